package state

import (
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// merger is a service that is served with the endpoints of others. DB.apply
// guards it.
//
// Each endpoint of a member has a derived record: in the namespace of the lead,
// with its label, its ports and a weight. Endpoints of the lead are served
// unchanged unless there are weights. Derived records depend only on the state
// of the registries, not on the order of events.
type merger struct {
	lead     *service
	own      *composition // the lead's own instances
	parts    *composition // what is served
	members  []*member    // in order of precedence, the lead first
	weighted bool

	// Changes of the current batch.

	wanted    bool // the current decision retains it
	full      bool // compose everything, not only addresses
	changed   bool // in batch.mergers
	addresses map[string]bool
	removed   []*Record // instances of members
}

// member is a service whose endpoints are served as those of the lead.
type member struct {
	conflict.Member[entryID]
	s *service

	served map[*Record]*Record // the derived record by the instance
	weight uint64              // sum of the own weights of served
	unit   uint64              // divisor of their weights: weight, rounded
}

func ownWeight(r *Record) uint64 { return min(uint64(encode.Weight(r.Spec())), conflict.MaxOwnWeight) }

// mergeInto makes the service of an entry the lead of its members.
func (b *batch) mergeInto(e *contender) {
	s := e.record.of
	m := s.merger
	if m != nil && m.lead != s {
		b.dissolve(m)
		m = nil
	}
	if m == nil {
		m = &merger{lead: s, own: s.entry().parts, parts: &composition{Selector: s.selector}}
		s.merger = m
	}
	m.wanted = true
	members := []*member{{Member: e.Lead, s: s}}
	for _, of := range e.Members {
		members = append(members, &member{Member: *of, s: b.db.tables[collection.ServiceEntry].claim(of.ID.name, of.ID.registry).of})
	}
	kept := make(map[*service]bool)
	for _, now := range members {
		if now.s != s && now.s.merger != nil && now.s.merger != m {
			b.dissolve(now.s.merger)
		}
		now.s.merger = m
		kept[now.s] = true
		i := slices.IndexFunc(m.members, func(was *member) bool { return was.s == now.s })
		if i < 0 {
			now.served = make(map[*Record]*Record)
			continue
		}
		was := m.members[i]
		now.served, now.weight, now.unit = was.served, was.weight, was.unit
	}
	for _, was := range m.members {
		if !kept[was.s] {
			b.expel(m, was)
		}
	}
	m.members = members
	if weighted := e.Lead.Total > 0; weighted != m.weighted {
		m.weighted = weighted
		b.touchInstances(s)
	}
	m.full = true
	b.changeMerger(m)
}

// changeMerger schedules a merger for composition.
func (b *batch) changeMerger(m *merger) {
	if !m.changed {
		m.changed = true
		b.mergers = append(b.mergers, m)
	}
	b.change(m.lead)
}

// expel removes the derived records of a member.
func (b *batch) expel(m *merger, was *member) {
	var gone []*Record
	for _, r := range was.served {
		b.dropDerived(r)
		gone = append(gone, r)
	}
	was.served = nil
	m.parts = m.parts.With(nil, gone)
	if was.s.merger == m && was.s != m.lead {
		was.s.merger = nil
	}
}

func (b *batch) dissolve(m *merger) {
	if m.lead.merger != m {
		return
	}
	for _, was := range m.members {
		b.expel(m, was)
	}
	m.members = nil
	m.lead.merger = nil
	if c := m.lead.entry(); c != nil && c.of == m.lead {
		e := *c
		e.place = [shapes]Revision{}
		e.parts = m.own
		b.change(m.lead)
		e.kind.collection.put(&e)
		if m.weighted {
			b.touchInstances(m.lead)
		}
	}
}

// touchInstances touches the names of the instances of a service, as whether
// they are served may change.
func (b *batch) touchInstances(s *service) {
	s.each(func(i *Record) { b.touch(b.db.tables[collection.WorkloadEntry], i.Name()) })
}

// instances returns the composition of the service's own instances.
func (s *service) instances() *composition {
	if m := s.merger; m != nil && m.lead == s {
		return m.own
	}
	return s.entry().parts
}

// isReplaced reports whether only derived records of the service's instances
// are served.
func (s *service) isReplaced() bool {
	return s.merger != nil && s.merger.lead == s && s.merger.weighted
}

// note records that instances of a member changed.
func (m *merger) note(added, removed []*Record) {
	if m.addresses == nil {
		m.addresses = make(map[string]bool)
	}
	for _, r := range added {
		m.addresses[r.Address()] = true
	}
	for _, r := range removed {
		m.addresses[r.Address()] = true
	}
	m.removed = append(m.removed, removed...)
}

// compose derives the changed records, and returns the served composition.
func (m *merger) compose(b *batch) *composition {
	var added, removed []*Record
	replace := func(of *member, i, now *Record) {
		was := of.served[i]
		switch {
		case was == now && now != nil:
			return
		case was != nil && now != nil && was.Sum() == now.Sum() && was.Name() == now.Name() && was.Is(record.Derived) && now.Is(record.Derived):
			return
		}
		if was != nil {
			b.dropDerived(was)
			removed = append(removed, was)
		}
		if now == nil {
			delete(of.served, i)
			return
		}
		of.served[i] = now
		if now.Is(record.Derived) {
			b.putDerived(now)
		}
		added = append(added, now)
	}
	looked := m.addresses
	if m.full {
		looked = make(map[string]bool)
		for _, of := range m.members {
			for r := range of.served {
				looked[r.Address()] = true
			}
			for r := range of.s.instances().All() {
				looked[r.Address()] = true
			}
		}
	}
	// Select the endpoints of each address that no earlier member has.
	fresh := make([][]*Record, len(m.members))
	stale := make([]map[*Record]bool, len(m.members))
	for n, of := range m.members {
		stale[n] = make(map[*Record]bool)
		if m.full {
			for i := range of.served {
				stale[n][i] = true
			}
			continue
		}
		for _, i := range m.removed {
			if of.served[i] != nil {
				stale[n][i] = true
			}
		}
		for address := range looked {
			for _, i := range of.s.instances().At(address) {
				if of.served[i] != nil {
					stale[n][i] = true
				}
			}
		}
	}
	for address := range looked {
		var taken [][]encode.NamedPort
		for n, of := range m.members {
			if of.Total > 0 && of.Share == 0 {
				continue
			}
			var mine [][]encode.NamedPort
			for _, i := range of.s.instances().At(address) {
				ports := of.endpoint(i)
				if slices.ContainsFunc(taken, func(p []encode.NamedPort) bool { return slices.Equal(p, ports) }) {
					continue
				}
				mine = append(mine, ports)
				delete(stale[n], i)
				fresh[n] = append(fresh[n], i)
			}
			taken = append(taken, mine...)
		}
	}
	for n, of := range m.members {
		for i := range stale[n] {
			replace(of, i, nil)
			of.weight -= ownWeight(i)
		}
		for _, i := range fresh[n] {
			if of.served[i] == nil {
				of.weight += ownWeight(i)
			}
		}
		again := fresh[n]
		if unit := conflict.RoundWeight(of.weight); of.Total > 0 && unit != of.unit && !m.full {
			of.unit = unit
			for i := range of.served {
				if !slices.Contains(fresh[n], i) {
					again = append(again, i)
				}
			}
		} else {
			of.unit = unit
		}
		for _, i := range again {
			replace(of, i, m.derive(of, i))
		}
	}
	m.full, m.addresses, m.removed = false, nil, nil
	m.parts = m.parts.With(added, removed)
	return m.parts
}

// endpoint returns the ports that distinguish an endpoint from others of its
// address.
func (m *member) endpoint(i *Record) []encode.NamedPort {
	if m.Ports != nil {
		return m.PortsOf(i.Spec())
	}
	var out []encode.NamedPort
	for _, n := range encode.PortNumbers(i.Spec()) {
		out = append(out, encode.NamedPort{Number: n})
	}
	return out
}

// derive returns the record that is served for an instance of a member.
func (m *merger) derive(of *member, i *Record) *Record {
	if of.s == m.lead && of.Total == 0 {
		return i
	}
	to := encode.Rewriting{Selector: m.lead.selector}
	if of.Total > 0 {
		to.Weight = of.Weight(ownWeight(i), of.unit)
	}
	name := i.Name()
	if of.s != m.lead {
		to.Ports = of.PortsOf(i.Spec())
		name = derivedName(m.lead, of.s, name)
	}
	p := &encode.Part{
		Collection: i.Collection(), Name: name, Metadata: encode.WithName(i.Metadata(), name), BodyURL: i.kind.url,
		Spec: encode.Rewrite(i.Spec(), to), Address: i.Address(),
	}
	p.Hash = encode.HashOf([]byte(p.Collection), p.Metadata, p.Spec)
	r := newRecord(m.lead.registry.kindOf(i.kind.collection, i.kind.url), p)
	r.of = m.lead
	r.Set(record.OwnLabel, true)
	r.Set(record.Derived, true)
	return r
}

const maxDerivedName = 253 // without the namespace

// derivedName returns the name of a member's instance in the lead's namespace:
// its own name, its namespace unless that equals the registry's name, and the
// registry.
func derivedName(lead, of *service, name string) string {
	ns, short, _ := strings.Cut(name, "/")
	suffix := "." + of.registry.name
	if ns != of.registry.name {
		suffix = "." + ns + suffix
	}
	if len(short)+len(suffix) > maxDerivedName {
		hash := "-" + encode.HashOf([]byte(name), []byte(of.registry.name)).String()
		suffix = "." + of.registry.name
		short = short[:maxDerivedName-len(suffix)-len(hash)] + hash
	}
	leadNS, _, _ := strings.Cut(lead.name, "/")
	return leadNS + "/" + short + suffix
}

// putDerived adds a derived record after all claims on its name.
func (b *batch) putDerived(c *Record) {
	b.touch(c.kind.collection, c.Name())
	c.kind.collection.putDerived(c)
}

func (b *batch) dropDerived(c *Record) {
	if !c.Is(record.Derived) {
		return
	}
	t := c.kind.collection
	b.touch(t, c.Name())
	t.drop(c)
	b.db.setServed(c, false)
	b.concern(c.kind.registry)
}
