// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// request is one call that wants a lease. The same ticket goes with all its attempts, and with its place in line:
// so however it is granted, and however late that shows, it is granted once.
type request struct {
	since   time.Time
	granted chan *Held // one place; filled by observe
	refused chan error // one place; filled by the heartbeat

	// The session's mu guards these.
	ticket int64
	wanted bool  // the session's object is to say so
	sent   bool  // an attempt or a want is or was under way: the ticket may be granted at any time
	seen   int64 // the lease's token when the request was last known to be open
	gaps   int   // the session's gaps at that time
}

// Acquire waits until the session holds the lease, and returns the term. Callers in line get it in order; within
// the process they take turns, each with a token of its own, so Acquire of a lease that the same process holds
// waits for its release. ctx bounds the wait only. When it ends, the place in line is given up, and a grant
// that crosses this on its way is given back at once; the error matches the context's, and ErrHeld or ErrNotReady
// when that is what the lease was waiting for.
//
// A lease that does not exist is a NotFound of the API server at once, also in the midst of waiting. A session that
// is lost or closed ends the wait with ErrLost. Timeouts and outages do not: they may last as long as the session.
func (s *Session) Acquire(ctx context.Context, lease string) (*Held, error) {
	return s.acquire(ctx, lease, true)
}

// TryAcquire is Acquire without the wait: when somebody has the lease, another caller of this process included, the
// error is a *HeldError; when no controller has initialised it yet, ErrNotReady.
func (s *Session) TryAcquire(ctx context.Context, lease string) (*Held, error) {
	return s.acquire(ctx, lease, false)
}

func (s *Session) acquire(ctx context.Context, name string, wait bool) (held *Held, err error) {
	doing := fmt.Sprintf("acquire lease %q", name)
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
		return nil, fmt.Errorf("%s: no lease has such a name: %s", doing, strings.Join(problems, ", "))
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	slot, err := s.enter(name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	defer s.leave(slot)
	if err := s.takeTurn(ctx, slot, wait); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	r := s.open(slot)
	held, last, err := s.contend(ctx, slot, r, wait)
	s.close(ctx, slot, r, held)
	if held == nil {
		return nil, s.explain(waitedFor(err, last, wait), doing)
	}
	if err := held.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err) // lost already: no work must begin
	}
	s.metrics.acquired(name, time.Since(r.since))
	return held, nil
}

// takeTurn waits until no other caller of this process holds the lease or asks for it.
func (s *Session) takeTurn(ctx context.Context, slot *slot, wait bool) error {
	select {
	case slot.turn <- struct{}{}:
		return nil
	default:
	}
	if !wait {
		return s.taken(slot)
	}
	select {
	case slot.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", context.Cause(ctx), s.taken(slot))
	case <-s.ctx.Done():
		return s.Err()
	case <-s.closing:
		return errClosed
	}
}

// taken says that a caller of this process has the lease, or is about to.
func (s *Session) taken(slot *slot) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := &HeldError{Lease: slot.name, Phase: v1alpha1.PhaseHeld, Identity: s.self.Identity, Token: Token(slot.seen)}
	if slot.term != nil {
		e.Token = slot.term.token
	}
	return e
}

// open begins a request.
func (s *Session) open(slot *slot) *request {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &request{since: time.Now(), granted: make(chan *Held, 1), refused: make(chan error, 1)}
	s.newTicket(slot, r)
	slot.request = r
	return r
}

// newTicket gives the request a ticket above all earlier ones of the session. The caller holds mu.
func (s *Session) newTicket(slot *slot, r *request) {
	if !r.sent {
		delete(slot.tickets, r.ticket)
	}
	r.ticket = protocol.NextTicket(s.object.ResourceVersion, s.lastTicket)
	r.sent, r.seen, r.gaps = false, slot.seen, s.gaps
	s.lastTicket = r.ticket
	slot.tickets[r.ticket] = struct{}{}
}

// close ends a request. One that was not granted gives up its place in line; a grant that crossed is given back.
func (s *Session) close(ctx context.Context, slot *slot, r *request, held *Held) {
	s.mu.Lock()
	if slot.request == r {
		slot.request = nil
	}
	if held == nil && r.wanted {
		s.renewSoon() // others should not wait for us; after a grant the next renewal is soon enough
	}
	if !r.sent {
		delete(slot.tickets, r.ticket)
	}
	s.mu.Unlock()
	if held != nil {
		return // it keeps the turn until its term is over
	}
	select {
	case crossed := <-r.granted:
		s.inBackground(func() { _ = crossed.Release(ctx) }) // a failure is repeated with the next poll
	default:
		slot.endTurn()
	}
}

// contend asks for the lease until it is granted, or cannot be, or the wait is over. last is the lease as it was
// last seen.
func (s *Session) contend(ctx context.Context, slot *slot, r *request, wait bool) (held *Held, last *v1alpha1.FencedLease, err error) {
	tested := int64(0) // the token that an acquire without answer has tested; 0: every attempt is settled
	var pause backoff
	for {
		if len(r.granted) > 0 {
			return <-r.granted, last, nil
		}
		l, err := s.read(ctx, slot.name)
		switch {
		case len(r.granted) > 0:
			continue
		case err != nil && (definite(err) || !wait && tested == 0):
			return nil, last, err
		case err != nil:
			if err := s.waitFor(ctx, slot, r, pause.next()); err != nil {
				return nil, last, err
			}
			continue
		}
		last = l
		if protocol.Settled(l, tested) {
			tested = 0
		}
		s.judge(l, slot, r)
		if l.Status != nil && l.Status.Phase == v1alpha1.PhaseAvailable {
			open, err := s.attempt(ctx, l, r)
			switch {
			case err != nil:
				return nil, last, err
			case open:
				tested = l.Status.Token
				if err := s.waitFor(ctx, slot, r, pause.next()); err != nil {
					return nil, last, err
				}
			}
			continue // granted, or somebody else was faster: look again
		}
		if !wait {
			return nil, last, unavailable(l)
		}
		pause.reset()
		s.want(l, r)
		if err := s.waitFor(ctx, slot, r, jitter(s.pollEvery())); err != nil {
			return nil, last, err
		}
	}
}

// read reads the lease and takes in what it says.
func (s *Session) read(ctx context.Context, name string) (*v1alpha1.FencedLease, error) {
	l, err := s.api.lease(ctx, name)
	if err != nil {
		if apierrors.IsNotFound(err) {
			s.vanished(name)
		}
		return nil, err
	}
	s.observe(l)
	return l, nil
}

// judge gives the request a new ticket when the old one cannot be granted any more: it was, and the term ended
// before anybody heard of it.
func (s *Session) judge(l *v1alpha1.FencedLease, slot *slot, r *request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot.request != r {
		return // granted
	}
	seen := int64(0)
	if r.gaps != s.gaps {
		seen = r.seen
	}
	switch protocol.FateOf(l, s.asks(r), seen) {
	case protocol.FateOver:
		s.newTicket(slot, r)
	case protocol.FateOpen:
		r.gaps = s.gaps
	}
	if l.Status != nil {
		r.seen = max(r.seen, l.Status.Token)
	}
}

// asks is the session as a contender with the request's ticket. The caller holds mu.
func (s *Session) asks(r *request) v1alpha1.Contender {
	c := s.self
	c.Ticket = r.ticket
	return c
}

// attempt tries to take a free lease. open says that no answer came, so that it may still land.
func (s *Session) attempt(ctx context.Context, l *v1alpha1.FencedLease, r *request) (open bool, err error) {
	if err := s.shrinkTo(ctx, l); err != nil {
		return false, err
	}
	s.mu.Lock()
	by, before := s.asks(r), r.sent
	r.sent = true
	s.mu.Unlock()
	patch, _, err := protocol.Patch(l, protocol.Acquire(by, time.Now()))
	if err != nil {
		return false, err
	}
	answer, err := s.api.patch(ctx, l.Name, patch)
	switch {
	case err == nil:
		s.observe(answer)
		return false, nil
	case raced(err), definite(err):
		s.mu.Lock()
		r.sent = before // this attempt has not landed and never will
		s.mu.Unlock()
		if raced(err) {
			return false, nil
		}
		return false, err
	}
	return true, nil
}

// shrinkTo waits until the session is fast enough for the lease.
func (s *Session) shrinkTo(ctx context.Context, l *v1alpha1.FencedLease) error {
	for {
		s.mu.Lock()
		s.shrink(l)
		done, renewed := s.wantTTL == s.ttl, s.renewed
		s.mu.Unlock()
		if done {
			return nil
		}
		s.renewSoon()
		select {
		case <-renewed:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.ctx.Done():
			return s.Err()
		case <-s.closing:
			return errClosed
		}
	}
}

// shrink makes the next renewal shorten the TTL to what the lease allows. The caller holds mu.
func (s *Session) shrink(l *v1alpha1.FencedLease) {
	if most := time.Duration(l.Spec.LeaseDurationSeconds) * time.Second; most > 0 && most < s.wantTTL {
		s.wantTTL = most
		s.renewSoon()
	}
}

// want puts the request in line: by the session's own object, so that waiters do not fight over the lease.
func (s *Session) want(l *v1alpha1.FencedLease, r *request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shrink(l)
	r.wanted = true
	if s.hasNewWant() { // new, or with a new ticket
		s.renewSoon()
	}
}

// waitFor waits for something to happen: nil means that it is time to look again.
func (s *Session) waitFor(ctx context.Context, slot *slot, r *request, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case held := <-r.granted:
		r.granted <- held // it has one place, and only we take from it
		return nil
	case err := <-r.refused:
		return fmt.Errorf("wait for it: %w", err)
	case <-slot.news:
		return nil
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.ctx.Done():
		return s.Err()
	case <-s.closing:
		return errClosed
	}
}

// pollEvery is how often a waiter looks by himself, and the session lists what it holds: the watch may be dead, or
// the controller.
func (s *Session) pollEvery() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return min(s.ttl/2, 10*time.Second) // the jitter adds up to half of it
}

// unavailable says why the lease cannot be had now.
func unavailable(l *v1alpha1.FencedLease) error {
	if l.Status == nil {
		return fmt.Errorf("lease %q: %w: wait with Acquire; if it stays so, check that the FencedLease controller runs", l.Name, ErrNotReady)
	}
	e := &HeldError{Lease: l.Name, Phase: l.Status.Phase, Token: Token(l.Status.Token)}
	if l.Status.Holder != nil {
		e.Identity = l.Status.Holder.Identity
	}
	return e
}

// waitedFor adds to the end of a wait what the lease was waiting for.
func waitedFor(err error, last *v1alpha1.FencedLease, wait bool) error {
	ended := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	if !wait || !ended || last == nil || last.Status != nil && last.Status.Phase == v1alpha1.PhaseAvailable {
		return err
	}
	return fmt.Errorf("%w: %w", err, unavailable(last))
}
