// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"
)

// lives are how long things last.
type lives struct {
	authority, serving time.Duration
	// settle is how long after the caBundle was seen to have a new authority certificates of it are served: by then
	// every API server has heard of it.
	settle time.Duration
	// poll is the time between two looks at the Secret and the webhook configuration, retry after one that failed.
	poll, retry time.Duration
	// call bounds one look.
	call time.Duration
}

func defaultLives() lives {
	const day = 24 * time.Hour
	return lives{
		authority: 365 * day, serving: 30 * day, settle: 10 * time.Minute,
		poll: 10 * time.Second, retry: time.Second, call: 10 * time.Second,
	}
}

// managed keeps a certificate of its own.
type managed struct {
	Options
	lives lives
	// trustedSince says since when the caBundle has had an authority, by its raw certificate. Only keep touches it.
	trustedSince map[string]time.Time

	mu       sync.RWMutex
	serving  *tls.Certificate // nil: none yet
	injected bool             // whether the caBundle ever had our authority
	failure  error            // of the last look
}

func newManaged(o Options) (*managed, error) {
	if len(o.Hosts) == 0 {
		return nil, errors.New("no hosts to make a certificate for")
	}
	return &managed{Options: o, lives: defaultLives(), trustedSince: map[string]time.Time{}}, nil
}

// Start looks after the certificate again and again. It reads the wall clock each time, so a machine that slept
// renews as soon as it wakes.
func (m *managed) Start(ctx context.Context) error {
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithName("certs"))
	for {
		wait := m.lives.poll
		if err := m.look(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Could not look after the webhook's certificate; trying again")
			wait = m.lives.retry
		}
		select {
		case <-ctx.Done():
			return nil
		case <-m.Clock.After(wait):
		}
	}
}

func (m *managed) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.serving == nil {
		return nil, errNone
	}
	return m.serving, nil
}

func (m *managed) Ready(*http.Request) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	switch {
	case m.serving == nil:
		return errors.Join(errNone, m.failure)
	case !m.injected:
		return errors.Join(errors.New("the webhook configuration has no caBundle of ours yet"), m.failure)
	}
	return valid(m.serving, m.Clock.Now())
}

// look brings Secret, caBundle and serving certificate up to date, and notes how that went.
func (m *managed) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.lives.call)
	defer cancel()
	err := m.keep(ctx)
	m.mu.Lock()
	m.failure = err
	m.mu.Unlock()
	return err
}

func (m *managed) keep(ctx context.Context) error {
	a, err := m.loadAuthority(ctx)
	if err != nil {
		return err
	}
	injectErr := m.inject(ctx, a)
	if injectErr == nil {
		m.noteTrusted(a)
	}
	// A certificate is needed even if the caBundle cannot be written: it may have been right all along.
	return errors.Join(injectErr, m.serve(ctx, a))
}

// noteTrusted remembers since when the caBundle has had each authority.
func (m *managed) noteTrusted(a authority) {
	since := make(map[string]time.Time, len(a))
	for _, c := range a {
		key := string(c.cert.Raw)
		since[key] = m.Clock.Now()
		if earlier, ok := m.trustedSince[key]; ok {
			since[key] = earlier
		}
	}
	m.trustedSince = since
	m.mu.Lock()
	m.injected = true
	m.mu.Unlock()
}

func (m *managed) trusted(cert *x509.Certificate) bool {
	since, ok := m.trustedSince[string(cert.Raw)]
	return ok && m.Clock.Since(since) >= m.lives.settle
}

// serve issues a new certificate when the one served is old, or not of the authority that should sign it.
func (m *managed) serve(ctx context.Context, a authority) error {
	now, signer := m.Clock.Now(), a.signer(m.trusted)
	if have, err := m.GetCertificate(nil); err == nil && now.Before(renewalTime(have.Leaf)) && have.Leaf.CheckSignatureFrom(signer.cert) == nil {
		return nil
	}
	cert, err := signer.issue(now, m.lives.serving, m.Hosts)
	if err != nil {
		return fmt.Errorf("issue a certificate for %v: %w", m.Hosts, err)
	}
	m.mu.Lock()
	m.serving = cert
	m.mu.Unlock()
	log.FromContext(ctx).Info("Issued the webhook's certificate", "hosts", m.Hosts, "until", stamp(cert.Leaf.NotAfter))
	return nil
}
