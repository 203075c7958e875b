package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
)

// meshOf returns a mesh configuration without faults that follows Kubernetes
// and a bridge.
func meshOf(bridge *testisthmus.Server) string {
	return fmt.Sprintf("configSources: [{address: \"k8s://\"}, {address: %q}]\n", bridge.Source()) + captured
}

// captured turns on the capture of DNS in proxies.
const captured = "defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: \"true\"}}\n"

// checks compares the checks that found something with the wanted ones.
func checks(t *testing.T, found map[string]string, want ...string) {
	t.Helper()
	found = maps.Clone(found)
	maps.DeleteFunc(found, func(_, text string) bool { return strings.HasPrefix(text, "note: ") })
	if got := slices.Sorted(maps.Keys(found)); !slices.Equal(got, want) {
		t.Errorf("doctor found %q, want %q: %v", got, want, found)
	}
}

// says checks that a finding has a text.
func says(t *testing.T, found map[string]string, check, text string) {
	t.Helper()
	if !strings.Contains(found[check], text) {
		t.Errorf("doctor says %q of %s, want %q in it", found[check], check, text)
	}
}

// An istiod that is configured as `isthmus meshconfig` says has no finding, and
// each fault of one is found with the line to change.
func TestDoctorIstiod(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	registries := `- {name: load, type: sim, config: {services: 3, instances: 2}}` + "\n"

	t.Run("as printed", func(t *testing.T) {
		bridge := testisthmus.Start(t, registries)
		istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: meshOf(bridge)})
		istiod.WaitReady(t)
		for _, port := range []string{istiod.Monitoring, istiod.HTTP} {
			checks(t, bridge.Doctor(t, "--istiod", port, "--address", bridge.Admin))
		}
		istiod.Pause()
		defer istiod.Continue()
		bridge.Configure(t, registries+`- {name: more, type: sim, config: {services: 1}}`)
		bridge.WaitSink(t, "ServiceEntry", "sent")
		found := bridge.Doctor(t, "--address", bridge.Admin)
		checks(t, found, "sink-ack")
		says(t, found, "sink-ack", "it has not acknowledged networking.istio.io/v1/ServiceEntry within 5s")
	})

	t.Run("a protected sweep", func(t *testing.T) {
		services := func(n int) string {
			text := "- {name: a, type: static, config: {services: ["
			for i := range n {
				text += fmt.Sprintf("{name: s%d, ports: [{number: 80}], endpoints: [10.0.0.1]}, ", i)
			}
			return text + "]}}\n"
		}
		bridge := testisthmus.Start(t, services(12))
		istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: meshOf(bridge)})
		istiod.WaitReady(t)
		bridge.Configure(t, services(2))
		bridge.WaitPhase(t, "a", "removal-paused")
		testenv.Eventually(t, testenv.Patience, "the condition", func() (string, bool) {
			_, body := bridge.Get(t, "/api/v1/conditions")
			return body, strings.Contains(body, "removal-paused")
		})
		found := bridge.Doctor(t, "--address", bridge.Admin)
		checks(t, found, "removal-paused")
		says(t, found, "removal-paused", "10 of 12 services")
		says(t, found, "removal-paused", "isthmus removals allow a")
	})

	t.Run("rejected", func(t *testing.T) {
		dir := t.TempDir()
		virtualService := func(name string, weight int) string {
			return fmt.Sprintf(`
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: %s, namespace: files}
spec: {hosts: [a.example.org], http: [{route: [{destination: {host: a.example.org}, weight: %d}]}]}
`, name, weight)
		}
		write(t, filepath.Join(dir, "good.yaml"), virtualService("good", 1))
		write(t, filepath.Join(dir, "bad.yaml"), virtualService("bad", -1))
		bridge := testisthmus.Start(t, fmt.Sprintf("- {name: files, type: file, config: {path: %q}, owns: {collections: [networking.istio.io/*]}}\n", dir))
		istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: meshOf(bridge)})
		istiod.WaitReady(t)
		found := bridge.Doctor(t, "--istiod", istiod.HTTP, "--address", bridge.Admin)
		checks(t, found, "istiod-rejected")
		says(t, found, "istiod-rejected", "it does not have 1 resource of registry files that it was sent: its validation rejects that, which it acknowledges all the same: VirtualService files/bad")

		// An update that is rejected leaves the version before.
		const path = "/api/v1/resources?q=files/good"
		_, before := bridge.Get(t, path)
		write(t, filepath.Join(dir, "good.yaml"), virtualService("good", -1))
		if err := os.Remove(filepath.Join(dir, "bad.yaml")); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, testenv.Patience, "both changes", func() (string, bool) {
			_, now := bridge.Get(t, path)
			_, bad := bridge.Get(t, "/api/v1/resources?q=files/bad")
			return now + bad, now != before && strings.Contains(bad, `"total": 0`)
		})
		found = bridge.Doctor(t, "--istiod", istiod.HTTP, "--address", bridge.Admin)
		checks(t, found, "istiod-rejected")
		says(t, found, "istiod-rejected", "it has 1 resource of registry files in an old version, and not as last sent: its validation rejects that, which it acknowledges all the same: VirtualService files/good")
	})

	// What changes all the time is not taken for rejected.
	t.Run("busy", func(t *testing.T) {
		bridge := testisthmus.Start(t, "- {name: load, type: sim, config: {services: 50, changes_per_second: 200}}\n")
		istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: meshOf(bridge)})
		istiod.WaitReady(t)
		for range 3 {
			checks(t, bridge.Doctor(t, "--istiod", istiod.HTTP, "--address", bridge.Admin))
		}
	})

	// MUTUAL is not an error to istiod: it dials this bridge in plaintext.
	t.Run("no Kubernetes, MUTUAL, no DNS", func(t *testing.T) {
		bridge := testisthmus.Start(t, registries)
		istiod := testistiod.StartWith(t, testistiod.Newest, bridge.Source(), "tlsSettings: {mode: MUTUAL}")
		istiod.WaitReady(t)
		found := bridge.Doctor(t, "--istiod", istiod.HTTP, "--address", bridge.Admin)
		checks(t, found, "mesh-dns-capture", "mesh-k8s", "mesh-tls-mode")
		says(t, found, "mesh-k8s", "- address: k8s://")
		says(t, found, "mesh-tls-mode", "istiod dials "+bridge.Source()+" in plaintext silently; change: mode: SIMPLE")
	})

	t.Run("hosts without addresses", func(t *testing.T) {
		bridge := testisthmus.Start(t, `- {name: a, type: static, config: {services: [
  {name: one, ports: [{number: 9000, protocol: tcp}], endpoints: [10.0.0.1]},
  {name: two, ports: [{number: 9000, protocol: tcp}], endpoints: [10.0.0.2]}]}}
profile: tools
`)
		istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: meshOf(bridge)})
		istiod.WaitReady(t)
		found := bridge.Doctor(t, "--istiod", istiod.HTTP)
		checks(t, found, "istiod-addresses")
		says(t, found, "istiod-addresses", "2 hosts without an address speak raw TCP on port 9000")
	})

	// What the mesh configuration of an istiod that cannot start says.
	t.Run("TLS", func(t *testing.T) {
		authority, other := testcert.New(t, "isthmus.example.org"), testcert.New(t, "isthmus.example.org")
		bridge := testisthmus.StartSecure(t, registries, fmt.Sprintf("tls: {cert_file: %q, key_file: %q}", authority.Cert, authority.Key))
		pem, err := os.ReadFile(other.Cert)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(string(pem))
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct{ settings, check string }{
			{"{mode: MUTUAL}", "mesh-tls-mode"},
			{"{mode: DISABLE}", "mesh-tls-missing"},
			{"{mode: SIMPLE, sni: isthmus.example.org, caCertificates: /etc/ca.pem}", "mesh-tls-ca"},
			{fmt.Sprintf("{mode: SIMPLE, sni: isthmus.example.org, caCertificates: %s}", text), "mesh-tls-authority"},
			{"{mode: SIMPLE, sni: other.example.org}", "mesh-tls-name"},
		} {
			mesh := filepath.Join(t.TempDir(), "mesh.yaml")
			write(t, mesh, fmt.Sprintf("configSources:\n- address: k8s://\n- address: %s\n  tlsSettings: %s\n%s", bridge.Source(), tt.settings, captured))
			found := bridge.Doctor(t, "--mesh-config", mesh)
			checks(t, found, tt.check)
			says(t, found, tt.check, mesh+":4:")
		}
		// And the block that the program prints makes istiod follow the bridge.
		istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: bridge.Configured(t, "meshconfig")})
		istiod.WaitReady(t)
		checks(t, bridge.Doctor(t, "--istiod", istiod.HTTP, "--address", bridge.Admin))
	})
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// What keeps a registry from being followed is found by its own plugin, with
// the field that decides.
func TestDoctorRegistries(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcert.New(t, "127.0.0.1")
	locked := testconsul.Start(t, testconsul.Config{ACL: true})
	open := testconsul.Start(t, testconsul.Config{CertFile: server.Cert, KeyFile: server.Key})
	open.Register(t, web(1))
	locked.Register(t, web(2))
	maintained := testconsul.Start(t, testconsul.Config{})
	agent := maintained.Client.Agent()
	guessed := testconsul.Start(t, testconsul.Config{})
	if err := guessed.Client.Agent().ServiceRegister(&api.AgentServiceRegistration{ID: "api-1", Name: "api", Port: 80, Address: "10.0.0.1"}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		agent.ServiceRegister(&api.AgentServiceRegistration{ID: "web-1", Name: "web", Port: 80, Address: "10.0.0.1"}),
		agent.EnableServiceMaintenance("web-1", "moved"),
	); err != nil {
		t.Fatal(err)
	}
	dead := testenv.NewGate(t, open.Addr) // nothing listens until it is opened
	dir := t.TempDir()
	token := filepath.Join(dir, "token")
	write(t, token, "00000000-0000-0000-0000-000000000000\n")
	for _, tt := range []struct{ name, registries, check, says string }{
		{"right", consulBlock("dc1", open.Addr, ""), "", ""},
		{"dead", consulBlock("dc1", dead.Addr, ""), "registry-reach", "isthmus.yaml:"},
		{"dead", consulBlock("dc1", dead.Addr, ""), "registry-reach", "change: registries[0].config.address"},
		{
			"wrong token", fmt.Sprintf("- {name: dc1, type: consul, config: {address: \"http://%s\", token_file: %q}}\n", locked.Addr, token),
			"registry-token", "change: registries[0].config.token_file",
		},
		{"maintenance", consulBlock("dc1", maintained.Addr, ""), "registry-left-out", "web-1: is disabled in the registry"},
		{"a protocol guessed wrongly", consulBlock("dc1", guessed.Addr, ""), "registry-protocol", "api.service.consul: protocol of port tcp: TCP, as nothing says it: neither the port"},
		{"TLS", fmt.Sprintf("- {name: dc1, type: consul, config: {address: \"https://%s\"}}\n", open.Addr), "registry-tls", "config.tls"},
		{"a host owned twice", consulBlock("dc1", open.Addr, "") + consulBlock("dc2", open.Addr, ""), "conflict", `web.service.consul is served from dc1, and that of dc2 is shadowed`},
		{
			"a host shared on purpose", consulBlock("dc1", open.Addr, "") + consulBlock("dc2", open.Addr, "") + "conflicts: [{hosts: [\"*.service.consul\"], policy: merge}]\n",
			"", "",
		},
		{"near a limit", consulBlock("dc1", open.Addr, "") + "limits: {services_per_registry: 1}\n", "registry-limit", "change: limits.services_per_registry: 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			found := testisthmus.DoctorOf(t, tt.registries)
			if tt.check == "" {
				checks(t, found)
				return
			}
			if tt.check != "registry-left-out" && tt.check != "registry-protocol" { // notes
				checks(t, found, tt.check)
			}
			says(t, found, tt.check, tt.says)
		})
	}
}

// What keeps a consumer from writing stubs, and calls from reaching a waypoint,
// is found on a real API server with the cure: kinds, rights, waypoints, and
// stubs that are not as what is served.
func TestDoctorConsumer(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	kube := testkube.Start(t, testkube.Config{Istio: true})
	kube.ApplyKinds(t, testkube.GatewayCRDsTool)
	token := kube.ServiceAccount(t, "isthmus", "isthmus")
	kube.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: load}}")
	const grants = `
{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {namespace: load, name: isthmus}, rules: [{apiGroups: [networking.istio.io], resources: [serviceentries], verbs: [get, list, patch, create, delete]}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {namespace: load, name: isthmus}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: isthmus}, subjects: [{kind: ServiceAccount, namespace: isthmus, name: isthmus}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {namespace: isthmus, name: isthmus}, rules: [{apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, create, update]}]}
---
{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {namespace: isthmus, name: isthmus}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: isthmus}, subjects: [{kind: ServiceAccount, namespace: isthmus, name: isthmus}]}
`
	const gateway = `{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {namespace: load, name: waypoint}, `
	waypoint := func(class string) {
		t.Helper()
		kube.Apply(t, gateway+"spec: {gatewayClassName: "+class+", listeners: [{name: mesh, port: 15008, protocol: HBONE}]}}")
	}
	programmed := func(status string) {
		t.Helper()
		kube.ApplyStatus(t, gateway+"status: {conditions: [{type: Programmed, status: \""+status+"\", reason: test, message: no pod is ready yet, lastTransitionTime: \"2026-01-01T00:00:00Z\"}]}}")
	}
	bridge := testisthmus.Start(t, fmt.Sprintf(`- {name: load, type: sim, config: {services: 3, instances: 2, changes_per_second: 0}}
consumers: {kubernetes: [{name: ambient, kubeconfig: %q, lease_namespace: isthmus, view: {namespaces: [load]}}]}
`, kube.KubeconfigOf(t, map[string]any{"token": token})))
	found := func(check string, texts ...string) {
		t.Helper()
		all := bridge.Doctor(t, "--kubeconfig", kube.Kubeconfig)
		// The running bridge reports the same, a moment later.
		delete(all, "objects-not-written")
		var want []string
		if check != "" {
			want = []string{check}
		}
		checks(t, all, want...)
		for _, text := range texts {
			says(t, all, check, text)
		}
	}

	found("consumer-rights", "it may not get serviceentries in load, list serviceentries in load", "create leases in isthmus", "docs/ambient.md#rights")
	kube.Apply(t, grants)
	testenv.Eventually(t, testenv.Patience, "the stubs", func() (string, bool) {
		_, body := bridge.Get(t, "/api/v1/consumers")
		return body, strings.Contains(body, `"written": 3`)
	})
	found("consumer-waypoint", "the waypoint load/waypoint is not there", "istioctl waypoint apply --namespace load --name waypoint")
	waypoint("istio")
	found("consumer-waypoint", "is a Gateway of class istio and no waypoint")
	waypoint("istio-waypoint")
	programmed("False")
	found("consumer-waypoint", "is not ready: no pod is ready yet")
	programmed("True")
	found("consumer-waypoint", "has no pod that is ready")
	kube.Apply(t, "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {namespace: load, name: waypoint, labels: {kubernetes.io/service-name: waypoint}}, addressType: IPv4, ports: [{port: 15008}], endpoints: [{addresses: [10.0.0.9], conditions: {ready: true}}]}")
	found("")

	// The bridge itself may read no Gateway, and says so.
	all := bridge.Doctor(t)
	checks(t, all)
	says(t, all, "consumer-waypoint", "the bridge may not read Gateways")

	// Somebody changes a stub.
	body, code, err := kube.Do(t.Context(), http.MethodGet, "/apis/networking.istio.io/v1/namespaces/load/serviceentries", "", "", nil)
	var list struct {
		Items []struct{ Metadata struct{ Name string } }
	}
	if err == nil {
		err = json.Unmarshal(body, &list)
	}
	if err != nil || code != http.StatusOK || len(list.Items) != 3 {
		t.Fatalf("status %d, %v: %s", code, err, body)
	}
	name := list.Items[0].Metadata.Name
	kube.Apply(t, "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {namespace: load, name: "+name+"}, spec: {addresses: [10.9.9.9]}}")
	found("consumer-stubs", "1 of 3 stubs are not as what is served by xDS", "load/"+name+" has the addresses [10.9.9.9], and what is served by xDS [2")

	// A cluster without Istio.
	kube.Delete(t, "{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: serviceentries.networking.istio.io}}", "")
	testenv.Eventually(t, testenv.Patience, "the kind to go", func() (string, bool) {
		body, code, err := kube.Do(t.Context(), http.MethodGet, "/apis/networking.istio.io/v1/namespaces/load/serviceentries", "", "", nil)
		return fmt.Sprintf("status %d, %v: %.200s", code, err, body), code == http.StatusNotFound
	})
	found("consumer-crds", "the API server has no ServiceEntry of networking.istio.io/v1", "install Istio there")
	kube.Kill()
	found("consumer-unreached", "the API server cannot be asked")
}
