package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// adapterFunc is an Adapter.
type adapterFunc func(ctx context.Context, c Catalog) error

func (f adapterFunc) Run(ctx context.Context, c Catalog) error { return f(ctx, c) }

// testStream is the plugin's end of a stream. Send blocks until the test takes
// the message.
type testStream struct {
	grpc.ServerStream
	ctx  context.Context
	sent chan *pluginv1.WatchResponse
}

func (s *testStream) Context() context.Context { return s.ctx }

func (s *testStream) Send(m *pluginv1.WatchResponse) error {
	select {
	case s.sent <- m:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

func newTestStream(ctx context.Context) *testStream {
	return &testStream{ctx: ctx, sent: make(chan *pluginv1.WatchResponse)}
}

// testServer returns a configured server; its adapter is run by the test.
func testServer(t *testing.T, run adapterFunc) *server {
	t.Helper()
	o := options{collections: []string{collection.ServiceEntry, collection.WorkloadEntry}}
	s, err := newServer("test", o, func(struct{}, Env) (Adapter, error) { return run, nil })
	if err != nil {
		t.Fatal(err)
	}
	s.log = slog.New(slog.DiscardHandler)
	resp, err := s.Configure(t.Context(), &pluginv1.ConfigureRequest{Registry: "r"})
	if err != nil || len(resp.GetViolations()) != 0 {
		t.Fatal(resp, err)
	}
	return s
}

// A stream that has nothing to say gives a sign of life every two seconds, and
// no more often.
func TestWatchHeartbeat(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := testServer(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		stream := newTestStream(ctx)
		done := make(chan error, 1)
		go func() { done <- s.Watch(nil, stream) }()
		<-stream.sent // the state of the registry
		for range 10 {
			began := time.Now()
			m := <-stream.sent
			if d := time.Since(began); d != wire.Heartbeat || proto.Size(m) != 0 {
				t.Errorf("after %v came %v", d, m)
			}
		}
		cancel()
		if err := <-done; status.Code(err) != codes.Canceled {
			t.Errorf("the stream ended with %v", err)
		}
	})
}

// While a host is slow, changes pile up as state: however many there are, the
// next message is the last state once.
func TestWatchSlowHost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := testServer(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		stream := newTestStream(ctx)
		done := make(chan error, 1)
		go func() { done <- s.Watch(nil, stream) }()
		<-stream.sent
		in := instances("1")
		in[0].Ports = append(in[0].Ports, ports(8080)...)
		s.catalog.Set(service1("web"), in)
		synctest.Wait() // the message is made, and not taken
		for i := range 1000 {
			in[0].Weight = new(float64(i + 2))
			s.catalog.Set(service1("web"), in)
		}
		first, second := <-stream.sent, <-stream.sent
		if len(first.GetUpserts()) != 2 || len(second.GetUpserts()) != 1 {
			t.Errorf("%d and %d upserts, want 2 and 1", len(first.GetUpserts()), len(second.GetUpserts()))
		}
		cancel()
		<-done
	})
}

// A second stream takes over from the first.
func TestWatchSuperseded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := testServer(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		one, two := newTestStream(ctx), newTestStream(ctx)
		done := make(chan error, 1)
		go func() { done <- s.Watch(nil, one) }()
		<-one.sent
		done2 := make(chan error, 1)
		go func() { done2 <- s.Watch(nil, two) }()
		<-two.sent
		if err := <-done; status.Code(err) != codes.Aborted {
			t.Errorf("the first stream ended with %v", err)
		}
		cancel()
		<-done2
	})
}

// What an adapter left when it ended is sent before the reason.
func TestWatchAdapterEnds(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		run  adapterFunc
		want string
	}{
		"error": {func(_ context.Context, c Catalog) error { c.Problem("x", "y"); return errors.New("broken") }, "the adapter ended: broken"},
		"nil":   {func(_ context.Context, c Catalog) error { c.Problem("x", "y"); return nil }, "without an error"},
		"panic": {func(_ context.Context, c Catalog) error { c.Problem("x", "y"); panic("boom") }, "the adapter panicked: boom"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := testServer(t, tt.run)
				stream := newTestStream(t.Context())
				done := make(chan error, 1)
				go func() { done <- s.Watch(nil, stream) }()
				<-s.watched
				s.end(runAdapter(t.Context(), s))
				problems := 0
				for {
					select {
					case m := <-stream.sent:
						problems += len(m.GetProblems())
						continue
					case err := <-done:
						if status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), tt.want) {
							t.Errorf("the stream ended with %v", err)
						}
					}
					break
				}
				if problems != 1 {
					t.Errorf("%d problems were sent, want 1", problems)
				}
			})
		})
	}
}

// What can be wrong with a plugin's own description is found before it serves.
func TestNewServerErrors(t *testing.T) {
	t.Parallel()
	build := func(name string, collections ...string) error {
		_, err := newServer(name, options{collections: collections}, func(struct{}, Env) (Adapter, error) { return nil, nil })
		return err
	}
	if err := build("Bad_Name", collection.ServiceEntry); err == nil {
		t.Error("a bad name is accepted")
	}
	if err := build("good", "core/Secret"); err == nil {
		t.Error("an unknown collection is accepted")
	}
	if err := build("good", collection.ServiceEntry); err != nil {
		t.Error(err)
	}
}

// Log records come out as hclog writes them, whatever is in them.
func TestLogHandler(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := newLogger(&out).With(slog.String("a", "b")).WithGroup("g").With(slog.Int("n", 1))
	log.Debug("hidden")
	log.Warn("hello", slog.Any("err", errors.New("no")), slog.Duration("d", time.Second), slog.Any("f", func() {}), slog.Any("token", Secret("hush")),
		slog.Group("h", slog.Bool("yes", true)), slog.String("@level", "x"))
	var got map[string]any
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	delete(got, "@timestamp")
	f, _ := got["g.f"].(string)
	delete(got, "g.f")
	want := map[string]any{
		"@level": "warn", "@message": "hello", "a": "b", "g.n": 1.0, "g.err": "no", "g.d": "1s", "g.token": "<secret>", "g.h.yes": true, "g.level": "x",
	}
	if fmt.Sprint(got) != fmt.Sprint(want) || f == "" || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("got %v, want %v", got, want)
	}
}
