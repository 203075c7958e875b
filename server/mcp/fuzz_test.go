package mcp

import (
	"bytes"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// Whatever a sink sends, nothing panics, each response decodes and is well
// addressed, one at most is under way per collection, and if the sink behaves
// well from then on, everything that it asked for is answered, a collection
// behind the barrier too.
func FuzzRequests(f *testing.F) {
	add := func(reqs ...*mcpv1.RequestResources) {
		var b []byte
		for _, req := range reqs {
			raw, err := proto.Marshal(req)
			if err != nil {
				f.Fatal(err)
			}
			b = protowire.AppendBytes(b, raw)
		}
		f.Add(b)
	}
	ask := func(name string) *mcpv1.RequestResources { return &mcpv1.RequestResources{Collection: name} }
	var pass *mcpv1.RequestResources // marshals to nothing: time passes
	add()
	add(ask(serviceEntries), pass, &mcpv1.RequestResources{Collection: serviceEntries, ResponseNonce: "1", Incremental: true})
	add(ask(serviceEntries), pass, &mcpv1.RequestResources{Collection: serviceEntries, ResponseNonce: "1", ErrorDetail: &mcpv1.Status{Code: 3, Message: "\x00no"}})
	add(ask(serviceEntries), ask(serviceEntries), pass, &mcpv1.RequestResources{Collection: serviceEntries, ResponseNonce: "2.1"})
	add(&mcpv1.RequestResources{Collection: serviceEntries, Incremental: true, InitialResourceVersions: map[string]string{"dc1/web": "1", "": "", "dc1/x": "2"}}, pass)
	add(ask(syntheticEntries), ask(""), ask("$triggerCollection"), pass, ask("nonsense"))
	add(&mcpv1.RequestResources{SinkNode: &mcpv1.SinkNode{Id: "SSEMCP", Annotations: map[string]string{"a": "b"}}, Collection: rbacPolicies})
	for _, p := range profiles {
		var reqs []*mcpv1.RequestResources
		for _, c := range p.Collections {
			reqs = append(reqs, ask(c))
		}
		add(reqs...)
		reqs = append(reqs, pass, pass)
		for _, c := range p.Collections {
			reqs = append(reqs, &mcpv1.RequestResources{Collection: c, ResponseNonce: "1", Incremental: true}, pass)
		}
		add(reqs...)
	}
	f.Add([]byte{0xff, 1, 2, 3})
	f.Fuzz(func(t *testing.T, data []byte) {
		w := newWorld(t, state.Options{Tombstones: 2})
		w.Entry("dc1/web", "web.example.org")
		m := newMetrics(nil)
		now := time.Unix(1_700_000_000, 0)
		s := newSession(w.View, Config{SyntheticEntries: true}, nil, m, slog.New(slog.DiscardHandler))
		defer s.Close(now, nil)
		flying := map[string]string{} // nonce by collection
		take := func(req *mcpv1.RequestResources) bool {
			if err := s.take(req, now); err != nil {
				return false // asks for too much: the stream ends
			}
			if name := req.GetCollection(); req.GetResponseNonce() == "" || req.GetResponseNonce() == flying[name] {
				delete(flying, name)
			}
			return true
		}
		drain := func() {
			for n := 0; ; n++ {
				msg, _, err := s.Next(now)
				if err != nil || msg == nil {
					return
				}
				if n > 2*maxCollections {
					t.Fatal("it does not stop")
				}
				header, segments := msg.Parts()
				var res mcpv1.Resources
				if err := proto.Unmarshal(append(bytes.Clone(header), bytes.Join(segments, nil)...), &res); err != nil {
					t.Fatal(err)
				}
				name := res.GetCollection()
				if s.Of[name] == nil {
					t.Fatalf("%q was not asked for", name)
				}
				if nonce, ok := flying[name]; ok {
					t.Fatalf("%q: %s is under way, and now %s", name, nonce, res.GetNonce())
				}
				if len(res.GetRemovedResources()) > 0 && !res.GetIncremental() {
					t.Fatalf("%q: a full response removes", name)
				}
				flying[name] = res.GetNonce()
			}
		}
		for i := byte(0); len(data) > 0; i++ {
			raw, n := protowire.ConsumeBytes(data)
			if n < 0 {
				break
			}
			data = data[n:]
			req := new(mcpv1.RequestResources)
			if proto.Unmarshal(raw, req) != nil {
				continue
			}
			if !take(req) {
				return
			}
			if len(raw) == 0 {
				now = now.Add((1 + time.Duration(i)) * Settle)
			}
			if i%3 == 0 {
				w.Instance("dc1/web", "dc1/web-1", "10.0.0.1", 0, servertest.Port{Name: "http", Number: uint32(i) + 1})
			}
			drain()
			s.Status(new(stream.Status))
		}
		// Asked anew, the entries are answered even if the sink said before
		// that it does not support them.
		if !take(ask(serviceEntries)) || !take(ask("istio/networking/v1alpha3/gateways")) {
			return
		}
		for round := 0; ; round++ {
			now = now.Add(time.Hour)
			drain()
			if len(flying) == 0 {
				break
			}
			if round == 20 {
				t.Fatalf("it does not come to rest: %v", flying)
			}
			for _, name := range slices.Sorted(maps.Keys(flying)) {
				take(&mcpv1.RequestResources{Collection: name, ResponseNonce: flying[name]})
			}
		}
		var st stream.Status
		s.Status(&st)
		for _, sub := range st.Subscriptions {
			if sub.Sent == 0 || sub.State != view.Current.String() || sub.Waiting != "" {
				t.Errorf("not answered: %+v", sub)
			}
		}
	})
}
