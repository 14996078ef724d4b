// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fencedlease/fencedlease/internal/protocol"
)

// patched is the patch of an update, as JSON.
func patched(t *testing.T, old, updated, mark string) string {
	t.Helper()
	g := newGuard(held, may())
	w, err := g.decode(update(old, updated))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(patch(w, protocol.Decision{Mark: mark}))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestPatch(t *testing.T) {
	tests := map[string]struct{ old, updated, mark, want string }{
		"nothing to do": {
			old: `{"metadata":{}}`, updated: `{"metadata":{"annotations":{"a":"b"}}}`, want: `null`,
		},
		"the mark is as it should be": {
			old: `{"metadata":{}}`, updated: `{"metadata":{"annotations":{"fencedlease.dev/accepted-token":"7"}}}`, mark: "7", want: `null`,
		},
		"only what is touched, with its slash escaped": {
			old: `{"metadata":{}}`, updated: `{"metadata":{"annotations":{"a":"b","fencedlease.dev/token":"7"}}}`, mark: "7",
			want: `[{"op":"remove","path":"/metadata/annotations/fencedlease.dev~1token"},{"op":"add","path":"/metadata/annotations/fencedlease.dev~1accepted-token","value":"7"}]`,
		},
		"a map for the first annotation": {
			old: `{"metadata":{}}`, updated: `{"metadata":{}}`, mark: "7",
			want: `[{"op":"add","path":"/metadata/annotations","value":{"fencedlease.dev/accepted-token":"7"}}]`,
		},
		"no map for the last one": {
			old: `{"metadata":{}}`, updated: `{"metadata":{"annotations":{"fencedlease.dev/token":"7"}}}`,
			want: `[{"op":"remove","path":"/metadata/annotations"}]`,
		},
		"managed fields, each as far as it owns nothing else, from the end": {
			old: `{"metadata":{}}`,
			updated: `{"metadata":{"managedFields":[
				{"fieldsV1":{"f:metadata":{"f:annotations":{"f:fencedlease.dev/token":{}}}}},
				{"fieldsV1":{"f:data":{},"f:metadata":{"f:annotations":{"f:fencedlease.dev/bypass":{}}}}},
				{"fieldsV1":{"f:metadata":{"f:annotations":{"f:fencedlease.dev/accepted-token":{},"f:fencedlease.dev/token":{}},"f:labels":{}}}},
				{"fieldsV1":{"f:metadata":{"f:annotations":{".":{},"f:fencedlease.dev/token":{},"f:a":{}}}}},
				{"fieldsV1":{"f:metadata":{"f:annotations":{"f:fencedlease.dev/lease":{}}}}},
				{"fieldsType":"FieldsV1"}]}}`,
			want: `[{"op":"remove","path":"/metadata/managedFields/3/fieldsV1/f:metadata/f:annotations/f:fencedlease.dev~1token"},` +
				`{"op":"remove","path":"/metadata/managedFields/2/fieldsV1/f:metadata/f:annotations"},` +
				`{"op":"remove","path":"/metadata/managedFields/1/fieldsV1/f:metadata"},` +
				`{"op":"remove","path":"/metadata/managedFields/0"}]`,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, patched(t, tc.old, tc.updated, tc.mark)); diff != "" {
				t.Errorf("patch (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPointerEscapes(t *testing.T) {
	if got, want := pointer("a", "b/c~d"), "/a/b~1c~0d"; got != want {
		t.Errorf("pointer is %q, want %q", got, want)
	}
}
