// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// world is a namespace of its own with two accounts that may contend for leases in it.
type world struct {
	namespace     string
	worker, other *rest.Config
}

func newWorld(ctx context.Context) *world {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "shop-"}}
	Expect(admin.Create(ctx, ns)).To(Succeed())
	w := &world{namespace: ns.Name}
	Expect(admin.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "contenders"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "fencedlease-contender"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: "system:serviceaccounts:" + ns.Name}},
	})).To(Succeed())
	var err error
	w.worker, err = env.ServiceAccount(ctx, ns.Name, "worker")
	Expect(err).NotTo(HaveOccurred())
	w.other, err = env.ServiceAccount(ctx, ns.Name, "other")
	Expect(err).NotTo(HaveOccurred())
	return w
}

// manager is a running manager with the controller.
type manager struct {
	tracker *tracker
	metrics *Metrics
	mgr     ctrl.Manager
	// writes counts what it writes.
	writes atomic.Int64
	cancel context.CancelFunc
	done   chan error
}

// manage starts a manager for the namespace under the real account; it is stopped after the spec.
func (w *world) manage(change ...func(*ctrl.Options)) *manager {
	m := &manager{done: make(chan error, 1), tracker: newTracker(clock.RealClock{}), metrics: NewMetrics(prometheus.NewRegistry())}
	skipNames := true // of the managers of other specs
	o := ctrl.Options{
		Scheme:     scheme,
		Metrics:    metricsserver.Options{BindAddress: "0"},
		Cache:      cache.Options{ByObject: CacheOptions(), DefaultNamespaces: map[string]cache.Config{w.namespace: {}}},
		Controller: config.Controller{SkipNameValidation: &skipNames},
		NewClient:  m.client,
	}
	for _, f := range change {
		f(&o)
	}
	var err error
	m.mgr, err = ctrl.NewManager(managerConfig, o)
	Expect(err).NotTo(HaveOccurred())
	Expect(setup(m.mgr, Options{Clock: clock.RealClock{}, Metrics: m.metrics}, m.tracker)).To(Succeed())
	var ctx context.Context
	ctx, m.cancel = context.WithCancel(context.Background())
	go func() { m.done <- m.mgr.Start(ctx) }()
	DeferCleanup(m.stop)
	return m
}

// stop ends the manager, as a lost lead or a shutdown does. It is safe to repeat.
func (m *manager) stop() {
	m.cancel()
	if m.done != nil {
		Eventually(m.done).Should(Receive(BeNil()))
		m.done = nil
	}
}

func (m *manager) client(cfg *rest.Config, o client.Options) (client.Client, error) {
	c, err := client.NewWithWatch(cfg, o)
	if err != nil {
		return nil, err
	}
	return interceptor.NewClient(c, interceptor.Funcs{
		Delete: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.DeleteOption) error {
			m.writes.Add(1)
			return c.Delete(ctx, obj, opts...)
		},
		SubResourcePatch: func(ctx context.Context, c client.Client, sub string, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
			m.writes.Add(1)
			return c.SubResource(sub).Patch(ctx, obj, patch, opts...)
		},
	}), nil
}

// handovers is the counter of that reason.
func (m *manager) handovers(reason string) int {
	return int(testutil.ToFloat64(m.metrics.handovers.WithLabelValues(reason)))
}

// settled waits until the cache shows the lease as the API server has it.
func (m *manager) settled(ctx context.Context, l *v1alpha1.FencedLease) {
	GinkgoHelper()
	Eventually(func(g Gomega) {
		var live, cached v1alpha1.FencedLease
		g.Expect(admin.Get(ctx, client.ObjectKeyFromObject(l), &live)).To(Succeed())
		g.Expect(m.mgr.GetCache().Get(ctx, client.ObjectKeyFromObject(l), &cached)).To(Succeed())
		g.Expect(cached.ResourceVersion).To(Equal(live.ResourceVersion))
	}).Should(Succeed())
}

// sees waits until the controller has seen the session as it was last written.
func (m *manager) sees(p *process) {
	GinkgoHelper()
	written := p.written()
	Eventually(func() string {
		if s := m.tracker.named(nameOf(written)); s != nil {
			return s.version
		}
		return ""
	}).Should(Equal(written.ResourceVersion))
}

// lease creates a lease and waits for its first status.
func (w *world) lease(ctx context.Context, name string, spec v1alpha1.FencedLeaseSpec) *v1alpha1.FencedLease {
	GinkgoHelper()
	l := w.uninitialised(ctx, name, spec)
	Eventually(status(ctx, l)).ShouldNot(BeNil())
	return l
}

func (w *world) uninitialised(ctx context.Context, name string, spec v1alpha1.FencedLeaseSpec) *v1alpha1.FencedLease {
	GinkgoHelper()
	l := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}, Spec: spec}
	Expect(admin.Create(ctx, l)).To(Succeed())
	return l
}

// read returns the lease as it is now.
func read(ctx context.Context, l *v1alpha1.FencedLease) *v1alpha1.FencedLease {
	GinkgoHelper()
	var now v1alpha1.FencedLease
	Expect(admin.Get(ctx, client.ObjectKeyFromObject(l), &now)).To(Succeed())
	return &now
}

// status asks for the status of the lease, for Eventually and Consistently; what fails is nil.
func status(ctx context.Context, l *v1alpha1.FencedLease) func() *v1alpha1.FencedLeaseStatus {
	return func() *v1alpha1.FencedLeaseStatus {
		var now v1alpha1.FencedLease
		if err := admin.Get(ctx, client.ObjectKeyFromObject(l), &now); err != nil {
			return nil
		}
		return now.Status
	}
}

// heldBy matches a status by the name of the holder's session; empty: nobody holds.
func heldBy(session string) OmegaMatcher {
	return WithTransform(func(s *v1alpha1.FencedLeaseStatus) string {
		switch {
		case s == nil:
			return "(no status)"
		case s.Holder == nil:
			return ""
		}
		return s.Holder.Session
	}, Equal(session))
}

// queueOf matches a status by the names of the sessions in the queue.
func queueOf(sessions ...string) OmegaMatcher {
	return WithTransform(func(s *v1alpha1.FencedLeaseStatus) []string {
		names := []string{}
		if s != nil {
			for _, c := range s.Queue {
				names = append(names, c.Session)
			}
		}
		return names
	}, HaveExactElements(sessions))
}

// endedAs matches a status by why its last terms ended, newest first.
func endedAs(reasons ...v1alpha1.EndReason) OmegaMatcher {
	return WithTransform(func(s *v1alpha1.FencedLeaseStatus) []v1alpha1.EndReason {
		ended := []v1alpha1.EndReason{}
		if s != nil {
			for _, t := range s.Terms {
				ended = append(ended, t.EndReason)
			}
		}
		return ended
	}, HaveExactElements(reasons))
}

// told is what events say of the lease or session, oldest first: type and reason.
func told(ctx context.Context, o client.Object) func(g Gomega) []string {
	return func(g Gomega) []string {
		var list eventsv1.EventList
		g.Expect(admin.List(ctx, &list, client.InNamespace(o.GetNamespace()))).To(Succeed())
		said := []string{}
		for _, e := range list.Items {
			if e.Regarding.UID == o.GetUID() {
				g.Expect(e.Series).To(BeNil())
				said = append(said, e.Type+" "+e.Reason)
			}
		}
		return said
	}
}

// write makes a transition of the lease as it is now, as whoever the client is of.
func write(ctx context.Context, c client.Client, l *v1alpha1.FencedLease, step protocol.Transition) error {
	var now v1alpha1.FencedLease
	if err := c.Get(ctx, client.ObjectKeyFromObject(l), &now); err != nil {
		return err
	}
	patch, _, err := protocol.Patch(&now, step)
	if err != nil {
		return err
	}
	return c.Status().Patch(ctx, &now, client.RawPatch(types.JSONPatchType, patch), client.FieldValidation("Strict"))
}

// steal ends the present term as an admin.
func steal(ctx context.Context, l *v1alpha1.FencedLease) error {
	return write(ctx, admin, l, protocol.End(read(ctx, l).Status.Token, v1alpha1.EndStolen, time.Now()))
}
