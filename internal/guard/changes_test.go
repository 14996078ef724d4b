// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fencedlease/fencedlease/internal/protocol"
)

func TestCompare(t *testing.T) {
	none := protocol.Changes{}
	other := protocol.Changes{Other: true}
	tests := map[string]struct {
		old, updated string
		scope        scope
		want         protocol.Changes
	}{
		"what the server sets": {
			old:     `{"metadata":{"uid":"a","resourceVersion":"1","generation":1,"creationTimestamp":"x","selfLink":"y"},"data":{"a":"b"}}`,
			updated: `{"metadata":{"uid":"b","resourceVersion":"2","generation":2,"creationTimestamp":null,"deletionTimestamp":"z","deletionGracePeriodSeconds":3},"data":{"a":"b"}}`,
			want:    none,
		},
		"our own annotations": {
			old:     `{"metadata":{"annotations":{"fencedlease.dev/accepted-token":"1"}}}`,
			updated: `{"metadata":{"annotations":{"fencedlease.dev/accepted-token":"9","fencedlease.dev/token":"3","fencedlease.dev/bypass":"x"}}}`,
			want:    none,
		},
		"nothing, in another order and spacing": {
			old: `{"metadata":{"labels":{"a":"1","b":"2"}},"data":{"x":"1","y":"2"}}`, updated: `{"data": {"y":"2","x":"1"}, "metadata":{"labels":{"b":"2","a":"1"}}}`,
			want: none,
		},
		"bytes that JSON cannot say, which look equal": {
			old: `{"metadata":{},"data":{"a":"caf\ufffd"}}`, updated: `{"metadata":{},"data":{"a":"caf\ufffd"}}`, want: other,
		},
		"the same, written out": {
			old: "{\"metadata\":{},\"data\":{\"a\":\"\uFFFD\"}}", updated: "{\"metadata\":{},\"data\":{\"a\":\"\uFFFD\"}}", want: other,
		},
		"an empty map in metadata for none": {old: `{"metadata":{"labels":{}}}`, updated: `{"metadata":{}}`, want: none},
		"data":                              {old: `{"metadata":{},"data":{"a":"1"}}`, updated: `{"metadata":{},"data":{"a":"2"}}`, want: other},
		"an empty spec for none":            {old: `{"metadata":{}}`, updated: `{"metadata":{},"spec":{}}`, want: other},
		"a label":                           {old: `{"metadata":{}}`, updated: `{"metadata":{"labels":{"a":"b"}}}`, want: other},
		"another annotation":                {old: `{"metadata":{}}`, updated: `{"metadata":{"annotations":{"a":"b"}}}`, want: other},
		"two large integers that are the same as floats": {
			old: `{"metadata":{},"spec":9007199254740992}`, updated: `{"metadata":{},"spec":9007199254740993}`, want: other,
		},
		"owners": {old: `{"metadata":{}}`, updated: `{"metadata":{"ownerReferences":[{"uid":"a"}]}}`, want: protocol.Changes{Owners: true}},
		"finalizers, and data": {
			old: `{"metadata":{"finalizers":["a"]}}`, updated: `{"metadata":{},"data":{"a":"b"}}`, want: protocol.Changes{Finalizers: true, Other: true},
		},
		"times of managed fields": {
			old:     `{"metadata":{"managedFields":[{"manager":"m","time":"1","fieldsV1":{"f:data":{}}}]}}`,
			updated: `{"metadata":{"managedFields":[{"manager":"m","time":"2","fieldsV1":{"f:data":{}}}]}}`,
			want:    none,
		},
		"a new owner of a field": {
			old:     `{"metadata":{"managedFields":[{"manager":"m","fieldsV1":{"f:data":{}}}]}}`,
			updated: `{"metadata":{"managedFields":[{"manager":"m","fieldsV1":{"f:data":{}}},{"manager":"n","fieldsV1":{"f:data":{}}}]}}`,
			want:    protocol.Changes{ManagedFields: true},
		},
		"a new owner of our annotations only": {
			old:     `{"metadata":{"managedFields":[{"manager":"m","fieldsV1":{"f:data":{}}}]}}`,
			updated: `{"metadata":{"managedFields":[{"manager":"m","fieldsV1":{"f:data":{}}},{"manager":"n","fieldsV1":{"f:metadata":{"f:annotations":{"f:fencedlease.dev/bypass":{}}}}}]}}`,
			want:    none,
		},
		"status, of a kind without /status": {old: `{"metadata":{},"status":1}`, updated: `{"metadata":{},"status":2}`, want: other},
		"status, on the main resource of a kind with /status": {
			old: `{"metadata":{},"status":1}`, updated: `{"metadata":{},"status":2}`, scope: scopeWithoutStatus, want: none,
		},
		"status, on /status": {old: `{"metadata":{},"status":1}`, updated: `{"metadata":{},"status":2}`, scope: scopeStatus, want: other},
		"all but status, on /status": {
			old: `{"metadata":{"labels":{"a":"b"},"finalizers":["f"]},"spec":1,"status":1}`, updated: `{"metadata":{},"spec":2,"status":1}`, scope: scopeStatus, want: none,
		},
		"metadata that is no map": {old: `{"metadata":1}`, updated: `{"metadata":2}`, want: none},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := compare([]byte(tc.old), []byte(tc.updated), tc.scope)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("changes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCompareUnreadable(t *testing.T) {
	for name, objects := range map[string][2]string{"the old object": {`[]`, `{}`}, "the new object": {`{}`, `"x"`}} {
		t.Run(name, func(t *testing.T) {
			if _, err := compare([]byte(objects[0]), []byte(objects[1]), scopeAll); err == nil {
				t.Error("no error")
			}
		})
	}
}
