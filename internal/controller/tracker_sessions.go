// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"maps"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/internal/protocol"
)

// sessionSight is what was seen of one session.
type sessionSight struct {
	name types.NamespacedName
	uid  types.UID
	// version is the newest resourceVersion, and seen when it was seen first: a new one is a renewal.
	version string
	seen    time.Time
	// session is what it says; with a fault, which is why it says nothing that counts, it is empty.
	session protocol.Session
	fault   string
	// reported: the fault was told once.
	reported bool
	// condemned: a delete of version was sent. If the session turns out to be gone, it was for its silence.
	condemned bool
}

// hole is how long the API server may go unread without an excuse for the session: two of its renewals.
func (s *sessionSight) hole() time.Duration { return min(s.session.TTL*2/3, longestHole) }

// place is where a request stands in line: those found at the start in the order of their tickets, behind
// them the others as they came.
type place struct {
	seen, ticket int64
}

// look takes in a session as the watch gives it, and returns the leases for which its request changed.
// touched says that it changed in a way that may matter to leases which it holds or queues for. A plain renewal
// changes neither. Objects found at the start are initial.
func (t *tracker) look(lease *coordinationv1.Lease, initial bool) (wants []string, touched bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, gone := t.fates[lease.UID]; gone {
		return nil, false // a late echo
	}
	session, err := protocol.ParseSession(lease)
	s := t.sessions[lease.UID]
	if s == nil {
		s = &sessionSight{name: nameOf(lease), uid: lease.UID}
		t.sessions[s.uid], t.names[s.name] = s, s.uid
		touched = true
	}
	if s.version == "" || older(s.version, lease.ResourceVersion) {
		s.version, s.seen, s.condemned = lease.ResourceVersion, t.clock.Now(), false
	}
	fault := ""
	if err != nil {
		fault = err.Error()
	}
	touched = touched || fault != s.fault || s.session.Contender != session.Contender ||
		s.session.TTL != session.TTL || s.session.Dying != session.Dying
	s.reported = s.reported && fault == s.fault
	wants = t.line(s, session.Wants, initial)
	if touched {
		wants = slices.AppendSeq(wants, maps.Keys(session.Wants))
	}
	s.session, s.fault = session, fault
	return wants, touched
}

// line puts the session in line for what it wants, and returns what changed. A request that was there keeps its place.
func (t *tracker) line(s *sessionSight, wants map[string]int64, initial bool) []string {
	var changed []string
	for name := range s.session.Wants {
		if _, still := wants[name]; !still {
			t.leave(s, name)
			changed = append(changed, name)
		}
	}
	for name, ticket := range wants {
		if s.session.Wants[name] == ticket {
			continue
		}
		p := place{ticket: ticket}
		if !initial {
			t.seen++
			p.seen = t.seen
		}
		key := types.NamespacedName{Namespace: s.name.Namespace, Name: name}
		if t.lines[key] == nil {
			t.lines[key] = map[types.UID]place{}
		}
		t.lines[key][s.uid] = p
		changed = append(changed, name)
	}
	return changed
}

func (t *tracker) leave(s *sessionSight, name string) {
	key := types.NamespacedName{Namespace: s.name.Namespace, Name: name}
	delete(t.lines[key], s.uid)
	if len(t.lines[key]) == 0 {
		delete(t.lines, key)
	}
}

// gone says that a session is no more, and returns the leases that it wanted. known says that it was there until now.
func (t *tracker) gone(uid types.UID) (wants []string, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[uid]
	if s == nil {
		return nil, false
	}
	for name := range s.session.Wants {
		t.leave(s, name)
		wants = append(wants, name)
	}
	delete(t.sessions, uid)
	if t.names[s.name] == uid {
		delete(t.names, s.name)
	}
	t.fates[uid] = fate{expired: s.condemned, at: t.clock.Now()}
	return wants, true
}

// named is a copy of what was seen of the session of that name; nil: nothing.
func (t *tracker) named(name types.NamespacedName) *sessionSight {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[t.names[name]]
	if s == nil {
		return nil
	}
	seen := *s
	return &seen
}

// reported says that the session's fault was told.
func (t *tracker) reported(uid types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.sessions[uid]; s != nil {
		s.reported = true
	}
}

// left is how long the session may still be silent: not above 0 when it may no longer. Version is what the API
// server itself says now; if it is not the last one seen, the session renewed and the watch is behind. Empty:
// nobody asked it.
func (t *tracker) left(uid types.UID, version string) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[uid]
	if s == nil {
		return 0
	}
	if version != "" && version != s.version {
		s.version, s.seen, s.condemned = version, t.clock.Now(), false
	}
	return s.session.Deadline(s.seen).Sub(t.clock.Now())
}

// condemn says that a delete of what was seen is about to be sent. False: there is nothing to delete.
func (t *tracker) condemn(uid types.UID) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[uid]
	if s == nil {
		return false
	}
	s.condemned = true
	return true
}

// spared says that the session renewed at the last moment, and counts anew.
func (t *tracker) spared(uid types.UID) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.sessions[uid]
	if s == nil {
		return 0
	}
	s.seen, s.condemned = t.clock.Now(), false
	return s.session.TTL
}

// next is the session whose time runs out first, and the shortest TTL of all. False: there is none.
func (t *tracker) next() (name types.NamespacedName, shortest time.Duration, some bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var first *sessionSight
	for _, s := range t.sessions {
		if s.fault != "" {
			continue
		}
		if first == nil || s.session.TTL < shortest {
			shortest = s.session.TTL
		}
		if first == nil || s.session.Deadline(s.seen).Before(first.session.Deadline(first.seen)) {
			first = s
		}
	}
	if first == nil {
		t.blind, t.lastRead = false, time.Time{}
		return name, 0, false
	}
	return first.name, shortest, true
}
