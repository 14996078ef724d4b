// SPDX-License-Identifier: Apache-2.0

//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A lock is one byte of the file bin/dev/lock. The kernel knows which process holds it, and frees it however that
// process ends: no file with a process id can be stale, and no stranger who got an old id is ever ended.
type lock int64

const (
	// starting is held by `dev up` while it starts a supervisor.
	starting lock = iota
	// supervising is held by the supervisor as long as it lives.
	supervising
)

// openLocks opens the file of the locks. Close it only to give up all locks that this process has.
func openLocks() (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return os.OpenFile(lockPath(), os.O_CREATE|os.O_RDWR, 0o600)
}

// take takes the lock, or says that somebody else has it.
func (l lock) take(file *os.File) (bool, error) {
	err := unix.FcntlFlock(file.Fd(), unix.F_SETLK, l.flock())
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EAGAIN) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lock %s: %w", lockPath(), err)
	}
	return true, nil
}

// holder is the process that has the lock, 0 if none has.
func (l lock) holder(file *os.File) (int, error) {
	flock := l.flock()
	if err := unix.FcntlFlock(file.Fd(), unix.F_GETLK, flock); err != nil {
		return 0, fmt.Errorf("ask who holds the lock on %s: %w", lockPath(), err)
	}
	if flock.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(flock.Pid), nil
}

func (l lock) flock() *unix.Flock_t {
	return &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: int64(l), Len: 1}
}

// end signals the process that holds the lock, and waits until it does not hold it any more.
func (l lock) end(ctx context.Context, file *os.File, pid int, signal syscall.Signal, limit time.Duration) error {
	process, err := os.FindProcess(pid) // a handle on this very process, where the system has such
	if err != nil {
		return err
	}
	// Asked again, because only who still holds the lock is the one that we have the handle of.
	if now, err := l.holder(file); err != nil || now != pid {
		return err
	}
	if err := process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("pid %d still runs %s after the signal %q", pid, limit, signal))
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if now, err := l.holder(file); err != nil || now != pid {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
