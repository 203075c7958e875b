package resource

import (
	"slices"
	"strings"
)

// endpointGroup is the endpoints of a service that have the same attributes and
// share their address with no other.
type endpointGroup struct {
	attributes uint64
	sum        uint64 // of the low halves of the parts' hashes
	count      int
}

// endpointGroups finds the attributes that most endpoints of a service have.
type endpointGroups struct {
	// heap has the ordinary group first. Which one that is depends on the
	// endpoints only, not on what happened before.
	heap []endpointGroup
	// places are indices in heap by attributes. Most services have few groups,
	// which are searched one by one: it is nil until there are more than
	// manyGroups.
	places map[uint64]int
}

const manyGroups = 8

// add adds an endpoint.
func (g *endpointGroups) add(p *Part) {
	i := g.find(p)
	if i < 0 {
		i = len(g.heap)
		g.heap = append(g.heap, endpointGroup{attributes: p.attributes})
		switch {
		case g.places != nil:
			g.places[p.attributes] = i
		case len(g.heap) > manyGroups:
			g.places = make(map[uint64]int)
			for i := range g.heap {
				g.places[g.heap[i].attributes] = i
			}
		}
	}
	g.heap[i].count++
	g.heap[i].sum += p.hash[1]
	g.fix(i)
}

// remove removes an endpoint that was added.
func (g *endpointGroups) remove(p *Part) {
	i := g.find(p)
	g.heap[i].count--
	g.heap[i].sum -= p.hash[1]
	if g.heap[i].count == 0 {
		last := len(g.heap) - 1
		g.swap(i, last)
		g.heap = g.heap[:last]
		delete(g.places, p.attributes)
		if i == last {
			return
		}
	}
	g.fix(i)
}

// find returns the index in heap of the group that p belongs to, -1 if there is
// none.
func (g *endpointGroups) find(p *Part) int {
	if g.places == nil {
		return slices.IndexFunc(g.heap, func(e endpointGroup) bool { return e.attributes == p.attributes })
	}
	if i, ok := g.places[p.attributes]; ok {
		return i
	}
	return -1
}

// before is the order of the heap: by number of endpoints, the largest first,
// then by attributes.
func (g *endpointGroups) before(i, j int) bool {
	a, b := &g.heap[i], &g.heap[j]
	return a.count > b.count || a.count == b.count && a.attributes < b.attributes
}

// fix restores the order of the heap after group i changed.
func (g *endpointGroups) fix(i int) {
	for parent := (i - 1) / 2; i > 0 && g.before(i, parent); i, parent = parent, (parent-1)/2 {
		g.swap(i, parent)
	}
	for child := 2*i + 1; child < len(g.heap); child = 2*i + 1 {
		if child+1 < len(g.heap) && g.before(child+1, child) {
			child++
		}
		if !g.before(child, i) {
			return
		}
		g.swap(i, child)
		i = child
	}
}

func (g *endpointGroups) swap(i, j int) {
	h := g.heap
	h[i], h[j] = h[j], h[i]
	if g.places != nil {
		g.places[h[i].attributes], g.places[h[j].attributes] = i, j
	}
}

// exceptions returns the value of [EndpointsLabel], the sum being that of all
// endpoints.
func (g *endpointGroups) exceptions(sum Hash) uint64 {
	if len(g.heap) == 0 {
		return sum[1]
	}
	return sum[1] - g.heap[0].sum + g.heap[0].attributes
}

// arrive notes an endpoint that is about to be inserted.
func (s *Service) arrive(p *Part) {
	switch other, more := s.at(p.address); {
	case other == nil:
		s.groups.add(p)
	case !more: // the other one had the address alone
		s.groups.remove(other)
	}
}

// leave notes an endpoint that was dropped.
func (s *Service) leave(p *Part) {
	switch other, more := s.at(p.address); {
	case other == nil:
		s.groups.remove(p)
	case !more: // the other one has the address alone now
		s.groups.add(other)
	}
}

// at returns the first endpoint with an address, nil if there is none, and
// whether there are more.
func (s *Service) at(address string) (first *Part, more bool) {
	compare := func(p *Part, address string) int { return strings.Compare(p.address, address) }
	b, _ := slices.BinarySearchFunc(s.blocks, address, func(bl *block, address string) int {
		return compare(bl.parts[len(bl.parts)-1], address)
	})
	if b == len(s.blocks) {
		return nil, false
	}
	parts := s.blocks[b].parts
	i, found := slices.BinarySearchFunc(parts, address, compare)
	if !found {
		return nil, false
	}
	first = parts[i]
	switch {
	case i+1 < len(parts):
		more = parts[i+1].address == address
	case b+1 < len(s.blocks):
		more = s.blocks[b+1].parts[0].address == address
	}
	return first, more
}
