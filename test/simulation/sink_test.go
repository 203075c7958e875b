package simulation

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
	"github.com/isthmus-mesh/isthmus/verify"
)

// services collects the gRPC services of a bridge.
type services map[string]method

type method struct {
	implementation any
	handler        grpc.StreamHandler
}

// RegisterService implements grpc.ServiceRegistrar.
func (s services) RegisterService(d *grpc.ServiceDesc, implementation any) {
	for _, m := range d.Streams {
		s["/"+d.ServiceName+"/"+m.StreamName] = method{implementation, m.Handler}
	}
}

// pipe is the bridge's end of a stream.
type pipe struct {
	ctx      context.Context
	requests chan []byte

	mu   sync.Mutex
	sent []sent        // guarded by mu
	gate chan struct{} // guarded by mu; not nil while the sink does not read
}

type sent struct {
	at    time.Time
	bytes []byte
}

// Context implements grpc.ServerStream.
func (p *pipe) Context() context.Context { return p.ctx }

// SetHeader implements grpc.ServerStream.
func (p *pipe) SetHeader(metadata.MD) error { return nil }

// SendHeader implements grpc.ServerStream.
func (p *pipe) SendHeader(metadata.MD) error { return nil }

// SetTrailer implements grpc.ServerStream.
func (p *pipe) SetTrailer(metadata.MD) {}

// SendMsg implements grpc.ServerStream.
func (p *pipe) SendMsg(m any) error {
	header, segments := m.(wire.Spliced).Parts()
	b := slices.Concat(append([][]byte{header}, segments...)...)
	p.mu.Lock()
	gate := p.gate
	p.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-p.ctx.Done():
			return p.ctx.Err()
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sent = append(p.sent, sent{time.Now(), b})
	return nil
}

// RecvMsg implements grpc.ServerStream.
func (p *pipe) RecvMsg(m any) error {
	select {
	case b, ok := <-p.requests:
		if !ok {
			return io.EOF
		}
		return wire.NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, m)
	case <-p.ctx.Done():
		return p.ctx.Err()
	}
}

// sink is a model sink.
type sink struct {
	w        *world
	protocol string
	shape    string
	profile  string
	types    []string
	// permits: MCP, incremental responses.
	permits bool
	filter  *view.Filter // of its view, nil is all
	names   bool         // it subscribes to names, not to all

	want map[string][]string // names by type, sorted

	stream  int // 0 while not connected
	pipe    *pipe
	cancel  context.CancelFunc
	have    map[string]map[string]string // version by type and name; of delta and MCP
	answers []answer                     // that it owes
	last    answer                       // that it sent
	stalled bool

	// Its mood.
	slow    time.Duration // how long it takes to answer
	refuses bool
	deaf    bool // does not answer at all
}

type answer struct {
	due     time.Time
	url     string
	nonce   string
	version string
	refuse  bool
}

const (
	sotwMethod  = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
	deltaMethod = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"
	mcpMethod   = "/istio.mcp.v1alpha1.ResourceSource/EstablishResourceStream"
)

// filtered is the admission of a stream that may see some.
type filtered struct{ filter view.Filter }

// Identity implements [stream.Admission].
func (filtered) Identity() string { return "" }

// Views implements [stream.Admission].
func (f filtered) Views() ([]view.Filter, <-chan struct{}) { return []view.Filter{f.filter}, nil }

// connect opens a stream and subscribes.
func (s *sink) connect() {
	w := s.w
	w.streams++
	s.stream = w.streams
	ctx, cancel := context.WithCancel(w.bridge.ctx)
	s.cancel = cancel
	entry, err := w.bridge.streams.Enter(ctx, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	if s.filter != nil {
		entry.SetAdmission(filtered{*s.filter})
	}
	s.pipe = &pipe{ctx: entry.Context(), requests: make(chan []byte, 1000)}
	s.answers, s.last, s.stalled = nil, answer{}, false
	name := map[string]string{"sotw": sotwMethod, "delta": deltaMethod, "mcp": mcpMethod}[s.protocol]
	m, ok := w.bridge.services[name]
	if !ok {
		panic("BUG: no method " + name)
	}
	p := s.pipe
	w.bridge.group.Go(func() { // ends with ctx, or at the end of the requests
		_ = m.handler(m.implementation, p)
		entry.Leave()
		cancel()
	})
	open := &verify.Event{Kind: verify.Open, Stream: s.stream, Protocol: s.protocol, Shape: s.shape, Form: s.profile}
	if s.filter != nil { // a registry is a namespace
		open.Namespaces = slices.Concat(s.filter.Registries, s.filter.Namespaces)
	}
	w.add(open)
	for _, url := range s.types {
		var versions map[string]string
		if s.protocol == "delta" || s.permits {
			versions = s.have[url]
		}
		e := &verify.Event{Type: url, Versions: versions}
		if s.names {
			if len(s.want[url]) == 0 {
				s.want[url] = []string{s.w.anyName(url)} // without a name it would be all
			}
			e.Names = s.want[url]
		}
		s.request(e)
	}
}

// ask subscribes to a name, or unsubscribes from one; one at least stays.
func (s *sink) ask() {
	if s.pipe == nil || !s.names {
		return
	}
	rand := s.w.rand
	url := s.types[rand.IntN(len(s.types))]
	want := s.want[url]
	if len(want) > 1 && rand.IntN(3) == 0 {
		n := rand.IntN(len(want))
		name := want[n]
		s.want[url] = slices.Delete(slices.Clone(want), n, n+1)
		delete(s.have[url], name)
		s.request(&verify.Event{Type: url, Dropped: []string{name}})
		return
	}
	name := s.w.anyName(url) // again, perhaps
	if n, there := slices.BinarySearch(want, name); !there {
		s.want[url] = slices.Insert(slices.Clone(want), n, name)
	}
	s.request(&verify.Event{Type: url, Names: []string{name}})
}

// disconnect ends the stream.
func (s *sink) disconnect(why string) {
	if s.stream == 0 {
		return
	}
	s.cancel()
	s.w.add(&verify.Event{Kind: verify.End, Stream: s.stream, Reason: why})
	s.stream, s.pipe = 0, nil
}

// request sends what an event says.
func (s *sink) request(e *verify.Event) {
	e.Kind, e.Stream = verify.Request, s.stream
	s.w.add(e)
	var refusal *statuspb.Status
	if e.Refused != "" {
		refusal = &statuspb.Status{Code: 3, Message: e.Refused}
	}
	metadata := map[string]*structpb.Value{}
	if s.shape != "" {
		metadata["ISTHMUS_SHAPE"] = structpb.NewStringValue(s.shape)
	}
	node := &core.Node{Id: "model", Metadata: &structpb.Struct{Fields: metadata}}
	var m proto.Message
	switch s.protocol {
	case "sotw":
		m = &discovery.DiscoveryRequest{Node: node, TypeUrl: e.Type, ResponseNonce: e.Nonce, ErrorDetail: refusal, VersionInfo: e.Version}
	case "delta":
		m = &discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: e.Type, ResponseNonce: e.Nonce, ErrorDetail: refusal, InitialResourceVersions: e.Versions, ResourceNamesSubscribe: e.Names, ResourceNamesUnsubscribe: e.Dropped}
	default:
		req := &mcpv1.RequestResources{
			SinkNode: &mcpv1.SinkNode{Id: "model"}, Collection: e.Type, ResponseNonce: e.Nonce,
			InitialResourceVersions: e.Versions, Incremental: s.permits && refusal == nil,
		}
		if refusal != nil {
			req.ErrorDetail = &mcpv1.Status{Code: refusal.GetCode(), Message: refusal.GetMessage()}
		}
		m = req
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		panic(err)
	}
	s.pipe.requests <- b
}

// read returns what was received since the last call, as events.
func (s *sink) read() (events []*verify.Event) {
	if s.pipe == nil {
		return nil
	}
	s.pipe.mu.Lock()
	got := s.pipe.sent
	s.pipe.sent = nil
	s.pipe.mu.Unlock()
	for _, g := range got {
		e := s.decode(g.bytes)
		e.Time, e.Stream = g.at, s.stream
		events = append(events, e)
	}
	return events
}

func (s *sink) decode(b []byte) *verify.Event {
	must := func(err error) {
		if err != nil {
			panic(fmt.Sprintf("a response does not decode: %v", err))
		}
	}
	switch s.protocol {
	case "sotw":
		r := new(discovery.DiscoveryResponse)
		must(proto.Unmarshal(b, r))
		return verify.SotW(r)
	case "delta":
		r := new(discovery.DeltaDiscoveryResponse)
		must(proto.Unmarshal(b, r))
		return verify.Delta(r)
	default:
		r := new(mcpv1.Resources)
		must(proto.Unmarshal(b, r))
		return verify.Legacy(r.GetCollection(), r.GetNonce(), r.GetSystemVersionInfo(), r.GetIncremental(), r.GetResources(), r.GetRemovedResources())
	}
}

// handle applies a response and plans its answer.
func (s *sink) handle(e *verify.Event) {
	refuse := s.refuses && s.w.rand.IntN(3) == 0
	if s.have[e.Type] == nil || !e.Incremental {
		s.have[e.Type] = map[string]string{}
	}
	// What is refused is taken nevertheless: in delta it is not sent again.
	for i := range e.Resources {
		if name := e.Resources[i].Name; !s.names || slices.Contains(s.want[e.Type], name) {
			s.have[e.Type][name] = e.Resources[i].Version
		}
	}
	for _, name := range e.Removed {
		delete(s.have[e.Type], name)
	}
	due := e.Time
	if s.slow > 0 {
		due = due.Add(time.Duration(s.w.rand.Int64N(int64(s.slow))))
	}
	s.answers = append(s.answers, answer{due, e.Type, e.Nonce, e.Version, refuse})
}

// answer sends the answers that are due.
func (s *sink) answer() {
	if s.pipe == nil || s.deaf {
		return
	}
	now := time.Now()
	s.answers = slices.DeleteFunc(s.answers, func(a answer) bool {
		if a.due.After(now) {
			return false
		}
		e := &verify.Event{Type: a.url, Nonce: a.nonce}
		if s.protocol == "sotw" {
			e.Version = a.version
		}
		if a.refuse {
			e.Refused = "not today"
		}
		s.request(e)
		s.last = a
		return true
	})
}

// repeat answers something that was answered before.
func (s *sink) repeat() {
	if s.pipe == nil || s.last.nonce == "" {
		return
	}
	e := &verify.Event{Type: s.last.url, Nonce: s.last.nonce}
	if s.protocol == "sotw" {
		e.Version = s.last.version
	}
	s.request(e)
}

// stall stops or resumes reading.
func (s *sink) stall(on bool) {
	if s.pipe == nil || on == s.stalled {
		return
	}
	s.stalled = on
	s.pipe.mu.Lock()
	defer s.pipe.mu.Unlock()
	if on {
		s.pipe.gate = make(chan struct{})
	} else {
		close(s.pipe.gate)
		s.pipe.gate = nil
	}
}
