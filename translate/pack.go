package translate

import (
	"encoding/binary"
	"fmt"
	"iter"
	"slices"
	"sync"

	"github.com/klauspost/compress/s2"
)

// blockEndpoints is the number of endpoints compressed together. A larger block
// would save little, since a service's endpoints are alike, and a change
// recompresses its block.
const blockEndpoints = 64

// block is up to blockEndpoints compressed endpoints: their number, the lengths
// of each name and resource, all names, all resources.
type block []byte

// buffers pools the buffers for building blocks.
var buffers = sync.Pool{New: func() any { return new([2][]byte) }}

// Pack compresses Endpoints, so that [Result.Release] can drop them. It shares
// the unchanged blocks of prev, the result that r was made from, or nil.
func (r *Result) Pack(prev *Result) {
	if r.blocks != nil || len(r.Endpoints) == 0 {
		return
	}
	r.blocks = make([]block, (len(r.Endpoints)+blockEndpoints-1)/blockEndpoints)
	for i := range r.blocks {
		all := blockOf(r.Endpoints, i)
		if prev != nil && i < len(prev.blocks) && slices.EqualFunc(all, blockOf(prev.Endpoints, i), sameEncoded) {
			r.blocks[i] = prev.blocks[i]
		} else {
			r.blocks[i] = pack(all)
		}
	}
}

// blockOf returns the endpoints of the i-th block.
func blockOf(endpoints []Encoded, i int) []Encoded {
	from := min(i*blockEndpoints, len(endpoints))
	return endpoints[from:min(from+blockEndpoints, len(endpoints))]
}

// Unpack restores Endpoints.
func (r *Result) Unpack() {
	if r.Endpoints != nil {
		return
	}
	var u unpacker
	for i, b := range r.blocks {
		u.open(b)
		if i == 0 { // all blocks but the last are full
			r.Endpoints = make([]Encoded, 0, u.n*len(r.blocks))
		}
		for range u.n {
			r.Endpoints = append(r.Endpoints, u.next())
		}
	}
}

// Release drops Endpoints if they are packed.
func (r *Result) Release() {
	if r.blocks != nil {
		r.Endpoints = nil
	}
}

// Each yields the endpoints by name, packed or not. It does not read Endpoints
// if they are packed, so it may run concurrently with [Result.Unpack].
func (r *Result) Each() iter.Seq[Encoded] {
	if r.blocks == nil {
		return slices.Values(r.Endpoints)
	}
	return func(yield func(Encoded) bool) {
		var u unpacker
		for _, b := range r.blocks {
			u.open(b)
			for range u.n {
				if !yield(u.next()) {
					return
				}
			}
		}
	}
}

// sameEncoded reports whether two endpoints share memory.
func sameEncoded(a, b Encoded) bool {
	return len(a.Resource) == len(b.Resource) && len(a.Resource) > 0 && &a.Resource[0] == &b.Resource[0]
}

func pack(endpoints []Encoded) block {
	buf := buffers.Get().(*[2][]byte) //nolint:forcetypeassert // nothing else is in the pool
	defer buffers.Put(buf)
	raw := binary.AppendUvarint(buf[0][:0], uint64(len(endpoints)))
	for _, e := range endpoints {
		raw = binary.AppendUvarint(raw, uint64(len(e.Name)))
		raw = binary.AppendUvarint(raw, uint64(len(e.Resource)))
	}
	for _, e := range endpoints {
		raw = append(raw, e.Name...)
	}
	for _, e := range endpoints {
		raw = append(raw, e.Resource...)
	}
	out := s2.Encode(buf[1][:cap(buf[1])], raw)
	buf[0], buf[1] = raw, out
	return slices.Clone(block(out))
}

// unpacker reads the endpoints of a block.
type unpacker struct {
	n       int // endpoints in the block
	at      int // endpoints read
	lengths [2 * blockEndpoints]int
	names   string // names of unread endpoints
	raw     []byte // resources of unread endpoints
}

func (u *unpacker) open(b block) {
	raw, err := s2.Decode(nil, b)
	if err != nil {
		panic(fmt.Sprintf("BUG: translate: unpack: %v", err))
	}
	number := func() int {
		v, n := binary.Uvarint(raw)
		raw = raw[n:]
		return int(v) //nolint:gosec // pack wrote it
	}
	u.n, u.at = number(), 0
	names := 0
	for i := range 2 * u.n {
		u.lengths[i] = number()
		if i%2 == 0 {
			names += u.lengths[i]
		}
	}
	u.names, u.raw = string(raw[:names]), raw[names:]
}

func (u *unpacker) next() Encoded {
	name, resource := u.lengths[2*u.at], u.lengths[2*u.at+1]
	e := Encoded{Name: u.names[:name], Resource: u.raw[:resource:resource]}
	u.names, u.raw = u.names[name:], u.raw[resource:]
	u.at++
	return e
}
