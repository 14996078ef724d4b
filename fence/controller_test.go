// SPDX-License-Identifier: Apache-2.0

package fence_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/controller"
	"github.com/fencedlease/fencedlease/internal/protocol"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

// runController runs the controller until the test ends.
func (w *world) runController(t *testing.T) {
	t.Helper()
	cfg, err := w.env.ServiceAccount(t.Context(), testenv.ManagerNamespace, testenv.ManagerAccount)
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS = -1
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme:  w.admin.Scheme(),
		Cache:   cache.Options{ByObject: controller.CacheOptions()},
		Metrics: metricsserver.Options{BindAddress: "0"},
		Logger:  logr.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := controller.Setup(mgr, controller.Options{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The controller may be set up once per process only (its name), so all that needs it is here.
func TestWithController(t *testing.T) {
	w := theWorld(t)
	w.runController(t)
	create := func(t *testing.T, name string) {
		t.Helper()
		l := &v1alpha1.FencedLease{}
		l.Name, l.Namespace = name, w.namespace
		if err := w.admin.Create(t.Context(), l); err != nil {
			t.Fatal(err)
		}
	}

	t.Run("Acquire waits for a new lease to be initialised", func(t *testing.T) {
		create(t, "new")
		s := w.session(t, w.pod(t, "a"), fence.Options{})
		mustAcquire(t, s, "new")
	})

	t.Run("many waiters get it in turn, each with the next token", func(t *testing.T) {
		create(t, "busy")
		const sessions, rounds = 8, 4
		var mu sync.Mutex
		var tokens []fence.Token
		inside := 0
		var all sync.WaitGroup
		for i := range sessions {
			s := w.session(t, w.pod(t, fmt.Sprintf("busy-%d", i)), fence.Options{})
			all.Go(func() {
				for range rounds {
					err := s.Do(t.Context(), "busy", func(_ context.Context, token fence.Token) error {
						mu.Lock()
						defer mu.Unlock()
						if inside++; inside != 1 {
							t.Error("two at once")
						}
						tokens = append(tokens, token)
						inside--
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		for i := 1; i < len(tokens); i++ {
			if tokens[i] <= tokens[i-1] {
				t.Errorf("token %d after %d", tokens[i], tokens[i-1])
			}
		}
		if len(tokens) != sessions*rounds {
			t.Errorf("%d turns", len(tokens))
		}
	})

	t.Run("who is cut off has stopped before the next begins", func(t *testing.T) {
		create(t, "cut")
		cfg, proxy := throughProxy(t, w.pod(t, "a"))
		a := w.session(t, cfg, fence.Options{TTL: 3 * time.Second})
		b := w.session(t, w.pod(t, "b"), fence.Options{})
		first := mustAcquire(t, a, "cut")
		waiting := acquire(t.Context(), b, "cut")
		w.waiter(t, b, "cut")
		proxy.BlackHole()
		<-first.Context().Done()
		stopped := time.Now()
		second := <-waiting
		if second.err != nil || second.held.Token() <= first.Token() {
			t.Fatalf("the next: %+v", second)
		}
		if second.at.Before(stopped) {
			t.Errorf("the next began %s before the first stopped", stopped.Sub(second.at))
		}
		proxy.Pass()
	})

	t.Run("a waiter whose session expired never gets a grant", func(t *testing.T) {
		create(t, "expired")
		a, c := w.session(t, w.pod(t, "a"), fence.Options{}), w.session(t, w.pod(t, "c"), fence.Options{})
		cfg, proxy := throughProxy(t, w.pod(t, "b"))
		b := w.session(t, cfg, fence.Options{TTL: 2 * time.Second})
		first := mustAcquire(t, a, "expired")
		waitingB := acquire(t.Context(), b, "expired")
		w.waiter(t, b, "expired")
		waitingC := acquire(t.Context(), c, "expired")
		w.waiter(t, c, "expired")
		proxy.BlackHole()
		if r := <-waitingB; !errors.Is(r.err, fence.ErrLost) || r.held != nil {
			t.Errorf("the expired waiter: %+v", r)
		}
		eventually(t, 10*time.Second, "the dead session is out of the line", func() bool {
			q := w.mustGet(t, "expired").Status.Queue
			return len(q) == 1 && q[0].Session == c.Name()
		})
		proxy.Pass()
		if err := first.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r := <-waitingC; r.err != nil || r.held.Token() != first.Token()+1 {
			t.Errorf("the next: %+v", r)
		}
	})

	t.Run("a wait that ends leaves no ghost in the line", func(t *testing.T) {
		create(t, "ghost")
		a, b := w.session(t, w.pod(t, "a"), fence.Options{}), w.session(t, w.pod(t, "b"), fence.Options{})
		first := mustAcquire(t, a, "ghost")
		for range 5 {
			ctx, cancel := context.WithCancel(t.Context())
			waiting := acquire(ctx, b, "ghost")
			w.waiter(t, b, "ghost")
			cancel()
			<-waiting
		}
		waiting := acquire(t.Context(), b, "ghost")
		w.waiter(t, b, "ghost")
		if err := first.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r := <-waiting; r.err != nil {
			t.Error(r.err)
		}
	})

	t.Run("a stolen lease ends the work at once, and says so", func(t *testing.T) {
		create(t, "stolen")
		s := w.session(t, w.pod(t, "a"), fence.Options{})
		held := mustAcquire(t, s, "stolen")
		if _, err := w.do(t.Context(), "stolen", func(l *v1alpha1.FencedLease) protocol.Transition {
			return protocol.End(l.Status.Token, v1alpha1.EndStolen, time.Now())
		}); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		<-held.Context().Done()
		if d := time.Since(start); d > 2*time.Second {
			t.Errorf("heard after %s", d)
		}
		again := mustAcquire(t, s, "stolen")
		if again.Token() <= held.Token() {
			t.Errorf("token %d after %d", again.Token(), held.Token())
		}
	})

	t.Run("crossing cancellations lose no lease", func(t *testing.T) {
		create(t, "crossed")
		a, b := w.session(t, w.pod(t, "a"), fence.Options{}), w.session(t, w.pod(t, "b"), fence.Options{})
		for i := range 30 {
			first := mustAcquire(t, a, "crossed")
			ctx, cancel := context.WithCancel(t.Context())
			waiting := acquire(ctx, b, "crossed")
			w.waiter(t, b, "crossed")
			var both sync.WaitGroup
			both.Go(func() { _ = first.Release(t.Context()) })
			both.Go(func() {
				<-time.After(time.Duration(i%10) * time.Millisecond)
				cancel()
			})
			both.Wait()
			if r := <-waiting; r.err == nil {
				if err := r.held.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}
		mustAcquire(t, a, "crossed")
	})
}
