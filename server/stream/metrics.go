package stream

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are those of all streams of one protocol.
type Metrics struct {
	responses, bytes, acks, nacks *prometheus.CounterVec
	duration                      *prometheus.HistogramVec
	// Sinks is the number of open streams whose profile is known.
	Sinks *prometheus.GaugeVec
	// Oversize counts responses that are larger than a sink receives.
	Oversize *prometheus.CounterVec

	reg    prometheus.Registerer
	prefix string
	wrong  error
}

// NewMetrics makes the metrics of a protocol, whose names begin with
// isthmus_PREFIX_. The labels are those of [Metrics.Sinks]; the first counters
// have "collection" besides. A nil registerer drops them. See [Metrics.Err].
func NewMetrics(reg prometheus.Registerer, prefix string, labels ...string) *Metrics {
	m := &Metrics{reg: reg, prefix: prefix}
	all := append(labels[:len(labels):len(labels)], "collection")
	m.responses = m.Counter("responses_total", "Responses that were handed to gRPC.", all...)
	m.bytes = m.Counter("response_bytes_total", "Bytes of these responses.", all...)
	m.acks = m.Counter("acks_total", "Responses that sinks acknowledged.", all...)
	m.nacks = m.Counter("nacks_total", "Responses that sinks refused. An istiod never does.", all...)
	m.Sinks = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: m.name("sinks"), Help: "Open streams whose profile is known.",
	}, labels)
	m.duration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: m.name("push_duration_seconds"), Help: "Time from handing a response to gRPC to its ACK or NACK.",
		Buckets: prometheus.ExponentialBuckets(0.0001, 4, 10), // to 26 s
	}, labels)
	m.register(m.Sinks)
	m.register(m.duration)
	return m
}

// Counter makes a counter of the protocol's own.
func (m *Metrics) Counter(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.name(name), Help: help}, labels)
	m.register(c)
	return c
}

func (m *Metrics) name(s string) string { return "isthmus_" + m.prefix + "_" + s }

func (m *Metrics) register(c prometheus.Collector) {
	if m.reg == nil || m.wrong != nil {
		return
	}
	if err := m.reg.Register(c); err != nil {
		m.wrong = fmt.Errorf("%s metrics: %w", m.prefix, err)
	}
}

// Err returns why the metrics could not be registered, if so.
func (m *Metrics) Err() error { return m.wrong }

// counters are the metrics of one subscription, looked up once per profile.
type counters struct {
	responses, bytes, acks, nacks prometheus.Counter
	duration                      prometheus.Observer
}

// Count makes a subscription count under labels; the collection comes from a
// bounded set.
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

func clip(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit]
	}
	return strings.ToValidUTF8(strings.Clone(s), "")
}
