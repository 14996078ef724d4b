// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

const (
	leaseKey  = v1alpha1.LeaseAnnotation
	tokenKey  = v1alpha1.TokenAnnotation
	markKey   = v1alpha1.AcceptedTokenAnnotation
	bypassKey = v1alpha1.BypassAnnotation
)

// notes are the annotations of an object, as pairs of key and value.
func notes(pairs ...string) *metav1.PartialObjectMetadata {
	o := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "config"}}
	for i := 0; i < len(pairs); i += 2 {
		metav1.SetMetaDataAnnotation(&o.ObjectMeta, pairs[i], pairs[i+1])
	}
	return o
}

// guarded is the object as it is stored: fenced by lease orders, which has accepted token 100 for it.
func guarded(more ...string) *metav1.PartialObjectMetadata {
	return notes(append([]string{leaseKey, "orders", markKey, "100"}, more...)...)
}

// world is what the guard could ask, and what it was asked.
type world struct {
	leases map[string]builder
	verbs  map[string]bool // "protect shop/orders"
	broken bool
	asked  []string
}

var errDown = errors.New("the API server is away")

func (w *world) Lease(name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	w.asked = append(w.asked, "lease "+name.String())
	if w.broken {
		return nil, errDown
	}
	return w.leases[name.String()].FencedLease, nil
}

func (w *world) Allowed(verb string, name types.NamespacedName) (bool, error) {
	w.asked = append(w.asked, verb+" "+name.String())
	if w.broken {
		return false, errDown
	}
	return w.verbs[verb+" "+name.String()], nil
}

// verdict is a case: a write, the world, and what must come of it.
type verdict struct {
	old, new    *metav1.PartialObjectMetadata
	by          protocol.Requester
	namespace   string // default shop; "-" for none
	subresource string
	changes     protocol.Changes
	leases      map[string]builder // default: shop/orders held by a with token 101
	verbs       []string
	broken      bool

	result   protocol.Result
	reason   v1alpha1.Reason
	mark     string
	lease    string // default shop/orders; "-" for none
	bypass   string
	behind   bool
	warnings int
	says     []string // words of the message or of the warnings
	asked    []string
}

var (
	holderA  = protocol.Requester{User: "sa-a", PodUID: "pod-a"}
	stranger = protocol.Requester{User: "sa-z", PodUID: "pod-z"}
	gc       = protocol.Requester{User: "system:serviceaccount:kube-system:generic-garbage-collector", Collector: true}

	something = protocol.Changes{Other: true}
	orders    = []string{"lease shop/orders"}
)

func judge(t *testing.T, cases map[string]verdict) {
	t.Helper()
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := &world{leases: tc.leases, verbs: map[string]bool{}, broken: tc.broken}
			if w.leases == nil {
				w.leases = map[string]builder{"shop/orders": held("a", 7)}
			}
			for _, verb := range tc.verbs {
				w.verbs[verb] = true
			}
			write := protocol.Write{Namespace: tc.namespace, Subresource: tc.subresource, Old: tc.old, New: tc.new, By: tc.by}
			switch tc.namespace {
			case "":
				write.Namespace = "shop"
			case "-":
				write.Namespace = ""
			}
			if write.By.User == "" {
				write.By = holderA
			}
			write.Changes = func() (protocol.Changes, error) {
				w.asked = append(w.asked, "changes")
				return tc.changes, nil
			}
			before := []*metav1.PartialObjectMetadata{tc.old.DeepCopy(), tc.new.DeepCopy()}
			got, err := protocol.Verdict(write, w)
			if tc.broken {
				if !errors.Is(err, errDown) || got.Allowed() && got.Result != "" {
					t.Fatalf("got %+v, error %v; want %v and no decision", got, err, errDown)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			check(t, tc, got, w.asked)
			if diff := cmp.Diff(before, []*metav1.PartialObjectMetadata{tc.old, tc.new}); diff != "" {
				t.Errorf("Verdict changed its arguments:\n%s", diff)
			}
		})
	}
}

func check(t *testing.T, tc verdict, got protocol.Decision, asked []string) {
	t.Helper()
	lease := got.Lease.String()
	switch tc.lease {
	case "":
		tc.lease = "shop/orders"
	case "-":
		tc.lease = "/"
	}
	want := protocol.Decision{
		Result: tc.result, Reason: tc.reason, Mark: tc.mark, Bypass: tc.bypass, Behind: tc.behind,
		Lease: got.Lease, Message: got.Message, Warnings: got.Warnings,
	}
	if diff := cmp.Diff(want, got); diff != "" || lease != tc.lease {
		t.Errorf("lease %s, want %s; decision (-want +got):\n%s", lease, tc.lease, diff)
	}
	if diff := cmp.Diff(tc.asked, asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	if len(got.Warnings) != tc.warnings || (got.Message != "") != (got.Reason != "") {
		t.Errorf("warnings %q, message %q", got.Warnings, got.Message)
	}
	if got.Allowed() != (got.Result != protocol.ResultDenied) || got.Result == protocol.ResultDenied && (got.Reason == "" || got.Mark != "") {
		t.Errorf("a denial has a reason and no mark: %+v", got)
	}
	text := got.Message + strings.Join(got.Warnings, " ")
	for _, words := range tc.says {
		if !strings.Contains(text, words) {
			t.Errorf("%q does not say %q", text, words)
		}
	}
}

// warning is shop/orders, held by a with token 101, whose enforcement is Warn.
func warning() map[string]builder {
	return map[string]builder{"shop/orders": held("a", 7).with(func(b builder) { b.Spec.Enforcement = v1alpha1.EnforcementWarn })}
}

func with(lease builder) map[string]builder { return map[string]builder{"shop/orders": lease} }

func TestVerdictToken(t *testing.T) {
	judge(t, map[string]verdict{
		"the holder writes with the current token: the mark rises": {
			old: guarded(), new: guarded(tokenKey, "101"), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"and again, for another change or to seal": {
			old: guarded(markKey, "101"), new: guarded(markKey, "101", tokenKey, "101"), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"an object that has no mark yet gets one": {
			old: notes(leaseKey, "orders"), new: notes(leaseKey, "orders", tokenKey, "101"), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"a mark in the request does not count, not a high one": {
			old: guarded(), new: guarded(markKey, "9007199254740991", tokenKey, "101"), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"nor a removed one": {
			old: guarded(), new: notes(leaseKey, "orders", tokenKey, "101"), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"a malformed mark counts as none, and is mended": {
			old: guarded(markKey, "0x64"), new: guarded(markKey, "0x64", tokenKey, "101"), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"an older token is stale, although the object has not seen the newer one": {
			old: guarded(markKey, "90"), new: guarded(tokenKey, "100"), result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders,
			says: []string{`lease shop/orders is held by "a" with token 101`, "carries 100", "acquire"}},
		"one below the mark is stale": {
			old: guarded(), new: guarded(tokenKey, "99"), result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders,
			says: []string{"accepted token 100", "carries 99"}},
		"even while nobody holds the lease": {
			old: guarded(), new: guarded(tokenKey, "99"), leases: with(available()), result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders},
		"even when the lease itself is behind the mark": {
			old: guarded(markKey, "500"), new: guarded(tokenKey, "101"), result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, behind: true, asked: orders,
			says: []string{"set spec.minToken of lease shop/orders above it"}},
		"a token that was never issued is unknown": {
			old: guarded(), new: guarded(tokenKey, "102"), result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenUnknown, asked: orders, says: []string{"never issued"}},
		"the last token of a lease that nobody holds is not held": {
			old: guarded(), new: guarded(tokenKey, "100"), leases: with(available()), result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHeld, asked: orders, says: []string{"acquire lease shop/orders"}},
		"nor of one that cools down": {
			old: guarded(), new: guarded(tokenKey, "101"), leases: with(cooling()), result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHeld, asked: orders},
		"nor of one that was never started": {
			old: guarded(), new: guarded(tokenKey, "101"), leases: with(fresh()), result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHeld, asked: orders},
		"a lease that is gone judges against": {
			old: guarded(), new: guarded(tokenKey, "101"), leases: map[string]builder{}, result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, asked: orders,
			says: []string{"lease shop/orders, which does not exist", bypassKey}},
		"another user may not use the holder's token": {
			old: guarded(), new: guarded(tokenKey, "101"), by: protocol.Requester{User: "sa-z", PodUID: "pod-a"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHolder, asked: orders,
			says: []string{`user "sa-a", Pod "pod-a"`, `user "sa-z", Pod "pod-a"`}},
		"nor another Pod of the same user": {
			old: guarded(), new: guarded(tokenKey, "101"), by: protocol.Requester{User: "sa-a", PodUID: "pod-b"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHolder, asked: orders},
		"nor the same user from outside Pods": {
			old: guarded(), new: guarded(tokenKey, "101"), by: protocol.Requester{User: "sa-a"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHolder, asked: orders},
		"nor a user whose name begins like the holder's": {
			old: guarded(), new: guarded(tokenKey, "101"), by: protocol.Requester{User: "sa-a0", PodUID: "pod-a"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHolder, asked: orders},
		"nor the garbage collector": {
			old: guarded(), new: guarded(tokenKey, "101"), by: gc, result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHolder, asked: orders},
		"a holder outside Pods is known by its name": {
			old: guarded(), new: guarded(tokenKey, "101"), by: protocol.Requester{User: "sa-a"},
			leases: with(held("a", 7).with(func(b builder) { b.Status.Holder.PodUID = "" })), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"who runs in a Pod is not that holder": {
			old: guarded(), new: guarded(tokenKey, "101"),
			leases: with(held("a", 7).with(func(b builder) { b.Status.Holder.PodUID = "" })), result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHolder, asked: orders},
		"tokenBinding None: whoever knows it": {
			old: guarded(), new: guarded(tokenKey, "101"), by: stranger,
			leases: with(held("a", 7).with(func(b builder) { b.Spec.TokenBinding = v1alpha1.TokenBindingNone })), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"but not an older one": {
			old: guarded(), new: guarded(tokenKey, "100"), by: stranger,
			leases: with(held("a", 7).with(func(b builder) { b.Spec.TokenBinding = v1alpha1.TokenBindingNone })), result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders},
		"a bypass does not excuse a stale token": {
			old: guarded(), new: guarded(tokenKey, "99", bypassKey, "fire"), verbs: []string{"bypass shop/orders"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders},
		"nor does dying": {
			old: dying(guarded()), new: dying(guarded(tokenKey, "99")), result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders},
		"with a current token nobody asks for the verb": {
			old: guarded(), new: guarded(tokenKey, "101", bypassKey, "fire"), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"the lease cannot be read": {old: guarded(), new: guarded(tokenKey, "101"), broken: true},
	})
}

func dying(o *metav1.PartialObjectMetadata) *metav1.PartialObjectMetadata {
	o.DeletionTimestamp = &metav1.Time{Time: noon}
	return o
}

func TestVerdictMalformedToken(t *testing.T) {
	cases := map[string]verdict{
		"malformed and the lease is gone": {
			old: guarded(), new: guarded(tokenKey, "abc"), leases: map[string]builder{}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenInvalid, asked: orders},
		"malformed and the lease cannot be read": {old: guarded(), new: guarded(tokenKey, "abc"), broken: true},
		"malformed and the lease only warns": {
			old: guarded(), new: guarded(tokenKey, "abc"), leases: warning(), result: protocol.ResultWarned, reason: v1alpha1.ReasonTokenInvalid, mark: "100", warnings: 1, asked: orders},
	}
	for name, text := range malformedTokens {
		cases["protected, "+name] = verdict{
			old: guarded(), new: guarded(tokenKey, text), verbs: []string{"bypass shop/orders"},
			result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenInvalid, asked: orders}
		cases["not protected, "+name] = verdict{
			old: notes(), new: notes(tokenKey, text), lease: "-",
			result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenInvalid}
		cases["created under a lease, "+name] = verdict{
			new: notes(leaseKey, "orders", tokenKey, text), verbs: []string{"protect shop/orders"},
			result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenInvalid, asked: orders}
	}
	judge(t, cases)
}

func TestVerdictWithoutToken(t *testing.T) {
	asked := append([]string{"changes"}, orders...)
	judge(t, map[string]verdict{
		"something changes": {
			old: guarded(), new: guarded(), changes: something, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked,
			says: []string{"protected by lease shop/orders", `held by "a" with token 101`, tokenKey}},
		"something changes while nobody holds the lease": {
			old: guarded(), new: guarded(), changes: something, leases: with(available()), result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked,
			says: []string{"acquire lease shop/orders"}},
		"something changes and the lease is gone": {
			old: guarded(), new: guarded(), changes: something, leases: map[string]builder{}, result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, asked: asked},
		"something changes and the lease is behind the mark": {
			old: guarded(markKey, "500"), new: guarded(), changes: something, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, behind: true, asked: asked,
			says: []string{"set spec.minToken"}},
		"something changes and the lease cannot be read": {old: guarded(), new: guarded(), changes: something, broken: true},
		"nothing changes: no lease is read": {
			old: guarded(), new: guarded(), by: stranger, result: protocol.ResultUnchanged, mark: "100", lease: "-", asked: []string{"changes"}},
		"nothing but a forged mark: the old one stays": {
			old: guarded(), new: guarded(markKey, "9007199254740991"), by: stranger, result: protocol.ResultUnchanged, mark: "100", lease: "-", asked: []string{"changes"}},
		"nothing but a lowered mark": {
			old: guarded(), new: guarded(markKey, "1"), by: stranger, result: protocol.ResultUnchanged, mark: "100", lease: "-", asked: []string{"changes"}},
		"nothing but a removed mark": {
			old: guarded(), new: notes(leaseKey, "orders"), by: stranger, result: protocol.ResultUnchanged, mark: "100", lease: "-", asked: []string{"changes"}},
		"nothing, where no mark was ever": {
			old: notes(leaseKey, "orders"), new: guarded(), by: stranger, result: protocol.ResultUnchanged, lease: "-", asked: []string{"changes"}},
		"nothing but a bypass, which nobody needs": {
			old: guarded(), new: guarded(bypassKey, "fire"), by: stranger, result: protocol.ResultUnchanged, mark: "100", lease: "-", asked: []string{"changes"}},
		"only who owns the fields changes": {
			old: guarded(), new: guarded(), changes: protocol.Changes{ManagedFields: true}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked},
		"the garbage collector changes owners and finalizers": {
			old: guarded(), new: guarded(), by: gc, changes: protocol.Changes{Owners: true, Finalizers: true, ManagedFields: true}, result: protocol.ResultSystem, mark: "100", lease: "-", asked: []string{"changes"}},
		"the garbage collector changes data": {
			old: guarded(), new: guarded(), by: gc, changes: protocol.Changes{Owners: true, Other: true}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked},
		"somebody else changes owners": {
			old: guarded(), new: guarded(), by: stranger, changes: protocol.Changes{Owners: true}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked},
		"somebody takes a finalizer off": {
			old: guarded(), new: guarded(), by: stranger, changes: protocol.Changes{Finalizers: true}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked},
		"somebody wipes the managed fields of a dying object": {
			old: dying(guarded()), new: dying(guarded()), by: stranger, changes: protocol.Changes{ManagedFields: true}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked},
		"somebody takes a finalizer off a dying object": {
			old: dying(guarded()), new: dying(guarded()), by: stranger, changes: protocol.Changes{Finalizers: true, ManagedFields: true}, result: protocol.ResultSystem, mark: "100", lease: "-", asked: []string{"changes"}},
		"and changes its data too": {
			old: dying(guarded()), new: dying(guarded()), by: stranger, changes: protocol.Changes{Finalizers: true, Other: true}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked},
		"and its owners": {
			old: dying(guarded()), new: dying(guarded()), by: stranger, changes: protocol.Changes{Finalizers: true, Owners: true}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked},
		"a live object does not die because the request says so": {
			old: guarded(), new: dying(guarded()), by: stranger, changes: protocol.Changes{Finalizers: true}, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: asked},
		"the lease's name is malformed": {
			old: guarded(leaseKey, "Orders"), new: guarded(leaseKey, "Orders"), changes: something, lease: "-", result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, asked: []string{"changes"},
			says: []string{`"Orders"`, "NAME"}},
	})
}

func TestVerdictChangesUnreadable(t *testing.T) {
	write := protocol.Write{Namespace: "shop", Old: guarded(), New: guarded(), By: holderA, Changes: func() (protocol.Changes, error) { return protocol.Changes{}, errDown }}
	if got, err := protocol.Verdict(write, &world{}); !errors.Is(err, errDown) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestVerdictNotProtected(t *testing.T) {
	judge(t, map[string]verdict{
		"a write without token passes, and keeps what it brings": {
			old: notes(), new: notes(markKey, "7"), result: protocol.ResultIgnored, mark: "7", lease: "-"},
		"so does a create": {new: notes(), result: protocol.ResultIgnored, lease: "-"},
		"a token guards nothing here, and the writer must know": {
			old: notes(), new: notes(tokenKey, "101"), result: protocol.ResultDenied, reason: v1alpha1.ReasonNotProtected, lease: "-", says: []string{leaseKey}},
		"nor on a create": {
			new: notes(tokenKey, "101"), result: protocol.ResultDenied, reason: v1alpha1.ReasonNotProtected, lease: "-"},
		"nor on /status": {
			old: notes(), new: notes(tokenKey, "101"), subresource: "status", result: protocol.ResultDenied, reason: v1alpha1.ReasonNotProtected, lease: "-"},
		"a bypass is not stored either": {
			old: notes(), new: notes(bypassKey, "fire"), verbs: []string{"bypass shop/orders"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonNotProtected, lease: "-"},
		"/status cannot bring a mark": {
			old: notes(), new: notes(leaseKey, "orders", markKey, "9007199254740991"), subresource: "status", result: protocol.ResultIgnored, lease: "-"},
	})
}

func TestVerdictDeclares(t *testing.T) {
	protect := []string{"protect shop/orders"}
	both := []string{"protect shop/orders", "lease shop/orders"}
	tokenFirst := []string{"lease shop/orders", "protect shop/orders", "lease shop/orders"}
	judge(t, map[string]verdict{
		"first annotation with the verb: the mark starts at the lease's token": {
			old: notes(), new: notes(leaseKey, "orders"), by: stranger, verbs: protect, result: protocol.ResultDeclared, mark: "101", asked: both},
		"created under a lease": {
			new: notes(leaseKey, "orders"), by: stranger, verbs: protect, result: protocol.ResultDeclared, mark: "101", asked: both},
		"without the verb": {
			old: notes(), new: notes(leaseKey, "orders"), by: stranger, result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: protect,
			says: []string{`user "sa-z"`, "verb protect", "shop/orders"}},
		"created without the verb": {
			new: notes(leaseKey, "orders"), by: stranger, result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: protect},
		"the verb on another lease does not count": {
			old: notes(), new: notes(leaseKey, "orders"), by: stranger, verbs: []string{"protect shop/other", "bypass shop/orders"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: protect},
		"a lease that nobody holds protects too": {
			old: notes(), new: notes(leaseKey, "orders"), verbs: protect, leases: with(available()), result: protocol.ResultDeclared, mark: "100", asked: both},
		"a missing lease warns": {
			old: notes(), new: notes(leaseKey, "orders"), verbs: protect, leases: map[string]builder{}, result: protocol.ResultDeclared, warnings: 1, asked: both, says: []string{"does not exist"}},
		"one without status too": {
			old: notes(), new: notes(leaseKey, "orders"), verbs: protect, leases: with(fresh()), result: protocol.ResultDeclared, warnings: 1, asked: both},
		"a forged mark in the request does not lower ours": {
			old: notes(), new: notes(leaseKey, "orders", markKey, "1"), verbs: protect, result: protocol.ResultDeclared, mark: "101", asked: both},
		"nor does a malformed one": {
			old: notes(), new: notes(leaseKey, "orders", markKey, "x"), verbs: protect, result: protocol.ResultDeclared, mark: "101", asked: both},
		"a higher mark, as after a restore, warns and is counted": {
			new: notes(leaseKey, "orders", markKey, "500"), verbs: protect, result: protocol.ResultDeclared, mark: "101", behind: true, warnings: 1, asked: both, says: []string{"mark 500", "token 101", "minToken"}},
		"also while the lease is not there yet": {
			new: notes(leaseKey, "orders", markKey, "500"), verbs: protect, leases: map[string]builder{}, result: protocol.ResultDeclared, behind: true, warnings: 2, asked: both, says: []string{"mark 500", "does not exist"}},
		"the holder creates what he protects, without the verb": {
			new: notes(leaseKey, "orders", tokenKey, "101"), result: protocol.ResultAccepted, mark: "101", asked: orders},
		"a stranger with the holder's token does not": {
			new: notes(leaseKey, "orders", tokenKey, "101"), by: stranger, verbs: protect, result: protocol.ResultDenied, reason: v1alpha1.ReasonNotHolder, asked: orders},
		"nor a holder of old": {
			new: notes(leaseKey, "orders", tokenKey, "100"), verbs: protect, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders},
		"the holder protects what is there: that needs the verb": {
			old: notes(), new: notes(leaseKey, "orders", tokenKey, "101"), result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: tokenFirst[:2]},
		"with the verb": {
			old: notes(), new: notes(leaseKey, "orders", tokenKey, "101"), verbs: protect, result: protocol.ResultDeclared, mark: "101", asked: tokenFirst},
		"a mark forged before protection does not make the token stale": {
			old: notes(markKey, "9007199254740991"), new: notes(leaseKey, "orders", tokenKey, "101"), verbs: protect, result: protocol.ResultDeclared, mark: "101", asked: tokenFirst},
		"and does not survive": {
			old: notes(markKey, "9007199254740991"), new: notes(leaseKey, "orders"), verbs: protect, result: protocol.ResultDeclared, mark: "101", asked: both},
		"a wrong token on a lease that warns still needs the verb": {
			new: notes(leaseKey, "orders", tokenKey, "99"), leases: warning(), result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: tokenFirst[:2]},
		"with the verb it warns, and the mark starts": {
			new: notes(leaseKey, "orders", tokenKey, "99"), leases: warning(), verbs: protect, result: protocol.ResultWarned, reason: v1alpha1.ReasonTokenStale, mark: "101", warnings: 1, asked: tokenFirst},
		"a malformed name protects nothing": {
			old: notes(), new: notes(leaseKey, "Orders"), verbs: protect, result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, lease: "-"},
		"nor does an empty one": {
			old: notes(), new: notes(leaseKey, ""), verbs: protect, result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, lease: "-"},
		"nor one of another namespace": {
			old: notes(), new: notes(leaseKey, "other/orders"), verbs: []string{"protect other/orders"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, lease: "-"},
		"the verb cannot be asked": {old: notes(), new: notes(leaseKey, "orders"), broken: true},
	})
}

func TestVerdictUnprotects(t *testing.T) {
	bypass := []string{"bypass shop/orders"}
	moved := func(more ...string) *metav1.PartialObjectMetadata {
		return notes(append([]string{leaseKey, "billing", markKey, "100"}, more...)...)
	}
	two := map[string]builder{"shop/orders": held("a", 7), "shop/billing": held("b", 7).token(50)}
	repointed := []string{"bypass shop/orders", "protect shop/billing", "lease shop/billing"}
	judge(t, map[string]verdict{
		"removed with nothing": {
			old: guarded(), new: notes(), result: protocol.ResultDenied, reason: v1alpha1.ReasonProtectionKept, says: []string{bypassKey, "shop/orders"}},
		"removed, although the garbage collector asks": {
			old: guarded(), new: notes(), by: gc, result: protocol.ResultDenied, reason: v1alpha1.ReasonProtectionKept},
		"removed from a dying object": {
			old: dying(guarded()), new: dying(notes()), result: protocol.ResultDenied, reason: v1alpha1.ReasonProtectionKept},
		"removed on a lease that warns": {
			old: guarded(), new: notes(), leases: warning(), result: protocol.ResultDenied, reason: v1alpha1.ReasonProtectionKept},
		"removed by the holder with the current token": {
			old: guarded(), new: notes(tokenKey, "101"), result: protocol.ResultDenied, reason: v1alpha1.ReasonProtectionKept, asked: orders},
		"removed with an empty reason": {
			old: guarded(), new: notes(bypassKey, ""), verbs: bypass, result: protocol.ResultDenied, reason: v1alpha1.ReasonProtectionKept},
		"removed with the annotation, but without the verb": {
			old: guarded(), new: notes(bypassKey, "fire"), result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: bypass},
		"removed with both: the mark goes": {
			old: guarded(), new: notes(bypassKey, "fire", markKey, "100"), by: stranger, verbs: bypass, result: protocol.ResultBypassed, bypass: "fire", asked: bypass},
		"removed with both and a stale token": {
			old: guarded(), new: notes(bypassKey, "fire", tokenKey, "99"), verbs: bypass, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders},
		"removed with both and the current token": {
			old: guarded(), new: notes(bypassKey, "fire", tokenKey, "101"), verbs: bypass, result: protocol.ResultBypassed, bypass: "fire", asked: append(orders, bypass...)},
		"removed when the lease is long gone": {
			old: guarded(), new: notes(bypassKey, "fire"), verbs: bypass, leases: map[string]builder{}, result: protocol.ResultBypassed, bypass: "fire", asked: bypass},
		"removed when its name never was one": {
			old: guarded(leaseKey, "Orders"), new: notes(bypassKey, "fire"), verbs: []string{"bypass shop/Orders"}, lease: "shop/Orders", result: protocol.ResultBypassed, bypass: "fire", asked: []string{"bypass shop/Orders"}},
		"emptied is not removed, but pointed nowhere": {
			old: guarded(), new: notes(leaseKey, "", bypassKey, "fire"), verbs: bypass, lease: "-", result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, asked: bypass},
		"pointed elsewhere with nothing": {
			old: guarded(), new: moved(), leases: two, verbs: []string{"protect shop/billing"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonProtectionKept},
		"pointed elsewhere with the current token alone": {
			old: guarded(), new: moved(tokenKey, "101"), leases: two, verbs: []string{"protect shop/billing"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonProtectionKept, asked: orders},
		"pointed elsewhere with the other lease's token": {
			old: guarded(), new: moved(tokenKey, "50", bypassKey, "split"), by: protocol.Requester{User: "sa-b", PodUID: "pod-b"}, leases: two, verbs: repointed, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders},
		"pointed elsewhere without protect there": {
			old: guarded(), new: moved(bypassKey, "split"), leases: two, verbs: bypass, lease: "shop/billing", result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: repointed[:2]},
		"pointed elsewhere without bypass here": {
			old: guarded(), new: moved(bypassKey, "split"), leases: two, verbs: []string{"protect shop/billing", "bypass shop/billing"}, result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: bypass},
		"pointed elsewhere with both: declared anew, though the mark falls": {
			old: guarded(), new: moved(bypassKey, "split"), leases: two, verbs: repointed, lease: "shop/billing", result: protocol.ResultBypassed, mark: "50", bypass: "split", asked: repointed},
		"and with the current token too": {
			old: guarded(), new: moved(tokenKey, "101", bypassKey, "split"), leases: two, verbs: repointed, lease: "shop/billing", result: protocol.ResultBypassed, mark: "50", bypass: "split", asked: append(orders, repointed...)},
		"the verb cannot be asked": {old: guarded(), new: notes(bypassKey, "fire"), broken: true},
	})
}

func TestVerdictBypass(t *testing.T) {
	verb := []string{"bypass shop/orders"}
	asked := append([]string{"changes"}, verb...)
	judge(t, map[string]verdict{
		"annotation and verb: it passes, and the mark stays": {
			old: guarded(), new: guarded(bypassKey, "fire"), by: stranger, changes: something, verbs: verb, result: protocol.ResultBypassed, mark: "100", bypass: "fire", asked: asked},
		"a mark in the request stays out": {
			old: guarded(), new: guarded(bypassKey, "fire", markKey, "1"), by: stranger, changes: something, verbs: verb, result: protocol.ResultBypassed, mark: "100", bypass: "fire", asked: asked},
		"the annotation alone": {
			old: guarded(), new: guarded(bypassKey, "fire"), by: stranger, changes: something, result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: asked, says: []string{"verb bypass"}},
		"the verb alone never bypasses": {
			old: guarded(), new: guarded(), by: stranger, changes: something, verbs: verb, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: append([]string{"changes"}, orders...)},
		"a bypass has a reason": {
			old: guarded(), new: guarded(bypassKey, ""), by: stranger, changes: something, verbs: verb, lease: "-", result: protocol.ResultDenied, reason: v1alpha1.ReasonVerbMissing, asked: []string{"changes"}, says: []string{"empty"}},
		"it needs no lease": {
			old: guarded(), new: guarded(bypassKey, "fire"), by: stranger, changes: something, verbs: verb, leases: map[string]builder{}, result: protocol.ResultBypassed, mark: "100", bypass: "fire", asked: asked},
		"nor one that could be": {
			old: guarded(leaseKey, "Orders"), new: guarded(leaseKey, "Orders", bypassKey, "fire"), by: stranger, changes: something, verbs: []string{"bypass shop/Orders"}, lease: "shop/Orders", result: protocol.ResultBypassed, mark: "100", bypass: "fire", asked: []string{"changes", "bypass shop/Orders"}},
		"on /status": {
			old: guarded(), new: guarded(bypassKey, "fire"), by: stranger, subresource: "status", changes: something, verbs: verb, result: protocol.ResultBypassed, mark: "100", bypass: "fire", asked: asked},
		"the verb cannot be asked": {old: guarded(), new: guarded(bypassKey, "fire"), changes: something, broken: true},
	})
}

func TestVerdictWarns(t *testing.T) {
	notHeld := warning()
	notHeld["shop/orders"].Status.Holder, notHeld["shop/orders"].Status.Phase = nil, v1alpha1.PhaseAvailable
	cases := map[string]verdict{}
	for reason, tc := range map[v1alpha1.Reason]verdict{
		v1alpha1.ReasonTokenMissing: {new: guarded(), changes: something, asked: append([]string{"changes"}, orders...)},
		v1alpha1.ReasonTokenInvalid: {new: guarded(tokenKey, "x")},
		v1alpha1.ReasonTokenStale:   {new: guarded(tokenKey, "99")},
		v1alpha1.ReasonTokenUnknown: {new: guarded(tokenKey, "102")},
		v1alpha1.ReasonNotHolder:    {new: guarded(tokenKey, "101"), by: stranger},
		v1alpha1.ReasonNotHeld:      {new: guarded(tokenKey, "101"), leases: notHeld},
	} {
		tc.old, tc.result, tc.reason, tc.mark, tc.warnings = guarded(), protocol.ResultWarned, reason, "100", 1
		tc.says = []string{string(reason), "only warns"}
		if tc.leases == nil {
			tc.leases = warning()
		}
		if tc.asked == nil {
			tc.asked = orders
		}
		cases[fmt.Sprintf("%s passes with a warning, and the mark stays", reason)] = tc
	}
	cases["a current token raises the mark as ever"] = verdict{
		old: guarded(), new: guarded(tokenKey, "101"), leases: warning(), result: protocol.ResultAccepted, mark: "101", asked: orders}
	cases["a lease that is gone cannot only warn"] = verdict{
		old: guarded(), new: guarded(tokenKey, "101"), leases: map[string]builder{}, result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, asked: orders}
	judge(t, cases)
}

func TestVerdictStatus(t *testing.T) {
	judge(t, map[string]verdict{
		"the current token passes": {
			old: guarded(), new: guarded(tokenKey, "101"), subresource: "status", result: protocol.ResultAccepted, mark: "101", asked: orders},
		"a client that sends no other annotation is not unprotecting": {
			old: guarded(), new: notes(tokenKey, "101"), subresource: "status", result: protocol.ResultAccepted, mark: "101", asked: orders},
		"the old object's lease judges, whatever the request names": {
			old: guarded(), new: notes(leaseKey, "billing", tokenKey, "101"), subresource: "status", result: protocol.ResultAccepted, mark: "101", asked: orders},
		"below the mark is stale": {
			old: guarded(), new: guarded(tokenKey, "99"), subresource: "status", result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenStale, asked: orders},
		"no token, and the status changes": {
			old: guarded(), new: notes(), subresource: "status", changes: something, result: protocol.ResultDenied, reason: v1alpha1.ReasonTokenMissing, asked: append([]string{"changes"}, orders...)},
		"no token, and nothing changes": {
			old: guarded(), new: notes(), subresource: "status", result: protocol.ResultUnchanged, mark: "100", lease: "-", asked: []string{"changes"}},
	})
}

func TestVerdictNames(t *testing.T) {
	// As long as a name may be: 253 characters, labels of 63.
	long := strings.TrimSuffix(strings.Repeat(strings.Repeat("a", 62)+".", 4)+"b", ".")
	if len(long) != 253 {
		t.Fatalf("%d characters", len(long))
	}
	one := func(name string) map[string]builder { return map[string]builder{name: held("a", 7)} }
	cases := map[string]verdict{
		"a name of 253 characters with dots": {
			old: notes(leaseKey, long), new: notes(leaseKey, long, tokenKey, "101"), leases: one("shop/" + long), lease: "shop/" + long, result: protocol.ResultAccepted, mark: "101", asked: []string{"lease shop/" + long}},
		"the same for a cluster-scoped object": {
			namespace: "-", old: notes(leaseKey, "shop/"+long), new: notes(leaseKey, "shop/"+long, tokenKey, "101"), leases: one("shop/" + long), lease: "shop/" + long, result: protocol.ResultAccepted, mark: "101", asked: []string{"lease shop/" + long}},
		"a cluster-scoped object is declared under a lease of a namespace": {
			namespace: "-", old: notes(), new: notes(leaseKey, "shop/orders"), verbs: []string{"protect shop/orders"}, result: protocol.ResultDeclared, mark: "101", asked: []string{"protect shop/orders", "lease shop/orders"}},
	}
	for what, name := range map[string]string{
		"254 characters": long + "c", "an empty name": "", "capitals": "Orders", "a slash": "shop/orders", "a space": " orders", "dots in a row": "a..b", "a wildcard": "*", "a way up": "..",
	} {
		cases["namespaced, "+what] = verdict{old: notes(), new: notes(leaseKey, name), verbs: []string{"protect shop/" + name}, result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, lease: "-", says: []string{"same namespace"}}
	}
	for what, name := range map[string]string{
		"no namespace": "orders", "an empty namespace": "/orders", "an empty name": "shop/", "two slashes": "shop/orders/x", "a namespace with a dot": "sh.op/orders", "capitals": "Shop/orders", "nothing": "",
	} {
		cases["cluster-scoped, "+what] = verdict{namespace: "-", old: notes(), new: notes(leaseKey, name), verbs: []string{"protect " + name}, result: protocol.ResultDenied, reason: v1alpha1.ReasonLeaseNotFound, lease: "-", says: []string{"NAMESPACE/NAME"}}
	}
	judge(t, cases)
}

// TestVerdictNeverLowersAMark: over all combinations of stored mark, presented token, phase and requester, a
// write that passes leaves a mark that is not below the one before, and one with a token below it never passes.
func TestVerdictNeverLowersAMark(t *testing.T) {
	marks := []string{"", "99", "100", "101", "102", "x"}
	presented := []map[string]string{{}, {tokenKey: "99"}, {tokenKey: "100"}, {tokenKey: "101"}, {tokenKey: "102"}, {tokenKey: "x"}, {bypassKey: "fire"}, {bypassKey: "fire", tokenKey: "99"}}
	leases := []map[string]builder{with(held("a", 7)), with(available()), with(cooling()), with(fresh()), {}}
	for _, mark := range marks {
		for _, extra := range presented {
			for _, forged := range marks {
				for _, leaseMap := range leases {
					for _, by := range []protocol.Requester{holderA, stranger, gc} {
						for _, changes := range []protocol.Changes{{}, something, {Finalizers: true}} {
							object := guarded(markKey, mark)
							request := guarded(markKey, forged)
							maps.Copy(request.Annotations, extra)
							w := &world{leases: leaseMap, verbs: map[string]bool{"bypass shop/orders": true}}
							got, err := protocol.Verdict(protocol.Write{Namespace: "shop", Old: object, New: request, By: by,
								Changes: func() (protocol.Changes, error) { return changes, nil }}, w)
							if err != nil {
								t.Fatal(err)
							}
							before, _ := protocol.ParseToken(mark)
							after, _ := protocol.ParseToken(got.Mark)
							token, _ := protocol.ParseToken(extra[tokenKey])
							_, hasToken := extra[tokenKey]
							if got.Allowed() && (after < before || hasToken && (token < before || token != 101 || by != holderA)) {
								t.Fatalf("mark %q, request %v by %v: %+v", mark, extra, by, got)
							}
						}
					}
				}
			}
		}
	}
}
