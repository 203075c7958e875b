package eureka

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testapp"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testeureka"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// moments are the first times at which something was seen, by its name.
type moments struct {
	mu   sync.Mutex // guards seen
	seen map[string]time.Time
	wake chan struct{} // capacity one
}

func newMoments() *moments {
	return &moments{seen: map[string]time.Time{}, wake: make(chan struct{}, 1)}
}

func (m *moments) put(name string, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.seen[name]; ok {
		return
	}
	m.seen[name] = at
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// get waits until name was seen.
func (m *moments) get(b *testing.B, name string) time.Time {
	b.Helper()
	late := time.NewTimer(testenv.Patience)
	defer late.Stop()
	for {
		m.mu.Lock()
		at, ok := m.seen[name]
		m.mu.Unlock()
		if ok {
			return at
		}
		select {
		case <-m.wake:
		case <-late.C:
			b.Fatalf("%s was not seen within %v", name, testenv.Patience)
		}
	}
}

// BenchmarkChange measures, for one more instance among 10,000, the time from
// its registration until the client of Spring Cloud has it, and until a delta
// sink of Isthmus has it, in the same run. Both ask every second. What Isthmus
// adds begins with the answer of the server that has the instance.
//
//	go test ./test/eureka -run '^$' -bench Change -benchtime 100x -timeout 30m
func BenchmarkChange(b *testing.B) {
	const services, perService = 1000, 10
	server := testeureka.Start(b, testeureka.Config{HeapMB: 1000, Properties: map[string]string{
		// Of the load only the last seconds are among the changes.
		"eureka.server.retention-time-in-m-s-in-delta-queue": "5000", "eureka.server.delta-retention-timer-interval-in-ms": "1000",
	}})
	var all []testeureka.Instance
	for s := range services {
		for i := range perService {
			all = append(all, instance(s, fmt.Sprintf("app-%d-%d", s, i), i))
		}
	}
	server.RegisterMany(b, all)
	app := testapp.StartSpringApp(b, server, "own", map[string]string{"eureka.client.registry-fetch-interval-seconds": "1"})

	answers, sink := newMoments(), newMoments()
	address := relay(b, server.URL, func(answer []byte) {
		now := time.Now()
		for rest := answer; ; {
			_, after, ok := bytes.Cut(rest, []byte(`"instanceId":"more-`))
			if !ok {
				return
			}
			id, _, _ := bytes.Cut(after, []byte(`"`))
			answers.put("more-"+string(id), now)
			rest = after
		}
	})
	isthmus := testisthmus.Start(b, fmt.Sprintf("- {name: eureka, type: eureka, config: {servers: [%q], interval: 1s}}", address))
	isthmus.WaitReady(b)
	var mu sync.Mutex // guards expected
	var expected, service string
	follow(b, isthmus.XDS, func(name string) {
		mu.Lock()
		defer mu.Unlock()
		if expected != "" && strings.Contains(name, "/"+service+"-") {
			sink.put(expected, time.Now())
		}
	})

	var own, bridge, added []time.Duration
	n := 0
	for b.Loop() {
		n++
		s, id := n%services, fmt.Sprint("more-", n)
		mu.Lock()
		expected, service = id, fmt.Sprint("app-", s)
		mu.Unlock()
		time.Sleep(rand.N(time.Second)) // at any point of the two intervals
		at := time.Now()
		server.Register(b, instance(s, id, n%250))
		for !slices.Contains(app.Instances(b, fmt.Sprint("app-", s)), id) {
			time.Sleep(5 * time.Millisecond)
		}
		own = append(own, time.Since(at))
		arrived := sink.get(b, id)
		bridge = append(bridge, arrived.Sub(at))
		added = append(added, arrived.Sub(answers.get(b, id)))
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(0, "ns/op")
	for name, all := range map[string][]time.Duration{"own": own, "isthmus": bridge, "added": added} {
		b.ReportMetric(ms(quantile(all, 0.5)), "ms-"+name+"-p50")
		b.ReportMetric(ms(quantile(all, 0.99)), "ms-"+name+"-p99")
	}
}

func instance(s int, id string, host int) testeureka.Instance {
	return testeureka.Instance{App: fmt.Sprint("APP-", s), ID: id, IP: fmt.Sprintf("10.%d.%d.%d", s/250, s%250, host+1), Port: 8080}
}

func quantile[T cmp.Ordered](all []T, q float64) T {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// relay returns the URL of a server that passes requests on, and calls got with
// each answer before it is passed back.
func relay(b *testing.B, server string, got func(answer []byte)) string {
	b.Helper()
	target, err := url.Parse(server)
	if err != nil {
		b.Fatal(err)
	}
	transport := &http.Transport{}
	s := httptest.NewServer(&httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = target.Scheme, target.Host
			p.Out.Header.Del("Accept-Encoding")
		},
		ModifyResponse: func(res *http.Response) error {
			answer, err := io.ReadAll(res.Body)
			if err != nil {
				return err
			}
			res.Body.Close()
			res.Body = io.NopCloser(bytes.NewReader(answer))
			got(answer)
			return nil
		},
	})
	b.Cleanup(transport.CloseIdleConnections)
	b.Cleanup(s.Close)
	return s.URL + "/eureka"
}

// follow is a delta sink, which calls got with the name of each resource after
// those of the first answers.
func follow(b *testing.B, address string, got func(name string)) {
	b.Helper()
	cc, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { cc.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(cc).DeltaAggregatedResources(ctx)
	if err != nil {
		b.Fatal(err)
	}
	kinds := map[string]bool{}
	for _, kind := range []string{"ServiceEntry", "WorkloadEntry"} {
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{Node: &core.Node{Id: "bench"}, TypeUrl: "networking.istio.io/v1/" + kind}); err != nil {
			b.Fatal(err)
		}
	}
	first, ended := make(chan struct{}), make(chan struct{})
	// Ends with ctx, at the end of the benchmark.
	go func() {
		defer close(ended)
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			if len(kinds) == 2 {
				for _, res := range r.GetResources() {
					got(res.GetName())
				}
			} else if kinds[r.GetTypeUrl()] = true; len(kinds) == 2 {
				close(first)
			}
			if stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()}) != nil {
				return
			}
		}
	}()
	b.Cleanup(func() {
		cancel()
		<-ended
	})
	select {
	case <-first:
	case <-ended:
		b.Fatal("the sink ended before it had everything")
	}
}
