// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Annotations of protected objects.
const (
	// LeaseAnnotation protects an object: its value names the FencedLease that fences it, NAME for an
	// object of the same namespace, NAMESPACE/NAME for a cluster-scoped one.
	LeaseAnnotation = "fencedlease.dev/lease"

	// TokenAnnotation presents a token with a write: a decimal from 1 to 2^53-1. It lives in requests only;
	// the guard consumes it, so a stored object never has it.
	TokenAnnotation = "fencedlease.dev/token"

	// AcceptedTokenAnnotation is the mark: the highest token that was accepted for the object so far.
	// Only the guard writes it, from token and old object; what a request says of it is ignored.
	AcceptedTokenAnnotation = "fencedlease.dev/accepted-token"

	// BypassAnnotation asks to pass without a token, for the reason in its value. It needs the verb
	// bypass on the lease, and is consumed like the token.
	BypassAnnotation = "fencedlease.dev/bypass"
)

// Label and annotations of sessions: coordination.k8s.io/v1 Leases, one per process and namespace.
const (
	// SessionLabel, with the value "true", makes a Lease a session.
	SessionLabel = "fencedlease.dev/session"

	// UserAnnotation names the user who owns the session. It equals the requester and never changes.
	UserAnnotation = "fencedlease.dev/user"

	// PodUIDAnnotation is the UID of the owner's Pod; absent outside Pods. It never changes.
	PodUIDAnnotation = "fencedlease.dev/pod-uid"

	// WaitingForAnnotation lists what the session wants, as LEASE=TICKET, separated by single spaces.
	WaitingForAnnotation = "fencedlease.dev/waiting-for"
)

// PodUIDExtra is the key of userInfo.extra under which the API server gives the UID of the Pod that a
// service-account token is bound to.
const PodUIDExtra = "authentication.kubernetes.io/pod-uid"

// Verbs on fencedleases beyond those of the API, asked of the authorizer.
const (
	// VerbProtect allows to put an object under a lease. Shipped to edit and admin.
	VerbProtect = "protect"
	// VerbBypass allows to write past the guard, to unprotect, and to weaken a lease.
	VerbBypass = "bypass"
	// VerbSteal allows to end somebody else's term.
	VerbSteal = "steal"
	// VerbManage is the controller's: everything else in status. Checked without namespace and name.
	VerbManage = "manage"
)

// Bounds, repeated by the schema and the policies.
const (
	// MaxToken is the last token: 2^53-1, the largest integer that every JSON client keeps exact.
	MaxToken = 1<<53 - 1
	// MaxQueue is how many contenders the queue in status holds; the others wait behind it.
	MaxQueue = 8
	// MaxTerms is how many ended terms status keeps.
	MaxTerms = 10
	// MaxWants is how many leases one session may wait for at a time.
	MaxWants = 64
	// MaxIdentityLength is the longest holderIdentity, in characters.
	MaxIdentityLength = 1024
	// MaxUserLength is the longest user name, in characters.
	MaxUserLength = 512
)
