package state

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Encoding is a record in a form, ready to be written. It is cheap to make:
// most bytes are produced when they are appended.
type Encoding struct {
	// Version is the resource's version in the form.
	Version encode.Hash
	// Size is the length of the encoded istio.mcp.v1alpha1.Resource, in bytes.
	Size int
	// Absent means that sinks of the form must not receive the resource. See
	// [encode.LegacyDrop].
	Absent bool

	head   encode.Head
	spec   []byte
	tail   []byte   // additional fields of the spec
	blocks []*block // the endpoints that follow
	own    []byte   // the endpoints instead of blocks if the form changes them
}

// Encode returns the record in a form.
func (r *Record) Encode(l *encode.Layout) (e Encoding) {
	e.head = encode.Head{Metadata: r.metadata(), BodyURL: r.kind.url, Stated: !l.OmitVersion}
	e.spec, e.tail = r.Spec(), r.tail()
	isEntry := r.kind.collection.name == collection.ServiceEntry
	if isEntry {
		e.Version = l.VersionOf(r.Hash(l.Shape), r.parts != nil)
	} else {
		e.Version = r.hash
	}
	legacy := isEntry && l.Legacy != encode.NotLegacy
	empty := legacy && r.isEmpty(l.Shape)
	if empty && l.Legacy == encode.LegacyDrop {
		return Encoding{Version: e.Version, Absent: true}
	}
	size := 0
	if c := r.parts; c != nil {
		if l.Address && c.address.IsValid() {
			e.tail = encode.AppendAddress(e.tail, c.address.String())
		}
		if l.Shape == encode.Workload || c.count == 0 && l.EmptySelector {
			e.tail = encode.AppendSelector(e.tail, c.selector)
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
		e.head.Metadata = r.legacyMetadata(l, &e, empty)
	}
	if l.EndpointsHash && isEntry && l.Shape == encode.Inline {
		exceptions := r.hash // endpoints inside the spec are not examined
		if r.parts != nil {
			exceptions = r.parts.exceptions()
		}
		e.head.Metadata = encode.AppendMetadataLabel(slices.Clip(e.head.Metadata), encode.EndpointsLabel, exceptions.String())
	}
	if l.Registry {
		registry := *r.kind.registry.shown.Load()
		e.Version += encode.HashOf([]byte(encode.RegistryAnnotation), []byte(registry))
		e.head.Metadata = encode.AppendMetadataAnnotation(slices.Clip(e.head.Metadata), encode.RegistryAnnotation, registry)
	}
	e.head.Version = e.Version
	e.head.Spec = len(e.spec) + len(e.tail) + size
	e.Size = e.head.Size()
	return e
}

// HeadSize returns the length of what precedes the endpoints, in bytes.
func (e *Encoding) HeadSize() int { return e.head.Size() - e.head.Spec + len(e.spec) + len(e.tail) }

// Append appends the whole resource.
func (e *Encoding) Append(b []byte) []byte {
	b = append(append(append(e.head.Append(b), e.spec...), e.tail...), e.own...)
	for _, bl := range e.blocks {
		b = bl.append(b)
	}
	return b
}

// Segments appends what precedes the endpoints to b, and returns it followed by
// the endpoints. The endpoints are shared with other responses and must not be
// modified.
func (e *Encoding) Segments(b []byte) [][]byte {
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
func (r *Record) isEmpty(s encode.Shape) bool {
	if !r.is(isStatic) || !r.is(isComposable) {
		return false
	}
	return r.parts == nil || s == encode.Inline && r.parts.count == 0
}

// legacyMetadata returns the metadata of a ServiceEntry in a legacy form,
// without version.
func (r *Record) legacyMetadata(l *encode.Layout, e *Encoding, empty bool) []byte {
	content := r.Hash(l.Shape)
	var nanos uint64
	switch {
	case empty:
		nanos = encode.EmptyNanos
	case l.Legacy == encode.LegacyEndpoints && !r.hasServicePorts(e):
		nanos = content.Nanos()
	}
	out := encode.WithNanos(r.metadata(), nanos)
	if l.Synthetic {
		endpoints := content - r.hash
		if r.parts == nil {
			endpoints = content // they are part of the entry
		}
		out = encode.AppendSynthetic(out, r.hash, endpoints)
	}
	return out
}

// hasServicePorts reports whether all ports of all endpoints are ports of the
// service.
func (r *Record) hasServicePorts(e *Encoding) bool {
	ports := encode.ServicePorts(r.Spec())
	if r.parts == nil {
		return ports.HasAll(r.Spec())
	}
	for _, b := range r.parts.blocks {
		for _, endpoint := range b.records {
			if !ports.Has(endpoint.Spec()) {
				return false
			}
		}
	}
	return true
}

// labelled encodes the endpoints one by one and adds the label of
// [encode.Form.PortSets] to those that share an address.
func (c *composition) labelled() []byte {
	all := make([]*Record, 0, c.count)
	for _, b := range c.blocks {
		all = append(all, b.records...)
	}
	out := make([]byte, 0, c.size+64)
	var tail []byte
	for i := 0; i < len(all); {
		j := i + 1
		for j < len(all) && all[j].address() == all[i].address() {
			j++
		}
		if j == i+1 {
			out = encode.AppendEndpoint(out, all[i].Spec(), all[i].tail())
			i = j
			continue
		}
		d := sha256.New()
		for _, r := range all[i:j] {
			for _, port := range encode.PortNumbers(r.Spec()) {
				d.Write(binary.BigEndian.AppendUint32(nil, port))
			}
			d.Write([]byte{';'})
		}
		value := fmt.Sprintf("%x", d.Sum(nil)[:5])
		for _, r := range all[i:j] {
			tail = encode.AppendLabel(append(tail[:0], r.tail()...), encode.PortsLabel, value)
			out = encode.AppendEndpoint(out, r.Spec(), tail)
		}
		i = j
	}
	return out
}
