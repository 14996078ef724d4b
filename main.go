// SPDX-License-Identifier: Apache-2.0

// Command manager is the FencedLease manager: the controller, on the replica that leads, and the guard, on all.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/config"
	"github.com/fencedlease/fencedlease/internal/certs"
	"github.com/fencedlease/fencedlease/internal/controller"
	"github.com/fencedlease/fencedlease/internal/guard"
	"github.com/fencedlease/fencedlease/internal/install"
)

const version = "v0.1.0"

// flags are the command line.
type flags struct {
	webhookPort              int
	metricsAddr, probeAddr   string
	leaderElect, showVersion bool
	namespace, certDir       string
	webhookURL, exemptUsers  string
	log                      zap.Options
}

func main() {
	f := readFlags()
	if f.showVersion {
		fmt.Fprintln(os.Stdout, version)
		return
	}
	logger := zap.New(zap.UseFlagOptions(&f.log))
	ctrl.SetLogger(logger)
	klog.SetLogger(logger)
	if err := run(ctrl.SetupSignalHandler(), f); err != nil {
		logger.Error(err, "The manager stopped")
		os.Exit(1)
	}
}

func readFlags() flags {
	f := flags{namespace: "fencedlease-system"}
	if ns := os.Getenv("POD_NAMESPACE"); ns != "" {
		f.namespace = ns
	}
	flag.IntVar(&f.webhookPort, "webhook-port", 9443, "port of the webhook")
	flag.StringVar(&f.metricsAddr, "metrics-bind-address", ":8080", "address of the metrics; 0 for none")
	flag.StringVar(&f.probeAddr, "health-probe-bind-address", ":8081", "address of /healthz and /readyz")
	flag.BoolVar(&f.leaderElect, "leader-elect", true, "elect one replica to be the controller; all judge writes")
	flag.StringVar(&f.namespace, "namespace", f.namespace, "namespace of the leader election and of the Secret with the webhook's authority; default $POD_NAMESPACE")
	flag.StringVar(&f.certDir, "cert-dir", "", "directory with tls.crt and tls.key for the webhook, kept and injected by somebody else; empty: self-managed")
	flag.StringVar(&f.webhookURL, "webhook-url", "", "for development: the url in the webhook configuration, whose host the certificate must be good for")
	flag.StringVar(&f.exemptUsers, "exempt-users", strings.Join(guard.DefaultExempt(), ","), "users who collect garbage: they may change owners and finalizers of protected objects without a token; comma separated")
	flag.BoolVar(&f.showVersion, "version", false, "print the version and exit")
	f.log.BindFlags(flag.CommandLine)
	flag.Parse()
	return f
}

// run runs the manager until ctx ends. Certificates and the look at what is installed start before the manager,
// and beside it: they must go on while it waits for its caches, since they tell why it would not get ready.
func run(ctx context.Context, f flags) error {
	ctrl.Log.Info("Starting the FencedLease manager", "version", version, "namespace", f.namespace)
	cfg, err := ctrl.GetConfig()
	if err != nil {
		return fmt.Errorf("find the API server: %w", err)
	}
	cfg.QPS = -1 // the API server's priority levels bound us; a limit here would delay expiries and verdicts
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return fmt.Errorf("build the scheme: %w", err)
		}
	}
	source, err := newCerts(cfg, scheme, f)
	if err != nil {
		return fmt.Errorf("set up the certificate: %w", err)
	}
	checker, err := install.New(cfg, config.Files)
	if err != nil {
		return err
	}
	mgr, err := newManager(cfg, scheme, f, source, checker)
	if err != nil {
		return err
	}
	ctx = ctrl.LoggerInto(ctx, ctrl.Log)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return source.Start(ctx) })
	group.Go(func() error { return checker.Start(ctx) })
	group.Go(func() error { return mgr.Start(ctx) })
	return group.Wait()
}

func newCerts(cfg *rest.Config, scheme *runtime.Scheme, f flags) (certs.Source, error) {
	uncached, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	service := "fencedlease-webhook." + f.namespace + ".svc"
	hosts := []string{service, service + ".cluster.local"}
	if f.webhookURL != "" {
		parsed, err := url.Parse(f.webhookURL)
		if err != nil {
			return nil, fmt.Errorf("--webhook-url: %w", err)
		}
		hosts = append(hosts, parsed.Hostname())
	}
	return certs.New(certs.Options{
		Dir: f.certDir, Client: uncached, Namespace: f.namespace, Secret: "fencedlease-webhook-ca",
		Configuration: "fencedlease-guard", Hosts: hosts, Registerer: metrics.Registry,
	})
}

func newManager(cfg *rest.Config, scheme *runtime.Scheme, f flags, source certs.Source, checker *install.Checker) (ctrl.Manager, error) {
	grace := 20 * time.Second // less than a Pod is given
	server := webhook.NewServer(webhook.Options{
		Port:    f.webhookPort,
		TLSOpts: []func(*tls.Config){func(c *tls.Config) { c.GetCertificate, c.MinVersion = source.GetCertificate, tls.VersionTLS12 }},
	})
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme:                        scheme,
		Cache:                         cache.Options{ByObject: controller.CacheOptions()},
		Metrics:                       metricsserver.Options{BindAddress: f.metricsAddr},
		HealthProbeBindAddress:        f.probeAddr,
		WebhookServer:                 server,
		LeaderElection:                f.leaderElect,
		LeaderElectionID:              "fencedlease-manager",
		LeaderElectionNamespace:       f.namespace,
		LeaderElectionReleaseOnCancel: true, // nothing leads after Start returns: the program ends
		GracefulShutdownTimeout:       &grace,
	})
	if err != nil {
		return nil, fmt.Errorf("make the manager: %w", err)
	}
	if err := controller.Setup(mgr, controller.Options{Metrics: controller.NewMetrics(metrics.Registry)}); err != nil {
		return nil, fmt.Errorf("set up the controller: %w", err)
	}
	handler, err := newGuard(cfg, f, checker)
	if err != nil {
		return nil, fmt.Errorf("set up the guard: %w", err)
	}
	mgr.GetWebhookServer().Register("/guard", &admission.Webhook{Handler: handler}) // asking for it makes the manager run it
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return nil, err
	}
	// Not ready before it can judge: the certificate is there, the server answers, and nothing is missing around it.
	for name, check := range map[string]healthz.Checker{"certificate": source.Ready, "webhook": server.StartedChecker(), "installed": checker.Ready} {
		if err := mgr.AddReadyzCheck(name, check); err != nil {
			return nil, err
		}
	}
	return mgr, nil
}

func newGuard(cfg *rest.Config, f flags, checker *install.Checker) (*guard.Guard, error) {
	m := guard.NewMetrics(metrics.Registry)
	leases, err := guard.NewLeaseReader(cfg, m)
	if err != nil {
		return nil, err
	}
	access, err := guard.NewAccessReviewer(cfg)
	if err != nil {
		return nil, err
	}
	return guard.New(guard.Options{
		Leases: leases, Access: access, Metrics: m,
		Exempt: strings.Split(f.exemptUsers, ","), HasStatus: checker.HasStatus,
	}), nil
}
