package xds

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// liveHeap returns the bytes of the heap that are in use.
func liveHeap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

type deltaStream = discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesClient

func openDelta(ctx context.Context, t testing.TB, client discovery.AggregatedDiscoveryServiceClient, names []string) deltaStream {
	t.Helper()
	stream, err := client.DeltaAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsV1, ResourceNamesSubscribe: names}); err != nil {
		t.Fatal(err)
	}
	return stream
}

// nextDelta receives a response and acknowledges it.
func nextDelta(stream deltaStream) (*discovery.DeltaDiscoveryResponse, error) {
	r, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	return r, stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsV1, ResponseNonce: r.GetNonce()})
}

// A stream that asks for a million names, and then changes a tenth of them in
// each request, costs a bounded number of bytes per name, gets its answers,
// leaves nothing behind, and takes no change from the others. How long these
// wait meanwhile is printed with -v. One name more ends the stream.
func TestMillionNames(t *testing.T) {
	if testing.Short() {
		t.Skip("seconds of a core")
	}
	const (
		services = 1000
		sinks    = 50
		names    = 20
		batch    = 100_000
	)
	w := servertest.New(t, state.Options{})
	defer w.Follow()()
	for i := range services {
		name := fmt.Sprintf("ns/s%d", i)
		w.Entry(name, fmt.Sprintf("s%d.example.org", i))
		w.Instance(name, fmt.Sprintf("ns/w%d", i), fmt.Sprintf("10.0.%d.%d", i/200, i%200+1), 1)
	}
	server := newServer(t, w, Config{})
	client := discovery.NewAggregatedDiscoveryServiceClient(loopback(t, register(server)))

	// Each of the others asks for twenty names, and reports what changed.
	seen := make(chan string, sinks)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range sinks {
		asked := make([]string, names)
		for j := range asked {
			asked[j] = fmt.Sprintf("ns/w%d", i*names+j)
		}
		stream := openDelta(ctx, t, client, asked)
		for have := 0; have < names; {
			r, err := nextDelta(stream)
			if err != nil {
				t.Fatal(err)
			}
			have += len(r.GetResources())
		}
		go func() { // ends with cancel
			for {
				r, err := nextDelta(stream)
				if err != nil {
					return
				}
				for _, res := range r.GetResources() {
					seen <- res.GetName()
				}
			}
		}()
	}
	weight := uint32(1)
	round := func(n int) (took []time.Duration) {
		weight++
		for i := range n {
			k := i * 7919 % services
			start := time.Now()
			w.Instance(fmt.Sprintf("ns/s%d", k), fmt.Sprintf("ns/w%d", k), fmt.Sprintf("10.0.%d.%d", k/200, k%200+1), weight)
			if got, want := <-seen, fmt.Sprintf("ns/w%d", k); got != want {
				t.Fatalf("a change of %s arrived, not of %s", got, want)
			}
			took = append(took, time.Since(start))
		}
		slices.Sort(took)
		return took
	}
	report := func(when string, took []time.Duration) {
		t.Logf("%s: %d changes, p50 %v, p99 %v, most %v", when, len(took), took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
	}
	round(100)
	report("calm", round(services))
	before := liveHeap()

	greedy := func(from, count int) []string {
		asked := make([]string, count)
		for i := range asked {
			asked[i] = fmt.Sprintf("ns/nobody-has-this-%d", from+i)
		}
		return asked
	}
	hostile, stop := context.WithCancel(t.Context())
	defer stop()
	stream := openDelta(hostile, t, client, greedy(0, batch))
	answered, sent, rounds := 0, batch, make(chan struct{})
	advance := func(req *discovery.DeltaDiscoveryRequest) {
		req.TypeUrl = workloadsV1
		if err := stream.Send(req); err != nil {
			t.Fatal(err)
		}
		sent += len(req.GetResourceNamesSubscribe())
		for answered < sent {
			r, err := nextDelta(stream)
			if err != nil {
				t.Fatal(err)
			}
			answered += len(r.GetRemovedResources())
		}
	}
	go func() {
		defer close(rounds)
		for from := batch; from < MaxNames; from += batch {
			advance(&discovery.DeltaDiscoveryRequest{ResourceNamesSubscribe: greedy(from, batch)})
		}
	}()
	var during []time.Duration
	for open := true; open; {
		select {
		case <-rounds:
			open = false
		default:
			during = append(during, round(100)...)
		}
	}
	slices.Sort(during)
	report("while a stream asks for a million names", during)
	held := liveHeap() - before
	t.Logf("a million names: %d B each", held/MaxNames)
	if held > 256*MaxNames {
		t.Errorf("%d bytes for a million names, more than 256 each", held)
	}

	rounds = make(chan struct{})
	go func() {
		defer close(rounds)
		for i := range 10 {
			advance(&discovery.DeltaDiscoveryRequest{ResourceNamesUnsubscribe: greedy(i*batch, batch), ResourceNamesSubscribe: greedy(MaxNames+i*batch, batch)})
		}
	}()
	during = nil
	for open := true; open; {
		select {
		case <-rounds:
			open = false
		default:
			during = append(during, round(100)...)
		}
	}
	slices.Sort(during)
	report("while it changes a tenth of them at each request", during)

	if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsV1, ResourceNamesSubscribe: []string{"ns/one-more"}}); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := stream.Recv(); err != nil {
			if status.Code(err) != codes.ResourceExhausted {
				t.Fatalf("after one name more: %v", err)
			}
			break
		}
	}
	round(services)
	if left := liveHeap() - before; left > held/4 {
		t.Errorf("%d bytes of %d are held after the stream ended", left, held)
	}
}
