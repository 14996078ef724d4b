// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// Backend is a server behind a balancer.
type Backend struct {
	// Addr is its "host:port".
	Addr string
	// Ready says whether it may get a connection; nil: always.
	Ready Check
}

// NewBalancer starts a Proxy in front of several backends. Each new connection goes to the next backend in turn that
// is ready, asked at that moment and for at most a second, and that accepts it; when none does, it is closed. Open
// connections stay where they are, as they do behind a Service. The faults of Proxy apply here too.
func NewBalancer(backends ...Backend) (*Proxy, error) {
	var turn atomic.Uint64
	return newProxy(func(ctx context.Context) (net.Conn, error) {
		first := turn.Add(1) - 1
		var refusals []error
		for i := range backends {
			conn, err := backends[(first+uint64(i))%uint64(len(backends))].connect(ctx)
			if err == nil {
				return conn, nil
			}
			refusals = append(refusals, err)
		}
		return nil, errors.Join(refusals...)
	})
}

func (b Backend) connect(ctx context.Context) (net.Conn, error) {
	if b.Ready != nil {
		if err := b.Ready.within(ctx, time.Second); err != nil {
			return nil, fmt.Errorf("backend %s is not ready: %w", b.Addr, err)
		}
	}
	return (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", b.Addr)
}
