// SPDX-License-Identifier: Apache-2.0

package fence_test

import (
	"context"
	"errors"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/fence"
)

// exampleWorld gives the examples a cluster and a namespace with the lease "orders".
func exampleWorld() (cfg *rest.Config, namespace string, w *world) {
	w, err := newWorld(context.Background())
	if err == nil {
		err = w.lease(context.Background(), "orders")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return w.env.Config(), w.namespace, w
}

// A session holds leases; a term of a lease has a token; giving it back makes way for the next.
func Example() {
	ctx := context.Background()
	cfg, namespace, _ := exampleWorld() // in a Pod: rest.InClusterConfig()

	s, err := fence.NewSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "worker-1"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close(ctx)

	first, err := s.Acquire(ctx, "orders")
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := first.Release(ctx); err != nil {
		fmt.Println(err)
		return
	}
	second, err := s.Acquire(ctx, "orders")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("the token grew by", second.Token()-first.Token())
	fmt.Println("the first term is over:", errors.Is(first.Err(), fence.ErrLost))
	// Output:
	// the token grew by 1
	// the first term is over: true
}

// Acquire waits; its context bounds the wait, and the error says who was in the way. The context of the term is that of
// the work.
func ExampleSession_Acquire() {
	ctx := context.Background()
	cfg, namespace, _ := exampleWorld()
	holder, err := fence.NewSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "worker-1"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer holder.Close(ctx)
	s, err := fence.NewSession(ctx, cfg, fence.Options{Namespace: namespace, Identity: "worker-2"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close(ctx)

	held, err := holder.Acquire(ctx, "orders")
	if err != nil {
		fmt.Println(err)
		return
	}
	work := held.Context() // give it to everything that needs the lease

	impatient, cancel := context.WithTimeout(ctx, 1)
	defer cancel()
	_, err = s.Acquire(impatient, "orders")
	fmt.Println("timed out:", errors.Is(err, context.DeadlineExceeded))

	_, err = s.TryAcquire(ctx, "orders")
	if e, ok := errors.AsType[*fence.HeldError](err); ok {
		fmt.Println("held by", e.Identity)
	}

	fmt.Println("work goes on:", work.Err() == nil)
	if err := held.Release(ctx); err != nil {
		fmt.Println(err)
	}
	fmt.Println("work goes on:", work.Err() == nil)
	// Output:
	// timed out: true
	// held by worker-1
	// work goes on: true
	// work goes on: false
}

// Do acquires, works and releases.
func ExampleSession_Do() {
	ctx := context.Background()
	cfg, namespace, _ := exampleWorld()
	s, err := fence.NewSession(ctx, cfg, fence.Options{Namespace: namespace})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close(ctx)

	err = s.Do(ctx, "orders", func(ctx context.Context, token fence.Token) error {
		fmt.Println("alone, with a token:", token > 0)
		return ctx.Err() // ends when the lease is lost
	})
	switch {
	case errors.Is(err, fence.ErrLost):
		fmt.Println("lost on the way: somebody else may have begun")
	case err != nil:
		fmt.Println(err)
	default:
		fmt.Println("done")
	}
	// Output:
	// alone, with a token: true
	// done
}

// NewClient presents the token with every write. Here no guard is installed, and it says so.
func ExampleNewClient() {
	ctx := context.Background()
	cfg, namespace, w := exampleWorld()
	s, err := fence.NewSession(ctx, cfg, fence.Options{Namespace: namespace})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close(ctx)
	held, err := s.Acquire(ctx, "orders")
	if err != nil {
		fmt.Println(err)
		return
	}

	c := fence.NewClient(w.admin, held) // wraps any client of controller-runtime
	stock := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "stock", Namespace: namespace}}
	err = c.Create(ctx, stock)
	switch {
	case errors.Is(err, fence.ErrNotProtected):
		fmt.Println("written, but nothing was guarding")
	case errors.Is(err, fence.ErrFenced):
		fmt.Println("refused: the token is not the current one")
	case err != nil:
		fmt.Println(err)
	}

	if err := held.Release(ctx); err != nil {
		fmt.Println(err)
	}
	err = c.Update(ctx, stock)
	fmt.Println("after the release nothing is sent:", errors.Is(err, fence.ErrLost))
	// Output:
	// written, but nothing was guarding
	// after the release nothing is sent: true
}
