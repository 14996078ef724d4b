// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// walk is a lease in the hands of many: contenders who ask, take, give back and die, admins who steal, and a
// controller that is late, forgets everything now and then, and decides on old copies. What happened is kept
// apart from what the lease says, in tokens granted and terms ended, and compared.
type walk struct {
	t      *testing.T
	random *rand.Rand
	step   int
	name   string // of what happens in this step

	lease    *v1alpha1.FencedLease // as stored
	copies   []*v1alpha1.FencedLease
	sessions []*actor
	lives    int // of the lease: how often it was created
	brain    *brain

	granted map[protocol.Place]int  // how often each request was granted
	spare   map[protocol.Place]bool // requests that a late write queued again after they were granted
	ended   []v1alpha1.Term         // every term that ended
	counts  map[string]int
}

// actor is a session as it is; the controller may know an older one.
type actor struct {
	protocol.Session
	dead   bool
	ticket int64 // the last that was used
}

// brain is what one controller remembers; a failover begins with an empty one.
type brain struct {
	seen    map[types.UID]protocol.Session
	order   []protocol.Place
	served  map[types.UID]int64
	expired map[types.UID]bool
	token   int64
	phase   v1alpha1.Phase
	since   int // step at which this token and phase were seen first
	queued  int
	begun   bool
}

func newBrain() *brain {
	return &brain{seen: map[types.UID]protocol.Session{}, served: map[types.UID]int64{}, expired: map[types.UID]bool{}}
}

// TestRandomWalk lets it all happen at random, and looks after every step.
func TestRandomWalk(t *testing.T) {
	steps := 100_000
	if testing.Short() {
		steps = 20_000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	w := &walk{
		t: t, random: rand.New(rand.NewPCG(seed, 0)), brain: newBrain(),
		granted: map[protocol.Place]int{}, spare: map[protocol.Place]bool{}, counts: map[string]int{},
	}
	w.begin()
	for w.step = range steps {
		if w.step > 0 && w.step%(steps/8) == 0 {
			w.begin()
		}
		w.once()
		if t.Failed() {
			t.Fatalf("seed %d, step %d: %s: %s", seed, w.step, w.name, line(w.lease))
		}
	}
	w.settleDown()
	t.Logf("%v, %d requests granted, %d of them once more", w.counts, len(w.granted), w.twice())
	for _, must := range []string{"acquire", "release", "steal", "die", "close", "failover", "late write", "late write lost", "Grant", "Queue", "End", "EndCooldown"} {
		if w.counts[must] < 5 {
			t.Errorf("%s happened %d times only", must, w.counts[must])
		}
	}
}

// begin makes a new lease of the same name: its tokens go on above the old ones.
func (w *walk) begin() {
	w.lives++
	l := fresh().cooldown(int32(3 * (w.lives % 2)))
	if w.lives/2%2 == 0 {
		l.maxHold(40)
	}
	rv := int64(1000)
	if w.lease != nil {
		rv = w.lease.Status.Token + 1 + w.random.Int64N(1000)
	}
	l.ResourceVersion = fmt.Sprint(rv)
	started, err := protocol.Apply(l.FencedLease, protocol.Initialise(noon))
	if err != nil {
		w.t.Fatal(err)
	}
	w.lease, w.copies, w.ended = started, nil, nil
}

func (w *walk) once() {
	w.copies = append(w.copies, w.lease)
	if len(w.copies) > 6 {
		w.copies = w.copies[1:]
	}
	who := w.somebody()
	switch dice := w.random.IntN(100); {
	case dice < 20: // ask, or ask anew
		w.did("ask")
		who.ticket++
		who.Wants = map[string]int64{"orders": who.ticket}
	case dice < 23:
		w.did("give up")
		who.Wants = map[string]int64{}
	case dice < 33:
		w.did("acquire")
		who.ticket++
		w.write(w.copy(), protocol.Acquire(who.Request(who.ticket), noon))
	case dice < 48: // whoever holds gives back, and does not ask for what it got
		w.did("release")
		if h := w.lease.Status.Holder; h != nil {
			w.forget(h.Contender)
			w.write(w.copy(), protocol.Release(h.Contender, noon))
		}
	case dice < 50:
		w.did("steal")
		from := w.copy()
		w.write(from, protocol.End(from.Status.Token, v1alpha1.EndStolen, noon))
	case dice < 52:
		w.did("die")
		who.dead = true
		w.brain.expired[who.SessionUID] = true
	case dice < 54:
		w.did("close")
		who.dead = true
	case dice < 55:
		w.did("failover")
		w.brain = newBrain()
	default:
		w.control()
	}
}

func (w *walk) did(name string) { w.name = name; w.counts[name]++ }

// somebody is a live session; there are always seven.
func (w *walk) somebody() *actor {
	w.sessions = slices.DeleteFunc(w.sessions, func(a *actor) bool { return a.dead })
	for len(w.sessions) < 7 {
		s := session(fmt.Sprintf("s%d", w.random.Uint32()))
		w.sessions = append(w.sessions, &actor{Session: s})
	}
	return w.sessions[w.random.IntN(len(w.sessions))]
}

// copy is the lease as it is, or as it was some steps ago.
func (w *walk) copy() *v1alpha1.FencedLease {
	if w.random.IntN(3) > 0 {
		return w.lease
	}
	return w.copies[w.random.IntN(len(w.copies))]
}

// forget takes back the want that was granted.
func (w *walk) forget(c v1alpha1.Contender) {
	for _, a := range w.sessions {
		if a.SessionUID == c.SessionUID && a.Wants["orders"] <= c.Ticket {
			a.Wants = map[string]int64{}
		}
	}
}

// control is one step of the controller, on what it sees, which may be old.
func (w *walk) control() {
	b := w.brain
	w.look()
	l := w.copy()
	if l.Status.Token != b.token || l.Status.Phase != b.phase {
		b.begun = b.token != 0 && l.Status.Token > b.token
		b.token, b.phase, b.since = l.Status.Token, l.Status.Phase, w.step
	}
	if h := l.Status.Holder; h != nil {
		b.served[h.SessionUID] = max(b.served[h.SessionUID], h.Ticket)
	}
	v := protocol.View{
		Now: noon, Sessions: b.seen, Order: b.order, Served: b.served, Begun: b.begun,
		HeldFor: time.Duration(w.step-b.since) * time.Second, CooledFor: time.Duration(w.step-b.since) * time.Second,
		QueuedFor: time.Duration(w.step-b.queued) * 100 * time.Millisecond,
	}
	if h := l.Status.Holder; h != nil {
		v.Expired = b.expired[h.SessionUID]
	}
	move, _, ok := protocol.Settle(l, v)
	if !ok {
		w.name = "nothing to do"
		return
	}
	w.did(string(move.Kind()))
	if move.Kind() == protocol.KindGrant || move.Kind() == protocol.KindQueue {
		b.queued = w.step
	}
	w.write(l, move)
}

// look lets the controller see the sessions: of some of them only what it saw before. That a session is gone
// it believes late as well; that it is there it never doubts without asking.
func (w *walk) look() {
	b := w.brain
	for uid := range b.seen {
		gone := !slices.ContainsFunc(w.sessions, func(a *actor) bool { return a.SessionUID == uid && !a.dead })
		if gone && w.random.IntN(4) > 0 {
			delete(b.seen, uid)
		}
	}
	for _, a := range w.sessions {
		if _, known := b.seen[a.SessionUID]; a.dead || known && w.random.IntN(4) == 0 {
			continue
		}
		b.seen[a.SessionUID] = protocol.Session{Contender: a.Contender, TTL: a.TTL, Wants: a.Wants}
		place := protocol.Place{SessionUID: a.SessionUID, Ticket: a.Wants["orders"]}
		if place.Ticket > 0 && !slices.Contains(b.order, place) {
			b.order = append(b.order, place)
		}
	}
	b.order = slices.DeleteFunc(b.order, func(p protocol.Place) bool { return b.seen[p.SessionUID].Wants["orders"] != p.Ticket })
}

// write sends what was decided on from. Decided on the lease as it is, it must pass; decided on an old copy, it
// goes as the patch that it is, and passes or not.
func (w *walk) write(from *v1alpha1.FencedLease, move protocol.Transition) {
	if from == w.lease {
		next, err := protocol.Apply(from, move)
		if err == nil {
			w.stored(next, move, false)
		} else if w.name != "acquire" && w.name != "steal" {
			w.t.Errorf("%s on %s: %v", move, line(from), err)
		}
		return
	}
	patch, _, err := protocol.Patch(from, move)
	if err != nil {
		return
	}
	w.counts["late write"]++
	doc, err := apply(w.t, encode(w.t, w.lease), patch)
	if err != nil {
		w.counts["late write lost"]++
		return
	}
	next := decode(w.t, doc)
	if move.Kind() == protocol.KindQueue && shape(next.Status) != "" {
		w.counts["late write refused by the schema"]++
		return
	}
	w.stored(next, move, true)
}

// stored judges a lease that was written, and keeps the books.
func (w *walk) stored(next *v1alpha1.FencedLease, move protocol.Transition, late bool) {
	before, now := w.lease.Status, next.Status
	w.lease = next
	if wrong := shape(now); wrong != "" {
		w.t.Error(wrong)
	}
	isGrant := now.Token != before.Token
	switch {
	case now.Token < before.Token, isGrant && now.Token != before.Token+1:
		w.t.Errorf("token went from %d to %d", before.Token, now.Token)
	case isGrant != (now.Handovers != before.Handovers):
		w.t.Error("handovers do not count the grants")
	case !isGrant && now.Holder != nil && (before.Holder == nil || before.Holder.Contender != now.Holder.Contender):
		w.t.Error("a holder without a token of its own")
	case isGrant && before.Phase == v1alpha1.PhaseCooldown && move.Kind() != protocol.KindEndCooldown:
		w.t.Error("granted in the cooldown")
	case isGrant && len(before.Queue) > 0 && now.Holder.Contender != before.Queue[0]:
		w.t.Error("the head of the queue was passed over")
	case !late && !keepsOrder(before.Queue, now.Queue):
		w.t.Error("somebody lost the place in the queue")
	}
	if move.Kind() == protocol.KindGrant {
		if _, alive := w.brain.seen[now.Holder.SessionUID]; !alive {
			w.t.Error("the controller granted to a session that it knew to be dead")
		}
	}
	w.termEnded(before, now, move)
	if late && move.Kind() == protocol.KindQueue {
		for _, c := range now.Queue {
			if p := placeOf(c); w.granted[p] > 0 {
				w.spare[p] = true
			}
		}
	}
	if isGrant {
		w.isGranted(placeOf(now.Holder.Contender), before)
	}
}

func (w *walk) termEnded(before, now *v1alpha1.FencedLeaseStatus, move protocol.Transition) {
	if before.Holder != nil && now.Token == before.Token && now.Holder != nil || before.Holder == nil {
		if len(now.Terms) != min(len(w.ended), v1alpha1.MaxTerms) {
			w.t.Error("terms changed without an end")
		}
		return
	}
	w.ended = append(w.ended, term(before.Token, before.Holder.Contender, move.Reason()))
	for i, got := range now.Terms {
		want := w.ended[len(w.ended)-1-i]
		if got.Token != want.Token || got.SessionUID != want.SessionUID || got.Ticket != want.Ticket || got.EndReason != want.EndReason {
			w.t.Errorf("term %d is %+v, want %+v", i, got, want)
		}
	}
	cools := w.lease.Spec.CooldownSeconds > 0 && move.Reason() != v1alpha1.EndReleased
	if cools != (now.Phase == v1alpha1.PhaseCooldown) {
		w.t.Errorf("after %s the phase is %s", move.Reason(), now.Phase)
	}
}

// isGranted counts. Twice is wrong, unless nobody could know: a failover forgot what more than ten terms ago
// the lease forgot too, or a late write queued the request again. Then the spare term is given back.
func (w *walk) isGranted(p protocol.Place, before *v1alpha1.FencedLeaseStatus) {
	w.granted[p]++
	recorded := slices.ContainsFunc(before.Terms, func(t v1alpha1.Term) bool { return t.SessionUID == p.SessionUID && t.Ticket >= p.Ticket })
	if w.granted[p] > 1 && !w.spare[p] && (recorded || w.brain.served[p.SessionUID] >= p.Ticket) {
		w.t.Errorf("request %v was granted %d times", p, w.granted[p])
	}
}

func (w *walk) twice() int {
	n := 0
	for _, times := range w.granted {
		if times > 1 {
			n++
		}
	}
	return n
}

func placeOf(c v1alpha1.Contender) protocol.Place {
	return protocol.Place{SessionUID: c.SessionUID, Ticket: c.Ticket}
}

// settleDown stops all trouble: everybody who still asks gets the lease, one after the other.
func (w *walk) settleDown() {
	w.name = "settle down"
	waiting := map[types.UID]int64{}
	for _, a := range w.sessions {
		a.ticket++
		a.Wants = map[string]int64{"orders": a.ticket}
		waiting[a.SessionUID] = a.ticket
	}
	for range 500 {
		w.step += 100 // time passes
		w.copies = []*v1alpha1.FencedLease{w.lease}
		if h := w.lease.Status.Holder; h != nil { // an older request's term is given back as well
			if waiting[h.SessionUID] == h.Ticket {
				delete(waiting, h.SessionUID)
			}
			w.forget(h.Contender)
			w.write(w.lease, protocol.Release(h.Contender, noon))
		}
		if len(waiting) == 0 {
			return
		}
		w.control()
	}
	w.t.Errorf("%d sessions never got the lease: %s", len(waiting), line(w.lease))
}
