package state

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
)

// service is the mutable state of a ServiceEntry with instances. DB.apply
// guards all mutable fields.
type service struct {
	registry *Registry
	name     string // of its ServiceEntry; immutable, with memory not shared with a buffer
	selector string // the value of [encode.SelectorLabel]
	label    []byte // the label as a field of WorkloadEntry; immutable

	host string // host counted in DB.hosts
	// unaddressed reports that the host has no address although it should.
	unaddressed bool
	keptBack    bool    // the entry is not served separately, as another registry has precedence
	merger      *merger // merger that it leads or belongs to, nil for none
	kept        uint32  // last listing that kept all instances, 0 for none

	// Counters of [Protect].
	live      int           // instances except retained ones
	keptCount int           // retained instances
	emptied   bool          // all instances were removed or retained
	isKept    bool          // the entry is retained
	counted   bool          // in guard.live
	lost      bool          // in guard.services
	peaks     protect.Peaks // past values of live, with [Protect.Service]
	run       *protect.Run[*Record]
	missing   int // in guard.missing

	// Changes of the current batch.
	changed        bool
	added, removed []*Record
}

// composition holds the endpoints of a service's ServiceEntry. It is immutable
// and shares unchanged blocks with its predecessor.
type composition struct {
	selector string
	address  hostAddress
	blocks   []*block
	count    int         // number of endpoints
	size     int         // bytes of all endpoints, each encoded as a field of ServiceEntry
	sum      encode.Hash // of the instances
}

// hostAddress is the address assigned to a service's host.
type hostAddress struct {
	netip.Addr             // zero for none
	hash       encode.Hash // 0 for none
}

// blockSize is the maximum number of endpoints in a block.
const blockSize = 64

// keepAbove is the size in bytes from which the encoded endpoints of a service
// are cached per block. Larger services are sent from their blocks, smaller
// ones are copied into the response.
const keepAbove = 16 << 10

// block is an ordered run of endpoints. It is immutable except for its caches.
type block struct {
	records []*Record
	shared  bool // at least two have the same address
	size    int  // bytes of all, each encoded as a field of ServiceEntry
	bytes   atomic.Pointer[[]byte]
	groups  atomic.Pointer[[]endpointGroup]
}

func newBlock(records []*Record) *block {
	b := &block{records: records}
	for i, r := range records {
		b.size += r.endpointSize()
		b.shared = b.shared || i > 0 && records[i-1].address() == r.address()
	}
	return b
}

func (r *Record) endpointSize() int { return encode.SizeEndpoint(len(r.Spec()) + len(r.tail())) }

// append appends the encoded endpoints.
func (b *block) append(out []byte) []byte {
	if kept := b.bytes.Load(); kept != nil {
		return append(out, *kept...)
	}
	for _, r := range b.records {
		out = encode.AppendEndpoint(out, r.Spec(), r.tail())
	}
	return out
}

// encoded returns the encoded endpoints and caches them.
func (b *block) encoded() []byte {
	if kept := b.bytes.Load(); kept != nil {
		return *kept
	}
	out := b.append(make([]byte, 0, b.size))
	b.bytes.Store(&out)
	return out
}

// order sorts endpoints by address, ports and name. A stable order matters:
// istiod 1.24 and older push everything when only the order changes.
func order(a, b *Record) int {
	if c := strings.Compare(a.address(), b.address()); c != 0 || a == b {
		return c
	}
	return cmp.Or(
		slices.Compare(encode.PortNumbers(a.Spec()), encode.PortNumbers(b.Spec())),
		strings.Compare(a.Name(), b.Name()),
	)
}

// with returns the composition after a batch. Records in removed are in c,
// those in added are not. Both slices are sorted in place.
func (c *composition) with(added, removed []*Record) *composition {
	out := *c
	if len(added)+len(removed) == 0 {
		return &out
	}
	for _, r := range added {
		out.sum += r.hash
	}
	for _, r := range removed {
		out.sum -= r.hash
	}
	slices.SortFunc(added, order)
	slices.SortFunc(removed, order)
	out.blocks = make([]*block, 0, len(c.blocks)+1+len(added)/blockSize)
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
		out.blocks = appendBlocks(out.blocks, merge(nil, added, nil))
	}
	out.count, out.size = 0, 0
	for _, b := range out.blocks {
		out.count += len(b.records)
		out.size += b.size
	}
	if len(out.blocks) > 4+4*out.count/blockSize { // mostly small blocks
		all := make([]*Record, 0, out.count)
		for _, b := range out.blocks {
			all = append(all, b.records...)
		}
		out.blocks = appendBlocks(nil, all)
	}
	return &out
}

// upTo returns the number of sorted records that are not after last.
func upTo(records []*Record, last *Record) int {
	n, found := slices.BinarySearchFunc(records, last, order)
	if found {
		n++
	}
	return n
}

// merge returns the sorted records of a block after a change.
func merge(records, added, removed []*Record) []*Record {
	out := make([]*Record, 0, max(len(records)+len(added)-len(removed), 0))
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
		panic("BUG: state: an instance is not in its block")
	}
	return append(out, added...)
}

// appendBlocks splits records into as few blocks of equal size as possible.
func appendBlocks(blocks []*block, records []*Record) []*block {
	n := (len(records) + blockSize - 1) / blockSize
	for ; n > 0; n-- {
		size := (len(records) + n - 1) / n
		blocks = append(blocks, newBlock(records[:size:size]))
		records = records[size:]
	}
	return blocks
}

// sharesAddress reports whether any two endpoints have the same address.
func (c *composition) sharesAddress() bool {
	last := ""
	for _, b := range c.blocks {
		if b.shared || b.records[0].address() == last {
			return true
		}
		last = b.records[len(b.records)-1].address()
	}
	return false
}
