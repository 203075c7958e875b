package stream_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

var start = time.Unix(1e9, 0)

// pusher is a subscription and what it told.
type pusher struct {
	*stream.Subscription
	t     *testing.T
	w     *servertest.World
	acked []string
	bytes int // of all messages
	log   bytes.Buffer
}

func newPusher(t *testing.T, framing view.Framing, m *stream.Metrics) *pusher {
	p := &pusher{t: t, w: servertest.New(t, state.Options{})}
	p.Subscription = &stream.Subscription{Name: "type", Subscription: view.NewSubscription(p.w.View, view.Options{Collection: entries, Framing: framing})}
	m.Count(p.Subscription, entries, "test")
	p.OnAck("kind", func(kind string, after, upTo uint64, sent, acked time.Time) {
		p.acked = append(p.acked, fmt.Sprintf("%s %d-%d %v %v", kind, after, upTo, sent.Sub(start), acked.Sub(start)))
	})
	p.w.Entry("ns/a", "a.example.org")
	return p
}

func (p *pusher) push(interval, at time.Duration) *stream.Message {
	p.t.Helper()
	r, ok, err := p.Next()
	if !ok || err != nil {
		p.t.Fatalf("no response: %v", err)
	}
	m := p.Respond(&r, []byte("header"), func(int) time.Duration { return interval }, start.Add(at), p.logger())
	p.bytes += m.Size
	return m
}

func (p *pusher) answer(nonce string, r *stream.Refusal, at time.Duration) bool {
	return p.Answer(nonce, r, false, start.Add(at), p.logger())
}

func (p *pusher) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(&p.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func metrics(reg prometheus.Registerer) *stream.Metrics {
	return stream.NewMetrics(reg, "test", "profile")
}

// A sink rests after a full response for twice the time that it took to answer,
// within bounds of the interval of its size; after changes it does not.
func TestRest(t *testing.T) {
	for _, tt := range []struct {
		framing        view.Framing
		interval, took time.Duration
		want           time.Duration // since the answer; 0 for no rest
		incremental    bool          // the answer permits changes
	}{
		{view.XDS, time.Second, 0, 250 * time.Millisecond, false},
		{view.XDS, time.Second, 125 * time.Millisecond, 250 * time.Millisecond, false},
		{view.XDS, time.Second, 300 * time.Millisecond, 600 * time.Millisecond, false},
		{view.XDS, time.Second, time.Minute, 4 * time.Second, false},
		{view.XDS, 0, time.Minute, 0, false},
		{view.MCP, time.Second, 300 * time.Millisecond, 600 * time.Millisecond, false},
		{framing: view.MCP, interval: time.Second, took: 300 * time.Millisecond, incremental: true},
		{framing: view.DeltaXDS, interval: time.Second, took: 300 * time.Millisecond},
	} {
		for _, refusal := range []*stream.Refusal{nil, {Reason: "no"}} {
			if refusal != nil && tt.incremental {
				continue // a NACK permits nothing
			}
			p := newPusher(t, tt.framing, metrics(nil))
			if !p.Due(start).IsZero() {
				t.Error("the first response waits")
			}
			p.push(tt.interval, time.Second)
			p.Answer("1", refusal, tt.incremental, start.Add(time.Second+tt.took), p.logger())
			var want time.Time
			if tt.want > 0 {
				want = start.Add(time.Second + tt.took + tt.want)
				if got := p.Due(want); !got.IsZero() {
					t.Errorf("%+v: when the rest is over it is due at %v", tt, got)
				}
			}
			if got := p.Due(start.Add(time.Second + tt.took)); !got.Equal(want) {
				t.Errorf("%+v: due %v, want %v", tt, got, want)
			}
		}
	}
}

// Only the answer to the response in flight counts, once. Metrics, times, the
// lag and [stream.AckFunc] follow it.
func TestAnswer(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	p := newPusher(t, view.XDS, metrics(reg))
	revision := func() uint64 { return uint64(p.w.View.Revision()) }
	lag := func(want uint64) {
		t.Helper()
		if got := p.Lag(revision()); got != want {
			t.Errorf("lag %d, want %d", got, want)
		}
	}
	change := func(n int) {
		for i := range n {
			p.w.Entry("ns/a", fmt.Sprintf("a%d-%d.example.org", revision(), i))
		}
	}
	before := revision()
	lag(before)
	m := p.push(0, time.Second)
	if n := len(m.Header) + len(bytes.Join(m.Segments, nil)); m.Size != n || p.Size() != n || !m.Shared || p.Changes() || p.Oversize(n) || !p.Oversize(n-1) || p.Oversize(0) {
		t.Errorf("a message of %d bytes: %+v, Size is %d", n, m, p.Size())
	}
	for _, nonce := range []string{"", "0", "2"} {
		if p.answer(nonce, nil, 2*time.Second) || p.answer(nonce, &stream.Refusal{}, 2*time.Second) {
			t.Errorf("nonce %q answers response 1", nonce)
		}
	}
	lag(before)
	if !p.answer("1", nil, 3*time.Second) || p.answer("1", nil, 3*time.Second) {
		t.Error("an ACK counts once")
	}
	if sent, acked := p.Times(); !sent.Equal(start.Add(time.Second)) || !acked.Equal(start.Add(3*time.Second)) {
		t.Errorf("sent %v, acknowledged %v", sent, acked)
	}
	lag(0)

	first := revision()
	change(2)
	second := revision()
	lag(second - first)
	p.push(0, 4*time.Second)
	p.answer("2", nil, 6*time.Second)
	p.w.Publish("ns/other", &networking.Gateway{}) // of another collection
	lag(revision() - second)
	p.Idle(revision())
	lag(0)
	idle := revision()
	change(1)
	p.push(0, 7*time.Second)
	p.Idle(revision()) // in flight: not current
	lag(revision() - idle)
	p.answer("3", &stream.Refusal{Reason: strings.Repeat("x", 10_000)}, 8*time.Second)
	p.Idle(revision()) // refused: not current
	lag(revision() - idle)
	change(1)
	p.push(0, 9*time.Second)
	p.answer("4", nil, 10*time.Second) // with what was refused
	lag(0)
	last := revision()
	if d := cmp.Diff([]string{fmt.Sprintf("kind %d-%d 4s 6s", first, second), fmt.Sprintf("kind %d-%d 9s 10s", idle, last)}, p.acked); d != "" {
		t.Errorf("acknowledged (-want +got):\n%s", d)
	}

	part, release := p.w.View.Narrow(view.Filter{Hosts: []string{"a*"}})
	defer release()
	p.SetView(part)
	p.push(0, 11*time.Second)
	if all := uint64(part.Revision()); all == 0 || p.Lag(all) != all {
		t.Errorf("with another view, lag %d of %d", p.Lag(all), all)
	}
	p.answer("5", nil, 12*time.Second)
	if len(p.acked) != 2 {
		t.Errorf("a response of a part is told as one of all: %q", p.acked)
	}
	if longest := len(p.Status().LastNack); longest > 4200 || p.Status().Nacks != 1 {
		t.Errorf("a reason of %d bytes is kept", longest)
	}
	if err := testutil.GatherAndCompare(reg, strings.NewReader(fmt.Sprintf(`
# HELP isthmus_test_acks_total Responses that sinks acknowledged.
# TYPE isthmus_test_acks_total counter
isthmus_test_acks_total{collection=%q,profile="test"} 4
# HELP isthmus_test_nacks_total Responses that sinks refused. An istiod never does.
# TYPE isthmus_test_nacks_total counter
isthmus_test_nacks_total{collection=%[1]q,profile="test"} 1
# HELP isthmus_test_response_bytes_total Bytes of these responses.
# TYPE isthmus_test_response_bytes_total counter
isthmus_test_response_bytes_total{collection=%[1]q,profile="test"} %d
# HELP isthmus_test_responses_total Responses that were handed to gRPC.
# TYPE isthmus_test_responses_total counter
isthmus_test_responses_total{collection=%[1]q,profile="test"} 5
`, entries, p.bytes)), "isthmus_test_acks_total", "isthmus_test_nacks_total", "isthmus_test_response_bytes_total", "isthmus_test_responses_total"); err != nil {
		t.Error(err)
	}
}

// A subscription begins anew, but for its name.
// What a sink writes into the log is bounded.
func TestReopen(t *testing.T) {
	p := newPusher(t, view.XDS, metrics(nil))
	p.push(time.Second, 0)
	p.Reopen(view.NewSubscription(p.w.View, view.Options{Collection: entries}))
	if sent, acked := p.Times(); p.Name != "type" || p.Asked != 1 || !sent.IsZero() || !acked.IsZero() || p.Size() != 0 {
		t.Errorf("after Reopen: %+v", p.Subscription)
	}
	p.log.Reset()
	stream.LogRefusal(p.logger(), strings.Repeat("c", 10_000), "7", &stream.Refusal{Reason: strings.Repeat("r", 10_000)}, "code", 3)
	if line := p.log.String(); len(line) > 5000 || !strings.Contains(line, "level=WARN") || !strings.Contains(line, "nonce=7") || !strings.Contains(line, "code=3") {
		t.Errorf("a refusal is logged in %d bytes: %.200s", len(line), line)
	}
}

func TestEarlier(t *testing.T) {
	var never time.Time
	late := start.Add(1)
	for _, tt := range [][3]time.Time{{never, never, never}, {start, never, start}, {never, start, start}, {start, late, start}, {late, start, start}} {
		if got := stream.Earlier(tt[0], tt[1]); !got.Equal(tt[2]) {
			t.Errorf("of %v and %v: %v", tt[0], tt[1], got)
		}
	}
}

// Lines of one address are left out beyond 300 and then one a second, those of
// all beyond 3000 and then ten a second. The next line says how many; Debug is
// never left out.
func TestSparse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		all := stream.Sparse(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})))
		peer := func(ip string) *slog.Logger {
			return (&stream.Entry{Address: netip.AddrPortFrom(netip.MustParseAddr(ip), 1).String()}).Log(all).With("a", 1).WithGroup("g")
		}
		one, same, other := peer("2001:db8::1"), peer("2001:db8::ffff:2"), peer("10.0.0.1")
		expect := func(when string, l *slog.Logger, level slog.Level, lines, want, leftOut int) {
			t.Helper()
			out.Reset()
			for range lines {
				l.Log(context.Background(), level, "line")
			}
			if got := strings.Count(out.String(), "msg=line address="); got != want {
				t.Errorf("%s: %d of %d lines, want %d", when, got, lines, want)
			}
			first, _, _ := strings.Cut(out.String(), "\n")
			if has := strings.Contains(first, "left_out="); has != (leftOut > 0) || has && !strings.HasSuffix(first, fmt.Sprintf("left_out=%d", leftOut)) {
				t.Errorf("%s: the first line is %q, want %d left out", when, first, leftOut)
			}
			if strings.Count(out.String(), "left_out=") > 1 {
				t.Errorf("%s: what was left out is told twice", when)
			}
		}
		expect("one address", one, slog.LevelInfo, 200, 200, 0)
		expect("the same network", same, slog.LevelWarn, 150, 100, 0)
		expect("traffic", one, slog.LevelDebug, 1000, 1000, 0)
		expect("another address", other, slog.LevelInfo, 1, 1, 50)
		time.Sleep(2 * time.Second)
		expect("two seconds later", one, slog.LevelInfo, 5, 2, 0)
		for n := range 10 {
			peer(fmt.Sprintf("10.0.1.%d", n)).Info("line")
		}
		time.Sleep(time.Hour)
		for n := range 9 {
			expect("a crowd", peer(fmt.Sprintf("10.0.2.%d", n)), slog.LevelInfo, 300, 300, 0)
		}
		expect("the last of a crowd", peer("10.0.3.1"), slog.LevelInfo, 400, 300, 0)
		expect("one too many", peer("10.0.3.2"), slog.LevelInfo, 1, 0, 0)
		time.Sleep(time.Second)
		expect("of all, a second later", peer("10.0.3.3"), slog.LevelInfo, 20, 10, 101)
	})
}
