package mcp

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/server/stream"
)

// metrics are the metrics of all streams.
type metrics struct {
	*stream.Metrics
	stale, dials prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{Metrics: stream.NewMetrics(reg, "mcp", "profile")}
	m.Oversize = m.Counter("oversize_total", "Responses of more than 4 MiB, which a Pilot accepts only if it is told to.")
	m.Oversize.WithLabelValues() // exported from the start, so that alerts see the first increase
	m.stale = m.Counter("stale_nonces_total", "Requests that were ignored because their nonce is not that of the newest response.").WithLabelValues()
	m.dials = m.Counter("dials_total", "Attempts to open a stream to a sink in reverse mode.").WithLabelValues()
	for _, p := range profiles {
		m.Sinks.WithLabelValues(p.Name) // exported from the start, so that alerts see 0
	}
	return m
}
