// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/client-go/tools/events"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

func TestNews(t *testing.T) {
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	a, b, c := contender("a", 1), contender("b", 2), contender("c", 3)
	held := []protocol.Transition{protocol.Acquire(a, at(1)), protocol.Queue([]v1alpha1.Contender{b}, 1)}
	for name, tc := range map[string]struct {
		before []protocol.Transition
		since  [][]protocol.Transition // each step is seen at once
		want   []string
	}{
		"what was before is not news": {before: held},
		"a grant": {
			since: [][]protocol.Transition{{protocol.Acquire(a, at(1))}},
			want:  []string{`Granted: "i-a" got the lease with token 101.`},
		},
		"a release hands over: one piece of news": {
			before: held,
			since:  [][]protocol.Transition{{protocol.Release(a, at(2))}},
			want:   []string{`Released: The term of "i-a" with token 101 ended: it was released. "i-b" got the lease with token 102.`},
		},
		"a release of a lease that nobody waits for, and the next grant": {
			before: held[:1],
			since:  [][]protocol.Transition{{protocol.Release(a, at(2))}, {protocol.Acquire(c, at(3))}},
			want: []string{
				`Released: The term of "i-a" with token 101 ended: it was released.`,
				`Granted: "i-c" got the lease with token 102.`,
			},
		},
		"several at once, as after a stalled watch": {
			before: held,
			since: [][]protocol.Transition{{
				protocol.End(101, v1alpha1.EndExpired, at(2)), protocol.Release(b, at(3)), protocol.Acquire(c, at(4)),
			}},
			want: []string{
				`Expired!: The term of "i-a" with token 101 ended: its session was silent for longer than its TTL. "i-b" got the lease with token 102.`,
				`Released: The term of "i-b" with token 102 ended: it was released.`,
				`Granted: "i-c" got the lease with token 103.`,
			},
		},
		"a queue is no news": {
			before: held[:1],
			since:  [][]protocol.Transition{{held[1]}, {protocol.Observe(at(3))}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tr, _ := newTestTracker()
			l := lease(t, tc.before...)
			tr.observe(l)
			for _, step := range tc.since {
				l = then(t, l, step...)
				tr.observe(l)
				tr.observe(l) // our own write comes back by the watch
			}
			var got []string
			for _, n := range tr.takeNews(orders) {
				warning := map[bool]string{true: "!"}[n.warning]
				got = append(got, n.reason+warning+": "+n.note)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("news (-want +got):\n%s", diff)
			}
			if again := tr.takeNews(orders); len(again) > 0 {
				t.Errorf("%d pieces of news come twice", len(again))
			}
		})
	}
}

func TestNewsNameTheSession(t *testing.T) {
	tr, _ := newTestTracker()
	l := lease(t, protocol.Acquire(contender("a", 1), start))
	tr.observe(l)
	tr.observe(then(t, l, protocol.Release(contender("a", 1), start)))
	for _, n := range tr.takeNews(orders) {
		session, ok := n.related.(*coordinationv1.Lease)
		if !ok || session.Name != "a" || session.UID != "a" || session.Namespace != orders.Namespace {
			t.Errorf("the event is related to %+v, want the session", n.related)
		}
	}
}

func TestNoteFits(t *testing.T) {
	long := strings.Repeat("€", v1alpha1.MaxIdentityLength)
	n := ended(
		term{Term: v1alpha1.Term{Token: v1alpha1.MaxToken, Identity: long, EndReason: v1alpha1.EndInvalid}},
		&term{Term: v1alpha1.Term{Token: v1alpha1.MaxToken, Identity: long}},
	)
	n.regarding = lease(t)
	recorder := events.NewFakeRecorder(1)
	n.tell(recorder)
	note := strings.TrimPrefix(<-recorder.Events, "Warning Invalid ")
	if len(note) > longestNote || !utf8.ValidString(note) || !strings.HasSuffix(note, "got the lease with token 9007199254740991.") {
		t.Errorf("a note of %d bytes: %s", len(note), note)
	}
}

func TestClip(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		most int
		want string
	}{
		"short enough":                    {"abc", 3, "abc"},
		"cut":                             {"abcdef", 5, "ab…"},
		"not within a character":          {"a€€€", 7, "a€…"},
		"what is no UTF-8 is cut as well": {"\x80\x80\x80\x80", 3, "…"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := clip(tc.text, tc.most); got != tc.want {
				t.Errorf("clip %q to %d gives %q, want %q", tc.text, tc.most, got, tc.want)
			}
		})
	}
}
