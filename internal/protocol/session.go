// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// ErrUnusableSession: a Lease with the session label that cannot hold or wait: what it lacks is in the text.
var ErrUnusableSession = errors.New("unusable session")

// Session is a session as its Lease says it.
type Session struct {
	// Contender is who asks; its ticket is zero, since each want has its own.
	v1alpha1.Contender
	// TTL is how long the session may be silent.
	TTL time.Duration
	// Wants are the leases it waits for, with the ticket of each request.
	Wants map[string]int64
	// Dying: the object has a deletionTimestamp. A dying session is dead.
	Dying bool
}

// ParseSession reads a session from its Lease. It refuses, with ErrUnusableSession, what a queue or a holder
// could not represent, so that no single session can poison a write for others.
func ParseSession(lease *coordinationv1.Lease) (Session, error) {
	wants, err := ParseWants(lease.Annotations[v1alpha1.WaitingForAnnotation])
	if err != nil {
		return Session{}, fmt.Errorf("session %q: %w", lease.Name, err)
	}
	s := Session{
		Contender: v1alpha1.Contender{
			Session:    lease.Name,
			SessionUID: lease.UID,
			User:       lease.Annotations[v1alpha1.UserAnnotation],
			PodUID:     types.UID(lease.Annotations[v1alpha1.PodUIDAnnotation]),
		},
		Wants: wants,
		Dying: lease.DeletionTimestamp != nil,
	}
	if lease.Spec.HolderIdentity != nil {
		s.Identity = *lease.Spec.HolderIdentity
	}
	if lease.Spec.LeaseDurationSeconds != nil {
		s.TTL = time.Duration(*lease.Spec.LeaseDurationSeconds) * time.Second
	}
	if s.TTL <= 0 {
		return Session{}, fmt.Errorf("session %q: spec.leaseDurationSeconds is missing or not positive: %w", lease.Name, ErrUnusableSession)
	}
	if err := valid(s.Request(1)); err != nil {
		return Session{}, fmt.Errorf("session %q: %w: %w", lease.Name, ErrUnusableSession, err)
	}
	return s, nil
}

// Request is the session as a contender with that ticket.
func (s Session) Request(ticket int64) v1alpha1.Contender {
	c := s.Contender
	c.Ticket = ticket
	return c
}

// Deadline is when a session is expired that was last seen to renew at seen. Both are of the same monotonic
// clock: the controller's own.
func (s Session) Deadline(seen time.Time) time.Time { return seen.Add(s.TTL) }

// TooSlow says that the session may be silent for longer than the lease allows.
func (s Session) TooSlow(l *v1alpha1.FencedLease) bool {
	return s.TTL > time.Duration(l.Spec.LeaseDurationSeconds)*time.Second
}

// ParseWants reads the value of the waiting-for annotation.
func ParseWants(value string) (map[string]int64, error) {
	wants := map[string]int64{}
	if value == "" {
		return wants, nil
	}
	for want := range strings.SplitSeq(value, " ") {
		name, number, _ := strings.Cut(want, "=")
		ticket, err := parseDecimal(number)
		if err != nil || name == "" {
			return nil, fmt.Errorf("waiting-for: %q is not LEASE=TICKET: %w", want, ErrUnusableSession)
		}
		if _, twice := wants[name]; twice {
			return nil, fmt.Errorf("waiting-for: %q stands there twice: %w", name, ErrUnusableSession)
		}
		wants[name] = ticket
	}
	if len(wants) > v1alpha1.MaxWants {
		return nil, fmt.Errorf("waiting-for: %d wants, at most %d: %w", len(wants), v1alpha1.MaxWants, ErrUnusableSession)
	}
	return wants, nil
}

// FormatWants is the value of the waiting-for annotation, in the order of the names.
func FormatWants(wants map[string]int64) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(wants)) {
		words = append(words, name+"="+strconv.FormatInt(wants[name], 10))
	}
	return strings.Join(words, " ")
}

// SameRequest says that two contenders are the same request: of the same session, user, Pod and ticket.
func SameRequest(a, b v1alpha1.Contender) bool {
	return a.SessionUID == b.SessionUID && a.Ticket == b.Ticket && a.User == b.User && a.PodUID == b.PodUID
}

// Served says that the request c was granted in that term, or passed over for a later one of its session. Only a
// term of the session's own user and Pod says so: its UID can be claimed by whoever reads it.
func Served(t v1alpha1.Term, c v1alpha1.Contender) bool {
	return t.SessionUID == c.SessionUID && t.User == c.User && t.PodUID == c.PodUID && t.Ticket >= c.Ticket
}

// servedNow is Served for the present term.
func servedNow(h *v1alpha1.Holder, c v1alpha1.Contender) bool {
	return h != nil && h.SessionUID == c.SessionUID && h.User == c.User && h.PodUID == c.PodUID && h.Ticket >= c.Ticket
}

// valid says whether the schema would take the contender.
func valid(c v1alpha1.Contender) error {
	for _, leaf := range []struct {
		name string
		ok   bool
	}{
		{"identity", bounded(c.Identity, v1alpha1.MaxIdentityLength)},
		{"session", len(validation.IsDNS1123Subdomain(c.Session)) == 0},
		{"sessionUID", bounded(string(c.SessionUID), 36)},
		{"user", bounded(c.User, v1alpha1.MaxUserLength)},
		{"podUID", c.PodUID == "" || bounded(string(c.PodUID), 36)},
		{"ticket", c.Ticket >= 1 && c.Ticket <= v1alpha1.MaxToken},
	} {
		if !leaf.ok {
			return fmt.Errorf("%s of the contender is missing or out of bounds: %w", leaf.name, ErrIllegal)
		}
	}
	return nil
}

// bounded says whether JSON keeps s as it is, and the schema takes it. Bytes that are no UTF-8 can come in by
// protobuf; JSON would change them, so that the stored contender would never again equal its session.
func bounded(s string, most int) bool {
	return s != "" && utf8.ValidString(s) && utf8.RuneCountInString(s) <= most
}

// validQueue says whether queue may stand behind holder (nil: nobody holds).
func validQueue(queue []v1alpha1.Contender, waiting int32, holder *v1alpha1.Contender) error {
	if len(queue) > v1alpha1.MaxQueue || int(waiting) < len(queue) {
		return fmt.Errorf("a queue of %d with %d waiting: %w", len(queue), waiting, ErrIllegal)
	}
	for i, c := range queue {
		if err := valid(c); err != nil {
			return err
		}
		same := func(o v1alpha1.Contender) bool { return o.SessionUID == c.SessionUID && o.Ticket == c.Ticket }
		if (holder != nil && same(*holder)) || slices.ContainsFunc(queue[:i], same) {
			return fmt.Errorf("ticket %d of session %q stands in line twice: %w", c.Ticket, c.Session, ErrIllegal)
		}
	}
	return nil
}
