// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

const (
	// promptly is what the controller gets to do what is due.
	promptly = time.Second
	// polling is how often a condition is looked at.
	polling = 20 * time.Millisecond
)

var (
	env *testenv.Env
	// admin may do everything.
	admin client.Client
	// managerConfig is of the manager's real account.
	managerConfig *rest.Config
	scheme        = runtime.NewScheme()
)

func TestController(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "controller")
}

var _ = BeforeSuite(func(ctx context.Context) {
	SetDefaultEventuallyTimeout(20 * time.Second)
	SetDefaultEventuallyPollingInterval(polling)
	SetDefaultConsistentlyDuration(time.Second)
	SetDefaultConsistentlyPollingInterval(polling)
	ctrl.SetLogger(zap.New(zap.WriteTo(GinkgoWriter), zap.UseDevMode(true)))
	Expect(clientgoscheme.AddToScheme(scheme)).To(Succeed())
	Expect(v1alpha1.AddToScheme(scheme)).To(Succeed())

	var err error
	env, err = testenv.Start(ctx, testenv.Options{ControllerManager: true})
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() { Expect(env.Stop()).To(Succeed()) })
	for _, part := range []string{"namespace", "crd", "policy", "rbac"} {
		Expect(env.Apply(ctx, "../../config/"+part)).To(Succeed())
	}
	admin = clientOf(env.Config())
	managerConfig, err = env.ServiceAccount(ctx, testenv.ManagerNamespace, testenv.ManagerAccount)
	Expect(err).NotTo(HaveOccurred())
	managerConfig.QPS = -1
})

// clientOf is a client without cache and rate limit.
func clientOf(cfg *rest.Config) client.WithWatch {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: scheme})
	Expect(err).NotTo(HaveOccurred())
	return c
}
