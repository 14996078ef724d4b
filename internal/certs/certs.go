// SPDX-License-Identifier: Apache-2.0

// Package certs keeps the certificate of the webhook: self-managed, or from files that somebody else keeps.
//
// Self-managed, the authority lies in one Secret that all replicas share; serving keys and certificates live only
// in memory, one per replica, so nothing is mounted and nothing restarts. Certificates are renewed at two thirds of
// their life. No write fails while the authority changes: first the new one is added to the Secret, then to the
// caBundle of the webhook configuration beside the old one, and only when every API server has had time to hear of
// it does a replica serve a certificate signed by it. The old one stays trusted until it expires.
//
// Deleting the Secret is the emergency exit: the old authority is distrusted as soon as the new one is there, and
// guarded writes may fail for the seconds until all replicas have seen it.
//
// Libraries were weighed. cert-manager's pkg/server/tls replaces its authority in one step, so that each rotation has
// a moment in which API servers distrust the webhook; its clock is the system's, and it brings clients of LDAP and
// Kerberos with it. open-policy-agent/cert-controller waits for mounted files. So these few hundred lines are ours,
// in the shape of cert-manager's authority.
package certs

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// errNone: there is no certificate yet.
var errNone = errors.New("the webhook has no certificate yet")

// Source is where the webhook server gets its certificate. Its methods may be called concurrently.
type Source interface {
	// Start keeps the certificate until ctx ends.
	Start(ctx context.Context) error
	// GetCertificate is for tls.Config. It never blocks.
	GetCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error)
	// Ready is a health check: it fails while there is no valid certificate that API servers trust.
	Ready(req *http.Request) error
}

// Options are what a source needs.
type Options struct {
	// Dir holds tls.crt and tls.key that somebody else keeps, and whose authority somebody else injects. Empty: the
	// certificate is self-managed, for which the rest is needed.
	Dir string

	// Client reads and writes the Secret and the webhook configuration. It must not read from a cache.
	Client client.Client
	// Namespace and Secret name the Secret with the authority.
	Namespace, Secret string
	// Configuration is the MutatingWebhookConfiguration that gets the caBundle.
	Configuration string
	// Hosts are the names and IP addresses that the certificate is for.
	Hosts []string

	// Clock is the time; nil: the system's.
	Clock clock.Clock
	// Registerer gets the metrics.
	Registerer prometheus.Registerer
}

// New returns the source that the options ask for.
func New(o Options) (Source, error) {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	var source Source
	var err error
	if o.Dir != "" {
		source, err = newFiles(o)
	} else {
		source, err = newManaged(o)
	}
	if err != nil {
		return nil, err
	}
	return source, o.Registerer.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "fencedlease_webhook_certificate_seconds_left",
		Help: "Seconds until the certificate that the webhook serves expires; 0 when it has none.",
	}, func() float64 { return secondsLeft(source, o.Clock) }))
}

func secondsLeft(s Source, c clock.PassiveClock) float64 {
	cert, err := s.GetCertificate(nil)
	if err != nil {
		return 0
	}
	return cert.Leaf.NotAfter.Sub(c.Now()).Seconds()
}

// valid fails unless the certificate is good now.
func valid(cert *tls.Certificate, now time.Time) error {
	if now.Before(cert.Leaf.NotBefore) || now.After(cert.Leaf.NotAfter) {
		return fmt.Errorf("the webhook's certificate is good from %s to %s, and not now, %s",
			stamp(cert.Leaf.NotBefore), stamp(cert.Leaf.NotAfter), stamp(now))
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
