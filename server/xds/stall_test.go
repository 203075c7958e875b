package xds

import (
	"fmt"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// Sinks that read nothing for ten minutes of changes, state of the world and
// delta, cost a bounded number of bytes, whatever changes meanwhile, and no
// other sink a change.
func TestStalledSinks(t *testing.T) {
	const (
		services = 300
		stalled  = 10 // of each variant
		minutes  = 10
	)
	bubble(t, func(t *testing.T, w *servertest.World, s *Server, client discovery.AggregatedDiscoveryServiceClient) {
		defer w.Follow()()
		fill(w, services)
		for range stalled {
			openSotW(t, client, entriesV1)
			stream, err := client.DeltaAggregatedResources(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsV1}); err != nil {
				t.Fatal(err)
			}
		}
		good, err := client.DeltaAggregatedResources(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := good.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsV1}); err != nil {
			t.Fatal(err)
		}
		for got := 0; got < services*10; {
			r, err := nextDelta(good)
			if err != nil {
				t.Fatal(err)
			}
			got += len(r.GetResources())
		}
		time.Sleep(time.Minute)
		before := liveHeap()
		for second := range minutes * 60 {
			// Each instance changes twice, so that a queue would grow.
			for i := range 10 {
				n := (second*10 + i) % (services * 10)
				name := fmt.Sprintf("ns/s%d", n/10)
				w.Instance(name, fmt.Sprintf("%s-%d", name, n%10), fmt.Sprintf("10.%d.%d.%d", n/2000, n/10%200, n%10+1), uint32(2+second))
				r, err := nextDelta(good)
				if err != nil {
					t.Fatal(err)
				}
				if len(r.GetResources()) != 1 {
					t.Fatalf("second %d: %d resources for one change", second, len(r.GetResources()))
				}
			}
			time.Sleep(time.Second)
		}
		if grown := liveHeap() - before; grown > 4<<20 {
			t.Errorf("%d bytes more live after %d minutes, of at most 4 MiB", grown, minutes)
		}
		sent := 0
		for _, st := range s.Status() {
			for _, sub := range st.Subscriptions {
				if sub.State == view.Sent.String() {
					sent++
				}
			}
		}
		if sent != 2*stalled {
			t.Errorf("%d subscriptions wait for their ACK, want %d", sent, 2*stalled)
		}
	})
}
