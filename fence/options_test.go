// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

func TestOptions(t *testing.T) {
	tests := map[string]struct {
		options Options
		word    string
	}{
		"the zero value":               {},
		"any UTF-8":                    {options: Options{Identity: "Ωμέγα 🦀/:_"}},
		"the longest identity":         {options: Options{Identity: strings.Repeat("ä", v1alpha1.MaxIdentityLength)}},
		"an identity that is too long": {options: Options{Identity: strings.Repeat("ä", v1alpha1.MaxIdentityLength+1)}, word: "longer than 1024"},
		"an identity that is no UTF-8": {options: Options{Identity: "\xff"}, word: "UTF-8"},
		"a TTL of half a second":       {options: Options{TTL: 500 * time.Millisecond}, word: "whole seconds"},
		"a TTL of 1.5 seconds":         {options: Options{TTL: 1500 * time.Millisecond}, word: "whole seconds"},
		"a negative TTL":               {options: Options{TTL: -time.Second}, word: "whole seconds"},
		"a TTL of two hours":           {options: Options{TTL: 2 * time.Hour}, word: "whole seconds"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAPIServer("orders")
				tc.options.clock = monotonic()
				s, err := NewSession(t.Context(), a.config(), tc.options)
				if tc.word != "" {
					if err == nil || !strings.Contains(err.Error(), tc.word) {
						t.Errorf("got %v, want %q", err, tc.word)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				mustAcquire(t, s, "orders")
				if h := a.lease("orders").Status.Holder; tc.options.Identity != "" && h.Identity != tc.options.Identity {
					t.Errorf("identity %q", h.Identity)
				}
				if err := s.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestDefaultIdentitiesDiffer(t *testing.T) {
	a, err := Options{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	b, err := Options{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	if a.Identity == b.Identity || a.TTL != 15*time.Second || a.Namespace == "" {
		t.Errorf("%+v, %+v", a, b)
	}
}

func TestNamePrefix(t *testing.T) {
	for identity, want := range map[string]string{
		"orders-7d9f-abcde":      "orders-7d9f-abcde-",
		"Host_Name.example.org":  "host-name-example-org-",
		"-_-a":                   "a-",
		"Ωμέγα":                  "session-",
		strings.Repeat("x", 300): strings.Repeat("x", 50) + "-",
	} {
		if got := namePrefix(identity); got != want {
			t.Errorf("%q: got %q, want %q", identity, got, want)
		}
	}
}

func TestOwnConfigSharesNoLimiter(t *testing.T) {
	limiter := flowcontrol.NewTokenBucketRateLimiter(1, 1)
	cfg := &rest.Config{Host: "http://api", QPS: 1, Burst: 1, RateLimiter: limiter, Timeout: time.Hour}
	a, err := newAPI(cfg, "default")
	if err != nil {
		t.Fatal(err)
	}
	if got := a.leases.GetRateLimiter(); got != nil {
		t.Errorf("limiter %v", got)
	}
	if own := ownConfig(cfg); own.Timeout != 0 || len(own.NextProtos) != 1 || own.NextProtos[0] != "http/1.1" {
		t.Errorf("a dead connection would be shared, or the watch ended: %+v", own)
	}
	if cfg.RateLimiter != limiter || cfg.QPS != 1 || cfg.NextProtos != nil {
		t.Error("the caller's configuration was changed")
	}
}

func TestPod(t *testing.T) {
	token := "x." + base64.RawURLEncoding.EncodeToString([]byte(
		`{"kubernetes.io":{"namespace":"shop","pod":{"name":"from-token","uid":"uid-token"},"serviceaccount":{"name":"orders"}}}`)) + ".y"
	bound := authenticationv1.UserInfo{Username: "system:serviceaccount:shop:orders", Extra: map[string]authenticationv1.ExtraValue{
		podNameExtra: {"from-review"}, v1alpha1.PodUIDExtra: {"uid-review"},
	}}
	owner := func(name, uid string) []metav1.OwnerReference {
		return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: name, UID: types.UID("uid-" + uid)}}
	}
	tests := map[string]struct {
		env       map[string]string
		files     map[string]string
		user      authenticationv1.UserInfo
		namespace string
		host      string
		want      []metav1.OwnerReference
	}{
		"outside Pods there is no owner": {namespace: "shop"},
		"the downward API names it": {
			env:       map[string]string{"POD_NAME": "from-env", "POD_UID": "uid-env", "POD_NAMESPACE": "shop"},
			namespace: "shop", want: owner("from-env", "env"),
		},
		"the claims of the mounted token name it": {
			files:     map[string]string{"token": token, "namespace": "shop\n"},
			namespace: "shop", want: owner("from-token", "token"),
		},
		"the downward API goes before the claims": {
			env:       map[string]string{"POD_NAME": "from-env", "POD_UID": "uid-env"},
			files:     map[string]string{"token": token},
			namespace: "shop", want: owner("from-env", "env"),
		},
		"what the API server says goes before all": {
			env:  map[string]string{"POD_NAME": "from-env", "POD_UID": "uid-env", "POD_NAMESPACE": "shop"},
			user: bound, namespace: "shop", want: owner("from-review", "review"),
		},
		"a Pod of another namespace owns nothing here": {
			user: bound, namespace: "elsewhere",
		},
		"a Pod of another cluster neither": {
			env: map[string]string{
				"POD_NAME": "from-env", "POD_UID": "uid-env", "POD_NAMESPACE": "shop",
				"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443",
			},
			namespace: "shop", host: "https://other.example.org",
		},
		"a client certificate used in the own cluster": {
			env: map[string]string{
				"POD_NAME": "from-env", "POD_UID": "uid-env", "POD_NAMESPACE": "shop",
				"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443",
			},
			namespace: "shop", host: "https://10.0.0.1:443", want: owner("from-env", "env"),
		},
		"a broken token names nothing": {
			files: map[string]string{"token": "a.b!.c"}, namespace: "shop",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range tc.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			getenv := func(key string) string { return tc.env[key] }
			got := podOf(tc.user, podFrom(getenv, dir), &rest.Config{Host: tc.host}, getenv).owners(tc.namespace)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
