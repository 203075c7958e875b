package mcp

import (
	"fmt"
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

const entries = collection.ServiceEntry

type (
	resourceStore = store.Store[*resource.Resource]
	op            = store.Op[*resource.Resource]
)

// world is a store with services, as ingest fills it, and a gate.
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
	a, err := anypb.New(body)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(&mcp.Resource{
		Metadata: &mcp.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 7}}, Body: a,
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

// entry sets a service.
func (w *world) entry(name, host string, resolution networking.ServiceEntry_Resolution) {
	svc := w.services[name]
	if svc == nil {
		svc = resource.NewService("dc1", host)
		w.services[name] = svc
	}
	svc.SetEntry(part(w.t, name, &networking.ServiceEntry{
		Hosts: []string{host}, Resolution: resolution,
		Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
	}))
	svc.SetVIP(resource.VIPs(host)[0].String())
	w.apply(name)
}

func (w *world) apply(name string) {
	w.store.Apply([]op{{Collection: entries, Name: name, Value: w.services[name].Resource(resource.Inline)}})
}

// instance sets an instance of a service.
func (w *world) instance(service, name, address string, port uint32) {
	w.services[service].SetInstance(part(w.t, name, &networking.WorkloadEntry{
		Address: netip.MustParseAddr(address).String(), Ports: map[string]uint32{"http": port},
	}))
	w.apply(service)
}

// crowd sets many instances of a service, each with a label that makes it about so large.
func (w *world) crowd(service string, count, size int) {
	labels := map[string]string{"padding": strings.Repeat("x", size)}
	for i := range count {
		w.services[service].SetInstance(part(w.t, fmt.Sprintf("%s-%d", service, i), &networking.WorkloadEntry{
			Address: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String(), Labels: labels,
		}))
	}
	w.apply(service)
}

// drop removes an instance of a service.
func (w *world) drop(service, name string) {
	w.services[service].RemoveInstance(name)
	w.apply(service)
}

// remove removes a service.
func (w *world) remove(name string) {
	delete(w.services, name)
	w.store.Apply([]op{{Collection: entries, Name: name, Remove: true}})
}

// publish sets a resource that is served as it is.
func (w *world) publish(name string, body proto.Message) {
	p := part(w.t, name, body)
	w.store.Apply([]op{{Collection: p.Collection(), Name: name, Value: resource.NewResource(p, "dc1")}})
}
