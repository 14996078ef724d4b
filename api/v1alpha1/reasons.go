// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Reason is a machine word that says why: of a denial (in details.causes[].type of the answer), in the
// guard's metrics and audit annotations.
type Reason string

// Reasons of the guard.
const (
	// ReasonTokenInvalid: the token is not a decimal from 1 to 2^53-1 without leading zero.
	ReasonTokenInvalid Reason = "TokenInvalid"
	// ReasonTokenMissing: the object is protected and the write carries no token.
	ReasonTokenMissing Reason = "TokenMissing"
	// ReasonTokenStale: a newer token was granted, or accepted for this object.
	ReasonTokenStale Reason = "TokenStale"
	// ReasonTokenUnknown: the lease has not issued this token yet.
	ReasonTokenUnknown Reason = "TokenUnknown"
	// ReasonNotProtected: the write carries a token, but the object names no lease.
	ReasonNotProtected Reason = "NotProtected"
	// ReasonLeaseNotFound: the lease that the object names does not exist, or cannot.
	ReasonLeaseNotFound Reason = "LeaseNotFound"
	// ReasonNotHeld: nobody holds the lease.
	ReasonNotHeld Reason = "NotHeld"
	// ReasonNotHolder: the token is current, but it is somebody else's.
	ReasonNotHolder Reason = "NotHolder"
	// ReasonVerbMissing: the requester lacks the verb on the lease (protect, bypass) that the write needs.
	ReasonVerbMissing Reason = "VerbMissing"
	// ReasonProtectionKept: the write removes or changes the lease annotation without a bypass.
	ReasonProtectionKept Reason = "ProtectionKept"
	// ReasonLeaseUnreadable: the lease could not be read in time; the answer is 503 and the write may be repeated.
	ReasonLeaseUnreadable Reason = "LeaseUnreadable"
)

// Condition types and reasons of a FencedLease.
const (
	// ConditionReady: the controller has taken up the lease, so that it can be acquired.
	ConditionReady = "Ready"
	// ConditionReasonInitialised: status.token was seeded; the lease can be acquired.
	ConditionReasonInitialised = "Initialised"
	// ConditionReasonTokensExhausted: no token is left below 2^53; the lease grants nothing any more.
	ConditionReasonTokensExhausted = "TokensExhausted"
)
