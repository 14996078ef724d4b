// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package fence

func newClock() clock { return monotonic() }
