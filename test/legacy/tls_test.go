package legacy

import (
	"crypto/x509"
	"fmt"
	"maps"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
)

// A real Pilot 1.8.0 dials a listener with TLS and a rule for its SPIFFE ID, as
// its documentation says (MUTUAL), and sees what the rule's view selects, also
// of a view that changes. One with another certificate, and one with none
// (SIMPLE), get nothing, and the bridge says why.
func TestPilotMutual(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	identity := func(c *x509.Certificate) {
		c.URIs = []*url.URL{{Scheme: "spiffe", Host: "cluster.local", Path: "/ns/istio-system/sa/pilot"}}
	}
	server, pilot, other := testcert.New(t, "isthmus.example.org"), testcert.New(t, "pilot.example.org", identity), testcert.New(t, "pilot.example.org", identity)
	settings := func(mode string, own *testcert.Certificate) testpilot.Options {
		return testpilot.Options{Incremental: true, Settings: fmt.Sprintf("tlsSettings: {mode: %s, clientCertificate: %q, privateKey: %q, caCertificates: %q, sni: isthmus.example.org}",
			mode, own.Cert, own.Key, server.Cert)}
	}
	security := func(view string) string {
		return fmt.Sprintf("tls: {cert_file: %q, key_file: %q, client_ca_file: %q}, allow: [{peer: {spiffe: spiffe://cluster.local/ns/istio-system/sa/*}, view: %s}]",
			server.Cert, server.Key, pilot.Cert, view)
	}
	i := testisthmus.StartSecure(t, "- {name: load, type: sim, config: {services: 40, instances: 3, changes_per_second: 0, seed: 7}}", security("{registries: [load]}"))
	i.WaitReady(t)

	p := testpilot.Start(t, settings("MUTUAL", pilot), i.XDS)
	p.WaitReady(t)
	all := p.EndpointShards(t)
	if len(all) < 20 {
		t.Fatalf("Pilot is ready with %d hosts", len(all))
	}
	// One half, then the other: what is outside of the view goes, what is in it
	// comes, and the stream is the same.
	before := p.Updates(t)
	for half := range 2 {
		want := maps.Clone(all)
		maps.DeleteFunc(want, func(host string, _ []string) bool { return shard.Of(host, 2) != half })
		i.Secure(t, security(fmt.Sprintf("{shard: %d/2}", half)))
		testenv.Eventually(t, testenv.Patience, "Pilot to have half of it", func() (string, bool) {
			d := cmp.Diff(want, p.EndpointShards(t))
			return d, d == ""
		})
	}
	t.Logf("two changes of the view: updates %v", quiet(t, p).Sub(before))
	if n := len(i.Sinks(t)); n != 1 {
		t.Errorf("%d streams", n)
	}
	if strings.Contains(i.Log(), "stream ended") {
		t.Errorf("a stream ended: %s", i.Log())
	}

	for mode, own := range map[string]*testcert.Certificate{"MUTUAL": other, "SIMPLE": pilot} {
		t.Run(mode, func(t *testing.T) { // which ends the Pilot, and its attempts
			refused := i.Refused(t, "handshake")
			wrong := testpilot.Start(t, settings(mode, own), i.XDS)
			testenv.Eventually(t, testenv.Patience, "a refusal", func() (string, bool) {
				return i.Log(), i.Refused(t, "handshake") > refused
			})
			if wrong.Ready() {
				t.Error("Pilot is ready although it was refused")
			}
		})
	}
}
