// SPDX-License-Identifier: Apache-2.0

// Package guard is the admission webhook that fences protected objects: it decodes a request, asks
// internal/protocol for the verdict, and translates that into an answer. It decides nothing itself.
//
// It keeps no memory and writes nothing: the API server runs it several times for one request, for writes that
// fail later, and for dry runs. What the verdict compares with the stored object is atomic with the write, since
// the API server asks again whenever the object has changed under it. The lease is as it was at a read that
// began after the request arrived.
//
// It judges CREATE and UPDATE of objects and of their /status. Anything else that a rule sends here is refused.
package guard

import (
	"context"
	"errors"
	"slices"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// answerWithin is the time for one answer. It is below the three seconds of the webhook configuration, so that the
// writer learns what could not be read instead of a bare timeout.
const answerWithin = 2500 * time.Millisecond

// LeaseReader reads leases as they are now: every answer comes from a read that began after the call.
type LeaseReader interface {
	// Lease returns a lease, nil if there is none. The caller shares it with others and must not change it.
	Lease(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error)
}

// AccessReviewer asks the authorizer.
type AccessReviewer interface {
	// Allowed says whether the user has the verb on the lease.
	Allowed(ctx context.Context, user authenticationv1.UserInfo, verb string, name types.NamespacedName) (bool, error)
}

// Options are what a guard needs. All but Exempt and HasStatus are required.
type Options struct {
	Leases  LeaseReader
	Access  AccessReviewer
	Metrics *Metrics
	// Exempt are the users that collect garbage: they may change owners and finalizers without a token.
	Exempt []string
	// HasStatus says of which custom resources /status is served and guarded. A write to their main resource
	// cannot change status, so status does not count there. Nil: of none.
	HasStatus func(schema.GroupResource) bool
}

// DefaultExempt are the names under which kube-controller-manager collects garbage: with a service account for
// each controller, and without.
func DefaultExempt() []string {
	return []string{"system:serviceaccount:kube-system:generic-garbage-collector", "system:kube-controller-manager"}
}

// Guard is the admission handler. It may be called concurrently.
type Guard struct {
	Options
}

var _ admission.Handler = (*Guard)(nil)

// New returns a guard.
func New(o Options) *Guard {
	if o.HasStatus == nil {
		o.HasStatus = func(schema.GroupResource) bool { return false }
	}
	return &Guard{Options: o}
}

// Handle answers one admission request. It always answers within the webhook's timeout, and what it could not
// judge it refuses.
func (g *Guard) Handle(ctx context.Context, req admission.Request) admission.Response {
	defer g.Metrics.observe(time.Now())
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()

	w, err := g.decode(req)
	if err != nil {
		g.Metrics.count(resultMalformed, "")
		return malformed(err)
	}
	d, err := protocol.Verdict(w.Write, world{ctx: ctx, guard: g, user: req.UserInfo})
	if errors.Is(err, errMalformed) {
		g.Metrics.count(resultMalformed, "")
		return malformed(err)
	}
	if err != nil {
		g.Metrics.count(resultUnjudged, v1alpha1.ReasonLeaseUnreadable)
		return unjudged(req, err)
	}
	g.tell(ctx, d)
	return answer(req, w, d)
}

// tell counts the verdict, and logs what somebody may ask about later. The API server's audit log has the rest.
func (g *Guard) tell(ctx context.Context, d protocol.Decision) {
	g.Metrics.count(string(d.Result), d.Reason)
	logger := log.FromContext(ctx).WithValues("lease", d.Lease.String())
	if d.Behind {
		g.Metrics.behind.Inc()
		logger.Info("Lease is behind the mark of an object, as after a restore: set spec.minToken of the lease above it")
	}
	switch d.Result {
	case protocol.ResultBypassed:
		logger.Info("Write passed the guard by bypass", "bypass", d.Bypass)
	case protocol.ResultDenied, protocol.ResultWarned:
		logger.V(1).Info("Write found wanting", "result", d.Result, "reason", d.Reason, "message", d.Message)
	}
}

func (g *Guard) requester(user authenticationv1.UserInfo) protocol.Requester {
	by := protocol.Requester{User: user.Username, Collector: slices.Contains(g.Exempt, user.Username)}
	if uids := user.Extra[v1alpha1.PodUIDExtra]; len(uids) == 1 {
		by.PodUID = types.UID(uids[0])
	}
	return by
}

// world answers the questions of one verdict.
type world struct {
	ctx   context.Context //nolint:containedctx // It lives as long as the verdict, whose interface knows no contexts.
	guard *Guard
	user  authenticationv1.UserInfo
}

func (w world) Lease(name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	return w.guard.Leases.Lease(w.ctx, name)
}

func (w world) Allowed(verb string, name types.NamespacedName) (bool, error) {
	return w.guard.Access.Allowed(w.ctx, w.user, verb, name)
}
