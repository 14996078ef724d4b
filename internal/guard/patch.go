// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"maps"
	"slices"
	"strconv"

	"gomodules.xyz/jsonpatch/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/json"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// patch makes the object of the request what may be stored: token and bypass consumed, the mark as decided. It
// touches nothing else, and is empty when there is nothing to do.
func patch(w write, d protocol.Decision) []jsonpatch.Operation {
	return append(patchAnnotations(w, d.Mark), patchManagedFields(w.newRaw)...)
}

func patchAnnotations(w write, mark string) []jsonpatch.Operation {
	want := maps.Clone(w.New.Annotations)
	if want == nil {
		want = map[string]string{}
	}
	delete(want, v1alpha1.TokenAnnotation)
	delete(want, v1alpha1.BypassAnnotation)
	set(want, v1alpha1.AcceptedTokenAnnotation, mark, mark != "")
	if w.Subresource != "" && w.Old != nil {
		// Where a subresource stores annotations, as those of many built-in kinds do, it must not move the object
		// to another lease.
		lease, had := w.Old.Annotations[v1alpha1.LeaseAnnotation]
		set(want, v1alpha1.LeaseAnnotation, lease, had)
	}
	return between(w.New.Annotations, want)
}

func set(annotations map[string]string, key, value string, present bool) {
	if present {
		annotations[key] = value
		return
	}
	delete(annotations, key)
}

// between returns the operations that lead from the annotations of an object to those wanted.
func between(have, want map[string]string) []jsonpatch.Operation {
	if maps.Equal(have, want) {
		return nil
	}
	base := pointer("metadata", "annotations")
	switch {
	case len(want) == 0:
		return []jsonpatch.Operation{jsonpatch.NewOperation("remove", base, nil)}
	case len(have) == 0:
		return []jsonpatch.Operation{jsonpatch.NewOperation("add", base, want)}
	}
	var ops []jsonpatch.Operation
	for _, key := range slices.Sorted(maps.Keys(have)) {
		if _, keep := want[key]; !keep {
			ops = append(ops, jsonpatch.NewOperation("remove", base+pointer(key), nil))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if value, had := have[key]; !had || value != want[key] {
			ops = append(ops, jsonpatch.NewOperation("add", base+pointer(key), want[key]))
		}
	}
	return ops
}

// patchManagedFields takes our annotations from everybody's managed fields. The field manager ran before us, so an
// applier owns the token that we consume; the next one to apply a token would meet a conflict. An entry that owned
// nothing else goes: an empty one in its place would own the whole of a map.
func patchManagedFields(raw []byte) []jsonpatch.Operation {
	var object struct {
		Metadata struct {
			ManagedFields []metav1.ManagedFieldsEntry `json:"managedFields"`
		} `json:"metadata"`
	}
	if json.Unmarshal(raw, &object) != nil {
		return nil // decoded before: it cannot fail
	}
	var ops []jsonpatch.Operation
	// From the end, for a removal moves the entries behind it.
	for i, entry := range slices.Backward(object.Metadata.ManagedFields) {
		if entry.FieldsV1 == nil {
			continue
		}
		for _, path := range disown(entry.FieldsV1.GetRawBytes()) {
			steps := append([]string{"metadata", "managedFields", strconv.Itoa(i)}, path...)
			ops = append(ops, jsonpatch.NewOperation("remove", pointer(steps...), nil))
		}
	}
	return ops
}

// disown returns the paths, below one entry of managedFields, whose removal takes our annotations from its owner:
// each annotation, or the highest map that owns nothing else. The empty path is the entry itself.
func disown(fieldsV1 []byte) [][]string {
	root := fields{}
	if json.Unmarshal(fieldsV1, &root) != nil {
		return nil
	}
	annotations := descend(root, "f:metadata", "f:annotations")
	var ours []string
	for _, key := range ownAnnotations() {
		if _, owned := annotations["f:"+key]; owned {
			ours = append(ours, "f:"+key)
		}
	}
	switch {
	case len(ours) == 0:
		return nil
	case len(ours) < len(annotations):
		var paths [][]string
		for _, key := range ours {
			paths = append(paths, []string{"fieldsV1", "f:metadata", "f:annotations", key})
		}
		return paths
	case len(descend(root, "f:metadata")) > 1:
		return [][]string{{"fieldsV1", "f:metadata", "f:annotations"}}
	case len(root) > 1:
		return [][]string{{"fieldsV1", "f:metadata"}}
	}
	return [][]string{{}}
}
