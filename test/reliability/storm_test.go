package reliability

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// storm is many sinks of delta xDS, each with a connection and an address of
// its own, that do not decode what they receive: the machine is the bridge's.
type storm struct {
	t       *testing.T
	address string
	ctx     context.Context //nolint:containedctx // of one test
	cancel  context.CancelFunc
	group   sync.WaitGroup
	listed  atomic.Int64
	bytes   atomic.Int64 // received
}

const stormSinks = 1000

// raw passes messages as they are on the wire.
type raw struct{}

// Marshal implements encoding.Codec.
func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

// Unmarshal implements encoding.Codec.
func (raw) Unmarshal(b []byte, v any) error {
	*v.(*[]byte) = slices.Clone(b)
	return nil
}

// Name implements encoding.Codec.
func (raw) Name() string { return "proto" }

// startStorm connects the sinks, which have the versions of some resources.
func startStorm(t *testing.T, address string, versions map[string]string) *storm {
	s := &storm{t: t, address: address}
	s.ctx, s.cancel = context.WithCancel(t.Context())
	t.Cleanup(s.end)
	request, err := proto.Marshal(&discovery.DeltaDiscoveryRequest{TypeUrl: entryType, InitialResourceVersions: versions})
	if err != nil {
		t.Fatal(err)
	}
	for n := range stormSinks {
		s.group.Go(func() { // ends with end
			if err := s.sink(n, request, steadyServices-len(versions)); err != nil && s.ctx.Err() == nil {
				t.Errorf("sink %d: %v", n, err)
			}
		})
	}
	return s
}

// end cuts all sinks off.
func (s *storm) end() {
	s.cancel()
	s.group.Wait()
}

// waitListed waits until every sink has what it lacked.
func (s *storm) waitListed() {
	s.t.Helper()
	testenv.Eventually(s.t, 4*testenv.Patience, "the sinks to have everything", func() (string, bool) {
		n := s.listed.Load()
		return fmt.Sprint(n), n == stormSinks
	})
}

func (s *storm) sink(n int, request []byte, lacks int) error {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 1, byte(n/250), byte(n%250+1))}}
	conn, err := grpc.NewClient("passthrough:///"+s.address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", address)
		}),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}), grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := conn.NewStream(s.ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true},
		discovery.AggregatedDiscoveryService_DeltaAggregatedResources_FullMethodName, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	if err := stream.SendMsg(&request); err != nil {
		return err
	}
	for received, listed := 0, false; ; {
		var b []byte
		if err := stream.RecvMsg(&b); err != nil {
			return err
		}
		s.bytes.Add(int64(len(b)))
		resources, nonce := skim(b)
		if received += resources; !listed && received >= lacks {
			listed = true
			s.listed.Add(1)
		}
		ack, err := proto.Marshal(&discovery.DeltaDiscoveryRequest{TypeUrl: entryType, ResponseNonce: nonce})
		if err != nil {
			return err
		}
		if err := stream.SendMsg(&ack); err != nil {
			return err
		}
	}
}

// skim returns the number of resources and the nonce of a delta response.
func skim(b []byte) (resources int, nonce string) {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return resources, nonce
		}
		size := protowire.ConsumeFieldValue(number, kind, b[n:])
		if size < 0 {
			return resources, nonce
		}
		switch value := b[n : n+size]; number {
		case 2:
			resources++
		case 5:
			bytes, _ := protowire.ConsumeBytes(value)
			nonce = string(bytes)
		}
		b = b[n+size:]
	}
	return resources, nonce
}

// versionsNow returns the versions of all services, as a sink has them.
func versionsNow(t *testing.T, address string) map[string]string {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		t.Fatal(err)
	}
	have, nonce := map[string]string{}, ""
	for len(have) < steadyServices {
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: entryType, ResponseNonce: nonce}); err != nil {
			t.Fatal(err)
		}
		r, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		nonce = r.GetNonce()
		for _, d := range r.GetResources() {
			have[d.GetName()] = d.GetVersion()
		}
	}
	return have
}
