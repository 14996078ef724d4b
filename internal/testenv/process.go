// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

const (
	// startTimeout bounds a start whose context has no deadline: an API server needs 4 s on two idle cores, and
	// several times that beside a compiler.
	startTimeout = 90 * time.Second
	// stopTimeout is what a process gets between SIGTERM and SIGKILL unless it says otherwise.
	stopTimeout = 20 * time.Second
	// pollInterval is the pause between two looks at a condition.
	pollInterval = 50 * time.Millisecond
)

// Process is a program which a test can start, stop, kill and pause, any number of times. Set the exported fields
// before the first Start. Its methods may be called concurrently, but which of two opposite calls wins is then open.
//
// A child ends with the process that started it, also when that one is killed; see tied for how. What the child
// itself has started does not.
type Process struct {
	// Name is what errors call it.
	Name string
	// Path is the program's file.
	Path string
	// Args are its arguments, without the name; every Start uses the same.
	Args []string
	// Env is added to the environment of this process.
	Env []string
	// LogPath is the file to which both outputs are appended; empty throws them away.
	LogPath string
	// Ready tells Start when the process serves; nil: as soon as it runs.
	Ready Check
	// StopTimeout is what it gets to end after SIGTERM; 0: 20 seconds.
	StopTimeout time.Duration

	mu  sync.Mutex
	run *run // the latest run, over or not; nil before the first
}

// Start starts the process and waits until it is ready. ctx bounds only that wait. When the process ends before it
// is ready, or is not ready in time, it is gone when Start returns, and the error carries the end of its log.
func (p *Process) Start(ctx context.Context) error {
	r, err := p.launch()
	if err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	if p.Ready == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := p.awaitReady(ctx, r); err != nil {
		_ = p.Kill()
		return fmt.Errorf("start %s: %w; its log %s ends with:\n%s", p.Name, err, p.LogPath, r.log.tail())
	}
	return nil
}

// Stop asks the process to end (SIGTERM), also if it is paused, and waits. One that does not end within StopTimeout is
// killed, and the error says so. Stopping a process that does not run does nothing.
func (p *Process) Stop() error {
	r := p.current()
	if r == nil {
		return nil
	}
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return p.Kill() // it has ended already, or the system knows no SIGTERM
	}
	_ = resume(r.cmd.Process) // a paused process receives the signal only when it goes on
	limit := cmp.Or(p.StopTimeout, stopTimeout)
	select {
	case <-r.exited:
		return nil
	case <-time.After(limit):
		return errors.Join(
			fmt.Errorf("stop %s: it still ran %s after SIGTERM, so it was killed; see its log %s", p.Name, limit, p.LogPath),
			p.Kill())
	}
}

// Kill ends the process at once (SIGKILL), also if it is paused, and waits until it is gone.
func (p *Process) Kill() error {
	r := p.current()
	if r == nil {
		return nil
	}
	if err := r.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.Name, err)
	}
	<-r.exited
	return nil
}

// Pause stops the process where it is (SIGSTOP); it keeps memory, ports and connections. On Linux it has stopped
// when Pause returns.
func (p *Process) Pause() error {
	return p.whileRunning("pause", pause)
}

// Resume lets a paused process go on (SIGCONT).
func (p *Process) Resume() error {
	return p.whileRunning("resume", resume)
}

// Restart stops the process, if it runs, and starts it again with the same arguments, so with the same ports and
// data, and waits until it is ready. For the restart after a crash: Kill, then Start.
func (p *Process) Restart(ctx context.Context) error {
	if err := p.Stop(); err != nil {
		return fmt.Errorf("restart %s: %w", p.Name, err)
	}
	return p.Start(ctx)
}

// Exited is closed when the run that Start began last is over. Before the first Start it is nil: it blocks for ever.
func (p *Process) Exited() <-chan struct{} {
	if r := p.current(); r != nil {
		return r.exited
	}
	return nil
}

// Wait waits until the latest run is over and says how it ended: nil for exit code 0, otherwise an *exec.ExitError.
func (p *Process) Wait() error {
	r := p.current()
	if r == nil {
		return fmt.Errorf("wait for %s: it was never started", p.Name)
	}
	<-r.exited
	return r.err
}

// PID is the process id of the latest run, and 0 before the first.
func (p *Process) PID() int {
	if r := p.current(); r != nil {
		return r.cmd.Process.Pid
	}
	return 0
}

func (p *Process) current() *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.run
}

func (p *Process) whileRunning(verb string, do func(*os.Process) error) error {
	r := p.current()
	if r == nil {
		return fmt.Errorf("%s %s: it was never started", verb, p.Name)
	}
	if err := do(r.cmd.Process); err != nil {
		return fmt.Errorf("%s %s: %w", verb, p.Name, err)
	}
	return nil
}

func (p *Process) launch() (*run, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.run != nil && !p.run.over() {
		return nil, fmt.Errorf("it runs already (pid %d): stop it first, or use Restart", p.run.cmd.Process.Pid)
	}
	r := &run{cmd: exec.Command(p.Path, p.Args...), exited: make(chan struct{})}
	r.cmd.Env = append(os.Environ(), p.Env...)
	if p.LogPath != "" {
		file, err := os.OpenFile(p.LogPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, err
		}
		defer file.Close() // the child has its own descriptor
		r.log = markLog(file)
		r.cmd.Stdout, r.cmd.Stderr = file, file
	}
	if err := r.live(); err != nil {
		return nil, err
	}
	p.run = r
	return r, nil
}

func (p *Process) awaitReady(ctx context.Context, r *run) error {
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		err := p.Ready.within(ctx, 5*time.Second)
		if r.over() { // asked last, so that a stranger on our port is not taken for the child
			return fmt.Errorf("it ended before it was ready (%s)", r.cmd.ProcessState)
		}
		if err == nil {
			return nil
		}
		select {
		case <-r.exited:
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("not ready in time (%w), last answer: %w", context.Cause(ctx), err)
		}
	}
}
