// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
	"github.com/fencedlease/fencedlease/internal/protocol"
)

func doc(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "protocol.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// section is the part of the document under a heading.
func section(t *testing.T, heading string) string {
	t.Helper()
	_, rest, found := strings.Cut(doc(t), "\n## "+heading+"\n")
	if !found {
		t.Fatalf("docs/protocol.md has no section %q", heading)
	}
	text, _, _ := strings.Cut(rest, "\n## ")
	return text
}

// rows are the cells of the table in a section, without its head.
func rows(t *testing.T, heading string) [][]string {
	t.Helper()
	var table [][]string
	for text := range strings.Lines(section(t, heading)) {
		if text = strings.TrimSpace(text); strings.HasPrefix(text, "|") {
			var cells []string
			for cell := range strings.SplitSeq(strings.Trim(text, "|"), "|") {
				cells = append(cells, strings.Trim(strings.TrimSpace(cell), "`"))
			}
			table = append(table, cells)
		}
	}
	if len(table) < 3 {
		t.Fatalf("section %q of docs/protocol.md has no table", heading)
	}
	return table[2:]
}

// TestDocTable runs the table of transitions: what stands there happens so, and what does not stand there is
// refused.
func TestDocTable(t *testing.T) {
	b, c := contender("b", 8), contender("c", 9)
	states := map[string]builder{
		"no status": fresh(), "Available": available(),
		"Held": held("a", 7), "Held+queue": held("a", 7).queue(b, c),
		"Held+cooldown": held("a", 7).cooldown(5), "Held+queue+cooldown": held("a", 7).cooldown(5).queue(b, c),
		"Cooldown": cooling(), "Cooldown+queue": cooling().queue(b, c),
	}
	written := []v1alpha1.Contender{contender("d", 1)}
	kinds := map[string]protocol.Transition{
		"Initialise": protocol.Initialise(noon), "Acquire": protocol.Acquire(contender("z", 1), noon),
		"Grant": protocol.Grant(contender("z", 1), written, 1, noon), "Release": protocol.Release(contender("a", 7), noon),
		"End": protocol.End(101, v1alpha1.EndExpired, noon), "EndCooldown": protocol.EndCooldown(noon),
		"Queue": protocol.Queue(written, 1), "Observe": protocol.Observe(noon),
	}
	table := rows(t, "Transitions")
	for _, row := range table {
		if _, ok := kinds[row[0]]; !ok || len(row) != 7 {
			t.Fatalf("row %q is not a transition of seven cells", row)
		}
		for from := range strings.SplitSeq(row[2], ", ") {
			if _, ok := states[from]; !ok {
				t.Fatalf("row %q begins in an unknown state", row)
			}
		}
	}
	for kind, move := range kinds {
		for from, before := range states {
			t.Run(kind+" from "+from, func(t *testing.T) {
				after, err := protocol.Apply(before.FencedLease, move)
				i := slices.IndexFunc(table, func(row []string) bool {
					return row[0] == kind && slices.Contains(strings.Split(row[2], ", "), from)
				})
				switch {
				case i < 0 && err == nil:
					t.Errorf("it is not in the table, and happens: %s", line(after))
				case i >= 0 && err != nil:
					t.Errorf("it is in the table, and does not happen: %v", err)
				case i >= 0:
					runRow(t, table[i], before.FencedLease, after, written)
				}
			})
		}
	}
}

func runRow(t *testing.T, row []string, before, after *v1alpha1.FencedLease, written []v1alpha1.Contender) {
	t.Helper()
	old := before.Status
	if old == nil {
		old = &v1alpha1.FencedLeaseStatus{}
	}
	for _, cell := range []struct {
		name, says string
		truths     map[string]bool
	}{
		{"to", row[3], map[string]bool{string(after.Status.Phase): true, "as it was": after.Status.Phase == old.Phase}},
		{"token", row[4], map[string]bool{"start": after.Status.Token == 100 && before.Status == nil, "next": after.Status.Token == old.Token+1, "same": after.Status.Token == old.Token}},
		{"term", row[5], map[string]bool{"recorded": len(after.Status.Terms) == len(old.Terms)+1, "-": len(after.Status.Terms) == len(old.Terms)}},
		{"queue", row[6], map[string]bool{
			"empty":          len(after.Status.Queue) == 0,
			"as it was":      slices.Equal(after.Status.Queue, old.Queue),
			"as written":     slices.Equal(after.Status.Queue, written),
			"loses its head": len(old.Queue) > 0 && slices.Equal(after.Status.Queue, old.Queue[1:]),
		}},
	} {
		if !cell.truths[cell.says] {
			t.Errorf("%s is not %q: %s", cell.name, cell.says, line(after))
		}
	}
}

// TestDocEndReasons: the table of end reasons is whole, and says which of them cool down.
func TestDocEndReasons(t *testing.T) {
	var reasons []string
	for _, row := range rows(t, "End reasons") {
		reasons = append(reasons, row[0])
		l := held("a", 7).cooldown(5).FencedLease
		move := protocol.End(101, v1alpha1.EndReason(row[0]), noon)
		if row[0] == string(v1alpha1.EndReleased) {
			move = protocol.Release(contender("a", 7), noon)
		}
		after, err := protocol.Apply(l, move)
		if err != nil {
			t.Fatal(err)
		}
		if cools := after.Status.Phase == v1alpha1.PhaseCooldown; cools != (row[2] == "yes") {
			t.Errorf("%s: cools down is %v, the document says %q", row[0], cools, row[2])
		}
	}
	source, err := os.ReadFile(filepath.Join("..", "..", "api", "v1alpha1", "fencedlease_types.go"))
	if err != nil {
		t.Fatal(err)
	}
	_, enum, _ := strings.Cut(string(source), "// EndReason says why a term ended.\n// +kubebuilder:validation:Enum=")
	enum, _, _ = strings.Cut(enum, "\n")
	if got := strings.Join(reasons, ";"); got != enum {
		t.Errorf("the document has %s, the API has %s", got, enum)
	}
}

// TestDocNamesItsTests: every test that the document names exists.
func TestDocNamesItsTests(t *testing.T) {
	exist := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	err := filepath.WalkDir(filepath.Join("..", ".."), func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "bin" || strings.HasPrefix(entry.Name(), ".") && len(entry.Name()) > 2):
			return fs.SkipDir
		case !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		source, err := os.ReadFile(path)
		for _, match := range declared.FindAllStringSubmatch(string(source), -1) {
			exist[match[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rows(t, "Promises") {
		if !regexp.MustCompile("^(Test|Fuzz)").MatchString(row[1]) {
			t.Errorf("the promise %q names no test", row[0])
		}
	}
	named := regexp.MustCompile(`\b((?:Test|Fuzz)[A-Z]\w+)`).FindAllString(doc(t), -1)
	for _, name := range named {
		if !exist[name] {
			t.Errorf("there is no %s", name)
		}
	}
}

// TestDocQuotesStories: what the document quotes from a story stands there word for word.
func TestDocQuotesStories(t *testing.T) {
	quotes := regexp.MustCompile("(?ms)^( *)```text (\\S+)\n(.*?)\n *```$").FindAllStringSubmatch(doc(t), -1)
	if len(quotes) < 3 {
		t.Fatalf("only %d quotes were found", len(quotes))
	}
	for _, quote := range quotes {
		story, err := os.ReadFile(filepath.Join("testdata", quote[2]))
		if err != nil {
			t.Fatal(err)
		}
		if text := strings.TrimPrefix(strings.ReplaceAll("\n"+quote[3], "\n"+quote[1], "\n"), "\n"); !strings.Contains(string(story), text+"\n") {
			t.Errorf("%s does not say:\n%s", quote[2], text)
		}
	}
	if lines := strings.Count(doc(t), "\n"); lines > 250 {
		t.Errorf("the document has %d lines", lines)
	}
}
