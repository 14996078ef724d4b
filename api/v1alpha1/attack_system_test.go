// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// testManager asks for what the manager must not be able to do, beside what the other tables show that it can.
func testManager(t *testing.T, c *cluster) {
	for name, row := range map[string]struct {
		args []string
		want string
	}{
		"it reads leases everywhere":                 {[]string{"list", "fencedleases.fencedlease.dev", "-A"}, "yes"},
		"it deletes sessions everywhere":             {[]string{"delete", "leases.coordination.k8s.io", "-A"}, "yes"},
		"it elects a leader in its namespace":        {[]string{"create", "leases.coordination.k8s.io", "-n", "fencedlease-system"}, "yes"},
		"it writes no session of others":             {[]string{"update", "leases.coordination.k8s.io", "-n", theNamespace}, "no"},
		"it keeps its Secret":                        {[]string{"update", "secrets", "-n", "fencedlease-system"}, "yes"},
		"it reads no Secret of others":               {[]string{"get", "secrets", "-n", theNamespace}, "no"},
		"it writes its webhook":                      {[]string{"update", "mutatingwebhookconfigurations.admissionregistration.k8s.io/fencedlease-guard"}, "yes"},
		"it writes no other webhook":                 {[]string{"update", "mutatingwebhookconfigurations.admissionregistration.k8s.io/other"}, "no"},
		"it writes no policy":                        {[]string{"update", "validatingadmissionpolicies.admissionregistration.k8s.io"}, "no"},
		"it edits no lease":                          {[]string{"update", "fencedleases.fencedlease.dev", "-A"}, "no"},
		"it records events":                          {[]string{"create", "events.events.k8s.io", "-A"}, "yes"},
		"it asks what others may do":                 {[]string{"create", "subjectaccessreviews.authorization.k8s.io"}, "yes"},
		"it reads no ConfigMap, protected or not":    {[]string{"get", "configmaps", "-A"}, "no"},
		"it neither steals nor bypasses for anybody": {[]string{"bypass", "fencedleases.fencedlease.dev", "-A"}, "no"},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"auth", "can-i", "--as=" + c.controller.contender.User}, row.args...)
			out, err := c.env.Kubectl(t.Context(), args...)
			if got := strings.TrimSpace(out); got != row.want {
				t.Errorf("kubectl %s: %q, want %q (%v)", strings.Join(args, " "), got, row.want, err)
			}
		})
	}
}

// testCollectors lets the real controllers do what they must, and no more.
func testCollectors(t *testing.T, c *cluster) {
	t.Run("a session goes with its Pod", func(t *testing.T) {
		passing := c.account(t, theNamespace, "orders", "passing")
		own := session(passing)
		own.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "passing", UID: passing.contender.PodUID}}
		l, err := passing.kube.CoordinationV1().Leases(theNamespace).Create(t.Context(), own, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		c.deletePod(t, "passing", metav1.DeletePropagationBackground)
		c.awaitGone(t, l)
	})
	t.Run("a session is orphaned by its Pod", func(t *testing.T) {
		left := c.account(t, theNamespace, "orders", "left")
		own := session(left)
		own.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "left", UID: left.contender.PodUID}}
		l, err := left.kube.CoordinationV1().Leases(theNamespace).Create(t.Context(), own, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		c.deletePod(t, "left", metav1.DeletePropagationOrphan)
		until(t, "the garbage collector took the owner off the session", func(ctx context.Context) error {
			now, err := c.admin.kube.CoordinationV1().Leases(theNamespace).Get(ctx, l.Name, metav1.GetOptions{})
			if err != nil || len(now.OwnerReferences) > 0 {
				return fmt.Errorf("%v %v", now, err)
			}
			return nil
		})
	})
	collector := newActor(t, c.env.As("system:serviceaccount:kube-system:generic-garbage-collector", "system:serviceaccounts", "system:serviceaccounts:kube-system"), "gc", "")
	t.Run("the garbage collector changes nothing else of a session", func(t *testing.T) {
		l, err := c.holder.kube.CoordinationV1().Leases(theNamespace).Create(t.Context(), session(c.holder), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for patch, want := range map[string]verdict{
			`{"metadata":{"finalizers":["example.com/a"]}}`:            stored,
			`{"metadata":{"finalizers":null}}`:                         stored,
			`{"metadata":{"labels":null}}`:                             policy("session"),
			`{"metadata":{"annotations":{"fencedlease.dev/user":""}}}`: policy("session"),
			`{"spec":{"renewTime":"2030-01-01T00:00:00.000000Z"}}`:     policy("session"),
			`{"spec":{"leaseDurationSeconds":1}}`:                      policy("session"),
		} {
			_, err := collector.kube.CoordinationV1().Leases(theNamespace).Patch(t.Context(), l.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			want.check(t, err)
		}
	})
	t.Run("a held lease goes with its owner", func(t *testing.T) { testOwnedLease(t, c) })
	t.Run("a namespace goes with a held lease and a session in it", func(t *testing.T) { testNamespace(t, c) })
}

func (c *cluster) deletePod(t *testing.T, name string, how metav1.DeletionPropagation) {
	t.Helper()
	err := c.admin.kube.CoreV1().Pods(theNamespace).Delete(t.Context(), name, metav1.DeleteOptions{PropagationPolicy: &how, GracePeriodSeconds: ptr.To[int64](0)})
	if err != nil {
		t.Fatal(err)
	}
}

func (c *cluster) awaitGone(t *testing.T, l *coordinationv1.Lease) {
	t.Helper()
	until(t, "the session is gone", func(ctx context.Context) error {
		return gone(c.admin.kube.CoordinationV1().Leases(l.Namespace).Get(ctx, l.Name, metav1.GetOptions{}))
	})
}

// gone says whether a GET found nothing.
func gone[T any](found T, err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("still there: %v", found)
}

// testOwnedLease deletes the owner of a held lease: the garbage collector has no verb steal, so it gets the lease when
// it is free. Else an editor would take it from its holder by deleting its owner.
func testOwnedLease(t *testing.T, c *cluster) {
	maps := c.admin.kube.CoreV1().ConfigMaps(theNamespace)
	owner, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owner"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l := newLease(spec{})
	l.ObjectMeta = metav1.ObjectMeta{Name: "owned", Namespace: theNamespace,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID}}}
	created, err := c.eddie.leases().Create(t.Context(), &unstructured.Unstructured{Object: encode(l)}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	held := c.apply(t, typed(t, created), append([]step{initialise}, c.held()...)...)
	if err := maps.Delete(t.Context(), owner.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	collector := newActor(t, c.env.As("system:serviceaccount:kube-system:generic-garbage-collector", "system:serviceaccounts", "system:serviceaccounts:kube-system"), "gc", "")
	policy("spec").check(t, remove(collector)(t.Context(), held))
	c.apply(t, held, release(c.holder)) // it is still there, and still held
	until(t, "the lease is gone", func(ctx context.Context) error {
		return gone(c.admin.leases().Get(ctx, "owned", metav1.GetOptions{}))
	})
}

// testNamespace deletes a namespace with a held lease, one that is ahead of its revision, and a session.
func testNamespace(t *testing.T, c *cluster) {
	const name = "doomed"
	c.namespace(t, name)
	leases := c.admin.Resource(v1alpha1.GroupVersion.WithResource("fencedleases")).Namespace(name)
	for lease, s := range map[string]spec{"held": {}, "ahead": {minToken: 1 << 40}} {
		l := newLease(s)
		l.ObjectMeta = metav1.ObjectMeta{Name: lease, Namespace: name}
		created, err := leases.Create(t.Context(), &unstructured.Unstructured{Object: encode(l)}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, next := range append([]step{initialise}, c.held()...) {
			w := legit(next)(typed(t, created))
			if created, err = leases.Patch(t.Context(), lease, w.kind, w.data, metav1.PatchOptions{}, "status"); err != nil {
				t.Fatal(err)
			}
		}
	}
	own := session(c.admin)
	own.Namespace = name
	own.Annotations[v1alpha1.UserAnnotation] = c.whoami(t, c.admin)
	if _, err := c.admin.kube.CoordinationV1().Leases(name).Create(t.Context(), own, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	namespaces := c.admin.kube.CoreV1().Namespaces()
	if err := namespaces.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	until(t, "the namespace is gone", func(ctx context.Context) error {
		return gone(namespaces.Get(ctx, name, metav1.GetOptions{}))
	})
}

func (c *cluster) whoami(t *testing.T, a *actor) string {
	t.Helper()
	review, err := a.kube.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return review.Status.UserInfo.Username
}
