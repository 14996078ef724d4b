// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	jsonpatchv5 "github.com/evanphx/json-patch/v5"
	jsonpatch "gopkg.in/evanphx/json-patch.v4" // the one in the API server

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// apply applies a patch as the API server does: its library, its order, nothing on failure. The newer version
// of the library, which clients and the fake API server use, must agree.
func apply(tb testing.TB, doc, patch []byte) ([]byte, error) {
	tb.Helper()
	ops, err := jsonpatch.DecodePatch(patch)
	if err != nil {
		tb.Fatalf("decode %s: %v", patch, err)
	}
	got, err := ops.Apply(doc)
	newer, err5 := jsonpatchv5.DecodePatch(patch)
	if err5 != nil {
		tb.Fatalf("v5: decode %s: %v", patch, err5)
	}
	got5, err5 := newer.Apply(doc)
	if (err == nil) != (err5 == nil) || err == nil && canonical(tb, got) != canonical(tb, got5) {
		tb.Fatalf("the versions of the library disagree on %s\nv4: %s, %v\nv5: %s, %v", patch, got, err, got5, err5)
	}
	return got, err
}

// moves are transitions that somebody might want of a lease in any state: legal, illegal and late ones.
func moves(l *v1alpha1.FencedLease) []protocol.Transition {
	a, b, c := contender("a", 1), contender("b", 1), contender("c", 1)
	all := []protocol.Transition{
		protocol.Initialise(noon),
		protocol.Acquire(a, noon), protocol.Acquire(without(b), noon), protocol.Acquire(contender("a", 2), noon),
		protocol.Grant(a, nil, 0, noon), protocol.Grant(b, []v1alpha1.Contender{a, c}, 4, noon),
		protocol.Release(a, noon), protocol.Release(contender("a", 2), noon),
		protocol.Queue(nil, 0), protocol.Queue([]v1alpha1.Contender{b}, 1), protocol.Queue([]v1alpha1.Contender{b, c}, 9),
		protocol.EndCooldown(noon), protocol.Observe(noon),
	}
	if l.Status == nil {
		return all
	}
	s := l.Status
	all = append(all,
		protocol.End(s.Token, v1alpha1.EndExpired, noon), protocol.End(s.Token, v1alpha1.EndStolen, noon),
		protocol.End(s.Token-1, v1alpha1.EndMaxHold, noon))
	if s.Holder != nil {
		all = append(all, protocol.Release(s.Holder.Contender, noon))
	}
	if len(s.Queue) > 0 {
		all = append(all,
			protocol.Queue(s.Queue[1:], s.Waiting-1),
			protocol.Queue(append(slices.Clone(s.Queue), contender("d", 3)), s.Waiting+1))
	}
	return all
}

// specs are the leases to start from.
func specs() map[string]builder {
	return map[string]builder{
		"a plain lease":           fresh(),
		"a lease with a cooldown": fresh().cooldown(5),
		"a lease with a floor":    fresh().minToken(105),
		"a lease near its end": fresh().with(func(b builder) {
			b.ResourceVersion = fmt.Sprint(v1alpha1.MaxToken - 2)
		}),
	}
}

// TestPatchDoesWhatApplySays: for every reachable state and every transition, the patch makes exactly the
// object that Apply returns, and there is a patch exactly when Apply agrees.
func TestPatchDoesWhatApplySays(t *testing.T) {
	for name, start := range specs() {
		t.Run(name, func(t *testing.T) {
			seen := map[string]bool{}
			frontier := []*v1alpha1.FencedLease{start.FencedLease}
			for range 6 { // more than the longest way without going in circles: initialise, grant, queue, end, hand over
				var next []*v1alpha1.FencedLease
				for _, l := range frontier {
					next = append(next, checkMoves(t, l, seen)...)
				}
				frontier = next
			}
			if len(seen) < 100 {
				t.Errorf("only %d states were reached", len(seen))
			}
		})
	}
}

// checkMoves checks every move from l, and returns the states not seen before.
func checkMoves(t *testing.T, l *v1alpha1.FencedLease, seen map[string]bool) []*v1alpha1.FencedLease {
	t.Helper()
	var fresh []*v1alpha1.FencedLease
	doc := encode(t, l)
	for _, move := range moves(l) {
		want, wantErr := protocol.Apply(l, move)
		patch, next, err := protocol.Patch(l, move)
		if wantErr != nil {
			if err == nil || err.Error() != wantErr.Error() || patch != nil || next != nil {
				t.Fatalf("%s on %s: Apply says %v, Patch says %v", move, line(l), wantErr, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%s on %s: %v", move, line(l), err)
		}
		got, err := apply(t, doc, patch)
		if err != nil {
			t.Fatalf("%s on %s: the patch does not apply: %v\n%s", move, line(l), err, patch)
		}
		wantDoc := canonical(t, encode(t, want))
		if canonical(t, got) != wantDoc || canonical(t, encode(t, next)) != wantDoc {
			t.Fatalf("%s on %s:\nApply: %s\nPatch: %s\npatch: %s", move, line(l), wantDoc, canonical(t, got), patch)
		}
		if !seen[wantDoc] {
			seen[wantDoc] = true
			fresh = append(fresh, want)
		}
	}
	return fresh
}

// TestPatchGuardsWhatItDecidedOn: along random histories of a lease, each decision is applied to all the
// other states of the same history, as an answer that comes late or a cache that is behind would do it. It
// applies exactly where nothing has changed that it depends on, and does there what Apply would do.
func TestPatchGuardsWhatItDecidedOn(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	tried, landed := 0, 0
	for range 10 {
		states := history(t, random)
		docs := make([][]byte, len(states))
		for i, l := range states {
			docs[i] = encode(t, l)
		}
		for _, from := range states {
			for _, move := range moves(from) {
				patch, next, err := protocol.Patch(from, move)
				if err != nil {
					continue
				}
				for j, to := range states {
					tried++
					got, err := apply(t, docs[j], patch)
					if want := undisturbed(move, from, to, next); want != (err == nil) {
						t.Fatalf("seed %d: %s, decided on %s, applied to %s: %v\n%s", seed, move, line(from), line(to), err, patch)
					}
					if err == nil {
						landed++
						sameAsApply(t, to, move, got)
					}
				}
			}
		}
	}
	if landed < 1000 || tried < 3*landed {
		t.Errorf("%d patches tried, %d landed: too few to say anything", tried, landed)
	}
}

// history is a lease over some eighteen moves; now and then somebody changes its spec.
func history(t *testing.T, random *rand.Rand) []*v1alpha1.FencedLease {
	t.Helper()
	l := fresh().cooldown(int32(5 * random.IntN(2))).FencedLease
	states := []*v1alpha1.FencedLease{l}
	for tries := 0; tries < 200 && len(states) < 18; tries++ {
		all := moves(l)
		next, err := protocol.Apply(l, all[random.IntN(len(all))])
		if err != nil {
			continue
		}
		if random.IntN(8) == 0 {
			next.Generation++
		}
		next.ResourceVersion = fmt.Sprint(100 + len(states))
		states, l = append(states, next), next
	}
	return states
}

// undisturbed says whether nothing that the move was decided on differs between two states.
func undisturbed(move protocol.Transition, from, to, next *v1alpha1.FencedLease) bool {
	if move.Kind() == protocol.KindInitialise {
		return from.ResourceVersion == to.ResourceVersion
	}
	if to.Status == nil {
		return false
	}
	a, b := from.Status, to.Status
	sameTerm := a.Token == b.Token && a.Phase == b.Phase
	switch move.Kind() {
	case protocol.KindObserve:
		return from.Generation == to.Generation
	case protocol.KindQueue: // somebody may have joined behind those who were seen
		return a.Phase == b.Phase && len(b.Queue) >= len(a.Queue) && slices.Equal(a.Queue, b.Queue[:len(a.Queue)]) &&
			(len(a.Queue) > 0 || len(b.Queue) == 0)
	case protocol.KindRelease, protocol.KindEnd, protocol.KindEndCooldown:
		switch next.Status.Phase {
		case v1alpha1.PhaseHeld:
			return sameTerm && len(b.Queue) > 0 && a.Queue[0] == b.Queue[0] && a.Waiting == b.Waiting
		case v1alpha1.PhaseAvailable:
			return sameTerm && len(b.Queue) == 0
		}
	}
	return sameTerm
}

// sameAsApply says that a patch which landed on l made what Apply would have made of it.
func sameAsApply(t *testing.T, l *v1alpha1.FencedLease, move protocol.Transition, got []byte) {
	t.Helper()
	want, err := protocol.Apply(l, move)
	if err != nil {
		// The one thing that a patch leaves to the CRD's rules: a queue entry that has become the holder.
		if move.Kind() == protocol.KindQueue && errors.Is(err, protocol.ErrIllegal) && strings.Contains(err.Error(), "stands in line twice") {
			return
		}
		t.Fatalf("%s landed on %s, where it may not happen: %v", move, line(l), err)
	}
	if canonical(t, encode(t, want)) != canonical(t, got) {
		t.Fatalf("%s on %s:\nApply: %s\nPatch: %s", move, line(l), encode(t, want), got)
	}
}

// TestPatchBytes pins what goes over the wire, for readers and for other clients.
func TestPatchBytes(t *testing.T) {
	holder := `{"identity":"a","session":"a-1","sessionUID":"uid-a","user":"sa-a","podUID":"pod-a","ticket":7,"acquireTime":"2026-03-01T12:00:00.123456Z"}`
	for name, tc := range map[string]struct {
		lease builder
		do    protocol.Transition
		want  []string
	}{
		"acquire": {available(), protocol.Acquire(contender("a", 7), noon), []string{
			`{"op":"test","path":"/status/token","value":100}`,
			`{"op":"test","path":"/status/phase","value":"Available"}`,
			`{"op":"replace","path":"/status/token","value":101}`,
			`{"op":"replace","path":"/status/phase","value":"Held"}`,
			`{"op":"replace","path":"/status/handovers","value":1}`,
			`{"op":"add","path":"/status/holder","value":` + holder + `}`,
		}},
		"release to nobody": {held("a", 7).history(10), protocol.Release(contender("a", 7), noon), []string{
			`{"op":"test","path":"/status/token","value":101}`,
			`{"op":"test","path":"/status/phase","value":"Held"}`,
			`{"op":"add","path":"/status/terms/0","value":{"token":101,"identity":"a","sessionUID":"uid-a","user":"sa-a","podUID":"pod-a","ticket":7,"startTime":"2026-03-01T12:00:00.123456Z","endTime":"2026-03-01T12:00:00.123456Z","endReason":"Released"}}`,
			`{"op":"remove","path":"/status/terms/10"}`,
			`{"op":"test","path":"/status/queue","value":[]}`,
			`{"op":"remove","path":"/status/holder"}`,
			`{"op":"replace","path":"/status/phase","value":"Available"}`,
		}},
		"queue emptied": {held("a", 7).queue(contender("b", 8)), protocol.Queue(nil, 0), []string{
			`{"op":"test","path":"/status/phase","value":"Held"}`,
			`{"op":"test","path":"/status/queue/0/sessionUID","value":"uid-b"}`,
			`{"op":"test","path":"/status/queue/0/ticket","value":8}`,
			`{"op":"replace","path":"/status/queue","value":[]}`,
			`{"op":"replace","path":"/status/waiting","value":0}`,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			patch, _, err := protocol.Patch(tc.lease.FencedLease, tc.do)
			if err != nil {
				t.Fatal(err)
			}
			var got []json.RawMessage
			if err := json.Unmarshal(patch, &got); err != nil {
				t.Fatal(err)
			}
			if len(got) != len(tc.want) {
				t.Fatalf("got %d operations, want %d: %s", len(got), len(tc.want), patch)
			}
			for i := range got {
				if string(got[i]) != tc.want[i] {
					t.Errorf("operation %d:\n got %s\nwant %s", i, got[i], tc.want[i])
				}
			}
		})
	}
}

// TestPatchTestsOnlyNumbersAndASCII: the API server compares the bytes of what it stored with those of the
// patch, and the two may write the same text differently.
func TestPatchTestsOnlyNumbersAndASCII(t *testing.T) {
	odd := func(name string, ticket int64) v1alpha1.Contender {
		c := contender(name, ticket)
		c.Identity, c.User = "<ä&日本>"+name, "ü\u2028"+name
		return c
	}
	l := held("a", 7).queue(odd("b", 8), odd("c", 9)).with(func(b builder) { b.Status.Holder.Contender = odd("a", 7) })
	for _, move := range []protocol.Transition{
		protocol.Release(odd("a", 7), noon), protocol.End(101, v1alpha1.EndStolen, noon), protocol.Queue([]v1alpha1.Contender{odd("c", 9)}, 1),
	} {
		patch, next, err := protocol.Patch(l.FencedLease, move)
		if err != nil {
			t.Fatal(err)
		}
		var ops []struct {
			Op    string          `json:"op"`
			Value json.RawMessage `json:"value"`
		}
		if err := json.Unmarshal(patch, &ops); err != nil {
			t.Fatal(err)
		}
		for _, op := range ops {
			if op.Op == "test" && strings.ContainsFunc(string(op.Value), func(r rune) bool { return r > 126 || r == '\\' }) {
				t.Errorf("%s tests %s", move, op.Value)
			}
		}
		got, err := apply(t, encode(t, l.FencedLease), patch)
		if err != nil || canonical(t, got) != canonical(t, encode(t, next)) {
			t.Errorf("%s: %v\n got %s\nwant %s", move, err, got, encode(t, next))
		}
	}
}
