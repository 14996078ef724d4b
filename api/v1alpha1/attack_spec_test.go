// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// specRow is one write of a lease itself.
type specRow struct {
	given []step
	none  bool
	spec  spec
	do    func(ctx context.Context, l *v1alpha1.FencedLease) error
	want  verdict
}

func testSpec(t *testing.T, c *cluster) {
	forbidden := policy("spec")
	owners := `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"owner","uid":"0"}]}}`
	ahead := spec{minToken: 1 << 40}
	for name, row := range map[string]specRow{
		"an editor creates":                                 {do: create(c.eddie, nil), want: stored},
		"an editor creates with a generated name":           {do: createGenerated(c.eddie), want: stored},
		"an editor edits":                                   {given: c.held(), do: merge(c.eddie, `{"spec":{"cooldownSeconds":5,"leaseDurationSeconds":20,"maxHoldSeconds":60}}`), want: stored},
		"an editor labels":                                  {given: c.held(), do: merge(c.eddie, `{"metadata":{"labels":{"a":"b"}}}`), want: stored},
		"an editor creates with enforcement Warn":           {do: create(c.eddie, map[string]any{"enforcement": "Warn"}), want: forbidden},
		"an editor creates with tokenBinding None":          {do: create(c.eddie, map[string]any{"tokenBinding": "None"}), want: forbidden},
		"an editor creates with minToken":                   {do: create(c.eddie, map[string]any{"minToken": int64(5)}), want: forbidden},
		"an editor sets enforcement Warn":                   {do: merge(c.eddie, `{"spec":{"enforcement":"Warn"}}`), want: forbidden},
		"an editor sets tokenBinding None":                  {do: merge(c.eddie, `{"spec":{"tokenBinding":"None"}}`), want: forbidden},
		"an editor sets minToken":                           {do: merge(c.eddie, `{"spec":{"minToken":5}}`), want: forbidden},
		"an editor removes minToken":                        {spec: ahead, do: merge(c.eddie, `{"spec":{"minToken":null}}`), want: forbidden},
		"an admin with bypass creates with minToken":        {do: create(c.lena, map[string]any{"minToken": int64(5), "enforcement": "Warn", "tokenBinding": "None"}), want: stored},
		"an admin with bypass sets enforcement Warn":        {do: merge(c.lena, `{"spec":{"enforcement":"Warn","tokenBinding":"None","minToken":7}}`), want: stored},
		"an editor goes back to Deny and Holder":            {do: both(merge(c.lena, `{"spec":{"enforcement":"Warn","tokenBinding":"None"}}`), merge(c.eddie, `{"spec":{"enforcement":"Deny","tokenBinding":"Holder"}}`)), want: stored},
		"an editor edits a lease that only warns":           {do: both(merge(c.lena, `{"spec":{"enforcement":"Warn"}}`), merge(c.eddie, `{"spec":{"cooldownSeconds":5}}`)), want: stored},
		"an editor gives a lease an owner":                  {do: merge(c.eddie, owners), want: forbidden},
		"an admin with steal gives a lease an owner":        {do: merge(c.lena, owners), want: stored},
		"an editor deletes an available lease":              {do: remove(c.eddie), want: stored},
		"an editor deletes a lease without status":          {none: true, do: remove(c.eddie), want: stored},
		"an editor deletes a held lease":                    {given: c.held(), do: remove(c.eddie), want: forbidden},
		"an editor deletes a collection with a held lease":  {given: c.held(), do: removeCollection(c.eddie), want: forbidden},
		"an admin with steal deletes a collection":          {given: c.held(), do: removeCollection(c.lena), want: stored},
		"an admin with steal deletes a held lease":          {given: c.held(), do: remove(c.lena), want: stored},
		"a Role with verbs * deletes a held lease":          {given: c.held(), do: remove(c.nora), want: stored},
		"an editor deletes a lease ahead of its revision":   {spec: ahead, do: remove(c.eddie), want: forbidden},
		"an admin with bypass deletes it":                   {spec: ahead, do: remove(c.lena), want: stored},
		"a lease is acquired that is being deleted":         {do: c.acquireDying, want: policy("status")},
		"an editor gets rid of a held lease by a finalizer": {given: c.held(), do: c.finalizer, want: forbidden},
	} {
		t.Run(name, func(t *testing.T) {
			l := c.lease(t, row.spec)
			if !row.none {
				l = c.apply(t, l, append([]step{initialise}, row.given...)...)
			}
			row.want.check(t, row.do(t.Context(), l))
		})
	}
	t.Run("the refusal names the minToken of the successor", func(t *testing.T) {
		l := c.apply(t, c.lease(t, ahead), initialise, acquire(c.alice), release(c.alice))
		err := remove(c.eddie)(t.Context(), l)
		if want := fmt.Sprintf("spec.minToken %d", l.Status.Token); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("refused with %v, want %q in it", err, want)
		}
	})
	t.Run("the successor of a deleted lease starts above it", func(t *testing.T) {
		l := c.apply(t, c.lease(t, spec{}), initialise, acquire(c.alice), release(c.alice), acquire(c.rival), release(c.rival))
		if err := remove(c.eddie)(t.Context(), l); err != nil {
			t.Fatal(err)
		}
		again := newLease(spec{})
		again.ObjectMeta = metav1.ObjectMeta{Namespace: l.Namespace, Name: l.Name}
		created, err := c.eddie.leases().Create(t.Context(), &unstructured.Unstructured{Object: encode(again)}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if next := c.apply(t, typed(t, created), initialise, acquire(c.alice)); next.Status.Token <= l.Status.Token {
			t.Errorf("token %d after %d", next.Status.Token, l.Status.Token)
		}
	})
}

type specWrite = func(ctx context.Context, l *v1alpha1.FencedLease) error

func create(by *actor, over map[string]any) specWrite {
	return func(ctx context.Context, l *v1alpha1.FencedLease) error {
		object := map[string]any{"apiVersion": "fencedlease.dev/v1alpha1", "kind": "FencedLease", "metadata": map[string]any{"name": "new-" + l.Name}}
		if over != nil {
			object["spec"] = over
		}
		_, err := by.leases().Create(ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
		return err
	}
}

func createGenerated(by *actor) specWrite {
	return func(ctx context.Context, _ *v1alpha1.FencedLease) error {
		object := map[string]any{"apiVersion": "fencedlease.dev/v1alpha1", "kind": "FencedLease", "metadata": map[string]any{"generateName": "generated-"}}
		_, err := by.leases().Create(ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
		return err
	}
}

func merge(by *actor, patch string) specWrite {
	return func(ctx context.Context, l *v1alpha1.FencedLease) error {
		_, err := by.leases().Patch(ctx, l.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
}

func both(first, second specWrite) specWrite {
	return func(ctx context.Context, l *v1alpha1.FencedLease) error {
		if err := first(ctx, l); err != nil {
			return fmt.Errorf("prepare: %w", err)
		}
		return second(ctx, l)
	}
}

func remove(by *actor) specWrite {
	return func(ctx context.Context, l *v1alpha1.FencedLease) error {
		return by.leases().Delete(ctx, l.Name, metav1.DeleteOptions{})
	}
}

// removeCollection deletes one lease as a collection: then the request names none.
func removeCollection(by *actor) specWrite {
	return func(ctx context.Context, l *v1alpha1.FencedLease) error {
		return by.leases().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "metadata.name=" + l.Name})
	}
}

// acquireDying acquires a lease that was deleted while it was available, so without a verb, and kept by a finalizer:
// it would go while it is held.
func (c *cluster) acquireDying(ctx context.Context, l *v1alpha1.FencedLease) error {
	w := legit(acquire(c.holder))(l)
	if err := both(merge(c.eddie, hold), remove(c.eddie))(ctx, l); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	_, err := c.holder.leases().Patch(ctx, l.Name, w.kind, w.data, metav1.PatchOptions{}, "status")
	return err
}

// finalizer takes the last finalizer off a held lease whose deletion somebody with the verb steal has begun: with it
// the lease goes, and no DELETE is admitted any more.
func (c *cluster) finalizer(ctx context.Context, l *v1alpha1.FencedLease) error {
	if err := both(merge(c.eddie, hold), remove(c.lena))(ctx, l); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	return merge(c.eddie, `{"metadata":{"finalizers":null}}`)(ctx, l)
}

// hold is a finalizer.
const hold = `{"metadata":{"finalizers":["example.com/hold"]}}`
