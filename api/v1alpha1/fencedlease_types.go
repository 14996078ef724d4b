// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// FencedLease is a lock with a token counter. Each grant issues the next token; the guard lets a write to
// an object protected by the lease through only with the current one.
//
// The rules below are the transitions of internal/protocol, said a second time in the API server. They
// stand at the root, because rules under status vanish with it. A differential test keeps both in step.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=fl,categories=fencing
// +kubebuilder:subresource:status
// +kubebuilder:selectablefield:JSONPath=`.status.holder.sessionUID`
// +kubebuilder:printcolumn:name="Holder",type=string,JSONPath=`.status.holder.identity`
// +kubebuilder:printcolumn:name="Token",type=integer,JSONPath=`.status.token`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Waiting",type=integer,JSONPath=`.status.waiting`
// +kubebuilder:printcolumn:name="Handovers",type=integer,JSONPath=`.status.handovers`
// +kubebuilder:printcolumn:name="Since",type=date,JSONPath=`.status.holder.acquireTime`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || has(self.status)",message="status cannot be removed: it holds the token counter"
// +kubebuilder:validation:XValidation:rule="!has(self.status) || ((self.status.phase == 'Held') == has(self.status.holder) && (self.status.phase == 'Cooldown') == has(self.status.cooldownUntil))",message="status.holder is there exactly while Held, status.cooldownUntil exactly in Cooldown"
// +kubebuilder:validation:XValidation:rule="!has(self.status) || (self.status.waiting >= size(self.status.queue) && (self.status.phase != 'Available' || size(self.status.queue) == 0))",message="status.waiting counts at least the queue, and nobody queues while the lease is Available"
// +kubebuilder:validation:XValidation:rule="!has(self.status) || (self.status.queue.all(e, self.status.queue.exists_one(o, o.sessionUID == e.sessionUID && o.ticket == e.ticket)) && !(has(self.status.holder) && self.status.queue.exists(e, e.sessionUID == self.status.holder.sessionUID && e.ticket == self.status.holder.ticket)))",message="a request (sessionUID and ticket) stands once in the line: as the holder or in the queue"
// +kubebuilder:validation:XValidation:rule="has(oldSelf.status) || !has(self.status) || (self.status.phase == 'Available' && self.status.token >= self.spec.minToken && self.status.waiting == 0 && self.status.handovers == 0 && size(self.status.terms) == 0)",message="the first status is Available, with nobody in line and no history"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(self.status) || (self.status.token == oldSelf.status.token ? self.status.handovers == oldSelf.status.handovers && (!has(self.status.holder) || (has(oldSelf.status.holder) && self.status.holder == oldSelf.status.holder)) : has(self.status.holder) && self.status.handovers == oldSelf.status.handovers + 1 && self.status.token == (self.spec.minToken > oldSelf.status.token ? self.spec.minToken : oldSelf.status.token + 1))",message="a new holder, and only that, takes the next token: the larger of status.token+1 and spec.minToken"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(self.status) || self.status.token == oldSelf.status.token || oldSelf.status.phase == 'Available' || (size(oldSelf.status.queue) > 0 && has(self.status.holder) && self.status.holder.identity == oldSelf.status.queue[0].identity && self.status.holder.session == oldSelf.status.queue[0].session && self.status.holder.sessionUID == oldSelf.status.queue[0].sessionUID && self.status.holder.user == oldSelf.status.queue[0].user && has(self.status.holder.podUID) == has(oldSelf.status.queue[0].podUID) && (!has(self.status.holder.podUID) || self.status.holder.podUID == oldSelf.status.queue[0].podUID) && self.status.holder.ticket == oldSelf.status.queue[0].ticket && [oldSelf.status.queue[0]] + self.status.queue == oldSelf.status.queue && self.status.waiting == oldSelf.status.waiting - 1)",message="from Held and Cooldown only the head of the queue follows, as it stands there, and the queue loses exactly its head"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(self.status) || self.status.token != oldSelf.status.token || self.status.phase == oldSelf.status.phase || (self.status.queue == oldSelf.status.queue && self.status.waiting == oldSelf.status.waiting)",message="a term that ends leaves the queue as it is"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(self.status) || self.status.phase != 'Cooldown' || (oldSelf.status.phase == 'Held' && self.status.token == oldSelf.status.token) || (oldSelf.status.phase == 'Cooldown' && has(self.status.cooldownUntil) && has(oldSelf.status.cooldownUntil) && self.status.cooldownUntil == oldSelf.status.cooldownUntil)",message="a cooldown follows a term, and its end stays as it was announced"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(self.status) || (has(oldSelf.status.holder) && (!has(self.status.holder) || self.status.token != oldSelf.status.token) ? size(self.status.terms) > 0 && self.status.terms[0].token == oldSelf.status.token && self.status.terms[0].identity == oldSelf.status.holder.identity && self.status.terms[0].sessionUID == oldSelf.status.holder.sessionUID && self.status.terms[0].user == oldSelf.status.holder.user && has(self.status.terms[0].podUID) == has(oldSelf.status.holder.podUID) && (!has(self.status.terms[0].podUID) || self.status.terms[0].podUID == oldSelf.status.holder.podUID) && self.status.terms[0].ticket == oldSelf.status.holder.ticket && self.status.terms[0].startTime == oldSelf.status.holder.acquireTime && (size(oldSelf.status.terms) < 10 ? self.status.terms == [self.status.terms[0]] + oldSelf.status.terms : self.status.terms + [oldSelf.status.terms[9]] == [self.status.terms[0]] + oldSelf.status.terms) : self.status.terms == oldSelf.status.terms)",message="status.terms grows by the term that ended, at the front, and only then"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(self.status) || !has(oldSelf.status.holder) || (has(self.status.holder) && self.status.token == oldSelf.status.token) || (size(self.status.terms) > 0 && (self.status.phase == 'Cooldown') == (self.spec.cooldownSeconds > 0 && self.status.terms[0].endReason != 'Released'))",message="a term that ended otherwise than by release is followed by the cooldown that the spec asks for, a released one by none"
type FencedLease struct {
	metav1.TypeMeta `json:",inline"`

	// metadata is the standard object's metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitzero"`

	// spec is what the users of the lease ask for.
	// +optional
	// +kubebuilder:default={}
	Spec FencedLeaseSpec `json:"spec,omitzero"`

	// status is the state of the lease. Absent until the controller has taken it up; never removed after.
	// Holders, contenders and the controller write it, each only the transitions that are theirs.
	// +optional
	Status *FencedLeaseStatus `json:"status,omitempty"`
}

// FencedLeaseSpec is what the users of a lease ask for.
type FencedLeaseSpec struct {
	// leaseDurationSeconds is how long a holder may be silent before it loses the lease, and so the longest
	// TTL of a session that may hold it. From 1 to 3600; default 15.
	// +optional
	// +kubebuilder:default=15
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	LeaseDurationSeconds int32 `json:"leaseDurationSeconds,omitempty"`

	// maxHoldSeconds ends a term after this long, however well the holder renews. From 1 to 31536000 (a year);
	// absent: a term lasts until it is released or lost.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=31536000
	MaxHoldSeconds *int32 `json:"maxHoldSeconds,omitempty"`

	// cooldownSeconds is for how long nobody gets the lease after a term that ended otherwise than by
	// release. From 0 to 3600; default 0.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=3600
	CooldownSeconds int32 `json:"cooldownSeconds"`

	// minToken is a recovery floor: the next token issued is at least this. From 0 to 2^52; default 0.
	// To set or change it needs the verb bypass on the lease.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4503599627370496
	MinToken int64 `json:"minToken"`

	// enforcement says what becomes of a write that the guard finds wanting. Default Deny.
	// Anything else needs the verb bypass on the lease.
	// +optional
	// +kubebuilder:default=Deny
	Enforcement Enforcement `json:"enforcement,omitempty"`

	// tokenBinding says who may use the current token. Default Holder.
	// Anything else needs the verb bypass on the lease.
	// +optional
	// +kubebuilder:default=Holder
	TokenBinding TokenBinding `json:"tokenBinding,omitempty"`
}

// Enforcement says what becomes of a write that the guard finds wanting.
// +kubebuilder:validation:Enum=Deny;Warn
type Enforcement string

const (
	// EnforcementDeny refuses the write.
	EnforcementDeny Enforcement = "Deny"
	// EnforcementWarn lets the write pass, with a warning header, an audit annotation and a metric.
	EnforcementWarn Enforcement = "Warn"
)

// TokenBinding says who may use the current token.
// +kubebuilder:validation:Enum=Holder;None
type TokenBinding string

const (
	// TokenBindingHolder: only the holder's own user and Pod.
	TokenBindingHolder TokenBinding = "Holder"
	// TokenBindingNone: whoever knows it.
	TokenBindingNone TokenBinding = "None"
)

// Phase is the state of a lease.
// +kubebuilder:validation:Enum=Available;Held;Cooldown
type Phase string

const (
	// PhaseAvailable: nobody holds the lease and nobody stands in the queue.
	PhaseAvailable Phase = "Available"
	// PhaseHeld: status.holder holds it with status.token.
	PhaseHeld Phase = "Held"
	// PhaseCooldown: a term ended otherwise than by release; nobody gets the lease before the controller says so.
	PhaseCooldown Phase = "Cooldown"
)

// FencedLeaseStatus is the state of a lease.
type FencedLeaseStatus struct {
	// observedGeneration is the generation of the spec that the controller saw last. It writes it.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// phase is the state: Available, Held or Cooldown.
	// +required
	Phase Phase `json:"phase"`

	// token is the last token issued: while Held, the holder's. It never falls and never repeats. From 1 to 2^53-1.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	Token int64 `json:"token"`

	// holder is who holds the lease. Present exactly while Held; changes only together with token.
	// +optional
	Holder *Holder `json:"holder,omitempty"`

	// queue is who comes next, first in line first. The controller keeps up to 8 contenders here, the others
	// wait behind. Always present; empty while Available.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=8
	Queue []Contender `json:"queue"`

	// waiting counts all waiters: those in the queue and those behind it. Never below the length of the queue.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	Waiting int32 `json:"waiting"`

	// handovers counts the terms granted since the lease was created.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=9007199254740991
	Handovers int64 `json:"handovers"`

	// terms are the last ended terms, newest first, at most 10. Always present.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=10
	Terms []Term `json:"terms"`

	// cooldownUntil is when the cooldown ends by the clock of the controller that began it: for people, nobody
	// computes with it. Present exactly in Cooldown.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:Pattern=`^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$`
	// +kubebuilder:validation:MaxLength=27
	CooldownUntil *metav1.MicroTime `json:"cooldownUntil,omitempty"`

	// conditions are what the controller says of the lease: Ready.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=8
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Contender is a request for the lease. Sessions ask by their own object; the controller puts them in line.
type Contender struct {
	// identity is the holderIdentity of the session: for people, any UTF-8, up to 1024 characters.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Identity string `json:"identity"`

	// session is the name of the session: a coordination.k8s.io/v1 Lease of the same namespace.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
	Session string `json:"session"`

	// sessionUID is the UID of that Lease. With ticket it names one request.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=36
	SessionUID types.UID `json:"sessionUID"`

	// user is who owns the session, up to 512 characters.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	User string `json:"user"`

	// podUID is the Pod of the owner; absent outside Pods.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=36
	PodUID types.UID `json:"podUID,omitempty"`

	// ticket grows with each request of the session. From 1 to 2^53-1.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	Ticket int64 `json:"ticket"`
}

// Holder is the contender who holds the lease.
type Holder struct {
	Contender `json:",inline"`

	// acquireTime is when the term was granted, by the clock of whoever wrote the grant: for people, nobody
	// computes with it.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:Pattern=`^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$`
	// +kubebuilder:validation:MaxLength=27
	AcquireTime metav1.MicroTime `json:"acquireTime"`
}

// Term is a term that ended: the recorded handover.
type Term struct {
	// token is the term's token.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	Token int64 `json:"token"`

	// identity is who held the lease.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Identity string `json:"identity"`

	// sessionUID is the session of the holder.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=36
	SessionUID types.UID `json:"sessionUID"`

	// user is who owned the session: a session's UID can be claimed by others, user and Pod cannot.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	User string `json:"user"`

	// podUID is the Pod of the owner; absent outside Pods.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=36
	PodUID types.UID `json:"podUID,omitempty"`

	// ticket is the request that the term answered.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=9007199254740991
	Ticket int64 `json:"ticket"`

	// startTime is the term's acquireTime.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:Pattern=`^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$`
	// +kubebuilder:validation:MaxLength=27
	StartTime metav1.MicroTime `json:"startTime"`

	// endTime is when the term ended, by the clock of whoever ended it: for people.
	// +required
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:Format=date-time
	// +kubebuilder:validation:Pattern=`^[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z$`
	// +kubebuilder:validation:MaxLength=27
	EndTime metav1.MicroTime `json:"endTime"`

	// endReason says why it ended.
	// +required
	EndReason EndReason `json:"endReason"`
}

// EndReason says why a term ended.
// +kubebuilder:validation:Enum=Released;Expired;SessionClosed;MaxHold;Stolen;Invalid
type EndReason string

const (
	// EndReleased: the holder gave the lease back.
	EndReleased EndReason = "Released"
	// EndExpired: the session was silent for longer than its TTL.
	EndExpired EndReason = "Expired"
	// EndSessionClosed: the session object is gone: its Pod was deleted and garbage collection took it, or
	// someone deleted it.
	EndSessionClosed EndReason = "SessionClosed"
	// EndMaxHold: the term lasted for spec.maxHoldSeconds.
	EndMaxHold EndReason = "MaxHold"
	// EndStolen: somebody with the verb steal ended it.
	EndStolen EndReason = "Stolen"
	// EndInvalid: the controller found the holder's session missing, someone else's, or slower than the
	// lease allows.
	EndInvalid EndReason = "Invalid"
)

// FencedLeaseList is a list of FencedLeases.
// +kubebuilder:object:root=true
type FencedLeaseList struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard list's metadata.
	// +optional
	metav1.ListMeta `json:"metadata,omitzero"`
	// items are the leases.
	Items []FencedLease `json:"items"`
}
