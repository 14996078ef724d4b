// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// term is a term as news see it: one that ended, or the present one.
type term struct {
	v1alpha1.Term
	session types.NamespacedName // empty where its name is not known
	ended   bool
}

// news are the notices of what happened to the lease since e was seen, whoever wrote it: one for each term that
// ended, with whom it was handed over to in the same write, and one for each other grant.
func news(l *v1alpha1.FencedLease, e *leaseSight) []notice {
	chain := termsOf(l, e)
	regarding := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{
		Namespace: l.Namespace, Name: l.Name, UID: l.UID, ResourceVersion: l.ResourceVersion,
	}}
	var found []notice
	for i, t := range chain {
		// Who hands over writes one time as the end and as the start.
		handed := i > 0 && chain[i-1].EndTime.Equal(&t.StartTime)
		if t.Token > e.granted && !handed {
			found = append(found, granted(t))
		}
		if t.ended && t.Token > e.ended {
			var to *term
			if i+1 < len(chain) && t.EndTime.Equal(&chain[i+1].StartTime) {
				to = &chain[i+1]
			}
			found = append(found, ended(t, to))
		}
	}
	for i := range found {
		found[i].regarding = regarding
	}
	return found
}

// termsOf are the recorded terms of the lease and the present one, oldest first.
func termsOf(l *v1alpha1.FencedLease, e *leaseSight) []term {
	var chain []term
	for _, recorded := range slices.Backward(l.Status.Terms) {
		t := term{Term: recorded, ended: true}
		if t.SessionUID == e.holder.SessionUID {
			t.session = types.NamespacedName{Namespace: l.Namespace, Name: e.holder.Session}
		}
		chain = append(chain, t)
	}
	if h := l.Status.Holder; h != nil {
		session := types.NamespacedName{Namespace: l.Namespace, Name: h.Session}
		chain = append(chain, term{session: session, Term: v1alpha1.Term{
			Token: l.Status.Token, Identity: h.Identity, SessionUID: h.SessionUID, Ticket: h.Ticket, StartTime: h.AcquireTime,
		}})
	}
	return chain
}

// reference names a session as the object of an event.
func reference(name types.NamespacedName, uid types.UID) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name, UID: uid}}
}
