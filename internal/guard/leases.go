// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// readWithin bounds one call of the guard to the API server.
const readWithin = 2 * time.Second

// getLease reads a lease once; a lease that does not exist is a NotFound error.
type getLease func(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error)

// liveReader reads each lease live, and lets callers share a read only if they were waiting before it began. (A
// plain singleflight joins a read already under way, whose answer may be older than the caller's request: then a
// stale token would pass although the newer grant was stored before the write arrived.)
type liveReader struct {
	get     getLease
	metrics *Metrics

	mu     sync.Mutex
	leases map[types.NamespacedName]*reads // those being read now
}

// reads are the reads of one lease: at most one is running, and all who came since it began wait for the next.
type reads struct {
	next *read // nil: nobody waits
}

// read is one read, for all who wait for it.
type read struct {
	done  chan struct{}
	lease *v1alpha1.FencedLease // both valid once done is closed
	err   error
}

// NewLeaseReader returns a reader with a client of its own, without a rate limit and with its own connection. Each
// read is bounded to two seconds.
func NewLeaseReader(cfg *rest.Config, metrics *Metrics) (LeaseReader, error) {
	client, err := leaseClient(cfg)
	if err != nil {
		return nil, fmt.Errorf("make client for leases: %w", err)
	}
	return newLiveReader(metrics, func(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
		lease := &v1alpha1.FencedLease{}
		// Without a resourceVersion the API server reads from its store, not from its cache.
		err := client.Get().Namespace(name.Namespace).Resource("fencedleases").Name(name.Name).Do(ctx).Into(lease)
		return lease, err
	}), nil
}

func newLiveReader(metrics *Metrics, get getLease) *liveReader {
	return &liveReader{get: get, metrics: metrics, leases: map[types.NamespacedName]*reads{}}
}

// Lease implements LeaseReader. When ctx ends first, the read goes on for the others.
func (r *liveReader) Lease(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	mine := r.enlist(ctx, name)
	select {
	case <-mine.done:
		return mine.lease, mine.err
	case <-ctx.Done():
		return nil, fmt.Errorf("read lease %s: %w", name, context.Cause(ctx))
	}
}

// enlist returns a read that has not begun yet.
func (r *liveReader) enlist(ctx context.Context, name types.NamespacedName) *read {
	r.mu.Lock()
	defer r.mu.Unlock()
	of, running := r.leases[name]
	if !running {
		of = &reads{}
		r.leases[name] = of
	}
	if of.next == nil {
		of.next = &read{done: make(chan struct{})}
	}
	mine := of.next
	if !running {
		go r.serve(context.WithoutCancel(ctx), name, of)
	}
	return mine
}

// serve reads until nobody waits any more.
func (r *liveReader) serve(ctx context.Context, name types.NamespacedName, of *reads) {
	for {
		r.mu.Lock()
		current := of.next
		of.next = nil
		if current == nil {
			delete(r.leases, name)
		}
		r.mu.Unlock()
		if current == nil {
			return
		}
		current.lease, current.err = r.read(ctx, name)
		close(current.done)
	}
}

func (r *liveReader) read(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	ctx, cancel := context.WithTimeout(ctx, readWithin)
	defer cancel()
	defer r.metrics.observeRead(time.Now())
	lease, err := r.get(ctx, name)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // no lease is an answer, see protocol.World
	}
	if err != nil {
		return nil, fmt.Errorf("read lease %s: %w", name, err)
	}
	return lease, nil
}

func leaseClient(cfg *rest.Config) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	metav1.AddToGroupVersion(scheme, metav1.Unversioned)
	own := unlimited(cfg)
	own.GroupVersion, own.APIPath = &v1alpha1.GroupVersion, "/apis"
	own.ContentType, own.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	own.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientFor(own)
}

// unlimited returns the configuration for calls that somebody's write waits for: bounded in time, not held up by
// our other traffic. The API server's own priority levels keep it from being flooded.
func unlimited(cfg *rest.Config) *rest.Config {
	own := rest.CopyConfig(cfg)
	own.QPS, own.Timeout = -1, readWithin
	// A dialer of its own keeps the connection apart from that of the informers.
	own.Dial = (&net.Dialer{Timeout: readWithin, KeepAlive: readWithin}).DialContext
	return own
}
