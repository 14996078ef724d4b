// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// Write is a create or update that the guard has to judge.
type Write struct {
	// Namespace is the object's; empty for a cluster-scoped one.
	Namespace string
	// Subresource is empty or "status".
	Subresource string
	// Old is the stored object, nil on create; New is what the request would make of it.
	Old, New *metav1.PartialObjectMetadata
	// By is who writes.
	By Requester
	// Changes tells what the write changes. It is asked only where the verdict depends on it.
	Changes func() (Changes, error)
}

// Requester is who writes: the predicate of holders, user and Pod, and whether he is one of the system's own.
type Requester struct {
	User   string
	PodUID types.UID
	// Collector: the garbage collector, which may change owners and finalizers.
	Collector bool
}

// Is says whether the requester is the contender: user names equal and Pod UIDs equal, absent counting as empty.
func (r Requester) Is(c v1alpha1.Contender) bool { return r.User == c.User && r.PodUID == c.PodUID }

// Changes are the parts of an object that a write changes, beside what the server sets and what the guard
// itself writes. The times of managedFields do not count.
type Changes struct {
	Owners, Finalizers, ManagedFields, Other bool
}

// World answers what a verdict depends on beside the request: live, and only when asked.
type World interface {
	// Lease reads a lease; nil, nil when there is none.
	Lease(name types.NamespacedName) (*v1alpha1.FencedLease, error)
	// Allowed asks whether the requester has a verb on a lease.
	Allowed(verb string, name types.NamespacedName) (bool, error)
}

// Result is what becomes of a write, in one word, for metrics and audit.
type Result string

// The results.
const (
	// ResultAccepted: the token is current.
	ResultAccepted Result = "accepted"
	// ResultUnchanged: no token, and nothing changes.
	ResultUnchanged Result = "unchanged"
	// ResultSystem: the garbage collector, or finalizers of a dying object.
	ResultSystem Result = "system"
	// ResultDeclared: the object is protected from now on, or by another lease.
	ResultDeclared Result = "declared"
	// ResultBypassed: passed, or unprotected, by annotation and verb.
	ResultBypassed Result = "bypassed"
	// ResultWarned: would be denied, but the lease only warns.
	ResultWarned Result = "warned"
	// ResultDenied: refused.
	ResultDenied Result = "denied"
	// ResultIgnored: the object is not protected and the write asks for nothing.
	ResultIgnored Result = "ignored"
)

// Decision is the verdict on a write.
type Decision struct {
	Result Result
	// Reason is set when the write is denied or warned about.
	Reason v1alpha1.Reason
	// Message says what is wrong and what to do. Set with Reason.
	Message string
	// Lease names the lease that judged; empty where none did.
	Lease types.NamespacedName
	// Mark is the accepted-token annotation that the object must have after the write; empty: none.
	Mark string
	// Behind: the lease's token is below the object's mark, as after a restore.
	Behind bool
	// Bypass is the reason given for a bypass.
	Bypass string
	// Warnings are for the writer, on writes that pass.
	Warnings []string
}

// Allowed says whether the write may pass.
func (d Decision) Allowed() bool { return d.Result != ResultDenied }

// Verdict judges a write. It reads no clock: a token is stale because a newer one exists, not because a clock
// says so. An error means that something could not be read, so the write can be neither let through nor refused
// for good.
//
// First of all, a token that is presented must be current, in every case. The lease that the old object names
// is the judge; the new name counts only where protection is declared. What the verdict compares with the old
// object (the mark) is atomic with the write; the lease is as it was when it was read.
func Verdict(w Write, world World) (Decision, error) {
	j := judge{Write: w, World: world}
	j.oldLease, j.wasProtected = annotation(w.Old, v1alpha1.LeaseAnnotation)
	j.newLease, j.isProtected = annotation(w.New, v1alpha1.LeaseAnnotation)
	if w.Subresource != "" {
		j.newLease, j.isProtected = j.oldLease, j.wasProtected // metadata is not this write's business
	}
	j.presented, j.hasToken = annotation(w.New, v1alpha1.TokenAnnotation)
	j.bypass, j.hasBypass = annotation(w.New, v1alpha1.BypassAnnotation)
	if j.wasProtected { // else anybody may have written it
		j.mark, _ = annotation(w.Old, v1alpha1.AcceptedTokenAnnotation)
	}
	return j.verdict()
}

// judge is one verdict under way.
type judge struct {
	Write
	World

	oldLease, newLease        string
	wasProtected, isProtected bool
	presented, bypass         string
	hasToken, hasBypass       bool
	mark                      string // of the old object
}

func (j *judge) verdict() (Decision, error) {
	switch {
	case !j.wasProtected && !j.isProtected:
		return j.unprotected(), nil
	case !j.wasProtected:
		return j.declare()
	case j.hasToken:
		d, err := j.checkToken(j.oldLease)
		if err != nil || !d.Allowed() || j.newLease == j.oldLease && j.isProtected {
			return d, err
		}
		return j.unprotect()
	case !j.isProtected || j.newLease != j.oldLease:
		return j.unprotect()
	}
	return j.withoutToken()
}

// unprotected judges a write to an object that no lease fences, before or after.
func (j *judge) unprotected() Decision {
	if !j.hasToken && !j.hasBypass {
		from := j.New
		if j.Subresource != "" {
			from = j.Old
		}
		mark, _ := annotation(from, v1alpha1.AcceptedTokenAnnotation)
		return Decision{Result: ResultIgnored, Mark: mark}
	}
	if _, err := ParseToken(j.presented); j.hasToken && err != nil {
		return deny(v1alpha1.ReasonTokenInvalid, "%v; write the token that the lease issued, as a string", err)
	}
	return deny(v1alpha1.ReasonNotProtected,
		"nothing guards this write: the object names no lease; protect it first with the annotation %s, or write without token", v1alpha1.LeaseAnnotation)
}

// declare judges the write that puts an object under a lease: the first annotation, or its creation.
func (j *judge) declare() (Decision, error) {
	d := Decision{Result: ResultDeclared}
	if j.hasToken {
		checked, err := j.checkToken(j.newLease)
		switch {
		case err != nil || !checked.Allowed():
			return checked, err
		case checked.Result == ResultAccepted && j.Old == nil:
			return checked, nil // a holder may create what he protects
		case checked.Result == ResultWarned:
			d = checked // the warning stays; the verb is needed all the same
		}
	}
	return j.declareUnder(d)
}

// declareUnder asks for the verb protect on the new lease, and starts the mark at the lease's token.
func (j *judge) declareUnder(d Decision) (Decision, error) {
	name, err := j.leaseName(j.newLease)
	if err != nil {
		return deny(v1alpha1.ReasonLeaseNotFound, "%v", err), nil
	}
	d.Lease = name
	if denied, err := j.require(v1alpha1.VerbProtect, name, "to protect an object with it"); err != nil || denied != nil {
		return orDenied(denied), err
	}
	lease, err := j.World.Lease(name)
	if err != nil {
		return Decision{}, err
	}
	var token int64
	if lease == nil || lease.Status == nil {
		d.Mark = ""
		d.Warnings = append(d.Warnings, fmt.Sprintf("lease %s does not exist or is not initialised yet: until it is, every write to this object is refused", name))
	} else {
		token = lease.Status.Token
		d.Mark = FormatToken(token)
	}
	// Only an object that no lease fenced before can have come from a restore: one that is pointed elsewhere
	// brings the mark of its old lease along.
	claimed, _ := annotation(j.New, v1alpha1.AcceptedTokenAnnotation)
	if n, err := ParseToken(claimed); err == nil && n > token && !j.wasProtected {
		d.Behind = true
		d.Warnings = append(d.Warnings, fmt.Sprintf(
			"the object came with the mark %d, above the token %d of lease %s, and starts at the latter: if it was restored and the mark is genuine, set spec.minToken of the lease above it first", n, token, name))
	}
	return d, nil
}

// unprotect judges the write that takes an object from its lease, or points it to another.
func (j *judge) unprotect() (Decision, error) {
	old, err := j.leaseName(j.oldLease)
	if err != nil {
		old = types.NamespacedName{Namespace: j.Namespace, Name: j.oldLease}
	}
	if !j.hasBypass || j.bypass == "" {
		d := deny(v1alpha1.ReasonProtectionKept,
			"the object is protected by lease %s and stays so: to change or remove the annotation %s, write the annotation %s with a reason in the same request, with the verb %s on the lease",
			old, v1alpha1.LeaseAnnotation, v1alpha1.BypassAnnotation, v1alpha1.VerbBypass)
		d.Lease = old
		return d, nil
	}
	if denied, err := j.require(v1alpha1.VerbBypass, old, "to unprotect the object"); err != nil || denied != nil {
		return orDenied(denied), err
	}
	d := Decision{Result: ResultBypassed, Lease: old, Bypass: j.bypass}
	if !j.isProtected {
		return d, nil
	}
	return j.declareUnder(d)
}

// withoutToken judges a write to a protected object, which stays protected, that presents no token.
func (j *judge) withoutToken() (Decision, error) {
	changes, err := j.Changes()
	if err != nil {
		return Decision{}, err
	}
	dying := j.Old.DeletionTimestamp != nil
	switch {
	case changes == Changes{}:
		return Decision{Result: ResultUnchanged, Mark: j.mark}, nil
	case !changes.Other && (j.By.Collector || dying && changes.Finalizers && !changes.Owners):
		return Decision{Result: ResultSystem, Mark: j.mark}, nil
	case j.hasBypass:
		return j.bypassed()
	}
	name, lease, denied, err := j.readLease(j.oldLease)
	if err != nil || denied != nil {
		return orDenied(denied), err
	}
	return j.refuse(name, lease, v1alpha1.ReasonTokenMissing,
		"the object is protected by lease %s, and this write carries no token; %s", name, whatToDo(lease)), nil
}

func (j *judge) bypassed() (Decision, error) {
	name, err := j.leaseName(j.oldLease)
	if err != nil {
		name = types.NamespacedName{Namespace: j.Namespace, Name: j.oldLease}
	}
	if j.bypass == "" {
		return deny(v1alpha1.ReasonVerbMissing, "the annotation %s is empty: write the reason for the bypass into it", v1alpha1.BypassAnnotation), nil
	}
	if denied, err := j.require(v1alpha1.VerbBypass, name, "to write past the guard"); err != nil || denied != nil {
		return orDenied(denied), err
	}
	return Decision{Result: ResultBypassed, Lease: name, Bypass: j.bypass, Mark: j.mark}, nil
}

// checkToken judges the token that the write presents, by the lease of that name.
func (j *judge) checkToken(leaseName string) (Decision, error) {
	token, invalid := ParseToken(j.presented)
	name, lease, denied, err := j.readLease(leaseName)
	if err != nil || (denied != nil && invalid == nil) {
		return orDenied(denied), err
	}
	mark, _ := ParseToken(j.mark) // the guard wrote it, so it parses; one from before the guard counts as none
	switch {
	case invalid != nil:
		return j.refuse(name, lease, v1alpha1.ReasonTokenInvalid, "%v; write the token that the lease issued, as a string", invalid), nil
	case token < mark:
		return j.refuse(name, lease, v1alpha1.ReasonTokenStale,
			"this object has accepted token %d, and this write carries %d; %s", mark, token, whatToDo(lease)), nil
	case lease.Status == nil || lease.Status.Holder == nil:
		return j.refuse(name, lease, v1alpha1.ReasonNotHeld, "nobody holds lease %s, and this write carries token %d; %s", name, token, whatToDo(lease)), nil
	case token < lease.Status.Token:
		return j.refuse(name, lease, v1alpha1.ReasonTokenStale, "%s; this write carries %d: stop, and acquire the lease again", held(name, lease), token), nil
	case token > lease.Status.Token:
		return j.refuse(name, lease, v1alpha1.ReasonTokenUnknown, "%s; this write carries %d, which was never issued", held(name, lease), token), nil
	case lease.Spec.TokenBinding != v1alpha1.TokenBindingNone && !j.By.Is(lease.Status.Holder.Contender):
		return j.refuse(name, lease, v1alpha1.ReasonNotHolder,
			"%s, who is user %q, Pod %q; this write is by user %q, Pod %q: only the holder may use its token",
			held(name, lease), lease.Status.Holder.User, lease.Status.Holder.PodUID, j.By.User, j.By.PodUID), nil
	}
	return Decision{Result: ResultAccepted, Lease: name, Mark: FormatToken(token)}, nil
}

// readLease reads the lease that an object names.
func (j *judge) readLease(leaseName string) (types.NamespacedName, *v1alpha1.FencedLease, *Decision, error) {
	name, err := j.leaseName(leaseName)
	if err != nil {
		d := deny(v1alpha1.ReasonLeaseNotFound, "%v", err)
		return name, nil, &d, nil
	}
	lease, err := j.World.Lease(name)
	if err != nil {
		return name, nil, nil, err
	}
	if lease == nil {
		d := deny(v1alpha1.ReasonLeaseNotFound, "the object is protected by lease %s, which does not exist: create it and acquire it, or unprotect the object with the annotation %s", name, v1alpha1.BypassAnnotation)
		d.Lease = name
		return name, nil, &d, nil
	}
	return name, lease, nil, nil
}

// leaseName reads the value of the lease annotation.
func (j *judge) leaseName(value string) (types.NamespacedName, error) {
	name := types.NamespacedName{Namespace: j.Namespace, Name: value}
	form := "NAME, of a lease of the same namespace"
	if j.Namespace == "" {
		form = "NAMESPACE/NAME, since the object is cluster-scoped"
		name.Namespace, name.Name, _ = strings.Cut(value, "/")
		if len(validation.IsDNS1123Label(name.Namespace)) > 0 {
			return name, fmt.Errorf("annotation %s is %q, and must be %s", v1alpha1.LeaseAnnotation, clip(value), form)
		}
	}
	if len(validation.IsDNS1123Subdomain(name.Name)) > 0 {
		return name, fmt.Errorf("annotation %s is %q, and must be %s", v1alpha1.LeaseAnnotation, clip(value), form)
	}
	return name, nil
}

// require denies unless the requester has the verb on the lease.
func (j *judge) require(verb string, name types.NamespacedName, purpose string) (*Decision, error) {
	allowed, err := j.Allowed(verb, name)
	if err != nil || allowed {
		return nil, err
	}
	d := deny(v1alpha1.ReasonVerbMissing, "user %q needs the verb %s on fencedleases.fencedlease.dev %s %s", j.By.User, verb, name, purpose)
	d.Lease = name
	return &d, nil
}

// refuse denies, or warns where the lease says so; then the mark stays as it was.
func (j *judge) refuse(name types.NamespacedName, lease *v1alpha1.FencedLease, reason v1alpha1.Reason, format string, args ...any) Decision {
	d := deny(reason, format, args...)
	d.Lease = name
	if lease == nil {
		return d
	}
	if mark, err := ParseToken(j.mark); err == nil && lease.Status != nil && lease.Status.Token < mark {
		d.Behind = true
		d.Message += fmt.Sprintf(". The lease is behind the mark %d of this object, as after a restore: set spec.minToken of lease %s above it", mark, name)
	}
	if lease.Spec.Enforcement == v1alpha1.EnforcementWarn {
		d.Result, d.Mark = ResultWarned, j.mark
		d.Warnings = []string{fmt.Sprintf("%s: %s (the lease only warns)", reason, d.Message)}
	}
	return d
}

func deny(reason v1alpha1.Reason, format string, args ...any) Decision {
	return Decision{Result: ResultDenied, Reason: reason, Message: fmt.Sprintf(format, args...)}
}

func orDenied(d *Decision) Decision {
	if d == nil {
		return Decision{}
	}
	return *d
}

// whatToDo says who holds the lease, or how to get it.
func whatToDo(l *v1alpha1.FencedLease) string {
	name := types.NamespacedName{Namespace: l.Namespace, Name: l.Name}
	if l.Status == nil || l.Status.Holder == nil {
		return fmt.Sprintf("acquire lease %s and write its token into the annotation %s", name, v1alpha1.TokenAnnotation)
	}
	return held(name, l) + fmt.Sprintf("; only its holder may write, with that token in the annotation %s", v1alpha1.TokenAnnotation)
}

func held(name types.NamespacedName, l *v1alpha1.FencedLease) string {
	return fmt.Sprintf("lease %s is held by %q with token %d", name, l.Status.Holder.Identity, l.Status.Token)
}

func annotation(o *metav1.PartialObjectMetadata, key string) (string, bool) {
	if o == nil {
		return "", false
	}
	value, ok := o.Annotations[key]
	return value, ok
}
