// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

// ttl of the leases here; the next in line gets the lease within that and a second.
const (
	ttl   = 3 * time.Second
	grace = time.Second
)

var _ = Describe("A holder that", func() {
	var namespace string
	BeforeEach(func(ctx SpecContext) {
		namespace = newNamespace(ctx)
		newLease(ctx, namespace, "orders", int32(ttl/time.Second))
		newConfigMap(ctx, namespace, "protected", "orders")
		newConfigMap(ctx, namespace, "unprotected", "")
	})

	It("is stopped loses the lease in time, and its late write is refused where the lease protects", func(ctx SpecContext) {
		stopped := newWorker(ctx, contender(ctx, namespace, "orders"), namespace, "stopped", "--keep-writing")
		before := holderIs(ctx, namespace, "orders", "stopped")
		next := inLine(ctx, namespace)

		Expect(stopped.Pause()).To(Succeed())
		since := time.Now()
		held := <-next
		Expect(held).NotTo(BeNil())
		Expect(time.Since(since)).To(BeNumerically("<=", ttl+grace))
		Expect(int64(held.Token())).To(Equal(before.Token + 1))
		Expect(statusOf(ctx, namespace, "orders").Terms[0].EndReason).To(Equal(v1alpha1.EndExpired))

		By("writing as the new holder, then letting the old one go on")
		fenced := fence.NewClient(clientFor(contender(ctx, namespace, "orders")), held)
		Expect(write(ctx, fenced, configMap(namespace, "protected"), "next")).To(Succeed())
		Expect(write(ctx, admin, configMap(namespace, "unprotected"), "next")).To(Succeed())
		kept := stored(ctx, configMap(namespace, "protected"))
		Expect(stopped.Resume()).To(Succeed())
		Eventually(logOf(stopped)).Should(And(
			MatchRegexp(`late write of count=\d+ to protected was REFUSED: .*this write carries %d`, before.Token),
			MatchRegexp(`late write of count=\d+ to unprotected was ACCEPTED`)))
		Expect(stored(ctx, configMap(namespace, "protected")).ResourceVersion).To(Equal(kept.ResourceVersion), "nothing has touched it")
	}, SpecTimeout(time.Minute))

	It("is cut off stops working before the next begins, and loses the lease in time", func(ctx SpecContext) {
		cfg := contender(ctx, namespace, "orders")
		wire, err := testenv.NewProxy(env.Config().Host[len("https://"):])
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(wire.Close)
		cut, err := newSession(ctx, wire.Config(cfg), fence.Options{Namespace: namespace, Identity: "cut"}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		next := inLine(ctx, namespace)

		wire.BlackHole()
		since := time.Now()
		held := <-next
		Expect(held).NotTo(BeNil())
		Expect(cut.Context().Err()).To(HaveOccurred(), "the work of the old holder has ended before")
		Expect(context.Cause(cut.Context())).To(MatchError(fence.ErrLost))
		Expect(time.Since(since)).To(BeNumerically("<=", ttl+grace))
		Expect(held.Token()).To(Equal(cut.Token() + 1))
	}, SpecTimeout(time.Minute))

	It("is a Pod that is deleted loses the lease when its session goes, long before the time is up", func(ctx SpecContext) {
		newLease(ctx, namespace, "slow", 600)
		cfg, pod, err := env.Pod(ctx, namespace, "orders", "holder")
		Expect(err).NotTo(HaveOccurred())
		gone, err := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "holder", TTL: 10 * time.Minute}).Acquire(ctx, "slow")
		Expect(err).NotTo(HaveOccurred())
		session := &coordinationv1.Lease{}
		session.Namespace, session.Name = namespace, statusOf(ctx, namespace, "slow").Holder.Session
		Expect(admin.Get(ctx, client.ObjectKeyFromObject(session), session)).To(Succeed())
		Expect(session.OwnerReferences).To(HaveExactElements(HaveField("UID", pod.UID)))
		next := acquireLater(ctx, newSession(ctx, contender(ctx, namespace, "orders"), fence.Options{Namespace: namespace}), "slow")
		Eventually(leaseOf(ctx, namespace, "slow")).Should(HaveField("Status.Waiting", BeEquivalentTo(1)))

		Expect(admin.Delete(ctx, pod)).To(Succeed())
		Eventually(func() bool {
			return apierrors.IsNotFound(admin.Get(ctx, client.ObjectKeyFromObject(session), session))
		}).WithTimeout(time.Minute).Should(BeTrue(), "the garbage collector takes the session")
		var held *fence.Held
		Eventually(next).WithTimeout(grace).Should(Receive(&held))
		Expect(held.Token()).To(Equal(gone.Token() + 1))
		Expect(statusOf(ctx, namespace, "slow").Terms[0].EndReason).To(Equal(v1alpha1.EndSessionClosed))
	}, SpecTimeout(2*time.Minute))
})

// inLine is somebody who waits for the lease, and whom the controller has seen.
func inLine(ctx context.Context, namespace string) <-chan *fence.Held {
	GinkgoHelper()
	next := acquireLater(ctx, newSession(ctx, contender(ctx, namespace, "orders"), fence.Options{Namespace: namespace, Identity: "next"}), "orders")
	Eventually(leaseOf(ctx, namespace, "orders")).Should(HaveField("Status.Waiting", BeEquivalentTo(1)))
	return next
}
