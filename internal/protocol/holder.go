// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"slices"
	"time"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// RenewEvery is how often a session renews itself: two renewals may fail before it could expire.
func RenewEvery(ttl time.Duration) time.Duration { return ttl / 3 }

// Margin is by how much a session gives itself up before anybody else may expire it: a tenth of the TTL, at
// least 250 milliseconds. It pays for clocks that do not run equally fast, for the interval at which the
// library looks at its clock, and for the time that the work needs to hear of the end.
func Margin(ttl time.Duration) time.Duration { return max(ttl/10, 250*time.Millisecond) }

// GiveUp is when a session counts itself lost whose last successful renewal was sent at that time, on the
// session's own clock.
func GiveUp(sent, ttl time.Duration) time.Duration { return sent + ttl - Margin(ttl) }

// NextTicket is the ticket of a session's next request: its resourceVersion, which is above every ticket of
// its former lives, or one more than the last.
func NextTicket(resourceVersion string, last int64) int64 {
	n, err := parseDecimal(resourceVersion)
	if err != nil {
		n = 1
	}
	return max(n, last+1)
}

// Settled says that an acquire which tested that token cannot land any more: the lease has gone on. A lease
// without status is a new one, whose tokens begin above all former ones.
func Settled(l *v1alpha1.FencedLease, tested int64) bool {
	return l.Status == nil || l.Status.Token > tested
}

// Fate is what became of a request.
type Fate string

// The fates.
const (
	// FateOpen: the request was not granted yet, and may be.
	FateOpen Fate = "Open"
	// FateGranted: the request holds the lease.
	FateGranted Fate = "Granted"
	// FateOver: the request was granted, or passed over for a later one of its session; it will never be
	// granted again.
	FateOver Fate = "Over"
)

// FateOf says what became of a request, as far as the lease tells. When its session may have missed grants
// since the token seen, a request that could have been granted and ended beyond the recorded terms counts as
// over; seen 0 says that nothing was missed.
func FateOf(l *v1alpha1.FencedLease, c v1alpha1.Contender, seen int64) Fate {
	if l.Status == nil {
		return FateOpen
	}
	s := l.Status
	if s.Holder != nil && SameRequest(s.Holder.Contender, c) {
		return FateGranted
	}
	switch {
	case servedNow(s.Holder, c), slices.ContainsFunc(s.Terms, func(t v1alpha1.Term) bool { return Served(t, c) }):
		return FateOver
	case slices.ContainsFunc(s.Queue, func(q v1alpha1.Contender) bool { return SameRequest(q, c) }):
		return FateOpen
	case seen > 0 && len(s.Terms) == v1alpha1.MaxTerms && s.Terms[v1alpha1.MaxTerms-1].Token > seen+1:
		return FateOver
	}
	return FateOpen
}

// Holds says that the lease is held by that request with that token.
func Holds(l *v1alpha1.FencedLease, c v1alpha1.Contender, token int64) bool {
	return l.Status != nil && l.Status.Token == token && l.Status.Holder != nil && SameRequest(l.Status.Holder.Contender, c)
}

// EndOf is the recorded end of the term with that token.
func EndOf(l *v1alpha1.FencedLease, token int64) (v1alpha1.EndReason, bool) {
	if l.Status == nil {
		return "", false
	}
	for _, t := range l.Status.Terms {
		if t.Token == token {
			return t.EndReason, true
		}
	}
	return "", false
}
