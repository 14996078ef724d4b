// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/google/cel-go/cel"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	crdcel "k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel/model"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	vapcel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/common"
	"k8s.io/apiserver/pkg/cel/environment"
	"sigs.k8s.io/yaml"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

const (
	crdFile    = "../../config/crd/fencedlease.dev_fencedleases.yaml"
	statusFile = "../../config/policy/status.yaml"
)

// server judges a write of the status as the API server does, with its own libraries, from the files that are
// installed: defaults, schema, the rules of the CRD, then the status policy.
type server struct {
	structural *schema.Structural
	status     validation.SchemaValidator
	rules      *crdcel.Validator
	policy     validating.Validator
}

// newServer loads the files, but leaves out the rule of the CRD that has this message.
func newServer(without string) (*server, error) {
	root, err := loadSchema()
	if err != nil {
		return nil, err
	}
	root.XValidations = slices.DeleteFunc(root.XValidations, func(r apiextensions.ValidationRule) bool { return r.Message == without })
	s := &server{}
	if s.structural, err = schema.NewStructural(root); err != nil {
		return nil, fmt.Errorf("structural schema: %w", err)
	}
	statusSchema := root.Properties["status"]
	if s.status, _, err = validation.NewSchemaValidator(&statusSchema); err != nil {
		return nil, fmt.Errorf("schema of status: %w", err)
	}
	s.rules = crdcel.NewValidator(s.structural, true, celconfig.PerCallLimit)
	policy, err := loadPolicy(statusFile)
	if err != nil {
		return nil, err
	}
	s.policy, err = compilePolicy(policy)
	return s, err
}

func loadSchema() (*apiextensions.JSONSchemaProps, error) {
	data, err := os.ReadFile(crdFile)
	if err != nil {
		return nil, err
	}
	var crd apiextensionsv1.CustomResourceDefinition
	if err := yaml.UnmarshalStrict(data, &crd); err != nil {
		return nil, fmt.Errorf("decode %s: %w", crdFile, err)
	}
	var internal apiextensions.JSONSchemaProps
	err = apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(crd.Spec.Versions[0].Schema.OpenAPIV3Schema, &internal, nil)
	return &internal, err
}

// loadPolicy reads the policy in a file that also has its binding.
func loadPolicy(file string) (*admissionregistrationv1.ValidatingAdmissionPolicy, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	first, _, found := bytes.Cut(data, []byte("\n---\n"))
	if !found {
		return nil, fmt.Errorf("%s: no binding behind the policy", file)
	}
	var policy admissionregistrationv1.ValidatingAdmissionPolicy
	if err := yaml.UnmarshalStrict(first, &policy); err != nil {
		return nil, fmt.Errorf("decode %s: %w", file, err)
	}
	return &policy, nil
}

// variable is a variable of a policy as the compiler wants it.
type variable struct {
	admissionregistrationv1.Variable
}

func (v *variable) GetName() string          { return v.Name }
func (v *variable) GetExpression() string    { return v.Expression }
func (v *variable) ReturnTypes() []*cel.Type { return []*cel.Type{cel.AnyType, cel.DynType} }

// compilePolicy is what the API server does with a policy without parameters and match conditions.
func compilePolicy(policy *admissionregistrationv1.ValidatingAdmissionPolicy) (validating.Validator, error) {
	compiler, err := vapcel.NewCompositedCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	if err != nil {
		return nil, err
	}
	with := vapcel.OptionalVariableDeclarations{HasAuthorizer: true}
	for _, v := range policy.Spec.Variables {
		compiler.CompileAndStoreVariable(&variable{v}, with, environment.StoredExpressions)
	}
	var conditions, messages []vapcel.ExpressionAccessor
	for _, v := range policy.Spec.Validations {
		conditions = append(conditions, &validating.ValidationCondition{Expression: v.Expression, Message: v.Message, Reason: v.Reason})
		messages = append(messages, &validating.MessageExpressionCondition{MessageExpression: v.MessageExpression})
	}
	return validating.NewValidator(
		compiler.CompileCondition(conditions, with, environment.StoredExpressions),
		nil,
		compiler.CompileCondition(nil, with, environment.StoredExpressions),
		compiler.CompileCondition(messages, vapcel.OptionalVariableDeclarations{}, environment.StoredExpressions),
		policy.Spec.FailurePolicy, nil), nil
}

// structure is the answer of the CRD: schema, then rules.
func (s *server) structure(old, next map[string]any) field.ErrorList {
	correlated := common.NewCorrelatedObject(next, old, &model.Structural{Structural: s.structural})
	if status, ok := next["status"]; ok {
		errs := validation.ValidateCustomResourceUpdate(field.NewPath("status"), status, old["status"], s.status,
			validation.WithRatcheting(correlated.Key("status")))
		if len(errs) > 0 {
			return errs
		}
	}
	if errs := listtype.ValidateListSetsAndMaps(nil, s.structural, next); len(errs) > 0 {
		return errs
	}
	errs, _ := s.rules.Validate(context.Background(), nil, s.structural, next, old, celconfig.RuntimeCELCostBudget, crdcel.WithRatcheting(correlated))
	return errs
}

// authority is the answer of the status policy.
func (s *server) authority(old, next map[string]any, by requester) error {
	kind := v1alpha1.GroupVersion.WithKind("FencedLease")
	resource := v1alpha1.GroupVersion.WithResource("fencedleases")
	object, oldObject := &unstructured.Unstructured{Object: next}, &unstructured.Unstructured{Object: old}
	attributes := admission.NewAttributesRecord(object, oldObject, kind, oldObject.GetNamespace(), oldObject.GetName(), resource, "status",
		admission.Update, &metav1.UpdateOptions{}, false, by.info())
	versioned, err := admission.NewVersionedAttributes(attributes, kind, nil)
	if err != nil {
		return err
	}
	result := s.policy.Validate(context.Background(), resource, versioned, nil, nil, celconfig.RuntimeCELCostBudget, by)
	var denied []string
	for _, d := range result.Decisions {
		if d.Action == validating.ActionDeny {
			denied = append(denied, d.Message)
		}
	}
	if len(denied) == 0 {
		return nil
	}
	return errors.New(strings.Join(denied, "; "))
}
