package xds

import (
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// metrics are those of all streams.
type metrics struct {
	responses, bytes, acks, nacks *prometheus.CounterVec
	oversize                      *prometheus.CounterVec
	sinks                         *prometheus.GaugeVec
	duration                      *prometheus.HistogramVec
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	labels := []string{"protocol", "profile", "collection"}
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "isthmus_xds_" + name, Help: help}, labels)
	}
	m := &metrics{
		responses: counter("responses_total", "Responses that were handed to gRPC."),
		bytes:     counter("response_bytes_total", "Bytes of these responses."),
		acks:      counter("acks_total", "Responses that sinks acknowledged."),
		nacks:     counter("nacks_total", "Responses that sinks refused. An istiod never does."),
		oversize: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_xds_oversize_total", Help: "Responses that are larger than a sink of the profile receives.",
		}, labels[1:2]),
		sinks: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "isthmus_xds_sinks", Help: "Open streams whose profile is known.",
		}, labels[:2]),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "isthmus_xds_push_duration_seconds", Help: "Time from handing a response to gRPC to its ACK or NACK.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 10), // to 26 s
		}, labels[:2]),
	}
	// What alerts watch is there from the start.
	for _, p := range profiles {
		if p.Limit > 0 {
			m.oversize.WithLabelValues(p.Name)
		}
		m.sinks.WithLabelValues("sotw", p.Name)
		m.sinks.WithLabelValues("delta", p.Name)
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.responses, m.bytes, m.acks, m.nacks, m.oversize, m.sinks, m.duration} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("xds metrics: %w", err)
		}
	}
	return m, nil
}

// counters are the metrics of one subscription, looked up once per profile.
type counters struct {
	responses, bytes, acks, nacks prometheus.Counter
	duration                      prometheus.Observer
}

func (m *metrics) counters(protocol, profile, coll string) *counters {
	if !known(coll) && coll != meshConfig {
		coll = "other" // whoever connects chooses the type URL
	}
	return &counters{
		responses: m.responses.WithLabelValues(protocol, profile, coll),
		bytes:     m.bytes.WithLabelValues(protocol, profile, coll),
		acks:      m.acks.WithLabelValues(protocol, profile, coll),
		nacks:     m.nacks.WithLabelValues(protocol, profile, coll),
		duration:  m.duration.WithLabelValues(protocol, profile),
	}
}

var collections = collection.All()

// known says whether an adapter may publish to a collection.
func known(coll string) bool { return slices.Contains(collections, coll) }
