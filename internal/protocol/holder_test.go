// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"testing"
	"time"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// TestHolderStopsBeforeExpiry: the session counts from when it sent a renewal, the controller from when it saw
// it, which is later. So by its own clock the session gives up first, by the margin, even if its clock is
// slower than the controller's by as much as the margin allows for.
func TestHolderStopsBeforeExpiry(t *testing.T) {
	for ttl := time.Second; ttl <= time.Hour; ttl += time.Second {
		s := protocol.Session{TTL: ttl}
		sent := 5 * time.Second
		givesUp := protocol.GiveUp(sent, ttl)
		expires := s.Deadline(noon).Sub(noon) + sent
		if margin := expires - givesUp; margin < 250*time.Millisecond || margin < ttl/10 {
			t.Fatalf("TTL %v: the margin is %v", ttl, margin)
		}
		if tries := (givesUp - sent) / protocol.RenewEvery(ttl); tries < 2 {
			t.Fatalf("TTL %v: only %d renewals before it gives up", ttl, tries)
		}
	}
}

func TestNextTicket(t *testing.T) {
	for name, tc := range map[string]struct {
		resourceVersion string
		last, want      int64
	}{
		"the first is the session's resourceVersion":       {"500", 0, 500},
		"a second at the same resourceVersion is one more": {"500", 500, 501},
		"a later resourceVersion is larger":                {"600", 501, 600},
		"never below the last":                             {"400", 501, 502},
		"an odd resourceVersion counts up":                 {"x", 7, 8},
		"from one":                                         {"", 0, 1},
	} {
		if got := protocol.NextTicket(tc.resourceVersion, tc.last); got != tc.want {
			t.Errorf("%s: got %d, want %d", name, got, tc.want)
		}
	}
}

func TestSettled(t *testing.T) {
	for name, tc := range map[string]struct {
		lease  builder
		tested int64
		want   bool
	}{
		"the token that was tested still stands: it may land": {available(), 100, false},
		"the token has passed it: it cannot":                  {held("b", 1), 100, true},
		"also when nobody holds any more":                     {after(v1alpha1.EndReleased), 100, true},
		"a new lease starts above all former tokens":          {fresh(), 100, true},
	} {
		if got := protocol.Settled(tc.lease.FencedLease, tc.tested); got != tc.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
}

func TestFateOf(t *testing.T) {
	me := contender("a", 7)
	full := func(oldest int64) builder { // ten terms of others, the oldest with that token
		return available().token(oldest + 10).history(10)
	}
	for name, tc := range map[string]struct {
		lease builder
		seen  int64
		want  protocol.Fate
	}{
		"a lease without status granted nothing":       {fresh(), 0, protocol.FateOpen},
		"a free lease neither":                         {available(), 0, protocol.FateOpen},
		"held by it":                                   {held("a", 7), 0, protocol.FateGranted},
		"held by another":                              {held("b", 7), 0, protocol.FateOpen},
		"held by a later request of the session":       {held("a", 8), 0, protocol.FateOver},
		"held by an earlier one":                       {held("a", 6), 0, protocol.FateOpen},
		"queued":                                       {held("b", 7).queue(me), 0, protocol.FateOpen},
		"queued, whatever was missed":                  {held("b", 7).queue(me).history(10), 1, protocol.FateOpen},
		"granted and ended":                            {after(v1alpha1.EndExpired), 0, protocol.FateOver},
		"a later one was granted and ended":            {after(v1alpha1.EndExpired).with(func(b builder) { b.Status.Terms[0].Ticket = 8 }), 0, protocol.FateOver},
		"an earlier one was":                           {after(v1alpha1.EndExpired).with(func(b builder) { b.Status.Terms[0].Ticket = 6 }), 0, protocol.FateOpen},
		"ten terms since, all of them recorded":        {full(200), 199, protocol.FateOpen},
		"more terms since than are recorded":           {full(200), 198, protocol.FateOver},
		"as many, but nothing was missed":              {full(200), 0, protocol.FateOpen},
		"held by somebody with our session and ticket": {held("a", 7).with(func(b builder) { b.Status.Holder.User = "sa-z" }), 0, protocol.FateOver},
	} {
		if got := protocol.FateOf(tc.lease.FencedLease, me, tc.seen); got != tc.want {
			t.Errorf("%s: got %s, want %s", name, got, tc.want)
		}
	}
}

func TestHoldsAndEndOf(t *testing.T) {
	me := contender("a", 7)
	for name, tc := range map[string]struct {
		lease builder
		token int64
		holds bool
		ended v1alpha1.EndReason
	}{
		"the present term":                {held("a", 7), 101, true, ""},
		"a later term of the same ticket": {held("a", 7).token(102), 101, false, ""},
		"another ticket's":                {held("a", 8), 101, false, ""},
		"one that ended":                  {after(v1alpha1.EndStolen), 101, false, v1alpha1.EndStolen},
		"one that was followed":           {followed(v1alpha1.EndMaxHold), 101, false, v1alpha1.EndMaxHold},
		"a lease without status":          {fresh(), 101, false, ""},
	} {
		if got := protocol.Holds(tc.lease.FencedLease, me, tc.token); got != tc.holds {
			t.Errorf("%s: holds is %v", name, got)
		}
		if got, ok := protocol.EndOf(tc.lease.FencedLease, tc.token); got != tc.ended || ok != (tc.ended != "") {
			t.Errorf("%s: ended %q, %v", name, got, ok)
		}
	}
}
