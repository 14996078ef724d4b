// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"fmt"
	"strconv"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// ParseToken reads a token as it is presented: a decimal from 1 to 2^53-1 without sign, space or leading
// zero. Nothing else is ever read as a number.
func ParseToken(s string) (int64, error) {
	n, err := parseDecimal(s)
	if err != nil {
		return 0, fmt.Errorf("token %q is not a decimal from 1 to %d without leading zero", clip(s), int64(v1alpha1.MaxToken))
	}
	return n, nil
}

// FormatToken is a token as it is presented.
func FormatToken(token int64) string { return strconv.FormatInt(token, 10) }

func parseDecimal(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 1 || n > v1alpha1.MaxToken || strconv.FormatInt(n, 10) != s {
		return 0, strconv.ErrSyntax
	}
	return n, nil
}

// clip bounds what is quoted of a request in an error.
func clip(s string) string {
	const most = 40
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}
