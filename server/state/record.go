package state

import (
	"strings"
	"unsafe"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Record is one resource of one registry: the ServiceEntry of a service, the
// WorkloadEntry of an instance, or a resource that is served as it is. What it
// says is immutable; a change of content is another Record.
type Record struct {
	buf  string // the fields of Metadata but the version, then the spec
	kind *kind
	hash encode.Hash // of the content, an instance's label included

	// of is the service that an instance or a service's ServiceEntry is a part
	// of, nil for any other resource.
	of *service
	// parts is what a service's ServiceEntry is composed of, nil for any other
	// resource.
	parts *composition

	nameAt    uint32 // where in buf the name begins
	specAt    uint32 // the same of the spec
	addressAt uint32 // the same of a WorkloadEntry's address
	seen      uint32 // guarded by DB.apply: the listing that mentioned it last

	nameLen    uint16
	addressLen uint16
	registry   uint16 // place of the registry in the configuration
	traits     traits
	marks      marks // guarded by DB.apply

	// next is the claim of a later registry on the same name, guarded by
	// DB.apply. The last one may be a tombstone.
	next *Record

	// place is the revision of the record's slot in the log of each shape, 0
	// for none. Guarded by DB.mu.
	place [shapes]Revision
}

// shapes is the number of shapes.
const shapes = 2

// traits are what is known of a record from the beginning.
type traits uint8

const (
	isStatic     traits = 1 << iota // a ServiceEntry whose endpoints are IP addresses
	isComposable                    // a ServiceEntry with neither endpoints nor workloadSelector
	ownAddress                      // a ServiceEntry that states addresses, or must not have one
	ownLabel                        // an instance that came with the label of its service
	isTombstone                     // only the name; it was removed
)

func (r *Record) is(t traits) bool { return r.traits&t != 0 }

func (r *Record) set(t traits, on bool) {
	if on {
		r.traits |= t
	}
}

// marks are what became of a record.
type marks uint8

const (
	isShadowed marks = 1 << iota // another registry owns the name
	isServed                     // counted as served
)

func (r *Record) marked(m marks) bool { return r.marks&m != 0 }

func (r *Record) mark(m marks, on bool) {
	if on {
		r.marks |= m
	} else {
		r.marks &^= m
	}
}

// kind is a collection and the message that bodies are written in.
type kind struct {
	collection *table
	url        string
}

// newRecord copies a part.
func newRecord(k *kind, p *encode.Part, registry uint16) *Record {
	var b strings.Builder
	b.Grow(len(p.Metadata) + len(p.Spec))
	b.Write(p.Metadata)
	b.Write(p.Spec)
	r := &Record{
		buf: b.String(), kind: k, hash: p.Hash, registry: registry,
		specAt: uint32(len(p.Metadata)), nameLen: uint16(len(p.Name)), addressLen: uint16(min(len(p.Address), 1<<16-1)),
	}
	// Whichever occurrence of the text is found, it is the same text.
	r.nameAt = uint32(strings.Index(r.buf, p.Name))
	r.addressAt = r.specAt + uint32(max(strings.Index(r.buf[r.specAt:], p.Address), 0))
	r.set(isStatic, p.Static)
	r.set(isComposable, p.Composable)
	r.set(ownAddress, p.OwnAddress)
	return r
}

// newTombstone returns what is left of a name that is gone.
func newTombstone(k *kind, name string) *Record {
	return &Record{buf: strings.Clone(name), kind: k, nameLen: uint16(len(name)), specAt: uint32(len(name)), registry: 1<<16 - 1, traits: isTombstone}
}

// Name returns the resource's name, "namespace/name".
func (r *Record) Name() string { return r.buf[r.nameAt:][:r.nameLen] }

// Namespace returns the part of the name before the slash.
func (r *Record) namespace() string {
	ns, _, _ := strings.Cut(r.Name(), "/")
	return ns
}

// Collection returns the resource's collection.
func (r *Record) Collection() string { return r.kind.collection.name }

// Hosts returns the hosts of a ServiceEntry, nil for any other kind.
func (r *Record) Hosts() []string {
	if r.Collection() != collection.ServiceEntry {
		return nil
	}
	return encode.Hosts(r.spec())
}

// Endpoints returns the number of instances of a service, 0 for a resource that
// is no service's ServiceEntry.
func (r *Record) Endpoints() int {
	if r.parts == nil {
		return 0
	}
	return r.parts.count
}

// Hash returns the hash of what sinks of a shape get, whatever the form.
func (r *Record) Hash(s encode.Shape) encode.Hash {
	switch {
	case r.parts == nil:
		return r.hash
	case s == encode.Inline:
		return r.hash + r.parts.address.hash + r.parts.sum
	}
	return r.hash + r.parts.address.hash
}

// address returns the address of a WorkloadEntry.
func (r *Record) address() string { return r.buf[r.addressAt:][:r.addressLen] }

func (r *Record) metadata() []byte { return readOnly(r.buf[:r.specAt]) }

func (r *Record) spec() []byte { return readOnly(r.buf[r.specAt:]) }

// tail is what follows the spec of an instance: its label.
func (r *Record) tail() []byte {
	if r.of == nil || r.is(ownLabel) || r.parts != nil {
		return nil
	}
	return r.of.label
}

// visible reports whether sinks of a shape have the resource: inline, an
// instance is an endpoint of its service.
func (r *Record) visible(s encode.Shape) bool {
	return r != nil && !r.is(isTombstone) && (s == encode.Workload || !r.isInstance())
}

func (r *Record) isInstance() bool { return r.of != nil && r.parts == nil }

// size is what counts against the bytes of a registry.
func (r *Record) size() int { return len(r.buf) }

// readOnly returns the bytes of s without copying them. Nobody may write to
// them.
func readOnly(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }
