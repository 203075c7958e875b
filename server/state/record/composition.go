package record

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Endpoint is an instance of a service.
type Endpoint interface {
	comparable
	Encoded() *Content
	// Tail returns what follows its spec: the label of its service.
	Tail() []byte
}

// Composition holds the endpoints of a service's ServiceEntry. It is immutable
// and shares unchanged blocks with its predecessor.
type Composition[E Endpoint] struct {
	Selector string // the value of [encode.SelectorLabel]
	Address  HostAddress
	blocks   []*block[E]
	count    int         // number of endpoints
	size     int         // bytes of all endpoints, each encoded as a field of ServiceEntry
	sum      encode.Hash // of the instances
}

// HostAddress is the address assigned to a service's host.
type HostAddress struct {
	netip.Addr             // zero for none
	Hash       encode.Hash // 0 for none
}

// blockSize is the maximum number of endpoints in a block.
const blockSize = 64

// keepAbove is the size in bytes from which the encoded endpoints of a service
// are cached per block. Larger services are sent from their blocks, smaller
// ones are copied into the response.
const keepAbove = 16 << 10

// block is an ordered run of endpoints. It is immutable except for its caches.
type block[E Endpoint] struct {
	records []E
	shared  bool // at least two have the same address
	size    int  // bytes of all, each encoded as a field of ServiceEntry
	bytes   atomic.Pointer[[]byte]
	groups  atomic.Pointer[[]endpointGroup]
}

func newBlock[E Endpoint](records []E) *block[E] {
	b := &block[E]{records: records}
	for i, r := range records {
		b.size += endpointSize(r)
		b.shared = b.shared || i > 0 && records[i-1].Encoded().Address() == r.Encoded().Address()
	}
	return b
}

func endpointSize[E Endpoint](r E) int {
	return encode.SizeEndpoint(len(r.Encoded().Spec()) + len(r.Tail()))
}

// append appends the encoded endpoints.
func (b *block[E]) append(out []byte) []byte {
	if kept := b.bytes.Load(); kept != nil {
		return append(out, *kept...)
	}
	for _, r := range b.records {
		out = encode.AppendEndpoint(out, r.Encoded().Spec(), r.Tail())
	}
	return out
}

// encoded returns the encoded endpoints and caches them.
func (b *block[E]) encoded() []byte {
	if kept := b.bytes.Load(); kept != nil {
		return *kept
	}
	out := b.append(make([]byte, 0, b.size))
	b.bytes.Store(&out)
	return out
}

// order sorts endpoints by address, ports and name. A stable order matters:
// istiod 1.24 and older push everything when only the order changes.
func order[E Endpoint](a, b E) int {
	x, y := a.Encoded(), b.Encoded()
	if c := strings.Compare(x.Address(), y.Address()); c != 0 || x == y {
		return c
	}
	return cmp.Or(
		slices.Compare(encode.PortNumbers(x.Spec()), encode.PortNumbers(y.Spec())),
		strings.Compare(x.Name(), y.Name()),
	)
}

// With returns the composition after a batch. Records in removed are in c,
// those in added are not. Both slices are sorted in place.
func (c *Composition[E]) With(added, removed []E) *Composition[E] {
	out := *c
	if len(added)+len(removed) == 0 {
		return &out
	}
	for _, r := range added {
		out.sum += r.Encoded().Sum()
	}
	for _, r := range removed {
		out.sum -= r.Encoded().Sum()
	}
	slices.SortFunc(added, order[E])
	slices.SortFunc(removed, order[E])
	out.blocks = make([]*block[E], 0, len(c.blocks)+1+len(added)/blockSize)
	for i, b := range c.blocks {
		in, gone := len(added), len(removed)
		if i < len(c.blocks)-1 {
			last := b.records[len(b.records)-1]
			in, gone = upTo(added, last), upTo(removed, last)
		}
		if in+gone == 0 {
			out.blocks = append(out.blocks, b)
			continue
		}
		out.blocks = appendBlocks(out.blocks, merge(b.records, added[:in], removed[:gone]))
		added, removed = added[in:], removed[gone:]
	}
	if len(c.blocks) == 0 {
		out.blocks = appendBlocks(out.blocks, merge[E](nil, added, nil))
	}
	out.count, out.size = 0, 0
	for _, b := range out.blocks {
		out.count += len(b.records)
		out.size += b.size
	}
	if len(out.blocks) > 4+4*out.count/blockSize { // mostly small blocks
		all := make([]E, 0, out.count)
		for _, b := range out.blocks {
			all = append(all, b.records...)
		}
		out.blocks = appendBlocks[E](nil, all)
	}
	return &out
}

// upTo returns the number of sorted records that are not after last.
func upTo[E Endpoint](records []E, last E) int {
	n, found := slices.BinarySearchFunc(records, last, order[E])
	if found {
		n++
	}
	return n
}

// merge returns the sorted records of a block after a change.
func merge[E Endpoint](records, added, removed []E) []E {
	out := make([]E, 0, max(len(records)+len(added)-len(removed), 0))
	for _, r := range records {
		if len(removed) > 0 && removed[0] == r {
			removed = removed[1:]
			continue
		}
		for len(added) > 0 && order(added[0], r) < 0 {
			out, added = append(out, added[0]), added[1:]
		}
		out = append(out, r)
	}
	if len(removed) > 0 {
		panic("BUG: record: an instance is not in its block")
	}
	return append(out, added...)
}

// appendBlocks splits records into as few blocks of equal size as possible.
func appendBlocks[E Endpoint](blocks []*block[E], records []E) []*block[E] {
	n := (len(records) + blockSize - 1) / blockSize
	for ; n > 0; n-- {
		size := (len(records) + n - 1) / n
		blocks = append(blocks, newBlock(records[:size:size]))
		records = records[size:]
	}
	return blocks
}

// sharesAddress reports whether any two endpoints have the same address.
func (c *Composition[E]) sharesAddress() bool {
	last := ""
	for _, b := range c.blocks {
		if b.shared || b.records[0].Encoded().Address() == last {
			return true
		}
		last = b.records[len(b.records)-1].Encoded().Address()
	}
	return false
}

// At returns the endpoints at an address.
func (c *Composition[E]) At(address string) (out []E) {
	first, _ := slices.BinarySearchFunc(c.blocks, address, func(b *block[E], address string) int {
		return strings.Compare(b.records[len(b.records)-1].Encoded().Address(), address)
	})
	for _, b := range c.blocks[first:] {
		i, _ := slices.BinarySearchFunc(b.records, address, func(r E, address string) int { return strings.Compare(r.Encoded().Address(), address) })
		for ; i < len(b.records); i++ {
			if b.records[i].Encoded().Address() != address {
				return out
			}
			out = append(out, b.records[i])
		}
	}
	return out
}

// All returns the endpoints, in order. The nil composition has none.
func (c *Composition[E]) All() iter.Seq[E] {
	return func(yield func(E) bool) {
		if c == nil {
			return
		}
		for _, b := range c.blocks {
			for _, r := range b.records {
				if !yield(r) {
					return
				}
			}
		}
	}
}

// Len returns the number of endpoints. The nil composition has none.
func (c *Composition[E]) Len() int {
	if c == nil {
		return 0
	}
	return c.count
}

// Hash returns the hash of what is served in a shape of a resource with a
// content: of a ServiceEntry with the composition, or of any other with nil.
func (c *Composition[E]) Hash(content encode.Hash, s encode.Shape) encode.Hash {
	switch {
	case c == nil:
		return content
	case s == encode.Inline:
		return content + c.Address.Hash + c.sum
	}
	return content + c.Address.Hash
}

// labelled encodes the endpoints one by one and adds the label of
// [encode.Form.PortSets] to those that share an address.
func (c *Composition[E]) labelled() []byte {
	all := make([]E, 0, c.count)
	for _, b := range c.blocks {
		all = append(all, b.records...)
	}
	out := make([]byte, 0, c.size+64)
	var tail []byte
	for i := 0; i < len(all); {
		j := i + 1
		for j < len(all) && all[j].Encoded().Address() == all[i].Encoded().Address() {
			j++
		}
		if j == i+1 {
			out = encode.AppendEndpoint(out, all[i].Encoded().Spec(), all[i].Tail())
			i = j
			continue
		}
		d := sha256.New()
		for _, r := range all[i:j] {
			for _, port := range encode.PortNumbers(r.Encoded().Spec()) {
				d.Write(binary.BigEndian.AppendUint32(nil, port))
			}
			d.Write([]byte{';'})
		}
		value := fmt.Sprintf("%x", d.Sum(nil)[:5])
		for _, r := range all[i:j] {
			tail = encode.AppendLabel(append(tail[:0], r.Tail()...), encode.PortsLabel, value)
			out = encode.AppendEndpoint(out, r.Encoded().Spec(), tail)
		}
		i = j
	}
	return out
}
