// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// certificates are what a control plane needs to trust and to be trusted, in memory and as files in dir.
type certificates struct {
	dir                   string
	ca                    []byte // PEM, as in caFile
	caFile                string
	serving               keyPair // of kube-apiserver and kube-controller-manager alike
	admin                 keyPair
	controllerManager     keyPair
	serviceAccountKeyFile string // signs and verifies tokens
}

// keyPair is a certificate and its key as PEM, and the files that hold them.
type keyPair struct {
	cert, key         []byte
	certFile, keyFile string
}

// authority issues certificates into dir.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func writeCertificates(dir string) (c certificates, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return c, err
	}
	root := &authority{dir: dir}
	ca, err := root.issue("ca", x509.Certificate{
		Subject: pkix.Name{CommonName: "fencedlease-testenv"},
		IsCA:    true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
	if err != nil {
		return c, err
	}
	c = certificates{dir: dir, ca: ca.cert, caFile: ca.certFile}
	if c.serving, err = root.issue("serving", x509.Certificate{
		Subject:     pkix.Name{CommonName: "localhost"},
		DNSNames:    []string{"localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}); err != nil {
		return c, err
	}
	if c.admin, err = root.issueClient("admin", "system:masters"); err != nil {
		return c, err
	}
	if c.controllerManager, err = root.issueClient("system:kube-controller-manager"); err != nil {
		return c, err
	}
	// The API server and the controller manager want a bare key; that of a certificate nobody uses will do.
	serviceAccounts, err := root.issueClient("service-accounts")
	c.serviceAccountKeyFile = serviceAccounts.keyFile
	return c, err
}

func (a *authority) issueClient(user string, groups ...string) (keyPair, error) {
	return a.issue(strings.TrimPrefix(user, "system:"), x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// issue signs the template and writes the pair as NAME.crt and NAME.key. The first is signed by itself and becomes
// the authority's own.
func (a *authority) issue(name string, template x509.Certificate) (p keyPair, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return p, fmt.Errorf("issue certificate %q: %w", name, err)
	}
	now := time.Now()
	template.SerialNumber = big.NewInt(now.UnixNano())
	// Valid long before and after: tests may step clocks.
	template.NotBefore, template.NotAfter = now.AddDate(-1, 0, 0), now.AddDate(10, 0, 0)
	if a.cert == nil {
		a.cert, a.key = &template, key
	}
	signed, err := x509.CreateCertificate(rand.Reader, &template, a.cert, key.Public(), a.key)
	if err != nil {
		return p, fmt.Errorf("issue certificate %q: %w", name, err)
	}
	bare, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return p, fmt.Errorf("issue certificate %q: %w", name, err)
	}
	p = keyPair{
		cert:     pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}),
		key:      pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: bare}),
		certFile: filepath.Join(a.dir, name+".crt"),
		keyFile:  filepath.Join(a.dir, name+".key"),
	}
	if err := os.WriteFile(p.certFile, p.cert, 0o600); err != nil {
		return p, err
	}
	return p, os.WriteFile(p.keyFile, p.key, 0o600)
}
