// SPDX-License-Identifier: Apache-2.0

package fence

import "time"

// clock counts from some moment in the past. It never goes back, and where the system allows it goes on
// while the machine sleeps.
type clock func() time.Duration

// monotonic is the clock of the Go runtime. On most systems it stands still while the machine sleeps.
func monotonic() clock {
	start := time.Now()
	return func() time.Duration { return time.Since(start) }
}
