// Package testresource encodes the resources of tests.
package testresource

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
)

// Named returns the metadata of a resource that was created at second 1.
func Named(name string) *mcp.Metadata {
	return &mcp.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1}}
}

// Encode returns an encoded istio.mcp.v1alpha1.Resource. Equal arguments give
// equal bytes. It panics if spec cannot be encoded.
func Encode(m *mcp.Metadata, spec proto.Message) []byte {
	o := proto.MarshalOptions{Deterministic: true}
	body := new(anypb.Any)
	if err := anypb.MarshalFrom(body, spec, o); err != nil {
		panic(err)
	}
	b, err := o.Marshal(&mcp.Resource{Metadata: m, Body: body})
	if err != nil {
		panic(err)
	}
	return b
}
