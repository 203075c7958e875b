package resource

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Shape is how a service's instances reach a sink.
type Shape uint8

const (
	// Inline is one ServiceEntry with its endpoints.
	Inline Shape = iota
	// Workload is a ServiceEntry with a workloadSelector, and one WorkloadEntry per instance.
	Workload
)

// String returns the shape's name as in configuration.
func (s Shape) String() string {
	if s == Workload {
		return "workload"
	}
	return "inline"
}

// ParseShape is the inverse of [Shape.String].
func ParseShape(s string) (Shape, error) {
	switch s {
	case "inline":
		return Inline, nil
	case "workload":
		return Workload, nil
	}
	return 0, fmt.Errorf("shape %q: must be inline or workload", s)
}

// Key returns the name under which the store keeps what sinks of a shape get of a collection. Only the collections that the
// shape changes have one per shape.
func Key(coll string, shape Shape) string {
	if shape == Workload && (coll == collection.ServiceEntry || coll == collection.WorkloadEntry) {
		return coll + "#workload"
	}
	return coll
}

// Collection is the inverse of [Key].
func Collection(key string) (coll string, shape Shape) {
	if coll, ok := strings.CutSuffix(key, "#workload"); ok {
		return coll, Workload
	}
	return key, Inline
}

// Form is a shape and the workarounds that a range of sink versions needs. It is comparable; all sinks of one form share bytes.
type Form struct {
	Shape Shape
	// OmitVersion leaves metadata.version empty: on Istio 1.11 a version makes every update conflict.
	OmitVersion bool
	// Address gives a ServiceEntry without an address the one that its host hashes to: before Istio 1.25 each change of
	// inline endpoints of an entry without one is a full push.
	Address bool
	// PortSets labels inline endpoints that share an IP with a hash of the IP's ports: before Istio 1.30 a change of one of
	// several ports of one IP is not seen otherwise.
	PortSets bool
	// EmptySelector gives an inline ServiceEntry without endpoints a workloadSelector that nothing matches: before Istio 1.30 the old
	// endpoints of an entry whose list became empty are kept, or the change is a full push anyway.
	EmptySelector bool
	// EndpointsHash labels a ServiceEntry with a hash of its exceptional
	// endpoints, see [EndpointsLabel]: Istio 1.14 to 1.22.3 do not look at what
	// changes while the set of addresses stays the same, unless the entry
	// itself changes, which makes it a full push.
	EndpointsHash bool
	// Legacy is what a Pilot before Istio 1.9 needs to see that a ServiceEntry's endpoints changed.
	Legacy Legacy
	// Synthetic adds the annotations by which Istio 1.4 and 1.5 tell a change of a synthetic ServiceEntry's endpoints from one
	// of the entry itself.
	Synthetic bool
}

// String names the form; it is part of versions and so may never change its meaning.
func (f Form) String() string {
	s := f.Shape.String()
	if f.OmitVersion {
		s += ",omit-version"
	}
	if f.Address {
		s += ",address"
	}
	if f.PortSets {
		s += ",port-sets"
	}
	if f.EmptySelector {
		s += ",empty-selector"
	}
	if f.EndpointsHash {
		s += ",endpoints-hash"
	}
	if f.Legacy != NotLegacy {
		s += "," + f.Legacy.String()
	}
	if f.Synthetic {
		s += ",synthetic"
	}
	return s
}

// layout is the version of the way in which resources are composed; whoever changes the bytes that come out of Encode for the
// same parts adds one.
const layout = "1"

func (f Form) hash() Hash { return HashOf([]byte("form"), []byte(layout), []byte(f.String())) }

// PortsLabel is the label of [Form.PortSets].
const PortsLabel = "isthmus.io/ports"

// EndpointsLabel is the label of [Form.EndpointsHash]. The attributes of an
// endpoint are everything but its address. Those that most endpoints of a
// service have are ordinary; of attributes that are equally frequent the least
// hash wins. The label hashes the ordinary attributes together with each
// endpoint that has others, or that shares its address. So two services with
// the same set of addresses and the same label have the same endpoints, and an
// ordinary endpoint that comes or goes leaves the label as it was.
const EndpointsLabel = "isthmus.io/endpoints"

// Encoding is a resource encoded for one form. It is immutable and shared.
type Encoding struct {
	// Version is the resource's version in this form.
	Version string
	// Segments are the encoded istio.mcp.v1alpha1.Resource, to be sent one after the other.
	Segments [][]byte
	// Size is the length of all segments together, in bytes.
	Size int
	// Absent means that sinks of the form must not have the resource at all; there are no segments then. See [LegacyDrop].
	Absent bool
}

// Resource is one resource as sinks of one shape get it. It is immutable.
type Resource struct {
	part     *Part
	registry string
	shape    Shape
	hash     Hash // of everything that it is composed of

	composed *composed // nil if it is served as it is

	encodings atomic.Pointer[encodings]
}

// composed is what a ServiceEntry is composed of besides its part.
type composed struct {
	blocks     []*block
	endpoints  int
	selector   string
	vip        string
	exceptions uint64 // see EndpointsLabel
}

// encodings is a list that only grows; its length is the number of forms in use.
type encodings struct {
	form Form
	enc  *Encoding
	next *encodings
}

// Name returns the resource's name, "namespace/name".
func (r *Resource) Name() string { return r.part.name }

// Collection returns the resource's collection.
func (r *Resource) Collection() string { return r.part.collection }

// Size returns what the resource counts towards limits, without its instances. See [Part.Size].
func (r *Resource) Size() int { return r.part.Size() }

// Registry returns the name of the registry that the resource comes from.
func (r *Resource) Registry() string { return r.registry }

// Hosts returns the hosts of a ServiceEntry, nil for any other kind.
func (r *Resource) Hosts() []string { return r.part.hosts }

// Endpoints returns the number of endpoints of a composed inline ServiceEntry, 0 for any other.
func (r *Resource) Endpoints() int {
	if r.composed == nil {
		return 0
	}
	return r.composed.endpoints
}

// Version returns the hash of what the resource is composed of. It is what the store compares; what a sink sees is
// [Encoding.Version].
func (r *Resource) Version() string { return r.hash.String() }

// NewResource returns a part that is served as it is, in every shape.
func NewResource(p *Part, registry string) *Resource {
	return &Resource{part: p, registry: registry, hash: p.hash}
}

// copyBelow is the size in bytes below which a spec is copied into its encoding; a larger one stays where it is and is shared.
const copyBelow = 4 << 10

// Encode returns the resource in a form. The first call for a form encodes, all others share its result. That of what is small and served
// as it is, as an instance is, is shared by those who ask soon, as all sinks do after a change: to keep it would take as much memory as
// all the rest of an instance, to make it again takes less than a microsecond.
func (r *Resource) Encode(f Form) *Encoding {
	f.Shape = r.shape
	if r.composed == nil {
		f.Address, f.PortSets, f.EmptySelector = false, false, false
	}
	if r.part.collection != collection.ServiceEntry {
		f.Legacy, f.Synthetic, f.EndpointsHash = NotLegacy, false, false
	}
	if r.composed == nil && len(r.part.spec) < copyBelow {
		slot := &recent[r.hash[1]%uint64(len(recent))]
		e := slot.Load()
		if e == nil || e.of != r || e.form != f {
			e = &recentEncoding{r, f, r.encode(f)}
			slot.Store(e)
		}
		return e.enc
	}
	head := r.encodings.Load()
	for e := head; e != nil; e = e.next {
		if e.form == f {
			return e.enc
		}
	}
	enc := r.encode(f)
	for {
		if r.encodings.CompareAndSwap(head, &encodings{f, enc, head}) {
			return enc
		}
		head = r.encodings.Load()
		for e := head; e != nil; e = e.next {
			if e.form == f {
				return e.enc
			}
		}
	}
}

// recent are small encodings that were asked for lately, by hash of the resource; a newer one takes the place of an older one.
var recent [1024]atomic.Pointer[recentEncoding]

// recentEncoding is immutable.
type recentEncoding struct {
	of   *Resource
	form Form
	enc  *Encoding
}

func (r *Resource) encode(f Form) *Encoding {
	version := ""
	switch {
	case r.composed != nil || f.Legacy != NotLegacy || f.EndpointsHash:
		version = r.hash.Add(f.hash()).String()
	default:
		version = r.hash.String()
	}
	stated := version
	if f.OmitVersion {
		stated = ""
	}
	if f.Legacy == LegacyDrop && r.empty() {
		return &Encoding{Version: version, Absent: true}
	}

	// What is appended to the ServiceEntry besides its endpoints.
	var tail []byte
	var blocks [][]byte
	if c := r.composed; c != nil {
		if f.Address && c.vip != "" {
			tail = appendString(tail, serviceEntryAddresses, c.vip)
		}
		if r.shape == Workload || c.endpoints == 0 && f.EmptySelector {
			tail = protowire.AppendTag(tail, serviceEntrySelector, protowire.BytesType)
			var labels []byte
			labels = appendMapEntry(labels, selectorLabels, SelectorLabel, c.selector)
			tail = protowire.AppendBytes(tail, labels)
		}
		if r.shape == Inline {
			blocks = c.endpointBytes(f)
		}
	}

	metadata := r.part.metadata
	if f.Legacy != NotLegacy {
		metadata = r.legacyMetadata(f, blocks)
	}
	if f.EndpointsHash && r.shape == Inline {
		exceptions := r.hash[1] // an entry's own endpoints are not told apart
		if r.composed != nil {
			exceptions = r.composed.exceptions
		}
		metadata = string(appendMapEntry([]byte(metadata), metadataLabels, EndpointsLabel, Hash{0, exceptions}.String()))
	}

	specSize := len(r.part.spec) + len(tail)
	for _, b := range blocks {
		specSize += len(b)
	}
	metadataSize := len(metadata)
	if stated != "" {
		metadataSize += sizeString(stated)
	}
	bodyURL := r.part.bodyURL()
	bodySize := sizeString(bodyURL) + 1 + protowire.SizeBytes(specSize)

	// One allocation for everything in front of the endpoints.
	shared := len(r.part.spec) >= copyBelow
	room := 2*11 + metadataSize + bodySize - specSize
	if !shared {
		room += len(r.part.spec) + len(tail)
	}
	head := make([]byte, 0, room)
	head = protowire.AppendTag(head, resourceMetadata, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(metadataSize))
	head = append(head, metadata...)
	if stated != "" {
		head = appendString(head, metadataVersion, stated)
	}
	head = protowire.AppendTag(head, resourceBody, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(bodySize))
	head = appendString(head, anyTypeURL, bodyURL)
	head = protowire.AppendTag(head, anyValue, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(specSize))

	enc := &Encoding{Version: version, Segments: make([][]byte, 0, 3+len(blocks))}
	if shared {
		enc.Segments = append(enc.Segments, head, r.part.spec)
		if len(tail) > 0 {
			enc.Segments = append(enc.Segments, tail)
		}
	} else {
		head = append(head, r.part.spec...)
		head = append(head, tail...)
		enc.Segments = append(enc.Segments, head)
	}
	enc.Segments = append(enc.Segments, blocks...)
	for _, s := range enc.Segments {
		enc.Size += len(s)
	}
	return enc
}

// endpointBytes returns the encoded endpoints in a form.
func (c *composed) endpointBytes(f Form) [][]byte {
	if f.PortSets && c.sharedAddress() {
		return [][]byte{c.labelledEndpoints()}
	}
	out := make([][]byte, 0, len(c.blocks))
	for _, b := range c.blocks {
		out = append(out, b.bytes)
	}
	return out
}

// sharedAddress says whether two endpoints have one address. Endpoints are ordered by address first.
func (c *composed) sharedAddress() bool {
	last := ""
	for _, b := range c.blocks {
		if b.sharedAddress || b.parts[0].address == last {
			return true
		}
		last = b.parts[len(b.parts)-1].address
	}
	return false
}

// labelledEndpoints encodes the endpoints one by one, those that share an address with the label of [Form.PortSets].
func (c *composed) labelledEndpoints() []byte {
	var all []*Part
	size := 0
	for _, b := range c.blocks {
		all = append(all, b.parts...)
		size += len(b.bytes)
	}
	out := make([]byte, 0, size+64)
	for i := 0; i < len(all); {
		j := i + 1
		for j < len(all) && all[j].address == all[i].address {
			j++
		}
		if j == i+1 {
			out = appendEndpoint(out, all[i].spec)
			i = j
			continue
		}
		d := sha256.New()
		for _, p := range all[i:j] {
			for _, port := range p.ports {
				d.Write(binary.BigEndian.AppendUint32(nil, port))
			}
			d.Write([]byte{';'})
		}
		value := fmt.Sprintf("%x", d.Sum(nil)[:5])
		for _, p := range all[i:j] {
			out = appendEndpoint(out, appendLabel(slices.Clip(p.spec), PortsLabel, value))
		}
		i = j
	}
	return out
}

func appendEndpoint(b, spec []byte) []byte {
	b = protowire.AppendTag(b, serviceEntryEndpoints, protowire.BytesType)
	return protowire.AppendBytes(b, spec)
}

// VIPs returns the addresses that a host hashes to, the one to take and the one for when another host has that: of 241.0.0.0-250.255.255.255. The block is
// reserved (RFC 1112 section 4), routed nowhere, and does not overlap 240.240.0.0/16, from which istiod allocates.
func VIPs(host string) [2]netip.Addr {
	return [2]netip.Addr{vip("vip", host), vip("vip2", host)}
}

func vip(choice, host string) netip.Addr {
	h := HashOf([]byte(choice), []byte(host))
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], uint32(h[0]))
	a[0] = 241 + byte(h[1]%10)
	return netip.AddrFrom4(a)
}
