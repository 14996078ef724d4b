// SPDX-License-Identifier: Apache-2.0

package protocol_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/fencedlease/fencedlease"

// TestImports checks who may import whom. Each rule is about everything that ends up in the program, not only
// about what a file imports itself.
func TestImports(t *testing.T) {
	root := filepath.Join("..", "..")
	client, runtime := "k8s.io/client-go", "sigs.k8s.io/controller-runtime"
	controller, guard, certs, install := module+"/internal/controller", module+"/internal/guard", module+"/internal/certs", module+"/internal/install"
	fence, testenv := module+"/fence", module+"/internal/testenv"
	for dir, forbidden := range map[string][]string{
		"api/v1alpha1":        {module, client, runtime},
		"internal/protocol":   {module + "/internal", module + "/fence", client, runtime},
		"internal/controller": {guard, certs, install, fence, testenv},
		"internal/guard":      {controller, certs, install, fence, testenv},
		"internal/certs":      {controller, guard, fence, testenv},
		"fence":               {controller, guard, certs, install, testenv},
		"cmd/kubectl-fence":   {controller, guard, certs, install, testenv},
	} {
		t.Run(dir, func(t *testing.T) {
			if !hasGo(t, filepath.Join(root, dir)) {
				t.Logf("%s holds no Go files yet", dir)
				return
			}
			for _, pkg := range deps(t, root, "./"+dir+"/...") {
				for _, no := range forbidden {
					if within(pkg, no) && !within(pkg, module+"/"+dir) {
						t.Errorf("%s depends on %s", dir, pkg)
					}
				}
			}
		})
	}
}

// within says whether a package is, or lies below, another.
func within(pkg, parent string) bool { return pkg == parent || strings.HasPrefix(pkg, parent+"/") }

// TestProtocolImportsLittle: the package itself names no client, log, clock, context or goroutine.
func TestProtocolImportsLittle(t *testing.T) {
	allowed := map[string]bool{
		"encoding/json": true, "errors": true, "fmt": true, "maps": true, "slices": true, "strconv": true, "strings": true,
		"time": true, "unicode/utf8": true, module + "/api/v1alpha1": true,
	}
	for _, pkg := range list(t, ".", "-f", `{{join .Imports "\n"}}`, ".") {
		if !allowed[pkg] && !within(pkg, "k8s.io/apimachinery") && !within(pkg, "k8s.io/api") {
			t.Errorf("internal/protocol imports %s", pkg)
		}
	}
}

// TestProtocolReadsNoClock: time comes in as an argument.
func TestProtocolReadsNoClock(t *testing.T) {
	for _, name := range list(t, ".", "-f", `{{join .GoFiles "\n"}}`, ".") {
		source, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, clock := range []string{"time.Now", "time.Since", "time.Until", "time.After", "time.Sleep", "time.Tick", "time.NewT"} {
			if strings.Contains(string(source), clock) {
				t.Errorf("%s reads a clock: %s", name, clock)
			}
		}
	}
}

func deps(t *testing.T, dir string, patterns ...string) []string {
	t.Helper()
	return list(t, dir, append([]string{"-deps"}, patterns...)...)
}

func list(t *testing.T, dir string, args ...string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list"}, args...)...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", cmd, err)
	}
	return strings.Fields(string(out))
}

func hasGo(t *testing.T, dir string) bool {
	t.Helper()
	found := false
	_ = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		found = found || err == nil && strings.HasSuffix(path, ".go")
		return nil
	})
	return found
}
