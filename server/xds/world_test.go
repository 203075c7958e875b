package xds

import (
	"net/netip"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/push"
	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
)

const (
	entries   = collection.ServiceEntry
	workloads = collection.WorkloadEntry

	entriesV1     = "networking.istio.io/v1/ServiceEntry"
	entriesV1A3   = "networking.istio.io/v1alpha3/ServiceEntry"
	workloadsV1   = "networking.istio.io/v1/WorkloadEntry"
	meshConfigURL = "core/v1alpha1/MeshConfig"
)

type (
	resourceStore = store.Store[*resource.Resource]
	op            = store.Op[*resource.Resource]
)

// world is a store with services in both shapes, as ingest fills it, and a gate.
type world struct {
	t        testing.TB
	store    *resourceStore
	hub      *push.Hub
	services map[string]*resource.Service

	mu   sync.Mutex
	held map[string]bool // guarded by mu
}

func newWorld(t testing.TB, o store.Options) *world {
	w := &world{t: t, store: store.New[*resource.Resource](o), services: map[string]*resource.Service{}, held: map[string]bool{}}
	w.hub = push.NewHub(w.store, func(coll string) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return !w.held[coll]
	})
	return w
}

// hold closes or opens a collection.
func (w *world) hold(coll string, held bool) {
	w.mu.Lock()
	w.held[coll] = held
	w.mu.Unlock()
	w.store.Wake()
}

func part(t testing.TB, name string, body proto.Message) *resource.Part {
	t.Helper()
	a := new(anypb.Any)
	if err := anypb.MarshalFrom(a, body, proto.MarshalOptions{Deterministic: true}); err != nil {
		t.Fatal(err)
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(&mcp.Resource{
		Metadata: &mcp.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1}}, Body: a,
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

// port is the number of a named port.
type port struct {
	name   string
	number uint32
}

// entry sets a service. Without ports it has one, http on 80. A port's name is its protocol.
func (w *world) entry(name, host string, ports ...port) {
	if len(ports) == 0 {
		ports = []port{{"http", 80}}
	}
	svc := w.services[name]
	if svc == nil {
		svc = resource.NewService("dc1", host)
		w.services[name] = svc
	}
	entry := &networking.ServiceEntry{Hosts: []string{host}, Resolution: networking.ServiceEntry_STATIC}
	for _, p := range ports {
		entry.Ports = append(entry.Ports, &networking.ServicePort{Number: p.number, Name: p.name, Protocol: strings.ToUpper(p.name)})
	}
	svc.SetEntry(part(w.t, name, entry))
	svc.SetVIP(resource.VIPs(host)[0].String())
	w.store.Apply(w.serviceOps(name))
}

func (w *world) serviceOps(name string) []op {
	svc := w.services[name]
	return []op{
		{Collection: resource.Key(entries, resource.Inline), Name: name, Value: svc.Resource(resource.Inline)},
		{Collection: resource.Key(entries, resource.Workload), Name: name, Value: svc.Resource(resource.Workload)},
	}
}

// instance sets an instance of a service. Without ports it has one, http on 8080.
func (w *world) instance(service, name, address string, weight uint32, ports ...port) {
	w.store.Apply(w.instanceOps(service, name, address, weight, ports...))
}

func (w *world) instanceOps(service, name, address string, weight uint32, ports ...port) []op {
	if len(ports) == 0 {
		ports = []port{{"http", 8080}}
	}
	entry := &networking.WorkloadEntry{Address: netip.MustParseAddr(address).String(), Ports: map[string]uint32{}, Weight: weight}
	for _, p := range ports {
		entry.Ports[p.name] = p.number
	}
	r := w.services[service].SetInstance(part(w.t, name, entry))
	if r == nil {
		return nil
	}
	return append(w.serviceOps(service), op{Collection: resource.Key(workloads, resource.Workload), Name: name, Value: r})
}

// drop removes an instance of a service.
func (w *world) drop(service, name string) {
	w.services[service].RemoveInstance(name)
	w.store.Apply(append(w.serviceOps(service), op{Collection: resource.Key(workloads, resource.Workload), Name: name, Remove: true}))
}

// remove removes a service without instances.
func (w *world) remove(name string) {
	delete(w.services, name)
	w.store.Apply([]op{
		{Collection: resource.Key(entries, resource.Inline), Name: name, Remove: true},
		{Collection: resource.Key(entries, resource.Workload), Name: name, Remove: true},
	})
}
