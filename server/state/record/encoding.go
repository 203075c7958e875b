package record

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Resource is what is encoded of a resource.
type Resource[E Endpoint] struct {
	*Content
	Parts    *Composition[E] // the endpoints of a service's ServiceEntry, nil for any other resource
	Tail     []byte          // see [Endpoint]
	URL      string          // of the body
	IsEntry  bool            // a ServiceEntry
	Registry string          // with [encode.Form.Registry]
}

// Encoding is a record in a form, ready to be written. It is cheap to make:
// most bytes are produced when they are appended.
type Encoding[E Endpoint] struct {
	// Version is the resource's version in the form.
	Version encode.Hash
	// Size is the length of the encoded istio.mcp.v1alpha1.Resource, in bytes.
	Size int
	// Absent means that sinks of the form must not receive the resource. See
	// [encode.LegacyDrop].
	Absent bool

	head   encode.Head
	spec   []byte
	tail   []byte      // additional fields of the spec
	blocks []*block[E] // the endpoints that follow
	own    []byte      // the endpoints instead of blocks if the form changes them
}

// Encode returns the record in a form.
func (r *Resource[E]) Encode(l *encode.Layout) (e Encoding[E]) {
	e.head = encode.Head{Metadata: r.Metadata(), BodyURL: r.URL, Stated: !l.OmitVersion}
	e.spec, e.tail = r.Spec(), r.Tail
	if r.IsEntry {
		e.Version = l.VersionOf(r.Parts.Hash(r.Sum(), l.Shape), r.Parts != nil)
	} else {
		e.Version = r.Sum()
	}
	legacy := r.IsEntry && l.Legacy != encode.NotLegacy
	empty := legacy && r.isEmpty(l.Shape)
	if empty && l.Legacy == encode.LegacyDrop {
		return Encoding[E]{Version: e.Version, Absent: true}
	}
	size := 0
	if c := r.Parts; c != nil {
		if l.Address && c.Address.IsValid() {
			e.tail = encode.AppendAddress(e.tail, c.Address.String())
		}
		if l.Shape == encode.Workload || c.count == 0 && l.EmptySelector {
			e.tail = encode.AppendSelector(e.tail, c.Selector)
		}
		switch {
		case l.Shape == encode.Workload:
		case l.PortSets && c.sharesAddress():
			e.own = c.labelled()
			size = len(e.own)
		default:
			e.blocks, size = c.blocks, c.size
		}
	}
	if legacy {
		e.head.Metadata = r.legacyMetadata(l, empty)
	}
	if l.EndpointsHash && r.IsEntry && l.Shape == encode.Inline {
		exceptions := r.Sum() // endpoints inside the spec are not examined
		if r.Parts != nil {
			exceptions = r.Parts.exceptions()
		}
		e.head.Metadata = encode.AppendMetadataLabel(slices.Clip(e.head.Metadata), encode.EndpointsLabel, exceptions.String())
	}
	if l.Registry {
		e.Version += encode.HashOf([]byte(encode.RegistryAnnotation), []byte(r.Registry))
		e.head.Metadata = encode.AppendMetadataAnnotation(slices.Clip(e.head.Metadata), encode.RegistryAnnotation, r.Registry)
	}
	e.head.Version = e.Version
	e.head.Spec = len(e.spec) + len(e.tail) + size
	e.Size = e.head.Size()
	return e
}

// HeadSize returns the length of what precedes the endpoints, in bytes.
func (e *Encoding[E]) HeadSize() int { return e.head.Size() - e.head.Spec + len(e.spec) + len(e.tail) }

// Append appends the whole resource.
func (e *Encoding[E]) Append(b []byte) []byte {
	b = append(append(append(e.head.Append(b), e.spec...), e.tail...), e.own...)
	for _, bl := range e.blocks {
		b = bl.append(b)
	}
	return b
}

// Segments appends what precedes the endpoints to b, and returns it followed by
// the endpoints. The endpoints are shared with other responses and must not be
// modified.
func (e *Encoding[E]) Segments(b []byte) [][]byte {
	b = append(append(e.head.Append(b), e.spec...), e.tail...)
	out := append(make([][]byte, 0, 2+len(e.blocks)), b)
	if len(e.own) > 0 {
		out = append(out, e.own)
	}
	if e.head.Spec < keepAbove {
		for _, bl := range e.blocks {
			out[0] = bl.append(out[0])
		}
		return out
	}
	for _, bl := range e.blocks {
		out = append(out, bl.encoded())
	}
	return out
}

// isEmpty reports whether r is a STATIC ServiceEntry that needs inline
// endpoints and has none.
func (r *Resource[E]) isEmpty(s encode.Shape) bool {
	if !r.Is(Static) || !r.Is(Composable) {
		return false
	}
	return r.Parts == nil || s == encode.Inline && r.Parts.count == 0
}

// legacyMetadata returns the metadata of a ServiceEntry in a legacy form,
// without version.
func (r *Resource[E]) legacyMetadata(l *encode.Layout, empty bool) []byte {
	content := r.Parts.Hash(r.Sum(), l.Shape)
	var nanos uint64
	switch {
	case empty:
		nanos = encode.EmptyNanos
	case l.Legacy == encode.LegacyEndpoints && !r.hasServicePorts():
		nanos = content.Nanos()
	}
	out := encode.WithNanos(r.Metadata(), nanos)
	if l.Synthetic {
		endpoints := content - r.Sum()
		if r.Parts == nil {
			endpoints = content // they are part of the entry
		}
		out = encode.AppendSynthetic(out, r.Sum(), endpoints)
	}
	return out
}

// hasServicePorts reports whether all ports of all endpoints are ports of the
// service.
func (r *Resource[E]) hasServicePorts() bool {
	ports := encode.ServicePorts(r.Spec())
	if r.Parts == nil {
		return ports.HasAll(r.Spec())
	}
	for endpoint := range r.Parts.All() {
		if !ports.Has(endpoint.Encoded().Spec()) {
			return false
		}
	}
	return true
}
