package legacy

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcpapi "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

// form is that of the profile of Pilot 1.8, which the sinks here ask like.
var form = encode.Form{Legacy: encode.LegacyEmpty}

// names of collections as sinks call them.
const (
	entries  = "istio/networking/v1alpha3/serviceentries"
	gateways = "istio/networking/v1alpha3/gateways"
)

// world is the bridge from the store on, on a port of loopback, and what fills
// the store.
type world struct {
	t        testing.TB
	address  string
	config   mcp.Config
	db       *state.DB
	services map[string]*service
	applied  map[string]map[string]bool // names of instances by service, as of the last apply

	mcp     *mcp.Server
	stop    func()
	streams atomic.Int64 // that were opened, over all lives of the bridge
}

func newWorld(t testing.TB, c mcp.Config) *world {
	t.Helper()
	w := &world{t: t, config: c}
	w.empty()
	w.listen()
	t.Cleanup(func() { w.stop() })
	return w
}

// service is one as the next apply will make it.
type service struct {
	entry     *pluginv1.Upsert
	instances map[string]*networking.WorkloadEntry // by name
}

// empty forgets everything, as a restart without disk does.
func (w *world) empty() {
	w.t.Helper()
	db := state.New([]string{"dc1", "gate"}, state.Options{Tombstones: 100}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	w.db, w.services, w.applied = db, map[string]*service{}, map[string]map[string]bool{}
	db.Registry("dc1").Apply(&pluginv1.WatchResponse{Synced: true})
	w.setSynced(true)
}

// setSynced says whether the registries have completed their first listings.
// Until they have, ServiceEntries are held.
func (w *world) setSynced(synced bool) {
	held := []string{collection.ServiceEntry}
	if synced {
		held = []string{}
	}
	w.db.Registry("gate").Begin(held)
}

// listen serves the store, at the same address as before.
func (w *world) listen() {
	w.t.Helper()
	var err error
	if w.mcp, err = mcp.New(view.New(w.db), w.config, slog.New(slog.NewTextHandler(logWriter{w.t}, nil)), nil); err != nil {
		w.t.Fatal(err)
	}
	listener := listen(w.t, &w.address)
	server := grpc.NewServer(append(xds.ServerOptions(), grpc.ChainStreamInterceptor(
		func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			w.streams.Add(1)
			return handler(srv, stream)
		}))...)
	w.mcp.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends with stop
	w.stop = func() {
		w.stop = func() {}
		server.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			w.t.Error(err)
		}
	}
}

func listen(t testing.TB, address *string) net.Listener {
	t.Helper()
	for range 10 {
		addr := *address
		if addr == "" {
			addr = fmt.Sprintf("127.0.0.1:%d", testenv.FreePort(t))
		}
		listener, err := net.Listen("tcp", addr)
		if err == nil {
			*address = addr
			return listener
		}
		if *address != "" {
			t.Fatal(err)
		}
	}
	t.Fatal("no free port")
	return nil
}

type logWriter struct{ t testing.TB }

func (w logWriter) Write(b []byte) (int, error) {
	fmt.Fprintf(w.t.Output(), "%s", b)
	return len(b), nil
}

func upsert(t testing.TB, service, name string, body proto.Message) *pluginv1.Upsert {
	t.Helper()
	a, err := anypb.New(body)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(&mcpapi.Resource{
		Metadata: &mcpapi.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1_600_000_000}}, Body: a,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &pluginv1.Upsert{Service: service, Resource: raw}
}

func full(name string) string { return "dc1/" + name }
func host(name string) string { return name + ".example.org" }

// entry makes a service, with one port, 80.
func (w *world) entry(name string) { w.entryWithPort(name, 80) }

// entryWithPort makes a service with another port. Its instances stay as they
// are.
func (w *world) entryWithPort(name string, port uint32) {
	svc := w.services[name]
	if svc == nil {
		svc = &service{instances: map[string]*networking.WorkloadEntry{}}
		w.services[name] = svc
	}
	svc.entry = upsert(w.t, full(name), full(name), &networking.ServiceEntry{
		Hosts: []string{host(name)}, Resolution: networking.ServiceEntry_STATIC, Location: networking.ServiceEntry_MESH_INTERNAL,
		Ports: []*networking.ServicePort{{Number: port, Name: "http", Protocol: "HTTP"}},
	})
}

// instance sets an instance of a service.
func (w *world) instance(service, name, address string, port, weight uint32) {
	w.services[service].instances[full(name)] = &networking.WorkloadEntry{
		Address: address, Ports: map[string]uint32{"http": port}, Weight: weight,
	}
}

// drop removes an instance.
func (w *world) drop(service, name string) { delete(w.services[service].instances, full(name)) }

// apply makes services visible as one change; those that are not there any more
// are removed.
func (w *world) apply(names ...string) {
	m := &pluginv1.WatchResponse{}
	for _, name := range slices.Compact(slices.Sorted(slices.Values(names))) {
		svc := w.services[name]
		if svc == nil {
			m.Removals = append(m.Removals, &pluginv1.Removal{Collection: collection.ServiceEntry, Name: full(name)})
			delete(w.applied, name)
			continue
		}
		m.Upserts = append(m.Upserts, svc.entry)
		for instance := range w.applied[name] {
			if svc.instances[instance] == nil {
				m.Removals = append(m.Removals, &pluginv1.Removal{Collection: collection.WorkloadEntry, Name: instance})
			}
		}
		w.applied[name] = map[string]bool{}
		for instance, body := range svc.instances {
			m.Upserts = append(m.Upserts, upsert(w.t, full(name), instance, body))
			w.applied[name][instance] = true
		}
	}
	w.db.Registry("dc1").Apply(m)
}

// gateway sets a Gateway.
func (w *world) gateway(name, app string) {
	w.db.Registry("dc1").Apply(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{upsert(w.t, "", full(name), &networking.Gateway{
		Selector: map[string]string{"app": app},
		Servers:  []*networking.Server{{Hosts: []string{"*"}, Port: &networking.Port{Number: 80, Name: "http", Protocol: "HTTP"}}},
	})}})
}

// hash is that of everything that a sink has to hold.
func (w *world) hash() (hash string, resources int) {
	var lines []string
	for key, name := range map[string]string{collection.ServiceEntry: entries, "networking.istio.io/Gateway": gateways} {
		for c := range w.db.Changes(state.Kind{Collection: key}, new(state.Cursor)) {
			e := c.Record.Encode(encode.NewLayout(form))
			lines = append(lines, name+" "+c.Name+" "+e.Version.String()+"\n")
		}
	}
	slices.Sort(lines)
	return fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(lines, "")))), len(lines)
}

// endpoints is what a Pilot has to have, by host; hosts without endpoints are
// left out.
func (w *world) endpoints() map[string][]string {
	out := map[string][]string{}
	for name, svc := range w.services {
		var list []string
		for _, e := range svc.instances {
			list = append(list, fmt.Sprintf("%s:%d", e.GetAddress(), e.GetPorts()["http"]))
		}
		slices.Sort(list)
		if len(list) > 0 {
			out[host(name)] = list
		}
	}
	return out
}

// sinks is a running legacy sink program.
type sinks struct{ *testpilot.Legacy }

type sinkState struct {
	Hash        string `json:"hash"`
	Resources   int    `json:"resources"`
	Collections int    `json:"collections"`
	Applied     int    `json:"applied"`
	Incremental int    `json:"incremental"`
	Refused     int    `json:"refused"`
	Objects     int    `json:"objects"`
	Streams     int    `json:"streams"`
}

func (s sinks) state(t testing.TB) []sinkState {
	t.Helper()
	var all struct {
		Clients []sinkState `json:"clients"`
	}
	s.Ask(t, "state", &all)
	return all.Clients
}

// breakOff cuts all connections.
func (s sinks) breakOff(t testing.TB) {
	t.Helper()
	s.Ask(t, "break", new(map[string]bool))
}

// settle waits until every sink holds what the store does, and has had an
// answer to every collection.
func (s sinks) settle(t testing.TB, w *world) []sinkState {
	t.Helper()
	hash, resources := w.hash()
	var states []sinkState
	testenv.Eventually(t, testenv.Patience, fmt.Sprintf("%d resources in each sink", resources), func() (string, bool) {
		states = s.state(t)
		for i, st := range states {
			if st.Hash != hash || st.Collections != 11 {
				return fmt.Sprintf("sink %d has %+v", i, st), false
			}
		}
		return "", true
	})
	return states
}

// dial serves a sink in reverse mode until the returned function is called.
func (w *world) dial(address string) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.mcp.Dial(ctx, mcp.Sink{Address: address}) }() // ends with stop
	return func() {
		cancel()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				w.t.Errorf("Dial: %v", err)
			}
		case <-time.After(testenv.Patience):
			w.t.Error("Dial does not end")
		}
	}
}
