package lastgood

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	bytes, written, failing, restore prometheus.Gauge
	errors                           *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	auto := promauto.With(reg)
	gauge := func(name, help string) prometheus.Gauge {
		return auto.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &metrics{
		bytes:   gauge("isthmus_state_file_bytes", "Size of the last good state on disk."),
		written: gauge("isthmus_state_written_timestamp_seconds", "When the last good state was last written."),
		failing: gauge("isthmus_state_failing", "1 while the last good state cannot be written."),
		restore: gauge("isthmus_state_restore_seconds", "How long it took at the start to read the last good state and serve it; 0 if there was none."),
		errors:  auto.NewCounterVec(prometheus.CounterOpts{Name: "isthmus_state_errors_total", Help: "What failed of reading and writing the last good state."}, []string{"op"}),
	}
	for _, op := range []string{"read", "write"} {
		m.errors.WithLabelValues(op).Add(0)
	}
	return m
}
