package xds

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// benchServices have ten instances each.
const benchServices = 10_000

// flip is a change of one instance, there and back.
type flip [2]*pluginv1.Upsert

// benchSource returns changes to 10,000 services with 100,000 instances. It
// takes seconds to make, so all benchmarks share it.
func benchSource(b *testing.B) *source {
	b.Helper()
	if shared.w != nil {
		return &shared
	}
	w := servertest.New(b, state.Options{})
	for i := range benchServices {
		name := fmt.Sprintf("ns/service-%d", i)
		w.Entry(name, fmt.Sprintf("service-%d.example.org", i))
		for j := range 10 {
			w.Instance(name, fmt.Sprintf("ns/service-%d-%d", i, j), fmt.Sprintf("10.%d.%d.%d", i/250, i%250, j+1), 0)
		}
	}
	flips := make([]flip, 500)
	for i := range flips {
		name := fmt.Sprintf("ns/service-%d", i*20)
		for v := range flips[i] {
			flips[i][v] = w.InstanceUpsert(name, name+"-5", fmt.Sprintf("10.%d.%d.6", i*20/250, i*20%250), uint32(1+v))
		}
	}
	shared = source{w: w, flips: flips}
	return &shared
}

var shared source

// versions returns what a delta sink of tools that has everything holds.
func versions(w *servertest.World, url string, delta bool) map[string]string {
	if !delta {
		return nil
	}
	have := map[string]string{}
	for _, res := range w.Resources(collection.OfTypeURL(url), encode.Form{Shape: encode.Workload}) {
		have[res.GetMetadata().GetName()] = res.GetMetadata().GetVersion()
	}
	return have
}

// source makes one change of one instance after the other.
type source struct {
	w     *servertest.World
	flips []flip
	n     int
}

func (s *source) next() {
	i := s.n % len(s.flips)
	s.w.Apply(s.flips[i][s.n/len(s.flips)&1])
	s.n++
}

// benchSink is a session whose sink takes and acknowledges at once.
type benchSink struct {
	s     *session
	delta bool
	url   string
	now   time.Time
	codec encoding.CodecV2
}

func newBenchSink(b *testing.B, w *servertest.World, delta bool, url string) *benchSink {
	b.Helper()
	m := newMetrics(prometheus.NewRegistry())
	k := &benchSink{s: newSession(w.View, delta, nil, m, slog.New(slog.DiscardHandler)), delta: delta, url: url, now: time.Unix(0, 0), codec: wire.NewCodec()}
	k.request(b, "")
	for k.step(b) {
	}
	return k
}

func (k *benchSink) request(b *testing.B, nonce string) {
	var req proto.Message = &discovery.DiscoveryRequest{TypeUrl: k.url, ResponseNonce: nonce}
	if k.delta {
		req = &discovery.DeltaDiscoveryRequest{TypeUrl: k.url, ResponseNonce: nonce}
	}
	if err := k.s.take(req, k.now); err != nil {
		b.Fatal(err)
	}
}

// step takes the next response through the codec, if there is one, and
// acknowledges it.
func (k *benchSink) step(b *testing.B) bool {
	k.now = k.now.Add(time.Minute) // no pacing
	m, _, err := k.s.Next(k.now)
	if err != nil {
		b.Fatal(err)
	}
	if m == nil {
		return false
	}
	buffers, err := k.codec.Marshal(m)
	if err != nil {
		b.Fatal(err)
	}
	buffers.Free()
	k.request(b, k.s.Of[k.url].Nonce())
	return true
}

// BenchmarkChange is one changed instance of 100,000, from the store to the
// encoded message of every sink and back with its ACK, without a connection.
func BenchmarkChange(b *testing.B) {
	src := benchSource(b)
	w := src.w
	for _, mode := range []string{"delta", "sotw"} {
		for _, sinks := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/sinks=%d", mode, sinks), func(b *testing.B) {
				url := entriesV1
				if mode == "delta" {
					url = workloadsV1
				}
				all := make([]*benchSink, sinks)
				for i := range all {
					all[i] = newBenchSink(b, w, mode == "delta", url)
					defer all[i].s.Close(time.Time{}, nil)
				}
				b.ReportAllocs()
				for b.Loop() {
					src.next()
					for _, k := range all {
						if !k.step(b) {
							b.Fatal("no response")
						}
					}
				}
			})
		}
	}
}

// echo answers each message with itself: what gRPC costs by itself.
type echo struct {
	discovery.UnimplementedAggregatedDiscoveryServiceServer
}

func (echo) StreamAggregatedResources(stream discovery.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	for {
		req, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := stream.Send(&discovery.DiscoveryResponse{TypeUrl: req.GetTypeUrl(), Nonce: req.GetResponseNonce()}); err != nil {
			return err
		}
	}
}

// discard is the client's codec: it takes messages apart no further than needed
// for the ACK, so that what is measured is the server and gRPC.
type discard struct{ encoding.CodecV2 }

// taken is a response of which only the header was looked at.
type taken struct {
	size  int
	nonce string
	whole bool // count the resources too
	count int
}

// Unmarshal finds the nonce at the beginning of a response; see header.
func (d discard) Unmarshal(data mem.BufferSlice, v any) error {
	t := v.(*taken)
	t.size = data.Len()
	var head [256]byte
	r := data.Reader()
	n, err := r.Read(head[:])
	if err != nil {
		return err
	}
	t.nonce = nonceOf(head[:n])
	if t.whole {
		t.count = resourcesOf(data.Materialize())
	}
	return r.Close()
}

// resourcesOf counts the resources of a delta response.
func resourcesOf(b []byte) (count int) {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		m := protowire.ConsumeFieldValue(num, typ, b[max(n, 0):])
		if n < 0 || m < 0 {
			return count
		}
		if num == 2 { // DeltaDiscoveryResponse.resources
			count++
		}
		b = b[n+m:]
	}
	return count
}

// loopback serves over TCP on the loopback interface.
func loopback(b testing.TB, register func(*grpc.Server)) *grpc.ClientConn {
	b.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	server := grpc.NewServer(ServerOptions()...)
	register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends with Stop below
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(8<<20), grpc.WithInitialConnWindowSize(8<<20),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		conn.Close()
		server.Stop()
		if err := <-served; err != nil {
			b.Error(err)
		}
	})
	return conn
}

// wireSink is one stream over a real connection, which takes responses with the
// codec discard.
type wireSink struct {
	stream grpc.ClientStream
	url    string
	delta  bool
}

func newWireSink(ctx context.Context, b *testing.B, conn *grpc.ClientConn, delta bool, url string, versions map[string]string) *wireSink {
	b.Helper()
	method := "StreamAggregatedResources"
	if delta {
		method = "DeltaAggregatedResources"
	}
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		"/envoy.service.discovery.v3.AggregatedDiscoveryService/"+method, grpc.ForceCodecV2(discard{wire.NewCodec()}))
	if err != nil {
		b.Fatal(err)
	}
	k := &wireSink{stream, url, delta}
	k.send(b, "", versions)
	return k
}

// nonceOf finds the nonce in the beginning of a response.
func nonceOf(b []byte) string {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		m := protowire.ConsumeFieldValue(num, typ, b[max(n, 0):])
		if n < 0 || m < 0 {
			return ""
		}
		if num == fieldNonce {
			v, _ := protowire.ConsumeString(b[n:])
			return v
		}
		b = b[n+m:]
	}
	return ""
}

func (k *wireSink) send(b *testing.B, nonce string, versions map[string]string) {
	var req proto.Message = &discovery.DiscoveryRequest{TypeUrl: k.url, ResponseNonce: nonce}
	if k.delta {
		req = &discovery.DeltaDiscoveryRequest{TypeUrl: k.url, ResponseNonce: nonce, InitialResourceVersions: versions}
	}
	if err := k.stream.SendMsg(req); err != nil {
		b.Error(err)
	}
}

// take receives a response and acknowledges it.
func (k *wireSink) take(b *testing.B) int {
	var t taken
	if err := k.stream.RecvMsg(&t); err != nil {
		b.Error(err)
		return 0
	}
	k.send(b, t.nonce, nil)
	return t.size
}

// count receives a response, acknowledges it and returns how many resources it
// has.
func (k *wireSink) count(b *testing.B) int {
	t := taken{whole: true}
	if err := k.stream.RecvMsg(&t); err != nil {
		b.Fatal(err)
	}
	k.send(b, t.nonce, nil)
	return t.count
}

// BenchmarkLoopback is one changed instance of 100,000 through gRPC over TCP,
// from the store to the client having the whole message, beside a bare
// ping-pong of gRPC messages of 100 bytes, and one of messages as large as the
// state of the world, in the same run. The ACK is sent and not waited for.
func BenchmarkLoopback(b *testing.B) {
	b.Run("ping-pong", func(b *testing.B) {
		conn := loopback(b, func(s *grpc.Server) { discovery.RegisterAggregatedDiscoveryServiceServer(s, echo{}) })
		ctx, cancel := context.WithCancel(b.Context())
		defer cancel()
		k := newWireSink(ctx, b, conn, false, "networking.istio.io/v1/ServiceEntry?an-url-of-a-hundred-bytes-so-that-there-is-something-to-carry-along", nil)
		b.ReportAllocs()
		for b.Loop() {
			k.take(b)
		}
	})
	src := benchSource(b)
	w := src.w
	whole := 10 << 20 // size of a state-of-the-world response
	for _, mode := range []string{"delta", "sotw"} {
		for _, sinks := range []int{1, 32} {
			if mode == "sotw" && sinks > 1 {
				continue // 32 times 10 MB through one loopback measures the kernel
			}
			b.Run(fmt.Sprintf("%s/sinks=%d", mode, sinks), func(b *testing.B) {
				s := newServer(b, w, Config{})
				s.interval = func(int) time.Duration { return 0 }
				conn := loopback(b, register(s))
				ctx, cancel := context.WithCancel(b.Context())
				defer cancel()
				url := entriesV1
				if mode == "delta" {
					url = workloadsV1
				}
				all := make([]*wireSink, sinks)
				have := versions(w, url, mode == "delta") // so that the first response is the only one
				for i := range all {
					all[i] = newWireSink(ctx, b, conn, mode == "delta", url, have)
					all[i].take(b)
				}
				size := 0
				b.ReportAllocs()
				for b.Loop() {
					src.next()
					var wg sync.WaitGroup
					for _, k := range all[1:] {
						wg.Go(func() { k.take(b) })
					}
					size = all[0].take(b)
					wg.Wait()
				}
				b.ReportMetric(float64(size), "B/response")
				if mode == "sotw" {
					whole = size
				}
			})
		}
	}
	// What gRPC takes for as many bytes, in one piece that is there already.
	b.Run("bare/sotw", func(b *testing.B) {
		message := protowire.AppendTag(header(false, "1", entriesV1, "1", nil), 2, protowire.BytesType)
		message = protowire.AppendBytes(message, make([]byte, whole-len(message)-5))
		conn := loopback(b, func(s *grpc.Server) { discovery.RegisterAggregatedDiscoveryServiceServer(s, bare{message: message}) })
		ctx, cancel := context.WithCancel(b.Context())
		defer cancel()
		k := newWireSink(ctx, b, conn, false, entriesV1, nil)
		size := 0
		b.ReportAllocs()
		for b.Loop() {
			size = k.take(b)
		}
		b.ReportMetric(float64(size), "B/response")
	})
}

// bare answers every request with the same bytes.
type bare struct {
	discovery.UnimplementedAggregatedDiscoveryServiceServer
	message encoded
}

func (s bare) StreamAggregatedResources(stream discovery.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	for {
		if _, err := stream.Recv(); err != nil {
			return err
		}
		if err := stream.SendMsg(s.message); err != nil {
			return err
		}
	}
}

type encoded []byte

func (e encoded) Parts() (header []byte, segments [][]byte) { return nil, [][]byte{e} }

// register registers a server with gRPC.
func register(s *Server) func(*grpc.Server) { return func(g *grpc.Server) { s.Register(g) } }
