// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// Tests run in a bubble of testing/synctest: time is virtual, and the bubble does not end before every goroutine that
// began in it has. So each test of a session that is closed or lost also shows that it leaks none.

// sleepyClock is a clock that can jump ahead while the timers stand still, as when a machine sleeps.
type sleepyClock struct {
	mu   sync.Mutex
	run  clock
	jump time.Duration
}

func newSleepyClock() *sleepyClock { return &sleepyClock{run: monotonic()} }

func (c *sleepyClock) now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.run() + c.jump
}

func (c *sleepyClock) sleep(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.jump += d
}

func mustAcquire(t *testing.T, s *Session, lease string) *Held {
	t.Helper()
	held, err := s.Acquire(t.Context(), lease)
	if err != nil {
		t.Fatalf("Acquire: %v", err)
	}
	return held
}

// wantLost says that an error is a loss whose text holds all the words.
func wantLost(t *testing.T, err error, words ...string) {
	t.Helper()
	if !errors.Is(err, ErrLost) {
		t.Fatalf("got %v, want ErrLost", err)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

func TestSessionRenewsEveryThirdOfItsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{})
		mustAcquire(t, s, "orders")
		time.Sleep(10 * time.Minute)
		puts := a.handled("PUT session")
		if len(puts) < 115 || len(puts) > 121 {
			t.Errorf("%d renewals in ten minutes at a TTL of 15 s, want 120", len(puts))
		}
		for i := 1; i < len(puts); i++ {
			if d := puts[i].Sub(puts[i-1]); d > 6*time.Second {
				t.Fatalf("renewal %d came %s after the one before", i, d)
			}
		}
		if err := s.Err(); err != nil {
			t.Errorf("Err: %v", err)
		}
		if n := a.watchers(); n != 1 {
			t.Errorf("%d watches, want 1", n)
		}
	})
}

func TestSessionSurvives(t *testing.T) {
	conflict := apierrors.NewConflict(schema.GroupResource{Resource: "leases"}, "x", errors.New("changed"))
	tests := map[string]fault{
		"the lost answer of a renewal":                  forCalls("PUT session", 1, lostAnswer),
		"a renewal that lands after it was given up":    forCalls("PUT session", 1, late(6*time.Second)),
		"a lost renewal":                                forCalls("PUT session", 1, blackHole),
		"a conflict":                                    forCalls("PUT session", 2, refused(conflict)),
		"an overloaded API server":                      forCalls("PUT session", 5, refused(apierrors.NewServiceUnavailable("busy"))),
		"answers that take a quarter of the TTL":        forCalls("PUT session", -1, slow(15*time.Second/4)),
		"lists that hang, which are not about renewals": forCalls("GET leases", -1, blackHole),
	}
	for name, f := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				s := a.open(t, Options{})
				held := mustAcquire(t, s, "orders")
				a.setFault(f)
				time.Sleep(2 * time.Minute)
				if err := held.Err(); err != nil {
					t.Errorf("lost: %v", err)
				}
			})
		})
	}
}

func TestSessionIsLostBeforeItsTTLHasPassed(t *testing.T) {
	tests := map[string]struct {
		ttl, answers time.Duration
	}{
		"a TTL of 15 s":                    {ttl: 15 * time.Second},
		"a TTL of 1 s":                     {ttl: time.Second},
		"a TTL of an hour":                 {ttl: time.Hour},
		"answers that come 2 s after sent": {ttl: 15 * time.Second, answers: 2 * time.Second},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer()
				a.addLease("orders", 3600)
				a.do("orders", protocol.Initialise(time.Now()))
				s := a.open(t, Options{TTL: tc.ttl})
				held := mustAcquire(t, s, "orders")
				a.setFault(forCalls("PUT session", -1, slow(tc.answers)))
				time.Sleep(tc.ttl + tc.answers)
				synctest.Wait()
				a.setFault(blackHole)
				puts := a.handled("PUT session")
				sent := puts[len(puts)-1] // the server saw it when it was sent

				<-held.Context().Done()
				if got, most := time.Since(sent), tc.ttl-protocol.Margin(tc.ttl)/2; got > most || got < tc.ttl/2 {
					t.Errorf("lost %s after the last renewal was sent, want before %s", got, most)
				}
				wantLost(t, context.Cause(held.Context()), "not renewed for", "last attempt")
				wantLost(t, held.Err())
				wantLost(t, context.Cause(s.Context()))
				a.setFault(nil)
				time.Sleep(time.Minute)
				if after := a.handled("PUT session"); len(after) != len(puts) {
					t.Errorf("%d renewals of a lost session", len(after)-len(puts))
				}
			})
		})
	}
}

func TestLostSessionIsDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		s := a.open(t, Options{})
		a.setFault(forCalls("PUT session", -1, blackHole))
		<-s.Done()
		synctest.Wait()
		if a.session(s.Name()) != nil {
			t.Error("the object of a lost session is still there")
		}
		_, err := s.Acquire(t.Context(), "orders")
		wantLost(t, err)
		_, err = s.TryAcquire(t.Context(), "orders")
		wantLost(t, err)
	})
}

func TestSessionWhoseObjectIsGoneIsLostWithTheNextRenewal(t *testing.T) {
	tests := map[string]func(a *apiServer, s *Session){
		"expired by the controller": func(a *apiServer, s *Session) { a.deleteSession(s.Name()) },
		"deleted, and its name taken by another": func(a *apiServer, s *Session) {
			a.mu.Lock()
			defer a.mu.Unlock()
			other := a.sessions[s.Name()].DeepCopy()
			other.UID = "another"
			a.sessions[s.Name()] = other
		},
	}
	for name, remove := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				s := a.open(t, Options{})
				held := mustAcquire(t, s, "orders")
				remove(a, s)
				start := time.Now()
				<-held.Context().Done()
				if d := time.Since(start); d > 6*time.Second {
					t.Errorf("heard of it after %s", d)
				}
				wantLost(t, held.Err(), "gone")
			})
		})
	}
}

func TestWakingUp(t *testing.T) {
	first := map[string]func(s *Session, h *Held) error{
		"asks for the token":             func(_ *Session, h *Held) error { h.Token(); return h.ctx.Err() },
		"asks the term":                  func(_ *Session, h *Held) error { return h.Err() },
		"asks for the context":           func(_ *Session, h *Held) error { return h.Context().Err() },
		"asks the session":               func(s *Session, _ *Held) error { return s.Err() },
		"asks for the session's context": func(s *Session, _ *Held) error { return s.Context().Err() },
		"releases":                       func(_ *Session, h *Held) error { return h.Release(context.Background()) },
	}
	for name, ask := range first {
		t.Run("a process that was paused and first "+name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				c := newSleepyClock()
				s := a.open(t, Options{clock: c.now})
				held := mustAcquire(t, s, "orders")
				ctx := held.Context()
				c.sleep(14 * time.Second)
				if err := ask(s, held); err == nil {
					t.Error("does not know that it lost the lease")
				}
				if ctx.Err() == nil {
					t.Error("the context that it had before lives on")
				}
			})
		})
	}
	t.Run("a context that was taken before the pause asks the clock", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			c := newSleepyClock()
			s := a.open(t, Options{clock: c.now})
			ctx := mustAcquire(t, s, "orders").Context()
			c.sleep(14 * time.Second)
			if ctx.Err() == nil {
				t.Error("it lives on")
			}
		})
	})
	t.Run("a process that asks nothing hears of it within the margin", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			c := newSleepyClock()
			s := a.open(t, Options{clock: c.now})
			done := mustAcquire(t, s, "orders").Context().Done()
			time.Sleep(time.Second)
			c.sleep(time.Hour)
			start := time.Now()
			<-done
			if d := time.Since(start); d > protocol.Margin(15*time.Second) {
				t.Errorf("heard after %s", d)
			}
		})
	})
	t.Run("after a short sleep the renewal comes in time by the session's clock", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			c := newSleepyClock()
			s := a.open(t, Options{clock: c.now})
			time.Sleep(time.Second)
			c.sleep(8 * time.Second)
			start := time.Now()
			time.Sleep(2 * time.Second)
			if puts := a.handled("PUT session"); len(puts) == 0 || puts[0].Sub(start) > time.Second {
				t.Errorf("renewals after the sleep: %v", puts)
			}
			if err := s.Err(); err != nil {
				t.Error(err)
			}
		})
	})
}

func TestClose(t *testing.T) {
	t.Run("releases all leases, deletes the session and is safe to repeat", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("a", "b", "c")
			s := a.open(t, Options{})
			var ctxs []context.Context
			for _, name := range []string{"a", "b", "c"} {
				ctxs = append(ctxs, mustAcquire(t, s, name).Context())
			}
			var mu sync.Mutex
			ended := true
			a.setFault(forCalls("PATCH lease", -1, func(_ *http.Request, next func() *http.Response) (*http.Response, error) {
				mu.Lock()
				defer mu.Unlock()
				for _, ctx := range ctxs {
					ended = ended && ctx.Err() != nil
				}
				return next(), nil
			}))
			cancelled, cancel := context.WithCancel(t.Context())
			cancel()
			for range 3 {
				if err := s.Close(cancelled); err != nil {
					t.Fatal(err)
				}
			}
			if !ended {
				t.Error("a release was sent before all work had ended")
			}
			for _, name := range []string{"a", "b", "c"} {
				if st := a.lease(name).Status; st.Phase != v1alpha1.PhaseAvailable || st.Terms[0].EndReason != v1alpha1.EndReleased {
					t.Errorf("lease %s: %+v", name, st)
				}
			}
			if a.session(s.Name()) != nil {
				t.Error("the session is still there")
			}
			if err := s.Context().Err(); err == nil || !errors.Is(context.Cause(s.Context()), context.Canceled) {
				t.Errorf("context: %v, cause %v", err, context.Cause(s.Context()))
			}
			_, err := s.Acquire(t.Context(), "a")
			wantLost(t, err, "closed")
			n := len(a.handled("PUT session"))
			time.Sleep(time.Minute)
			if len(a.handled("PUT session")) != n {
				t.Error("renewed after Close")
			}
		})
	})
	t.Run("ends the waits", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			holder, s := a.open(t, Options{}), a.open(t, Options{})
			mustAcquire(t, holder, "orders")
			result := make(chan error, 1)
			go func() { _, err := s.Acquire(context.Background(), "orders"); result <- err }()
			time.Sleep(time.Second)
			start := time.Now()
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			wantLost(t, <-result, "closed")
			if d := time.Since(start); d > time.Second {
				t.Errorf("took %s", d)
			}
		})
	})
	t.Run("gives up in time when nobody answers, and says so", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders", "other")
			a.addLease("fast", 5)
			a.do("fast", protocol.Initialise(time.Now()))
			s := a.open(t, Options{TTL: time.Hour})
			a.setFault(forCalls("PUT session", -1, blackHole))
			shrinking := acquire(t.Context(), s, "fast")
			synctest.Wait()
			a.setFault(blackHole)
			waiting := acquire(t.Context(), s, "other")
			synctest.Wait()
			defer func() { <-waiting.done; <-shrinking.done }()
			start := time.Now()
			if err := s.Close(t.Context()); err == nil {
				t.Error("no error")
			}
			if d := time.Since(start); d > 30*time.Second {
				t.Errorf("took %s", d)
			}
		})
	})
	t.Run("gives back what is granted in its midst", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			s := a.open(t, Options{})
			a.muteWatches() // the answer is the first to say so
			a.setFault(forCalls("PATCH lease", 1, slow(2*time.Second)))
			result := make(chan error, 1)
			go func() { _, err := s.Acquire(context.Background(), "orders"); result <- err }()
			time.Sleep(time.Second)
			if err := s.Close(t.Context()); err != nil {
				t.Fatal(err)
			}
			wantLost(t, <-result)
			if st := a.lease("orders").Status; st.Phase != v1alpha1.PhaseAvailable {
				t.Errorf("the lease is %s", st.Phase)
			}
		})
	})
}

func TestTTLShrinks(t *testing.T) {
	ttl := func(a *apiServer, s *Session) int32 { return *a.session(s.Name()).Spec.LeaseDurationSeconds }
	t.Run("before a faster lease is acquired", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer()
			a.addLease("orders", 5)
			a.do("orders", protocol.Initialise(time.Now()))
			s := a.open(t, Options{})
			a.setFault(forCalls("PATCH lease", -1, func(_ *http.Request, next func() *http.Response) (*http.Response, error) {
				if got := ttl(a, s); got != 5 {
					t.Errorf("acquired with a TTL of %d s", got)
				}
				return next(), nil
			}))
			mustAcquire(t, s, "orders")
			time.Sleep(time.Minute)
			if n := len(a.handled("PUT session")); n < 30 {
				t.Errorf("%d renewals in a minute, want one each 5/3 s", n)
			}
		})
	})
	t.Run("when the spec of a held lease does", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			s := a.open(t, Options{})
			mustAcquire(t, s, "orders")
			a.change("orders", func(l *v1alpha1.FencedLease) { l.Spec.LeaseDurationSeconds = 3 })
			synctest.Wait()
			if got := ttl(a, s); got != 3 {
				t.Errorf("TTL %d s, want 3", got)
			}
			a.change("orders", func(l *v1alpha1.FencedLease) { l.Spec.LeaseDurationSeconds = 30 })
			time.Sleep(time.Minute)
			if got := ttl(a, s); got != 3 {
				t.Errorf("TTL %d s: it grew", got)
			}
		})
	})
	t.Run("and counts from when it was sent, also when the answer is lost", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			a := newAPIServer("orders")
			s := a.open(t, Options{})
			mustAcquire(t, s, "orders")
			lost := false
			a.setFault(forCalls("PUT session", -1, func(r *http.Request, next func() *http.Response) (*http.Response, error) {
				if lost {
					return blackHole(r, next)
				}
				lost = true
				return lostAnswer(r, next)
			}))
			a.change("orders", func(l *v1alpha1.FencedLease) { l.Spec.LeaseDurationSeconds = 3 })
			start := time.Now()
			<-s.Done()
			if d := time.Since(start); d > 3*time.Second {
				t.Errorf("lost after %s, although the API server knows a TTL of 3 s since then", d)
			}
		})
	})
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAPIServer("orders")
		var mu sync.Mutex
		renewed, acquired, ended := 0, "", []error{}
		s := a.open(t, Options{Metrics: Metrics{
			Renewed:  func(time.Duration, error) { mu.Lock(); defer mu.Unlock(); renewed++ },
			Acquired: func(lease string, _ time.Duration) { mu.Lock(); defer mu.Unlock(); acquired = lease },
			Ended:    func(_ string, _ time.Duration, lost error) { mu.Lock(); defer mu.Unlock(); ended = append(ended, lost) },
		}})
		_ = mustAcquire(t, s, "orders").Release(t.Context())
		mustAcquire(t, s, "orders")
		time.Sleep(6 * time.Second)
		a.deleteSession(s.Name())
		<-s.Done()
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if renewed < 2 || acquired != "orders" || len(ended) != 2 || ended[0] != nil || !errors.Is(ended[1], ErrLost) {
			t.Errorf("renewed %d, acquired %q, ended %v", renewed, acquired, ended)
		}
	})
}
