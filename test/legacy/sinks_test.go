package legacy

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
	"github.com/isthmus-mesh/isthmus/server/mcp"
)

// churn changes the world at random: some hundred small batches.
func churn(w *world, r *rand.Rand) {
	for range 300 {
		var touched []string
		for range 1 + r.IntN(5) {
			name := fmt.Sprintf("s%d", r.IntN(200))
			instance := fmt.Sprintf("%s-%d", name, r.IntN(5))
			switch svc := w.services[name]; {
			case svc == nil:
				w.entry(name)
			case r.IntN(10) == 0:
				delete(w.services, name)
			case r.IntN(3) == 0:
				w.drop(name, instance)
			default:
				w.instance(name, instance, fmt.Sprintf("10.0.%d.%d", r.IntN(250), 1+r.IntN(250)), uint32(8000+r.IntN(3)), uint32(r.IntN(4)))
			}
			touched = append(touched, name)
		}
		w.apply(touched...)
		if r.IntN(10) == 0 {
			w.gateway(fmt.Sprintf("gw%d", r.IntN(5)), fmt.Sprintf("app%d", r.IntN(100)))
		}
	}
}

// Real sinks of Istio 1.8.0 hold what the store holds at each quiet point:
// whether they permit incremental responses or not, refuse one response of ten,
// and lose their connection in between.
func TestSinkLibrary(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	for _, tt := range []struct {
		name    string
		args    []string
		reverse bool
		fewer   bool // no incremental response is to be seen
	}{
		{name: "full", args: []string{"-clients", "4"}, fewer: true},
		{name: "incremental", args: []string{"-clients", "4", "-incremental", "all"}},
		{name: "32 sinks, half of them incremental, refusing one of ten", args: []string{"-clients", "32", "-incremental", "half", "-nack", "0.1"}},
		{name: "slow", args: []string{"-clients", "2", "-incremental", "half", "-delay", "20ms"}},
		{name: "reverse full", args: []string{"-nack", "0.1"}, reverse: true, fewer: true},
		{name: "reverse incremental", args: []string{"-incremental", "all", "-nack", "0.1"}, reverse: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, mcp.Config{})
			r := rand.New(rand.NewPCG(1, 2))
			churn(w, r)
			address := []string{"-address", w.address}
			if tt.reverse {
				address = []string{"-listen", "127.0.0.1:0"}
			}
			s := sinks{testpilot.StartLegacy(t, append(append([]string{"sink"}, address...), tt.args...)...)}
			if tt.reverse {
				var at struct{ Address string }
				s.Read(t, &at)
				defer w.dial(at.Address)()
			}
			for phase := range 5 {
				s.settle(t, w)
				churn(w, r)
				if phase%2 == 1 {
					s.breakOff(t)
					churn(w, r)
				}
			}
			states := s.settle(t, w)
			total := sinkState{}
			for i, st := range states {
				total.Applied += st.Applied
				total.Incremental += st.Incremental
				total.Refused += st.Refused
				total.Streams += st.Streams
				if st.Streams < 3 {
					t.Errorf("sink %d: %d connections, want 3 at least", i, st.Streams)
				}
			}
			if (total.Incremental == 0) != tt.fewer {
				t.Errorf("%d incremental responses", total.Incremental)
			}
			if refuses := strings.Contains(strings.Join(tt.args, " "), "-nack"); refuses != (total.Refused > 0) {
				t.Errorf("%d responses were refused", total.Refused)
			}
			t.Logf("%d sinks: %d responses applied, %d of them incremental, %d refused, %d connections",
				len(states), total.Applied, total.Incremental, total.Refused, total.Streams)
		})
	}
}

// A bridge that is gone and comes back with the same content sends a sink that
// says what it holds only what changed meanwhile.
func TestSinkResumes(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	fill := func(w *world) {
		var names []string
		for i := range 500 {
			name := fmt.Sprintf("s%d", i)
			w.entry(name)
			w.instance(name, name+"-1", fmt.Sprintf("10.0.%d.%d", i>>8, i&255), 80, 0)
			names = append(names, name)
		}
		w.apply(names...)
	}
	w := newWorld(t, mcp.Config{})
	fill(w)
	s := sinks{testpilot.StartLegacy(t, "sink", "-address", w.address, "-incremental", "all")}
	before := s.settle(t, w)[0]
	w.stop()
	w.empty()
	fill(w)
	w.instance("s7", "s7-2", "10.9.9.9", 80, 0)
	delete(w.services, "s8")
	w.apply("s7", "s8")
	w.listen()
	after := s.settle(t, w)[0]
	if sent := after.Objects - before.Objects; sent != 1 {
		t.Errorf("%d resources were sent after the restart, want only the one that changed", sent)
	}
	if after.Resources != 499 {
		t.Errorf("the sink holds %d", after.Resources)
	}
}

// More than a sink accepts in one message: one that permits incremental
// responses gets it in parts on its first stream; one that does not neither
// goes round in a hot loop nor keeps others from being served.
func TestSinkTooSmall(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	w := newWorld(t, mcp.Config{})
	var names []string
	for i := range 1500 {
		name := fmt.Sprintf("s%d", i)
		w.entry(name)
		for n := range 100 {
			w.instance(name, fmt.Sprintf("%s-%d", name, n), fmt.Sprintf("10.%d.%d.%d", n, i>>8, i&255), 80, 0)
		}
		names = append(names, name)
	}
	w.apply(names...)
	small := sinks{testpilot.StartLegacy(t, "sink", "-address", w.address)}
	parts := sinks{testpilot.StartLegacy(t, "sink", "-address", w.address, "-incremental", "all")}
	large := sinks{testpilot.StartLegacy(t, "sink", "-address", w.address, "-max-size", "100000000")}
	begin := time.Now()
	large.settle(t, w)
	if st := parts.settle(t, w)[0]; st.Streams != 1 || st.Incremental < 1 {
		t.Errorf("in parts: %+v", st)
	}
	const watched = 12 * time.Second
	tick := time.NewTimer(max(0, watched-time.Since(begin)))
	defer tick.Stop()
	<-tick.C
	st := small.state(t)[0]
	if st.Resources != 0 {
		t.Errorf("a message that is too large was taken: %+v", st)
	}
	// The pauses are 1, 2, 4, 8 s.
	oversize := 0
	for _, sink := range w.mcp.Status() {
		for _, sub := range sink.Subscriptions {
			if sub.Oversize {
				oversize++
			}
		}
	}
	t.Logf("in %v: %d connections of the sink that is too small, %d oversize subscriptions now", watched, st.Streams, oversize)
	if applied := st.Applied; applied > 10*8 {
		t.Errorf("%d responses in %v: that is a hot loop", applied, watched)
	}
}
