// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"
	logf "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

const (
	readTimeout  = 3 * time.Second
	writeTimeout = 5 * time.Second
)

// errAbsent: there is no such object.
var errAbsent = errors.New("there is none")

func ignoreAbsent(err error) error {
	if errors.Is(err, errAbsent) {
		return nil
	}
	return err
}

// liveReader asks the API server itself, past the cache, and tells the tracker whether it can be read.
type liveReader struct {
	reader  client.Reader
	tracker *tracker
}

// session returns the session of that name, or errAbsent: also when it has lost its label, or when no object can
// have such a name (that must not look as if the API server could not be read).
func (r *liveReader) session(ctx context.Context, name types.NamespacedName) (*coordinationv1.Lease, error) {
	if len(validation.IsDNS1123Subdomain(name.Name)) > 0 {
		return nil, errAbsent
	}
	var lease coordinationv1.Lease
	if err := r.get(ctx, name, &lease); err != nil {
		return nil, fmt.Errorf("read session %q: %w", name, err)
	}
	if lease.UID == "" || lease.Labels[v1alpha1.SessionLabel] != "true" {
		return nil, errAbsent
	}
	return &lease, nil
}

// lease returns the FencedLease of that name, or errAbsent.
func (r *liveReader) lease(ctx context.Context, name types.NamespacedName) (*v1alpha1.FencedLease, error) {
	var lease v1alpha1.FencedLease
	if err := r.get(ctx, name, &lease); err != nil {
		return nil, fmt.Errorf("read lease %q: %w", name, err)
	}
	if lease.UID == "" {
		return nil, errAbsent
	}
	return &lease, nil
}

// get leaves o empty when it does not exist.
func (r *liveReader) get(ctx context.Context, name types.NamespacedName, o client.Object) error {
	call, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	begun := r.tracker.clock.Now()
	err := client.IgnoreNotFound(r.reader.Get(call, name, o))
	switch {
	case ctx.Err() != nil:
		return ctx.Err() // we are stopping: that says nothing about the API server
	case err != nil:
		if r.tracker.unreadable() {
			logf.FromContext(ctx).Info("The API server cannot be read: no session expires until it can.", "error", err.Error())
		}
	case r.tracker.readable(begun):
		logf.FromContext(ctx).Info("The API server can be read again: each session counts anew.")
	}
	return err
}

// lostRace says that a write was decided on a state that is no longer there: one of its tests failed (422 without
// causes), or the object is gone. A 422 with causes is a rule of the schema: the spec changed, or we have a bug.
func lostRace(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return true
	}
	details := status.Status().Details
	return apierrors.IsInvalid(err) && (details == nil || len(details.Causes) == 0)
}
