package resource

import (
	"cmp"
	"errors"
	"slices"
	"strings"
)

// SelectorLabel is the label of WorkloadEntries that tells which ServiceEntry they belong to.
const SelectorLabel = "isthmus.io/service"

// blockSize is the number of endpoints up to which a block grows; it is split in two above.
const blockSize = 64

// block is a run of endpoints in order, with their bytes. It is immutable.
type block struct {
	parts         []*Part
	bytes         []byte // each as field 6 of ServiceEntry
	sharedAddress bool   // two of them have one address
}

func newBlock(parts []*Part) *block {
	b := &block{parts: parts}
	size := 0
	for _, p := range parts {
		size += 1 + 4 + len(p.spec)
	}
	b.bytes = make([]byte, 0, size)
	for i, p := range parts {
		b.bytes = appendEndpoint(b.bytes, p.spec)
		b.sharedAddress = b.sharedAddress || i > 0 && parts[i-1].address == p.address
	}
	return b
}

// order is the order of endpoints: address, port, name. istiod 1.24 and older push everything when only the order changes.
func order(a, b *Part) int {
	if c := strings.Compare(a.address, b.address); c != 0 {
		return c
	}
	if c := slices.Compare(a.ports, b.ports); c != 0 {
		return c
	}
	return strings.Compare(a.name, b.name)
}

// Service is a ServiceEntry and its instances while they change. It belongs to one goroutine; the resources that it yields are
// immutable and share what did not change.
type Service struct {
	registry string
	selector string
	vip      string
	entry    *Part
	parts    map[string]*Part // by name
	blocks   []*block         // replaced, never changed
	sum      Hash             // of the parts
	groups   endpointGroups
}

// NewService returns a service without entry and instances, whose instances carry [SelectorLabel] with the given value.
func NewService(registry, selector string) *Service {
	return &Service{registry: registry, selector: selector, parts: make(map[string]*Part)}
}

// ErrNotComposable is the reason for refusing a ServiceEntry that says that its instances are resources of their own and has endpoints
// or a workloadSelector all the same.
var ErrNotComposable = errors.New("a ServiceEntry whose instances are resources of their own must have neither endpoints nor workloadSelector")

// SetEntry sets the ServiceEntry and reports whether it changed.
func (s *Service) SetEntry(p *Part) (changed bool) {
	if s.entry != nil && s.entry.hash == p.hash {
		return false
	}
	s.entry = p
	return true
}

// Entry returns the ServiceEntry's part, nil if there is none.
func (s *Service) Entry() *Part { return s.entry }

// RemoveEntry removes the ServiceEntry.
func (s *Service) RemoveEntry() { s.entry = nil }

// SetVIP sets the address that the entry has in forms with [Form.Address], "" for none.
func (s *Service) SetVIP(vip string) { s.vip = vip }

// WantsVIP says whether the entry may be given an address.
func (s *Service) WantsVIP() bool { return s.entry != nil && !s.entry.hasVIP }

// Len returns the number of instances.
func (s *Service) Len() int { return len(s.parts) }

// SetInstance sets one instance, by the name of its WorkloadEntry, and returns it as a resource of its own; nil if nothing
// changed. The part gets the label that ties it to its service if it lacks it.
func (s *Service) SetInstance(p *Part) *Resource {
	p = p.withLabel(SelectorLabel, s.selector)
	old := s.parts[p.name]
	if old != nil {
		if old.hash == p.hash {
			return nil
		}
		s.drop(old)
	}
	s.parts[p.name] = p
	s.sum = s.sum.Add(p.hash)
	s.arrive(p)
	s.insert(p)
	return &Resource{part: p, registry: s.registry, shape: Workload, hash: p.hash}
}

// RemoveInstance removes an instance and reports whether it was there.
func (s *Service) RemoveInstance(name string) bool {
	old := s.parts[name]
	if old == nil {
		return false
	}
	delete(s.parts, name)
	s.drop(old)
	return true
}

// Instances returns the instances as resources of their own, by name.
func (s *Service) Instances() []*Resource {
	out := make([]*Resource, 0, len(s.parts))
	for _, p := range s.parts {
		out = append(out, &Resource{part: p, registry: s.registry, shape: Workload, hash: p.hash})
	}
	slices.SortFunc(out, func(a, b *Resource) int { return cmp.Compare(a.Name(), b.Name()) })
	return out
}

// Resource returns the service's ServiceEntry in a shape. There must be an entry.
func (s *Service) Resource(shape Shape) *Resource {
	c := &composed{selector: s.selector}
	r := &Resource{part: s.entry, registry: s.registry, shape: shape, composed: c, hash: s.entry.hash}
	if s.WantsVIP() {
		c.vip = s.vip
		if s.vip != "" {
			r.hash = r.hash.Add(HashOf([]byte("address"), []byte(s.vip)))
		}
	}
	if shape == Inline {
		c.blocks, c.endpoints, r.hash = s.blocks, len(s.parts), r.hash.Add(s.sum)
		c.exceptions = s.groups.exceptions(s.sum)
	}
	return r
}

// find returns the block that p belongs into and its place there.
func (s *Service) find(p *Part) (b, i int, found bool) {
	b, _ = slices.BinarySearchFunc(s.blocks, p, func(bl *block, p *Part) int {
		return order(bl.parts[len(bl.parts)-1], p)
	})
	if b == len(s.blocks) {
		return b, 0, false
	}
	i, found = slices.BinarySearchFunc(s.blocks[b].parts, p, order)
	return b, i, found
}

func (s *Service) insert(p *Part) {
	b, i, _ := s.find(p)
	if b == len(s.blocks) && b > 0 {
		b--
		i = len(s.blocks[b].parts)
	}
	if len(s.blocks) == 0 {
		s.blocks = []*block{newBlock([]*Part{p})}
		return
	}
	parts := slices.Insert(slices.Clone(s.blocks[b].parts), i, p)
	if len(parts) <= blockSize {
		s.replace(b, newBlock(parts))
		return
	}
	half := len(parts) / 2
	s.replace(b, newBlock(slices.Clone(parts[:half])), newBlock(slices.Clone(parts[half:])))
}

func (s *Service) drop(p *Part) {
	s.sum = s.sum.Sub(p.hash)
	b, i, found := s.find(p)
	if !found {
		panic("BUG: resource: an instance is not in its block")
	}
	parts := slices.Delete(slices.Clone(s.blocks[b].parts), i, i+1)
	if len(parts) == 0 {
		s.replace(b)
	} else {
		s.replace(b, newBlock(parts))
	}
	s.leave(p)
}

// replace puts blocks in the place of block b, in a new list: resources share the old one.
func (s *Service) replace(b int, with ...*block) {
	blocks := make([]*block, 0, len(s.blocks)-1+len(with))
	blocks = append(blocks, s.blocks[:b]...)
	blocks = append(blocks, with...)
	s.blocks = append(blocks, s.blocks[b+1:]...)
}
