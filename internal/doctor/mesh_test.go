package doctor

import (
	"context"
	"fmt"
	"slices"
	"testing"
)

// A mesh configuration is found in each of the forms in which people have it,
// with the position of what is wrong.
func TestReadMesh(t *testing.T) {
	for _, tt := range []struct{ name, text, at string }{
		{"istiod's own", "trustDomain: x\nconfigSources:\n- address: xds://b:15051\n", "f:3:1"},
		{"ConfigMap", "kind: ConfigMap\ndata:\n  mesh: |-\n    trustDomain: x\n    configSources:\n    - address: xds://b:15051\n", "f:6:1"},
		{"IstioOperator", "kind: IstioOperator\nspec:\n  meshConfig:\n    configSources:\n    - address: xds://b:15051\n", "f:5:5"},
		{"Helm values", "meshConfig:\n  configSources:\n  - address: xds://b:15051\n", "f:3:3"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, err := ReadMesh("f", []byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			found := m.Check(Bridge{Ports: []string{"15051"}}, Version{})
			i := slices.IndexFunc(found, func(f Finding) bool { return f.Check == "mesh-k8s" })
			if i < 0 || found[i].Subject != tt.at {
				t.Errorf("findings %+v, want mesh-k8s at %s", found, tt.at)
			}
		})
	}
	for _, text := range []string{"", "- a\n", "configSources: [", "configSources: [3]\n", "data: {mesh: \"[\"}\n", "data: {mesh: \"\"}\n"} {
		if m, err := ReadMesh("f", []byte(text)); err == nil {
			t.Errorf("%q was read as %+v", text, m)
		}
	}
}

// Each fault has a check of its own, and what is right has none.
func TestMeshCheck(t *testing.T) {
	const k8s = "configSources:\n- address: k8s://\n"
	const dns = "defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: \"true\"}}\n"
	plain := Bridge{Ports: []string{"15051"}}
	secure := Bridge{Ports: []string{"15051"}, TLS: true}
	for _, tt := range []struct {
		name, text string
		bridge     Bridge
		version    string
		want       []string
	}{
		{"right", k8s + "- address: xds://b:15051\n" + dns, plain, "", nil},
		{"a Service with another port", k8s + "- address: xds://b:80\n" + dns, plain, "", nil},
		{"other bridges", k8s + "- {address: xds://b:15051}\n- {address: xds://other:1, tlsSettings: {mode: MUTUAL}}\n" + dns, plain, "", nil},
		{"defaults", "trustDomain: x\n" + dns, plain, "", []string{"mesh-source"}},
		{"no DNS", k8s + "- address: xds://b:15051\n", plain, "", []string{"mesh-dns-capture"}},
		{"TLS for nothing", k8s + "- {address: xds://b:15051, tlsSettings: {mode: SIMPLE}}\n" + dns, plain, "", []string{"mesh-tls-unwanted"}},
		{"no TLS", k8s + "- address: xds://b:15051\n" + dns, secure, "", []string{"mesh-tls-missing"}},
		{"SIMPLE", k8s + "- {address: xds://b:15051, tlsSettings: {mode: SIMPLE}}\n" + dns, secure, "1.26.2", nil},
		{"too old", k8s + "- {address: xds://b:15051, tlsSettings: {mode: SIMPLE}}\n" + dns, secure, "1.25-alpha.0", []string{"mesh-tls-version"}},
		{
			"client certificate", k8s + "- {address: xds://b:15051, tlsSettings: {mode: SIMPLE}}\n" + dns,
			Bridge{TLS: true, ClientCertificate: true, ClientAuthField: "listen.xds.tls.client_auth"},
			"1.30.0",
			[]string{"mesh-tls-client"},
		},
		{
			"ambient", k8s + "- address: xds://b:15051\ndefaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: \"true\", ISTIO_META_ENABLE_HBONE: \"true\"}}\n",
			plain, "",
			[]string{"ambient"},
		},
		{
			"ambient with stubs", k8s + "- address: xds://b:15051\ndefaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: \"true\", ISTIO_META_ENABLE_HBONE: \"true\"}}\n",
			Bridge{Ports: plain.Ports, Stubs: true},
			"",
			nil,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, err := ReadMesh("f", []byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range m.Check(tt.bridge, ParseVersion(tt.version)) {
				got = append(got, f.Check)
				if f.Change == "" && f.Severity != Note {
					t.Errorf("%s names no change", f.Check)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("checks %q, want %q", got, tt.want)
			}
		})
	}
}

// What a sink does wrong is found after it had time to do it right.
func TestCheckSinks(t *testing.T) {
	sink := func(profile string, s Subscription) []Sink {
		s.TypeURL = "networking.istio.io/v1/ServiceEntry"
		return []Sink{{Address: "10.0.0.1:1", Profile: profile, Subscriptions: []Subscription{s}}}
	}
	for _, tt := range []struct {
		name          string
		before, later []Sink
		want          []string
	}{
		{"right", sink("istio-1.30", Subscription{State: "sent", Sent: 1}), sink("istio-1.30", Subscription{State: "current", Sent: 1}), nil},
		{"busy", sink("istio-1.30", Subscription{State: "sent", Sent: 1}), sink("istio-1.30", Subscription{State: "sent", Sent: 2}), nil},
		{"hangs", sink("istio-1.30", Subscription{State: "sent", Sent: 1}), sink("istio-1.30", Subscription{State: "sent", Sent: 1}), []string{"sink-ack"}},
		{"waiting", nil, sink("istio-1.30", Subscription{State: "waiting"}), []string{"sink-held"}},
		{"waiting, of an older bridge", nil, sink("istio-1.30", Subscription{State: "held"}), []string{"sink-held"}},
		{"large", nil, sink("istio-1.10", Subscription{State: "sent", Bytes: 5 << 20}), []string{"sink-size"}},
		{"large, and received", nil, sink("istio-1.12", Subscription{State: "current", Bytes: 5 << 20}), nil},
		{"large for a Pilot", nil, sink("pilot-1.8", Subscription{State: "sent", Bytes: 5 << 20, Oversize: true}), []string{"sink-size"}},
		{"large for a Pilot that is told to receive it", nil, sink("pilot-1.8", Subscription{State: "current", Bytes: 5 << 20, Oversize: true}), nil},
		{"back after a large one", nil, sink("pilot-1.8", Subscription{State: "held", Waiting: "penalty"}), []string{"sink-size"}},
		{"after another collection", nil, sink("pilot-1.8", Subscription{State: "held", Waiting: "istio/networking/v1alpha3/serviceentries"}), nil},
		{"refused", nil, sink("pilot-1.8", Subscription{State: "current", Nacks: 1, LastNack: "no"}), []string{"sink-nack"}},
		{"tools only", nil, sink("tools", Subscription{State: "current"}), []string{"sink-none"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			for _, f := range CheckSinks(Sinks{List: tt.before}, Sinks{List: tt.later}, 0) {
				got = append(got, f.Check)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("checks %q, want %q", got, tt.want)
			}
		})
	}
}

// A sink that comes and goes over a response that is too large is found by the
// count of these although it is never seen.
func TestCheckSinksUnseen(t *testing.T) {
	const page = "# HELP isthmus_xds_oversize_total Responses.\nisthmus_xds_oversize_total{profile=\"istio-1.10\"} %d\nisthmus_xds_streams 3\n"
	reading := func(n int) Sinks {
		counts, err := ReadOversize(t.Context(), func(context.Context, string) ([]byte, error) { return fmt.Appendf(nil, page, n), nil })
		if err != nil {
			t.Fatal(err)
		}
		return Sinks{Oversize: counts}
	}
	for later, want := range map[int]string{3: "sink-none", 4: "sink-size"} {
		found := CheckSinks(reading(3), reading(later), 0)
		if len(found) != 1 || found[0].Check != want {
			t.Errorf("%d responses later: %v, want %s", later-3, found, want)
		}
	}
}
