// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"
	logf "sigs.k8s.io/controller-runtime/pkg/log"
)

// longestPulse is how often the API server is read at least while there are sessions.
const longestPulse = time.Second

// pulse reads the API server all the time, so that an outage is noticed: who could not renew is not silent. It
// reads three times within the shortest TTL, as often as a session renews.
type pulse struct {
	clock   clock.WithTicker
	log     logr.Logger
	live    *liveReader
	tracker *tracker
	metrics *Metrics
}

// Start beats until the context ends, which is when this process leads no longer.
func (p *pulse) Start(ctx context.Context) error {
	ctx = logf.IntoContext(ctx, p.log)
	defer p.metrics.show(counts{})
	for {
		wait := p.clock.After(p.beat(ctx))
		select {
		case <-ctx.Done():
			return nil
		case <-wait:
		}
	}
}

// beat returns when the next one is due.
func (p *pulse) beat(ctx context.Context) time.Duration {
	p.tracker.sweep()
	p.metrics.show(p.tracker.counts())
	name, shortest, some := p.tracker.next()
	if !some {
		return longestPulse / 3 // soon enough for the first session
	}
	// What it says does not matter, and whoever must know of the error is told.
	_, _ = p.live.session(ctx, name)
	return min(shortest/3, longestPulse)
}
