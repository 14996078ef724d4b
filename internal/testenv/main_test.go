// SPDX-License-Identifier: Apache-2.0

package testenv_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/fencedlease/fencedlease/internal/testenv"
)

// parentVar makes this test binary a parent of a control plane in the directory it names, until it is killed.
const parentVar = "TESTENV_PARENT_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(parentVar); dir != "" {
		beParent(dir)
	}
	os.Exit(m.Run())
}

// beParent starts a control plane, tells its process ids, and waits to be killed.
func beParent(dir string) {
	env, err := testenv.Start(context.Background(), testenv.Options{Dir: dir})
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	fmt.Println(env.Etcd.PID(), env.APIServer.PID())
	select {}
}

// never is a Check that fails.
func never(context.Context) error { return errors.New("not yet") }

// eventually waits until done returns true without an error, and tells its last error when that does not come.
func eventually(t *testing.T, what string, done func(ctx context.Context) (bool, error)) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		ok, err := done(ctx)
		last = err
		return ok && err == nil, nil
	})
	if err != nil {
		t.Fatalf("wait until %s: %v (last error: %v)", what, err, last)
	}
}
