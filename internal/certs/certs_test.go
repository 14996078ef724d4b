// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

const host = "fencedlease-webhook.fencedlease-system.svc"

var (
	errBoom  = errors.New("boom")
	begin    = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	testLife = lives{authority: 24 * time.Hour, serving: 5 * time.Hour, settle: 10 * time.Minute, poll: time.Minute, retry: time.Second, call: time.Minute}
)

func configuration() *admissionregistrationv1.MutatingWebhookConfiguration {
	return &admissionregistrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "fencedlease-guard"},
		Webhooks:   []admissionregistrationv1.MutatingWebhook{{Name: "guard.fencedlease.dev"}, {Name: "another.fencedlease.dev"}},
	}
}

func newReplica(t *testing.T, c client.Client, k clock.Clock) *managed {
	t.Helper()
	m, err := newManaged(Options{
		Client: c, Namespace: "fencedlease-system", Secret: "fencedlease-webhook-ca", Configuration: "fencedlease-guard",
		Hosts: []string{host, "127.0.0.1"}, Clock: k,
	})
	if err != nil {
		t.Fatal(err)
	}
	m.lives = testLife
	return m
}

func bundles(t *testing.T, c client.Client) [2]string {
	t.Helper()
	var got admissionregistrationv1.MutatingWebhookConfiguration
	if err := c.Get(t.Context(), client.ObjectKey{Name: "fencedlease-guard"}, &got); err != nil {
		t.Fatal(err)
	}
	return [2]string{string(got.Webhooks[0].ClientConfig.CABundle), string(got.Webhooks[1].ClientConfig.CABundle)}
}

// connect does a TLS handshake as an API server would, which trusts bundle.
func connect(s Source, bundle, name string, now time.Time) error {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(bundle))
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	server := &tls.Config{GetCertificate: s.GetCertificate, MinVersion: tls.VersionTLS12}
	go func() { _ = tls.Server(theirs, server).Handshake() }()
	return tls.Client(ours, &tls.Config{RootCAs: roots, ServerName: name, Time: func() time.Time { return now }, MinVersion: tls.VersionTLS12}).Handshake()
}

// TestNoConnectionFailsThroughRotations runs two replicas for four simulated days, through every renewal of both
// the authority and the serving certificates. API servers hear of a new caBundle only minutes later.
func TestNoConnectionFailsThroughRotations(t *testing.T) {
	const step, lag = 9 * time.Minute, 1
	c := fake.NewClientBuilder().WithObjects(configuration()).Build()
	k := clocktesting.NewFakeClock(begin)
	replicas := []*managed{newReplica(t, c, k), newReplica(t, c, k)}
	var heard []string // the bundle as of each step
	authorities, served, both := map[string]bool{}, map[string]bool{}, false

	for k.Since(begin) < 4*24*time.Hour {
		for _, r := range replicas {
			if err := r.look(t.Context()); err != nil {
				t.Fatalf("after %s: %v", k.Since(begin), err)
			}
		}
		bundle := bundles(t, c)[0]
		authorities[bundle] = true
		both = both || strings.Count(bundle, "BEGIN") == 2
		heard = append(heard, bundle)
		trusted := heard[max(0, len(heard)-1-lag)]
		for i, r := range replicas {
			for _, name := range []string{host, "127.0.0.1"} {
				if err := connect(r, trusted, name, k.Now()); err != nil {
					t.Fatalf("replica %d, %s, after %s: %v", i, name, k.Since(begin), err)
				}
			}
			if err := r.Ready(nil); err != nil {
				t.Fatalf("replica %d is not ready after %s: %v", i, k.Since(begin), err)
			}
			served[r.serving.Leaf.SerialNumber.String()] = true
		}
		k.Step(step)
	}
	if len(authorities) < 10 || len(served) < 50 || !both {
		t.Errorf("%d bundles and %d certificates were seen, both authorities at once: %v; that is no test of rotations", len(authorities), len(served), both)
	}
}

func TestNewAuthorityIsServedOnlyOnceItHasSettled(t *testing.T) {
	c := fake.NewClientBuilder().WithObjects(configuration()).Build()
	k := clocktesting.NewFakeClock(begin)
	m := newReplica(t, c, k)
	look := func() string {
		t.Helper()
		if err := m.look(t.Context()); err != nil {
			t.Fatal(err)
		}
		return m.serving.Leaf.SerialNumber.String()
	}
	look()
	k.Step(16 * time.Hour) // two thirds of the authority's life
	renewed := look()      // by the old authority, which has the longer half of a serving life left
	k.Step(testLife.settle - time.Second)
	if look() != renewed {
		t.Error("a certificate of the new authority is served before API servers have heard of it")
	}
	k.Step(time.Second)
	if look() == renewed {
		t.Error("the new authority is not used after it has settled")
	}

	restarted := newReplica(t, c, k)
	if err := restarted.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := connect(restarted, bundles(t, c)[0], host, k.Now()); err != nil {
		t.Errorf("a replica that started meanwhile: %v", err)
	}
}

func TestReplicasAgree(t *testing.T) {
	// The second replica does all its work between the first one's read and its write.
	var second *managed
	inner := fake.NewClientBuilder().WithObjects(configuration()).Build()
	raced := false
	c := interceptor.NewClient(inner, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			if !raced {
				raced = true
				if err := second.look(ctx); err != nil {
					t.Errorf("second replica: %v", err)
				}
			}
			return c.Create(ctx, obj, opts...)
		},
	})
	k := clocktesting.NewFakeClock(begin)
	first := newReplica(t, c, k)
	second = newReplica(t, inner, k)
	if err := first.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	bundle := bundles(t, inner)
	if strings.Count(bundle[0], "BEGIN") != 1 || bundle[0] != bundle[1] {
		t.Errorf("the webhooks trust %q, want one authority", bundle)
	}
	for name, r := range map[string]*managed{"first": first, "second": second} {
		if err := connect(r, bundle[0], host, k.Now()); err != nil {
			t.Errorf("%s replica: %v", name, err)
		}
	}
}

func TestBadSecretsAreReplaced(t *testing.T) {
	k := clocktesting.NewFakeClock(begin)
	good := func(at time.Time) authority {
		a, _, err := authority(nil).renew(at, testLife.authority)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	secret := func(certs, keys []byte) *corev1.Secret {
		return &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "fencedlease-system", Name: "fencedlease-webhook-ca"},
			Data:       map[string][]byte{certsKey: certs, keysKey: keys},
		}
	}
	oldCerts, oldKeys, _ := good(begin.Add(-48 * time.Hour)).encode()
	certs, keys, _ := good(begin).encode()
	_, otherKeys, _ := good(begin).encode()
	tests := map[string]*corev1.Secret{
		"expired":                    secret(oldCerts, oldKeys),
		"empty":                      secret(nil, nil),
		"not PEM":                    secret([]byte("x"), []byte("y")),
		"the key of another":         secret(certs, otherKeys),
		"a certificate without key":  secret(append(certs, certs...), keys),
		"garbage behind the good":    secret(certs, append(keys, "garbage"...)),
		"PEM that is no certificate": secret([]byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), keys),
	}
	for name, s := range tests {
		t.Run(name, func(t *testing.T) {
			c := fake.NewClientBuilder().WithObjects(configuration(), s).Build()
			m := newReplica(t, c, k)
			if err := m.look(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := connect(m, bundles(t, c)[0], host, k.Now()); err != nil {
				t.Error(err)
			}
			if err := m.Ready(nil); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestBundleIsWrittenOnlyWhenItDiffers(t *testing.T) {
	patches := 0
	c := interceptor.NewClient(fake.NewClientBuilder().WithObjects(configuration()).Build(), interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			patches++
			return c.Patch(ctx, obj, patch, opts...)
		},
	})
	m := newReplica(t, c, clocktesting.NewFakeClock(begin))
	for range 3 {
		if err := m.look(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if patches != 1 {
		t.Errorf("%d patches, want 1", patches)
	}
}

func TestBundleIsWrittenOnWhatWasRead(t *testing.T) {
	inner := fake.NewClientBuilder().WithObjects(configuration()).Build()
	c := interceptor.NewClient(inner, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			other := configuration()
			if err := inner.Get(ctx, client.ObjectKeyFromObject(other), other); err != nil {
				return err
			}
			other.Webhooks = other.Webhooks[1:] // the indexes in the patch mean something else now
			if err := inner.Update(ctx, other); err != nil {
				return err
			}
			return c.Patch(ctx, obj, patch, opts...)
		},
	})
	if err := newReplica(t, c, clocktesting.NewFakeClock(begin)).look(t.Context()); err == nil {
		t.Error("the patch was applied to a configuration that had changed")
	}
}

func TestReady(t *testing.T) {
	k := clocktesting.NewFakeClock(begin)
	down := false
	c := interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			if down {
				return errBoom
			}
			return c.Get(ctx, key, obj, opts...)
		},
	})
	m := newReplica(t, c, k)
	check := func(when, want string) {
		t.Helper()
		err := m.Ready(nil)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", when, err, want)
		}
	}
	check("at first", "no certificate yet")
	if err := m.look(t.Context()); err == nil {
		t.Error("no error without a webhook configuration")
	}
	check("without a webhook configuration", `MutatingWebhookConfiguration "fencedlease-guard"`)
	if err := c.Create(t.Context(), configuration()); err != nil {
		t.Fatal(err)
	}
	if err := m.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("when all is there", "")
	down = true
	if err := m.look(t.Context()); !errors.Is(err, errBoom) {
		t.Errorf("error %v while the API server is down", err)
	}
	check("in an outage", "")
	k.Step(testLife.serving + time.Second)
	check("with an expired certificate", "and not now")
}

func TestStartTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		c := interceptor.NewClient(fake.NewClientBuilder().WithObjects(configuration()).Build(), interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
				if looks++; looks <= 3 {
					return errBoom
				}
				return c.Get(ctx, key, obj, opts...)
			},
		})
		m := newReplica(t, c, clock.RealClock{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Start(ctx) }()
		<-time.After(3*testLife.retry + time.Millisecond)
		synctest.Wait()
		if err := m.Ready(nil); err != nil {
			t.Errorf("after three failures: %v", err)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestNewTellsTheSecondsLeft(t *testing.T) {
	registry := prometheus.NewRegistry()
	k := clocktesting.NewFakeClock(begin)
	c := fake.NewClientBuilder().WithObjects(configuration()).Build()
	s, err := New(Options{Client: c, Configuration: "fencedlease-guard", Namespace: "n", Secret: "s", Hosts: []string{host}, Clock: k, Registerer: registry})
	if err != nil {
		t.Fatal(err)
	}
	expect := func(seconds string) {
		t.Helper()
		const name = "fencedlease_webhook_certificate_seconds_left"
		want := "# HELP " + name + " Seconds until the certificate that the webhook serves expires; 0 when it has none.\n# TYPE " + name + " gauge\n" + name + " " + seconds + "\n"
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want), name); err != nil {
			t.Error(err)
		}
	}
	expect("0")
	if err := s.(*managed).look(t.Context()); err != nil {
		t.Fatal(err)
	}
	expect("2.592e+06") // thirty days
}

func TestNewNeedsHosts(t *testing.T) {
	if _, err := New(Options{Registerer: prometheus.NewRegistry()}); err == nil {
		t.Error("no error without hosts")
	}
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	k := clocktesting.NewFakeClock(begin)
	issue := func() {
		t.Helper()
		a, _, err := authority(nil).renew(k.Now(), testLife.authority)
		if err != nil {
			t.Fatal(err)
		}
		certs, keys, err := a.encode()
		if err != nil {
			t.Fatal(err)
		}
		for name, content := range map[string][]byte{"tls.crt": certs, "tls.key": keys} {
			if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	o := Options{Dir: dir, Clock: k, Registerer: prometheus.NewRegistry()}
	if _, err := New(o); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("error %v without files, want one that names the directory", err)
	}
	issue()
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(nil); err != nil {
		t.Error(err)
	}
	k.Step(testLife.authority + time.Second)
	if err := s.Ready(nil); err == nil {
		t.Error("ready with an expired certificate")
	}
	issue()
	if err := s.(*files).watcher.ReadCertificate(); err != nil {
		t.Fatal(err)
	}
	if err := s.Ready(nil); err != nil {
		t.Errorf("after the files were renewed: %v", err)
	}
}
