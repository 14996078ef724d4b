// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"encoding/json"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

const (
	theNamespace = "shop"
	theName      = "orders"
)

var endReasons = []v1alpha1.EndReason{
	v1alpha1.EndReleased, v1alpha1.EndExpired, v1alpha1.EndSessionClosed, v1alpha1.EndMaxHold, v1alpha1.EndStolen, v1alpha1.EndInvalid,
}

// epoch is when the old states came about; their successors come a minute later.
var epoch = time.Date(2026, 1, 2, 3, 4, 5, 678901000, time.UTC)

// contender is the i-th contender: each third one lives outside Pods, and two of three share a user.
func contender(i int) v1alpha1.Contender {
	c := v1alpha1.Contender{
		Identity:   fmt.Sprintf("worker-%d", i),
		Session:    fmt.Sprintf("worker-%d-x2x4v", i),
		SessionUID: types.UID(fmt.Sprintf("5e551071-0000-0000-0000-%012d", i)),
		User:       fmt.Sprintf("system:serviceaccount:shop:app-%d", i%2),
		PodUID:     types.UID(fmt.Sprintf("90d00000-0000-0000-0000-%012d", i)),
		Ticket:     int64(7 + i),
	}
	if i%3 == 2 {
		c.PodUID = ""
	}
	return c
}

func contenders(from, n int) []v1alpha1.Contender {
	line := []v1alpha1.Contender{}
	for i := range n {
		line = append(line, contender(from+i))
	}
	return line
}

// spec is one choice of what the spec says to the rules.
type spec struct {
	cooldown int32
	minToken int64
}

var specs = []spec{{0, 0}, {30, 0}, {0, 5000}, {30, v1alpha1.MaxToken / 2}}

// newLease is a lease that nobody has initialised.
func newLease(s spec) *v1alpha1.FencedLease {
	return &v1alpha1.FencedLease{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "FencedLease"},
		ObjectMeta: metav1.ObjectMeta{Namespace: theNamespace, Name: theName, UID: "1ea5e", ResourceVersion: "100", Generation: 2,
			CreationTimestamp: metav1.NewTime(epoch.Truncate(time.Second))},
		Spec: v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 15, CooldownSeconds: s.cooldown, MinToken: s.minToken,
			Enforcement: v1alpha1.EnforcementDeny, TokenBinding: v1alpha1.TokenBindingHolder},
	}
}

// states are the leases of one spec that the walk starts from: uninitialised, and every phase with queues of 0, 1, 2
// and 8, history of 0, 1 and 10 terms, waiters behind the queue or none, and tokens at the start and at the end.
func states(s spec) []*v1alpha1.FencedLease {
	all := []*v1alpha1.FencedLease{newLease(s)}
	for _, phase := range []v1alpha1.Phase{v1alpha1.PhaseAvailable, v1alpha1.PhaseHeld, v1alpha1.PhaseCooldown} {
		for _, queue := range []int{0, 1, 2, v1alpha1.MaxQueue} {
			for _, terms := range []int{0, 1, v1alpha1.MaxTerms} {
				for _, behind := range []int32{0, 3} {
					for _, token := range []int64{1000, 4999, v1alpha1.MaxToken - 1, v1alpha1.MaxToken} {
						// Cooldown alone needs a spec that asks for it; the ends of the scale need no long history.
						if phase == v1alpha1.PhaseAvailable && queue > 0 || token != 1000 && (terms == v1alpha1.MaxTerms || behind > 0 || queue > 1) {
							continue
						}
						all = append(all, state(s, phase, queue, terms, behind, token))
					}
				}
			}
		}
	}
	return all
}

func state(s spec, phase v1alpha1.Phase, queue, terms int, behind int32, token int64) *v1alpha1.FencedLease {
	l := newLease(s)
	l.Status = &v1alpha1.FencedLeaseStatus{
		ObservedGeneration: 2,
		Phase:              phase,
		Token:              token,
		Queue:              contenders(1, queue),
		Waiting:            int32(queue) + behind,
		Handovers:          int64(terms) + 20,
		Terms:              []v1alpha1.Term{},
		Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Initialised", ObservedGeneration: 2,
			LastTransitionTime: metav1.NewTime(epoch.Truncate(time.Second))}},
	}
	for i := range terms {
		l.Status.Terms = append(l.Status.Terms, v1alpha1.Term{
			Token: token - int64(i) - 1, Identity: contender(30 + i).Identity, SessionUID: contender(30 + i).SessionUID, User: contender(30 + i).User,
			PodUID: contender(30 + i).PodUID, Ticket: int64(i) + 1,
			StartTime: metav1.NewMicroTime(epoch.Add(-time.Hour)), EndTime: metav1.NewMicroTime(epoch.Add(-time.Minute)),
			EndReason: endReasons[i%len(endReasons)],
		})
	}
	switch phase {
	case v1alpha1.PhaseHeld:
		l.Status.Holder = &v1alpha1.Holder{Contender: contender(0), AcquireTime: metav1.NewMicroTime(epoch)}
	case v1alpha1.PhaseCooldown:
		until := metav1.NewMicroTime(epoch.Add(30 * time.Second))
		l.Status.CooldownUntil = &until
	}
	return l
}

// steps are transitions of every kind that somebody might ask of a lease; Apply refuses those that do not fit.
func steps(l *v1alpha1.FencedLease) []protocol.Transition {
	at := epoch.Add(time.Minute)
	if l.Status == nil {
		return []protocol.Transition{protocol.Initialise(at)}
	}
	stranger, outside := contender(20), contender(23)
	all := []protocol.Transition{
		protocol.Acquire(stranger, at), protocol.Acquire(outside, at),
		protocol.Grant(stranger, contenders(1, 3), 3, at), protocol.Grant(stranger, nil, 0, at), protocol.Grant(outside, contenders(1, 8), 50, at),
		protocol.EndCooldown(at), protocol.Observe(at),
		protocol.Queue(nil, 0), protocol.Queue(contenders(1, 1), 1), protocol.Queue(contenders(2, 5), 9), protocol.Queue(contenders(1, 8), 8),
	}
	if l.Status.Holder != nil {
		all = append(all, protocol.Release(l.Status.Holder.Contender, at))
		for _, reason := range endReasons {
			all = append(all, protocol.End(l.Status.Token, reason, at))
		}
	}
	return all
}

// encode is a lease as the API server decodes it: integers are int64.
func encode(l *v1alpha1.FencedLease) map[string]any {
	data, err := json.Marshal(l)
	if err != nil {
		panic(err) // our own types always encode
	}
	var object map[string]any
	if err := utiljson.Unmarshal(data, &object); err != nil {
		panic(err)
	}
	return object
}
