package xds

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// newMetrics returns the metrics of all streams.
func newMetrics(reg prometheus.Registerer) *stream.Metrics {
	m := stream.NewMetrics(reg, "xds", "protocol", "profile")
	m.Oversize = m.Counter("oversize_total", "Responses that are larger than a sink of the profile receives.", "profile")
	for _, p := range profiles {
		if p.Limit > 0 {
			m.Oversize.WithLabelValues(p.Name) // exported from the start, so that alerts see the first increase
		}
		m.Sinks.WithLabelValues("sotw", p.Name)
		m.Sinks.WithLabelValues("delta", p.Name)
	}
	return m
}

// collections are those that adapters can publish to.
var collections = collection.All()
