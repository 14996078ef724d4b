// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// NewClient wraps a client so that every write, to subresources too, presents the token of that term. The guard
// refuses the write when the token is not the current one; the error is then a *FencedError. When the term is known
// to be over, nothing is sent and the error matches ErrLost.
//
// It presents and never protects: an object is protected by the annotation fencedlease.dev/lease, which somebody
// with the verb protect sets once. After a write to an object itself the mark in the answer is checked; when it is
// missing or below the token the error matches ErrNotProtected. The write has happened then, but nothing was
// guarding it. Writes to /status and /scale leave no mark, so there is nothing to check.
//
// The caller's objects do not keep the token. Objects that are written at the same time must not share annotations.
// A merge patch that sets metadata or its annotations to null as a whole is refused: name the keys. A JSON patch
// needs annotations in the stored object, which a protected object has; where it has none the API server refuses
// the patch as invalid.
//
// Delete and DeleteAllOf present no token, because a DELETE request has no place for one in this release. They too
// are refused locally once the term is over.
func NewClient(c client.Client, held *Held) client.Client {
	return &fencedClient{Reader: c, c: c, stamp: stamp{held}}
}

var (
	_ client.Client            = &fencedClient{}
	_ client.SubResourceClient = &fencedSubResource{}
)

type fencedClient struct {
	client.Reader
	c client.Client
	stamp
}

func (f *fencedClient) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	return f.main(obj, f.object(obj, func() error { return f.c.Create(ctx, obj, opts...) }))
}

func (f *fencedClient) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	return f.main(obj, f.object(obj, func() error { return f.c.Update(ctx, obj, opts...) }))
}

func (f *fencedClient) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
	return f.main(obj, f.patch(obj, obj, patch, "", func(p client.Patch) error { return f.c.Patch(ctx, obj, p, opts...) }))
}

func (f *fencedClient) Apply(ctx context.Context, obj runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
	return f.apply(obj, func(ac runtime.ApplyConfiguration) error { return f.c.Apply(ctx, ac, opts...) }, f.marked)
}

func (f *fencedClient) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	return f.send(func() error { return f.c.Delete(ctx, obj, opts...) })
}

func (f *fencedClient) DeleteAllOf(ctx context.Context, obj client.Object, opts ...client.DeleteAllOfOption) error {
	return f.send(func() error { return f.c.DeleteAllOf(ctx, obj, opts...) })
}

func (f *fencedClient) Scheme() *runtime.Scheme     { return f.c.Scheme() }
func (f *fencedClient) RESTMapper() meta.RESTMapper { return f.c.RESTMapper() }
func (f *fencedClient) GroupVersionKindFor(obj runtime.Object) (schema.GroupVersionKind, error) {
	return f.c.GroupVersionKindFor(obj)
}
func (f *fencedClient) IsObjectNamespaced(obj runtime.Object) (bool, error) {
	return f.c.IsObjectNamespaced(obj)
}

func (f *fencedClient) Status() client.StatusWriter {
	return &fencedSubResource{w: f.c.Status(), name: "status", stamp: f.stamp}
}

func (f *fencedClient) SubResource(subResource string) client.SubResourceClient {
	c := f.c.SubResource(subResource)
	return &fencedSubResource{SubResourceReader: c, w: c, name: subResource, stamp: f.stamp}
}

type fencedSubResource struct {
	client.SubResourceReader
	w    client.SubResourceWriter
	name string
	stamp
}

// Create presents the token in the subresource that is created: an eviction, a token request. Not in a binding,
// whose annotations the API server copies to the Pod.
func (f *fencedSubResource) Create(ctx context.Context, obj, subResource client.Object, opts ...client.SubResourceCreateOption) error {
	write := func() error { return f.w.Create(ctx, obj, subResource, opts...) }
	if f.name == "binding" {
		return f.send(write)
	}
	return f.object(subResource, write)
}

func (f *fencedSubResource) Update(ctx context.Context, obj client.Object, opts ...client.SubResourceUpdateOption) error {
	o := &client.SubResourceUpdateOptions{}
	o.ApplyOptions(opts)
	body := obj
	if o.SubResourceBody != nil {
		body = o.SubResourceBody
	}
	return f.object(body, func() error { return f.w.Update(ctx, obj, opts...) })
}

func (f *fencedSubResource) Patch(ctx context.Context, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
	o := &client.SubResourcePatchOptions{}
	o.ApplyOptions(opts)
	body := obj
	if o.SubResourceBody != nil {
		body = o.SubResourceBody
	}
	return f.patch(obj, body, patch, f.name, func(p client.Patch) error { return f.w.Patch(ctx, obj, p, opts...) })
}

func (f *fencedSubResource) Apply(ctx context.Context, obj runtime.ApplyConfiguration, opts ...client.SubResourceApplyOption) error {
	o := &client.SubResourceApplyOptions{}
	o.ApplyOpts(opts)
	unchecked := func(map[string]string) error { return nil }
	if o.SubResourceBody == nil {
		return f.apply(obj, func(ac runtime.ApplyConfiguration) error { return f.w.Apply(ctx, ac, opts...) }, unchecked)
	}
	return f.apply(o.SubResourceBody, func(ac runtime.ApplyConfiguration) error {
		o.SubResourceBody = ac
		return f.w.Apply(ctx, obj, o)
	}, unchecked)
}

// main checks the mark after a write to an object itself.
func (s stamp) main(obj client.Object, err error) error {
	if err != nil {
		return err
	}
	if err := s.marked(obj.GetAnnotations()); err != nil {
		return fmt.Errorf("%s %q was written: %w", kindOf(obj), client.ObjectKeyFromObject(obj), err)
	}
	return nil
}

// marked says whether the guard has accepted this token for the object with those annotations.
func (s stamp) marked(annotations map[string]string) error {
	mark, ok := annotations[v1alpha1.AcceptedTokenAnnotation]
	n, err := protocol.ParseToken(mark)
	switch {
	case ok && err == nil && Token(n) >= s.held.token:
		return nil
	case annotations[v1alpha1.LeaseAnnotation] == "":
		return fmt.Errorf("%w: it names no lease; protect it with the annotation %s", ErrNotProtected, v1alpha1.LeaseAnnotation)
	}
	return fmt.Errorf("%w: its mark is %q after a write with token %d; check that the webhook configuration fencedlease-guard covers this kind",
		ErrNotProtected, mark, s.held.token)
}

func kindOf(obj client.Object) string {
	if kind := obj.GetObjectKind().GroupVersionKind().Kind; kind != "" {
		return kind
	}
	return fmt.Sprintf("%T", obj)
}
