// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// Metrics are the controller's figures. Only the leader counts; the gauges of the others are 0.
type Metrics struct {
	handovers   *prometheus.CounterVec
	held        prometheus.Gauge
	waiting     prometheus.Gauge
	sessions    prometheus.Gauge
	expired     prometheus.Counter
	expiryDelay prometheus.Histogram
	unusable    prometheus.Counter
}

// NewMetrics makes the metrics and registers them. It panics if they were registered there before.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		handovers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fencedlease_handovers_total",
			Help: "Terms that ended, by end reason (a lease handed over in the same write counts once), and other grants (Granted).",
		}, []string{"reason"}),
		held: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fencedlease_terms_held",
			Help: "Leases that are held now.",
		}),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fencedlease_waiting",
			Help: "Requests that wait for leases now.",
		}),
		sessions: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fencedlease_sessions",
			Help: "Sessions that are there now.",
		}),
		expired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fencedlease_sessions_expired_total",
			Help: "Sessions deleted because they were silent for longer than their TTL.",
		}),
		expiryDelay: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "fencedlease_session_expiry_delay_seconds",
			Help:    "How long after its TTL a silent session was deleted.",
			Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		unusable: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fencedlease_session_unusable_total",
			Help: "Leases with the session label that cannot be sessions, counted once for each fault.",
		}),
	}
	for _, reason := range []string{
		reasonGranted, string(v1alpha1.EndReleased), string(v1alpha1.EndExpired), string(v1alpha1.EndSessionClosed),
		string(v1alpha1.EndMaxHold), string(v1alpha1.EndStolen), string(v1alpha1.EndInvalid),
	} {
		m.handovers.WithLabelValues(reason)
	}
	reg.MustRegister(m.handovers, m.held, m.waiting, m.sessions, m.expired, m.expiryDelay, m.unusable)
	return m
}

func (m *Metrics) show(c counts) {
	m.held.Set(float64(c.held))
	m.waiting.Set(float64(c.waiting))
	m.sessions.Set(float64(c.sessions))
}
