package plugin

import (
	"fmt"
	"math"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

var metricName = regexp.MustCompile(wire.MetricName)

// Metrics are an adapter's own counters and gauges. The bridge shows them as
// isthmus_adapter_NAME, with the registry as the label. There are no other
// labels, and at most 100 metrics, so what is counted is a kind of event and
// never a service or an address.
//
// A nil Metrics, as in the Env of tests, works and shows nothing. Metrics is
// safe for concurrent use.
type Metrics struct {
	mu  sync.Mutex
	all []*metric // guarded by mu
}

// metric is one number.
type metric struct {
	name, help string
	kind       pluginv1.MetricKind
	bits       atomic.Uint64 // of a float64
}

// Counter is a number that only grows.
type Counter struct{ m *metric }

// Gauge is a number that goes up and down.
type Gauge struct{ m *metric }

// Counter registers a counter. The name has lower-case letters, digits and
// underscores and ends in _total; help is a sentence. A name that is not like
// that, or is registered already, is a fault of the program: Counter panics.
func (m *Metrics) Counter(name, help string) Counter {
	if !strings.HasSuffix(name, "_total") {
		panic(fmt.Sprintf("BUG: the counter %q must end in _total", name))
	}
	return Counter{m.register(name, help, pluginv1.MetricKind_METRIC_KIND_COUNTER)}
}

// Gauge registers a gauge, as [Metrics.Counter] does a counter. Its name has a
// unit where it has one, and does not end in _total.
func (m *Metrics) Gauge(name, help string) Gauge {
	if strings.HasSuffix(name, "_total") {
		panic(fmt.Sprintf("BUG: the gauge %q must not end in _total", name))
	}
	return Gauge{m.register(name, help, pluginv1.MetricKind_METRIC_KIND_GAUGE)}
}

func (m *Metrics) register(name, help string, kind pluginv1.MetricKind) *metric {
	if !metricName.MatchString(name) {
		panic(fmt.Sprintf("BUG: the metric %q must match %s", name, wire.MetricName))
	}
	n := &metric{name: name, help: help, kind: kind}
	if m == nil {
		return n
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, other := range m.all {
		if other.name == name {
			panic(fmt.Sprintf("BUG: the metric %q is registered twice", name))
		}
	}
	if len(m.all) == wire.MaxMetrics {
		panic(fmt.Sprintf("BUG: more than %d metrics", wire.MaxMetrics))
	}
	m.all = append(m.all, n)
	return n
}

// Inc adds one.
func (c Counter) Inc() { c.Add(1) }

// Add adds n, which must not be negative.
func (c Counter) Add(n float64) {
	if !(n >= 0) {
		panic(fmt.Sprintf("BUG: %v is added to the counter %s", n, c.m.name))
	}
	for {
		old := c.m.bits.Load()
		if c.m.bits.CompareAndSwap(old, math.Float64bits(math.Float64frombits(old)+n)) {
			return
		}
	}
}

// Set sets the gauge.
func (g Gauge) Set(v float64) { g.m.bits.Store(math.Float64bits(v)) }

// toldMetrics holds what a stream has told: bits by metric.
type toldMetrics map[*metric]uint64

// changed returns the metrics that were not told, or not with this value.
func (m *Metrics) changed(t toldMetrics) (out []*pluginv1.Metric) {
	m.mu.Lock()
	all := m.all
	m.mu.Unlock()
	for _, n := range all {
		bits := n.bits.Load()
		if was, ok := t[n]; ok && was == bits {
			continue
		}
		t[n] = bits
		out = append(out, &pluginv1.Metric{Name: n.name, Help: n.help, Kind: n.kind, Value: math.Float64frombits(bits)})
	}
	return out
}
