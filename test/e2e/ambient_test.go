package e2e

import (
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
)

// addressType is the type of all that ztunnel knows of services and workloads.
const addressType = "type.googleapis.com/istio.workload.Address"

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
	conn, err := grpc.NewClient(istiod.GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(t.Context())
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
	r, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if r.GetTypeUrl() != addressType {
		t.Fatalf("istiod answered with the type %s", r.GetTypeUrl())
	}
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
