// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// guardedServer stores one object, and has a guard which consumes the token and keeps the mark. It stands behind a real
// client of controller-runtime, so that tests see what really goes over the wire.
type guardedServer struct {
	stored    map[string]any
	unguarded bool                   // there is no guard: the token is stored
	mark      string                 // the mark that the guard leaves, if not the token
	deny      *apierrors.StatusError // refuse every write
	presented []string               // the tokens of all writes, empty where there was none
	paths     []string
	body      string // of the last write
}

func newGuardedServer(t *testing.T) (*guardedServer, client.Client) {
	t.Helper()
	g := &guardedServer{stored: map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{
			"name": "stock", "namespace": "shop", "resourceVersion": "7",
			"annotations": map[string]any{v1alpha1.LeaseAnnotation: "orders", "kept": "yes"},
		},
		"data": map[string]any{"apples": "3"},
	}}
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("ConfigMap"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Pod"), meta.RESTScopeNamespace)
	mapper.Add(appsv1.SchemeGroupVersion.WithKind("Deployment"), meta.RESTScopeNamespace)
	asJSON := rest.ContentConfig{ContentType: runtime.ContentTypeJSON, AcceptContentTypes: runtime.ContentTypeJSON}
	c, err := client.New(&rest.Config{Host: "http://api", Transport: g, ContentConfig: asJSON}, client.Options{Scheme: scheme.Scheme, Mapper: mapper})
	if err != nil {
		t.Fatal(err)
	}
	return g, c
}

func (g *guardedServer) RoundTrip(r *http.Request) (*http.Response, error) {
	body := []byte{}
	if r.Body != nil {
		body, _ = io.ReadAll(r.Body)
	}
	g.paths = append(g.paths, r.Method+" "+r.URL.Path)
	if r.Method == http.MethodDelete {
		g.presented = append(g.presented, "")
		return answerWith(http.StatusOK, &metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Success"}, nil), nil
	}
	if r.Method == http.MethodGet {
		return answerWith(http.StatusOK, g.stored, nil), nil
	}
	g.body = string(body)
	next, err := g.apply(r, body)
	if err != nil {
		return answerWith(0, nil, apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", schema.GroupResource{}, "", err.Error(), 0, false)), nil
	}
	annotations, _, _ := unstructured.NestedStringMap(next, "metadata", "annotations")
	token := annotations[v1alpha1.TokenAnnotation]
	g.presented = append(g.presented, token)
	if g.deny != nil {
		return answerWith(0, nil, g.deny), nil
	}
	if !g.unguarded && annotations != nil {
		delete(annotations, v1alpha1.TokenAnnotation)
		if main := strings.Count(r.URL.Path, "/") == 6 || r.Method == http.MethodPost; main && annotations[v1alpha1.LeaseAnnotation] != "" {
			annotations[v1alpha1.AcceptedTokenAnnotation] = token
			if g.mark != "" {
				annotations[v1alpha1.AcceptedTokenAnnotation] = g.mark
			}
		}
		_ = unstructured.SetNestedStringMap(next, annotations, "metadata", "annotations")
	}
	return answerWith(http.StatusOK, next, nil), nil
}

// apply is the object that the request makes; strategic merge and apply are taken for merge, which they are here.
func (g *guardedServer) apply(r *http.Request, body []byte) (map[string]any, error) {
	old, err := json.Marshal(g.stored)
	if err != nil {
		return nil, err
	}
	text := body
	switch r.Header.Get("Content-Type") {
	case string(types.JSONPatchType):
		patch, err := jsonpatch.DecodePatch(body)
		if err != nil {
			return nil, err
		}
		if text, err = patch.Apply(old); err != nil {
			return nil, err
		}
	case string(types.MergePatchType), string(types.StrategicMergePatchType), string(types.ApplyYAMLPatchType):
		if text, err = jsonpatch.MergePatch(old, body); err != nil {
			return nil, err
		}
	}
	next := map[string]any{}
	return next, json.Unmarshal(text, &next)
}

func stock() *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "stock", Namespace: "shop", ResourceVersion: "7", Annotations: map[string]string{v1alpha1.LeaseAnnotation: "orders"}},
		Data:       map[string]string{"apples": "3"},
	}
}

func pears(obj client.Object) client.Object {
	obj.(*corev1.ConfigMap).Data["pears"] = "1"
	return obj
}

// writes are all ways to write an object itself.
var writes = map[string]func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error{
	"Create": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error {
		obj.ResourceVersion = ""
		return c.Create(ctx, obj)
	},
	"Update": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error { return c.Update(ctx, obj) },
	"merge patch": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error {
		return c.Patch(ctx, obj, client.MergeFrom(obj.DeepCopy()))
	},
	"merge patch with changes": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error {
		before := obj.DeepCopy()
		return c.Patch(ctx, pears(obj), client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	},
	"strategic merge patch": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error {
		before := obj.DeepCopy()
		return c.Patch(ctx, pears(obj), client.StrategicMergeFrom(before))
	},
	"JSON patch": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error {
		return c.Patch(ctx, obj, client.RawPatch(types.JSONPatchType, []byte(`[{"op":"add","path":"/data/pears","value":"1"}]`)))
	},
	"apply patch in YAML": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error {
		return c.Patch(ctx, obj, client.RawPatch(types.ApplyYAMLPatchType, []byte("apiVersion: v1\nkind: ConfigMap\ndata:\n  pears: '1'\n")),
			client.FieldOwner("me"), client.ForceOwnership)
	},
	"Apply": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error {
		ac := corev1ac.ConfigMap(obj.Name, obj.Namespace).WithData(map[string]string{"pears": "1"}).WithAnnotations(obj.Annotations)
		err := c.Apply(ctx, ac, client.FieldOwner("me"))
		obj.Annotations = ac.Annotations
		return err
	},
	"Apply of unstructured": func(ctx context.Context, c client.Client, obj *corev1.ConfigMap) error {
		u := &unstructured.Unstructured{}
		u.SetAPIVersion("v1")
		u.SetKind("ConfigMap")
		u.SetName(obj.Name)
		u.SetNamespace(obj.Namespace)
		u.SetAnnotations(obj.Annotations)
		err := c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner("me"))
		obj.Annotations = u.GetAnnotations()
		return err
	},
}

// holding runs f with a term of a session of its own.
func holding(t *testing.T, f func(t *testing.T, held *Held, a *apiServer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		f(t, mustAcquire(t, a.open(t, Options{}), "orders"), a)
	})
}

func TestEveryWritePresentsTheToken(t *testing.T) {
	for name, write := range writes {
		t.Run(name, func(t *testing.T) {
			holding(t, func(t *testing.T, held *Held, _ *apiServer) {
				g, inner := newGuardedServer(t)
				obj := stock()
				if err := write(t.Context(), NewClient(inner, held), obj); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff([]string{held.Token().String()}, g.presented); diff != "" {
					t.Error(diff)
				}
				if _, kept := obj.Annotations[v1alpha1.TokenAnnotation]; kept {
					t.Error("the caller's object keeps the token")
				}
				if obj.Annotations[v1alpha1.AcceptedTokenAnnotation] != held.Token().String() {
					t.Errorf("annotations %v: the answer is not in the object", obj.Annotations)
				}
			})
		})
		t.Run(name+" that nothing guards", func(t *testing.T) {
			holding(t, func(t *testing.T, held *Held, _ *apiServer) {
				g, inner := newGuardedServer(t)
				g.unguarded = true
				obj := stock()
				err := write(t.Context(), NewClient(inner, held), obj)
				if !errors.Is(err, ErrNotProtected) || errors.Is(err, ErrFenced) {
					t.Errorf("got %v", err)
				}
				if _, kept := obj.Annotations[v1alpha1.TokenAnnotation]; kept {
					t.Error("the caller's object keeps the token")
				}
			})
		})
		t.Run(name+" whose mark is behind", func(t *testing.T) {
			holding(t, func(t *testing.T, held *Held, _ *apiServer) {
				g, inner := newGuardedServer(t)
				g.mark = "1"
				if err := write(t.Context(), NewClient(inner, held), stock()); !errors.Is(err, ErrNotProtected) {
					t.Errorf("got %v", err)
				}
			})
		})
		t.Run(name+" that the guard refuses", func(t *testing.T) {
			holding(t, func(t *testing.T, held *Held, _ *apiServer) {
				g, inner := newGuardedServer(t)
				g.deny = denial(v1alpha1.ReasonTokenStale)
				obj := stock()
				before := obj.DeepCopy()
				err := write(t.Context(), NewClient(inner, held), obj)
				fenced := &FencedError{}
				if !errors.Is(err, ErrFenced) || !errors.As(err, &fenced) || fenced.Reason != v1alpha1.ReasonTokenStale || !apierrors.IsForbidden(err) {
					t.Errorf("got %v", err)
				}
				if diff := cmp.Diff(before.Annotations, obj.Annotations); diff != "" {
					t.Error(diff)
				}
			})
		})
		t.Run(name+" when the term is over", func(t *testing.T) {
			holding(t, func(t *testing.T, held *Held, _ *apiServer) {
				g, inner := newGuardedServer(t)
				_ = held.Release(t.Context())
				wantLost(t, write(t.Context(), NewClient(inner, held), stock()), "nothing was sent")
				if len(g.paths) > 0 {
					t.Errorf("sent %v", g.paths)
				}
			})
		})
	}
}

func denial(reason v1alpha1.Reason) *apierrors.StatusError {
	err := apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "stock", errors.New("admission webhook denied the request"))
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseType(reason), Message: "why"}}
	return err
}

func TestSubresourcesPresentTheToken(t *testing.T) {
	deployment := func() *appsv1.Deployment {
		return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "stock", Namespace: "shop"}}
	}
	scale := func() *autoscalingv1.Scale {
		return &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Name: "stock", Namespace: "shop"}, Spec: autoscalingv1.ScaleSpec{Replicas: 2}}
	}
	empty := map[string]any{"metadata": map[string]any{"name": "stock", "namespace": "shop"}, "spec": map[string]any{"replicas": 1}}
	tests := map[string]struct {
		write  func(ctx context.Context, c client.Client) (client.Object, error)
		stored map[string]any
		none   bool
	}{
		"Status().Update": {write: func(ctx context.Context, c client.Client) (client.Object, error) {
			obj := stock()
			return obj, c.Status().Update(ctx, obj)
		}},
		"Status().Patch": {write: func(ctx context.Context, c client.Client) (client.Object, error) {
			obj := stock()
			return obj, c.Status().Patch(ctx, obj, client.RawPatch(types.MergePatchType, []byte(`{"status":{}}`)))
		}},
		"Status().Patch with a JSON patch": {write: func(ctx context.Context, c client.Client) (client.Object, error) {
			obj := stock()
			return obj, c.Status().Patch(ctx, obj, client.RawPatch(types.JSONPatchType, []byte(`[{"op":"add","path":"/status","value":{}}]`)))
		}},
		"Status().Apply": {write: func(ctx context.Context, c client.Client) (client.Object, error) {
			return stock(), c.Status().Apply(ctx, corev1ac.ConfigMap("stock", "shop"), client.FieldOwner("me"))
		}},
		"Update of a scale": {write: func(ctx context.Context, c client.Client) (client.Object, error) {
			body := scale()
			return body, c.SubResource("scale").Update(ctx, deployment(), client.WithSubResourceBody(body))
		}},
		"Patch of a scale": {stored: empty, write: func(ctx context.Context, c client.Client) (client.Object, error) {
			body := scale()
			return body, c.SubResource("scale").Patch(ctx, deployment(), client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":3}}`)), client.WithSubResourceBody(body))
		}},
		"JSON patch of a scale, which has no annotations": {stored: empty, write: func(ctx context.Context, c client.Client) (client.Object, error) {
			body := scale()
			return body, c.SubResource("scale").Patch(ctx, deployment(), client.RawPatch(types.JSONPatchType, []byte(`[{"op":"replace","path":"/spec/replicas","value":3}]`)), client.WithSubResourceBody(body))
		}},
		"Apply of a scale": {stored: empty, write: func(ctx context.Context, c client.Client) (client.Object, error) {
			u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": map[string]any{"name": "stock", "namespace": "shop"}}}
			parent := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": "stock", "namespace": "shop"}}}
			return u, c.SubResource("scale").Apply(ctx, client.ApplyConfigurationFromUnstructured(parent),
				client.FieldOwner("me"), &client.SubResourceApplyOptions{SubResourceBody: client.ApplyConfigurationFromUnstructured(u)})
		}},
		"Create of a scale": {write: func(ctx context.Context, c client.Client) (client.Object, error) {
			body := scale()
			return body, c.SubResource("scale").Create(ctx, deployment(), body)
		}},
		"Create of a binding, whose annotations would go to the Pod": {none: true, write: func(ctx context.Context, c client.Client) (client.Object, error) {
			body := &corev1.Binding{Target: corev1.ObjectReference{Name: "node"}}
			return body, c.SubResource("binding").Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "stock", Namespace: "shop"}}, body)
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			holding(t, func(t *testing.T, held *Held, _ *apiServer) {
				g, inner := newGuardedServer(t)
				if tc.stored != nil {
					g.stored = tc.stored
				}
				body, err := tc.write(t.Context(), NewClient(inner, held))
				if err != nil {
					t.Fatal(err)
				}
				want := []string{held.Token().String()}
				if tc.none {
					want = []string{""}
				}
				if diff := cmp.Diff(want, g.presented); diff != "" {
					t.Errorf("%s\nsent %v: %s", diff, g.paths, g.body)
				}
				if _, kept := body.GetAnnotations()[v1alpha1.TokenAnnotation]; kept {
					t.Error("the caller's object keeps the token")
				}
				_ = held.Release(t.Context())
				_, err = tc.write(t.Context(), NewClient(inner, held))
				wantLost(t, err, "nothing was sent")
			})
		})
	}
}

func TestPatchesKeepTheirMeaning(t *testing.T) {
	tests := map[string]struct {
		kind        types.PatchType
		patch, want string
		word        string
	}{
		"numbers keep every digit": {
			kind:  types.MergePatchType,
			patch: `{"spec":{"token":9007199254740993}}`,
			want:  `{"metadata":{"annotations":{"fencedlease.dev/token":"TOKEN"}},"spec":{"token":9007199254740993}}`,
		},
		"other annotations stay, removals too": {
			kind:  types.MergePatchType,
			patch: `{"metadata":{"labels":{"a":"b"},"annotations":{"x":"y","gone":null}}}`,
			want:  `{"metadata":{"annotations":{"fencedlease.dev/token":"TOKEN","gone":null,"x":"y"},"labels":{"a":"b"}}}`,
		},
		"all annotations cannot be removed": {
			kind: types.MergePatchType, patch: `{"metadata":{"annotations":null}}`, word: "metadata.annotations is null",
		},
		"all metadata cannot be removed": {
			kind: types.StrategicMergePatchType, patch: `{"metadata":null}`, word: "metadata is null",
		},
		"a JSON patch keeps its order, and the annotations of the object": {
			kind:  types.JSONPatchType,
			patch: `[{"op":"test","path":"/data/apples","value":"3"}]`,
			want:  `[{"op":"test","path":"/data/apples","value":"3"},{"op":"add","path":"/metadata/annotations/fencedlease.dev~1token","value":"TOKEN"}]`,
		},
		"an empty JSON patch": {
			kind:  types.JSONPatchType,
			patch: `[]`,
			want:  `[{"op":"add","path":"/metadata/annotations/fencedlease.dev~1token","value":"TOKEN"}]`,
		},
		"an unknown kind is refused": {kind: "application/apply-patch+cbor", patch: "x", word: "cannot carry it"},
		"nonsense is refused":        {kind: types.MergePatchType, patch: "[]", word: "read the patch"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			holding(t, func(t *testing.T, held *Held, _ *apiServer) {
				g, inner := newGuardedServer(t)
				g.stored["data"] = map[string]any{"apples": "3"}
				err := NewClient(inner, held).Patch(t.Context(), stock(), client.RawPatch(tc.kind, []byte(tc.patch)))
				if tc.word != "" {
					if err == nil || !strings.Contains(err.Error(), tc.word) || len(g.paths) > 0 {
						t.Errorf("got %v, sent %v", err, g.paths)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(strings.ReplaceAll(tc.want, "TOKEN", held.Token().String()), g.body); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
	t.Run("a JSON patch of an object without annotations is refused", func(t *testing.T) {
		holding(t, func(t *testing.T, held *Held, _ *apiServer) {
			g, inner := newGuardedServer(t)
			delete(g.stored["metadata"].(map[string]any), "annotations")
			err := NewClient(inner, held).Patch(t.Context(), stock(), client.RawPatch(types.JSONPatchType, []byte(`[]`)))
			if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "names no lease") {
				t.Errorf("got %v", err)
			}
		})
	})
}

func TestGuardsThatRefuseForWantOfProtection(t *testing.T) {
	holding(t, func(t *testing.T, held *Held, _ *apiServer) {
		g, inner := newGuardedServer(t)
		c := NewClient(inner, held)
		g.deny = denial(v1alpha1.ReasonNotProtected)
		if err := c.Update(t.Context(), stock()); !errors.Is(err, ErrNotProtected) || !errors.Is(err, ErrFenced) {
			t.Errorf("got %v", err)
		}
		g.deny = apierrors.NewServiceUnavailable("lease unreadable")
		g.deny.ErrStatus.Details = &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseType(v1alpha1.ReasonLeaseUnreadable)}}}
		if err := c.Update(t.Context(), stock()); errors.Is(err, ErrFenced) || !apierrors.IsServiceUnavailable(err) {
			t.Errorf("what may be repeated must not look fenced off: %v", err)
		}
		g.deny = apierrors.NewForbidden(schema.GroupResource{}, "x", errors.New("some other policy"))
		if err := c.Update(t.Context(), stock()); errors.Is(err, ErrFenced) || !apierrors.IsForbidden(err) {
			t.Errorf("somebody else's refusal must not look fenced off: %v", err)
		}
		if fenced, ok := AsFenced(denial(v1alpha1.ReasonNotHolder)); !ok || fenced.Reason != v1alpha1.ReasonNotHolder {
			t.Errorf("AsFenced of another client's error: %v", fenced)
		}
		if _, ok := AsFenced(nil); ok {
			t.Error("AsFenced of nil")
		}
	})
}

// TestNoWriteIsForgotten finds the methods by reflection, so that one which controller-runtime adds fails it: each that
// is not a known read must be fenced by us, and refuse when the term is over.
func TestNoWriteIsForgotten(t *testing.T) {
	reads := []string{"Get", "List", "Scheme", "RESTMapper", "GroupVersionKindFor", "IsObjectNamespaced", "Status", "SubResource"}
	holding(t, func(t *testing.T, held *Held, _ *apiServer) {
		_ = held.Release(t.Context())
		for _, c := range []any{
			&fencedClient{stamp: stamp{held}}, // with no client behind it: a write that goes through panics
			&fencedSubResource{name: "status", stamp: stamp{held}},
			&fencedSubResource{name: "binding", stamp: stamp{held}},
		} {
			of := reflect.TypeFor[client.Client]()
			if _, ok := c.(*fencedSubResource); ok {
				of = reflect.TypeFor[client.SubResourceClient]()
			}
			checked := 0
			for m := range of.Methods() {
				name := m.Name
				if slices.Contains(reads, name) {
					continue
				}
				err, _ := callMethod(t, reflect.ValueOf(c).MethodByName(name)).(error)
				wantLost(t, err, "nothing was sent")
				checked++
			}
			if checked < 4 {
				t.Errorf("%T: %d writes found", c, checked)
			}
		}
	})
}

// callMethod calls a method with arguments that fit, and returns its last result.
func callMethod(t *testing.T, method reflect.Value) any {
	t.Helper()
	some := []any{
		t.Context(), stock(), client.RawPatch(types.MergePatchType, []byte(`{}`)),
		client.ApplyConfigurationFromUnstructured(&unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "ConfigMap"}}),
	}
	var args []reflect.Value
	for i := range method.Type().NumIn() {
		if method.Type().IsVariadic() && i == method.Type().NumIn()-1 {
			break
		}
		in := method.Type().In(i)
		arg := reflect.Zero(in)
		for _, s := range some {
			if reflect.TypeOf(s).AssignableTo(in) {
				arg = reflect.ValueOf(s)
				break
			}
		}
		args = append(args, arg)
	}
	results := method.Call(args)
	return results[len(results)-1].Interface()
}

func TestReadsAndDeletesGoThrough(t *testing.T) {
	holding(t, func(t *testing.T, held *Held, _ *apiServer) {
		g, inner := newGuardedServer(t)
		c := NewClient(inner, held)
		if err := c.Get(t.Context(), types.NamespacedName{Namespace: "shop", Name: "stock"}, &corev1.ConfigMap{}); err != nil {
			t.Error(err)
		}
		if err := c.Delete(t.Context(), stock()); err != nil {
			t.Error(err)
		}
		if err := c.DeleteAllOf(t.Context(), stock(), client.InNamespace("shop")); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff([]string{"GET /api/v1/namespaces/shop/configmaps/stock", "DELETE /api/v1/namespaces/shop/configmaps/stock", "DELETE /api/v1/namespaces/shop/configmaps"}, g.paths); diff != "" {
			t.Error(diff)
		}
		gvk, err := c.GroupVersionKindFor(stock())
		if namespaced, err2 := c.IsObjectNamespaced(stock()); err != nil || err2 != nil || gvk.Kind != "ConfigMap" || !namespaced || c.Scheme() != inner.Scheme() || c.RESTMapper() != inner.RESTMapper() {
			t.Error("what is no write is not passed on")
		}
		_ = held.Release(t.Context())
		if err := c.Get(t.Context(), types.NamespacedName{Namespace: "shop", Name: "stock"}, &corev1.ConfigMap{}); err != nil {
			t.Errorf("reads are free, also when the term is over: %v", err)
		}
	})
}

var _ runtime.Unstructured = &unstructured.Unstructured{} // answer relies on it
