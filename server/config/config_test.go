package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// builtIn are the adapters of these tests.
var builtIn = []string{"consul", "file", "nacos", "sim"}

func env(vars map[string]string) Options {
	return Options{Adapters: builtIn, LookupEnv: func(name string) (string, bool) { v, ok := vars[name]; return v, ok }}
}

// The configuration of the first release stays readable for ever.
func TestFirstConfiguration(t *testing.T) {
	got, err := Parse("isthmus.yaml", []byte(`
listen: {xds: 127.0.0.1:15051, admin: 127.0.0.1:15080}
registries:
- {name: dc1, type: consul, config: {address: "http://127.0.0.1:8500"}, translate: {namespace: consul}}
- {name: load, type: sim, config: {services: 1000, instances: 10, changes_per_second: 5, seed: 1}}
- {name: static, type: file, config: {path: ./mesh}}
`), Options{Adapters: builtIn})
	if err != nil {
		t.Fatal(err)
	}
	want := Default
	want.Registries = withDefaults(
		Registry{Name: "dc1", Type: "consul", Config: []byte(`{"address":"http://127.0.0.1:8500"}`), Translate: []byte(`{"namespace":"consul"}`)},
		Registry{Name: "load", Type: "sim", Config: []byte(`{"services":1000,"instances":10,"changes_per_second":5,"seed":1}`), Translate: []byte(`{}`)},
		Registry{Name: "static", Type: "file", Config: []byte(`{"path":"./mesh"}`), Translate: []byte(`{}`)},
	)
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Config{})); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
}

// withDefaults returns registries with the defaults of what every registry has.
func withDefaults(registries ...Registry) []Registry {
	for i := range registries {
		r := &registries[i]
		r.Required, r.SyncTimeout, r.Protect = true, Duration(time.Minute), Protect{
			MinShare: 0.5, MinServices: 10, Hold: Duration(10 * time.Minute), Service: ProtectService{MinEndpoints: 10},
		}
		r.Plugin.Confine = true
	}
	return registries
}

func TestEveryField(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "isthmus-adapter-zoo"), []byte("#!/bin/sh\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	sum := strings.Repeat("ab", 32)
	got, err := Parse("f", []byte(`
listen:
  xds:
    address: ":1"
    tls: {cert_file: cert, key_file: key, client_ca_file: ca, client_auth: request, min_version: "1.3"}
    allow:
    - {peer: {cidr: 10.1.0.0/16, spiffe: "spiffe://mesh/ns/*/sa/istiod", san: "*.example.org", sni: bridge, token_file: tokens}}
    - {peer: {service_account: "tools/*"}}
    token_review: {kubeconfig: k, audience: mesh}
  admin: {address: "[::1]:0", allow: [{peer: {password_file: users}, role: read}]}
  mcp: {address: ":2", insecure: true}
plugin_dir: `+dir+`
profile: tools
log: {level: debug, format: json}
state: {dir: /var/lib/mesh}
conflicts:
- {hosts: ["*.example.org", x], policy: merge, weights: {zoo-1: 90}}
- {hosts: ["*"], policy: isolate}
admin: {pprof: true, guard_probes: true}
mesh: {cluster_domain: corp.example, root_namespace: mesh-root}
drain: 20s
limits: {resources_per_registry: 5, services_per_registry: 4, bytes_per_registry: 7, connections_per_peer: 8, streams: 9, request_bytes: 67108864, retained_bytes: 16777216, response_bytes: 16777217, plugin_memory: 1000000000, plugin_files: 100, tombstones: 6}
telemetry: {address: "127.0.0.1:4317", tls: {enabled: true, ca_file: ca}, headers: {key: "${T}"}, traces: 0.5, interval: 10s}
mcp: {profile: pilot-1.8, synthetic_entries: true, full_state: true}
sinks:
- address: pilot.example.org:9901
  tls: {enabled: true, ca_file: ca, cert_file: cert, key_file: key, server_name: pilot}
  metadata: {authorization: "Bearer ${T}", x: ""}
consumers:
  kubernetes:
  - {name: ambient, publish: stubs, view: {namespaces: [shop]}, kubeconfig: k, waypoint: {name: shared, namespace: gateways}, labels: {example.org/team: shop}, annotations: {note: "${T}"}, lease_namespace: mesh, writes_per_second: 7}
  - {name: other}
registries:
- name: zoo-1
  type: zoo
  plugin: {sha256: `+sum+`, public_key: RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3, env: [A, b_1], user: nobody, confine: false}
  required: false
  sync_timeout: 90s
  owns: {collections: [security.istio.io/*], hosts: ["*.zoo"], namespaces: [zoo, "z*"], addresses: [10.0.0.0/8], labels: [istio-locality]}
  protect: {min_share: 0.25, min_services: 3, hold: "${HOLD}", service: {min_share: 1, min_endpoints: 4}}
  config: {b: ~, a: [1, -2.5, 0x10, true, "x", {y: z}], 80: "<&>"}
`), Options{
		Adapters: builtIn,
		Profiles: []string{"tools"}, MCPProfiles: []string{"pilot-1.8"},
		LookupEnv: func(name string) (string, bool) {
			v, ok := map[string]string{"T": "secret", "HOLD": "1h30m"}[name]
			return v, ok
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		Listen: Listen{
			XDS: Listeners{{
				Address: ":1", TLS: ListenerTLS{CertFile: "cert", KeyFile: "key", ClientCAFile: "ca", ClientAuth: "request", MinVersion: "1.3"},
				Allow:       []Allow{{Peer: Peer{CIDR: "10.1.0.0/16", SPIFFE: "spiffe://mesh/ns/*/sa/istiod", SAN: "*.example.org", SNI: "bridge", TokenFile: "tokens"}}, {Peer: Peer{ServiceAccount: "tools/*"}}},
				TokenReview: TokenReview{Kubeconfig: "k", Audience: "mesh"},
			}},
			Admin: Listener{Address: "[::1]:0", Allow: []Allow{{Peer: Peer{PasswordFile: "users"}, Role: "read"}}},
			MCP:   Listener{Address: ":2", Insecure: true},
		},
		Mesh:      Mesh{ClusterDomain: "corp.example", RootNamespace: "mesh-root"},
		PluginDir: dir,
		Profile:   "tools",
		Log:       Log{Level: "debug", Format: "json"},
		State:     State{Dir: "/var/lib/mesh"},
		Conflicts: []Conflict{{Hosts: []string{"*.example.org", "x"}, Policy: "merge", Weights: map[string]int{"zoo-1": 90}}, {Hosts: []string{"*"}, Policy: "isolate"}},
		Admin:     Admin{Pprof: true, GuardProbes: true},
		Drain:     Duration(20 * time.Second),
		Limits:    Limits{ResourcesPerRegistry: 5, ServicesPerRegistry: 4, BytesPerRegistry: 7, ConnectionsPerPeer: 8, Streams: 9, RequestBytes: 64 << 20, RetainedBytes: 16 << 20, ResponseBytes: 16<<20 + 1, PluginMemory: 1_000_000_000, PluginFiles: 100, Tombstones: 6},
		Telemetry: Telemetry{
			Address: "127.0.0.1:4317", TLS: SinkTLS{Enabled: true, CAFile: "ca"}, Headers: map[string]string{"key": "secret"},
			Traces: 0.5, Interval: Duration(10 * time.Second),
		},
		MCP: MCP{Profile: "pilot-1.8", SyntheticEntries: true, FullState: true},
		Sinks: []Sink{{
			Address: "pilot.example.org:9901", Metadata: map[string]string{"authorization": "Bearer secret", "x": ""},
			TLS: SinkTLS{Enabled: true, CAFile: "ca", CertFile: "cert", KeyFile: "key", ServerName: "pilot"},
		}},
		Consumers: Consumers{Kubernetes: []Kubernetes{{
			Name: "ambient", Publish: "stubs", View: View{Namespaces: []string{"shop"}}, Kubeconfig: "k", Waypoint: Waypoint{Name: "shared", Namespace: "gateways"},
			Labels: map[string]string{"example.org/team": "shop"}, Annotations: map[string]string{"note": "secret"}, LeaseNamespace: "mesh", WritesPerSecond: 7,
		}, {Name: "other", Publish: "stubs", Waypoint: Waypoint{Name: "waypoint"}, WritesPerSecond: 20}}},
		Registries: []Registry{{
			Name: "zoo-1", Type: "zoo", Plugin: Plugin{SHA256: sum, PublicKey: "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3", Env: []string{"A", "b_1"}, User: "nobody"}, SyncTimeout: Duration(90 * time.Second),
			Owns:    Owns{Collections: []string{"security.istio.io/*"}, Hosts: []string{"*.zoo"}, Namespaces: []string{"zoo", "z*"}, Addresses: []string{"10.0.0.0/8"}, Labels: []string{"istio-locality"}},
			Protect: Protect{MinShare: 0.25, MinServices: 3, Hold: Duration(90 * time.Minute), Service: ProtectService{MinShare: 1, MinEndpoints: 4}},
			Config:  []byte(`{"b":null,"a":[1,-2.5,16,true,"x",{"y":"z"}],"80":"<&>"}`), Translate: []byte(`{}`),
		}},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Config{})); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
	path, args, err := got.Command(&got.Registries[0])
	if err != nil || path != filepath.Join(dir, "isthmus-adapter-zoo") || len(args) != 0 {
		t.Errorf("Command = %q %q %v", path, args, err)
	}
	if _, args, err := got.Command(&Registry{Name: "x", Type: "sim"}); err != nil || !cmp.Equal(args, []string{"adapter", "sim"}) {
		t.Errorf("Command of a built-in adapter = %q, %v", args, err)
	}
}

func TestEnvironment(t *testing.T) {
	got, err := Parse("f", []byte(`
registries:
- {name: "${N}-1", type: sim, config: {token: "a${T}b$${T}c$d$", "${T}": 1, n: !!int "${T}", f: !!float "${F:-0.5}", d: "${E:-x}${U:-y}"}}
limits: {streams: "${T}", tombstones: "${U:-7}"}
`), env(map[string]string{"N": "dc", "T": "12", "E": ""}))
	if err != nil {
		t.Fatal(err)
	}
	if got.Registries[0].Name != "dc-1" {
		t.Errorf("name = %q", got.Registries[0].Name)
	}
	if got, want := string(got.Registries[0].Config), `{"token":"a12b${T}c$d$","${T}":1,"n":12,"f":0.5,"d":"xy"}`; got != want {
		t.Errorf("config = %s, want %s: keys stay, values are text unless a tag says otherwise", got, want)
	}
	if got.Limits.Streams != 12 || got.Limits.Tombstones != 7 {
		t.Errorf("limits = %+v", got.Limits)
	}
	// The names of variables are compared without their values.
	was, err := got.Unexpanded()
	if err != nil {
		t.Fatal(err)
	}
	if d := was.Diff(&was); !d.Empty() {
		t.Errorf("a configuration differs from itself: %+v", d)
	}
}

// A listener is an address or a block, and those of xds are one or a list.
func TestListeners(t *testing.T) {
	const a, b = "127.0.0.1:1", "127.0.0.1:2"
	for text, want := range map[string]Listen{
		"{xds: '127.0.0.1:1', admin: '127.0.0.1:2'}":                                            {XDS: Listeners{{Address: a}}, Admin: Listener{Address: b}},
		"{xds: {address: '127.0.0.1:1'}, admin: {address: '127.0.0.1:2'}}":                      {XDS: Listeners{{Address: a}}, Admin: Listener{Address: b}},
		"{xds: ['127.0.0.1:1', {address: '127.0.0.1:2'}], admin: '[::1]:0'}":                    {XDS: Listeners{{Address: a}, {Address: b}}, Admin: Listener{Address: "[::1]:0"}},
		"{mcp: {address: '127.0.0.1:1'}, admin: '127.0.0.1:2', xds: ['[::1]:0']}":               {XDS: Listeners{{Address: "[::1]:0"}}, Admin: Listener{Address: b}, MCP: Listener{Address: a}},
		"{xds: [{address: '[::1]:0'}, {address: '[::1]:0'}], admin: '[::1]:0', mcp: '[::1]:0'}": {XDS: Listeners{{Address: "[::1]:0"}, {Address: "[::1]:0"}}, Admin: Listener{Address: "[::1]:0"}, MCP: Listener{Address: "[::1]:0"}},
		"{xds: ['127.0.0.1:1', '127.0.0.1:2'], admin: {address: 'localhost:0'}}":                {XDS: Listeners{{Address: a}, {Address: b}}, Admin: Listener{Address: "localhost:0"}},
	} {
		c, err := Parse("f", []byte("listen: "+text+"\nregistries: [{name: a, type: sim}]"), env(nil))
		if err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if d := cmp.Diff(want, c.Listen); d != "" {
			t.Errorf("%s (-want +got):\n%s", text, d)
		}
	}
}

func TestProblems(t *testing.T) {
	tests := []struct {
		name, file string
		want       string // one line per problem
	}{
		{"empty", "", `f: the file is empty; the smallest configuration has one registry: registries: [{name: load, type: sim}]`},
		{"no registries", "log: {level: info}", `f:1:1: registries: no registry is configured; add one, for example {name: load, type: sim}`},
		{"syntax", "registries:\n- {name: a", "f:2:1: YAML: a { is not closed, or a comma is missing between two fields (did not find expected ',' or '}')"},
		{"syntax of the scanner", "a: 1\nb: c: d\n", "f:2:1: YAML: a field cannot begin here: indent it as the fields around it, or write a text with a colon in quotes (mapping values are not allowed in this context)"},
		{"tab", "registries:\n- name: a\n  \ttype: sim\n", "f:3:3: YAML: a tab indents this line; indent with spaces (found a tab character that violates indentation)"},
		{"template", "registries:\n- {name: a, type: {{ .Values.type }} }\n", "f:2:20: registries[0].type: {{ begins a field of a template: render the template first (helm template), or write the text in quotes"},
		{"quote", "registries:\n- {name: \"a, type: sim}\n", "f:2:1: YAML: a quote, [ or { is not closed (found unexpected end of stream)"},
		{"capitals", "registries: [{name: a, type: Consul}]", "f:1:24: registries[0].type: must be lower-case letters, digits and dashes; did you mean consul?"},
		{"port", "listen: {xds: \"127.0.0.1:99999\"}\nregistries: [{name: a, type: sim}]", "f:1:10: listen.xds: must be host:port, for example 127.0.0.1:15051, or :15051 for all addresses of the machine, or unix:PATH"},
		{"telemetry", "registries: [{name: a, type: sim}]\ntelemetry: {address: \":1\", traces: 2, interval: 1ms, tls: {ca_file: x}}", `
f:2:13: telemetry.address: must be host:port of a collector that takes OTLP over gRPC, for example 127.0.0.1:4317
f:2:28: telemetry.traces: must be a share from 0 to 1
f:2:39: telemetry.interval: must be 0s, or at least 1s
f:2:54: telemetry.tls.enabled: is not true, but there are other fields of tls; set it to true, or remove them`},
		{"consumers", `registries: [{name: a, type: sim}]
consumers:
  kubernetes:
  - {name: Up, publish: pods, view: {collections: [networking.istio.io/ServiceEntry]}, waypoint: {name: a/b, namespace: A}, writes_per_second: 0}
  - {name: two, labels: {istio.io/use-waypoint: x, "a b": y, team: "a b"}, annotations: {isthmus.io/hash: x}}
  - {name: two, lease_namespace: "*"}
  - {name: three, cluster_ip: true}
  - {name: four, publish: services, waypoint: {name: x}}`, `
f:4:6: consumers.kubernetes[0].name: must be lower-case letters, digits and dashes, at most 40, such as ambient
f:4:16: consumers.kubernetes[0].publish: must be stubs, services or workloads
f:4:38: consumers.kubernetes[0].view.collections: is for sinks; services are written
f:4:99: consumers.kubernetes[0].waypoint.name: must be the name of a Gateway, such as waypoint
f:4:110: consumers.kubernetes[0].waypoint.namespace: must be a namespace such as istio-ingress
f:4:125: consumers.kubernetes[0].writes_per_second: must be 1 to 1000
f:5:17: consumers.kubernetes[1].labels: a b is no key, such as example.org/team
f:5:76: consumers.kubernetes[1].annotations: isthmus.io/hash is the consumer's own
f:6:6: consumers.kubernetes[2].name: another consumer has the name two already, on line 5; names are unique
f:6:17: consumers.kubernetes[2].lease_namespace: must be a namespace such as istio-ingress
f:7:19: consumers.kubernetes[3].cluster_ip: is for publish: services
f:8:37: consumers.kubernetes[4].waypoint: is for publish: stubs`},
		{"no number", "registries: [{name: a, type: sim}]\nlimits: {streams: \"${SECRET}\", tombstones: !!int \"${NONE}\"}", `
f:2:19: limits.streams: must be a number, and the value of the variables is none
f:2:44: limits.tombstones: the environment variable NONE is not set`},
		{"syntax on the first line", "a: [", "f:1:1: YAML: did not find expected node content"},
		{"two documents", "registries: [{name: a, type: sim}]\n---\na: 1\n", `f:2:1: a second document begins here; the configuration is one document`},
		{"everything at once", `
listen: {xds: "15051", admn: ":1"}
registries:
- {nmae: a, type: sim}
- {name: B_, type: consl}
- {name: a, type: sim, config: 5}
- {name: a, type: sim, translate: [], plugin: {sha256: ab}}
log: {level: loud, format: xml}
admin: {pprof: please}
limits: {tombstones: -1, resources_per_registry: many, bytes_per_registry: 0, services_per_registry: -2}
profile: tool
log: {}
`, `
f:2:10: listen.xds: must be host:port, for example 127.0.0.1:15051, or :15051 for all addresses of the machine, or unix:PATH
f:2:24: listen.admn: unknown field; did you mean admin?
f:4:3: registries[0].name: is missing; give the registry a name
f:4:4: registries[0].nmae: unknown field; did you mean name?
f:5:4: registries[1].name: must be lower-case letters, digits and dashes, beginning and ending with a letter or digit, at most 63
f:5:14: registries[1].type: no adapter of this name is built in; did you mean consul?; or set plugin_dir to the directory that has isthmus-adapter-consl
f:6:32: registries[2].config: must be a block of fields, not the number 5
f:7:4: registries[3].name: another registry has the name a already, on line 6; names are unique
f:7:35: registries[3].translate: must be a block of fields, not a list
f:7:48: registries[3].plugin.sha256: the adapter sim is built in; sha256 is for executables in plugin_dir
f:8:7: log.level: must be one of debug, info, warn, error
f:8:20: log.format: must be one of text, json
f:9:16: admin.pprof: must be true or false, not text
f:10:10: limits.tombstones: must be positive
f:10:50: limits.resources_per_registry: must be a whole number, not text
f:10:56: limits.bytes_per_registry: must be positive
f:10:79: limits.services_per_registry: must be positive
f:11:1: profile: there is no profile of this name; did you mean tools?
f:12:1: log: given twice, first on line 8`},
		{"same port of blocks", "listen: {xds: ['[::1]:1', {address: '[::1]:2'}, {address: '[::1]:1'}], admin: {address: '[::1]:2'}}\nregistries: [{name: a, type: sim}]", `
f:1:50: listen.xds[2].address: is the same as listen.xds[0]; they need a port each
f:1:80: listen.admin.address: is the same as listen.xds[1].address; they need a port each`},
		{"open to all", "listen: {xds: [':1', {address: '10.0.0.1:2', insecure: true}, {address: 'host:3', allow: [{peer: {cidr: 10.0.0.0/8}}]}], admin: '0.0.0.0:0', mcp: 'unix:/a'}\nregistries: [{name: a, type: sim}]", `
f:1:16: listen.xds[0]: is not loopback, and everyone who reaches it could use it: give it tls, or rules in allow, or write {address: ":1", insecure: true}
f:1:122: listen.admin: is not loopback, and everyone who reaches it could read it: give it rules in allow, or tls with client_auth: require, or write {address: "0.0.0.0:0", insecure: true}`},
		{"rules that fit nobody or everybody", `listen:
  xds:
    address: ":1"
    tls: {key_file: key, client_ca_file: ca, client_auth: none, min_version: "1.1"}
    allow:
    - {}
    - {peer: {cidr: 10.1.0.0/33, spiffe: "mesh/*", san: "[", password_file: users}, role: read}
  admin: {address: ":2", tls: {cert_file: c, key_file: k, client_auth: require}, allow: [{peer: {spiffe: "spiffe://a/b"}, role: root}]}
  mcp: {address: "unix:/s", allow: [{peer: {cidr: "::1", sni: x}}, {peer: {token_file: t}}]}
registries: [{name: a, type: sim}]
`, `
f:4:5: listen.xds.tls.cert_file: is missing; name the PEM file of the certificate
f:4:26: listen.xds.tls.client_ca_file: is not used, for client_auth is none; write request or require
f:4:65: listen.xds.tls.min_version: must be "1.2" or "1.3"
f:6:7: listen.xds.allow[0].peer: fits everyone; name a cidr, spiffe, san, sni, token_file or service_account, or leave allow out
f:7:15: listen.xds.allow[1].peer.cidr: must be a block of addresses such as 10.1.0.0/16 or fd00::/8, or one address
f:7:34: listen.xds.allow[1].peer.spiffe: must begin with spiffe://, such as spiffe://cluster.local/ns/istio-system/sa/istiod
f:7:52: listen.xds.allow[1].peer.san: is not a pattern: a [ needs its ], and a \ something behind it
f:7:62: listen.xds.allow[1].peer.password_file: is for listen.admin; sinks send a token: token_file
f:7:85: listen.xds.allow[1].role: is for listen.admin; everyone who may use this listener may read
f:8:26: listen.admin.tls.client_ca_file: is missing; client_auth require needs the authorities of the clients
f:8:98: listen.admin.allow[0].peer.spiffe: fits nobody without tls.client_ca_file or tls.workload_api, which certificates of clients are verified with
f:8:123: listen.admin.allow[0].role: must be read or operate
f:9:45: listen.mcp.allow[0].peer.cidr: fits nobody, as callers of a unix socket have no address
f:9:58: listen.mcp.allow[0].peer.sni: fits nobody without tls`},
		{"service accounts", `listen:
  xds:
    address: ":1"
    allow: [{peer: {service_account: a/b}}]
  admin: {address: localhost:2, token_review: {audience: x}}
  mcp: {address: localhost:3, allow: [{peer: {service_account: istiod}}, {peer: {service_account: "["}}]}
registries: [{name: a, type: sim}]
`, `
f:4:21: listen.xds.allow[0].peer.service_account: a token would be sent in plaintext; give the listener tls, or write insecure: true
f:5:33: listen.admin.token_review: is not used, as no rule in allow has a service_account
f:6:47: listen.mcp.allow[0].peer.service_account: must be NAMESPACE/NAME, such as istio-system/istiod, or tools/* for all of a namespace
f:6:82: listen.mcp.allow[1].peer.service_account: is not a pattern: a [ needs its ], and a \ something behind it`},
		{"views of nothing", `registries: [{name: one, type: sim}, {name: two, type: sim}]
listen:
  admin: {address: localhost:1, view: {registries: [one]}}
  mcp: {address: localhost:2, view: {}}
  xds:
  - {address: localhost:3, view: {registries: [], namespaces: [], hosts: [], collections: []}}
  - {address: localhost:4, view: {registries: [tow], namespaces: [A], hosts: ["["], collections: [networking.istio.io/ServiceEntri], shard: 16/16}}
  - {address: localhost:4, view: {shard: 3-1/4}}
  - address: localhost:5
    view: {registries: [one], namespaces: [a], collections: [networking.istio.io/ServiceEntry], shard: 0-1/4}
    allow:
    - {peer: {cidr: 10.0.0.0/8}, view: {registries: [two], namespaces: [b], collections: [networking.istio.io/Gateway], shard: 6/8}}
    - {peer: {cidr: 10.0.0.0/8}, view: {registries: [one, two], shard: 5/8}}
  - {address: localhost:6, view: {shard: ""}}`, `
f:3:33: listen.admin.view: is for sinks; listen.admin shows everything
f:4:31: listen.mcp.view: is empty; name registries, namespaces, hosts, collections or a shard, or leave it out for everything
f:6:35: listen.xds[0].view.registries: is an empty list, which selects nothing; leave it out for everything
f:6:51: listen.xds[0].view.namespaces: is an empty list, which selects nothing; leave it out for everything
f:6:67: listen.xds[0].view.hosts: is an empty list, which selects nothing; leave it out for everything
f:6:78: listen.xds[0].view.collections: is an empty list, which selects nothing; leave it out for everything
f:7:48: listen.xds[1].view.registries[0]: no registry has this name; did you mean two?
f:7:67: listen.xds[1].view.namespaces[0]: must be lower-case letters, digits and dashes
f:7:79: listen.xds[1].view.hosts[0]: is not a pattern; *.service.consul fits every host of that domain
f:7:99: listen.xds[1].view.collections[0]: no kind of resource is called so; did you mean networking.istio.io/ServiceEntry?
f:7:134: listen.xds[1].view.shard: shard 16 is out of range: of 16 there are 0 to 15
f:8:6: listen.xds[2].address: is the same as listen.xds[1].address; they need a port each
f:8:35: listen.xds[2].view.shard: no shard is from 3 to 1
f:12:41: listen.xds[3].allow[0].view.registries: select nothing, for the listener's view has only one
f:12:60: listen.xds[3].allow[0].view.namespaces: select nothing, for the listener's view has only a
f:12:77: listen.xds[3].allow[0].view.collections: select nothing, for the listener's view has only networking.istio.io/ServiceEntry
f:12:121: listen.xds[3].allow[0].view.shard: selects nothing, for the listener's view has only shard 0-1/4
f:14:28: listen.xds[4].view: is empty; name registries, namespaces, hosts, collections or a shard, or leave it out for everything`},
		{"a workload api and files", `registries: [{name: one, type: sim}]
listen:
  admin: {address: ":1", tls: {workload_api: /run/agent.sock}}
  xds:
  - {address: ":2", tls: {workload_api: "unix:///run/agent.sock", cert_file: a, key_file: b, client_ca_file: c}}
  - {address: ":3", tls: {workload_api: "unix:///run/agent.sock", client_auth: none}, allow: [{peer: {spiffe: "spiffe://a/b"}}]}
  - {address: ":4", tls: {workload_api: "unix:///run/agent.sock"}, allow: [{peer: {spiffe: "spiffe://a/b"}}]}`, `
f:3:32: listen.admin.tls.workload_api: must be unix:// and an absolute path, such as unix:///run/spire/agent.sock
f:5:67: listen.xds[0].tls.cert_file: is not used, as the certificate comes from workload_api
f:5:81: listen.xds[0].tls.key_file: is not used, as the certificate comes from workload_api
f:5:94: listen.xds[0].tls.client_ca_file: is not used, as the authorities come from workload_api
f:6:103: listen.xds[1].allow[0].peer.spiffe: fits nobody without tls.client_ca_file or tls.workload_api, which certificates of clients are verified with`},
		{"no listeners", "listen: {xds: []}\nregistries: [{name: a, type: sim}]", `f:1:10: listen.xds: is an empty list; leave it out for 127.0.0.1:15051`},
		{"listener of another kind", "listen: {admin: [':1']}\nregistries: [{name: a, type: sim}]", `f:1:17: listen.admin: must be an address as host:port, or a block with one, not a list`},
		{"same port", "listen: {xds: 'localhost:1', admin: 'localhost:1'}\nregistries: [{name: a, type: sim}]", `f:1:30: listen.admin: is the same as listen.xds; they need a port each`},
		{"legacy protocol", `listen: {xds: "localhost:1", mcp: "localhost:1"}
registries: [{name: a, type: sim}]
mcp: {profile: pilot-1.9}
sinks:
- {metadata: [a]}
- {address: x, tls: {ca_file: a}}
- {address: x, tls: {enabled: true, key_file: k}, metadata: {a: 5}}
- {address: y, metadata: {a: {b: c}}}`, `
f:1:30: listen.mcp: is the same as listen.xds; they need a port each
f:3:7: mcp.profile: there is no profile of this name; did you mean pilot-1.7?
f:5:3: sinks[0].address: is missing; for example pilot.example.org:9901
f:5:14: sinks[0].metadata: must be a block of fields, not a list
f:6:16: sinks[1].tls.enabled: is not true, but there are other fields of tls; set it to true, or remove them
f:7:4: sinks[2].address: sinks[1] has the same
f:7:37: sinks[2].tls.key_file: cert_file and key_file go together
f:8:30: sinks[3].metadata.a: must be a word, not a block of fields`},
		{"environment", "registries: [{name: a, type: sim, config: {token: '${SECRET}${NONE}', b: '${', c: ['${a b}']}}]", `
f:1:51: registries[0].config.token: the environment variable NONE is not set
f:1:74: registries[0].config.b: ${ begins the name of an environment variable, as in ${NAME} or ${NAME:-default}; write $${ for a plain ${
f:1:84: registries[0].config.c[0]: ${ begins the name of an environment variable, as in ${NAME} or ${NAME:-default}; write $${ for a plain ${`},
		{"odd YAML", "x: &x {a: 1}\nregistries: [{name: a, type: sim, config: {<<: *x, [a]: 1, n: .inf, b: !!binary aa, i: 99999999999999999999999}}]", `
f:1:1: x: unknown field; there are listen, registries, conflicts, addresses, mesh, plugin_dir, profile, log, state, audit, admin, limits, telemetry, mcp, sinks, consumers, drain
f:2:44: registries[0].config: merge keys (<<) are not supported; write the fields out
f:2:52: registries[0].config: a key must be a plain word
f:2:63: registries[0].config.n: .inf is not a number that can be used here
f:2:72: registries[0].config.b: !!binary is not supported; write text`},
		{"no plugin", "plugin_dir: /nowhere\nregistries: [{name: a, type: zoo, plugin: {sha256: xyz}}]", `
f:2:24: registries[0].type: no adapter of this name is built in (consul, file, nacos, sim), and there is no /nowhere/isthmus-adapter-zoo
f:2:44: registries[0].plugin.sha256: must be 64 hexadecimal digits, as sha256sum prints them`},
		{"protection", `registries:
- {name: a, type: sim, sync_timeout: 0s, protect: {min_share: 1.5, min_services: 0, hold: 10, service: {min_share: -1, min_endpoints: 0}}}
- {name: b, type: sim, required: no way, sync_timeout: soon, protect: {min_share: half, hold: 1ms}}
- {name: c, type: sim, protect: off}
- {name: d, type: sim, sync_timeout: 99999999h, protect: {hold: 99999999999999999999h}}`, `
f:2:24: registries[0].sync_timeout: must be more than 0, and at most 8760h
f:2:52: registries[0].protect.min_share: must be from 0 (off) to 1 (any loss is paused)
f:2:68: registries[0].protect.min_services: must be positive
f:2:91: registries[0].protect.hold: must be a duration such as "5s" or "1m30s"
f:2:105: registries[0].protect.service.min_share: must be from 0 (off) to 1 (any loss is paused)
f:2:120: registries[0].protect.service.min_endpoints: must be positive
f:3:34: registries[1].required: must be true or false, not text
f:3:56: registries[1].sync_timeout: must be a duration such as "5s" or "1m30s"
f:3:83: registries[1].protect.min_share: must be a number, not text
f:3:89: registries[1].protect.hold: must be 1s to 8760h; min_share: 0 turns the protection off
f:4:33: registries[2].protect: must be a block of fields, not text
f:5:24: registries[3].sync_timeout: must be more than 0, and at most 8760h
f:5:59: registries[3].protect.hold: must be 1s to 8760h; min_share: 0 turns the protection off`},
		{"numbers that are too large", "limits: {tombstones: 18446744073709551615, plugin_memory: 1e300}\nregistries: [{name: a, type: sim, required: 1}]", `
f:1:22: limits.tombstones: the number 18446744073709551615 is too large
f:1:59: limits.plugin_memory: the number 1e300 is too large
f:2:45: registries[0].required: must be true or false, not the number 1`},
		{"conflicts", `registries: [{name: old, type: sim}, {name: new, type: sim}]
conflicts:
- {hosts: ["*.example.org", "[a", "a/b", ""], policy: merge, weights: {old: 90, nwe: 10}}
- {policy: merg}
- {hosts: [x], policy: priority, weights: {old: 1}}
- {hosts: [x], policy: merge, weights: {old: 0, new: -1}}
- {hosts: [x], policy: merge, weights: {}}
- {hosts: [x], policy: merge, weights: {old: 1001}}
- {hosts: [x], registry: od, policy: isolate}
- {hosts: [x], registry: old, policy: merge, weights: {old: 1}}`, `
f:3:29: conflicts[0].hosts[1]: [a is not a pattern: a [ needs its ], and a \ something behind it; *.example.org fits every host of that domain
f:3:35: conflicts[0].hosts[2]: a/b fits no host, as none has a slash or a space
f:3:42: conflicts[0].hosts[3]: is empty; write "*" for every host
f:3:81: conflicts[0].weights.nwe: no registry has this name; did you mean new?
f:4:3: conflicts[1].hosts: is missing; name hosts or patterns such as "*.example.org", or "*" for every host
f:4:4: conflicts[1].policy: must be one of priority, isolate, merge
f:5:34: conflicts[2].weights: is for policy merge; with priority each host has one registry's endpoints, or each namespace its own
f:6:31: conflicts[3].weights: has no share above 0, so that nothing would be served; give the registry that is to serve the host at least 1
f:6:49: conflicts[3].weights.new: must be 0 to 1000
f:7:31: conflicts[4].weights: has no share above 0, so that nothing would be served; give the registry that is to serve the host at least 1
f:8:41: conflicts[5].weights.old: must be 0 to 1000
f:9:16: conflicts[6].registry: no registry has this name; did you mean old?
f:10:46: conflicts[7].weights: are shares of registries, and with registry the rule is for the services of one`},
		{"owns", `mesh: {cluster_domain: .local, root_namespace: "*"}
registries:
- {name: a, type: sim, owns: {collections: [ServiceEntry, networking.istio.io/*, "*"], hosts: ["[a", ""], namespaces: [A, "a-*"], addresses: [10.0.0.0/33], labels: ["[", "*"]}}`, `
f:1:8: mesh.cluster_domain: must be a domain such as cluster.local
f:1:32: mesh.root_namespace: must be a namespace such as istio-system
f:3:45: registries[0].owns.collections[0]: fits none of networking.istio.io/DestinationRule, networking.istio.io/EnvoyFilter, networking.istio.io/Gateway, networking.istio.io/ProxyConfig, networking.istio.io/ServiceEntry, networking.istio.io/Sidecar, networking.istio.io/VirtualService, networking.istio.io/WorkloadEntry, networking.istio.io/WorkloadGroup, security.istio.io/AuthorizationPolicy, security.istio.io/PeerAuthentication, security.istio.io/RequestAuthentication
f:3:96: registries[0].owns.hosts[0]: is not a pattern; *.service.consul fits every host of that domain
f:3:102: registries[0].owns.hosts[1]: is not a pattern; *.service.consul fits every host of that domain
f:3:120: registries[0].owns.namespaces[0]: must be lower-case letters, digits and dashes, or * for any run of them
f:3:143: registries[0].owns.addresses[0]: must be a block of addresses such as 10.1.0.0/16 or fd00::/8, or one address
f:3:166: registries[0].owns.labels[0]: is not a pattern; security.istio.io/tlsMode fits that label`},
		{"addresses 10.0.0.1/8", "addresses: {cidr: '10.0.0.1/8'}\nregistries: [{name: a, type: sim}]", `
f:1:13: addresses.cidr: is an address in a network; write 10.0.0.0/8 for the network`},
		{"addresses 10.0.0.0", "addresses: {cidr: '10.0.0.0'}\nregistries: [{name: a, type: sim}]", `
f:1:13: addresses.cidr: is not a network; write it like 10.64.0.0/10`},
		{"addresses 10.0.0.0/25", "addresses: {cidr: '10.0.0.0/25'}\nregistries: [{name: a, type: sim}]", `
f:1:13: addresses.cidr: has fewer than 256 addresses; choose a wider network`},
		{"addresses 240.0.0.0/4", "addresses: {cidr: '240.0.0.0/4'}\nregistries: [{name: a, type: sim}]", `
f:1:13: addresses.cidr: overlaps with 240.240.0.0/16, which is for addresses that istiod allocates; choose another network`},
		{"addresses fe80::/64", "addresses: {cidr: 'fe80::/64'}\nregistries: [{name: a, type: sim}]", `
f:1:13: addresses.cidr: overlaps with fe80::/10, which is for link-local addresses; choose another network`},
		{"addresses 0.0.0.0/0", "addresses: {cidr: '0.0.0.0/0'}\nregistries: [{name: a, type: sim}]", `
f:1:13: addresses.cidr: overlaps with 0.0.0.0/8, which is for this host; choose another network`},
		{"not a mapping", "- 1", `f:1:1: must be a block of fields, not a list`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := env(map[string]string{"SECRET": "hunter2"})
			o.Profiles, o.MCPProfiles = []string{"tools", "istio-1.30"}, []string{"pilot-1.7", "pilot-1.8"}
			_, err := Parse("f", []byte(tt.file), o)
			problems, ok := errors.AsType[Problems](err)
			if !ok {
				t.Fatalf("error = %v, want Problems", err)
			}
			if diff := cmp.Diff(strings.Split(strings.TrimSpace(tt.want), "\n"), strings.Split(problems.Error(), "\n")); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

// A value that is wrong is not repeated if it may come from the environment.
func TestSecretsAreNotPrinted(t *testing.T) {
	_, err := Parse("f", []byte(`{listen: {xds: "${S}"}, log: {level: "${S}"}, profile: "${S}", registries: [{name: "${S}", type: "${S}"}]}`), env(map[string]string{"S": "Hunter 2"}))
	if err == nil || strings.Contains(err.Error(), "Hunter") {
		t.Errorf("error = %v, want one without the variable's value", err)
	}
}

// What a plugin finds wrong is shown at its place in the file.
func TestProblemOfAPlugin(t *testing.T) {
	c, err := Parse("isthmus.yaml", []byte("registries:\n- {name: a, type: sim}\n- name: b\n  type: sim\n  config:\n    services: 1\n    kinds:\n    - x\n"), Options{Adapters: builtIn})
	if err != nil {
		t.Fatal(err)
	}
	for field, want := range map[string]string{
		"config.services":   "isthmus.yaml:6:5: registries[1].config.services: no",
		"config.kinds[0].z": "isthmus.yaml:8:7: registries[1].config.kinds[0].z: no",
		"config.seed":       "isthmus.yaml:5:3: registries[1].config.seed: no",
		"translate.host":    "isthmus.yaml:3:3: registries[1].translate.host: no",
		"":                  "isthmus.yaml:3:3: registries[1]: no",
	} {
		if got := c.Problem(1, field, "no").Error(); got != want {
			t.Errorf("Problem(%q) = %s, want %s", field, got, want)
		}
	}
}

// A file with problems still tells what its registries are, so that their
// plugins can be asked; what a plugin then says of a value that it could not
// get is left out.
func TestProblemsAndPlugins(t *testing.T) {
	c, err := Parse("f", []byte(`
registries:
- {name: load, type: sim, config: {services: many, cidr: "${NONE}", seed: .inf, zones: ["${NONE}", a]}}
- {name: B_, type: smi}
- {name: B_, type: sim, confg: 1}
- {name: load, type: sim, config: 5}
`), env(nil))
	if _, ok := errors.AsType[Problems](err); !ok {
		t.Fatalf("error = %v, want Problems", err)
	}
	if got, want := string(c.Registries[0].Config), `{"services":"many","cidr":null,"seed":null,"zones":[null,"a"]}`; got != want {
		t.Errorf("config = %s, want %s", got, want)
	}
	for i, want := range []struct {
		name     string
		askable  bool
		problems map[string]bool // whether a violation of the field is reported
	}{
		{"load", true, map[string]bool{"config.services": true, "config.cidr": false, "config.seed": false, "config.zones[0]": false, "config.zones": false, "config.zones[1]": true, "": true}},
		{"registry-1", false, nil},
		{"registry-2", true, map[string]bool{"config.services": true, "": true}},
		{"load", true, map[string]bool{"config.services": false, "translate.host": true}},
	} {
		if c.Registries[i].Name != want.name || c.Askable(i) != want.askable {
			t.Errorf("registries[%d] is called %q, askable: %v", i, c.Registries[i].Name, c.Askable(i))
		}
		for field, reported := range want.problems {
			if p := c.Problem(i, field, "x"); (p != nil) != reported {
				t.Errorf("registries[%d]: problem with %q: %v, want it reported: %v", i, field, p, reported)
			}
		}
	}
}

// What keeps a file from being looked at is said with the cure.
func TestCures(t *testing.T) {
	denied := &fs.PathError{Op: "stat", Path: "plugins/isthmus-adapter-zoo", Err: syscall.EACCES}
	if got := lookError(denied); !strings.Contains(got, "plugins/isthmus-adapter-zoo: permission denied; make plugin_dir") || !strings.Contains(got, "chmod a+rx") {
		t.Errorf("lookError = %s", got)
	}
	if got := readError(&fs.PathError{Op: "open", Path: "f", Err: syscall.EACCES}).Error(); !strings.Contains(got, "open f: permission denied; make it readable") {
		t.Errorf("readError = %s", got)
	}
	if _, err := Load(t.TempDir(), Options{Adapters: builtIn}); err == nil || !strings.Contains(err.Error(), "is a directory; name the file in it") {
		t.Errorf("error of a directory = %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Parse("f", []byte("plugin_dir: "+file+"\nregistries: [{name: a, type: zoo}]"), Options{Adapters: builtIn}); err == nil ||
		!strings.Contains(err.Error(), "not a directory; plugin_dir must be the directory") {
		t.Errorf("error of a plugin_dir that is a file = %v", err)
	}
}

func TestLoad(t *testing.T) {
	if _, err := Load(filepath.Join(t.TempDir(), "none.yaml"), Options{Adapters: builtIn}); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "a relative path starts at") {
		t.Errorf("error of a file that does not exist = %v", err)
	}
	file := filepath.Join(t.TempDir(), "big.yaml")
	if err := os.WriteFile(file, make([]byte, MaxSize+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(file, Options{Adapters: builtIn}); err == nil || !strings.Contains(err.Error(), "larger than 4 MiB") {
		t.Errorf("error of a file that is too large = %v", err)
	}
}

// bombs are small files that stand for much, with a part of what is said of
// them.
var bombs = map[string]struct{ file, want string }{
	"an alias within itself":   {"a: &a [*a]\n\nregistries: *a\n", "an alias (*) that contains itself"},
	"aliases within itself":    {"registries: &a [*a, *a, *a]\n", "nested deeper than 64 levels"},
	"a mapping within itself":  {"registries: &a {a: *a}\n", "nested deeper than 64 levels"},
	"a deep list":              {"registries: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000), "nested deeper than 64 levels"},
	"aliases of aliases":       {"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nregistries: [*e,*e,*e,*e]\n", "values and keys once all aliases are followed"},
	"aliases of a long text":   {"a: &a " + strings.Repeat("x", 1<<20) + "\nregistries: [" + strings.Repeat("*a,", 1000) + "]\n", "MiB of text once all aliases"},
	"a long variable":          {"plugin_dir: \"" + strings.Repeat("${LONG}", 1000) + "\"\nregistries: []\n", "MiB once its variables are replaced"},
	"a deep path of long keys": {"registries: " + strings.Repeat("{"+strings.Repeat("k", 1000)+": ", 60) + "[" + strings.Repeat("x,", 100_000) + "]" + strings.Repeat("}", 60), "MiB of text once all aliases"},
	"one key again and again":  {strings.Repeat("a: b\n", 700_000), "given twice"},
	"unknown fields":           {unknown(90_000), "unknown field"},
	"registries without type":  {"registries: [" + strings.Repeat("{name: a},", 60_000) + "]", "is missing"},
	"registries that are none": {"registries: [" + strings.Repeat("1,", 90_000) + "]", "must be"},
}

func unknown(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "f%d: 1\n", i)
	}
	return b.String()
}

// A file cannot stand for more than the machine has: what is refused takes
// memory in proportion to the largest file.
func TestBombs(t *testing.T) {
	for name, c := range bombs {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := Parse("f", []byte(c.file), env(map[string]string{"LONG": strings.Repeat("x", 100_000)}))
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%.300v, want %q", err, c.want)
			}
			took := (after.TotalAlloc - before.TotalAlloc) >> 20
			t.Logf("%d bytes took %d MiB", len(c.file), took)
			most := uint64(512)
			if testwait.Raced() {
				most *= 4
			}
			if took > most {
				t.Errorf("%d bytes took %d MiB", len(c.file), took)
			}
		})
	}
}

// Whatever a file holds, Parse returns a usable configuration or problems that
// say where.
func FuzzParse(f *testing.F) {
	f.Add("registries: [{name: a, type: sim, config: {services: 1}}]")
	f.Add("listen: {xds: ':0'}\nregistries:\n- &a {name: a, type: sim, translate: {host: '$${x}${Y}'}}\n- *a\n")
	f.Add("a: !!merge <<\n? [x]\n: y\n")
	f.Add("log: {level: debug}\n---\n")
	f.Add("%YAML 1.1\n---\nregistries: ~")
	for _, b := range bombs {
		if len(b.file) < 20_000 {
			f.Add(b.file)
		}
	}
	f.Fuzz(func(t *testing.T, file string) {
		c, err := Parse("f", []byte(file), env(map[string]string{"Y": "y"}))
		if err == nil {
			for i := range c.Registries {
				if r := &c.Registries[i]; !label.MatchString(r.Name) || len(r.Config) < 2 || len(r.Translate) < 2 {
					t.Errorf("accepted registry %+v", r)
				}
			}
			return
		}
		problems, ok := errors.AsType[Problems](err)
		if !ok || len(problems) == 0 {
			t.Fatalf("error = %v, want Problems", err)
		}
		for i := range c.Registries {
			if r := &c.Registries[i]; c.Askable(i) && (!label.MatchString(r.Name) || !json.Valid(r.Config) || !json.Valid(r.Translate)) {
				t.Errorf("registry to be asked about: %+v", r)
			}
		}
		for _, p := range problems {
			if p.Reason == "" || p.Line < 0 || p.Line > strings.Count(file, "\n")+strings.Count(file, "\r")+2+strings.Count(file, "\u2028")+strings.Count(file, "\u2029")+strings.Count(file, "\u0085") {
				t.Errorf("problem %+v of a file of %d bytes", p, len(file))
			}
		}
	})
}

// A directory that is not named is one for the user and the file.
func TestStateDir(t *testing.T) {
	base, home := t.TempDir(), t.TempDir()
	parse := func(name, text string) string {
		t.Helper()
		c, err := Parse(name, []byte(text+"registries: [{name: load, type: sim}]"), Options{Adapters: builtIn})
		if err != nil {
			t.Fatal(err)
		}
		dir, err := c.StateDir()
		if err != nil {
			t.Fatal(err)
		}
		return dir
	}
	t.Setenv("STATE_DIRECTORY", "")
	t.Setenv("XDG_STATE_HOME", "")
	t.Setenv("HOME", home)
	one := parse("/etc/one/isthmus.yaml", "")
	if filepath.Dir(one) != filepath.Join(home, ".local", "state", "isthmus") || !strings.HasPrefix(filepath.Base(one), "isthmus-") {
		t.Errorf("for a user: %s", one)
	}
	if two := parse("/etc/two/isthmus.yaml", ""); two == one {
		t.Errorf("for two files: %s", one)
	}
	if again := parse("/etc/one/isthmus.yaml", "state: {dir: }\n"); again != one {
		t.Errorf("for the same: %s, then %s", one, again)
	}
	t.Setenv("XDG_STATE_HOME", filepath.Join(base, "xdg"))
	if dir := parse("a.yaml", ""); filepath.Dir(dir) != filepath.Join(base, "xdg", "isthmus") {
		t.Errorf("with XDG_STATE_HOME: %s", dir)
	}
	t.Setenv("STATE_DIRECTORY", filepath.Join(base, "unit")+":"+base)
	if dir := parse("a.yaml", ""); filepath.Dir(dir) != filepath.Join(base, "unit") {
		t.Errorf("with STATE_DIRECTORY: %s", dir)
	}
	if dir := parse("a.yaml", "state: {dir: /var/lib/mesh}\n"); dir != "/var/lib/mesh" {
		t.Errorf("named: %s", dir)
	}
	if dir := parse("a.yaml", "state: {dir: \"\"}\n"); dir != "" {
		t.Errorf("turned off: %s", dir)
	}
}
