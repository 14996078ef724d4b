// SPDX-License-Identifier: Apache-2.0

// Package examples_test keeps the README and the examples in step.
package examples_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// What the README shows as Go is a part of a program that compiles.
func TestREADMEShowsTheQuickstart(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("quickstart/main.go")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllSubmatch(readme, -1)
	if len(blocks) != 1 {
		t.Fatalf("README.md has %d blocks of Go, want 1", len(blocks))
	}
	if shown := string(blocks[0][1]); !strings.HasSuffix(string(program), shown) {
		t.Errorf("README.md shows Go that is not the end of examples/quickstart/main.go; copy it from there:\n%s", shown)
	}
}

// Links to files lead somewhere.
func TestREADMELinks(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	links := regexp.MustCompile(`\]\(([^):#]+)\)`).FindAllSubmatch(readme, -1)
	if len(links) < 5 {
		t.Fatalf("README.md has %d links to files, want several", len(links))
	}
	for _, link := range links {
		if _, err := os.Stat("../" + string(link[1])); err != nil {
			t.Errorf("README.md links to %s: %v", link[1], err)
		}
	}
}
