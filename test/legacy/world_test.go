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
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcpapi "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/push"
	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

// form is that of the profile of Pilot 1.8, which the sinks here ask like.
var form = resource.Form{Legacy: resource.LegacyEmpty}

// names of collections as sinks call them.
const (
	entries  = "istio/networking/v1alpha3/serviceentries"
	gateways = "istio/networking/v1alpha3/gateways"
)

type op = store.Op[*resource.Resource]

// world is the bridge from the store on, on a port of loopback, and what fills the store.
type world struct {
	t        testing.TB
	address  string
	config   mcp.Config
	store    *store.Store[*resource.Resource]
	services map[string]*resource.Service

	mcp     *mcp.Server
	stop    func()
	streams atomic.Int64 // that were opened, over all lives of the bridge

	mu     sync.Mutex
	synced bool // guarded by mu
}

func newWorld(t testing.TB, c mcp.Config) *world {
	t.Helper()
	w := &world{t: t, config: c, synced: true}
	w.empty()
	w.listen()
	t.Cleanup(func() { w.stop() })
	return w
}

// empty forgets everything, as a restart without disk does.
func (w *world) empty() {
	w.store, w.services = store.New[*resource.Resource](store.Options{Tombstones: 100}), map[string]*resource.Service{}
}

// setSynced says whether the registry has completed its first listing. Until it has, ServiceEntries are held.
func (w *world) setSynced(synced bool) {
	w.mu.Lock()
	w.synced = synced
	w.mu.Unlock()
	w.store.Wake()
}

// listen serves the store, at the same address as before.
func (w *world) listen() {
	w.t.Helper()
	hub := push.NewHub(w.store, func(coll string) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.synced || coll != collection.ServiceEntry
	})
	var err error
	if w.mcp, err = mcp.New(hub, w.config, slog.New(slog.NewTextHandler(logWriter{w.t}, nil)), nil); err != nil {
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

func part(t testing.TB, name string, body proto.Message) *resource.Part {
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
	p, err := resource.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func full(name string) string { return "dc1/" + name }
func host(name string) string { return name + ".example.org" }

// entry makes a service, with one port, 80.
func (w *world) entry(name string) { w.entryWithPort(name, 80) }

// entryWithPort makes a service with another port. Its instances stay as they are.
func (w *world) entryWithPort(name string, port uint32) {
	svc := w.services[name]
	if svc == nil {
		svc = resource.NewService("dc1", name)
		w.services[name] = svc
	}
	svc.SetEntry(part(w.t, full(name), &networking.ServiceEntry{
		Hosts: []string{host(name)}, Resolution: networking.ServiceEntry_STATIC, Location: networking.ServiceEntry_MESH_INTERNAL,
		Ports: []*networking.ServicePort{{Number: port, Name: "http", Protocol: "HTTP"}},
	}))
}

// instance sets an instance of a service.
func (w *world) instance(service, name, address string, port, weight uint32) {
	w.services[service].SetInstance(part(w.t, full(name), &networking.WorkloadEntry{
		Address: address, Ports: map[string]uint32{"http": port}, Weight: weight,
	}))
}

// drop removes an instance.
func (w *world) drop(service, name string) { w.services[service].RemoveInstance(full(name)) }

// apply makes services visible as one change; those that are not there any more are removed.
func (w *world) apply(names ...string) {
	var ops []op
	for _, name := range names {
		if svc := w.services[name]; svc != nil {
			ops = append(ops, op{Collection: collection.ServiceEntry, Name: full(name), Value: svc.Resource(resource.Inline)})
		} else {
			ops = append(ops, op{Collection: collection.ServiceEntry, Name: full(name), Remove: true})
		}
	}
	w.store.Apply(ops)
}

// gateway sets a Gateway.
func (w *world) gateway(name, app string) {
	p := part(w.t, full(name), &networking.Gateway{
		Selector: map[string]string{"app": app},
		Servers:  []*networking.Server{{Hosts: []string{"*"}, Port: &networking.Port{Number: 80, Name: "http", Protocol: "HTTP"}}},
	})
	w.store.Apply([]op{{Collection: p.Collection(), Name: full(name), Value: resource.NewResource(p, "dc1")}})
}

// hash is that of everything that a sink has to hold.
func (w *world) hash() (hash string, resources int) {
	var lines []string
	for key, name := range map[string]string{collection.ServiceEntry: entries, "networking.istio.io/Gateway": gateways} {
		all, _ := w.store.All(key)
		for c := range all {
			lines = append(lines, name+" "+c.Name+" "+c.Value.Encode(form).Version+"\n")
		}
	}
	slices.Sort(lines)
	return fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(lines, "")))), len(lines)
}

// endpoints is what a Pilot has to have, by host; hosts without endpoints are left out.
func (w *world) endpoints() map[string][]string {
	out := map[string][]string{}
	for name, svc := range w.services {
		var list []string
		for _, r := range svc.Instances() {
			var res mcpapi.Resource
			var e networking.WorkloadEntry
			if err := proto.Unmarshal(slices.Concat(r.Encode(resource.Form{}).Segments...), &res); err != nil {
				w.t.Fatal(err)
			}
			if err := res.GetBody().UnmarshalTo(&e); err != nil {
				w.t.Fatal(err)
			}
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
type sinks struct{ *testenv.Legacy }

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

// settle waits until every sink holds what the store does, and has had an answer to every collection.
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
