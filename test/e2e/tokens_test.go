// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

var _ = Describe("Tokens and holders", func() {
	It("has never two holders, and tokens only rise, whatever is killed and restarted", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 15)
		cfg := contender(ctx, namespace, "orders")
		contending, stop := context.WithCancel(ctx)
		var h history
		var contenders sync.WaitGroup
		for i := range 5 {
			session := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: fmt.Sprintf("contender-%d", i)})
			contenders.Go(func() { h.contend(contending, session, "orders") })
		}
		h.goesOn(ctx)

		By("killing the leading manager")
		leader, _, err := operator.Leader(ctx)
		Expect(err).NotTo(HaveOccurred())
		Expect(leader.Kill()).To(Succeed())
		h.goesOn(ctx)
		Expect(leader.Start(ctx)).To(Succeed())
		h.goesOn(ctx)

		By("killing the API server")
		Expect(env.APIServer.Kill()).To(Succeed())
		Expect(env.APIServer.Start(ctx)).To(Succeed())
		h.goesOn(ctx)

		By("restarting etcd")
		Expect(env.Etcd.Restart(ctx)).To(Succeed())
		h.goesOn(ctx)

		stop()
		contenders.Wait()
		h.holds()
	}, SpecTimeout(3*time.Minute))

	It("goes on above the old token after the lease was deleted and created again, and the old holder stays out", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 15)
		protected := newConfigMap(ctx, namespace, "protected", "orders")
		cfg := contender(ctx, namespace, "orders")
		old, err := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "old"}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		Expect(write(ctx, fence.NewClient(clientFor(cfg), old), protected, "old")).To(Succeed())

		By("deleting it under its holder")
		_, err = env.Kubectl(ctx, "delete", "fencedlease", "orders", "-n", namespace)
		Expect(err).NotTo(HaveOccurred())
		Eventually(old.Context().Done()).Should(BeClosed())
		Expect(writeWith(ctx, clientFor(cfg), protected, decimal(old.Token()), "late")).To(MatchError(ContainSubstring("does not exist")))

		By("creating it anew")
		newLease(ctx, namespace, "orders", 15)
		fresh, err := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "fresh"}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		Expect(fresh.Token()).To(BeNumerically(">", old.Token()))
		Expect(write(ctx, fence.NewClient(clientFor(cfg), fresh), protected, "fresh")).To(Succeed())
		Expect(writeWith(ctx, clientFor(cfg), protected, decimal(old.Token()), "late")).To(MatchError(ContainSubstring("has accepted token %d", fresh.Token())))
		Expect(stored(ctx, protected).Data).To(HaveKeyWithValue("value", "fresh"))
	}, SpecTimeout(time.Minute))

	It("refuses an editor who would delete a lease under its holder", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 15)
		cfg := contender(ctx, namespace, "orders")
		_, err := newSession(ctx, cfg, fence.Options{Namespace: namespace}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		Expect(clientFor(cfg).Delete(ctx, &v1alpha1.FencedLease{ObjectMeta: configMap(namespace, "orders").ObjectMeta})).
			To(MatchError(And(ContainSubstring("is held with token"), ContainSubstring("steal"))))
	}, SpecTimeout(time.Minute))
})

// history is what contenders of one process have seen, on the one clock that they share.
type history struct {
	mu     sync.Mutex
	terms  []*fence.Held
	faults []string
}

// contend takes the lease and gives it back, again and again. Errors are the weather: the API server may be down.
func (h *history) contend(ctx context.Context, session *fence.Session, lease string) {
	for ctx.Err() == nil {
		held, err := session.Acquire(ctx, lease)
		if err == nil {
			h.begins(held)
		}
		var lost <-chan struct{}
		if held != nil {
			lost = held.Context().Done()
		}
		select {
		case <-lost:
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond): // at work, or before the next try
		}
		if held != nil {
			_ = held.Release(context.WithoutCancel(ctx))
		}
	}
}

// begins records a term, and any other one that had not ended by then.
func (h *history) begins(held *fence.Held) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, other := range h.terms {
		if other.Context().Err() == nil && held.Context().Err() == nil {
			h.faults = append(h.faults, fmt.Sprintf("token %d was granted while the holder of %d was at work", held.Token(), other.Token()))
		}
	}
	h.terms = append(h.terms, held)
}

func (h *history) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.terms)
}

// goesOn waits for twenty more terms.
func (h *history) goesOn(ctx context.Context) {
	GinkgoHelper()
	Eventually(h.count).WithContext(ctx).WithTimeout(40 * time.Second).Should(BeNumerically(">=", h.count()+20))
}

func (h *history) holds() {
	GinkgoHelper()
	Expect(h.faults).To(BeEmpty())
	tokens := make([]fence.Token, 0, len(h.terms))
	for _, held := range h.terms {
		tokens = append(tokens, held.Token())
	}
	Expect(slices.IsSorted(tokens)).To(BeTrue(), "tokens in the order of the terms: %v", tokens)
	Expect(slices.Compact(tokens)).To(HaveLen(len(h.terms)), "no token twice")
}
