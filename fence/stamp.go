// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// tokenPointer is where a JSON patch puts the token.
const tokenPointer = "/metadata/annotations/fencedlease.dev~1token"

// stamp puts the token of a term into writes.
type stamp struct{ held *Held }

// send sends a write unless the term is over, and rebuilds what the guard says.
func (s stamp) send(write func() error) error {
	if err := s.held.Err(); err != nil {
		return fmt.Errorf("nothing was sent: %w", err)
	}
	err := write()
	if fenced, ok := AsFenced(err); ok {
		return fenced
	}
	return err
}

// object stamps obj for the time of the write. Afterwards it is what the server answered, without the token; when
// the write failed, what it was.
func (s stamp) object(obj client.Object, write func() error) error {
	before := obj.GetAnnotations()
	during := maps.Clone(before)
	if during == nil {
		during = map[string]string{}
	}
	during[v1alpha1.TokenAnnotation] = s.held.token.String()
	obj.SetAnnotations(during)
	if err := s.send(write); err != nil {
		obj.SetAnnotations(before)
		return err
	}
	unstamp(obj)
	return nil
}

// unstamp removes a token that the server has stored, because nothing consumed it, or that was left behind by
// decoding the answer over the request.
func unstamp(obj client.Object) {
	annotations := obj.GetAnnotations()
	if _, ok := annotations[v1alpha1.TokenAnnotation]; !ok {
		return
	}
	annotations = maps.Clone(annotations)
	delete(annotations, v1alpha1.TokenAnnotation)
	if len(annotations) == 0 {
		annotations = nil
	}
	obj.SetAnnotations(annotations)
}

// patch stamps a patch of any kind. It is computed from body, and the answer goes there.
func (s stamp) patch(obj, body client.Object, patch client.Patch, subResource string, write func(client.Patch) error) error {
	data, err := patch.Data(body)
	if err != nil {
		return fmt.Errorf("compute patch: %w", err)
	}
	stamped, err := s.patchData(patch.Type(), data, subResource)
	if err != nil {
		return fmt.Errorf("put the token into a patch of %s %q: %w", kindOf(obj), client.ObjectKeyFromObject(obj), err)
	}
	err = s.send(func() error { return write(client.RawPatch(patch.Type(), stamped)) })
	if err != nil {
		if patch.Type() == types.JSONPatchType && raced(err) {
			return fmt.Errorf("%w: an operation of the JSON patch does not apply; that of the token does not where the object has no annotations, so names no lease", err)
		}
		return err
	}
	unstamp(body)
	return nil
}

// patchData adds the token to the text of a patch.
func (s stamp) patchData(kind types.PatchType, data []byte, subResource string) ([]byte, error) {
	switch kind {
	case types.JSONPatchType:
		return s.jsonPatch(data, subResource)
	case types.MergePatchType, types.StrategicMergePatchType:
		return s.document(data)
	case types.ApplyYAMLPatchType:
		text, err := yaml.YAMLToJSON(data)
		if err != nil {
			return nil, err
		}
		return s.document(text)
	}
	return nil, fmt.Errorf("patches of type %q cannot carry it; use a merge, strategic merge, JSON or apply patch", kind)
}

// jsonPatch adds the token by an operation at the end, where the patch may have made the annotations. Adding the
// annotations themselves would wipe those that the object has, except in a Scale, which never has any.
func (s stamp) jsonPatch(data []byte, subResource string) ([]byte, error) {
	var ops []json.RawMessage
	if err := json.Unmarshal(data, &ops); err != nil {
		return nil, err
	}
	op := map[string]any{"op": "add", "path": tokenPointer, "value": s.held.token.String()}
	if subResource == "scale" {
		op["path"], op["value"] = "/metadata/annotations", map[string]string{v1alpha1.TokenAnnotation: s.held.token.String()}
	}
	text, err := json.Marshal(op)
	if err != nil {
		return nil, err
	}
	return json.Marshal(append(ops, text))
}

// document adds the token to metadata.annotations of a JSON document. Everything else stays as it is written, so
// that no number loses a digit.
func (s stamp) document(data []byte) ([]byte, error) {
	root, err := members(data, "the patch")
	if err != nil {
		return nil, err
	}
	metadata, err := members(root["metadata"], "metadata")
	if err != nil {
		return nil, err
	}
	annotations, err := members(metadata["annotations"], "metadata.annotations")
	if err != nil {
		return nil, err
	}
	annotations[v1alpha1.TokenAnnotation] = json.RawMessage(`"` + s.held.token.String() + `"`)
	if metadata["annotations"], err = json.Marshal(annotations); err != nil {
		return nil, err
	}
	if root["metadata"], err = json.Marshal(metadata); err != nil {
		return nil, err
	}
	return json.Marshal(root)
}

// members are the members of a JSON object; none if it is absent.
func members(data json.RawMessage, what string) (map[string]json.RawMessage, error) {
	all := map[string]json.RawMessage{}
	if len(data) == 0 {
		return all, nil
	}
	if bytes.Equal(bytes.TrimSpace(data), []byte("null")) {
		return nil, fmt.Errorf("%s is null, which removes it as a whole: name the keys to remove", what)
	}
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	return all, nil
}

// apply stamps a copy of an apply configuration, and puts the answer into the original as controller-runtime does.
func (s stamp) apply(obj runtime.ApplyConfiguration, write func(runtime.ApplyConfiguration) error, check func(map[string]string) error) error {
	data, err := json.Marshal(obj)
	if err != nil {
		return fmt.Errorf("read apply configuration: %w", err)
	}
	if data, err = s.document(data); err != nil {
		return fmt.Errorf("put the token into an apply configuration: %w", err)
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON(data); err != nil {
		return fmt.Errorf("read apply configuration: %w", err)
	}
	if err := s.send(func() error { return write(client.ApplyConfigurationFromUnstructured(u)) }); err != nil {
		return err
	}
	unstamp(u)
	err = answer(obj, u)
	if checked := check(u.GetAnnotations()); checked != nil {
		checked = fmt.Errorf("%s %q was written: %w", u.GetKind(), client.ObjectKeyFromObject(u), checked)
		err = errors.Join(checked, err)
	}
	return err
}

// answer puts what the server stored into the caller's apply configuration.
func answer(obj runtime.ApplyConfiguration, u *unstructured.Unstructured) error {
	if target, ok := obj.(runtime.Unstructured); ok {
		target.SetUnstructuredContent(u.Object)
		return nil
	}
	data, err := u.MarshalJSON()
	if err == nil {
		err = json.Unmarshal(data, obj)
	}
	if err != nil {
		return fmt.Errorf("the object was written; read the answer: %w", err)
	}
	return nil
}
