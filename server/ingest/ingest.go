package ingest

import (
	"cmp"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
)

type op = store.Op[*resource.Resource]

// Options tune an Ingest. The zero value works.
type Options struct {
	// MaxResources is the number of resources that one registry may have; what comes beyond is refused and listed.
	// 0 means [DefaultMaxResources].
	MaxResources int
	// MaxBytes is the number of bytes that the resources of one registry may have together, by [resource.Part.Size]; as above.
	// 0 means [DefaultMaxBytes].
	MaxBytes int
	// Selector returns the value of [resource.SelectorLabel] for the instances of a ServiceEntry, given the name of the
	// entry without its namespace. Nil means the name itself.
	Selector func(name string) string
	// Validate says what istiod would reject in a body that decodes: istiod itself tells nobody. Nil means that everything that
	// decodes is served.
	Validate func(body proto.Message) error
}

// Defaults of [Options].
const (
	DefaultMaxResources = 1_000_000
	DefaultMaxBytes     = 512 << 20
)

// Limits of what is kept for people, per process or registry.
const (
	maxChanges  = 1_000
	maxProblems = 10_000
)

// Ingest is all registries together. Its methods may be called from any goroutine.
type Ingest struct {
	options Options
	store   *store.Store[*resource.Resource]
	log     *slog.Logger
	metrics *metrics
	behind  atomic.Int64 // registries that lack a first listing

	mu         sync.Mutex
	registries []*Registry               // in the order of the configuration; set once
	vips       map[netip.Addr][]claimant // guarded by mu; the hosts that hash to an address
	changes    []Change                  // guarded by mu; a ring
	next       int                       // guarded by mu; where the next change goes
}

// Change is one change of the store, for people.
type Change struct {
	Time       time.Time      `json:"time"`
	Registry   string         `json:"registry"`
	Collection string         `json:"collection"`
	Name       string         `json:"name"`
	Op         string         `json:"op"` // upsert or remove
	Version    string         `json:"version,omitempty"`
	Revision   store.Revision `json:"revision"` // of the store after the batch that the change came in
}

// Status is a registry as people want to see it.
type Status struct {
	Registry     string         `json:"registry"`
	Synced       bool           `json:"synced"`                 // a first listing is complete
	Listing      bool           `json:"listing"`                // a new listing is coming in
	ListingSince time.Time      `json:"listing_since,omitzero"` // of the first of those that are not complete yet
	Down         string         `json:"down,omitempty"`         // why there is no plugin
	Error        string         `json:"error,omitempty"`        // why the plugin can not follow its registry
	Detail       string         `json:"detail,omitempty"`
	Since        time.Time      `json:"since"`     // of the above
	Services     uint64         `json:"services"`  // that the plugin knows of
	Instances    uint64         `json:"instances"` // the same
	Resources    map[string]int `json:"resources"` // served, by collection
	Bytes        int            `json:"bytes"`     // of all resources, as [Options.MaxBytes] counts
	Problems     int            `json:"problems"`
	Revision     store.Revision `json:"revision"` // of the store after the last change
}

// Stale says whether what is served may be older than what the registry holds.
func (s Status) Stale() bool { return s.Down != "" || s.Error != "" }

// Problem is something that cannot be served as it is.
type Problem struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
}

type metrics struct {
	changes   *prometheus.CounterVec
	refused   *prometheus.CounterVec
	resources *prometheus.GaugeVec
	bytes     *prometheus.GaugeVec
	listing   *prometheus.GaugeVec
	synced    *prometheus.GaugeVec
	stale     *prometheus.GaugeVec
	problems  *prometheus.GaugeVec
	services  *prometheus.GaugeVec
	instances *prometheus.GaugeVec
	revision  prometheus.GaugeFunc
}

func newMetrics(st *store.Store[*resource.Resource]) *metrics {
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	return &metrics{
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_changes_total", Help: "Changes of resources that came from a registry.",
		}, []string{"registry", "collection", "op"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_refused_total", Help: "Resources from a plugin that were refused; the last good one is kept.",
		}, []string{"registry"}),
		resources: gauge("isthmus_resources", "Resources that are served.", "registry", "collection"),
		bytes:     gauge("isthmus_registry_bytes", "Bytes of the registry's resources, as limits.bytes_per_registry counts them.", "registry"),
		listing:   gauge("isthmus_registry_listing_since_timestamp_seconds", "Since when the registry's listing is incomplete. Absent while it is complete.", "registry"),
		synced:    gauge("isthmus_registry_synced", "1 when the registry has completed a first listing.", "registry"),
		stale:     gauge("isthmus_registry_stale", "1 while the registry cannot be followed; what is known of it is kept.", "registry"),
		problems:  gauge("isthmus_registry_problems", "Things in the registry that cannot be served as they are.", "registry"),
		services:  gauge("isthmus_registry_services", "Services that the registry's plugin knows of.", "registry"),
		instances: gauge("isthmus_registry_instances", "Instances that the registry's plugin knows of.", "registry"),
		revision: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "isthmus_store_revision", Help: "Changes that the store has seen since the process started.",
		}, func() float64 { return float64(st.Revision()) }),
	}
}

// New returns an Ingest of registries by name, in the order of the configuration. It registers its metrics.
func New(st *store.Store[*resource.Resource], registries []string, o Options, log *slog.Logger, reg prometheus.Registerer) (*Ingest, error) {
	o.MaxResources = cmp.Or(o.MaxResources, DefaultMaxResources)
	o.MaxBytes = cmp.Or(o.MaxBytes, DefaultMaxBytes)
	if o.Validate == nil {
		o.Validate = func(proto.Message) error { return nil }
	}
	if o.Selector == nil {
		o.Selector = func(name string) string { return name }
	}
	i := &Ingest{options: o, store: st, log: log, metrics: newMetrics(st), vips: make(map[netip.Addr][]claimant)}
	for _, c := range []prometheus.Collector{
		i.metrics.changes, i.metrics.refused, i.metrics.resources, i.metrics.bytes, i.metrics.listing, i.metrics.synced, i.metrics.stale,
		i.metrics.problems, i.metrics.services, i.metrics.instances, i.metrics.revision,
	} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	for n, name := range registries {
		r := &Registry{
			ingest: i, name: name, order: n, log: log.With("registry", name),
			services: make(map[string]*service), of: make(map[string]*service), plain: make(map[key]*plain), published: make(map[string]int),
			problems: make(map[string]string), own: make(map[string]refusal), shadowed: make(map[key]string), kept: make(map[string]int),
		}
		r.status = Status{Registry: name, Since: time.Now()}
		i.registries = append(i.registries, r)
		i.metrics.synced.WithLabelValues(name).Set(0)
		i.metrics.stale.WithLabelValues(name).Set(0)
		i.metrics.problems.WithLabelValues(name).Set(0)
		i.metrics.refused.WithLabelValues(name).Add(0)
		i.metrics.bytes.WithLabelValues(name).Set(0)
		r.countServedLocked()
	}
	i.behind.Store(int64(len(registries)))
	return i, nil
}

// tickEvery is how often [Ingest.Run] looks.
const tickEvery = 5 * time.Second

// Run says in the log, until ctx ends, what only time brings about: that a listing is still not complete, and what the bounds of
// the log kept back.
func (i *Ingest) Run(ctx context.Context) error {
	t := time.NewTicker(tickEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		i.mu.Lock()
		for _, r := range i.registries {
			r.tickLocked()
		}
		i.mu.Unlock()
	}
}

// Registry returns the registry of that name, nil if there is none.
func (i *Ingest) Registry(name string) *Registry {
	for _, r := range i.registries {
		if r.name == name {
			return r
		}
	}
	return nil
}

// Synced says whether every registry has completed a first listing. It takes no lock.
func (i *Ingest) Synced() bool { return i.behind.Load() == 0 }

// Ready says whether the collection is open: no registry that may publish to it lacks its first listing.
func (i *Ingest) Ready(coll string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return len(i.waitingLocked(coll)) == 0
}

// Waiting returns the registries that hold a collection back.
func (i *Ingest) Waiting(coll string) []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.waitingLocked(coll)
}

func (i *Ingest) waitingLocked(coll string) (names []string) {
	for _, r := range i.registries {
		if !r.status.Synced && r.mayPublishLocked(coll) {
			names = append(names, r.name)
		}
	}
	return names
}

// Changes returns the newest changes, newest first, at most 1,000.
func (i *Ingest) Changes() []Change {
	i.mu.Lock()
	defer i.mu.Unlock()
	out := make([]Change, 0, len(i.changes))
	for n := range len(i.changes) {
		out = append(out, i.changes[(i.next-1-n+2*len(i.changes))%len(i.changes)])
	}
	return out
}

// commitLocked applies operations and notes them. It reports whether anything changed.
func (i *Ingest) commitLocked(registry string, ops []op) bool {
	if len(ops) == 0 {
		return false
	}
	rev, changed := i.store.Apply(ops)
	if changed == 0 {
		return false
	}
	now := time.Now()
	for len(ops) > 0 {
		n := 1
		for n < len(ops) && sameName(ops[0], ops[n]) {
			n++
		}
		if o := seen(ops[:n]); o != nil {
			i.noteLocked(o, registry, now, rev)
		}
		ops = ops[n:]
	}
	return true
}

// sameName says whether two operations are about the shapes of one resource.
func sameName(a, b op) bool {
	collA, _ := resource.Collection(a.Collection)
	collB, _ := resource.Collection(b.Collection)
	return collA == collB && a.Name == b.Name
}

// seen returns the operation that stands for those on all shapes of one resource, which are one change for people; nil if none
// changed anything. The inline shape, which comes first, changes whenever the other does, but for what is there in one shape only.
func seen(ops []op) (o *op) {
	for n := range ops {
		if ops[n].Changed && (o == nil || o.Remove) {
			o = &ops[n]
		}
	}
	return o
}

// noteLocked notes a change for people.
func (i *Ingest) noteLocked(o *op, registry string, now time.Time, rev store.Revision) {
	coll, _ := resource.Collection(o.Collection)
	c := Change{Time: now, Collection: coll, Name: o.Name, Op: "upsert", Registry: registry, Revision: rev}
	if o.Remove {
		c.Op = "remove"
	} else {
		c.Version, c.Registry = o.Value.Version(), o.Value.Registry()
	}
	i.metrics.changes.WithLabelValues(registry, coll, c.Op).Inc()
	if len(i.changes) < maxChanges {
		i.changes = append(i.changes, c)
		i.next = len(i.changes) % maxChanges
		return
	}
	i.changes[i.next] = c
	i.next = (i.next + 1) % maxChanges
}

// claimant is a host that hashes to an address.
type claimant struct {
	host     string
	services int  // that have it
	first    bool // the address is its first choice
}

// before says whether the address is c's rather than d's: it goes to those whose first choice it is, and then by name. So it hangs on nothing but the
// set of hosts.
func (c *claimant) before(d *claimant) bool {
	if c.first != d.first {
		return c.first
	}
	return c.host < d.host
}

// hasVIPLocked says whether a host has an address that it hashes to.
func (i *Ingest) hasVIPLocked(host string, addr netip.Addr) bool {
	all := i.vips[addr]
	n := slices.IndexFunc(all, func(c claimant) bool { return c.host == host })
	return n >= 0 && !slices.ContainsFunc(all, func(c claimant) bool { return c.host != host && c.before(&all[n]) })
}

// vipLocked returns the address of a host, "" if both that it hashes to are those of others. Of 100,000 hosts some 30 need their second one.
func (i *Ingest) vipLocked(host string) string {
	for _, addr := range resource.VIPs(host) {
		if i.hasVIPLocked(host, addr) {
			return addr.String()
		}
	}
	return ""
}

// countHostLocked notes that a service has (delta 1) or had (delta -1) a host, and returns the services whose address that
// may change: those of other hosts that hash to the same address, and have or want it.
func (i *Ingest) countHostLocked(host string, delta int) (others []string) {
	choices := resource.VIPs(host)
	for n, addr := range choices {
		if n > 0 && addr == choices[0] {
			break
		}
		all := i.vips[addr]
		at := slices.IndexFunc(all, func(c claimant) bool { return c.host == host })
		if at < 0 {
			at = len(all)
			all = append(all, claimant{host: host, first: n == 0})
		}
		all[at].services += delta
		me := all[at]
		if me.services <= 0 {
			all = slices.Delete(all, at, at+1)
		}
		if i.vips[addr] = all; len(all) == 0 {
			delete(i.vips, addr)
		}
		for _, c := range all {
			if me.before(&c) && (c.first || !i.hasVIPLocked(c.host, resource.VIPs(c.host)[0])) {
				others = append(others, c.host)
			}
		}
	}
	return others
}

// Registries returns the state of all registries, in the order of the configuration.
func (i *Ingest) Registries() []Status {
	out := make([]Status, 0, len(i.registries))
	for _, r := range i.registries {
		out = append(out, r.Status())
	}
	return out
}

// ServiceStatus is a service as people want to see it.
type ServiceStatus struct {
	Registry  string   `json:"registry"`
	Name      string   `json:"name"` // of its ServiceEntry
	Hosts     []string `json:"hosts"`
	Endpoints int      `json:"endpoints"`
	Version   string   `json:"version"`
	// ShadowedBy is the registry that owns the name; the service is kept back then. It is empty if the service is served.
	ShadowedBy string `json:"shadowed_by,omitempty"`
}

// Services returns the services of all registries, by registry and name.
func (i *Ingest) Services() []ServiceStatus {
	i.mu.Lock()
	defer i.mu.Unlock()
	var out []ServiceStatus
	for _, r := range i.registries {
		first := len(out)
		for name, s := range r.services {
			out = append(out, ServiceStatus{
				Registry: r.name, Name: name, Hosts: s.svc.Entry().Hosts(), Endpoints: s.svc.Len(),
				Version:    s.svc.Resource(resource.Inline).Version(),
				ShadowedBy: r.shadowed[key{collection.ServiceEntry, name}],
			})
		}
		slices.SortFunc(out[first:], func(a, b ServiceStatus) int { return strings.Compare(a.Name, b.Name) })
	}
	return out
}
