package supervisor

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// Metrics are the supervisors' metrics, labelled by registry.
type Metrics struct {
	starts   *prometheus.CounterVec
	failures *prometheus.CounterVec
	phase    *prometheus.GaugeVec
	messages *prometheus.CounterVec
	bytes    *prometheus.CounterVec
	upserts  *prometheus.CounterVec
	removals *prometheus.CounterVec
	dropped  *prometheus.CounterVec
	heard    *prometheus.GaugeVec
	apply    *prometheus.HistogramVec
	own      *ownMetrics
}

// NewMetrics creates the metrics and registers them with reg, which may be nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	auto := promauto.With(reg)
	counter := func(name, help string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"registry"})
	}
	own := &ownMetrics{registries: map[string]map[string]*pluginv1.Metric{}}
	if reg != nil {
		reg.MustRegister(own)
	}
	return &Metrics{
		own:      own,
		starts:   counter("isthmus_plugin_starts_total", "Starts of the registry's plugin process."),
		failures: counter("isthmus_plugin_failures_total", "Times that the plugin could not be started, died, hung, broke the contract or refused its configuration."),
		phase: auto.NewGaugeVec(prometheus.GaugeOpts{Name: "isthmus_plugin_phase", Help: "1 for the phase that the plugin is in, 0 for the others."},
			[]string{"registry", "phase"}),
		messages: counter("isthmus_plugin_messages_total", "Messages from the plugin, signs of life included."),
		bytes:    counter("isthmus_plugin_bytes_total", "Bytes of messages from the plugin."),
		upserts:  counter("isthmus_plugin_upserts_total", "New and changed resources from the plugin."),
		removals: counter("isthmus_plugin_removals_total", "Removed resources from the plugin."),
		dropped:  counter("isthmus_plugin_log_dropped_total", "Lines of the plugin's output that were not logged, since there were too many."),
		heard: auto.NewGaugeVec(prometheus.GaugeOpts{
			Name: "isthmus_registry_last_heard_timestamp_seconds",
			Help: "When the registry itself answered or sent anything last, as its adapter tells it. Absent if it does not tell.",
		}, []string{"registry"}),
		apply: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "isthmus_plugin_apply_seconds",
			Help:    "Time taken to apply a message that is more than a sign of life.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9),
		}, []string{"registry"}),
	}
}

// forget removes a registry's series.
func (m *Metrics) forget(registry string) {
	labels := prometheus.Labels{"registry": registry}
	for _, v := range []interface {
		DeletePartialMatch(labels prometheus.Labels) int
	}{m.starts, m.failures, m.phase, m.messages, m.bytes, m.upserts, m.removals, m.dropped, m.heard, m.apply} {
		v.DeletePartialMatch(labels)
	}
	m.own.forget(registry)
}
