// SPDX-License-Identifier: Apache-2.0

//go:build unix

package main

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

const (
	namespace = "demo"
	// stepLimit bounds one step of the story.
	stepLimit = 30 * time.Second
)

//go:embed stage.yaml
var scenery string

// stage is everything that the story needs.
type stage struct {
	env      *testenv.Env
	operator *testenv.Operator
	client   client.Client
	kubectl  *actor // prints the lease as it changes
	a, b     *actor // the workers
}

// setStage starts it all. When it fails nothing is left running.
func setStage(ctx context.Context) (*stage, error) {
	s := &stage{}
	if err := s.set(ctx); err != nil {
		return nil, errors.Join(err, s.clear())
	}
	return s, nil
}

func (s *stage) set(ctx context.Context) (err error) {
	worker, err := testenv.Build(ctx, "worker", "./examples/worker")
	if err != nil {
		return err
	}
	if s.env, err = testenv.Start(ctx, testenv.Options{ControllerManager: true}); err != nil {
		return err
	}
	if s.operator, err = s.env.StartOperator(ctx); err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	if s.client, err = client.New(s.env.Config(), client.Options{Scheme: scheme}); err != nil {
		return err
	}
	if err := s.decorate(ctx); err != nil {
		return err
	}
	if s.a, err = s.worker(ctx, worker, "worker-a", "--keep-writing"); err != nil {
		return err
	}
	if s.b, err = s.worker(ctx, worker, "worker-b"); err != nil {
		return err
	}
	s.kubectl = s.actor("kubectl", filepath.Join(filepath.Dir(worker), "kubectl"), s.env.Kubeconfig(),
		"get", "fencedleases", "orders", "--namespace="+namespace, "--watch",
		"-o=custom-columns=LEASE:.metadata.name,HOLDER:.status.holder.identity,TOKEN:.status.token,PHASE:.status.phase,WAITING:.status.waiting")
	return s.kubectl.Start(ctx)
}

// decorate applies the scenery, and waits until the lease is ready to be taken.
func (s *stage) decorate(ctx context.Context) error {
	file := filepath.Join(s.env.LogDir(), "stage.yaml")
	if err := os.WriteFile(file, []byte(scenery), 0o600); err != nil {
		return err
	}
	if _, err := s.env.Kubectl(ctx, "apply", "--server-side", "-f", file); err != nil {
		return err
	}
	return s.leaseShows(ctx, "its first status", func(*v1alpha1.FencedLease) bool { return true })
}

// worker makes a worker under the identity of a Pod of its own.
func (s *stage) worker(ctx context.Context, path, name string, args ...string) (*actor, error) {
	cfg, _, err := s.env.Pod(ctx, namespace, "worker", name)
	if err != nil {
		return nil, err
	}
	kubeconfig := filepath.Join(s.env.LogDir(), name+".kubeconfig")
	if err := testenv.WriteKubeconfig(cfg, kubeconfig); err != nil {
		return nil, err
	}
	args = append([]string{"--namespace=" + namespace, "--name=" + name, "--protected=protected", "--every=300ms", "--writes=3"}, args...)
	return s.actor(name, path, kubeconfig, args...), nil
}

func (s *stage) actor(name, path, kubeconfig string, args ...string) *actor {
	return &actor{told: make(chan struct{}), Process: &testenv.Process{
		Name: name, Path: path, Args: args,
		Env:     []string{"KUBECONFIG=" + kubeconfig},
		LogPath: filepath.Join(s.env.LogDir(), name+".log"),
	}}
}

// clear ends everything that was started.
func (s *stage) clear() error {
	var errs []error
	for _, a := range []*actor{s.a, s.b, s.kubectl} {
		if a != nil {
			errs = append(errs, a.Process.Stop())
		}
	}
	if s.operator != nil {
		errs = append(errs, s.operator.Stop())
	}
	if s.env != nil {
		errs = append(errs, s.env.Stop())
	}
	return errors.Join(errs...)
}

// actor is a process whose lines appear on the stage.
type actor struct {
	*testenv.Process

	told chan struct{} // closed when the process has ended and all that it printed was shown

	mu    sync.Mutex
	lines []string
}

// Start starts the process, and repeats what it prints under its name.
func (a *actor) Start(ctx context.Context) error {
	if err := a.Process.Start(ctx); err != nil {
		return err
	}
	go a.follow(ctx)
	return nil
}

// follow shows what is in the log, line by line as it comes.
func (a *actor) follow(ctx context.Context) {
	defer close(a.told)
	file, err := os.Open(a.LogPath)
	if err != nil {
		note("%s: %v", a.Name, err)
		return
	}
	defer file.Close()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	var line string
	for reader, exited := bufio.NewReader(file), false; ctx.Err() == nil; {
		part, err := reader.ReadString('\n')
		line += part // a line may come in parts
		switch {
		case err == nil:
			a.show(strings.TrimSpace(line))
			line = ""
		case exited:
			return // and there was no more
		default:
			select {
			case <-a.Exited():
				exited = true
			case <-tick.C:
			}
		}
	}
}

func (a *actor) show(line string) {
	fmt.Printf("   %-9s| %s\n", a.Name, line)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lines = append(a.lines, line)
}

// await waits until the process has printed a line that matches.
func (a *actor) await(ctx context.Context, pattern *regexp.Regexp) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if match := a.match(pattern); match != nil {
			return match, nil
		}
		select {
		case <-tick.C:
		case <-a.told:
			if match := a.match(pattern); match != nil {
				return match, nil
			}
			return nil, fmt.Errorf("%s has ended (%w) before it printed %q", a.Name, a.Wait(), pattern)
		case <-ctx.Done():
			return nil, fmt.Errorf("%s did not print %q in %s", a.Name, pattern, stepLimit)
		}
	}
}

func (a *actor) match(pattern *regexp.Regexp) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, line := range a.lines {
		if match := pattern.FindStringSubmatch(line); match != nil {
			return match
		}
	}
	return nil
}
