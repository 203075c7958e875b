package xds

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
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
)

var update = flag.Bool("update", false, "write testdata/*.txtar anew")

// Each file of testdata is a rule of the protocol: a script, and what then travels in both directions, in whole messages. Time is
// fake; after each step the transcript waits until nothing moves any more.
//
//	entry NAME HOST [PORT=NUMBER]...  sets a service
//	instance SERVICE NAME ADDRESS [WEIGHT] [PORT=NUMBER]...
//	                                  sets an instance
//	drop SERVICE NAME, remove NAME    remove them
//	hold COLLECTION, open COLLECTION  a registry has not completed its first listing, has
//	stream NAME sotw|delta            opens a stream
//	NAME JSON                         sends a request; TYPE(nonce) is not needed, see ack
//	NAME ack URL [JSON]               acknowledges the newest response for a type URL, with more fields
//	NAME nack URL DETAIL              refuses it
//	NAME close                        closes the sink's side
//	wait DURATION                     lets time pass
//	status                            prints what Status says
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
	client  discovery.AggregatedDiscoveryServiceClient
	streams map[string]*playerStream
	order   []*playerStream
	out     strings.Builder
	started time.Time
}

type playerStream struct {
	name  string
	delta bool
	send  func(proto.Message) error
	close func() error
	got   chan any // proto.Message or error
	last  map[string][2]string
}

// serveBufconn starts s over an in-memory connection until the test ends, and returns a client's connection.
func serveBufconn(t testing.TB, s *Server, options ...grpc.DialOption) (conn *grpc.ClientConn, stop func()) {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(ServerOptions()...)
	s.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends with Stop below
	conn, err := grpc.NewClient("passthrough:///bufconn", append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1 << 30)),
	}, options...)...)
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

func play(t *testing.T, script string) string {
	var out string
	synctest.Test(t, func(t *testing.T) {
		p := &player{t: t, w: servertest.New(t, state.Options{Tombstones: 4}), streams: map[string]*playerStream{}, started: time.Now()}
		config := Config{}
		if first, rest, _ := strings.Cut(script, "\n"); strings.HasPrefix(first, "profile ") {
			config.Profile, script = strings.TrimPrefix(first, "profile "), rest
		}
		var err error
		p.server, err = New(p.w.View, config, slog.New(slog.NewTextHandler(t.Output(), nil)), prometheus.NewRegistry())
		if err != nil {
			t.Fatal(err)
		}
		conn, stop := serveBufconn(t, p.server)
		defer stop()
		defer p.w.Follow()()
		p.client = discovery.NewAggregatedDiscoveryServiceClient(conn)
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
		out = p.out.String()
	})
	return out
}

func (p *player) step(line string) {
	p.t.Helper()
	f := strings.Fields(line)
	if s := p.streams[f[0]]; s != nil {
		p.request(s, strings.TrimSpace(strings.TrimPrefix(line, f[0])))
		return
	}
	fmt.Fprintf(&p.out, "%s\n", line)
	switch f[0] {
	case "entry":
		p.w.Entry(f[1], f[2], p.ports(f[3:])...)
	case "instance":
		weight, rest := uint32(0), f[4:]
		if len(rest) > 0 && !strings.Contains(rest[0], "=") {
			weight, rest = p.number(rest[0]), rest[1:]
		}
		p.w.Instance(f[1], f[2], f[3], weight, p.ports(rest)...)
	case "drop":
		p.w.Drop(f[2])
	case "remove":
		p.w.Remove(f[1])
	case "hold", "open":
		p.w.Hold(f[1], f[0] == "hold")
	case "wait":
		d, err := time.ParseDuration(f[1])
		if err != nil {
			p.t.Fatal(err)
		}
		<-time.After(d)
	case "stream":
		p.open(f[1], f[2] == "delta")
	case "shutdown":
		p.server.Shutdown()
	case "status":
		synctest.Wait()
		for _, s := range p.server.Status() {
			s.Connected = s.Connected.UTC()
			p.json("status", s)
		}
	default:
		p.t.Fatalf("script: %s", line)
	}
}

func (p *player) number(s string) uint32 {
	p.t.Helper()
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		p.t.Fatal(err)
	}
	return uint32(n)
}

// ports reads PORT=NUMBER.
func (p *player) ports(words []string) []servertest.Port {
	p.t.Helper()
	var ports []servertest.Port
	for _, word := range words {
		name, number, _ := strings.Cut(word, "=")
		ports = append(ports, servertest.Port{Name: name, Number: p.number(number)})
	}
	return ports
}

func (p *player) open(name string, delta bool) {
	ctx := p.t.Context()
	s := &playerStream{name: name, delta: delta, got: make(chan any, 1000), last: map[string][2]string{}}
	var recv func() (proto.Message, error)
	if delta {
		stream, err := p.client.DeltaAggregatedResources(ctx)
		if err != nil {
			p.t.Fatal(err)
		}
		s.send = func(m proto.Message) error { return stream.Send(m.(*discovery.DeltaDiscoveryRequest)) }
		recv = func() (proto.Message, error) { return stream.Recv() }
		s.close = stream.CloseSend
	} else {
		stream, err := p.client.StreamAggregatedResources(ctx)
		if err != nil {
			p.t.Fatal(err)
		}
		s.send = func(m proto.Message) error { return stream.Send(m.(*discovery.DiscoveryRequest)) }
		recv = func() (proto.Message, error) { return stream.Recv() }
		s.close = stream.CloseSend
	}
	go func() { // ends with the stream, at the latest when the connection is closed
		for {
			m, err := recv()
			if err != nil {
				s.got <- err
				return
			}
			s.got <- m
		}
	}()
	p.streams[name] = s
	p.order = append(p.order, s)
}

// request sends what a line says.
func (p *player) request(s *playerStream, line string) {
	p.t.Helper()
	if line == "close" {
		fmt.Fprintf(&p.out, "%s > close\n", s.name)
		if err := s.close(); err != nil {
			p.t.Fatal(err)
		}
		return
	}
	req := proto.Message(&discovery.DiscoveryRequest{})
	if s.delta {
		req = &discovery.DeltaDiscoveryRequest{}
	}
	fields := map[string]any{}
	verb, rest, _ := strings.Cut(line, " ")
	if verb == "ack" || verb == "nack" {
		url, more, _ := strings.Cut(rest, " ")
		last := s.last[url]
		fields["typeUrl"], fields["responseNonce"] = url, last[1]
		if !s.delta {
			fields["versionInfo"] = last[0]
		}
		line = more
		if verb == "nack" {
			fields["errorDetail"], line = map[string]any{"code": 3, "message": more}, ""
		}
	}
	if line != "" {
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			p.t.Fatalf("%v: %s", err, line)
		}
	}
	raw, err := json.Marshal(fields)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := protojson.Unmarshal(raw, req); err != nil {
		p.t.Fatal(err)
	}
	fmt.Fprintf(&p.out, "%s > %s\n", s.name, raw)
	if err := s.send(req); err != nil {
		fmt.Fprintf(&p.out, "%s   not sent: %v\n", s.name, err)
	}
}

// collect waits until nothing moves and prints what came.
func (p *player) collect() {
	p.t.Helper()
	synctest.Wait()
	for _, s := range p.order {
		for done := false; !done; {
			select {
			case got := <-s.got:
				switch m := got.(type) {
				case error:
					fmt.Fprintf(&p.out, "%s < end: %v\n", s.name, m)
				case proto.Message:
					p.message(s, m)
				}
			default:
				done = true
			}
		}
	}
}

func (p *player) message(s *playerStream, m proto.Message) {
	p.t.Helper()
	switch m := m.(type) {
	case *discovery.DiscoveryResponse:
		s.last[m.GetTypeUrl()] = [2]string{m.GetVersionInfo(), m.GetNonce()}
	case *discovery.DeltaDiscoveryResponse:
		s.last[m.GetTypeUrl()] = [2]string{"", m.GetNonce()}
	}
	raw, err := protojson.Marshal(m)
	if err != nil {
		p.t.Fatal(err)
	}
	p.json(s.name+" <", json.RawMessage(raw))
}

// json prints v, one field a line.
func (p *player) json(prefix string, v any) {
	p.t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		p.t.Fatal(err)
	}
	var b bytes.Buffer
	if err := json.Indent(&b, raw, "  ", "  "); err != nil {
		p.t.Fatal(err)
	}
	fmt.Fprintf(&p.out, "%s %s\n", prefix, b.String())
}
