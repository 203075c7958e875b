package simulation

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

// feed is a plugin that sends what next returns; nil ends the stream.
type feed struct {
	pluginv1.AdapterServiceClient
	grpc.ClientStream
	ctx  context.Context
	next func(ctx context.Context) *pluginv1.WatchResponse
}

func (f *feed) Describe(context.Context, *pluginv1.DescribeRequest, ...grpc.CallOption) (*pluginv1.DescribeResponse, error) {
	return &pluginv1.DescribeResponse{Name: "feed", Version: "1", ConfigSchema: []byte("{}"), Collections: []string{serviceEntry, workloadEntry}}, nil
}

func (f *feed) Configure(context.Context, *pluginv1.ConfigureRequest, ...grpc.CallOption) (*pluginv1.ConfigureResponse, error) {
	return &pluginv1.ConfigureResponse{}, nil
}

func (f *feed) Watch(ctx context.Context, _ *pluginv1.WatchRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[pluginv1.WatchResponse], error) {
	f.ctx = ctx
	return f, nil
}

func (f *feed) Recv() (*pluginv1.WatchResponse, error) {
	if m := f.next(f.ctx); m != nil {
		return m, nil
	}
	return nil, context.Canceled
}

// BenchmarkBesideBusyRegistry is how long a change of one registry takes to one
// of 20 sinks while another registry changes 5,000 instances without end: with
// a pace of that registry, and without. An iteration is 200 changes each, of
// which the 99th percentile is reported, in turns.
func BenchmarkBesideBusyRegistry(b *testing.B) {
	phases := []struct {
		name string
		busy bool
		pace int
	}{{"quiet", false, 0}, {"without", true, -1}, {"pace", true, 0}}
	all := make([][]time.Duration, len(phases))
	for b.Loop() {
		for i, p := range phases {
			all[i] = append(all[i], beside(b, p.busy, p.pace)...)
		}
	}
	for i, p := range phases {
		slices.Sort(all[i])
		b.ReportMetric(float64(all[i][len(all[i])*99/100].Microseconds())/1000, p.name+"-p99-ms")
		b.ReportMetric(float64(all[i][len(all[i])/2].Microseconds())/1000, p.name+"-p50-ms")
	}
}

func beside(b *testing.B, busy bool, pace int) (took []time.Duration) {
	ctx, cancel := context.WithCancel(b.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	log := slog.New(slog.DiscardHandler)
	db := state.New([]string{"busy", "calm"}, state.Options{}, log, prometheus.NewRegistry())
	v := view.New(db)
	x, err := xds.New(v, xds.Config{}, log, prometheus.NewRegistry())
	if err != nil {
		b.Fatal(err)
	}
	server := grpc.NewServer(xds.ServerOptions()...)
	x.Register(server)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	group.Go(func() { _ = server.Serve(l) })
	defer server.Stop()
	group.Go(func() { v.Run(ctx) })
	host, err := supervisor.NewHost("", log)
	if err != nil {
		b.Fatal(err)
	}
	defer host.Close()

	const services, each = 50, 100
	turn := 0
	flood := &feed{next: func(ctx context.Context) *pluginv1.WatchResponse {
		if ctx.Err() != nil || turn > 5 && !busy {
			<-ctx.Done()
			return nil
		}
		m := &pluginv1.WatchResponse{Synced: turn == 4}
		for s := turn % 5 * 10; s < turn%5*10+10; s++ {
			name := fmt.Sprintf("busy/s%d", s)
			if turn < 5 {
				m.Upserts = append(m.Upserts, entry(name, spec{host: fmt.Sprintf("s%d.example.org", s)}))
			}
			for i := range each {
				m.Upserts = append(m.Upserts, member(name, fmt.Sprintf("%s-%d", name, i), endpoint{address: fmt.Sprintf("10.%d.%d.%d", turn/5%200, s, i)}))
			}
		}
		turn++
		return m
	}}
	changes := make(chan *pluginv1.WatchResponse)
	calm := &feed{next: func(ctx context.Context) *pluginv1.WatchResponse {
		select {
		case m := <-changes:
			return m
		case <-ctx.Done():
			return nil
		}
	}}
	for name, f := range map[string]*feed{"busy": flood, "calm": calm} {
		s, err := supervisor.New(host, supervisor.Spec{
			Registry: name, Resources: 1_000_000, Pace: pace, Open: func(context.Context) (pluginv1.AdapterServiceClient, error) { return f, nil },
		}, registrySink{db.Registry(name)}, log, nil)
		if err != nil {
			b.Fatal(err)
		}
		group.Go(func() { _ = s.Run(ctx) })
	}
	changes <- &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{entry("calm/web", spec{host: "web.example.org"})}, Synced: true}

	arrived := make(chan string, 1000)
	shape, err := structpb.NewStruct(map[string]any{"ISTHMUS_SHAPE": "workload"})
	if err != nil {
		b.Fatal(err)
	}
	for n := range 20 {
		conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
		if err != nil {
			b.Fatal(err)
		}
		defer conn.Close()
		stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
		if err != nil {
			b.Fatal(err)
		}
		const url = "networking.istio.io/v1/WorkloadEntry"
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{Node: &core.Node{Id: fmt.Sprint(n), Metadata: shape}, TypeUrl: url}); err != nil {
			b.Fatal(err)
		}
		group.Go(func() {
			for {
				m, err := stream.Recv()
				if err != nil {
					return
				}
				if n == 0 {
					for _, r := range m.GetResources() {
						if len(r.GetName()) > 5 && r.GetName()[:5] == "calm/" {
							arrived <- r.GetName()
						}
					}
				}
				if stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: url, ResponseNonce: m.GetNonce()}) != nil {
					return
				}
			}
		})
	}
	for n := range 201 {
		name := fmt.Sprintf("calm/web-%d", n)
		began := time.Now()
		changes <- &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{member("calm/web", name, endpoint{address: "10.9.9.9"})}}
		for got := range arrived {
			if got == name {
				break
			}
		}
		if n > 0 { // with the first one comes everything
			took = append(took, time.Since(began))
		}
	}
	return took
}
