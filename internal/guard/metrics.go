// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// Results beside those of the protocol.
const (
	// resultUnjudged: the lease or the authority of the requester could not be read.
	resultUnjudged = "unjudged"
	// resultMalformed: the request could not be decoded.
	resultMalformed = "malformed"
)

// Metrics are the guard's metrics.
type Metrics struct {
	verdicts    *prometheus.CounterVec
	seconds     prometheus.Histogram
	reads       prometheus.Counter
	readSeconds prometheus.Histogram
	behind      prometheus.Counter
}

// NewMetrics returns metrics that are registered with r.
func NewMetrics(r prometheus.Registerer) *Metrics {
	// From a read on the same machine to the timeout of the webhook.
	buckets := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2, 3}
	m := &Metrics{
		verdicts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fencedlease_guard_verdicts_total",
			Help: "Verdicts on writes to protected objects, by result and, where one was found wanting, the reason.",
		}, []string{"result", "reason"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fencedlease_guard_seconds", Buckets: buckets,
			Help: "Seconds that the guard took for a verdict, with all that it had to read.",
		}),
		reads: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fencedlease_guard_lease_reads_total",
			Help: "Live reads of leases by the guard. One read may serve many verdicts.",
		}),
		readSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fencedlease_guard_lease_read_seconds", Buckets: buckets,
			Help: "Seconds that a live read of a lease took.",
		}),
		behind: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fencedlease_guard_behind_total",
			Help: "Writes whose lease was behind the mark of the object, as after a restore.",
		}),
	}
	r.MustRegister(m.verdicts, m.seconds, m.reads, m.readSeconds, m.behind)
	return m
}

func (m *Metrics) count(result string, reason v1alpha1.Reason) {
	m.verdicts.WithLabelValues(result, string(reason)).Inc()
}

func (m *Metrics) observe(start time.Time) { m.seconds.Observe(time.Since(start).Seconds()) }

func (m *Metrics) observeRead(start time.Time) {
	m.reads.Inc()
	m.readSeconds.Observe(time.Since(start).Seconds())
}
