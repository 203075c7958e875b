package testisthmus

import (
	"cmp"
	"context"
	"slices"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Arrivals returns when each changed instance arrives at a client that asks for
// updates. The client has everything, that many instances, when it returns.
func (i *Server) Arrivals(t testing.TB, instances int) <-chan time.Time {
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
	testwait.Receive(t, testenv.Patience, "everything at the sink", first)
	return arrived
}

// MeasureChanges makes one change after the other, numbered from 1, and
// measures until each arrives at a bare subscriber of the registry and at a
// sink of Isthmus, which send a time for each change. It reports medians and
// the 99th percentile of what Isthmus adds, beside by how much a second bare
// subscriber is later than the first, which says what of it is the machine's.
func MeasureChanges(b *testing.B, change func(n int), bare, second, sink <-chan time.Time) {
	b.Helper()
	var toBare, toSink, added, apart []time.Duration
	for n := 1; b.Loop(); n++ {
		at := time.Now()
		change(n)
		x, y := testwait.Receive(b, testenv.Patience, "the change at a bare subscriber", bare), testwait.Receive(b, testenv.Patience, "the change at the sink", sink)
		z := testwait.Receive(b, testenv.Patience, "the change at a second subscriber", second)
		toBare, toSink = append(toBare, x.Sub(at)), append(toSink, y.Sub(at))
		added, apart = append(added, y.Sub(x)), append(apart, z.Sub(x))
	}
	ms := func(all []time.Duration, q float64) float64 {
		slices.SortFunc(all, cmp.Compare)
		return float64(all[min(int(q*float64(len(all))), len(all)-1)].Microseconds()) / 1000
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(toBare, 0.5), "ms-bare-p50")
	b.ReportMetric(ms(toSink, 0.5), "ms-isthmus-p50")
	b.ReportMetric(ms(added, 0.5), "ms-added-p50")
	b.ReportMetric(ms(added, 0.99), "ms-added-p99")
	b.ReportMetric(ms(apart, 0.99), "ms-second-bare-p99")
}
