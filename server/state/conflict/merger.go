package conflict

import (
	"maps"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// Service is a service as it is merged.
type Service[E record.Endpoint] interface {
	comparable
	// Identity returns the name of its ServiceEntry, that of its registry, and
	// the value of [encode.SelectorLabel].
	Identity() (name, registry, selector string)
	// Instances returns its own endpoints.
	Instances() *record.Composition[E]
	// Derive returns the endpoint of the service that a part describes, in
	// place of another service's. It has the trait [record.Derived].
	Derive(p *encode.Part, of E) E
}

// Merger serves the endpoints of several services as those of one, the lead.
//
// Each endpoint of another member is derived: in the namespace of the lead,
// with its label, its ports and a weight. Endpoints of the lead are served
// unchanged unless there are weights. An endpoint with an address and the ports
// of one of an earlier member is not served. So what is served depends only on
// the members and their endpoints, and not on the order of events; a change
// costs as much as the addresses that it concerns.
type Merger[S Service[E], E record.Endpoint] struct {
	Lead    S
	members []*source[S, E] // in order of precedence, the lead first
	parts   *record.Composition[E]

	// Changes since the last call of Compose.

	full      bool            // everything is derived anew
	addresses map[string]bool // of changed endpoints
	gone      []E             // endpoints of members
	left      []E             // served of members that left
}

// source is a member with what is served of it.
type source[S Service[E], E record.Endpoint] struct {
	Member[S]
	served map[E]E // by its own endpoint
	weight uint64  // sum of the own weights of served
	unit   uint64  // divisor of their weights: weight, rounded
}

// NewMerger returns a merger without members.
func NewMerger[S Service[E], E record.Endpoint](lead S) *Merger[S, E] {
	_, _, selector := lead.Identity()
	return &Merger[S, E]{Lead: lead, parts: &record.Composition[E]{Selector: selector}}
}

// Set replaces the members; the first one is the lead. Without any, nothing is
// served.
func (m *Merger[S, E]) Set(members []Member[S]) {
	was := m.members
	m.members = make([]*source[S, E], 0, len(members))
	for _, now := range members {
		next := &source[S, E]{Member: now, served: make(map[E]E)}
		if i := slices.IndexFunc(was, func(s *source[S, E]) bool { return s.ID == now.ID }); i >= 0 {
			next.served, next.weight = was[i].served, was[i].weight
			was = slices.Delete(was, i, i+1)
		}
		m.members = append(m.members, next)
	}
	for _, s := range was {
		m.left = slices.AppendSeq(m.left, maps.Values(s.served))
	}
	m.full = true
}

// Members returns the services that are merged, the lead first.
func (m *Merger[S, E]) Members() []S {
	out := make([]S, len(m.members))
	for n, s := range m.members {
		out[n] = s.ID
	}
	return out
}

// IsWeighted reports whether the endpoints of the lead are derived, too.
func (m *Merger[S, E]) IsWeighted() bool { return len(m.members) > 0 && m.members[0].Total > 0 }

// Note notes endpoints that a member has got or lost.
func (m *Merger[S, E]) Note(got, lost []E) {
	for _, i := range got {
		m.look(i)
	}
	for _, i := range lost {
		m.look(i)
	}
	m.gone = append(m.gone, lost...)
}

// look notes the address of an endpoint.
func (m *Merger[S, E]) look(i E) {
	if m.addresses == nil {
		m.addresses = make(map[string]bool)
	}
	m.addresses[i.Encoded().Address()] = true
}

// Compose returns what is served, and how it differs from before.
func (m *Merger[S, E]) Compose() (parts *record.Composition[E], added, removed []E) {
	removed = m.left
	drop := func(of *source[S, E], i E) {
		if as, is := of.served[i]; is {
			delete(of.served, i)
			of.weight -= ownWeight(i)
			removed = append(removed, as)
		}
	}
	for _, of := range m.members {
		for _, i := range m.gone {
			drop(of, i)
		}
		if m.full {
			for i := range of.ID.Instances().All() {
				m.look(i)
			}
		}
	}
	var none E
	fresh := make([][]E, len(m.members))
	for address := range m.addresses {
		var taken, mine [][]encode.NamedPort
		for n, of := range m.members {
			taken, mine = append(taken, mine...), nil
			for _, i := range of.ID.Instances().At(address) {
				ports := of.endpoint(i)
				if of.Total > 0 && of.Share == 0 || slices.ContainsFunc(taken, func(p []encode.NamedPort) bool { return slices.Equal(p, ports) }) {
					drop(of, i)
					continue
				}
				mine = append(mine, ports)
				if _, is := of.served[i]; !is {
					of.served[i] = none
					of.weight += ownWeight(i)
					fresh[n] = append(fresh[n], i)
				}
			}
		}
	}
	for n, of := range m.members {
		unit := roundWeight(of.weight)
		if m.full || of.Total > 0 && unit != of.unit {
			fresh[n] = slices.Collect(maps.Keys(of.served))
		}
		of.unit = unit
		for _, i := range fresh[n] {
			was, as := of.served[i], m.derive(of, i)
			if was == as || was != none && alike(was.Encoded(), as.Encoded()) {
				continue
			}
			if was != none {
				removed = append(removed, was)
			}
			of.served[i] = as
			added = append(added, as)
		}
	}
	m.full, m.addresses, m.gone, m.left = false, nil, nil, nil
	m.parts = m.parts.With(added, removed)
	return m.parts, added, removed
}

// alike reports whether nothing tells one endpoint from another.
func alike(a, b *record.Content) bool {
	return a.Sum() == b.Sum() && a.Name() == b.Name() && a.Is(record.Derived) == b.Is(record.Derived)
}

func ownWeight[E record.Endpoint](i E) uint64 {
	return min(uint64(encode.Weight(i.Encoded().Spec())), maxOwnWeight)
}

// endpoint returns the ports that distinguish an endpoint from others of its
// address.
func (s *source[S, E]) endpoint(i E) []encode.NamedPort {
	spec := i.Encoded().Spec()
	if s.Ports != nil {
		return s.portsOf(spec)
	}
	var out []encode.NamedPort
	for _, n := range encode.PortNumbers(spec) {
		out = append(out, encode.NamedPort{Number: n})
	}
	return out
}

// derive returns what is served for an endpoint of a member.
func (m *Merger[S, E]) derive(of *source[S, E], i E) E {
	if of.ID == m.Lead && of.Total == 0 {
		return i
	}
	lead, _, selector := m.Lead.Identity()
	c, to := i.Encoded(), encode.Rewriting{Selector: selector}
	if of.Total > 0 {
		to.Weight = of.weightOf(ownWeight(i), of.unit)
	}
	name := c.Name()
	if of.ID != m.Lead {
		_, registry, _ := of.ID.Identity()
		to.Ports = of.portsOf(c.Spec())
		name = derivedName(namespace(lead), registry, name)
	}
	p := &encode.Part{
		Collection: collection.WorkloadEntry, Name: name, Metadata: encode.WithName(c.Metadata(), name),
		Spec: encode.Rewrite(c.Spec(), to), Address: c.Address(),
	}
	p.Hash = encode.HashOf([]byte(p.Collection), p.Metadata, p.Spec)
	return m.Lead.Derive(p, i)
}

const maxDerivedName = 253 // without the namespace

// derivedName returns the name of a member's endpoint in the lead's namespace:
// its own name, its namespace unless that equals the registry's name, and the
// registry.
func derivedName(lead, registry, name string) string {
	ns, short, _ := strings.Cut(name, "/")
	suffix := "." + registry
	if ns != registry {
		suffix = "." + ns + suffix
	}
	if len(short)+len(suffix) > maxDerivedName {
		hash := "-" + encode.HashOf([]byte(name), []byte(registry)).String()
		suffix = "." + registry
		short = short[:maxDerivedName-len(suffix)-len(hash)] + hash
	}
	return lead + "/" + short + suffix
}
