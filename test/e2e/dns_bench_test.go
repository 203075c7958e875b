package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testcoredns"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// relay forwards questions over UDP to a server, and notes when an answer with
// an address is sent.
type relay struct {
	addr string

	mu   sync.Mutex // guards the fields below
	want net.IP
	at   chan time.Time // capacity one
}

func startRelay(b *testing.B, target string) *relay {
	b.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	r := &relay{addr: conn.LocalAddr().String(), at: make(chan time.Time, 1)}
	var running sync.WaitGroup
	// Owned by the benchmark; ends when the cleanup closes the socket.
	running.Go(func() {
		for {
			question := make([]byte, 4096)
			n, from, err := conn.ReadFrom(question)
			if err != nil {
				return
			}
			// Ends with its answer or its deadline.
			running.Go(func() {
				server, err := net.Dial("udp", target)
				if err != nil {
					return
				}
				defer server.Close()
				_ = server.SetDeadline(time.Now().Add(2 * time.Second))
				answer := make([]byte, 4096)
				if _, err := server.Write(question[:n]); err != nil {
					return
				}
				if n, err = server.Read(answer); err != nil {
					return
				}
				r.mu.Lock()
				if r.want != nil && bytes.Contains(answer[:n], r.want) {
					r.want = nil
					r.at <- time.Now()
				}
				r.mu.Unlock()
				_, _ = conn.WriteTo(answer[:n], from)
			})
		}
	})
	b.Cleanup(func() {
		conn.Close()
		running.Wait()
	})
	return r
}

func (r *relay) expect(ip net.IP) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.want = ip
}

// A changed A record, with a TTL of a second, among 1,000 names: when the
// server's answer has it, and when a delta sink does.
func BenchmarkDNSChange(b *testing.B) {
	const names = 1000
	server := testcoredns.Start(b, testcoredns.Config{Zones: []string{"example.org", "many.test"}})
	var records []string
	list := ""
	for i := range names {
		records = append(records, fmt.Sprintf("app-%d 60 A 10.0.%d.%d", i, i/250, i%250))
		list += fmt.Sprintf("app-%d.many.test:80, ", i)
	}
	server.SetZone(b, "many.test", records...)
	server.SetZone(b, "example.org", "web A 10.1.0.0")
	r := startRelay(b, server.Addr)
	bridge := testisthmus.Start(b, fmt.Sprintf("- {name: dns, type: dns, config: {servers: [%q], names: [%sweb.example.org:80], min_ttl: 1s}}", r.addr, list))
	bridge.WaitReady(b)

	cc, err := grpc.NewClient("passthrough:///"+bridge.XDS, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	defer cc.Close()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(cc).DeltaAggregatedResources(ctx)
	if err != nil {
		b.Fatal(err)
	}
	const kind = "networking.istio.io/v1/WorkloadEntry"
	if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: kind}); err != nil {
		b.Fatal(err)
	}
	// receive returns when a message came that has text in it.
	receive := func(text []byte) time.Time {
		for {
			m, err := stream.Recv()
			if err != nil {
				b.Fatal(err)
			}
			at := time.Now()
			if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: kind, ResponseNonce: m.GetNonce()}); err != nil {
				b.Fatal(err)
			}
			for _, res := range m.GetResources() {
				if bytes.Contains(res.GetResource().GetValue(), text) {
					return at
				}
			}
		}
	}
	receive([]byte("10.1.0.0"))
	var toAnswer, added []time.Duration
	n := 0
	for b.Loop() {
		n++
		ip := net.IPv4(10, 1, byte(n/250+1), byte(n%250)).To4()
		r.expect(ip)
		begin := time.Now()
		server.SetZone(b, "example.org", "web A "+ip.String())
		sink := receive([]byte(ip.String()))
		answer := <-r.at
		toAnswer, added = append(toAnswer, answer.Sub(begin)), append(added, sink.Sub(answer))
	}
	report := func(name string, all []time.Duration) {
		slices.Sort(all)
		for _, q := range []int{50, 99} {
			b.ReportMetric(float64(all[min(q*len(all)/100, len(all)-1)].Microseconds())/1000, fmt.Sprintf("ms-%s-p%d", name, q))
		}
	}
	b.ReportMetric(0, "ns/op")
	report("to-answer", toAnswer)
	report("added", added)
}
