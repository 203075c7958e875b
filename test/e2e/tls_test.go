package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// istiod dials with TLS as its documentation says, from 1.26 on, and follows
// changes of Consul through a certificate that is renewed. What an operator can
// set wrongly is named in the bridge's log.
func TestIstiodDialsTLS(t *testing.T) {
	testenv.SkipIfShort(t)
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
	consul := testenv.StartConsul(t, testenv.ConsulConfig{})
	consul.Register(t, web(1), web(2))
	isthmus := testenv.StartSecureIsthmus(t, follow{}.registries(consul.Addr), tls+", allow: [{peer: {sni: isthmus.example.org}}]")
	isthmus.WaitReady(t)
	cluster := testenv.OutboundCluster("web.service.consul", 8080)
	refused := func(t *testing.T, reason string, before float64) {
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
		istiod := testenv.StartIstiodWith(t, testenv.IstiodNewest, isthmus.Source(), settings("SIMPLE", authority))
		istiod.WaitReady(t)
		recorder := testenv.StartRecorder(t, istiod)
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
		testenv.StartIstiodWith(t, testenv.IstiodNewest, isthmus.Source(), settings("SIMPLE", other)).MayEnd()
		refused(t, "handshake", before)
	})
	t.Run("MUTUAL is plaintext", func(t *testing.T) {
		before := isthmus.Refused(t, "plaintext")
		testenv.StartIstiodWith(t, testenv.IstiodNewest, isthmus.Source(), settings("MUTUAL", authority)).MayEnd()
		refused(t, "plaintext", before)
	})
	t.Run("1.24 is plaintext", func(t *testing.T) {
		before := isthmus.Refused(t, "plaintext")
		testenv.StartIstiodWith(t, testenv.Istiod124, isthmus.Source(), settings("SIMPLE", authority)).MayEnd()
		refused(t, "plaintext", before)
	})
	if strings.Contains(isthmus.Log(), "PRIVATE KEY") {
		t.Error("the log has a key")
	}
}
