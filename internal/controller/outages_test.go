// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

var _ = Describe("An outage", Serial, func() {
	const ttl = 2 * time.Second

	DescribeTable("ends no term of who could not renew, and each session gets its full TTL after",
		func(ctx context.Context, breakDown func() error, mend func(context.Context) error) {
			w := newWorld(ctx)
			m := w.manage()
			l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
			p := w.process(ctx, "p", ttl)
			p.acquire(ctx, l)
			Expect(p.renew(ctx)).To(Succeed())
			m.sees(p)
			Expect(breakDown()).To(Succeed())
			mending := sync.OnceValue(func() error { return mend(context.Background()) })
			DeferCleanup(func() { Expect(mending()).To(Succeed()) })
			Eventually(m.tracker.left).WithArguments(p.uid(), "").Should(BeNumerically("<", -ttl))
			go func() { _ = mending() }() // it returns when all is ready, which is later than the first read
			Eventually(m.tracker.left).WithArguments(p.uid(), "").Should(BeNumerically(">", ttl*3/4))
			Eventually(m.tracker.left).WithArguments(p.uid(), "").Should(BeNumerically("<", ttl/2))
			Expect(p.renew(ctx)).To(Succeed())
			fallSilent := p.live()
			Consistently(status(ctx, l)).WithTimeout(ttl).Should(And(heldBy("p"), endedAs()))

			By("ending the term of who falls silent after it")
			fallSilent()
			Eventually(status(ctx, l)).WithTimeout(time.Minute).Should(endedAs(v1alpha1.EndExpired))
			Expect(time.Since(p.renewed)).To(BeNumerically(">=", ttl))
		},
		Entry("of etcd", func() error { return env.Etcd.Pause() }, func(context.Context) error { return env.Etcd.Resume() }),
		Entry("of the API server", func() error { return env.APIServer.Kill() }, func(ctx context.Context) error { return env.APIServer.Start(ctx) }),
	)

	It("of the controller alone ends no term, and what died meanwhile is found", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		alive, closed, silent := w.lease(ctx, "alive", v1alpha1.FencedLeaseSpec{}),
			w.lease(ctx, "closed", v1alpha1.FencedLeaseSpec{}), w.lease(ctx, "silent", v1alpha1.FencedLeaseSpec{})
		p, q, r := w.process(ctx, "p", ttl), w.process(ctx, "q", calm), w.process(ctx, "r", ttl)
		p.live()
		stop := r.live()
		p.acquire(ctx, alive)
		q.acquire(ctx, closed)
		r.acquire(ctx, silent)
		m.stop()
		stop()
		q.close(ctx)
		Eventually(func() time.Duration { return time.Since(r.renewed) }).Should(BeNumerically(">", ttl))

		begun := time.Now()
		w.manage()
		Eventually(status(ctx, closed)).Should(endedAs(v1alpha1.EndSessionClosed))
		Eventually(status(ctx, silent)).Should(endedAs(v1alpha1.EndExpired))
		Expect(time.Since(begun)).To(BeNumerically(">=", ttl))
		Expect(status(ctx, alive)()).To(And(heldBy("p"), endedAs()))
	})

	It("of the watch alone changes nothing but the time", func(ctx context.Context) {
		w := newWorld(ctx)
		proxy, err := testenv.NewProxy(strings.TrimPrefix(managerConfig.Host, "https://"))
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(proxy.Close)
		m := w.manage(func(o *ctrl.Options) {
			o.NewCache = func(cfg *rest.Config, o cache.Options) (cache.Cache, error) {
				o.HTTPClient = nil // it goes to the API server itself
				return cache.New(proxy.Config(cfg), o)
			}
		})
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		p, next, last := w.process(ctx, "p", ttl), w.process(ctx, "next", calm), w.process(ctx, "last", calm)
		fallSilent := p.live()
		next.live()
		last.live()
		p.acquire(ctx, l)
		next.want(ctx, l)
		Eventually(status(ctx, l)).Should(queueOf("next"))
		last.want(ctx, l)
		Eventually(status(ctx, l)).Should(queueOf("next", "last"))
		m.settled(ctx, l)

		proxy.Delay(3 * time.Second)
		By("believing the API server that the holder renewed")
		Consistently(status(ctx, l)).WithTimeout(ttl + promptly).Should(heldBy("p"))
		By("expiring it once")
		fallSilent()
		Eventually(status(ctx, l)).Should(And(heldBy("next"), queueOf("last"), endedAs(v1alpha1.EndExpired)))
		Expect(time.Since(p.renewed)).To(BeNumerically(">=", ttl))
		granted := status(ctx, l)().Token
		m.settled(ctx, l) // what was late has arrived
		m.quiet()
		Expect(status(ctx, l)()).To(And(heldBy("next"), queueOf("last"), HaveField("Token", granted),
			HaveField("Handovers", int64(2)), endedAs(v1alpha1.EndExpired)))
		Eventually(told(ctx, l)).Should(ConsistOf("Normal Granted", "Warning Expired"))
		Expect(m.handovers(string(v1alpha1.EndExpired))).To(Equal(1))
	})
})

var _ = Describe("A decision", func() {
	It("is put off while the API server cannot say whether a session is there", func(ctx context.Context) {
		w := newWorld(ctx)
		l := w.uninitialised(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		Expect(write(ctx, admin, l, protocol.Initialise(time.Now()))).To(Succeed())
		p := w.process(ctx, "p", calm)
		p.acquire(ctx, l)
		p.close(ctx)
		t, c := newTracker(clock.RealClock{}), clientOf(managerConfig)
		down := true
		flaky := interceptor.NewClient(c, interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				if _, session := o.(*coordinationv1.Lease); session && down {
					return errors.New("connection refused")
				}
				return c.Get(ctx, key, o, opts...)
			},
		})
		r := &leaseReconciler{client: c, tracker: t, live: &liveReader{reader: flaky, tracker: t}, metrics: NewMetrics(prometheus.NewRegistry())}
		r.recorder = events.NewFakeRecorder(10)
		_, err := r.Reconcile(ctx, client.ObjectKeyFromObject(l))
		Expect(err).To(MatchError(ContainSubstring("connection refused")))
		Expect(status(ctx, l)()).To(heldBy("p"))

		down = false
		_, err = r.Reconcile(ctx, client.ObjectKeyFromObject(l))
		Expect(err).NotTo(HaveOccurred())
		Expect(status(ctx, l)()).To(And(heldBy(""), endedAs(v1alpha1.EndSessionClosed)))
	})

	It("that is overtaken is made again, on what is there then", func(ctx context.Context) {
		w := newWorld(ctx)
		l := w.uninitialised(ctx, "orders", v1alpha1.FencedLeaseSpec{MaxHoldSeconds: ptr.To[int32](1)})
		Expect(write(ctx, admin, l, protocol.Initialise(time.Now()))).To(Succeed())
		p := w.process(ctx, "p", calm)
		p.acquire(ctx, l)
		t, c := newTracker(clock.RealClock{}), clientOf(managerConfig)
		t.look(p.session, true)
		t.observe(read(ctx, l))
		Eventually(func() time.Duration { return t.view(read(ctx, l), nil).HeldFor }).Should(BeNumerically(">", time.Second))
		overtaken := false
		r := &leaseReconciler{tracker: t, live: &liveReader{reader: c, tracker: t}, metrics: NewMetrics(prometheus.NewRegistry())}
		r.recorder = events.NewFakeRecorder(10)
		r.client = interceptor.NewClient(c, interceptor.Funcs{
			SubResourcePatch: func(ctx context.Context, c client.Client, sub string, o client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
				if !overtaken {
					overtaken = true
					p.release(ctx, l)
					p.acquire(ctx, l)
				}
				return c.SubResource(sub).Patch(ctx, o, patch, opts...)
			},
		})
		_, err := r.Reconcile(ctx, client.ObjectKeyFromObject(l))
		Expect(err).NotTo(HaveOccurred())
		Expect(overtaken).To(BeTrue())
		Expect(status(ctx, l)()).To(And(heldBy("p"), endedAs(v1alpha1.EndReleased)))
	})
})

var _ = Describe("A manager", func() {
	It("that does not lead does nothing, and one that led shows nothing held", func(ctx context.Context) {
		w := newWorld(ctx)
		elected := func(o *ctrl.Options) {
			o.Cache.DefaultNamespaces = nil // as in production
			o.LeaderElection, o.LeaderElectionID = true, "fencedlease-manager-test"
			o.LeaderElectionNamespace, o.LeaderElectionReleaseOnCancel = testenv.ManagerNamespace, true
			retry := 200 * time.Millisecond
			o.RetryPeriod = &retry
		}
		leader := w.manage(elected)
		Eventually(leader.mgr.Elected()).Should(BeClosed())
		standby := w.manage(elected)
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		p := w.process(ctx, "p", calm)
		p.live()
		p.acquire(ctx, l)
		held := func(m *manager) func() float64 {
			return func() float64 { return testutil.ToFloat64(m.metrics.held) }
		}
		Eventually(held(leader)).Should(BeNumerically(">", 0))
		Expect(held(standby)()).To(BeZero())
		Expect(standby.writes.Load()).To(BeZero())

		leader.stop()
		Expect(held(leader)()).To(BeZero())
		written := leader.writes.Load()
		Eventually(held(standby)).Should(BeNumerically(">", 0))
		p.release(ctx, l)
		q := w.process(ctx, "q", calm)
		q.want(ctx, l)
		Eventually(status(ctx, l)).Should(heldBy("q"))
		Expect(leader.writes.Load()).To(Equal(written))
	})
})
