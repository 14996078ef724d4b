// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	logf "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

const (
	// fieldOwner is who wrote the controller's fields, in managedFields.
	fieldOwner = "fencedlease-controller"

	// maxSteps bounds how long one lease keeps a worker. Settle needs three or four at most; more are lost races.
	maxSteps = 8

	// lookAgain is when a lease is looked at again that could not be settled, or rests on a session that the
	// watch has not shown yet.
	lookAgain = time.Second
)

// leaseReconciler does to leases what time and sessions bring about.
type leaseReconciler struct {
	client   client.Client
	live     *liveReader
	tracker  *tracker
	recorder events.EventRecorder
	metrics  *Metrics
}

// Reconcile takes one step after the other, each decided on what the one before left behind, until nothing more is due.
func (r *leaseReconciler) Reconcile(ctx context.Context, name types.NamespacedName) (ctrl.Result, error) {
	defer r.announce(ctx, name)
	lease, err := r.read(ctx, name)
	for n := 0; n < maxSteps && err == nil; n++ {
		view, unsure, viewErr := r.view(ctx, lease)
		if viewErr != nil {
			return ctrl.Result{}, viewErr
		}
		step, wake, due := protocol.Settle(lease, view)
		if !due {
			return r.settled(lease, wake, unsure), nil
		}
		lease, err = r.write(ctx, lease, step)
	}
	if err != nil {
		return ctrl.Result{}, ignoreAbsent(err)
	}
	return ctrl.Result{RequeueAfter: lookAgain}, nil
}

// settled says when to look at the lease again.
func (r *leaseReconciler) settled(lease *v1alpha1.FencedLease, wake time.Duration, unsure bool) ctrl.Result {
	r.tracker.judged(lease)
	if unsure && (wake == 0 || wake > lookAgain) {
		wake = lookAgain
	}
	return ctrl.Result{RequeueAfter: wake}
}

// read returns the lease from the cache, or from the API server when the cache is behind what was seen already:
// the answer to our own write; or errAbsent.
func (r *leaseReconciler) read(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	var lease v1alpha1.FencedLease
	err := r.client.Get(ctx, name, &lease)
	if apierrors.IsNotFound(err) {
		r.announce(ctx, name)
		r.tracker.forget(name)
		return nil, errAbsent
	}
	if err != nil {
		return nil, fmt.Errorf("read lease %q: %w", name, err)
	}
	if r.tracker.behind(&lease) {
		return r.fresh(ctx, name)
	}
	r.tracker.observe(&lease)
	return &lease, nil
}

// fresh returns the lease as the API server has it, or errAbsent.
func (r *leaseReconciler) fresh(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	lease, err := r.live.lease(ctx, name)
	if err == nil {
		r.tracker.observe(lease)
	}
	return lease, err
}

// view gathers what Settle needs to know. A session that was never seen is asked for: only the API server can
// say that it is not there. Unsure: it is there, so the watch is behind.
func (r *leaseReconciler) view(ctx context.Context, lease *v1alpha1.FencedLease) (v protocol.View, unsure bool, err error) {
	found := map[types.UID]protocol.Session{}
	for _, c := range r.tracker.unknown(lease) {
		live, err := r.live.session(ctx, types.NamespacedName{Namespace: lease.Namespace, Name: c.Session})
		if errors.Is(err, errAbsent) || (err == nil && live.UID != c.SessionUID) {
			continue
		}
		if err != nil {
			return v, false, err
		}
		if session, err := protocol.ParseSession(live); err == nil {
			found[c.SessionUID] = session
		}
		unsure = true
	}
	return r.tracker.view(lease, found), unsure, nil
}

// write makes one step and returns the lease as it is then. When somebody else was faster that is not what the
// step would have made of it, so it is read again and judged anew.
func (r *leaseReconciler) write(ctx context.Context, lease *v1alpha1.FencedLease, step protocol.Transition) (*v1alpha1.FencedLease, error) {
	patch, _, err := protocol.Patch(lease, step)
	if err != nil {
		return nil, fmt.Errorf("decide on lease %q: %w", nameOf(lease), err)
	}
	call, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	after := lease.DeepCopy()
	err = r.client.Status().Patch(call, after, client.RawPatch(types.JSONPatchType, patch),
		client.FieldOwner(fieldOwner), client.FieldValidation("Strict"))
	if lostRace(err) {
		logf.FromContext(ctx).V(1).Info("The lease changed meanwhile.", "step", step.String())
		return r.fresh(ctx, nameOf(lease))
	}
	if err != nil {
		return nil, fmt.Errorf("write %s to lease %q: %w", step, nameOf(lease), err)
	}
	r.tracker.observe(after)
	if step.Kind() == protocol.KindQueue || step.Kind() == protocol.KindGrant {
		r.tracker.queued(nameOf(lease))
	}
	return after, nil
}

// announce tells what happened to the lease since it was last told: what we wrote, and what holders, contenders
// and admins did.
func (r *leaseReconciler) announce(ctx context.Context, name types.NamespacedName) {
	for _, n := range r.tracker.takeNews(name) {
		logf.FromContext(ctx).Info(n.note, "reason", n.reason)
		n.tell(r.recorder)
		r.metrics.handovers.WithLabelValues(n.reason).Inc()
	}
}
