// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// space holds named mutations of a state against named invariants of what comes out of it: every subset of
// the mutations is applied, in their order, to the initial state, and every invariant must hold afterwards.
type space[S, R any] struct {
	initial    func() S
	mutations  []named[func(S)]
	run        func(S) R
	invariants []named[func(S, R) bool]
}

type named[F any] struct {
	name string
	f    F
}

func (s space[S, R]) evaluate(t *testing.T, explain func(R) string) {
	t.Helper()
	for subset := range 1 << len(s.mutations) {
		state := s.initial()
		for i, m := range s.mutations {
			if subset&(1<<i) != 0 {
				m.f(state)
			}
		}
		result := s.run(state)
		for _, invariant := range s.invariants {
			if !invariant.f(state, result) {
				t.Fatalf("not true: %s\nof: %s\n%s", invariant.name, s.names(subset), explain(result))
			}
		}
	}
}

func (s space[S, R]) names(subset int) string {
	var names []string
	for i, m := range s.mutations {
		if subset&(1<<i) != 0 {
			names = append(names, m.name)
		}
	}
	return strings.Join(names, ", ")
}

// scene is a lease and what the controller knows beside it.
type scene struct {
	lease builder
	view  protocol.View
}

// asks makes a session want the lease with a ticket, last in line.
func (s *scene) asks(name string, ticket int64) {
	uid := contender(name, 0).SessionUID
	who, known := s.view.Sessions[uid]
	if !known {
		who = session(name)
	}
	who.Wants = map[string]int64{"orders": ticket}
	s.view.Sessions[uid] = who
	s.view.Order = append(s.view.Order, protocol.Place{SessionUID: uid, Ticket: ticket})
}

// change changes the session of that name.
func (s *scene) change(name string, f func(*protocol.Session)) {
	uid := contender(name, 0).SessionUID
	if who, known := s.view.Sessions[uid]; known {
		f(&who)
		s.view.Sessions[uid] = who
	}
}

// course is what settling did: the leases, from the first to the settled one, and the transitions between.
type course struct {
	leases []*v1alpha1.FencedLease
	moves  []protocol.Transition
	wake   time.Duration
	again  bool // asked once more, Settle had something to do
	err    error
}

func (c course) settled() *v1alpha1.FencedLease { return c.leases[len(c.leases)-1] }

func (c course) String() string {
	text := "begin: " + line(c.leases[0])
	for i, m := range c.moves {
		text += fmt.Sprintf("\n%s: ", m)
		if i+1 < len(c.leases) {
			text += line(c.leases[i+1])
		}
	}
	return fmt.Sprintf("%s\nwake %s, error %v", text, c.wake, c.err)
}

// every says whether something holds for each move, with the lease before and after it.
func (c course) every(f func(before *v1alpha1.FencedLease, move protocol.Transition, after *v1alpha1.FencedLease) bool) bool {
	for i := range len(c.leases) - 1 {
		if !f(c.leases[i], c.moves[i], c.leases[i+1]) {
			return false
		}
	}
	return true
}

// settle does what the controller does: ask, write, look again, with a view that knows what was written.
func settle(s *scene) course {
	l, v := s.lease.DeepCopy(), s.view
	c := course{leases: []*v1alpha1.FencedLease{l}}
	for range 10 {
		move, wake, ok := protocol.Settle(l, v)
		if !ok {
			c.wake = wake
			_, _, c.again = protocol.Settle(l, v)
			return c
		}
		c.moves = append(c.moves, move)
		next, err := protocol.Apply(l, move)
		if err != nil {
			c.err = err
			return c
		}
		if l.Status != nil && next.Status.Token != l.Status.Token {
			v.HeldFor, v.Begun, v.Expired = 0, true, false
		}
		if next.Status.Phase == v1alpha1.PhaseCooldown && l.Status.Phase != v1alpha1.PhaseCooldown {
			v.CooledFor = 0
		}
		if move.Kind() == protocol.KindQueue || move.Kind() == protocol.KindGrant {
			v.QueuedFor = 0
		}
		l = next
		c.leases = append(c.leases, l)
	}
	c.err = fmt.Errorf("not settled after %d moves", len(c.moves))
	return c
}

// TestSettleStateSpace: every combination of what may have happened to a lease and its sessions while the
// controller looked away.
func TestSettleStateSpace(t *testing.T) {
	space[*scene, course]{
		initial: func() *scene {
			s := &scene{lease: available(), view: protocol.View{Now: noon, Sessions: map[types.UID]protocol.Session{}, Served: map[types.UID]int64{}}}
			s.lease.Spec.MaxHoldSeconds = new(int32(60))
			s.view.Sessions["uid-a"] = session("a")
			return s
		},
		mutations: []named[func(*scene)]{
			{"a holds", func(s *scene) {
				s.lease = held("a", 1).maxHold(60)
				s.view.Served["uid-a"] = 1
			}},
			{"or cooldown", func(s *scene) { s.lease = cooling().maxHold(60) }},
			{"a cooldown is asked for", func(s *scene) { s.lease.Spec.CooldownSeconds = 5 }},
			{"b and c wait in the queue", func(s *scene) {
				s.asks("b", 1)
				s.asks("c", 1)
				if s.lease.Status.Phase != v1alpha1.PhaseAvailable {
					s.lease.queue(contender("b", 1), contender("c", 1))
				}
			}},
			{"d asks", func(s *scene) { s.asks("d", 1) }},
			{"a asks again", func(s *scene) { s.asks("a", 2) }},
			{"e, who is too slow, asks", func(s *scene) {
				s.asks("e", 1)
				s.change("e", func(e *protocol.Session) { e.TTL = time.Minute })
			}},
			{"a crowd asks", func(s *scene) {
				for _, c := range crowd(9) {
					s.asks(c.Identity, c.Ticket)
				}
			}},
			{"a is gone", func(s *scene) { delete(s.view.Sessions, "uid-a") }},
			{"expired", func(s *scene) { s.view.Expired = true }},
			{"b is dying", func(s *scene) { s.change("b", func(b *protocol.Session) { b.Dying = true }) }},
			{"b gave up", func(s *scene) { s.change("b", func(b *protocol.Session) { b.Wants = nil }) }},
			{"c was served before", func(s *scene) { s.view.Served["uid-c"] = 1 }},
			{"time is up", func(s *scene) { s.view.HeldFor, s.view.CooledFor = time.Minute, 5*time.Second }},
			{"the queue was written long ago", func(s *scene) { s.view.QueuedFor = time.Hour }},
			{"tokens are exhausted", func(s *scene) { s.lease.token(v1alpha1.MaxToken) }},
			{"the spec changed", func(s *scene) { s.lease.Generation++ }},
		},
		run: settle,
		invariants: append([]named[func(*scene, course) bool]{
			{"settling ends, and every move is legal", func(_ *scene, c course) bool { return c.err == nil }},
			{"a settled lease has nothing left to do", func(_ *scene, c course) bool { return !c.again }},
		}, append(lawsOfMoves(), lawsOfRest()...)...),
	}.evaluate(t, course.String)
}

// lawsOfMoves are true of every move of the controller.
func lawsOfMoves() []named[func(*scene, course) bool] {
	granted := func(b, a *v1alpha1.FencedLease) bool { return a.Status.Token != b.Status.Token }
	each := func(f func(s *scene, before *v1alpha1.FencedLease, move protocol.Transition, after *v1alpha1.FencedLease) bool) func(*scene, course) bool {
		return func(s *scene, c course) bool {
			return c.every(func(b *v1alpha1.FencedLease, m protocol.Transition, a *v1alpha1.FencedLease) bool {
				return f(s, b, m, a)
			})
		}
	}
	return []named[func(*scene, course) bool]{
		{"status is as the schema wants it", each(func(_ *scene, _ *v1alpha1.FencedLease, _ protocol.Transition, a *v1alpha1.FencedLease) bool {
			return shape(a.Status) == ""
		})},
		{"tokens never fall and never repeat", each(func(_ *scene, b *v1alpha1.FencedLease, _ protocol.Transition, a *v1alpha1.FencedLease) bool {
			return a.Status.Token >= b.Status.Token && (granted(b, a) == (a.Status.Handovers == b.Status.Handovers+1))
		})},
		{"a dead, dying, slow or served session is never granted", each(func(s *scene, b *v1alpha1.FencedLease, _ protocol.Transition, a *v1alpha1.FencedLease) bool {
			return !granted(b, a) || s.mayHave(a.Status.Holder.Contender)
		})},
		{"nobody is granted twice for one ticket", each(func(_ *scene, b *v1alpha1.FencedLease, _ protocol.Transition, a *v1alpha1.FencedLease) bool {
			return !granted(b, a) || !slices.ContainsFunc(a.Status.Terms, func(t v1alpha1.Term) bool {
				return t.SessionUID == a.Status.Holder.SessionUID && t.Ticket == a.Status.Holder.Ticket
			})
		})},
		{"who queues keeps his place", each(func(_ *scene, b *v1alpha1.FencedLease, _ protocol.Transition, a *v1alpha1.FencedLease) bool {
			return keepsOrder(b.Status.Queue, a.Status.Queue)
		})},
		{"the head of the queue is granted, nobody else", each(func(_ *scene, b *v1alpha1.FencedLease, _ protocol.Transition, a *v1alpha1.FencedLease) bool {
			return !granted(b, a) || len(b.Status.Queue) == 0 || a.Status.Holder.Contender == b.Status.Queue[0]
		})},
		{"a cooldown is respected", each(func(s *scene, b *v1alpha1.FencedLease, m protocol.Transition, a *v1alpha1.FencedLease) bool {
			ended := b.Status.Holder != nil && (a.Status.Holder == nil || granted(b, a))
			if ended && s.lease.Spec.CooldownSeconds > 0 {
				return a.Status.Phase == v1alpha1.PhaseCooldown
			}
			return b.Status.Phase != v1alpha1.PhaseCooldown || a.Status.Phase == v1alpha1.PhaseCooldown || m.Kind() == protocol.KindEndCooldown
		})},
	}
}

// mayHave says whether the request may be granted, judged by the scene alone.
func (s *scene) mayHave(c v1alpha1.Contender) bool {
	who, alive := s.view.Sessions[c.SessionUID]
	return alive && !who.Dying && who.TTL <= 15*time.Second && who.Wants["orders"] == c.Ticket && s.view.Served[c.SessionUID] < c.Ticket
}

// waiters are the requests that may be granted and were not, judged by the scene alone.
func (s *scene) waiters(c course) []v1alpha1.Contender {
	var all []v1alpha1.Contender
	for _, p := range s.view.Order {
		who := s.view.Sessions[p.SessionUID]
		request := who.Contender
		request.Ticket = p.Ticket
		gone := !c.every(func(_ *v1alpha1.FencedLease, _ protocol.Transition, a *v1alpha1.FencedLease) bool {
			return a.Status.Holder == nil || a.Status.Holder.Contender != request
		})
		if s.mayHave(request) && !gone {
			all = append(all, request)
		}
	}
	return all
}

// lawsOfRest are true of every settled lease.
func lawsOfRest() []named[func(*scene, course) bool] {
	return []named[func(*scene, course) bool]{
		{"an available lease has nobody waiting for it", func(s *scene, c course) bool {
			return c.settled().Status.Phase != v1alpha1.PhaseAvailable || s.lease.Status.Token >= v1alpha1.MaxToken || len(s.waiters(c)) == 0
		}},
		{"a holder's session is alive, and was not held for too long", func(s *scene, c course) bool {
			h := c.settled().Status.Holder
			_, alive := s.view.Sessions[uidOf(h)]
			return h == nil || alive && (len(c.moves) > 0 || s.view.HeldFor < time.Minute)
		}},
		{"the queue holds only those who may be granted", func(s *scene, c course) bool {
			return !slices.ContainsFunc(c.settled().Status.Queue, func(q v1alpha1.Contender) bool { return !s.mayHave(q) })
		}},
		{"the queue is the beginning of the line, or will be soon", func(s *scene, c course) bool {
			st := c.settled().Status
			line := s.waiters(c)
			full := len(st.Queue) == min(len(line), v1alpha1.MaxQueue) && int(st.Waiting) == len(line)
			soon := c.wake > 0 && c.wake <= time.Second
			return s.lease.Status.Token >= v1alpha1.MaxToken || full || soon
		}},
		{"a queue never runs dry while many wait", func(s *scene, c course) bool {
			st := c.settled().Status
			return st.Phase == v1alpha1.PhaseAvailable || st.Token >= v1alpha1.MaxToken || len(st.Queue) >= min(len(s.waiters(c)), v1alpha1.MaxQueue/2+1)
		}},
		{"exhausted tokens drain the queue", func(_ *scene, c course) bool {
			st := c.settled().Status
			return st.Token < v1alpha1.MaxToken || len(st.Queue) == 0
		}},
		{"what ends by time is asked for again in time", func(_ *scene, c course) bool {
			return c.settled().Status.Phase == v1alpha1.PhaseAvailable || c.wake > 0 && c.wake <= time.Minute
		}},
		{"the spec was seen, and the condition says whether there are tokens", func(s *scene, c course) bool {
			st := c.settled().Status
			return st.ObservedGeneration == s.lease.Generation &&
				(st.Conditions[0].Status == "True") == (st.Token < v1alpha1.MaxToken)
		}},
	}
}

func uidOf(h *v1alpha1.Holder) types.UID {
	if h == nil {
		return ""
	}
	return h.SessionUID
}

// shape says what the CRD's rules on a single state would find wrong, in words of this test.
func shape(s *v1alpha1.FencedLeaseStatus) string {
	twice := map[string]bool{}
	all := s.Queue
	if s.Holder != nil {
		all = append(slices.Clone(all), s.Holder.Contender)
	}
	for _, c := range all {
		key := fmt.Sprintf("%s/%d", c.SessionUID, c.Ticket)
		if twice[key] {
			return key + " both holds and queues, or queues twice"
		}
		twice[key] = true
	}
	switch {
	case (s.Phase == v1alpha1.PhaseHeld) != (s.Holder != nil):
		return "holder without Held"
	case (s.Phase == v1alpha1.PhaseCooldown) != (s.CooldownUntil != nil):
		return "cooldownUntil without Cooldown"
	case s.Phase == v1alpha1.PhaseAvailable && len(s.Queue) > 0:
		return "available with a queue"
	case int(s.Waiting) < len(s.Queue):
		return "waiting is below the queue"
	case len(s.Queue) > v1alpha1.MaxQueue || len(s.Terms) > v1alpha1.MaxTerms:
		return "queue or terms are too long"
	case s.Queue == nil || s.Terms == nil:
		return "queue or terms are absent"
	case s.Token < 1 || s.Token > v1alpha1.MaxToken:
		return "token is out of bounds"
	}
	return ""
}

// keepsOrder says that those of before who are still there stand in the same order, and before all others.
func keepsOrder(before, after []v1alpha1.Contender) bool {
	var stayed []v1alpha1.Contender
	for _, c := range before {
		if slices.Contains(after, c) {
			stayed = append(stayed, c)
		}
	}
	return slices.Equal(stayed, after[:len(stayed)])
}
