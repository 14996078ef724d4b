// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

var orders = types.NamespacedName{Namespace: "shop", Name: "orders"}

// store is a lease whose reads block until they are let go, and return the token as it was when they began.
type store struct {
	token atomic.Int64
	reads atomic.Int64
	gate  chan struct{}
}

func (s *store) get(ctx context.Context, _ types.NamespacedName) (*v1alpha1.FencedLease, error) {
	s.reads.Add(1)
	token := s.token.Load()
	select {
	case <-s.gate:
		return &v1alpha1.FencedLease{Status: &v1alpha1.FencedLeaseStatus{Token: token}}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func TestReadsBeginAfterTheirCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{gate: make(chan struct{})}
		m := NewMetrics(prometheus.NewRegistry())
		r := newLiveReader(m, s.get)
		s.token.Store(41)

		var tokens [10]int64
		var wg sync.WaitGroup
		ask := func(i int) {
			wg.Go(func() {
				lease, err := r.Lease(t.Context(), orders)
				if err != nil {
					t.Errorf("caller %d: %v", i, err)
					return
				}
				tokens[i] = lease.Status.Token
			})
			synctest.Wait()
		}
		ask(0)            // its read is under way, and has seen 41
		s.token.Store(42) // the newer grant is stored
		for i := 1; i < len(tokens); i++ {
			ask(i) // these came after it: a shared read of 41 would let a stale token pass
		}
		s.gate <- struct{}{}
		synctest.Wait()
		s.gate <- struct{}{}
		wg.Wait()

		if want := [10]int64{41, 42, 42, 42, 42, 42, 42, 42, 42, 42}; tokens != want {
			t.Errorf("callers got tokens %v, want %v", tokens, want)
		}
		if n := testutil.ToFloat64(m.reads); n != 2 || s.reads.Load() != 2 {
			t.Errorf("%d reads for %d callers, and %v counted; want 2", s.reads.Load(), len(tokens), n)
		}
		synctest.Wait()
		if len(r.leases) != 0 {
			t.Error("the reader remembers a lease that nobody reads")
		}
	})
}

func TestReadOfAnotherLeaseDoesNotWait(t *testing.T) {
	s := &store{gate: make(chan struct{})}
	r := newLiveReader(NewMetrics(prometheus.NewRegistry()), func(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
		if name == orders {
			return s.get(ctx, name)
		}
		return &v1alpha1.FencedLease{}, nil
	})
	blocked := r.enlist(t.Context(), orders)
	if _, err := r.Lease(t.Context(), types.NamespacedName{Namespace: "shop", Name: "billing"}); err != nil {
		t.Error(err)
	}
	close(s.gate)
	<-blocked.done
}

func TestReadIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{gate: make(chan struct{})}
		r := newLiveReader(NewMetrics(prometheus.NewRegistry()), s.get)
		start := time.Now()
		_, err := r.Lease(t.Context(), orders)
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took != readWithin {
			t.Errorf("error %v after %s, want a deadline after %s", err, took, readWithin)
		}
	})
}

func TestCallerThatGivesUpLeavesTheReadToOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &store{gate: make(chan struct{})}
		r := newLiveReader(NewMetrics(prometheus.NewRegistry()), s.get)
		impatient, cancel := context.WithCancel(t.Context())
		var first, second error
		var wg sync.WaitGroup
		wg.Go(func() { _, first = r.Lease(impatient, orders) })
		synctest.Wait()
		wg.Go(func() { _, second = r.Lease(t.Context(), orders) })
		synctest.Wait()
		cancel()
		synctest.Wait()
		close(s.gate)
		wg.Wait()
		if !errors.Is(first, context.Canceled) || second != nil {
			t.Errorf("who gave up got %v, who waited got %v", first, second)
		}
	})
}

func TestReadOfNoLease(t *testing.T) {
	r := newLiveReader(NewMetrics(prometheus.NewRegistry()), func(context.Context, types.NamespacedName) (*v1alpha1.FencedLease, error) {
		return &v1alpha1.FencedLease{}, apierrors.NewNotFound(schema.GroupResource{}, "orders")
	})
	if lease, err := r.Lease(t.Context(), orders); lease != nil || err != nil {
		t.Errorf("got %v, %v; want none", lease, err)
	}
}

// TestReadsUnderLoad is for the race detector: every caller must see at least what was stored before it asked.
func TestReadsUnderLoad(t *testing.T) {
	s := &store{gate: make(chan struct{})}
	close(s.gate)
	r := newLiveReader(NewMetrics(prometheus.NewRegistry()), s.get)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 500 {
				stored := s.token.Add(1)
				lease, err := r.Lease(t.Context(), orders)
				if err != nil || lease.Status.Token < stored {
					t.Errorf("token %v, error %v; %d was stored before", lease, err, stored)
					return
				}
			}
		})
	}
	wg.Wait()
}
