// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"
)

const webhookKind = "MutatingWebhookConfiguration"

// resourceOf says where a kind is served that is compared. Other kinds in the manifests are not looked at.
func resourceOf(kind string) (r schema.GroupVersionResource, compared bool) {
	admission := schema.GroupVersion{Group: "admissionregistration.k8s.io", Version: "v1"}
	switch kind {
	case "CustomResourceDefinition":
		return schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}, true
	case "ValidatingAdmissionPolicy":
		return admission.WithResource("validatingadmissionpolicies"), true
	case "ValidatingAdmissionPolicyBinding":
		return admission.WithResource("validatingadmissionpolicybindings"), true
	case webhookKind:
		return admission.WithResource("mutatingwebhookconfigurations"), true
	}
	return r, false
}

// readWanted returns the objects of the manifests that are compared.
func readWanted(manifests fs.FS) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	err := fs.WalkDir(manifests, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".yaml") {
			return err
		}
		content, err := fs.ReadFile(manifests, path)
		if err != nil {
			return err
		}
		objects, err := split(content)
		if err != nil {
			return fmt.Errorf("manifest %s: %w", path, err)
		}
		all = append(all, objects...)
		return nil
	})
	if err == nil && len(all) == 0 {
		err = errors.New("the manifests hold nothing to compare with")
	}
	return all, err
}

func split(content []byte) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	for documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content))); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		object := &unstructured.Unstructured{}
		text, err := sigsyaml.YAMLToJSON(document)
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(text, &object.Object); err != nil {
			return nil, err
		}
		if _, compared := resourceOf(object.GetKind()); compared {
			all = append(all, object)
		}
	}
}
