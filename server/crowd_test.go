package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
)

// A peer that has as many connections as it may gets no more until it closes
// one, on whichever port; those that it has go on.
func TestConnectionsPerPeer(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nlimits: {connections_per_peer: 3}")
	dial := func(address net.Addr) net.Conn {
		t.Helper()
		conn, err := net.Dial("tcp", address.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	// closed reports whether the server closed a connection instead of sending
	// something.
	closed := func(conn net.Conn) bool {
		t.Helper()
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		_, err := conn.Read(make([]byte, 1))
		return err != nil
	}
	// A client of HTTP/2 begins with this, and an empty SETTINGS frame.
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	first := dial(s.XDSAddr())
	if _, err := io.WriteString(first, preface); err != nil {
		t.Fatal(err)
	}
	if closed(first) {
		t.Fatal("the first connection was closed")
	}
	stream := ask(t, s.XDSAddr(), entries)
	last := responses(t, stream, entries, 1)
	third := dial(s.AdminAddr())
	if _, err := io.WriteString(third, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if closed(third) {
		t.Fatal("the third connection was closed")
	}
	for _, address := range []net.Addr{s.XDSAddr(), s.AdminAddr()} {
		if !closed(dial(address)) {
			t.Errorf("a fourth connection to %v stays open", address)
		}
	}
	// The stream goes on.
	if err := stream.SendMsg(&mcpv1.RequestResources{Collection: entries, ResponseNonce: last.GetNonce(), Incremental: true}); err != nil {
		t.Fatal(err)
	}
	responses(t, stream, entries, 2)
	first.Close()
	for tries := 0; ; tries++ {
		again := dial(s.XDSAddr())
		if _, err := io.WriteString(again, preface); err == nil && !closed(again) {
			break
		}
		if tries > 1000 {
			t.Fatal("no connection is accepted after one was closed")
		}
	}
	if n := counter(t, s, "isthmus_connections_refused_total", limitPeer); n < 2 {
		t.Errorf("%v connections counted as refused, want two at least", n)
	}
}

// Streams beyond the limit are refused with words that name it, and one that
// ends makes room.
func TestStreams(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nlimits: {streams: 2}")
	for range 2 {
		responses(t, ask(t, s.XDSAddr(), entries), entries, 1)
	}
	err := ask(t, s.XDSAddr(), entries).RecvMsg(new(struct{}))
	if err == nil || !strings.Contains(err.Error(), "ResourceExhausted") || !strings.Contains(err.Error(), "limits.streams allows (2)") {
		t.Errorf("a third stream: %v", err)
	}
	if n := counter(t, s, "isthmus_connections_refused_total", limitStreams); n != 1 {
		t.Errorf("%v streams counted as refused, want one", n)
	}
}

// counter returns the value of a counter with one label.
func counter(t *testing.T, s *Server, name, label string) float64 {
	t.Helper()
	families, err := s.options.Metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue()
			}
		}
	}
	t.Fatalf("there is no %s{%s}", name, label)
	return 0
}

// A peer that uses one port for connections to two listeners is bounded on
// both: the end of one, or its beginning, takes nothing from the other.
func TestOnePortOfAPeer(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, mcp: 127.0.0.1:0, admin: 127.0.0.1:0}")
	counted := func(what string, want int) {
		t.Helper()
		testwait.Eventually(t, patience, what, func() (string, bool) {
			s.crowd.intake.mu.Lock()
			defer s.crowd.intake.mu.Unlock()
			conns := len(s.crowd.intake.conns)
			return fmt.Sprintf("%d connections", conns), conns == want
		})
	}
	dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			failed = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
		})
		return errors.Join(err, failed)
	}}
	dialer.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}
	dial := func(to net.Addr) net.Conn {
		t.Helper()
		conn, err := dialer.DialContext(t.Context(), "tcp", to.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	first := dial(s.XDSAddr())
	dialer.LocalAddr = first.LocalAddr()
	second := dial(s.MCPAddr())
	counted("both to be bounded", 2)
	second.Close()
	counted("the first to stay so", 1)
	first.Close()
	counted("nothing to be left", 0)
}

// A stream whose requests may be compressed is refused before one is read, as
// it is their size on the wire that is bounded.
func TestCompressed(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}")
	for _, compression := range []string{gzip.Name, encoding.Identity} {
		stream, err := discovery.NewAggregatedDiscoveryServiceClient(connect(t, s.XDSAddr())).DeltaAggregatedResources(t.Context(), grpc.UseCompressor(compression))
		if err != nil {
			t.Fatal(err)
		}
		// Unknown types are answered at once.
		_ = stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: "a", ResourceNamesSubscribe: slices.Repeat([]string{strings.Repeat("a", 1000)}, 1000)})
		_, err = stream.Recv()
		if want := codes.OK; compression == encoding.Identity && status.Code(err) != want {
			t.Errorf("without compression: %v", err)
		} else if want = codes.Unimplemented; compression == gzip.Name && (status.Code(err) != want || !strings.Contains(err.Error(), "grpc-encoding")) {
			t.Errorf("with compression: %v, want %v", err, want)
		}
	}
}

// An address that opens streams without end fills no log, and another one is
// still in it.
func TestLinesPerAddress(t *testing.T) {
	const streams = 500
	lines := new(counted)
	cfg, err := parse("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}")
	if err != nil {
		t.Fatal(err)
	}
	s := serveConfig(t, cfg, Options{Log: slog.New(lines)})
	open := func(client discovery.AggregatedDiscoveryServiceClient, node string) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := client.DeltaAggregatedResources(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{Node: &core.Node{Id: node}, TypeUrl: "a"}); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	many := discovery.NewAggregatedDiscoveryServiceClient(connectFrom(t, "127.0.0.2", s.XDSAddr()))
	for range streams {
		open(many, "many")
	}
	if n := lines.of("many"); n < 100 || n > 400 {
		t.Errorf("%d streams of one address logged %d lines", streams, n)
	}
	other := discovery.NewAggregatedDiscoveryServiceClient(connectFrom(t, "127.0.0.3", s.XDSAddr()))
	open(other, "other")
	if n := lines.of("other"); n == 0 {
		t.Error("another address logged nothing")
	}
	if lines.leftOut.Load() == 0 {
		t.Error("no line says how many were left out")
	}
}

// counted counts lines of the log by node.
type counted struct {
	node    string
	parent  *counted
	nodes   sync.Map // *atomic.Int64 by node
	leftOut atomic.Int64
}

func (c *counted) of(node string) int64 {
	n, _ := c.nodes.LoadOrStore(node, new(atomic.Int64))
	return n.(*atomic.Int64).Load()
}

func (c *counted) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }
func (c *counted) WithGroup(string) slog.Handler                { return c }

func (c *counted) WithAttrs(attrs []slog.Attr) slog.Handler {
	root := cmp.Or(c.parent, c)
	for _, a := range attrs {
		if a.Key == "node" {
			return &counted{node: a.Value.String(), parent: root}
		}
	}
	return c
}

func (c *counted) Handle(_ context.Context, r slog.Record) error {
	root := cmp.Or(c.parent, c)
	n, _ := root.nodes.LoadOrStore(c.node, new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "left_out" {
			root.leftOut.Add(a.Value.Int64())
		}
		return true
	})
	return nil
}

// connectFrom is a connection from an address of its own.
func connectFrom(t *testing.T, from string, to net.Addr) *grpc.ClientConn {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	conn, err := grpc.NewClient(to.String(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		return dialer.DialContext(ctx, "tcp", address)
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}
