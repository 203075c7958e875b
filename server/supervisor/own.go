package supervisor

import (
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

const (
	// ownPrefix begins the names of adapters' own metrics.
	ownPrefix = "isthmus_adapter_"
	// maxHelp bounds the help of one, in bytes.
	maxHelp = 300
)

var metricName = regexp.MustCompile(wire.MetricName)

// ownMetrics collects the adapters' own metrics. A registry has at most
// [wire.MaxMetrics]. Two registries share a name only if it is of one kind for
// both: that of the registry whose name sorts first is shown.
type ownMetrics struct {
	mu         sync.Mutex
	registries map[string]map[string]*pluginv1.Metric // by registry and name; guarded by mu
}

var _ prometheus.Collector = (*ownMetrics)(nil)

// Describe implements [prometheus.Collector]. The names are not known before.
func (*ownMetrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements [prometheus.Collector].
func (o *ownMetrics) Collect(out chan<- prometheus.Metric) {
	o.mu.Lock()
	defer o.mu.Unlock()
	type family struct {
		kind pluginv1.MetricKind
		desc *prometheus.Desc
	}
	families := map[string]family{}
	for _, registry := range slices.Sorted(maps.Keys(o.registries)) {
		for name, m := range o.registries[registry] {
			f, ok := families[name]
			if !ok {
				f = family{m.GetKind(), prometheus.NewDesc(ownPrefix+name, m.GetHelp(), []string{"registry"}, nil)}
				families[name] = f
			}
			if f.kind != m.GetKind() {
				continue
			}
			kind := prometheus.GaugeValue
			if f.kind == pluginv1.MetricKind_METRIC_KIND_COUNTER {
				kind = prometheus.CounterValue
			}
			out <- prometheus.MustNewConstMetric(f.desc, kind, m.GetValue(), registry)
		}
	}
}

// set takes what a plugin tells. What is invalid or beyond the bound is
// ignored.
func (o *ownMetrics) set(registry string, metrics []*pluginv1.Metric) {
	o.mu.Lock()
	defer o.mu.Unlock()
	own := o.registries[registry]
	if own == nil {
		own = map[string]*pluginv1.Metric{}
		o.registries[registry] = own
	}
	for _, m := range metrics {
		_, known := own[m.GetName()]
		if !validMetric(m) || !known && len(own) >= wire.MaxMetrics {
			continue
		}
		m.Help = strings.ToValidUTF8(clip.Text(m.GetHelp(), maxHelp), "\uFFFD")
		own[m.GetName()] = m
	}
}

func validMetric(m *pluginv1.Metric) bool {
	v, name := m.GetValue(), m.GetName()
	if !metricName.MatchString(name) || math.IsNaN(v) || math.IsInf(v, 0) {
		return false
	}
	switch m.GetKind() {
	case pluginv1.MetricKind_METRIC_KIND_COUNTER:
		return v >= 0 && strings.HasSuffix(name, "_total")
	case pluginv1.MetricKind_METRIC_KIND_GAUGE:
		return !strings.HasSuffix(name, "_total")
	default:
		return false
	}
}

// forget removes those of a registry.
func (o *ownMetrics) forget(registry string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.registries, registry)
}
