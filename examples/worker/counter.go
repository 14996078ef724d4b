// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// counter counts in both ConfigMaps during one term. It reads the count once, when the term begins, and then trusts
// its memory: right as long as it is the only writer, which is what the lease is for.
type counter struct {
	*worker

	held   *fence.Held
	fenced client.Client

	begun   bool
	count   int
	written int
}

// step is what is to be done at a tick.
func (c *counter) step(ctx context.Context) error {
	switch {
	case !c.begun:
		return c.begin(ctx)
	case c.writes == 0 || c.written < c.writes:
		return c.write(ctx)
	}
	return nil
}

// begin puts our token on the protected ConfigMap before anything is read from it, by a write that changes nothing
// else: from now on nothing older can land there, so what is read stays true.
func (c *counter) begin(ctx context.Context) error {
	protected := c.configMap(c.protected)
	if err := c.fenced.Patch(ctx, protected, client.RawPatch(types.MergePatchType, []byte(`{}`))); err != nil {
		return err
	}
	if err := c.plain.Get(ctx, client.ObjectKeyFromObject(protected), protected); err != nil {
		return err
	}
	c.count, _ = strconv.Atoi(protected.Data["count"]) // absent: 0
	c.begun = true
	return nil
}

// write counts one up in both.
func (c *counter) write(ctx context.Context) error {
	next := c.count + 1
	if err := c.patch(ctx, c.fenced, c.protected, next, nil); err != nil {
		return err
	}
	if err := c.patch(ctx, c.plain, c.unprotected, next, nil); err != nil {
		return err
	}
	c.count = next
	c.written++
	c.say("wrote count=%d to %s and %s", next, c.protected, c.unprotected)
	return nil
}

// writeLate is the next write of a program that has not heard of its loss. The fenced client would refuse it here, in
// this process, so it goes around it, with the token that was right a moment ago.
func (c *counter) writeLate(ctx context.Context) {
	next := c.count + 1
	token := map[string]string{v1alpha1.TokenAnnotation: c.held.Token().String()}
	for _, name := range []string{c.protected, c.unprotected} {
		annotations := token
		if name == c.unprotected {
			annotations = nil // nobody would consume it there
		}
		if err := c.patch(ctx, c.plain, name, next, annotations); err != nil {
			c.say("late write of count=%d to %s was REFUSED: %v", next, name, err)
			continue
		}
		c.say("late write of count=%d to %s was ACCEPTED", next, name)
	}
}

func (c *counter) patch(ctx context.Context, to client.Client, name string, count int, annotations map[string]string) error {
	changed := c.configMap(name)
	changed.Annotations = annotations
	changed.Data = map[string]string{"count": strconv.Itoa(count), "writer": c.name}
	return to.Patch(ctx, changed, client.MergeFrom(c.configMap(name)))
}

func (c *counter) configMap(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: name}}
}
