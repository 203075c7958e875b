package view

import (
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/isthmus-mesh/isthmus/server/state"
)

// Framing is the framing of a protocol: how a resource is wrapped in a
// response, and whether responses are full or incremental.
type Framing uint8

const (
	// XDS is envoy.service.discovery.v3.DiscoveryResponse.resources: field 2,
	// an Any that holds an istio.mcp.v1alpha1.Resource. Responses are full.
	XDS Framing = iota
	// DeltaXDS is envoy.service.discovery.v3.DeltaDiscoveryResponse.resources:
	// field 2, a Resource with name, version and such an Any. Responses are
	// incremental.
	DeltaXDS
	// MCP is istio.mcp.v1alpha1.Resources.resources: field 3, the
	// istio.mcp.v1alpha1.Resource itself. Each request of the sink says whether
	// the next response may be incremental.
	MCP
)

// ResourceTypeURL is the type URL of the Any around each resource. istiod
// checks it; the requested type is only in the type_url of the response.
const ResourceTypeURL = "type.googleapis.com/istio.mcp.v1alpha1.Resource"

// Field numbers of envoy/service/discovery/v3/discovery.proto and
// istio/mcp/v1alpha1/mcp.proto.
const (
	responseResources    = 2 // DiscoveryResponse, DeltaDiscoveryResponse
	deltaResourceVersion = 1 // Resource
	deltaResourceAny     = 2
	deltaResourceName    = 3
	mcpResources         = 3 // Resources
)

// versionSize is the length of a version, in bytes.
const versionSize = 16

// maxFrame bounds the size of a frame without the name, in bytes.
const maxFrame = 128

// sizeRemoved bounds the size of a removed name in a response, in bytes.
func sizeRemoved(name string) int { return len(name) + 4 }

func sizeAny(size int) int {
	return 1 + protowire.SizeBytes(len(ResourceTypeURL)) + 1 + protowire.SizeBytes(size)
}

// append appends the frame that precedes the resource.
func (f Framing) append(b []byte, name string, e *state.Encoding) []byte {
	size := e.Size
	switch f {
	case MCP:
		b = protowire.AppendTag(b, mcpResources, protowire.BytesType)
		return protowire.AppendVarint(b, uint64(size))
	case DeltaXDS:
		inner := sizeAny(size)
		total := 1 + protowire.SizeBytes(len(name)) + 1 + protowire.SizeBytes(versionSize) + 1 + protowire.SizeBytes(inner)
		b = protowire.AppendTag(b, responseResources, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(total))
		b = protowire.AppendTag(b, deltaResourceName, protowire.BytesType)
		b = protowire.AppendString(b, name)
		b = protowire.AppendTag(b, deltaResourceVersion, protowire.BytesType)
		b = protowire.AppendVarint(b, versionSize)
		b = e.Version.Append(b)
		b = protowire.AppendTag(b, deltaResourceAny, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(inner))
	default:
		b = protowire.AppendTag(b, responseResources, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(sizeAny(size)))
	}
	b = protowire.AppendTag(b, 1, protowire.BytesType) // Any.type_url
	b = protowire.AppendString(b, ResourceTypeURL)
	b = protowire.AppendTag(b, 2, protowire.BytesType) // Any.value
	return protowire.AppendVarint(b, uint64(size))
}
