// SPDX-License-Identifier: Apache-2.0

package install

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/fencedlease/fencedlease/config"
)

// manifest returns a manifest of this release that the test may change.
func manifest(t *testing.T, kind, name string) *unstructured.Unstructured {
	t.Helper()
	all, err := readWanted(config.Files)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range all {
		if o.GetKind() == kind && o.GetName() == name {
			return o
		}
	}
	t.Fatalf("the manifests have no %s %q", kind, name)
	return nil
}

func TestReadWanted(t *testing.T) {
	all, err := readWanted(config.Files)
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, o := range all {
		kinds[o.GetKind()]++
	}
	want := map[string]int{"CustomResourceDefinition": 1, "ValidatingAdmissionPolicy": 3, "ValidatingAdmissionPolicyBinding": 3, "MutatingWebhookConfiguration": 1}
	for kind, n := range want {
		if kinds[kind] < n {
			t.Errorf("%d of kind %s, want at least %d", kinds[kind], kind, n)
		}
	}
}

// at walks to a value in an object: keys for maps, numbers for lists.
func at(t *testing.T, v any, path ...any) any {
	t.Helper()
	for _, step := range path {
		switch step := step.(type) {
		case string:
			v = v.(fields)[step]
		case int:
			v = v.([]any)[step]
		}
		if v == nil {
			t.Fatalf("the manifest has nothing at %v of %v", step, path)
		}
	}
	return v
}

func TestLacks(t *testing.T) {
	const (
		crd     = "CustomResourceDefinition/fencedleases.fencedlease.dev"
		status  = "ValidatingAdmissionPolicy/fencedlease-status"
		binding = "ValidatingAdmissionPolicyBinding/fencedlease-status"
		hook    = "MutatingWebhookConfiguration/fencedlease-guard"
	)
	schema := []any{"spec", "versions", 0, "schema", "openAPIV3Schema"}
	rules := func(t *testing.T, o fields) fields { return at(t, o, schema...).(fields) }
	webhook := func(t *testing.T, o fields) fields { return at(t, o, "webhooks", 0).(fields) }
	tests := map[string]struct {
		object string
		change func(t *testing.T, o fields)
		// want is in the sentence; empty: nothing is missing. byName is the same for who was ready before.
		want, byName string
	}{
		"nothing changed": {object: crd, change: func(*testing.T, fields) {}},
		"a rule of the definition is gone": {
			object: crd,
			change: func(t *testing.T, o fields) {
				s := rules(t, o)
				s["x-kubernetes-validations"] = s["x-kubernetes-validations"].([]any)[1:]
			},
			want: `message "status cannot be removed`, byName: `message "status cannot be removed`,
		},
		"a rule has another text": {
			object: crd,
			change: func(t *testing.T, o fields) {
				at(t, rules(t, o), "x-kubernetes-validations", 0).(fields)["rule"] = "true"
			},
			want: "rule is not that of this release",
		},
		"a field is gone": {
			object: crd,
			change: func(t *testing.T, o fields) {
				delete(at(t, rules(t, o), "properties", "status", "properties").(fields), "token")
			},
			want: "properties.token is missing", byName: "properties.token is missing",
		},
		"a bound is another": {
			object: crd,
			change: func(t *testing.T, o fields) {
				at(t, rules(t, o), "properties", "spec", "properties", "minToken").(fields)["maximum"] = int64(5)
			},
			want: `minToken.maximum is "5" instead of`,
		},
		"an additional field, rule and column": {
			object: crd,
			change: func(t *testing.T, o fields) {
				s := rules(t, o)
				s["x-kubernetes-validations"] = append(s["x-kubernetes-validations"].([]any), fields{"rule": "true", "message": "new"})
				at(t, s, "properties").(fields)["more"] = fields{"type": "string"}
				at(t, o, "spec", "versions", 0).(fields)["additionalPrinterColumns"] = []any{}
			},
		},
		"the subresource is gone": {
			object: crd, change: func(t *testing.T, o fields) { delete(at(t, o, "spec", "versions", 0).(fields), "subresources") },
			want: "subresources is missing", byName: "subresources is missing",
		},
		"the selectable field is another": {
			object: crd,
			change: func(t *testing.T, o fields) {
				at(t, o, "spec", "versions", 0).(fields)["selectableFields"] = []any{fields{"jsonPath": ".status.phase"}}
			},
			want: `jsonPath ".status.holder.sessionUID"`, byName: `jsonPath ".status.holder.sessionUID"`,
		},
		"a validation of a policy has another text": {
			object: status,
			change: func(t *testing.T, o fields) { at(t, o, "spec", "validations", 0).(fields)["expression"] = "true" },
			want:   "expression is not that of this release",
		},
		"a validation of a policy is gone": {
			object: status,
			change: func(t *testing.T, o fields) {
				at(t, o, "spec").(fields)["validations"] = at(t, o, "spec", "validations").([]any)[:1]
			},
			want: "spec.validations lacks message", byName: "spec.validations lacks message",
		},
		"a policy that fails open": {
			object: status, change: func(t *testing.T, o fields) { at(t, o, "spec").(fields)["failurePolicy"] = "Ignore" },
			want: `failurePolicy is "Ignore" instead of "Fail"`, byName: `failurePolicy is "Ignore"`,
		},
		"a policy of other operations": {
			object: status,
			change: func(t *testing.T, o fields) {
				at(t, o, "spec", "matchConstraints", "resourceRules", 0).(fields)["operations"] = []any{"CREATE"}
			},
			want: "resourceRules lacks", byName: "resourceRules lacks",
		},
		"a policy of more operations": {
			object: status,
			change: func(t *testing.T, o fields) {
				at(t, o, "spec", "matchConstraints", "resourceRules", 0).(fields)["operations"] = []any{"*"}
			},
		},
		"a policy with a condition of somebody's": {
			object: status,
			change: func(t *testing.T, o fields) {
				at(t, o, "spec").(fields)["matchConditions"] = []any{fields{"name": "not-me", "expression": "false"}}
			},
			want: `name "not-me", so that some requests pass unseen`, byName: "pass unseen",
		},
		"a binding that only audits": {
			object: binding, change: func(t *testing.T, o fields) { at(t, o, "spec").(fields)["validationActions"] = []any{"Audit"} },
			want: `validationActions lacks "Deny"`, byName: `validationActions lacks "Deny"`,
		},
		"a binding that audits besides": {
			object: binding, change: func(t *testing.T, o fields) { at(t, o, "spec").(fields)["validationActions"] = []any{"Deny", "Audit"} },
		},
		"a binding of some objects": {
			object: binding,
			change: func(t *testing.T, o fields) {
				at(t, o, "spec").(fields)["matchResources"] = fields{"objectSelector": fields{"matchLabels": fields{"a": "b"}}, "matchPolicy": "Equivalent"}
			},
			want: "matchResources is set", byName: "matchResources is set",
		},
		"a binding with the empty selectors of the API server": {
			object: binding,
			change: func(t *testing.T, o fields) {
				at(t, o, "spec").(fields)["matchResources"] = fields{"objectSelector": fields{}, "namespaceSelector": fields{}, "matchPolicy": "Equivalent"}
			},
		},
		"a webhook with another condition": {
			object: hook,
			change: func(t *testing.T, o fields) {
				c := webhook(t, o)
				c["matchConditions"] = append(c["matchConditions"].([]any), fields{"name": "no-secrets", "expression": "false"})
			},
			want: "no-secrets", byName: "no-secrets",
		},
		"a webhook without its condition": {
			object: hook, change: func(t *testing.T, o fields) { delete(webhook(t, o), "matchConditions") },
			want: "matchConditions is missing", byName: "matchConditions is missing",
		},
		"a webhook of some objects": {
			object: hook, change: func(t *testing.T, o fields) {
				webhook(t, o)["objectSelector"] = fields{"matchLabels": fields{"a": "b"}}
			},
			want: "objectSelector is set", byName: "objectSelector is set",
		},
		"a webhook of some namespaces, with another timeout, at another place": {
			object: hook,
			change: func(t *testing.T, o fields) {
				w := webhook(t, o)
				w["namespaceSelector"] = fields{"matchExpressions": []any{fields{"key": "control-plane", "operator": "DoesNotExist"}}}
				w["timeoutSeconds"] = int64(10)
				w["clientConfig"] = fields{"url": "https://127.0.0.1/guard"}
			},
		},
		"a webhook that fails open": {
			object: hook, change: func(t *testing.T, o fields) { webhook(t, o)["failurePolicy"] = "Ignore" },
			want: "failurePolicy", byName: "failurePolicy",
		},
		"no webhook of ours": {
			object: hook, change: func(t *testing.T, o fields) { webhook(t, o)["name"] = "other.example.com" },
			want: `webhooks lacks name "guard.fencedlease.dev"`, byName: `webhooks lacks name "guard.fencedlease.dev"`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			kind, object, _ := strings.Cut(tc.object, "/")
			want, have := manifest(t, kind, object), manifest(t, kind, object)
			tc.change(t, have.Object)
			for d, sentence := range map[depth]string{exactly: tc.want, byName: tc.byName} {
				got := lacks(substance(want), substance(have), "", d)
				switch {
				case sentence == "" && len(got) > 0:
					t.Errorf("depth %d: %q is missing, want nothing", d, got)
				case sentence != "" && !strings.Contains(strings.Join(got, "; "), sentence):
					t.Errorf("depth %d: %q is missing, want %q", d, got, sentence)
				}
			}
		})
	}
}
