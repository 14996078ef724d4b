// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"encoding/json"
	"maps"
	"reflect"
	"strings"
	"unicode/utf8"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// scope is the part of an object that a write can change.
type scope int

const (
	// scopeAll: the main resource of a kind without /status.
	scopeAll scope = iota
	// scopeWithoutStatus: the main resource of a kind with /status; the API server keeps the old status.
	scopeWithoutStatus
	// scopeStatus: /status; the API server keeps the rest.
	scopeStatus
)

// ownAnnotations are written by the guard, or consumed by it. They are no change of the object.
func ownAnnotations() []string {
	return []string{v1alpha1.TokenAnnotation, v1alpha1.BypassAnnotation, v1alpha1.AcceptedTokenAnnotation}
}

// serverSet are the fields of metadata that the API server sets whatever a request says of them.
func serverSet() []string {
	return []string{"uid", "creationTimestamp", "generation", "resourceVersion", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds"}
}

type fields = map[string]any

// compare says what a write changes within its scope. Old is empty on create.
func compare(oldRaw, newRaw []byte, s scope) (protocol.Changes, error) {
	before, err := parse(oldRaw)
	if err != nil {
		return protocol.Changes{}, err
	}
	after, err := parse(newRaw)
	if err != nil {
		return protocol.Changes{}, err
	}
	oldMeta, newMeta := significant(before), significant(after)
	changes := protocol.Changes{
		ManagedFields: differ(oldMeta, newMeta, "managedFields"),
		Other:         ambiguous(oldRaw) || ambiguous(newRaw),
	}
	if s == scopeStatus {
		changes.Other = changes.Other || differ(before, after, "status")
		return changes, nil
	}
	changes.Owners = differ(oldMeta, newMeta, "ownerReferences")
	changes.Finalizers = differ(oldMeta, newMeta, "finalizers")
	for _, key := range []string{"managedFields", "ownerReferences", "finalizers"} {
		delete(oldMeta, key)
		delete(newMeta, key)
	}
	if s == scopeWithoutStatus {
		delete(before, "status")
		delete(after, "status")
	}
	delete(before, "metadata")
	delete(after, "metadata")
	changes.Other = changes.Other || !reflect.DeepEqual(oldMeta, newMeta) || !reflect.DeepEqual(before, after)
	return changes, nil
}

// ambiguous says that the object may hold bytes which JSON cannot say. By protobuf they can be stored, and reach the
// guard as U+FFFD, so two different values look equal: such an object is never taken for unchanged.
func ambiguous(raw []byte) bool {
	return !utf8.Valid(raw) || bytes.ContainsRune(raw, utf8.RuneError) ||
		bytes.Contains(raw, []byte(`\ufffd`)) || bytes.Contains(raw, []byte(`\uFFFD`))
}

// parse keeps numbers as they are written: as floats, two large integers could look the same.
func parse(raw []byte) (fields, error) {
	object := fields{}
	if len(raw) == 0 {
		return object, nil
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	if err := decoder.Decode(&object); err != nil {
		return nil, err
	}
	return object, nil
}

// significant returns the metadata of an object without what the server sets, what the guard itself writes, and
// the times in managedFields. An empty value is the same as none there. It changes the object.
func significant(object fields) fields {
	meta, _ := object["metadata"].(fields)
	for _, key := range serverSet() {
		delete(meta, key)
	}
	annotations, _ := meta["annotations"].(fields)
	for _, key := range ownAnnotations() {
		delete(annotations, key)
	}
	if entries, ok := meta["managedFields"].([]any); ok {
		meta["managedFields"] = owned(entries)
	}
	maps.DeleteFunc(meta, func(_ string, v any) bool { return empty(v) })
	return meta
}

// owned returns the entries of managedFields without their times and without our annotations; an entry that owns
// nothing else is none.
func owned(entries []any) []any {
	kept := []any{}
	for _, e := range entries {
		entry, _ := e.(fields)
		delete(entry, "time")
		annotations := descend(entry, "fieldsV1", "f:metadata", "f:annotations")
		before := len(annotations)
		for _, key := range ownAnnotations() {
			delete(annotations, "f:"+key)
		}
		if len(annotations) < before {
			prune(entry)
		}
		if _, owns := entry["fieldsV1"]; owns {
			kept = append(kept, entry)
		}
	}
	return kept
}

// prune removes the maps above f:annotations that have become empty.
func prune(entry fields) {
	path := []string{"fieldsV1", "f:metadata", "f:annotations"}
	for n := len(path); n > 0; n-- {
		parent := descend(entry, path[:n-1]...)
		if !empty(parent[path[n-1]]) {
			return
		}
		delete(parent, path[n-1])
	}
}

func descend(m fields, path ...string) fields {
	for _, key := range path {
		m, _ = m[key].(fields)
	}
	return m
}

func differ(a, b fields, key string) bool { return !reflect.DeepEqual(a[key], b[key]) }

func empty(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case fields:
		return len(v) == 0
	case []any:
		return len(v) == 0
	case string:
		return v == ""
	}
	return false
}

// pointer joins the steps of a path into a JSON pointer.
func pointer(steps ...string) string {
	escape := strings.NewReplacer("~", "~0", "/", "~1")
	var b strings.Builder
	for _, step := range steps {
		b.WriteString("/" + escape.Replace(step))
	}
	return b.String()
}
