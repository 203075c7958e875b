package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
)

// addressType is the type of all that ztunnel knows of services and workloads.
const addressType = "type.googleapis.com/istio.workload.Address"

// ztunnel is a client of istiod that asks for what ztunnel asks for.
type ztunnel struct {
	stream discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesClient
	has    map[string]*discovery.Resource
}

func newZtunnel(t *testing.T, istiod *testistiod.Server) *ztunnel {
	t.Helper()
	conn, err := grpc.NewClient(istiod.GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 2*testenv.Patience)
	t.Cleanup(cancel)
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&discovery.DeltaDiscoveryRequest{
		Node:                   &core.Node{Id: "ztunnel~10.0.0.9~ztunnel.istio-system~istio-system.svc.cluster.local"},
		TypeUrl:                addressType,
		ResourceNamesSubscribe: []string{"*"},
	}); err != nil {
		t.Fatal(err)
	}
	return &ztunnel{stream, map[string]*discovery.Resource{}}
}

// receive returns the next response, which it acknowledges.
func (z *ztunnel) receive(t *testing.T) *discovery.DeltaDiscoveryResponse {
	t.Helper()
	r, err := z.stream.Recv()
	if err == nil {
		err = z.stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: addressType, ResponseNonce: r.GetNonce()})
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.GetTypeUrl() != addressType {
		t.Fatalf("istiod answered with the type %s", r.GetTypeUrl())
	}
	for _, a := range r.GetResources() {
		z.has[a.GetName()] = a
	}
	for _, name := range r.GetRemovedResources() {
		delete(z.has, name)
	}
	return r
}

// services returns the names of those that the bridge has.
func (z *ztunnel) services() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(z.has)), func(name string) bool { return !strings.HasPrefix(name, "load/") })
}

// An istiod with ambient on does not give ztunnel the services of a config
// source. doctor, README.md and docs/istiod.md say so: if this test fails, as
// istiod has begun to, they are wrong.
func TestAmbient(t *testing.T) {
	testenv.SkipIfShort(t)
	bridge := testisthmus.Start(t, "- {name: load, type: sim, config: {services: 3, instances: 2}}\n")
	istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: meshOf(bridge), Env: []string{"PILOT_ENABLE_AMBIENT=true"}})
	istiod.WaitReady(t)
	if hosts := istiod.Hosts(t); len(hosts) != 3 {
		t.Fatalf("istiod has the hosts %q, want 3 of the bridge", hosts)
	}
	r := newZtunnel(t, istiod).receive(t)
	var names []string
	for _, a := range r.GetResources() {
		names = append(names, a.GetName())
	}
	slices.Sort(names)
	if len(names) > 0 {
		t.Errorf("istiod gives ztunnel %s: it now reads services of config sources", strings.Join(names, ", "))
	}
	found := bridge.Doctor(t, "--istiod", istiod.HTTP)
	checks(t, found, "ambient")
	says(t, found, "ambient", "ztunnel and waypoints do not see the services of a config source")
}

// With stubs in Kubernetes ztunnel has the services of the bridge, each with
// the address that sidecars have, and not one instance; a sidecar has what it
// had. A stub that is deleted takes its service away from ztunnel only.
func TestAmbientStubs(t *testing.T) {
	testenv.SkipIfShort(t)
	kube := testkube.Start(t, testkube.Config{Istio: true})
	kube.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: load}}")
	bridge := testisthmus.Start(t, "- {name: load, type: sim, config: {services: 3, instances: 2, changes_per_second: 0}}\n")
	istiod := testistiod.StartAs(t, testistiod.Options{
		Version: testistiod.Newest, Mesh: meshOf(bridge), Kubeconfig: kube.Kubeconfig, Env: []string{"PILOT_ENABLE_AMBIENT=true"},
	})
	istiod.WaitReady(t)
	// Kubernetes has a service of its own.
	ofBridge := func() []string {
		return slices.DeleteFunc(istiod.Hosts(t), func(host string) bool { return !strings.HasSuffix(host, ".load") })
	}
	hosts := ofBridge()
	if len(hosts) != 3 {
		t.Fatalf("istiod has the hosts %q, want 3 of the bridge", hosts)
	}
	z := newZtunnel(t, istiod)
	z.receive(t)
	if found := z.services(); len(found) > 0 {
		t.Fatalf("ztunnel has %q without stubs", found)
	}
	sidecar := testistiod.StartRecorder(t, istiod)
	sidecar.WaitSubscribed(t)
	names, endpoints := sidecar.Names(), istiod.EndpointShards(t)

	stubs := bridge.Configured(t, "dump", "--for", "kubernetes")
	kube.Apply(t, stubs)
	for len(z.services()) < len(hosts) {
		z.receive(t)
	}
	for _, host := range hosts {
		a, ok := z.has["load/"+host]
		if !ok || len(names[host]) == 0 {
			t.Fatalf("ztunnel has %q, and the sidecar %q for %s", z.services(), names[host], host)
		}
		for _, address := range names[host] {
			if ip := netip.MustParseAddr(address); !bytes.Contains(a.GetResource().GetValue(), ip.AsSlice()) {
				t.Errorf("ztunnel does not have the address %s of %s that sidecars have", ip, host)
			}
		}
	}
	// A push meanwhile names an address for the stub, too.
	if now := sidecar.Names(); !maps.EqualFunc(now, names, func(a, b []string) bool {
		return slices.Equal(slices.Compact(slices.Sorted(slices.Values(a))), slices.Compact(slices.Sorted(slices.Values(b))))
	}) {
		t.Errorf("with stubs the sidecar resolves %v, without %v", now, names)
	}
	if now := istiod.EndpointShards(t); !maps.EqualFunc(now, endpoints, slices.Equal) {
		t.Errorf("with stubs istiod has the endpoints %v, without %v", now, endpoints)
	}

	// With stubs doctor has nothing to say about ambient, but of those that do
	// not fit.
	checks(t, bridge.Doctor(t, "--istiod", istiod.HTTP))
	kube.Apply(t, strings.ReplaceAll(stubs, "number: ", "number: 1"))
	testenv.Eventually(t, testenv.Patience, "istiod to have other ports", func() (string, bool) {
		found := bridge.Doctor(t, "--istiod", istiod.HTTP)
		return fmt.Sprint(found), strings.Contains(found["istiod-stubs"], "3 of 3 stubs do not fit what it has of the bridge")
	})

	kube.Delete(t, stubs, "")
	for len(z.services()) > 0 {
		z.receive(t)
	}
	if now := ofBridge(); !slices.Equal(now, hosts) {
		t.Errorf("without stubs istiod has the hosts %q, want %q of the bridge", now, hosts)
	}
}

// A waypoint has the services of stubs that the bridge writes, with the
// instances that came by xDS: a changed instance is one push of endpoints and
// no write to Kubernetes, a bridge that is killed takes nothing away, and a
// stub that is deleted takes its service. doctor finds nothing wrong, and a
// stub that somebody has changed.
func TestWaypoint(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	for _, version := range testistiod.Versions() {
		if version.Name == testistiod.V121.Name {
			continue // reads all sources for ambient, and has it under another name
		}
		t.Run(version.Name, func(t *testing.T) { testWaypoint(t, version) })
	}
}

func testWaypoint(t *testing.T, version testistiod.Version) {
	kube := testkube.Start(t, testkube.Config{Istio: true})
	kube.ApplyKinds(t, testkube.GatewayCRDsTool)
	// The controllers that make Service and pods of a Gateway are away.
	kube.Apply(t, `
{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: GatewayClass, metadata: {name: istio-waypoint}, spec: {controllerName: istio.io/mesh-controller}}
---
{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {namespace: shop, name: waypoint}, spec: {gatewayClassName: istio-waypoint, listeners: [{name: mesh, port: 15008, protocol: HBONE}]}}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: waypoint, labels: {gateway.istio.io/managed: istio.io-mesh-controller, gateway.networking.k8s.io/gateway-name: waypoint}}
spec: {selector: {gateway.networking.k8s.io/gateway-name: waypoint}, ports: [{name: mesh, port: 15008, appProtocol: hbone}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: waypoint, labels: {kubernetes.io/service-name: waypoint}}
addressType: IPv4
ports: [{name: mesh, port: 15008}]
endpoints: [{addresses: [10.0.0.8], conditions: {ready: true}}]
`)
	kube.ApplyStatus(t, `
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {namespace: shop, name: waypoint}
status:
  addresses: [{type: Hostname, value: waypoint.shop.svc.cluster.local}]
  conditions: [{type: Programmed, status: "True", reason: Programmed, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}]
`)
	registries := func(web string) string {
		return fmt.Sprintf(`- {name: shop, type: static, translate: {namespace: shop, host: "{{.Name}}.example.org"}, config: {services: [
  {name: web, ports: [{name: http, number: 80}], endpoints: [%s]},
  {name: db, ports: [{name: tcp, number: 5432}], endpoints: [10.2.0.1]}]}}
consumers: {kubernetes: [{name: ambient, kubeconfig: %q}]}
`, web, kube.Kubeconfig)
	}
	bridge := testisthmus.Start(t, registries("10.1.0.1, 10.1.0.2"))
	istiod := testistiod.StartAs(t, testistiod.Options{Version: version, Mesh: meshOf(bridge), Kubeconfig: kube.Kubeconfig, Env: []string{"PILOT_ENABLE_AMBIENT=true"}})
	istiod.WaitReady(t)
	waypoint := testistiod.StartWaypoint(t, istiod, "shop", "waypoint")
	web, db := testistiod.InboundCluster("web.example.org", 80, "http"), testistiod.InboundCluster("db.example.org", 5432, "tcp")
	fence := func(name string) {
		t.Helper()
		kube.Apply(t, fmt.Sprintf(`
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {namespace: shop, name: %[1]s, labels: {istio.io/use-waypoint: waypoint}}
spec: {hosts: [%[1]s.example.org], addresses: [240.240.0.%[2]d], ports: [{name: http, number: 80, protocol: HTTP}], location: MESH_INTERNAL, resolution: STATIC, endpoints: [{address: 10.3.0.1}]}
`, name, len(name)))
		waypoint.WaitEndpoints(t, testistiod.InboundCluster(name+".example.org", 80, "http"), "10.3.0.1:80")
	}
	entries := 2 // the stubs
	if version.Name != testistiod.Newest.Name {
		// Older ones tell a waypoint of a stub with the next full push, as its
		// service is no new one.
		testenv.Eventually(t, testenv.Patience, "istiod to have the stubs", func() (string, bool) {
			all := istiod.Configz(t)
			_, ok := all["ServiceEntry shop/web.isthmus-stub"]
			return fmt.Sprint(slices.Sorted(maps.Keys(all))), ok
		})
		fence("first")
		entries++
	}
	waypoint.WaitEndpoints(t, web, "10.1.0.1:80", "10.1.0.2:80")
	waypoint.WaitEndpoints(t, db, "10.2.0.1:5432")
	checks(t, bridge.Doctor(t, "--istiod", istiod.HTTP))

	// One instance changes. The other service is a fence: what it brings comes
	// after what the first change brought.
	stubs := func() string {
		t.Helper()
		body, code, err := kube.Do(t.Context(), http.MethodGet, "/apis/networking.istio.io/v1/namespaces/shop/serviceentries", "", "", nil)
		if err != nil || code != http.StatusOK {
			t.Fatalf("status %d, %v: %s", code, err, body)
		}
		var list struct {
			Items []struct {
				Metadata struct {
					Name, UID  string
					Generation int
				}
			}
		}
		if err := json.Unmarshal(body, &list); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(list.Items)
	}
	before, mark := stubs(), len(waypoint.Pushes())
	_, writes := bridge.Get(t, "/metrics")
	bridge.Configure(t, registries("10.1.0.1, 10.1.0.3"))
	waypoint.WaitEndpoints(t, web, "10.1.0.1:80", "10.1.0.3:80")
	bridge.Configure(t, strings.Replace(registries("10.1.0.1, 10.1.0.3"), "10.2.0.1", "10.2.0.2", 1))
	waypoint.WaitEndpoints(t, db, "10.2.0.2:5432")
	var pushes []string
	for _, p := range waypoint.Pushes()[mark:] {
		pushes = append(pushes, p.Kind)
	}
	if !slices.Equal(pushes, []string{"eds", "eds"}) {
		t.Errorf("a changed instance, and a fence, are the pushes %v: %v", pushes, waypoint.Pushes()[mark:])
	}
	if now := stubs(); now != before {
		t.Errorf("a changed instance is a write: the stubs were %s and are %s", before, now)
	}
	const applied = `isthmus_consumer_writes_total{consumer="ambient",result="applied"} 2`
	if _, now := bridge.Get(t, "/metrics"); !strings.Contains(writes, applied) || !strings.Contains(now, applied) {
		t.Errorf("the bridge wrote something else than two stubs at the start: %s", now)
	}

	// With a namespace for its Lease, istiod writes status.
	kube.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: istio-system}}")
	testenv.Eventually(t, testenv.Patience, "istiod to say that each has its waypoint", func() (string, bool) {
		body, code, err := kube.Do(t.Context(), http.MethodGet, "/apis/networking.istio.io/v1/namespaces/shop/serviceentries", "", "", nil)
		return fmt.Sprintf("status %d, %v: %s", code, err, body), strings.Count(string(body), "Successfully attached to waypoint shop/waypoint") == entries
	})
	found := bridge.Doctor(t, "--istiod", istiod.HTTP)
	checks(t, found)
	if found["consumer-istiod"] != "" {
		t.Errorf("doctor does not see what istiod says: %s", found["consumer-istiod"])
	}

	// The bridge is gone. A service of Kubernetes is the fence.
	bridge.Kill9()
	fence("last")
	waypoint.WaitEndpoints(t, web, "10.1.0.1:80", "10.1.0.3:80")

	// Somebody deletes a stub.
	kube.Delete(t, "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {namespace: shop, name: db.isthmus-stub}}", "")
	waypoint.WaitNoCluster(t, db)
	waypoint.WaitEndpoints(t, web, "10.1.0.1:80", "10.1.0.3:80")
}
