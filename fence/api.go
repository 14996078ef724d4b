// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"fmt"
	"net/http"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

const (
	// callTimeout bounds each call; a renewal is also bounded by a third of the TTL. What did not answer by then is
	// asked about again.
	callTimeout = 5 * time.Second

	// watchTimeout is when the API server closes a watch, and the session begins the next: so a connection
	// that died without a word is not kept for ever.
	watchTimeout = 5 * time.Minute

	// callsAtOnce bounds the calls about leases: as many as client-go's transport keeps connections for.
	// Renewals do not count, so that nothing delays them.
	callsAtOnce = 25

	resource = "fencedleases"
)

// api is what a session asks of the API server. Every call is bounded in time.
type api struct {
	host      string
	namespace string
	reviews   authenticationclient.SelfSubjectReviewInterface
	sessions  coordinationclient.LeaseInterface
	leases    rest.Interface
	params    runtime.ParameterCodec
	closeIdle func() // ends the connections that nobody uses
	slots     chan struct{}
}

// ownConfig is a copy of cfg for a client that shares no rate limiter: a burst of the program's own calls must not
// delay a renewal. It speaks HTTP/1.1 on purpose: a call that times out takes its connection with it, and the next
// one dials anew; over HTTP/2 all calls would share a dead connection for 45 seconds.
func ownConfig(cfg *rest.Config) *rest.Config {
	own := rest.CopyConfig(cfg)
	own.QPS, own.Burst, own.RateLimiter = -1, 0, nil
	own.Timeout = 0
	own.NextProtos = []string{"http/1.1"}
	own.WarningHandler, own.WarningHandlerWithContext = rest.NoWarnings{}, rest.NoWarnings{}
	own.ContentConfig = rest.ContentConfig{ContentType: runtime.ContentTypeJSON, AcceptContentTypes: runtime.ContentTypeJSON}
	if own.UserAgent == "" {
		own.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	return own
}

// newAPI makes the session's own client.
func newAPI(cfg *rest.Config, namespace string) (*api, error) {
	own := ownConfig(cfg)
	httpClient, err := rest.HTTPClientFor(own)
	if err != nil {
		return nil, fmt.Errorf("read client configuration: %w", err)
	}
	authentication, err := authenticationclient.NewForConfigAndClient(own, httpClient)
	if err != nil {
		return nil, fmt.Errorf("read client configuration: %w", err)
	}
	coordination, err := coordinationclient.NewForConfigAndClient(own, httpClient)
	if err != nil {
		return nil, fmt.Errorf("read client configuration: %w", err)
	}

	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("build scheme: %w", err)
	}
	own.APIPath, own.GroupVersion = "/apis", &v1alpha1.GroupVersion
	own.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	leases, err := rest.RESTClientForConfigAndClient(own, httpClient)
	if err != nil {
		return nil, fmt.Errorf("read client configuration: %w", err)
	}
	return &api{
		host:      own.Host,
		namespace: namespace,
		reviews:   authentication.SelfSubjectReviews(),
		sessions:  coordination.Leases(namespace),
		leases:    leases,
		params:    runtime.NewParameterCodec(scheme),
		closeIdle: func() { closeIdle(httpClient.Transport) },
		slots:     make(chan struct{}, callsAtOnce),
	}, nil
}

// closeIdle ends the connections of a transport that nobody uses now. (The one of apimachinery prints where a program
// brought a transport of its own.)
func closeIdle(transport http.RoundTripper) {
	for transport != nil {
		if t, ok := transport.(interface{ CloseIdleConnections() }); ok {
			t.CloseIdleConnections()
			return
		}
		wrapper, ok := transport.(interface{ WrappedRoundTripper() http.RoundTripper })
		if !ok {
			return
		}
		transport = wrapper.WrappedRoundTripper()
	}
}

// bounded waits for one of the few places for calls, and bounds the call.
func (a *api) bounded(ctx context.Context) (context.Context, func(), error) {
	select {
	case a.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	return ctx, func() { cancel(); <-a.slots }, nil
}

// whoami asks who the API server takes us for.
func (a *api) whoami(ctx context.Context) (authenticationv1.UserInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	review, err := a.reviews.Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return authenticationv1.UserInfo{}, err
	}
	return review.Status.UserInfo, nil
}

func (a *api) createSession(ctx context.Context, session *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return a.sessions.Create(ctx, session, metav1.CreateOptions{})
}

func (a *api) session(ctx context.Context, name string) (*coordinationv1.Lease, error) {
	return a.sessions.Get(ctx, name, metav1.GetOptions{})
}

func (a *api) updateSession(ctx context.Context, session *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	return a.sessions.Update(ctx, session, metav1.UpdateOptions{})
}

func (a *api) deleteSession(ctx context.Context, name string, uid types.UID) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return a.sessions.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
}

// lease reads a lease: from the store, not from a cache.
func (a *api) lease(ctx context.Context, name string) (*v1alpha1.FencedLease, error) {
	ctx, done, err := a.bounded(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	l := &v1alpha1.FencedLease{}
	return l, a.leases.Get().Namespace(a.namespace).Resource(resource).Name(name).Do(ctx).Into(l)
}

// patch sends a transition. It is strict, so that a field which an older CRD does not know is refused, not dropped.
func (a *api) patch(ctx context.Context, name string, patch []byte) (*v1alpha1.FencedLease, error) {
	ctx, done, err := a.bounded(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	l := &v1alpha1.FencedLease{}
	return l, a.leases.Patch(types.JSONPatchType).Namespace(a.namespace).Resource(resource).Name(name).SubResource("status").
		Param("fieldValidation", metav1.FieldValidationStrict).Body(patch).Do(ctx).Into(l)
}

// mine lists the leases that the session holds.
func (a *api) mine(ctx context.Context, uid types.UID) (*v1alpha1.FencedLeaseList, error) {
	ctx, done, err := a.bounded(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	list := &v1alpha1.FencedLeaseList{}
	return list, a.leases.Get().Namespace(a.namespace).Resource(resource).
		VersionedParams(&metav1.ListOptions{FieldSelector: heldBy(uid)}, a.params).Do(ctx).Into(list)
}

// watchMine watches the leases that the session holds: one that comes to it is added, one that leaves it deleted.
// Only the beginning is bounded by callTimeout; the watch ends with ctx.
func (a *api) watchMine(ctx context.Context, uid types.UID, resourceVersion string) (watch.Interface, error) {
	ctx, cancel := context.WithCancel(ctx)
	late := time.AfterFunc(callTimeout, cancel)
	seconds := int64(watchTimeout / time.Second)
	w, err := a.leases.Get().Namespace(a.namespace).Resource(resource).VersionedParams(&metav1.ListOptions{
		FieldSelector:       heldBy(uid),
		ResourceVersion:     resourceVersion,
		Watch:               true,
		AllowWatchBookmarks: true,
		TimeoutSeconds:      &seconds,
	}, a.params).Watch(ctx)
	switch {
	case err != nil:
		cancel()
		return nil, err
	case !late.Stop():
		w.Stop()
		return nil, fmt.Errorf("watch: no answer within %s", callTimeout)
	}
	return &cancellingWatch{Interface: w, cancel: cancel}, nil
}

// cancellingWatch ends the request with the watch.
type cancellingWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

func (w *cancellingWatch) Stop() {
	w.cancel()
	w.Interface.Stop()
}

func heldBy(uid types.UID) string {
	return fields.OneTermEqualSelector("status.holder.sessionUID", string(uid)).String()
}
