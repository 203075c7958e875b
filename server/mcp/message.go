package mcp

import (
	"google.golang.org/protobuf/encoding/protowire"
)

// Names of the gRPC services and of their only method.
const (
	sourceService = "istio.mcp.v1alpha1.ResourceSource"
	sinkService   = "istio.mcp.v1alpha1.ResourceSink"
	streamName    = "EstablishResourceStream"

	// SourceMethod is the method that sinks call.
	SourceMethod = "/" + sourceService + "/" + streamName
	// SinkMethod is the method that a source calls in reverse mode.
	SinkMethod = "/" + sinkService + "/" + streamName
)

// TriggerCollection is the collection of the first response in reverse mode. It
// makes the sink read from the stream; the sink refuses it with Unimplemented.
// (Istio 1.1 leaves the collection empty.)
const TriggerCollection = "$triggerCollection"

// Field numbers of istio.mcp.v1alpha1.Resources, as in
// proto/isthmus/mcp/v1/mcp.proto.
const (
	fieldVersion     = 1
	fieldCollection  = 2
	fieldRemoved     = 4
	fieldNonce       = 5
	fieldIncremental = 6
)

// header encodes a Resources message without its resources.
func header(version, collection, nonce string, removed []string, incremental bool) []byte {
	size := 2
	for _, s := range []string{version, collection, nonce} {
		size += sizeString(s)
	}
	for _, name := range removed {
		size += sizeString(name)
	}
	b := make([]byte, 0, size)
	b = appendString(b, fieldVersion, version)
	b = appendString(b, fieldCollection, collection)
	for _, name := range removed {
		b = appendString(b, fieldRemoved, name)
	}
	b = appendString(b, fieldNonce, nonce)
	if incremental {
		b = protowire.AppendTag(b, fieldIncremental, protowire.VarintType)
		b = protowire.AppendVarint(b, 1)
	}
	return b
}

func sizeString(s string) int { return 1 + protowire.SizeBytes(len(s)) }

func appendString(b []byte, field protowire.Number, s string) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendString(b, s)
}
