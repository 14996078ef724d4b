// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"errors"
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/types"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

var _ = Describe("An error says what to do about", func() {
	DescribeTable("a spec that cannot be",
		func(ctx SpecContext, spec map[string]any, says string) {
			namespace := newNamespace(ctx)
			by := clientFor(contender(ctx, namespace, "dev")) // an editor
			err := by.Create(ctx, unstructuredLease(namespace, spec))
			Expect(err).To(MatchError(ContainSubstring(says)))
		},
		Entry("no time at all", map[string]any{"leaseDurationSeconds": 0}, "spec.leaseDurationSeconds in body should be greater than or equal to 1", SpecTimeout(time.Minute)),
		Entry("more than an hour", map[string]any{"leaseDurationSeconds": 3601}, "should be less than or equal to 3600", SpecTimeout(time.Minute)),
		Entry("a word for a number", map[string]any{"leaseDurationSeconds": "15s"}, "must be of type integer", SpecTimeout(time.Minute)),
		Entry("an unknown enforcement", map[string]any{"enforcement": "Maybe"}, `supported values: "Deny", "Warn"`, SpecTimeout(time.Minute)),
		Entry("a weaker fence without the verb", map[string]any{"enforcement": "Warn"}, "ask for the verb bypass on fencedleases.fencedlease.dev", SpecTimeout(time.Minute)),
		Entry("a token floor without the verb", map[string]any{"minToken": 7}, "ask for the verb bypass on fencedleases.fencedlease.dev", SpecTimeout(time.Minute)),
	)

	DescribeTable("a token that is none",
		func(ctx SpecContext, token string) {
			namespace := newNamespace(ctx)
			newLease(ctx, namespace, "orders", 15)
			protected := newConfigMap(ctx, namespace, "protected", "orders")
			cfg := contender(ctx, namespace, "orders")
			_, err := newSession(ctx, cfg, fence.Options{Namespace: namespace}).Acquire(ctx, "orders")
			Expect(err).NotTo(HaveOccurred())
			err = writeWith(ctx, clientFor(cfg), protected, token, "x")
			Expect(err).To(MatchError(ContainSubstring("is not a decimal from 1 to 9007199254740991 without leading zero")))
			Expect(err).To(haveReason(v1alpha1.ReasonTokenInvalid))
		},
		Entry("empty", "", SpecTimeout(time.Minute)),
		Entry("a word", "seven", SpecTimeout(time.Minute)),
		Entry("zero", "0", SpecTimeout(time.Minute)),
		Entry("a leading zero", "007", SpecTimeout(time.Minute)),
		Entry("negative", "-1", SpecTimeout(time.Minute)),
		Entry("a float", "1e3", SpecTimeout(time.Minute)),
		Entry("beyond 2^53-1", "9007199254740992", SpecTimeout(time.Minute)),
		Entry("digits of another script", "٤٢", SpecTimeout(time.Minute)),
		Entry("very long", strings.Repeat("9", 10_000), SpecTimeout(time.Minute)),
	)

	It("a token that was never issued", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 15)
		protected := newConfigMap(ctx, namespace, "protected", "orders")
		cfg := contender(ctx, namespace, "orders")
		held, err := newSession(ctx, cfg, fence.Options{Namespace: namespace}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		err = writeWith(ctx, clientFor(cfg), protected, decimal(held.Token()+1), "x")
		Expect(err).To(MatchError(ContainSubstring("was never issued")))
		Expect(err).To(haveReason(v1alpha1.ReasonTokenUnknown))
	}, SpecTimeout(time.Minute))

	It("a token on an object that nothing protects", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		err := writeWith(ctx, admin, newConfigMap(ctx, namespace, "unprotected", ""), "7", "x")
		Expect(err).To(MatchError(ContainSubstring("protect it first with the annotation fencedlease.dev/lease")))
		Expect(err).To(haveReason(v1alpha1.ReasonNotProtected))
	}, SpecTimeout(time.Minute))

	It("missing rights", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		stranger := contender(ctx, newNamespace(ctx), "stranger")
		_, err := fence.NewSession(ctx, stranger, fence.Options{Namespace: namespace})
		Expect(apierrors.IsForbidden(err)).To(BeTrue(), "%v", err)
		Expect(err).To(MatchError(ContainSubstring("bind the ClusterRole fencedlease-contender to this user in namespace %q", namespace)))
	}, SpecTimeout(time.Minute))

	It("a namespace that does not exist", func(ctx SpecContext) {
		_, err := fence.NewSession(ctx, env.Config(), fence.Options{Namespace: "nowhere"})
		Expect(err).To(MatchError(ContainSubstring(`create the namespace "nowhere", or set Options.Namespace`)))
	}, SpecTimeout(time.Minute))

	It("a lease that does not exist", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		session := newSession(ctx, contender(ctx, namespace, "orders"), fence.Options{Namespace: namespace})
		_, err := session.Acquire(ctx, "nothing")
		Expect(apierrors.IsNotFound(err)).To(BeTrue(), "%v", err)
		Expect(err).To(MatchError(ContainSubstring("nothing")))
	}, SpecTimeout(time.Minute))

	It("a lease that somebody else holds", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 15)
		cfg := contender(ctx, namespace, "orders")
		_, err := newSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "holder"}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		_, err = newSession(ctx, cfg, fence.Options{Namespace: namespace}).TryAcquire(ctx, "orders")
		Expect(err).To(MatchError(fence.ErrHeld))
		Expect(err).To(MatchError(And(ContainSubstring(`held by "holder"`), ContainSubstring("wait with Acquire"))))
	}, SpecTimeout(time.Minute))

	It("a cluster that does not answer", func(ctx SpecContext) {
		port, err := testenv.FreePort()
		Expect(err).NotTo(HaveOccurred())
		cfg := env.Config()
		cfg.Host = fmt.Sprintf("https://127.0.0.1:%d", port)
		_, err = fence.NewSession(ctx, cfg, fence.Options{Namespace: "default"})
		Expect(err).To(MatchError(And(ContainSubstring(cfg.Host), ContainSubstring("check that the cluster runs"))))
	}, SpecTimeout(time.Minute))
})

func unstructuredLease(namespace string, spec map[string]any) client.Object {
	lease := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	lease.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("FencedLease"))
	lease.SetNamespace(namespace)
	lease.SetName("orders")
	return lease
}

// haveReason matches an error of the API server that carries the guard's machine word.
func haveReason(reason v1alpha1.Reason) types.GomegaMatcher {
	return WithTransform(func(err error) (causes []metav1.CauseType) {
		status := apierrors.APIStatus(nil)
		if errors.As(err, &status) && status.Status().Details != nil {
			for _, cause := range status.Status().Details.Causes {
				causes = append(causes, cause.Type)
			}
		}
		return causes
	}, ContainElement(metav1.CauseType(reason)))
}
