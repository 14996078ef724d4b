// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

const (
	// longestNote is what the API server takes, in bytes, and longestName what of it one identity may use: two of
	// them and the words fit.
	longestNote, longestName = 1024, 400

	reasonGranted  = "Granted"
	reasonUnusable = "UnusableSession"
)

// notice is an event that is due: it is made of what is stored already, so it tells only what stuck.
type notice struct {
	regarding, related runtime.Object // related: the session, nil where none is known
	warning            bool
	reason, action     string
	note               string
}

// granted: nobody held the lease, and somebody got it.
func granted(t term) notice {
	return notice{
		related: related(t),
		reason:  reasonGranted,
		action:  "Grant",
		note:    fmt.Sprintf("%s got the lease with token %d.", quote(t.Identity), t.Token),
	}
}

// ended: a term ended, and was handed over in the same write unless to is nil.
func ended(t term, to *term) notice {
	n := notice{
		related: related(t),
		warning: t.EndReason == v1alpha1.EndExpired || t.EndReason == v1alpha1.EndStolen || t.EndReason == v1alpha1.EndInvalid,
		reason:  string(t.EndReason),
		action:  "EndTerm",
		note:    fmt.Sprintf("The term of %s with token %d ended: %s.", quote(t.Identity), t.Token, because(t.EndReason)),
	}
	if to != nil {
		n.action = "HandOver"
		n.note += fmt.Sprintf(" %s got the lease with token %d.", quote(to.Identity), to.Token)
	}
	return n
}

// unusable: a Lease has the session label, and cannot be a session.
func unusable(s *sessionSight) notice {
	return notice{
		regarding: reference(s.name, s.uid),
		warning:   true,
		reason:    reasonUnusable,
		action:    "Skip",
		note:      fmt.Sprintf("It holds nothing and waits for nothing until this is mended: %s.", s.fault),
	}
}

// because says the reason in words.
func because(reason v1alpha1.EndReason) string {
	switch reason {
	case v1alpha1.EndReleased:
		return "it was released"
	case v1alpha1.EndExpired:
		return "its session was silent for longer than its TTL"
	case v1alpha1.EndSessionClosed:
		return "its session was deleted"
	case v1alpha1.EndMaxHold:
		return "it lasted for spec.maxHoldSeconds"
	case v1alpha1.EndStolen:
		return "it was stolen"
	case v1alpha1.EndInvalid:
		return "its session is missing, somebody else's, or slower than spec.leaseDurationSeconds"
	}
	return string(reason)
}

// tell records the event.
func (n notice) tell(recorder events.EventRecorder) {
	kind := corev1.EventTypeNormal
	if n.warning {
		kind = corev1.EventTypeWarning
	}
	recorder.Eventf(n.regarding, n.related, kind, n.reason, n.action, "%s", clip(n.note, longestNote))
}

// related is the session of the term, where its name is known.
func related(t term) runtime.Object {
	if t.session.Name == "" {
		return nil
	}
	return reference(t.session, t.SessionUID)
}

func quote(identity string) string { return fmt.Sprintf("%q", clip(identity, longestName)) }

// clip cuts s to at most that many bytes, between characters.
func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	const dots = "…"
	end := most - len(dots)
	for end > 0 && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + dots
}
