// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// Token is a fencing token: it grows with every grant of a lease, from 1 to 2^53-1.
type Token int64

// String is the token as a write presents it.
func (t Token) String() string { return strconv.FormatInt(int64(t), 10) }

// errReleased is why a term is over that was given back.
var errReleased = errors.New("released")

// Held is one term: a lease that the session holds, with the token of this grant. All methods may be called
// concurrently.
type Held struct {
	session *Session
	slot    *slot
	token   Token
	by      v1alpha1.Contender // the request that was granted
	begun   time.Time
	ctx     context.Context
	cancel  context.CancelCauseFunc

	releasing sync.Mutex // one release at a time

	// The session's mu guards these.
	lease *v1alpha1.FencedLease // as last seen while the term lasts
	over  error                 // why the term is over; nil while it lasts
	given bool                  // the release is stored, or not needed any more
}

// newHeld is the term that answers the request. The caller holds mu.
func (s *Session) newHeld(slot *slot, r *request, l *v1alpha1.FencedLease) *Held {
	h := &Held{session: s, slot: slot, token: Token(l.Status.Token), by: s.asks(r), begun: time.Now(), lease: l}
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(s.ctx))
	return h
}

// Token is the token of this term. It stays the same when the term is over, and is of no more use then.
func (h *Held) Token() Token {
	_ = h.Err()
	return h.token
}

// Context ends when the term does: with a cause that matches ErrLost when it was lost, with context.Canceled when
// it was released. Its Err asks the clock first, as that of Session.Context does.
func (h *Held) Context() context.Context {
	_ = h.Err()
	return checkedContext{Context: h.ctx, check: h.Err}
}

// Err is nil while the term lasts. Afterwards it matches ErrLost and says why: lost, and how, or released.
func (h *Held) Err() error {
	_ = h.session.Err() // when the session is lost this ends the term
	h.session.mu.Lock()
	defer h.session.mu.Unlock()
	if errors.Is(h.over, errReleased) {
		return fmt.Errorf("lease %q, token %d: the term is over (%w): %w", h.slot.name, h.token, ErrLost, h.over)
	}
	return h.over
}

// Release ends the work context and gives the lease back; the next in line gets it in the same write. It does not
// stop when ctx is cancelled, but after 10 seconds; then the session goes on trying, and the error says what was in
// the way. It is safe to repeat. When the term was lost before, the error matches ErrLost: the work may not have
// been alone.
func (h *Held) Release(ctx context.Context) error {
	_ = h.session.Err()
	h.releasing.Lock()
	defer h.releasing.Unlock()
	s := h.session

	s.mu.Lock()
	h.giveUp()
	over, given, l := h.over, h.given, h.lease
	s.mu.Unlock()
	switch {
	case !errors.Is(over, errReleased):
		return fmt.Errorf("release: %w", over)
	case given:
		return nil
	}
	err := s.release(ctx, h.by, h.slot.name, l)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots[h.slot.name] != h.slot || h.slot.term != h { // the watch was faster, or an earlier try gave the turn away
		h.given = h.given || err == nil
		return err
	}
	if err == nil {
		s.endTerm(h.slot, errReleased)
		return nil
	}
	h.slot.term = nil // nobody uses it any more: the next poll gives it back
	h.slot.endTurn()
	return err
}

// giveUp ends the work because the caller wants it so. The caller holds the session's mu.
func (h *Held) giveUp() {
	if h.over == nil {
		h.over = errReleased
		h.cancel(context.Canceled)
		h.count(nil)
	}
}

// end takes in that the term is over at the API server. What ended the work first stays the reason. The caller holds
// the session's mu.
func (h *Held) end(why error) {
	if h.over == nil {
		h.over = why
		h.cancel(why)
		h.count(why)
	}
	h.given = true
}

// count tells the metrics, without the lock that the caller holds.
func (h *Held) count(lost error) {
	held := time.Since(h.begun)
	h.session.running.Go(func() { h.session.metrics.ended(h.slot.name, held, lost) })
}

// release gives back the term of by, until it is known to be over. l is the lease as it was last seen; what it says
// may be old, and then its patch fails and it is read again. A lost answer is no failure: what counts is that the
// lease is not ours any more.
func (s *Session) release(ctx context.Context, by v1alpha1.Contender, name string, l *v1alpha1.FencedLease) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTimeout)
	defer cancel()
	doing := fmt.Sprintf("release lease %q", name)
	var wait backoff
	for {
		err := error(nil)
		if l == nil {
			l, err = s.api.lease(ctx, name)
		}
		if err == nil {
			if protocol.FateOf(l, by, 0) != protocol.FateGranted {
				s.observe(l)
				return nil
			}
			var patch []byte
			patch, _, err = protocol.Patch(l, protocol.Release(by, time.Now()))
			if err != nil {
				return fmt.Errorf("%s: %w", doing, err)
			}
			l, err = s.api.patch(ctx, name, patch)
		}
		switch {
		case err == nil:
			s.observe(l)
			return nil
		case apierrors.IsNotFound(err):
			return nil
		case definite(err), !raced(err) && !pause(ctx, wait.next()):
			return s.explain(err, doing)
		}
		l = nil
	}
}

// Do acquires the lease, runs f and releases the lease again, also when f panics. The context of f is that of the
// caller, and ends with the term, then with a cause that matches ErrLost; f must stop then, because nothing else
// can stop it. When the term was lost while f ran, the error matches ErrLost beside what f returned: whatever f did
// without the token may have met somebody else's work. Do does not try again: a lost session needs a new one.
func (s *Session) Do(ctx context.Context, lease string, f func(ctx context.Context, token Token) error) (err error) {
	held, err := s.Acquire(ctx, lease)
	if err != nil {
		return err
	}
	work, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(held.ctx, func() { cancel(context.Cause(held.ctx)) })
	defer func() {
		stop()
		cancel(context.Canceled)
		err = errors.Join(err, held.Release(ctx))
	}()
	return f(checkedContext{Context: work, check: held.Err}, held.token)
}
