package xds

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

func newServer(t testing.TB, w *servertest.World, c Config) *Server {
	t.Helper()
	s, err := New(w.View, c, nil, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// bubble runs f with a server on fake time.
func bubble(t *testing.T, f func(t *testing.T, w *servertest.World, s *Server, client discovery.AggregatedDiscoveryServiceClient), options ...grpc.DialOption) {
	synctest.Test(t, func(t *testing.T) {
		w := servertest.New(t, state.Options{})
		s := newServer(t, w, Config{})
		conn, stop := serveBufconn(t, s, options...)
		defer stop()
		f(t, w, s, discovery.NewAggregatedDiscoveryServiceClient(conn))
	})
}

type sotwStream = discovery.AggregatedDiscoveryService_StreamAggregatedResourcesClient

func openSotW(t testing.TB, client discovery.AggregatedDiscoveryServiceClient, url string) sotwStream {
	t.Helper()
	stream, err := client.StreamAggregatedResources(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: url}); err != nil {
		t.Fatal(err)
	}
	return stream
}

func recv(t testing.TB, stream sotwStream) *discovery.DiscoveryResponse {
	t.Helper()
	r, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func ack(t testing.TB, stream sotwStream, r *discovery.DiscoveryResponse) {
	t.Helper()
	if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: r.GetTypeUrl(), VersionInfo: r.GetVersionInfo(), ResponseNonce: r.GetNonce()}); err != nil {
		t.Fatal(err)
	}
}

// fill adds services of about 1 kB each with ten instances.
func fill(w *servertest.World, services int) {
	for i := range services {
		name := fmt.Sprintf("ns/s%d", i)
		w.Entry(name, fmt.Sprintf("s%d.example.org", i))
		for j := range 10 {
			w.Instance(name, fmt.Sprintf("ns/s%d-%d", i, j), fmt.Sprintf("10.%d.%d.%d", i/200, i%200, j+1), 0)
		}
	}
}

// built is the response as a server that copies would build it.
func built(t testing.TB, w *servertest.World, f encode.Form) (out []*anypb.Any) {
	t.Helper()
	for _, res := range w.Resources(entries, f) {
		a, err := anypb.New(res)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, a)
	}
	return out
}

// diff compares whole messages; resources of state-of-the-world responses are
// in no order, so sort them first.
func diff(want, got proto.Message) string {
	if proto.Equal(want, got) {
		return "" // cmp takes seconds for a MB
	}
	return cmp.Diff(want, got, protocmp.Transform())
}

func sorted(as []*anypb.Any) []*anypb.Any {
	slices.SortFunc(as, func(a, b *anypb.Any) int { return bytes.Compare(a.GetValue(), b.GetValue()) })
	return as
}

// What a client decodes of a spliced response is what it would decode of one
// that was built and marshalled, in both variants and for responses of several
// pages.
func TestSplicesDecode(t *testing.T) {
	for _, services := range []int{0, 1, 300} {
		t.Run(fmt.Sprint(services), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *servertest.World, _ *Server, client discovery.AggregatedDiscoveryServiceClient) {
				fill(w, services)
				got := recv(t, openSotW(t, client, entriesV1))
				want := &discovery.DiscoveryResponse{
					VersionInfo: got.GetVersionInfo(), TypeUrl: entriesV1, Nonce: "1",
					ControlPlane: &core.ControlPlane{Identifier: "isthmus"}, Resources: built(t, w, encode.Form{}),
				}
				sorted(want.Resources)
				sorted(got.Resources)
				if d := diff(want, got); d != "" {
					t.Errorf("state of the world (-built +spliced):\n%s", d)
				}

				stream, err := client.DeltaAggregatedResources(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: entriesV1, InitialResourceVersions: map[string]string{"ns/gone": "1"}}); err != nil {
					t.Fatal(err)
				}
				delta, err := stream.Recv()
				if err != nil {
					t.Fatal(err)
				}
				wantDelta := &discovery.DeltaDiscoveryResponse{
					SystemVersionInfo: delta.GetSystemVersionInfo(), TypeUrl: entriesV1, Nonce: "1", RemovedResources: []string{"ns/gone"},
					ControlPlane: &core.ControlPlane{Identifier: "isthmus"},
				}
				for _, a := range built(t, w, encode.Form{Shape: encode.Workload}) {
					var res mcp.Resource
					if err := a.UnmarshalTo(&res); err != nil {
						t.Fatal(err)
					}
					wantDelta.Resources = append(wantDelta.Resources, &discovery.Resource{
						Name: res.GetMetadata().GetName(), Version: res.GetMetadata().GetVersion(), Resource: a,
					})
				}
				if d := diff(wantDelta, delta); d != "" {
					t.Errorf("delta (-built +spliced):\n%s", d)
				}
			})
		})
	}
}

// The time after an ACK in which no next response is sent is twice what the
// sink took for it, but within a quarter and four times the interval of the
// size. What changes meanwhile is in that response; a change after it goes out
// at once.
func TestPacing(t *testing.T) {
	bubble(t, func(t *testing.T, w *servertest.World, _ *Server, client discovery.AggregatedDiscoveryServiceClient) {
		fill(w, 1000)
		stream := openSotW(t, client, entriesV1)
		newest := recv(t, stream)
		for i, tt := range []struct {
			took, waits float64 // intervals
		}{{0, 0.25}, {0.1, 0.25}, {0.5, 1}, {1, 2}, {1.5, 3}, {2, 4}, {50, 4}, {0, 0.25}} {
			interval := view.Interval(proto.Size(newest) - 100)
			if interval < 50*time.Millisecond {
				t.Fatalf("the response has %d bytes only", proto.Size(newest))
			}
			of := func(intervals float64) time.Duration { return time.Duration(intervals * float64(interval)) }
			w.Entry("ns/s0", "a.example.org") // while it is in flight
			<-time.After(of(tt.took))
			ack(t, stream, newest)
			begun := time.Now()
			synctest.Wait()
			last := fmt.Sprintf("b%d.example.org", i)
			w.Entry("ns/s0", last)
			newest = recv(t, stream)
			want := of(tt.waits)
			if waited := time.Since(begun); waited < want || waited > want+10*time.Millisecond {
				t.Errorf("after %v intervals of %v until the ACK the next response came after %v, want about %v", tt.took, interval, waited, want)
			}
			if !slices.ContainsFunc(newest.GetResources(), func(a *anypb.Any) bool { return bytes.Contains(a.GetValue(), []byte(last)) }) {
				t.Error("the next response lacks what changed last")
			}
		}
		ack(t, stream, newest)
		<-time.After(time.Hour)
		begun := time.Now()
		w.Entry("ns/s0", "c.example.org")
		recv(t, stream)
		if waited := time.Since(begun); waited != 0 {
			t.Errorf("the first change after a rest waited %v", waited)
		}
	})
}

// A sink that does not read delays nobody else, and its next response has
// everything when it reads again.
func TestSlowSink(t *testing.T) {
	bubble(t, func(t *testing.T, w *servertest.World, s *Server, client discovery.AggregatedDiscoveryServiceClient) {
		fill(w, 1000)
		slow, fast := openSotW(t, client, entriesV1), openSotW(t, client, entriesV1A3)
		synctest.Wait() // the slow one's response is stuck in its window
		r := recv(t, fast)
		for i := range 10 {
			ack(t, fast, r)
			<-time.After(time.Second)
			before := time.Now()
			w.Entry("ns/s0", fmt.Sprintf("x%d.example.org", i))
			r = recv(t, fast)
			if took := time.Since(before); took != 0 {
				t.Errorf("the fast sink waited %v", took)
			}
		}
		if st := s.Status(); len(st) != 2 {
			t.Errorf("Status has %d sinks", len(st))
		}
		r = recv(t, slow)
		ack(t, slow, r)
		r = recv(t, slow)
		if d := diff(&discovery.DiscoveryResponse{Resources: sorted(built(t, w, encode.Form{}))}, &discovery.DiscoveryResponse{Resources: sorted(r.GetResources())}); d != "" {
			t.Errorf("the slow sink (-store +sink):\n%s", d)
		}
	})
}

// A sink is in trouble at once if it refuses a response, and after a while if
// it does not acknowledge one, read or not.
func TestTroubled(t *testing.T) {
	bubble(t, func(t *testing.T, w *servertest.World, s *Server, client discovery.AggregatedDiscoveryServiceClient) {
		fill(w, 1000)
		troubled := func(want ...string) {
			t.Helper()
			synctest.Wait()
			var got []string
			for _, st := range s.Troubled(time.Now()) {
				got = append(got, st.Node)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("in trouble (-want +got):\n%s", d)
			}
		}
		sinks := map[string]sotwStream{}
		for _, node := range []string{"good", "refuses", "waits", "reads nothing"} {
			sink, err := client.StreamAggregatedResources(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := sink.Send(&discovery.DiscoveryRequest{TypeUrl: entriesV1, Node: &core.Node{Id: node}}); err != nil {
				t.Fatal(err)
			}
			sinks[node] = sink
			<-time.After(time.Millisecond) // so that they are in this order
		}
		ack(t, sinks["good"], recv(t, sinks["good"]))
		r := recv(t, sinks["refuses"])
		if err := sinks["refuses"].Send(&discovery.DiscoveryRequest{TypeUrl: entriesV1, ResponseNonce: r.GetNonce(), ErrorDetail: status.New(codes.InvalidArgument, "no").Proto()}); err != nil {
			t.Fatal(err)
		}
		waits := recv(t, sinks["waits"])
		troubled("refuses")
		<-time.After(stream.Patience)
		troubled("refuses", "waits", "reads nothing")
		ack(t, sinks["waits"], waits)
		ack(t, sinks["reads nothing"], recv(t, sinks["reads nothing"]))
		troubled("refuses")
		w.Entry("ns/s0", "other.example.org")
		for _, node := range []string{"good", "refuses", "waits", "reads nothing"} {
			ack(t, sinks[node], recv(t, sinks[node]))
		}
		troubled()
		if n := s.Len(); n != len(sinks) {
			t.Errorf("%d streams, want %d", n, len(sinks))
		}
	})
}

// A client that pings as often as gRPC lets it, with and without streams, keeps
// its connection for hours.
func TestKeepalive(t *testing.T) {
	bubble(t, func(t *testing.T, w *servertest.World, _ *Server, client discovery.AggregatedDiscoveryServiceClient) {
		stream := openSotW(t, client, entriesV1)
		r := recv(t, stream)
		<-time.After(3 * time.Hour)
		ack(t, stream, r)
		w.Entry("ns/a", "a.example.org")
		recv(t, stream)
		if err := stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Hour)
		recv(t, openSotW(t, client, entriesV1))
	}, grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, PermitWithoutStream: true}))
}

// A stream that asks for more types than there can be is ended, with the
// reason; nothing less ends it.
func TestTypesAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T, w *servertest.World, _ *Server, client discovery.AggregatedDiscoveryServiceClient) {
		stream, err := client.StreamAggregatedResources(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for i := range MaxTypes {
			if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: fmt.Sprintf("g/v1/K%d", i)}); err != nil {
				t.Fatal(err)
			}
			recv(t, stream)
		}
		if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: "g/v1/K"}); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "1000 types") {
			t.Errorf("error %v", err)
		}
	})
}

// A client that goes away without a word leaves nothing behind.
func TestSessionsEnd(t *testing.T) {
	bubble(t, func(t *testing.T, w *servertest.World, s *Server, client discovery.AggregatedDiscoveryServiceClient) {
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := client.StreamAggregatedResources(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: entriesV1}); err != nil {
			t.Fatal(err)
		}
		recv(t, stream)
		if n := len(s.Status()); n != 1 {
			t.Errorf("%d sinks, want 1", n)
		}
		cancel()
		synctest.Wait()
		if n := len(s.Status()); n != 0 {
			t.Errorf("%d sinks, want none", n)
		}
	})
}

// Metrics count what was exchanged, and their labels are bounded whatever type
// URL somebody asks for.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := servertest.New(t, state.Options{})
		reg := prometheus.NewRegistry()
		s, err := New(w.View, Config{}, nil, reg)
		if err != nil {
			t.Fatal(err)
		}
		conn, stop := serveBufconn(t, s)
		defer stop()
		stream := openSotW(t, discovery.NewAggregatedDiscoveryServiceClient(conn), "some/v1/Thing")
		ack(t, stream, recv(t, stream))
		if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: entriesV1}); err != nil {
			t.Fatal(err)
		}
		r := recv(t, stream)
		if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: entriesV1, ResponseNonce: r.GetNonce(), ErrorDetail: status.New(codes.InvalidArgument, "no").Proto()}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				var labels []string
				for _, l := range m.GetLabel() {
					labels = append(labels, l.GetValue())
				}
				got[f.GetName()+" "+strings.Join(labels, " ")] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
		want := map[string]float64{
			"isthmus_xds_responses_total other tools sotw":                                 1,
			"isthmus_xds_responses_total networking.istio.io/ServiceEntry tools sotw":      1,
			"isthmus_xds_acks_total other tools sotw":                                      1,
			"isthmus_xds_acks_total networking.istio.io/ServiceEntry tools sotw":           0,
			"isthmus_xds_nacks_total other tools sotw":                                     0,
			"isthmus_xds_nacks_total networking.istio.io/ServiceEntry tools sotw":          1,
			"isthmus_xds_push_duration_seconds tools sotw":                                 2,
			"isthmus_xds_sinks tools sotw":                                                 1,
			"isthmus_xds_oversize_total istio-1.9":                                         0,
			"isthmus_xds_oversize_total istio-1.10":                                        0,
			"isthmus_xds_response_bytes_total other tools sotw":                            0,
			"isthmus_xds_response_bytes_total networking.istio.io/ServiceEntry tools sotw": 0,
		}
		for k := range got {
			if strings.HasPrefix(k, "isthmus_xds_sinks ") && want[k] == 0 && got[k] == 0 {
				delete(got, k) // TestSinksBeforeTheFirst
			} else if strings.HasPrefix(k, "isthmus_xds_response_bytes_total") && got[k] > 0 {
				got[k] = 0 // some bytes
			} else if strings.Contains(k, "undecided") {
				delete(got, k)
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}

// What is larger than the sink receives is counted under its profile and logged
// once per stream, with the cure. A sink that receives any size is left alone.
func TestOversize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := servertest.New(t, state.Options{})
		fill(w, 5500)
		reg := prometheus.NewRegistry()
		var logged bytes.Buffer // written while the streams run, read when nothing moves any more
		s, err := New(w.View, Config{}, slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelWarn})), reg)
		if err != nil {
			t.Fatal(err)
		}
		conn, stop := serveBufconn(t, s)
		defer stop()
		client := discovery.NewAggregatedDiscoveryServiceClient(conn)
		for _, tt := range []struct {
			profile  string
			warnings int
		}{{"istio-1.9", 1}, {"istio-1.10", 1}, {"istio-1.12", 0}, {"istio-1.30", 0}, {"tools", 0}} {
			logged.Reset()
			stream, err := client.StreamAggregatedResources(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, url := range asked[tt.profile] {
				if err := stream.Send(&discovery.DiscoveryRequest{TypeUrl: url}); err != nil {
					t.Fatal(err)
				}
			}
			for got := 0; got < 2; { // responses with all services
				r := recv(t, stream)
				if len(r.GetResources()) == 0 {
					continue
				}
				got++
				if proto.Size(r) < 4<<20 {
					t.Fatalf("the response has %d bytes only", proto.Size(r))
				}
				w.Entry("ns/s0", fmt.Sprintf("%s-%d.example.org", strings.ReplaceAll(tt.profile, ".", "-"), got))
				ack(t, stream, r)
			}
			if err := stream.CloseSend(); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			text := logged.String()
			if n := strings.Count(text, "response is larger than this istiod accepts"); n != tt.warnings {
				t.Errorf("%s: %d warnings, want %d:\n%s", tt.profile, n, tt.warnings, text)
			}
			if tt.warnings > 0 && (!strings.Contains(text, "profile="+tt.profile+" ") || !strings.Contains(text, "limit=4194304") || !strings.Contains(text, "several config sources")) {
				t.Errorf("%s: the warning lacks profile, limit or cure:\n%s", tt.profile, text)
			}
		}
		want := map[string]float64{"istio-1.9": 2, "istio-1.10": 2}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			if f.GetName() == "isthmus_xds_oversize_total" {
				for _, m := range f.GetMetric() {
					got[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
				}
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("isthmus_xds_oversize_total (-want +got):\n%s", d)
		}
	})
}

// A profile that does not exist is refused, and the error names those that do.
func TestUnknownProfile(t *testing.T) {
	_, err := New(servertest.New(t, state.Options{}).View, Config{Profile: "istio-2"}, nil, nil)
	if err == nil || !strings.Contains(err.Error(), `profile "istio-2"`) || !strings.Contains(err.Error(), "istio-1.30") {
		t.Errorf("error %v", err)
	}
}

// An alert on the number of sinks can fire before the first one comes: every
// series that it adds up is there from the start.
func TestSinksBeforeTheFirst(t *testing.T) {
	m := newMetrics(nil)
	series := make(chan prometheus.Metric, 100)
	m.Sinks.Collect(series)
	if want := 2 * len(profiles); len(series) != want {
		t.Errorf("%d series of isthmus_xds_sinks, want %d", len(series), want)
	}
}
