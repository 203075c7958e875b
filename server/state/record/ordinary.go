package record

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// endpointGroup represents the endpoints of a service that have equal
// attributes and an address that no other endpoint has.
type endpointGroup struct {
	attributes encode.Hash
	sum        encode.Hash
	count      int
}

// endpointGroups holds groups by attributes. Most services have few groups, so
// a linear search comes first.
type endpointGroups struct {
	list   []endpointGroup
	places map[encode.Hash]int // index in list; nil up to manyGroups
}

const manyGroups = 8

func (g *endpointGroups) add(e endpointGroup) {
	i := g.find(e.attributes)
	if i < 0 {
		i = len(g.list)
		g.list = append(g.list, endpointGroup{attributes: e.attributes})
		switch {
		case g.places != nil:
			g.places[e.attributes] = i
		case len(g.list) > manyGroups:
			g.places = make(map[encode.Hash]int)
			for i := range g.list {
				g.places[g.list[i].attributes] = i
			}
		}
	}
	g.list[i].sum += e.sum
	g.list[i].count += e.count
}

func (g *endpointGroups) find(attributes encode.Hash) int {
	if g.places == nil {
		return slices.IndexFunc(g.list, func(e endpointGroup) bool { return e.attributes == attributes })
	}
	if i, ok := g.places[attributes]; ok {
		return i
	}
	return -1
}

func group[E Endpoint](r E) endpointGroup {
	return endpointGroup{attributes: encode.Attributes(r.Encoded().Spec()), sum: r.Encoded().Sum(), count: 1}
}

// inner returns the groups of all endpoints but the first and the last, which
// alone depend on adjacent blocks.
func (b *block[E]) inner() []endpointGroup {
	if kept := b.groups.Load(); kept != nil {
		return *kept
	}
	var g endpointGroups
	for i := 1; i < len(b.records)-1; i++ {
		r := b.records[i]
		if r.Encoded().Address() != b.records[i-1].Encoded().Address() && r.Encoded().Address() != b.records[i+1].Encoded().Address() {
			g.add(group(r))
		}
	}
	b.groups.Store(&g.list)
	return g.list
}

// exceptions returns the value of [encode.EndpointsLabel].
func (c *Composition[E]) exceptions() encode.Hash {
	var all endpointGroups
	for i, b := range c.blocks {
		for _, g := range b.inner() {
			all.add(g)
		}
		last := len(b.records) - 1
		if c.alone(i, 0) {
			all.add(group(b.records[0]))
		}
		if last > 0 && c.alone(i, last) {
			all.add(group(b.records[last]))
		}
	}
	if len(all.list) == 0 {
		return c.sum
	}
	ordinary := all.list[0]
	for _, g := range all.list[1:] {
		if g.count > ordinary.count || g.count == ordinary.count && g.attributes < ordinary.attributes {
			ordinary = g
		}
	}
	return c.sum - ordinary.sum + ordinary.attributes
}

// alone reports whether endpoint i of a block has an address that no other
// endpoint has.
func (c *Composition[E]) alone(block, i int) bool {
	records := c.blocks[block].records
	address := records[i].Encoded().Address()
	switch {
	case i > 0 && records[i-1].Encoded().Address() == address, i < len(records)-1 && records[i+1].Encoded().Address() == address:
		return false
	case i == 0 && block > 0:
		before := c.blocks[block-1].records
		if before[len(before)-1].Encoded().Address() == address {
			return false
		}
	}
	return i < len(records)-1 || block == len(c.blocks)-1 || c.blocks[block+1].records[0].Encoded().Address() != address
}
