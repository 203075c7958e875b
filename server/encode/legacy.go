package encode

import "google.golang.org/protobuf/encoding/protowire"

// Legacy is a workaround by which a Pilot before Istio 1.9, which is configured
// over MCP, notices changes that it would ignore.
type Legacy uint8

const (
	// NotLegacy applies to all other sinks.
	NotLegacy Legacy = iota
	// LegacyDrop is for Istio 1.4 and older: the Pilot rejects a STATIC
	// ServiceEntry without endpoints and retains the one before. So an entry
	// without endpoints is removed from the sink.
	LegacyDrop
	// LegacyEndpoints is for Istio 1.5 and 1.6, and includes LegacyEmpty: when
	// only endpoints change, the Pilot pushes the port of the service instead
	// of the port of the endpoint. Changing create_time makes it a full push,
	// which is correct. If all endpoints have the ports of the service,
	// create_time stays as it is.
	LegacyEndpoints
	// LegacyEmpty is for Istio 1.7 and 1.8: an entry that loses its last
	// endpoint retains it unless the entry itself changes. So create_time.nanos
	// is 1 without endpoints and 0 otherwise.
	LegacyEmpty
)

// String names the rule. The name is part of versions, so its meaning never
// changes.
func (l Legacy) String() string {
	switch l {
	case LegacyDrop:
		return "legacy-drop"
	case LegacyEndpoints:
		return "legacy-endpoints"
	case LegacyEmpty:
		return "legacy-empty"
	default:
		return ""
	}
}

// Annotations of synthetic ServiceEntries (istio.io/api/annotation of Istio
// 1.4). The third one, notReadyEndpoints, is never set, as endpoints that are
// not ready are never sent.
const (
	ServiceVersionAnnotation   = "networking.alpha.istio.io/serviceVersion"
	EndpointsVersionAnnotation = "networking.alpha.istio.io/endpointsVersion"
)

// Values of create_time.nanos in legacy forms.
const (
	// EmptyNanos stands for an entry without endpoints.
	EmptyNanos = 1
	// firstNanos and lastNanos bound the values that a hash of endpoints gives.
	firstNanos, lastNanos = 2, 999_999_999
)

// Nanos returns the create_time.nanos for content: neither 0 nor [EmptyNanos].
func (h Hash) Nanos() uint64 { return firstNanos + uint64(h)%(lastNanos-firstNanos+1) }

// WithNanos returns a copy of encoded metadata with create_time.nanos replaced.
// [Parse] must have accepted the metadata.
func WithNanos(metadata []byte, nanos uint64) []byte {
	out := make([]byte, 0, len(metadata)+160) // with capacity for annotations
	_ = fields(metadata, func(num protowire.Number, _ protowire.Type, field, value []byte) error {
		if num != metadataCreateTime {
			out = append(out, field...)
			return nil
		}
		var seconds uint64
		_ = fields(value, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
			if num == timestampSeconds {
				seconds, _ = protowire.ConsumeVarint(value)
			}
			return nil
		})
		var stamp []byte
		stamp = protowire.AppendTag(stamp, timestampSeconds, protowire.VarintType)
		stamp = protowire.AppendVarint(stamp, seconds)
		if nanos != 0 {
			stamp = protowire.AppendTag(stamp, timestampNanos, protowire.VarintType)
			stamp = protowire.AppendVarint(stamp, nanos)
		}
		out = protowire.AppendTag(out, metadataCreateTime, protowire.BytesType)
		out = protowire.AppendBytes(out, stamp)
		return nil
	})
	return out
}

// AppendSynthetic appends the annotations of a synthetic ServiceEntry to
// encoded metadata.
func AppendSynthetic(metadata []byte, service, endpoints Hash) []byte {
	metadata = appendMapEntry(metadata, metadataAnnotations, ServiceVersionAnnotation, service.String())
	return appendMapEntry(metadata, metadataAnnotations, EndpointsVersionAnnotation, endpoints.String())
}

// Ports are the numbers of ports by name.
type Ports map[string]uint64

// ServicePorts returns the ports of an encoded ServiceEntry.
func ServicePorts(serviceEntry []byte) Ports {
	ports := Ports{}
	_ = fields(serviceEntry, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
		if num != serviceEntryPorts {
			return nil
		}
		var number uint64
		name := ""
		_ = fields(value, func(num protowire.Number, typ protowire.Type, _, value []byte) error {
			switch {
			case num == portNumber && typ == protowire.VarintType:
				number, _ = protowire.ConsumeVarint(value)
			case num == portName && typ == protowire.BytesType:
				name = string(value)
			}
			return nil
		})
		ports[name] = number
		return nil
	})
	return ports
}

// Has reports whether ports has each port of an encoded WorkloadEntry, by name
// and number.
func (ports Ports) Has(workloadEntry []byte) bool {
	same := true
	eachPort(workloadEntry, func(name []byte, number uint64) {
		same = same && ports[string(name)] == number
	})
	return same
}

// HasAll reports whether [Ports.Has] holds for each endpoint of an encoded
// ServiceEntry, or of its endpoint fields alone.
func (ports Ports) HasAll(serviceEntry []byte) bool {
	same := true
	_ = fields(serviceEntry, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
		if num == serviceEntryEndpoints && same {
			same = ports.Has(value)
		}
		return nil
	})
	return same
}

func eachPort(workloadEntry []byte, f func(name []byte, number uint64)) {
	_ = fields(workloadEntry, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
		if num != workloadEntryPorts {
			return nil
		}
		var number uint64
		var name []byte
		_ = fields(value, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
			switch num {
			case mapKey:
				name = value
			case mapValue:
				number, _ = protowire.ConsumeVarint(value)
			}
			return nil
		})
		f(name, number)
		return nil
	})
}
