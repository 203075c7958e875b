package state

import (
	"iter"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/record"
	"github.com/isthmus-mesh/isthmus/server/state/shapes"
)

// Record is one resource of one registry: the ServiceEntry of a service, the
// WorkloadEntry of an instance, or a resource published unchanged. Its content
// is immutable; a change creates another Record.
type Record struct {
	// Content has the last listing with the record as Seen, and its marks;
	// DB.apply guards both.
	record.Content
	kind *kind

	// of is the service of an instance or of a service's ServiceEntry, nil for
	// any other resource.
	of *service
	// parts are the endpoints of a service's ServiceEntry, nil for any other
	// resource.
	parts *composition

	// next is the claim on the same name that comes next in precedence, guarded
	// by DB.apply. The last may be a tombstone.
	next *Record

	// place is the revision of the record's slot in the log of each shape, 0
	// for none. DB.mu guards it; see [shapes.Places.At].
	place shapes.Places
}

// composition has the endpoints of a service.
type composition = record.Composition[*Record]

// Encoding is a record in a form, ready to be written.
type Encoding = record.Encoding[*Record]

// marks are mutable properties of a record.
type marks uint8

const (
	isShadowed  marks = 1 << iota // another registry owns the name
	isServed                      // counted as served
	isPaused                      // retained after removal by its registry; see [Protect]
	isUndecided                   // while it is restored: it may be in conflict with others
)

func (r *Record) marked(m marks) bool { return marks(r.Marks)&m != 0 }

func (r *Record) mark(m marks, on bool) {
	if on {
		r.Marks |= uint8(m)
	} else {
		r.Marks &^= uint8(m)
	}
}

// kind is shared by many records: collection, registry and body message.
type kind struct {
	collection *table
	registry   *Registry
	url        string
}

// copy returns a record of the same content that nothing has claimed.
func (r *Record) copy() *Record { return &Record{Content: r.Content.Copy(), kind: r.kind} }

// newRecord copies a part into a record.
func newRecord(k *kind, p *encode.Part) *Record { return &Record{Content: record.Of(p), kind: k} }

// newTombstone returns the tombstone of a removed name.
func newTombstone(k *kind, name string) *Record {
	return &Record{Content: record.TombstoneOf(name), kind: k}
}

// isClaim reports whether the record is a claim of its registry, and neither
// derived nor a tombstone.
func (r *Record) isClaim() bool { return !r.Is(record.Tombstone | record.Derived) }

// isOf reports whether the record is a claim of the registry.
func (r *Record) isOf(registry *Registry) bool { return r.kind.registry == registry && r.isClaim() }

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
func (r *Record) Instances() iter.Seq[*Record] { return r.parts.All() }

// Hosts returns the hosts of a ServiceEntry, nil for any other kind.
func (r *Record) Hosts() []string {
	if r.Collection() != collection.ServiceEntry {
		return nil
	}
	return encode.Hosts(r.Spec())
}

// Endpoints returns the number of instances of a service, 0 for any other
// resource.
func (r *Record) Endpoints() int { return r.parts.Len() }

// Hash returns the hash of the content served in a shape, independent of the
// form.
func (r *Record) Hash(s encode.Shape) encode.Hash { return r.parts.Hash(r.Sum(), s) }

// ofTools is the form of tools, which pages and the API show.
var ofTools = encode.NewLayout(encode.Form{})

// Version returns the version that tools receive.
func (r *Record) Version() encode.Hash {
	if r.Collection() == collection.ServiceEntry {
		return ofTools.VersionOf(r.Hash(encode.Inline), r.parts != nil)
	}
	return r.Sum()
}

// Encode returns the record in a form.
func (r *Record) Encode(l *encode.Layout) Encoding {
	of := record.Resource[*Record]{
		Content: &r.Content, Parts: r.parts, Tail: r.Tail(), URL: r.kind.url, IsEntry: r.Collection() == collection.ServiceEntry,
	}
	if l.Registry {
		of.Registry = r.Registry()
	}
	return of.Encode(l)
}

// Tail returns what follows the spec of an instance: its label.
func (r *Record) Tail() []byte {
	if r.of == nil || r.Is(record.OwnLabel) || r.parts != nil {
		return nil
	}
	return r.of.label
}

// Places returns the record's places in the logs. It implements [shapes.Entry].
func (r *Record) Places() *shapes.Places { return &r.place }

// Shows reports whether the resource exists in a shape. In the inline shape,
// instances are endpoints of their service.
func (r *Record) Shows(s encode.Shape) bool {
	return r != nil && !r.Is(record.Tombstone) && (s == encode.Workload || !r.IsInstance())
}

// IsInstance reports whether the record is an instance of a service.
func (r *Record) IsInstance() bool { return r.of != nil && r.parts == nil }
