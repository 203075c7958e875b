package ingest

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/resource"
)

// key names a resource.
type key struct{ collection, name string }

// service is a ServiceEntry with the instances that belong to it, as the plugin said.
type service struct {
	svc       *resource.Service
	seen      uint64            // the listing that mentioned the entry last
	instances map[string]uint64 // the same for each instance, by name
	host      string            // that is counted in Ingest.vips
}

// plain is a resource that is served as it is.
type plain struct {
	res  *resource.Resource
	seen uint64
}

// Registry is what one registry's plugin said. Its methods may be called from any goroutine; batches are applied one after the
// other.
type Registry struct {
	ingest *Ingest
	name   string
	order  int
	log    *slog.Logger

	// all guarded by ingest.mu
	status      Status
	collections []string // that the plugin may publish to; nil until it said so
	listing     uint64   // number of the present listing
	services    map[string]*service
	of          map[string]*service // by name of an instance
	plain       map[key]*plain
	published   map[string]int    // number of plain ones by collection
	shadowed    map[key]string    // names that another registry owns, and which
	problems    map[string]string // that the plugin listed
	own         map[string]string // that the host found
	resources   int               // entries, instances and plain ones
}

// Begin says that a plugin begins a listing. What it does not mention until it is synced will be removed then. The collections are those
// that it may publish to.
func (r *Registry) Begin(collections []string) {
	r.ingest.mu.Lock()
	defer r.ingest.mu.Unlock()
	r.collections = slices.Clone(collections)
	r.listing++
	r.status.Listing = true
	r.setStateLocked(func(s *Status) { s.Down, s.Error, s.Detail = "", "", "" })
	clear(r.problems)
	r.countProblemsLocked()
	r.ingest.store.Wake()
}

// Down says that there is no plugin, and why. Everything stays as it is.
func (r *Registry) Down(err error) {
	r.ingest.mu.Lock()
	defer r.ingest.mu.Unlock()
	r.setStateLocked(func(s *Status) { s.Down = err.Error() })
}

func (r *Registry) setStateLocked(change func(*Status)) {
	before := r.status
	change(&r.status)
	if before.Down != r.status.Down || before.Error != r.status.Error || before.Detail != r.status.Detail {
		r.status.Since = time.Now()
	}
	stale := 0.0
	if r.status.Stale() {
		stale = 1
	}
	r.ingest.metrics.stale.WithLabelValues(r.name).Set(stale)
}

func (r *Registry) mayPublishLocked(coll string) bool {
	if r.collections == nil {
		return slices.Contains(collection.All(), coll)
	}
	return slices.Contains(r.collections, coll)
}

// batch collects the operations that come out of one message of the plugin.
type batch struct {
	r       *Registry
	ops     []op
	touched map[string]*service // entries to compose again, by name
	rehost  []string            // hosts whose address may have changed
}

// Apply carries out one message of the plugin. Nothing that the message holds can make it fail: what cannot be served is refused, counted
// and listed, and the last good one is kept.
func (r *Registry) Apply(m *pluginv1.WatchResponse) {
	// Taking resources apart is the expensive part and needs no lock.
	parts := make([]*resource.Part, len(m.GetUpserts()))
	errs := make([]error, len(parts))
	for n, u := range m.GetUpserts() {
		parts[n], errs[n] = resource.Parse(u.GetResource(), r.ingest.options.Validate)
	}

	i := r.ingest
	i.mu.Lock()
	defer i.mu.Unlock()
	b := &batch{r: r, touched: make(map[string]*service)}
	for _, rm := range m.GetRemovals() {
		b.removeLocked(rm.GetCollection(), rm.GetName())
	}
	// Entries before instances: a new service is composed once.
	for n, u := range m.GetUpserts() {
		switch {
		case errs[n] != nil:
		case u.GetService() == "":
			errs[n] = b.setLocked(parts[n])
		case isEntry(parts[n], u):
			errs[n] = b.setEntryLocked(parts[n])
		}
	}
	for n, u := range m.GetUpserts() {
		if errs[n] == nil && u.GetService() != "" && !isEntry(parts[n], u) {
			errs[n] = b.setInstanceLocked(parts[n], u.GetService())
		}
	}
	for n := range errs {
		r.noteLocked(m.GetUpserts()[n], parts[n], errs[n])
	}
	for _, p := range m.GetProblems() {
		r.problemLocked(p.GetId(), p.GetReason())
	}
	opened := false
	if m.GetSynced() {
		b.sweepLocked()
		opened = !r.status.Synced
		if opened || r.status.Listing {
			r.log.Info("listing complete", "services", len(r.services), "instances", len(r.of), "published", len(r.plain))
		}
		r.status.Synced, r.status.Listing = true, false
		i.metrics.synced.WithLabelValues(r.name).Set(1)
	}
	b.commitLocked()
	if st := m.GetStatus(); st != nil {
		was := r.status.Error
		r.setStateLocked(func(s *Status) { s.Error, s.Detail = st.GetError(), st.GetDetail() })
		switch {
		case was == "" && st.GetError() != "":
			r.log.Warn("the registry can not be followed; what is known is served", "err", st.GetError())
		case was != "" && st.GetError() == "":
			r.log.Info("the registry is followed again")
		}
	}
	if m.GetServices() != 0 || m.GetInstances() != 0 || m.GetSynced() || len(m.GetRemovals()) > 0 {
		r.status.Services, r.status.Instances = m.GetServices(), m.GetInstances()
		i.metrics.services.WithLabelValues(r.name).Set(float64(m.GetServices()))
		i.metrics.instances.WithLabelValues(r.name).Set(float64(m.GetInstances()))
	}
	r.countProblemsLocked()
	if opened {
		i.store.Wake()
	}
}

// isEntry says whether an upsert is a service's ServiceEntry.
func isEntry(p *resource.Part, u *pluginv1.Upsert) bool {
	return p.Collection() == collection.ServiceEntry && u.GetService() == p.Name()
}

// noteLocked lists what was refused, and takes what is accepted again off the list.
func (r *Registry) noteLocked(u *pluginv1.Upsert, p *resource.Part, err error) {
	var k key
	if p != nil {
		k = key{p.Collection(), p.Name()}
	}
	if invalid, ok := errors.AsType[*resource.Invalid](err); ok {
		k = key{invalid.Collection, invalid.Name}
	}
	id := "resource " + k.collection + " " + k.name
	if k.collection == "" {
		id = "resource of unknown kind " + strconv.QuoteToASCII(k.name)
	}
	if err == nil {
		delete(r.own, id)
		return
	}
	r.ingest.metrics.refused.WithLabelValues(r.name).Inc()
	r.keepLocked(k, u.GetService())
	reason := err.Error() + "; refused, the last good one is kept"
	if _, have := r.own[id]; r.own[id] == reason || !have && len(r.own) >= maxProblems {
		return
	}
	r.own[id] = reason
	r.log.Warn("resource refused", "id", id, "err", err)
}

// keepLocked notes that a listing mentioned a resource, although in a form that was refused: its last good content stays.
func (r *Registry) keepLocked(k key, serviceName string) {
	if pl := r.plain[k]; pl != nil {
		pl.seen = r.listing
	}
	switch k.collection {
	case collection.ServiceEntry:
		if s := r.services[k.name]; s != nil {
			s.seen = r.listing
		}
	case collection.WorkloadEntry:
		if s := r.of[k.name]; s != nil && serviceName != "" {
			s.instances[k.name] = r.listing
		}
	}
}

func (r *Registry) problemLocked(id, reason string) {
	if reason == "" {
		delete(r.problems, id)
		return
	}
	if _, have := r.problems[id]; have || len(r.problems) < maxProblems {
		r.problems[id] = reason
	}
}

func (r *Registry) countProblemsLocked() {
	r.status.Problems = len(r.problems) + len(r.own) + len(r.shadowed)
	r.ingest.metrics.problems.WithLabelValues(r.name).Set(float64(r.status.Problems))
}

// hasLocked says whether the plugin said that there is such a resource.
func (r *Registry) hasLocked(k key) bool {
	if k.collection == collection.ServiceEntry {
		if s := r.services[k.name]; s != nil && s.svc.Entry() != nil {
			return true
		}
	}
	return r.plain[k] != nil
}

// ownerLocked returns the registry whose resource of that name is served, nil if no one has it.
func (i *Ingest) ownerLocked(k key) *Registry {
	for _, r := range i.registries {
		if r.hasLocked(k) {
			return r
		}
	}
	return nil
}

// setLocked sets a resource that is served as it is.
func (b *batch) setLocked(p *resource.Part) error {
	r := b.r
	k := key{p.Collection(), p.Name()}
	if k.collection == collection.ServiceEntry && r.services[k.name] != nil {
		b.removeLocked(k.collection, k.name) // from a service to an entry that stands for itself
	}
	pl := r.plain[k]
	if pl == nil {
		if err := r.limitLocked(true); err != nil {
			return err
		}
		pl = &plain{}
		r.plain[k] = pl
		r.published[k.collection]++
		r.resources++
	}
	pl.seen = r.listing
	if pl.res != nil && pl.res.Version() == p.Version() {
		return nil
	}
	pl.res = resource.NewResource(p, r.name)
	b.publishPlainLocked(k)
	return nil
}

func (r *Registry) limitLocked(isNew bool) error {
	if isNew && r.resources >= r.ingest.options.MaxResources {
		return fmt.Errorf("the registry has %d resources already, the limit; raise limits.max_resources or filter in the adapter", r.resources)
	}
	return nil
}

// setEntryLocked sets the ServiceEntry of a service.
func (b *batch) setEntryLocked(p *resource.Part) error {
	r := b.r
	k := key{p.Collection(), p.Name()}
	if !p.Composable() {
		return resource.ErrNotComposable
	}
	if r.plain[k] != nil {
		b.removeLocked(k.collection, k.name) // the other way round
	}
	s := r.services[p.Name()]
	if err := r.limitLocked(s == nil || s.svc.Entry() == nil); err != nil {
		return err
	}
	if s == nil {
		s = r.newServiceLocked(p.Name())
	}
	if s.svc.Entry() == nil {
		r.resources++
	}
	s.seen = r.listing
	if !s.svc.SetEntry(p) {
		return nil
	}
	b.touched[p.Name()] = s
	b.countHostLocked(s)
	return nil
}

func (r *Registry) newServiceLocked(name string) *service {
	_, short, _ := strings.Cut(name, "/")
	s := &service{
		svc:       resource.NewService(r.name, r.ingest.options.Selector(short)),
		instances: make(map[string]uint64),
	}
	r.services[name] = s
	return s
}

// countHostLocked keeps the count of hosts by address after the entry changed.
func (b *batch) countHostLocked(s *service) {
	host := ""
	if s.svc.WantsVIP() {
		host = s.svc.Entry().Hosts()[0]
	}
	if host == s.host {
		return
	}
	i := b.r.ingest
	if s.host != "" {
		b.rehost = append(b.rehost, i.countHostLocked(s.host, -1)...)
	}
	if s.host = host; host != "" {
		b.rehost = append(b.rehost, i.countHostLocked(host, 1)...)
	}
}

func (b *batch) setInstanceLocked(p *resource.Part, serviceName string) error {
	r := b.r
	if p.Collection() != collection.WorkloadEntry {
		return fmt.Errorf("a %s can not be an instance of service %s; only a WorkloadEntry can", p.Collection(), serviceName)
	}
	s := r.services[serviceName]
	if s == nil || s.svc.Entry() == nil {
		return fmt.Errorf("its service %q is not there; its ServiceEntry has to come first, or in the same batch", serviceName)
	}
	if ns := s.svc.Entry().Namespace(); ns != p.Namespace() {
		return fmt.Errorf("it is in namespace %s and its service in %s; a workloadSelector reaches its own namespace only", p.Namespace(), ns)
	}
	was := r.of[p.Name()]
	if err := r.limitLocked(was == nil); err != nil {
		return err
	}
	if was != nil && was != s { // moved
		b.removeInstanceLocked(p.Name())
		was = nil
	}
	if was == nil {
		r.resources++
		r.of[p.Name()] = s
	}
	s.instances[p.Name()] = r.listing
	res := s.svc.SetInstance(p)
	if res == nil {
		return nil
	}
	b.touched[serviceName] = s
	if r.shadowed[key{collection.ServiceEntry, serviceName}] == "" {
		b.ops = append(b.ops, op{Collection: resource.Key(collection.WorkloadEntry, resource.Workload), Name: p.Name(), Value: res})
	}
	return nil
}

func (b *batch) removeInstanceLocked(name string) {
	r := b.r
	s := r.of[name]
	if s == nil {
		return
	}
	delete(r.of, name)
	delete(s.instances, name)
	r.resources--
	if !s.svc.RemoveInstance(name) {
		return
	}
	if e := s.svc.Entry(); e != nil {
		b.touched[e.Name()] = s
		if r.shadowed[key{collection.ServiceEntry, e.Name()}] != "" {
			return
		}
	}
	b.ops = append(b.ops, op{Collection: resource.Key(collection.WorkloadEntry, resource.Workload), Name: name, Remove: true})
}

func (b *batch) removeLocked(coll, name string) {
	r := b.r
	k := key{coll, name}
	delete(r.own, "resource "+coll+" "+name)
	if pl := r.plain[k]; pl != nil {
		delete(r.plain, k)
		r.published[coll]--
		r.resources--
		b.publishPlainLocked(k)
		return
	}
	if coll == collection.WorkloadEntry {
		b.removeInstanceLocked(name)
		return
	}
	s := r.services[name]
	if coll != collection.ServiceEntry || s == nil || s.svc.Entry() == nil {
		return
	}
	// Instances without their entry can not be served.
	for instance := range s.instances {
		b.removeInstanceLocked(instance)
	}
	s.svc.RemoveEntry()
	b.countHostLocked(s)
	delete(r.services, name)
	r.resources--
	b.touched[name] = s
}

// sweepLocked removes what the listing that is complete now did not mention.
func (b *batch) sweepLocked() {
	r := b.r
	if !r.status.Listing {
		return
	}
	removed := 0
	for name, s := range r.services {
		for instance, seen := range s.instances {
			if seen != r.listing {
				b.removeInstanceLocked(instance)
				removed++
			}
		}
		if s.seen != r.listing {
			b.removeLocked(collection.ServiceEntry, name)
			removed++
		}
	}
	for k, pl := range r.plain {
		if pl.seen != r.listing {
			b.removeLocked(k.collection, k.name)
			removed++
		}
	}
	if removed > 0 {
		r.log.Info("a complete new listing removed what it did not mention", "resources", removed)
	}
}

// publishPlainLocked brings the store up to date with who owns a name.
func (b *batch) publishPlainLocked(k key) {
	b.settleOwnersLocked(k)
	i := b.r.ingest
	owner := i.ownerLocked(k)
	var res *resource.Resource
	if owner != nil {
		if pl := owner.plain[k]; pl != nil {
			res = pl.res
		} else {
			b.touched[k.name] = owner.services[k.name]
			return
		}
	}
	for _, shape := range shapes(k.collection) {
		b.ops = append(b.ops, op{Collection: resource.Key(k.collection, shape), Name: k.name, Value: res, Remove: res == nil})
	}
}

// shapes returns the shapes in which a collection is kept apart.
func shapes(coll string) []resource.Shape {
	if resource.Key(coll, resource.Workload) == coll {
		return []resource.Shape{resource.Inline}
	}
	return []resource.Shape{resource.Inline, resource.Workload}
}

// settleOwnersLocked finds out who is kept back from a name, lists that, and publishes or withdraws the instances of services whose
// standing changed.
func (b *batch) settleOwnersLocked(k key) {
	i := b.r.ingest
	owner := i.ownerLocked(k)
	for _, r := range i.registries {
		was := r.shadowed[k]
		now := ""
		if r != owner && r.hasLocked(k) {
			now = owner.name
		}
		if was == now {
			continue
		}
		if now == "" {
			delete(r.shadowed, k)
		} else {
			r.shadowed[k] = now
			r.log.Warn("another registry owns the name; kept back", "collection", k.collection, "name", k.name, "owner", now)
		}
		if s := r.services[k.name]; s != nil && k.collection == collection.ServiceEntry {
			for _, res := range s.svc.Instances() {
				b.ops = append(b.ops, op{
					Collection: resource.Key(collection.WorkloadEntry, resource.Workload), Name: res.Name(), Value: res, Remove: now != "",
				})
			}
		}
		r.countProblemsLocked()
	}
}

// commitLocked composes the entries that were touched and applies everything as one.
func (b *batch) commitLocked() {
	r := b.r
	i := r.ingest
	for _, host := range b.rehost {
		for _, other := range i.registries {
			for name, s := range other.services {
				if s.host == host {
					b.touched[name] = s
				}
			}
		}
	}
	var removed []op
	for name := range b.touched {
		k := key{collection.ServiceEntry, name}
		b.settleOwnersLocked(k)
		owner := i.ownerLocked(k)
		for _, shape := range shapes(k.collection) {
			o := op{Collection: resource.Key(k.collection, shape), Name: name}
			switch {
			case owner == nil:
				o.Remove = true
				removed = append(removed, o)
				continue
			case owner.plain[k] != nil:
				o.Value = owner.plain[k].res
			default:
				s := owner.services[name]
				vip := ""
				if s.host != "" {
					vip = i.vipLocked(s.host)
				}
				s.svc.SetVIP(vip)
				o.Value = s.svc.Resource(shape)
			}
			b.ops = append(b.ops, o)
		}
	}
	b.ops = append(b.ops, removed...)
	slices.SortStableFunc(b.ops, func(a, b op) int {
		if c := strings.Compare(a.Collection, b.Collection); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	for n := range b.ops {
		coll, shape := resource.Collection(b.ops[n].Collection)
		if shape == resource.Workload && coll == collection.ServiceEntry {
			continue
		}
		word := "upsert"
		if b.ops[n].Remove {
			word = "remove"
		}
		i.metrics.changes.WithLabelValues(r.name, coll, word).Inc()
	}
	if i.commitLocked(r.name, b.ops) {
		r.status.Revision = i.store.Revision()
	}
	for coll, n := range r.countLocked() {
		i.metrics.resources.WithLabelValues(r.name, coll).Set(float64(n))
	}
}

// countLocked returns the number of resources by collection.
func (r *Registry) countLocked() map[string]int {
	n := maps.Clone(r.published)
	n[collection.ServiceEntry] += len(r.services)
	n[collection.WorkloadEntry] += len(r.of)
	return n
}

// Status returns the registry's state.
func (r *Registry) Status() Status {
	r.ingest.mu.Lock()
	defer r.ingest.mu.Unlock()
	s := r.status
	s.Resources = r.countLocked()
	return s
}

// Problems returns what cannot be served as it is, by id.
func (r *Registry) Problems() []Problem {
	r.ingest.mu.Lock()
	defer r.ingest.mu.Unlock()
	out := make([]Problem, 0, len(r.problems)+len(r.own)+len(r.shadowed))
	for id, reason := range r.problems {
		out = append(out, Problem{id, reason})
	}
	for id, reason := range r.own {
		out = append(out, Problem{id, reason})
	}
	for k, owner := range r.shadowed {
		out = append(out, Problem{
			"resource " + k.collection + " " + k.name,
			fmt.Sprintf("registry %q, which comes first in the configuration, has a resource of the same name; kept back. "+
				"Give one of the two another namespace (translate.namespace)", owner),
		})
	}
	slices.SortFunc(out, func(a, b Problem) int { return strings.Compare(a.ID, b.ID) })
	return out
}
