// SPDX-License-Identifier: Apache-2.0

//go:build unix && !linux

package testenv

import (
	"os"
	"syscall"
)

// tied has no means here to end the child with this process. The best that can be done: the child stays in the
// process group of its parent, so that Ctrl-C in a terminal ends both. After a SIGKILL of the parent, look for
// leftovers.
func tied() *syscall.SysProcAttr {
	return nil
}

func pause(child *os.Process) error {
	return child.Signal(syscall.SIGSTOP)
}

func resume(child *os.Process) error {
	return child.Signal(syscall.SIGCONT)
}
