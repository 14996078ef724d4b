// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"errors"
	"fmt"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/fencedlease/fencedlease/internal/protocol"
)

// errMalformed: the request is not one that this guard can judge. Repeating it does not help.
var errMalformed = errors.New("cannot judge this request")

// write is a request, decoded as far as every verdict needs it.
type write struct {
	protocol.Write
	// newRaw is the object of the request, for the patch.
	newRaw []byte
}

// decode reads the metadata of both objects; the rest is compared only if the verdict asks for it.
func (g *Guard) decode(req admission.Request) (write, error) {
	w := write{newRaw: req.Object.Raw}
	w.Namespace, w.Subresource, w.By = req.Namespace, req.SubResource, g.requester(req.UserInfo)
	// DELETE and /scale are kinds of their own: their place is here, and in the rules of the webhook configuration.
	if req.Operation != admissionv1.Create && req.Operation != admissionv1.Update {
		return w, fmt.Errorf("%w: operation %s is not one of CREATE and UPDATE; take it out of the rules of the webhook configuration", errMalformed, req.Operation)
	}
	if req.SubResource != "" && req.SubResource != "status" {
		return w, fmt.Errorf("%w: subresource %q is not status; take it out of the rules of the webhook configuration", errMalformed, req.SubResource)
	}
	var err error
	if w.New, err = metadata(req.Object.Raw); err != nil {
		return w, fmt.Errorf("%w: object: %w", errMalformed, err)
	}
	if req.Operation == admissionv1.Update {
		if w.Old, err = metadata(req.OldObject.Raw); err != nil {
			return w, fmt.Errorf("%w: old object: %w", errMalformed, err)
		}
	}
	scope := scopeOf(req, g.HasStatus)
	w.Changes = func() (protocol.Changes, error) {
		changes, err := compare(req.OldObject.Raw, req.Object.Raw, scope)
		if err != nil {
			return changes, fmt.Errorf("%w: %w", errMalformed, err)
		}
		return changes, nil
	}
	return w, nil
}

// metadata reads the metadata of an object and nothing else of it.
func metadata(raw []byte) (*metav1.PartialObjectMetadata, error) {
	var object struct {
		Metadata *metav1.ObjectMeta `json:"metadata"`
	}
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, errors.New("it is empty")
	}
	// This json minds the case of keys. The standard one would take "Metadata", which a custom resource may have
	// beside it, for the metadata.
	if err := json.Unmarshal(raw, &object); err != nil {
		return nil, err
	}
	if object.Metadata == nil {
		return nil, errors.New("it has no metadata")
	}
	return &metav1.PartialObjectMetadata{ObjectMeta: *object.Metadata}, nil
}

// scopeOf says which part of the object the request can change.
func scopeOf(req admission.Request, hasStatus func(schema.GroupResource) bool) scope {
	resource := schema.GroupResource{Group: req.Resource.Group, Resource: req.Resource.Resource}
	switch {
	case req.SubResource == "status":
		return scopeStatus
	case hasStatus(resource):
		return scopeWithoutStatus
	}
	return scopeAll
}
