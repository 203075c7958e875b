package state

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// service is a ServiceEntry with instances while they change. DB.apply guards
// what is not immutable.
type service struct {
	registry *Registry
	name     string // of its ServiceEntry
	selector string // the value of [encode.SelectorLabel]
	label    []byte // that label, as a field of WorkloadEntry; immutable

	host     string // that is counted in DB.hosts
	keptBack bool   // another registry owns the name of the entry
	kept     uint32 // the last listing that kept all instances, 0 for none

	// What the present batch changes.
	changed        bool
	added, removed []*Record
}

// composition is what a service's ServiceEntry consists of besides its own
// bytes. It is immutable and shares what did not change with the one before.
type composition struct {
	selector string
	address  hostAddress
	blocks   []*block
	count    int         // of endpoints
	size     int         // of all endpoints, each as a field of ServiceEntry, in bytes
	sum      encode.Hash // of the instances
}

// hostAddress is the address of a service's host.
type hostAddress struct {
	netip.Addr             // the zero Addr is none
	hash       encode.Hash // 0 for none
}

// blockSize is the number of endpoints up to which a block grows.
const blockSize = 64

// keepAbove is the size from which the encoded endpoints of a service are kept
// block by block, in bytes: such a service is sent from its blocks, a smaller
// one is copied into the response in any case.
const keepAbove = 16 << 10

// block is a run of endpoints in order. It is immutable but for what it
// keeps of readings.
type block struct {
	records []*Record
	shared  bool // two of them have one address
	size    int  // of all, each as a field of ServiceEntry, in bytes
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

func (r *Record) endpointSize() int { return encode.SizeEndpoint(len(r.spec()) + len(r.tail())) }

// append appends the endpoints.
func (b *block) append(out []byte) []byte {
	if kept := b.bytes.Load(); kept != nil {
		return append(out, *kept...)
	}
	for _, r := range b.records {
		out = encode.AppendEndpoint(out, r.spec(), r.tail())
	}
	return out
}

// encoded returns the endpoints, and keeps them.
func (b *block) encoded() []byte {
	if kept := b.bytes.Load(); kept != nil {
		return *kept
	}
	out := b.append(make([]byte, 0, b.size))
	b.bytes.Store(&out)
	return out
}

// order is the order of endpoints: address, ports, name. istiod 1.24 and older
// push everything when only the order changes.
func order(a, b *Record) int {
	if c := strings.Compare(a.address(), b.address()); c != 0 || a == b {
		return c
	}
	return cmp.Or(
		slices.Compare(encode.PortNumbers(a.spec()), encode.PortNumbers(b.spec())),
		strings.Compare(a.Name(), b.Name()),
	)
}

// with returns the composition after a batch. The records that are removed are
// in c, those that are added are not; both are reordered.
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
	if len(out.blocks) > 4+4*out.count/blockSize { // mostly small ones
		all := make([]*Record, 0, out.count)
		for _, b := range out.blocks {
			all = append(all, b.records...)
		}
		out.blocks = appendBlocks(nil, all)
	}
	return &out
}

// upTo returns the number of records, sorted, that are not after last.
func upTo(records []*Record, last *Record) int {
	n, found := slices.BinarySearchFunc(records, last, order)
	if found {
		n++
	}
	return n
}

// merge returns the records of a block after a change.
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

// appendBlocks appends blocks of records, as few as possible and of equal size.
func appendBlocks(blocks []*block, records []*Record) []*block {
	n := (len(records) + blockSize - 1) / blockSize
	for ; n > 0; n-- {
		size := (len(records) + n - 1) / n
		blocks = append(blocks, newBlock(records[:size:size]))
		records = records[size:]
	}
	return blocks
}

// sharesAddress reports whether two endpoints have one address.
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
