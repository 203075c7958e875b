package encode

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	networking "istio.io/api/networking/v1alpha3"
	_ "istio.io/api/networking/v1beta1" // registers the messages of other API versions
	_ "istio.io/api/security/v1beta1"   // likewise

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// MaxSize is the size of the largest accepted resource, in bytes. A composed
// ServiceEntry may be larger, as its endpoints arrive as resources of their
// own.
const MaxSize = 1 << 20

// Field numbers of istio/mcp/v1alpha1/{resource,metadata}.proto,
// google/protobuf/{any,timestamp}.proto and
// service_entry.proto, gateway.proto, workload_entry.proto and sidecar.proto of
// istio/networking/v1alpha3.
const (
	resourceMetadata = 1
	resourceBody     = 2

	metadataName        = 1
	metadataCreateTime  = 2
	metadataVersion     = 3
	metadataLabels      = 4
	metadataAnnotations = 5

	anyTypeURL = 1
	anyValue   = 2

	timestampSeconds = 1
	timestampNanos   = 2

	serviceEntryHosts     = 1
	serviceEntryAddresses = 2
	serviceEntryPorts     = 3
	serviceEntryEndpoints = 6
	serviceEntrySelector  = 9
	portNumber            = 1
	portName              = 3
	selectorLabels        = 1

	workloadEntryAddress = 1
	workloadEntryPorts   = 2
	workloadEntryLabels  = 3

	mapKey   = 1
	mapValue = 2
)

// Part is a parsed resource. Its slices are those of the message that was
// parsed.
type Part struct {
	Collection string
	Name       string // "namespace/name"
	Metadata   []byte // fields of Metadata without the version
	BodyURL    string
	Spec       []byte // message of the body
	Hash       Hash   // of all fields above and of the tail of [ParseWith]

	// Of a ServiceEntry:

	Hosts      []string
	OwnAddress bool // states addresses, or must not have any
	Composable bool // has neither endpoints nor workloadSelector
	Static     bool // has IP addresses as endpoints

	// Of a WorkloadEntry:

	Address string
	labels  map[string]string
}

// Namespace returns the part of the name before the slash.
func (p *Part) Namespace() string {
	ns, _, _ := strings.Cut(p.Name, "/")
	return ns
}

// LabelsAndAnnotations returns those of the resource. Of a key that is there
// twice each value is returned.
func (p *Part) LabelsAndAnnotations() iter.Seq2[string, string] {
	return func(yield func(key, value string) bool) {
		// checkMetadata found it well-formed; an error ends the loop.
		_ = fields(p.Metadata, func(num protowire.Number, _ protowire.Type, _, entry []byte) error {
			if num != metadataLabels && num != metadataAnnotations {
				return nil
			}
			var pair [mapValue + 1]string // the last of each counts
			_ = fields(entry, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
				if num <= mapValue {
					pair[num] = string(value)
				}
				return nil
			})
			if !yield(pair[mapKey], pair[mapValue]) {
				return io.EOF
			}
			return nil
		})
	}
}

// Label returns the value of a label of a WorkloadEntry, "" if it is missing.
func (p *Part) Label(key string) string { return p.labels[key] }

// hashWith returns the hash of the part with tail appended to its spec.
func (p *Part) hashWith(tail []byte) Hash {
	d := sha256.New()
	writePart(d.Write, len(p.Collection), []byte(p.Collection))
	writePart(d.Write, len(p.Metadata), p.Metadata)
	writePart(d.Write, len(p.Spec)+len(tail), p.Spec, tail)
	var sum [sha256.Size]byte
	d.Sum(sum[:0])
	return Hash(binary.BigEndian.Uint64(sum[8:]))
}

// Invalid is the error of a resource that cannot be served. Name and Collection
// are empty if they cannot be read.
type Invalid struct {
	Collection string
	Name       string
	Err        error
}

// Error implements error.
func (e *Invalid) Error() string {
	if e.Collection == "" {
		return fmt.Sprintf("resource %q: %v", e.Name, e.Err)
	}
	return fmt.Sprintf("%s %s: %v", e.Collection, e.Name, e.Err)
}

// Unwrap returns the cause.
func (e *Invalid) Unwrap() error { return e.Err }

// Nameless reports whether the resource cannot be identified, as it has no
// valid name.
func (e *Invalid) Nameless() bool { return checkName(e.Name) != nil }

var (
	errName       = errors.New(`metadata.name: must be "namespace/name"`)
	errCreateTime = errors.New("metadata.create_time: must be set and never change; sinks before Istio 1.14 drop a resource without it")
)

// Check returns why a resource cannot be served. The part has neither a hash
// nor what is of its kind.
type Check func(p *Part, body proto.Message) error

// Parse checks and parses an encoded istio.mcp.v1alpha1.Resource. The part
// shares raw, which must not change while the part is in use. No input makes
// Parse panic. The body has to decode and to pass the checks. The error is an
// [*Invalid] that names the field and, if possible, the resource.
//
// The hash includes the fields that tail, which may be nil, returns: those that
// the resource is served with at the end of its spec.
func Parse(raw []byte, tail func(*Part) []byte, checks ...Check) (*Part, error) {
	p, err := parse(raw, checks)
	if err != nil {
		coll, name := identify(raw)
		return nil, &Invalid{coll, name, err}
	}
	var more []byte
	if tail != nil {
		more = tail(p)
	}
	p.Hash = p.hashWith(more)
	return p, nil
}

func parse(raw []byte, checks []Check) (*Part, error) {
	if len(raw) > MaxSize {
		return nil, fmt.Errorf("it has more than %d bytes (%d MiB), the most that is accepted", MaxSize, MaxSize>>20)
	}
	p := &Part{}
	var body []byte
	seenMetadata, seenBody, seenTime, seenVersion := false, false, false, false
	err := fields(raw, func(num protowire.Number, typ protowire.Type, _, value []byte) error {
		switch {
		case num == resourceMetadata && typ == protowire.BytesType && !seenMetadata:
			seenMetadata = true
			p.Metadata = value
			return fields(value, func(num protowire.Number, typ protowire.Type, _, value []byte) error {
				switch {
				case num == metadataVersion:
					seenVersion = true
				case num == metadataName && typ == protowire.BytesType && p.Name == "":
					p.Name = string(value)
				case num == metadataCreateTime && typ == protowire.BytesType && !seenTime:
					seenTime = true
				case num == metadataName, num == metadataCreateTime:
					return fmt.Errorf("metadata: field %d is there twice or malformed", num)
				}
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
	if err := checkName(p.Name); err != nil {
		return nil, err
	}
	if seenVersion {
		p.Metadata = withoutVersion(p.Metadata)
	}
	err = fields(body, func(num protowire.Number, typ protowire.Type, _, value []byte) error {
		switch {
		case num == anyTypeURL && typ == protowire.BytesType:
			p.BodyURL = string(value)
		case num == anyValue && typ == protowire.BytesType:
			p.Spec = value
		default:
			return fmt.Errorf("unexpected field %d", num)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("body: %w", err)
	}
	p.Collection = collection.OfBody(p.BodyURL)
	switch {
	case p.Collection == "":
		return nil, fmt.Errorf("body: no kind that can be served is called %q", p.BodyURL)
	case !seenTime:
		return nil, errCreateTime
	}
	if err := checkMetadata(p.Metadata); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	if err := p.checkBody(checks); err != nil {
		return nil, err
	}
	return p, nil
}

// identify returns the collection and the name of a refused resource: "" for a
// collection that cannot be served, and for no name or several. Malformed or
// truncated data does not hide what precedes it.
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

// withoutVersion returns well-formed metadata without its version.
func withoutVersion(metadata []byte) []byte {
	out := make([]byte, 0, len(metadata))
	_ = fields(metadata, func(num protowire.Number, _ protowire.Type, field, _ []byte) error {
		if num != metadataVersion {
			out = append(out, field...)
		}
		return nil
	})
	return out
}

// maxDepth bounds how deep messages are nested in each other, as Envoy's and
// Java's decoders do: a body that is deeper would be refused by those who
// receive it. Printed as JSON, its size is quadratic.
const maxDepth = 100

func (p *Part) checkBody(checks []Check) error {
	var body proto.Message
	switch p.Collection {
	case collection.ServiceEntry:
		body = &networking.ServiceEntry{}
	case collection.WorkloadEntry:
		body = &networking.WorkloadEntry{}
	default:
		typ, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(strings.TrimPrefix(p.BodyURL, "type.googleapis.com/")))
		if err != nil {
			return err
		}
		body = typ.New().Interface()
	}
	if err := (proto.UnmarshalOptions{RecursionLimit: maxDepth}).Unmarshal(p.Spec, body); err != nil {
		return err
	}
	for _, check := range checks {
		if err := check(p, body); err != nil {
			return err
		}
	}
	switch body := body.(type) {
	case *networking.ServiceEntry:
		p.Hosts = body.GetHosts()
		p.Composable = len(body.GetEndpoints()) == 0 && body.GetWorkloadSelector() == nil
		p.Static = body.GetResolution() == networking.ServiceEntry_STATIC
		// An address is meaningless for a wildcard, and where the client's own
		// destination is retained.
		p.OwnAddress = len(body.GetAddresses()) > 0 || body.GetResolution() == networking.ServiceEntry_NONE ||
			len(body.GetHosts()) != 1 || strings.HasPrefix(body.GetHosts()[0], "*")
	case *networking.WorkloadEntry:
		p.Address, p.labels = body.GetAddress(), body.GetLabels()
	}
	return nil
}

// checkName checks the syntax of "namespace/name" as Kubernetes does, since
// istiod rejects anything else: characters of a DNS subdomain, length of a
// Kubernetes object name.
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

// checkMetadata checks that the metadata decodes: only the sink decodes it.
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
		case metadataLabels, metadataAnnotations:
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

// fields calls f with each field of an encoded message: number, type, the whole
// field and its value, without the length of length-delimited fields.
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

// prefixes calls f with each length-delimited field of a possibly truncated
// message and reports whether the field is complete. It stops at the first
// malformed field.
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
