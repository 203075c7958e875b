package state

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	dto "github.com/prometheus/client_model/go"

	"github.com/isthmus-mesh/isthmus/server/state/conflict"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
)

type metrics struct {
	changes, rejected *prometheus.CounterVec
	resources, bytes, listing, restored, synced, stale, problems, reasons, skipped, services, instances,
	waiting, paused, removals, conflicts *prometheus.GaugeVec
}

func newMetrics(d *DB, reg prometheus.Registerer) *metrics {
	auto := promauto.With(reg)
	registry := []string{"registry"}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return auto.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, append(registry, labels...))
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return auto.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, append(registry, labels...))
	}
	m := &metrics{
		changes:   counter("isthmus_changes_total", "Changes of resources that came from a registry; an endpoint counts once, as a WorkloadEntry.", "collection", "op"),
		rejected:  counter("isthmus_rejected_total", "Resources from a plugin that were rejected; the last good one is served."),
		resources: gauge("isthmus_resources", "Resources that are served.", "collection"),
		bytes:     gauge("isthmus_registry_bytes", "Bytes of the registry's resources, as limits.bytes_per_registry counts them."),
		listing:   gauge("isthmus_registry_listing_since_timestamp_seconds", "Since when the registry's listing is incomplete. Absent while it is complete."),
		restored:  gauge("isthmus_registry_restored_timestamp_seconds", "Of when what is served of the registry is, while it was read from disk at the start. Absent from its first listing on."),
		synced:    gauge("isthmus_registry_synced", "1 when the registry has completed a first listing."),
		stale:     gauge("isthmus_registry_stale", "1 while the registry cannot be followed; nothing is removed meanwhile."),
		problems:  gauge("isthmus_registry_problems", "Things in the registry that cannot be served as they are."),
		reasons:   gauge("isthmus_registry_problem_reasons", "The same by the field of the configuration that would change it, or by what else it is.", "reason"),
		skipped:   gauge("isthmus_registry_skipped", "Things in the registry that are not meant to be served, by the field of the configuration that would change it.", "reason"),
		services:  gauge("isthmus_registry_services", "Services that the registry's plugin knows of."),
		instances: gauge("isthmus_registry_instances", "Instances that the registry's plugin knows of."),
	}
	m.paused = gauge("isthmus_registry_removal_paused", "1 while a removal of the registry looks like an accident and waits for a decision.")
	m.removals = gauge("isthmus_registry_removals", "Resources that are served although the registry no longer has them.")
	m.waiting = auto.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_waiting", Help: "1 while the collection waits for a registry to complete its first listing.",
	}, []string{"collection"})
	m.conflicts = auto.NewGaugeVec(prometheus.GaugeOpts{
		Name: "isthmus_conflicts", Help: "Hosts that several services have, by the policy of conflicts that holds.",
	}, []string{"policy"})
	reg.MustRegister(
		oldName{m.waiting, "isthmus_held", "isthmus_waiting", []string{"collection"}},
		oldName{m.paused, "isthmus_registry_protected", "isthmus_registry_removal_paused", registry},
		oldName{m.removals, "isthmus_registry_kept", "isthmus_registry_removals", registry},
		oldName{m.skipped, "isthmus_registry_left_out", "isthmus_registry_skipped", []string{"registry", "reason"}},
		oldName{m.rejected, "isthmus_refused_total", "isthmus_rejected_total", registry},
	)
	m.setConflicts(nil)
	auto.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "isthmus_store_revision", Help: "Changes that the store has seen since the process started.",
	}, func() float64 { return float64(d.Revision()) })
	return m
}

// oldName exports a metric under the name that it had before, for this release.
type oldName struct {
	of        prometheus.Collector
	name, now string
	labels    []string
}

func (o oldName) desc() *prometheus.Desc {
	return prometheus.NewDesc(o.name, "Until the next release: "+o.now+" under its former name.", o.labels, nil)
}

// Describe implements prometheus.Collector.
func (o oldName) Describe(ch chan<- *prometheus.Desc) { ch <- o.desc() }

// Collect implements prometheus.Collector.
func (o oldName) Collect(ch chan<- prometheus.Metric) {
	desc, all := o.desc(), make(chan prometheus.Metric)
	go func() { // ends with the loop below
		defer close(all)
		o.of.Collect(all)
	}()
	for m := range all {
		var now dto.Metric
		if err := m.Write(&now); err != nil {
			ch <- prometheus.NewInvalidMetric(desc, err)
			continue
		}
		values := make([]string, 0, len(o.labels))
		for _, name := range o.labels {
			for _, l := range now.GetLabel() {
				if l.GetName() == name {
					values = append(values, l.GetValue())
				}
			}
		}
		kind, value := prometheus.GaugeValue, now.GetGauge().GetValue()
		if now.GetCounter() != nil {
			kind, value = prometheus.CounterValue, now.GetCounter().GetValue()
		}
		ch <- prometheus.MustNewConstMetric(desc, kind, value, values...)
	}
}

// setConflicts sets the number of contested hosts by policy.
func (m *metrics) setConflicts(by map[Policy]int) {
	for _, p := range conflict.Policies {
		m.conflicts.WithLabelValues(string(p)).Set(float64(by[p]))
	}
}

// begin creates the series of a registry, so that they exist before its first
// event.
func (m *metrics) begin(r *Registry) {
	m.setStale(r)
	m.setProblems(r)
	m.setServed(r)
	m.synced.WithLabelValues(r.name).Set(0)
	m.setBytes(r)
	m.rejected.WithLabelValues(r.name).Add(0)
	m.setPaused(r)
}

// setWaiting sets which collections wait, given the registries that each waits
// for.
func (m *metrics) setWaiting(d *DB, waiting map[string][]string) {
	for name := range d.tables {
		m.waiting.WithLabelValues(name).Set(float64(min(len(waiting[name]), 1)))
	}
}

func (m *metrics) setPaused(r *Registry) {
	m.paused.WithLabelValues(r.name).Set(float64(min(r.guard.Pending, 1)))
	m.removals.WithLabelValues(r.name).Set(float64(len(r.guard.paused)))
}

func (m *metrics) setBytes(r *Registry) { m.bytes.WithLabelValues(r.name).Set(float64(r.bytes)) }

func (m *metrics) setListing(r *Registry) {
	if !r.status.Listing {
		m.listing.DeleteLabelValues(r.name)
		return
	}
	m.listing.WithLabelValues(r.name).Set(float64(r.status.ListingSince.Unix()))
}

func (m *metrics) setRestored(r *Registry) {
	if r.status.Restored.IsZero() {
		m.restored.DeleteLabelValues(r.name)
		return
	}
	m.restored.WithLabelValues(r.name).Set(float64(r.status.Restored.Unix()))
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
	m.problems.WithLabelValues(r.name).Set(float64(r.status.ProblemCount))
	for reason, n := range r.reported.By {
		m.reasons.WithLabelValues(r.name, reason).Set(float64(n))
	}
	for reason, n := range r.skipped.By {
		m.skipped.WithLabelValues(r.name, reason).Set(float64(n))
	}
	m.reasons.WithLabelValues(r.name, problems.OfRejection).Set(float64(len(r.rejected)))
	m.reasons.WithLabelValues(r.name, problems.OfNetwork).Set(float64(r.unaddressed))
	m.reasons.WithLabelValues(r.name, problems.OfShadow).Set(float64(r.shadowed + r.disputed))
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

func (m *metrics) forget(registry string) {
	labels := prometheus.Labels{"registry": registry}
	for _, v := range []interface {
		DeletePartialMatch(labels prometheus.Labels) int
	}{m.changes, m.rejected, m.resources, m.bytes, m.listing, m.synced, m.stale, m.problems, m.reasons, m.skipped, m.services, m.instances, m.restored, m.paused, m.removals} {
		v.DeletePartialMatch(labels)
	}
}
