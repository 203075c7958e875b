package latency

import (
	"context"
	"maps"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
)

// Hops of a change.
const (
	hopPlugin = "plugin"
	hopApply  = "apply"
	hopWait   = "wait"
	hopAck    = "ack"
)

// hops are all of them, in their order.
var hops = [4]string{hopPlugin, hopApply, hopWait, hopAck}

// Message is a message of a plugin with changes.
type Message struct {
	// Changed is when the adapter made the oldest of them, Received when the
	// message arrived.
	Changed, Received time.Time
}

// batch is the changes of one message in the state.
type batch struct {
	Message
	registry string
	revision uint64 // of the last change
	applied  time.Time
	span     trace.SpanContext // of its trace; not valid unless it is sampled
}

// remembered is the number of batches that acknowledgements can be matched
// with. Of a sink that is further behind, the oldest of these is measured.
const remembered = 4096

// Tracker joins changes and acknowledgements. Its methods may be called from
// any goroutine.
type Tracker struct {
	tracer  trace.Tracer // nil if traces are off
	total   *prometheus.HistogramVec
	hops    *prometheus.HistogramVec
	changed *prometheus.GaugeVec

	mu      sync.RWMutex
	current map[string]Message // being applied, by registry; guarded by mu
	recent  []batch            // by revision; guarded by mu

	// of holds the series that were looked up, for a look-up by labels costs
	// more than what is observed.
	ofMu sync.RWMutex
	of   map[labels]*series // guarded by ofMu
}

// labels select the series of one registry, or those of one registry and sink.
type labels struct{ registry, sink string }

// series are the metrics of labels.
type series struct {
	changed prometheus.Gauge    // without sink
	total   prometheus.Observer // with sink, like hops
	hops    [4]prometheus.Observer
}

// New returns a tracker. With a nil tracer there are no traces.
func New(reg prometheus.Registerer, tracer trace.Tracer) *Tracker {
	auto := promauto.With(reg)
	return &Tracker{
		tracer: tracer, current: make(map[string]Message), of: make(map[labels]*series),
		total: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "isthmus_change_seconds", Help: "Time from a change in a registry, as its adapter noticed it, to the ACK of a sink.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 3, 12), // to 88 s
		}, []string{"registry", "sink"}),
		hops: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "isthmus_change_hop_seconds", Help: "The part of isthmus_change_seconds that each hop takes.",
			Buckets: prometheus.ExponentialBuckets(0.00005, 5, 10), // to 98 s
		}, []string{"registry", "sink", "hop"}),
		changed: auto.NewGaugeVec(prometheus.GaugeOpts{
			Name: "isthmus_registry_last_change_timestamp_seconds", Help: "When something of the registry changed last in what is served.",
		}, []string{"registry"}),
	}
}

// Begin records that a message of a registry is about to be applied. Changes
// applied without a message, as by an operator, are not measured.
func (t *Tracker) Begin(registry string, m Message) {
	if m.Changed.IsZero() || m.Changed.After(m.Received) {
		m.Changed = m.Received
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.current[registry] = m
}

// End records that the message was applied.
func (t *Tracker) End(registry string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.current, registry)
}

// Applied records the revision of changes of a registry. It must return before
// a sink can be sent them.
func (t *Tracker) Applied(registry string, revision uint64) {
	now := time.Now()
	t.seriesOf(labels{registry: registry}).changed.Set(float64(now.UnixMilli()) / 1000)
	t.mu.Lock()
	defer t.mu.Unlock()
	m, ok := t.current[registry]
	if !ok {
		return
	}
	if len(t.recent) == remembered {
		t.recent = slices.Delete(t.recent, 0, remembered/4)
	}
	b := batch{Message: m, registry: registry, revision: revision, applied: now}
	if t.tracer != nil {
		b.span = t.begin(&b)
	}
	t.recent = append(t.recent, b)
}

// Acked records that a sink acknowledged a response with the changes after one
// revision up to another.
func (t *Tracker) Acked(sink string, after, upTo uint64, sent, acked time.Time) {
	var seen [2]batch // the oldest of each registry; more are rare
	oldest := seen[:0]
	t.mu.RLock()
	first := sort.Search(len(t.recent), func(i int) bool { return t.recent[i].revision > after })
	for _, b := range t.recent[first:] {
		if b.revision > upTo {
			break
		}
		if !slices.ContainsFunc(oldest, func(o batch) bool { return o.registry == b.registry }) {
			oldest = append(oldest, b)
		}
	}
	t.mu.RUnlock()
	for i := range oldest {
		t.observe(&oldest[i], sink, sent, acked)
	}
}

func (t *Tracker) observe(b *batch, sink string, sent, acked time.Time) {
	s := t.seriesOf(labels{b.registry, sink})
	s.total.Observe(acked.Sub(b.Changed).Seconds())
	at := [...]time.Time{b.Changed, b.Received, b.applied, sent, acked}
	for i, hop := range s.hops {
		hop.Observe(max(0, at[i+1].Sub(at[i]).Seconds()))
	}
	if b.span.IsSampled() {
		ctx := trace.ContextWithSpanContext(context.Background(), b.span)
		ctx, span := t.tracer.Start(ctx, "deliver", trace.WithTimestamp(b.applied), trace.WithAttributes(attribute.String("sink", sink)))
		t.child(ctx, hopWait, b.applied, sent)
		t.child(ctx, hopAck, sent, acked)
		span.End(trace.WithTimestamp(acked))
	}
}

// seriesOf returns the series of labels.
func (t *Tracker) seriesOf(l labels) *series {
	t.ofMu.RLock()
	s := t.of[l]
	t.ofMu.RUnlock()
	if s != nil {
		return s
	}
	t.ofMu.Lock()
	defer t.ofMu.Unlock()
	if s = t.of[l]; s != nil {
		return s
	}
	s = new(series)
	if l.sink == "" {
		s.changed = t.changed.WithLabelValues(l.registry)
	} else {
		s.total = t.total.WithLabelValues(l.registry, l.sink)
		for i, hop := range hops {
			s.hops[i] = t.hops.WithLabelValues(l.registry, l.sink, hop)
		}
	}
	t.of[l] = s
	return s
}

// begin starts the trace of a batch, with the hops that are over.
func (t *Tracker) begin(b *batch) trace.SpanContext {
	ctx, span := t.tracer.Start(context.Background(), "change", trace.WithNewRoot(), trace.WithTimestamp(b.Changed),
		trace.WithAttributes(attribute.String("registry", b.registry), attribute.Int64("revision", int64(b.revision))))
	if span.SpanContext().IsSampled() {
		t.child(ctx, hopPlugin, b.Changed, b.Received)
		t.child(ctx, hopApply, b.Received, b.applied)
	}
	span.End(trace.WithTimestamp(b.applied))
	return span.SpanContext()
}

func (t *Tracker) child(ctx context.Context, name string, from, to time.Time) {
	_, span := t.tracer.Start(ctx, name, trace.WithTimestamp(from))
	span.End(trace.WithTimestamp(to))
}

// Forget removes what is measured of a registry.
func (t *Tracker) Forget(registry string) {
	t.ofMu.Lock()
	defer t.ofMu.Unlock()
	maps.DeleteFunc(t.of, func(l labels, _ *series) bool { return l.registry == registry })
	all := prometheus.Labels{"registry": registry}
	t.total.DeletePartialMatch(all)
	t.hops.DeletePartialMatch(all)
	t.changed.DeletePartialMatch(all)
}
