package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/isthmus-mesh/isthmus/server/config"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
)

// reloadable is a server whose configuration the test sets.
type reloadable struct {
	t *testing.T
	*Server
	text atomic.Pointer[string]
}

func serveReloadable(t *testing.T, text string, o Options) *reloadable {
	t.Helper()
	r := &reloadable{t: t}
	r.text.Store(&text)
	o.Load = func() (config.Config, error) { return parse(*r.text.Load()) }
	r.Server = serveWith(t, text, o)
	return r
}

func (r *reloadable) set(text string) config.Difference {
	r.t.Helper()
	r.text.Store(&text)
	d, err := r.Reload(r.t.Context(), "test")
	if err != nil {
		r.t.Fatal(err)
	}
	return d
}

// waitingSink is a sink that waits to be dialled, and tells of the streams that
// begin and end.
type waitingSink struct {
	address      string
	began, ended chan struct{}
}

func newWaitingSink(t *testing.T) *waitingSink {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &waitingSink{l.Addr().String(), make(chan struct{}, 10), make(chan struct{}, 10)}
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "istio.mcp.v1alpha1.ResourceSink",
		HandlerType: (*interface {
			establish(s grpc.ServerStream) error
		})(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: "EstablishResourceStream", ServerStreams: true, ClientStreams: true,
			Handler: func(srv any, stream grpc.ServerStream) error { return srv.(sinkFunc).establish(stream) },
		}},
	}, sinkFunc(func(stream grpc.ServerStream) error {
		w.began <- struct{}{}
		<-stream.Context().Done()
		w.ended <- struct{}{}
		return nil
	}))
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }() // ends with Stop
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return w
}

func await(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-c:
	case <-timer.C:
		t.Fatalf("not %s within %v", what, patience)
	}
}

// Sinks that are dialled come and go with the configuration, and the stream to
// one that stays goes on; so does the level of the log.
func TestReloadSinks(t *testing.T) {
	const listen = "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
	a, b := newWaitingSink(t), newWaitingSink(t)
	level := new(slog.LevelVar)
	s := serveReloadable(t, listen, Options{Level: level})
	sinks := func(all ...*waitingSink) string {
		text := listen + "log: {level: warn}\nsinks:\n"
		for _, w := range all {
			text += fmt.Sprintf("- {address: %q, metadata: {token: hush}}\n", w.address)
		}
		return text
	}
	d := s.set(sinks(a))
	if got := strings.Join(d.Fields, " "); got != "log.level sinks" || level.Level() != slog.LevelWarn {
		t.Errorf("changed: %s; the level is %v", got, level)
	}
	await(t, "dialled", a.began)
	s.set(sinks(b, a))
	await(t, "dialled", b.began)
	s.set(sinks(b))
	await(t, "left", a.ended)
	if len(a.began)+len(b.began)+len(b.ended) > 0 {
		t.Error("a sink that stays was dialled again, or left")
	}
}

// The legacy protocol moves to a port of its own and back, and a stream that is
// there goes on meanwhile.
func TestReloadMCPPort(t *testing.T) {
	const shared = "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
	s := serveReloadable(t, shared, Options{})
	stream := ask(t, s.XDSAddr(), entries)
	last := responses(t, stream, entries, 1)
	goesOn := func() {
		t.Helper()
		if err := stream.SendMsg(&mcpv1.RequestResources{Collection: entries, ResponseNonce: last.GetNonce(), Incremental: true}); err != nil {
			t.Fatal(err)
		}
		last = responses(t, stream, entries, 1)
	}
	refused := func() bool {
		err := ask(t, s.XDSAddr(), entries).RecvMsg(new(mcpv1.Resources))
		return err != nil && strings.Contains(err.Error(), "code = Unimplemented")
	}
	s.set("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0, mcp: 127.0.0.1:0}\n")
	if s.MCPAddr().String() == s.XDSAddr().String() || !refused() {
		t.Error("the ports of xDS take new streams of the legacy protocol, which has one of its own")
	}
	responses(t, ask(t, s.MCPAddr(), entries), entries, 1)
	goesOn()
	s.set(shared)
	if refused() {
		t.Error("the legacy protocol is served nowhere")
	}
	goesOn()
}

// A bridge that is told to end while a reload opens listeners ends in good
// order.
func TestEndWhileReloading(t *testing.T) {
	const few = "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
	reloaded := make(chan struct{})
	t.Cleanup(func() { <-reloaded })
	s := serveReloadable(t, few, Options{})
	many := strings.Replace(few, "xds: 127.0.0.1:0", "xds: ["+strings.Repeat("127.0.0.1:0, ", 300)+"]", 1)
	s.text.Store(&many)
	go func() { // ends with the server
		defer close(reloaded)
		_, _ = s.Reload(context.Background(), "test")
	}()
	// The end of the test, which is that of the server, comes right after the
	// listeners are there.
	for there := 0; there < 300; runtime.Gosched() {
		s.mu.Lock()
		there = len(s.ports)
		s.mu.Unlock()
	}
}

// A server that is ending, or has no file, says so.
func TestReloadNot(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}")
	if _, err := s.Reload(t.Context(), "test"); !errors.Is(err, ErrNoFile) {
		t.Errorf("without a file: %v", err)
	}
	cfg, err := parse("")
	if err != nil {
		t.Fatal(err)
	}
	ended, err := New(cfg, Options{Load: func() (config.Config, error) { return parse("") }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := ended.Run(ctx); err != nil {
		t.Errorf("Run: %v", err)
	}
	if _, err := ended.Reload(t.Context(), "test"); !errors.Is(err, ErrEnding) {
		t.Errorf("after the end: %v", err)
	}
}
