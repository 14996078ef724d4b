// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"time"

	"golang.org/x/sys/unix"
)

// newClock counts with CLOCK_BOOTTIME: unlike the runtime's clock it goes on while the machine sleeps, and a
// session must not take an hour of sleep for a moment.
func newClock() clock {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) != nil {
		return monotonic() // an old kernel, or a sandbox without the clock
	}
	return func() time.Duration {
		var now unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // it has worked once; it cannot fail later
		return time.Duration(now.Nano())
	}
}
