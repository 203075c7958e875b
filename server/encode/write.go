package encode

import (
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// Labels and annotations that resources get here.
const (
	// SelectorLabel is the label of WorkloadEntries that names their
	// ServiceEntry.
	SelectorLabel = "isthmus.io/service"
	// PortsLabel is the label of [Form.PortSets].
	PortsLabel = "isthmus.io/ports"
	// EndpointsLabel is the label of [Form.EndpointsHash]. The attributes of an
	// endpoint are everything but its address. The most frequent attributes of
	// a service's endpoints are its ordinary ones; among equally frequent ones
	// those with the least hash. The label hashes the ordinary attributes and
	// each endpoint that has others or shares its address. So services with the
	// same addresses and the same label have the same endpoints, and adding or
	// removing an ordinary endpoint leaves the label unchanged.
	EndpointsLabel = "isthmus.io/endpoints"
	// RegistryAnnotation is the annotation of [Form.Registry]: the registry
	// whose resource it is. A ServiceEntry with endpoints of several registries
	// is the first one's.
	RegistryAnnotation = "isthmus.io/registry"
)

// Head is the part of an encoded resource that precedes the spec.
type Head struct {
	Metadata []byte // fields of Metadata without the version
	Version  Hash
	// Stated is set if the metadata contains the version.
	Stated  bool
	BodyURL string
	// Spec is the length of the spec, in bytes.
	Spec int
}

func (h *Head) sizes() (metadata, body int) {
	metadata = len(h.Metadata)
	if h.Stated {
		metadata += 1 + protowire.SizeBytes(hashDigits)
	}
	return metadata, sizeString(h.BodyURL) + sizeBytes(h.Spec)
}

// Size returns the length of the whole resource with its spec, in bytes.
func (h *Head) Size() int {
	metadata, body := h.sizes()
	return sizeBytes(metadata) + sizeBytes(body)
}

// Append appends the head. The caller appends the spec.
func (h *Head) Append(b []byte) []byte {
	metadata, body := h.sizes()
	b = protowire.AppendTag(b, resourceMetadata, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(metadata))
	b = append(b, h.Metadata...)
	if h.Stated {
		b = protowire.AppendTag(b, metadataVersion, protowire.BytesType)
		b = protowire.AppendVarint(b, hashDigits)
		b = h.Version.Append(b)
	}
	b = protowire.AppendTag(b, resourceBody, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(body))
	b = appendString(b, anyTypeURL, h.BodyURL)
	b = protowire.AppendTag(b, anyValue, protowire.BytesType)
	return protowire.AppendVarint(b, uint64(h.Spec))
}

// AppendAddress appends an address to an encoded ServiceEntry.
func AppendAddress(serviceEntry []byte, address string) []byte {
	return appendString(serviceEntry, serviceEntryAddresses, address)
}

// AppendSelector appends a workloadSelector to an encoded ServiceEntry. It
// selects instances whose [SelectorLabel] has the value.
func AppendSelector(serviceEntry []byte, value string) []byte {
	serviceEntry = protowire.AppendTag(serviceEntry, serviceEntrySelector, protowire.BytesType)
	return protowire.AppendBytes(serviceEntry, appendMapEntry(nil, selectorLabels, SelectorLabel, value))
}

// AppendLabel appends a label to an encoded WorkloadEntry that lacks it.
// Protobuf allows map entries anywhere in a message.
func AppendLabel(workloadEntry []byte, key, value string) []byte {
	return appendMapEntry(workloadEntry, workloadEntryLabels, key, value)
}

// AppendMetadataLabel appends a label to encoded metadata that lacks it.
func AppendMetadataLabel(metadata []byte, key, value string) []byte {
	return appendMapEntry(metadata, metadataLabels, key, value)
}

// AppendMetadataAnnotation appends an annotation to encoded metadata. It
// replaces one of that key: the last entry of a map counts.
func AppendMetadataAnnotation(metadata []byte, key, value string) []byte {
	return appendMapEntry(metadata, metadataAnnotations, key, value)
}

// Attributes returns a hash of an encoded WorkloadEntry without its address.
func Attributes(workloadEntry []byte) Hash {
	attributes := make([]byte, 0, len(workloadEntry))
	_ = fields(workloadEntry, func(num protowire.Number, _ protowire.Type, field, _ []byte) error {
		if num != workloadEntryAddress {
			attributes = append(attributes, field...)
		}
		return nil
	})
	return HashOf(attributes)
}

// SizeEndpoint returns the length of an endpoint within a ServiceEntry, given
// the n bytes of its WorkloadEntry.
func SizeEndpoint(n int) int { return sizeBytes(n) }

// AppendEndpoint appends a WorkloadEntry, in two parts, to an encoded
// ServiceEntry as an endpoint.
func AppendEndpoint(serviceEntry, spec, tail []byte) []byte {
	serviceEntry = protowire.AppendTag(serviceEntry, serviceEntryEndpoints, protowire.BytesType)
	serviceEntry = protowire.AppendVarint(serviceEntry, uint64(len(spec)+len(tail)))
	serviceEntry = append(serviceEntry, spec...)
	return append(serviceEntry, tail...)
}

// PortNumbers returns the port numbers of an encoded WorkloadEntry, sorted.
func PortNumbers(workloadEntry []byte) []uint32 {
	var ports []uint32
	eachPort(workloadEntry, func(_ []byte, number uint64) { ports = append(ports, uint32(number)) })
	slices.Sort(ports)
	return ports
}

// Hosts returns the hosts of an encoded ServiceEntry.
func Hosts(serviceEntry []byte) (hosts []string) {
	_ = fields(serviceEntry, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
		if num == serviceEntryHosts {
			hosts = append(hosts, string(value))
		}
		return nil
	})
	return hosts
}

func appendMapEntry(b []byte, field protowire.Number, key, value string) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(sizeString(key)+sizeString(value)))
	b = appendString(b, mapKey, key)
	return appendString(b, mapValue, value)
}

// appendString appends a string field.
func appendString(b []byte, field protowire.Number, s string) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendString(b, s)
}

// sizeString and sizeBytes return the size of a length-delimited field whose
// number is below 16.
func sizeString(s string) int { return sizeBytes(len(s)) }

func sizeBytes(n int) int { return 1 + protowire.SizeBytes(n) }
