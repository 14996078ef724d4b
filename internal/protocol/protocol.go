// SPDX-License-Identifier: Apache-2.0

// Package protocol decides what may happen to a FencedLease, and whether a write to a protected object
// may pass. It is pure: no clock, no client, no log; a value goes in, a value comes out, and the argument
// is never changed. Client, controller, guard and plugin ask it; nobody else decides.
//
// The CRD's rules and the policies under config/policy say the same a second time, inside the API server.
// A differential test walks the state space and asks both. The promises are written down in
// docs/protocol.md; each names its test.
package protocol

import (
	"errors"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// What Apply says of a transition that may not happen to the lease as it stands. Each comes wrapped with
// what was found; match with errors.Is.
var (
	// ErrNotReady: the controller has not initialised the lease yet, or it was initialised already.
	ErrNotReady = errors.New("lease is not ready")
	// ErrNotAvailable: somebody holds the lease, or it cools down.
	ErrNotAvailable = errors.New("lease is not available")
	// ErrNotHolder: the term is not, or no longer, the one that the transition would end.
	ErrNotHolder = errors.New("not the holder")
	// ErrExhausted: no token is left below 2^53.
	ErrExhausted = errors.New("tokens are exhausted")
	// ErrIllegal: the transition is malformed; no state of the lease would take it.
	ErrIllegal = errors.New("illegal transition")
)

// Kind is what a transition does.
type Kind string

// The transitions. docs/protocol.md has the table of who may do which, and when.
const (
	KindInitialise  Kind = "Initialise"
	KindAcquire     Kind = "Acquire"
	KindGrant       Kind = "Grant"
	KindRelease     Kind = "Release"
	KindEnd         Kind = "End"
	KindQueue       Kind = "Queue"
	KindEndCooldown Kind = "EndCooldown"
	KindObserve     Kind = "Observe"
)

// Transition is one step of a lease. Make it with the functions below; the zero value is illegal.
type Transition struct {
	kind    Kind
	by      v1alpha1.Contender   // acquire, grant: the new holder; release: whose term
	queue   []v1alpha1.Contender // grant, queue: the queue afterwards
	waiting int32                // grant, queue: all waiters afterwards
	token   int64                // end: the term that ends
	reason  v1alpha1.EndReason   // end
	at      metav1.MicroTime     // for people: acquireTime, endTime
}

// Initialise gives a lease its first status: the token starts at the lease's own resourceVersion, which is
// above every token of an earlier lease of that name, or at spec.minToken.
func Initialise(at time.Time) Transition { return Transition{kind: KindInitialise, at: micro(at)} }

// Acquire takes a free lease.
func Acquire(by v1alpha1.Contender, at time.Time) Transition {
	return Transition{kind: KindAcquire, by: by, at: micro(at)}
}

// Grant gives a free lease to the first in line, and puts the others into the queue in the same write.
func Grant(first v1alpha1.Contender, queue []v1alpha1.Contender, waiting int32, at time.Time) Transition {
	return Transition{kind: KindGrant, by: first, queue: queue, waiting: waiting, at: micro(at)}
}

// Release ends the term of by, and hands over to the head of the queue in the same write.
func Release(by v1alpha1.Contender, at time.Time) Transition {
	return Transition{kind: KindRelease, by: by, reason: v1alpha1.EndReleased, at: micro(at)}
}

// End ends the term with that token for any reason but EndReleased: hands over, or begins the cooldown that
// the spec asks for.
func End(token int64, reason v1alpha1.EndReason, at time.Time) Transition {
	return Transition{kind: KindEnd, token: token, reason: reason, at: micro(at)}
}

// Queue sets who comes next, and how many wait in all.
func Queue(queue []v1alpha1.Contender, waiting int32) Transition {
	return Transition{kind: KindQueue, queue: queue, waiting: waiting}
}

// EndCooldown hands the lease to the head of the queue, or makes it available.
func EndCooldown(at time.Time) Transition { return Transition{kind: KindEndCooldown, at: micro(at)} }

// Observe records that the controller has seen the spec.
func Observe(at time.Time) Transition { return Transition{kind: KindObserve, at: micro(at)} }

// Kind says what the transition does.
func (t Transition) Kind() Kind { return t.kind }

// Reason says why the term ends that the transition ends; empty where it ends none.
func (t Transition) Reason() v1alpha1.EndReason { return t.reason }

// String is how event, log, plugin and transcript name the transition.
func (t Transition) String() string {
	switch t.kind {
	case KindAcquire, KindGrant, KindRelease:
		return fmt.Sprintf("%s by %q", t.kind, t.by.Identity)
	case KindEnd:
		return fmt.Sprintf("%s of %d: %s", t.kind, t.token, t.reason)
	case KindQueue:
		return fmt.Sprintf("%s of %d, %d waiting", t.kind, len(t.queue), t.waiting)
	}
	return string(t.kind)
}

// Apply returns the lease as it is after the transition, or why the transition may not happen: one of the
// errors above, wrapped. The lease itself is not changed.
func Apply(l *v1alpha1.FencedLease, t Transition) (*v1alpha1.FencedLease, error) {
	if (l.Status == nil) != (t.kind == KindInitialise) {
		return nil, fmt.Errorf("%s: %w", t.kind, ErrNotReady)
	}
	next := l.DeepCopy()
	var err error
	switch t.kind {
	case KindInitialise:
		err = initialise(next, t)
	case KindAcquire, KindGrant:
		err = grant(next, t)
	case KindRelease, KindEnd:
		err = end(next, t)
	case KindQueue:
		err = enqueue(next, t)
	case KindEndCooldown:
		err = endCooldown(next, t)
	case KindObserve:
		observe(next, t)
	default:
		err = fmt.Errorf("unknown kind %q: %w", t.kind, ErrIllegal)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.kind, err)
	}
	return next, nil
}

func initialise(l *v1alpha1.FencedLease, t Transition) error {
	seed, err := parseDecimal(l.ResourceVersion)
	if err != nil {
		return fmt.Errorf("resourceVersion %q seeds no token: %w", l.ResourceVersion, ErrIllegal)
	}
	l.Status = &v1alpha1.FencedLeaseStatus{
		Phase: v1alpha1.PhaseAvailable,
		Token: max(seed, l.Spec.MinToken),
		Queue: []v1alpha1.Contender{},
		Terms: []v1alpha1.Term{},
	}
	observe(l, t)
	return nil
}

func grant(l *v1alpha1.FencedLease, t Transition) error {
	if l.Status.Phase != v1alpha1.PhaseAvailable {
		return fmt.Errorf("phase is %s: %w", l.Status.Phase, ErrNotAvailable)
	}
	if l.DeletionTimestamp != nil { // else it would go while held, which asks for the verb steal
		return fmt.Errorf("the lease is being deleted: %w", ErrNotAvailable)
	}
	if err := valid(t.by); err != nil {
		return err
	}
	if t.kind == KindGrant {
		if err := validQueue(t.queue, t.waiting, &t.by); err != nil {
			return err
		}
		l.Status.Queue, l.Status.Waiting = append([]v1alpha1.Contender{}, t.queue...), t.waiting
	}
	return issue(l, t.by, t.at)
}

func end(l *v1alpha1.FencedLease, t Transition) error {
	s := l.Status
	switch {
	case t.kind == KindEnd && (t.reason == v1alpha1.EndReleased || t.reason == ""):
		return fmt.Errorf("reason is %q: %w", t.reason, ErrIllegal)
	case s.Holder == nil:
		return fmt.Errorf("phase is %s: %w", s.Phase, ErrNotHolder)
	case t.kind == KindEnd && s.Token != t.token:
		return fmt.Errorf("the term has token %d: %w", s.Token, ErrNotHolder)
	case t.kind == KindRelease && !SameRequest(s.Holder.Contender, t.by):
		return fmt.Errorf("the term is that of %q, ticket %d: %w", s.Holder.Identity, s.Holder.Ticket, ErrNotHolder)
	}
	s.Terms = slices.Insert(s.Terms, 0, v1alpha1.Term{
		Token:      s.Token,
		Identity:   s.Holder.Identity,
		SessionUID: s.Holder.SessionUID,
		User:       s.Holder.User,
		PodUID:     s.Holder.PodUID,
		Ticket:     s.Holder.Ticket,
		StartTime:  s.Holder.AcquireTime,
		EndTime:    t.at,
		EndReason:  t.reason,
	})
	s.Terms = s.Terms[:min(len(s.Terms), v1alpha1.MaxTerms)]
	s.Holder = nil
	if cooldown := l.Spec.CooldownSeconds; cooldown > 0 && t.reason != v1alpha1.EndReleased {
		until := micro(t.at.Add(time.Duration(cooldown) * time.Second))
		s.Phase, s.CooldownUntil = v1alpha1.PhaseCooldown, &until
		return nil
	}
	return next(l, t.at)
}

func endCooldown(l *v1alpha1.FencedLease, t Transition) error {
	if l.Status.Phase != v1alpha1.PhaseCooldown {
		return fmt.Errorf("phase is %s: %w", l.Status.Phase, ErrIllegal)
	}
	l.Status.CooldownUntil = nil
	return next(l, t.at)
}

// next passes a lease that nobody holds to the head of the queue; with an empty queue it becomes available.
func next(l *v1alpha1.FencedLease, at metav1.MicroTime) error {
	s := l.Status
	if len(s.Queue) == 0 {
		s.Phase = v1alpha1.PhaseAvailable
		return nil
	}
	head := s.Queue[0]
	s.Queue = slices.Delete(s.Queue, 0, 1)
	s.Waiting--
	return issue(l, head, at)
}

// issue makes c the holder with the next token.
func issue(l *v1alpha1.FencedLease, c v1alpha1.Contender, at metav1.MicroTime) error {
	token := NextToken(l)
	if token > v1alpha1.MaxToken {
		return fmt.Errorf("the last was %d: %w", l.Status.Token, ErrExhausted)
	}
	l.Status.Phase = v1alpha1.PhaseHeld
	l.Status.Token = token
	l.Status.Holder = &v1alpha1.Holder{Contender: c, AcquireTime: at}
	l.Status.Handovers++
	return nil
}

func enqueue(l *v1alpha1.FencedLease, t Transition) error {
	s := l.Status
	if s.Phase == v1alpha1.PhaseAvailable && len(t.queue) > 0 {
		return fmt.Errorf("an available lease is granted, not queued for: %w", ErrIllegal)
	}
	var holder *v1alpha1.Contender
	if s.Holder != nil {
		holder = &s.Holder.Contender
	}
	if err := validQueue(t.queue, t.waiting, holder); err != nil {
		return err
	}
	s.Queue, s.Waiting = append([]v1alpha1.Contender{}, t.queue...), t.waiting
	return nil
}

func observe(l *v1alpha1.FencedLease, t Transition) {
	l.Status.ObservedGeneration = l.Generation
	l.Status.Conditions = []metav1.Condition{ready(l, t.at)}
}

// ready says whether the lease can be acquired. Its transition time changes with its status only.
func ready(l *v1alpha1.FencedLease, at metav1.MicroTime) metav1.Condition {
	c := metav1.Condition{
		Type:               v1alpha1.ConditionReady,
		Status:             metav1.ConditionTrue,
		Reason:             v1alpha1.ConditionReasonInitialised,
		Message:            "The lease can be acquired.",
		ObservedGeneration: l.Generation,
		LastTransitionTime: metav1.NewTime(at.UTC().Truncate(time.Second)),
	}
	if exhausted(l) {
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ConditionReasonTokensExhausted
		c.Message = "The last token below 2^53 was issued. Create a lease of another name and protect the objects with it."
	}
	for _, old := range l.Status.Conditions {
		if old.Type == c.Type && old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
	}
	return c
}

// NextToken is the token that the next grant issues. Above MaxToken: it cannot.
func NextToken(l *v1alpha1.FencedLease) int64 { return max(l.Status.Token+1, l.Spec.MinToken) }

func exhausted(l *v1alpha1.FencedLease) bool { return NextToken(l) > v1alpha1.MaxToken }

// micro is a time as the API server stores it: in UTC, to the microsecond.
func micro(t time.Time) metav1.MicroTime {
	return metav1.NewMicroTime(t.UTC().Round(0).Truncate(time.Microsecond))
}
