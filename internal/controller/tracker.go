// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/utils/clock"
)

const (
	// rememberFates is for how long it is known of a session that it is gone, and why: long enough to record
	// the end of its terms, and for events of its life that are still on their way.
	rememberFates = 10 * time.Minute

	// longestHole is how long the API server may go unread without being taken for away. Reads are tried every
	// longestPulse or more often; so much more means that they hang, or that this process did not run.
	longestHole = 5 * time.Second
)

// tracker is what this controller has seen with its own eyes and its own monotonic clock: when sessions
// renewed, who stands in line where, when terms began. Nothing of it is stored, so a new controller counts
// anew: it acts later, never earlier. All methods may be called concurrently.
type tracker struct {
	clock clock.PassiveClock

	mu sync.Mutex
	// sessions are those that live, by UID; names finds the UID by the session's name. Both have the same sessions.
	sessions map[types.UID]*sessionSight
	names    map[types.NamespacedName]types.UID
	// lines are the places of the requests for each lease, by session. A lease need not exist to be wanted.
	lines map[types.NamespacedName]map[types.UID]place
	// seen numbers the places of those who came while this controller watched.
	seen int64
	// fates are the sessions that are gone. A UID in fates is never in sessions, and never comes back.
	fates map[types.UID]fate
	// leases are the leases that were seen.
	leases map[types.NamespacedName]*leaseSight

	// blind: the API server could not be read, so silence says nothing.
	blind bool
	// lastRead is when the last successful live read began; zero while nothing needs to be read.
	lastRead time.Time
}

// fate is how a session ended.
type fate struct {
	expired bool // by this controller, for its silence
	at      time.Time
}

func newTracker(c clock.PassiveClock) *tracker {
	return &tracker{
		clock:    c,
		sessions: map[types.UID]*sessionSight{},
		names:    map[types.NamespacedName]types.UID{},
		lines:    map[types.NamespacedName]map[types.UID]place{},
		fates:    map[types.UID]fate{},
		leases:   map[types.NamespacedName]*leaseSight{},
	}
}

// unreadable says that the API server could not be read. The answer is whether that is news.
func (t *tracker) unreadable() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	news := !t.blind
	t.blind = true
	return news
}

// blinded says whether the API server could not be read when that was last tried.
func (t *tracker) blinded() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.blind
}

// readable says that a live read, begun at that time, succeeded. Who could not renew because of an outage gets
// his full TTL from now on; the answer is whether there was one that concerns all.
func (t *tracker) readable(begun time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.clock.Now()
	outage := t.blind || (!t.lastRead.IsZero() && now.Sub(t.lastRead) > longestHole)
	for _, s := range t.sessions {
		// What was read, or seen to be written, proves that the API server worked then.
		proven := s.seen
		if t.lastRead.After(proven) {
			proven = t.lastRead
		}
		if outage || now.Sub(proven) > s.hole() {
			s.seen = now
		}
	}
	t.blind = false
	if begun.After(t.lastRead) {
		t.lastRead = begun
	}
	return outage
}

// sweep forgets what is of no use any more.
func (t *tracker) sweep() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for uid, f := range t.fates {
		if t.clock.Since(f.at) > rememberFates {
			delete(t.fates, uid)
		}
	}
}

// counts are the figures of the gauges.
type counts struct{ sessions, held, waiting int }

func (t *tracker) counts() counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := counts{sessions: len(t.sessions)}
	for _, l := range t.leases {
		c.waiting += l.waiting
		if l.held() {
			c.held++
		}
	}
	return c
}

// older says that resourceVersion a is of an earlier write than b. What is no number is never older: then the
// tests of the patches alone protect against an old state.
func older(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order < 0
}
