package xds

import (
	"slices"

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

// count sets the labels of a subscription.
func count(m *stream.Metrics, sub *subscription, protocol, profile string) {
	coll := sub.collection
	if !sub.known && coll != meshConfig {
		coll = "other" // clients choose the type URL, so it is not a label
	}
	m.Count(&sub.Subscription, coll, protocol, profile)
	sub.OnAck(protocol, m.Acked)
}

var collections = collection.All()

// known reports whether adapters can publish to a collection.
func known(coll string) bool { return slices.Contains(collections, coll) }
