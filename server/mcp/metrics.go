package mcp

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are those of all streams.
type metrics struct {
	responses, bytes, acks, nacks *prometheus.CounterVec
	stale, oversize, dials        prometheus.Counter
	sinks                         *prometheus.GaugeVec
	duration                      *prometheus.HistogramVec
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	labels := []string{"profile", "collection"}
	vec := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "isthmus_mcp_" + name, Help: help}, labels)
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "isthmus_mcp_" + name, Help: help})
	}
	m := &metrics{
		responses: vec("responses_total", "Responses that were handed to gRPC."),
		bytes:     vec("response_bytes_total", "Bytes of these responses."),
		acks:      vec("acks_total", "Responses that sinks acknowledged."),
		nacks:     vec("nacks_total", "Responses that sinks refused."),
		stale:     counter("stale_nonces_total", "Requests that were ignored because their nonce is not that of the newest response."),
		oversize:  counter("oversize_total", "Responses of more than 4 MiB, which a Pilot accepts only if it is told to."),
		dials:     counter("dials_total", "Attempts to open a stream to a sink in reverse mode."),
		sinks: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "isthmus_mcp_sinks", Help: "Open streams whose profile is known.",
		}, labels[:1]),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "isthmus_mcp_push_duration_seconds", Help: "Time from handing a response to gRPC to its ACK or NACK.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 10), // to 26 s
		}, labels[:1]),
	}
	for _, p := range profiles {
		m.sinks.WithLabelValues(p.Name) // is there from the start, to be watched for being 0
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.responses, m.bytes, m.acks, m.nacks, m.stale, m.oversize, m.dials, m.sinks, m.duration} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("mcp metrics: %w", err)
		}
	}
	return m, nil
}

// counters are the metrics of one subscription, looked up once.
type counters struct {
	responses, bytes, acks, nacks prometheus.Counter
	duration                      prometheus.Observer
}

func (m *metrics) counters(profile, name string) *counters {
	if collections[name] == "" && name != syntheticEntries {
		name = "other" // whoever connects chooses it
	}
	return &counters{
		responses: m.responses.WithLabelValues(profile, name),
		bytes:     m.bytes.WithLabelValues(profile, name),
		acks:      m.acks.WithLabelValues(profile, name),
		nacks:     m.nacks.WithLabelValues(profile, name),
		duration:  m.duration.WithLabelValues(profile),
	}
}
