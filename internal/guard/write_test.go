// SPDX-License-Identifier: Apache-2.0

package guard_test

import (
	"context"
	"fmt"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

const (
	leaseA  = v1alpha1.LeaseAnnotation
	tokenA  = v1alpha1.TokenAnnotation
	markA   = v1alpha1.AcceptedTokenAnnotation
	bypassA = v1alpha1.BypassAnnotation
)

// way is one way to write data.k of a ConfigMap, with a token or, when it is empty, without.
type way func(ctx context.Context, c client.Client, o *corev1.ConfigMap, value, token string) error

var ways = map[string]way{
	"PUT": func(ctx context.Context, c client.Client, o *corev1.ConfigMap, value, token string) error {
		if err := c.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
			return err
		}
		o.Data["k"] = value
		if token != "" {
			present(o, token)
		}
		return c.Update(ctx, o)
	},
	"merge patch": func(ctx context.Context, c client.Client, o *corev1.ConfigMap, value, token string) error {
		return c.Patch(ctx, o, mergePatch(set(value), tokenPair(token)...))
	},
	"strategic merge patch": func(ctx context.Context, c client.Client, o *corev1.ConfigMap, value, token string) error {
		raw, err := mergePatch(set(value), tokenPair(token)...).Data(o)
		if err != nil {
			return err
		}
		return c.Patch(ctx, o, client.RawPatch(types.StrategicMergePatchType, raw))
	},
	"JSON patch": func(ctx context.Context, c client.Client, o *corev1.ConfigMap, value, token string) error {
		ops := fmt.Sprintf(`{"op":"replace","path":"/data/k","value":%q}`, value)
		if token != "" {
			ops += fmt.Sprintf(`,{"op":"add","path":"/metadata/annotations/fencedlease.dev~1token","value":%q}`, token)
		}
		return c.Patch(ctx, o, client.RawPatch(types.JSONPatchType, []byte("["+ops+"]")))
	},
	"server-side apply": func(ctx context.Context, c client.Client, o *corev1.ConfigMap, value, token string) error {
		return apply(ctx, c, configMap(o.Namespace, o.Name, append(tokenPair(token), leaseA, "orders")...), value, "applier", client.ForceOwnership)
	},
}

func tokenPair(token string) []string {
	if token == "" {
		return nil
	}
	return []string{tokenA, token}
}

// apply applies the ConfigMap with a value, server-side.
func apply(ctx context.Context, c client.Client, o *corev1.ConfigMap, value, manager string, opts ...client.ApplyOption) error {
	o.Data = map[string]string{"k": value}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return err
	}
	u := &unstructured.Unstructured{Object: fields}
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	return c.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), append(opts, client.FieldOwner(manager))...)
}

// owners are the managed fields of an object, as text.
func owners(o client.Object) string {
	var all strings.Builder
	for _, entry := range o.GetManagedFields() {
		all.Write(entry.FieldsV1.GetRawBytes())
	}
	return all.String()
}

var _ = Describe("A write to a protected object", func() {
	for name, write := range ways {
		Context("by "+name, func() {
			It("passes with the current token, which is consumed and becomes the mark", func(ctx SpecContext) {
				ns := namespace(ctx, "alice")
				o := configMap(ns, "o")
				protected(ctx, o)
				token := grantTo(ctx, ns, "alice")
				Expect(write(ctx, as("alice"), o, "1", token)).To(Succeed())
				Expect(reread(ctx, o)).To(Equal(map[string]string{leaseA: "orders", markA: token}))
				Expect(o.Data).To(HaveKeyWithValue("k", "1"))
				Expect(owners(o)).NotTo(Or(ContainSubstring("f:"+tokenA), ContainSubstring("f:"+markA)))
			})

			It("is refused without a token, and with an old one", func(ctx SpecContext) {
				ns := namespace(ctx, "alice", "bob")
				o := configMap(ns, "o")
				protected(ctx, o)
				stale := grantTo(ctx, ns, "alice")
				grantTo(ctx, ns, "bob")
				Expect(write(ctx, as("alice"), o, "1", "")).To(beDenied(v1alpha1.ReasonTokenMissing))
				Expect(write(ctx, as("alice"), o, "1", stale)).To(beDenied(v1alpha1.ReasonTokenStale))
				reread(ctx, o)
				Expect(o.Data).To(HaveKeyWithValue("k", "0"))
			})
		})
	}

	It("may be its creation, by the holder and by nobody else", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "bob")
		token := grantTo(ctx, ns, "alice")
		o := configMap(ns, "o", leaseA, "orders", tokenA, token)
		Expect(as("bob").Create(ctx, o.DeepCopy())).To(beDenied(v1alpha1.ReasonNotHolder))
		Expect(as("alice").Create(ctx, o)).To(Succeed())
		Expect(reread(ctx, o)).To(Equal(map[string]string{leaseA: "orders", markA: token}))
	})

	It("is refused for each reason, with the reason as its cause", func(ctx SpecContext) {
		ns := namespace(ctx, "alice")
		alice := as("alice")
		o := configMap(ns, "o")
		protected(ctx, o)
		orphan := configMap(ns, "orphan", leaseA, "missing")
		Expect(admin.Create(ctx, orphan)).To(Succeed())
		plain := configMap(ns, "plain")
		Expect(admin.Create(ctx, plain)).To(Succeed())
		token := grantTo(ctx, ns, "alice")
		patch := func(o *corev1.ConfigMap, annotations ...string) error {
			return alice.Patch(ctx, o, mergePatch(set("1"), annotations...))
		}
		for _, malformed := range []string{"", "abc", "-1", " 7", "7.0", "1e3", "0x10", "07", "9007199254740992", "99999999999999999999"} {
			Expect(patch(o, tokenA, malformed)).To(beDenied(v1alpha1.ReasonTokenInvalid), "token %q", malformed)
		}
		Expect(patch(o, tokenA, "1"+token)).To(beDenied(v1alpha1.ReasonTokenUnknown))
		Expect(patch(orphan, tokenA, token)).To(beDenied(v1alpha1.ReasonLeaseNotFound))
		Expect(patch(plain, tokenA, token)).To(beDenied(v1alpha1.ReasonNotProtected))
		Expect(patch(plain, bypassA, "why not")).To(beDenied(v1alpha1.ReasonNotProtected))
		Expect(patch(o, bypassA, "repair")).To(beDenied(v1alpha1.ReasonVerbMissing))
		Expect(patch(o, tokenA, token, leaseA, "other")).To(beDenied(v1alpha1.ReasonProtectionKept))
		free(ctx, ns, "orders")
		Expect(patch(o, tokenA, token)).To(beDenied(v1alpha1.ReasonNotHeld))
	})

	It("passes with a warning where the lease only warns, and leaves the mark", func(ctx SpecContext) {
		ns := namespace(ctx, "alice")
		createLease(ctx, ns, "lenient", v1alpha1.FencedLeaseSpec{Enforcement: v1alpha1.EnforcementWarn})
		o := configMap(ns, "o", leaseA, "lenient")
		Expect(admin.Create(ctx, o)).To(Succeed())
		mark := reread(ctx, o)[markA]
		cfg := env.As("alice")
		heard := &warnings{}
		cfg.WarningHandlerWithContext = heard
		Expect(newClient(cfg).Patch(ctx, o, mergePatch(set("1"), tokenA, "1"))).To(Succeed())
		Expect(heard.texts).To(ConsistOf(ContainSubstring("TokenStale")))
		Expect(reread(ctx, o)).To(Equal(map[string]string{leaseA: "lenient", markA: mark}))
	})

	It("may change nothing, without a token", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "migrator", "bystander")
		o := configMap(ns, "o")
		token := grantTo(ctx, ns, "alice")
		Expect(apply(ctx, as("alice"), configMap(ns, "o", leaseA, "orders", tokenA, token), "0", "alice")).To(Succeed())
		reread(ctx, o)
		version := o.ResourceVersion

		By("an apply of the same manifest")
		Expect(apply(ctx, as("alice"), configMap(ns, "o", leaseA, "orders"), "0", "alice")).To(Succeed())
		By("the empty patch of a storage migration")
		Expect(as("migrator").Patch(ctx, o, client.RawPatch(types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"uid":%q,"resourceVersion":%q}}`, o.UID, version)))).To(Succeed())
		By("a PUT of what was read, and one that lost the mark on its way")
		Expect(as("bystander").Update(ctx, o)).To(Succeed())
		delete(o.Annotations, markA)
		Expect(as("bystander").Update(ctx, o)).To(Succeed())

		Expect(reread(ctx, o)).To(Equal(map[string]string{leaseA: "orders", markA: token}))
		Expect(o.ResourceVersion).To(Equal(version), "something was written")
	})
})

var _ = Describe("Server-side apply", func() {
	It("of one manifest twice is a no-op, token included", func(ctx SpecContext) {
		ns := namespace(ctx, "alice")
		token := grantTo(ctx, ns, "alice")
		again := func() error {
			return apply(ctx, as("alice"), configMap(ns, "o", leaseA, "orders", tokenA, token), "1", "alice")
		}
		Expect(again()).To(Succeed())
		o := configMap(ns, "o")
		reread(ctx, o)
		version := o.ResourceVersion
		Expect(again()).To(Succeed())
		Expect(again()).To(Succeed())
		reread(ctx, o)
		Expect(o.ResourceVersion).To(Equal(version))
	})

	It("leaves the next applier no conflict over the token", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "bob")
		token := grantTo(ctx, ns, "alice")
		o := configMap(ns, "o")
		Expect(apply(ctx, as("alice"), configMap(ns, "o", leaseA, "orders", tokenA, token), "1", "alice")).To(Succeed())
		Expect(as("alice").Patch(ctx, o, mergePatch("", tokenA, token), client.FieldOwner("sealer"))).To(Succeed())
		token = grantTo(ctx, ns, "bob")
		By("another applier, without force")
		Expect(apply(ctx, as("bob"), configMap(ns, "o", leaseA, "orders", tokenA, token), "1", "bob")).To(Succeed())
		By("over a value of somebody else's, which is a conflict as ever")
		Expect(apply(ctx, as("bob"), configMap(ns, "o", leaseA, "orders", tokenA, token), "2", "bob")).To(MatchError(ContainSubstring(".data.k")))
		By("with force")
		Expect(apply(ctx, as("bob"), configMap(ns, "o", leaseA, "orders", tokenA, token), "2", "bob", client.ForceOwnership)).To(Succeed())
		Expect(reread(ctx, o)).To(Equal(map[string]string{leaseA: "orders", markA: token}))
		Expect(owners(o)).NotTo(ContainSubstring(tokenA))
		for _, entry := range o.ManagedFields {
			Expect(string(entry.FieldsV1.GetRawBytes())).NotTo(Or(Equal("{}"), ContainSubstring(`"f:annotations":{}`)), "a manager of nothing: %s", entry.Manager)
		}
	})
})

var _ = Describe("A write to /status of a custom resource", func() {
	status := func(text string) string { return fmt.Sprintf(`,"status":{"text":%q}`, text) }
	write := map[string]func(ctx context.Context, c client.Client, o *unstructured.Unstructured, text, token string) error{
		"PUT": func(ctx context.Context, c client.Client, o *unstructured.Unstructured, text, token string) error {
			if err := c.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
				return err
			}
			o.Object["status"] = map[string]any{"text": text}
			if token != "" {
				present(o, token)
			}
			return c.Status().Update(ctx, o)
		},
		"merge patch": func(ctx context.Context, c client.Client, o *unstructured.Unstructured, text, token string) error {
			return c.Status().Patch(ctx, o, mergePatch(status(text), tokenPair(token)...))
		},
		"JSON patch": func(ctx context.Context, c client.Client, o *unstructured.Unstructured, text, token string) error {
			ops := fmt.Sprintf(`{"op":"add","path":"/status","value":{"text":%q}}`, text)
			if token != "" {
				ops += fmt.Sprintf(`,{"op":"add","path":"/metadata/annotations/fencedlease.dev~1token","value":%q}`, token)
			}
			return c.Status().Patch(ctx, o, client.RawPatch(types.JSONPatchType, []byte("["+ops+"]")))
		},
		"server-side apply": func(ctx context.Context, c client.Client, o *unstructured.Unstructured, text, token string) error {
			u := report(o.GetNamespace(), o.GetName(), "", tokenPair(token)...)
			delete(u.Object, "spec")
			u.Object["status"] = map[string]any{"text": text}
			return c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner("applier"), client.ForceOwnership)
		},
	}
	for name, by := range write {
		It("by "+name+" takes the token, and leaves no trace of it", func(ctx SpecContext) {
			ns := namespace(ctx, "alice", "bob")
			o := report(ns, "r", "x")
			protected(ctx, o)
			before := reread(ctx, o)
			stale := grantTo(ctx, ns, "alice")
			Expect(by(ctx, as("alice"), o, "first", stale)).To(Succeed())
			Expect(by(ctx, as("bob"), o, "stolen", stale)).To(beDenied(v1alpha1.ReasonNotHolder))
			Expect(by(ctx, as("alice"), o, "none", "")).To(beDenied(v1alpha1.ReasonTokenMissing))
			grantTo(ctx, ns, "bob")
			Expect(by(ctx, as("alice"), o, "late", stale)).To(beDenied(v1alpha1.ReasonTokenStale))
			Expect(reread(ctx, o)).To(Equal(before))
			Expect(o.Object["status"]).To(Equal(map[string]any{"text": "first"}))
			Expect(owners(o)).NotTo(ContainSubstring(tokenA))
		})
	}

	It("does not need a token on the main resource, where it does not count", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "bystander")
		o := report(ns, "r", "x")
		protected(ctx, o)
		token := grantTo(ctx, ns, "alice")
		Expect(as("alice").Status().Patch(ctx, o, mergePatch(status("new"), tokenA, token))).To(Succeed())
		reread(ctx, o)
		o.Object["status"] = map[string]any{"text": "old, from a cache that is behind"}
		Expect(as("bystander").Update(ctx, o)).To(Succeed())
		reread(ctx, o)
		Expect(o.Object["status"]).To(Equal(map[string]any{"text": "new"}))
	})

	It("is refused with an old token once the object has accepted a newer one through its main resource", func(ctx SpecContext) {
		ns := namespace(ctx, "alice", "bob")
		o := report(ns, "r", "x")
		protected(ctx, o)
		stale := grantTo(ctx, ns, "alice")
		token := grantTo(ctx, ns, "bob")
		Expect(as("bob").Patch(ctx, o, mergePatch("", tokenA, token))).To(Succeed())
		err := as("alice").Status().Patch(ctx, o, mergePatch(status("late"), tokenA, stale))
		Expect(err).To(beDenied(v1alpha1.ReasonTokenStale))
		Expect(err).To(MatchError(ContainSubstring("has accepted token " + token)))
	})
})

// warnings collects warning headers.
type warnings struct{ texts []string }

func (w *warnings) HandleWarningHeaderWithContext(_ context.Context, _ int, _ string, text string) {
	w.texts = append(w.texts, text)
}
