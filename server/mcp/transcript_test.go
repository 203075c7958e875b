package mcp

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"

	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// Each file of testdata shows one rule of the protocol. Besides the commands of
// [servertest.Transcript] there are:
//
//	config synthetic|full-state|profile=NAME
//	NAME ask COLLECTIONS [incremental] [id=ID] [have NAME=VERSION...]
//	NAME profile PROFILE [but COLLECTION] [incremental]
//	                                   subscribes to the collections of a profile
//	NAME ack COLLECTION [incremental]  acknowledges its newest response
//	NAME acks [incremental]            acknowledges everything, serviceentries last
//	NAME nack COLLECTION CODE DETAIL   refuses it
//	NAME send JSON                     sends a request as it is
//	NAME garbage                       sends what is no protobuf message
//
// A collection without a slash is one of istio/networking/v1alpha3.
func TestTranscripts(t *testing.T) {
	servertest.RunTranscripts(t, func(tr *servertest.Transcript, config []string) (servertest.Server, servertest.Protocol, []grpc.ServerOption, []grpc.DialOption) {
		tr.World.Created = created
		var c Config
		for _, word := range config {
			name, value, _ := strings.Cut(word, "=")
			switch name {
			case "synthetic":
				c.SyntheticEntries = true
			case "full-state":
				c.FullState = true
			case "profile":
				c.Profile = value
			default:
				tr.T.Fatalf("config: %s", word)
			}
		}
		s, err := New(tr.World.View, c, tr.Log, prometheus.NewRegistry())
		tr.Must(err)
		return s, player{tr}, serverOptions, dialOptions
	})
}

var (
	serverOptions = []grpc.ServerOption{grpc.ForceServerCodecV2(wire.NewCodec()), grpc.MaxRecvMsgSize(64 << 20)} // as xds.ServerOptions
	dialOptions   = []grpc.DialOption{grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wire.NewCodec()))}
)

// serveBufconn serves s over an in-memory connection until stop is called.
func serveBufconn(t testing.TB, s *Server, options ...grpc.CallOption) (conn *grpc.ClientConn, stop func()) {
	t.Helper()
	server := grpc.NewServer(serverOptions...)
	s.Register(server)
	return servertest.Connect(t, server, append(slices.Clone(dialOptions), grpc.WithDefaultCallOptions(options...))...)
}

type player struct{ *servertest.Transcript }

func (p player) Open(s *servertest.Stream, _ []string) (string, servertest.Client) {
	return SourceMethod, &playerStream{player: p, stream: s, nonces: map[string]string{}}
}

func (p player) Status(s stream.Status) { p.Printf("status %s\n", p.JSON(shown(s))) }

type playerStream struct {
	player
	stream *servertest.Stream
	nonces map[string]string // of the newest response to each collection
	order  []string          // collections that have an unanswered response
}

func long(name string) string {
	if strings.Contains(name, "/") || strings.HasPrefix(name, "$") {
		return name
	}
	return "istio/networking/v1alpha3/" + name
}

func (s *playerStream) Request(line string) {
	s.T.Helper()
	verb, rest, _ := strings.Cut(line, " ")
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
			s.send(req)
		}
	case "profile":
		s.Printf("%s > asks for all of %s\n", s.stream.Name, rest)
		for _, name := range profiles.Must(f[0]).Collections {
			if len(f) > 2 && f[1] == "but" && long(f[2]) == name {
				continue
			}
			s.Must(s.stream.SendMsg(&mcpv1.RequestResources{Collection: name, Incremental: incremental}))
		}
	case "ack":
		s.send(&mcpv1.RequestResources{Collection: long(f[0]), ResponseNonce: s.answer(long(f[0])), Incremental: incremental})
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
		s.Printf("%s > acknowledges %d responses\n", s.stream.Name, len(s.order))
		for _, name := range slices.Clone(s.order) {
			s.Must(s.stream.SendMsg(&mcpv1.RequestResources{Collection: name, ResponseNonce: s.answer(name), Incremental: incremental}))
		}
	case "nack":
		s.send(&mcpv1.RequestResources{
			Collection: long(f[0]), ResponseNonce: s.answer(long(f[0])),
			ErrorDetail: &mcpv1.Status{Code: int32(s.Number(f[1])), Message: strings.Join(f[2:], " ")},
		})
	case "send":
		req := new(mcpv1.RequestResources)
		s.Must(protojson.Unmarshal([]byte(rest), req))
		s.send(req)
	case "garbage":
		s.Printf("%s > garbage\n", s.stream.Name)
		s.Must(s.stream.SendMsg(&stream.Message{Header: []byte{0xff, 0xff, 0xff}}))
	default:
		s.T.Fatalf("script: %s", line)
	}
}

func (s *playerStream) send(req *mcpv1.RequestResources) {
	s.T.Helper()
	s.Printf("%s > %s\n", s.stream.Name, s.JSON(req))
	s.Must(s.stream.SendMsg(req))
}

// answer returns the nonce of the response that is answered.
func (s *playerStream) answer(name string) string {
	s.order = slices.DeleteFunc(s.order, func(o string) bool { return o == name })
	return s.nonces[name]
}

func (s *playerStream) New() proto.Message { return new(mcpv1.Resources) }

func (s *playerStream) Response(received proto.Message, err error) {
	s.T.Helper()
	if err != nil {
		s.Printf("%s < after %v: %v\n", s.stream.Name, s.Since(), err)
		return
	}
	m := received.(*mcpv1.Resources)
	name := m.GetCollection()
	if slices.Contains(s.order, name) {
		s.T.Errorf("a second response to %s is under way", name)
	}
	s.nonces[name] = m.GetNonce()
	s.order = append(s.order, name)

	// A long response is summed up.
	resources := m.GetResources()
	s.Printf("%s < after %v: %s nonce=%s ", s.stream.Name, s.Since(), name, m.GetNonce())
	switch {
	case m.GetIncremental():
		s.Printf("incremental version=%s\n", m.GetSystemVersionInfo())
	case len(resources) == 0 && len(m.GetRemovedResources()) == 0:
		s.Printf("empty\n")
	default:
		s.Printf("full version=%s\n", m.GetSystemVersionInfo())
	}
	if len(resources) > 9 {
		s.Printf("    %d resources, message of %d bytes\n", len(resources), proto.Size(m))
		resources = nil
	}
	var lines []string
	for _, raw := range resources {
		var res mcp.Resource
		s.Must(proto.Unmarshal(raw, &res))
		lines = append(lines, string(s.JSON(&res)))
	}
	slices.Sort(lines)
	for _, line := range lines {
		if len(line) > 1000 {
			line = line[:100] + "..."
		}
		s.Printf("    %s\n", line)
	}
	for _, name := range m.GetRemovedResources() {
		s.Printf("    removed %s\n", name)
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
