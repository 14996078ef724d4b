// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"bytes"
	"context"
	"encoding/json"
	"reflect"
	"regexp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// requester is who writes, and the verbs that he has.
type requester struct {
	protocol.Requester
	// manages in all namespaces, as a ClusterRoleBinding grants it.
	manages bool
	// rules everything in the namespace of the lease, as a Role with verbs "*" grants it: steal, and no more that counts.
	rules bool
	// steals this lease.
	steals bool
}

func (r requester) info() user.Info {
	info := &user.DefaultInfo{Name: r.User}
	if r.PodUID != "" {
		info.Extra = map[string][]string{v1alpha1.PodUIDExtra: {string(r.PodUID)}}
	}
	return info
}

// Authorize answers the policy's checks. It implements authorizer.UnconditionalAuthorizer.
func (r requester) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	lease := a.GetAPIGroup() == "fencedlease.dev" && a.GetResource() == "fencedleases" && a.GetSubresource() == ""
	ours := a.GetNamespace() == theNamespace
	switch {
	case lease && r.manages && a.GetVerb() == v1alpha1.VerbManage && a.GetNamespace() == "" && a.GetName() == "",
		lease && r.steals && a.GetVerb() == v1alpha1.VerbSteal && ours && a.GetName() == theName,
		lease && r.rules && ours:
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// legal is the oracle: the write is legal if some transition of the protocol, by that requester, takes old to
// exactly next. Times may be any, since they are for people, but only those of what is new.
//
// What the API server leaves to the controller (verb manage): to take any transition, for any reason, and to report
// (conditions, observedGeneration) along with it, or alone.
func legal(old, next map[string]any, by requester) bool {
	o, okOld := decode(old)
	n, okNext := decode(next)
	if !okOld || !okNext || n.Status == nil {
		return false // nothing that our types cannot say
	}
	for _, t := range candidates(o, n) {
		want, err := protocol.Apply(o, t)
		if err != nil || !may(by, t, o, n) {
			continue
		}
		adoptTimes(o, want, n)
		if by.manages {
			want.Status.Conditions, want.Status.ObservedGeneration = n.Status.Conditions, n.Status.ObservedGeneration
		}
		if equality.Semantic.DeepEqual(want.Status, n.Status) {
			return true
		}
	}
	return false
}

// candidates are the only transitions that could take old to next.
func candidates(old, next *v1alpha1.FencedLease) []protocol.Transition {
	at := time.Unix(0, 0)
	if old.Status == nil {
		return []protocol.Transition{protocol.Initialise(at)}
	}
	all := []protocol.Transition{protocol.Observe(at), protocol.EndCooldown(at), protocol.Queue(next.Status.Queue, next.Status.Waiting)}
	if h := next.Status.Holder; h != nil {
		all = append(all, protocol.Acquire(h.Contender, at), protocol.Grant(h.Contender, next.Status.Queue, next.Status.Waiting, at))
	}
	if h := old.Status.Holder; h != nil {
		all = append(all, protocol.Release(h.Contender, at))
		for _, reason := range endReasons {
			all = append(all, protocol.End(old.Status.Token, reason, at))
		}
	}
	return all
}

// may says whose transitions are whose.
func may(by requester, t protocol.Transition, old, next *v1alpha1.FencedLease) bool {
	switch {
	case by.manages:
		return true
	case t.Kind() == protocol.KindAcquire:
		return by.Is(next.Status.Holder.Contender)
	case t.Kind() == protocol.KindRelease:
		return by.Is(old.Status.Holder.Contender)
	case t.Kind() == protocol.KindEnd && t.Reason() == v1alpha1.EndStolen:
		return by.steals || by.rules
	}
	return false
}

// adoptTimes takes from next the times that want has made up: those of a new holder, a new term, a new cooldown.
func adoptTimes(old, want, next *v1alpha1.FencedLease) {
	w, n := want.Status, next.Status
	if w.Holder != nil && n.Holder != nil && (old.Status == nil || w.Token != old.Status.Token) {
		w.Holder.AcquireTime = n.Holder.AcquireTime
	}
	if old.Status == nil {
		return
	}
	if old.Status.Holder != nil && len(w.Terms) > 0 && len(n.Terms) > 0 && w.Terms[0].Token == old.Status.Token {
		w.Terms[0].EndTime = n.Terms[0].EndTime
	}
	if old.Status.CooldownUntil == nil && w.CooldownUntil != nil && n.CooldownUntil != nil {
		w.CooldownUntil = n.CooldownUntil
	}
}

// decode reads a lease. It must be what our types would write: nothing more, nothing less.
func decode(object map[string]any) (*v1alpha1.FencedLease, bool) {
	data, err := json.Marshal(object)
	if err != nil {
		return nil, false
	}
	var lease v1alpha1.FencedLease
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&lease); err != nil {
		return nil, false
	}
	return &lease, reflect.DeepEqual(canonical(object)["status"], canonical(encode(&lease))["status"]) && reportable(lease.Status)
}

// canonical leaves out of a status what says nothing: our types do not write it.
func canonical(object map[string]any) map[string]any {
	c := runtime.DeepCopyJSON(object)
	status, ok := c["status"].(map[string]any)
	if !ok {
		return c
	}
	conditions, _ := status["conditions"].([]any)
	for _, o := range append(slices.Clone(conditions), status) {
		if o := o.(map[string]any); o["observedGeneration"] == int64(0) {
			delete(o, "observedGeneration")
		}
	}
	if len(conditions) == 0 {
		delete(status, "conditions")
	}
	return c
}

// reportable says whether the conditions are such as the schema of metav1.Condition takes.
func reportable(s *v1alpha1.FencedLeaseStatus) bool {
	if s == nil {
		return true
	}
	word := regexp.MustCompile(`^[A-Za-z]+$`)
	types := map[string]bool{}
	for _, c := range s.Conditions {
		known := c.Status == metav1.ConditionTrue || c.Status == metav1.ConditionFalse || c.Status == metav1.ConditionUnknown
		if !known || !word.MatchString(c.Type) || !word.MatchString(c.Reason) || c.ObservedGeneration < 0 || types[c.Type] {
			return false
		}
		types[c.Type] = true
	}
	return s.ObservedGeneration >= 0
}
