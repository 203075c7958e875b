package mcp

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

var update = flag.Bool("update", false, "write testdata/*.txtar anew")

// Each file of testdata is a rule of the protocol: a script, and what then travels in both directions, in whole messages. Time is
// fake; after each step the transcript waits until nothing moves any more.
//
//	config synthetic|full-state|profile=NAME   comes first
//	entry NAME HOST [dns]                      sets a service
//	instance SERVICE NAME ADDRESS PORT         sets an instance
//	crowd SERVICE COUNT BYTES                  sets instances of about so many bytes each
//	drop SERVICE NAME, remove NAME             remove them
//	gateway NAME                               sets a Gateway
//	many COUNT BYTES                           sets services with hosts that make them about so large
//	hold COLLECTION, open COLLECTION           a registry has not completed its first listing, has
//	stream NAME                                opens a stream
//	NAME ask COLLECTIONS [incremental] [id=ID] [have NAME=VERSION...]
//	NAME profile PROFILE [but COLLECTION] [incremental]
//	                                           asks for what a sink of that profile asks for
//	NAME ack COLLECTION [incremental]          acknowledges its newest response
//	NAME acks [incremental]                    acknowledges everything, serviceentries last
//	NAME nack COLLECTION CODE DETAIL           refuses it
//	NAME send JSON                             sends a request as it is
//	NAME garbage                               sends what is no protobuf message
//	NAME close                                 closes the sink's side
//	NAME cancel                                goes away
//	wait DURATION                              lets time pass
//	status                                     prints what Status says
//	shutdown                                   ends the server
//
// A collection without a slash is one of istio/networking/v1alpha3.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, error %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var script, want string
			for _, f := range a.Files {
				switch f.Name {
				case "script":
					script = string(f.Data)
				case "transcript":
					want = string(f.Data)
				}
			}
			got := play(t, script)
			if *update {
				a.Files = []txtar.File{{Name: "script", Data: []byte(script)}, {Name: "transcript", Data: []byte(got)}}
				if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if d := cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")); d != "" {
				t.Errorf("(-want +got), -update accepts it:\n%s", d)
			}
		})
	}
}

// player is one end of all streams of a transcript.
type player struct {
	t       *testing.T
	w       *servertest.World
	server  *Server
	conn    *grpc.ClientConn
	streams map[string]*playerStream
	order   []*playerStream
	out     strings.Builder
	warned  chan string
	started time.Time
}

type playerStream struct {
	name   string
	stream grpc.ClientStream
	cancel context.CancelFunc
	got    chan any          // *mcpv1.Resources or error
	nonces map[string]string // of the newest response to each collection, "" once it was answered
	order  []string          // collections that have an unanswered response
	// last says when the newest one came
	last time.Time
}

// serveBufconn starts s over an in-memory connection, and returns a client's connection.
func serveBufconn(t testing.TB, s *Server, options ...grpc.CallOption) (conn *grpc.ClientConn, stop func()) {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(grpc.ForceServerCodecV2(wire.NewCodec()), grpc.MaxRecvMsgSize(64<<20)) // as xds.ServerOptions
	s.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends with Stop below
	conn, err := grpc.NewClient("passthrough:///bufconn",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(append([]grpc.CallOption{grpc.MaxCallRecvMsgSize(1 << 30), grpc.ForceCodecV2(wire.NewCodec())}, options...)...))
	if err != nil {
		t.Fatal(err)
	}
	return conn, func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// warnings hands on what is logged as a warning.
type warnings struct {
	slog.Handler
	to chan<- string
}

func (w warnings) WithAttrs(a []slog.Attr) slog.Handler {
	return warnings{w.Handler.WithAttrs(a), w.to}
}

func (w warnings) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelWarn {
		var b strings.Builder
		fmt.Fprintf(&b, "log: %s", r.Message)
		r.Attrs(func(a slog.Attr) bool {
			fmt.Fprintf(&b, " %s=%v", a.Key, a.Value)
			return true
		})
		w.to <- b.String()
	}
	return w.Handler.Handle(ctx, r)
}

func play(t *testing.T, script string) string {
	var out string
	synctest.Test(t, func(t *testing.T) {
		p := &player{
			t: t, w: newWorld(t, state.Options{Tombstones: 4}), streams: map[string]*playerStream{}, started: time.Now(),
			warned: make(chan string, 1000),
		}
		config := Config{}
		if first, rest, _ := strings.Cut(script, "\n"); strings.HasPrefix(first, "config ") {
			script = rest
			for _, f := range strings.Fields(first)[1:] {
				name, value, _ := strings.Cut(f, "=")
				switch name {
				case "synthetic":
					config.SyntheticEntries = true
				case "full-state":
					config.FullState = true
				case "profile":
					config.Profile = value
				default:
					t.Fatalf("config: %s", f)
				}
			}
		}
		var err error
		log := slog.New(warnings{slog.NewTextHandler(t.Output(), nil), p.warned})
		p.server, err = New(p.w.View, config, log, prometheus.NewRegistry())
		if err != nil {
			t.Fatal(err)
		}
		conn, stop := serveBufconn(t, p.server)
		defer stop()
		p.conn = conn
		for line := range strings.Lines(script) {
			if line = strings.TrimSpace(line); line == "" {
				continue
			}
			if strings.HasPrefix(line, "#") {
				fmt.Fprintln(&p.out, line)
				continue
			}
			p.step(line)
			p.collect()
		}
		for _, s := range p.order {
			s.cancel()
		}
		out = p.out.String()
	})
	return out
}

func (p *player) step(line string) {
	p.t.Helper()
	f := strings.Fields(line)
	if s := p.streams[f[0]]; s != nil {
		p.request(s, f[1], strings.TrimSpace(strings.TrimPrefix(line, f[0]+" "+f[1])))
		return
	}
	fmt.Fprintf(&p.out, "%s\n", line)
	number := func(s string) int {
		n, err := strconv.Atoi(s)
		if err != nil {
			p.t.Fatal(err)
		}
		return n
	}
	switch f[0] {
	case "entry":
		resolution := networking.ServiceEntry_STATIC
		if len(f) > 3 {
			resolution = networking.ServiceEntry_DNS
		}
		p.w.EntryOf(f[1], f[2], resolution)
	case "instance":
		p.w.Instance(f[1], f[2], f[3], 0, servertest.Port{Name: "http", Number: uint32(number(f[4]))})
	case "crowd":
		p.w.Crowd(f[1], number(f[2]), number(f[3]))
	case "drop":
		p.w.Drop(f[2])
	case "remove":
		p.w.Remove(f[1])
	case "gateway":
		p.w.Publish(f[1], &networking.Gateway{Selector: map[string]string{"app": f[1]}})
	case "many":
		for i := range number(f[1]) {
			p.w.Publish(fmt.Sprintf("dc1/s%d", i), &networking.ServiceEntry{Hosts: []string{strings.Repeat("x", number(f[2]))}})
		}
	case "hold", "open":
		p.w.Hold(f[1], f[0] == "hold")
	case "wait":
		d, err := time.ParseDuration(f[1])
		if err != nil {
			p.t.Fatal(err)
		}
		<-time.After(d)
	case "stream":
		p.open(f[1])
	case "shutdown":
		p.server.Shutdown()
	case "status":
		synctest.Wait()
		for _, s := range p.server.Status() {
			raw, err := json.Marshal(shown(s))
			if err != nil {
				p.t.Fatal(err)
			}
			fmt.Fprintf(&p.out, "status %s\n", raw)
		}
	default:
		p.t.Fatalf("script: %s", line)
	}
}

func (p *player) open(name string) {
	ctx, cancel := context.WithCancel(p.t.Context())
	stream, err := p.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, SourceMethod)
	if err != nil {
		p.t.Fatal(err)
	}
	s := &playerStream{name: name, stream: stream, cancel: cancel, got: make(chan any, 1000), nonces: map[string]string{}, last: time.Now()}
	go func() { // ends with the stream, at the latest when the connection is closed
		for {
			m := new(mcpv1.Resources)
			if err := stream.RecvMsg(m); err != nil {
				s.got <- err
				return
			}
			s.got <- m
		}
	}()
	if i := slices.IndexFunc(p.order, func(o *playerStream) bool { return o.name == name }); i >= 0 {
		p.order = slices.Delete(p.order, i, i+1)
	}
	p.streams[name] = s
	p.order = append(p.order, s)
}

func long(name string) string {
	if strings.Contains(name, "/") || strings.HasPrefix(name, "$") {
		return name
	}
	return "istio/networking/v1alpha3/" + name
}

// request sends what a line says.
func (p *player) request(s *playerStream, verb, rest string) {
	p.t.Helper()
	f := strings.Fields(rest)
	incremental := slices.Contains(f, "incremental")
	switch verb {
	case "ask":
		req := &mcpv1.RequestResources{Incremental: incremental}
		for i, word := range f[1:] {
			if id, ok := strings.CutPrefix(word, "id="); ok {
				req.SinkNode = &mcpv1.SinkNode{Id: id}
			}
			if word == "have" {
				req.InitialResourceVersions = map[string]string{}
				for _, pair := range f[i+2:] {
					name, version, _ := strings.Cut(pair, "=")
					req.InitialResourceVersions[name] = version
				}
				break
			}
		}
		for name := range strings.SplitSeq(f[0], ",") {
			req.Collection = long(name)
			s.answer(req.GetCollection())
			p.send(s, req)
		}
	case "profile":
		fmt.Fprintf(&p.out, "%s > asks for all of %s\n", s.name, rest)
		for _, name := range mustProfile(f[0]).collections {
			if len(f) > 2 && f[1] == "but" && long(f[2]) == name {
				continue
			}
			if err := s.stream.SendMsg(&mcpv1.RequestResources{Collection: name, Incremental: incremental}); err != nil {
				p.t.Fatal(err)
			}
		}
	case "ack":
		p.send(s, &mcpv1.RequestResources{Collection: long(f[0]), ResponseNonce: s.answer(long(f[0])), Incremental: incremental})
	case "acks":
		slices.SortStableFunc(s.order, func(a, b string) int {
			switch {
			case a == serviceEntries:
				return 1
			case b == serviceEntries:
				return -1
			}
			return 0
		})
		fmt.Fprintf(&p.out, "%s > acknowledges %d responses\n", s.name, len(s.order))
		for _, name := range slices.Clone(s.order) {
			if err := s.stream.SendMsg(&mcpv1.RequestResources{Collection: name, ResponseNonce: s.answer(name), Incremental: incremental}); err != nil {
				p.t.Fatal(err)
			}
		}
	case "nack":
		code, err := strconv.Atoi(f[1])
		if err != nil {
			p.t.Fatal(err)
		}
		p.send(s, &mcpv1.RequestResources{
			Collection: long(f[0]), ResponseNonce: s.answer(long(f[0])),
			ErrorDetail: &mcpv1.Status{Code: int32(code), Message: strings.Join(f[2:], " ")},
		})
	case "send":
		req := new(mcpv1.RequestResources)
		if err := protojson.Unmarshal([]byte(rest), req); err != nil {
			p.t.Fatal(err)
		}
		p.send(s, req)
	case "garbage":
		fmt.Fprintf(&p.out, "%s > garbage\n", s.name)
		if err := s.stream.SendMsg(&stream.Message{Header: []byte{0xff, 0xff, 0xff}}); err != nil {
			p.t.Fatal(err)
		}
	case "close":
		fmt.Fprintf(&p.out, "%s > close\n", s.name)
		if err := s.stream.CloseSend(); err != nil {
			p.t.Fatal(err)
		}
	case "cancel":
		fmt.Fprintf(&p.out, "%s > cancel\n", s.name)
		s.cancel()
	default:
		p.t.Fatalf("script: %s %s", verb, rest)
	}
}

func (p *player) send(s *playerStream, req *mcpv1.RequestResources) {
	p.t.Helper()
	fmt.Fprintf(&p.out, "%s > %s\n", s.name, compact(p.t, req))
	if err := s.stream.SendMsg(req); err != nil {
		p.t.Fatal(err)
	}
}

// answer returns the nonce to answer with.
func (s *playerStream) answer(name string) string {
	if i := slices.Index(s.order, name); i >= 0 {
		s.order = slices.Delete(s.order, i, i+1)
	}
	return s.nonces[name]
}

func compact(t testing.TB, m proto.Message) string {
	t.Helper()
	raw, err := protojson.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil { // protojson varies its spaces on purpose
		t.Fatal(err)
	}
	return b.String()
}

// collect prints what came.
func (p *player) collect() {
	synctest.Wait()
	for len(p.warned) > 0 {
		fmt.Fprintln(&p.out, <-p.warned)
	}
	for _, s := range p.order {
		for len(s.got) > 0 {
			since := time.Since(p.started).Round(time.Millisecond)
			switch m := (<-s.got).(type) {
			case error:
				fmt.Fprintf(&p.out, "%s < after %v: %v\n", s.name, since, m)
			case *mcpv1.Resources:
				if _, twice := s.nonces[m.GetCollection()]; twice && slices.Contains(s.order, m.GetCollection()) {
					p.t.Errorf("a second response to %s is under way", m.GetCollection())
				}
				s.nonces[m.GetCollection()] = m.GetNonce()
				s.order = append(s.order, m.GetCollection())
				p.print(s, since, m)
			}
		}
	}
}

// print shows a response whole, or sums it up if it is long.
func (p *player) print(s *playerStream, since time.Duration, m *mcpv1.Resources) {
	resources := m.GetResources()
	if len(resources) == 0 && !m.GetIncremental() && len(m.GetRemovedResources()) == 0 {
		fmt.Fprintf(&p.out, "%s < after %v: %s nonce=%s empty\n", s.name, since, m.GetCollection(), m.GetNonce())
		return
	}
	kind := "full"
	if m.GetIncremental() {
		kind = "incremental"
	}
	fmt.Fprintf(&p.out, "%s < after %v: %s nonce=%s %s version=%s\n", s.name, since, m.GetCollection(), m.GetNonce(), kind, m.GetSystemVersionInfo())
	if len(resources) > 9 {
		fmt.Fprintf(&p.out, "    %d resources, message of %d bytes\n", len(resources), proto.Size(m))
		resources = nil
	}
	var lines []string
	for _, raw := range resources {
		var res mcp.Resource
		if err := proto.Unmarshal(raw, &res); err != nil {
			p.t.Fatal(err)
		}
		lines = append(lines, compact(p.t, &res))
	}
	slices.Sort(lines)
	for _, line := range lines {
		if len(line) > 1000 {
			line = line[:100] + "..."
		}
		fmt.Fprintf(&p.out, "    %s\n", line)
	}
	for _, name := range m.GetRemovedResources() {
		fmt.Fprintf(&p.out, "    removed %s\n", name)
	}
}

// shownStatus is what the transcripts show of a stream.
type shownStatus struct {
	Address       string              `json:"address"`
	Node          string              `json:"node"`
	Profile       string              `json:"profile"`
	Shape         string              `json:"shape"`
	Reverse       bool                `json:"reverse"`
	Connected     time.Time           `json:"connected"`
	StaleNonces   uint64              `json:"stale_nonces"`
	Subscriptions []shownSubscription `json:"subscriptions"`
}

type shownSubscription struct {
	Name string `json:"name"`
	view.Status
	Incremental bool   `json:"incremental"`
	Oversize    bool   `json:"oversize,omitempty"`
	Waiting     string `json:"waiting,omitempty"`
	Lag         uint64 `json:"lag"`
}

func shown(s stream.Status) shownStatus {
	out := shownStatus{s.Address, s.Node, s.Profile, s.Shape, s.Protocol == "mcp reverse", s.Connected.UTC(), s.StaleNonces, []shownSubscription{}}
	for _, u := range s.Subscriptions {
		out.Subscriptions = append(out.Subscriptions, shownSubscription{u.TypeURL, u.Status, u.Incremental, u.Oversize, u.Waiting, u.Lag})
	}
	return out
}
