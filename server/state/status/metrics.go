package status

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
)

// Source is what [Metrics] reads, whenever somebody reads the metrics.
type Source interface {
	Registries() []Registry
	Waiting(coll string) (registries []string)
	Contested() map[conflict.Policy]int
	Revision() changelog.Revision
}

// Metrics exports a source.
type Metrics struct{ Source Source }

// series is a metric of registries.
type series struct {
	name, old string // old is its name before, for this release; "" if the same
	help      string
	labels    []string // besides the registry
	kind      prometheus.ValueType
	values    func(r *Registry, emit func(value float64, labels ...string))
}

const (
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

// one emits one value.
func one[V int | uint64 | float64](of func(*Registry) V) func(*Registry, func(float64, ...string)) {
	return func(r *Registry, emit func(float64, ...string)) { emit(float64(of(r))) }
}

// since emits a time, unless it is zero.
func since(of func(*Registry) time.Time) func(*Registry, func(float64, ...string)) {
	return func(r *Registry, emit func(float64, ...string)) {
		if t := of(r); !t.IsZero() {
			emit(float64(t.Unix()))
		}
	}
}

// by emits a value for each key.
func by[M ~map[string]int](of func(*Registry) M) func(*Registry, func(float64, ...string)) {
	return func(r *Registry, emit func(float64, ...string)) {
		for key, n := range of(r) {
			emit(float64(n), key)
		}
	}
}

// sizes emits what a plugin counts, once it has counted.
func sizes(of func(*Registry) uint64) func(*Registry, func(float64, ...string)) {
	return func(r *Registry, emit func(float64, ...string)) {
		if r.Listed() || r.Services+r.Instances > 0 {
			emit(float64(of(r)))
		}
	}
}

func bit(on bool) int {
	if on {
		return 1
	}
	return 0
}

var ofRegistries = []series{
	{"isthmus_changes_total", "", "Changes of resources that came from a registry; an endpoint counts once, as a WorkloadEntry.", []string{"collection", "op"}, counter, func(r *Registry, emit func(float64, ...string)) {
		for c, n := range r.Changes {
			emit(float64(n.Load()), c.Collection, c.Op)
		}
	}},
	{"isthmus_rejected_total", "isthmus_refused_total", "Resources from a plugin that were rejected; the last good one is served.", nil, counter, one(func(r *Registry) uint64 { return r.Rejected })},
	{"isthmus_resources", "", "Resources that are served.", []string{"collection"}, gauge, by(func(r *Registry) map[string]int { return r.Resources })},
	{"isthmus_registry_bytes", "", "Bytes of the registry's resources, as limits.bytes_per_registry counts them.", nil, gauge, one(func(r *Registry) int { return r.Bytes })},
	{"isthmus_registry_listing_since_timestamp_seconds", "", "Since when the registry's listing is incomplete. Absent while it is complete.", nil, gauge, since(func(r *Registry) time.Time { return r.ListingSince })},
	{"isthmus_registry_restored_timestamp_seconds", "", "Of when what is served of the registry is, while it was read from disk at the start. Absent from its first listing on.", nil, gauge, since(func(r *Registry) time.Time { return r.Restored })},
	{"isthmus_registry_synced", "", "1 when the registry has completed a first listing.", nil, gauge, one(func(r *Registry) int { return bit(r.Synced) })},
	{"isthmus_registry_stale", "", "1 while the registry cannot be followed; nothing is removed meanwhile.", nil, gauge, one(func(r *Registry) int { return bit(r.Stale()) })},
	{"isthmus_registry_problems", "", "Things in the registry that cannot be served as they are.", nil, gauge, one(func(r *Registry) int { return r.ProblemCount })},
	{"isthmus_registry_problem_reasons", "", "The same by the field of the configuration that would change it, or by what else it is.", []string{"reason"}, gauge, by(func(r *Registry) map[string]int { return r.Reasons })},
	{"isthmus_registry_skipped", "isthmus_registry_left_out", "Things in the registry that are not meant to be served, by the field of the configuration that would change it.", []string{"reason"}, gauge, by(func(r *Registry) map[string]int { return r.Skips })},
	{"isthmus_registry_services", "", "Services that the registry's plugin knows of.", nil, gauge, sizes(func(r *Registry) uint64 { return r.Services })},
	{"isthmus_registry_instances", "", "Instances that the registry's plugin knows of.", nil, gauge, sizes(func(r *Registry) uint64 { return r.Instances })},
	{"isthmus_registry_removal_paused", "isthmus_registry_protected", "1 while a removal of the registry looks like an accident and waits for a decision.", nil, gauge, one(func(r *Registry) int { return bit(r.Protection != nil && r.Protection.Pending) })},
	{"isthmus_registry_removals", "isthmus_registry_kept", "Resources that are served although the registry no longer has them.", nil, gauge, one(func(r *Registry) int { return r.Removals })},
}

var (
	waiting    = prometheus.NewDesc("isthmus_waiting", "1 while the collection waits for a registry to complete its first listing.", []string{"collection"}, nil)
	oldWaiting = prometheus.NewDesc("isthmus_held", former("isthmus_waiting"), []string{"collection"}, nil)
	conflicts  = prometheus.NewDesc("isthmus_conflicts", "Hosts that several services have, by the policy of conflicts that holds.", []string{"policy"}, nil)
	revision   = prometheus.NewDesc("isthmus_store_revision", "Changes that the store has seen since the process started.", nil, nil)
)

func former(name string) string {
	return "Until the next release: " + name + " under its former name."
}

// descs returns the description of a series, and that of its old name if it has
// one.
func (s *series) descs() []*prometheus.Desc {
	labels := append([]string{"registry"}, s.labels...)
	out := []*prometheus.Desc{prometheus.NewDesc(s.name, s.help, labels, nil)}
	if s.old != "" {
		out = append(out, prometheus.NewDesc(s.old, former(s.name), labels, nil))
	}
	return out
}

// Describe implements prometheus.Collector.
func (m Metrics) Describe(ch chan<- *prometheus.Desc) {
	for i := range ofRegistries {
		for _, d := range ofRegistries[i].descs() {
			ch <- d
		}
	}
	for _, d := range []*prometheus.Desc{waiting, oldWaiting, conflicts, revision} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m Metrics) Collect(ch chan<- prometheus.Metric) {
	registries := m.Source.Registries()
	for i := range ofRegistries {
		s := &ofRegistries[i]
		descs := s.descs()
		for n := range registries {
			s.values(&registries[n], func(value float64, labels ...string) {
				for _, d := range descs {
					ch <- prometheus.MustNewConstMetric(d, s.kind, value, append([]string{registries[n].Registry}, labels...)...)
				}
			})
		}
	}
	for _, coll := range collection.All() {
		n := float64(bit(len(m.Source.Waiting(coll)) > 0))
		ch <- prometheus.MustNewConstMetric(waiting, gauge, n, coll)
		ch <- prometheus.MustNewConstMetric(oldWaiting, gauge, n, coll)
	}
	contested := m.Source.Contested()
	for _, p := range conflict.Policies {
		ch <- prometheus.MustNewConstMetric(conflicts, gauge, float64(contested[p]), string(p))
	}
	ch <- prometheus.MustNewConstMetric(revision, gauge, float64(m.Source.Revision()))
}
