package plugin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Union combines in one catalog what several parts of a registry report, which
// are followed each on its own, such as clusters: one whose outage, retention
// and doubt are its own, and takes nothing from the others.
//
// A service whose key several parts report is one service with the instances of
// all. Its description and ports are those of the first part that has it, with
// the ports of the others whose name and number are not taken. The name of the
// part precedes the ID of an instance, and is its Cluster unless it has one.
//
// The first listing ends with that of the last part. Reasons, problems and
// details name their part. An adapter gives each part a catalog of its own, and
// makes no calls to the catalog behind.
type Union struct {
	catalog Catalog
	what    string
	names   []string
	faults  *Faults[int]

	mu sync.Mutex // guards the fields below and the order of calls to catalog
	// services holds what each part reports, by its number; nil where it does
	// not have the service.
	services map[registry.Key][]*Snapshot
	details  []string
	retained []func(registry.Key) map[string]string // see recaller
}

// NewUnion returns a Union of parts with these names, in the order of their
// precedence. What a part is, is shown before its name: "context".
func NewUnion(catalog Catalog, what string, names []string) *Union {
	u := &Union{
		catalog: catalog, what: what, names: names, faults: NewFaults[int](catalog),
		services: map[registry.Key][]*Snapshot{}, details: make([]string, len(names)), retained: make([]func(registry.Key) map[string]string, len(names)),
	}
	recallWith(catalog, u.recall, u.retainedOf)
	return u
}

// Parts returns a catalog for each part, once.
func (u *Union) Parts() []Catalog {
	first := NewFirstListing(u.catalog)
	parts := make([]Catalog, 0, len(u.names))
	for i := range u.names {
		parts = append(parts, &unionPart{Union: u, i: i, arrived: first.Expect()})
	}
	return parts
}

// recall returns a service as it is in the catalog.
func (u *Union) recall(key registry.Key) (s Snapshot, ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	of := u.services[key]
	if of != nil {
		s = u.join(of)
	}
	return s, of != nil
}

// retainedOf returns why the parts retain instances, by ID.
func (u *Union) retainedOf(key registry.Key) map[string]string {
	u.mu.Lock()
	all := slices.Clone(u.retained)
	u.mu.Unlock()
	out := map[string]string{}
	for i, retained := range all { // without a lock: it takes the part's
		if retained == nil {
			continue
		}
		for id, text := range retained(key) {
			out[u.id(i, id)] = text
		}
	}
	return out
}

// id returns the ID of a part's instance in the catalog.
func (u *Union) id(part int, id string) string { return u.names[part] + "/" + id }

// join combines what the parts report of a service.
func (u *Union) join(of []*Snapshot) (all Snapshot) {
	has := false
	for i, part := range of {
		if part == nil {
			continue
		}
		if !has {
			has, all.Service = true, part.Service
			all.Service.Ports = slices.Clone(part.Service.Ports)
		}
		for _, port := range part.Service.Ports {
			if !slices.ContainsFunc(all.Service.Ports, func(p registry.Port) bool { return p.Name == port.Name || p.Number == port.Number }) {
				all.Service.Ports = append(all.Service.Ports, port)
			}
		}
		for _, in := range part.Instances {
			in.ID, in.Cluster = u.id(i, in.ID), cmp.Or(in.Cluster, u.names[i])
			all.Instances = append(all.Instances, in)
		}
	}
	return all
}

// unionPart is the catalog of one part.
type unionPart struct {
	*Union
	i       int
	arrived func()
}

var _ Catalog = (*unionPart)(nil)

// Set implements [Catalog]. It retains the instances, which Grace permits.
func (p *unionPart) Set(svc registry.Service, instances []registry.Instance) {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.services[svc.Key]
	if of == nil {
		of = make([]*Snapshot, len(p.names))
		p.services[svc.Key] = of
	}
	of[p.i] = &Snapshot{svc, instances}
	all := p.join(of)
	p.catalog.Set(all.Service, all.Instances)
}

// Remove implements [Catalog].
func (p *unionPart) Remove(key registry.Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.services[key]
	if of == nil || of[p.i] == nil {
		return
	}
	of[p.i] = nil
	if slices.ContainsFunc(of, func(s *Snapshot) bool { return s != nil }) {
		all := p.join(of)
		p.catalog.Set(all.Service, all.Instances)
		return
	}
	delete(p.services, key)
	p.catalog.Remove(key)
}

// Synced implements [Catalog].
func (p *unionPart) Synced() { p.arrived() }

// Degraded implements [Catalog].
func (p *unionPart) Degraded(err error) {
	if err != nil {
		err = fmt.Errorf("%s %s: %w", p.what, p.names[p.i], err)
	}
	p.faults.Set(p.names[p.i], p.i, err)
}

// Detail implements [Catalog].
func (p *unionPart) Detail(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.details[p.i] = text
	var all []string
	for i, text := range p.details {
		if text != "" {
			all = append(all, p.names[i]+": "+text)
		}
	}
	p.catalog.Detail(strings.Join(all, "; "))
}

// Problem implements [Catalog].
func (p *unionPart) Problem(id, reason string) { p.catalog.Problem(p.named(id), reason) }

// LeftOut implements [Catalog].
func (p *unionPart) LeftOut(id, reason string) { p.catalog.LeftOut(p.named(id), reason) }

// named returns an id that no other part uses.
func (p *unionPart) named(id string) string { return id + " " + p.what + " " + p.names[p.i] }

// Heard implements [Catalog].
func (p *unionPart) Heard() { p.catalog.Heard() }
