package testenv

import (
	"context"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Arrivals returns when each changed instance arrives at a client that asks for
// updates. The client has everything, that many instances, when it returns.
func (i *Isthmus) Arrivals(t testing.TB, instances int) <-chan time.Time {
	t.Helper()
	cc, err := grpc.NewClient("passthrough:///"+i.XDS, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	arrived, done := make(chan time.Time, 16), make(chan struct{})
	t.Cleanup(func() {
		cancel()
		<-done
		cc.Close()
	})
	const kind = "networking.istio.io/v1/WorkloadEntry"
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(cc).DeltaAggregatedResources(ctx)
	if err == nil {
		err = stream.Send(&discovery.DeltaDiscoveryRequest{Node: &core.Node{Id: "bench"}, TypeUrl: kind})
	}
	if err != nil {
		t.Fatal(err)
	}
	first := make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ; {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			now := time.Now()
			if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: kind, ResponseNonce: r.GetNonce()}); err != nil {
				return
			}
			if n < instances {
				if n += len(r.GetResources()); n >= instances {
					close(first)
				}
				continue
			}
			for range r.GetResources() {
				select {
				case arrived <- now:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	testwait.Receive(t, Patience, "everything at the sink", first)
	return arrived
}
