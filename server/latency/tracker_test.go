package latency

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// counts returns how often each series of a histogram was observed.
func counts(t *testing.T, reg *prometheus.Registry, name string) map[string]uint64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]uint64{}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			key := ""
			for _, l := range m.GetLabel() {
				key += l.GetValue() + " "
			}
			out[key[:len(key)-1]] += m.GetHistogram().GetSampleCount()
		}
	}
	return out
}

// The oldest change of each registry in a response is measured, once for each
// sink, and no change outside of it.
func TestOldestOfEachRegistry(t *testing.T) {
	reg := prometheus.NewRegistry()
	tr := New(reg, nil)
	now := time.Now()
	apply := func(registry string, revision uint64) {
		tr.Begin(registry, Message{Changed: now.Add(-time.Second), Received: now})
		tr.Applied(registry, revision)
		tr.End(registry)
	}
	apply("a", 3)
	apply("a", 5)
	apply("b", 8)
	tr.Applied("b", 9) // by an operator
	tr.Acked("sotw", 3, 8, now, now.Add(time.Second))
	tr.Acked("delta", 8, 9, now, now.Add(time.Second))
	if diff := cmp.Diff(map[string]uint64{"a sotw": 1, "b sotw": 1}, counts(t, reg, "isthmus_change_seconds")); diff != "" {
		t.Errorf("isthmus_change_seconds (-want +got):\n%s", diff)
	}
	want := map[string]uint64{}
	for _, hop := range []string{hopPlugin, hopApply, hopWait, hopAck} {
		want[hop+" a sotw"], want[hop+" b sotw"] = 1, 1
	}
	if diff := cmp.Diff(want, counts(t, reg, "isthmus_change_hop_seconds")); diff != "" {
		t.Errorf("isthmus_change_hop_seconds (-want +got):\n%s", diff)
	}
	tr.Forget("a")
	if diff := cmp.Diff(map[string]uint64{"b sotw": 1}, counts(t, reg, "isthmus_change_seconds")); diff != "" {
		t.Errorf("after the registry was removed (-want +got):\n%s", diff)
	}
	apply("a", 9)
	tr.Acked("sotw", 8, 9, now, now)
	if got := counts(t, reg, "isthmus_change_seconds")["a sotw"]; got != 1 {
		t.Errorf("a registry that is back was measured %d times, want once", got)
	}
	tr.Forget("a")
	for i := range uint64(2 * remembered) {
		apply("a", 10+i)
	}
	if len(tr.recent) > remembered {
		t.Errorf("%d batches are remembered", len(tr.recent))
	}
	tr.Acked("sotw", 9, 1<<40, now, now)
	if got := counts(t, reg, "isthmus_change_seconds")["a sotw"]; got != 1 {
		t.Errorf("a sink that is far behind was measured %d times", got)
	}
}

// A traced change has a span for each hop and one for each sink, and they have
// the times of the change.
func TestTrace(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(recorder))
	tr := New(nil, provider.Tracer("test"))
	at := time.Now().Add(-time.Minute)
	tr.Begin("a", Message{Changed: at, Received: at.Add(time.Second)})
	tr.Applied("a", 1)
	tr.Acked("delta", 0, 1, time.Now(), time.Now())
	tr.Acked("sotw", 0, 1, time.Now(), time.Now())
	names := map[string]int{}
	for _, s := range recorder.Ended() {
		names[s.Name()]++
		if s.SpanContext().TraceID() != recorder.Ended()[0].SpanContext().TraceID() {
			t.Errorf("%s is of another trace", s.Name())
		}
		if s.Name() == "change" && !s.StartTime().Equal(at) {
			t.Errorf("the change begins at %v, want %v", s.StartTime(), at)
		}
		if s.Name() == hopPlugin && s.EndTime().Sub(s.StartTime()) != time.Second {
			t.Errorf("the hop to the bridge takes %v", s.EndTime().Sub(s.StartTime()))
		}
	}
	if diff := cmp.Diff(map[string]int{"change": 1, hopPlugin: 1, hopApply: 1, "deliver": 2, hopWait: 2, hopAck: 2}, names); diff != "" {
		t.Errorf("spans (-want +got):\n%s", diff)
	}
}

// The cost of one change and one acknowledgement.
func BenchmarkChange(b *testing.B) {
	run := func(b *testing.B, tr *Tracker) {
		b.ReportAllocs()
		revision := uint64(0)
		now := time.Now()
		for b.Loop() {
			tr.Begin("a", Message{Received: now})
			tr.Applied("a", revision+1)
			tr.End("a")
			tr.Acked("sotw", revision, revision+1, now, now)
			revision++
		}
	}
	b.Run("metrics", func(b *testing.B) { run(b, New(prometheus.NewRegistry(), nil)) })
	b.Run("traces 1 %", func(b *testing.B) {
		provider := sdk.NewTracerProvider(sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(0.01))))
		run(b, New(prometheus.NewRegistry(), provider.Tracer("test")))
	})
}
