// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

func TestLostRace(t *testing.T) {
	resource := schema.GroupResource{Group: v1alpha1.GroupVersion.Group, Resource: "fencedleases"}
	kind := v1alpha1.GroupVersion.WithKind("FencedLease").GroupKind()
	rule := field.ErrorList{field.Invalid(field.NewPath("status"), nil, "status cannot be removed")}
	for name, tc := range map[string]struct {
		err  error
		want bool
	}{
		"nothing went wrong":      {nil, false},
		"a test failed":           {apierrors.NewInvalid(kind, "orders", nil), true},
		"the same, wrapped":       {fmt.Errorf("patch: %w", apierrors.NewInvalid(kind, "orders", nil)), true},
		"a rule of the schema":    {apierrors.NewInvalid(kind, "orders", rule), false},
		"it is gone":              {apierrors.NewNotFound(resource, "orders"), true},
		"a conflict":              {apierrors.NewConflict(resource, "orders", nil), true},
		"a policy":                {apierrors.NewForbidden(resource, "orders", errors.New("no")), false},
		"the answer did not come": {apierrors.NewTimeoutError("late", 1), false},
		"the network":             {errors.New("connection refused"), false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := lostRace(tc.err); got != tc.want {
				t.Errorf("lost race: %t, want %t", got, tc.want)
			}
		})
	}
}

func TestMetricsAreWellFormed(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	NewMetrics(reg).show(counts{sessions: 3, held: 2, waiting: 1})
	problems, err := testutil.GatherAndLint(reg)
	if err != nil || len(problems) > 0 {
		t.Errorf("problems %v, error %v", problems, err)
	}
	n, err := testutil.GatherAndCount(reg, "fencedlease_handovers_total")
	if err != nil || n != 7 {
		t.Errorf("%d reasons (error %v), want 7 from the start", n, err)
	}
}
