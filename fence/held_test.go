// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

func TestLossIsHeardAtOnce(t *testing.T) {
	tests := map[string]struct {
		end  func(a *apiServer, h *Held)
		word string
	}{
		"stolen": {
			end: func(a *apiServer, h *Held) {
				a.do("orders", protocol.End(int64(h.token), v1alpha1.EndStolen, time.Now()))
			},
			word: "Stolen",
		},
		"the longest time is over, and it cools down": {
			end: func(a *apiServer, h *Held) {
				a.change("orders", func(l *v1alpha1.FencedLease) { l.Spec.CooldownSeconds = 10 })
				a.do("orders", protocol.End(int64(h.token), v1alpha1.EndMaxHold, time.Now()))
			},
			word: "MaxHold",
		},
		"stolen, and at once somebody else's": {
			end: func(a *apiServer, h *Held) {
				a.do("orders", protocol.End(int64(h.token), v1alpha1.EndStolen, time.Now()))
				a.hold("orders")
			},
			word: "Stolen",
		},
		"the lease is deleted": {end: func(a *apiServer, _ *Held) { a.deleteLease("orders") }, word: "lost"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				s := a.open(t, Options{})
				held := mustAcquire(t, s, "orders")
				tc.end(a, held)
				synctest.Wait()
				wantLost(t, held.Err(), "orders", tc.word)
				wantLost(t, context.Cause(held.Context()))
				patches := len(a.handled("PATCH lease"))
				wantLost(t, held.Release(t.Context()))
				if len(a.handled("PATCH lease")) != patches {
					t.Error("a release was sent for a term that is over")
				}
				if err := s.Err(); err != nil {
					t.Errorf("the session went with it: %v", err)
				}
			})
		})
	}
}

func TestATokenThatChangesUnderTheSameSessionIsALossAndAGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{})
		held := mustAcquire(t, s, "orders")
		w := acquire(t.Context(), s, "orders") // it waits for the process's own turn, and is not in line yet
		synctest.Wait()
		// An admin ends the term; the next attempt of the same session takes the lease before anything is heard.
		a.setFault(forCalls("GET leases", -1, blackHole))
		a.do("orders", protocol.End(int64(held.token), v1alpha1.EndStolen, time.Now()))
		<-w.done
		wantLost(t, held.Err())
		if w.err != nil || w.held.Token() <= held.Token() || w.held.Err() != nil {
			t.Errorf("the next: %v, error %v", w.held, w.err)
		}
	})
	synctest.Test(t, func(t *testing.T) { // one event says both
		a := newAPIServer("orders")
		s := a.open(t, Options{})
		held := mustAcquire(t, s, "orders")
		l := a.lease("orders")
		next := l.DeepCopy()
		next.Status.Token++
		next.Status.Holder.Ticket = held.by.Ticket + 1
		s.mu.Lock()
		s.slots["orders"].tickets[held.by.Ticket+1] = struct{}{}
		s.mu.Unlock()
		a.mu.Lock()
		a.store(next)
		a.mu.Unlock()
		time.Sleep(time.Second)
		wantLost(t, held.Err())
		if st := a.lease("orders").Status; st.Phase != v1alpha1.PhaseAvailable {
			t.Errorf("the new term, which nobody wants, was not given back: %+v", st.Holder)
		}
	})
}

func TestTermsThatAreNotOursAreLeftAlone(t *testing.T) {
	tests := map[string]func(c *v1alpha1.Contender){
		"another user":                     func(c *v1alpha1.Contender) { c.User = "mallory" },
		"another Pod":                      func(c *v1alpha1.Contender) { c.PodUID = "another" },
		"a ticket that was never used":     func(c *v1alpha1.Contender) { c.Ticket += 5 },
		"a lease that was never asked for": func(*v1alpha1.Contender) {},
	}
	for name, forge := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				s := a.open(t, Options{})
				c := s.self
				c.Ticket = 1
				if !strings.Contains(name, "never asked") {
					other := a.hold("orders")
					ctx, cancel := context.WithCancel(t.Context())
					w := acquire(ctx, s, "orders")
					time.Sleep(time.Second)
					c = a.asker(t, s, "orders")
					cancel()
					<-w.done
					a.do("orders", protocol.Release(other, time.Now()))
				}
				forge(&c)
				a.do("orders", protocol.Acquire(c, time.Now()))
				time.Sleep(time.Minute)
				if h := a.lease("orders").Status.Holder; h == nil || h.Contender != c {
					t.Errorf("holder %+v, want it untouched", h)
				}
			})
		})
	}
}

func TestTheWatchMayFail(t *testing.T) {
	tests := map[string]struct {
		fail   func(a *apiServer)
		within time.Duration
	}{
		"closed without a word": {fail: func(a *apiServer) { a.closeWatches(0) }, within: time.Second},
		"410 Gone":              {fail: func(a *apiServer) { a.closeWatches(http.StatusGone) }, within: time.Second},
		"silent":                {fail: func(a *apiServer) { a.muteWatches() }, within: 15 * time.Second},
		"closed, and the new ones hang": {fail: func(a *apiServer) {
			a.setFault(forCalls("GET watch", -1, blackHole))
			a.closeWatches(0)
		}, within: 15 * time.Second},
		"closed, and the new ones are refused": {fail: func(a *apiServer) {
			a.setFault(forCalls("GET watch", -1, refused(apierrors.NewServiceUnavailable("busy"))))
			a.closeWatches(0)
		}, within: 15 * time.Second},
	}
	for name, tc := range tests {
		t.Run(name+": a steal is heard all the same", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				s := a.open(t, Options{})
				held := mustAcquire(t, s, "orders")
				time.Sleep(time.Second)
				tc.fail(a)
				a.do("orders", protocol.End(int64(held.token), v1alpha1.EndStolen, time.Now()))
				start := time.Now()
				<-held.Context().Done()
				if d := time.Since(start); d > tc.within {
					t.Errorf("heard after %s", d)
				}
			})
		})
		t.Run(name+": a grant is heard all the same", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				other := a.hold("orders")
				s := a.open(t, Options{})
				w := acquire(t.Context(), s, "orders")
				time.Sleep(time.Second)
				a.do("orders", protocol.Queue([]v1alpha1.Contender{a.asker(t, s, "orders")}, 1))
				tc.fail(a)
				a.do("orders", protocol.Release(other, time.Now()))
				start := time.Now()
				<-w.done
				if d := time.Since(start); w.err != nil || d > tc.within {
					t.Errorf("after %s: %v", d, w.err)
				}
			})
		})
	}
	t.Run("it comes back", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			a.open(t, Options{})
			for range 5 {
				a.closeWatches(http.StatusGone)
				time.Sleep(10 * time.Second)
				if n := a.watchers(); n != 1 {
					t.Fatalf("%d watches", n)
				}
			}
			if n := len(a.handled("GET watch")); n > 7 {
				t.Errorf("%d watches begun for 5 that failed", n)
			}
		})
	})
}

func TestAGrantThatCameAndWentUnheardGetsANewTicket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		other := a.hold("orders")
		s := a.open(t, Options{})
		w := acquire(t.Context(), s, "orders")
		time.Sleep(time.Second)
		first := a.want(s, "orders")
		a.do("orders", protocol.Queue([]v1alpha1.Contender{a.asker(t, s, "orders")}, 1))
		a.muteWatches()
		a.do("orders", protocol.Release(other, time.Now()))
		a.do("orders", protocol.End(a.lease("orders").Status.Token, v1alpha1.EndStolen, time.Now()))
		a.hold("orders")
		time.Sleep(20 * time.Second)
		if got := a.want(s, "orders"); got <= first {
			t.Errorf("it waits with ticket %d, which was granted before (%d)", got, first)
		}
		_ = s.Close(t.Context())
		<-w.done
	})
}

func TestRelease(t *testing.T) {
	next := v1alpha1.Contender{Identity: "next", Session: "next", SessionUID: "next", User: "next", Ticket: 1}
	tests := map[string]struct {
		before func(a *apiServer)
		holder string
	}{
		"hands over in the same write": {
			before: func(a *apiServer) { a.do("orders", protocol.Queue([]v1alpha1.Contender{next}, 1)) },
			holder: "next",
		},
		"decides again when the queue changed under it": {
			before: func(a *apiServer) {
				a.muteWatches()
				a.do("orders", protocol.Queue([]v1alpha1.Contender{next}, 1))
			},
			holder: "next",
		},
		"takes a lost answer for success": {
			before: func(a *apiServer) { a.setFault(forCalls("PATCH lease", 1, lostAnswer)) },
		},
		"takes a lost answer for success when somebody else got the lease": {
			before: func(a *apiServer) {
				a.do("orders", protocol.Queue([]v1alpha1.Contender{next}, 1))
				a.setFault(forCalls("PATCH lease", 1, lostAnswer))
			},
			holder: "next",
		},
		"repeats what was lost": {
			before: func(a *apiServer) { a.setFault(forCalls("PATCH lease", 1, blackHole)) },
		},
		"repeats what an overloaded API server refused": {
			before: func(a *apiServer) {
				a.setFault(forCalls("PATCH lease", 3, refused(apierrors.NewServiceUnavailable("busy"))))
			},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				s := a.open(t, Options{TTL: time.Minute})
				held := mustAcquire(t, s, "orders")
				synctest.Wait()
				tc.before(a)
				synctest.Wait()
				ctx, cancel := context.WithCancel(t.Context())
				cancel() // a release is not bounded by its caller
				if err := held.Release(ctx); err != nil {
					t.Fatal(err)
				}
				st := a.lease("orders").Status
				got := ""
				if st.Holder != nil {
					got = st.Holder.Identity
				}
				if got != tc.holder || st.Terms[0].EndReason != v1alpha1.EndReleased || len(st.Terms) != 1 {
					t.Errorf("holder %q, terms %+v", got, st.Terms)
				}
			})
		})
	}

	t.Run("gives up in time, and the session goes on trying", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			s := a.open(t, Options{})
			held := mustAcquire(t, s, "orders")
			a.setFault(forCalls("PATCH lease", -1, blackHole))
			start := time.Now()
			if err := held.Release(t.Context()); err == nil {
				t.Error("no error")
			}
			if d := time.Since(start); d > cleanUpTimeout+time.Second {
				t.Errorf("took %s", d)
			}
			if held.Context().Err() == nil {
				t.Error("the work goes on")
			}
			a.setFault(nil)
			time.Sleep(30 * time.Second)
			if st := a.lease("orders").Status; st.Phase != v1alpha1.PhaseAvailable {
				t.Errorf("the lease is %s", st.Phase)
			}
			if err := held.Release(t.Context()); err != nil {
				t.Errorf("repeated: %v", err)
			}
			mustAcquire(t, s, "orders")
		})
	})
}

func TestDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{})
		boom := errors.New("boom")
		free := func() bool { return a.lease("orders").Status.Phase == v1alpha1.PhaseAvailable }

		var work context.Context
		ctx, cancel := context.WithCancel(t.Context())
		err := s.Do(ctx, "orders", func(ctx context.Context, token Token) error {
			work = ctx
			if int64(token) != a.lease("orders").Status.Token {
				t.Errorf("token %d", token)
			}
			cancel() // the caller's cancellation reaches the work, and does not hinder the release
			<-ctx.Done()
			return boom
		})
		if !errors.Is(err, boom) || errors.Is(err, ErrLost) || !free() || work.Err() == nil {
			t.Errorf("error %v, free %v", err, free())
		}

		err = s.Do(t.Context(), "orders", func(ctx context.Context, token Token) error {
			a.do("orders", protocol.End(int64(token), v1alpha1.EndStolen, time.Now()))
			<-ctx.Done()
			wantLost(t, context.Cause(ctx))
			return nil
		})
		wantLost(t, err)

		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed")
				}
			}()
			_ = s.Do(t.Context(), "orders", func(context.Context, Token) error { panic("boom") })
		}()
		if !free() {
			t.Error("a panic keeps the lease")
		}
		if err := s.Do(t.Context(), "missing", nil); !apierrors.IsNotFound(err) {
			t.Errorf("got %v", err)
		}
	})
}

func TestErrorsSayWhatToDoNext(t *testing.T) {
	fencedleases, leases := schema.GroupResource{Group: v1alpha1.GroupVersion.Group, Resource: "fencedleases"}, schema.GroupResource{Resource: "leases"}
	rights := errors.New(`User "u" cannot list resource "fencedleases" in API group "fencedlease.dev" in the namespace "default"`)
	noSuchPath := &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
		Message: "the server could not find the requested resource",
		Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseTypeUnexpectedServerResponse, Message: "404 page not found"}}},
	}}
	tests := map[string]struct {
		f    fault
		is   func(error) bool
		word string
	}{
		"no FencedLease installed": {
			f: forCalls("GET leases", 1, refused(noSuchPath)), is: apierrors.IsNotFound, word: "config/crd",
		},
		"no such namespace": {
			f:  forCalls("POST session", 1, refused(apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "default"))),
			is: apierrors.IsNotFound, word: `create the namespace "default"`,
		},
		"no right to list leases": {
			f:  forCalls("GET leases", 1, refused(apierrors.NewForbidden(fencedleases, "", rights))),
			is: apierrors.IsForbidden, word: "fencedlease-contender",
		},
		"no right to watch leases": {
			f:  forCalls("GET watch", 1, refused(apierrors.NewForbidden(fencedleases, "", rights))),
			is: apierrors.IsForbidden, word: "fencedlease-contender",
		},
		"no right to create sessions": {
			f:  forCalls("POST session", 1, refused(apierrors.NewForbidden(leases, "", rights))),
			is: apierrors.IsForbidden, word: "fencedlease-contender",
		},
		"no answer": {
			f: blackHole, is: func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }, word: "http://api",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				a.setFault(tc.f)
				_, err := NewSession(t.Context(), a.config(), Options{clock: monotonic()})
				if err == nil || !tc.is(err) || !strings.Contains(err.Error(), tc.word) {
					t.Errorf("got %v", err)
				}
				if len(a.sessions) != 0 {
					t.Error("a session was left behind")
				}
			})
		})
	}
	t.Run("no right to renew", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			s := a.open(t, Options{})
			a.setFault(forCalls("PUT session", -1, refused(apierrors.NewForbidden(leases, s.Name(), rights))))
			<-s.Done()
			wantLost(t, s.Err(), "cannot list resource")
		})
	})
	t.Run("no right to acquire", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			s := a.open(t, Options{})
			a.setFault(forCalls("PATCH lease", -1, refused(apierrors.NewForbidden(fencedleases, "orders", rights))))
			_, err := s.Acquire(t.Context(), "orders")
			if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "fencedlease-contender") {
				t.Errorf("got %v", err)
			}
		})
	})
}

func TestWhatIsOldChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{})
		free := a.lease("orders")
		first := mustAcquire(t, s, "orders")
		held := a.lease("orders")
		if s.observe(free) || first.Err() != nil {
			t.Errorf("a read from before the grant ended the term: %v", first.Err())
		}
		if err := first.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		// A request under way keeps the slot, and its ticket, alive.
		a.hold("orders")
		w := acquire(t.Context(), s, "orders")
		time.Sleep(time.Second)
		s.mu.Lock()
		s.slots["orders"].tickets[held.Status.Holder.Ticket] = struct{}{}
		s.slots["orders"].seen = held.Status.Token // as if the watch were slow
		s.slots["orders"].ended = held.Status.Token
		s.mu.Unlock()
		patches := len(a.handled("PATCH lease"))
		if s.observe(held) || s.observe(free) {
			t.Error("a read from before the release is news")
		}
		synctest.Wait()
		s.mu.Lock()
		seen := s.slots["orders"].seen
		s.mu.Unlock()
		if len(a.handled("PATCH lease")) != patches || seen != held.Status.Token {
			t.Errorf("a term that was over was given back again, or forgotten: seen %d", seen)
		}
		_ = s.Close(t.Context())
		<-w.done
	})
}
