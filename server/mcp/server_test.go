package mcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

// No two profiles can be mistaken for each other, and the collections are as
// many as each version of Istio asks for.
func TestProfiles(t *testing.T) {
	counts := map[string]int{
		"pilot-1.1": 16, "pilot-1.2": 17, "pilot-1.4": 17, "pilot-1.5": 19, "pilot-1.6": 18, "pilot-1.7": 14, "pilot-1.8": 11, "synthetic": 1,
	}
	for _, p := range profiles {
		if len(p.Collections) != counts[p.Name] {
			t.Errorf("%s: %d collections, want %d", p.Name, len(p.Collections), counts[p.Name])
		}
		if !slices.IsSorted(p.Collections) || len(slices.Compact(slices.Clone(p.Collections))) != len(p.Collections) {
			t.Errorf("%s: not sorted, or twice the same: %v", p.Name, p.Collections)
		}
		if len(p.Collections) == 0 {
			continue
		}
		asked := map[string]bool{}
		for _, c := range p.Collections {
			asked[c] = true
		}
		got, final := classify(asked)
		if got != p {
			t.Errorf("the collections of %s are taken for %s", p.Name, got.Name)
		}
		// Only those that a later version extends have to wait.
		if want := p.Name != "pilot-1.1" && p.Name != "pilot-1.4" && p.Name != "pilot-1.7"; final != want {
			t.Errorf("%s: final is %v, want %v", p.Name, final, want)
		}
		if form := p.Form; form.Shape != 0 || form.OmitVersion || form.Address || form.PortSets || form.Legacy == 0 {
			t.Errorf("%s: form %v", p.Name, form)
		}
	}
	if got, _ := classify(map[string]bool{serviceEntries: true}); got != tools {
		t.Errorf("serviceentries alone is taken for %s", got.Name)
	}
}

// sinkServer is a sink that waits to be dialled.
type sinkServer interface {
	establish(grpc.ServerStream) error
}

type sinkFunc func(grpc.ServerStream) error

func (f sinkFunc) establish(s grpc.ServerStream) error { return f(s) }

// serveSink serves f on the listener until stop is called.
func serveSink(t testing.TB, l net.Listener, f sinkFunc, options ...grpc.ServerOption) (stop func()) {
	t.Helper()
	server := grpc.NewServer(append([]grpc.ServerOption{grpc.ForceServerCodecV2(wire.NewCodec())}, options...)...)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: sinkService,
		HandlerType: (*sinkServer)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: streamName, ServerStreams: true, ClientStreams: true,
			Handler: func(srv any, stream grpc.ServerStream) error { return srv.(sinkServer).establish(stream) },
		}},
	}, f)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }() // ends with Stop
	return func() {
		server.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
	}
}

// Reverse mode: the source dials, begins with the trigger, swallows the NACK of
// it, and serves as ever.
func TestReverse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, state.Options{})
		w.Entry("dc1/web", "web.example.org")
		s, err := New(w.View, Config{}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		var log []string
		listener := bufconn.Listen(1 << 20)
		stop := serveSink(t, listener, func(stream grpc.ServerStream) error {
			md, _ := metadata.FromIncomingContext(stream.Context())
			log = append(log, fmt.Sprint("token ", md.Get("x-token")))
			for range 3 {
				m := new(mcpv1.Resources)
				if err := stream.RecvMsg(m); err != nil {
					return err
				}
				log = append(log, fmt.Sprintf("%s %d", m.GetCollection(), len(m.GetResources())))
				if m.GetCollection() == TriggerCollection {
					for _, req := range []*mcpv1.RequestResources{
						{Collection: serviceEntries, Incremental: true},
						{Collection: TriggerCollection, ErrorDetail: &mcpv1.Status{Code: unimplemented}},
					} {
						if err := stream.SendMsg(req); err != nil {
							return err
						}
					}
					continue
				}
				if err := stream.SendMsg(&mcpv1.RequestResources{Collection: serviceEntries, ResponseNonce: m.GetNonce(), Incremental: true}); err != nil {
					return err
				}
			}
			return nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { // ends with cancel
			done <- s.Dial(ctx, Sink{Address: "passthrough:///sink", Metadata: map[string]string{"x-token": "t"}},
				grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
		}()
		<-time.After(200 * time.Millisecond)
		synctest.Wait()
		if st := s.Status(); len(st) != 1 || st[0].Protocol != "mcp reverse" || st[0].Subscriptions[0].State != "current" || st[0].Subscriptions[0].Resources != 1 {
			t.Errorf("status %+v", st)
		}
		w.Instance("dc1/web", "dc1/web-1", "10.0.0.1", 0, servertest.Port{Name: "http", Number: 80})
		synctest.Wait()
		// The sink ended the stream; it is opened again after about a second.
		<-time.After(1500 * time.Millisecond)
		synctest.Wait()
		want := []string{"token [t]", TriggerCollection + " 0", serviceEntries + " 1", serviceEntries + " 1"}
		if want = append(want, want[:3]...); !slices.Equal(log, want) {
			t.Errorf("the sink saw %v, want %v", log, want)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Dial: %v", err)
		}
		stop()
	})
}

// A sink that cannot be reached is dialled again after a time that doubles, up
// to a minute, and is never quite the same.
func TestRedial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, state.Options{})
		s, err := New(w.View, Config{}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		var at []time.Time
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { // ends with cancel
			done <- s.Dial(ctx, Sink{Address: "passthrough:///sink"}, grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
				at = append(at, time.Now())
				return nil, errors.New("refused")
			}))
		}()
		<-time.After(5 * time.Minute)
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Dial: %v", err)
		}
		want := time.Second
		deviations := map[float64]bool{}
		for i := 1; i < len(at); i++ {
			d := at[i].Sub(at[i-1])
			if d < want*8/10 || d > want*12/10 {
				t.Errorf("attempt %d after %v, want about %v", i, d, want)
			}
			deviations[float64(d)/float64(want)] = true
			want = min(2*want, time.Minute)
		}
		if len(deviations) < len(at)/2 {
			t.Errorf("%d attempts deviate from their times by the same factors %v: bridges that were started together dial together", len(at), deviations)
		}
		if len(at) < 8 || len(at) > 12 {
			t.Errorf("%d attempts in 5 minutes", len(at))
		}
	})
}

// The end of the server ends reverse mode, too.
func TestShutdownEndsDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := New(newWorld(t, state.Options{}).View, Config{}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { // ends with Shutdown
			done <- s.Dial(t.Context(), Sink{Address: "passthrough:///sink"}, grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
				return nil, errors.New("refused")
			}))
		}()
		<-time.After(10 * time.Second)
		s.Drain(0)
		if err := <-done; status.Code(err) != codes.Unavailable {
			t.Errorf("Dial: %v", err)
		}
	})
}

// A sink behind mutual TLS is served; one whose certificate is not to be
// trusted is not.
func TestReverseTLS(t *testing.T) {
	sink, ours := testcert.New(t, "sink.example.org"), testcert.New(t, "isthmus.example.org")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan string, 100)
	stop := serveSink(t, listener, func(stream grpc.ServerStream) error {
		m := new(mcpv1.Resources)
		if err := stream.RecvMsg(m); err != nil {
			return err
		}
		got <- m.GetCollection()
		<-stream.Context().Done()
		return nil
	}, grpc.Creds(credentials.NewTLS(sink.Server(ours))))
	defer stop()
	for _, tt := range []struct {
		name string
		tls  TLS
		want string // of the error; "" for none
	}{
		{"mutual", TLS{CA: sink.Cert, Certificate: ours.Cert, Key: ours.Key, ServerName: "sink.example.org"}, ""},
		{"other CA", TLS{CA: ours.Cert, Certificate: ours.Cert, Key: ours.Key, ServerName: "sink.example.org"}, "unknown authority"},
		{"other name", TLS{CA: sink.Cert, Certificate: ours.Cert, Key: ours.Key, ServerName: "other.example.org"}, "other.example.org"},
		{"no file", TLS{CA: "/nonexistent"}, "tls: ca:"},
		{"no PEM", TLS{CA: os.DevNull}, "no certificate in PEM"},
		{"no key", TLS{CA: sink.Cert, Certificate: ours.Cert}, "tls: certificate:"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, err := New(newWorld(t, state.Options{}).View, Config{}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if tt.want != "" {
				if _, err := s.dialOnce(ctx, Sink{Address: listener.Addr().String(), TLS: &tt.tls}, nil); err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("error %v, want one with %q", err, tt.want)
				}
				return
			}
			done := make(chan error, 1)
			go func() { // ends with cancel
				done <- s.Dial(ctx, Sink{Address: listener.Addr().String(), TLS: &tt.tls})
			}()
			select {
			case c := <-got:
				if c != TriggerCollection {
					t.Errorf("the first response is of %q", c)
				}
			case err := <-done:
				t.Fatal(err)
			}
			cancel()
			<-done
		})
	}
}

// An alert on the number of sinks can fire before the first one comes: every
// series that it adds up is there from the start.
func TestSinksBeforeTheFirst(t *testing.T) {
	m := newMetrics(nil)
	series := make(chan prometheus.Metric, 100)
	m.Sinks.Collect(series)
	if len(series) != len(profiles) {
		t.Errorf("%d series of isthmus_mcp_sinks, want %d", len(series), len(profiles))
	}
}
