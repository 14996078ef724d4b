// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	logf "sigs.k8s.io/controller-runtime/pkg/log"
)

// sessionReconciler deletes the sessions that fell silent.
type sessionReconciler struct {
	client   client.Writer
	live     *liveReader
	tracker  *tracker
	wake     *waker
	recorder events.EventRecorder
	metrics  *Metrics
}

// Reconcile waits for the end of the session's time; a renewal needs no call. Then it asks the API server
// itself whether the session is silent, since the watch may be behind.
func (r *sessionReconciler) Reconcile(ctx context.Context, name types.NamespacedName) (ctrl.Result, error) {
	s := r.tracker.named(name)
	if s == nil {
		return ctrl.Result{}, nil
	}
	if s.fault != "" {
		r.report(ctx, s)
		return ctrl.Result{}, nil
	}
	if left := r.tracker.left(s.uid, ""); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	if r.tracker.blinded() {
		return ctrl.Result{RequeueAfter: lookAgain}, nil // the pulse finds out when that is over
	}
	lease, err := r.live.session(ctx, name)
	if errors.Is(err, errAbsent) || (err == nil && lease.UID != s.uid) {
		r.wake.gone(ctx, r.wake.queue, name, s.uid)
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	if left := r.tracker.left(s.uid, lease.ResourceVersion); left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}
	return r.expire(ctx, s, lease.ResourceVersion)
}

// expire deletes the session as it was last seen, so that a renewal and an expiry cannot both succeed.
// If we die after it, our successor ends the terms as SessionClosed.
func (r *sessionReconciler) expire(ctx context.Context, s *sessionSight, version string) (ctrl.Result, error) {
	late := -r.tracker.left(s.uid, "")
	if !r.tracker.condemn(s.uid) {
		return ctrl.Result{}, nil
	}
	call, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	session := &coordinationv1.Lease{}
	session.Namespace, session.Name = s.name.Namespace, s.name.Name
	err := r.client.Delete(call, session, client.Preconditions{UID: &s.uid, ResourceVersion: &version})
	switch {
	case apierrors.IsConflict(err):
		logf.FromContext(ctx).V(1).Info("The session renewed at the last moment.")
		return ctrl.Result{RequeueAfter: r.tracker.spared(s.uid)}, nil
	case client.IgnoreNotFound(err) != nil:
		return ctrl.Result{}, fmt.Errorf("expire session %q: %w", s.name, err)
	case err == nil:
		logf.FromContext(ctx).Info("Session expired.", "identity", clip(s.session.Identity, longestName), "late", late)
		r.metrics.expired.Inc()
		r.metrics.expiryDelay.Observe(late.Seconds())
	}
	r.wake.gone(ctx, r.wake.queue, s.name, s.uid)
	return ctrl.Result{}, nil
}

// report tells once what is wrong with the session.
func (r *sessionReconciler) report(ctx context.Context, s *sessionSight) {
	if s.reported {
		return
	}
	logf.FromContext(ctx).Info("Session is unusable.", "error", s.fault)
	unusable(s).tell(r.recorder)
	r.metrics.unusable.Inc()
	r.tracker.reported(s.uid)
}
