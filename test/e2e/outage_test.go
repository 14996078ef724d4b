// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
)

var _ = Describe("While no manager runs", func() {
	It("goes on to take, give back and hand over leases; only fenced writes are refused", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 60)
		newLease(ctx, namespace, "billing", 60)
		protected := newConfigMap(ctx, namespace, "protected", "orders")
		unprotected := newConfigMap(ctx, namespace, "unprotected", "")
		cfg := contender(ctx, namespace, "orders")
		plain := clientFor(cfg)
		session := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "first"})
		first, err := session.Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		next := inLine(ctx, namespace)

		killManagers()

		By("handing over to who stood in line")
		Expect(first.Release(ctx)).To(Succeed())
		var second *fence.Held
		Eventually(next).Should(Receive(&second))
		Expect(second.Token()).To(Equal(first.Token() + 1))

		By("taking and giving back another")
		billing, err := session.TryAcquire(ctx, "billing")
		Expect(err).NotTo(HaveOccurred())
		Expect(billing.Release(ctx)).To(Succeed())

		By("waiting without a controller, when the lease comes free")
		waiting := acquireLater(ctx, session, "orders")
		Expect(second.Release(ctx)).To(Succeed())
		var third *fence.Held
		Eventually(waiting).WithTimeout(time.Minute).Should(Receive(&third))
		Expect(third.Token()).To(Equal(second.Token() + 1))

		By("writing what nothing protects, at the usual speed")
		began := time.Now()
		Expect(write(ctx, plain, unprotected, "as ever")).To(Succeed())
		Expect(time.Since(began)).To(BeNumerically("<", time.Second))

		By("refusing what is protected, with a word on why")
		Expect(write(ctx, fence.NewClient(plain, third), protected, "fenced")).
			To(MatchError(ContainSubstring("failed calling webhook \"guard.fencedlease.dev\"")))
		Expect(stored(ctx, protected).Data).To(BeEmpty())

		By("leaving the control plane alone")
		Expect(env.APIServer.Restart(ctx)).To(Succeed())
		fresh := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "story-"}}
		Expect(admin.Create(ctx, fresh)).To(Succeed())
		Eventually(func() error {
			return admin.Get(ctx, client.ObjectKey{Namespace: fresh.Name, Name: "kube-root-ca.crt"}, &corev1.ConfigMap{})
		}).Should(Succeed())

		By("starting the managers again")
		Expect(startManagers(ctx)).To(Succeed())
		Eventually(func() error {
			return write(ctx, fence.NewClient(plain, third), protected, "fenced")
		}).Should(Succeed())
		Expect(stored(ctx, protected).Data).To(HaveKeyWithValue("value", "fenced"))
	}, SpecTimeout(3*time.Minute))
})
