package nacos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/nacos-group/nacos-sdk-go/v2/model"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
)

// arrival is when something was received, and how many bytes it was.
type arrival struct {
	at    time.Time
	bytes int
}

// inbox keeps the first arrival of each thing that is waited for.
type inbox struct {
	mu   sync.Mutex // guards everything below
	seen map[string]arrival
	wake chan struct{} // closed and replaced at each arrival
}

func newInbox() *inbox { return &inbox{seen: map[string]arrival{}, wake: make(chan struct{})} }

func (b *inbox) put(what string, bytes int) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.seen[what]; !ok {
		b.seen[what] = arrival{now, bytes}
		close(b.wake)
		b.wake = make(chan struct{})
	}
}

func (b *inbox) get(tb testing.TB, what string) arrival {
	tb.Helper()
	late := time.NewTimer(testenv.Patience)
	defer late.Stop()
	for {
		b.mu.Lock()
		a, ok := b.seen[what]
		wake := b.wake
		b.mu.Unlock()
		if ok {
			return a
		}
		select {
		case <-wake:
		case <-late.C:
			tb.Fatalf("%s has not arrived after %v", what, testenv.Patience)
		}
	}
}

// perService is how many instances a service has.
const perService = 10

func instancesOf(s, weight int) []testnacos.Instance {
	all := make([]testnacos.Instance, perService)
	for i := range all {
		all[i] = testnacos.Up(fmt.Sprintf("10.%d.%d.%d", 10+i, s/256, s%256), 8080)
		all[i].Metadata = map[string]string{"protocol": "http"}
	}
	all[0].Weight = float64(weight)
	return all
}

// BenchmarkChange measures, for one changed instance among many, the time from
// the registration in Nacos to the update received by a bare subscriber of
// Nacos, by a delta sink of Isthmus, and on 2.x by a client of the server's own
// bridge, in the same run. It reports medians, and the 99th percentile of what
// Isthmus adds, beside that of what a second bare subscriber does.
//
//	go test ./test/nacos ./adapters/nacos -run '^$' -bench 'Change|Idle' -benchtime 100x -timeout 60m
func BenchmarkChange(b *testing.B) {
	for _, version := range testnacos.Versions() {
		for _, services := range []int{1000, 10_000} {
			b.Run(fmt.Sprintf("%s/services=%d", version.Name, services), func(b *testing.B) { benchmarkChange(b, version, services, false) })
		}
	}
	b.Run("dubbo/services=1000", func(b *testing.B) { benchmarkChange(b, testnacos.V3, 1000, true) })
}

// benchmarkChange measures changes of services, which are interfaces of Dubbo
// if dubbo is set.
func benchmarkChange(b *testing.B, version testnacos.Version, services int, dubbo bool) {
	named := func(s int) string {
		if dubbo {
			return fmt.Sprintf("providers:svc-%d:1.0.0:", s)
		}
		return fmt.Sprintf("svc-%d", s)
	}
	plain := func(name string) string {
		_, name, _ = strings.Cut(name, "svc-")
		name, _, _ = strings.Cut(name, ":")
		return "svc-" + name
	}
	// The delay before pushes is the server's default.
	server := testnacos.Start(b, testnacos.Config{Version: version, DefaultPushDelay: true, Istio: !version.V3})
	app := server.Client(b)
	register := func(s, weight int) {
		if err := app.TryRegister(b.Context(), "public", "DEFAULT_GROUP", named(s), instancesOf(s, weight)...); err != nil {
			b.Fatalf("register service %d: %v", s, err)
		}
	}
	begin := time.Now()
	for s := range services {
		register(s, 1)
	}
	b.Logf("%d services registered in %v", services, time.Since(begin).Round(time.Second))

	begin = time.Now()
	isthmus := testisthmus.Start(b, fmt.Sprintf(`- {name: nacos, type: nacos, config: {servers: [%q], dubbo: %t}}`, server.Addr, dubbo))
	isthmus.WaitReady(b)
	b.Logf("isthmus ready after %v", time.Since(begin).Round(100*time.Millisecond))

	// (a): a subscriber of the services that change, and a second one: by how
	// much they differ is by how much anybody's second connection does.
	const changing = 50
	bare, second, delta, own := newInbox(), newInbox(), newInbox(), newInbox()
	for _, in := range []*inbox{bare, second} {
		subscriber := server.Client(b)
		for s := range changing {
			subscriber.Subscribe(b, "public", "DEFAULT_GROUP", named(s), func(info model.Service) {
				for _, i := range info.Hosts {
					if i.Weight > 1 {
						in.put(plain(info.Name)+" "+strconv.FormatFloat(i.Weight, 'f', -1, 64), 0)
					}
				}
			})
		}
	}
	// (b): a delta sink of Isthmus.
	var changes int
	var mu sync.Mutex // guards current
	current := ""
	expect := func(what string) { mu.Lock(); current = what; mu.Unlock() }
	expected := func() string { mu.Lock(); defer mu.Unlock(); return current }
	deltaSink(b, isthmus.XDS, func(names []string, bytes int) {
		what := expected()
		service, _, _ := strings.Cut(what, " ")
		if what != "" && slices.ContainsFunc(names, func(n string) bool { return strings.Contains(n+"-", service+"-") }) {
			delta.put(what, bytes)
		}
	})
	// (c): the server's own bridge.
	if !version.V3 {
		ownSink(b, server.IstioAddr, services, func(bytes int) {
			if what := expected(); what != "" {
				own.put(what, bytes)
			}
		})
	}

	var toBare, toDelta, toOwn, added, apart []time.Duration
	var deltaBytes, ownBytes []int
	for b.Loop() {
		changes++
		s, weight := changes%changing, changes+1
		what := fmt.Sprintf("svc-%d %d", s, weight)
		expect(what)
		at := time.Now()
		register(s, weight)
		x, y, other := bare.get(b, what), delta.get(b, what), second.get(b, what)
		toBare, toDelta = append(toBare, x.at.Sub(at)), append(toDelta, y.at.Sub(at))
		added, apart = append(added, y.at.Sub(x.at)), append(apart, other.at.Sub(x.at))
		deltaBytes = append(deltaBytes, y.bytes)
		if !version.V3 {
			z := own.get(b, what)
			toOwn = append(toOwn, z.at.Sub(at))
			ownBytes = append(ownBytes, z.bytes)
		}
	}
	for i, d := range added {
		if d > 5*time.Millisecond {
			b.Logf("change %d of %d: isthmus added %v, the second subscriber %v", i, len(added), d, apart[i])
		}
	}
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(quantile(toBare, 0.5)), "ms-bare-p50")
	b.ReportMetric(ms(quantile(toDelta, 0.5)), "ms-isthmus-p50")
	b.ReportMetric(ms(quantile(added, 0.5)), "ms-added-p50")
	b.ReportMetric(ms(quantile(added, 0.99)), "ms-added-p99")
	b.ReportMetric(ms(quantile(apart, 0.99)), "ms-second-bare-p99")
	b.ReportMetric(float64(quantile(deltaBytes, 0.5)), "B-isthmus")
	if !version.V3 {
		b.ReportMetric(ms(quantile(toOwn, 0.5)), "ms-own-bridge-p50")
		b.ReportMetric(float64(quantile(ownBytes, 0.5)), "B-own-bridge")
	}
}

func quantile[T cmp.Ordered](all []T, q float64) T {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// dial connects to an xDS server for the rest of the benchmark.
func dial(b *testing.B, addr string) discovery.AggregatedDiscoveryServiceClient {
	b.Helper()
	cc, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { cc.Close() })
	return discovery.NewAggregatedDiscoveryServiceClient(cc)
}

// sink runs receive, which must end with its context, for the rest of the
// benchmark. It returns once ready was called.
func sink(b *testing.B, receive func(ctx context.Context, ready func()) error) {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	first := make(chan struct{})
	ended := make(chan error, 1)
	go func() { ended <- receive(ctx, sync.OnceFunc(func() { close(first) })) }()
	b.Cleanup(func() {
		cancel()
		<-ended
	})
	late := time.NewTimer(testenv.Patience)
	defer late.Stop()
	select {
	case <-first:
	case err := <-ended:
		ended <- err
		b.Fatalf("a sink ended before it had everything: %v", err)
	case <-late.C:
		b.Fatal("a sink has not everything")
	}
}

// deltaSink is a client of Isthmus that asks for updates, and calls got with
// the names and the size of each after the first.
func deltaSink(b *testing.B, addr string, got func(names []string, bytes int)) {
	b.Helper()
	client := dial(b, addr)
	sink(b, func(ctx context.Context, ready func()) error {
		stream, err := client.DeltaAggregatedResources(ctx)
		if err != nil {
			return err
		}
		node := &core.Node{Id: "bench"}
		for _, kind := range []string{"ServiceEntry", "WorkloadEntry"} {
			if err := stream.Send(&discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: "networking.istio.io/v1/" + kind}); err != nil {
				return err
			}
		}
		kinds := map[string]bool{}
		for {
			r, err := stream.Recv()
			if err != nil {
				return ignoreEnd(err)
			}
			if kinds[r.GetTypeUrl()] = true; len(kinds) == 2 {
				var names []string
				for _, res := range r.GetResources() {
					names = append(names, res.GetName())
				}
				got(names, proto.Size(r))
				ready()
			}
			if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()}); err != nil {
				return ignoreEnd(err)
			}
		}
	})
}

// ownSink is a client of Nacos' own bridge, and calls got with the size of each
// response after the first one that holds all services.
func ownSink(b *testing.B, addr string, services int, got func(bytes int)) {
	b.Helper()
	client := dial(b, addr)
	sink(b, func(ctx context.Context, ready func()) error {
		const kind = "networking.istio.io/v1alpha3/ServiceEntry"
		stream, err := client.StreamAggregatedResources(ctx)
		if err != nil {
			return err
		}
		node := &core.Node{Id: "sidecar~127.0.0.1~bench.default~default.svc.cluster.local"}
		if err := stream.Send(&discovery.DiscoveryRequest{Node: node, TypeUrl: kind}); err != nil {
			return err
		}
		all := false
		for {
			r, err := stream.Recv()
			if err != nil {
				return ignoreEnd(err)
			}
			if all {
				got(proto.Size(r))
			} else if all = len(r.GetResources()) >= services; all {
				ready()
			}
			if err := stream.Send(&discovery.DiscoveryRequest{Node: node, TypeUrl: kind, VersionInfo: r.GetVersionInfo(), ResponseNonce: r.GetNonce()}); err != nil {
				return ignoreEnd(err)
			}
		}
	})
}

// ignoreEnd is err unless the stream ended as it should.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
