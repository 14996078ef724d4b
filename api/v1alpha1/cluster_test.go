// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

// actor is somebody with an account of his own.
type actor struct {
	dynamic.Interface

	kube kubernetes.Interface
	// contender is what he may truthfully say of himself.
	contender v1alpha1.Contender
}

func (a *actor) leases() dynamic.ResourceInterface {
	return a.Resource(v1alpha1.GroupVersion.WithResource("fencedleases")).Namespace(theNamespace)
}

// cluster is a control plane with the CRD, the policies and the roles as they are installed.
type cluster struct {
	env                           *testenv.Env
	admin, controller             *actor
	holder, otherPod, outsidePods *actor // one service account, two Pods, and none
	rival                         *actor // another service account, that may take leases
	alice                         *actor // may take leases; a user outside Pods
	nora                          *actor // holds a Role with verbs "*" on everything in the namespace
	eddie                         *actor // has the ClusterRole edit
	lena                          *actor // has the ClusterRoles edit and fencedlease-admin
	lou                           *actor // may write Leases, and nothing else
	made                          int    // objects so far
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
	env, err := testenv.Start(t.Context(), testenv.Options{ControllerManager: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	c := &cluster{env: env}
	c.admin = newActor(t, env.Config(), "admin", "")
	for _, ns := range []string{"fencedlease-system", theNamespace} {
		c.namespace(t, ns)
	}
	for _, dir := range []string{"crd", "rbac", "policy"} {
		if err := env.Apply(t.Context(), "../../config/"+dir); err != nil {
			t.Fatal(err)
		}
	}
	c.controller = c.account(t, "fencedlease-system", "fencedlease-manager", "")
	c.holder, c.otherPod = c.account(t, theNamespace, "orders", "orders-0"), c.account(t, theNamespace, "orders", "orders-1")
	c.outsidePods = c.account(t, theNamespace, "orders", "")
	c.rival = c.account(t, theNamespace, "billing", "billing-0")
	for user, to := range map[string]**actor{"alice": &c.alice, "nora": &c.nora, "eddie": &c.eddie, "lena": &c.lena, "lou": &c.lou} {
		*to = newActor(t, env.As(user), user, "")
	}
	c.grant(t)
	c.awaitPolicies(t)
	return c
}

func (c *cluster) namespace(t *testing.T, name string) {
	t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := c.admin.kube.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// account is a service account, in a Pod or, with an empty name of a Pod, outside.
func (c *cluster) account(t *testing.T, namespace, name, podName string) *actor {
	t.Helper()
	user := "system:serviceaccount:" + namespace + ":" + name
	if podName == "" {
		cfg, err := c.env.ServiceAccount(t.Context(), namespace, name)
		if err != nil {
			t.Fatal(err)
		}
		return newActor(t, cfg, user, "")
	}
	cfg, pod, err := c.env.Pod(t.Context(), namespace, name, podName)
	if err != nil {
		t.Fatal(err)
	}
	return newActor(t, cfg, user, pod.UID)
}

func newActor(t *testing.T, cfg *rest.Config, user string, podUID types.UID) *actor {
	t.Helper()
	dyn, err := dynamic.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	kube, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	short := user[strings.LastIndex(user, ":")+1:]
	return &actor{Interface: dyn, kube: kube, contender: v1alpha1.Contender{
		Identity: "i-am-" + short, Session: short + "-x2x4v", SessionUID: types.UID("uid-" + short), User: user, PodUID: podUID, Ticket: 7,
	}}
}

// grant binds the roles. What they are for is what TestAttacks shows.
func (c *cluster) grant(t *testing.T) {
	t.Helper()
	user := func(name string) rbacv1.Subject {
		return rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: name}
	}
	account := func(name string) rbacv1.Subject {
		return rbacv1.Subject{Kind: "ServiceAccount", Namespace: theNamespace, Name: name}
	}
	for _, role := range []*rbacv1.Role{
		{ObjectMeta: metav1.ObjectMeta{Name: "everything"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}}},
		{ObjectMeta: metav1.ObjectMeta{Name: "leases"}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"*"}}}},
	} {
		if _, err := c.admin.kube.RbacV1().Roles(theNamespace).Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for i, b := range []struct {
		kind, name string
		subjects   []rbacv1.Subject
	}{
		{"ClusterRole", "fencedlease-contender", []rbacv1.Subject{account("orders"), account("billing"), user("alice")}},
		{"ClusterRole", "edit", []rbacv1.Subject{user("eddie"), user("lena")}},
		{"ClusterRole", "fencedlease-admin", []rbacv1.Subject{user("lena")}},
		{"Role", "everything", []rbacv1.Subject{user("nora")}},
		{"Role", "leases", []rbacv1.Subject{user("lou")}},
	} {
		binding := &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("binding-", i)},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: b.kind, Name: b.name},
			Subjects:   b.subjects,
		}
		if _, err := c.admin.kube.RbacV1().RoleBindings(theNamespace).Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// awaitPolicies waits until each policy refuses something, and the aggregated role allows something.
func (c *cluster) awaitPolicies(t *testing.T) {
	t.Helper()
	lease := c.lease(t, spec{})
	dry := metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}
	until(t, "the policies are in force", func(ctx context.Context) error {
		_, err := c.eddie.leases().Patch(ctx, lease.Name, types.MergePatchType, []byte(`{"spec":{"minToken":1}}`), dry)
		if err := refusedBy("fencedlease-spec", err); err != nil {
			return err
		}
		_, err = c.nora.leases().Patch(ctx, lease.Name, types.MergePatchType, []byte(`{"status":{"phase":"Available","token":1000000,"queue":[],"terms":[],"waiting":0,"handovers":0}}`), dry, "status")
		if err := refusedBy("fencedlease-status", err); err != nil {
			return err
		}
		_, err = c.nora.kube.CoordinationV1().Leases(theNamespace).Create(ctx, session(c.alice), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return refusedBy("fencedlease-session", err)
	})
}

func refusedBy(policy string, err error) error {
	if err != nil && strings.Contains(err.Error(), policy) {
		return nil
	}
	return fmt.Errorf("policy %s did not refuse: %v", policy, err)
}

// until waits until done returns no error.
func until(t *testing.T, what string, done func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		last = done(ctx)
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("wait until %s: %v (last: %v)", what, err, last)
	}
}

// lease creates a lease that nobody has initialised.
func (c *cluster) lease(t *testing.T, s spec) *v1alpha1.FencedLease {
	t.Helper()
	c.made++
	l := newLease(s)
	l.ObjectMeta = metav1.ObjectMeta{Name: fmt.Sprint("lease-", c.made), Namespace: theNamespace}
	stored, err := c.admin.leases().Create(t.Context(), &unstructured.Unstructured{Object: encode(l)}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return typed(t, stored)
}

// apply takes a lease through transitions, as the admin, who manages.
func (c *cluster) apply(t *testing.T, l *v1alpha1.FencedLease, steps ...step) *v1alpha1.FencedLease {
	t.Helper()
	for _, next := range steps {
		patch, _, err := protocol.Patch(l, next(l))
		if err != nil {
			t.Fatal(err)
		}
		stored, err := c.admin.leases().Patch(t.Context(), l.Name, types.JSONPatchType, patch, metav1.PatchOptions{}, "status")
		if err != nil {
			t.Fatalf("%s: %v", next(l), err)
		}
		l = typed(t, stored)
	}
	return l
}

func typed(t *testing.T, o *unstructured.Unstructured) *v1alpha1.FencedLease {
	t.Helper()
	var l v1alpha1.FencedLease
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &l); err != nil {
		t.Fatal(err)
	}
	return &l
}

// verdict is how a write must end.
type verdict struct {
	code int32  // 0: it is stored
	by   string // what must stand in the answer: the name of the policy, the words of the rule, the path of the leaf
}

var stored = verdict{}

// rule: the CRD refuses, by a rule with these words or a schema at this path, with causes.
func rule(words string) verdict { return verdict{http.StatusUnprocessableEntity, words} }

// policy: that policy refuses. A refusal by RBAC does not count.
func policy(name string) verdict {
	return verdict{http.StatusForbidden, "ValidatingAdmissionPolicy 'fencedlease-" + name + "'"}
}

// check compares the answer of the API server with the verdict.
func (v verdict) check(t *testing.T, err error) {
	t.Helper()
	if v == stored {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		t.Fatalf("stored, or no answer: %v, want it refused by %q", err, v.by)
	}
	s := status.Status()
	if s.Code != v.code || !strings.Contains(s.Message, v.by) || s.Details == nil || v.code == http.StatusUnprocessableEntity && len(s.Details.Causes) == 0 {
		t.Errorf("refused with %d %q, want %d by %q", s.Code, s.Message, v.code, v.by)
	}
}

func mustJSON(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // tests encode maps and our own types only
	}
	return data
}
