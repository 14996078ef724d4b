// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// View is what the controller knows beside the lease itself: what CEL cannot see, a session's life and time.
// All durations are of the controller's own monotonic clock.
type View struct {
	// Now is the wall clock: it is written for people, and never computed with.
	Now time.Time

	// Sessions are the live sessions that want, queue for or hold the lease, by UID. One that is not here
	// is dead, so the controller asks the API server live before it leaves one out.
	Sessions map[types.UID]Session

	// Order is where each request that this controller has seen stands in line, earliest first: the
	// requests of Sessions, in the order in which the controller saw them.
	Order []Place

	// Served is the highest ticket of each session that was granted already, as far as this controller saw.
	Served map[types.UID]int64

	// Expired: the holder's session is gone because this controller expired it.
	Expired bool

	// Begun: this controller saw the term begin, and judges the holder's session for the first time.
	Begun bool

	// HeldFor and CooledFor are for how long this controller has seen the present term or cooldown.
	HeldFor, CooledFor time.Duration

	// QueuedFor is how long ago this controller last wrote the queue.
	QueuedFor time.Duration
}

// Place is a request in line.
type Place struct {
	// SessionUID and Ticket name the request.
	SessionUID types.UID
	Ticket     int64
}

// topUpEvery bounds how often the queue is written only to fill it up or to count the waiters anew: with
// 200 waiters, one such write serves many of them.
const topUpEvery = time.Second

// Settle returns what time and sessions bring about next: one transition, or none. Then wake says when to
// ask again although nothing was heard (0: not before something is heard). Repeated until it returns none
// it ends, and asking once more with the same view changes nothing.
func Settle(l *v1alpha1.FencedLease, v View) (t Transition, wake time.Duration, ok bool) {
	if l.Status == nil {
		return Initialise(v.Now), 0, true
	}
	s := l.Status
	line := inLine(l, v)
	queue := stillWanted(l, line)
	pruned := len(queue) < len(s.Queue)
	full := append(slices.Clone(queue), behind(queue, line)...)
	full = full[:min(len(full), v1alpha1.MaxQueue)]
	waiting := int32(min(len(line), 1_000_000))

	switch s.Phase {
	case v1alpha1.PhaseAvailable:
		if len(full) > 0 {
			return Grant(full[0], full[1:], waiting-1, v.Now), 0, true
		}
	case v1alpha1.PhaseHeld:
		reason, left := over(l, v)
		if reason != "" && !pruned {
			return End(s.Token, reason, v.Now), 0, true
		}
		wake = left
	case v1alpha1.PhaseCooldown:
		left := time.Duration(l.Spec.CooldownSeconds)*time.Second - v.CooledFor
		if left <= 0 && !pruned {
			return EndCooldown(v.Now), 0, true
		}
		wake = left
	}

	// A dead head blocks the line, and a short queue runs dry: both at once. The rest may wait a little, as
	// may a number of waiters who went away while the lease was available.
	short := len(full) > len(s.Queue) && len(s.Queue) <= v1alpha1.MaxQueue/2
	changed := len(full) != len(s.Queue) || waiting != s.Waiting
	switch {
	case pruned, short, changed && v.QueuedFor >= topUpEvery:
		return Queue(full, waiting), 0, true
	case changed:
		wake = soonest(wake, topUpEvery-v.QueuedFor)
	}
	if s.ObservedGeneration != l.Generation || readyIsStale(l) {
		return Observe(v.Now), 0, true
	}
	return Transition{}, wake, false
}

// over says why the present term is over, or how long it may last (0: for as long as it likes).
func over(l *v1alpha1.FencedLease, v View) (v1alpha1.EndReason, time.Duration) {
	holder := l.Status.Holder
	if holder == nil {
		return "", 0 // the schema forbids it; nothing that we could end
	}
	session, alive := v.Sessions[holder.SessionUID]
	switch {
	case !alive && v.Expired:
		return v1alpha1.EndExpired, 0
	case !alive && v.Begun:
		return v1alpha1.EndInvalid, 0 // it acquired with a session that nobody ever saw
	case !alive, session.Dying:
		return v1alpha1.EndSessionClosed, 0
	case !SameRequest(session.Request(holder.Ticket), holder.Contender),
		session.Session != holder.Session, session.Identity != holder.Identity,
		v.Begun && session.TooSlow(l):
		return v1alpha1.EndInvalid, 0
	case l.Spec.MaxHoldSeconds == nil:
		return "", 0
	}
	left := time.Duration(*l.Spec.MaxHoldSeconds)*time.Second - v.HeldFor
	if left <= 0 {
		return v1alpha1.EndMaxHold, 0
	}
	return "", left
}

// inLine are the requests that may be granted, in the order of the line: those of live sessions, fast
// enough, and not served before. Nobody is in line for a lease that is being deleted, or has no token left.
func inLine(l *v1alpha1.FencedLease, v View) []v1alpha1.Contender {
	if exhausted(l) || l.DeletionTimestamp != nil {
		return nil
	}
	var line []v1alpha1.Contender
	for _, p := range v.Order {
		session, alive := v.Sessions[p.SessionUID]
		if !alive || session.Dying || session.TooSlow(l) || session.Wants[l.Name] != p.Ticket {
			continue
		}
		if c := session.Request(p.Ticket); valid(c) == nil && !served(l, v, c) {
			line = append(line, c)
		}
	}
	return line
}

// served says that the request was granted before: it, or a later one of the same session. The controller
// remembers; after a failover holder and terms say so.
func served(l *v1alpha1.FencedLease, v View, c v1alpha1.Contender) bool {
	return v.Served[c.SessionUID] >= c.Ticket || servedNow(l.Status.Holder, c) ||
		slices.ContainsFunc(l.Status.Terms, func(t v1alpha1.Term) bool { return Served(t, c) })
}

// stillWanted is the queue without those who are no longer in line. Who stands in the queue keeps his place.
func stillWanted(l *v1alpha1.FencedLease, line []v1alpha1.Contender) []v1alpha1.Contender {
	var queue []v1alpha1.Contender
	for _, c := range l.Status.Queue {
		if slices.Contains(line, c) {
			queue = append(queue, c)
		}
	}
	return queue
}

// behind are those in line who do not stand in queue.
func behind(queue, line []v1alpha1.Contender) []v1alpha1.Contender {
	var rest []v1alpha1.Contender
	for _, c := range line {
		if !slices.Contains(queue, c) {
			rest = append(rest, c)
		}
	}
	return rest
}

func readyIsStale(l *v1alpha1.FencedLease) bool {
	want := ready(l, metav1.MicroTime{})
	return !slices.ContainsFunc(l.Status.Conditions, func(c metav1.Condition) bool {
		return c.Type == want.Type && c.Status == want.Status && c.Reason == want.Reason
	})
}

// soonest is the shorter of two waits, where 0 means for ever.
func soonest(a, b time.Duration) time.Duration {
	if a == 0 || (b != 0 && b < a) {
		return b
	}
	return a
}
