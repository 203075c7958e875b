package encode

import "google.golang.org/protobuf/encoding/protowire"

// Legacy says how a Pilot before Istio 1.9, which gets its configuration over
// MCP, is made to see changes that it would miss.
type Legacy uint8

const (
	// NotLegacy is for every other sink.
	NotLegacy Legacy = iota
	// LegacyDrop is for Istio 1.4 and older: a STATIC ServiceEntry without
	// endpoints is rejected, and what the Pilot had before stays. So the sink
	// must not have the entry while it has none.
	LegacyDrop
	// LegacyEndpoints is for Istio 1.5 and 1.6, with the rule of LegacyEmpty
	// too: when only endpoints change, the Pilot pushes the port of the service
	// in place of that of the endpoint. A create_time that changes makes it a
	// full push, which is right. If all endpoints have the service's ports
	// there is nothing to mend.
	LegacyEndpoints
	// LegacyEmpty is for Istio 1.7 and 1.8: an entry whose last endpoint goes
	// keeps it, unless the entry itself changes. So create_time.nanos is 1
	// while there are no endpoints, 0 otherwise.
	LegacyEmpty
)

// String names the rule. It is part of versions and so never changes its
// meaning.
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
// 1.4). Not-ready endpoints are never sent, so the third one,
// notReadyEndpoints, is always absent.
const (
	ServiceVersionAnnotation   = "networking.alpha.istio.io/serviceVersion"
	EndpointsVersionAnnotation = "networking.alpha.istio.io/endpointsVersion"
)

// Nanos of a create_time that a legacy form gives.
const (
	// EmptyNanos says that there are no endpoints.
	EmptyNanos = 1
	// firstNanos and lastNanos bound those that a hash of endpoints gives.
	firstNanos, lastNanos = 2, 999_999_999
)

// Nanos returns the create_time.nanos that content determines: neither 0 nor
// [EmptyNanos].
func (h Hash) Nanos() uint64 { return firstNanos + uint64(h)%(lastNanos-firstNanos+1) }

// WithNanos returns encoded metadata that [Parse] accepted, with other
// create_time.nanos.
func WithNanos(metadata []byte, nanos uint64) []byte {
	out := make([]byte, 0, len(metadata)+160) // with room for annotations
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

// Has reports whether each port of an encoded WorkloadEntry is the one of that
// name in ports.
func (ports Ports) Has(workloadEntry []byte) bool {
	same := true
	eachPort(workloadEntry, func(name []byte, number uint64) {
		same = same && ports[string(name)] == number
	})
	return same
}

// HasAll reports whether [Ports.Has] holds for each endpoint that an encoded
// ServiceEntry, or the run of its endpoint fields, has.
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
