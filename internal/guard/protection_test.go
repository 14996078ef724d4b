// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// allow gives a user verbs on leases of the namespace: on one, or with no name on all.
func allow(ctx context.Context, namespace, user, verb string, names ...string) {
	GinkgoHelper()
	role := &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "r-"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{"fencedlease.dev"}, Resources: []string{"fencedleases"}, Verbs: []string{verb}, ResourceNames: names}},
	}
	Expect(admin.Create(ctx, role)).To(Succeed())
	Expect(admin.Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "b-"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
	})).To(Succeed())
}

var _ = Describe("Protection", func() {
	It("is declared with the verb protect on that lease, and the mark starts at its token", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "carol")
		token := grantTo(ctx, ns, "alice")
		o := configMap(ns, "o")
		Expect(admin.Create(ctx, o)).To(Succeed())
		declare := mergePatch("", leaseA, "orders", markA, "1")

		Expect(as("carol").Patch(ctx, o, declare)).To(beDenied(v1alpha1.ReasonVerbMissing))
		Expect(as("carol").Create(ctx, configMap(ns, "new", leaseA, "orders"))).To(beDenied(v1alpha1.ReasonVerbMissing))
		By("the verb on another lease")
		allow(ctx, ns, "carol", v1alpha1.VerbProtect, "other")
		Expect(as("carol").Patch(ctx, o, declare)).To(beDenied(v1alpha1.ReasonVerbMissing))
		By("the verb on this one, which takes no token")
		allow(ctx, ns, "carol", v1alpha1.VerbProtect, "orders")
		Eventually(func() error { return as("carol").Patch(ctx, o, declare) }).Should(Succeed())
		Expect(reread(ctx, o)).To(Equal(map[string]string{leaseA: "orders", markA: token}))
		Expect(as("carol").Create(ctx, configMap(ns, "new", leaseA, "orders"))).To(Succeed())
	})

	It("is declared by the shipped role for editors", func(ctx SpecContext) {
		ns := namespace(ctx)
		bind(ctx, ns, "erin", "edit")
		// kube-controller-manager aggregates roles when it comes to it.
		Eventually(func() error { return as("erin").Create(ctx, configMap(ns, "o", leaseA, "orders")) }).Should(Succeed())
		By("who may neither bypass nor unprotect")
		o := configMap(ns, "o")
		Expect(as("erin").Patch(ctx, o, mergePatch(set("1"), bypassA, "please"))).To(beDenied(v1alpha1.ReasonVerbMissing))
	})

	It("warns when the lease is missing, and when the object comes from a restore", func(ctx SpecContext) {
		ns := namespace(ctx)
		cfg := env.Config()
		heard := &warnings{}
		cfg.WarningHandlerWithContext = heard
		c := newClient(cfg)
		Expect(c.Create(ctx, configMap(ns, "early", leaseA, "later"))).To(Succeed())
		Expect(heard.texts).To(ConsistOf(ContainSubstring("does not exist")))
		heard.texts = nil
		restored := configMap(ns, "restored", leaseA, "orders", markA, "900719925474099")
		Expect(c.Create(ctx, restored)).To(Succeed())
		Expect(heard.texts).To(ConsistOf(ContainSubstring("spec.minToken")))
		Expect(reread(ctx, restored)[markA]).To(Equal(protocol.FormatToken(readLease(ctx, ns, "orders").Status.Token)))
	})

	It("is removed by annotation and verb together, and by neither alone", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "root")
		o := configMap(ns, "o")
		protected(ctx, o)
		token := grantTo(ctx, ns, "alice")
		allow(ctx, ns, "root", v1alpha1.VerbBypass, "orders")
		remove := func(more string) client.Patch {
			return client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"fencedlease.dev/lease":null`+more+`}}}`))
		}
		By("the verb without the annotation")
		Expect(as("root").Patch(ctx, o, remove(""))).To(beDenied(v1alpha1.ReasonProtectionKept))
		By("the holder's token")
		Expect(as("alice").Patch(ctx, o, remove(`,"fencedlease.dev/token":"`+token+`"`))).To(beDenied(v1alpha1.ReasonProtectionKept))
		By("the annotation without the verb")
		Expect(as("alice").Patch(ctx, o, remove(`,"fencedlease.dev/bypass":"x"`))).To(beDenied(v1alpha1.ReasonVerbMissing))
		By("PUT of an object without annotations at all")
		bare := configMap(ns, "o")
		Expect(as("alice").Update(ctx, bare)).To(beDenied(v1alpha1.ReasonProtectionKept))
		By("both")
		Expect(as("root").Patch(ctx, o, remove(`,"fencedlease.dev/bypass":"moving house"`))).To(Succeed())
		Expect(reread(ctx, o)).To(BeEmpty())
		Expect(as("alice").Patch(ctx, o, mergePatch(set("1")))).To(Succeed())
	})

	It("is pointed elsewhere with protect on the new lease besides, and is declared anew", func(ctx SpecContext) {
		ns := namespace(ctx, "root")
		createLease(ctx, ns, "billing", v1alpha1.FencedLeaseSpec{})
		billing := grant(ctx, ns, "billing", "bob", "")
		o := configMap(ns, "o")
		protected(ctx, o)
		allow(ctx, ns, "root", v1alpha1.VerbBypass, "orders")
		point := mergePatch("", leaseA, "billing", bypassA, "reorganisation", markA, "1")
		Expect(as("root").Patch(ctx, o, point)).To(beDenied(v1alpha1.ReasonVerbMissing))
		allow(ctx, ns, "root", v1alpha1.VerbProtect, "billing")
		Eventually(func() error { return as("root").Patch(ctx, o, point) }).Should(Succeed())
		Expect(reread(ctx, o)).To(Equal(map[string]string{leaseA: "billing", markA: billing}))
	})

	It("lets a write pass by bypass, which is consumed", func(ctx SpecContext) {
		ns := namespace(ctx, "root")
		o := configMap(ns, "o")
		protected(ctx, o)
		mark := reread(ctx, o)[markA]
		allow(ctx, ns, "root", v1alpha1.VerbBypass, "orders")
		Expect(as("root").Patch(ctx, o, mergePatch(set("1")))).To(beDenied(v1alpha1.ReasonTokenMissing))
		Expect(as("root").Patch(ctx, o, mergePatch(set("1"), bypassA, ""))).To(beDenied(v1alpha1.ReasonVerbMissing))
		Expect(as("root").Patch(ctx, o, mergePatch(set("1"), bypassA, "repair of the data"))).To(Succeed())
		Expect(reread(ctx, o)).To(Equal(map[string]string{leaseA: "orders", markA: mark}))
		Expect(owners(o)).NotTo(ContainSubstring(bypassA))
	})
})

var _ = Describe("A token", func() {
	It("is the holder's own: not another user's, and not another Pod's of the same account", func(ctx SpecContext) {
		ns := namespace(ctx, "mallory")
		mine, pod, err := env.Pod(ctx, ns, "worker", "worker-0")
		Expect(err).NotTo(HaveOccurred())
		sibling, _, err := env.Pod(ctx, ns, "worker", "worker-1")
		Expect(err).NotTo(HaveOccurred())
		outside, err := env.ServiceAccount(ctx, ns, "worker")
		Expect(err).NotTo(HaveOccurred())
		user := "system:serviceaccount:" + ns + ":worker"
		bind(ctx, ns, user, "writer")
		o := configMap(ns, "o")
		protected(ctx, o)
		token := grant(ctx, ns, "orders", user, pod.UID)

		patch := mergePatch(set("1"), tokenA, token)
		Expect(newClient(sibling).Patch(ctx, o, patch)).To(beDenied(v1alpha1.ReasonNotHolder))
		Expect(newClient(outside).Patch(ctx, o, patch)).To(beDenied(v1alpha1.ReasonNotHolder))
		Expect(as("mallory").Patch(ctx, o, patch)).To(beDenied(v1alpha1.ReasonNotHolder))
		Expect(newClient(mine).Patch(ctx, o, patch)).To(Succeed())
		Expect(reread(ctx, o)[markA]).To(Equal(token))
	})

	It("is whoever knows it where the lease does not bind it", func(ctx SpecContext) {
		ns := namespace(ctx, "mallory")
		createLease(ctx, ns, "open", v1alpha1.FencedLeaseSpec{TokenBinding: v1alpha1.TokenBindingNone})
		o := configMap(ns, "o", leaseA, "open")
		Expect(admin.Create(ctx, o)).To(Succeed())
		token := grant(ctx, ns, "open", "alice", "")
		Expect(as("mallory").Patch(ctx, o, mergePatch(set("1"), tokenA, token))).To(Succeed())
	})

	It("is not inherited by those who read the object and write it back", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "bystander")
		o := configMap(ns, "o")
		protected(ctx, o)
		token := grantTo(ctx, ns, "alice")
		Expect(as("alice").Patch(ctx, o, mergePatch(set("1"), tokenA, token))).To(Succeed())
		bystander := as("bystander")
		Expect(bystander.Get(ctx, client.ObjectKeyFromObject(o), o)).To(Succeed())
		o.Data["mine"] = "too"
		Expect(bystander.Update(ctx, o)).To(beDenied(v1alpha1.ReasonTokenMissing))
	})

	It("of a former holder is refused before and after the successor's first write", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "bob")
		o := configMap(ns, "o")
		protected(ctx, o)
		stale := grantTo(ctx, ns, "alice")
		Expect(as("alice").Patch(ctx, o, mergePatch(set("1"), tokenA, stale))).To(Succeed())
		token := grantTo(ctx, ns, "bob")
		Expect(as("alice").Patch(ctx, o, mergePatch(set("late"), tokenA, stale))).To(beDenied(v1alpha1.ReasonTokenStale))
		Expect(as("bob").Patch(ctx, o, mergePatch(set("2"), tokenA, token))).To(Succeed())
		Expect(as("alice").Patch(ctx, o, mergePatch(set("late"), tokenA, stale))).To(beDenied(v1alpha1.ReasonTokenStale))
		reread(ctx, o)
		Expect(o.Data).To(HaveKeyWithValue("k", "2"))
	})
})
