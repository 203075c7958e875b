package xds

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// A part of the state has revisions of its own. A sink whose view becomes one
// lags until it acknowledged that, and its acknowledgements are not reported as
// such of other revisions.
func TestRevisionsOfAView(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := servertest.New(t, state.Options{})
		type bounds struct{ after, upTo uint64 }
		acked := make(chan bounds, 10)
		s := newServer(t, w, Config{Acked: func(_ string, after, upTo uint64, _, _ time.Time) { acked <- bounds{after, upTo} }})
		var filters atomic.Pointer[[]view.Filter]
		filters.Store(&[]view.Filter{})
		regrant := make(chan struct{}) // closed once
		server := registered(s, func(e *stream.Entry) {
			e.SetAdmission(granted(func() ([]view.Filter, <-chan struct{}) {
				if f := *filters.Load(); len(f) > 0 {
					return f, nil
				}
				return nil, regrant
			}))
		})
		conn, stop := servertest.Connect(t, server)
		defer stop()
		for range 50 {
			w.Entry("a/web", "web.a.example.org")
			w.Remove("a/web")
		}
		w.Entry("a/web", "web.a.example.org")
		w.Entry("b/web", "web.b.example.org")
		client := openSotW(t, discovery.NewAggregatedDiscoveryServiceClient(conn), entries)
		ack(t, client, recv(t, client))
		lag := func() uint64 {
			synctest.Wait()
			return s.Status()[0].Subscriptions[0].Lag
		}
		// change makes a change, acknowledges it, and returns what is reported.
		change := func(host string) (now uint64, reported []bounds) {
			w.Entry("b/web", host)
			ack(t, client, recv(t, client))
			if n := lag(); n != 0 {
				t.Errorf("the lag is %d after the ACK", n)
			}
			for len(acked) > 0 {
				reported = append(reported, <-acked)
			}
			return uint64(w.DB.Revision()), reported
		}
		now, reported := change("two.b.example.org")
		if len(reported) != 1 || reported[0].after >= now || reported[0].upTo < now {
			t.Errorf("revision %d was reported as acknowledged by %v", now, reported)
		}
		filters.Store(&[]view.Filter{{Namespaces: []string{"b"}}})
		close(regrant)
		r := recv(t, client)
		if n := len(r.GetResources()); n != 1 || lag() == 0 {
			t.Errorf("%d resources in the new view, and the lag is %d before the ACK", n, lag())
		}
		ack(t, client, r)
		now, reported = change("three.b.example.org")
		for _, b := range reported {
			if b.after >= now || b.upTo < now {
				t.Errorf("revision %d was reported as acknowledged by %v", now, b)
			}
		}
	})
}

// registered returns a server whose streams are let in by a function.
func registered(s *Server, let func(e *stream.Entry)) *grpc.Server {
	server := grpc.NewServer(append(ServerOptions(), grpc.ChainStreamInterceptor(
		s.Listener("").Stream,
		func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			let(stream.EntryOf(ss.Context()))
			return next(srv, ss)
		},
	))...)
	s.Register(server)
	return server
}

// granted is the admission of a stream that may see some.
type granted func() (filters []view.Filter, changed <-chan struct{})

// Identity implements [stream.Admission].
func (granted) Identity() string { return "" }

// Views implements [stream.Admission].
func (g granted) Views() (filters []view.Filter, changed <-chan struct{}) { return g() }

// A sink that has to wait for its turn gets all that changed until then at
// once, and its first request does not wait for a turn.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := servertest.New(t, state.Options{})
		s := newServer(t, w, Config{})
		turns := 0
		server := registered(s, func(e *stream.Entry) {
			e.SetAccount(inTurn{Account: stream.Unbounded(), wait: func(context.Context) {
				turns++
				time.Sleep(time.Second)
			}})
		})
		conn, stop := servertest.Connect(t, server)
		defer stop()
		w.Entry("a/web", "web.a.example.org")
		began := time.Now()
		client, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(t.Context())
		if err == nil {
			err = client.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: entriesV1})
		}
		if err != nil {
			t.Fatal(err)
		}
		next := func(resources int, after time.Duration) {
			t.Helper()
			r, err := client.Recv()
			if err == nil {
				err = client.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: entriesV1, ResponseNonce: r.GetNonce()})
			}
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); len(r.GetResources()) != resources || took < after || took > after+2*Settle {
				t.Errorf("%d resources after %v, want %d after %v", len(r.GetResources()), took, resources, after)
			}
		}
		next(1, 0)
		synctest.Wait()
		began = time.Now()
		for i := range 3 {
			w.Entry(fmt.Sprintf("a/api%d", i), fmt.Sprintf("api%d.a.example.org", i))
			time.Sleep(100 * time.Millisecond)
		}
		next(3, time.Second)
		synctest.Wait()
		if turns != 1 {
			t.Errorf("%d turns for changes that came in one", turns)
		}
	})
}

// Changes do not wake the stream of a sink that has not answered, of either
// variant. When it does, it gets what has changed.
func TestUnansweredStreamsAreNotWoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := servertest.New(t, state.Options{})
		s := newServer(t, w, Config{})
		var woken atomic.Int32
		server := registered(s, func(e *stream.Entry) {
			e.SetAccount(inTurn{Account: stream.Unbounded(), wait: func(context.Context) { woken.Add(1) }})
		})
		conn, stop := servertest.Connect(t, server)
		defer stop()
		w.Entry("a/web", "web.a.example.org")
		client := discovery.NewAggregatedDiscoveryServiceClient(conn)
		all := openSotW(t, client, entriesV1)
		delta, err := client.DeltaAggregatedResources(t.Context())
		if err == nil {
			err = delta.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: entriesV1})
		}
		if err != nil {
			t.Fatal(err)
		}
		r := recv(t, all)
		d, err := delta.Recv()
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		before := woken.Load()
		for i := range 10 {
			w.Entry(fmt.Sprintf("a/api%d", i), fmt.Sprintf("api%d.a.example.org", i))
			synctest.Wait()
		}
		if n := woken.Load() - before; n != 0 {
			t.Errorf("ten changes woke the streams %d times", n)
		}
		ack(t, all, r)
		if err := delta.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: entriesV1, ResponseNonce: d.GetNonce()}); err != nil {
			t.Fatal(err)
		}
		if d, err = delta.Recv(); err != nil || len(d.GetResources()) != 10 {
			t.Errorf("after its answer a delta sink gets %d resources, %v", len(d.GetResources()), err)
		}
		if r = recv(t, all); len(r.GetResources()) != 11 {
			t.Errorf("after its answer a SotW sink gets %d resources", len(r.GetResources()))
		}
	})
}

// A panic while a request is decoded ends its stream, and no other.
func TestPanicIsOfOneStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := servertest.New(t, state.Options{})
		s := newServer(t, w, Config{})
		server := grpc.NewServer(append(ServerOptions(), grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			return next(srv, &broken{ss})
		}))...)
		s.Register(server)
		conn, stop := servertest.Connect(t, server)
		defer stop()
		w.Entry("a/web", "web.a.example.org")
		client := discovery.NewAggregatedDiscoveryServiceClient(conn)
		good, bad := openSotW(t, client, entriesV1), openSotW(t, client, "of a defect")
		if _, err := bad.Recv(); err == nil || !strings.Contains(err.Error(), "meets a defect of the bridge: decode") {
			t.Errorf("the stream of the request: %v", err)
		}
		ack(t, good, recv(t, good))
		w.Entry("a/api", "api.a.example.org")
		if n := len(recv(t, good).GetResources()); n != 2 {
			t.Errorf("another stream gets %d resources, want 2", n)
		}
	})
}

// broken is a stream whose decoder has a defect.
type broken struct{ grpc.ServerStream }

// RecvMsg implements grpc.ServerStream.
func (s *broken) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	if m.(*wire.Request).Size() == proto.Size(&discovery.DiscoveryRequest{TypeUrl: "of a defect"}) {
		panic("decode")
	}
	return err
}

// inTurn is an account that bounds nothing but turns.
type inTurn struct {
	stream.Account
	wait func(context.Context)
}

func (a inTurn) Turn(ctx context.Context) { a.wait(ctx) }
