package xds

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// Each file of testdata shows one rule of the protocol. Besides the commands of
// [servertest.Transcript] there are:
//
//	config profile=NAME     gives every client that profile
//	stream NAME sotw|delta  opens a stream
//	NAME JSON               sends a request
//	NAME ack URL [JSON]     acknowledges the newest response of a type, with more fields
//	NAME nack URL DETAIL    refuses it
func TestTranscripts(t *testing.T) {
	servertest.RunTranscripts(t, func(tr *servertest.Transcript, config []string) (servertest.Server, servertest.Protocol, []grpc.ServerOption, []grpc.DialOption) {
		var c Config
		for _, word := range config {
			c.Profile = strings.TrimPrefix(word, "profile=")
		}
		s, err := New(tr.World.View, c, tr.Log, prometheus.NewRegistry())
		tr.Must(err)
		return s, player{tr}, ServerOptions(), nil
	})
}

// serveBufconn serves s over an in-memory connection until stop is called.
func serveBufconn(t testing.TB, s *Server, options ...grpc.DialOption) (conn *grpc.ClientConn, stop func()) {
	t.Helper()
	server := grpc.NewServer(ServerOptions()...)
	s.Register(server)
	return servertest.Connect(t, server, options...)
}

type player struct{ *servertest.Transcript }

func (p player) Open(s *servertest.Stream, words []string) (string, servertest.Client) {
	c := &playerStream{p, s, words[0] == "delta", map[string][2]string{}}
	if c.delta {
		return discovery.AggregatedDiscoveryService_DeltaAggregatedResources_FullMethodName, c
	}
	return discovery.AggregatedDiscoveryService_StreamAggregatedResources_FullMethodName, c
}

func (p player) Status(s stream.Status) { p.json("status", s) }

// json prints v, one field a line.
func (p player) json(prefix string, v any) {
	p.T.Helper()
	var b bytes.Buffer
	p.Must(json.Indent(&b, p.JSON(v), "  ", "  "))
	p.Printf("%s %s\n", prefix, b.String())
}

type playerStream struct {
	player
	stream *servertest.Stream
	delta  bool
	last   map[string][2]string // version and nonce of the newest response, by type URL
}

func (s *playerStream) Request(line string) {
	s.T.Helper()
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
		s.Must(json.Unmarshal([]byte(line), &fields))
	}
	req := proto.Message(new(discovery.DiscoveryRequest))
	if s.delta {
		req = new(discovery.DeltaDiscoveryRequest)
	}
	raw := s.JSON(fields)
	s.Must(protojson.Unmarshal(raw, req))
	s.Printf("%s > %s\n", s.stream.Name, raw)
	if err := s.stream.SendMsg(req); err != nil {
		s.Printf("%s   not sent: %v\n", s.stream.Name, err)
	}
}

func (s *playerStream) New() proto.Message {
	if s.delta {
		return new(discovery.DeltaDiscoveryResponse)
	}
	return new(discovery.DiscoveryResponse)
}

func (s *playerStream) Response(m proto.Message, err error) {
	s.T.Helper()
	if err != nil {
		s.Printf("%s < end: %v\n", s.stream.Name, err)
		return
	}
	switch m := m.(type) {
	case *discovery.DiscoveryResponse:
		s.last[m.GetTypeUrl()] = [2]string{m.GetVersionInfo(), m.GetNonce()}
	case *discovery.DeltaDiscoveryResponse:
		s.last[m.GetTypeUrl()] = [2]string{"", m.GetNonce()}
	}
	s.json(s.stream.Name+" <", m)
}
