// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"fmt"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// slot is what a session knows of one lease. The session's mu guards all but turn and news.
type slot struct {
	name    string
	turn    chan struct{} // one place: whoever put something in may ask for the lease, or holds it
	news    chan struct{} // one place: something was heard of the lease that is worth a look
	users   int           // calls that are under way
	request *request      // the call whose turn it is; nil while there is none, or it was granted
	term    *Held         // the term that this process knows of and uses; nil while there is none
	giving  int64         // the token of a term that nobody wants and that is being given back; 0: none

	// tickets are those that may be granted, now or later: a term of our session with another ticket is not ours.
	tickets map[int64]struct{}
	// seen is the highest token seen; what tells of a lower one is old.
	seen int64
	// ended is the highest token of a term of ours that is known to be over.
	ended int64
}

// endTurn lets the next caller of the process have a go.
func (slot *slot) endTurn() { <-slot.turn }

// enter finds or makes the slot of a lease, for a call that Close waits for. Every enter has its leave.
func (s *Session) enter(name string) (*slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.over != nil:
		return nil, s.over
	case s.ending:
		return nil, errClosed
	}
	s.calls.Add(1)
	found := s.slots[name]
	if found == nil {
		found = &slot{
			name:    name,
			turn:    make(chan struct{}, 1),
			news:    make(chan struct{}, 1),
			tickets: map[int64]struct{}{},
		}
		s.slots[name] = found
	}
	found.users++
	return found, nil
}

// leave forgets a slot that nobody needs any more.
func (s *Session) leave(slot *slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot.users--
	s.forget(slot)
	s.calls.Done()
}

// forget drops a slot without users, term and tickets. The caller holds mu.
func (s *Session) forget(slot *slot) {
	if slot.users == 0 && slot.term == nil && slot.giving == 0 && len(slot.tickets) == 0 && len(slot.turn) == 0 {
		delete(s.slots, slot.name)
	}
}

// observe takes in what a lease says, however it was learnt: by a read, an answer, a list or the watch. What is
// old changes nothing, because tokens only grow. It says whether there was something new for this session.
func (s *Session) observe(l *v1alpha1.FencedLease) (news bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.slots[l.Name]
	if slot == nil || s.over != nil {
		return false
	}
	if l.Status == nil { // a status is never removed, so this is a new lease of the same name
		return s.replaced(slot)
	}
	if l.Status.Token < slot.seen {
		return false
	}
	slot.seen = l.Status.Token
	if h := slot.term; h != nil {
		if protocol.Holds(l, h.by, int64(h.token)) {
			h.lease = l
			s.shrink(l)
			return false
		}
		if l.Status.Token >= int64(h.token) {
			s.endTerm(slot, overBy(l, int64(h.token)))
			news = true
		}
	}
	return s.heard(slot, l) || news
}

// heard takes in a term of our session: a grant, or one that nobody wants. The caller holds mu.
func (s *Session) heard(slot *slot, l *v1alpha1.FencedLease) (news bool) {
	h := l.Status.Holder
	if h == nil || l.Status.Token <= slot.ended || !s.ours(slot, h.Contender) {
		return false // somebody else's, or one with our session's UID that we never asked for
	}
	if r := slot.request; r != nil && r.ticket == h.Ticket && !s.ending {
		slot.request = nil
		slot.term = s.newHeld(slot, r, l)
		r.granted <- slot.term
		s.shrink(l)
		return true
	}
	if slot.giving == l.Status.Token {
		return false
	}
	slot.giving = l.Status.Token
	s.inBackgroundLocked(func() { s.giveBack(slot, l) })
	return true
}

// ours says that the contender is one of our requests: of our session, user and Pod, with a ticket that we used.
func (s *Session) ours(slot *slot, c v1alpha1.Contender) bool {
	asked := s.self
	asked.Ticket = c.Ticket
	_, used := slot.tickets[c.Ticket]
	return used && protocol.SameRequest(asked, c)
}

// giveBack releases a term that no caller wants: the late answer of an attempt, or a grant that crossed the end of
// the wait. When that fails the next poll finds it again.
func (s *Session) giveBack(slot *slot, l *v1alpha1.FencedLease) {
	token := l.Status.Token
	err := s.release(context.WithoutCancel(s.ctx), l.Status.Holder.Contender, l.Name, l)
	s.log.V(1).Info("gave back a term that nobody wanted", "lease", l.Name, "token", token, "error", err)
	s.mu.Lock()
	defer s.mu.Unlock()
	slot.giving = 0
	if err == nil {
		s.spend(slot, l.Status.Holder.Ticket, token)
	}
	slot.tell()
	s.forget(slot)
}

// gone takes in that the watch saw the term with that token leave the session. The reason is learnt by a read.
func (s *Session) gone(name string, token int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.slots[name]
	if slot == nil || s.over != nil {
		return
	}
	slot.seen = max(slot.seen, token)
	if h := slot.term; h != nil && int64(h.token) <= token {
		released := h.over != nil
		s.endTerm(slot, fmt.Errorf("lease %q, token %d: %w: its term was ended by others", name, h.token, ErrLost))
		if !released {
			s.inBackgroundLocked(func() { s.learn(h) })
		}
	}
	slot.ended = max(slot.ended, token)
	slot.tell()
}

// learn adds to a term that was lost why it was.
func (s *Session) learn(h *Held) {
	l, err := s.api.lease(s.ctx, h.slot.name)
	if err != nil {
		return // it is lost all the same
	}
	if reason, ok := protocol.EndOf(l, int64(h.token)); ok {
		s.mu.Lock()
		h.over = lostBy(h.slot.name, h.token, reason)
		s.mu.Unlock()
	}
	s.observe(l)
}

// vanished takes in that the lease does not exist.
func (s *Session) vanished(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot := s.slots[name]; slot != nil && s.over == nil {
		s.replaced(slot)
	}
}

// replaced takes in that the lease was deleted, and perhaps created again. The caller holds mu.
func (s *Session) replaced(slot *slot) (news bool) {
	if slot.term == nil {
		return false
	}
	s.endTerm(slot, fmt.Errorf("lease %q, token %d: %w: the lease was deleted", slot.name, slot.term.token, ErrLost))
	return true
}

// endTerm ends the slot's term, and lets the next caller of the process have a go. The caller holds mu.
func (s *Session) endTerm(slot *slot, why error) {
	h := slot.term
	slot.term = nil
	h.end(why)
	s.spend(slot, h.by.Ticket, int64(h.token))
	slot.tell()
	slot.endTurn()
	s.forget(slot)
}

// spend notes that the term with that ticket and token is over: no lower ticket is ever granted either. The caller
// holds mu.
func (s *Session) spend(slot *slot, ticket, token int64) {
	slot.ended = max(slot.ended, token)
	for t := range slot.tickets {
		if t <= ticket {
			delete(slot.tickets, t)
		}
	}
}

// tell makes whoever waits look again.
func (slot *slot) tell() {
	select {
	case slot.news <- struct{}{}:
	default:
	}
}

// inBackground runs f so that Close waits for it; not at all when the session is over.
func (s *Session) inBackground(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inBackgroundLocked(f)
}

func (s *Session) inBackgroundLocked(f func()) {
	if s.over == nil {
		s.running.Go(f)
	}
}

// overBy says how the term with that token ended, as far as the lease tells.
func overBy(l *v1alpha1.FencedLease, token int64) error {
	if reason, ok := protocol.EndOf(l, token); ok {
		return lostBy(l.Name, Token(token), reason)
	}
	return fmt.Errorf("lease %q, token %d: %w: the lease went on without it", l.Name, token, ErrLost)
}

func lostBy(lease string, token Token, reason v1alpha1.EndReason) error {
	return fmt.Errorf("lease %q, token %d: %w: its term ended as %s", lease, token, ErrLost, reason)
}
