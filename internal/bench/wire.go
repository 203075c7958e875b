package bench

import (
	"bytes"
	"context"
	"hash/maphash"
	"strconv"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/adapters/sim"
	legacy "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
)

// raw is the codec of the sinks. What they receive stays encoded: a client that
// decodes everything would measure itself.
type raw struct{}

func (raw) Name() string { return "proto" }

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	b, err := proto.Marshal(v.(proto.Message))
	return mem.BufferSlice{mem.SliceBuffer(b)}, err
}

func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// protocol is one protocol as a sink speaks it.
type protocol struct {
	method string
	// types are the types or collections to ask for.
	types []string
	// ask returns the request for a type; names are those of the resources, nil
	// for all.
	ask func(typ string, names []string) proto.Message
	// ack returns the answer to a response.
	ack func(r *response) proto.Message
	// fields are the numbers of the fields of a response.
	fields fields
	// whole reports that a response contains all resources of its type, if it
	// does not say otherwise.
	whole bool
}

// fields are numbers of fields, 0 for none.
type fields struct{ version, typ, nonce, resources, removed, incremental protowire.Number }

const (
	serviceEntry  = "networking.istio.io/v1/ServiceEntry"
	workloadEntry = "networking.istio.io/v1/WorkloadEntry"
)

const node = "isthmus-bench"

func protocolOf(name string) protocol {
	switch name {
	case sotw:
		return protocol{
			method: "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources",
			types:  []string{serviceEntry, workloadEntry},
			ask: func(typ string, _ []string) proto.Message {
				return &discovery.DiscoveryRequest{TypeUrl: typ, Node: &core.Node{Id: node}}
			},
			ack: func(r *response) proto.Message {
				return &discovery.DiscoveryRequest{TypeUrl: r.typ, VersionInfo: r.version, ResponseNonce: r.nonce}
			},
			fields: fields{version: 1, resources: 2, typ: 4, nonce: 5}, whole: true,
		}
	case mcp, mcpIncremental:
		return protocol{
			method: "/istio.mcp.v1alpha1.ResourceSource/EstablishResourceStream",
			types:  []string{"istio/networking/v1alpha3/serviceentries"},
			ask: func(typ string, _ []string) proto.Message {
				return &legacy.RequestResources{Collection: typ, SinkNode: &legacy.SinkNode{Id: node}, Incremental: name == mcpIncremental}
			},
			ack: func(r *response) proto.Message {
				return &legacy.RequestResources{Collection: r.typ, ResponseNonce: r.nonce, SinkNode: &legacy.SinkNode{Id: node}, Incremental: name == mcpIncremental}
			},
			fields: fields{version: 1, typ: 2, resources: 3, removed: 4, nonce: 5, incremental: 6}, whole: true,
		}
	default:
		return protocol{
			method: "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources",
			types:  []string{serviceEntry, workloadEntry},
			ask: func(typ string, names []string) proto.Message {
				return &discovery.DeltaDiscoveryRequest{TypeUrl: typ, Node: &core.Node{Id: node}, ResourceNamesSubscribe: names}
			},
			ack: func(r *response) proto.Message {
				return &discovery.DeltaDiscoveryRequest{TypeUrl: r.typ, ResponseNonce: r.nonce}
			},
			fields: fields{version: 1, resources: 2, typ: 4, nonce: 5, removed: 6},
		}
	}
}

// response is a response, taken apart no further than needed. Its parts share
// the memory of the message.
type response struct {
	typ, version, nonce string
	resources           [][]byte
	removed             [][]byte
	whole               bool
}

func (p protocol) parse(b []byte) (r response, err error) {
	r.whole = p.whole
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return r, protowire.ParseError(n)
		}
		b = b[n:]
		var value []byte
		switch typ {
		case protowire.BytesType:
			value, n = protowire.ConsumeBytes(b)
		case protowire.VarintType:
			var x uint64
			if x, n = protowire.ConsumeVarint(b); num == p.fields.incremental && x != 0 {
				r.whole = false
			}
		default:
			n = protowire.ConsumeFieldValue(num, typ, b)
		}
		if n < 0 {
			return r, protowire.ParseError(n)
		}
		b = b[n:]
		switch num {
		case p.fields.version:
			r.version = string(value)
		case p.fields.typ:
			r.typ = string(value)
		case p.fields.nonce:
			r.nonce = string(value)
		case p.fields.resources:
			r.resources = append(r.resources, value)
		case p.fields.removed:
			r.removed = append(r.removed, value)
		}
	}
	return r, nil
}

// field returns the bytes of the first field of a number.
func field(b []byte, want protowire.Number) []byte {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil
		}
		if num == want && typ == protowire.BytesType {
			v, _ := protowire.ConsumeBytes(b[n:])
			return v
		}
		m := protowire.ConsumeFieldValue(num, typ, b[n:])
		if m < 0 {
			return nil
		}
		b = b[n+m:]
	}
	return nil
}

// nameOf returns the name of a resource of a response.
func (p protocol) nameOf(resource []byte) string {
	switch {
	case p.fields.typ == 2: // mcp.Resource: metadata.name
		return string(field(field(resource, 1), 1))
	case p.whole: // google.protobuf.Any of an mcp.Resource
		return string(field(field(field(resource, 2), 1), 1))
	default: // envoy Resource
		return string(field(resource, 3))
	}
}

var seed = maphash.MakeSeed()

// digestOf returns a hash of what the sink holds of a resource. Legacy
// resources carry the time of their creation as the bridge gave it, so it is
// the same for all sinks.
func digestOf(resource []byte) uint64 { return maphash.Bytes(seed, resource) }

// stampPrefix precedes the time of a change: the key of the label, and the tag
// and the length of its value in a protobuf map.
var stampPrefix = append([]byte(sim.ChangedAt), 2<<3|2, stampLen)

const stampLen = 19 // digits of nanoseconds since 1970, until 2286

// stamps appends the times of changes in b, in nanoseconds since 1970.
func stamps(to []int64, b []byte) []int64 {
	for {
		i := bytes.Index(b, stampPrefix)
		if i < 0 || len(b) < i+len(stampPrefix)+stampLen {
			return to
		}
		b = b[i+len(stampPrefix):]
		if at, err := strconv.ParseInt(string(b[:stampLen]), 10, 64); err == nil {
			to = append(to, at)
		}
		b = b[stampLen:]
	}
}

// open opens a stream and sends the first requests.
func (p protocol) open(ctx context.Context, conn *grpc.ClientConn, names []string) (grpc.ClientStream, error) {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, p.method, grpc.ForceCodecV2(raw{}))
	if err != nil {
		return nil, err
	}
	for _, typ := range p.types {
		if names != nil && typ != workloadEntry {
			continue
		}
		if err := stream.SendMsg(p.ask(typ, names)); err != nil {
			return nil, err
		}
	}
	return stream, nil
}
