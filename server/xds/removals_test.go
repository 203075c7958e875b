package xds

import (
	"fmt"
	"strings"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	networking "istio.io/api/networking/v1alpha3"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// Removals alone can be more than a gRPC client receives by default. They come
// in several responses then, whether the sink holds the resources from this
// stream or from another, or only asks for names that there are not.
func TestRemovalsAreReceived(t *testing.T) {
	names := make([]string, 100_000)
	for i := range names {
		names[i] = fmt.Sprintf("consul/service-with-a-long-name-%08d", i)
	}
	url := workloadsV1
	for _, tt := range []struct {
		name  string
		first func(w *servertest.World) *discovery.DeltaDiscoveryRequest
		then  func(w *servertest.World)
	}{
		{
			name: "removed at once",
			first: func(w *servertest.World) *discovery.DeltaDiscoveryRequest {
				upserts := make([]*pluginv1.Upsert, len(names))
				for i, name := range names {
					upserts[i] = w.Upsert("", name, &networking.WorkloadEntry{Address: "10.0.0.1"})
				}
				w.Apply(upserts...)
				return &discovery.DeltaDiscoveryRequest{TypeUrl: url}
			},
			then: func(w *servertest.World) {
				m := &pluginv1.WatchResponse{}
				for _, name := range names {
					m.Removals = append(m.Removals, &pluginv1.Removal{Collection: workloads, Name: name})
				}
				w.DB.Registry("dc1").Apply(m)
			},
		},
		{
			name: "held by a sink that reconnects",
			first: func(*servertest.World) *discovery.DeltaDiscoveryRequest {
				versions := make(map[string]string, len(names))
				for _, name := range names {
					versions[name] = "0123456789abcdef"
				}
				return &discovery.DeltaDiscoveryRequest{TypeUrl: url, InitialResourceVersions: versions}
			},
		},
		{
			name: "asked for by name",
			first: func(*servertest.World) *discovery.DeltaDiscoveryRequest {
				return &discovery.DeltaDiscoveryRequest{TypeUrl: url, ResourceNamesSubscribe: names}
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *servertest.World, _ *Server, client discovery.AggregatedDiscoveryServiceClient) {
				stream, err := client.DeltaAggregatedResources(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.Send(tt.first(w)); err != nil {
					t.Fatal(err)
				}
				held := len(names)
				if tt.then != nil {
					held = 0
				}
				removed, responses := map[string]bool{}, 0
				for len(removed) < len(names) {
					r, err := stream.Recv()
					if err != nil {
						t.Fatalf("after %d of %d removals in %d responses: %v", len(removed), len(names), responses, err)
					}
					held += len(r.GetResources())
					if tt.then != nil && held == len(names) {
						tt.then(w)
						tt.then = nil
					}
					for _, name := range r.GetRemovedResources() {
						if removed[name] || !strings.HasPrefix(name, "consul/service-") {
							t.Fatalf("%s is removed twice, or never was", name)
						}
						removed[name] = true
					}
					responses++
					if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: url, ResponseNonce: r.GetNonce()}); err != nil {
						t.Fatal(err)
					}
				}
			}, grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(view.MaxMessage)))
		})
	}
}
