package e2e

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// istiod dials with TLS as its documentation says, from 1.26 on, and follows
// changes of Consul through a certificate that is renewed. What an operator can
// set wrongly is named in the bridge's log.
func TestIstiodDialsTLS(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	authority := testcert.New(t, "isthmus.example.org")
	other := testcert.New(t, "isthmus.example.org")
	settings := func(mode string, ca *testcert.Certificate) string {
		pem, err := os.ReadFile(ca.Cert)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(string(pem))
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("tlsSettings: {mode: %s, sni: isthmus.example.org, subjectAltNames: [isthmus.example.org], caCertificates: %s}", mode, text)
	}
	tls := fmt.Sprintf("tls: {cert_file: %q, key_file: %q}", authority.Cert, authority.Key)
	consul := testconsul.Start(t, testconsul.Config{})
	consul.Register(t, web(1), web(2))
	isthmus := testisthmus.StartSecure(t, follow{}.registries(consul.Addr), tls+", allow: [{peer: {sni: isthmus.example.org}}]")
	isthmus.WaitReady(t)
	cluster := testistiod.OutboundCluster("web.service.consul", 8080)
	refused := func(t *testing.T, reason string, before int) {
		t.Helper()
		testenv.Eventually(t, testenv.Patience, "a refusal because of "+reason, func() (string, bool) {
			return isthmus.Log(), isthmus.Refused(t, reason) > before
		})
	}
	expiry := func(t *testing.T) float64 {
		t.Helper()
		return isthmus.Metrics(t)["isthmus_tls_certificate_expiry_timestamp_seconds"].GetMetric()[0].GetGauge().GetValue()
	}

	t.Run("SIMPLE", func(t *testing.T) {
		istiod := testistiod.StartWith(t, testistiod.Newest, isthmus.Source(), settings("SIMPLE", authority))
		istiod.WaitReady(t)
		recorder := testistiod.StartRecorder(t, istiod)
		recorder.WaitSubscribed(t)
		recorder.WaitEndpoints(t, cluster, "10.1.0.1:8080", "10.1.0.2:8080")

		before := expiry(t)
		authority.Renew(t)
		if now := expiry(t); now <= before {
			t.Errorf("the certificate in use ends at %f, as before it was renewed", now)
		}
		consul.Register(t, web(3))
		recorder.WaitEndpoints(t, cluster, "10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080")

		// A rule that fits nobody ends the stream; nothing is removed.
		isthmus.Secure(t, tls+", allow: [{peer: {sni: nobody}}]")
		refused(t, "rule", 0)
		if want := "no rule in allow of listen.xds fits: address 127.0.0.1, no client certificate, server name isthmus.example.org"; !strings.Contains(isthmus.Log(), want) {
			t.Errorf("the log does not say %q: %s", want, isthmus.Log())
		}
		isthmus.Secure(t, tls)
		consul.Deregister(t, web(3).ID)
		recorder.WaitEndpoints(t, cluster, "10.1.0.1:8080", "10.1.0.2:8080")
	})
	t.Run("another authority", func(t *testing.T) {
		before := isthmus.Refused(t, "handshake")
		testistiod.StartWith(t, testistiod.Newest, isthmus.Source(), settings("SIMPLE", other)).MayEnd()
		refused(t, "handshake", before)
	})
	t.Run("MUTUAL is plaintext", func(t *testing.T) {
		before := isthmus.Refused(t, "plaintext")
		testistiod.StartWith(t, testistiod.Newest, isthmus.Source(), settings("MUTUAL", authority)).MayEnd()
		refused(t, "plaintext", before)
	})
	t.Run("1.24 is plaintext", func(t *testing.T) {
		before := isthmus.Refused(t, "plaintext")
		testistiod.StartWith(t, testistiod.V124, isthmus.Source(), settings("SIMPLE", authority)).MayEnd()
		refused(t, "plaintext", before)
	})
	if strings.Contains(isthmus.Log(), "PRIVATE KEY") {
		t.Error("the log has a key")
	}
}

// All that a certificate has changes under a bridge whose services change all
// the time: it is renewed, it has another authority, another name. istiod
// connects again after each, or refuses to, and no proxy loses an endpoint.
func TestCertificatesRotateUnderChurn(t *testing.T) {
	testenv.SkipIfShort(t)
	testenv.Wide(t)
	const host = "isthmus.example.org"
	first, second, unknown := testcert.New(t, "first"), testcert.New(t, "second"), testcert.New(t, "unknown")
	var trusted []byte
	for _, c := range []*testcert.Certificate{first, second} {
		pem, err := os.ReadFile(c.Cert)
		if err != nil {
			t.Fatal(err)
		}
		trusted = append(trusted, pem...)
	}
	ca, err := json.Marshal(string(trusted))
	if err != nil {
		t.Fatal(err)
	}
	settings := fmt.Sprintf("tlsSettings: {mode: SIMPLE, sni: %s, subjectAltNames: [alias.example.org, %[1]s], caCertificates: %s}", host, ca)

	for _, version := range testistiod.TLSVersions() {
		t.Run(version.Name, func(t *testing.T) {
			files := newMounted(t)
			files.put(first.Issue(t, host))
			consul := testconsul.Start(t, testconsul.Config{})
			consul.Register(t, web(1), web(2))
			isthmus := testisthmus.StartSecure(t, follow{}.registries(consul.Addr)+"\n- {name: load, type: sim, config: {services: 20, instances: 10, changes_per_second: 50}}\n",
				fmt.Sprintf("tls: {cert_file: %q, key_file: %q}, allow: [{peer: {sni: %s}}]", files.path("cert.pem"), files.path("key.pem"), host))
			isthmus.WaitReady(t)
			gate := testenv.NewGate(t, isthmus.XDS)
			gate.Open(t)
			istiod := testistiod.StartWith(t, version, "xds://"+gate.Addr, settings)
			istiod.WaitReady(t)
			recorder := testistiod.StartRecorder(t, istiod)
			recorder.WaitSubscribed(t)
			cluster := testistiod.OutboundCluster("web.service.consul", 8080)
			have := []string{"10.1.0.1:8080", "10.1.0.2:8080"}
			recorder.WaitEndpoints(t, cluster, have...)
			stays := slices.Clone(have)
			var mu sync.Mutex
			pushed := 0 // pushes of other services; guarded by mu
			recorder.OnEndpoints(func(name string, endpoints []string) {
				mu.Lock()
				defer mu.Unlock()
				if name != cluster {
					pushed++
				}
				for _, e := range stays {
					if name == cluster && !slices.Contains(endpoints, e) {
						t.Errorf("a proxy is told that %s has %v", name, endpoints)
					}
				}
			})
			others := func() int {
				mu.Lock()
				defer mu.Unlock()
				return pushed
			}

			next := 3
			follows := func() {
				t.Helper()
				consul.Register(t, web(next))
				have = append(have, fmt.Sprintf("10.1.0.%d:8080", next))
				next++
				recorder.WaitEndpoints(t, cluster, have...)
				before := others()
				testenv.Eventually(t, testenv.Patience, "what changes all the time to go on", func() (string, bool) { return "nothing", others() > before })
			}
			follows()
			alias := func(c *x509.Certificate) { c.DNSNames = append(c.DNSNames, "alias.example.org") }
			for _, tt := range []struct {
				name string
				cert *testcert.Certificate
				good bool
			}{
				{"renewed", first.Issue(t, host), true},
				{"of another authority", second.Issue(t, host), true},
				{"with a further name", second.Issue(t, host, alias), true},
				{"without the name", second.Issue(t, "other.example.org"), false},
				{"renewed after that", second.Issue(t, host), true},
				{"of an authority that istiod does not trust", unknown.Issue(t, host), false},
				{"of the first authority again", first.Issue(t, host), true},
			} {
				// The stream that is open stays; the next meets it.
				files.put(tt.cert)
				testenv.Eventually(t, testenv.Patience, "the certificate "+tt.name+" to be in use", func() (string, bool) {
					conn, err := tls.Dial("tcp", isthmus.XDS, &tls.Config{ServerName: host, InsecureSkipVerify: true, NextProtos: []string{"h2"}}) //nolint:gosec // to look at it
					if err != nil {
						return err.Error(), false
					}
					defer conn.Close()
					now := conn.ConnectionState().PeerCertificates[0].Raw
					return fmt.Sprintf("%d bytes", len(now)), bytes.Equal(now, tt.cert.Leaf().Raw)
				})
				follows()
				refused := isthmus.Refused(t, "handshake")
				gate.Shut()
				gate.Open(t)
				if tt.good {
					follows()
					continue
				}
				testenv.Eventually(t, testenv.Patience, "istiod to refuse the certificate "+tt.name, func() (string, bool) {
					return isthmus.Log(), isthmus.Refused(t, "handshake") > refused
				})
			}
		})
	}
}

// mounted is a folder whose files are replaced all at once, as those of a
// Secret in a pod are.
type mounted struct {
	t   *testing.T
	dir string
	n   int
}

func newMounted(t *testing.T) *mounted {
	t.Helper()
	return &mounted{t: t, dir: t.TempDir()}
}

func (m *mounted) path(name string) string { return filepath.Join(m.dir, "data", name) }

func (m *mounted) put(c *testcert.Certificate) {
	m.t.Helper()
	m.n++
	folder := fmt.Sprintf("v%d", m.n)
	must := func(err error) {
		m.t.Helper()
		if err != nil {
			m.t.Fatal(err)
		}
	}
	must(os.Mkdir(filepath.Join(m.dir, folder), 0o700))
	for name, from := range map[string]string{"cert.pem": c.Cert, "key.pem": c.Key} {
		b, err := os.ReadFile(from)
		must(err)
		must(os.WriteFile(filepath.Join(m.dir, folder, name), b, 0o600))
	}
	must(os.Symlink(folder, filepath.Join(m.dir, "data.new")))
	must(os.Rename(filepath.Join(m.dir, "data.new"), filepath.Join(m.dir, "data")))
}
