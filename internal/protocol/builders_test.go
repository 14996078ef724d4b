// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// noon is when everything in these tests happens, unless a test says otherwise.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.UTC)

// at is noon as the API server stores it.
var at = metav1.NewMicroTime(time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC))

// contender is a request: "a" with ticket 7 is of the session a-1, UID uid-a, user sa-a.
func contender(name string, ticket int64) v1alpha1.Contender {
	return v1alpha1.Contender{
		Identity:   name,
		Session:    name + "-1",
		SessionUID: types.UID("uid-" + name),
		User:       "sa-" + name,
		PodUID:     types.UID("pod-" + name),
		Ticket:     ticket,
	}
}

// session is the live session of contender name; it wants nothing.
func session(name string) protocol.Session {
	return protocol.Session{Contender: contender(name, 0), TTL: 15 * time.Second, Wants: map[string]int64{}}
}

// builder makes leases: lease().held("a", 7).queue(...).
type builder struct{ *v1alpha1.FencedLease }

// fresh is the lease shop/orders as a user creates it, at resourceVersion 100.
func fresh() builder {
	return builder{&v1alpha1.FencedLease{
		TypeMeta:   metav1.TypeMeta{APIVersion: "fencedlease.dev/v1alpha1", Kind: "FencedLease"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "orders", ResourceVersion: "100", Generation: 1},
		Spec:       v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: 15},
	}}
}

// available is the lease with its first status: token 100, nobody holds it, nobody waits.
func available() builder {
	b := fresh()
	b.Status = &v1alpha1.FencedLeaseStatus{
		ObservedGeneration: 1,
		Phase:              v1alpha1.PhaseAvailable,
		Token:              100,
		Queue:              []v1alpha1.Contender{},
		Terms:              []v1alpha1.Term{},
		Conditions: []metav1.Condition{{
			Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: v1alpha1.ConditionReasonInitialised,
			Message: "The lease can be acquired.", ObservedGeneration: 1, LastTransitionTime: metav1.NewTime(noon.Truncate(time.Second)),
		}},
	}
	return b
}

// held is the lease in its first term: token 101.
func held(name string, ticket int64) builder {
	b := available()
	b.Status.Phase, b.Status.Token, b.Status.Handovers = v1alpha1.PhaseHeld, 101, 1
	b.Status.Holder = &v1alpha1.Holder{Contender: contender(name, ticket), AcquireTime: at}
	return b
}

// cooling is the lease after its first term, token 101, which expired.
func cooling() builder {
	b := available().cooldown(5)
	until := metav1.NewMicroTime(at.Add(5 * time.Second))
	b.Status.Phase, b.Status.Token, b.Status.Handovers, b.Status.CooldownUntil = v1alpha1.PhaseCooldown, 101, 1, &until
	b.Status.Terms = []v1alpha1.Term{term(101, contender("x", 1), v1alpha1.EndExpired)}
	return b
}

func (b builder) queue(queue ...v1alpha1.Contender) builder {
	b.Status.Queue, b.Status.Waiting = queue, int32(len(queue))
	return b
}
func (b builder) waiting(n int32) builder      { b.Status.Waiting = n; return b }
func (b builder) token(n int64) builder        { b.Status.Token = n; return b }
func (b builder) minToken(n int64) builder     { b.Spec.MinToken = n; return b }
func (b builder) cooldown(s int32) builder     { b.Spec.CooldownSeconds = s; return b }
func (b builder) maxHold(s int32) builder      { b.Spec.MaxHoldSeconds = &s; return b }
func (b builder) dying() builder               { now := metav1.NewTime(noon); b.DeletionTimestamp = &now; return b }
func (b builder) with(f func(builder)) builder { f(b); return b }

// history gives the lease n ended terms, of w, with the tokens before the present one.
func (b builder) history(n int) builder {
	b.Status.Terms = nil
	for i := range n {
		b.Status.Terms = append(b.Status.Terms, term(b.Status.Token-1-int64(i), contender("w", int64(n-i)), v1alpha1.EndReleased))
	}
	return b
}

func term(token int64, c v1alpha1.Contender, reason v1alpha1.EndReason) v1alpha1.Term {
	return v1alpha1.Term{
		Token: token, Identity: c.Identity, SessionUID: c.SessionUID, User: c.User, PodUID: c.PodUID, Ticket: c.Ticket,
		StartTime: at, EndTime: at, EndReason: reason,
	}
}

// line is a lease in one line of text, as the transcripts print it.
func line(l *v1alpha1.FencedLease) string {
	s := l.Status
	if s == nil {
		return "no status"
	}
	text := fmt.Sprintf("%s, token %d", s.Phase, s.Token)
	if s.Holder != nil {
		text += fmt.Sprintf(", holder %s/%d", s.Holder.Identity, s.Holder.Ticket)
	}
	if len(s.Queue) > 0 {
		text += ", queue"
		for _, c := range s.Queue {
			text += fmt.Sprintf(" %s/%d", c.Identity, c.Ticket)
		}
	}
	if int(s.Waiting) != len(s.Queue) {
		text += fmt.Sprintf(", %d waiting", s.Waiting)
	}
	return text
}

// encode is the JSON of a lease.
func encode(tb testing.TB, l *v1alpha1.FencedLease) []byte {
	tb.Helper()
	doc, err := json.Marshal(l)
	if err != nil {
		tb.Fatalf("encode lease: %v", err)
	}
	return doc
}

// canonical is the same JSON with its keys in order and every digit kept.
func canonical(tb testing.TB, doc []byte) string {
	tb.Helper()
	decoder := json.NewDecoder(bytes.NewReader(doc))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		tb.Fatalf("decode %s: %v", doc, err)
	}
	out, err := json.Marshal(value)
	if err != nil {
		tb.Fatalf("encode %v: %v", value, err)
	}
	return string(out)
}

// decode is the lease in some JSON.
func decode(tb testing.TB, doc []byte) *v1alpha1.FencedLease {
	tb.Helper()
	var l v1alpha1.FencedLease
	if err := json.Unmarshal(doc, &l); err != nil {
		tb.Fatalf("decode %s: %v", doc, err)
	}
	return &l
}
