package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/isthmus-mesh/isthmus/adapters/sim"
	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// The test binary is the program that the server starts for a registry of a
// built-in type.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "adapter" && os.Args[2] == "sim" {
		sim.Main("test")
		return
	}
	goleak.VerifyTestMain(m)
}

// patience is how long anything may take on a busy machine.
const patience = time.Minute

const (
	entries   = "istio/networking/v1alpha3/serviceentries"
	synthetic = "istio/networking/v1alpha3/synthetic/serviceentries"
)

// serve runs a server of a configuration that is added to one with a registry
// of three services whose weights change all the time.
func serve(t *testing.T, text string) *Server {
	t.Helper()
	return serveWith(t, text, Options{})
}

// parse reads a configuration that is added to one with that registry.
func parse(text string) (config.Config, error) {
	return config.Parse("isthmus.yaml", []byte(`
registries: [{name: load, type: sim, config: {services: 3, changes_per_second: 50, changes: {weight: 1}}}]
`+text), config.Options{Adapters: []string{"sim"}, MCPProfiles: mcp.Profiles(), LookupEnv: func(name string) (string, bool) { return "of " + name, true }})
}

func serveWith(t *testing.T, text string, o Options) *Server {
	t.Helper()
	cfg, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return serveConfig(t, cfg, o)
}

func serveConfig(t *testing.T, cfg config.Config, o Options) *Server {
	t.Helper()
	if o.Log == nil {
		o.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	s, err := New(cfg, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }() // ends with cancel
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
	})
	ready, stop := context.WithTimeout(ctx, patience)
	defer stop()
	if err := s.WaitSynced(ready); err != nil {
		t.Fatal(err)
	}
	return s
}

// connect returns a connection that ends with the test, before the server does.
func connect(t *testing.T, address net.Addr) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address.String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// ask opens a stream of the legacy protocol on which collections are asked for
// with the permission to send incremental responses.
func ask(t *testing.T, address net.Addr, collections ...string) grpc.ClientStream {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	stream, err := connect(t, address).NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, mcp.SourceMethod)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range collections {
		// An error of the stream shows when it is read.
		_ = stream.SendMsg(&mcpv1.RequestResources{Collection: c, Incremental: true})
	}
	return stream
}

// responses reads and acknowledges until a collection has had so many
// responses, and returns the last of them.
func responses(t *testing.T, stream grpc.ClientStream, collection string, count int) *mcpv1.Resources {
	t.Helper()
	for {
		m := new(mcpv1.Resources)
		if err := stream.RecvMsg(m); err != nil {
			t.Fatal(err)
		}
		if m.GetCollection() == collection {
			if count--; count == 0 {
				return m
			}
		}
		if err := stream.SendMsg(&mcpv1.RequestResources{Collection: m.GetCollection(), ResponseNonce: m.GetNonce(), Incremental: true}); err != nil {
			t.Fatal(err)
		}
	}
}

// Each listener of a list serves xDS, and both protocols without a port of its
// own for the legacy one.
func TestListeners(t *testing.T) {
	s := serve(t, "listen: {xds: ['127.0.0.1:0', {address: '127.0.0.1:0'}], admin: {address: '127.0.0.1:0'}}")
	if len(s.ports) != 3 { // that of the admin pages is the last
		t.Fatalf("%d listeners", len(s.ports))
	}
	for _, l := range s.ports[:2] {
		if m := responses(t, ask(t, l.Addr(), entries), entries, 1); len(m.GetResources()) != 3 {
			t.Errorf("%v: %d resources", l.Addr(), len(m.GetResources()))
		}
	}
}

// With a port of its own the legacy protocol is served there and nowhere else,
// and xDS is not; without one both have one port.
func TestMCPPort(t *testing.T) {
	xds := func(t *testing.T, address net.Addr) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		stream, err := discovery.NewAggregatedDiscoveryServiceClient(connect(t, address)).StreamAggregatedResources(ctx)
		if err != nil {
			t.Fatal(err)
		}
		_ = stream.Send(&discovery.DiscoveryRequest{TypeUrl: "networking.istio.io/v1/ServiceEntry"})
		_, err = stream.Recv()
		return err
	}
	legacy := func(t *testing.T, address net.Addr) error {
		return ask(t, address, entries).RecvMsg(new(mcpv1.Resources))
	}
	for _, tt := range []struct {
		name, listen string
		apart        bool
	}{
		{"its own", "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0, mcp: 127.0.0.1:0}", true},
		{"one for both", "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, tt.listen)
			if err := legacy(t, s.MCPAddr()); err != nil {
				t.Errorf("MCP on its port: %v", err)
			}
			if err := xds(t, s.XDSAddr()); err != nil {
				t.Errorf("xDS on its port: %v", err)
			}
			for what, err := range map[string]error{"MCP on the port of xDS": legacy(t, s.XDSAddr()), "xDS on the port of MCP": xds(t, s.MCPAddr())} {
				if refused := err != nil && strings.Contains(err.Error(), "code = Unimplemented"); refused != tt.apart {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
	}
}

// What the configuration says under mcp is what sinks get and what the admin
// pages show.
func TestMCPOptions(t *testing.T) {
	const listen = "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
	sinks := func(s *Server) []stream.Status { return source{s}.Overview().Sinks }
	for _, tt := range []struct {
		name, config string
		profile      string
		incremental  bool
	}{
		{"nothing", "", "mcp-tools", true},
		{"full_state", "mcp: {full_state: true}", "mcp-tools", false},
		{"profile", "mcp: {profile: pilot-1.6}", "pilot-1.6", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := serve(t, listen+tt.config)
			stream := ask(t, s.MCPAddr(), entries)
			if m := responses(t, stream, entries, 3); m.GetIncremental() != tt.incremental {
				t.Errorf("incremental is %v", m.GetIncremental())
			}
			all := sinks(s)
			if len(all) != 1 || all[0].Protocol != "mcp" || all[0].Profile != tt.profile || len(all[0].Subscriptions) != 1 {
				t.Fatalf("sinks %+v", all)
			}
			if sub := all[0].Subscriptions[0]; sub.TypeURL != entries || sub.State != "sent" || sub.Incremental != tt.incremental {
				t.Errorf("subscription %+v", sub)
			}
		})
	}
	t.Run("synthetic_entries", func(t *testing.T) {
		s := serve(t, listen+"mcp: {synthetic_entries: true}")
		collections, _ := mcp.Asks("pilot-1.4")
		if m := responses(t, ask(t, s.MCPAddr(), collections...), entries, 1); len(m.GetResources()) != 0 {
			t.Errorf("%d ServiceEntries on the main stream", len(m.GetResources()))
		}
		if m := responses(t, ask(t, s.MCPAddr(), synthetic), synthetic, 1); len(m.GetResources()) != 3 {
			t.Errorf("%d synthetic ones", len(m.GetResources()))
		}
	})
	t.Run("waiting", func(t *testing.T) {
		s := serve(t, listen)
		collections, _ := mcp.Asks("pilot-1.8")
		stream := ask(t, s.MCPAddr(), collections...)
		// The others come at once; the one that waits for the entries does not.
		// A nonce of nobody's is ignored.
		first := responses(t, stream, entries, 1)
		if err := stream.SendMsg(&mcpv1.RequestResources{Collection: entries, ResponseNonce: "nobody's"}); err != nil {
			t.Fatal(err)
		}
		waiting := func() (found []string) {
			for _, sub := range sinks(s)[0].Subscriptions {
				if sub.Waiting != "" {
					found = append(found, sub.TypeURL+" waits for "+sub.Waiting)
				}
			}
			return found
		}
		// Not all that was asked for need have been read by then.
		testwait.Eventually(t, patience, "the last collection to wait for the entries", func() (string, bool) {
			got := waiting()
			return fmt.Sprint(got), slices.Equal(got, []string{collections[len(collections)-1] + " waits for " + entries})
		})
		if err := stream.SendMsg(&mcpv1.RequestResources{Collection: entries, ResponseNonce: first.GetNonce()}); err != nil {
			t.Fatal(err)
		}
		responses(t, stream, collections[len(collections)-1], 1)
		if got := waiting(); len(got) != 0 {
			t.Errorf("after the ACK: %v", got)
		}
		if got := sinks(s)[0].StaleNonces; got != 1 {
			t.Errorf("%d stale nonces", got)
		}
	})
}

// sinkFunc is a sink that waits to be dialled.
type sinkFunc func(grpc.ServerStream) error

func (f sinkFunc) establish(s grpc.ServerStream) error { return f(s) }

// The sinks of the configuration are dialled with their files, name and
// headers, and served.
func TestSinks(t *testing.T) {
	theirs, ours := testcert.New(t, "sink.example.org"), testcert.New(t, "isthmus.example.org")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	type call struct {
		token   []string
		trigger string
		entries int
		err     error
	}
	calls := make(chan call, 1)
	done := make(chan struct{}) // closed when the test has seen what it wants
	dialled := grpc.NewServer(grpc.Creds(credentials.NewTLS(theirs.Server(ours))))
	dialled.RegisterService(&grpc.ServiceDesc{
		ServiceName: "istio.mcp.v1alpha1.ResourceSink",
		HandlerType: (*interface {
			establish(s grpc.ServerStream) error
		})(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: "EstablishResourceStream", ServerStreams: true, ClientStreams: true,
			Handler: func(srv any, stream grpc.ServerStream) error { return srv.(sinkFunc).establish(stream) },
		}},
	}, sinkFunc(func(stream grpc.ServerStream) error {
		md, _ := metadata.FromIncomingContext(stream.Context())
		c := call{token: md.Get("authorization")}
		var first, second mcpv1.Resources
		c.err = stream.RecvMsg(&first)
		c.trigger = first.GetCollection()
		c.err = errors.Join(c.err, stream.SendMsg(&mcpv1.RequestResources{Collection: entries}), stream.RecvMsg(&second))
		c.entries = len(second.GetResources())
		select {
		case calls <- c:
		default: // a later call of a test that failed
		}
		<-done
		return nil
	}))
	served := make(chan error, 1)
	go func() { served <- dialled.Serve(listener) }() // ends with Stop
	defer func() {
		close(done)
		dialled.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	s := serve(t, fmt.Sprintf(`
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
sinks:
- address: %q
  tls: {enabled: true, ca_file: %q, cert_file: %q, key_file: %q, server_name: sink.example.org}
  metadata: {authorization: "Bearer ${TOKEN}"}
`, listener.Addr(), theirs.Cert, ours.Cert, ours.Key))
	c := testwait.Receive(t, patience, "the sink to be dialled and served", calls)
	if c.err != nil || c.trigger != mcp.TriggerCollection || c.entries != 3 || !slices.Equal(c.token, []string{"Bearer of TOKEN"}) {
		t.Errorf("the sink saw %+v", c)
	}
	if all := (source{s}).Overview().Sinks; len(all) != 1 || all[0].Protocol != "mcp reverse" || all[0].Address != listener.Addr().String() {
		t.Errorf("sinks %+v", all)
	}
}

// problematic is a server, not running, whose one registry is synced and has
// all the problems that are listed of one.
func problematic(tb testing.TB) *Server {
	tb.Helper()
	cfg, err := config.Parse("isthmus.yaml", []byte("registries: [{name: load, type: sim}]"), config.Options{Adapters: []string{"sim"}})
	if err != nil {
		tb.Fatal(err)
	}
	s, err := New(cfg, Options{})
	if err != nil {
		tb.Fatal(err)
	}
	r := s.db.Registry("load")
	s.members[0].sink.Registry = r
	if err := s.supervise(s.members[0]); err != nil {
		tb.Fatal(err)
	}
	close(s.ready)
	r.Begin(nil)
	m := &pluginv1.WatchResponse{Synced: true}
	for i := range 10_000 {
		m.Problems = append(m.Problems, &pluginv1.Problem{Id: fmt.Sprint("service ", i), Reason: "it has no port"})
	}
	r.Apply(m)
	return s
}

// Whether the bridge is ready is a flag, whatever else there is to tell.
func TestReadyIsAFlag(t *testing.T) {
	s := problematic(t)
	if got := (source{s}).Overview().Registries[0].ProblemCount; got != 10_000 {
		t.Fatalf("%d problems", got)
	}
	if n := testing.AllocsPerRun(100, func() {
		if reasons := (source{s}).NotReady(); len(reasons) > 0 {
			t.Error(reasons)
		}
		if wrong := (source{s}).Conditions(); len(wrong) > 0 {
			t.Error(wrong)
		}
	}); n != 0 {
		t.Errorf("%.0f allocations", n)
	}
}

// BenchmarkReadyz is one probe of a bridge with 10,000 problems.
func BenchmarkReadyz(b *testing.B) {
	h := admin.New(source{problematic(b)}, admin.Options{})
	request := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/readyz", nil)
	b.ReportAllocs()
	for b.Loop() {
		r := httptest.NewRecorder()
		if h.ServeHTTP(r, request); r.Code != http.StatusOK {
			b.Fatal(r.Body)
		}
	}
}
