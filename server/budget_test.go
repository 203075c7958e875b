package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/config"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

const workloadsURL = "networking.istio.io/v1/WorkloadEntry"

type deltaStream = grpc.BidiStreamingClient[discovery.DeltaDiscoveryRequest, discovery.DeltaDiscoveryResponse]

func openDelta(t *testing.T, conn *grpc.ClientConn, first *discovery.DeltaDiscoveryRequest) deltaStream {
	t.Helper()
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = stream.Send(first) // an error shows when the stream is read
	return stream
}

// ended reads a stream until it ends.
func ended(stream deltaStream) error {
	for {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
}

// named returns so many names of 100 bytes.
func named(from, count int) []string {
	names := make([]string, count)
	for i := range names {
		names[i] = fmt.Sprintf("ns/%s-%08d", strings.Repeat("x", 88), from+i)
	}
	return names
}

func retained(s *Server) int64 {
	s.crowd.budget.mu.Lock()
	defer s.crowd.budget.mu.Unlock()
	return s.crowd.budget.retained
}

// What a stream has the bridge keep is bounded by bytes, however it is kept,
// and nothing of it is kept when it is taken back or the stream ends.
func TestRetainedByStream(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nlimits: {retained_bytes: 16777216}")
	const most = 16 << 20 / streamShare
	versions := make(map[string]string)
	for _, name := range named(0, most/200) {
		versions[name] = "1"
	}
	for what, first := range map[string]*discovery.DeltaDiscoveryRequest{
		"names":    {TypeUrl: workloadsURL, ResourceNamesSubscribe: named(0, most/200)},
		"versions": {TypeUrl: workloadsURL, InitialResourceVersions: versions},
		"a type":   {TypeUrl: strings.Repeat("x", 2000)},
	} {
		if err := ended(openDelta(t, connect(t, s.XDSAddr()), first)); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("%s: %v, want %v", what, err, codes.ResourceExhausted)
		}
	}
	// Each request replaces the names of the one before.
	stream := openDelta(t, connect(t, s.XDSAddr()), &discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResourceNamesSubscribe: named(0, 1000)})
	for i := range 30 {
		r, err := stream.Recv()
		if err != nil || len(r.GetRemovedResources()) != 1000 {
			t.Fatalf("%d names answered, error %v", len(r.GetRemovedResources()), err)
		}
		next := &discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResponseNonce: r.GetNonce(), ResourceNamesUnsubscribe: named(i*1000, 1000), ResourceNamesSubscribe: named((i+1)*1000, 1000)}
		if err := stream.Send(next); err != nil {
			t.Fatal(err)
		}
	}
	if n := retained(s); n < 200_000 || n > 400_000 {
		t.Errorf("%d bytes for 1000 names of 100 bytes", n)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	_ = ended(stream)
	testwait.Eventually(t, patience, "nothing to be retained", func() (string, bool) {
		n := retained(s)
		return fmt.Sprint(n), n == 0
	})
}

// An address that has streams retain more than half of what may be retained
// loses those that have most, and one of another address goes on.
func TestRetainedByAddress(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nlimits: {retained_bytes: 16777216}")
	first := &discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResourceNamesSubscribe: named(0, 10_000)} // 2.5 MB
	good := openDelta(t, connectFrom(t, "127.0.0.3", s.XDSAddr()), first)
	if _, err := good.Recv(); err != nil {
		t.Fatal(err)
	}
	conn := connectFrom(t, "127.0.0.2", s.XDSAddr())
	errs := make(chan error, 6)
	for range cap(errs) {
		stream := openDelta(t, conn, first)
		go func() { errs <- ended(stream) }() // ends with the test
	}
	for range cap(errs) - 3 {
		if err := testwait.Receive(t, patience, "the end of a stream", errs); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "retained_bytes") {
			t.Errorf("a stream has ended: %v", err)
		}
	}
	if n := counter(t, s, "isthmus_connections_refused_total", limitRetained); n < 3 {
		t.Errorf("%v streams counted as ended, want three at least", n)
	}
	if n := retained(s); n > 16<<20/peerShare+3<<20 {
		t.Errorf("%d bytes are retained", n)
	}
	if err := good.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResourceNamesSubscribe: []string{"a/b"}}); err != nil {
		t.Fatal(err)
	}
}

// An identity has the share of one address on however many it comes from, and
// when all is used up, who has most of it loses streams.
func TestRetainedByIdentity(t *testing.T) {
	b := newBudget(16<<20, 16<<20, func(string, string) {})
	lost := make(map[string]int)
	open := func(host, identity string, bytes int) *account {
		a := b.open(&intakeConn{pacedConn: pacedConn{host: host}}, identity, nil, func(err error) {
			if !errors.Is(err, errShed) {
				t.Error(err)
			}
			lost[identity]++
		})
		if err := a.Retain(bytes); err != nil {
			t.Error(err)
		}
		return a
	}
	var all []*account
	for i := range 32 {
		all = append(all, open(fmt.Sprint("10.0.0.", i), "thief", 512<<10))
	}
	// Those that were ended, and have not seen it yet, take nothing of others.
	for _, a := range all {
		if err := a.Retain(512 << 10); err != nil && !errors.Is(err, errShed) {
			t.Error(err)
		}
	}
	if lost["thief"] < 16 || lost["thief"] > 20 || b.retained > 8<<20 {
		t.Errorf("of 32 streams of 512 KiB an identity lost %d, %d bytes are retained", lost["thief"], b.retained)
	}
	for i := range 20 { // 14 MiB in all
		all = append(all, open(fmt.Sprint("10.0.1.", i), fmt.Sprint("good-", i), 512<<10))
	}
	if b.retained > 16<<20 || len(lost) != 1 {
		t.Errorf("%d bytes are retained; lost: %v", b.retained, lost)
	}
	for _, a := range all {
		a.close()
	}
	if b.retained != 0 || len(b.peers) != 0 || len(b.streams) != 0 {
		t.Errorf("%d bytes, %d addresses, %d streams are left", b.retained, len(b.peers), len(b.streams))
	}
}

// Types that clients invent are forgotten with the stream, on a listener with a
// view too.
func TestTypesForgotten(t *testing.T) {
	s := serve(t, "listen: {xds: [{address: '127.0.0.1:0', view: {namespaces: [a]}}], admin: 127.0.0.1:0}")
	const streams, types, size = 20, 200, 1000
	conn := connect(t, s.XDSAddr())
	round := func(i int) {
		stream := openDelta(t, conn, &discovery.DeltaDiscoveryRequest{TypeUrl: fmt.Sprintf("%0*d", size, i*types)})
		for j := range types {
			if _, err := stream.Recv(); err != nil {
				t.Fatal(err)
			}
			if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: fmt.Sprintf("%0*d", size, i*types+j+1)}); err != nil {
				t.Fatal(err)
			}
		}
		_ = stream.CloseSend()
		_ = ended(stream)
	}
	round(0)
	before := live()
	for i := range streams {
		round(i + 1)
	}
	testwait.Eventually(t, patience, "the types to be forgotten", func() (string, bool) {
		runtime.Gosched()
		kept := int64(live()) - int64(before)
		return fmt.Sprintf("%d bytes kept of %d", kept, streams*types*size), kept < streams*types*size/4
	})
}

// While requests of many addresses wait for their turn, none of them is
// handled, and a sink that asks for little is answered at once.
func TestRequestsTakeTurns(t *testing.T) {
	s := serve(t, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}")
	good := openDelta(t, connectFrom(t, "127.0.0.9", s.XDSAddr()), &discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResourceNamesSubscribe: named(0, 1)})
	r, err := good.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var busy []*access.Pass
	for range workers() { // what others have asked for takes long
		pass, err := s.crowd.budget.work.Enter(t.Context(), "127.0.0.8")
		if err != nil {
			t.Fatal(err)
		}
		busy = append(busy, pass)
	}
	before := retained(s)
	const addresses, size = 32, 1000
	var flood []deltaStream
	for i := range addresses {
		flood = append(flood, openDelta(t, connectFrom(t, fmt.Sprint("127.0.1.", 1+i), s.XDSAddr()), &discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResourceNamesSubscribe: named(0, size)}))
	}
	testwait.Eventually(t, patience, "all requests to have come", func() (string, bool) {
		n := s.crowd.intake.total.Load()
		return fmt.Sprint(n), n > addresses*size*100
	})
	for i := range 10 {
		if err := good.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResponseNonce: r.GetNonce(), ResourceNamesSubscribe: named(i, 1)}); err != nil {
			t.Fatal(err)
		}
		if r, err = good.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if n := retained(s) - before; n > 10*1000 {
		t.Errorf("%d bytes are retained while no request had its turn", n)
	}
	for _, pass := range busy {
		pass.Leave()
	}
	for i, stream := range flood {
		if r, err := stream.Recv(); err != nil || len(r.GetRemovedResources()) != size {
			t.Errorf("address %d: %d names answered, error %v", i, len(r.GetRemovedResources()), err)
		}
	}
}

// crowded is a bridge whose instances are some first responses of 3 MiB.
func crowdedBridge(t *testing.T) *Server {
	t.Helper()
	cfg, err := config.Parse("isthmus.yaml", []byte(`
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
limits: {response_bytes: 33554432}
registries: [{name: load, type: sim, config: {services: 2000, instances: 10}}]
`), config.Options{Adapters: []string{"sim"}})
	if err != nil {
		t.Fatal(err)
	}
	return serveConfig(t, cfg, Options{})
}

func sending(s *Server) (bytes int64, responses int) {
	s.crowd.budget.mu.Lock()
	defer s.crowd.budget.mu.Unlock()
	return s.crowd.budget.sending, len(s.crowd.budget.sent)
}

// complete reads a first sync to its end.
func complete(t *testing.T, stream deltaStream, most *int64, s *Server) {
	for got := 0; got < 20_000; {
		r, err := stream.Recv()
		if err != nil {
			t.Error(err)
			return
		}
		if most != nil {
			n, _ := sending(s)
			*most = max(*most, n)
		}
		got += len(r.GetResources())
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResponseNonce: r.GetNonce()}); err != nil {
			t.Error(err)
			return
		}
	}
}

// Many first responses at once wait for their turn: what is being sent stays
// within its bound, and each sink gets everything.
func TestFirstResponsesTakeTurns(t *testing.T) {
	s := crowdedBridge(t)
	var all sync.WaitGroup
	most := make([]int64, 40)
	for i := range most {
		stream := openDelta(t, connectFrom(t, fmt.Sprintf("127.0.0.%d", 2+i%4), s.XDSAddr()), &discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL})
		all.Go(func() { complete(t, stream, &most[i], s) })
	}
	all.Wait()
	// A response may be a little more than 3 MiB while it is reserved, too.
	if n := slices.Max(most); n == 0 || n > 16<<20 {
		t.Errorf("%d bytes were being sent at once, of at most %d", n, 16<<20)
	}
	testwait.Eventually(t, patience, "nothing to be being sent", func() (string, bool) {
		n, responses := sending(s)
		return fmt.Sprint(n, " in ", responses), n == 0 && responses == 0
	})
}

// Streams that do not read hold a share of the room for responses; others get
// theirs meanwhile. While their own address waits for room, the connections
// that do not read are closed, and nothing of them is left.
func TestDeafStreams(t *testing.T) {
	s := crowdedBridge(t)
	const deaf = 20 // 60 MiB
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	conn := connectFrom(t, "127.0.0.2", s.XDSAddr())
	var streams []deltaStream
	for range deaf {
		stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL}); err != nil {
			t.Fatal(err)
		}
		streams = append(streams, stream)
	}
	testwait.Eventually(t, patience, "streams to wait for room", func() (string, bool) {
		s.crowd.budget.mu.Lock()
		defer s.crowd.budget.mu.Unlock()
		n := len(s.crowd.budget.waiting)
		return fmt.Sprint(n), n == 1
	})
	if n, _ := sending(s); n > 32<<20/sentShare/firstShare/peerShare+4<<20 {
		t.Errorf("%d bytes are being sent to one address", n)
	}
	complete(t, openDelta(t, connectFrom(t, "127.0.0.3", s.XDSAddr()), &discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL}), nil, s)
	for _, stream := range streams {
		_ = ended(stream) // the connection is closed; what has arrived is read
	}
	if n := counter(t, s, "isthmus_connections_refused_total", limitResponses); n < 1 {
		t.Errorf("%v connections counted as closed", n)
	}
	testwait.Eventually(t, patience, "nothing to be being sent", func() (string, bool) {
		n, responses := sending(s)
		return fmt.Sprint(n, " in ", responses), n == 0 && responses == 0
	})
}

// Pages that several sinks are sent count once, until the last of them has
// them.
func TestSharedPages(t *testing.T) {
	b := newBudget(16<<20, 16<<20, func(string, string) {})
	a := b.open(&intakeConn{pacedConn: pacedConn{host: "10.0.0.1"}}, "", nil, nil)
	page, other := make([]byte, 32<<10), make([]byte, 32<<10)
	first := a.begin(&stream.Message{Segments: [][]byte{page}, Size: len(page), Shared: true})
	second := a.begin(&stream.Message{Segments: [][]byte{page, other, nil}, Size: 2 * len(page), Shared: true})
	for i, want := range []int64{64 << 10, 64 << 10, 0, 0} {
		if b.shared != want || b.sending != 0 {
			t.Errorf("step %d: %d bytes of pages, want %d; %d of others", i, b.shared, want, b.sending)
		}
		[]func(){first, second, second, func() {}}[i]()
	}
}

// Who connects to a unix socket has the budgets of an address.
func TestSocketIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "xds")
	_ = serve(t, "listen: {xds: 'unix:"+path+"', admin: 127.0.0.1:0}\nlimits: {retained_bytes: 16777216}")
	conn := connect(t, peerName("unix:"+path))
	if err := ended(openDelta(t, conn, &discovery.DeltaDiscoveryRequest{TypeUrl: workloadsURL, ResourceNamesSubscribe: named(0, 16<<20/streamShare/200)})); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("too many names: %v, want %v", err, codes.ResourceExhausted)
	}
}

// A sink that the bridge dials has the budgets of an address.
func TestDialedSinkIsBounded(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	versions := make(map[string]string)
	for _, name := range named(0, 16<<20/streamShare/200) {
		versions[name] = "1"
	}
	calls := make(chan error, 100)
	dialed := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		err := errors.Join(stream.RecvMsg(new(mcpv1.Resources)), stream.SendMsg(&mcpv1.RequestResources{Collection: entries, Incremental: true, InitialResourceVersions: versions}))
		for err == nil {
			err = stream.RecvMsg(new(mcpv1.Resources))
		}
		select {
		case calls <- err:
		default: // it is dialed again and again
		}
		return nil
	}))
	served := make(chan error, 1)
	go func() { served <- dialed.Serve(listener) }() // ends with Stop
	defer func() {
		dialed.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	s := serve(t, fmt.Sprintf("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nlimits: {retained_bytes: 16777216}\nsinks: [{address: %q}]", listener.Addr()))
	if err := testwait.Receive(t, patience, "the stream to end", calls); status.Code(err) != codes.Canceled {
		t.Errorf("the sink sees %v", err)
	}
	if n := counter(t, s, "isthmus_connections_refused_total", limitRetained); n == 0 {
		t.Error("no stream counts as refused")
	}
	testwait.Eventually(t, patience, "nothing to be retained", func() (string, bool) {
		n := retained(s)
		return fmt.Sprint(n), n == 0
	})
}
