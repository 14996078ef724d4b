// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/onsi/gomega/gbytes"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

var _ = Describe("The README", func() {
	It("shows a way with kubectl alone that works for an editor who may hold leases", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		kubeconfig := kubeconfigFor(ctx, namespace)

		out, err := script(ctx, kubeconfig, shellOf("With kubectl alone"))
		Expect(err).NotTo(HaveOccurred(), out)

		report := stored(ctx, configMap(namespace, "report"))
		Expect(report.Data).To(HaveKeyWithValue("rows", "42"))
		Eventually(leaseOf(ctx, namespace, "backup")).Should(HaveField("Status.Terms", ConsistOf(And(
			HaveField("Identity", "my-backup"),
			HaveField("EndReason", v1alpha1.EndSessionClosed),
		))))

		By("writing without the token")
		out, err = script(ctx, kubeconfig, `kubectl patch configmap report -p "data: {rows: '43'}"`)
		Expect(err).To(HaveOccurred())
		Expect(out).To(And(ContainSubstring("Forbidden"), ContainSubstring("carries no token")))

		By("writing with an older one")
		out, err = script(ctx, kubeconfig, `kubectl patch configmap report --type=merge \
			-p '{"metadata": {"annotations": {"fencedlease.dev/token": "1"}}, "data": {"rows": "43"}}'`)
		Expect(err).To(HaveOccurred())
		Expect(out).To(And(ContainSubstring("Forbidden"), ContainSubstring("this write carries 1")))
		Expect(stored(ctx, configMap(namespace, "report")).Data).To(HaveKeyWithValue("rows", "42"))
	}, SpecTimeout(time.Minute))
})

// shellOf is the one shell block of that section.
func shellOf(section string) string {
	GinkgoHelper()
	readme, err := os.ReadFile("../../README.md")
	Expect(err).NotTo(HaveOccurred())
	match := regexp.MustCompile("(?s)\n## " + section + "\n(?:[^#].*?)?```sh\n(.*?)```").FindSubmatch(readme)
	Expect(match).NotTo(BeNil(), "a shell block under %q", section)
	return string(match[1])
}

// kubeconfigFor is that of a service account of the namespace, with the namespace as default.
func kubeconfigFor(ctx context.Context, namespace string) string {
	GinkgoHelper()
	path := filepath.Join(GinkgoT().TempDir(), "kubeconfig")
	Expect(testenv.WriteKubeconfig(contender(ctx, namespace, "dev"), path)).To(Succeed())
	_, err := env.Kubectl(ctx, "config", "set-context", "--current", "--namespace="+namespace, "--kubeconfig="+path)
	Expect(err).NotTo(HaveOccurred())
	return path
}

// script runs it with bash, and returns all that it prints.
func script(ctx context.Context, kubeconfig, text string) (string, error) {
	out := gbytes.NewBuffer()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", text)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "KUBERC=off",
		"PATH="+filepath.Dir(worker)+string(os.PathListSeparator)+os.Getenv("PATH"))
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	return string(out.Contents()), err
}
