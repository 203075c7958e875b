package state

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are those of all registries.
type metrics struct {
	changes, refused                                                        *prometheus.CounterVec
	resources, bytes, listing, synced, stale, problems, services, instances *prometheus.GaugeVec
}

func newMetrics(d *DB, reg prometheus.Registerer) (*metrics, error) {
	registry := []string{"registry"}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, append(registry, labels...))
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, append(registry, labels...))
	}
	m := &metrics{
		changes:   counter("isthmus_changes_total", "Changes of resources that came from a registry.", "collection", "op"),
		refused:   counter("isthmus_refused_total", "Resources from a plugin that were refused; the last good one is kept."),
		resources: gauge("isthmus_resources", "Resources that are served.", "collection"),
		bytes:     gauge("isthmus_registry_bytes", "Bytes of the registry's resources, as limits.bytes_per_registry counts them."),
		listing:   gauge("isthmus_registry_listing_since_timestamp_seconds", "Since when the registry's listing is incomplete. Absent while it is complete."),
		synced:    gauge("isthmus_registry_synced", "1 when the registry has completed a first listing."),
		stale:     gauge("isthmus_registry_stale", "1 while the registry cannot be followed; what is known of it is kept."),
		problems:  gauge("isthmus_registry_problems", "Things in the registry that cannot be served as they are."),
		services:  gauge("isthmus_registry_services", "Services that the registry's plugin knows of."),
		instances: gauge("isthmus_registry_instances", "Instances that the registry's plugin knows of."),
	}
	revision := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "isthmus_store_revision", Help: "Changes that the store has seen since the process started.",
	}, func() float64 { return float64(d.Revision()) })
	for _, c := range []prometheus.Collector{
		m.changes, m.refused, m.resources, m.bytes, m.listing, m.synced, m.stale, m.problems, m.services, m.instances, revision,
	} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("state metrics: %w", err)
		}
	}
	return m, nil
}

// begin makes the series of a registry, to be there before anything happens.
func (m *metrics) begin(r *Registry) {
	m.setStale(r)
	m.setProblems(r)
	m.setServed(r)
	m.synced.WithLabelValues(r.name).Set(0)
	m.setBytes(r)
	m.refused.WithLabelValues(r.name).Add(0)
}

func (m *metrics) setBytes(r *Registry) { m.bytes.WithLabelValues(r.name).Set(float64(r.bytes)) }

func (m *metrics) setListing(r *Registry) {
	if !r.status.Listing {
		m.listing.DeleteLabelValues(r.name)
		return
	}
	m.listing.WithLabelValues(r.name).Set(float64(r.status.ListingSince.Unix()))
}

func (m *metrics) setStale(r *Registry) {
	stale := 0.0
	if r.status.Stale() {
		stale = 1
	}
	m.stale.WithLabelValues(r.name).Set(stale)
}

func (m *metrics) setSynced(r *Registry) { m.synced.WithLabelValues(r.name).Set(1) }

func (m *metrics) setProblems(r *Registry) {
	m.problems.WithLabelValues(r.name).Set(float64(r.status.Problems))
}

func (m *metrics) setServed(r *Registry) {
	for coll, n := range r.served {
		m.resources.WithLabelValues(r.name, coll).Set(float64(n))
	}
}

func (m *metrics) setSizes(r *Registry) {
	m.services.WithLabelValues(r.name).Set(float64(r.status.Services))
	m.instances.WithLabelValues(r.name).Set(float64(r.status.Instances))
}
