// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// want is the ticket with which the session waits for the lease; 0 if it does not.
func (a *apiServer) want(s *Session, lease string) int64 {
	wants, _ := protocol.ParseWants(a.session(s.Name()).Annotations[v1alpha1.WaitingForAnnotation])
	return wants[lease]
}

// asker is the session as it stands in line for the lease.
func (a *apiServer) asker(t *testing.T, s *Session, lease string) v1alpha1.Contender {
	t.Helper()
	parsed, err := protocol.ParseSession(a.session(s.Name()))
	if err != nil {
		t.Fatal(err)
	}
	if parsed.Wants[lease] == 0 {
		t.Fatalf("session %s does not wait for %s", s.Name(), lease)
	}
	return parsed.Request(parsed.Wants[lease])
}

// hold makes a stranger hold the lease.
func (a *apiServer) hold(lease string) v1alpha1.Contender {
	other := v1alpha1.Contender{Identity: "other", Session: "other", SessionUID: "other", User: "other", Ticket: 1}
	a.do(lease, protocol.Acquire(other, time.Now()))
	return other
}

// acquiring is an Acquire under way.
type acquiring struct {
	done chan struct{}
	held *Held
	err  error
}

func acquire(ctx context.Context, s *Session, lease string) *acquiring {
	w := &acquiring{done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.held, w.err = s.Acquire(ctx, lease)
	}()
	return w
}

func TestAcquireAndRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{Identity: "me"})
		before := a.lease("orders").Status.Token
		held := mustAcquire(t, s, "orders")
		if got, want := int64(held.Token()), before+1; got != want {
			t.Errorf("token %d, want %d", got, want)
		}
		if h := a.lease("orders").Status.Holder; h.Identity != "me" || h.Session != s.Name() || h.User != "user" {
			t.Errorf("holder: %+v", h)
		}
		ctx := held.Context()
		for range 2 {
			if err := held.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if ctx.Err() == nil || !errors.Is(context.Cause(ctx), context.Canceled) || errors.Is(context.Cause(ctx), ErrLost) {
			t.Errorf("context after the release: %v, cause %v", ctx.Err(), context.Cause(ctx))
		}
		wantLost(t, held.Err(), "released")
		if got := a.lease("orders").Status; got.Phase != v1alpha1.PhaseAvailable || got.Terms[0].EndReason != v1alpha1.EndReleased {
			t.Errorf("status after the release: %+v", got)
		}
		if n := len(a.handled("GET lease")) + len(a.handled("PATCH lease")); n != 3 {
			t.Errorf("acquire and release took %d requests, want 3", n)
		}
	})
}

func TestAttemptsAreSettled(t *testing.T) {
	patches := func(n int, f fault) func() fault { return func() fault { return forCalls("PATCH lease", n, f) } }
	tests := map[string]func() fault{
		"the answer is lost": patches(1, lostAnswer),
		"the answers of all but the third attempt are lost":  patches(2, lostAnswer),
		"it lands after it was given up":                     patches(1, late(callTimeout+time.Millisecond)),
		"it lands after the first read said that it did not": patches(1, late(callTimeout+60*time.Millisecond)),
		"two land late":                patches(2, late(callTimeout+100*time.Millisecond)),
		"it is lost":                   patches(1, blackHole),
		"the API server is overloaded": patches(2, refused(apierrors.NewServiceUnavailable("busy"))),
		"the answer is lost, and so are the next reads": lostThenNoReads,
	}
	for name, f := range tests {
		for _, how := range []string{"Acquire", "TryAcquire"} {
			for _, watch := range []string{"alive", "dead"} {
				t.Run(how+" when "+name+", the watch "+watch, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						a := newAPIServer("orders")
						s := a.open(t, Options{TTL: time.Minute})
						if watch == "dead" {
							a.muteWatches()
						}
						a.setFault(f())
						before := a.lease("orders").Status
						held, err := map[string]func(context.Context, string) (*Held, error){"Acquire": s.Acquire, "TryAcquire": s.TryAcquire}[how](t.Context(), "orders")
						if err != nil {
							t.Fatal(err)
						}
						time.Sleep(time.Minute) // what is late has landed
						got := a.lease("orders").Status
						if got.Token != before.Token+1 || got.Handovers != before.Handovers+1 || int64(held.Token()) != got.Token {
							t.Errorf("token %d, handovers %d, returned %d; want one grant after %d", got.Token, got.Handovers, held.Token(), before.Token)
						}
						if err := held.Err(); err != nil {
							t.Error(err)
						}
					})
				})
			}
		}
	}
}

// lostThenNoReads loses the answer of the first acquire, and the next reads.
func lostThenNoReads() fault {
	patches, gets := forCalls("PATCH lease", 1, lostAnswer), 0
	return func(r *http.Request, next func() *http.Response) (*http.Response, error) {
		if kindOfCall(r) == "GET lease" {
			if gets++; gets == 2 || gets == 3 {
				return blackHole(r, next)
			}
		}
		return patches(r, next)
	}
}

func TestTryAcquireOfATakenLeaseSettlesWhenTheTokenHasPassed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{TTL: time.Minute})
		a.setFault(forCalls("PATCH lease", 1, func(r *http.Request, next func() *http.Response) (*http.Response, error) {
			a.hold("orders")
			return late(callTimeout+time.Second)(r, next)
		}))
		_, err := s.TryAcquire(t.Context(), "orders")
		if !errors.Is(err, ErrHeld) {
			t.Fatalf("got %v, want ErrHeld", err)
		}
		time.Sleep(time.Minute)
		if h := a.lease("orders").Status.Holder; h.Identity != "other" {
			t.Errorf("holder %+v", h)
		}
	})
}

func TestAnAttemptThatLandsWhenNobodyWantsItIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{TTL: time.Minute})
		a.setFault(forCalls("PATCH lease", 1, late(20*time.Second)))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.TryAcquire(ctx, "orders"); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("got %v", err)
		}
		time.Sleep(21 * time.Second)
		st := a.lease("orders").Status
		if st.Phase != v1alpha1.PhaseAvailable || len(st.Terms) != 1 || st.Terms[0].EndReason != v1alpha1.EndReleased {
			t.Errorf("status %+v, want a released term", st)
		}
		mustAcquire(t, s, "orders")
	})
}

func TestWaiting(t *testing.T) {
	t.Run("is to write a ticket into the session's own object, and to hear of the grant", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			other := a.hold("orders")
			s := a.open(t, Options{})
			w := acquire(t.Context(), s, "orders")
			time.Sleep(time.Second)
			me := a.asker(t, s, "orders")
			a.do("orders", protocol.Queue([]v1alpha1.Contender{me}, 1))
			puts := len(a.handled("PUT session"))
			a.do("orders", protocol.Release(other, time.Now()))
			synctest.Wait()
			select {
			case <-w.done:
			default:
				t.Fatal("the grant was not heard at once")
			}
			if w.err != nil || int64(w.held.Token()) != a.lease("orders").Status.Token {
				t.Fatalf("held %v, error %v", w.held, w.err)
			}
			if n := len(a.handled("PUT session")); n != puts {
				t.Error("a grant costs no write")
			}
			time.Sleep(6 * time.Second)
			if a.want(s, "orders") != 0 {
				t.Error("the next renewal still wants it")
			}
		})
	})
	t.Run("does without the controller: a free lease is taken within the TTL", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			other := a.hold("orders")
			s := a.open(t, Options{})
			w := acquire(t.Context(), s, "orders")
			time.Sleep(time.Second)
			a.do("orders", protocol.Release(other, time.Now()))
			start := time.Now()
			<-w.done
			if d := time.Since(start); w.err != nil || d > 15*time.Second {
				t.Errorf("after %s: %v", d, w.err)
			}
		})
	})
	t.Run("of a lease that is not initialised lasts until it is", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer()
			a.addLease("orders", 15)
			s := a.open(t, Options{})
			w := acquire(t.Context(), s, "orders")
			time.Sleep(time.Second)
			a.do("orders", protocol.Initialise(time.Now()))
			a.do("orders", protocol.Grant(a.asker(t, s, "orders"), nil, 0, time.Now()))
			synctest.Wait()
			<-w.done
			if w.err != nil {
				t.Error(w.err)
			}
		})
	})
	t.Run("says what it waited for when it ends", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			a.hold("orders")
			a.addLease("new", 15)
			s := a.open(t, Options{})
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := s.Acquire(ctx, "orders")
			held := &HeldError{}
			if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrHeld) || !errors.As(err, &held) || held.Identity != "other" {
				t.Errorf("got %v", err)
			}
			ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, err := s.Acquire(ctx, "new"); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrNotReady) {
				t.Errorf("got %v", err)
			}
		})
	})
	t.Run("that ends gives up the place in line at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			a.hold("orders")
			s := a.open(t, Options{})
			ctx, cancel := context.WithCancel(t.Context())
			w := acquire(ctx, s, "orders")
			time.Sleep(time.Second)
			first := a.want(s, "orders")
			cancel()
			<-w.done
			synctest.Wait()
			if got := a.want(s, "orders"); first == 0 || got != 0 {
				t.Errorf("wanted with ticket %d, and afterwards with %d", first, got)
			}
			again := acquire(t.Context(), s, "orders")
			time.Sleep(time.Second)
			if got := a.want(s, "orders"); got <= first {
				t.Errorf("ticket %d after %d", got, first)
			}
			_ = s.Close(t.Context())
			<-again.done
		})
	})
	t.Run("that ends while the grant is under way gives that back at once", func(t *testing.T) {
		crossing := func(t *testing.T) {
			a := newAPIServer("orders")
			other := a.hold("orders")
			s := a.open(t, Options{})
			ctx, cancel := context.WithCancel(t.Context())
			w := acquire(ctx, s, "orders")
			time.Sleep(time.Second)
			a.do("orders", protocol.Queue([]v1alpha1.Contender{a.asker(t, s, "orders")}, 1))
			cancel()
			a.do("orders", protocol.Release(other, time.Now()))
			<-w.done
			if w.err == nil {
				_ = w.held.Release(t.Context()) // the grant was faster
			}
			time.Sleep(time.Second)
			st := a.lease("orders").Status
			if st.Phase != v1alpha1.PhaseAvailable || st.Terms[0].SessionUID != a.session(s.Name()).UID {
				t.Errorf("status %+v, want a released term of the session", st)
			}
			mustAcquire(t, s, "orders")
		}
		for range 20 { // which of the two is noticed first is chance
			synctest.Test(t, crossing)
		}
	})
	t.Run("keeps a grant that comes through a stale queue entry away from the next caller", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			other := a.hold("orders")
			s := a.open(t, Options{})
			ctx, cancel := context.WithCancel(t.Context())
			w := acquire(ctx, s, "orders")
			time.Sleep(time.Second)
			a.do("orders", protocol.Queue([]v1alpha1.Contender{a.asker(t, s, "orders")}, 1))
			cancel()
			<-w.done
			next := acquire(t.Context(), s, "orders")
			time.Sleep(time.Second)
			a.do("orders", protocol.Release(other, time.Now())) // to the old ticket
			<-next.done
			if next.err != nil {
				t.Fatal(next.err)
			}
			st := a.lease("orders").Status
			if st.Terms[0].EndReason != v1alpha1.EndReleased || st.Holder.Ticket <= st.Terms[0].Ticket || int64(next.held.Token()) != st.Token {
				t.Errorf("status %+v; want the old ticket given back, and a grant of a newer one", st)
			}
		})
	})
	t.Run("ends with NotFound when the lease is deleted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			a.hold("orders")
			s := a.open(t, Options{})
			w := acquire(t.Context(), s, "orders")
			time.Sleep(time.Second)
			a.deleteLease("orders")
			<-w.done
			if !apierrors.IsNotFound(w.err) {
				t.Errorf("got %v", w.err)
			}
		})
	})
	t.Run("ends with ErrLost when the session is lost, and gets no grant after that", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			other := a.hold("orders")
			s := a.open(t, Options{})
			w := acquire(t.Context(), s, "orders")
			time.Sleep(time.Second)
			a.do("orders", protocol.Queue([]v1alpha1.Contender{a.asker(t, s, "orders")}, 1))
			a.setFault(forCalls("PUT session", -1, blackHole))
			<-s.Done()
			a.do("orders", protocol.Release(other, time.Now()))
			<-w.done
			wantLost(t, w.err)
			if w.held != nil {
				t.Error("a lost session got a grant")
			}
		})
	})
	t.Run("goes on through outages", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			other := a.hold("orders")
			s := a.open(t, Options{})
			a.setFault(forCalls("GET lease", 20, refused(apierrors.NewInternalError(errors.New("boom")))))
			w := acquire(t.Context(), s, "orders")
			time.Sleep(30 * time.Second)
			a.do("orders", protocol.Release(other, time.Now()))
			<-w.done
			if w.err != nil {
				t.Error(w.err)
			}
		})
	})
	t.Run("is refused where the policy refuses the want, and the session lives on", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders", "billing")
			a.hold("orders")
			a.hold("billing")
			s := a.open(t, Options{})
			a.setFault(forCalls("PUT session", -1, func(r *http.Request, next func() *http.Response) (*http.Response, error) {
				text := readBody(r)
				if strings.Contains(text, "orders=") {
					return refused(apierrors.NewForbidden(schema.GroupResource{Resource: "leases"}, s.Name(), errors.New("no rights on orders")))(r, next)
				}
				return next(), nil
			}))
			may, not := acquire(t.Context(), s, "billing"), acquire(t.Context(), s, "orders")
			<-not.done
			if !apierrors.IsForbidden(not.err) {
				t.Errorf("got %v", not.err)
			}
			time.Sleep(time.Minute)
			if a.want(s, "billing") == 0 || s.Err() != nil {
				t.Errorf("the other want is gone, or the session: %v", s.Err())
			}
			_ = s.Close(t.Context())
			<-may.done
		})
	})
	t.Run("for more leases than a session may want is possible", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var names []string
			for i := range v1alpha1.MaxWants + 6 {
				names = append(names, fmt.Sprintf("lease-%d", i))
			}
			a := newAPIServer(names...)
			var others []v1alpha1.Contender
			for _, name := range names {
				others = append(others, a.hold(name))
			}
			s := a.open(t, Options{})
			var waits []*acquiring
			for _, name := range names {
				waits = append(waits, acquire(t.Context(), s, name))
			}
			time.Sleep(20 * time.Second)
			wants, err := protocol.ParseWants(a.session(s.Name()).Annotations[v1alpha1.WaitingForAnnotation])
			if err != nil || len(wants) != v1alpha1.MaxWants {
				t.Errorf("%d wants, error %v", len(wants), err)
			}
			for i, name := range names {
				a.do(name, protocol.Release(others[i], time.Now()))
			}
			for _, w := range waits {
				if <-w.done; w.err != nil {
					t.Error(w.err)
				}
			}
		})
	})
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders", "cooling")
		a.addLease("new", 15)
		a.hold("orders")
		a.change("cooling", func(l *v1alpha1.FencedLease) { l.Spec.CooldownSeconds = 60 })
		a.hold("cooling")
		a.do("cooling", protocol.End(a.lease("cooling").Status.Token, v1alpha1.EndExpired, time.Now()))
		s := a.open(t, Options{})

		_, err := s.TryAcquire(t.Context(), "orders")
		held := &HeldError{}
		if !errors.Is(err, ErrHeld) || !errors.As(err, &held) {
			t.Fatalf("got %v", err)
		}
		want := &HeldError{Lease: "orders", Phase: v1alpha1.PhaseHeld, Identity: "other", Token: Token(a.lease("orders").Status.Token)}
		if diff := cmp.Diff(want, held); diff != "" {
			t.Error(diff)
		}
		if _, err = s.TryAcquire(t.Context(), "cooling"); !errors.As(err, &held) || held.Phase != v1alpha1.PhaseCooldown || held.Identity != "" {
			t.Errorf("in cooldown: %v", err)
		}
		if _, err = s.TryAcquire(t.Context(), "new"); !errors.Is(err, ErrNotReady) {
			t.Errorf("not initialised: %v", err)
		}
		for name, f := range map[string]func(context.Context, string) (*Held, error){"Acquire": s.Acquire, "TryAcquire": s.TryAcquire} {
			if _, err = f(t.Context(), "missing"); !apierrors.IsNotFound(err) {
				t.Errorf("%s of a missing lease: %v", name, err)
			}
			calls := len(a.handled("GET lease"))
			for _, bad := range []string{"", "Orders", "a/b", "ä", "..", strings.Repeat("a", 254)} {
				if _, err = f(t.Context(), bad); err == nil || !strings.Contains(err.Error(), "no lease has such a name") {
					t.Errorf("%s of %q: %v", name, bad, err)
				}
			}
			if len(a.handled("GET lease")) != calls {
				t.Error("asked the API server for an impossible name")
			}
		}
		if time.Since(s.Context().Value(startKey{}).(time.Time)) > time.Second {
			t.Error("a refusal took its time")
		}
	})
}

func TestCallersOfOneProcessTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{})
		var mu sync.Mutex
		inside, tokens := 0, map[Token]bool{}
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				for range 5 {
					err := s.Do(t.Context(), "orders", func(_ context.Context, token Token) error {
						mu.Lock()
						inside++
						if inside != 1 || tokens[token] {
							t.Errorf("%d inside, token %d seen: %v", inside, token, tokens[token])
						}
						tokens[token] = true
						mu.Unlock()
						time.Sleep(time.Millisecond)
						mu.Lock()
						inside--
						mu.Unlock()
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		if len(tokens) != 50 {
			t.Errorf("%d tokens for 50 turns", len(tokens))
		}
		held := mustAcquire(t, s, "orders")
		_, err := s.TryAcquire(t.Context(), "orders")
		e := &HeldError{}
		if !errors.As(err, &e) || e.Token != held.Token() || e.Identity == "" {
			t.Errorf("TryAcquire of what this process holds: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err = s.Acquire(ctx, "orders"); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, ErrHeld) {
			t.Errorf("Acquire of what this process holds: %v", err)
		}
	})
}
