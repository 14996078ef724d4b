// SPDX-License-Identifier: Apache-2.0

package install_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/config"
	"github.com/fencedlease/fencedlease/internal/install"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

// TestChecker installs, spoils and mends on a real control plane, with the rights of the manager.
func TestChecker(t *testing.T) {
	env, err := testenv.Start(t.Context(), testenv.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	kubectl := func(args ...string) {
		t.Helper()
		if _, err := env.Kubectl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
	patch := func(kind, name, operations string) {
		t.Helper()
		kubectl("patch", kind, name, "--type=json", "-p", operations)
	}
	kubectl("create", "namespace", testenv.ManagerNamespace)
	cfg, err := env.ServiceAccount(t.Context(), testenv.ManagerNamespace, testenv.ManagerAccount)
	if err != nil {
		t.Fatal(err)
	}
	apply := func() {
		t.Helper()
		if err := env.Apply(t.Context(), "../../config/dev"); err != nil {
			t.Fatal(err)
		}
	}
	kubectl("apply", "--server-side", "-k", "../../config/rbac")

	checker := newChecker(t, cfg)
	expect(t, checker, "before the first look", "not known yet")
	expect(t, look(t, checker), "before the installation", `CustomResourceDefinition "fencedleases.fencedlease.dev" does not exist`)

	apply()
	expect(t, look(t, checker), "after it", "")
	reports := schema.GroupResource{Group: "samples.fencedlease.dev", Resource: "reports"}
	if checker.HasStatus(reports) {
		t.Error("a resource that is not served has /status")
	}
	kubectl("apply", "-f", "../../config/samples/report-crd.yaml")
	eventually(t, func() bool { return look(t, checker).HasStatus(reports) })
	if checker.HasStatus(schema.GroupResource{Resource: "configmaps"}) {
		t.Error("ConfigMaps have /status")
	}
	expect(t, checker, "with the sample served", "")

	t.Run("an upgrade refines a rule", func(t *testing.T) {
		patch("crd", "fencedleases.fencedlease.dev", `[{"op":"replace","path":"/spec/versions/0/schema/openAPIV3Schema/x-kubernetes-validations/0/rule","value":"!has(oldSelf.status) || has(self.status) || false"}]`)
		expect(t, look(t, checker), "who was ready", "")
		expect(t, look(t, newChecker(t, cfg)), "who starts", "rule is not that of this release")
		apply()
		expect(t, look(t, newChecker(t, cfg)), "who starts when it is mended", "")
	})
	t.Run("a definition that lost a rule", func(t *testing.T) {
		patch("crd", "fencedleases.fencedlease.dev", `[{"op":"remove","path":"/spec/versions/0/schema/openAPIV3Schema/x-kubernetes-validations/0"}]`)
		expect(t, look(t, checker), "it is named", `lacks message "status cannot be removed: it holds the token counter"`)
		apply()
		expect(t, look(t, checker), "mended", "")
	})
	t.Run("a binding that only warns, then none", func(t *testing.T) {
		patch("validatingadmissionpolicybinding", "fencedlease-session", `[{"op":"replace","path":"/spec/validationActions","value":["Warn"]}]`)
		expect(t, look(t, checker), "only warns", `ValidatingAdmissionPolicyBinding "fencedlease-session": spec.validationActions lacks "Deny"`)
		kubectl("delete", "validatingadmissionpolicybinding", "fencedlease-session")
		expect(t, look(t, checker), "none", `ValidatingAdmissionPolicyBinding "fencedlease-session" does not exist`)
		apply()
		expect(t, look(t, checker), "mended", "")
	})
	t.Run("a webhook without the status of the sample", func(t *testing.T) {
		patch("mutatingwebhookconfiguration", "fencedlease-guard", `[{"op":"replace","path":"/webhooks/0/rules/1/resources","value":["reports"]}]`)
		expect(t, look(t, checker), "it is named", "its rules lack UPDATE of reports.samples.fencedlease.dev/status")
		if checker.HasStatus(reports) {
			t.Error("a /status that the guard never sees does not count as guarded")
		}
		apply()
		expect(t, look(t, checker), "mended", "")
	})
	t.Run("an outage of the API server", func(t *testing.T) {
		if err := env.APIServer.Pause(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = env.APIServer.Resume() })
		expect(t, lookFor(checker, time.Second), "who was ready stays it", "")
		expect(t, lookFor(newChecker(t, cfg), time.Second), "who starts does not know", "not known yet")
	})
}

func newChecker(t *testing.T, cfg *rest.Config) *install.Checker {
	t.Helper()
	c, err := install.New(cfg, config.Files)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func look(t *testing.T, c *install.Checker) *install.Checker {
	t.Helper()
	c.Look(t.Context())
	return c
}

func lookFor(c *install.Checker, d time.Duration) *install.Checker {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	c.Look(ctx)
	return c
}

// expect compares what the checker says with a part of it; empty: it is ready.
func expect(t *testing.T, c *install.Checker, when, want string) {
	t.Helper()
	err := c.Ready(nil)
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("%s: %v, want %q", when, err, want)
	}
}

func eventually(t *testing.T, done func() bool) {
	t.Helper()
	for deadline := time.After(20 * time.Second); !done(); {
		select {
		case <-deadline:
			t.Fatal("it did not come")
		case <-time.After(100 * time.Millisecond):
		}
	}
}
