package plugin

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
)

// A plugin that is asked for some shards sends their services only, whatever
// its adapter sets, and the adapter can tell by the key where the host depends
// on nothing else.
func TestShards(t *testing.T) {
	own := shard.Set{First: 1, Last: 2, Of: 4}
	for _, tt := range []struct {
		translate string
		host      func(name, meta string) string
		byKey     bool
	}{
		{`{"host": "{{.Name}}.example.org"}`, func(name, _ string) string { return name + ".example.org" }, true},
		{`{"host": "{{.Name}}.{{.Meta.zone}}.example.org"}`, func(name, meta string) string { return name + "." + meta + ".example.org" }, false},
		{`{"host": "{{with .InstanceMeta \"zone\"}}{{.}}{{end}}{{.Name}}.example.org"}`, func(name, _ string) string { return name + ".example.org" }, false},
	} {
		var env Env
		s, err := newServer("test", options{collections: []string{collection.ServiceEntry, collection.WorkloadEntry}}, func(_ struct{}, e Env) (Adapter, error) {
			env = e
			return adapterFunc(nil), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		s.log = slog.New(slog.DiscardHandler)
		resp, err := s.Configure(t.Context(), &pluginv1.ConfigureRequest{
			Registry: "r", Translate: []byte(tt.translate), Shards: &pluginv1.Shards{First: 1, Last: 2, Of: 4},
		})
		if err != nil || len(resp.GetViolations()) > 0 {
			t.Fatal(resp, err)
		}
		in1 := instances("1")
		in1[0].Ports = ports(8080)
		want := map[string]bool{}
		for i := range 40 {
			name := fmt.Sprintf("s%d", i)
			key := registry.Key{Name: name}
			in := own.Has(tt.host(name, "a"))
			if in {
				want[tt.host(name, "a")] = true
			}
			if got := env.Wants(key); got != (in || !tt.byKey) {
				t.Errorf("%s: wants %s: %v", tt.translate, name, got)
			}
			// A host that changes takes the service out of the shards, or in.
			s.given.Set(registry.Service{Key: key, Meta: map[string]string{"zone": "b"}}, in1)
			s.given.Set(registry.Service{Key: key, Meta: map[string]string{"zone": "a"}}, in1)
		}
		s.given.Synced()
		ctx, cancel := context.WithCancel(t.Context())
		stream, done := newTestStream(ctx), make(chan error, 1)
		go func() { done <- s.Watch(nil, stream) }() // ends with cancel
		got := map[string]bool{}
		for synced := false; !synced; {
			m := <-stream.sent
			for _, u := range m.GetUpserts() {
				if host := hostIn(t, u.GetResource()); host != "" {
					got[host] = true
				}
			}
			synced = m.GetSynced()
			if n := m.GetServices(); synced && n != uint64(len(want)) {
				t.Errorf("%s: %d services are counted, want %d", tt.translate, n, len(want))
			}
		}
		cancel()
		<-done
		for host := range want {
			if !got[host] {
				t.Errorf("%s: %s is not sent", tt.translate, host)
			}
		}
		if len(got) != len(want) || len(want) == 0 {
			t.Errorf("%s: %d services are sent, want %d", tt.translate, len(got), len(want))
		}
	}
}

// hostIn returns the host of an encoded ServiceEntry, "" of any other resource.
func hostIn(t *testing.T, raw []byte) string {
	var res mcp.Resource
	var se networking.ServiceEntry
	if err := proto.Unmarshal(raw, &res); err != nil {
		t.Fatal(err)
	}
	if res.GetBody().UnmarshalTo(&se) != nil {
		return ""
	}
	return se.GetHosts()[0]
}

// Shards that cannot be are an error of the host.
func TestShardsOutOfRange(t *testing.T) {
	for _, s := range []*pluginv1.Shards{{First: 4, Last: 4, Of: 4}, {First: 2, Last: 1, Of: 4}, {First: 1, Last: 1}} {
		srv, err := newServer("test", options{collections: slices.Clone(collection.All())}, func(struct{}, Env) (Adapter, error) { return adapterFunc(nil), nil })
		if err != nil {
			t.Fatal(err)
		}
		srv.log = slog.New(slog.DiscardHandler)
		if _, err := srv.Configure(t.Context(), &pluginv1.ConfigureRequest{Registry: "r", Shards: s}); err == nil {
			t.Errorf("%v is taken", s)
		}
	}
}
