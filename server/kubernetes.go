package server

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// consumer is a configured API server that is written to.
type consumer struct {
	of config.Kubernetes
	*kubernetes.Consumer
	release func()             // of its view
	end     context.CancelFunc // nil until it runs
}

// makerOf returns how the objects of a consumer are made.
func makerOf(k *config.Kubernetes) kubernetes.Maker {
	meta := kubernetes.Meta{Consumer: k.Name, Labels: k.Labels, Annotations: k.Annotations}
	switch k.Publish {
	case config.PublishServices:
		return &kubernetes.Services{Meta: meta, ClusterIP: k.ClusterIP}
	case config.PublishWorkloads:
		return &kubernetes.Workloads{Meta: meta}
	}
	return &kubernetes.Stub{Meta: meta, Waypoint: k.Waypoint.Name, WaypointNamespace: k.Waypoint.Namespace}
}

// narrowed returns what a view of the configuration selects.
func (s *Server) narrowed(v config.View) (part *view.View, release func()) {
	if v.IsZero() {
		return s.view, func() {}
	}
	return s.view.Narrow(view.Filter{Registries: v.Registries, Namespaces: v.Namespaces, Hosts: v.Hosts, Shards: v.Shards()})
}

// Planned is the objects of a service in Kubernetes.
type Planned struct {
	Hosts   []string
	Objects []*unstructured.Unstructured
}

// Plan returns the objects of a consumer, sorted by the name of the service,
// and the resources that have none with the reason.
func (s *Server) Plan(k *config.Kubernetes) (planned []Planned, without []Problem) {
	part, release := s.narrowed(k.View)
	defer release()
	maker := makerOf(k)
	var records []*state.Record
	for c := range part.Changes(maker.Reads(), new(state.Cursor)) {
		if !c.Removed {
			records = append(records, c.Record)
		}
	}
	slices.SortFunc(records, func(a, b *state.Record) int { return strings.Compare(a.Name(), b.Name()) })
	for _, r := range records {
		p := maker.Plan(r)
		planned = append(planned, Planned{r.Hosts(), p.Objects})
		for _, name := range slices.Sorted(maps.Keys(p.Without)) {
			without = append(without, Problem{r.Registry(), state.Problem{ID: "object of " + name, Reason: p.Without[name]}})
		}
	}
	return planned, without
}

// newConsumers returns the consumers of a configuration: those that run if
// their blocks are the same, and new ones that do not run yet.
func (s *Server) newConsumers(cfg *config.Config) (all []*consumer, found config.Problems) {
	s.mu.Lock()
	before := slices.Clone(s.consumers)
	s.mu.Unlock()
	for i := range cfg.Consumers.Kubernetes {
		k := &cfg.Consumers.Kubernetes[i]
		if n := slices.IndexFunc(before, func(c *consumer) bool { return reflect.DeepEqual(c.of, *k) }); n >= 0 {
			all = append(all, before[n])
			continue
		}
		o := kubernetes.Options{
			Make: makerOf(k), Kubeconfig: k.Kubeconfig, Namespaces: k.View.Namespaces, LeaseNamespace: k.LeaseNamespace,
			Has: s.options.Shards.Has, WritesPerSecond: k.WritesPerSecond, Complete: s.allListed,
		}
		if shards := s.options.Shards; !shards.All() {
			o.Shard = strings.ReplaceAll(shards.String(), "/", "-of-")
		}
		part, release := s.narrowed(k.View)
		made, err := kubernetes.New(part, o, s.log)
		if err != nil {
			release()
			at := fmt.Sprintf("consumers.kubernetes[%d].kubeconfig", i)
			found = append(found, &config.Problem{File: cfg.File(), Position: cfg.Position(at), Field: at, Reason: err.Error()})
			continue
		}
		all = append(all, &consumer{of: *k, Consumer: made, release: release})
	}
	return all, found
}

// dropConsumers releases consumers that do not run.
func dropConsumers(all []*consumer) {
	for _, c := range all {
		if c.end == nil {
			c.release()
		}
	}
}

// runConsumers runs consumers until ctx ends, and ends those that run and are
// not among them. Their objects stay.
func (s *Server) runConsumers(ctx context.Context, group *errgroup.Group, all []*consumer) {
	s.mu.Lock()
	before := s.consumers
	s.consumers = all
	s.mu.Unlock()
	for _, c := range before {
		if !slices.Contains(all, c) {
			c.end()
		}
	}
	for _, c := range all {
		if c.end != nil {
			continue
		}
		var own context.Context
		own, c.end = context.WithCancel(ctx)
		group.Go(func() error {
			defer c.release()
			defer c.end()
			c.Run(own)
			return nil
		})
	}
}

// allListed reports whether every registry has completed a first listing since
// the start, so that what is not served is nowhere.
func (s *Server) allListed() bool {
	return !slices.ContainsFunc(s.db.Registries(), func(st state.Status) bool { return !st.Synced })
}

// allConsumers returns the consumers of the configuration in force.
func (s *Server) allConsumers() []*consumer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.consumers)
}

// ofConsumers describes the consumers for display.
func (s *Server) ofConsumers() (out []admin.Consumer) {
	for _, c := range s.allConsumers() {
		out = append(out, admin.Consumer{Status: c.Status(), Kubeconfig: c.of.Kubeconfig, All: c.Objects})
	}
	return out
}

// judgeConsumers returns what is wrong with consumers.
func (s *Server) judgeConsumers(now time.Time) (found []conditions.Condition) {
	for _, c := range s.allConsumers() {
		st := c.Status()
		subject := "consumer " + st.Name
		if st.Error != "" && now.Sub(st.Since) > startPatience {
			found = append(found, conditions.New(conditions.ObjectsNotWritten, subject, st.Since, "nothing can be written to Kubernetes: %s", st.Error))
			continue
		}
		if first := st.NotWritten; first != nil {
			refused := st.Objects[kubernetes.Refused] + st.Objects[kubernetes.Conflict]
			found = append(found, conditions.New(conditions.ObjectsNotWritten, subject, first.Since, "%d of its objects are not written, one of them %s: %s", refused, first.Name, first.Reason))
		}
	}
	return found
}

// consumerMetrics implements [prometheus.Collector] for the consumers.
type consumerMetrics struct {
	s                       *Server
	objects, writer, writes *prometheus.Desc
}

func newConsumerMetrics(s *Server) *consumerMetrics {
	return &consumerMetrics{
		s:       s,
		objects: prometheus.NewDesc("isthmus_consumer_objects", "Objects of a consumer by state; without is services that have none.", []string{"consumer", "state"}, nil),
		writer:  prometheus.NewDesc("isthmus_consumer_writer", "1 while this process holds the Lease of the consumer and writes.", []string{"consumer"}, nil),
		writes:  prometheus.NewDesc("isthmus_consumer_writes_total", "Writes of a consumer by result: applied, removed or failed.", []string{"consumer", "result"}, nil),
	}
}

// Describe implements [prometheus.Collector].
func (m *consumerMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.objects
	ch <- m.writer
	ch <- m.writes
}

// Collect implements [prometheus.Collector].
func (m *consumerMetrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	for _, c := range m.s.allConsumers() {
		st := c.Status()
		for of, n := range st.Objects {
			gauge(m.objects, n, st.Name, string(of))
		}
		gauge(m.objects, st.Without, st.Name, string(kubernetes.Without))
		writer := 0
		if st.Writer {
			writer = 1
		}
		gauge(m.writer, writer, st.Name)
		for result, n := range map[string]uint64{"applied": st.Writes.Applied, "removed": st.Writes.Removed, "failed": st.Writes.Failed} {
			ch <- prometheus.MustNewConstMetric(m.writes, prometheus.CounterValue, float64(n), st.Name, result)
		}
	}
}
