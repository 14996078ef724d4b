// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
	"github.com/fencedlease/fencedlease/internal/testenv"
)

var _ = Describe("The cluster itself", func() {
	It("takes the owner from a protected object, when the owner is deleted and leaves it behind", func(ctx SpecContext) {
		ns := namespace(ctx)
		owner := configMap(ns, "owner")
		Expect(admin.Create(ctx, owner)).To(Succeed())
		o := configMap(ns, "o")
		o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID}}
		protected(ctx, o)
		Expect(admin.Delete(ctx, owner, client.PropagationPolicy(metav1.DeletePropagationOrphan))).To(Succeed())
		Eventually(ctx, func() error { return admin.Get(ctx, client.ObjectKeyFromObject(owner), owner) }).WithTimeout(30 * time.Second).Should(WithTransform(apierrors.IsNotFound, BeTrue()))
		Expect(reread(ctx, o)).To(HaveKeyWithValue(leaseA, "orders"))
		Expect(o.OwnerReferences).To(BeEmpty())
	})

	It("deletes a namespace with protected objects and finalizers, whose lease is gone", func(ctx SpecContext) {
		ns := namespace(ctx)
		o := configMap(ns, "o")
		o.Finalizers = []string{"example.com/held"}
		protected(ctx, o)
		Expect(admin.Delete(ctx, &v1alpha1.FencedLease{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "orders"}})).To(Succeed())
		Expect(admin.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}})).To(Succeed())
		Eventually(ctx, func() *metav1.Time { reread(ctx, o); return o.DeletionTimestamp }).WithTimeout(30 * time.Second).ShouldNot(BeNil())
		By("data along with the finalizer")
		o.Finalizers, o.Data["k"] = nil, "stolen"
		Expect(admin.Update(ctx, o)).To(beDenied(v1alpha1.ReasonLeaseNotFound))
		By("the finalizer alone")
		Expect(admin.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))).To(Succeed())
		Eventually(ctx, func() error {
			return admin.Get(ctx, client.ObjectKey{Name: ns}, &corev1.Namespace{})
		}).WithTimeout(time.Minute).Should(WithTransform(apierrors.IsNotFound, BeTrue()))
	})

	It("does not let others touch owners and finalizers of a living object", func(ctx SpecContext) {
		ns := namespace(ctx, "bystander")
		o := configMap(ns, "o")
		protected(ctx, o)
		for _, patch := range []string{
			`{"metadata":{"finalizers":["example.com/mine"]}}`,
			`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"x","uid":"y"}]}}`,
		} {
			Expect(as("bystander").Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(patch)))).To(beDenied(v1alpha1.ReasonTokenMissing))
		}
	})
})

var _ = Describe("When something does not answer", Serial, func() {
	It("answers 503 while the lease cannot be read, and client-go repeats the write", func(ctx SpecContext) {
		ns := namespace(ctx, "alice")
		o := configMap(ns, "o")
		protected(ctx, o)
		token := grantTo(ctx, ns, "alice")
		patch := mergePatch(set("1"), tokenA, token)
		raw, err := patch.Data(o)
		Expect(err).NotTo(HaveOccurred())
		clientset, err := kubernetes.NewForConfig(env.As("alice"))
		Expect(err).NotTo(HaveOccurred())

		leases.failures.Store(1)
		err = clientset.CoreV1().RESTClient().Patch(types.MergePatchType).MaxRetries(0).
			Namespace(ns).Resource("configmaps").Name("o").Body(raw).Do(ctx).Error()
		Expect(apierrors.IsServiceUnavailable(err)).To(BeTrue(), "%v", err)
		Expect(causeOf(err)).To(Equal(string(v1alpha1.ReasonLeaseUnreadable)))
		seconds, ok := apierrors.SuggestsClientDelay(err)
		Expect(ok).To(BeTrue())
		Expect(seconds).To(Equal(1))

		leases.failures.Store(2)
		Expect(as("alice").Patch(ctx, o, patch)).To(Succeed())
		Expect(reread(ctx, o)[markA]).To(Equal(token))
	})

	for name, fault := range map[string]func(){"refuses": func() { front.Drop() }, "is silent": func() { front.BlackHole() }} {
		It("fails protected writes and no others, when the webhook "+name, func(ctx SpecContext) {
			ns := namespace(ctx, "alice")
			alice := as("alice")
			o, plain := configMap(ns, "o"), configMap(ns, "plain")
			protected(ctx, o)
			Expect(admin.Create(ctx, plain)).To(Succeed())
			DeferCleanup(func() { front.Pass() })
			fault()

			Expect(alice.Patch(ctx, plain, mergePatch(set("1")))).To(Succeed())
			Expect(alice.Create(ctx, configMap(ns, "another"))).To(Succeed())
			Expect(alice.Delete(ctx, plain)).To(Succeed())
			By("the life of leases goes on")
			token := grantTo(ctx, ns, "alice")
			By("a protected write fails closed, and in time")
			start := time.Now()
			Expect(alice.Patch(ctx, o, mergePatch(set("1"), tokenA, token))).To(MatchError(ContainSubstring("guard.fencedlease.dev")))
			Expect(time.Since(start)).To(BeNumerically("<", 10*time.Second))

			front.Pass()
			Eventually(ctx, func() error { return alice.Patch(ctx, o, mergePatch(set("1"), tokenA, token)) }).WithTimeout(30 * time.Second).Should(Succeed())
		})
	}
})

var _ = Describe("The guard's certificate", Serial, func() {
	It("is trusted again within seconds when its authority is taken away", func(ctx SpecContext) {
		ns := namespace(ctx, "alice")
		o := configMap(ns, "o")
		protected(ctx, o)
		token := grantTo(ctx, ns, "alice")
		bundle := caBundle(ctx)
		Expect(admin.Delete(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: testenv.ManagerNamespace, Name: "fencedlease-webhook-ca"}})).To(Succeed())
		Eventually(ctx, func() string { return caBundle(ctx) }).WithTimeout(30 * time.Second).ShouldNot(Equal(bundle))
		front.Drop() // connections that were trusted before would live on
		front.Pass()
		Eventually(ctx, func() error { return as("alice").Patch(ctx, o, mergePatch(set("1"), tokenA, token)) }).WithTimeout(20 * time.Second).Should(Succeed())
	})
})

func caBundle(ctx context.Context) string {
	GinkgoHelper()
	var c admissionregistrationv1.MutatingWebhookConfiguration
	Expect(admin.Get(ctx, client.ObjectKey{Name: "fencedlease-guard"}, &c)).To(Succeed())
	return string(c.Webhooks[0].ClientConfig.CABundle)
}

var _ = Describe("Two holders at the same instant", func() {
	It("never leave the older token's write over the newer one's", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "bob")
		alice, bob := as("alice"), as("bob")
		const rounds = 25
		for round := range rounds {
			o := configMap(ns, "o-"+strconv.Itoa(round))
			protected(ctx, o)
			stale := grantTo(ctx, ns, "alice")
			var token string
			var wg sync.WaitGroup
			write := func(c client.Client, who, token string, n int) {
				for i := range n {
					err := c.Patch(ctx, configMap(ns, o.Name), mergePatch(set(fmt.Sprintf("%s-%d", who, i)), tokenA, token))
					if err != nil && !apierrors.IsForbidden(err) {
						AddReportEntry("error", err.Error())
					}
				}
			}
			wg.Go(func() { write(alice, "alice", stale, 8) })
			wg.Go(func() {
				defer GinkgoRecover()
				token = grantTo(ctx, ns, "bob")
				write(bob, "bob", token, 1)
			})
			wg.Wait()
			Expect(reread(ctx, o)).To(HaveKeyWithValue(markA, token))
			Expect(o.Data).To(HaveKeyWithValue("k", "bob-0"), "round %d", round)
		}
	})

	It("never leave a smaller mark than the object had", func(ctx SpecContext) {
		// Many holders in turn, all of whom keep writing, while marks are watched: they only rise.
		ns := namespace(ctx, "alice")
		o := configMap(ns, "o")
		protected(ctx, o)
		watched, stop := context.WithCancel(ctx)
		defer stop()
		var wg sync.WaitGroup
		falls := watchFalls(watched, &wg, o)
		for range 10 {
			token := grantTo(ctx, ns, "alice")
			wg.Go(func() {
				for range 5 {
					_ = as("alice").Patch(ctx, configMap(ns, "o"), mergePatch(set(token), tokenA, token))
				}
			})
		}
		last := protocol.FormatToken(readLease(ctx, ns, "orders").Status.Token)
		Eventually(ctx, func() string { return reread(ctx, o)[markA] }).Should(Equal(last))
		stop()
		wg.Wait()
		Expect(*falls).To(BeEmpty())
	})
})

// watchFalls watches the mark of an object until ctx ends, and notes where it fell.
func watchFalls(ctx context.Context, wg *sync.WaitGroup, o *corev1.ConfigMap) *[]string {
	GinkgoHelper()
	clientset, err := kubernetes.NewForConfig(env.Config())
	Expect(err).NotTo(HaveOccurred())
	w, err := clientset.CoreV1().ConfigMaps(o.Namespace).Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + o.Name})
	Expect(err).NotTo(HaveOccurred())
	falls := &[]string{}
	wg.Go(func() {
		defer w.Stop()
		last := int64(0)
		for event := range w.ResultChan() {
			seen, ok := event.Object.(*corev1.ConfigMap)
			if !ok {
				continue
			}
			mark, err := protocol.ParseToken(seen.Annotations[markA])
			if err != nil || mark < last || seen.Annotations[tokenA] != "" {
				*falls = append(*falls, fmt.Sprintf("%d after %d: %v", mark, last, seen.Annotations))
			}
			last = mark
		}
	})
	return falls
}
