package wire

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

type spliced [][]byte

func (s spliced) Parts() (header []byte, segments [][]byte) { return s[0], s[1:] }

// A spliced message is what its parts are, one after the other, and large ones
// are not copied.
func TestSpliced(t *testing.T) {
	c := NewCodec()
	large := bytes.Repeat([]byte{7}, 100_000)
	for _, parts := range []spliced{{nil}, {{1, 2}}, {nil, {3}}, {{1, 2}, {3}, large, {4, 5}}} {
		out, err := c.Marshal(parts)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := out.Materialize(), bytes.Join(parts, nil); !bytes.Equal(got, want) {
			t.Errorf("%d bytes, want %d", len(got), len(want))
		}
		if len(parts) > 3 && &out[2].ReadOnlyData()[0] != &large[0] {
			t.Error("a large segment was copied")
		}
		out.Free()
	}
}

// Any other message is protobuf in both directions, and Request takes it as it
// came, decodable or not.
func TestMessages(t *testing.T) {
	c := NewCodec()
	want := &timestamppb.Timestamp{Seconds: 5, Nanos: 6}
	out, err := c.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got timestamppb.Timestamp
	if err := c.Unmarshal(out, &got); err != nil || !proto.Equal(want, &got) {
		t.Errorf("%v, error %v", &got, err)
	}
	var req Request
	got.Reset()
	if err := c.Unmarshal(out, &req); err != nil || req.Size() != out.Len() || req.Decode(&got) != nil || !proto.Equal(want, &got) {
		t.Errorf("%v, error %v", &got, err)
	}
	bad := mem.BufferSlice{mem.SliceBuffer{0xff}}
	if err := c.Unmarshal(bad, &req); err != nil || req.Size() != 1 || req.Decode(&got) == nil {
		t.Errorf("%d bytes, error %v", req.Size(), err)
	}
	if err := c.Unmarshal(bad, &got); err == nil {
		t.Error("what does not decode was decoded")
	}
}
