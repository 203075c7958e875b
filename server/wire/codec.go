package wire

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Spliced is a message that is encoded already. Its parts leave one after the other, as they are, and must not change until the
// message is sent; the segments may be shared with other messages.
type Spliced interface {
	Parts() (header []byte, segments [][]byte)
}

// Raw is a message as it came, not decoded. With it the receiver decides what becomes of one that does not decode; gRPC itself would end the
// stream at once.
type Raw []byte

// NewCodec returns the ordinary protobuf codec, except that a [Spliced] message leaves as the bytes that it consists of, and that a *[Raw]
// takes any message.
func NewCodec() encoding.CodecV2 { return codec{encoding.GetCodecV2(proto.Name)} }

type codec struct{ encoding.CodecV2 }

// keep is a pool that takes nothing back: segments belong to the store. With it gRPC recycles its own bookkeeping per segment,
// which without a pool is an allocation each.
var keep mem.NopBufferPool

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(Spliced)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	header, segments := m.Parts()
	out := make(mem.BufferSlice, 0, 1+len(segments))
	if len(header) > 0 {
		out = append(out, mem.SliceBuffer(header))
	}
	for i := range segments {
		out = append(out, mem.NewBuffer(&segments[i], keep))
	}
	return out, nil
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if r, ok := v.(*Raw); ok {
		*r = data.Materialize()
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}
