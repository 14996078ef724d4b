// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// longAgo is how long ago something happened that this controller did not do.
const longAgo = time.Hour

// leaseSight is what was seen of one lease.
type leaseSight struct {
	uid     types.UID
	version string // the newest resourceVersion; what is older is ignored

	// phase and token are the present term or cooldown (or neither), since when this controller first saw it.
	phase v1alpha1.Phase
	token int64
	since time.Time
	// begun: it saw the term begin, and has not judged the holder's session yet.
	begun bool
	// holder is the last one seen: terms do not name the session, only its UID.
	holder v1alpha1.Contender
	// waiting is status.waiting.
	waiting int
	// served is the highest ticket granted to each session.
	served map[types.UID]int64
	// queued is when this controller last wrote the queue.
	queued time.Time

	// granted and ended are the highest tokens whose grant and whose end are in news, or happened before this controller looked.
	granted, ended int64
	// news is what was not announced yet.
	news []notice
}

func (e *leaseSight) held() bool { return e.phase == v1alpha1.PhaseHeld }

// observe takes in a lease, from the watch or as the answer to a write. A state older than one seen is ignored.
func (t *tracker) observe(l *v1alpha1.FencedLease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := nameOf(l)
	e := t.leases[key]
	if e != nil && older(l.ResourceVersion, e.version) {
		return
	}
	first := e == nil || e.uid != l.UID // or it was deleted and created again
	if first {
		e = &leaseSight{uid: l.UID, served: map[types.UID]int64{}}
		t.leases[key] = e
	}
	e.version = l.ResourceVersion
	if l.Status == nil {
		return
	}
	if !first {
		e.news = append(e.news, news(l, e)...)
		e.news = e.news[max(0, len(e.news)-2*v1alpha1.MaxTerms):]
	}
	t.remember(e, l, first)
}

// remember takes over the state of the lease.
func (t *tracker) remember(e *leaseSight, l *v1alpha1.FencedLease, first bool) {
	s := l.Status
	if e.phase != s.Phase || e.token != s.Token {
		e.begun = !first && s.Phase == v1alpha1.PhaseHeld
		e.phase, e.token, e.since = s.Phase, s.Token, t.clock.Now()
	}
	e.waiting = int(s.Waiting)
	for _, term := range s.Terms {
		t.serve(e, v1alpha1.Contender{SessionUID: term.SessionUID, User: term.User, PodUID: term.PodUID, Ticket: term.Ticket})
		e.ended = max(e.ended, term.Token)
	}
	e.granted = max(e.granted, e.ended)
	if s.Holder != nil {
		e.holder = s.Holder.Contender
		t.serve(e, e.holder)
		e.granted = max(e.granted, s.Token)
	}
}

// serve remembers that the request was granted, if it is one of that session: by user and Pod, since whoever reads a
// session's UID can claim it.
func (t *tracker) serve(e *leaseSight, c v1alpha1.Contender) {
	if s := t.sessions[c.SessionUID]; s != nil && s.session.User == c.User && s.session.PodUID == c.PodUID {
		e.served[c.SessionUID] = max(e.served[c.SessionUID], c.Ticket)
	}
}

// behind says that a newer state of the lease, or a newer lease of that name, was seen.
func (t *tracker) behind(l *v1alpha1.FencedLease) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.leases[nameOf(l)]
	return e != nil && older(l.ResourceVersion, e.version)
}

// forget says that the lease is gone.
func (t *tracker) forget(key types.NamespacedName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.leases, key)
}

// unknown are holder and queue of the lease as far as their sessions were never seen: they may be missing, or
// the watch may be behind.
func (t *tracker) unknown(l *v1alpha1.FencedLease) []v1alpha1.Contender {
	t.mu.Lock()
	defer t.mu.Unlock()
	var unknown []v1alpha1.Contender
	for _, c := range contenders(l) {
		_, gone := t.fates[c.SessionUID]
		if t.sessionIn(l.Namespace, c.SessionUID) == nil && !gone {
			unknown = append(unknown, c)
		}
	}
	return unknown
}

// sessionIn is the session with that UID, if it is one of that namespace: a lease knows no other.
func (t *tracker) sessionIn(namespace string, uid types.UID) *sessionSight {
	if s := t.sessions[uid]; s != nil && s.name.Namespace == namespace {
		return s
	}
	return nil
}

// view is what protocol.Settle needs to know. Found are sessions that only the API server knew.
func (t *tracker) view(l *v1alpha1.FencedLease, found map[types.UID]protocol.Session) protocol.View {
	t.mu.Lock()
	defer t.mu.Unlock()
	key, now := nameOf(l), t.clock.Now()
	v := protocol.View{Now: now, Sessions: map[types.UID]protocol.Session{}, QueuedFor: longAgo}
	for _, uid := range t.inLine(key) {
		v.Order = append(v.Order, protocol.Place{SessionUID: uid, Ticket: t.lines[key][uid].ticket})
		t.enlist(&v, key.Namespace, uid)
	}
	for _, c := range contenders(l) {
		t.enlist(&v, key.Namespace, c.SessionUID)
	}
	for uid, session := range found {
		_, gone := t.fates[uid]
		if _, seen := v.Sessions[uid]; !gone && !seen {
			v.Sessions[uid] = session
			v.Order = append(v.Order, protocol.Place{SessionUID: uid, Ticket: session.Wants[l.Name]})
		}
	}
	if e := t.leases[key]; e != nil && e.uid == l.UID {
		t.recall(&v, l, e)
	}
	return v
}

// inLine are the sessions that want the lease, first in line first.
func (t *tracker) inLine(key types.NamespacedName) []types.UID {
	line := t.lines[key]
	return slices.SortedFunc(maps.Keys(line), func(a, b types.UID) int {
		return cmp.Or(cmp.Compare(line[a].seen, line[b].seen), cmp.Compare(line[a].ticket, line[b].ticket), cmp.Compare(a, b))
	})
}

func (t *tracker) enlist(v *protocol.View, namespace string, uid types.UID) {
	if s := t.sessionIn(namespace, uid); s != nil && s.fault == "" {
		v.Sessions[uid] = s.session
	}
}

// recall adds what is remembered of the lease itself.
func (t *tracker) recall(v *protocol.View, l *v1alpha1.FencedLease, e *leaseSight) {
	for uid := range e.served {
		if t.sessions[uid] == nil {
			delete(e.served, uid) // holder and terms still say so, if it should turn up late
		}
	}
	v.Served = maps.Clone(e.served)
	if !e.queued.IsZero() {
		v.QueuedFor = v.Now.Sub(e.queued)
	}
	if l.Status == nil || e.phase != l.Status.Phase || e.token != l.Status.Token {
		return // an old state, of which nothing is known
	}
	v.HeldFor, v.CooledFor = v.Now.Sub(e.since), v.Now.Sub(e.since)
	if holder := l.Status.Holder; holder != nil {
		f, gone := t.fates[holder.SessionUID]
		v.Expired = gone && f.expired
		// A session that was seen alive and closed before it was judged was closed, not invalid; one that says
		// nothing usable is invalid whenever that is found.
		s := t.sessionIn(l.Namespace, holder.SessionUID)
		v.Begun = (e.begun && !gone) || (s != nil && s.fault != "")
	}
}

// judged says that holder and queue were found to be in order.
func (t *tracker) judged(l *v1alpha1.FencedLease) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.leases[nameOf(l)]; e != nil && l.Status != nil && e.token == l.Status.Token {
		e.begun = false
	}
}

// queued says that this controller wrote the queue just now.
func (t *tracker) queued(key types.NamespacedName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.leases[key]; e != nil {
		e.queued = t.clock.Now()
	}
}

// takeNews returns what was not announced yet, once.
func (t *tracker) takeNews(key types.NamespacedName) []notice {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.leases[key]
	if e == nil {
		return nil
	}
	taken := e.news
	e.news = nil
	return taken
}

// contenders are the holder and the queue.
func contenders(l *v1alpha1.FencedLease) []v1alpha1.Contender {
	if l.Status == nil {
		return nil
	}
	all := slices.Clone(l.Status.Queue)
	if l.Status.Holder != nil {
		all = append(all, l.Status.Holder.Contender)
	}
	return all
}

func nameOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}
