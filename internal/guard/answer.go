// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"net/http"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// answer translates a decision.
func answer(req admission.Request, w write, d protocol.Decision) admission.Response {
	resp := admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{AuditAnnotations: audit(d)}}
	if !d.Allowed() {
		// Forbidden, not Conflict: generic retry loops repeat conflicts at once, and a stale token stays stale.
		resp.Result = status(req, http.StatusForbidden, metav1.StatusReasonForbidden, d.Reason, d.Message)
		return resp
	}
	resp.Allowed = true
	resp.Warnings = d.Warnings
	resp.Patches = patch(w, d)
	return resp
}

// unjudged answers a write whose lease or authority could not be read. The client may repeat it: client-go does so
// by itself, after the time named here.
func unjudged(req admission.Request, err error) admission.Response {
	message := fmt.Sprintf("this write could not be judged, and so was not let through: %v; repeat it", err)
	result := status(req, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable, v1alpha1.ReasonLeaseUnreadable, message)
	result.Details.RetryAfterSeconds = 1
	return admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{
		Result:           result,
		AuditAnnotations: map[string]string{"result": resultUnjudged, "reason": string(v1alpha1.ReasonLeaseUnreadable)},
	}}
}

func malformed(err error) admission.Response {
	resp := admission.Errored(http.StatusBadRequest, err)
	resp.Result.Reason = metav1.StatusReasonBadRequest
	return resp
}

func status(req admission.Request, code int32, reason metav1.StatusReason, cause v1alpha1.Reason, message string) *metav1.Status {
	return &metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    code,
		Reason:  reason,
		Message: message,
		Details: &metav1.StatusDetails{
			Name: req.Name, Group: req.Resource.Group, Kind: req.Resource.Resource,
			Causes: []metav1.StatusCause{{
				Type:    metav1.CauseType(cause),
				Message: message,
				Field:   fmt.Sprintf("metadata.annotations[%s]", v1alpha1.TokenAnnotation),
			}},
		},
	}
}

// audit returns what the API server adds to its audit log, below the name of the webhook.
func audit(d protocol.Decision) map[string]string {
	annotations := map[string]string{"result": string(d.Result)}
	if d.Lease.Name != "" {
		annotations["lease"] = d.Lease.String()
	}
	if d.Reason != "" {
		annotations["reason"] = string(d.Reason)
	}
	if d.Bypass != "" {
		annotations["bypass"] = d.Bypass
	}
	return annotations
}
