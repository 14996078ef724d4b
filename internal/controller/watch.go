// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	logf "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// kind is of what a request is.
type kind string

const (
	leaseKind   kind = "lease"
	sessionKind kind = "session"
)

// request is a lease or a session to look at. Both stand in one queue, so that what the watch of sessions saw is
// in the tracker before a lease is judged by it.
type request struct {
	kind kind
	name types.NamespacedName
}

type queue = workqueue.TypedRateLimitingInterface[request]

// sessionIndex finds leases by the sessions that hold or queue for them.
const sessionIndex = "status.sessionUIDs"

func indexSessions(o client.Object) []string {
	var uids []string
	lease, ok := o.(*v1alpha1.FencedLease)
	if !ok {
		return nil
	}
	for _, c := range contenders(lease) {
		uids = append(uids, string(c.SessionUID))
	}
	return slices.Compact(slices.Sorted(slices.Values(uids)))
}

// waker puts into the queue what a change concerns.
type waker struct {
	reader  client.Reader // the cache
	tracker *tracker
	queue   queue // for reconcilers: it is set before they start, but after the first events
}

// wants wakes the leases that a session of the namespace asks for.
func (w *waker) wants(q queue, namespace string, names []string) {
	for _, name := range names {
		q.Add(request{leaseKind, types.NamespacedName{Namespace: namespace, Name: name}})
	}
}

// touched wakes the leases that the session holds or queues for. One that the cache does not show yet is judged
// when it does.
func (w *waker) touched(ctx context.Context, q queue, namespace string, uid types.UID) {
	var leases v1alpha1.FencedLeaseList
	err := w.reader.List(ctx, &leases, client.InNamespace(namespace), client.MatchingFields{sessionIndex: string(uid)})
	if err != nil {
		logf.FromContext(ctx).Error(err, "List the leases of a session.", "sessionUID", uid)
	}
	for i := range leases.Items {
		q.Add(request{leaseKind, nameOf(&leases.Items[i])})
	}
}

// gone takes note that a session is no more.
func (w *waker) gone(ctx context.Context, q queue, name types.NamespacedName, uid types.UID) {
	if wants, known := w.tracker.gone(uid); known {
		w.wants(q, name.Namespace, wants)
		w.touched(ctx, q, name.Namespace, uid)
	}
}

// sessionEvents takes in every sight of a session.
func (w *waker) sessionEvents() handler.TypedEventHandler[*coordinationv1.Lease, request] {
	return handler.TypedFuncs[*coordinationv1.Lease, request]{
		CreateFunc: func(ctx context.Context, e event.TypedCreateEvent[*coordinationv1.Lease], q queue) {
			wants, _ := w.tracker.look(e.Object, e.IsInInitialList)
			q.Add(request{sessionKind, nameOf(e.Object)})
			if e.IsInInitialList {
				return // each lease is looked at anyway, once all sessions are known
			}
			w.wants(q, e.Object.Namespace, wants)
			w.touched(ctx, q, e.Object.Namespace, e.Object.UID)
		},
		UpdateFunc: func(ctx context.Context, e event.TypedUpdateEvent[*coordinationv1.Lease], q queue) {
			name := nameOf(e.ObjectNew)
			if e.ObjectOld.UID != e.ObjectNew.UID {
				w.gone(ctx, q, name, e.ObjectOld.UID) // deleted and created again while the watch was away
			}
			wants, touched := w.tracker.look(e.ObjectNew, false)
			w.wants(q, name.Namespace, wants)
			if touched {
				q.Add(request{sessionKind, name}) // its time may end sooner
				w.touched(ctx, q, name.Namespace, e.ObjectNew.UID)
			}
		},
		DeleteFunc: func(ctx context.Context, e event.TypedDeleteEvent[*coordinationv1.Lease], q queue) {
			w.gone(ctx, q, nameOf(e.Object), e.Object.UID)
		},
	}
}

// leaseEvents takes in every sight of a lease: a term may begin and end before the lease is looked at.
func (w *waker) leaseEvents() handler.TypedEventHandler[*v1alpha1.FencedLease, request] {
	return handler.TypedFuncs[*v1alpha1.FencedLease, request]{
		CreateFunc: func(_ context.Context, e event.TypedCreateEvent[*v1alpha1.FencedLease], q queue) {
			w.tracker.observe(e.Object)
			q.Add(request{leaseKind, nameOf(e.Object)})
		},
		UpdateFunc: func(_ context.Context, e event.TypedUpdateEvent[*v1alpha1.FencedLease], q queue) {
			w.tracker.observe(e.ObjectNew)
			q.Add(request{leaseKind, nameOf(e.ObjectNew)})
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[*v1alpha1.FencedLease], q queue) {
			q.Add(request{leaseKind, nameOf(e.Object)})
		},
	}
}
