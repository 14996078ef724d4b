// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// What callers branch on. They come wrapped; match with errors.Is.
var (
	// ErrHeld: somebody else holds the lease, or it cools down. *HeldError says more.
	ErrHeld = errors.New("lease is held")
	// ErrLost: the term or the whole session is over. Stop the work; it may be somebody else's already.
	ErrLost = errors.New("lost")
	// ErrNotReady: the lease exists, but no controller has initialised it yet.
	ErrNotReady = errors.New("lease is not initialised")
	// ErrNotProtected: nothing guards the object that was written, so the token fences nothing there.
	ErrNotProtected = errors.New("nothing guards this object")
	// ErrFenced: the guard refused the write. *FencedError says why.
	ErrFenced = errors.New("write was fenced off")
)

// HeldError says who has the lease. It matches ErrHeld.
type HeldError struct {
	// Lease is the name of the lease.
	Lease string
	// Phase is Held or Cooldown.
	Phase v1alpha1.Phase
	// Identity is who holds the lease; empty in Cooldown.
	Identity string
	// Token is the last token issued; while Held, the holder's.
	Token Token
}

// Error says who has the lease and what to do.
func (e *HeldError) Error() string {
	if e.Phase == v1alpha1.PhaseCooldown {
		return fmt.Sprintf("lease %q cools down after token %d; wait with Acquire, or try again later", e.Lease, e.Token)
	}
	return fmt.Sprintf("lease %q is held by %q with token %d; wait with Acquire, or try again later", e.Lease, e.Identity, e.Token)
}

// Is matches ErrHeld.
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// FencedError is a write that the guard refused. It matches ErrFenced, and ErrNotProtected where the guard
// refused because the object names no lease. It unwraps to the API server's error.
type FencedError struct {
	// Reason is the machine word of the denial.
	Reason v1alpha1.Reason
	err    error
}

// Error is what the guard said, which includes what to do.
func (e *FencedError) Error() string { return fmt.Sprintf("%s (%s)", e.err.Error(), e.Reason) }

// Is matches ErrFenced and, by reason, ErrNotProtected.
func (e *FencedError) Is(target error) bool {
	return target == ErrFenced || target == ErrNotProtected && e.Reason == v1alpha1.ReasonNotProtected
}

// Unwrap is the API server's error.
func (e *FencedError) Unwrap() error { return e.err }

// AsFenced rebuilds the guard's denial from an error of any client. Errors of NewClient carry it already.
func AsFenced(err error) (*FencedError, bool) {
	if fenced, ok := errors.AsType[*FencedError](err); ok {
		return fenced, true
	}
	for _, c := range causes(err) {
		if reason := v1alpha1.Reason(c.Type); isDenial(reason) {
			return &FencedError{Reason: reason, err: err}, true
		}
	}
	return nil, false
}

// isDenial says whether the guard refuses for good with that reason. ReasonLeaseUnreadable is none: it says that the
// write may be repeated.
func isDenial(reason v1alpha1.Reason) bool {
	switch reason {
	case v1alpha1.ReasonTokenInvalid, v1alpha1.ReasonTokenMissing, v1alpha1.ReasonTokenStale, v1alpha1.ReasonTokenUnknown,
		v1alpha1.ReasonNotProtected, v1alpha1.ReasonLeaseNotFound, v1alpha1.ReasonNotHeld, v1alpha1.ReasonNotHolder,
		v1alpha1.ReasonVerbMissing, v1alpha1.ReasonProtectionKept:
		return true
	}
	return false
}

func causes(err error) []metav1.StatusCause {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return nil
	}
	return status.Status().Details.Causes
}

// raced says that a test operation of a JSON patch failed: a 422 without causes. One with causes is a rule of
// the CRD.
func raced(err error) bool { return apierrors.IsInvalid(err) && len(causes(err)) == 0 }

// definite says that the API server refused for good, so that repeating the same call is of no use. Anything
// else, a timeout above all, may have landed, or may still.
func definite(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := int(status.Status().Code)
	return code >= 400 && code < 500 && code != http.StatusRequestTimeout && code != http.StatusTooManyRequests &&
		code != http.StatusConflict && !raced(err)
}

// explain adds what was done, and what to do about it where that is known.
func (s *Session) explain(err error, doing string) error {
	return explain(err, doing, s.namespace, s.api.host)
}

func explain(err error, doing, namespace, host string) error {
	hint := ""
	var status apierrors.APIStatus
	var transport *url.Error
	switch {
	case errors.As(err, &transport):
		hint = fmt.Sprintf("; no answer from the API server at %s: check that the cluster runs and the configuration points to it", host)
	case apierrors.IsNotFound(err) && noSuchResource(err):
		hint = "; the API server does not know this kind: install FencedLease, config/crd first"
	case apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "namespaces":
		hint = fmt.Sprintf("; create the namespace %q, or set Options.Namespace", namespace)
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), " cannot "):
		hint = fmt.Sprintf("; bind the ClusterRole fencedlease-contender to this user in namespace %q", namespace)
	case apierrors.IsUnauthorized(err):
		hint = "; the API server does not accept the credentials: check the configuration"
	}
	return fmt.Errorf("%s: %w%s", doing, err, hint)
}

// noSuchResource tells a path that the API server does not serve from an object that does not exist.
func noSuchResource(err error) bool {
	return slices.ContainsFunc(causes(err), func(c metav1.StatusCause) bool {
		return c.Type == metav1.CauseTypeUnexpectedServerResponse
	})
}
