// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// tied makes the kernel kill the child when the thread that starts it ends, at the latest with this process, however
// that one dies. So start and wait on a locked thread. A group of its own keeps Ctrl-C in a terminal from reaching
// the child: whoever catches it can still stop the children in order.
func tied() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

// pause returns when all threads of the process have stopped, or when it has ended. The signal alone only asks.
func pause(child *os.Process) error {
	if err := child.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for {
		// WNOWAIT: the end of the child is still there for the one that waits for it.
		err := unix.Waitid(unix.P_PID, child.Pid, nil, unix.WSTOPPED|unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func resume(child *os.Process) error {
	return child.Signal(syscall.SIGCONT)
}
