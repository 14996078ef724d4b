// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/fence"
)

// crowd is how many wait at a time. Heartbeats are slow here, so that what is counted are handovers.
const (
	crowd        = 200
	crowdSeconds = 3600
)

var _ = Describe("A crowd of waiters", func() {
	It("each gets its turn, at the cost of at most three requests per handover", func(ctx SpecContext) {
		namespace := newNamespace(ctx)
		newLease(ctx, namespace, "orders", crowdSeconds)
		cfg := contender(ctx, namespace, "orders")
		cfg.QPS = -1
		sessions := manySessions(ctx, cfg, namespace)
		first, err := newSession(ctx, cfg, fence.Options{Namespace: namespace, TTL: time.Hour}).Acquire(ctx, "orders")
		Expect(err).NotTo(HaveOccurred())

		start := requests(ctx)
		var turns sync.Map // token to session
		var crowded sync.WaitGroup
		for _, session := range sessions {
			crowded.Go(func() {
				defer GinkgoRecover()
				held, err := session.Acquire(ctx, "orders")
				Expect(err).NotTo(HaveOccurred())
				_, twice := turns.LoadOrStore(held.Token(), session)
				Expect(twice).To(BeFalse(), "token %d was granted twice", held.Token())
				Expect(held.Release(ctx)).To(Succeed())
			})
		}
		Eventually(leaseOf(ctx, namespace, "orders")).WithTimeout(time.Minute).Should(HaveField("Status.Waiting", BeEquivalentTo(crowd)))
		lined, released := requests(ctx), time.Now()
		Expect(first.Release(ctx)).To(Succeed())
		crowded.Wait()
		took := time.Since(released)

		status := statusOf(ctx, namespace, "orders")
		Expect(status.Handovers).To(BeEquivalentTo(crowd + 1))
		Expect(status.Token).To(BeEquivalentTo(int64(first.Token()) + crowd))
		toLineUp, perHandover := (lined-start)/crowd, (requests(ctx)-lined)/crowd
		AddReportEntry("handovers", fmt.Sprintf("%d in %s; %.2f requests to get in line, %.2f for each handover",
			crowd, took.Round(time.Millisecond), toLineUp, perHandover), ReportEntryVisibilityAlways)
		Expect(perHandover).To(BeNumerically("<=", 3))
		Expect(toLineUp).To(BeNumerically("<=", 2.5), "a look at the lease, a note in the session, and a part of the controller's writes")
	}, SpecTimeout(4*time.Minute))
})

func manySessions(ctx context.Context, cfg *rest.Config, namespace string) []*fence.Session {
	GinkgoHelper()
	sessions := make([]*fence.Session, crowd)
	for i := range sessions {
		sessions[i] = newSession(ctx, cfg, fence.Options{
			Namespace: namespace, Identity: fmt.Sprintf("waiter-%d", i), TTL: crowdSeconds * time.Second,
		})
	}
	return sessions
}

// requests counts what the API server has answered on leases and sessions, of everybody: the contenders and the
// controller, and the few heartbeats of whoever elects a leader. Watches count when they end, so they do not count.
func requests(ctx context.Context) float64 {
	GinkgoHelper()
	clientset, err := kubernetes.NewForConfig(env.Config())
	Expect(err).NotTo(HaveOccurred())
	text, err := clientset.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	Expect(err).NotTo(HaveOccurred())
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(text)))
	Expect(err).NotTo(HaveOccurred())
	var sum float64
	for _, metric := range families["apiserver_request_total"].GetMetric() {
		labels := labelsOf(metric)
		if (labels["resource"] == "fencedleases" || labels["resource"] == "leases") && labels["verb"] != "WATCH" {
			sum += metric.GetCounter().GetValue()
		}
	}
	Expect(sum).To(BeNumerically(">", 0))
	return math.Round(sum)
}

func labelsOf(metric *dto.Metric) map[string]string {
	labels := map[string]string{}
	for _, pair := range metric.GetLabel() {
		labels[pair.GetName()] = pair.GetValue()
	}
	return labels
}
