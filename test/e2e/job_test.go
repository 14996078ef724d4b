// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

var _ = Describe("The main job", func() {
	It("takes a lease, writes with its token, and gives it back; a stranger without the token is refused", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 15)
		protected := newConfigMap(ctx, namespace, "protected", "orders")
		cfg := contender(ctx, namespace, "orders")
		plain := clientFor(cfg)

		By("taking it")
		session := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "worker-a"})
		held, err := session.Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		Expect(kubectlShows(ctx, namespace)).To(MatchRegexp(`orders +worker-a +%s +Held +0 +1 `, decimal(held.Token())))

		By("writing")
		Expect(fence.NewClient(plain, held).Patch(ctx, configMap(namespace, "protected"), client.RawPatch(types.MergePatchType, []byte(`{}`)))).To(Succeed())
		Expect(stored(ctx, protected).Annotations).To(HaveKeyWithValue(v1alpha1.AcceptedTokenAnnotation, decimal(held.Token())), "to seal is to write nothing with a token")
		Expect(write(ctx, fence.NewClient(plain, held), protected, "by the holder")).To(Succeed())
		found := stored(ctx, protected)
		Expect(found.Data).To(HaveKeyWithValue("value", "by the holder"))
		Expect(found.Annotations).To(HaveKeyWithValue(v1alpha1.AcceptedTokenAnnotation, decimal(held.Token())))
		Expect(found.Annotations).NotTo(HaveKey(v1alpha1.TokenAnnotation), "the token is consumed")

		By("being the only one who may")
		Expect(write(ctx, plain, protected, "without token")).To(MatchError(ContainSubstring("carries no token")))
		Expect(writeWith(ctx, admin, protected, decimal(held.Token()), "by another user")).To(MatchError(ContainSubstring("only the holder may use its token")))

		By("giving it back")
		Expect(held.Release(ctx)).To(Succeed())
		Expect(held.Context().Err()).To(MatchError(context.Canceled))
		Expect(write(ctx, fence.NewClient(plain, held), protected, "late")).To(MatchError(fence.ErrLost))
		Expect(writeWith(ctx, plain, protected, decimal(held.Token()), "late")).To(MatchError(ContainSubstring("nobody holds lease")))
		Expect(stored(ctx, protected).Data).To(HaveKeyWithValue("value", "by the holder"))
		Expect(statusOf(ctx, namespace, "orders").Terms).To(HaveExactElements(And(
			HaveField("Token", int64(held.Token())),
			HaveField("EndReason", v1alpha1.EndReleased),
		)))
	}, SpecTimeout(time.Minute))

	It("hands over to the next in line in the order of their wishes", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 15)
		cfg := contender(ctx, namespace, "orders")
		first, err := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "first"}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())

		var waiting []<-chan *fence.Held
		for i, name := range []string{"second", "third", "fourth"} {
			waiting = append(waiting, acquireLater(ctx, newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: name}), "orders"))
			Eventually(leaseOf(ctx, namespace, "orders")).Should(HaveField("Status.Waiting", BeEquivalentTo(i+1)))
		}
		last := first
		for _, next := range waiting {
			Expect(last.Release(ctx)).To(Succeed())
			held := <-next
			Expect(held).NotTo(BeNil())
			Expect(held.Token()).To(Equal(last.Token() + 1))
			last = held
		}
		Expect(last.Release(ctx)).To(Succeed())
		Expect(statusOf(ctx, namespace, "orders").Phase).To(Equal(v1alpha1.PhaseAvailable))
	}, SpecTimeout(time.Minute))
})

func kubectlShows(ctx context.Context, namespace string) string {
	GinkgoHelper()
	out, err := env.Kubectl(ctx, "get", "fencedleases", "-n", namespace)
	Expect(err).NotTo(HaveOccurred())
	return out
}

// acquireLater waits for the lease in the background. The channel gets the lease, or nil when it was not to be had.
func acquireLater(ctx context.Context, session *fence.Session, lease string) <-chan *fence.Held {
	got := make(chan *fence.Held, 1)
	go func() {
		defer GinkgoRecover()
		held, err := session.Acquire(ctx, lease)
		if err != nil {
			GinkgoWriter.Printf("acquire %s: %v\n", lease, err)
		}
		got <- held
	}()
	return got
}
