package watch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/watch"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/xds"
	"github.com/isthmus-mesh/isthmus/verify"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// take returns what was written since the last call.
func (b *buffer) take() string {
	synctest.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.b.String()
	b.b.Reset()
	return s
}

// env is a server that can go away and come back, on fake time, and a watch of
// it.
type env struct {
	t      *testing.T
	w      *servertest.World
	out    buffer
	stderr buffer
	ended  chan error

	mu       sync.Mutex
	listener *bufconn.Listener
	stop     func()
}

// run starts a server and a watch of it and calls f. The watch ends after f,
// without an error.
func run(t *testing.T, o watch.Options, f func(e *env)) {
	synctest.Test(t, func(t *testing.T) {
		e := &env{t: t, w: servertest.New(t, state.Options{}), ended: make(chan error, 1)}
		e.up(nil)
		defer func() { e.stop() }()
		ctx, cancel := context.WithCancel(t.Context())
		o.Address, o.Stderr = "passthrough:///bufconn", &e.stderr
		o.DialOptions = []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			e.mu.Lock()
			l := e.listener
			e.mu.Unlock()
			if l == nil {
				return nil, errors.New("connection refused")
			}
			return l.DialContext(ctx)
		})}
		go func() { e.ended <- watch.Run(ctx, o, &e.out) }() // ends with cancel below
		synctest.Wait()
		f(e)
		cancel()
		if err := <-e.ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// up starts a server: that of xds, or another.
func (e *env) up(other discovery.AggregatedDiscoveryServiceServer) {
	e.t.Helper()
	server := grpc.NewServer(xds.ServerOptions()...)
	if other != nil {
		discovery.RegisterAggregatedDiscoveryServiceServer(server, other)
	} else {
		s, err := xds.New(e.w.View, xds.Config{}, nil, nil)
		if err != nil {
			e.t.Fatal(err)
		}
		s.Register(server)
	}
	listener := bufconn.Listen(1 << 20)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends with stop
	e.mu.Lock()
	e.listener = listener
	e.mu.Unlock()
	e.stop = func() {
		e.mu.Lock()
		e.listener = nil
		e.mu.Unlock()
		server.Stop()
		if err := <-served; err != nil {
			e.t.Error(err)
		}
	}
}

// set sets a service. Its shape shows by whether it has a selector.
func (e *env) set(name, host string) {
	e.t.Helper()
	e.w.Entry(name, host)
}

func (e *env) remove(name string) { e.w.Remove(name) }

// lines decodes what was printed since the last call to "push op name [host]"
// each, having checked what is common to all.
func (e *env) lines() (out []string) {
	e.t.Helper()
	for line := range strings.Lines(e.out.take()) {
		var l watch.Line
		dec := json.NewDecoder(strings.NewReader(line))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&l); err != nil {
			e.t.Fatalf("%v: %s", err, line)
		}
		if l.Collection != collection.ServiceEntry || (l.Version == "") != (l.Op == "remove") {
			e.t.Errorf("line %+v", l)
		}
		if age := time.Since(l.Time); age < 0 || age > 10*time.Second {
			e.t.Errorf("the time is off by %v", age)
		}
		text := fmt.Sprintf("%d %s %s", l.Push, l.Op, l.Name)
		if len(l.Resource) > 0 {
			var res mcp.Resource
			var se networking.ServiceEntry
			if err := protojson.Unmarshal(l.Resource, &res); err != nil {
				e.t.Fatal(err)
			}
			if err := res.GetBody().UnmarshalTo(&se); err != nil {
				e.t.Fatal(err)
			}
			if res.GetMetadata().GetName() != l.Name || res.GetMetadata().GetVersion() != l.Version {
				e.t.Errorf("line %+v holds %v", l, res.GetMetadata())
			}
			text += " " + strings.Join(se.GetHosts(), " ")
			if se.GetWorkloadSelector() != nil {
				text += " selector"
			}
		}
		out = append(out, text)
	}
	return out
}

func (e *env) want(step string, want ...string) {
	e.t.Helper()
	if d := cmp.Diff(want, e.lines()); d != "" {
		e.t.Errorf("%s (-want +got):\n%s", step, d)
	}
}

// Each change is a line with the number of its response; removals are told
// apart although a state-of-the-world response does not name them. Two types
// are subscribed to, so the first change comes in the third response.
func TestChanges(t *testing.T) {
	for protocol, shape := range map[string]string{"sotw": "", "delta": " selector"} {
		t.Run(protocol, func(t *testing.T) {
			run(t, watch.Options{Protocol: protocol, Output: "json", Body: true}, func(e *env) {
				e.want("nothing yet")
				e.set("ns/a", "a.example.org")
				e.want("one comes", "3 upsert ns/a a.example.org"+shape)
				e.set("ns/b", "b.example.org")
				e.want("another comes", "4 upsert ns/b b.example.org"+shape)
				e.set("ns/a", "c.example.org")
				e.want("one changes", "5 upsert ns/a c.example.org"+shape)
				e.remove("ns/b")
				e.want("one goes", "6 remove ns/b")
			})
		})
	}
}

// A watch whose server goes away tries again, and prints exactly what it
// missed.
func TestReconnect(t *testing.T) {
	for _, protocol := range []string{"sotw", "delta"} {
		t.Run(protocol, func(t *testing.T) {
			run(t, watch.Options{Protocol: protocol, Output: "json", Types: []string{"networking.istio.io/v1alpha3/ServiceEntry"}}, func(e *env) {
				e.set("ns/same", "same.example.org")
				e.set("ns/changes", "a.example.org")
				e.set("ns/goes", "goes.example.org")
				e.lines()
				e.stop()
				e.set("ns/changes", "b.example.org")
				e.remove("ns/goes")
				e.set("ns/new", "new.example.org")
				<-time.After(time.Minute)
				e.want("the server is away")
				if log := e.stderr.take(); strings.Count(log, "\n") != 2 || !strings.Contains(log, "bufconn: error reading from server: EOF; connecting again") ||
					!strings.Contains(log, "bufconn: nothing listens there (connection refused): is the bridge running") {
					t.Errorf("stderr says:\n%s", log)
				}
				<-time.After(time.Minute)
				if log := e.stderr.take(); strings.Count(log, "\n") != 1 {
					t.Errorf("a minute later stderr says:\n%s", log)
				}
				e.up(nil)
				<-time.After(6 * time.Second)
				got := e.lines()
				for i := range got {
					_, got[i], _ = strings.Cut(got[i], " ")
				}
				if d := cmp.Diff([]string{"upsert ns/changes", "upsert ns/new", "remove ns/goes"}, got); d != "" {
					t.Errorf("the server is back (-want +got):\n%s", d)
				}
			})
		})
	}
}

// A recording has what was sent and received on each stream; a judge that is
// told what the registry had finds nothing wrong with it, and notices a line
// that is missing.
func TestRecord(t *testing.T) {
	for _, protocol := range []string{"sotw", "delta"} {
		t.Run(protocol, func(t *testing.T) {
			var recording buffer
			run(t, watch.Options{Protocol: protocol, Record: &recording, Types: []string{"networking.istio.io/v1/ServiceEntry"}}, func(e *env) {
				e.set("ns/a", "a.example.org")
				e.out.take()
				e.set("ns/a", "b.example.org")
				e.out.take()
				e.stop()
				e.up(nil)
				<-time.After(time.Minute)
				e.set("ns/b", "b.example.org")
				e.out.take()
			})
			lines := strings.SplitAfter(recording.b.String(), "\n")
			judge := func(lines []string) (kinds string, violations []verify.Violation) {
				j := verify.New()
				j.Add(&verify.Event{Kind: verify.Truth, Collection: collection.ServiceEntry, Name: "ns/a", Revision: 1})
				j.Add(&verify.Event{Kind: verify.Truth, Collection: collection.ServiceEntry, Name: "ns/b", Revision: 2})
				if err := verify.Read(strings.NewReader(strings.Join(lines, "")), func(_ int, e *verify.Event) error {
					kinds += e.Kind[:3] + " "
					violations = append(violations, j.Add(e)...)
					return nil
				}); err != nil {
					t.Fatal(err)
				}
				return kinds, violations
			}
			kinds, violations := judge(lines)
			if len(violations) > 0 || !strings.HasPrefix(kinds, "ope req res req res req ") || !strings.Contains(kinds, "end ope req res req ") || !strings.HasSuffix(kinds, "res req end ") {
				t.Errorf("the recording has %s, with %v", kinds, violations)
			}
			at := strings.Index(kinds, "req res req res") / 4
			if _, violations := judge(slices.Delete(slices.Clone(lines), at+2, at+3)); len(violations) != 1 || violations[0].Guarantee != verify.OneInFlight {
				t.Errorf("without an ACK: %v", violations)
			}
		})
	}
}

// A shape that is asked for is got.
func TestShape(t *testing.T) {
	run(t, watch.Options{Protocol: "delta", Output: "json", Body: true, Shape: "inline"}, func(e *env) {
		e.set("ns/a", "a.example.org")
		e.want("inline", "3 upsert ns/a a.example.org")
	})
	run(t, watch.Options{Protocol: "sotw", Output: "json", Body: true, Shape: "workload"}, func(e *env) {
		e.set("ns/a", "a.example.org")
		e.want("workload", "3 upsert ns/a a.example.org selector")
	})
}

// Of several registries those that are asked for are printed, together with the
// other filters, and whose a resource is that changes hands.
func TestRegistry(t *testing.T) {
	for _, protocol := range []string{"sotw", "delta"} {
		t.Run(protocol, func(t *testing.T) {
			run(t, watch.Options{Protocol: protocol, Registry: "gate", ChangesOnly: true, Namespace: "n*"}, func(e *env) {
				e.set("ns/a", "a.example.org")
				e.w.EntryFrom("gate", "ns/b", "x.example.org")
				e.w.EntryFrom("gate", "other/b", "x.example.org")
				if got := e.out.take(); !strings.Contains(got, "upsert  ServiceEntry   ns/b  of gate") || strings.Count(got, "\n") != 1 {
					t.Errorf("printed %q", got)
				}
				e.set("ns/b", "b.example.org") // of dc1, which comes first
				if got := e.out.take(); !strings.Contains(got, "ns/b  of dc1  was of gate") || strings.Count(got, "\n") != 1 {
					t.Errorf("printed %q", got)
				}
				e.remove("ns/b") // gate has it still
				if got := e.out.take(); !strings.Contains(got, "ns/b  of gate  was of dc1") || strings.Count(got, "\n") != 1 {
					t.Errorf("printed %q", got)
				}
				e.w.RemoveFrom("gate", "ns/b")
				e.remove("ns/a")
				if got := e.out.take(); !strings.Contains(got, "remove  ServiceEntry   ns/b  of gate") || strings.Count(got, "\n") != 1 {
					t.Errorf("printed %q", got)
				}
			})
		})
	}
}

// Text has one line per change too, with the body at its end.
func TestText(t *testing.T) {
	run(t, watch.Options{Body: true}, func(e *env) {
		e.set("ns/a", "a.example.org")
		got := e.out.take()
		for _, want := range []string{"push 3 ", "upsert", "ServiceEntry", "ns/a", `"hosts":["a.example.org"]`, `"workloadSelector"`} {
			if !strings.Contains(got, want) {
				t.Errorf("no %q in %q", want, got)
			}
		}
		e.remove("ns/a")
		if got += e.out.take(); strings.Count(got, "\n") != 2 || !strings.Contains(got, "remove  ServiceEntry   ns/a\n") {
			t.Errorf("printed %q", got)
		}
	})
}

// Messages may be larger than gRPC accepts by default.
func TestBigMessage(t *testing.T) {
	run(t, watch.Options{Protocol: "sotw", Output: "json"}, func(e *env) {
		e.stop()
		for i := range 12 {
			e.set(fmt.Sprintf("ns/s%d", i), strings.Repeat("x", 500_000+i))
		}
		e.up(nil)
		<-time.After(time.Second)
		if got := e.lines(); len(got) != 12 {
			t.Errorf("%d lines, want 12; stderr: %s", len(got), e.stderr.take())
		}
	})
}

// rogue sends, on the n-th request, the n-th response.
type rogue struct {
	discovery.UnimplementedAggregatedDiscoveryServiceServer
	responses []*discovery.DiscoveryResponse
	requests  chan *discovery.DiscoveryRequest
}

func (r *rogue) StreamAggregatedResources(stream discovery.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	for i := 0; ; i++ {
		req, err := stream.Recv()
		if err != nil {
			return err
		}
		r.requests <- req
		if i < len(r.responses) {
			if err := stream.Send(r.responses[i]); err != nil {
				return err
			}
		}
	}
}

// A response that does not decode, or that nobody asked for, is refused with
// the reason and changes nothing.
func TestRefusal(t *testing.T) {
	const url = "networking.istio.io/v1/ServiceEntry"
	r := &rogue{responses: []*discovery.DiscoveryResponse{
		{TypeUrl: url, VersionInfo: "good", Nonce: "1"},
		{TypeUrl: url, VersionInfo: "bad", Nonce: "2", Resources: []*anypb.Any{{TypeUrl: "type.googleapis.com/google.protobuf.Empty"}}},
		{TypeUrl: "other", VersionInfo: "bad", Nonce: "3"},
	}}
	run(t, watch.Options{Protocol: "sotw", Types: []string{url}}, func(e *env) {
		r.requests = make(chan *discovery.DiscoveryRequest, 10)
		e.stop()
		e.up(r)
		<-time.After(time.Second)
		var got []string
		for len(r.requests) > 0 {
			req := <-r.requests
			got = append(got, fmt.Sprintf("%s %s %s %t", req.GetTypeUrl(), req.GetVersionInfo(), req.GetResponseNonce(), req.GetErrorDetail() != nil))
		}
		want := []string{url + "   false", url + " good 1 false", url + " good 2 true", "other  3 true"}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("requests (-want +got):\n%s", d)
		}
		if log := e.stderr.take(); strings.Count(log, "refused") != 2 {
			t.Errorf("stderr says %q", log)
		}
	})
}

// full is a disk that is.
type full struct{}

var errFull = errors.New("no space left")

func (full) Write([]byte) (int, error) { return 0, errFull }

// A watch that can not print ends with the reason.
func TestWriteError(t *testing.T) {
	run(t, watch.Options{}, func(e *env) {
		e.set("ns/a", "a.example.org")
		o := watch.Options{Address: "passthrough:///bufconn", DialOptions: []grpc.DialOption{
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return e.listener.DialContext(ctx) }),
		}}
		if err := watch.Run(e.t.Context(), o, full{}); !errors.Is(err, errFull) {
			t.Errorf("Run: %v", err)
		}
	})
}

// What keeps a stream from being opened is said in words, with the cure.
func TestReasons(t *testing.T) {
	listen := func() net.Listener {
		t.Helper()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	closed := listen()
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	pages := httptest.NewServer(http.NotFoundHandler())
	defer pages.Close()
	other := grpc.NewServer()
	at := listen()
	go func() { _ = other.Serve(at) }() // ends with Stop
	defer other.Stop()
	for _, tt := range []struct{ address, protocol, want string }{
		{closed.Addr().String(), "delta", "nothing listens there (connection refused): is the bridge running"},
		{pages.Listener.Addr().String(), "sotw", "what answers there speaks HTTP/1.1 and not gRPC: is this the address after xds="},
		{"nowhere.invalid:1", "delta", "the name of the host is not known ("},
		{at.Addr().String(), "delta", "the server does not have the protocol delta: choose another with --protocol"},
		{at.Addr().String(), "mcp", "the server does not have the protocol mcp: choose another with --protocol"},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		said := firstLine{cancel: cancel}
		if err := watch.Run(ctx, watch.Options{Address: tt.address, Protocol: tt.protocol, Stderr: &said}, full{}); err != nil {
			t.Errorf("Run: %v", err)
		}
		if !strings.HasPrefix(said.text, tt.address+": "+tt.want) || !strings.HasSuffix(said.text, "; connecting again until it answers\n") {
			t.Errorf("%s: stderr says %q", tt.address, said.text)
		}
	}
}

// firstLine keeps what is written first.
type firstLine struct {
	cancel context.CancelFunc
	text   string
}

func (f *firstLine) Write(b []byte) (int, error) {
	if f.text == "" {
		f.text = string(b)
		f.cancel()
	}
	return len(b), nil
}

// Addresses and type URLs that cannot be right are refused, and others are not.
func TestForms(t *testing.T) {
	for want, options := range map[string][]watch.Options{
		"": {
			{Address: "127.0.0.1:1"},
			{Address: "[::1]:15051"},
			{Address: "dns:///isthmus.example.org:15051"},
			{Address: "a.example.org:1", Types: []string{"networking.istio.io/v1alpha3/ServiceEntry", "type.googleapis.com/envoy.config.cluster.v3.Cluster"}},
			{Address: "a:1", Protocol: "mcp", Types: []string{"istio/networking/v1alpha3/synthetic/serviceentries"}},
			{Listen: ":0", Protocol: "mcp"},
		},
		": must be host:port": {
			{Address: "foo"},
			{Address: ":15051"},
			{Address: "foo:0"},
			{Address: "foo:xds"},
			{Address: "foo:70000"},
			{Address: "http://foo:15080"},
			{Listen: "foo", Protocol: "mcp"},
		},
		": must be a type URL": {
			{Address: "a:1", Types: []string{"foo"}},
			{Address: "a:1", Types: []string{"networking.istio.io/ServiceEntry"}},
			{Address: "a:1", Types: []string{"networking.istio.io//ServiceEntry"}},
			{Address: "a:1", Types: []string{"istio/networking/v1alpha3/serviceentries"}},
			{Address: "a:1", Types: []string{"networking.istio.io/v1/Service Entry"}},
		},
		": must be a collection": {{Address: "a:1", Protocol: "mcp", Types: []string{"serviceentries"}}},
	} {
		for _, o := range options {
			err := o.Validate()
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%+v: error %v, want %q", o, err, want)
			}
		}
	}
}

// What is wrong with options is said, all of it.
func TestOptions(t *testing.T) {
	err := watch.Run(t.Context(), watch.Options{Protocol: "a", Output: "b", Shape: "c", Types: []string{"", "x", "x"}}, full{})
	for _, want := range []string{"--address: is missing", "--protocol a: ", "--output b: ", "--shape c: ", `--type "": must be a type URL`, `--type "x": is there twice`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}
