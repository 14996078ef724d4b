// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// session is a session of a's own.
func session(a *actor) *coordinationv1.Lease {
	l := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: "session-", Namespace: theNamespace,
			Labels:      map[string]string{v1alpha1.SessionLabel: "true"},
			Annotations: map[string]string{v1alpha1.UserAnnotation: a.contender.User},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: new("me"), LeaseDurationSeconds: new(int32(15))},
	}
	if a.contender.PodUID != "" {
		l.Annotations[v1alpha1.PodUIDAnnotation] = string(a.contender.PodUID)
	}
	return l
}

// change is what a write does to a session.
type change = func(l *coordinationv1.Lease)

// sessionRow is a session of owner, made with begin, and one write of it by somebody.
type sessionRow struct {
	owner *actor
	begin []change
	by    *actor
	do    func(ctx context.Context, by *actor, l *coordinationv1.Lease) error
	want  verdict
}

// put writes the session back, changed.
func put(changes ...change) func(context.Context, *actor, *coordinationv1.Lease) error {
	return func(ctx context.Context, by *actor, l *coordinationv1.Lease) error {
		for _, c := range changes {
			c(l)
		}
		_, err := by.kube.CoordinationV1().Leases(l.Namespace).Update(ctx, l, metav1.UpdateOptions{})
		return err
	}
}

// post creates a session of by's own instead, changed.
func post(changes ...change) func(context.Context, *actor, *coordinationv1.Lease) error {
	return func(ctx context.Context, by *actor, _ *coordinationv1.Lease) error {
		l := session(by)
		for _, c := range changes {
			c(l)
		}
		_, err := by.kube.CoordinationV1().Leases(theNamespace).Create(ctx, l, metav1.CreateOptions{})
		return err
	}
}

func deleteSession(ctx context.Context, by *actor, l *coordinationv1.Lease) error {
	return by.kube.CoordinationV1().Leases(l.Namespace).Delete(ctx, l.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(l.UID))})
}

func deleteSessions(ctx context.Context, by *actor, l *coordinationv1.Lease) error {
	return by.kube.CoordinationV1().Leases(l.Namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "metadata.name=" + l.Name})
}

// nothing is an empty patch, as a storage migration sends it.
func nothing(ctx context.Context, by *actor, l *coordinationv1.Lease) error {
	_, err := by.kube.CoordinationV1().Leases(l.Namespace).Patch(ctx, l.Name, types.MergePatchType, []byte(`{}`), metav1.PatchOptions{})
	return err
}

func annotate(key, value string) change {
	return func(l *coordinationv1.Lease) {
		if value == "" {
			delete(l.Annotations, key)
		} else {
			l.Annotations[key] = value
		}
	}
}

func wants(value string) change { return annotate(v1alpha1.WaitingForAnnotation, value) }
func ttl(seconds int32) change {
	return func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = &seconds }
}
func identity(s string) change        { return func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = &s } }
func unlabel(l *coordinationv1.Lease) { delete(l.Labels, v1alpha1.SessionLabel) }
func relabel(value string) change {
	return func(l *coordinationv1.Lease) { l.Labels = map[string]string{v1alpha1.SessionLabel: value} }
}
func finalize(l *coordinationv1.Lease)   { l.Finalizers = []string{"example.com/hold"} }
func noTTL(l *coordinationv1.Lease)      { l.Spec.LeaseDurationSeconds = nil }
func noIdentity(l *coordinationv1.Lease) { l.Spec.HolderIdentity = nil }
func renew(l *coordinationv1.Lease)      { l.Spec.RenewTime = new(metav1.NowMicro()) }
func owned(l *coordinationv1.Lease) {
	l.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "gone", UID: "0"}}
}

func testSession(t *testing.T, c *cluster) {
	c.limit(t)
	for name, row := range c.sessionRows() {
		t.Run(name, func(t *testing.T) {
			if row.owner == nil {
				row.owner = c.holder
			}
			if row.by == nil {
				row.by = row.owner
			}
			own := session(row.owner)
			for _, begin := range row.begin {
				begin(own)
			}
			leases := c.admin.kube.CoordinationV1().Leases(theNamespace)
			created, err := row.owner.kube.CoordinationV1().Leases(theNamespace).Create(t.Context(), own, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			row.want.check(t, row.do(t.Context(), row.by, created.DeepCopy()))
			after, err := leases.Get(t.Context(), created.Name, metav1.GetOptions{})
			if row.want != stored && (err != nil || after.ResourceVersion != created.ResourceVersion) {
				t.Errorf("refused, and the session changed all the same: %v %v", after, err)
			}
		})
	}
	t.Run("wants are added one by one up to 64", func(t *testing.T) { testManyWants(t, c) })
	t.Run("a session that lost its label gets none again", func(t *testing.T) { testLabelTrick(t, c) })
}

// limit lets lou, who writes Leases, take the lease "allowed" and no other.
func (c *cluster) limit(t *testing.T) {
	t.Helper()
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "allowed"}, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{"fencedlease.dev"}, Resources: []string{"fencedleases/status"}, ResourceNames: []string{"allowed"}, Verbs: []string{"patch"},
	}}}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "allowed"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "allowed"},
		Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "lou"}},
	}
	if _, err := c.admin.kube.RbacV1().Roles(theNamespace).Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.admin.kube.RbacV1().RoleBindings(theNamespace).Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "the role is known", func(ctx context.Context) error {
		return post(func(l *coordinationv1.Lease) { wants("allowed=1")(l) })(ctx, c.lou, nil)
	})
}

func (c *cluster) sessionRows() map[string]sessionRow {
	forbidden := policy("session")
	rows := map[string]sessionRow{
		"the owner renews":                               {do: put(renew), want: stored},
		"an owner outside Pods renews":                   {owner: c.alice, do: put(renew), want: stored},
		"the owner shrinks the TTL":                      {do: put(ttl(5)), want: stored},
		"the owner waits":                                {do: put(wants("orders=7")), want: stored},
		"the owner waits with a later ticket":            {begin: []change{wants("orders=7")}, do: put(wants("orders=9")), want: stored},
		"the owner waits no more":                        {begin: []change{wants("orders=7")}, do: put(wants("")), want: stored},
		"the owner takes off the label":                  {do: put(unlabel), want: stored},
		"the owner deletes":                              {do: deleteSession, want: stored},
		"the controller deletes":                         {by: c.controller, do: deleteSession, want: stored},
		"a cluster admin deletes":                        {by: c.admin, do: deleteSession, want: stored},
		"a migration writes it back as it is":            {by: c.admin, do: nothing, want: stored},
		"who may take a lease waits for it":              {owner: c.lou, do: put(wants("allowed=7")), want: stored},
		"the longest TTL and identity":                   {do: post(ttl(3600), identity(strings.Repeat("ü", 1024))), want: stored},
		"the largest ticket":                             {do: post(wants("orders=9007199254740991")), want: stored},
		"another Pod of the account renews":              {by: c.otherPod, do: put(renew), want: forbidden},
		"the account outside Pods renews":                {by: c.outsidePods, do: put(renew), want: forbidden},
		"another user renews":                            {by: c.rival, do: put(renew), want: forbidden},
		"a namespace admin renews":                       {by: c.nora, do: put(renew), want: forbidden},
		"a cluster admin renews":                         {by: c.admin, do: put(renew), want: forbidden},
		"an admin with the verb steal renews":            {by: c.lena, do: put(renew), want: forbidden},
		"another Pod of the account deletes":             {by: c.otherPod, do: deleteSession, want: forbidden},
		"another user deletes":                           {by: c.rival, do: deleteSession, want: forbidden},
		"a namespace admin deletes":                      {by: c.nora, do: deleteSession, want: forbidden},
		"a namespace admin deletes the collection":       {by: c.nora, do: deleteSessions, want: forbidden},
		"another user takes off the label":               {by: c.lou, do: put(unlabel), want: forbidden},
		"another user sets the label to false":           {by: c.lou, do: put(relabel("false")), want: forbidden},
		"another user takes the session over":            {by: c.lou, do: put(annotate(v1alpha1.UserAnnotation, "lou"), annotate(v1alpha1.PodUIDAnnotation, "")), want: forbidden},
		"another user makes it wait":                     {by: c.lou, do: put(wants("allowed=7")), want: forbidden},
		"another user gives it an owner":                 {by: c.lou, do: put(owned), want: forbidden},
		"the owner names another user":                   {do: put(annotate(v1alpha1.UserAnnotation, "lou")), want: forbidden},
		"the owner names another Pod":                    {do: put(annotate(v1alpha1.PodUIDAnnotation, "other")), want: forbidden},
		"the owner names no Pod":                         {do: put(annotate(v1alpha1.PodUIDAnnotation, "")), want: forbidden},
		"a session is made in another's name":            {by: c.lou, do: post(annotate(v1alpha1.UserAnnotation, "alice")), want: forbidden},
		"a session is made in no name":                   {by: c.lou, do: post(annotate(v1alpha1.UserAnnotation, "")), want: forbidden},
		"a session is made for another Pod":              {by: c.holder, do: post(annotate(v1alpha1.PodUIDAnnotation, "other")), want: forbidden},
		"the owner raises the TTL":                       {do: put(ttl(16)), want: forbidden},
		"the owner removes the TTL":                      {do: put(noTTL), want: forbidden},
		"a session without TTL":                          {do: post(noTTL), want: forbidden},
		"a TTL of 3601":                                  {do: post(ttl(3601)), want: forbidden},
		"the owner renames himself":                      {do: put(identity("you")), want: forbidden},
		"the owner has no identity":                      {do: put(noIdentity), want: forbidden},
		"a session without identity":                     {do: post(noIdentity), want: forbidden},
		"an identity of 1025 characters in a session":    {do: post(identity(strings.Repeat("x", 1025))), want: forbidden},
		"the owner adds a finalizer":                     {do: put(finalize), want: forbidden},
		"a session with a finalizer":                     {do: post(finalize), want: forbidden},
		"two wants are added at once":                    {do: put(wants("billing=1 orders=7")), want: forbidden},
		"a session is made with two wants":               {do: post(wants("billing=1 orders=7")), want: forbidden},
		"a want and a later ticket at once":              {begin: []change{wants("orders=7")}, do: put(wants("billing=1 orders=8")), want: forbidden},
		"who may not take a lease waits for it":          {owner: c.lou, do: put(wants("orders=7")), want: forbidden},
		"who may not take a lease starts waiting for it": {by: c.lou, do: post(wants("orders=7")), want: forbidden},
		"who may not take it waits for it as well":       {owner: c.lou, begin: []change{wants("allowed=7")}, do: put(wants("allowed=7 orders=7")), want: forbidden},
		"wants that are longer than an annotation needs": {do: put(wants(strings.Repeat("x", 17344))), want: forbidden},
	}
	for _, malformed := range []string{
		"orders", "orders=", "=7", "orders=0", "orders=07", "orders=-7", "orders=+7", "orders=7.5", "orders=1e3", "orders=0x7", "orders=9007199254740992",
		"orders=99999999999999999999", "orders=7 ", " orders=7", "orders=7,billing=8", "orders=7\n", "Orders=7", "-orders=7", "orders.=7", "a/b=7", "orders=7=8", "*=7",
		strings.Repeat("x", 254) + "=7",
	} {
		rows[fmt.Sprintf("wants of %.30q", malformed)] = sessionRow{do: put(wants(malformed)), want: forbidden}
	}
	for _, twice := range []string{"orders=7 orders=7", "orders=7 orders=8", "orders=7  "} {
		rows[fmt.Sprintf("wants of %q after orders=7", twice)] = sessionRow{begin: []change{wants("orders=7")}, do: put(wants(twice)), want: forbidden}
	}
	return rows
}

func testManyWants(t *testing.T, c *cluster) {
	leases := c.holder.kube.CoordinationV1().Leases(theNamespace)
	l, err := leases.Create(t.Context(), session(c.holder), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 248)
	var words []string
	for i := range v1alpha1.MaxWants + 1 {
		words = append(words, fmt.Sprintf("%s-%03d=9007199254740991", long, i))
		wants(strings.Join(words, " "))(l)
		after, err := leases.Update(t.Context(), l, metav1.UpdateOptions{})
		if i == v1alpha1.MaxWants {
			policy("session").check(t, err)
			return
		}
		if err != nil {
			t.Fatalf("want %d: %v", i+1, err)
		}
		l = after
	}
}

// testLabelTrick raises the TTL while the policy does not look.
func testLabelTrick(t *testing.T, c *cluster) {
	leases := c.holder.kube.CoordinationV1().Leases(theNamespace)
	l, err := leases.Create(t.Context(), session(c.holder), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, changes := range [][]change{{unlabel}, {ttl(3600), wants("a=1 b=2 c=3")}} {
		for _, change := range changes {
			change(l)
		}
		if l, err = leases.Update(t.Context(), l, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	relabel("true")(l)
	_, err = leases.Update(t.Context(), l, metav1.UpdateOptions{})
	policy("session").check(t, err)
}
