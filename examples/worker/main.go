// SPDX-License-Identifier: Apache-2.0

// Command worker is a small program that works under a lease. While it holds the lease it counts up in two ConfigMaps:
// one that the lease protects, with its token, and one that nothing protects. Start several, and pause the one that
// works (Ctrl-Z): the next takes over. When the first comes back (fg), the library tells it that it lost. With
// --keep-writing it acts like a program without the library then: it finishes what it was about to do.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
)

type options struct {
	kubeconfig, namespace, lease, name string
	protected, unprotected             string
	ttl, every                         time.Duration
	writes                             int
	keepWriting                        bool
}

func main() {
	var o options
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "path of the kubeconfig; empty: $KUBECONFIG, or the Pod's own account")
	flag.StringVar(&o.namespace, "namespace", "default", "namespace of lease and ConfigMaps")
	flag.StringVar(&o.lease, "lease", "orders", "the FencedLease to work under; it must exist")
	flag.StringVar(&o.name, "name", fmt.Sprintf("worker-%d", os.Getpid()), "who I am, for people")
	flag.StringVar(&o.protected, "protected", "orders-state", "ConfigMap to count in, with the annotation fencedlease.dev/lease")
	flag.StringVar(&o.unprotected, "unprotected", "unprotected", "ConfigMap to count in, without it")
	flag.DurationVar(&o.ttl, "ttl", 0, "how long I may be silent; 0: as long as the lease allows")
	flag.DurationVar(&o.every, "every", time.Second, "pause between two writes")
	flag.IntVar(&o.writes, "writes", 0, "writes in one term, then just hold; 0: no end")
	flag.BoolVar(&o.keepWriting, "keep-writing", false, "finish the next write even when the lease is lost, with the old token")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "worker: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) error {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.kubeconfig
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return err
	}
	plain, err := client.New(cfg, client.Options{})
	if err != nil {
		return err
	}
	w := &worker{options: o, cfg: cfg, plain: plain, out: out}
	for ctx.Err() == nil {
		if err := w.live(ctx); err != nil {
			return err
		}
	}
	return nil
}

type worker struct {
	options

	cfg   *rest.Config
	plain client.Client
	out   io.Writer
}

// live is the life of one session. A session that was lost stays lost, so the next life has a new one.
func (w *worker) live(ctx context.Context) error {
	session, err := fence.NewSession(ctx, w.cfg, fence.Options{Namespace: w.namespace, Identity: w.name, TTL: w.ttl})
	if err != nil {
		return err
	}
	for ctx.Err() == nil && session.Err() == nil {
		if err := w.turn(ctx, session); err != nil && ctx.Err() == nil && session.Err() == nil {
			w.say("%v", err)
			break
		}
	}
	// The caller's context may have ended: closing gets one of its own, and leases go on to the next at once.
	return session.Close(context.WithoutCancel(ctx))
}

// turn waits for the lease and works while it is held.
func (w *worker) turn(ctx context.Context, session *fence.Session) error {
	w.say("wants lease %s", w.lease)
	held, err := session.Acquire(ctx, w.lease)
	if err != nil {
		return err
	}
	w.say("holds lease %s with token %d", w.lease, held.Token())
	w.term(ctx, held)
	if ctx.Err() == nil {
		w.say("%v", held.Err())
	}
	return nil
}

// term is the work of one term: it returns when the lease is lost, or ctx ends. A write that fails is tried again at
// the next tick.
func (w *worker) term(ctx context.Context, held *fence.Held) {
	c := counter{worker: w, held: held, fenced: fence.NewClient(w.plain, held)}
	tick := time.NewTicker(w.every)
	defer tick.Stop()
	for {
		if err := c.step(held.Context()); err != nil && held.Context().Err() == nil {
			w.say("%v", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-held.Context().Done():
			if w.keepWriting && ctx.Err() == nil {
				c.writeLate(ctx)
			}
			return
		case <-tick.C:
		}
	}
}

func (w *worker) say(format string, args ...any) {
	fmt.Fprintf(w.out, time.Now().Format("15:04:05.000 ")+format+"\n", args...)
}
