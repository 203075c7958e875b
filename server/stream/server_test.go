package stream_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/wire"
)

const entries = collection.ServiceEntry

// sink is both ends of a stream in a bubble, and its session: that of a
// protocol whose requests are functions. The test may read and write its fields
// when all goroutines are blocked.
type sink struct {
	t        *testing.T
	ctx      context.Context
	cancel   context.CancelFunc
	requests chan any     // a request, an error of the stream, or a string to panic with
	taken    func() error // the newest request
	sent     chan *stream.Message
	ended    chan struct{} // closed when Serve has returned
	err      error         // of Serve
	closed   []error       // what Close was told

	name      string
	view      *view.View
	sub       stream.Subscription
	wake      stream.Waker
	interval  time.Duration
	connected time.Time
	limit     int
	retained  int
	selective bool
	fails     error        // of Next and SendMsg
	during    func()       // runs once, when Next has found nothing to send
	calls     int          // of Next
	large     bool         // responses, which are of this sink only
	account   *account     // nil for none
	extra     atomic.Int32 // messages to send that only the waker announces

	have     []*mcp.Resource
	nonce    string // of the response in flight
	refused  bool   // the newest response
	messages int    // that were read
	extras   int    // of them
}

// open starts a stream that sends all ServiceEntries.
func open(t *testing.T, w *servertest.World, s *stream.Server, name string, change ...func(*sink)) *sink {
	t.Helper()
	k := &sink{
		t: t, name: name, view: w.View, wake: stream.NewWaker(), connected: time.Now(),
		requests: make(chan any), sent: make(chan *stream.Message), ended: make(chan struct{}),
	}
	k.sub = stream.Subscription{Name: "type", Subscription: view.NewSubscription(w.View, view.Options{Collection: entries, Framing: view.XDS, Wake: k.wake.Wake})}
	stream.NewMetrics(nil, "test").Count(&k.sub, entries)
	k.ctx, k.cancel = context.WithCancel(t.Context())
	for _, f := range change {
		f(k)
	}
	go func() {
		defer close(k.ended) // ends with the stream
		k.err = s.Serve(k, func(e *stream.Entry) stream.Session { e.Address = k.name; return k })
	}()
	synctest.Wait()
	return k
}

// enter registers the stream.
func (k *sink) enter(s *stream.Server) *stream.Entry {
	k.t.Helper()
	e, err := s.Enter(k.ctx, nil)
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(e.Leave)
	k.ctx = e.Context()
	return e
}

// request is what a sink sends: a message of a size, and what it does.
type request struct {
	size int
	do   func() error
}

func (k *sink) RecvMsg(m any) error {
	select {
	case r := <-k.requests:
		switch r := r.(type) {
		case string:
			panic(r)
		case error:
			return r
		case request:
			k.taken = r.do
			return wire.NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(make([]byte, r.size))}, m)
		}
		panic("BUG")
	case <-k.ctx.Done():
		return k.ctx.Err()
	}
}

func (k *sink) Context() context.Context { return k.ctx }

func (k *sink) SendMsg(m any) error {
	if k.fails != nil {
		return k.fails
	}
	select {
	case k.sent <- m.(*stream.Message):
		return nil
	case <-k.ctx.Done():
		return k.ctx.Err()
	}
}

func (k *sink) Take(*wire.Request, time.Time) error { return k.taken() }
func (k *sink) Retained() int                       { return k.retained }
func (k *sink) Selective() bool                     { return k.selective }
func (k *sink) Troubled() time.Time                 { return k.sub.Troubled(k.limit) }
func (k *sink) Close(_ time.Time, err error)        { k.closed = append(k.closed, err); k.sub.Close() }

func (k *sink) Room() (size int, shared bool) {
	if size, shared = k.sub.Room(); size > 0 && k.large {
		return stream.LargeResponse, false
	}
	return size, shared
}

func (k *sink) SetView(v *view.View) {
	k.view = v
	k.sub.SetView(v)
}

func (k *sink) Status(*stream.Status) {}
func (k *sink) Waker() stream.Waker   { return k.wake }

func (k *sink) Next(now time.Time) (*stream.Message, time.Duration, error) {
	k.calls++
	if k.account != nil && k.large && k.sub.State() != view.Sent && !k.account.working {
		k.t.Error("a large response is made out of turn")
	}
	if k.extra.Load() > 0 {
		k.extra.Add(-1)
		return &stream.Message{Header: []byte("extra")}, 0, nil
	}
	if due := k.sub.Due(now); !due.IsZero() && k.sub.State() != view.Sent {
		return nil, due.Sub(now), nil
	}
	revision := uint64(k.view.Revision())
	r, ok, err := k.sub.Next()
	if ok {
		interval := func(int) time.Duration { return k.interval }
		return k.sub.Respond(&r, nil, interval, now, slog.New(slog.DiscardHandler)), 0, nil
	}
	k.sub.Idle(revision)
	if f := k.during; f != nil {
		k.during = nil
		f()
	}
	return nil, 0, err
}

// do has the session handle a request.
func (k *sink) do(f func() error) {
	k.requests <- request{1, f}
	synctest.Wait()
}

// read reads what the stream has sent, and returns how many messages that are.
func (k *sink) read() (n int) {
	k.t.Helper()
	synctest.Wait()
	for {
		select {
		case m := <-k.sent:
			n++
			k.messages++
			synctest.Wait()
			if len(m.Header) > 0 {
				k.extras++
				continue
			}
			if k.nonce != "" {
				k.t.Fatal("a second response is sent while one is in flight")
			}
			k.nonce, k.refused = fmt.Sprint(k.sub.Status().Sent), false
			var r discovery.DiscoveryResponse
			if err := proto.Unmarshal(bytes.Join(m.Segments, nil), &r); err != nil {
				k.t.Fatal(err)
			}
			k.have = nil
			for _, a := range r.GetResources() {
				res := new(mcp.Resource)
				if err := a.UnmarshalTo(res); err != nil {
					k.t.Fatal(err)
				}
				k.have = append(k.have, res)
			}
		default:
			return n
		}
	}
}

// answer acknowledges the response in flight, if there is one, or refuses it.
func (k *sink) answer(r *stream.Refusal) {
	k.t.Helper()
	if k.nonce == "" {
		return
	}
	k.do(func() error {
		if !k.sub.Answer(k.nonce, r, false, time.Now(), slog.New(slog.DiscardHandler)) {
			k.t.Errorf("the answer to response %s is not one to the response in flight", k.nonce)
		}
		k.nonce, k.refused = "", r != nil
		return nil
	})
}

// names returns what the sink has.
func (k *sink) names() string {
	var names []string
	for _, r := range k.have {
		names = append(names, r.GetMetadata().GetName())
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

func world(t *testing.T) (*servertest.World, *stream.Server) {
	w := servertest.New(t, state.Options{})
	return w, stream.NewServer(w.View)
}

// Whatever happens while a stream waits, or in the middle of a turn, is sent as
// soon as the sink may get it, without any other event: when all is quiet, a
// sink that has answered has everything.
func TestServeModel(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, 0))
				w, s := world(t)
				k := open(t, w, s, "a", func(k *sink) { k.interval = time.Duration(seed%2) * time.Second })
				announced := 0
				steps := []func(){
					func() { w.Entry(fmt.Sprintf("ns/s%d", r.IntN(5)), fmt.Sprintf("h%d.example.org", r.IntN(1e9))) },
					func() { w.Remove(fmt.Sprintf("ns/s%d", r.IntN(5))) },
					func() { announced++; k.extra.Add(1); k.wake.Wake() },
				}
				for range 80 {
					step := steps[r.IntN(len(steps))]
					switch r.IntN(4) {
					case 0:
						step()
					case 1:
						k.during = step
						k.wake.Wake()
					case 2:
						k.answer(nil)
					case 3:
						k.answer(&stream.Refusal{Reason: "no"})
					}
					k.read()
					if k.nonce != "" || k.refused {
						continue
					}
					time.Sleep(4 * k.interval) // the longest rest of a sink
					if k.read(); k.nonce != "" {
						continue
					}
					want := w.Resources(entries, encode.Form{})
					byName := func(a, b *mcp.Resource) int { return cmp.Compare(a.GetMetadata().GetName(), b.GetMetadata().GetName()) }
					slices.SortFunc(k.have, byName)
					slices.SortFunc(want, byName)
					if d := gocmp.Diff(want, k.have, protocmp.Transform()); d != "" {
						t.Fatalf("all is quiet (-state +sink):\n%s", d)
					}
					if lag := k.sub.Lag(uint64(w.View.Revision())); lag != 0 {
						t.Fatalf("all is quiet, the sink lags %d revisions behind", lag)
					}
				}
				if k.extras != announced {
					t.Errorf("%d messages that the waker announced were sent, want %d", k.extras, announced)
				}
				k.cancel()
				<-k.ended
			})
		})
	}
}

// A stream ends with the reason for it, which the session is told once and the
// log has at its level. Nothing of it stays.
func TestServeEnds(t *testing.T) {
	odd := errors.New("odd")
	asFault := func(code codes.Code) func(error) bool {
		return func(err error) bool {
			f, ok := errors.AsType[*stream.Fault](err)
			return ok && f.Code == code
		}
	}
	for _, tt := range []struct {
		name string
		end  func(s *stream.Server, w *servertest.World, k *sink)
		is   func(error) bool
		log  string
	}{
		{"the sink closes it", func(_ *stream.Server, _ *servertest.World, k *sink) { k.requests <- io.EOF }, func(err error) bool { return err == nil }, "INFO"},
		{"it breaks", func(_ *stream.Server, _ *servertest.World, k *sink) { k.requests <- odd }, func(err error) bool { return errors.Is(err, odd) }, "WARN"},
		{"the sink goes", func(_ *stream.Server, _ *servertest.World, k *sink) { k.cancel() }, func(err error) bool { return status.Code(err) == codes.Canceled }, "INFO"},
		{"a request is refused", func(_ *stream.Server, _ *servertest.World, k *sink) {
			k.requests <- request{1, func() error { return odd }}
		}, asFault(codes.ResourceExhausted), "WARN"},
		{"a request has a fault of its own", func(_ *stream.Server, _ *servertest.World, k *sink) {
			k.requests <- request{1, func() error { return &stream.Fault{Code: codes.InvalidArgument, Err: odd} }}
		}, asFault(codes.InvalidArgument), "WARN"},
		{"a request meets a defect", func(_ *stream.Server, _ *servertest.World, k *sink) {
			k.requests <- request{1, func() error { panic("odd") }}
		}, asFault(codes.ResourceExhausted), "ERROR"},
		{"reading meets a defect", func(_ *stream.Server, _ *servertest.World, k *sink) { k.requests <- "odd" }, func(err error) bool { return err != nil }, "ERROR"},
		{"sending fails", func(_ *stream.Server, w *servertest.World, k *sink) {
			k.fails = odd
			w.Entry("ns/b", "b.example.org")
		}, func(err error) bool { return errors.Is(err, odd) }, "WARN"},
		{"too much is kept of a request", func(_ *stream.Server, _ *servertest.World, k *sink) {
			k.requests <- request{1, func() error { k.retained = 11; return nil }}
		}, asFault(codes.ResourceExhausted), "WARN"},
		{"too much is kept for a response", func(_ *stream.Server, w *servertest.World, k *sink) {
			k.retained = 11
			w.Entry("ns/b", "b.example.org")
		}, asFault(codes.ResourceExhausted), "WARN"},
		{"the bridge goes", func(s *stream.Server, _ *servertest.World, _ *sink) { s.Drain(0) }, func(err error) bool { return errors.Is(err, stream.ErrShutdown) }, "INFO"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, s := world(t)
				w.Entry("ns/a", "a.example.org")
				k := open(t, w, s, "a", func(k *sink) { k.enter(s).SetAccount(&account{limit: 10}) })
				if k.read() != 1 || s.Len() != 1 || len(s.Status()) != 1 || len(s.Troubled(time.Now().Add(time.Hour))) != 1 {
					t.Fatalf("one stream waits for an answer: %d messages, %d streams, of them in trouble %v", k.messages, s.Len(), s.Troubled(time.Now().Add(time.Hour)))
				}
				k.answer(&stream.Refusal{})
				tt.end(s, w, k)
				synctest.Wait()
				select {
				case <-k.ended:
				default:
					t.Fatal("the stream goes on")
				}
				var log bytes.Buffer
				stream.LogEnd(slog.New(slog.NewTextHandler(&log, nil)), k.err)
				if !tt.is(k.err) || !strings.Contains(log.String(), "level="+tt.log+" ") {
					t.Errorf("it ends with %v, logged as %s", k.err, &log)
				}
				if len(k.closed) != 1 || k.closed[0] != k.err { //nolint:errorlint // the very same
					t.Errorf("the session is told %v, want %v once", k.closed, k.err)
				}
				if s.Len() != 0 || len(s.Status()) != 0 || len(s.Troubled(time.Now().Add(time.Hour))) != 0 {
					t.Errorf("%d streams stay, of them in trouble %v", s.Len(), s.Troubled(time.Now().Add(time.Hour)))
				}
				k.cancel()
			})
		})
	}
}

// Streams end one after the other, evenly over the given time. Until then they
// get what changes; new ones are refused.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, s := world(t)
		var all []*sink
		for i := range 4 {
			all = append(all, open(t, w, s, fmt.Sprint(i)))
			all[i].read()
			all[i].answer(nil)
		}
		s.Drain(4 * time.Second)
		s.Drain(0) // no effect
		<-s.Down()
		late := open(t, w, s, "late")
		if <-late.ended; !errors.Is(late.err, stream.ErrShutdown) || late.calls > 0 || len(late.closed) != 0 {
			t.Errorf("a new stream ends with %v after %d turns", late.err, late.calls)
		}
		for second := range 5 {
			synctest.Wait()
			if s.Len() != 4-second {
				t.Errorf("after %d s there are %d streams", second, s.Len())
			}
			w.Entry("ns/a", fmt.Sprintf("a%d.example.org", second))
			synctest.Wait()
			for _, k := range all {
				select {
				case <-k.ended:
				default:
					if k.read() != 1 {
						t.Errorf("after %d s a stream does not get what changes", second)
					}
					k.answer(nil)
				}
			}
			time.Sleep(time.Second)
		}
		for _, k := range append(all, late) {
			k.cancel()
		}
	})
}

// A stream sees what its grant allows, from its first response on and as soon
// as the grant changes.
func TestGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, s := world(t)
		w.Entry("ns/a", "a.example.org")
		w.Entry("ns/b", "b.example.org")
		host, changed := "a.*", make(chan struct{})
		k := open(t, w, s, "a", func(k *sink) {
			k.enter(s).SetAdmission(&admission{views: func() ([]view.Filter, <-chan struct{}) { return []view.Filter{{Hosts: []string{host}}}, changed }})
		})
		for _, next := range []string{"ns/a", "ns/b", ""} {
			if k.read(); k.names() != next {
				t.Fatalf("with the grant %s the sink has %q, want %q", host, k.names(), next)
			}
			k.answer(nil)
			old := changed
			changed = make(chan struct{})
			host = map[string]string{"a.*": "b.*", "b.*": "c.*", "c.*": "c.*"}[host]
			close(old)
		}
		k.read()
		k.answer(nil)
		w.Entry("ns/c", "c.example.org") // the view that it has now wakes it
		if k.read(); k.names() != "ns/c" {
			t.Errorf("after a change the sink has %q", k.names())
		}
		k.cancel()
	})
}

// account is an [stream.Account] of the test.
type account struct {
	limit    int
	turns    int
	reserved bool
	full     chan struct{} // closed when there is room; nil if there is
	working  bool
	works    []bool        // whether each turn was light
	busy     chan struct{} // closed when it is the stream's turn; nil if it is
}

func (a *account) Work(_ context.Context, light bool) (end func(), err error) {
	a.working = true
	a.works = append(a.works, light)
	if a.busy != nil {
		<-a.busy
	}
	return func() { a.working = false }, nil
}

func (a *account) Await(context.Context)         {}
func (a *account) Received(context.Context, int) {}
func (a *account) Turn(context.Context)          { a.turns++ }
func (a *account) Done()                         { a.reserved = false }
func (a *account) Send(*stream.Message)          {}

func (a *account) Retain(n int) error {
	if n > a.limit {
		return errors.New("too much")
	}
	return nil
}

func (a *account) Room(int, bool) <-chan struct{} {
	if a.full != nil {
		return a.full
	}
	a.reserved = true
	return nil
}

// What a stream may have of the bridge bounds it: it sends nothing without
// room, gives back room that it does not need, and takes a turn only for what
// it could send.
func TestAccount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, s := world(t)
		a := &account{limit: 10}
		k := open(t, w, s, "a", func(k *sink) {
			k.account = a
			k.enter(s).SetAccount(a)
		})
		expect := func(when string, messages, turns int) {
			t.Helper()
			if n := k.read(); n != messages || a.turns != turns {
				t.Errorf("%s: %d messages, %d turns; want %d, %d", when, n, a.turns, messages, turns)
			}
			a.turns = 0
		}
		expect("at the start", 1, 0)
		k.answer(nil)
		if a.reserved {
			t.Error("room is reserved although there is nothing to send")
		}
		a.full = make(chan struct{})
		w.Entry("ns/a", "a.example.org")
		expect("without room", 0, 1)
		w.Entry("ns/b", "b.example.org")
		expect("a change without room", 0, 0)
		room := a.full
		a.full = nil
		close(room)
		if expect("with room", 1, 0); k.names() != "ns/a ns/b" {
			t.Errorf("the sink has %q", k.names())
		}
		w.Entry("ns/c", "c.example.org")
		expect("a change while a response is in flight", 0, 0)
		k.answer(nil)
		expect("after the answer", 1, 0)
		k.answer(nil)
		k.do(func() error { k.selective = true; return nil })
		calls := k.calls
		w.Entry("ns/d", "d.example.org")
		if expect("a change of others", 0, 0); k.calls != calls {
			t.Error("it is looked at")
		}
		k.wake.Wake()
		expect("woken", 1, 0)
		k.answer(nil)
		k.cancel()
	})
}

// Requests, responses that are large and of one sink, and the end of a stream
// that kept much take turns of their weight.
func TestWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, s := world(t)
		a := &account{limit: 1e6}
		k := open(t, w, s, "a", func(k *sink) {
			k.account = a
			k.enter(s).SetAccount(a)
		})
		k.read()
		k.answer(nil)
		a.works = nil
		for _, size := range []int{1 << 10, 1<<10 + 1} {
			k.requests <- request{size, func() error {
				if !a.working {
					t.Error("a request is handled out of turn")
				}
				return nil
			}}
			synctest.Wait()
		}
		a.busy = make(chan struct{})
		k.do(func() error { return nil })
		select {
		case k.requests <- request{1, nil}:
			t.Error("a second request is received while one waits for its turn")
		default:
		}
		close(a.busy)
		synctest.Wait()
		a.busy = nil
		a.works = a.works[:2]
		k.do(func() error { k.large, k.retained = true, stream.LargeResponse+1; return nil })
		w.Entry("ns/a", "a.example.org")
		if k.read() != 1 || a.working {
			t.Error("there is no large response, or its turn goes on")
		}
		k.requests <- io.EOF
		<-k.ended
		want := []bool{true, false, true, false, false, false} // of three requests, a turn for nothing, a response, the end
		if d := gocmp.Diff(want, a.works); d != "" || a.working {
			t.Errorf("light turns (-want +got):\n%s", d)
		}
		k.cancel()
	})
}

// Sinks in trouble are those that refuse, are sent too much, or do not answer
// in time, whether they read or not; the oldest stream is first.
func TestTroubled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, s := world(t)
		w.Entry("ns/a", "a.example.org")
		var names []string
		all := map[string]*sink{}
		for _, name := range []string{"z-silent", "y-deaf", "x-refuses", "w-large", "v-good"} {
			names = append(names, name)
			all[name] = open(t, w, s, name, func(k *sink) {
				if name == "w-large" {
					k.limit = 10
				}
			})
			time.Sleep(time.Nanosecond)
		}
		for name, k := range all {
			if name != "y-deaf" {
				k.read()
			}
		}
		all["v-good"].answer(nil)
		all["x-refuses"].answer(&stream.Refusal{Reason: "no"})
		began := all["y-deaf"].connected
		expect := func(at time.Time, want ...string) {
			t.Helper()
			var got []string
			for _, st := range s.Troubled(at) {
				got = append(got, st.Address)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%v after the start: %q, want %q", at.Sub(began), got, want)
			}
		}
		expect(time.Now(), "x-refuses", "w-large")
		expect(began.Add(stream.Patience-1), "z-silent", "x-refuses", "w-large")
		expect(began.Add(stream.Patience), "z-silent", "y-deaf", "x-refuses", "w-large")
		all["w-large"].answer(nil)
		all["z-silent"].answer(nil)
		expect(began.Add(time.Hour), "y-deaf", "x-refuses")
		var got []string
		for _, st := range s.Status() {
			got = append(got, st.Address)
		}
		if !slices.Equal(got, names) {
			t.Errorf("the streams are %q, want the oldest first", got)
		}
		for _, k := range all {
			k.cancel()
		}
	})
}
