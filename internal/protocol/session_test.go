// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// sessionObject is the Lease of session a.
func sessionObject() *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "a-1", UID: "uid-a",
			Labels: map[string]string{v1alpha1.SessionLabel: "true"},
			Annotations: map[string]string{
				v1alpha1.UserAnnotation:       "sa-a",
				v1alpha1.PodUIDAnnotation:     "pod-a",
				v1alpha1.WaitingForAnnotation: "orders=7 billing=9",
			},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: new("a"), LeaseDurationSeconds: new(int32(15))},
	}
}

func TestParseSession(t *testing.T) {
	whole := session("a")
	whole.Wants = map[string]int64{"orders": 7, "billing": 9}
	for name, tc := range map[string]struct {
		change func(*coordinationv1.Lease)
		want   func(*protocol.Session) // nil: refused
	}{
		"a session says who it is and what it wants": {
			func(*coordinationv1.Lease) {}, func(*protocol.Session) {}},
		"one that waits for nothing": {
			func(l *coordinationv1.Lease) { delete(l.Annotations, v1alpha1.WaitingForAnnotation) },
			func(s *protocol.Session) { s.Wants = map[string]int64{} }},
		"one outside Pods": {
			func(l *coordinationv1.Lease) { delete(l.Annotations, v1alpha1.PodUIDAnnotation) },
			func(s *protocol.Session) { s.PodUID = "" }},
		"one that is being deleted is dying": {
			func(l *coordinationv1.Lease) { l.DeletionTimestamp = &metav1.Time{Time: noon} },
			func(s *protocol.Session) { s.Dying = true }},
		"an identity in any script, at full length": {
			func(l *coordinationv1.Lease) { *l.Spec.HolderIdentity = strings.Repeat("日", 1024) },
			func(s *protocol.Session) { s.Identity = strings.Repeat("日", 1024) }},
		"a user at full length": {
			func(l *coordinationv1.Lease) { l.Annotations[v1alpha1.UserAnnotation] = strings.Repeat("u", 512) },
			func(s *protocol.Session) { s.User = strings.Repeat("u", 512) }},
		"no identity":               {change: func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = nil }},
		"an empty identity":         {change: func(l *coordinationv1.Lease) { *l.Spec.HolderIdentity = "" }},
		"an identity too long":      {change: func(l *coordinationv1.Lease) { *l.Spec.HolderIdentity = strings.Repeat("日", 1025) }},
		"an identity not in UTF-8":  {change: func(l *coordinationv1.Lease) { *l.Spec.HolderIdentity = "a\xff" }},
		"no TTL":                    {change: func(l *coordinationv1.Lease) { l.Spec.LeaseDurationSeconds = nil }},
		"a TTL of nothing":          {change: func(l *coordinationv1.Lease) { *l.Spec.LeaseDurationSeconds = 0 }},
		"a negative TTL":            {change: func(l *coordinationv1.Lease) { *l.Spec.LeaseDurationSeconds = -1 }},
		"no user":                   {change: func(l *coordinationv1.Lease) { l.Annotations = nil }},
		"a user too long":           {change: func(l *coordinationv1.Lease) { l.Annotations[v1alpha1.UserAnnotation] = strings.Repeat("u", 513) }},
		"a Pod UID too long":        {change: func(l *coordinationv1.Lease) { l.Annotations[v1alpha1.PodUIDAnnotation] = strings.Repeat("p", 37) }},
		"wants that cannot be read": {change: func(l *coordinationv1.Lease) { l.Annotations[v1alpha1.WaitingForAnnotation] = "orders" }},
	} {
		t.Run(name, func(t *testing.T) {
			object, want := sessionObject(), whole
			tc.change(object)
			got, err := protocol.ParseSession(object)
			if tc.want == nil {
				if !errors.Is(err, protocol.ErrUnusableSession) || !strings.Contains(err.Error(), `"a-1"`) {
					t.Fatalf("got %v, want %v with the session's name", err, protocol.ErrUnusableSession)
				}
				return
			}
			tc.want(&want)
			if diff := cmp.Diff(want, got); err != nil || diff != "" {
				t.Errorf("error %v, session (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestSessionTime(t *testing.T) {
	s := session("a")
	if got := s.Deadline(noon); got != noon.Add(15*time.Second) {
		t.Errorf("deadline %v", got)
	}
	for ttl, slow := range map[time.Duration]bool{time.Second: false, 15 * time.Second: false, 15*time.Second + 1: true} {
		s.TTL = ttl
		if s.TooSlow(available().FencedLease) != slow {
			t.Errorf("TTL %v: too slow is not %v", ttl, slow)
		}
	}
}

func TestSameRequest(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*v1alpha1.Contender)
		same   bool
	}{
		"itself":                     {func(*v1alpha1.Contender) {}, true},
		"under another identity":     {func(c *v1alpha1.Contender) { c.Identity = "z" }, true},
		"a later ticket":             {func(c *v1alpha1.Contender) { c.Ticket++ }, false},
		"another session's":          {func(c *v1alpha1.Contender) { c.SessionUID = "uid-z" }, false},
		"another user's":             {func(c *v1alpha1.Contender) { c.User = "sa-z" }, false},
		"a user whose name goes on":  {func(c *v1alpha1.Contender) { c.User += "0" }, false},
		"another Pod's":              {func(c *v1alpha1.Contender) { c.PodUID = "pod-z" }, false},
		"the same user's, in no Pod": {func(c *v1alpha1.Contender) { c.PodUID = "" }, false},
	} {
		other := contender("a", 7)
		tc.change(&other)
		if protocol.SameRequest(contender("a", 7), other) != tc.same || protocol.SameRequest(other, contender("a", 7)) != tc.same {
			t.Errorf("%s: the same request is not %v", name, tc.same)
		}
	}
}

func TestParseWants(t *testing.T) {
	full := map[string]int64{}
	for i := range v1alpha1.MaxWants {
		full[fmt.Sprintf("lease-%d", i)] = int64(i + 1)
	}
	for name, tc := range map[string]struct {
		value string
		want  map[string]int64 // nil: refused
	}{
		"nothing":             {"", map[string]int64{}},
		"one":                 {"orders=7", map[string]int64{"orders": 7}},
		"two":                 {"orders=7 billing=9", map[string]int64{"orders": 7, "billing": 9}},
		"names of dots":       {"a.b-c=1", map[string]int64{"a.b-c": 1}},
		"the largest ticket":  {"orders=9007199254740991", map[string]int64{"orders": v1alpha1.MaxToken}},
		"as many as may be":   {protocol.FormatWants(full), full},
		"one too many":        {protocol.FormatWants(full) + " more=1", nil},
		"a ticket too large":  {"orders=9007199254740992", nil},
		"ticket zero":         {"orders=0", nil},
		"a leading zero":      {"orders=07", nil},
		"no ticket":           {"orders", nil},
		"an empty ticket":     {"orders=", nil},
		"no name":             {"=7", nil},
		"two equals signs":    {"orders==7", nil},
		"a space in front":    {" orders=7", nil},
		"a space behind":      {"orders=7 ", nil},
		"two spaces":          {"orders=7  billing=9", nil},
		"a line break":        {"orders=7\nbilling=9", nil},
		"a comma":             {"orders=7,billing=9", nil},
		"the same name twice": {"orders=7 orders=8", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := protocol.ParseWants(tc.value)
			if tc.want == nil {
				if !errors.Is(err, protocol.ErrUnusableSession) {
					t.Fatalf("%q was read as %v, error %v", tc.value, got, err)
				}
				return
			}
			if diff := cmp.Diff(tc.want, got); err != nil || diff != "" {
				t.Errorf("error %v (-want +got):\n%s", err, diff)
			}
		})
	}
	if got := protocol.FormatWants(map[string]int64{"orders": 7, "billing": 9}); got != "billing=9 orders=7" {
		t.Errorf("wants are written as %q", got)
	}
}

func FuzzParseWants(f *testing.F) {
	f.Add("orders=7 billing=9")
	f.Add(" =0")
	f.Fuzz(func(t *testing.T, value string) {
		wants, err := protocol.ParseWants(value)
		if err != nil {
			return
		}
		again, err := protocol.ParseWants(protocol.FormatWants(wants))
		if diff := cmp.Diff(wants, again); err != nil || diff != "" {
			t.Errorf("%q: error %v (-first +second):\n%s", value, err, diff)
		}
	})
}

// FuzzParseSession: what is taken can stand in a queue, and comes back from JSON as it was.
func FuzzParseSession(f *testing.F) {
	f.Add("a", "sa-a", "pod-a", "a-1", "uid-a", int32(15), "orders=7")
	f.Add("\xff", "<&>", "", "\u2028", "é", int32(1), "orders=1")
	f.Fuzz(func(t *testing.T, identity, user, pod, name, uid string, ttl int32, wants string) {
		object := sessionObject()
		object.Name, object.UID, object.Spec.HolderIdentity, object.Spec.LeaseDurationSeconds = name, types.UID(uid), &identity, &ttl
		object.Annotations = map[string]string{v1alpha1.UserAnnotation: user, v1alpha1.PodUIDAnnotation: pod, v1alpha1.WaitingForAnnotation: wants}
		s, err := protocol.ParseSession(object)
		if err != nil {
			return
		}
		l := held("h", 1)
		patch, next, err := protocol.Patch(l.FencedLease, protocol.Queue([]v1alpha1.Contender{s.Request(7)}, 1))
		if err != nil {
			t.Fatalf("a session that was taken cannot queue: %v", err)
		}
		doc, err := apply(t, encode(t, l.FencedLease), patch)
		if err != nil {
			t.Fatal(err)
		}
		if got := decode(t, doc).Status.Queue[0]; got != next.Status.Queue[0] || got != s.Request(7) {
			t.Errorf("%+v came back as %+v", s.Request(7), got)
		}
	})
}
