// SPDX-License-Identifier: Apache-2.0

package fence_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/goleak"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/protocol"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

// These tests run on a real control plane, with the CRD, the policies and the roles, so what they show holds with the
// real rules. It is started with the first test that needs it.
var plane struct {
	once  sync.Once
	env   *testenv.Env
	admin client.Client
	err   error
	mu    sync.Mutex
	last  int // number of the last namespace
}

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard()) // of controller-runtime
	code := m.Run()
	if plane.env != nil {
		if err := plane.env.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func startPlane() {
	ctx := context.Background()
	if plane.env, plane.err = testenv.Start(ctx, testenv.Options{}); plane.err != nil {
		return
	}
	for _, part := range []string{"namespace", "crd", "policy", "rbac"} {
		if plane.err = plane.env.Apply(ctx, "../config/"+part); plane.err != nil {
			return
		}
	}
	s := runtime.NewScheme()
	plane.err = errors.Join(scheme.AddToScheme(s), v1alpha1.AddToScheme(s))
	if plane.err != nil {
		return
	}
	plane.admin, plane.err = client.New(plane.env.Config(), client.Options{Scheme: s})
}

// world is a namespace of the control plane, with the service account "app" which may contend for its leases.
type world struct {
	env       *testenv.Env
	admin     client.Client
	namespace string
}

func newWorld(ctx context.Context) (*world, error) {
	plane.once.Do(startPlane)
	if plane.err != nil {
		return nil, plane.err
	}
	plane.mu.Lock()
	plane.last++
	w := &world{env: plane.env, admin: plane.admin, namespace: fmt.Sprintf("shop-%d", plane.last)}
	plane.mu.Unlock()
	err := w.admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}})
	if err != nil {
		return nil, err
	}
	return w, w.admin.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "contender", Namespace: w.namespace},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "fencedlease-contender"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "app", Namespace: w.namespace}},
	})
}

func theWorld(t *testing.T) *world {
	t.Helper()
	w, err := newWorld(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// pod is the configuration of a process in a Pod of that name.
func (w *world) pod(t *testing.T, name string) *rest.Config {
	t.Helper()
	cfg, _, err := w.env.Pod(t.Context(), w.namespace, "app", name)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// session opens a session, which is closed with the test.
func (w *world) session(t *testing.T, cfg *rest.Config, o fence.Options) *fence.Session {
	t.Helper()
	o.Namespace = w.namespace
	s, err := fence.NewSession(t.Context(), cfg, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(context.Background()) })
	return s
}

// lease creates a lease, and initialises it as the controller would.
func (w *world) lease(ctx context.Context, name string) error {
	l := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: w.namespace}}
	if err := w.admin.Create(ctx, l); err != nil {
		return err
	}
	_, err := w.do(ctx, name, func(*v1alpha1.FencedLease) protocol.Transition { return protocol.Initialise(time.Now()) })
	return err
}

func (w *world) mustLease(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := w.lease(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
}

// do makes a transition of a lease with the rights of the cluster's admin.
func (w *world) do(ctx context.Context, name string, f func(*v1alpha1.FencedLease) protocol.Transition) (*v1alpha1.FencedLease, error) {
	l, err := w.get(ctx, name)
	if err != nil {
		return nil, err
	}
	patch, _, err := protocol.Patch(l, f(l))
	if err != nil {
		return nil, err
	}
	return l, w.admin.Status().Patch(ctx, l, client.RawPatch(types.JSONPatchType, patch))
}

func (w *world) get(ctx context.Context, name string) (*v1alpha1.FencedLease, error) {
	l := &v1alpha1.FencedLease{}
	return l, w.admin.Get(ctx, types.NamespacedName{Namespace: w.namespace, Name: name}, l)
}

func (w *world) mustGet(t *testing.T, name string) *v1alpha1.FencedLease {
	t.Helper()
	l, err := w.get(context.Background(), name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// waiter is the session as it stands in line for the lease, once it does.
func (w *world) waiter(t *testing.T, s *fence.Session, lease string) v1alpha1.Contender {
	t.Helper()
	var c v1alpha1.Contender
	eventually(t, 10*time.Second, "session "+s.Name()+" waits for "+lease, func() bool {
		object := &coordinationv1.Lease{}
		if err := w.admin.Get(t.Context(), types.NamespacedName{Namespace: w.namespace, Name: s.Name()}, object); err != nil {
			t.Fatal(err)
		}
		parsed, err := protocol.ParseSession(object)
		if err != nil {
			t.Fatal(err)
		}
		c = parsed.Request(parsed.Wants[lease])
		return c.Ticket > 0
	})
	return c
}

func eventually(t *testing.T, most time.Duration, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(most); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", most, what)
		}
	}
}

func mustAcquire(t *testing.T, s *fence.Session, lease string) *fence.Held {
	t.Helper()
	held, err := s.Acquire(t.Context(), lease)
	if err != nil {
		t.Fatal(err)
	}
	return held
}

// result is how an Acquire in the background ended.
type result struct {
	held *fence.Held
	err  error
	at   time.Time
}

func acquire(ctx context.Context, s *fence.Session, lease string) <-chan result {
	done := make(chan result, 1)
	go func() {
		held, err := s.Acquire(ctx, lease)
		done <- result{held, err, time.Now()}
	}()
	return done
}

// throughProxy is a configuration that goes through a proxy, which is closed with the test.
func throughProxy(t *testing.T, cfg *rest.Config) (*rest.Config, *testenv.Proxy) {
	t.Helper()
	p, err := testenv.NewProxy(strings.TrimPrefix(cfg.Host, "https://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p.Config(cfg), p
}

// before calls f before the first request of that method is sent to a lease.
func before(cfg *rest.Config, method string, f func()) {
	var once sync.Once
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Method == method && strings.Contains(r.URL.Path, "/fencedleases/") {
				once.Do(f)
			}
			return next.RoundTrip(r)
		})
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestHandoverWithoutController(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	a := w.session(t, w.pod(t, "a"), fence.Options{})
	b := w.session(t, w.pod(t, "b"), fence.Options{})

	object := &coordinationv1.Lease{}
	if err := w.admin.Get(t.Context(), types.NamespacedName{Namespace: w.namespace, Name: a.Name()}, object); err != nil {
		t.Fatal(err)
	}
	if owners := object.OwnerReferences; len(owners) != 1 || owners[0].Name != "a" || owners[0].BlockOwnerDeletion != nil ||
		string(owners[0].UID) != object.Annotations[v1alpha1.PodUIDAnnotation] || len(object.Finalizers) != 0 {
		t.Errorf("session %+v", object.ObjectMeta)
	}

	first := mustAcquire(t, a, "orders")
	_, err := b.TryAcquire(t.Context(), "orders")
	held := &fence.HeldError{}
	if !errors.As(err, &held) || held.Token != first.Token() || held.Phase != v1alpha1.PhaseHeld {
		t.Fatalf("TryAcquire of a held lease: %v", err)
	}
	waiting := acquire(t.Context(), b, "orders")
	next := w.waiter(t, b, "orders")
	if _, err := w.do(t.Context(), "orders", func(*v1alpha1.FencedLease) protocol.Transition {
		return protocol.Queue([]v1alpha1.Contender{next}, 1)
	}); err != nil {
		t.Fatal(err)
	}
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := <-waiting
	if second.err != nil || second.held.Token() != first.Token()+1 {
		t.Fatalf("the next in line: %+v", second)
	}
	if err := b.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := w.mustGet(t, "orders")
	if l.Status.Phase != v1alpha1.PhaseAvailable || len(l.Status.Terms) != 2 || l.Status.Handovers != 2 {
		t.Errorf("status %+v", l.Status)
	}
	// Available again, and no controller: whoever waits takes it himself.
	if third := mustAcquire(t, a, "orders"); third.Token() != first.Token()+2 {
		t.Errorf("token %d", third.Token())
	}
}

func TestLostAcquireAnswerReturnsThatToken(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	cfg, proxy := throughProxy(t, w.pod(t, "a"))
	before(cfg, http.MethodPatch, func() {
		proxy.SwallowAnswers()
		time.AfterFunc(time.Second, proxy.Pass)
	})
	s := w.session(t, cfg, fence.Options{})
	start := w.mustGet(t, "orders").Status
	held := mustAcquire(t, s, "orders")
	if got := w.mustGet(t, "orders").Status; int64(held.Token()) != start.Token+1 || got.Token != start.Token+1 || got.Handovers != start.Handovers+1 {
		t.Errorf("returned %d; status %+v after token %d", held.Token(), got, start.Token)
	}
}

func TestAcquireThatLandsLate(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	cfg := w.pod(t, "a")
	before(cfg, http.MethodPatch, func() {
		if err := w.env.Etcd.Pause(); err != nil {
			t.Error(err)
		}
		time.AfterFunc(6*time.Second, func() { _ = w.env.Etcd.Resume() }) // the call gives up after five
	})
	s := w.session(t, cfg, fence.Options{TTL: 15 * time.Second})
	start := w.mustGet(t, "orders").Status
	held := mustAcquire(t, s, "orders")
	if got := w.mustGet(t, "orders").Status; int64(held.Token()) != start.Token+1 || got.Token != start.Token+1 || got.Handovers != start.Handovers+1 {
		t.Errorf("returned %d; status %+v after token %d", held.Token(), got, start.Token)
	}
}

func TestBlackHoleEndsTheWorkBeforeTheTTL(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	cfg, proxy := throughProxy(t, w.pod(t, "a"))
	const ttl = 3 * time.Second
	s := w.session(t, cfg, fence.Options{TTL: ttl})
	ctx := mustAcquire(t, s, "orders").Context()
	proxy.BlackHole()
	start := time.Now()
	<-ctx.Done()
	if d := time.Since(start); d > ttl {
		t.Errorf("the work ended %s after the connection was cut", d)
	}
	if cause := context.Cause(ctx); !errors.Is(cause, fence.ErrLost) || !strings.Contains(cause.Error(), "not renewed") {
		t.Errorf("cause %v", cause)
	}
	if _, err := s.TryAcquire(t.Context(), "orders"); !errors.Is(err, fence.ErrLost) {
		t.Errorf("a lost session acquires: %v", err)
	}
	proxy.Pass()
	eventually(t, 20*time.Second, "the lost session is deleted", func() bool {
		return apierrors.IsNotFound(w.admin.Get(t.Context(), types.NamespacedName{Namespace: w.namespace, Name: s.Name()}, &coordinationv1.Lease{}))
	})
}

func TestShortPartitionsAreSurvived(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	cfg, proxy := throughProxy(t, w.pod(t, "a"))
	s := w.session(t, cfg, fence.Options{TTL: 6 * time.Second})
	held := mustAcquire(t, s, "orders")
	for _, fault := range []func(){proxy.BlackHole, proxy.SwallowAnswers, proxy.Hold, proxy.Drop} {
		fault()
		select {
		case <-held.Context().Done():
			t.Fatalf("lost: %v", held.Err())
		case <-time.After(2 * time.Second):
		}
		proxy.Pass()
		renewed := time.NewTimer(3 * time.Second)
		select {
		case <-held.Context().Done():
			t.Fatalf("lost: %v", held.Err())
		case <-renewed.C:
		}
	}
	if err := held.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestSameIdentityIsTwoSessions(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	cfg := w.pod(t, "a")
	one, two := w.session(t, cfg, fence.Options{Identity: "same"}), w.session(t, cfg, fence.Options{Identity: "same"})
	if one.Name() == two.Name() {
		t.Fatal("they share an object")
	}
	held := mustAcquire(t, one, "orders")
	if _, err := two.TryAcquire(t.Context(), "orders"); !errors.Is(err, fence.ErrHeld) {
		t.Errorf("the second: %v", err)
	}
	if err := two.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := held.Err(); err != nil {
		t.Errorf("the end of one is the end of the other: %v", err)
	}
}

func TestSharedRateLimitDelaysNoRenewal(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	cfg := w.pod(t, "a")
	cfg.QPS, cfg.Burst = 0.001, 1
	cfg.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(0.001, 1)
	cfg.RateLimiter.Accept() // the application has used it up
	s := w.session(t, cfg, fence.Options{TTL: 2 * time.Second})
	held := mustAcquire(t, s, "orders")
	select {
	case <-held.Context().Done():
		t.Errorf("lost: %v", held.Err())
	case <-time.After(5 * time.Second):
	}
}

func TestNamesAndIdentities(t *testing.T) {
	w := theWorld(t)
	cfg := w.pod(t, "a")
	long := strings.TrimSuffix(strings.Repeat(strings.Repeat("a", 62)+".", 4)+"b", ".")
	long = (long + strings.Repeat("c", 253))[:253]
	identities := []string{"a", "a-1", "ends with space ", "Ωμέγα", "🦀", "a/b:c_d\"'\\", strings.Repeat("Ж", 1024)}
	for i, identity := range identities {
		name := fmt.Sprintf("lease-%d", i)
		if i == 0 {
			name = long
		}
		w.mustLease(t, name)
		s := w.session(t, cfg, fence.Options{Identity: identity})
		held := mustAcquire(t, s, name)
		if got := w.mustGet(t, name).Status.Holder.Identity; got != identity {
			t.Errorf("identity %q is stored as %q", identity, got)
		}
		_, err := w.session(t, cfg, fence.Options{}).TryAcquire(t.Context(), name)
		if e := (&fence.HeldError{}); !errors.As(err, &e) || e.Identity != identity || e.Lease != name {
			t.Errorf("the second: %v", err)
		}
		if err := held.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestMissingRightsAreSaid(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	cfg, err := w.env.ServiceAccount(t.Context(), w.namespace, "nobody")
	if err != nil {
		t.Fatal(err)
	}
	_, err = fence.NewSession(t.Context(), cfg, fence.Options{Namespace: w.namespace})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "fencedlease-contender") {
		t.Errorf("without rights: %v", err)
	}
	_, err = fence.NewSession(t.Context(), w.env.Config(), fence.Options{Namespace: "no-such-namespace"})
	if !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), "create the namespace") {
		t.Errorf("without namespace: %v", err)
	}
	unreachable := w.env.Config()
	unreachable.Host = "https://127.0.0.1:1"
	_, err = fence.NewSession(t.Context(), unreachable, fence.Options{})
	if err == nil || !strings.Contains(err.Error(), "https://127.0.0.1:1") {
		t.Errorf("without cluster: %v", err)
	}
	s := w.session(t, w.pod(t, "a"), fence.Options{})
	if _, err := s.Acquire(t.Context(), "no-such-lease"); !apierrors.IsNotFound(err) {
		t.Errorf("without lease: %v", err)
	}
}

func TestWantOfALeaseThatMayNotBeHeldIsRefused(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders", "mine")
	// May hold "mine" only, but read all.
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "some", Namespace: w.namespace}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"fencedleases"}, Verbs: []string{"get", "list", "watch"}},
		{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"fencedleases/status"}, Verbs: []string{"patch"}, ResourceNames: []string{"mine"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get", "create", "update", "delete"}},
	}}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "some", Namespace: w.namespace},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "some"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "some", Namespace: w.namespace}},
	}
	if err := errors.Join(w.admin.Create(t.Context(), role), w.admin.Create(t.Context(), binding)); err != nil {
		t.Fatal(err)
	}
	cfg, err := w.env.ServiceAccount(t.Context(), w.namespace, "some")
	if err != nil {
		t.Fatal(err)
	}
	holder := w.session(t, w.pod(t, "a"), fence.Options{})
	mustAcquire(t, holder, "orders")
	s := w.session(t, cfg, fence.Options{})
	own := mustAcquire(t, s, "mine")
	if _, err := s.Acquire(t.Context(), "orders"); !apierrors.IsForbidden(err) {
		t.Errorf("waiting for a lease that it may not hold: %v", err)
	}
	if err := own.Err(); err != nil {
		t.Errorf("what it holds is gone: %v", err)
	}
}

func TestUnguardedWriteIsNoticed(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	s := w.session(t, w.pod(t, "a"), fence.Options{})
	held := mustAcquire(t, s, "orders")
	c := fence.NewClient(w.admin, held)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "stock", Namespace: w.namespace}}
	if err := c.Create(t.Context(), cm); !errors.Is(err, fence.ErrNotProtected) {
		t.Errorf("got %v", err)
	}
	if _, kept := cm.Annotations[v1alpha1.TokenAnnotation]; kept {
		t.Error("the caller's object keeps the token")
	}
}

func TestCloseLeavesNoGoroutine(t *testing.T) {
	w := theWorld(t)
	w.mustLease(t, "orders")
	cfg, _ := throughProxy(t, w.pod(t, "a")) // connections of its own
	present := goleak.IgnoreCurrent()
	for range 3 {
		s, err := fence.NewSession(t.Context(), cfg, fence.Options{Namespace: w.namespace})
		if err != nil {
			t.Fatal(err)
		}
		mustAcquire(t, s, "orders")
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	inProxy := goleak.IgnoreAnyFunction("github.com/fencedlease/fencedlease/internal/testenv.(*Proxy).accept")
	inLinks := goleak.IgnoreAnyFunction("github.com/fencedlease/fencedlease/internal/testenv.(*link).copy")
	goleak.VerifyNone(t, present, inProxy, inLinks)
}
