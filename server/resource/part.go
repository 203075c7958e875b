package resource

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	networking "istio.io/api/networking/v1alpha3"
	_ "istio.io/api/networking/v1beta1" // registers the messages of the kinds that may be published
	_ "istio.io/api/security/v1beta1"   // the same

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// MaxSize is the largest encoded resource that is accepted, in bytes. A ServiceEntry with its endpoints may be larger: they
// are resources of their own here.
const MaxSize = 1 << 20

// maxShared is the size in bytes of the largest metadata that a name keeps: names live on in maps when the resource has other metadata.
const maxShared = 256

// Field numbers of istio/mcp/v1alpha1/{resource,metadata}.proto.
const (
	resourceMetadata = 1
	resourceBody     = 2

	metadataName       = 1
	metadataCreateTime = 2
	metadataVersion    = 3
	metadataLabels     = 4

	anyTypeURL = 1
	anyValue   = 2
)

// Hash is a content hash that adds up: the sum of the hashes of parts is the hash of their set. It is a 128 bit unsigned
// number, high word first.
type Hash [2]uint64

// Add returns h + o modulo 2^128.
func (h Hash) Add(o Hash) Hash {
	lo, carry := bits.Add64(h[1], o[1], 0)
	hi, _ := bits.Add64(h[0], o[0], carry)
	return Hash{hi, lo}
}

// Sub returns h - o modulo 2^128.
func (h Hash) Sub(o Hash) Hash {
	lo, borrow := bits.Sub64(h[1], o[1], 0)
	hi, _ := bits.Sub64(h[0], o[0], borrow)
	return Hash{hi, lo}
}

// String returns the hash as a version: the 16 hexadecimal digits of its low half. Versions of one name are compared with each
// other only, so 64 bits are plenty.
func (h Hash) String() string {
	const digits = "0123456789abcdef"
	var b [16]byte
	for i := range b {
		b[i] = digits[h[1]>>(60-4*i)&0xf]
	}
	return string(b[:])
}

// HashOf hashes the parts as one; where one ends and the next begins counts.
func HashOf(parts ...[]byte) Hash {
	d := sha256.New()
	var n [8]byte
	for _, p := range parts {
		binary.LittleEndian.PutUint64(n[:], uint64(len(p)))
		d.Write(n[:])
		d.Write(p)
	}
	var sum [sha256.Size]byte
	d.Sum(sum[:0])
	return Hash{binary.BigEndian.Uint64(sum[:]), binary.BigEndian.Uint64(sum[8:])}
}

// Part is one encoded resource taken apart at its seams. It is immutable. There is one for each instance, so it keeps nothing that can be
// read again, and nothing of the message that it came in.
type Part struct {
	collection string
	name       string // a part of metadata if that is not large
	metadata   string // the fields of Metadata but the version
	spec       []byte // the body's message
	hash       Hash   // of all of the above

	// of a ServiceEntry:
	hosts      []string
	hasVIP     bool // states addresses of its own, or must not have one
	selectable bool // has neither endpoints nor workloadSelector
	static     bool // its endpoints are IP addresses
	// of a WorkloadEntry:
	address string
	ports   []uint32 // sorted
	// attributes is a hash of everything but the address.
	attributes uint64
}

// typeURLs are the type URLs of bodies, by collection.
var typeURLs = func() map[string]string {
	urls := make(map[string]string)
	for _, name := range collection.All() {
		group, kind, _ := strings.Cut(name, "/")
		_, message := collection.OfKind(group+"/v1", kind)
		urls[name] = "type.googleapis.com/" + message
	}
	return urls
}()

// bodyURL returns the type URL of the body.
func (p *Part) bodyURL() string { return typeURLs[p.collection] }

// Collection returns the collection that the resource belongs to.
func (p *Part) Collection() string { return p.collection }

// Name returns the resource's name, "namespace/name".
func (p *Part) Name() string { return p.name }

// Namespace returns the part of the name before the slash.
func (p *Part) Namespace() string {
	ns, _, _ := strings.Cut(p.name, "/")
	return ns
}

// Hosts returns the hosts of a ServiceEntry, nil for any other kind.
func (p *Part) Hosts() []string { return p.hosts }

// Address returns the address of a WorkloadEntry, "" for any other kind.
func (p *Part) Address() string { return p.address }

// Size returns what the part counts towards limits: the bytes of its metadata and body.
func (p *Part) Size() int { return len(p.metadata) + len(p.spec) }

// Composable says whether the part is a ServiceEntry that instances can be added to: it has neither endpoints nor a
// workloadSelector.
func (p *Part) Composable() bool { return p.selectable }

// Version returns the version of the resource on its own.
func (p *Part) Version() string { return p.hash.String() }

// Invalid is the error of a resource that can not be served. Name and Collection are empty if the resource does not get as far as
// to say them.
type Invalid struct {
	Collection string
	Name       string
	Err        error
}

// Error names the resource and what is wrong with it.
func (e *Invalid) Error() string {
	if e.Collection == "" {
		return fmt.Sprintf("resource %q: %v", e.Name, e.Err)
	}
	return fmt.Sprintf("%s %s: %v", e.Collection, e.Name, e.Err)
}

// Unwrap returns what is wrong.
func (e *Invalid) Unwrap() error { return e.Err }

// Nameless says whether nothing tells which resource it is: no legal name can be read.
func (e *Invalid) Nameless() bool { return checkName(e.Name) != nil }

var (
	errName       = errors.New(`metadata.name: must be "namespace/name"`)
	errCreateTime = errors.New("metadata.create_time: must be set and never change; sinks before Istio 1.14 drop a resource without it")
)

// Parse checks an encoded istio.mcp.v1alpha1.Resource and takes it apart. It keeps nothing of raw. Nothing that raw holds can make it panic. The error is an [*Invalid] that names the field. The body has to decode, and to pass
// the checks.
func Parse(raw []byte, checks ...func(body proto.Message) error) (*Part, error) {
	p, err := parse(raw, checks)
	if err != nil {
		coll, name := identify(raw)
		return nil, &Invalid{coll, name, err}
	}
	return p, nil
}

func parse(raw []byte, checks []func(proto.Message) error) (*Part, error) {
	if len(raw) > MaxSize {
		return nil, fmt.Errorf("it has more than %d bytes (%d MiB), the most that is accepted", MaxSize, MaxSize>>20)
	}
	p := &Part{}
	var metadata, body []byte
	var name [2]int // the part of metadata that is the name
	seenMetadata, seenBody, seenTime := false, false, false
	err := fields(raw, func(num protowire.Number, typ protowire.Type, _, value []byte) error {
		switch {
		case num == resourceMetadata && typ == protowire.BytesType && !seenMetadata:
			seenMetadata = true
			metadata = make([]byte, 0, len(value))
			return fields(value, func(num protowire.Number, typ protowire.Type, field, value []byte) error {
				switch {
				case num == metadataVersion:
					return nil
				case num == metadataName && typ == protowire.BytesType && name[1] == 0:
					end := len(metadata) + len(field)
					name = [2]int{end - len(value), end}
				case num == metadataCreateTime && typ == protowire.BytesType && !seenTime:
					seenTime = true
				case num == metadataName, num == metadataCreateTime:
					return fmt.Errorf("metadata: field %d is there twice or malformed", num)
				}
				metadata = append(metadata, field...)
				return nil
			})
		case num == resourceBody && typ == protowire.BytesType && !seenBody:
			seenBody, body = true, value
			return nil
		}
		return fmt.Errorf("unexpected field %d", num)
	})
	if err != nil {
		return nil, err
	}
	p.metadata = string(metadata)
	p.name = p.metadata[name[0]:name[1]]
	if len(metadata) > maxShared {
		p.name = strings.Clone(p.name)
	}
	if err := checkName(p.name); err != nil {
		return nil, err
	}
	url := ""
	err = fields(body, func(num protowire.Number, typ protowire.Type, _, value []byte) error {
		switch {
		case num == anyTypeURL && typ == protowire.BytesType:
			url = string(value)
		case num == anyValue && typ == protowire.BytesType:
			p.spec = slices.Clone(value)
		default:
			return fmt.Errorf("unexpected field %d", num)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("body: %w", err)
	}
	p.collection = collection.OfBody(url)
	switch {
	case p.collection == "":
		return nil, fmt.Errorf("body: no kind that can be served is called %q", url)
	case !seenTime:
		return nil, errCreateTime
	}
	if err := checkMetadata(metadata); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	if err := p.checkBody(checks); err != nil {
		return nil, err
	}
	p.rehash()
	return p, nil
}

// identify reads what an encoded resource that was refused is called: the collection, "" if it is none that can be served, and the
// name, "" if it states none or several. What is malformed or cut off does not hide what comes before it.
func identify(raw []byte) (coll, name string) {
	names := 0
	prefixes(raw, func(num protowire.Number, value []byte, _ bool) {
		prefixes(value, func(sub protowire.Number, value []byte, whole bool) {
			switch {
			case !whole:
			case num == resourceMetadata && sub == metadataName:
				if names == 0 || name != string(value) {
					names++
				}
				name = string(value)
			case num == resourceBody && sub == anyTypeURL:
				coll = collection.OfBody(string(value))
			}
		})
	})
	if names > 1 {
		name = ""
	}
	return coll, name
}

func (p *Part) rehash() {
	p.hash = HashOf([]byte(p.collection), []byte(p.metadata), p.spec)
}

func (p *Part) checkBody(checks []func(proto.Message) error) error {
	var body proto.Message
	switch p.collection {
	case collection.ServiceEntry:
		body = &networking.ServiceEntry{}
	case collection.WorkloadEntry:
		body = &networking.WorkloadEntry{}
	default:
		typ, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(strings.TrimPrefix(p.bodyURL(), "type.googleapis.com/")))
		if err != nil {
			return err
		}
		body = typ.New().Interface()
	}
	if err := proto.Unmarshal(p.spec, body); err != nil {
		return err
	}
	for _, check := range checks {
		if err := check(body); err != nil {
			return err
		}
	}
	switch body := body.(type) {
	case *networking.ServiceEntry:
		p.hosts = body.GetHosts()
		p.selectable = len(body.GetEndpoints()) == 0 && body.GetWorkloadSelector() == nil
		p.static = body.GetResolution() == networking.ServiceEntry_STATIC
		// An address makes no sense for a wildcard, nor where the client's own destination is kept.
		p.hasVIP = len(body.GetAddresses()) > 0 || body.GetResolution() == networking.ServiceEntry_NONE ||
			len(body.GetHosts()) != 1 || strings.HasPrefix(body.GetHosts()[0], "*")
	case *networking.WorkloadEntry:
		p.address = body.GetAddress()
		for _, port := range body.GetPorts() {
			p.ports = append(p.ports, port)
		}
		slices.Sort(p.ports)
		p.attributes = attributesOf(p.spec)
	}
	return nil
}

// attributesOf hashes a WorkloadEntry without its address.
func attributesOf(spec []byte) uint64 {
	attributes := make([]byte, 0, len(spec))
	// The body was decoded: every field is well formed.
	_ = fields(spec, func(num protowire.Number, _ protowire.Type, field, _ []byte) error {
		if num != workloadEntryAddress {
			attributes = append(attributes, field...)
		}
		return nil
	})
	return HashOf(attributes)[1]
}

// withLabel returns p, a WorkloadEntry's part, with a label that it does not have yet. Labels are a map, field 3 of
// WorkloadEntry, and an entry of a map may be appended to an encoded message.
func (p *Part) withLabel(key, value string) *Part {
	if p.label(key) == value {
		return p
	}
	q := *p
	q.spec = slices.Clone(appendLabel(slices.Clip(p.spec), key, value))
	q.rehash()
	return &q
}

// label returns the value of a label of a WorkloadEntry. Of several the last counts.
func (p *Part) label(key string) (value string) {
	_ = fields(p.spec, func(num protowire.Number, typ protowire.Type, _, entry []byte) error {
		if num != workloadEntryLabels || typ != protowire.BytesType {
			return nil
		}
		var k, v []byte
		_ = fields(entry, func(num protowire.Number, typ protowire.Type, _, text []byte) error {
			switch {
			case typ != protowire.BytesType:
			case num == mapKey:
				k = text
			case num == mapValue:
				v = text
			}
			return nil
		})
		if string(k) == key {
			value = string(v)
		}
		return nil
	})
	return value
}

// Field numbers of istio/networking/v1alpha3/{service_entry,workload_entry,sidecar}.proto.
const (
	serviceEntryAddresses = 2
	serviceEntryEndpoints = 6
	serviceEntrySelector  = 9
	workloadEntryAddress  = 1
	workloadEntryLabels   = 3
	selectorLabels        = 1
)

func appendLabel(workloadEntry []byte, key, value string) []byte {
	return appendMapEntry(workloadEntry, workloadEntryLabels, key, value)
}

func appendMapEntry(b []byte, field protowire.Number, key, value string) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(sizeString(key)+sizeString(value)))
	b = appendString(b, 1, key)
	return appendString(b, 2, value)
}

// appendString appends a string field.
func appendString(b []byte, field protowire.Number, s string) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendString(b, s)
}

// sizeString returns the size of a string field of a number below 16.
func sizeString(s string) int { return 1 + protowire.SizeBytes(len(s)) }

// checkName checks "namespace/name" as Kubernetes would (istiod rejects anything else). The characters are those of a DNS
// subdomain; the length is that of a Kubernetes object name.
func checkName(name string) error {
	ns, n, ok := strings.Cut(name, "/")
	if !ok || !isName(ns, 63) || !isName(n, 253) {
		return fmt.Errorf("%w, lower-case letters, digits, '-' and '.', not %q", errName, name)
	}
	return nil
}

func isName(s string, limit int) bool {
	if s == "" || len(s) > limit {
		return false
	}
	for i := range len(s) {
		c := s[i]
		alnum := 'a' <= c && c <= 'z' || '0' <= c && c <= '9'
		if !alnum && (c != '-' && c != '.' || i == 0 || i == len(s)-1) {
			return false
		}
	}
	return true
}

// checkMetadata checks that the metadata would decode: the sink decodes it, we do not.
func checkMetadata(metadata []byte) error {
	return fields(metadata, func(num protowire.Number, typ protowire.Type, _, value []byte) error {
		if typ != protowire.BytesType {
			return fmt.Errorf("unexpected field %d", num)
		}
		switch num {
		case metadataName:
			return nil // checked already
		case metadataCreateTime:
			return fields(value, func(num protowire.Number, typ protowire.Type, _, _ []byte) error {
				if num > 2 || typ != protowire.VarintType {
					return errCreateTime
				}
				return nil
			})
		case 4, 5: // labels, annotations
			return fields(value, func(num protowire.Number, typ protowire.Type, _, value []byte) error {
				if num > 2 || typ != protowire.BytesType || !utf8.Valid(value) {
					return errors.New("labels and annotations must be UTF-8")
				}
				return nil
			})
		}
		return fmt.Errorf("unexpected field %d", num)
	})
}

// fields calls f with each field of an encoded message: its number and type, the whole field, and its value (without the length
// for a field of bytes).
func fields(b []byte, f func(num protowire.Number, typ protowire.Type, field, value []byte) error) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		m := protowire.ConsumeFieldValue(num, typ, b[n:])
		if m < 0 {
			return protowire.ParseError(m)
		}
		value := b[n : n+m]
		if typ == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(value)
		}
		if err := f(num, typ, b[:n+m], value); err != nil {
			return err
		}
		b = b[n+m:]
	}
	return nil
}

// prefixes calls f with the value of each field of bytes of an encoded message that may end anywhere, and whether it is there as a
// whole. It stops at what is no field.
func prefixes(b []byte, f func(num protowire.Number, value []byte, whole bool)) {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return
		}
		b = b[n:]
		if typ != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
				return
			}
			b = b[n:]
			continue
		}
		size, n := protowire.ConsumeVarint(b)
		if n < 0 {
			return
		}
		b = b[n:]
		whole := size <= uint64(len(b))
		value := b[:min(size, uint64(len(b)))]
		f(num, value, whole)
		b = b[len(value):]
	}
}
