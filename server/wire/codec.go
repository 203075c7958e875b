package wire

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Spliced is an encoded message. Its parts are sent in order, as they are. They
// must not change until the message is sent; segments may be shared with other
// messages.
type Spliced interface {
	Parts() (header []byte, segments [][]byte)
}

// Raw is a received message before decoding. The receiver then handles messages
// that do not decode; gRPC would end the stream.
type Raw []byte

// NewCodec returns the protobuf codec, except that it sends the bytes of a
// [Spliced] message as they are, and decodes any message into a *[Raw].
func NewCodec() encoding.CodecV2 { return codec{encoding.GetCodecV2(proto.Name)} }

type codec struct{ encoding.CodecV2 }

// keep is a pool that ignores buffers returned to it, as segments belong to the
// view. It lets gRPC recycle its bookkeeping per segment; without a pool that
// is one allocation per segment.
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
