// SPDX-License-Identifier: Apache-2.0

// Package testenv runs a real control plane for tests, demos and the programs under hack: etcd, kube-apiserver and,
// on request, kube-controller-manager, from the binaries which `make controlplane` puts into bin/. Each of them can
// be killed, paused and restarted, and so can our own programs, by the same Process. Proxy and NewBalancer stand
// between clients and servers and break connections on demand.
//
// It promises that no child outlives the process which started it, even when that one is killed (on Linux), and that
// a restarted server is back at its old address with its old data.
//
// It has no kubelet, no scheduler and no kube-proxy: Pods stay Pending, Services lead nowhere. etcd does not wait for
// the disk and speaks to anyone on this machine, so nothing of value belongs here.
package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Options says what to start. The zero value is an API server and its etcd, in a temporary directory.
type Options struct {
	// Dir gets data, certificates, kubeconfig and logs. Empty: a temporary directory, which Stop removes. When it has
	// the data of an earlier control plane, that is continued, with new certificates and ports; tokens issued before
	// are void.
	Dir string
	// ControllerManager asks for kube-controller-manager: garbage collection, deletion of namespaces, default service
	// accounts. Start then waits for the one of the namespace default.
	ControllerManager bool
	// APIServerFlags come after ours, so they win where a flag takes one value.
	APIServerFlags []string
}

// Env is a running control plane. Its methods may be called concurrently.
type Env struct {
	// Etcd is the store.
	Etcd *Process
	// APIServer is kube-apiserver.
	APIServer *Process
	// ControllerManager is kube-controller-manager, nil unless asked for.
	ControllerManager *Process

	dir       string
	temporary bool
	binaries  string
	admin     *rest.Config
	client    kubernetes.Interface // of the admin
}

// Start starts a control plane and waits until it is ready, which takes about five seconds. ctx bounds only the start.
// When it fails nothing is left running, and the error carries the end of the log of the part that failed.
func Start(ctx context.Context, options Options) (*Env, error) {
	e := &Env{dir: options.Dir, temporary: options.Dir == ""}
	if err := e.start(ctx, options); err != nil {
		return nil, errors.Join(fmt.Errorf("start control plane: %w", err), e.Stop())
	}
	return e, nil
}

// Stop ends all parts and removes the temporary directory. It is safe to repeat. A part that did not end when asked
// is killed, and reported.
func (e *Env) Stop() error {
	err := e.stopAll()
	if e.temporary && e.dir != "" {
		err = errors.Join(err, os.RemoveAll(e.dir))
	}
	return err
}

// Config returns a client configuration for the cluster's admin (group system:masters), without a rate limit. The
// caller may change it.
func (e *Env) Config() *rest.Config {
	return rest.CopyConfig(e.admin)
}

// Kubeconfig is the path of a kubeconfig for the admin.
func (e *Env) Kubeconfig() string {
	return filepath.Join(e.dir, "kubeconfig")
}

// LogDir is the directory of the logs, NAME.log for each part.
func (e *Env) LogDir() string {
	return filepath.Join(e.dir, "logs")
}

func (e *Env) start(ctx context.Context, options Options) error {
	if err := e.findBinaries(options.ControllerManager); err != nil {
		return err
	}
	if err := e.prepareDir(); err != nil {
		return err
	}
	// Ports are chosen here and bound by the children: someone may come between.
	for attempt := 1; ; attempt++ {
		err := e.startPlane(ctx, options)
		if err == nil || attempt == 3 || !strings.Contains(err.Error(), "address already in use") {
			return err
		}
		if err := e.stopAll(); err != nil {
			return err
		}
	}
}

func (e *Env) prepareDir() error {
	var err error
	if e.temporary {
		e.dir, err = os.MkdirTemp("", "fencedlease-")
	} else {
		e.dir, err = filepath.Abs(e.dir)
	}
	if err != nil {
		return err
	}
	return os.MkdirAll(e.LogDir(), 0o700)
}

func (e *Env) startPlane(ctx context.Context, options Options) error {
	p, err := newPlane(e, options)
	if err != nil {
		return err
	}
	e.admin = p.admin
	if err := WriteKubeconfig(e.admin, e.Kubeconfig()); err != nil {
		return err
	}
	if e.client, err = kubernetes.NewForConfig(e.admin); err != nil {
		return err
	}
	e.Etcd, e.APIServer = p.etcd(), p.apiServer(options.APIServerFlags)
	if err := e.Etcd.Start(ctx); err != nil {
		return err
	}
	if err := e.APIServer.Start(ctx); err != nil {
		return err
	}
	if !options.ControllerManager {
		return nil
	}
	e.ControllerManager = p.controllerManager()
	if err := e.ControllerManager.Start(ctx); err != nil {
		return err
	}
	return e.awaitControllers(ctx)
}

// awaitControllers waits for a first result of the controllers, which begin only after they say to be healthy.
func (e *Env) awaitControllers(ctx context.Context) error {
	accounts := e.client.CoreV1().ServiceAccounts(metav1.NamespaceDefault)
	err := wait.PollUntilContextTimeout(ctx, pollInterval, startTimeout, true, func(ctx context.Context) (bool, error) {
		_, err := accounts.Get(ctx, "default", metav1.GetOptions{})
		return err == nil, nil
	})
	if err != nil {
		return fmt.Errorf("wait for the default service account, see %s: %w", e.ControllerManager.LogPath, err)
	}
	return nil
}

// stopAll stops the parts, servers after their clients.
func (e *Env) stopAll() error {
	if e.Etcd != nil {
		_ = e.Etcd.Resume() // a test may have left it paused, and the API server waits for it
	}
	var errs []error
	for _, part := range []*Process{e.ControllerManager, e.APIServer, e.Etcd} {
		if part != nil {
			errs = append(errs, part.Stop())
		}
	}
	return errors.Join(errs...)
}
