// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

const never = time.Duration(math.MaxInt64)

// keepTime watches the clock: it declares the session lost at its deadline, however long a call hangs, and wakes
// the heartbeat when it is due. It looks at least every half margin, because the runtime's timers stand still
// while the machine sleeps and the session's clock does not.
func (s *Session) keepTime() {
	for {
		s.mu.Lock()
		now := s.clock()
		left, due, look := s.deadline-now, s.due-now, protocol.Margin(s.ttl)/2
		s.mu.Unlock()
		if left <= 0 {
			s.lose(nil)
			return
		}
		if due <= 0 {
			s.renewSoon()
			due = look
		}
		if !pause(s.ctx, min(left, due, look)) {
			return
		}
	}
}

// renewSoon wakes the heartbeat.
func (s *Session) renewSoon() {
	select {
	case s.kick <- struct{}{}:
	default: // it is awake already
	}
}

// heartbeat is the only writer of the session's object.
func (s *Session) heartbeat() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.kick:
		}
		for again := true; again && s.Err() == nil; {
			again = s.renew()
		}
	}
}

// renew writes the session once, and says whether to write it again at once. It counts from when it began to
// send: whatever the API server and its controller saw, they saw later.
//
//	the answer                    | it means                              | what is done
//	stored                        | renewed                               | wait for the next time, or write the next want
//	conflict                      | a lost answer, or a change of owners  | read, and write again on that
//	not found, or another's UID   | expired or deleted                    | lost
//	refused, with a new want      | may not wait for that lease           | tell who asked for it, write again without
//	anything else                 | unknown: it may have landed           | try again soon, until the deadline
func (s *Session) renew() (again bool) {
	next, want := s.compose()
	sent := s.beginRenewal(next)
	ctx, cancel := context.WithTimeout(s.ctx, min(protocol.RenewEvery(ttlOf(next)), callTimeout))
	defer cancel()
	stored, err := s.api.updateSession(ctx, next)
	s.metrics.renewed(s.clock()-sent, err)

	switch {
	case err == nil:
		return s.stored(stored, sent)
	case apierrors.IsNotFound(err):
		s.lose(errGone)
	case apierrors.IsConflict(err):
		return s.reread(ctx, sent)
	case want != nil && definite(err):
		s.refuse(want, err)
		return true
	default:
		s.failed(sent, err)
	}
	return false
}

// compose is the object as it is to be stored: the last answer with a later renewTime, the TTL to come, and what
// is wanted now. At most one want is new: the API server asks its authorizer for each, and has a budget.
func (s *Session) compose() (*coordinationv1.Lease, *request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.object.DeepCopy()

	renewTime := metav1.NowMicro()
	if last := s.object.Spec.RenewTime; last != nil && !renewTime.After(last.Time) {
		renewTime = metav1.NewMicroTime(last.Add(time.Microsecond)) // the wall clock stepped back
	}
	next.Spec.RenewTime = &renewTime
	seconds := int32(s.wantTTL / time.Second)
	next.Spec.LeaseDurationSeconds = &seconds

	stored, _ := protocol.ParseWants(s.object.Annotations[v1alpha1.WaitingForAnnotation])
	wants, added := map[string]int64{}, (*request)(nil)
	for name, slot := range s.slots { // those that stand there already first: there is room for 64
		if r := slot.request; r != nil && r.wanted && stored[name] == r.ticket {
			wants[name] = r.ticket
		}
	}
	for name, slot := range s.slots {
		r := slot.request
		if r == nil || !r.wanted || stored[name] == r.ticket || added != nil || len(wants) == v1alpha1.MaxWants {
			continue
		}
		wants[name], added = r.ticket, r
		r.sent = true
	}
	delete(next.Annotations, v1alpha1.WaitingForAnnotation)
	if len(wants) > 0 {
		next.Annotations[v1alpha1.WaitingForAnnotation] = protocol.FormatWants(wants)
	}
	return next, added
}

// beginRenewal notes that a renewal is under way. One that shortens the TTL may be stored although its answer
// gets lost, so the shorter TTL counts from now.
func (s *Session) beginRenewal(next *coordinationv1.Lease) (sent time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sent = s.clock()
	s.due = never
	if ttl := ttlOf(next); ttl < s.ttl {
		s.deadline = min(s.deadline, protocol.GiveUp(sent, ttl))
	}
	return sent
}

// stored takes in a successful renewal.
func (s *Session) stored(object *coordinationv1.Lease, sent time.Duration) (again bool) {
	if object.DeletionTimestamp != nil {
		s.lose(errGone)
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.object = object
	s.confirm(sent, ttlOf(object))
	return s.wantTTL < s.ttl || s.hasNewWant()
}

// confirm counts the session as renewed when that renewal was sent. The caller holds mu, or is alone.
func (s *Session) confirm(sent, ttl time.Duration) {
	s.ttl, s.wantTTL = ttl, min(s.wantTTL, ttl)
	s.deadline = protocol.GiveUp(sent, ttl)
	s.due = sent + protocol.RenewEvery(ttl)
	s.beatErr = nil
	close(s.renewed)
	s.renewed = make(chan struct{})
}

// hasNewWant says that a want is not stored yet. The caller holds mu.
func (s *Session) hasNewWant() bool {
	stored, _ := protocol.ParseWants(s.object.Annotations[v1alpha1.WaitingForAnnotation])
	for name, slot := range s.slots {
		if r := slot.request; r != nil && r.wanted && stored[name] != r.ticket {
			return len(stored) < v1alpha1.MaxWants
		}
	}
	return false
}

// reread learns what the object became, after a conflict: an earlier renewal whose answer was lost, or the garbage
// collector at work on its owners.
func (s *Session) reread(ctx context.Context, sent time.Duration) (again bool) {
	object, err := s.api.session(ctx, s.name)
	switch {
	case apierrors.IsNotFound(err):
		s.lose(errGone)
		return false
	case err != nil:
		s.failed(sent, err)
		return false
	case object.UID != s.self.SessionUID, object.DeletionTimestamp != nil:
		s.lose(errGone)
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.object = object
	return true
}

// failed tries again soon, not in step with others.
func (s *Session) failed(sent time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beatErr = fmt.Errorf("renew session %q: %w", s.name, err)
	s.due = max(s.clock(), sent+jitter(min(s.ttl/15, time.Second)))
}

// refuse tells who asked for it that the session may not wait for that lease.
func (s *Session) refuse(r *request, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.wanted, r.sent = false, false
	select {
	case r.refused <- err:
	default: // it has not read the last one yet
	}
}

func ttlOf(l *coordinationv1.Lease) time.Duration {
	if l.Spec.LeaseDurationSeconds == nil {
		return time.Second // somebody took it away; the policy does not let him
	}
	return time.Duration(*l.Spec.LeaseDurationSeconds) * time.Second
}

// jitter is a duration between d and 1.5 d.
func jitter(d time.Duration) time.Duration { return d + rand.N(d/2+1) }

// backoff gives waits that grow from about 50 milliseconds to about a second. The zero value is ready.
type backoff struct{ last time.Duration }

func (b *backoff) next() time.Duration {
	b.last = min(max(2*b.last, 50*time.Millisecond), time.Second)
	return jitter(b.last)
}

func (b *backoff) reset() { b.last = 0 }

// pause waits, and says whether ctx still lives.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
