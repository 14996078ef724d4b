// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// Where the manager lives, in every installation.
const (
	ManagerNamespace = "fencedlease-system"
	ManagerAccount   = "fencedlease-manager"
)

var leading = regexp.MustCompile(`(?m)^leader_election_master_status\{.*\} 1$`)

// Operator is FencedLease on a control plane: everything installed, and two managers, as in production.
type Operator struct {
	// Managers are the two replicas. Each can be killed, paused and restarted.
	Managers [2]*Process
	// MetricsURLs are where they tell their metrics, in the same order.
	MetricsURLs [2]string
	// Webhook stands between the API server and the managers, in the place of a Service. It can break connections.
	Webhook *Proxy

	env *Env
}

// StartOperator builds the manager, installs the kustomization config/dev, and starts two managers under their real
// service account behind a balancer. It returns when both are ready and the API server is seen to ask them. args are
// further flags of the manager. When it fails nothing of it is left running.
func (e *Env) StartOperator(ctx context.Context, args ...string) (*Operator, error) {
	o := &Operator{env: e}
	if err := o.start(ctx, args); err != nil {
		return nil, errors.Join(fmt.Errorf("start operator: %w", err), o.Stop())
	}
	return o, nil
}

// Stop ends both managers and the balancer. What was installed stays. It is safe to repeat.
func (o *Operator) Stop() error {
	var errs []error
	for _, manager := range o.Managers {
		if manager != nil {
			errs = append(errs, manager.Stop())
		}
	}
	if o.Webhook != nil {
		o.Webhook.Close()
	}
	return errors.Join(errs...)
}

// Leader returns the manager that leads, and the other one. It waits for a leader until ctx ends. They run on one
// host, so that the names in the election say nothing: their metrics do.
func (o *Operator) Leader(ctx context.Context) (leader, other *Process, err error) {
	err = wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		for i, url := range o.MetricsURLs {
			if leads(ctx, url) {
				leader, other = o.Managers[i], o.Managers[1-i]
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("wait for a leading manager: %w", err)
	}
	return leader, other, nil
}

// leads says whether the manager with these metrics leads; one that does not answer does not.
func leads(ctx context.Context, metricsURL string) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	text, err := get(ctx, metricsURL)
	return err == nil && leading.MatchString(text)
}

// Build compiles a package of this module ("." is the manager) to bin/name, and returns that path.
func Build(ctx context.Context, name, pkg string) (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, "bin", name)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", path, pkg)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", pkg, err, out)
	}
	return path, nil
}

func (o *Operator) start(ctx context.Context, args []string) error {
	path, err := Build(ctx, "manager", ".")
	if err != nil {
		return err
	}
	ports, err := freePorts(6)
	if err != nil {
		return err
	}
	var backends []Backend
	for i := range o.Managers {
		backends = append(backends, o.prepare(i, path, ports[3*i:3*i+3]))
	}
	if o.Webhook, err = NewBalancer(backends...); err != nil {
		return err
	}
	if err := o.install(ctx); err != nil {
		return err
	}
	cfg, err := o.env.ServiceAccount(ctx, ManagerNamespace, ManagerAccount)
	if err != nil {
		return err
	}
	return o.launch(ctx, cfg, args)
}

// prepare makes the i-th manager, all but its credentials.
func (o *Operator) prepare(i int, path string, ports []int) Backend {
	name := "manager-" + strconv.Itoa(i)
	webhook, metrics, health := loopback(ports[0]), loopback(ports[1]), loopback(ports[2])
	ready := HTTPOK("http://"+health+"/readyz", nil)
	o.Managers[i] = &Process{
		Name: name, Path: path, Ready: ready,
		LogPath: filepath.Join(o.env.LogDir(), name+".log"),
		Args: []string{
			"--webhook-port=" + strconv.Itoa(ports[0]),
			"--metrics-bind-address=" + metrics,
			"--health-probe-bind-address=" + health,
			"--namespace=" + ManagerNamespace,
		},
	}
	o.MetricsURLs[i] = "http://" + metrics + "/metrics"
	return Backend{Addr: webhook, Ready: ready}
}

// install applies config/dev with the address of the balancer.
func (o *Operator) install(ctx context.Context) error {
	dir := filepath.Join(o.env.dir, "install")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	base, err := filepath.Rel(dir, filepath.Join(root, "config", "dev")) // kustomize wants it relative
	if err != nil {
		return err
	}
	overlay := fmt.Sprintf(`resources: [%q]
patches:
- target: {kind: MutatingWebhookConfiguration}
  patch: |-
    - {op: add, path: /webhooks/0/clientConfig/url, value: %q}
`, base, o.url())
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(overlay), 0o600); err != nil {
		return err
	}
	return o.env.Apply(ctx, dir)
}

func (o *Operator) url() string { return "https://" + o.Webhook.Addr() + "/guard" }

// launch starts both managers, then waits for both, and until the API server has heard of the webhook.
func (o *Operator) launch(ctx context.Context, cfg *rest.Config, args []string) error {
	kubeconfig := filepath.Join(o.env.dir, "manager.kubeconfig")
	if err := WriteKubeconfig(cfg, kubeconfig); err != nil {
		return err
	}
	started := make(chan error)
	for _, manager := range o.Managers {
		manager.Args = append(append(manager.Args, "--webhook-url="+o.url()), args...)
		manager.Env = []string{"KUBECONFIG=" + kubeconfig, "POD_NAME=" + manager.Name}
		go func() { started <- manager.Start(ctx) }()
	}
	if err := errors.Join(<-started, <-started); err != nil {
		return err
	}
	return o.awaitGuard(ctx)
}

// awaitGuard waits until a write that only the guard refuses is refused.
func (o *Operator) awaitGuard(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	unguarded := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		GenerateName: "guard-probe-", Annotations: map[string]string{v1alpha1.TokenAnnotation: "1"},
	}}
	last := errors.New("the write passed: the API server does not ask the guard yet")
	err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
		_, err := o.env.client.CoreV1().ConfigMaps(metav1.NamespaceDefault).Create(ctx, unguarded, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			last = err
		}
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "guard."+v1alpha1.GroupVersion.Group), nil
	})
	if err != nil {
		return fmt.Errorf("wait for the guard: %w: %w", err, last)
	}
	return nil
}

func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		var err error
		if ports[i], err = FreePort(); err != nil {
			return nil, err
		}
	}
	return ports, nil
}

func get(ctx context.Context, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}
