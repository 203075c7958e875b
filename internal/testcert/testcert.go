// Package testcert creates certificates for tests.
package testcert

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Certificate is self-signed and valid for servers and clients.
type Certificate struct {
	// Cert and Key are the paths of its PEM files, which are removed after the
	// test.
	Cert, Key string

	pair tls.Certificate
	leaf *x509.Certificate

	template *x509.Certificate
	private  *ecdsa.PrivateKey
}

// Renew replaces the file of the certificate with one of the same key that ends
// an hour later. Whoever trusts the first trusts it too.
func (c *Certificate) Renew(t testing.TB) {
	t.Helper()
	c.template.SerialNumber.Add(c.template.SerialNumber, big.NewInt(1))
	c.template.NotAfter = c.template.NotAfter.Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, c.template, c.template, &c.private.PublicKey, c.private)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.Cert+".new", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(c.Cert+".new", c.Cert); err != nil {
		t.Fatal(err)
	}
}

// New returns a certificate for a host. Changes are applied to it before it is
// signed.
func New(t testing.TB, host string, changes ...func(*x509.Certificate)) *Certificate {
	t.Helper()
	return issue(t, nil, host, changes...)
}

// Issue is New, but the certificate is signed by c in place of itself, and may
// not sign others.
func (c *Certificate) Issue(t testing.TB, host string, changes ...func(*x509.Certificate)) *Certificate {
	t.Helper()
	return issue(t, c, host, changes...)
}

func issue(t testing.TB, by *Certificate, host string, changes ...func(*x509.Certificate)) *Certificate {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: host}, DNSNames: []string{host}, IsCA: by == nil, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	parent, signer := template, private
	if by != nil {
		template.SerialNumber, template.KeyUsage = big.NewInt(time.Now().UnixNano()), x509.KeyUsageDigitalSignature
		parent, signer = by.leaf, by.private
	}
	for _, change := range changes {
		change(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &private.PublicKey, signer)
	must(err)
	leaf, err := x509.ParseCertificate(der)
	must(err)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	must(err)
	dir := t.TempDir()
	write := func(file, kind string, b []byte) string {
		path := filepath.Join(dir, file)
		must(os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600))
		return path
	}
	return &Certificate{
		Cert: write("cert.pem", "CERTIFICATE", der), Key: write("key.pem", "PRIVATE KEY", secret),
		pair: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}, leaf: leaf, template: template, private: private,
	}
}

// Leaf returns the certificate itself.
func (c *Certificate) Leaf() *x509.Certificate { return c.leaf }

// Signer returns the certificate with its private key.
func (c *Certificate) Signer() (*x509.Certificate, crypto.Signer) { return c.leaf, c.private }

// Server returns the TLS configuration of a server with this certificate. It
// accepts only clients with one of theirs.
func (c *Certificate) Server(theirs ...*Certificate) *tls.Config {
	pool := x509.NewCertPool()
	for _, client := range theirs {
		pool.AddCert(client.leaf)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{c.pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12,
	}
}
