package ingest

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
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
	seen      uint64 // the listing that mentioned the entry last
	instances map[string]serviceInstance
	host      string // that is counted in Ingest.vips
	keptBack  bool   // another registry owns the name of the entry; the instances claim no name then
}

// serviceInstance is an instance of a service, by the name of its WorkloadEntry.
type serviceInstance struct {
	res  *resource.Resource // for sinks of the shape workload
	seen uint64             // the listing that mentioned it last
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
	nameless    uint64   // number of the last listing in which something was refused that has no legible name
	services    map[string]*service
	of          map[string]*service // by name of an instance
	plain       map[key]*plain
	published   map[string]int     // number of plain ones by collection
	shadowed    map[key]string     // names that it claims and another registry owns, and which
	kept        map[string]int     // number of resources by collection that are kept back
	problems    map[string]string  // that the plugin listed
	known       map[string]string  // that it listed before the present listing
	own         map[string]refusal // that the host found
	unlisted    int                // of both, what there was no room for
	lines       lines              // that were logged about all of these
	states      lines              // that were logged about what the plugin can do
	resources   int                // entries, instances and plain ones
	bytes       int                // of these
	limit       string             // for which something was refused last
	limitAt     time.Time          // when that was
	patience    time.Duration      // age of the listing at which the log says so
}

// Begin says that a plugin begins a listing. What it does not mention until it is synced will be removed then. The collections are those
// that it may publish to.
func (r *Registry) Begin(collections []string) {
	r.ingest.mu.Lock()
	defer r.ingest.mu.Unlock()
	r.collections = slices.Clone(collections)
	r.listing++
	r.forgetProblemsLocked()
	if !r.status.Listing {
		r.status.Listing, r.status.ListingSince, r.patience = true, time.Now(), listingPatience
		r.ingest.metrics.listing.WithLabelValues(r.name).Set(float64(r.status.ListingSince.Unix()))
	}
	r.setStateLocked(func(s *Status) { s.Down, s.Error, s.Detail = "", "", "" })
	r.countProblemsLocked()
	r.ingest.store.Wake()
}

// Down says that there is no plugin, and why. Everything stays as it is.
func (r *Registry) Down(err error) {
	r.ingest.mu.Lock()
	defer r.ingest.mu.Unlock()
	r.summarizeLocked(true)
	if r.states.dropped > 0 {
		r.sayStateLocked()
	}
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
	touched []key       // resources whose content changed
	claims  []key       // names that the registry claims since the batch, or claims no longer
	others  []*Registry // other registries of which something is kept back since, or no longer
	rehost  []string    // hosts whose address may have changed
}

func (b *batch) touch(coll, name string) { b.touched = append(b.touched, key{coll, name}) }

func (b *batch) claim(coll, name string) { b.claims = append(b.claims, key{coll, name}) }

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
	b := &batch{r: r}
	for _, rm := range m.GetRemovals() {
		b.removeLocked(rm.GetCollection(), rm.GetName())
	}
	// Entries before instances: a new service is composed once.
	isInstance := func(n int) bool {
		u := m.GetUpserts()[n]
		return errs[n] == nil && u.GetService() != "" && !isEntry(parts[n], u)
	}
	for n, u := range m.GetUpserts() {
		switch {
		case isInstance(n):
			continue
		case errs[n] != nil:
		case u.GetService() == "":
			errs[n] = b.setLocked(parts[n])
		default:
			errs[n] = b.setEntryLocked(parts[n])
		}
		r.noteLocked(parts[n], errs[n])
	}
	for n, u := range m.GetUpserts() {
		if isInstance(n) {
			r.noteLocked(parts[n], b.setInstanceLocked(parts[n], u.GetService()))
		}
	}
	for _, p := range m.GetProblems() {
		r.problemLocked(p.GetId(), p.GetReason())
	}
	opened, listed := false, false
	if m.GetSynced() {
		b.sweepLocked()
		opened = !r.status.Synced
		listed = opened || r.status.Listing
		r.status.Synced, r.status.Listing, r.status.ListingSince = true, false, time.Time{}
		i.metrics.listing.DeleteLabelValues(r.name)
		i.metrics.synced.WithLabelValues(r.name).Set(1)
	}
	b.commitLocked()
	if listed {
		r.log.Info("listing complete", "services", len(r.services), "instances", len(r.of), "published", len(r.plain))
	}
	if st := m.GetStatus(); st != nil {
		was := r.status.Error
		r.setStateLocked(func(s *Status) { s.Error, s.Detail = st.GetError(), st.GetDetail() })
		if (was == "") != (st.GetError() == "") {
			r.stateChangedLocked()
		}
	}
	if m.GetServices() != 0 || m.GetInstances() != 0 || m.GetSynced() || len(m.GetRemovals()) > 0 {
		r.status.Services, r.status.Instances = m.GetServices(), m.GetInstances()
		i.metrics.services.WithLabelValues(r.name).Set(float64(m.GetServices()))
		i.metrics.instances.WithLabelValues(r.name).Set(float64(m.GetInstances()))
	}
	i.metrics.bytes.WithLabelValues(r.name).Set(float64(r.bytes))
	r.countProblemsLocked()
	r.summarizeLocked(m.GetSynced())
	if opened {
		i.behind.Add(-1)
		i.store.Wake()
	}
}

// isEntry says whether an upsert is a service's ServiceEntry.
func isEntry(p *resource.Part, u *pluginv1.Upsert) bool {
	return p.Collection() == collection.ServiceEntry && u.GetService() == p.Name()
}

// claimsLocked says whether the registry has what would be served under a name if no other registry came first. The instances of a
// service that is kept back would not be.
func (r *Registry) claimsLocked(k key) bool {
	if len(r.plain) > 0 && r.plain[k] != nil {
		return true
	}
	switch k.collection {
	case collection.ServiceEntry:
		return r.services[k.name] != nil
	case collection.WorkloadEntry:
		s := r.of[k.name]
		return s != nil && !s.keptBack
	}
	return false
}

// ownerLocked returns the registry whose resource of that name is served, nil if no one has it.
func (i *Ingest) ownerLocked(k key) *Registry {
	for _, r := range i.registries {
		if r.claimsLocked(k) {
			return r
		}
	}
	return nil
}

// resourceLocked returns what sinks of a shape get under a name that the registry owns, nil for nothing.
func (r *Registry) resourceLocked(k key, shape resource.Shape) *resource.Resource {
	if len(r.plain) > 0 {
		if pl := r.plain[k]; pl != nil {
			return pl.res
		}
	}
	switch {
	case k.collection == collection.ServiceEntry:
		s := r.services[k.name]
		vip := ""
		if s.host != "" {
			vip = r.ingest.vipLocked(s.host)
		}
		s.svc.SetVIP(vip)
		return s.svc.Resource(shape)
	case shape == resource.Workload:
		return r.of[k.name].instances[k.name].res
	}
	return nil // inline, an instance is an endpoint of its service
}

// setLocked sets a resource that is served as it is.
func (b *batch) setLocked(p *resource.Part) error {
	r := b.r
	k := key{p.Collection(), p.Name()}
	if err := r.limitLocked(k, p); err != nil {
		return err
	}
	pl := r.plain[k]
	if pl == nil {
		b.removeLocked(k.collection, k.name) // of a service, to stand for itself from now on
		pl = &plain{}
		r.plain[k] = pl
		r.published[k.collection]++
		r.resources++
		b.claim(k.collection, k.name)
	}
	pl.seen = r.listing
	if pl.res != nil && pl.res.Version() == p.Version() {
		return nil
	}
	if pl.res != nil {
		r.bytes -= pl.res.Size()
	}
	pl.res = resource.NewResource(p, r.name)
	r.bytes += pl.res.Size()
	b.touch(k.collection, k.name)
	return nil
}

// limitError is why a resource is refused for which there is no room.
type limitError struct {
	field string // of the configuration
	value int
}

// Error implements error.
func (e *limitError) Error() string {
	return fmt.Sprintf("with it the registry would exceed %s (%d); raise that, or select less in the registry's config", e.field, e.value)
}

// limitLocked returns a *limitError if there is no room for a resource, or not for what it has grown by.
func (r *Registry) limitLocked(k key, p *resource.Part) error {
	o := &r.ingest.options
	size := r.sizeLocked(k)
	switch {
	case size == 0 && r.resources >= o.MaxResources:
		return &limitError{"limits.resources_per_registry", o.MaxResources}
	case p.Size() > size && r.bytes+p.Size()-size > o.MaxBytes:
		return &limitError{"limits.bytes_per_registry", o.MaxBytes}
	}
	return nil
}

// sizeLocked returns the size of what the registry has under a name, 0 for nothing.
func (r *Registry) sizeLocked(k key) int {
	if len(r.plain) > 0 {
		if pl := r.plain[k]; pl != nil {
			return pl.res.Size()
		}
	}
	switch k.collection {
	case collection.ServiceEntry:
		if s := r.services[k.name]; s != nil {
			return s.svc.Entry().Size()
		}
	case collection.WorkloadEntry:
		if s := r.of[k.name]; s != nil {
			return s.instances[k.name].res.Size()
		}
	}
	return 0
}

// setEntryLocked sets the ServiceEntry of a service.
func (b *batch) setEntryLocked(p *resource.Part) error {
	r := b.r
	k := key{p.Collection(), p.Name()}
	if !p.Composable() {
		return resource.ErrNotComposable
	}
	if err := r.limitLocked(k, p); err != nil {
		return err
	}
	if r.plain[k] != nil {
		b.removeLocked(k.collection, k.name) // the other way round
	}
	s := r.services[p.Name()]
	was := 0
	if s != nil {
		was = s.svc.Entry().Size()
	} else {
		_, short, _ := strings.Cut(p.Name(), "/")
		s = &service{
			svc:       resource.NewService(r.name, r.ingest.options.Selector(short)),
			instances: make(map[string]serviceInstance),
			keptBack:  r.shadowed[k] != "",
		}
		r.services[p.Name()] = s
		r.resources++
		b.claim(k.collection, k.name)
	}
	s.seen = r.listing
	if !s.svc.SetEntry(p) {
		return nil
	}
	r.bytes += p.Size() - was
	b.touch(k.collection, k.name)
	b.countHostLocked(s)
	return nil
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
	k := key{p.Collection(), p.Name()}
	if k.collection != collection.WorkloadEntry {
		return fmt.Errorf("a %s can not be an instance of service %s; only a WorkloadEntry can", k.collection, serviceName)
	}
	was := r.of[k.name]
	if err := r.limitLocked(k, p); err != nil {
		return err
	}
	s := r.services[serviceName]
	if s == nil {
		if _, refused := r.own[refusalID(key{collection.ServiceEntry, serviceName})]; refused {
			return fmt.Errorf("its service %q is not there, as its ServiceEntry was refused", serviceName)
		}
		return fmt.Errorf("its service %q is not there; its ServiceEntry has to come first, or in the same batch", serviceName)
	}
	if ns := s.svc.Entry().Namespace(); ns != p.Namespace() {
		return fmt.Errorf("it is in namespace %s and its service in %s; a workloadSelector reaches its own namespace only", p.Namespace(), ns)
	}
	if was != s { // new, or of another service before, or one that stood for itself
		b.removeLocked(k.collection, k.name)
		r.resources++
		r.of[k.name] = s
		if s.keptBack {
			r.kept[k.collection]++
		} else {
			b.claim(k.collection, k.name)
		}
	}
	in := s.instances[k.name]
	in.seen = r.listing
	res := s.svc.SetInstance(p)
	if res != nil {
		if in.res != nil {
			r.bytes -= in.res.Size()
		}
		in.res = res
		r.bytes += res.Size()
	}
	s.instances[k.name] = in
	if res != nil && !s.keptBack {
		b.touch(k.collection, k.name)
		b.touch(collection.ServiceEntry, serviceName)
	}
	return nil
}

func (b *batch) removeInstanceLocked(name string) {
	r := b.r
	s := r.of[name]
	if s == nil {
		return
	}
	r.bytes -= s.instances[name].res.Size()
	delete(r.of, name)
	delete(s.instances, name)
	r.resources--
	s.svc.RemoveInstance(name)
	if s.keptBack {
		r.kept[collection.WorkloadEntry]--
		return
	}
	b.claim(collection.WorkloadEntry, name)
	b.touch(collection.ServiceEntry, s.svc.Entry().Name())
}

func (b *batch) removeLocked(coll, name string) {
	r := b.r
	k := key{coll, name}
	r.forgetRefusalLocked(k)
	if pl := r.plain[k]; pl != nil {
		r.bytes -= pl.res.Size()
		delete(r.plain, k)
		r.published[coll]--
		r.resources--
		b.claim(coll, name)
		return
	}
	if coll == collection.WorkloadEntry {
		b.removeInstanceLocked(name)
		return
	}
	s := r.services[name]
	if coll != collection.ServiceEntry || s == nil {
		return
	}
	// Instances without their entry can not be served.
	for instance := range s.instances {
		b.removeInstanceLocked(instance)
	}
	r.bytes -= s.svc.Entry().Size()
	s.svc.RemoveEntry()
	b.countHostLocked(s)
	delete(r.services, name)
	r.resources--
	b.claim(coll, name)
}

// sweepLocked removes what the listing that is complete now did not mention. A resource that was refused and has no legible name may be
// any of these: then all of it stays until a later listing is complete without such a one.
func (b *batch) sweepLocked() {
	r := b.r
	if !r.status.Listing {
		return
	}
	if r.nameless == r.listing {
		r.log.Warn("the listing removes nothing, as something in it was refused that has no legible name", "see", "/api/v1/registries")
		return
	}
	r.sweepRefusalsLocked()
	removed := 0
	for name, s := range r.services {
		for instance, in := range s.instances {
			if in.seen != r.listing {
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

// shapes returns the shapes in which a collection is kept apart.
func shapes(coll string) []resource.Shape {
	if resource.Key(coll, resource.Workload) == coll {
		return inlineOnly
	}
	return allShapes
}

var (
	inlineOnly = []resource.Shape{resource.Inline}
	allShapes  = []resource.Shape{resource.Inline, resource.Workload}
)

// settleLocked finds out who is kept back from a name, and lists that.
func (b *batch) settleLocked(k key) {
	i := b.r.ingest
	owner := i.ownerLocked(k)
	for _, r := range i.registries {
		was := r.shadowed[k]
		now := ""
		if r != owner && r.claimsLocked(k) {
			now = owner.name
		}
		if was == now {
			continue
		}
		if r != b.r && !slices.Contains(b.others, r) {
			b.others = append(b.others, r)
		}
		if now == "" {
			delete(r.shadowed, k)
		} else {
			r.shadowed[k] = now
			if r.lineLocked() {
				r.log.Warn("another registry owns the name; kept back", "collection", k.collection, "name", k.name, "owner", now)
			}
		}
		switch {
		case was == "":
			b.keepBackLocked(r, k, true)
		case now == "":
			b.keepBackLocked(r, k, false)
		}
	}
}

// keepBackLocked notes that a name of a registry is kept back, or no longer is. With a ServiceEntry go its instances.
func (b *batch) keepBackLocked(r *Registry, k key, keptBack bool) {
	sign := 1
	if !keptBack {
		sign = -1
	}
	r.kept[k.collection] += sign
	s := r.services[k.name]
	if k.collection != collection.ServiceEntry || s == nil || s.keptBack == keptBack {
		return
	}
	s.keptBack = keptBack
	r.kept[collection.WorkloadEntry] += sign * len(s.instances)
	for name := range s.instances {
		b.claim(collection.WorkloadEntry, name)
	}
}

func uniq(keys []key) []key {
	slices.SortFunc(keys, func(a, b key) int {
		if c := strings.Compare(a.collection, b.collection); c != 0 {
			return c
		}
		return strings.Compare(a.name, b.name)
	})
	return slices.Compact(keys)
}

// commitLocked settles who owns the names that the batch claimed or gave up, composes what was touched and applies everything as
// one.
func (b *batch) commitLocked() {
	r := b.r
	i := r.ingest
	for _, host := range b.rehost {
		for _, other := range i.registries {
			for name, s := range other.services {
				if s.host == host {
					b.touch(collection.ServiceEntry, name)
				}
			}
		}
	}
	if len(b.claims) > 0 {
		// Services first: what becomes of them decides what their instances claim.
		b.claims = uniq(b.claims)
		for _, k := range b.claims {
			if k.collection == collection.ServiceEntry {
				b.settleLocked(k)
			}
		}
		b.claims = uniq(b.claims)
		for _, k := range b.claims {
			if k.collection != collection.ServiceEntry {
				b.settleLocked(k)
			}
		}
		r.countServedLocked()
		for _, other := range b.others {
			other.countServedLocked()
			other.countProblemsLocked()
			other.summarizeLocked(false)
		}
		b.touched = append(b.touched, b.claims...)
	}
	b.touched = uniq(b.touched)
	ops := make([]op, 0, 2*len(b.touched))
	for _, k := range b.touched {
		owner := i.ownerLocked(k)
		for _, shape := range shapes(k.collection) {
			o := op{Collection: resource.Key(k.collection, shape), Name: k.name}
			if owner != nil {
				o.Value = owner.resourceLocked(k, shape)
			}
			o.Remove = o.Value == nil
			ops = append(ops, o)
		}
	}
	if i.commitLocked(r.name, ops) {
		r.status.Revision = i.store.Revision()
	}
}

// servedLocked returns the number of resources by collection that are not kept back.
func (r *Registry) servedLocked() map[string]int {
	n := maps.Clone(r.published)
	n[collection.ServiceEntry] += len(r.services)
	n[collection.WorkloadEntry] += len(r.of)
	for coll, kept := range r.kept {
		n[coll] -= kept
	}
	return n
}

func (r *Registry) countServedLocked() {
	for coll, n := range r.servedLocked() {
		r.ingest.metrics.resources.WithLabelValues(r.name, coll).Set(float64(n))
	}
}

// Status returns the registry's state.
func (r *Registry) Status() Status {
	r.ingest.mu.Lock()
	defer r.ingest.mu.Unlock()
	s := r.status
	s.Resources, s.Bytes = r.servedLocked(), r.bytes
	return s
}
