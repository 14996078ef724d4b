// SPDX-License-Identifier: Apache-2.0

// Package controller does what holders and contenders cannot do themselves: it gives leases their first status,
// deletes sessions that fell silent, ends their terms, keeps the queues, and records the handovers as events
// and metrics. What may happen to a lease is decided by internal/protocol; here are its eyes, its clock and
// its hands.
//
// It promises: no session expires before it was silent, in this controller's own sight and on its own clock,
// for its whole TTL; none while the API server could not be read, nor for a TTL after. No term is ended and
// nobody leaves a queue because a session is missing from the cache: the API server is asked. Each write
// carries what it was decided on. Each handover is announced once, and only when it is stored.
//
// It does not promise to be on time: after a restart, an outage or a lost watch it counts anew, and what
// happened while nobody led is not announced.
package controller

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// name is the controller's, in logs, metrics and events.
const name = "fencedlease-controller"

// workers are how many leases and sessions are looked at at a time.
const workers = 4

// Options say how the controller works. The zero value is right.
type Options struct {
	// Clock is read wherever time matters; it must be monotonic. Nil: the real one.
	Clock clock.WithTicker
	// Metrics get the figures. Nil: nobody sees them.
	Metrics *Metrics
}

// CacheOptions is what the manager's cache must be told of (cache.Options.ByObject): of Leases it holds those with the
// session label only. So a read of any other Lease by the manager's client finds nothing.
func CacheOptions() map[client.Object]cache.ByObject {
	return map[client.Object]cache.ByObject{
		&coordinationv1.Lease{}: {
			Label:     labels.SelectorFromSet(labels.Set{v1alpha1.SessionLabel: "true"}),
			Transform: cache.TransformStripManagedFields(),
		},
		&v1alpha1.FencedLease{}: {Transform: cache.TransformStripManagedFields()},
	}
}

// Setup adds the controller to the manager; it works while the manager leads. The manager's scheme must know
// v1alpha1 and client-go's types, its cache must be made with CacheOptions, and its rest.Config should have QPS
// -1: the API server's priority and fairness bounds it, while a limit here would delay expiries.
func Setup(mgr ctrl.Manager, o Options) error {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(prometheus.NewRegistry())
	}
	return setup(mgr, o, newTracker(o.Clock))
}

func setup(mgr ctrl.Manager, o Options, t *tracker) error {
	ctx := context.Background() // only asks for an index, before the start
	if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.FencedLease{}, sessionIndex, indexSessions); err != nil {
		return fmt.Errorf("index leases by session: %w", err)
	}
	live := &liveReader{reader: mgr.GetAPIReader(), tracker: t}
	if err := mgr.Add(&pulse{clock: o.Clock, log: mgr.GetLogger().WithName(name), live: live, tracker: t, metrics: o.Metrics}); err != nil {
		return fmt.Errorf("add the pulse: %w", err)
	}
	w := &waker{reader: mgr.GetCache(), tracker: t}
	recorder := mgr.GetEventRecorder(name)
	return build(mgr, w, &reconciler{
		leases: &leaseReconciler{
			client: mgr.GetClient(), live: live, tracker: t, recorder: recorder, metrics: o.Metrics,
		},
		sessions: &sessionReconciler{
			client: mgr.GetClient(), live: live, tracker: t, wake: w, recorder: recorder, metrics: o.Metrics,
		},
	})
}

func build(mgr ctrl.Manager, w *waker, r *reconciler) error {
	err := builder.TypedControllerManagedBy[request](mgr).
		Named(name).
		WithOptions(controller.TypedOptions[request]{MaxConcurrentReconciles: workers}).
		WithLogConstructor(logs(mgr.GetLogger())).
		WatchesRawSource(source.TypedFunc[request](func(_ context.Context, q queue) error {
			w.queue = q
			return nil
		})).
		WatchesRawSource(source.TypedKind(mgr.GetCache(), &coordinationv1.Lease{}, w.sessionEvents())).
		WatchesRawSource(source.TypedKind(mgr.GetCache(), &v1alpha1.FencedLease{}, w.leaseEvents())).
		Complete(r)
	if err != nil {
		return fmt.Errorf("build the controller: %w", err)
	}
	return nil
}

// logs names what a line of the log is about.
func logs(base logr.Logger) func(*request) logr.Logger {
	return func(r *request) logr.Logger {
		log := base.WithName(name)
		if r == nil {
			return log
		}
		return log.WithValues(string(r.kind), r.name)
	}
}

// reconciler is the one for leases and the one for sessions.
type reconciler struct {
	leases   *leaseReconciler
	sessions *sessionReconciler
}

// Reconcile looks at one lease or one session.
func (r *reconciler) Reconcile(ctx context.Context, req request) (ctrl.Result, error) {
	if req.kind == sessionKind {
		return r.sessions.Reconcile(ctx, req.name)
	}
	return r.leases.Reconcile(ctx, req.name)
}
