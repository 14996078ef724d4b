// SPDX-License-Identifier: Apache-2.0

package testenv_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fencedlease/fencedlease/internal/testenv"
)

// The parent gets no chance to clean up; its children end all the same, the paused one included. Their data is left
// in order.
func TestChildrenDieWithTheirParent(t *testing.T) {
	dir := t.TempDir()
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), parentVar+"="+dir)
	parent.Stderr = os.Stderr
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = parent.Process.Kill()
		_ = parent.Wait()
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var etcd, apiServer int
	if _, err := fmt.Sscan(line, &etcd, &apiServer); err != nil {
		t.Fatalf("the parent said %q: %v", line, err)
	}
	if !alive(etcd) || !alive(apiServer) {
		t.Fatalf("etcd (pid %d) and kube-apiserver (pid %d) should be alive", etcd, apiServer)
	}
	before := clusterID(t, filepath.Join(dir, "kubeconfig"))
	if err := syscall.Kill(etcd, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}

	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the children are gone", func(context.Context) (bool, error) {
		return !alive(etcd) && !alive(apiServer), nil
	})

	env, err := testenv.Start(t.Context(), testenv.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	if after := clusterID(t, env.Kubeconfig()); after != before {
		t.Errorf("the cluster that continues in the same directory has id %s, want %s", after, before)
	}
}

// clusterID is the UID of the namespace kube-system, which serves as that of the cluster.
func clusterID(t *testing.T, kubeconfig string) types.UID {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	namespace, err := clientFor(t, cfg).CoreV1().Namespaces().Get(t.Context(), metav1.NamespaceSystem, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return namespace.UID
}
