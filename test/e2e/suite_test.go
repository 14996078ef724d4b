// SPDX-License-Identifier: Apache-2.0

// Package e2e_test tells the stories that users live through, on a real control plane with two managers: one file per
// feature, each step a named helper.
package e2e_test

import (
	"errors"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

// Of all stories.
var (
	env      *testenv.Env
	operator *testenv.Operator
	admin    client.Client
	worker   string // path of examples/worker
)

func TestStories(t *testing.T) {
	RegisterFailHandler(Fail)
	log.SetLogger(GinkgoLogr)
	SetDefaultEventuallyTimeout(20 * time.Second)
	SetDefaultEventuallyPollingInterval(20 * time.Millisecond)
	EnforceDefaultTimeoutsWhenUsingContexts()
	RunSpecs(t, "FencedLease end to end")
}

var _ = BeforeSuite(func(ctx SpecContext) {
	var err error
	worker, err = testenv.Build(ctx, "worker", "./examples/worker")
	Expect(err).NotTo(HaveOccurred())
	env, err = testenv.Start(ctx, testenv.Options{ControllerManager: true})
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(env.Stop)
	operator, err = env.StartOperator(ctx)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(operator.Stop)
	admin, err = client.New(env.Config(), client.Options{Scheme: scheme()})
	Expect(err).NotTo(HaveOccurred())
}, NodeTimeout(5*time.Minute))

// After a story, both managers serve again, whatever it did to them.
var _ = AfterEach(func(ctx SpecContext) {
	for _, manager := range operator.Managers {
		Eventually(manager.Ready).WithContext(ctx).Should(Succeed(), "%s after the story", manager.Name)
	}
})

func scheme() *runtime.Scheme {
	s := runtime.NewScheme()
	Expect(errors.Join(
		corev1.AddToScheme(s), coordinationv1.AddToScheme(s), rbacv1.AddToScheme(s), v1alpha1.AddToScheme(s),
	)).To(Succeed())
	return s
}
