package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpoint "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// BenchmarkIstiodShards measures what one changed endpoint of 100,000 costs an
// istiod that follows a bridge by one config source, and by several that share
// the services: its processor time, that of a bridge, and the time until a
// proxy has the endpoint. One iteration is one change, and waits until istiod
// is at rest again.
//
//	make bench-shards
func BenchmarkIstiodShards(b *testing.B) {
	for _, shards := range []int{1, 2, 4, 8, 16} {
		b.Run(fmt.Sprintf("shards=%d", shards), func(b *testing.B) { benchmarkIstiodShards(b, shards) })
	}
}

func benchmarkIstiodShards(b *testing.B, shards int) {
	const services, each, quiet = 10_000, 10, 3 * time.Second
	pipe, path := namedPipe(b)
	var views, sources []string
	for n := range shards {
		views = append(views, fmt.Sprintf("{shard: %d/%d}", n, shards))
	}
	bridge := testisthmus.StartWithViews(b, fmt.Sprintf(`- {name: exec, type: exec, config: {command: [cat, %q]}}`, path), views...)
	for _, address := range bridge.Views {
		sources = append(sources, "xds://"+address)
	}
	write := func(service, weight int) {
		instances := make([]map[string]any, each)
		for i := range instances {
			instances[i] = map[string]any{
				"id": fmt.Sprint(i), "address": fmt.Sprintf("10.%d.%d.%d", i, service/250, service%250),
				"port": 8080, "meta": map[string]string{"protocol": "http"},
			}
		}
		instances[0]["weight"] = weight
		text, err := json.Marshal(map[string]any{"service": map[string]any{"name": fmt.Sprintf("svc-%d", service), "instances": instances}})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := pipe.Write(append(text, '\n')); err != nil {
			b.Fatal(err)
		}
	}
	for s := range services {
		write(s, 1)
	}
	if _, err := pipe.WriteString("{\"synced\":true}\n"); err != nil {
		b.Fatal(err)
	}
	bridge.WaitReady(b)
	istiod := testistiod.Start(b, testistiod.Newest, sources...)
	istiod.WaitReady(b)

	// The services that change are in different shards.
	const changing = 40
	var clusters []string
	for s := range changing {
		clusters = append(clusters, testistiod.OutboundCluster(fmt.Sprintf("svc-%d.exec", s), 8080))
	}
	arrivals := weights(b, istiod.GRPC, clusters)

	rest := func() {
		for used := istiod.CPU(); ; {
			pause(b, quiet)
			now := istiod.CPU()
			if now-used < quiet/20 {
				return
			}
			used = now
		}
	}
	rest()
	idle := istiod.CPU()
	pause(b, 4*quiet)
	idle = (istiod.CPU() - idle) / 4 // in the time that a change is given

	var took, spent []time.Duration
	bridged := bridge.CPU()
	change := 0
	for b.Loop() {
		change++
		s := change % changing
		used, at := istiod.CPU(), time.Now()
		write(s, change+1)
		for {
			a := testwait.Receive(b, testenv.Patience, "the changed endpoint at the proxy", arrivals)
			if a.cluster == clusters[s] && a.weight == change+1 {
				took = append(took, a.at.Sub(at))
				break
			}
		}
		pause(b, time.Until(at.Add(quiet)))
		spent = append(spent, istiod.CPU()-used)
	}
	ms := func(all []time.Duration, q float64) float64 {
		slices.SortFunc(all, cmp.Compare)
		return float64(all[min(int(q*float64(len(all))), len(all)-1)].Microseconds()) / 1000
	}
	b.ReportMetric(0, "ns/op")
	// Of one change in some, istiod collects its garbage besides.
	b.ReportMetric(ms(spent, 0.5), "ms-istiod-cpu")
	b.ReportMetric(float64((bridge.CPU()-bridged).Milliseconds())/float64(change), "ms-bridge-cpu")
	b.ReportMetric(ms(took, 0.5), "ms-to-eds-p50")
	b.ReportMetric(ms(took, 0.99), "ms-to-eds-p99")
	b.ReportMetric(float64(idle.Milliseconds()), "ms-istiod-idle")
}

func pause(b *testing.B, d time.Duration) {
	b.Helper()
	select {
	case <-time.After(d):
	case <-b.Context().Done():
		b.Fatal(b.Context().Err())
	}
}

// weightArrival is a weight that a proxy has received.
type weightArrival struct {
	cluster string
	weight  int
	at      time.Time
}

// weights returns the weights of the first endpoints of clusters as a proxy
// receives them from an istiod. It returns when the proxy has all clusters.
func weights(b *testing.B, address string, clusters []string) <-chan weightArrival {
	b.Helper()
	const eds = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	arrived, done := make(chan weightArrival, 4096), make(chan struct{})
	b.Cleanup(func() {
		cancel()
		<-done
		conn.Close()
	})
	metadata, err := structpb.NewStruct(map[string]any{"NAMESPACE": "default", "ISTIO_VERSION": "1.30.0", "CLUSTER_ID": "Kubernetes"})
	if err != nil {
		b.Fatal(err)
	}
	node := &core.Node{Id: "sidecar~127.0.0.9~bench.default~default.svc.cluster.local", Metadata: metadata}
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
	if err == nil {
		err = stream.Send(&discovery.DiscoveryRequest{Node: node, TypeUrl: eds, ResourceNames: clusters})
	}
	if err != nil {
		b.Fatal(err)
	}
	first := make(chan struct{})
	// Owned by the benchmark; ends with the stream.
	go func() {
		defer close(done)
		have := make(map[string]bool)
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			now := time.Now()
			if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: eds, ResourceNames: clusters, VersionInfo: r.GetVersionInfo(), ResponseNonce: r.GetNonce()}); err != nil {
				return
			}
			for _, a := range r.GetResources() {
				var assignment endpoint.ClusterLoadAssignment
				if err := a.UnmarshalTo(&assignment); err != nil {
					continue
				}
				most := 0
				for _, l := range assignment.GetEndpoints() {
					for _, e := range l.GetLbEndpoints() {
						most = max(most, int(e.GetLoadBalancingWeight().GetValue()))
					}
				}
				if most == 0 {
					continue
				}
				if name := assignment.GetClusterName(); !have[name] {
					if have[name] = true; len(have) == len(clusters) {
						close(first)
					}
				}
				select {
				case arrived <- weightArrival{assignment.GetClusterName(), most, now}:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	select {
	case <-first:
	case <-done:
		b.Fatal("the proxy's stream ended before it had its endpoints")
	case <-time.After(testenv.Patience):
		b.Fatal("the proxy has not its endpoints")
	}
	return arrived
}
