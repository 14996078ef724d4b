// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

var _ = Describe("On a cluster without FencedLease", Ordered, func() {
	var bare *testenv.Env
	BeforeAll(func(ctx SpecContext) {
		var err error
		bare, err = testenv.Start(ctx, testenv.Options{})
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(bare.Stop)
	}, NodeTimeout(2*time.Minute))

	It("the library says to install it", func(ctx SpecContext) {
		_, err := fence.NewSession(ctx, bare.Config(), fence.Options{Namespace: "default"})
		Expect(err).To(MatchError(ContainSubstring("install FencedLease")))
	}, SpecTimeout(time.Minute))

	It("the API server takes the whole installation, dry and for real, and again", func(ctx SpecContext) {
		By("for real first: a dry run makes no namespace for what follows")
		Expect(bare.Apply(ctx, "../../config/default")).To(Succeed())
		By("and again")
		out, err := bare.Kubectl(ctx, "apply", "--server-side", "--dry-run=server", "-k", "../../config/default")
		Expect(err).NotTo(HaveOccurred())
		Expect(out).To(And(
			ContainSubstring("customresourcedefinition.apiextensions.k8s.io/fencedleases.fencedlease.dev"),
			ContainSubstring("mutatingwebhookconfiguration.admissionregistration.k8s.io/fencedlease-guard"),
			ContainSubstring("deployment.apps/fencedlease-manager"),
			ContainSubstring("validatingadmissionpolicy.admissionregistration.k8s.io/fencedlease-status")))
	}, SpecTimeout(2*time.Minute))
})
