package wire

import (
	"google.golang.org/grpc/encoding"
	codecproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// Spliced is an encoded message. Its parts are sent in order, as they are. They
// must not change until the message is sent; segments may be shared with other
// messages.
type Spliced interface {
	Parts() (header []byte, segments [][]byte)
}

// Tracked is a [Spliced] message that is told when gRPC has sent or dropped it.
// One without a part of more than 1 KiB is not.
type Tracked interface {
	Sent() func() // nil for none
}

// Request is a received message, as it came. Its receiver decodes it when it is
// its turn, and handles one that does not decode; gRPC would end the stream.
type Request struct{ data mem.BufferSlice }

// Size returns the size of the message, in bytes.
func (r *Request) Size() int { return r.data.Len() }

// Decode decodes the message, once.
func (r *Request) Decode(m proto.Message) error {
	defer r.data.Free()
	return encoding.GetCodecV2(codecproto.Name).Unmarshal(r.data, m)
}

// NewCodec returns the protobuf codec, except that it sends the bytes of a
// [Spliced] message as they are, and receives any message into a *[Request].
func NewCodec() encoding.CodecV2 { return codec{encoding.GetCodecV2(codecproto.Name)} }

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
	var done func()
	last := -1 // the part that is released last, as parts are sent in order
	if t, ok := m.(Tracked); ok {
		if done = t.Sent(); done != nil {
			last = tracked(segments)
		}
	}
	out := make(mem.BufferSlice, 0, 1+len(segments))
	switch {
	case len(header) == 0:
	case done != nil && last < 0:
		h := header // of this message only
		out = append(out, mem.NewBuffer(&h, sent(done)))
	default:
		out = append(out, mem.SliceBuffer(header))
	}
	for i := range segments {
		if i == last {
			out = append(out, mem.NewBuffer(&segments[i], sent(done)))
		} else {
			out = append(out, mem.NewBuffer(&segments[i], keep))
		}
	}
	return out, nil
}

// Tracks reports whether gRPC tells when it has sent a message.
func Tracks(m Spliced) bool {
	header, segments := m.Parts()
	return large(header) || tracked(segments) >= 0
}

// tracked returns the index of the last segment that gRPC releases, -1 if there
// is none.
func tracked(segments [][]byte) int {
	for i := len(segments) - 1; i >= 0; i-- {
		if large(segments[i]) {
			return i
		}
	}
	return -1
}

func large(b []byte) bool { return !mem.IsBelowBufferPoolingThreshold(cap(b)) }

// sent is a pool that tells when a buffer is returned to it.
type sent func()

// Get implements [mem.BufferPool].
func (sent) Get(n int) *[]byte { return keep.Get(n) }

// Put implements [mem.BufferPool].
func (s sent) Put(*[]byte) { s() }

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if r, ok := v.(*Request); ok {
		data.Ref()
		r.data = data
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}
