// SPDX-License-Identifier: Apache-2.0

//go:build unix

// Command dev runs a local control plane with FencedLease on it, in the background: etcd, kube-apiserver,
// kube-controller-manager and two managers, all children of one supervisor. It is what `make up` and `make down` run.
//
//	dev up      starts one, fresh, unless one runs already
//	dev down    ends it
//
// Its state is in bin/dev.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	dir = "bin/dev"
	// startLimit bounds a start: a minute on two busy cores, and building the manager before.
	startLimit = 5 * time.Minute
	// stopLimit bounds an orderly end; after it, the supervisor is killed, and the kernel ends its children.
	stopLimit    = time.Minute
	pollInterval = 100 * time.Millisecond
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "dev: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if _, err := os.Stat("hack/dev"); err != nil {
		return errors.New("run this from the root of the checkout")
	}
	switch strings.Join(args, " ") {
	case "up":
		return up(ctx, out)
	case "down":
		return down(ctx, out)
	case "supervise":
		return supervise(ctx)
	}
	return errors.New("usage: dev up | dev down")
}

// up starts a supervisor and waits until it says that all is ready.
func up(ctx context.Context, out io.Writer) error {
	locks, err := openLocks()
	if err != nil {
		return err
	}
	defer locks.Close()
	if mine, err := starting.take(locks); err != nil {
		return err
	} else if !mine {
		return errors.New("another `make up` is under way: wait for it")
	}
	if pid, err := supervising.holder(locks); err != nil {
		return err
	} else if pid != 0 {
		return alreadyUp(pid, out)
	}
	if err := clean(); err != nil {
		return err
	}
	fmt.Fprintf(out, "starting a control plane and two managers, which takes up to a minute (log: %s)\n", logPath())
	pid, err := startSupervisor(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "ready (pid %d); `make down` ends it\n\n", pid)
	whatNext(out)
	return nil
}

func alreadyUp(pid int, out io.Writer) error {
	if !ready() {
		return fmt.Errorf("one is half started (pid %d): end it with `make down`", pid)
	}
	fmt.Fprintf(out, "it runs already (pid %d); `make down` ends it\n\n", pid)
	whatNext(out)
	return nil
}

// clean removes what an earlier one left: its data, which nobody reads any more, and its log.
func clean() error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if path := filepath.Join(dir, entry.Name()); path != lockPath() {
			if err := os.RemoveAll(path); err != nil {
				return fmt.Errorf("remove what an earlier one left: %w", err)
			}
		}
	}
	return nil
}

// startSupervisor starts this program again, in a session of its own so that it outlives the terminal, and waits until
// it is ready.
func startSupervisor(ctx context.Context) (pid int, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	log, err := os.Create(logPath())
	if err != nil {
		return 0, err
	}
	defer log.Close()
	cmd := exec.Command(self, "supervise")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start the supervisor: %w", err)
	}
	return cmd.Process.Pid, awaitReady(ctx, cmd)
}

// awaitReady waits for the supervisor. One that is not ready in time, or that nobody waits for any more, is ended.
func awaitReady(ctx context.Context, supervisor *exec.Cmd) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		_ = supervisor.Wait() // its log says how it ended
		close(ended)
	}()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for !ready() {
		select {
		case <-ended:
			text, _ := os.ReadFile(logPath())
			return fmt.Errorf("it did not start (%s); its log says:\n%s", supervisor.ProcessState, text)
		case <-ctx.Done():
			_ = supervisor.Process.Signal(syscall.SIGTERM)
			<-ended
			return fmt.Errorf("gave up waiting, and ended it: %w; see %s", context.Cause(ctx), logPath())
		case <-tick.C:
		}
	}
	return nil
}

// down ends the supervisor, which ends the rest; if it does not obey, the kernel does.
func down(ctx context.Context, out io.Writer) error {
	locks, err := openLocks()
	if err != nil {
		return err
	}
	defer locks.Close()
	pid, err := supervising.holder(locks)
	if err != nil {
		return err
	}
	if pid == 0 {
		fmt.Fprintln(out, "nothing runs")
		return nil
	}
	if err := supervising.end(ctx, locks, pid, syscall.SIGTERM, stopLimit); err != nil {
		fmt.Fprintf(out, "%v; killing it\n", err)
		if err := supervising.end(ctx, locks, pid, syscall.SIGKILL, stopLimit); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "stopped (it was pid %d); its logs are in %s\n", pid, dir)
	return nil
}

func whatNext(out io.Writer) {
	fmt.Fprintf(out, `Type next:
  export KUBECONFIG=$PWD/%s/kubeconfig PATH=$PWD/bin:$PATH
  kubectl apply -k config/samples
  kubectl create configmap unprotected
  kubectl get fencedleases -w
and in other terminals, as many as you like:
  go run ./examples/worker
Stop one with Ctrl-Z and see what happens; fg lets it come back.
`, dir)
}

func ready() bool {
	_, err := os.Stat(readyPath())
	return err == nil
}

func logPath() string   { return filepath.Join(dir, "log") }
func readyPath() string { return filepath.Join(dir, "ready") }
func lockPath() string  { return filepath.Join(dir, "lock") }
