// SPDX-License-Identifier: Apache-2.0

//go:build unix

// Command demo plays the story of docs/concepts.md with real processes on a fresh control plane: a worker is paused
// while it holds a lease, another takes over, the first wakes up and writes. Each step is checked; the demo fails at
// the first that does not hold. It is what `make demo` runs.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// limit bounds the whole demo. It takes half a minute on two idle cores.
const limit = 3 * time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errors.New("the demo takes too long"))
	began := time.Now()
	err := run(ctx)
	cancel()
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "\ndemo: FAILED: %v\n", err)
		os.Exit(1)
	}
	fmt.Printf("\nEvery step held. (%.0f s)\n", time.Since(began).Seconds())
}

func run(ctx context.Context) (err error) {
	say("A real control plane, a real operator, two workers, and one lease of 3 seconds.")
	note("starting etcd, kube-apiserver, kube-controller-manager and two managers ...")
	s, err := setStage(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.clear()) }()
	return s.play(ctx)
}

// play is the story.
func (s *stage) play(ctx context.Context) error {
	say("1. worker-a takes the lease, and counts in two ConfigMaps: one is protected by the lease, one is not.")
	first, err := s.takesOver(ctx, s.a, "3")
	if err != nil {
		return err
	}
	say("2. worker-b wants the lease too, and waits in line.")
	if err := s.b.Start(ctx); err != nil {
		return err
	}
	if err := s.leaseShows(ctx, "worker-b in line", func(l *v1alpha1.FencedLease) bool { return l.Status.Waiting == 1 }); err != nil {
		return err
	}
	say("3. worker-a is paused (SIGSTOP), as by a debugger, a full disk, or a machine that swaps. It knows nothing of it.")
	if err := s.a.Pause(); err != nil {
		return err
	}
	note("its session falls silent, and 3 seconds later the lease is worker-b's, with the next token")
	second, err := s.goesOn(ctx, s.b, "6")
	if err != nil {
		return err
	}
	if second != first+1 {
		return fmt.Errorf("worker-b got token %d after %d: it should be the next one", second, first)
	}
	say("4. worker-a wakes up (SIGCONT) and does what it was about to do: write count=4, with token %d.", first)
	if err := s.wakes(ctx, first); err != nil {
		return err
	}
	say("5. What became of it:")
	if err := s.harm(ctx); err != nil {
		return err
	}
	say("6. The lease tells the story too (status.terms), and worker-b gives it back in order.")
	return s.epilogue(ctx, first, second)
}

func say(format string, args ...any)  { fmt.Printf("\n== "+format+"\n", args...) }
func note(format string, args ...any) { fmt.Printf("   "+format+"\n", args...) }
