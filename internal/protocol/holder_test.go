// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

func TestGiveUpComesBeforeTheTTLAndAfterTwoRenewals(t *testing.T) {
	for _, ttl := range []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, 15 * time.Second, time.Hour} {
		left := GiveUp(0, ttl)
		if left >= ttl || ttl-left < 250*time.Millisecond {
			t.Errorf("TTL %s: gives up after %s", ttl, left)
		}
		if 2*RenewEvery(ttl) >= left {
			t.Errorf("TTL %s: no time for a second attempt before %s", ttl, left)
		}
	}
}

func TestNextTicket(t *testing.T) {
	for name, tc := range map[string]struct {
		version    string
		last, want int64
	}{
		"the resourceVersion":             {version: "77", last: 5, want: 77},
		"one more than the last":          {version: "77", last: 77, want: 78},
		"a version that is no number":     {version: "x", last: 3, want: 4},
		"a version that is no number (2)": {version: "", want: 1},
	} {
		t.Run(name, func(t *testing.T) {
			if got := NextTicket(tc.version, tc.last); got != tc.want {
				t.Errorf("got %d, want %d", got, tc.want)
			}
		})
	}
}

func TestFateOf(t *testing.T) {
	me := v1alpha1.Contender{Identity: "me", Session: "me", SessionUID: "me", User: "u", Ticket: 5}
	with := func(ticket int64) v1alpha1.Contender { c := me; c.Ticket = ticket; return c }
	other := v1alpha1.Contender{Identity: "o", Session: "o", SessionUID: "o", User: "u", Ticket: 9}
	lease := func(token int64, holder *v1alpha1.Contender, queue []v1alpha1.Contender, terms ...v1alpha1.Term) *v1alpha1.FencedLease {
		s := &v1alpha1.FencedLeaseStatus{Token: token, Phase: v1alpha1.PhaseAvailable, Queue: queue, Terms: terms}
		if holder != nil {
			s.Phase, s.Holder = v1alpha1.PhaseHeld, &v1alpha1.Holder{Contender: *holder}
		}
		return &v1alpha1.FencedLease{Status: s}
	}
	term := func(token int64, uid types.UID, ticket int64) v1alpha1.Term {
		return v1alpha1.Term{Token: token, SessionUID: uid, User: "u", Ticket: ticket, EndReason: v1alpha1.EndReleased}
	}
	var many []v1alpha1.Term
	for i := range int64(v1alpha1.MaxTerms) {
		many = append(many, term(99-i, "o", 1))
	}
	later, foreign := with(6), me
	foreign.User = "mallory"
	forged := term(9, "me", 5)
	forged.User = "mallory"
	for name, tc := range map[string]struct {
		lease *v1alpha1.FencedLease
		seen  int64
		want  Fate
	}{
		"not initialised":                         {lease: &v1alpha1.FencedLease{}, want: FateOpen},
		"somebody else holds":                     {lease: lease(10, &other, nil), want: FateOpen},
		"it holds":                                {lease: lease(10, &me, nil), want: FateGranted},
		"a later request of the session holds":    {lease: lease(10, &later, nil), want: FateOver},
		"a forger holds with its session":         {lease: lease(10, &foreign, nil), want: FateOpen},
		"a forger's term is recorded":             {lease: lease(10, nil, nil, forged), want: FateOpen},
		"its term is recorded":                    {lease: lease(10, &other, nil, term(9, "me", 5)), want: FateOver},
		"a later term of the session is recorded": {lease: lease(10, nil, nil, term(9, "me", 6)), want: FateOver},
		"an earlier term is recorded":             {lease: lease(10, nil, nil, term(9, "me", 4)), want: FateOpen},
		"more terms than are recorded, all heard": {lease: lease(100, &other, nil, many...), want: FateOpen},
		"more terms than are recorded, unheard":   {lease: lease(100, &other, nil, many...), seen: 50, want: FateOver},
		"as many as are recorded, unheard":        {lease: lease(100, &other, nil, many...), seen: 89, want: FateOpen},
		"more terms, but it stands in the queue":  {lease: lease(100, &other, []v1alpha1.Contender{me}, many...), seen: 50, want: FateOpen},
	} {
		t.Run(name, func(t *testing.T) {
			if got := FateOf(tc.lease, me, tc.seen); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
	if l := lease(10, &me, nil, term(9, "o", 1)); !Holds(l, me, 10) || Holds(l, me, 9) || Holds(l, later, 10) || Holds(&v1alpha1.FencedLease{}, me, 10) {
		t.Error("Holds")
	}
	l := lease(10, nil, nil, term(9, "o", 1))
	if reason, ok := EndOf(l, 9); !ok || reason != v1alpha1.EndReleased {
		t.Error("EndOf a recorded term")
	}
	if _, ok := EndOf(l, 8); ok {
		t.Error("EndOf a forgotten term")
	}
	if Settled(l, 10) || !Settled(l, 9) || !Settled(&v1alpha1.FencedLease{}, 9) {
		t.Error("Settled")
	}
}
