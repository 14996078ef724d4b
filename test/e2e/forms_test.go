// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

var _ = Describe("Every legal form", func() {
	DescribeTable("of a lease's name and of an identity works: held, written with, waited for, handed over",
		func(ctx SpecContext, name, identity string) {
			namespace := newNamespace(ctx)
			newLease(ctx, namespace, name, 15)
			protected := newConfigMap(ctx, namespace, "protected", name)
			cfg := contender(ctx, namespace, "orders")
			first, err := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: identity}).Acquire(ctx, name)
			Expect(err).NotTo(HaveOccurred())
			Expect(write(ctx, fence.NewClient(clientFor(cfg), first), protected, "first")).To(Succeed())
			Expect(statusOf(ctx, namespace, name).Holder.Identity).To(Equal(identity))

			next := acquireLater(ctx, newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: identity}), name)
			Eventually(leaseOf(ctx, namespace, name)).Should(HaveField("Status.Waiting", BeEquivalentTo(1)))
			Expect(first.Release(ctx)).To(Succeed())
			var second *fence.Held
			Eventually(next).Should(Receive(&second))
			Expect(write(ctx, fence.NewClient(clientFor(cfg), second), protected, "second")).To(Succeed())
			Expect(statusOf(ctx, namespace, name).Terms[0].Identity).To(Equal(identity))
		},
		Entry("one letter each", "a", "x", SpecTimeout(time.Minute)),
		Entry("a name of 253 characters with dots, an identity of 1024", longName(), strings.Repeat("i", 1024), SpecTimeout(time.Minute)),
		Entry("a name of digits, an identity in several scripts", "2026", "заказы 注文 طلبات 🦀", SpecTimeout(time.Minute)),
		Entry("1024 characters of four bytes", "orders.shop.example.com", strings.Repeat("🦀", 1024), SpecTimeout(time.Minute)),
		Entry("quotes, markup, and what JSON and CEL escape", "x-1", `a"b'c\d <e> & %s {{.}} /f~g	`+"\u2028", SpecTimeout(time.Minute)),
	)

	It("of a token is exact, up to the largest that an administrator can start at", func(ctx SpecContext) {
		const floor = int64(1) << 52
		namespace := newNamespace(ctx)
		createLease(ctx, &v1alpha1.FencedLease{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "orders"},
			Spec:       v1alpha1.FencedLeaseSpec{MinToken: floor},
		})
		protected := newConfigMap(ctx, namespace, "protected", "orders")
		cfg := contender(ctx, namespace, "orders")
		held, err := newSession(ctx, cfg, fence.Options{Namespace: namespace}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		Expect(int64(held.Token())).To(Equal(floor + 1))
		Expect(write(ctx, fence.NewClient(clientFor(cfg), held), protected, "exact")).To(Succeed())
		Expect(stored(ctx, protected).Annotations).To(HaveKeyWithValue(v1alpha1.AcceptedTokenAnnotation, "4503599627370497"))
		Expect(kubectlShows(ctx, namespace)).To(ContainSubstring(" 4503599627370497 "))
	}, SpecTimeout(time.Minute))
})

// longName has the 253 characters that a name may have.
func longName() string {
	return strings.Repeat(strings.Repeat("a", 62)+".", 4) + "b"
}
