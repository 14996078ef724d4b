// SPDX-License-Identifier: Apache-2.0

package install

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func rule(group, resource string, operations ...admissionregistrationv1.OperationType) admissionregistrationv1.RuleWithOperations {
	return admissionregistrationv1.RuleWithOperations{
		Operations: operations,
		Rule:       admissionregistrationv1.Rule{APIGroups: []string{group}, APIVersions: []string{"*"}, Resources: []string{resource}},
	}
}

func TestRules(t *testing.T) {
	const create, update, all = admissionregistrationv1.Create, admissionregistrationv1.Update, admissionregistrationv1.OperationAll
	configMaps := rule("", "configmaps", create, update)
	served := func(r schema.GroupResource) serves {
		return map[string]serves{"configmaps": {main: true}, "reports": {main: true, status: true}}[r.Resource]
	}
	tests := map[string]struct {
		rules []admissionregistrationv1.RuleWithOperations
		want  []string
	}{
		"ConfigMaps": {rules: []admissionregistrationv1.RuleWithOperations{configMaps}, want: []string{}},
		"ConfigMaps, cut in two": {
			rules: []admissionregistrationv1.RuleWithOperations{rule("", "configmaps", create), rule("", "configmaps", update)}, want: []string{},
		},
		"all operations": {rules: []admissionregistrationv1.RuleWithOperations{rule("", "configmaps", all)}, want: []string{}},
		"nothing":        {want: []string{"its rules lack configmaps"}},
		"only creations": {rules: []admissionregistrationv1.RuleWithOperations{rule("", "configmaps", create)}, want: []string{"its rules lack UPDATE of configmaps"}},
		"a custom resource with its status": {
			rules: []admissionregistrationv1.RuleWithOperations{configMaps, rule("g", "reports", create, update), rule("g", "reports/status", update)}, want: []string{},
		},
		"a custom resource without its status": {
			rules: []admissionregistrationv1.RuleWithOperations{configMaps, rule("g", "reports", create, update)},
			want:  []string{"its rules lack UPDATE of reports.g/status"},
		},
		"a status without its main resource": {
			rules: []admissionregistrationv1.RuleWithOperations{configMaps, rule("g", "reports/status", update)},
			want:  []string{"its rules lack CREATE of reports.g", "its rules lack UPDATE of reports.g"},
		},
		"what is not installed": {rules: []admissionregistrationv1.RuleWithOperations{configMaps, rule("g", "absent", create)}, want: []string{}},
		"what cannot be guarded": {
			rules: []admissionregistrationv1.RuleWithOperations{configMaps, rule("", "pods", update), rule("coordination.k8s.io", "leases", update), rule("g", "reports/scale", update)},
			want: []string{
				"its rules list pods, which cannot be guarded: the cluster, or the leases themselves, would wait for the guard",
				"its rules list leases.coordination.k8s.io, which cannot be guarded: the cluster, or the leases themselves, would wait for the guard",
				"its rules list reports.g/scale, a subresource that this release does not judge",
			},
		},
		"a star": {
			rules: []admissionregistrationv1.RuleWithOperations{configMaps, rule("*", "reports", update)},
			want:  []string{"its rules list reports.*, a star, which takes in what cannot be guarded: name the resources"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			listed, wrong := readRules(tc.rules)
			if diff := cmp.Diff(tc.want, append(wrong, listed.gaps(served)...)); diff != "" {
				t.Errorf("sentences (-want +got):\n%s", diff)
			}
		})
	}
}
