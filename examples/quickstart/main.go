// SPDX-License-Identifier: Apache-2.0

// Command quickstart is the example of the README: it waits for the lease "orders" and writes one ConfigMap under it.
package main

import (
	"context"
	"log"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/fence"
)

func main() {
	ctx := ctrl.SetupSignalHandler()
	plain, err := client.New(ctrl.GetConfigOrDie(), client.Options{})
	if err == nil {
		err = run(ctx, ctrl.GetConfigOrDie(), plain)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// The README shows what follows.

func run(ctx context.Context, cfg *rest.Config, plain client.Client) error {
	session, err := fence.NewSession(ctx, cfg, fence.Options{Namespace: "default"}) // one heartbeat for all leases
	if err != nil {
		return err
	}
	defer session.Close(context.WithoutCancel(ctx)) // gives all leases back
	held, err := session.Acquire(ctx, "orders")     // waits its turn
	if err != nil {
		return err
	}
	fenced := fence.NewClient(plain, held) // presents the token with every write
	report := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "report"}}
	patch := client.RawPatch(types.MergePatchType, []byte(`{"data": {"rows": "42"}}`))
	return fenced.Patch(held.Context(), report, patch) // held.Context() ends when the lease is lost
}
