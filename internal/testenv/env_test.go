// SPDX-License-Identifier: Apache-2.0

package testenv_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fencedlease/fencedlease/internal/testenv"
)

// TestEnv shares one control plane among its subtests, which run in this order.
func TestEnv(t *testing.T) {
	began := time.Now()
	env, err := testenv.Start(t.Context(), testenv.Options{ControllerManager: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("started in %s", time.Since(began))
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})

	for _, test := range []struct {
		name string
		run  func(*testing.T, *testenv.Env)
	}{
		{"kubectl acts as the admin", testKubectl},
		{"kubectl acts as someone else by a kubeconfig", testKubectlAs},
		{"apply waits until definitions are served", testApply},
		{"a service account gets a token", testServiceAccount},
		{"the token of a Pod carries its UID and dies with it", testPod},
		{"the garbage collector follows a deleted Pod", testGarbageCollection},
		{"a proxied client verifies the server and feels the fault", testProxiedClient},
		{"a paused etcd holds writes back", testPausedEtcd},
		{"a killed API server comes back at the same address", testAPIServerComesBack},
		{"stop removes everything and is safe to repeat", testStop},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, env) })
	}
}

func TestStartWithoutBinaries(t *testing.T) {
	dir := t.TempDir()
	for name, test := range map[string]struct{ goMod, want string }{
		"outside of a checkout": {"module example.com/other\n", "checkout of github.com/fencedlease/fencedlease"},
		"before they are built": {"module github.com/fencedlease/fencedlease\n", "make controlplane"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte(test.goMod), 0o600); err != nil {
				t.Fatal(err)
			}
			t.Chdir(dir)
			if _, err := testenv.Start(t.Context(), testenv.Options{}); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q in it", err, test.want)
			}
		})
	}
}

func testKubectl(t *testing.T, env *testenv.Env) {
	out, err := env.Kubectl(t.Context(), "get", "ns", "-o", "name")
	if err != nil {
		t.Fatal(err)
	}
	if want := "namespace/default\n"; !strings.Contains(out, want) {
		t.Errorf("kubectl printed %q, want %q in it", out, want)
	}
	if _, err = env.Kubectl(t.Context(), "get", "ns", "missing"); err == nil || !strings.Contains(err.Error(), "NotFound") {
		t.Errorf("error %v, want the NotFound from stderr", err)
	}
}

func testKubectlAs(t *testing.T, env *testenv.Env) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := testenv.WriteKubeconfig(env.As("ada", "engineers"), path); err != nil {
		t.Fatal(err)
	}
	out, err := env.Kubectl(t.Context(), "--kubeconfig", path, "auth", "whoami", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"ada"`, `"engineers"`, `"system:authenticated"`} {
		if !strings.Contains(out, want) {
			t.Errorf("kubectl auth whoami printed %s, want %s in it", out, want)
		}
	}
}

func testApply(t *testing.T, env *testenv.Env) {
	dir := filepath.Join("testdata", "widgets")
	for range 2 { // and it is safe to repeat
		if err := env.Apply(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := env.Kubectl(t.Context(), "get", "widget", "first"); err != nil {
		t.Error(err)
	}
	if err := env.Apply(t.Context(), t.TempDir()); err == nil || !strings.Contains(err.Error(), "kustomization") {
		t.Errorf("error %v for a directory without kustomization, want kubectl's at once", err)
	}
}

func testServiceAccount(t *testing.T, env *testenv.Env) {
	for range 2 { // the second finds the account there
		cfg, err := env.ServiceAccount(t.Context(), "default", "worker")
		if err != nil {
			t.Fatal(err)
		}
		if got, want := whoami(t, cfg).Username, "system:serviceaccount:default:worker"; got != want {
			t.Errorf("the token is that of %q, want %q", got, want)
		}
	}
	if _, err := env.ServiceAccount(t.Context(), "missing", "worker"); !apierrors.IsNotFound(err) {
		t.Errorf("error %v in a missing namespace, want NotFound", err)
	}
}

func testPod(t *testing.T, env *testenv.Env) {
	cfg, pod, err := env.Pod(t.Context(), "default", "worker", "worker-0")
	if err != nil {
		t.Fatal(err)
	}
	user := whoami(t, cfg)
	for key, want := range map[string]string{
		"authentication.kubernetes.io/pod-name": pod.Name,
		"authentication.kubernetes.io/pod-uid":  string(pod.UID),
	} {
		if got := user.Extra[key]; len(got) != 1 || got[0] != want {
			t.Errorf("userInfo.extra[%s] is %v, want %q", key, got, want)
		}
	}
	if pod.Status.Phase != corev1.PodPending {
		t.Errorf("the Pod is %s, want %s", pod.Status.Phase, corev1.PodPending)
	}

	// The API server remembers for 10 s that it accepted a token, so this takes one that it has not seen.
	unseen, _, err := env.Pod(t.Context(), "default", "worker", "worker-0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := env.Kubectl(t.Context(), "delete", "pod", pod.Name); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the token of a deleted Pod is refused", func(ctx context.Context) (bool, error) {
		_, err := clientFor(t, unseen).AuthenticationV1().SelfSubjectReviews().
			Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		return apierrors.IsUnauthorized(err), nil
	})
}

func testGarbageCollection(t *testing.T, env *testenv.Env) {
	_, pod, err := env.Pod(t.Context(), "default", "worker", "owner")
	if err != nil {
		t.Fatal(err)
	}
	configMaps := clientFor(t, env.Config()).CoreV1().ConfigMaps("default")
	owned := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Name:            "owned",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}},
	}}
	if _, err := configMaps.Create(t.Context(), owned, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := env.Kubectl(t.Context(), "delete", "pod", pod.Name); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the ConfigMap follows its owner", func(ctx context.Context) (bool, error) {
		_, err := configMaps.Get(ctx, owned.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), nil
	})
}

func testStop(t *testing.T, env *testenv.Env) {
	for range 2 {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	}
	for _, part := range []*testenv.Process{env.Etcd, env.APIServer, env.ControllerManager} {
		select {
		case <-part.Exited():
		default:
			t.Errorf("%s (pid %d) is still there", part.Name, part.PID())
		}
	}
	if _, err := os.Stat(env.LogDir()); !os.IsNotExist(err) {
		t.Errorf("stat %s: %v, want it to be removed", env.LogDir(), err)
	}
}

func clientFor(t *testing.T, cfg *rest.Config) kubernetes.Interface {
	t.Helper()
	c, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func whoami(t *testing.T, cfg *rest.Config) authenticationv1.UserInfo {
	t.Helper()
	review, err := clientFor(t, cfg).AuthenticationV1().SelfSubjectReviews().
		Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return review.Status.UserInfo
}
