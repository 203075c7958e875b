package state

import (
	"iter"
	"strings"
	"unsafe"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Record is one resource of one registry: the ServiceEntry of a service, the
// WorkloadEntry of an instance, or a resource published unchanged. Its content
// is immutable; a change creates another Record.
type Record struct {
	buf  string // metadata fields except the version, then the spec
	kind *kind
	hash encode.Hash // of the content, including an instance's label

	// of is the service of an instance or of a service's ServiceEntry, nil for
	// any other resource.
	of *service
	// parts are the endpoints of a service's ServiceEntry, nil for any other
	// resource.
	parts *composition

	nameAt    uint32 // offset of the name in buf
	specAt    uint32 // offset of the spec in buf
	addressAt uint32 // offset of a WorkloadEntry's address in buf
	seen      uint32 // guarded by DB.apply: last listing with the record

	nameLen    uint16
	addressLen uint16
	traits     traits
	marks      marks // guarded by DB.apply

	// next is the claim on the same name that comes next in precedence, guarded
	// by DB.apply. The last may be a tombstone.
	next *Record

	// place is the revision of the record's slot in the log of each shape, 0
	// for none. Guarded by DB.mu.
	place [shapes]Revision
}

// shapes is the number of shapes.
const shapes = 2

// traits are immutable properties of a record.
type traits uint8

const (
	isStatic     traits = 1 << iota // a ServiceEntry whose endpoints are IP addresses
	isComposable                    // a ServiceEntry with neither endpoints nor workloadSelector
	ownAddress                      // a ServiceEntry with addresses, or that must not have any
	ownLabel                        // an instance received with the label of its service
	isTombstone                     // a removed name, without content
	isDerived                       // an instance as served in another service; see merger
)

func (r *Record) is(t traits) bool { return r.traits&t != 0 }

func (r *Record) set(t traits, on bool) {
	if on {
		r.traits |= t
	}
}

// marks are mutable properties of a record.
type marks uint8

const (
	isShadowed  marks = 1 << iota // another registry owns the name
	isServed                      // counted as served
	isKept                        // retained after removal by its registry; see [Protect]
	isUndecided                   // while it is restored: it may be in conflict with others
)

func (r *Record) marked(m marks) bool { return r.marks&m != 0 }

func (r *Record) mark(m marks, on bool) {
	if on {
		r.marks |= m
	} else {
		r.marks &^= m
	}
}

// kind is shared by many records: collection, registry and body message.
type kind struct {
	collection *table
	registry   *Registry
	url        string
}

// copy returns a record of the same content that nothing has claimed.
func (r *Record) copy() *Record {
	return &Record{
		buf: r.buf, kind: r.kind, hash: r.hash, nameAt: r.nameAt, specAt: r.specAt, addressAt: r.addressAt,
		seen: r.seen, nameLen: r.nameLen, addressLen: r.addressLen, traits: r.traits & savedTraits,
	}
}

// newRecord copies a part into a record.
func newRecord(k *kind, p *encode.Part) *Record {
	var b strings.Builder
	b.Grow(len(p.Metadata) + len(p.Spec))
	b.Write(p.Metadata)
	b.Write(p.Spec)
	r := &Record{
		buf: b.String(), kind: k, hash: p.Hash,
		specAt: uint32(len(p.Metadata)), nameLen: uint16(len(p.Name)), addressLen: uint16(min(len(p.Address), 1<<16-1)),
	}
	// The name and the address may occur several times; any occurrence will do.
	r.nameAt = uint32(strings.Index(r.buf, p.Name))
	r.addressAt = r.specAt + uint32(max(strings.Index(r.buf[r.specAt:], p.Address), 0))
	r.set(isStatic, p.Static)
	r.set(isComposable, p.Composable)
	r.set(ownAddress, p.OwnAddress)
	return r
}

// newTombstone returns the tombstone of a removed name.
func newTombstone(k *kind, name string) *Record {
	return &Record{buf: strings.Clone(name), kind: k, nameLen: uint16(len(name)), specAt: uint32(len(name)), traits: isTombstone}
}

// Name returns the resource's name, "namespace/name".
func (r *Record) Name() string { return r.buf[r.nameAt:][:r.nameLen] }

// isOf reports whether the record is a claim of the registry, as opposed to a
// derived record or a tombstone.
func (r *Record) isOf(registry *Registry) bool {
	return r.kind.registry == registry && !r.is(isTombstone) && !r.is(isDerived)
}

// Namespace returns the part of the name before the slash.
func (r *Record) Namespace() string {
	ns, _, _ := strings.Cut(r.Name(), "/")
	return ns
}

// Collection returns the resource's collection.
func (r *Record) Collection() string { return r.kind.collection.name }

// Registry returns the name of the record's registry.
func (r *Record) Registry() string { return *r.kind.registry.shown.Load() }

// IsOfRegistry reports whether both records are of one registry, whatever its
// name.
func (r *Record) IsOfRegistry(s *Record) bool { return r.kind.registry == s.kind.registry }

// Service returns the name of the ServiceEntry of an instance or of a service,
// "" for any other resource.
func (r *Record) Service() string {
	if r.of == nil {
		return ""
	}
	return r.of.name
}

// Instances returns the endpoints of a service's ServiceEntry.
func (r *Record) Instances() iter.Seq[*Record] {
	return func(yield func(*Record) bool) {
		if r.parts == nil {
			return
		}
		for _, b := range r.parts.blocks {
			for _, i := range b.records {
				if !yield(i) {
					return
				}
			}
		}
	}
}

// Hosts returns the hosts of a ServiceEntry, nil for any other kind.
func (r *Record) Hosts() []string {
	if r.Collection() != collection.ServiceEntry {
		return nil
	}
	return encode.Hosts(r.Spec())
}

// Endpoints returns the number of instances of a service, 0 for any other
// resource.
func (r *Record) Endpoints() int {
	if r.parts == nil {
		return 0
	}
	return r.parts.count
}

// Hash returns the hash of the content served in a shape, independent of the
// form.
func (r *Record) Hash(s encode.Shape) encode.Hash {
	switch {
	case r.parts == nil:
		return r.hash
	case s == encode.Inline:
		return r.hash + r.parts.address.hash + r.parts.sum
	}
	return r.hash + r.parts.address.hash
}

// ofTools is the form of tools, which pages and the API show.
var ofTools = encode.NewLayout(encode.Form{})

// Version returns the version that tools receive.
func (r *Record) Version() encode.Hash {
	if r.Collection() == collection.ServiceEntry {
		return ofTools.VersionOf(r.Hash(encode.Inline), r.parts != nil)
	}
	return r.hash
}

// address returns the address of a WorkloadEntry.
func (r *Record) address() string { return r.buf[r.addressAt:][:r.addressLen] }

func (r *Record) metadata() []byte { return readOnly(r.buf[:r.specAt]) }

// Spec returns the encoded body, which must not be modified.
func (r *Record) Spec() []byte { return readOnly(r.buf[r.specAt:]) }

// tail returns what follows the spec of an instance: its label.
func (r *Record) tail() []byte {
	if r.of == nil || r.is(ownLabel) || r.parts != nil {
		return nil
	}
	return r.of.label
}

// visible reports whether the resource exists in a shape. In the inline shape,
// instances are endpoints of their service.
func (r *Record) visible(s encode.Shape) bool {
	return r != nil && !r.is(isTombstone) && (s == encode.Workload || !r.IsInstance())
}

// IsInstance reports whether the record is an instance of a service.
func (r *Record) IsInstance() bool { return r.of != nil && r.parts == nil }

// size returns the bytes that count towards the registry's limit.
func (r *Record) size() int { return len(r.buf) }

// readOnly returns the bytes of s without copying. They must not be modified.
func readOnly(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }
