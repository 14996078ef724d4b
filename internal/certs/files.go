// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"path/filepath"

	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"
)

// files serves a certificate from a directory, and reloads it when it changes.
type files struct {
	watcher *certwatcher.CertWatcher
	clock   clock.PassiveClock
}

func newFiles(o Options) (*files, error) {
	watcher, err := certwatcher.New(filepath.Join(o.Dir, "tls.crt"), filepath.Join(o.Dir, "tls.key"))
	if err != nil {
		return nil, fmt.Errorf("read the webhook's certificate from tls.crt and tls.key in %q: %w", o.Dir, err)
	}
	return &files{watcher: watcher, clock: o.Clock}, nil
}

func (f *files) Start(ctx context.Context) error { return f.watcher.Start(ctx) }

func (f *files) GetCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	return f.watcher.GetCertificate(hello)
}

func (f *files) Ready(*http.Request) error {
	cert, err := f.watcher.GetCertificate(nil)
	if err != nil {
		return err
	}
	return valid(cert, f.clock.Now())
}
