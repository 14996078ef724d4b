// SPDX-License-Identifier: Apache-2.0

package testenv_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fencedlease/fencedlease/internal/testenv"
)

func testProxiedClient(t *testing.T, env *testenv.Env) {
	cfg := env.Config()
	proxy, err := testenv.NewProxy(cfg.Host[len("https://"):])
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close()
	direct, through := clientFor(t, cfg), clientFor(t, proxy.Config(cfg))
	configMaps := through.CoreV1().ConfigMaps("default")
	create := func(name string, limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		_, err := configMaps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		return err
	}
	if err := create("passed", 10*time.Second); err != nil {
		t.Fatal(err)
	}

	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := testenv.WriteKubeconfig(proxy.Config(cfg), path); err != nil {
		t.Fatal(err)
	}
	if _, err := env.Kubectl(t.Context(), "--kubeconfig", path, "get", "configmap", "passed"); err != nil {
		t.Errorf("kubectl through the proxy: %v", err)
	}

	// The write lands, and its answer is lost.
	proxy.SwallowAnswers()
	if err := create("landed", time.Second); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v without an answer, want %v", err, context.DeadlineExceeded)
	}
	eventually(t, "the write landed", func(ctx context.Context) (bool, error) {
		_, err := direct.CoreV1().ConfigMaps("default").Get(ctx, "landed", metav1.GetOptions{})
		return err == nil, err
	})

	proxy.Pass()
	eventually(t, "the client has found a new connection", func(context.Context) (bool, error) {
		err := create("healed", 10*time.Second)
		return err == nil, err
	})
}

func testPausedEtcd(t *testing.T, env *testenv.Env) {
	configMaps := clientFor(t, env.Config()).CoreV1().ConfigMaps("default")
	if err := env.Etcd.Pause(); err != nil {
		t.Fatal(err)
	}
	answer := make(chan error, 1)
	go func() {
		_, err := configMaps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "late"}}, metav1.CreateOptions{})
		answer <- err
	}()
	select {
	case err := <-answer:
		t.Errorf("a write was answered (%v) while etcd was paused", err)
	case <-time.After(time.Second):
	}
	if err := env.Etcd.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Errorf("the write failed after etcd went on: %v", err)
	}
}

func testAPIServerComesBack(t *testing.T, env *testenv.Env) {
	namespaces := clientFor(t, env.Config()).CoreV1().Namespaces() // one client, so one address, before and after
	kept := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "kept"}}
	if _, err := namespaces.Create(t.Context(), kept, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	comesBack := func(how string) {
		t.Helper()
		eventually(t, "the namespace is there after "+how, func(ctx context.Context) (bool, error) {
			_, err := namespaces.Get(ctx, kept.Name, metav1.GetOptions{})
			return err == nil, err
		})
	}

	before := env.APIServer.PID()
	if err := env.APIServer.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if env.APIServer.PID() == before {
		t.Errorf("the API server still has pid %d", before)
	}
	comesBack("a restart")

	if err := env.APIServer.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := namespaces.Get(t.Context(), kept.Name, metav1.GetOptions{}); err == nil {
		t.Error("a killed API server answered")
	}
	if err := env.APIServer.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	comesBack("a kill")
}
