package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"

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
