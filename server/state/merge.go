package state

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// merger is a service that is served with the endpoints of others. DB.apply
// guards it.
type merger = conflict.Merger[*service, *Record]

// Identity implements [conflict.Service].
func (s *service) Identity() (name, registry, selector string) {
	return s.name, s.registry.name, s.selector
}

// Instances implements [conflict.Service].
func (s *service) Instances() *composition { return s.own }

// Derive implements [conflict.Service].
func (s *service) Derive(p *encode.Part, of *Record) *Record {
	r := newRecord(s.registry.kindOf(of.kind.collection, of.kind.url), p)
	r.of = s
	r.Set(record.OwnLabel|record.Derived, true)
	return r
}

// merge carries out what was decided on services of one host: which one is
// served with the endpoints of which others.
func (b *batch) merge(all []*conflict.Contender[entryID]) {
	was := make(map[*service]*merger) // by lead
	for _, m := range b.loose {
		was[m.Lead] = m
	}
	for _, e := range all {
		if s := e.ID.service(); s != nil && s.merger != nil {
			was[s.merger.Lead] = s.merger
		}
	}
	for _, m := range was {
		for _, of := range m.Members() {
			of.merger = nil
		}
	}
	set := func(m *merger, members []conflict.Member[*service]) {
		weighted := m.IsWeighted()
		m.Set(members)
		for _, of := range members {
			of.ID.merger = m
		}
		b.changeMerger(m)
		if s := m.Lead; m.IsWeighted() != weighted && s.entry() != nil && s.entry().of == s {
			// Whether the names of its instances are served changes.
			s.each(func(i *Record) { b.touch(b.db.tables[collection.WorkloadEntry], i.Name()) })
		}
	}
	for _, e := range all {
		if len(e.Members) == 0 {
			continue
		}
		s := e.ID.service()
		m := was[s]
		if delete(was, s); m == nil {
			m = conflict.NewMerger[*service, *Record](s)
		}
		members := []conflict.Member[*service]{{ID: s, Role: e.Lead.Role}}
		for _, of := range e.Members {
			members = append(members, conflict.Member[*service]{ID: of.ID.service(), Role: of.Role})
		}
		set(m, members)
	}
	for _, m := range was {
		set(m, nil)
	}
}

// changeMerger schedules a merger for composition.
func (b *batch) changeMerger(m *merger) {
	if !slices.Contains(b.mergers, m) {
		b.mergers = append(b.mergers, m)
	}
	b.change(m.Lead)
}

// composeMerger serves what a merger composes. The entry of its lead is in no
// log yet.
func (b *batch) composeMerger(m *merger) {
	composed, added, removed := m.Compose()
	for _, c := range removed {
		if c.Is(record.Derived) {
			b.touch(c.kind.collection, c.Name())
			c.kind.collection.Drop(c)
			b.db.setServed(c, false)
			b.concern(c.kind.registry)
		}
	}
	for _, c := range added {
		if c.Is(record.Derived) {
			b.touch(c.kind.collection, c.Name())
			c.kind.collection.put(c)
		}
	}
	if m.Lead.merger == m {
		e, parts := m.Lead.entry(), *composed
		parts.Address = e.parts.Address
		e.parts = &parts
	}
}

// isReplaced reports whether only derived records of the service's instances
// are served.
func (s *service) isReplaced() bool {
	return s.merger != nil && s.merger.Lead == s && s.merger.IsWeighted()
}
