// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	coordinationv1 "k8s.io/api/coordination/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

var _ = Describe("A session", func() {
	const ttl = 3 * time.Second

	It("expires when it falls silent, not before its TTL and within a second after", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		p, next := w.process(ctx, "p", ttl), w.process(ctx, "next", calm)
		fallSilent := p.live()
		p.acquire(ctx, l)
		token := status(ctx, l)().Token
		next.want(ctx, l)
		Eventually(status(ctx, l)).Should(queueOf("next"))
		fallSilent()
		Eventually(status(ctx, l)).WithTimeout(ttl + promptly).Should(And(heldBy("next"), endedAs(v1alpha1.EndExpired),
			HaveField("Token", token+1)))
		Expect(time.Since(p.renewed)).To(BeNumerically(">=", ttl))
		Expect(p.renew(ctx)).NotTo(Succeed())
		Eventually(told(ctx, l)).Should(ConsistOf("Normal Granted", "Warning Expired"))
		Expect(testutil.ToFloat64(m.metrics.expired)).To(Equal(1.0))
		Expect(testutil.CollectAndCount(m.metrics.expiryDelay)).To(Equal(1))
		Expect(m.handovers(string(v1alpha1.EndExpired))).To(Equal(1))
	})

	It("either renews or expires, never both", func(ctx context.Context) {
		w := newWorld(ctx)
		p := w.process(ctx, "p", time.Second)
		t := newTracker(clock.RealClock{})
		t.look(p.session, false)
		Eventually(t.left).WithArguments(p.uid(), "").Should(BeNumerically("<", 0))
		atLast := p.renew // between our read and our delete
		c := interceptor.NewClient(clientOf(managerConfig), interceptor.Funcs{
			Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
				Expect(atLast(ctx)).To(Succeed())
				return c.Delete(ctx, o, opts...)
			},
		})
		r := &sessionReconciler{
			client: c, tracker: t, live: &liveReader{reader: c, tracker: t}, metrics: NewMetrics(prometheus.NewRegistry()),
		}
		key := client.ObjectKeyFromObject(p.session)
		// The tracker has not proved that the API server could be read, so that this read gives the TTL anew.
		Expect(t.readable(time.Now())).To(BeFalse())
		Eventually(func() time.Duration {
			t.readable(time.Now())
			return t.left(p.uid(), "")
		}).Should(BeNumerically("<", 0))
		result, err := r.Reconcile(ctx, key)
		Expect(err).NotTo(HaveOccurred())
		Expect(result.RequeueAfter).To(Equal(time.Second))
		Expect(p.renew(ctx)).To(Succeed())

		By("counting anew from the renewal that the watch did not show")
		result, err = r.Reconcile(ctx, key)
		Expect(err).NotTo(HaveOccurred())
		Expect(result.RequeueAfter).To(BeNumerically(">", 0))
		Expect(testutil.ToFloat64(r.metrics.expired)).To(BeZero())
	})

	It("costs nothing to renew: no write, no look at a lease", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		p, waiter := w.process(ctx, "p", calm), w.process(ctx, "waiter", calm)
		p.acquire(ctx, l)
		waiter.want(ctx, l)
		Eventually(status(ctx, l)).Should(queueOf("waiter"))
		m.settled(ctx, l)
		Eventually(told(ctx, l)).Should(HaveExactElements("Normal Granted"))
		m.quiet()
		before, writes, version := reconciles(), m.writes.Load(), read(ctx, l).ResourceVersion
		for range 20 {
			Expect(p.renew(ctx)).To(Succeed())
			Expect(waiter.renew(ctx)).To(Succeed())
		}
		m.sees(p)
		m.sees(waiter)
		Consistently(reconciles).Should(Equal(before))
		Expect(m.writes.Load()).To(Equal(writes))
		Expect(read(ctx, l).ResourceVersion).To(Equal(version))
	})

	It("that is unusable is told once, and harms nobody", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		// The policy does not bound the UID of a Pod: it comes from the API server itself, or from an impersonator.
		cfg := env.As("mallory")
		cfg.Impersonate.Extra = map[string][]string{v1alpha1.PodUIDExtra: {strings.Repeat("x", 100)}}
		Expect(admin.Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "mallory"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "fencedlease-contender"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "mallory"}},
		})).To(Succeed())
		bad := w.processAs(ctx, cfg, "bad", calm)
		bad.want(ctx, l)
		Eventually(told(ctx, bad.session)).Should(HaveExactElements("Warning " + reasonUnusable))
		good := w.process(ctx, "good", calm)
		good.want(ctx, l)
		Eventually(status(ctx, l)).Should(And(heldBy("good"), HaveField("Waiting", int32(0))))
		Expect(bad.renew(ctx)).To(Succeed())
		m.sees(bad)
		Consistently(told(ctx, bad.session)).Should(HaveLen(1))
		Expect(testutil.ToFloat64(m.metrics.unusable)).To(Equal(1.0))
	})

	It("of another kind of Lease is none", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		plain := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "plain"}}
		Expect(admin.Create(ctx, plain)).To(Succeed())
		p := w.process(ctx, "p", calm)
		Eventually(m.tracker.named).WithArguments(client.ObjectKeyFromObject(p.session)).ShouldNot(BeNil())
		Expect(m.tracker.named(client.ObjectKeyFromObject(plain))).To(BeNil())
		var leases coordinationv1.LeaseList
		Expect(m.mgr.GetCache().List(ctx, &leases)).To(Succeed())
		Expect(leases.Items).To(HaveLen(1))
	})
})

// quiet waits until nothing was looked at for a while.
func (m *manager) quiet() {
	GinkgoHelper()
	last, since := reconciles(), time.Now()
	Eventually(func() time.Duration {
		if now := reconciles(); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since)
	}).Should(BeNumerically(">", 300*time.Millisecond))
}

// reconciles is how often a controller of ours looked at something, in all.
func reconciles() float64 {
	families, err := ctrlmetrics.Registry.Gather()
	Expect(err).NotTo(HaveOccurred())
	var sum float64
	for _, f := range families {
		if f.GetName() != "controller_runtime_reconcile_total" {
			continue
		}
		for _, metric := range f.GetMetric() {
			sum += metric.GetCounter().GetValue()
		}
	}
	return sum
}
