// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	crdcel "k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel/model"
	"k8s.io/apimachinery/pkg/util/version"
	vapcel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

// oldest is the oldest Kubernetes that we support.
var oldest = version.MajorMinor(1, 32)

// TestRulesCompileOnOldestKubernetes compiles the CRD's rules in the CEL environment in which that release admits new
// expressions: nothing that came later is used.
func TestRulesCompileOnOldestKubernetes(t *testing.T) {
	root, err := loadSchema()
	if err != nil {
		t.Fatal(err)
	}
	structural, err := schema.NewStructural(root)
	if err != nil {
		t.Fatal(err)
	}
	results, err := crdcel.Compile(structural, model.SchemaDeclType(structural, true), celconfig.PerCallLimit,
		environment.MustBaseEnvSet(oldest), crdcel.NewExpressionsEnvLoader())
	if err != nil || len(results) == 0 {
		t.Fatalf("%d rules: %v", len(results), err)
	}
	for i, r := range results {
		if r.Error != nil {
			t.Errorf("%s: %v", structural.XValidations[i].Rule, r.Error)
		}
	}
}

func TestPoliciesCompileOnOldestKubernetes(t *testing.T) {
	for _, name := range []string{"spec", "status", "session"} {
		t.Run(name, func(t *testing.T) {
			policy, err := loadPolicy("../../config/policy/" + name + ".yaml")
			if err != nil {
				t.Fatal(err)
			}
			compiler, err := vapcel.NewCompositedCompiler(environment.MustBaseEnvSet(oldest))
			if err != nil {
				t.Fatal(err)
			}
			with := vapcel.OptionalVariableDeclarations{HasAuthorizer: true}
			check := func(what string, result vapcel.CompilationResult) {
				if result.Error != nil {
					t.Errorf("%s: %v", what, result.Error)
				}
			}
			for _, v := range policy.Spec.Variables {
				check(v.Name, compiler.CompileAndStoreVariable(&variable{v}, with, environment.NewExpressions))
			}
			for _, v := range policy.Spec.Validations {
				check(v.Expression, compiler.CompileCELExpression(&validating.ValidationCondition{Expression: v.Expression}, with, environment.NewExpressions))
				if v.MessageExpression != "" {
					message := &validating.MessageExpressionCondition{MessageExpression: v.MessageExpression}
					check(v.MessageExpression, compiler.CompileCELExpression(message, vapcel.OptionalVariableDeclarations{}, environment.NewExpressions))
				}
				if v.Message == "" || v.Reason == nil {
					t.Errorf("%s: no message, or no reason", v.Expression)
				}
			}
		})
	}
}
