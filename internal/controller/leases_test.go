// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"strconv"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// calm is a TTL that does not matter.
const calm = 10 * time.Second

var _ = Describe("A new lease", func() {
	It("starts at its own resourceVersion, above every token of its former life", func(ctx context.Context) {
		w := newWorld(ctx)
		w.manage()
		p := w.process(ctx, "p", calm)
		var last int64
		for range 3 {
			l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
			s := status(ctx, l)()
			Expect(strconv.FormatInt(s.Token, 10)).To(Equal(l.ResourceVersion))
			Expect(s.Token).To(BeNumerically(">", last))
			Eventually(func() []metav1.Condition { return status(ctx, l)().Conditions }).Should(ContainElement(And(
				HaveField("Type", v1alpha1.ConditionReady), HaveField("Status", metav1.ConditionTrue),
				HaveField("ObservedGeneration", int64(1)))))
			p.acquire(ctx, l)
			p.release(ctx, l)
			p.acquire(ctx, l)
			last = status(ctx, l)().Token
			Expect(admin.Delete(ctx, l)).To(Succeed())
		}
	})

	It("starts at spec.minToken where that is higher, and is lifted when that is raised", func(ctx context.Context) {
		w := newWorld(ctx)
		w.manage()
		p := w.process(ctx, "p", calm)
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{MinToken: 1 << 40})
		Expect(status(ctx, l)().Token).To(Equal(int64(1 << 40)))

		raised := read(ctx, l)
		raised.Spec.MinToken = 1 << 41
		Expect(admin.Update(ctx, raised)).To(Succeed())
		Eventually(status(ctx, l)).Should(HaveField("ObservedGeneration", raised.Generation))
		p.want(ctx, l)
		Eventually(status(ctx, l)).Should(heldBy("p"))
		Expect(status(ctx, l)().Token).To(Equal(int64(1 << 41)))
	})

	It("goes to the first in line, and the others queue in the same write", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "orders"}}
		for i := range 4 {
			p := w.process(ctx, fmt.Sprintf("p%d", i), calm)
			p.want(ctx, l)
			m.sees(p)
		}
		l = w.uninitialised(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		Eventually(status(ctx, l)).Should(And(heldBy("p0"), queueOf("p1", "p2", "p3"), HaveField("Waiting", int32(3)),
			HaveField("Handovers", int64(1))))
		m.settled(ctx, l)
		Expect(m.writes.Load()).To(Equal(int64(2))) // the first status, the grant
		Eventually(told(ctx, l)).Should(HaveExactElements("Normal Granted"))
		Expect(m.handovers(reasonGranted)).To(Equal(1))
	})
})

var _ = Describe("The line", func() {
	It("is longer than the queue, and nobody is passed over", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		const n = 11
		var all []*process
		for i := range n {
			p := w.process(ctx, fmt.Sprintf("p%d", i), calm)
			p.live()
			p.want(ctx, l)
			all = append(all, p)
		}
		Eventually(status(ctx, l)).Should(And(heldBy("p0"), HaveField("Waiting", int32(n-1)),
			HaveField("Queue", HaveLen(v1alpha1.MaxQueue))))
		Eventually(m.tracker.counts).Should(Equal(counts{sessions: n, held: 1, waiting: n - 1}))
		for i, p := range all {
			Eventually(status(ctx, l)).Should(heldBy(fmt.Sprintf("p%d", i)))
			p.release(ctx, l)
		}
		Eventually(status(ctx, l)).Should(And(HaveField("Phase", v1alpha1.PhaseAvailable), HaveField("Waiting", int32(0)),
			HaveField("Handovers", int64(n))))
	})

	It("is left by who asks no more, and a want that was granted is not queued again", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		a, b, c := w.process(ctx, "a", calm), w.process(ctx, "b", calm), w.process(ctx, "c", calm)
		a.want(ctx, l)
		Eventually(status(ctx, l)).Should(heldBy("a"))
		b.want(ctx, l)
		Eventually(status(ctx, l)).Should(queueOf("b"))
		c.want(ctx, l)
		Eventually(status(ctx, l)).Should(queueOf("b", "c"))
		b.forgo(ctx, l)
		Eventually(status(ctx, l)).Should(And(queueOf("c"), HaveField("Waiting", int32(1))))

		a.release(ctx, l) // a and c leave their wants as they are
		Eventually(status(ctx, l)).Should(heldBy("c"))
		c.release(ctx, l)
		m.settled(ctx, l)
		Consistently(status(ctx, l)).Should(And(heldBy(""), HaveField("Handovers", int64(2))))
		a.want(ctx, l)
		Eventually(status(ctx, l)).Should(heldBy("a"))
	})

	It("loses who died, also the first, before a term ends", func(ctx context.Context) {
		w := newWorld(ctx)
		w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		holder, dead, silent, next := w.process(ctx, "holder", calm), w.process(ctx, "dead", calm),
			w.process(ctx, "silent", 2*time.Second), w.process(ctx, "next", calm)
		holder.live()
		next.live()
		holder.acquire(ctx, l)
		for i, p := range []*process{dead, silent, next} {
			p.want(ctx, l)
			Eventually(status(ctx, l)).Should(HaveField("Queue", HaveLen(i+1)))
		}
		dead.close(ctx)
		Eventually(status(ctx, l)).WithTimeout(promptly).Should(queueOf("silent", "next"))
		Eventually(status(ctx, l)).Should(And(heldBy("holder"), queueOf("next")))
		holder.release(ctx, l)
		Eventually(status(ctx, l)).Should(And(heldBy("next"), endedAs(v1alpha1.EndReleased)))
	})

	It("is put in order again by ticket by a new controller", func(ctx context.Context) {
		w := newWorld(ctx)
		l := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "orders"}}
		for i, ticket := range []int64{5, 2, 9} {
			p := w.process(ctx, fmt.Sprintf("p%d", i), calm)
			p.ticket = ticket - 1
			p.want(ctx, l)
		}
		w.uninitialised(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		w.manage()
		Eventually(status(ctx, l)).Should(And(heldBy("p1"), queueOf("p0", "p2")))
	})
})

var _ = Describe("A term", func() {
	It("ends when its session is deleted", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		p := w.process(ctx, "p", calm)
		p.acquire(ctx, l)
		Eventually(told(ctx, l)).Should(HaveExactElements("Normal Granted"))
		p.close(ctx)
		Eventually(status(ctx, l)).WithTimeout(promptly).Should(And(heldBy(""), endedAs(v1alpha1.EndSessionClosed)))
		Eventually(told(ctx, l)).Should(ConsistOf("Normal Granted", "Normal SessionClosed"))
		Expect(m.handovers(string(v1alpha1.EndSessionClosed))).To(Equal(1))
	})

	It("ends when its Pod is deleted", func(ctx context.Context) {
		w := newWorld(ctx)
		w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		cfg, pod, err := env.Pod(ctx, w.namespace, "worker", "p")
		Expect(err).NotTo(HaveOccurred())
		p := w.processAs(ctx, cfg, "p", 15*time.Second,
			metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID})
		p.live()
		p.acquire(ctx, l)
		Expect(status(ctx, l)().Holder.PodUID).To(Equal(pod.UID))
		Expect(admin.Delete(ctx, pod, client.GracePeriodSeconds(0))).To(Succeed())
		Eventually(status(ctx, l)).Should(endedAs(v1alpha1.EndSessionClosed))
	})

	It("ends after spec.maxHoldSeconds, however well it renews", func(ctx context.Context) {
		w := newWorld(ctx)
		w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{MaxHoldSeconds: ptr.To[int32](1)})
		p, next := w.process(ctx, "p", calm), w.process(ctx, "next", calm)
		p.live()
		begun := time.Now()
		p.acquire(ctx, l)
		next.want(ctx, l)
		Eventually(status(ctx, l)).WithTimeout(time.Second + promptly).Should(And(heldBy("next"), endedAs(v1alpha1.EndMaxHold)))
		Expect(time.Since(begun)).To(BeNumerically(">=", time.Second))
	})

	It("is followed by a cooldown if it did not end by release", func(ctx context.Context) {
		w := newWorld(ctx)
		w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{CooldownSeconds: 1})
		p, q, next := w.process(ctx, "p", calm), w.process(ctx, "q", calm), w.process(ctx, "next", calm)
		p.acquire(ctx, l)
		p.release(ctx, l)
		Expect(status(ctx, l)()).To(HaveField("Phase", v1alpha1.PhaseAvailable))

		q.acquire(ctx, l)
		next.want(ctx, l)
		Eventually(status(ctx, l)).Should(queueOf("next"))
		ended := time.Now()
		q.close(ctx)
		Eventually(status(ctx, l)).WithTimeout(promptly).Should(And(HaveField("Phase", v1alpha1.PhaseCooldown),
			HaveField("CooldownUntil", Not(BeNil()))))
		Eventually(status(ctx, l)).WithTimeout(time.Second + promptly).Should(heldBy("next"))
		Expect(time.Since(ended)).To(BeNumerically(">=", time.Second))
	})

	DescribeTable("is invalid",
		func(ctx context.Context, contender func(ctx context.Context, w *world) v1alpha1.Contender) {
			w := newWorld(ctx)
			m := w.manage()
			l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
			c := contender(ctx, w)
			c.User, c.PodUID, c.Ticket = "system:serviceaccount:"+w.namespace+":worker", "", 1
			Expect(write(ctx, clientOf(w.worker), l, protocol.Acquire(c, time.Now()))).To(Succeed())
			Eventually(status(ctx, l)).WithTimeout(promptly).Should(And(heldBy(""), endedAs(v1alpha1.EndInvalid)))
			Eventually(told(ctx, l)).Should(ConsistOf("Normal Granted", "Warning Invalid"))
			Expect(m.handovers(string(v1alpha1.EndInvalid))).To(Equal(1))
		},
		Entry("when its session does not exist", func(context.Context, *world) v1alpha1.Contender {
			return v1alpha1.Contender{Identity: "ghost", Session: "ghost", SessionUID: "ghost"}
		}),
		Entry("when its session is an earlier one of that name", func(ctx context.Context, w *world) v1alpha1.Contender {
			c := w.process(ctx, "p", calm).request(1)
			c.SessionUID = "earlier"
			return c
		}),
		Entry("when its session is somebody else's", func(ctx context.Context, w *world) v1alpha1.Contender {
			return w.processAs(ctx, w.other, "p", calm).request(1)
		}),
		Entry("when its session may be silent for longer than the lease allows", func(ctx context.Context, w *world) v1alpha1.Contender {
			return w.process(ctx, "p", time.Minute).request(1)
		}),
	)

	It("outlives a shorter spec.leaseDurationSeconds, and the next does not begin", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		p, slow := w.process(ctx, "p", calm), w.process(ctx, "slow", calm)
		p.acquire(ctx, l)
		m.settled(ctx, l)
		shorter := read(ctx, l)
		shorter.Spec.LeaseDurationSeconds = 5
		Expect(admin.Update(ctx, shorter)).To(Succeed())
		slow.want(ctx, l)
		Eventually(status(ctx, l)).Should(HaveField("ObservedGeneration", shorter.Generation))
		Consistently(status(ctx, l)).Should(And(heldBy("p"), HaveField("Waiting", int32(0))))
	})

	It("that others begin, end or steal is told once as well", func(ctx context.Context) {
		w := newWorld(ctx)
		m := w.manage()
		l := w.lease(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		p := w.process(ctx, "p", calm)
		p.acquire(ctx, l)
		p.release(ctx, l)
		p.acquire(ctx, l)
		Expect(steal(ctx, l)).To(Succeed())
		want := ConsistOf("Normal Granted", "Normal Released", "Normal Granted", "Warning Stolen")
		Eventually(told(ctx, l)).Should(want)
		m.settled(ctx, l)
		Consistently(told(ctx, l)).Should(want)
		Expect(m.handovers(reasonGranted)).To(Equal(2))
		Expect(m.handovers(string(v1alpha1.EndReleased))).To(Equal(1))
		Expect(m.handovers(string(v1alpha1.EndStolen))).To(Equal(1))

		m.stop()
		m = w.manage()
		m.settled(ctx, l)
		Consistently(told(ctx, l)).Should(want)
		Expect(m.handovers(reasonGranted)).To(BeZero())
	})

	It("of a session that only the API server knows yet is left alone", func(ctx context.Context) {
		w := newWorld(ctx)
		l := w.uninitialised(ctx, "orders", v1alpha1.FencedLeaseSpec{})
		p := w.process(ctx, "p", calm)
		Expect(write(ctx, admin, l, protocol.Initialise(time.Now()))).To(Succeed())
		p.acquire(ctx, l)
		t := newTracker(clock.RealClock{})
		held := read(ctx, l)
		t.observe(held)
		r := &leaseReconciler{client: clientOf(managerConfig), tracker: t, live: &liveReader{reader: clientOf(managerConfig), tracker: t}}
		v, unsure, err := r.view(ctx, held)
		Expect(err).NotTo(HaveOccurred())
		Expect(unsure).To(BeTrue())
		Expect(v.Sessions).To(HaveKey(p.uid()))
		_, _, due := protocol.Settle(held, v)
		Expect(due).To(BeFalse())
	})
})
