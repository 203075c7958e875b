package resource

import (
	"google.golang.org/protobuf/encoding/protowire"
)

// Legacy says how a Pilot before Istio 1.9, which gets its configuration over MCP, is made to see changes that it would miss.
type Legacy uint8

const (
	// NotLegacy is for every other sink.
	NotLegacy Legacy = iota
	// LegacyDrop is for Istio 1.4 and older: a STATIC ServiceEntry without endpoints is rejected, and what the Pilot had before
	// stays; so the sink must not have the entry while it has none.
	LegacyDrop
	// LegacyEndpoints is for Istio 1.5 and 1.6, with the rule of LegacyEmpty too: when only endpoints change, the Pilot pushes
	// the port of the service in place of that of the endpoint. A create_time that changes makes it a full push, which is
	// right. If all endpoints have the service's ports there is nothing to mend.
	LegacyEndpoints
	// LegacyEmpty is for Istio 1.7 and 1.8: an entry whose last endpoint goes keeps it, unless the entry itself changes. So
	// create_time.nanos is 1 while there are no endpoints, 0 otherwise.
	LegacyEmpty
)

// String names the rule; it is part of versions and so may never change its meaning.
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

// Annotations of synthetic ServiceEntries (istio.io/api/annotation of Istio 1.4). Not-ready endpoints are never sent, so the
// third one, notReadyEndpoints, is always absent.
const (
	ServiceVersionAnnotation   = "networking.alpha.istio.io/serviceVersion"
	EndpointsVersionAnnotation = "networking.alpha.istio.io/endpointsVersion"
)

// Field numbers of istio/mcp/v1alpha1/metadata.proto, google/protobuf/timestamp.proto,
// istio/networking/v1alpha3/{service_entry,gateway,workload_entry}.proto.
const (
	metadataAnnotations = 5
	timestampSeconds    = 1
	timestampNanos      = 2
	serviceEntryPorts   = 3
	portNumber          = 1
	portName            = 3
	workloadEntryPorts  = 2
	mapKey              = 1
	mapValue            = 2
)

// empty says whether r is a STATIC ServiceEntry whose endpoints would have to be in it, and are not.
func (r *Resource) empty() bool {
	if !r.part.static || !r.part.selectable {
		return false
	}
	return r.composed == nil || r.shape == Inline && r.composed.endpoints == 0
}

// legacyMetadata returns the metadata of a ServiceEntry, without version, in a legacy form.
func (r *Resource) legacyMetadata(f Form, blocks [][]byte) string {
	var nanos uint64
	switch {
	case r.empty():
		nanos = 1
	case f.Legacy == LegacyEndpoints:
		nanos = r.endpointNanos(blocks)
	}
	out := make([]byte, 0, len(r.part.metadata)+160)
	// Metadata was checked when it was parsed: every field is well formed.
	_ = fields([]byte(r.part.metadata), func(num protowire.Number, _ protowire.Type, field, value []byte) error {
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
	if f.Synthetic {
		endpoints := r.hash.Sub(r.part.hash)
		if r.composed == nil {
			endpoints = r.hash // they are part of the entry
		}
		out = appendMapEntry(out, metadataAnnotations, ServiceVersionAnnotation, r.part.hash.String())
		out = appendMapEntry(out, metadataAnnotations, EndpointsVersionAnnotation, endpoints.String())
	}
	return string(out)
}

// endpointNanos returns 0 if every port of every endpoint is the service's, and otherwise a number that the endpoints determine.
func (r *Resource) endpointNanos(blocks [][]byte) uint64 {
	ports := map[string]uint64{}
	_ = fields(r.part.spec, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
		if num == serviceEntryPorts {
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
		}
		return nil
	})
	same := true
	endpoints := func(b []byte) {
		_ = fields(b, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
			if num == serviceEntryEndpoints && same {
				same = hasPorts(value, ports)
			}
			return nil
		})
	}
	if r.composed == nil {
		endpoints(r.part.spec)
	}
	for _, b := range blocks {
		endpoints(b)
	}
	if same {
		return 0
	}
	const first, last = 2, 999_999_999 // 1 says that there are none
	return first + r.hash[0]%(last-first+1)
}

// hasPorts says whether each port of an encoded WorkloadEntry is the one of that name in ports.
func hasPorts(endpoint []byte, ports map[string]uint64) bool {
	same := true
	_ = fields(endpoint, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
		if num == workloadEntryPorts {
			var number uint64
			name := ""
			_ = fields(value, func(num protowire.Number, _ protowire.Type, _, value []byte) error {
				switch num {
				case mapKey:
					name = string(value)
				case mapValue:
					number, _ = protowire.ConsumeVarint(value)
				}
				return nil
			})
			same = same && ports[name] == number
		}
		return nil
	})
	return same
}
