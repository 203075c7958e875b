// Package servertest drives the real state, and the protocols that serve it, in
// tests.
package servertest

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// World is a state with one registry, dc1, whose listing is complete, and a
// second one that holds collections back on demand. Its methods end the test if
// they cannot do what they say.
type World struct {
	DB   *state.DB
	View *view.View
	// Created is the create_time of resources, in seconds.
	Created int64
	t       testing.TB

	mu        sync.Mutex
	selectors map[string]string // guarded by mu; by the name of an entry without its namespace
	held      []string          // guarded by mu
}

// New returns a world without services. Names that are subscribed to are
// followed until the test ends.
func New(t testing.TB, o state.Options) *World {
	t.Helper()
	w := &World{Created: 1, t: t, selectors: map[string]string{}, held: []string{}}
	o.Selector = func(name string) string {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.selectors[name]
	}
	db := state.New([]string{"dc1", "gate"}, o, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	w.DB, w.View = db, view.New(db)
	w.apply("dc1", &pluginv1.WatchResponse{Synced: true})
	db.Registry("gate").Begin([]string{})
	return w
}

// Follow wakes subscriptions to names until stop is called.
func (w *World) Follow() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { w.View.Run(ctx) }) // ends with stop
	return func() {
		cancel()
		group.Wait()
	}
}

// Hold closes or opens a collection.
func (w *World) Hold(coll string, held bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held = slices.DeleteFunc(slices.Clone(w.held), func(c string) bool { return c == coll })
	if held {
		w.held = append(w.held, coll)
	}
	w.DB.Registry("gate").Begin(append([]string{}, w.held...))
}

// Apply applies one message of the registry's plugin.
func (w *World) Apply(upserts ...*pluginv1.Upsert) {
	w.t.Helper()
	w.apply("dc1", &pluginv1.WatchResponse{Upserts: upserts})
}

func (w *World) apply(registry string, m *pluginv1.WatchResponse) {
	w.t.Helper()
	if err := w.DB.Registry(registry).Apply(m); err != nil {
		w.t.Fatal(err)
	}
}

// Upsert returns a resource as a plugin sends it; service is "" for one that is
// served as it is.
func (w *World) Upsert(service, name string, body proto.Message) *pluginv1.Upsert {
	w.t.Helper()
	m := testresource.Named(name)
	m.CreateTime.Seconds = w.Created
	return &pluginv1.Upsert{Service: service, Resource: testresource.Encode(m, body)}
}

// Port is the number of a named port.
type Port struct {
	Name   string
	Number uint32
}

// Entry sets a service whose endpoints are addresses. Without ports it has one,
// http on 80. A port's name is its protocol.
func (w *World) Entry(name, host string, ports ...Port) {
	w.t.Helper()
	w.EntryOf(name, host, networking.ServiceEntry_STATIC, ports...)
}

// EntryOf is Entry with a resolution.
func (w *World) EntryOf(name, host string, resolution networking.ServiceEntry_Resolution, ports ...Port) {
	w.t.Helper()
	if len(ports) == 0 {
		ports = []Port{{"http", 80}}
	}
	_, short, _ := strings.Cut(name, "/")
	w.mu.Lock()
	if w.selectors[short] == "" {
		w.selectors[short] = host
	}
	w.mu.Unlock()
	entry := &networking.ServiceEntry{Hosts: []string{host}, Resolution: resolution}
	for _, p := range ports {
		entry.Ports = append(entry.Ports, &networking.ServicePort{Number: p.Number, Name: p.Name, Protocol: strings.ToUpper(p.Name)})
	}
	w.Apply(w.Upsert(name, name, entry))
}

// Instance sets an instance of a service. Without ports it has one, http on
// 8080.
func (w *World) Instance(service, name, address string, weight uint32, ports ...Port) {
	w.t.Helper()
	w.Apply(w.InstanceUpsert(service, name, address, weight, ports...))
}

// InstanceUpsert returns what [World.Instance] applies.
func (w *World) InstanceUpsert(service, name, address string, weight uint32, ports ...Port) *pluginv1.Upsert {
	w.t.Helper()
	if len(ports) == 0 {
		ports = []Port{{"http", 8080}}
	}
	entry := &networking.WorkloadEntry{Address: netip.MustParseAddr(address).String(), Ports: map[string]uint32{}, Weight: weight}
	for _, p := range ports {
		entry.Ports[p.Name] = p.Number
	}
	return w.Upsert(service, name, entry)
}

// Instances sets instances of a service at once, one for each address, as
// Instance does. Their names are that of the service with numbers from 0.
func (w *World) Instances(service string, addresses ...string) {
	w.t.Helper()
	upserts := make([]*pluginv1.Upsert, 0, len(addresses))
	for i, a := range addresses {
		upserts = append(upserts, w.InstanceUpsert(service, fmt.Sprintf("%s-%d", service, i), a, 1))
	}
	w.Apply(upserts...)
}

// Crowd sets many instances of a service, each with a label that makes it about
// so large, in bytes.
func (w *World) Crowd(service string, count, size int) {
	w.t.Helper()
	labels := map[string]string{"padding": strings.Repeat("x", size)}
	var upserts []*pluginv1.Upsert
	for i := range count {
		upserts = append(upserts, w.Upsert(service, fmt.Sprintf("%s-%d", service, i), &networking.WorkloadEntry{
			Address: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String(), Labels: labels,
		}))
	}
	w.Apply(upserts...)
}

// Publish sets a resource that is served as it is.
func (w *World) Publish(name string, body proto.Message) {
	w.t.Helper()
	w.Apply(w.Upsert("", name, body))
}

// Drop removes an instance of a service.
func (w *World) Drop(name string) { w.remove(collection.WorkloadEntry, name) }

// Remove removes a service with its instances.
func (w *World) Remove(name string) { w.remove(collection.ServiceEntry, name) }

func (w *World) remove(coll, name string) {
	w.apply("dc1", &pluginv1.WatchResponse{Removals: []*pluginv1.Removal{{Collection: coll, Name: name}}})
}

// EntryFrom sets a service of another registry, with one port.
func (w *World) EntryFrom(registry, name, host string) {
	w.t.Helper()
	w.apply(registry, &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{w.Upsert(name, name, &networking.ServiceEntry{
		Hosts: []string{host}, Resolution: networking.ServiceEntry_STATIC, Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
	})}})
}

// RemoveFrom removes a service of another registry.
func (w *World) RemoveFrom(registry, name string) {
	w.apply(registry, &pluginv1.WatchResponse{Removals: []*pluginv1.Removal{{Collection: collection.ServiceEntry, Name: name}}})
}

// Resources returns what sinks of a form have of a collection, decoded, with
// their versions, in the order of last change.
func (w *World) Resources(coll string, f encode.Form) (resources []*mcp.Resource) {
	w.t.Helper()
	l := encode.NewLayout(f)
	for c := range w.DB.Changes(state.Kind{Collection: coll, Shape: f.Shape}, new(state.Cursor)) {
		e := c.Record.Encode(l)
		if e.Absent {
			continue
		}
		r := new(mcp.Resource)
		if err := proto.Unmarshal(e.Append(nil), r); err != nil {
			w.t.Fatal(err)
		}
		resources = append(resources, r)
	}
	return resources
}
