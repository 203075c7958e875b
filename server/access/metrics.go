package access

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics are the metrics of all gates.
type Metrics struct {
	refused *prometheus.CounterVec
	reviews *prometheus.CounterVec
	expiry  *prometheus.Desc
	lately  Refusals

	mu    sync.Mutex
	gates map[*Gate]struct{} // guarded by mu
}

// NewMetrics registers the metrics.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		refused: promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_access_refused_total", Help: "Connections, streams and requests that a listener refused: plaintext where it has TLS, tls where it has none, a failed handshake, no fitting rule, a token review that could not be made, busy with wrong passwords of the same address, a request for another host.",
		}, []string{"listener", "reason"}),
		reviews: promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_access_token_reviews_total", Help: "Tokens that the API server of Kubernetes was asked about: of a service account, of a stranger, failed. Those asked about shortly before are not counted.",
		}, []string{"listener", "outcome"}),
		expiry: prometheus.NewDesc("isthmus_tls_certificate_expiry_timestamp_seconds", "When the certificate in use at a listener ends.", []string{"listener"}, nil),
		gates:  make(map[*Gate]struct{}),
	}
	reg.MustRegister(m)
	return m
}

func (m *Metrics) add(g *Gate) {
	for _, reason := range []string{reasonPlaintext, reasonTLS, reasonHandshake, reasonRule, reasonReview, reasonBusy, reasonHost} {
		m.refused.WithLabelValues(g.field(), reason)
	}
	for _, outcome := range []string{reviewAccount, reviewStranger, reviewFailed} {
		m.reviews.WithLabelValues(g.field(), outcome)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gates[g] = struct{}{}
}

func (m *Metrics) remove(g *Gate) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.gates, g)
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) { ch <- m.expiry }

// Collect implements prometheus.Collector. It notices files that were renewed.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, g := range m.all() {
		if p := g.policy.Load(); p.tls != nil {
			_, until := p.tls.valid()
			ch <- prometheus.MustNewConstMetric(m.expiry, prometheus.GaugeValue, float64(until.Unix()), g.listener)
			g.checkFiles(p)
		}
	}
}
