// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/prometheus/client_golang/prometheus"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/config"
	"github.com/fencedlease/fencedlease/internal/certs"
	"github.com/fencedlease/fencedlease/internal/guard"
	"github.com/fencedlease/fencedlease/internal/install"
	"github.com/fencedlease/fencedlease/internal/protocol"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

// These specs run the guard in front of a real API server: as in production, but in this process, under the
// manager's own account. Nobody plays the controller; leases change by the protocol's patches, by the cluster's admin.

var (
	env    *testenv.Env
	scheme = runtime.NewScheme()
	admin  client.Client
	// front stands between the API server and the guard, leases between the guard and its lease reader.
	front  *testenv.Proxy
	leases = &flakyLeases{}
)

func TestGuard(t *testing.T) {
	RegisterFailHandler(Fail)
	RunSpecs(t, "guard")
}

var _ = BeforeSuite(func(ctx SpecContext) {
	log.SetLogger(zap.New(zap.WriteTo(GinkgoWriter)))
	Expect(clientgoscheme.AddToScheme(scheme)).To(Succeed())
	Expect(v1alpha1.AddToScheme(scheme)).To(Succeed())
	var err error
	env, err = testenv.Start(ctx, testenv.Options{ControllerManager: true})
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func() error { return env.Stop() })
	admin = newClient(env.Config())
	Expect(env.Apply(ctx, "../../config/dev")).To(Succeed())
	_, err = env.Kubectl(ctx, "apply", "-f", "../../config/samples/report-crd.yaml")
	Expect(err).NotTo(HaveOccurred())
	createWriterRole(ctx)
	startGuard(ctx)
}, NodeTimeout(2*time.Minute))

// startGuard serves the guard behind front, and waits until the API server asks it.
func startGuard(ctx context.Context) {
	port, err := testenv.FreePort()
	Expect(err).NotTo(HaveOccurred())
	front, err = testenv.NewProxy(net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(front.Close)
	url := "https://" + front.Addr() + "/guard"
	Eventually(ctx, func() error {
		return admin.Patch(ctx, &admissionregistrationv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "fencedlease-guard"}},
			client.RawPatch(types.JSONPatchType, fmt.Appendf(nil, `[{"op":"replace","path":"/webhooks/0/clientConfig/url","value":%q}]`, url)))
	}).Should(Succeed())

	cfg, err := env.ServiceAccount(ctx, testenv.ManagerNamespace, testenv.ManagerAccount)
	Expect(err).NotTo(HaveOccurred())
	registry := prometheus.NewRegistry()
	source, err := certs.New(certs.Options{
		Client: newClient(cfg), Namespace: testenv.ManagerNamespace, Secret: "fencedlease-webhook-ca",
		Configuration: "fencedlease-guard", Hosts: []string{"127.0.0.1"}, Registerer: registry,
	})
	Expect(err).NotTo(HaveOccurred())
	checker, err := install.New(cfg, config.Files)
	Expect(err).NotTo(HaveOccurred())
	server := webhook.NewServer(webhook.Options{Host: "127.0.0.1", Port: port, TLSOpts: []func(*tls.Config){func(c *tls.Config) { c.GetCertificate = source.GetCertificate }}})
	server.Register("/guard", &admission.Webhook{Handler: newRealGuard(cfg, registry, checker)})

	running, stop := context.WithCancel(context.Background())
	DeferCleanup(stop)
	for _, start := range []func(context.Context) error{source.Start, checker.Start, server.Start} {
		go func() {
			defer GinkgoRecover()
			Expect(start(running)).To(Succeed())
		}()
	}
	Eventually(ctx, func() error { return errors.Join(source.Ready(nil), checker.Ready(nil), server.StartedChecker()(nil)) }).Should(Succeed())
	probe := configMap("default", "probe", v1alpha1.TokenAnnotation, "1")
	Eventually(ctx, func() error { return admin.Create(ctx, probe.DeepCopy(), client.DryRunAll) }).Should(beDenied(v1alpha1.ReasonNotProtected))
}

func newRealGuard(cfg *rest.Config, registry prometheus.Registerer, checker *install.Checker) *guard.Guard {
	m := guard.NewMetrics(registry)
	var err error
	leases.LeaseReader, err = guard.NewLeaseReader(cfg, m)
	Expect(err).NotTo(HaveOccurred())
	access, err := guard.NewAccessReviewer(cfg)
	Expect(err).NotTo(HaveOccurred())
	return guard.New(guard.Options{Leases: leases, Access: access, Metrics: m, Exempt: guard.DefaultExempt(), HasStatus: checker.HasStatus})
}

// flakyLeases is a lease reader that fails on demand.
type flakyLeases struct {
	guard.LeaseReader
	failures atomic.Int64 // how many reads are still to fail
}

func (f *flakyLeases) Lease(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	if f.failures.Add(-1) >= 0 {
		return nil, errors.New("the API server does not answer")
	}
	return f.LeaseReader.Lease(ctx, name)
}

func newClient(cfg *rest.Config) client.Client {
	GinkgoHelper()
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	Expect(err).NotTo(HaveOccurred())
	return c
}

// createWriterRole makes a role that may write all that is protected here, and nothing of leases.
func createWriterRole(ctx context.Context) {
	Expect(admin.Create(ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "writer"},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"*"}},
			{APIGroups: []string{"samples.fencedlease.dev"}, Resources: []string{"reports", "reports/status"}, Verbs: []string{"*"}},
		},
	})).To(Succeed())
}

// namespace makes a namespace with a lease "orders", and lets the users write in it.
func namespace(ctx context.Context, users ...string) string {
	GinkgoHelper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "shop-"}}
	Expect(admin.Create(ctx, ns)).To(Succeed())
	createLease(ctx, ns.Name, "orders", v1alpha1.FencedLeaseSpec{})
	for _, user := range users {
		bind(ctx, ns.Name, user, "writer")
	}
	return ns.Name
}

// bind gives a user a cluster role in the namespace.
func bind(ctx context.Context, namespace, user, role string) {
	GinkgoHelper()
	Expect(admin.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "b-"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
	})).To(Succeed())
}

func as(user string) client.Client {
	GinkgoHelper()
	return newClient(env.As(user))
}

func createLease(ctx context.Context, namespace, name string, spec v1alpha1.FencedLeaseSpec) {
	GinkgoHelper()
	spec.LeaseDurationSeconds = 15
	l := &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: spec}
	Expect(admin.Create(ctx, l)).To(Succeed())
	move(ctx, l, protocol.Initialise(time.Now()))
}

// move makes a transition of the lease, as the protocol writes it.
func move(ctx context.Context, l *v1alpha1.FencedLease, t protocol.Transition) {
	GinkgoHelper()
	patch, _, err := protocol.Patch(l, t)
	Expect(err).NotTo(HaveOccurred())
	Expect(admin.Status().Patch(ctx, l, client.RawPatch(types.JSONPatchType, patch))).To(Succeed())
}

func readLease(ctx context.Context, namespace, name string) *v1alpha1.FencedLease {
	GinkgoHelper()
	l := &v1alpha1.FencedLease{}
	Expect(admin.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, l)).To(Succeed())
	return l
}

// grantTo hands the lease "orders" to the user, outside Pods, and returns his token.
func grantTo(ctx context.Context, namespace, user string) string {
	GinkgoHelper()
	return grant(ctx, namespace, "orders", user, "")
}

func grant(ctx context.Context, namespace, name, user string, podUID types.UID) string {
	GinkgoHelper()
	free(ctx, namespace, name)
	l := readLease(ctx, namespace, name)
	move(ctx, l, protocol.Acquire(v1alpha1.Contender{
		Identity: "of-" + user, Session: "s", SessionUID: "session-uid", User: user, PodUID: podUID, Ticket: l.Status.Token + 1,
	}, time.Now()))
	return protocol.FormatToken(l.Status.Token)
}

// free ends the term of the lease, if there is one.
func free(ctx context.Context, namespace, name string) {
	GinkgoHelper()
	if l := readLease(ctx, namespace, name); l.Status.Holder != nil {
		move(ctx, l, protocol.End(l.Status.Token, v1alpha1.EndExpired, time.Now()))
	}
}

// configMap is one with annotations, given as pairs.
func configMap(namespace, name string, annotations ...string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: pairs(annotations)},
		Data:       map[string]string{"k": "0"},
	}
}

func pairs(annotations []string) map[string]string {
	if len(annotations) == 0 {
		return nil
	}
	m := map[string]string{}
	for i := 0; i < len(annotations); i += 2 {
		m[annotations[i]] = annotations[i+1]
	}
	return m
}

// report is the sample custom resource.
func report(namespace, name, text string, annotations ...string) *unstructured.Unstructured {
	r := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "samples.fencedlease.dev/v1", "kind": "Report",
		"metadata": map[string]any{"namespace": namespace, "name": name},
		"spec":     map[string]any{"text": text},
	}}
	r.SetAnnotations(pairs(annotations))
	return r
}

// protected makes an object and puts it under the lease "orders".
func protected(ctx context.Context, o client.Object) {
	GinkgoHelper()
	annotations := o.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[v1alpha1.LeaseAnnotation] = "orders"
	o.SetAnnotations(annotations)
	Expect(admin.Create(ctx, o)).To(Succeed())
}

// reread returns the annotations of the object as it is stored, which it reads anew.
func reread(ctx context.Context, o client.Object) map[string]string {
	GinkgoHelper()
	Expect(admin.Get(ctx, client.ObjectKeyFromObject(o), o)).To(Succeed())
	return o.GetAnnotations()
}

// present sets the token on an object, for a PUT.
func present(o client.Object, token string) {
	annotations := o.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[v1alpha1.TokenAnnotation] = token
	o.SetAnnotations(annotations)
}

// mergePatch is {"metadata":{"annotations":{…}}} with the given pairs, and more of the object.
func mergePatch(more string, annotations ...string) client.Patch {
	body := ""
	for i := 0; i < len(annotations); i += 2 {
		if i > 0 {
			body += ","
		}
		body += fmt.Sprintf("%q:%q", annotations[i], annotations[i+1])
	}
	return client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%s}}%s}`, body, more))
}

// set writes data.k, as a merge patch.
func set(value string) string { return fmt.Sprintf(`,"data":{"k":%q}`, value) }

// beDenied matches the guard's refusal for a reason.
func beDenied(reason v1alpha1.Reason) OmegaMatcher {
	return And(
		WithTransform(apierrors.IsForbidden, BeTrue()),
		WithTransform(causeOf, Equal(string(reason))),
	)
}

func causeOf(err error) string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil || len(status.Status().Details.Causes) == 0 {
		return fmt.Sprintf("no cause: %v", err)
	}
	return string(status.Status().Details.Causes[0].Type)
}
