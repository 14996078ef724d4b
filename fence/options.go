// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// defaultTTL is the default leaseDurationSeconds of a lease, so that a session may hold such a lease at once.
const defaultTTL = 15 * time.Second

// Options of a session. The zero value is right for a process in a Pod which uses the leases of its own namespace.
type Options struct {
	// Namespace holds the session and the leases that it can acquire. Empty: the namespace of the Pod that this
	// process runs in; outside Pods "default", because a *rest.Config has no namespace.
	Namespace string

	// Identity names the holder to people: any UTF-8, up to 1024 characters. It need not be unique; two sessions
	// with the same identity are two. Empty: the Pod's or host's name and a random part.
	Identity string

	// TTL is how long the session may be silent before others take over: whole seconds, from 1 to 3600. A lease
	// takes no session that may be silent for longer than its leaseDurationSeconds, so the TTL shrinks to that
	// of each lease that is acquired, and never grows again. Zero: 15 seconds.
	TTL time.Duration

	// Metrics are called when something happened that is worth counting.
	Metrics Metrics

	clock clock // nil: newClock
}

// Metrics are functions that a session calls, each of which may be nil. They are called in the course of the work,
// also from several goroutines at a time, and must not block.
type Metrics struct {
	// Renewed: the session was renewed, or could not be. It took this long.
	Renewed func(took time.Duration, err error)
	// Acquired: a lease was acquired after this wait.
	Acquired func(lease string, waited time.Duration)
	// Ended: a term ended after this time; lost is nil when it was released.
	Ended func(lease string, held time.Duration, lost error)
}

func (m Metrics) renewed(took time.Duration, err error) {
	if m.Renewed != nil {
		m.Renewed(took, err)
	}
}

func (m Metrics) acquired(lease string, waited time.Duration) {
	if m.Acquired != nil {
		m.Acquired(lease, waited)
	}
}

func (m Metrics) ended(lease string, held time.Duration, lost error) {
	if m.Ended != nil {
		m.Ended(lease, held, lost)
	}
}

// withDefaults fills in what is not set, and refuses what the API server would not take.
func (o Options) withDefaults() (Options, error) {
	o.Namespace = cmp.Or(o.Namespace, inPod().namespace, "default")
	o.TTL = cmp.Or(o.TTL, defaultTTL)
	if o.Identity == "" {
		host, _ := os.Hostname() // a host without a name has the random part
		o.Identity = cmp.Or(os.Getenv("POD_NAME"), host, "unknown") + "_" + rand.String(8)
	}
	if o.clock == nil {
		o.clock = newClock()
	}
	switch {
	case o.TTL%time.Second != 0 || o.TTL < time.Second || o.TTL > time.Hour:
		return o, fmt.Errorf("Options.TTL is %s: use whole seconds, from 1 to 3600", o.TTL)
	case !utf8.ValidString(o.Identity):
		return o, errors.New("Options.Identity is not valid UTF-8")
	case utf8.RuneCountInString(o.Identity) > v1alpha1.MaxIdentityLength:
		return o, fmt.Errorf("Options.Identity is longer than %d characters", v1alpha1.MaxIdentityLength)
	}
	return o, nil
}

// namePrefix is the beginning of the session's name: the identity, as far as an object may be called that.
func namePrefix(identity string) string {
	const most = 50 // the API server cuts longer ones, to append its random part
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '-'
	}, identity)
	clean = strings.TrimLeft(clean, "-")
	clean = strings.TrimRight(clean[:min(len(clean), most)], "-")
	return cmp.Or(clean, "session") + "-"
}
