package xds

import "google.golang.org/protobuf/encoding/protowire"

// Field numbers of envoy/service/discovery/v3/discovery.proto and
// envoy/config/core/v3/base.proto. DiscoveryResponse and DeltaDiscoveryResponse
// use the same ones for version, type URL and nonce.
const (
	fieldVersion           = 1
	fieldTypeURL           = 4
	fieldNonce             = 5
	fieldControlPlane      = 6
	fieldDeltaRemoved      = 6
	fieldDeltaControlPlane = 7
	fieldIdentifier        = 1 // ControlPlane
)

// controlPlane is the identifier of the control plane in responses.
const controlPlane = "isthmus"

func sizeField(n int) int { return 1 + protowire.SizeBytes(n) }

// header encodes a response without its resources.
func header(delta bool, version, url, nonce string, removed []string) []byte {
	plane := protowire.Number(fieldControlPlane)
	if delta {
		plane = fieldDeltaControlPlane
	}
	inner := sizeField(len(controlPlane))
	size := sizeField(len(version)) + sizeField(len(url)) + sizeField(len(nonce)) + sizeField(inner)
	for _, name := range removed {
		size += sizeField(len(name))
	}
	b := make([]byte, 0, size)
	b = appendString(b, fieldVersion, version)
	b = appendString(b, fieldTypeURL, url)
	b = appendString(b, fieldNonce, nonce)
	for _, name := range removed {
		b = appendString(b, fieldDeltaRemoved, name)
	}
	b = protowire.AppendTag(b, plane, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(inner))
	return appendString(b, fieldIdentifier, controlPlane)
}

func appendString(b []byte, field protowire.Number, s string) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendString(b, s)
}
