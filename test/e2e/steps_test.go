// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/fence"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

// newNamespace makes a namespace whose service accounts may hold leases and write ConfigMaps.
func newNamespace(ctx context.Context) string {
	GinkgoHelper()
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "story-"}}
	Expect(admin.Create(ctx, namespace)).To(Succeed())
	for _, role := range []string{"fencedlease-contender", "edit"} {
		Expect(admin.Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: "system:serviceaccounts:" + namespace.Name}},
		})).To(Succeed())
	}
	return namespace.Name
}

// newLease makes a lease and waits until the controller has taken it up.
func newLease(ctx context.Context, namespace, name string, seconds int32) {
	GinkgoHelper()
	createLease(ctx, &v1alpha1.FencedLease{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec:       v1alpha1.FencedLeaseSpec{LeaseDurationSeconds: seconds},
	})
}

func createLease(ctx context.Context, lease *v1alpha1.FencedLease) {
	GinkgoHelper()
	Expect(admin.Create(ctx, lease)).To(Succeed())
	Eventually(leaseOf(ctx, lease.Namespace, lease.Name)).Should(HaveField("Status", Not(BeNil())))
}

// leaseOf reads the lease again and again, for Eventually.
func leaseOf(ctx context.Context, namespace, name string) func() (*v1alpha1.FencedLease, error) {
	return func() (*v1alpha1.FencedLease, error) {
		lease := &v1alpha1.FencedLease{}
		return lease, admin.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, lease)
	}
}

func statusOf(ctx context.Context, namespace, name string) v1alpha1.FencedLeaseStatus {
	GinkgoHelper()
	lease, err := leaseOf(ctx, namespace, name)()
	Expect(err).NotTo(HaveOccurred())
	Expect(lease.Status).NotTo(BeNil())
	return *lease.Status
}

// newConfigMap makes a ConfigMap, under the lease unless that is empty.
func newConfigMap(ctx context.Context, namespace, name, lease string) *corev1.ConfigMap {
	GinkgoHelper()
	object := configMap(namespace, name)
	if lease != "" {
		object.Annotations = map[string]string{v1alpha1.LeaseAnnotation: lease}
	}
	Expect(admin.Create(ctx, object)).To(Succeed())
	return configMap(namespace, name)
}

func configMap(namespace, name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
}

// stored is the ConfigMap as it is now.
func stored(ctx context.Context, object *corev1.ConfigMap) *corev1.ConfigMap {
	GinkgoHelper()
	found := &corev1.ConfigMap{}
	Expect(admin.Get(ctx, client.ObjectKeyFromObject(object), found)).To(Succeed())
	return found
}

// write sets data.value.
func write(ctx context.Context, by client.Client, object *corev1.ConfigMap, value string) error {
	patch := fmt.Sprintf(`{"data": {"value": %q}}`, value)
	return by.Patch(ctx, configMap(object.Namespace, object.Name), client.RawPatch(types.MergePatchType, []byte(patch)))
}

// writeWith sets data.value with the token, past the library.
func writeWith(ctx context.Context, by client.Client, object *corev1.ConfigMap, token, value string) error {
	patch := fmt.Sprintf(`{"metadata": {"annotations": {%q: %q}}, "data": {"value": %q}}`, v1alpha1.TokenAnnotation, token, value)
	return by.Patch(ctx, configMap(object.Namespace, object.Name), client.RawPatch(types.MergePatchType, []byte(patch)))
}

func clientFor(cfg *rest.Config) client.Client {
	GinkgoHelper()
	c, err := client.New(cfg, client.Options{Scheme: scheme()})
	Expect(err).NotTo(HaveOccurred())
	return c
}

// contender is a service account of the namespace.
func contender(ctx context.Context, namespace, name string) *rest.Config {
	GinkgoHelper()
	cfg, err := env.ServiceAccount(ctx, namespace, name)
	Expect(err).NotTo(HaveOccurred())
	return cfg
}

// newSession makes a session that lasts until the story ends.
func newSession(ctx context.Context, cfg *rest.Config, options fence.Options) *fence.Session {
	GinkgoHelper()
	session, err := fence.NewSession(ctx, cfg, options)
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(func(ctx SpecContext) {
		_ = session.Close(ctx) // a story may have closed, expired or cut it off before
	}, NodeTimeout(10*time.Second))
	return session
}

func decimal(token fence.Token) string { return strconv.FormatInt(int64(token), 10) }

// newWorker starts examples/worker on the lease "orders" and the ConfigMaps "protected" and "unprotected".
func newWorker(ctx context.Context, cfg *rest.Config, namespace, name string, args ...string) *testenv.Process {
	GinkgoHelper()
	kubeconfig := filepath.Join(GinkgoT().TempDir(), name+".kubeconfig")
	Expect(testenv.WriteKubeconfig(cfg, kubeconfig)).To(Succeed())
	process := &testenv.Process{
		Name: name, Path: worker,
		Args:    append([]string{"--kubeconfig=" + kubeconfig, "--namespace=" + namespace, "--name=" + name, "--protected=protected", "--every=100ms"}, args...),
		LogPath: filepath.Join(env.LogDir(), namespace+"-"+name+".log"),
	}
	Expect(process.Start(ctx)).To(Succeed())
	DeferCleanup(process.Kill)
	return process
}

// holderIs waits until the lease is held under that identity, and returns the status then.
func holderIs(ctx context.Context, namespace, lease, identity string) v1alpha1.FencedLeaseStatus {
	GinkgoHelper()
	var found v1alpha1.FencedLeaseStatus
	Eventually(func() (string, error) {
		lease, err := leaseOf(ctx, namespace, lease)()
		if err != nil || lease.Status == nil || lease.Status.Holder == nil {
			return "", err
		}
		found = *lease.Status
		return found.Holder.Identity, nil
	}).Should(Equal(identity))
	return found
}

// killManagers ends both managers, and starts them again when the story ends.
func killManagers() {
	GinkgoHelper()
	for _, manager := range operator.Managers {
		Expect(manager.Kill()).To(Succeed())
	}
	DeferCleanup(startManagers, NodeTimeout(time.Minute))
}

// startManagers starts both again, at once, and waits until they are ready. What runs already is left alone.
func startManagers(ctx SpecContext) error {
	started := make(chan error)
	for _, manager := range operator.Managers {
		go func() {
			select {
			case <-manager.Exited():
				started <- manager.Start(ctx)
			default:
				started <- nil
			}
		}()
	}
	return errors.Join(<-started, <-started)
}

// logOf reads what the process has printed so far, for Eventually.
func logOf(process *testenv.Process) func() (string, error) {
	return func() (string, error) {
		text, err := os.ReadFile(process.LogPath)
		return string(text), err
	}
}
