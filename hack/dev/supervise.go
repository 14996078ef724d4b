// SPDX-License-Identifier: Apache-2.0

//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/fencedlease/fencedlease/internal/testenv"
)

// supervise owns the control plane and the managers until it is told to end, or one of them ends by itself.
func supervise(ctx context.Context) error {
	locks, err := openLocks()
	if err != nil {
		return err
	}
	defer locks.Close()
	if mine, err := supervising.take(locks); err != nil || !mine {
		return errors.Join(errors.New("another supervisor runs"), err)
	}
	env, err := testenv.Start(ctx, testenv.Options{Dir: dir, ControllerManager: true})
	if err != nil {
		return err
	}
	operator, err := env.StartOperator(ctx)
	if err != nil {
		return errors.Join(err, env.Stop())
	}
	if err := os.WriteFile(readyPath(), nil, 0o600); err != nil {
		return errors.Join(err, operator.Stop(), env.Stop())
	}
	fmt.Println("ready")
	select {
	case <-ctx.Done():
		fmt.Println("told to end")
	case <-env.APIServer.Exited():
		err = fmt.Errorf("kube-apiserver has ended, so the rest is ended too; see %s", env.LogDir())
	case <-env.Etcd.Exited():
		err = fmt.Errorf("etcd has ended, so the rest is ended too; see %s", env.LogDir())
	}
	return errors.Join(err, operator.Stop(), env.Stop())
}
