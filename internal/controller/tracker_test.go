// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// sight is a session as the watch shows it, with a TTL of 10 s; its UID is its name.
func sight(name string, version int, wants string) *coordinationv1.Lease {
	identity, ttl := "i-"+name, int32(10)
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: name, UID: types.UID(name), ResourceVersion: strconv.Itoa(version),
			Labels:      map[string]string{v1alpha1.SessionLabel: "true"},
			Annotations: map[string]string{v1alpha1.UserAnnotation: "u-" + name, v1alpha1.WaitingForAnnotation: wants},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &identity, LeaseDurationSeconds: &ttl},
	}
}

// contender is the request of the session of that name.
func contender(name string, ticket int64) v1alpha1.Contender {
	return v1alpha1.Contender{Identity: "i-" + name, Session: name, SessionUID: types.UID(name), User: "u-" + name, Ticket: ticket}
}

var orders = types.NamespacedName{Namespace: "shop", Name: "orders"}

// lease is the lease orders after the transitions, each of which costs one resourceVersion, from 100 on.
func lease(t *testing.T, transitions ...protocol.Transition) *v1alpha1.FencedLease {
	t.Helper()
	l := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{
		Namespace: orders.Namespace, Name: orders.Name, UID: "lease", ResourceVersion: "100",
	}}
	l.Spec.LeaseDurationSeconds = 10
	return then(t, l, append([]protocol.Transition{protocol.Initialise(start)}, transitions...)...)
}

// then is the lease after some more transitions.
func then(t *testing.T, l *v1alpha1.FencedLease, transitions ...protocol.Transition) *v1alpha1.FencedLease {
	t.Helper()
	for _, transition := range transitions {
		next, err := protocol.Apply(l, transition)
		if err != nil {
			t.Fatalf("apply %s: %v", transition, err)
		}
		version, err := strconv.Atoi(l.ResourceVersion)
		if err != nil {
			t.Fatal(err)
		}
		next.ResourceVersion = strconv.Itoa(version + 1)
		l = next
	}
	return l
}

func newTestTracker() (*tracker, *clocktesting.FakeClock) {
	c := clocktesting.NewFakeClock(start)
	return newTracker(c), c
}

func TestSessionTime(t *testing.T) {
	for name, tc := range map[string]struct {
		happens func(tr *tracker, c *clocktesting.FakeClock)
		want    time.Duration
	}{
		"counts from when it was seen first": {
			happens: func(_ *tracker, c *clocktesting.FakeClock) { c.Step(4 * time.Second) },
			want:    6 * time.Second,
		},
		"counts anew from a new resourceVersion": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				c.Step(4 * time.Second)
				tr.look(sight("a", 2, ""), false)
			},
			want: 10 * time.Second,
		},
		"does not count anew from a version that was seen already": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				c.Step(4 * time.Second)
				tr.look(sight("a", 1, ""), false)
			},
			want: 6 * time.Second,
		},
		"counts anew when only the API server knows of a renewal, once": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				c.Step(10 * time.Second)
				tr.left("a", "3")
				c.Step(time.Second)
				tr.look(sight("a", 2, ""), false)
				tr.look(sight("a", 3, ""), false)
				tr.left("a", "3")
			},
			want: 9 * time.Second,
		},
		"runs out when the API server knows of none": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				c.Step(11 * time.Second)
				tr.left("a", "1")
			},
			want: -time.Second,
		},
		"counts anew from the first read after the API server could not be read": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				tr.readable(c.Now())
				c.Step(9 * time.Second)
				tr.unreadable()
				c.Step(9 * time.Second)
				tr.readable(c.Now())
			},
			want: 10 * time.Second,
		},
		"counts anew from the first read after nobody had tried for long": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				tr.readable(c.Now())
				c.Step(longestHole + 1)
				tr.readable(c.Now())
			},
			want: 10 * time.Second,
		},
		"counts anew after a read that hung for most of its time, though it succeeded": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				begun := c.Now()
				tr.readable(begun)
				c.Step(longestHole + 1)
				tr.readable(begun)
			},
			want: 10 * time.Second,
		},
		"needs no read while it is seen to renew": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				tr.readable(c.Now().Add(-time.Second))
				c.Step(4 * time.Second)
				tr.look(sight("a", 2, ""), false)
				c.Step(4 * time.Second)
				tr.left("a", "2")
			},
			want: 6 * time.Second,
		},
		"goes on while the API server is read": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				for range 4 {
					tr.readable(c.Now())
					c.Step(2 * time.Second)
				}
			},
			want: 2 * time.Second,
		},
		"counts anew when it renewed at the last moment": {
			happens: func(tr *tracker, c *clocktesting.FakeClock) {
				c.Step(11 * time.Second)
				tr.condemn("a")
				tr.spared("a")
			},
			want: 10 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			tr, c := newTestTracker()
			tr.look(sight("a", 1, ""), true)
			tc.happens(tr, c)
			if got := tr.left("a", ""); got != tc.want {
				t.Errorf("the session has %v left, want %v", got, tc.want)
			}
		})
	}
}

func TestRenewalTouchesNothing(t *testing.T) {
	tr, _ := newTestTracker()
	tr.look(sight("a", 1, "orders=7"), false)
	if wants, touched := tr.look(sight("a", 2, "orders=7"), false); len(wants) > 0 || touched {
		t.Errorf("a plain renewal changes the wants %q (touched: %t), want nothing", wants, touched)
	}
}

func TestWantsThatChanged(t *testing.T) {
	for name, tc := range map[string]struct {
		was, is string
		want    []string
	}{
		"one more":        {"a=1", "a=1 b=2", []string{"b"}},
		"one less":        {"a=1 b=2", "b=2", []string{"a"}},
		"one asked again": {"a=1 b=2", "a=3 b=2", []string{"a"}},
		"unusable":        {"a=1 b=2", "a=", []string{"a", "b"}},
	} {
		t.Run(name, func(t *testing.T) {
			tr, _ := newTestTracker()
			tr.look(sight("s", 1, tc.was), false)
			got, _ := tr.look(sight("s", 2, tc.is), false)
			slices.Sort(got)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("leases to look at (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOrder(t *testing.T) {
	for name, tc := range map[string]struct {
		happens func(tr *tracker)
		want    []types.UID
	}{
		"those found at the start stand in the order of their tickets": {
			happens: func(tr *tracker) {
				tr.look(sight("a", 1, "orders=9"), true)
				tr.look(sight("b", 2, "orders=7"), true)
				tr.look(sight("c", 3, "orders=8"), true)
			},
			want: []types.UID{"b", "c", "a"},
		},
		"those who come later stand behind, as they come": {
			happens: func(tr *tracker) {
				tr.look(sight("a", 1, "orders=9"), true)
				tr.look(sight("b", 2, "orders=3"), false)
				tr.look(sight("c", 3, "orders=2"), false)
			},
			want: []types.UID{"a", "b", "c"},
		},
		"a renewal keeps the place, a new ticket loses it": {
			happens: func(tr *tracker) {
				tr.look(sight("a", 1, "orders=1"), false)
				tr.look(sight("b", 2, "orders=2"), false)
				tr.look(sight("c", 3, "orders=3"), false)
				tr.look(sight("a", 4, "orders=4"), false)
				tr.look(sight("b", 5, "orders=2"), false)
			},
			want: []types.UID{"b", "c", "a"},
		},
		"who is gone, wants it no longer, or is unusable, does not stand there": {
			happens: func(tr *tracker) {
				for i, name := range []string{"a", "b", "c", "d"} {
					tr.look(sight(name, i+1, "orders=5"), false)
				}
				tr.gone("a")
				tr.look(sight("b", 6, ""), false)
				tr.look(sight("c", 7, "orders=x"), false)
			},
			want: []types.UID{"d"},
		},
		"an echo does not bring back who is gone": {
			happens: func(tr *tracker) {
				tr.look(sight("a", 1, "orders=1"), false)
				tr.gone("a")
				tr.look(sight("a", 2, "orders=2"), false)
			},
			want: nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			tr, _ := newTestTracker()
			tc.happens(tr)
			var got []types.UID
			for _, p := range tr.view(lease(t), nil).Order {
				got = append(got, p.SessionUID)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("line (-want +got):\n%s", diff)
			}
		})
	}
}

func TestView(t *testing.T) {
	held := func(t *testing.T) *v1alpha1.FencedLease {
		return lease(t, protocol.Acquire(contender("a", 7), start))
	}
	for name, tc := range map[string]struct {
		happens func(t *testing.T, tr *tracker, c *clocktesting.FakeClock) *v1alpha1.FencedLease
		want    protocol.View
	}{
		"a term found at the start is not judged as new, and counts from then": {
			happens: func(t *testing.T, tr *tracker, c *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.observe(held(t))
				c.Step(3 * time.Second)
				return held(t)
			},
			want: protocol.View{HeldFor: 3 * time.Second, CooledFor: 3 * time.Second, QueuedFor: longAgo},
		},
		"a term that begins before our eyes is new until it is judged": {
			happens: func(t *testing.T, tr *tracker, _ *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.observe(lease(t))
				tr.observe(held(t))
				return held(t)
			},
			want: protocol.View{Begun: true, QueuedFor: longAgo},
		},
		"a judged term is not new": {
			happens: func(t *testing.T, tr *tracker, _ *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.observe(lease(t))
				tr.observe(held(t))
				tr.judged(held(t))
				return held(t)
			},
			want: protocol.View{QueuedFor: longAgo},
		},
		"a session that was seen and closed before its term was judged was closed, not invalid": {
			happens: func(t *testing.T, tr *tracker, _ *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.look(sight("a", 1, ""), false)
				tr.observe(lease(t))
				tr.observe(held(t))
				tr.gone("a")
				return held(t)
			},
			want: protocol.View{QueuedFor: longAgo},
		},
		"a session of another namespace is none": {
			happens: func(t *testing.T, tr *tracker, _ *clocktesting.FakeClock) *v1alpha1.FencedLease {
				elsewhere := sight("a", 1, "orders=9")
				elsewhere.Namespace = "elsewhere"
				tr.look(elsewhere, false)
				tr.observe(held(t))
				if unknown := tr.unknown(held(t)); len(unknown) != 1 {
					t.Errorf("got %d unknown sessions, want the holder's", len(unknown))
				}
				return held(t)
			},
			want: protocol.View{QueuedFor: longAgo},
		},
		"a term that others claimed with a session's UID serves no request of it": {
			happens: func(t *testing.T, tr *tracker, _ *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.look(sight("a", 1, ""), false)
				forged := held(t)
				forged.Status.Holder.User, forged.Status.Holder.Ticket = "mallory", v1alpha1.MaxToken
				tr.observe(forged)
				if served := tr.view(forged, nil).Served; len(served) != 0 {
					t.Errorf("served: %v, want nobody", served)
				}
				tr.gone("a")
				return held(t)
			},
			want: protocol.View{QueuedFor: longAgo},
		},
		"a session that is gone after a delete of ours was sent has expired": {
			happens: func(t *testing.T, tr *tracker, _ *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.look(sight("a", 1, ""), false)
				tr.observe(held(t))
				tr.condemn("a")
				tr.gone("a")
				return held(t)
			},
			want: protocol.View{Expired: true, QueuedFor: longAgo},
		},
		"one that renewed after a failed delete and is gone then was closed": {
			happens: func(t *testing.T, tr *tracker, _ *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.look(sight("a", 1, ""), false)
				tr.observe(held(t))
				tr.condemn("a")
				tr.look(sight("a", 2, ""), false)
				tr.gone("a")
				return held(t)
			},
			want: protocol.View{QueuedFor: longAgo},
		},
		"an old state does not undo a newer one": {
			happens: func(t *testing.T, tr *tracker, c *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.observe(held(t))
				c.Step(time.Second)
				tr.observe(lease(t))
				return held(t)
			},
			want: protocol.View{HeldFor: time.Second, CooledFor: time.Second, QueuedFor: longAgo},
		},
		"a lease created again is another one": {
			happens: func(t *testing.T, tr *tracker, c *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.observe(lease(t))
				c.Step(time.Second)
				again := held(t)
				again.UID = "again"
				tr.observe(again)
				tr.observe(lease(t)) // an echo of the first
				return again
			},
			want: protocol.View{QueuedFor: longAgo},
		},
		"it is known when we wrote the queue": {
			happens: func(t *testing.T, tr *tracker, c *clocktesting.FakeClock) *v1alpha1.FencedLease {
				tr.observe(held(t))
				tr.queued(orders)
				c.Step(time.Second)
				return held(t)
			},
			want: protocol.View{HeldFor: time.Second, CooledFor: time.Second, QueuedFor: time.Second},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tr, c := newTestTracker()
			l := tc.happens(t, tr, c)
			got := tr.view(l, nil)
			got.Now, got.Sessions, got.Order, got.Served = time.Time{}, nil, nil, nil
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("view (-want +got):\n%s", diff)
			}
		})
	}
}

func TestServed(t *testing.T) {
	tr, _ := newTestTracker()
	tr.look(sight("a", 1, "orders=7"), false)
	l := lease(t, protocol.Acquire(contender("a", 7), start))
	tr.observe(l)
	for range v1alpha1.MaxTerms + 1 { // until the recorded terms do not say it any more
		l = then(t, l, protocol.Release(l.Status.Holder.Contender, start), protocol.Acquire(contender("b", 1), start))
		tr.observe(l)
	}
	if got := tr.view(l, nil).Served["a"]; got != 7 {
		t.Errorf("ticket %d of the session is remembered as served, want 7", got)
	}
	tr.gone("a")
	if _, still := tr.view(l, nil).Served["a"]; still {
		t.Error("a session that is gone is still remembered")
	}
}

func TestFoundSessionKeepsItsPlace(t *testing.T) {
	tr, _ := newTestTracker()
	l := lease(t, protocol.Acquire(contender("a", 1), start), protocol.Queue([]v1alpha1.Contender{contender("b", 2)}, 1))
	if got := len(tr.unknown(l)); got != 2 {
		t.Fatalf("%d sessions are unknown, want 2", got)
	}
	found := map[types.UID]protocol.Session{}
	for _, s := range []*coordinationv1.Lease{sight("a", 1, "orders=1"), sight("b", 2, "orders=2")} {
		session, err := protocol.ParseSession(s)
		if err != nil {
			t.Fatal(err)
		}
		found[s.UID] = session
	}
	tr.look(sight("a", 1, "orders=1"), false)
	tr.gone("a") // closed after it was found
	v := tr.view(l, found)
	if _, alive := v.Sessions["a"]; alive {
		t.Error("a session lives that was seen to close")
	}
	v.Sessions["a"] = found["a"]
	if step, _, due := protocol.Settle(l, v); due && step.Kind() == protocol.KindQueue {
		t.Errorf("%s, although the waiter was found by the API server", step)
	}
}

func TestBounded(t *testing.T) {
	tr, c := newTestTracker()
	for i := range 100 {
		name := "s" + strconv.Itoa(i)
		tr.look(sight(name, i+1, "orders=1 billing=2"), false)
		tr.gone(types.UID(name))
	}
	tr.observe(lease(t))
	tr.forget(orders)
	c.Step(rememberFates + 1)
	tr.sweep()
	if n := len(tr.sessions) + len(tr.names) + len(tr.lines) + len(tr.fates) + len(tr.leases); n != 0 {
		t.Errorf("%d things are remembered of what is gone, want none", n)
	}
}

func TestCounts(t *testing.T) {
	tr, _ := newTestTracker()
	tr.look(sight("a", 1, "orders=7"), false)
	tr.observe(lease(t, protocol.Acquire(contender("a", 1), start), protocol.Queue([]v1alpha1.Contender{contender("b", 2)}, 5)))
	want := counts{sessions: 1, held: 1, waiting: 5}
	if got := tr.counts(); got != want {
		t.Errorf("counts %+v, want %+v", got, want)
	}
}
