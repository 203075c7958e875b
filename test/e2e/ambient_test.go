package e2e

import (
	"bytes"
	"context"
	"maps"
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

	stubs := bridge.Stubs(t)
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
	if now := sidecar.Names(); !maps.EqualFunc(now, names, slices.Equal) {
		t.Errorf("with stubs the sidecar resolves %v, without %v", now, names)
	}
	if now := istiod.EndpointShards(t); !maps.EqualFunc(now, endpoints, slices.Equal) {
		t.Errorf("with stubs istiod has the endpoints %v, without %v", now, endpoints)
	}

	kube.Delete(t, stubs, "")
	for len(z.services()) > 0 {
		z.receive(t)
	}
	if now := ofBridge(); !slices.Equal(now, hosts) {
		t.Errorf("without stubs istiod has the hosts %q, want %q of the bridge", now, hosts)
	}
}
