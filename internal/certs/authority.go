// SPDX-License-Identifier: Apache-2.0

package certs

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"time"
)

// backdate is how far the start of a certificate lies in the past, for API servers whose clocks are behind ours.
const backdate = 5 * time.Minute

// ca is a certificate authority: one certificate that may sign, and its key.
type ca struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// authority is what API servers are to trust, the oldest first: one ca, and two while they change. A value is never
// changed. It reads no clock.
type authority []ca

// renew returns the authority as it should be now: without what has expired, and with a new ca when the newest has
// lived two thirds of its life. changed says whether that differs.
func (a authority) renew(now time.Time, life time.Duration) (renewed authority, changed bool, err error) {
	for _, c := range a {
		if now.Before(c.cert.NotAfter) {
			renewed = append(renewed, c)
		}
	}
	changed = len(renewed) < len(a)
	if len(renewed) > 0 && now.Before(renewalTime(renewed[len(renewed)-1].cert)) {
		return renewed, changed, nil
	}
	fresh, err := newCA(now, life)
	if err != nil {
		return nil, false, err
	}
	return append(renewed, fresh), true, nil
}

// signer returns the newest ca that API servers are known to trust. As long as none is, the oldest: if they trust
// any, then that one.
func (a authority) signer(trusted func(*x509.Certificate) bool) ca {
	for i := len(a) - 1; i > 0; i-- {
		if trusted(a[i].cert) {
			return a[i]
		}
	}
	return a[0]
}

// renewalTime is when two thirds of the certificate's life are over.
func renewalTime(cert *x509.Certificate) time.Time {
	return cert.NotAfter.Add(-cert.NotAfter.Sub(cert.NotBefore) / 3)
}

// encode returns certificates and keys as PEM, in the same order.
func (a authority) encode() (certs, keys []byte, err error) {
	for _, c := range a {
		key, err := x509.MarshalPKCS8PrivateKey(c.key)
		if err != nil {
			return nil, nil, err
		}
		certs = append(certs, encodeCert(c.cert)...)
		keys = append(keys, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})...)
	}
	return certs, keys, nil
}

func encodeCert(cert *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
}

// parseAuthority reads what encode wrote, and refuses anything else.
func parseAuthority(certs, keys []byte) (authority, error) {
	var a authority
	for {
		var certBlock, keyBlock *pem.Block
		certBlock, certs = pem.Decode(certs)
		keyBlock, keys = pem.Decode(keys)
		if certBlock == nil || keyBlock == nil {
			break
		}
		c, err := parseCA(certBlock.Bytes, keyBlock.Bytes)
		if err != nil {
			return nil, err
		}
		a = append(a, c)
	}
	if len(a) == 0 || len(bytes.TrimSpace(certs)) > 0 || len(bytes.TrimSpace(keys)) > 0 {
		return nil, errors.New("it does not hold one key for each certificate, and at least one")
	}
	return a, nil
}

func parseCA(certDER, keyDER []byte) (ca, error) {
	cert, err := x509.ParseCertificate(certDER)
	if err != nil {
		return ca{}, err
	}
	parsed, err := x509.ParsePKCS8PrivateKey(keyDER)
	if err != nil {
		return ca{}, err
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !cert.IsCA || !key.PublicKey.Equal(cert.PublicKey) {
		return ca{}, fmt.Errorf("certificate %d is no authority with the ECDSA key beside it", cert.SerialNumber)
	}
	return ca{cert: cert, key: key}, nil
}

func newCA(now time.Time, life time.Duration) (ca, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return ca{}, err
	}
	template, err := newTemplate(now, now.Add(life))
	if err != nil {
		return ca{}, err
	}
	template.Subject = pkix.Name{CommonName: "fencedlease-webhook-ca"}
	template.IsCA, template.MaxPathLenZero = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	cert, err := sign(template, template, key, key)
	return ca{cert: cert, key: key}, err
}

// issue returns a new serving certificate, which ends with the authority at the latest.
func (c ca) issue(now time.Time, life time.Duration, hosts []string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	end := now.Add(life)
	if end.After(c.cert.NotAfter) {
		end = c.cert.NotAfter
	}
	template, err := newTemplate(now, end)
	if err != nil {
		return nil, err
	}
	template.Subject = pkix.Name{CommonName: hosts[0]}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
			continue
		}
		template.DNSNames = append(template.DNSNames, host)
	}
	cert, err := sign(template, c.cert, key, c.key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}, nil
}

func newTemplate(now, end time.Time) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{SerialNumber: serial, NotBefore: now.Add(-backdate), NotAfter: end, BasicConstraintsValid: true}, nil
}

func sign(template, parent *x509.Certificate, key, parentKey *ecdsa.PrivateKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}
