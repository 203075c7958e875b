package translate

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
)

// CreateTime is the create_time of every resource that does not set one. Istio
// requires the field, treats a changed one as a change of the resource, and
// gives a host claimed by two resources to the older one. So it is a constant,
// far in the future to let resources made by an operator in the mesh win over
// those of a registry.
var CreateTime = time.Date(2100, time.January, 1, 0, 0, 0, 0, time.UTC)

// createSeconds is CreateTime in Unix seconds.
const createSeconds = 4102444800

const (
	typePrefix        = "type.googleapis.com/"
	workloadEntryType = typePrefix + "istio.networking.v1alpha3.WorkloadEntry"
)

var deterministic = proto.MarshalOptions{Deterministic: true}

// encodeResource encodes body with the given metadata. It clears version and
// sets a missing create_time in metadata.
func encodeResource(metadata *mcp.Metadata, body proto.Message) ([]byte, error) {
	value, err := deterministic.Marshal(body)
	if err != nil {
		return nil, err
	}
	metadata.Version = ""
	if metadata.CreateTime == nil {
		metadata.CreateTime = timestamppb.New(CreateTime)
	}
	return deterministic.Marshal(&mcp.Resource{
		Metadata: metadata,
		Body:     &anypb.Any{TypeUrl: typePrefix + string(body.ProtoReflect().Descriptor().FullName()), Value: value},
	})
}

// workload is a WorkloadEntry to be encoded. ports and labels are sorted by
// name.
type workload struct {
	address        string
	ports          []portNumber
	labels         []pair
	network        string
	locality       string
	weight         uint32
	serviceAccount string
	metadata       []pair // labels of the resource itself, sorted
}

type portNumber struct {
	name   string
	number uint32
}

// Field numbers of istio.mcp.v1alpha1.{Resource,Metadata},
// google.protobuf.{Any,Timestamp} and istio.networking.v1alpha3.WorkloadEntry.
// TestEncodeWorkload compares the output with that of package proto, byte for
// byte.

// createTimeField is field 2 of Metadata.
var createTimeField = func() []byte {
	inner := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), createSeconds)
	return protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), inner)
}()

// encode returns the encoded Resource of the workload with the given name, in
// one allocation.
func (w *workload) encode(name string) []byte {
	metadata := sizeString(1, name) + len(createTimeField)
	for _, l := range w.metadata {
		metadata += sizeLen(4, sizeKey(l.key)+1+protowire.SizeBytes(len(l.value)))
	}
	value := w.size()
	body := sizeString(1, workloadEntryType)
	if value > 0 {
		body += sizeLen(2, value)
	}
	b := make([]byte, 0, sizeLen(1, metadata)+sizeLen(2, body))

	b = appendLen(b, 1, metadata)
	b = appendString(b, 1, name)
	b = append(b, createTimeField...)
	for _, l := range w.metadata {
		b = appendPair(b, 4, l)
	}
	b = appendLen(b, 2, body)
	b = appendString(b, 1, workloadEntryType)
	if value > 0 {
		b = appendLen(b, 2, value)
	}
	b = appendString(b, 1, w.address)
	for _, p := range w.ports {
		b = appendLen(b, 2, sizeKey(p.name)+1+protowire.SizeVarint(uint64(p.number)))
		b = appendKey(b, p.name)
		b = protowire.AppendTag(b, 2, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(p.number))
	}
	for _, l := range w.labels {
		b = appendPair(b, 3, l)
	}
	b = appendString(b, 4, w.network)
	b = appendString(b, 5, w.locality)
	if w.weight != 0 {
		b = protowire.AppendTag(b, 6, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(w.weight))
	}
	return appendString(b, 7, w.serviceAccount)
}

// size is the length of the encoded WorkloadEntry.
func (w *workload) size() int {
	n := sizeString(1, w.address) + sizeString(4, w.network) + sizeString(5, w.locality) + sizeString(7, w.serviceAccount)
	for _, p := range w.ports {
		n += sizeLen(2, sizeKey(p.name)+1+protowire.SizeVarint(uint64(p.number)))
	}
	for _, l := range w.labels {
		n += sizeLen(3, sizeKey(l.key)+1+protowire.SizeBytes(len(l.value)))
	}
	if w.weight != 0 {
		n += 1 + protowire.SizeVarint(uint64(w.weight))
	}
	return n
}

// sizeLen is the size of a field of n bytes; appendLen appends its header.
func sizeLen(field protowire.Number, n int) int {
	return protowire.SizeTag(field) + protowire.SizeBytes(n)
}

func appendLen(b []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(n))
}

// sizeString and appendString omit an empty string, as proto3 does.
func sizeString(field protowire.Number, s string) int {
	if s == "" {
		return 0
	}
	return sizeLen(field, len(s))
}

func appendString(b []byte, field protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	return append(appendLen(b, field, len(s)), s...)
}

// sizeKey and appendKey are for map keys, which are written even if empty.
func sizeKey(s string) int { return sizeLen(1, len(s)) }

func appendKey(b []byte, s string) []byte { return append(appendLen(b, 1, len(s)), s...) }

// appendPair appends an entry of a map of strings.
func appendPair(b []byte, field protowire.Number, l pair) []byte {
	b = appendLen(b, field, sizeKey(l.key)+1+protowire.SizeBytes(len(l.value)))
	b = appendKey(b, l.key)
	b = protowire.AppendTag(b, 2, protowire.BytesType)
	return protowire.AppendString(b, l.value)
}

func toMap(pairs []pair) map[string]string {
	if len(pairs) == 0 {
		return nil
	}
	m := make(map[string]string, len(pairs))
	for p := range slices.Values(pairs) {
		m[p.key] = p.value
	}
	return m
}

func sortedNames[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
