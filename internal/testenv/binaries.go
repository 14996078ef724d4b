// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const modulePath = "github.com/fencedlease/fencedlease"

// findBinaries finds bin/ and wants the binaries there which the environment will need.
func (e *Env) findBinaries(controllerManager bool) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	e.binaries = filepath.Join(root, "bin")
	wanted := []string{"etcd", "kube-apiserver", "kubectl"}
	if controllerManager {
		wanted = append(wanted, "kube-controller-manager")
	}
	for _, name := range wanted {
		if _, err := os.Stat(filepath.Join(e.binaries, name)); err != nil {
			return fmt.Errorf("find %s: %w: run `make controlplane`, which builds it (once per machine) or links it into bin/", name, err)
		}
	}
	return nil
}

// moduleRoot goes up from the working directory to our go.mod; those of nested modules are passed by.
func moduleRoot() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		content, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(content), "module "+modulePath+"\n") {
			return dir, nil
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("find bin/: %s is not inside a checkout of %s: run this from there", start, modulePath)
		}
	}
}
