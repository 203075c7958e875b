package server

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	mcpapi "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
)

const (
	entryType    = "networking.istio.io/v1/ServiceEntry"
	workloadType = "networking.istio.io/v1/WorkloadEntry"
)

// parseTwo reads a configuration that is added to one with two quiet registries
// of 40 services and two instances each.
func parseTwo(text string) (config.Config, error) {
	return config.Parse("isthmus.yaml", []byte(`
registries:
- {name: one, type: sim, config: {services: 40, instances: 2, changes_per_second: 0, seed: 1}}
- {name: two, type: sim, config: {services: 40, instances: 2, changes_per_second: 0, seed: 2}}
`+text), config.Options{Adapters: []string{"sim"}})
}

// sinkOf is a sink that has what a stream brought.
type sinkOf struct {
	t    *testing.T
	recv func() (upserts map[string]string, removed []string, full bool)
	have map[string]string // the host of a ServiceEntry, else the address, by name
	sets int               // resources received
}

// until takes responses until what the sink has is as wanted.
func (s *sinkOf) until(what string, cond func(have map[string]string) bool) {
	s.t.Helper()
	for !cond(s.have) {
		upserts, removed, full := s.recv()
		if full {
			clear(s.have)
		}
		for name, host := range upserts {
			s.have[name] = host
			s.sets++
		}
		for _, name := range removed {
			delete(s.have, name)
		}
	}
	s.t.Logf("%s: %d", what, len(s.have))
}

func hostOf(t *testing.T, raw []byte) (name, host string) {
	var res mcpapi.Resource
	if err := proto.Unmarshal(raw, &res); err != nil {
		t.Fatal(err)
	}
	m, err := res.GetBody().UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	switch body := m.(type) {
	case *networking.ServiceEntry:
		return res.GetMetadata().GetName(), body.GetHosts()[0]
	case *networking.WorkloadEntry:
		return res.GetMetadata().GetName(), body.GetAddress()
	}
	return res.GetMetadata().GetName(), ""
}

func asCaller(t *testing.T, token string) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
}

func sotwSink(t *testing.T, address net.Addr, token string) *sinkOf {
	t.Helper()
	st, err := discovery.NewAggregatedDiscoveryServiceClient(connect(t, address)).StreamAggregatedResources(asCaller(t, token))
	if err != nil {
		t.Fatal(err)
	}
	_ = st.Send(&discovery.DiscoveryRequest{TypeUrl: entryType})
	return &sinkOf{t: t, have: map[string]string{}, recv: func() (map[string]string, []string, bool) {
		r, err := st.Recv()
		if err != nil {
			t.Fatal(err)
		}
		_ = st.Send(&discovery.DiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce(), VersionInfo: r.GetVersionInfo()})
		upserts := map[string]string{}
		for _, a := range r.GetResources() {
			name, host := hostOf(t, a.GetValue())
			upserts[name] = host
		}
		return upserts, nil, true
	}}
}

func deltaSink(t *testing.T, address net.Addr, token, url string) *sinkOf {
	t.Helper()
	st, err := discovery.NewAggregatedDiscoveryServiceClient(connect(t, address)).DeltaAggregatedResources(asCaller(t, token))
	if err != nil {
		t.Fatal(err)
	}
	_ = st.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: url})
	return &sinkOf{t: t, have: map[string]string{}, recv: func() (map[string]string, []string, bool) {
		r, err := st.Recv()
		if err != nil {
			t.Fatal(err)
		}
		_ = st.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()})
		upserts := map[string]string{}
		for _, d := range r.GetResources() {
			name, host := hostOf(t, d.GetResource().GetValue())
			upserts[name] = host
		}
		return upserts, r.GetRemovedResources(), false
	}}
}

func mcpSink(t *testing.T, address net.Addr, token string, incremental bool) *sinkOf {
	t.Helper()
	st, err := connect(t, address).NewStream(asCaller(t, token), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, mcp.SourceMethod)
	if err != nil {
		t.Fatal(err)
	}
	_ = st.SendMsg(&mcpv1.RequestResources{Collection: entries, Incremental: incremental})
	return &sinkOf{t: t, have: map[string]string{}, recv: func() (map[string]string, []string, bool) {
		r := new(mcpv1.Resources)
		if err := st.RecvMsg(r); err != nil {
			t.Fatal(err)
		}
		_ = st.SendMsg(&mcpv1.RequestResources{Collection: r.GetCollection(), ResponseNonce: r.GetNonce(), Incremental: incremental})
		upserts := map[string]string{}
		for _, res := range r.GetResources() {
			name, host := hostOf(t, res)
			upserts[name] = host
		}
		return upserts, r.GetRemovedResources(), !r.GetIncremental()
	}}
}

// ofRegistries reports whether a sink has so many resources, of these
// namespaces only.
func ofRegistries(count int, names ...string) func(map[string]string) bool {
	return func(have map[string]string) bool {
		for name := range have {
			if ns, _, _ := strings.Cut(name, "/"); !slices.Contains(names, ns) {
				return false
			}
		}
		return len(have) == count
	}
}

// The rule that lets a stream in says what it sees of the listener's view. A
// changed rule holds for open streams of every protocol: they go on, lose what
// they may no longer see, and get nothing twice that they have.
func TestRuleViews(t *testing.T) {
	dir := t.TempDir()
	tokens := map[string]string{}
	for _, name := range []string{"all", "part"} {
		tokens[name] = filepath.Join(dir, name)
		if err := os.WriteFile(tokens[name], []byte("token-of-"+name+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config1 := func(view string) string {
		return fmt.Sprintf("listen: {admin: '127.0.0.1:0', xds: {address: '127.0.0.1:0', allow: [{peer: {token_file: %s}}, {peer: {token_file: %s}, view: %s}]}}", tokens["all"], tokens["part"], view)
	}
	var text atomic.Pointer[string]
	text.Store(new(config1("{registries: [one, two]}")))
	load := func() (config.Config, error) { return parseTwo(*text.Load()) }
	cfg, err := load()
	if err != nil {
		t.Fatal(err)
	}
	s := serveConfig(t, cfg, Options{Load: load})
	set := func(view string) time.Time {
		t.Helper()
		text.Store(new(config1(view)))
		began := time.Now()
		if _, err := s.Reload(t.Context(), "test"); err != nil {
			t.Fatal(err)
		}
		return began
	}
	everyone := sotwSink(t, s.XDSAddr(), "token-of-all")
	everyone.until("all", ofRegistries(80, "one", "two"))
	sinks := map[string]*sinkOf{
		"sotw":               sotwSink(t, s.XDSAddr(), "token-of-part"),
		"delta":              deltaSink(t, s.XDSAddr(), "token-of-part", entryType),
		"delta, instances":   deltaSink(t, s.XDSAddr(), "token-of-part", workloadType),
		"legacy":             mcpSink(t, s.MCPAddr(), "token-of-part", false),
		"legacy incremental": mcpSink(t, s.MCPAddr(), "token-of-part", true),
	}
	each := func(what string, began time.Time, count int, names ...string) {
		t.Helper()
		for kind, sink := range sinks {
			n := count
			if kind == "delta, instances" {
				n *= 2
			}
			sink.until(kind+", "+what, ofRegistries(n, names...))
		}
		if !began.IsZero() {
			t.Logf("%s: at five sinks %v after the reload was asked for", what, time.Since(began))
		}
	}
	each("at first", time.Time{}, 80, "one", "two")
	delta := sinks["delta"]
	delta.sets = 0
	each("after the view has shrunk", set("{registries: [two]}"), 40, "two")
	if delta.sets != 0 {
		t.Errorf("a delta sink whose view has shrunk got %d resources again", delta.sets)
	}
	each("after another view", set("{namespaces: [one]}"), 40, "one")
	if delta.sets != 40 {
		t.Errorf("a delta sink with another view got %d resources, want 40", delta.sets)
	}
	each("after the view has grown", set("{shard: 0/1}"), 80, "one", "two")
	if delta.sets != 80 {
		t.Errorf("a delta sink whose view has grown got %d resources in all, want 80", delta.sets)
	}
	if got := len(everyone.have); got != 80 {
		t.Errorf("the other sink has %d", got)
	}
}

// Listeners have the parts that their views select: each host is in one of the
// shards, the instances are with their services, and a process with some of the
// shards asks its adapters for these only.
func TestShardListeners(t *testing.T) {
	listen := "listen: {admin: '127.0.0.1:0', mcp: {address: '127.0.0.1:0', view: {shard: 1/3}}, xds: ["
	for i := range 3 {
		listen += fmt.Sprintf("{address: '127.0.0.1:0', view: {shard: %d/3}}, ", i)
	}
	cfg, err := parseTwo(listen + "]}")
	if err != nil {
		t.Fatal(err)
	}
	s := serveConfig(t, cfg, Options{})
	hosts, workloads := map[string]bool{}, 0
	var counts [3]int
	for i := range 3 {
		sink := sotwSink(t, s.ports[i].Addr(), "")
		sink.until("any", func(have map[string]string) bool { return len(have) > 0 })
		counts[i] = len(sink.have)
		for name, host := range sink.have {
			if shard.Of(host, 3) != i || hosts[name] {
				t.Errorf("%s (%s) is in shard %d", name, host, i)
			}
			hosts[name] = true
		}
		instances := deltaSink(t, s.ports[i].Addr(), "", workloadType)
		instances.until("all", func(have map[string]string) bool { return len(have) >= 2*counts[i] })
		workloads += len(instances.have)
	}
	if len(hosts) != 80 || workloads != 160 {
		t.Errorf("the shards have %d services and %d instances together", len(hosts), workloads)
	}
	legacy := mcpSink(t, s.MCPAddr(), "", true)
	legacy.until("legacy", func(have map[string]string) bool { return len(have) > 0 })
	if len(legacy.have) != counts[1] {
		t.Errorf("the legacy listener has %d services, want %d", len(legacy.have), counts[1])
	}

	cfg, err = parseTwo("listen: {admin: '127.0.0.1:0', xds: '127.0.0.1:0'}")
	if err != nil {
		t.Fatal(err)
	}
	own := serveConfig(t, cfg, Options{Shards: shard.Set{First: 0, Last: 1, Of: 3}})
	sink := sotwSink(t, own.XDSAddr(), "")
	sink.until("the process", func(have map[string]string) bool { return len(have) > 0 })
	if got := len(sink.have); got != counts[0]+counts[1] {
		t.Errorf("a process with shards 0 and 1 has %d services, want %d", got, counts[0]+counts[1])
	}
	services := 0
	for _, r := range (source{own}).Overview().Registries {
		services += int(r.Served.Services)
	}
	if services != counts[0]+counts[1] {
		t.Errorf("its plugins have %d services, want %d", services, counts[0]+counts[1])
	}
}

// A view of which this process has no shard is an error that names it, at the
// start and at a reload, and a gap between the shards is a warning.
func TestShardsOfTheProcess(t *testing.T) {
	cfg, err := parseTwo("listen: {admin: '127.0.0.1:0', xds: [{address: '127.0.0.1:0', view: {shard: 0-1/4}}, {address: '127.0.0.1:0', view: {shard: 3/4}}]}")
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(cfg, Options{Shards: shard.Set{First: 0, Last: 1, Of: 8}})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Listen()
	if err == nil || !strings.Contains(err.Error(), "isthmus.yaml:5:118:") || !strings.Contains(err.Error(), "listen.xds[1].view.shard: selects nothing, for this process has only shard 0-1/8") {
		t.Errorf("Listen: %v", err)
	}
	if gaps := cfg.Gaps(shard.Set{}); len(gaps) != 1 || gaps[0] != "no listener has shard 2/4" {
		t.Errorf("gaps %q", gaps)
	}
	if gaps := cfg.Gaps(shard.Set{First: 0, Last: 1, Of: 8}); len(gaps) != 0 {
		t.Errorf("gaps %q of shards that the process does not have", gaps)
	}
}
