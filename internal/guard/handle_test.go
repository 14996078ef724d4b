// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	apijson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

var errBoom = errors.New("boom")

type leaseReaderFunc func(types.NamespacedName) (*v1alpha1.FencedLease, error)

func (f leaseReaderFunc) Lease(_ context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	return f(name)
}

type accessFunc func(verb string) (bool, error)

func (f accessFunc) Allowed(_ context.Context, _ authenticationv1.UserInfo, verb string, _ types.NamespacedName) (bool, error) {
	return f(verb)
}

func may(verbs ...string) accessFunc {
	return func(verb string) (bool, error) { return slices.Contains(verbs, verb), nil }
}

// held is the lease of all tests here: alice holds it with token 42.
func held(name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	return &v1alpha1.FencedLease{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Status: &v1alpha1.FencedLeaseStatus{
			Phase: v1alpha1.PhaseHeld, Token: 42,
			Holder: &v1alpha1.Holder{Contender: v1alpha1.Contender{Identity: "a", User: "alice", PodUID: "pod-1"}},
		},
	}, nil
}

func newGuard(leases leaseReaderFunc, access accessFunc) *Guard {
	return New(Options{
		Leases: leases, Access: access, Metrics: NewMetrics(prometheus.NewRegistry()), Exempt: DefaultExempt(),
		HasStatus: func(r schema.GroupResource) bool { return r.Resource == "reports" },
	})
}

var alice = authenticationv1.UserInfo{Username: "alice", Extra: map[string]authenticationv1.ExtraValue{v1alpha1.PodUIDExtra: {"pod-1"}}}

// update is alice's request that makes new of old, both JSON.
func update(old, updated string) admission.Request {
	return admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		UID: "u", Namespace: "shop", Name: "x", Operation: admissionv1.Update, UserInfo: alice,
		Resource:  metav1.GroupVersionResource{Group: "samples.fencedlease.dev", Version: "v1", Resource: "reports"},
		Object:    runtime.RawExtension{Raw: []byte(updated)},
		OldObject: runtime.RawExtension{Raw: []byte(old)},
	}}
}

// object is a report with these annotations, given as pairs.
func object(spec string, annotations ...string) string {
	m := map[string]string{}
	for i := 0; i < len(annotations); i += 2 {
		m[annotations[i]] = annotations[i+1]
	}
	raw, err := json.Marshal(map[string]any{"metadata": map[string]any{"name": "x", "annotations": m}, "spec": spec})
	if err != nil {
		panic(err)
	}
	return string(raw)
}

const (
	leaseA  = v1alpha1.LeaseAnnotation
	tokenA  = v1alpha1.TokenAnnotation
	markA   = v1alpha1.AcceptedTokenAnnotation
	bypassA = v1alpha1.BypassAnnotation
)

// applied is what the answer's patch makes of the request's annotations.
func applied(t *testing.T, req admission.Request, resp admission.Response) map[string]string {
	t.Helper()
	after := req.Object.Raw
	if len(resp.Patches) > 0 {
		raw, err := json.Marshal(resp.Patches)
		if err != nil {
			t.Fatal(err)
		}
		patch, err := jsonpatch.DecodePatch(raw)
		if err != nil {
			t.Fatal(err)
		}
		if after, err = patch.Apply(after); err != nil {
			t.Fatalf("apply patch %s to %s: %v", raw, req.Object.Raw, err)
		}
	}
	var o metav1.PartialObjectMetadata
	if err := apijson.Unmarshal(after, &o); err != nil { // minds the case of keys, as the API server does
		t.Fatal(err)
	}
	return o.Annotations
}

func TestHandleAllows(t *testing.T) {
	protected := object("old", leaseA, "orders", markA, "41")
	tests := map[string]struct {
		req  admission.Request
		want map[string]string // the annotations that are stored
	}{
		"a current token is consumed and becomes the mark": {
			req:  update(protected, object("new", leaseA, "orders", markA, "41", tokenA, "42")),
			want: map[string]string{leaseA: "orders", markA: "42"},
		},
		"a mark in the request is ignored": {
			req:  update(protected, object("new", leaseA, "orders", markA, "99", tokenA, "42")),
			want: map[string]string{leaseA: "orders", markA: "42"},
		},
		"a mark that the request left out is kept, when nothing else changes": {
			req:  update(protected, object("old", leaseA, "orders")),
			want: map[string]string{leaseA: "orders", markA: "41"},
		},
		"bypass is consumed and keeps the mark": {
			req:  update(protected, object("new", leaseA, "orders", bypassA, "repair")),
			want: map[string]string{leaseA: "orders", markA: "41"},
		},
		"a declaration starts the mark at the lease's token, whatever the request says": {
			req:  update(object("old"), object("old", leaseA, "orders", markA, "1")),
			want: map[string]string{leaseA: "orders", markA: "42"},
		},
		"protection removed takes the mark along, and the empty map": {
			req:  update(protected, object("old", bypassA, "unprotect", markA, "41")),
			want: nil,
		},
		"an object that is not protected keeps what it has": {
			req:  update(object("old", markA, "7"), object("new", markA, "8")),
			want: map[string]string{markA: "8"},
		},
		"a status of a kind that has /status does not count on the main resource": {
			req: update(`{"metadata":{"annotations":{"fencedlease.dev/lease":"orders","fencedlease.dev/accepted-token":"41"}},"status":{"a":1}}`,
				`{"metadata":{"annotations":{"fencedlease.dev/lease":"orders","fencedlease.dev/accepted-token":"41"}},"status":{"a":2}}`),
			want: map[string]string{leaseA: "orders", markA: "41"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			resp := newGuard(held, may(v1alpha1.VerbProtect, v1alpha1.VerbBypass)).Handle(t.Context(), tc.req)
			if !resp.Allowed {
				t.Fatalf("denied: %v", resp.Result)
			}
			if diff := cmp.Diff(tc.want, applied(t, tc.req, resp)); diff != "" {
				t.Errorf("stored annotations (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHandleStatusKeepsTheLease(t *testing.T) {
	// Where /status stores annotations, as Deployments do, it must not move the object elsewhere.
	old := object("x", leaseA, "orders", markA, "41")
	tests := map[string]struct {
		updated string
		want    map[string]string
	}{
		"the lease annotation removed":  {object("x", tokenA, "42"), map[string]string{leaseA: "orders", markA: "42"}},
		"the lease annotation changed":  {object("x", leaseA, "mine", markA, "1", tokenA, "42"), map[string]string{leaseA: "orders", markA: "42"}},
		"the mark lowered, no token":    {object("x", leaseA, "orders", markA, "1"), map[string]string{leaseA: "orders", markA: "41"}},
		"nothing but the token to take": {object("x", leaseA, "orders", markA, "41", tokenA, "42"), map[string]string{leaseA: "orders", markA: "42"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			req := update(old, tc.updated)
			req.SubResource = "status"
			resp := newGuard(held, may()).Handle(t.Context(), req)
			if !resp.Allowed {
				t.Fatalf("denied: %v", resp.Result)
			}
			if diff := cmp.Diff(tc.want, applied(t, req, resp)); diff != "" {
				t.Errorf("stored annotations (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHandleDenies(t *testing.T) {
	g := newGuard(held, may())
	req := update(object("old", leaseA, "orders"), object("new", leaseA, "orders", tokenA, "41"))
	resp := g.Handle(t.Context(), req)
	const message = `lease shop/orders is held by "a" with token 42; this write carries 41: stop, and acquire the lease again`
	want := &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden, Message: message,
		Details: &metav1.StatusDetails{
			Name: "x", Group: "samples.fencedlease.dev", Kind: "reports",
			Causes: []metav1.StatusCause{{Type: "TokenStale", Message: message, Field: "metadata.annotations[fencedlease.dev/token]"}},
		},
	}
	if diff := cmp.Diff(want, resp.Result); resp.Allowed || diff != "" {
		t.Errorf("allowed %v, answer (-want +got):\n%s", resp.Allowed, diff)
	}
	if len(resp.Patches) > 0 {
		t.Errorf("a denial has patches: %v", resp.Patches)
	}
	audit := map[string]string{"result": "denied", "reason": "TokenStale", "lease": "shop/orders"}
	if diff := cmp.Diff(audit, resp.AuditAnnotations); diff != "" {
		t.Errorf("audit annotations (-want +got):\n%s", diff)
	}
	if n := testutil.ToFloat64(g.Metrics.verdicts.WithLabelValues("denied", "TokenStale")); n != 1 {
		t.Errorf("counted %v denials", n)
	}
}

func TestHandleCannotJudge(t *testing.T) {
	protected := object("old", leaseA, "orders")
	tests := map[string]struct {
		req    admission.Request
		leases leaseReaderFunc
		access accessFunc
	}{
		"the lease cannot be read": {
			req:    update(protected, object("new", leaseA, "orders", tokenA, "42")),
			leases: func(types.NamespacedName) (*v1alpha1.FencedLease, error) { return nil, errBoom },
		},
		"the verb cannot be asked": {
			req:    update(protected, object("new", leaseA, "orders", bypassA, "repair")),
			access: func(string) (bool, error) { return false, errBoom },
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			resp := newGuard(tc.leases, tc.access).Handle(t.Context(), tc.req)
			r := resp.Result
			if resp.Allowed || r.Code != http.StatusServiceUnavailable || r.Reason != metav1.StatusReasonServiceUnavailable ||
				r.Details.RetryAfterSeconds != 1 || r.Details.Causes[0].Type != "LeaseUnreadable" || !strings.Contains(r.Message, "boom") {
				t.Errorf("allowed %v, answer %v", resp.Allowed, r)
			}
		})
	}
}

func TestHandleRefusesWhatItCannotDecode(t *testing.T) {
	good := object("x", leaseA, "orders")
	with := func(change func(*admission.Request)) admission.Request {
		req := update(good, good)
		change(&req)
		return req
	}
	tests := map[string]admission.Request{
		"no object":                   with(func(r *admission.Request) { r.Object.Raw = nil }),
		"no old object":               with(func(r *admission.Request) { r.OldObject.Raw = nil }),
		"an object without metadata":  with(func(r *admission.Request) { r.Object.Raw = []byte(`{}`) }),
		"metadata of another case":    with(func(r *admission.Request) { r.Object.Raw = []byte(`{"Metadata":{}}`) }),
		"an object that is no JSON":   with(func(r *admission.Request) { r.Object.Raw = []byte(`{`) }),
		"annotations of another type": with(func(r *admission.Request) { r.Object.Raw = []byte(`{"metadata":{"annotations":{"a":1}}}`) }),
		"an operation of the future":  with(func(r *admission.Request) { r.Operation = admissionv1.Delete }),
		"a subresource of the future": with(func(r *admission.Request) { r.SubResource = "scale" }),
	}
	for name, req := range tests {
		t.Run(name, func(t *testing.T) {
			resp := newGuard(held, may()).Handle(t.Context(), req)
			if resp.Allowed || resp.Result.Code != http.StatusBadRequest || resp.Result.Message == "" {
				t.Errorf("allowed %v, answer %v", resp.Allowed, resp.Result)
			}
		})
	}
}

func TestHandleMindsTheCaseOfKeys(t *testing.T) {
	// A custom resource may have a field "Metadata" of its own. The guard must not take it for the metadata.
	old := `{"metadata":{"annotations":{"fencedlease.dev/lease":"orders"}},"spec":1}`
	updated := `{"metadata":{"annotations":{"fencedlease.dev/lease":"orders"}},"spec":2,"Metadata":{"annotations":{"fencedlease.dev/token":"42"}}}`
	resp := newGuard(held, may()).Handle(t.Context(), update(old, updated))
	if resp.Allowed || resp.Result.Details.Causes[0].Type != "TokenMissing" {
		t.Errorf("allowed %v, answer %v", resp.Allowed, resp.Result)
	}
}

// FuzzHandle: whatever arrives, the guard answers, lets nothing through without a result, and its patch applies
// and leaves neither token nor bypass.
func FuzzHandle(f *testing.F) {
	f.Add("UPDATE", "", "alice", object("old", leaseA, "orders", markA, "41"), object("new", leaseA, "orders", tokenA, "42"))
	f.Add("UPDATE", "status", "alice", object("old", leaseA, "orders"), object("new", leaseA, "orders", bypassA, "why"))
	f.Add("CREATE", "", "bob", "", object("new", leaseA, "a/b", tokenA, "042"))
	f.Add("UPDATE", "", "system:kube-controller-manager", `{"metadata":{"ownerReferences":[1]}}`, `{"metadata":{"managedFields":[{"fieldsV1":{"f:metadata":{"f:annotations":{"f:fencedlease.dev/token":{}}}}}]}}`)
	f.Add("UPDATE", "", "alice", `{"metadata":{"annotations":{"fencedlease.dev/lease":"orders"}}}`, `{"metadata":{"annotations":{"fencedlease.dev/lease":"orders"},"managedFields":[{"fieldsV1":{"f:metadata":7}},{"fieldsV1":null},{}]}}`)
	g := newGuard(held, may(v1alpha1.VerbProtect, v1alpha1.VerbBypass))
	f.Fuzz(func(t *testing.T, operation, sub, user, old, updated string) {
		req := update(old, updated)
		req.Operation, req.SubResource, req.UserInfo.Username = admissionv1.Operation(operation), sub, user
		resp := g.Handle(t.Context(), req)
		if !resp.Allowed {
			if resp.Result == nil || resp.Result.Code < 400 || resp.Result.Message == "" {
				t.Fatalf("refused without an explanation: %v", resp.Result)
			}
			return
		}
		if resp.AuditAnnotations["result"] == "" {
			t.Fatal("let through without a result")
		}
		if err := resp.Complete(req); err != nil {
			t.Fatalf("the answer cannot be encoded: %v", err)
		}
		for key := range maps.Keys(applied(t, req, resp)) {
			if key == tokenA || key == bypassA {
				t.Fatalf("%s would be stored", key)
			}
		}
	})
}
