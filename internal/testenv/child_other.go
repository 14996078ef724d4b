// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package testenv

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
)

// tied has no means here to end the child with this process: after a crash of the parent, look for leftovers.
func tied() *syscall.SysProcAttr {
	return nil
}

func pause(*os.Process) error {
	return fmt.Errorf("%w on %s: run this on Linux", errors.ErrUnsupported, runtime.GOOS)
}

func resume(*os.Process) error {
	return fmt.Errorf("%w on %s: run this on Linux", errors.ErrUnsupported, runtime.GOOS)
}
