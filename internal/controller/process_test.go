// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"maps"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// process has a session, and is simple-minded about it. Everything it does, it does under its own account.
type process struct {
	client client.Client

	mu      sync.Mutex
	session *coordinationv1.Lease // as last written
	wants   map[string]int64
	ticket  int64
	renewed time.Time // when the last renewal was sent that succeeded
}

// process starts one with a session of that name, which it does not renew before it is told to.
func (w *world) process(ctx context.Context, name string, ttl time.Duration) *process {
	GinkgoHelper()
	return w.processAs(ctx, w.worker, name, ttl)
}

func (w *world) processAs(ctx context.Context, cfg *rest.Config, name string, ttl time.Duration, owners ...metav1.OwnerReference) *process {
	GinkgoHelper()
	p := &process{client: clientOf(cfg), wants: map[string]int64{}, renewed: time.Now()}
	var self authenticationv1.SelfSubjectReview
	Expect(p.client.Create(ctx, &self)).To(Succeed())
	annotations := map[string]string{v1alpha1.UserAnnotation: self.Status.UserInfo.Username}
	if pod := self.Status.UserInfo.Extra[v1alpha1.PodUIDExtra]; len(pod) > 0 {
		annotations[v1alpha1.PodUIDAnnotation] = pod[0]
	}
	seconds := int32(ttl.Seconds())
	p.session = &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.namespace, Name: name, Annotations: annotations, OwnerReferences: owners,
			Labels: map[string]string{v1alpha1.SessionLabel: "true"},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &name, LeaseDurationSeconds: &seconds},
	}
	Expect(p.client.Create(ctx, p.session)).To(Succeed())
	return p
}

// put writes the whole session, with UID and resourceVersion, after a change.
func (p *process) put(ctx context.Context, change func(*coordinationv1.Lease)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	next, sent := p.session.DeepCopy(), time.Now()
	change(next)
	if err := p.client.Update(ctx, next); err != nil {
		return err
	}
	p.session, p.renewed = next, sent
	return nil
}

// renew sends one heartbeat.
func (p *process) renew(ctx context.Context) error {
	return p.put(ctx, func(s *coordinationv1.Lease) {
		now := metav1.NowMicro()
		s.Spec.RenewTime = &now
	})
}

// live renews every third of the TTL until the spec is over, or the function returned is called.
func (p *process) live() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	p.mu.Lock()
	ttl := time.Duration(*p.session.Spec.LeaseDurationSeconds) * time.Second
	p.mu.Unlock()
	go func() {
		defer close(ended)
		beat := time.NewTicker(ttl / 3)
		defer beat.Stop()
		for {
			_ = p.renew(ctx) // whether that is enough is for the spec to say
			select {
			case <-ctx.Done():
				return
			case <-beat.C:
			}
		}
	}()
	stop = func() {
		cancel()
		<-ended
	}
	DeferCleanup(stop)
	return stop
}

// want asks for the lease with a new ticket; forgo asks no more.
func (p *process) want(ctx context.Context, l *v1alpha1.FencedLease) {
	GinkgoHelper()
	p.ticket++
	p.wants[l.Name] = p.ticket
	Expect(p.put(ctx, p.say)).To(Succeed())
}

func (p *process) forgo(ctx context.Context, l *v1alpha1.FencedLease) {
	GinkgoHelper()
	delete(p.wants, l.Name)
	Expect(p.put(ctx, p.say)).To(Succeed())
}

func (p *process) say(s *coordinationv1.Lease) {
	s.Annotations = maps.Clone(s.Annotations)
	s.Annotations[v1alpha1.WaitingForAnnotation] = protocol.FormatWants(p.wants)
}

// request is the contender with that ticket.
func (p *process) request(ticket int64) v1alpha1.Contender {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := protocol.ParseSession(p.session)
	Expect(err).NotTo(HaveOccurred())
	return s.Request(ticket)
}

// acquire takes the lease; release gives back whatever term of it is its own.
func (p *process) acquire(ctx context.Context, l *v1alpha1.FencedLease) {
	GinkgoHelper()
	p.ticket++
	Expect(write(ctx, p.client, l, protocol.Acquire(p.request(p.ticket), time.Now()))).To(Succeed())
}

func (p *process) release(ctx context.Context, l *v1alpha1.FencedLease) {
	GinkgoHelper()
	holder := read(ctx, l).Status.Holder
	Expect(holder).NotTo(BeNil())
	// A retry, because the controller may write the queue at the same moment.
	Expect(retry.OnError(retry.DefaultBackoff, lostRace, func() error {
		return write(ctx, p.client, l, protocol.Release(p.request(holder.Ticket), time.Now()))
	})).To(Succeed())
}

// close deletes the session, as its owner.
func (p *process) close(ctx context.Context) {
	GinkgoHelper()
	p.mu.Lock()
	defer p.mu.Unlock()
	Expect(p.client.Delete(ctx, p.session.DeepCopy(), client.Preconditions{UID: &p.session.UID})).To(Succeed())
}

func (p *process) uid() types.UID {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.session.UID
}

// written is the session as it was last written.
func (p *process) written() *coordinationv1.Lease {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.session
}
