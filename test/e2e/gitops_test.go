// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
)

// The repository knows the object and its lease, and neither token nor mark.
const manifest = `
apiVersion: v1
kind: ConfigMap
metadata:
  name: settings
  namespace: %s
  annotations: {fencedlease.dev/lease: orders}
data: {from: %q}
`

var _ = Describe("A repository that applies a protected object", func() {
	DescribeTable("may repeat itself, may not change it past the holder, and never lowers the mark",
		func(ctx SpecContext, how ...string) {
			namespace := newNamespace(ctx)
			newLease(ctx, namespace, "orders", 15)
			cfg := contender(ctx, namespace, "orders")
			Expect(apply(ctx, namespace, "git", how...)).Error().NotTo(HaveOccurred(), "an editor declares the protection")

			held, err := newSession(ctx, cfg, fence.Options{Namespace: namespace}).Acquire(ctx, "orders")
			Expect(err).NotTo(HaveOccurred())
			Expect(write(ctx, fence.NewClient(clientFor(cfg), held), configMap(namespace, "settings"), "of the holder")).To(Succeed())
			before := stored(ctx, configMap(namespace, "settings"))

			By("applying the same again")
			Expect(apply(ctx, namespace, "git", how...)).Error().NotTo(HaveOccurred())
			after := stored(ctx, configMap(namespace, "settings"))
			Expect(after.Data).To(Equal(before.Data))
			Expect(after.Annotations).To(HaveKeyWithValue(v1alpha1.AcceptedTokenAnnotation, decimal(held.Token())))

			By("applying something else")
			_, err = apply(ctx, namespace, "a later commit", how...)
			Expect(err).To(MatchError(And(ContainSubstring("carries no token"), ContainSubstring("is held by"))))
			Expect(stored(ctx, configMap(namespace, "settings")).Data).To(Equal(before.Data))
		},
		Entry("client-side", SpecTimeout(time.Minute)),
		Entry("server-side", "--server-side", SpecTimeout(time.Minute)),
		Entry("server-side with force", "--server-side", "--force-conflicts", SpecTimeout(time.Minute)),
	)

	It("may even name a mark: it is not taken from there", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", 15)
		cfg := contender(ctx, namespace, "orders")
		Expect(apply(ctx, namespace, "git")).Error().NotTo(HaveOccurred())
		held, err := newSession(ctx, cfg, fence.Options{Namespace: namespace}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())
		Expect(write(ctx, fence.NewClient(clientFor(cfg), held), configMap(namespace, "settings"), "of the holder")).To(Succeed())

		for _, mark := range []string{"1", "9007199254740991", ""} {
			patch := fmt.Sprintf(`{"metadata": {"annotations": {%q: %q}}}`, v1alpha1.AcceptedTokenAnnotation, mark)
			_, err := env.Kubectl(ctx, "patch", "configmap", "settings", "-n", namespace, "--type=merge", "-p", patch)
			Expect(err).NotTo(HaveOccurred())
			Expect(stored(ctx, configMap(namespace, "settings")).Annotations).
				To(HaveKeyWithValue(v1alpha1.AcceptedTokenAnnotation, decimal(held.Token())))
		}
	}, SpecTimeout(time.Minute))
})

// apply applies the manifest as an editor of the namespace.
func apply(ctx context.Context, namespace, from string, how ...string) (string, error) {
	GinkgoHelper()
	file := filepath.Join(GinkgoT().TempDir(), "settings.yaml")
	Expect(os.WriteFile(file, []byte(fmt.Sprintf(manifest, namespace, from)), 0o600)).To(Succeed())
	args := append([]string{"apply", "--kubeconfig=" + kubeconfigFor(ctx, namespace), "-f", file}, how...)
	return env.Kubectl(ctx, args...)
}
