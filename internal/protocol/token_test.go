// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"strings"
	"testing"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

// malformedTokens are texts that must never be read as a number.
var malformedTokens = map[string]string{
	"nothing":             "",
	"letters":             "abc",
	"zero":                "0",
	"minus zero":          "-0",
	"a minus sign":        "-1",
	"a plus sign":         "+5",
	"a space before":      " 7",
	"a space behind":      "7 ",
	"a line break behind": "7\n",
	"a zero byte behind":  "7\x00",
	"a fraction":          "7.0",
	"an exponent":         "1e3",
	"hexadecimal":         "0x10",
	"leading zeros":       "007",
	"an underscore":       "1_000",
	"a comma":             "1,000",
	"two of them":         "7 8",
	"2^53":                "9007199254740992",
	"2^63":                "9223372036854775808",
	"20 digits":           "12345678901234567890",
	"full-width digits":   "５",
	"Arabic digits":       "٧",
	"no UTF-8":            "7\xff",
}

func TestParseToken(t *testing.T) {
	for name, text := range malformedTokens {
		if n, err := protocol.ParseToken(text); err == nil || n != 0 {
			t.Errorf("%s: %q was read as %d", name, text, n)
		}
	}
	for text, want := range map[string]int64{"1": 1, "9": 9, "10": 10, "48213": 48213, "9007199254740991": v1alpha1.MaxToken} {
		got, err := protocol.ParseToken(text)
		if err != nil || got != want {
			t.Errorf("%q: got %d, %v", text, got, err)
		}
		if back := protocol.FormatToken(got); back != text {
			t.Errorf("%q was written back as %q", text, back)
		}
	}
}

func TestParseTokenQuotesLittle(t *testing.T) {
	_, err := protocol.ParseToken(strings.Repeat("9", 100_000))
	if err == nil || len(err.Error()) > 200 {
		t.Errorf("the error has %d characters", len(err.Error()))
	}
}

func TestNextToken(t *testing.T) {
	for name, tc := range map[string]struct {
		lease builder
		want  int64
	}{
		"the last plus one":              {available(), 101},
		"or minToken":                    {available().minToken(5000), 5000},
		"which does not lower it":        {available().minToken(50), 101},
		"and may overshoot at the end":   {available().token(v1alpha1.MaxToken), v1alpha1.MaxToken + 1},
		"2^52 leaves as many as it took": {available().minToken(1 << 52), 1 << 52},
	} {
		if got := protocol.NextToken(tc.lease.FencedLease); got != tc.want {
			t.Errorf("%s: got %d, want %d", name, got, tc.want)
		}
	}
}

func FuzzParseToken(f *testing.F) {
	for _, text := range malformedTokens {
		f.Add(text)
	}
	f.Add("48213")
	f.Fuzz(func(t *testing.T, text string) {
		n, err := protocol.ParseToken(text)
		if err != nil {
			return
		}
		if n < 1 || n > v1alpha1.MaxToken || protocol.FormatToken(n) != text || strings.Trim(text, "0123456789") != "" {
			t.Errorf("%q was read as %d", text, n)
		}
	})
}
