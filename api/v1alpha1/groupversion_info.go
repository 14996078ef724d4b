// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 holds the nouns of FencedLease: the resource, the annotations and labels, and the
// machine words of denials, conditions and events. It imports nothing of ours; every other part speaks it.
//
// +kubebuilder:object:generate=true
// +groupName=fencedlease.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of the types in this package.
var GroupVersion = schema.GroupVersion{Group: "fencedlease.dev", Version: "v1alpha1"}

// SchemeBuilder collects the functions that add this package to a scheme.
var SchemeBuilder = runtime.NewSchemeBuilder(addKnownTypes)

// AddToScheme makes the types of this package known to a scheme. Safe to call twice.
var AddToScheme = SchemeBuilder.AddToScheme

func addKnownTypes(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(GroupVersion, &FencedLease{}, &FencedLeaseList{})
	metav1.AddToGroupVersion(scheme, GroupVersion)
	return nil
}
