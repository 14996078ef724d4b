// SPDX-License-Identifier: Apache-2.0

package testenv_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencedlease/fencedlease/internal/testenv"
)

// shell is a Process that runs a script.
func shell(t *testing.T, script string) *testenv.Process {
	t.Helper()
	p := &testenv.Process{
		Name:    "script",
		Path:    "/bin/sh",
		Args:    []string{"-c", script},
		LogPath: filepath.Join(t.TempDir(), "script.log"),
	}
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

func start(t *testing.T, p *testenv.Process) {
	t.Helper()
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestFailedStartTellsTheLog(t *testing.T) {
	p := shell(t, "echo unknown flag; exit 3")
	start(t, p) // the log has an earlier run
	<-p.Exited()
	p.Args = []string{"-c", "echo port is taken >&2; exit 4"}
	p.Ready = never
	err := p.Start(t.Context())
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"start script", "exit status 4", "port is taken", p.LogPath} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q, want %q in it", err, want)
		}
	}
	if strings.Contains(err.Error(), "unknown flag") {
		t.Errorf("error %q speaks of an earlier run", err)
	}
}

func TestStartThatIsNotReadyInTimeLeavesNothing(t *testing.T) {
	p := shell(t, "exec sleep 60")
	p.Ready = never
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := p.Start(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "not yet") {
		t.Errorf("error %v, want the deadline and the last answer", err)
	}
	if alive(p.PID()) {
		t.Error("the process is still there")
	}
}

func TestStartTwice(t *testing.T) {
	p := shell(t, "exec sleep 60")
	start(t, p)
	if err := p.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "runs already") {
		t.Errorf("error %v, want that it runs already", err)
	}
}

func TestStop(t *testing.T) {
	p := shell(t, "trap 'exit 5' TERM; echo up; while :; do sleep 0.01; done")
	if err := p.Stop(); err != nil {
		t.Errorf("stop before the first start: %v", err)
	}
	p.Ready = logContains(p, "up")
	start(t, p)
	for range 2 {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	}
	var exit *exec.ExitError
	if err := p.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 5 {
		t.Errorf("it ended with %v, want exit code 5 from its handler of SIGTERM", err)
	}
}

func TestStopKillsWhatDoesNotEnd(t *testing.T) {
	p := shell(t, "trap '' TERM; echo up; while :; do sleep 0.01; done")
	p.Ready = logContains(p, "up")
	p.StopTimeout = 100 * time.Millisecond
	start(t, p)
	if err := p.Stop(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("error %v, want that it was killed", err)
	}
	if alive(p.PID()) {
		t.Error("the process is still there")
	}
}

func TestStopAndKillEndThePaused(t *testing.T) {
	for name, end := range map[string]func(*testenv.Process) error{
		"stop": (*testenv.Process).Stop,
		"kill": (*testenv.Process).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			p := shell(t, "exec sleep 60")
			start(t, p)
			if err := p.Pause(); err != nil {
				t.Fatal(err)
			}
			if err := end(p); err != nil {
				t.Fatal(err)
			}
			if err := p.Pause(); !errors.Is(err, os.ErrProcessDone) {
				t.Errorf("error %v from pausing what has ended, want %v", err, os.ErrProcessDone)
			}
		})
	}
}

func TestPauseAndResume(t *testing.T) {
	p := shell(t, "while :; do echo tick; sleep 0.01; done")
	start(t, p)
	for range 2 { // the second pause must not take the first for its own
		if err := p.Pause(); err != nil {
			t.Fatal(err)
		}
		if got := processState(p.PID()); got != 'T' {
			t.Fatalf("its state is %c after Pause returned, want T", got)
		}
		if err := p.Resume(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it goes on", func(context.Context) (bool, error) { return processState(p.PID()) != 'T', nil })
	}
}

func TestRestart(t *testing.T) {
	p := shell(t, "echo $$ $WORD; exec sleep 60")
	p.Env = []string{"WORD=hello"}
	p.Ready = logContains(p, "hello")
	start(t, p)
	first, exited := p.PID(), p.Exited()
	if err := p.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-exited:
	default:
		t.Error("Exited of the first run is still open")
	}
	select {
	case <-p.Exited():
		t.Error("the second run is over")
	default:
	}
	if p.PID() == first {
		t.Errorf("the second run has pid %d, too", first)
	}
}

// The kernel would end the child with the thread that forked it: that must not be the caller's.
func TestChildOutlivesTheThreadOfItsStarter(t *testing.T) {
	p := shell(t, "exec sleep 60")
	thread := onDyingThread(func() {
		if err := p.Start(t.Context()); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "the thread has ended", func(context.Context) (bool, error) { return !threadExists(thread), nil })
	if !alive(p.PID()) {
		t.Error("the child has ended with the thread")
	}
}

func logContains(p *testenv.Process, word string) testenv.Check {
	return func(context.Context) error {
		content, err := os.ReadFile(p.LogPath)
		if err == nil && !strings.Contains(string(content), word) {
			err = errors.New("the log lacks " + word)
		}
		return err
	}
}

// alive tells whether the process runs. An orphan that ended counts as gone, even if nobody has collected it.
func alive(pid int) bool {
	switch processState(pid) {
	case 0, 'Z', 'X':
		return false
	default:
		return true
	}
}

// processState is the state letter of proc(5), 0 when there is no such process.
func processState(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// "pid (name) state …", and the name may hold anything.
	return stat[bytes.LastIndexByte(stat, ')')+2]
}

// onDyingThread runs do on a thread that ends when do has returned, and returns the thread's id.
func onDyingThread(do func()) int {
	id := make(chan int, 1)
	go func() {
		runtime.LockOSThread() // a thread that is locked to its goroutine ends with it
		thread := syscall.Gettid()
		if thread != os.Getpid() {
			do()
			id <- thread
			return
		}
		id <- onDyingThread(do) // the main thread never ends: occupy it meanwhile
		runtime.UnlockOSThread()
	}()
	return <-id
}

func threadExists(id int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", id))
	return err == nil
}
