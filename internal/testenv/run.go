// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
)

// run is one life of a Process.
type run struct {
	cmd    *exec.Cmd
	log    logMark
	exited chan struct{}
	err    error // how it ended; set before exited is closed
}

// live starts the child and watches over it in a goroutine of its own, which is bound to one thread of the system
// until the child is gone. Linux sends the signal of tied when the *thread* that forked ends, not the process. Go
// ends a thread when a goroutine returns that locked it, so a fork on a borrowed thread could kill a healthy child
// at any time. This thread forks, then does nothing but wait for the child.
func (r *run) live() error {
	r.cmd.SysProcAttr = tied()
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := r.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		r.err = r.cmd.Wait()
		close(r.exited)
	}()
	return <-started
}

func (r *run) over() bool {
	select {
	case <-r.exited:
		return true
	default:
		return false
	}
}

// logMark is the place in a log file where a run begins.
type logMark struct {
	path  string
	start int64
}

func markLog(file *os.File) logMark {
	m := logMark{path: file.Name()}
	if info, err := file.Stat(); err == nil {
		m.start = info.Size()
	}
	return m
}

// tail returns the end of what the run has written: 30 lines at most.
func (m logMark) tail() string {
	file, err := os.Open(m.path)
	if err != nil {
		return "(no log)"
	}
	defer file.Close()
	start := m.start
	if info, err := file.Stat(); err == nil {
		start = max(start, info.Size()-8192)
	}
	content, err := io.ReadAll(io.NewSectionReader(file, start, 1<<20))
	if err != nil {
		return "(unreadable: " + err.Error() + ")"
	}
	lines := strings.Split(strings.TrimSpace(string(content)), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}
