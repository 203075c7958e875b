package stream

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics holds the metrics of all streams of one protocol.
type Metrics struct {
	responses, bytes, acks, nacks *prometheus.CounterVec
	duration                      *prometheus.HistogramVec
	// Sinks counts the open streams whose profile is known.
	Sinks *prometheus.GaugeVec
	// Oversize counts responses above the size that a sink accepts.
	Oversize *prometheus.CounterVec
	// Acked receives acknowledged responses; nil discards them.
	Acked AckFunc

	auto   promauto.Factory
	prefix string
}

// NewMetrics returns the metrics of a protocol. Their names begin with
// isthmus_PREFIX_ and they carry the labels of [Metrics.Sinks]; counters per
// collection also carry "collection". With a nil registerer they are not
// registered.
func NewMetrics(reg prometheus.Registerer, prefix string, labels ...string) *Metrics {
	m := &Metrics{auto: promauto.With(reg), prefix: prefix}
	all := append(labels[:len(labels):len(labels)], "collection")
	m.responses = m.Counter("responses_total", "Responses that were handed to gRPC.", all...)
	m.bytes = m.Counter("response_bytes_total", "Bytes of these responses.", all...)
	m.acks = m.Counter("acks_total", "Responses that sinks acknowledged.", all...)
	m.nacks = m.Counter("nacks_total", "Responses that sinks refused. An istiod never does.", all...)
	m.Sinks = m.auto.NewGaugeVec(prometheus.GaugeOpts{
		Name: m.name("sinks"), Help: "Open streams whose profile is known.",
	}, labels)
	m.duration = m.auto.NewHistogramVec(prometheus.HistogramOpts{
		Name: m.name("push_duration_seconds"), Help: "Time from handing a response to gRPC to its ACK or NACK.",
		Buckets: prometheus.ExponentialBuckets(0.0001, 4, 10), // to 26 s
	}, labels)
	return m
}

// Counter returns a counter specific to the protocol.
func (m *Metrics) Counter(name, help string, labels ...string) *prometheus.CounterVec {
	return m.auto.NewCounterVec(prometheus.CounterOpts{Name: m.name(name), Help: help}, labels)
}

func (m *Metrics) name(s string) string { return "isthmus_" + m.prefix + "_" + s }

// counters are the metrics of one subscription, looked up once per profile.
type counters struct {
	responses, bytes, acks, nacks prometheus.Counter
	duration                      prometheus.Observer
}

// Count sets the labels under which a subscription counts. The caller takes the
// collection from a bounded set.
func (m *Metrics) Count(s *Subscription, collection string, labels ...string) {
	all := append(labels[:len(labels):len(labels)], collection)
	s.counters = &counters{
		responses: m.responses.WithLabelValues(all...),
		bytes:     m.bytes.WithLabelValues(all...),
		acks:      m.acks.WithLabelValues(all...),
		nacks:     m.nacks.WithLabelValues(all...),
		duration:  m.duration.WithLabelValues(labels...),
	}
}
