// SPDX-License-Identifier: Apache-2.0

//go:build unix

package main

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

const pollInterval = 50 * time.Millisecond

var (
	holds    = regexp.MustCompile(`holds lease orders with token (\d+)`)
	refused  = regexp.MustCompile(`late write of count=4 to protected was REFUSED: .*this write carries (\d+)`)
	accepted = regexp.MustCompile(`late write of count=4 to unprotected was ACCEPTED`)
)

// takesOver starts the worker and waits until it holds the lease and has counted to count. It returns its token.
func (s *stage) takesOver(ctx context.Context, a *actor, count string) (int64, error) {
	if err := a.Start(ctx); err != nil {
		return 0, err
	}
	return s.goesOn(ctx, a, count)
}

func (s *stage) goesOn(ctx context.Context, a *actor, count string) (int64, error) {
	match, err := a.await(ctx, holds)
	if err != nil {
		return 0, err
	}
	if _, err := a.await(ctx, regexp.MustCompile("wrote count="+count+" ")); err != nil {
		return 0, err
	}
	token, err := strconv.ParseInt(match[1], 10, 64)
	if err != nil {
		return 0, err
	}
	return token, s.counts(ctx, map[string]string{"protected": count + " by " + a.Name, "unprotected": count + " by " + a.Name})
}

// wakes lets worker-a go on, and wants its late write refused on one ConfigMap and accepted on the other.
func (s *stage) wakes(ctx context.Context, token int64) error {
	if err := s.a.Resume(); err != nil {
		return err
	}
	match, err := s.a.await(ctx, refused)
	if err != nil {
		return err
	}
	if match[1] != strconv.FormatInt(token, 10) {
		return fmt.Errorf("the write that was refused carried token %s, and should have carried %d", match[1], token)
	}
	_, err = s.a.await(ctx, accepted)
	return err
}

// harm shows both ConfigMaps side by side.
func (s *stage) harm(ctx context.Context) error {
	if err := s.counts(ctx, map[string]string{"protected": "6 by worker-b", "unprotected": "4 by worker-a"}); err != nil {
		return err
	}
	fmt.Print(`
                               protected             unprotected
     worker-b had written      count=6               count=6
     worker-a's late write     403, refused          200, accepted
     now there is              count=6 by worker-b   count=4 by worker-a  <- two of worker-b's steps are lost
`)
	return nil
}

// counts wants these counts and writers in the ConfigMaps.
func (s *stage) counts(ctx context.Context, want map[string]string) error {
	for name, want := range want {
		var found corev1.ConfigMap
		if err := s.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &found); err != nil {
			return err
		}
		if got := found.Data["count"] + " by " + found.Data["writer"]; got != want {
			return fmt.Errorf("ConfigMap %s says %q, and should say %q", name, got, want)
		}
	}
	return nil
}

// epilogue wants both terms in the lease's history, and the lease back after worker-b has ended.
func (s *stage) epilogue(ctx context.Context, first, second int64) error {
	if err := s.b.Stop(); err != nil {
		return err
	}
	// worker-a waits in line again since it woke up, so it is its turn.
	err := s.leaseShows(ctx, "worker-a with the third token", func(l *v1alpha1.FencedLease) bool {
		return l.Status.Token == second+1 && l.Status.Holder != nil && l.Status.Holder.Identity == s.a.Name
	})
	if err != nil {
		return err
	}
	lease, err := s.lease(ctx)
	if err != nil {
		return err
	}
	want := []v1alpha1.Term{
		{Token: second, Identity: s.b.Name, EndReason: v1alpha1.EndReleased},
		{Token: first, Identity: s.a.Name, EndReason: v1alpha1.EndExpired},
	}
	if len(lease.Status.Terms) != len(want) {
		return fmt.Errorf("status.terms has %d terms, and should have %d", len(lease.Status.Terms), len(want))
	}
	for i, term := range lease.Status.Terms {
		note("token %d  %-9s %s to %s  %s", term.Token, term.Identity,
			term.StartTime.Format(time.TimeOnly), term.EndTime.Format(time.TimeOnly), term.EndReason)
		if term.Token != want[i].Token || term.Identity != want[i].Identity || term.EndReason != want[i].EndReason {
			return fmt.Errorf("status.terms[%d] is token %d, %s, %s, and should be token %d, %s, %s", i,
				term.Token, term.Identity, term.EndReason, want[i].Token, want[i].Identity, want[i].EndReason)
		}
	}
	return nil
}

// leaseShows waits until the lease is as it should be.
func (s *stage) leaseShows(ctx context.Context, what string, is func(*v1alpha1.FencedLease) bool) error {
	err := wait.PollUntilContextTimeout(ctx, pollInterval, stepLimit, true, func(ctx context.Context) (bool, error) {
		lease, err := s.lease(ctx)
		return err == nil && lease.Status != nil && is(lease), err
	})
	if err != nil {
		return fmt.Errorf("wait for the lease to show %s: %w", what, err)
	}
	return nil
}

func (s *stage) lease(ctx context.Context) (*v1alpha1.FencedLease, error) {
	var lease v1alpha1.FencedLease
	err := s.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "orders"}, &lease)
	return &lease, err
}
