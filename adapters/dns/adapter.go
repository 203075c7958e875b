package dns

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Adapter follows names in the DNS. New makes one.
type Adapter struct {
	config Config
	env    plugin.Env
}

// New returns an adapter for a configuration that Validate accepts. It reads no
// file and starts nothing.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	c.Timeout = cmp.Or(c.Timeout, DefaultConfig.Timeout)
	c.MinTTL = cmp.Or(c.MinTTL, DefaultConfig.MinTTL)
	c.MaxTTL = cmp.Or(c.MaxTTL, max(DefaultConfig.MaxTTL, c.MinTTL))
	c.InFlight = cmp.Or(c.InFlight, DefaultConfig.InFlight)
	c.Priorities = cmp.Or(c.Priorities, DefaultConfig.Priorities)
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	return &Adapter{config: c, env: env}, nil
}

// faultKind is a kind of fault, in the order shown.
type faultKind int

const (
	// faultFile: the file of names, or that of the system's servers.
	faultFile faultKind = iota
	// faultServers: no server answers.
	faultServers
	// faultName: servers answer, but not this question.
	faultName
)

// result is what came of asking a question.
type result struct {
	query  *query
	answer answer
	err    error
}

// Run follows the names until ctx ends, and then returns nil. No failure of the
// servers ends it; questions are asked again.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	r := &run{
		Adapter: a, catalog: catalog, client: newClient(a.config), faults: plugin.NewFaults[faultKind](catalog), listing: plugin.NewFirstListing(catalog),
		queries: map[question]*query{}, services: map[string]*service{}, results: make(chan result, a.config.InFlight),
	}
	return r.run(ctx)
}

// run is one Run. One goroutine owns its fields.
type run struct {
	*Adapter
	catalog plugin.Catalog
	client  *client
	faults  *plugin.Faults[faultKind]
	listing *plugin.FirstListing

	queries  map[question]*query
	due      queue // queries that are not under way
	underWay int
	results  chan result // as many as may be under way, so sending never blocks
	services map[string]*service
	away     bool // no server answered last
}

func (r *run) run(ctx context.Context) error {
	defer r.client.close()
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	begun := r.listing.Expect()
	names := &file{path: r.config.NamesFile, others: r.config.Names}
	if names.path != "" {
		names.watch()
	}
	defer names.close()
	r.system()
	r.follow(r.config.Names)
	if r.config.NamesFile == "" || r.reread(names) {
		begun()
	}
	again := time.NewTicker(recheck)
	defer again.Stop()
	settle := time.NewTimer(0) // when the file has not changed for a while
	defer settle.Stop()
	wake := time.NewTimer(0)
	defer wake.Stop()
	for ctx.Err() == nil {
		for len(r.due) > 0 && r.underWay < r.config.InFlight && time.Until(r.due[0].due) <= 0 {
			q := r.due[0]
			heap.Pop(&r.due)
			r.underWay++
			// Owned by run; ends with ctx, or when its attempts are over.
			wg.Go(func() {
				a, err := r.client.ask(ctx, q.question)
				r.results <- result{q, a, err}
			})
		}
		if len(r.due) > 0 && r.underWay < r.config.InFlight {
			wake.Reset(time.Until(r.due[0].due))
		} else {
			wake.Stop() // a result comes first
		}
		select {
		case res := <-r.results:
			r.underWay--
			if ctx.Err() == nil {
				r.take(res)
			}
		case <-wake.C:
		case <-names.events():
			settle.Reset(quiet)
			continue
		case <-again.C:
			settle.Reset(0)
			r.system()
			r.client.reap()
		case <-settle.C:
			if r.config.NamesFile != "" && r.reread(names) {
				begun()
			}
		case <-ctx.Done():
		}
		r.detail()
	}
	return nil
}

// system reads which servers to ask.
func (r *run) system() {
	r.faults.Set("servers", faultFile, r.client.readServers())
}

// detail reports how the names are followed.
func (r *run) detail() {
	text := "polling"
	if s := r.client.inUse().String(); s != "" {
		text += " " + s
	}
	r.catalog.Detail(text)
}

// reread follows the names of the file, if they have changed. It reports
// whether the file was read.
func (r *run) reread(f *file) bool {
	names, changed, err := f.names()
	if err != nil {
		err = fmt.Errorf("names_file: %w; the names before it are followed", err)
	}
	r.faults.Set("file", faultFile, err)
	if changed {
		r.follow(r.config.Names, names)
	}
	return f.read
}

// follow follows these names and no others.
func (r *run) follow(names ...[]Name) {
	now := groupNames(names...)
	for key, s := range r.services {
		if now[key] == nil {
			delete(r.services, key)
			r.release(s, nil)
			r.problem(s, "")
			if s.exists {
				r.catalog.Remove(s.key)
			}
			s.arrived()
		}
	}
	for key, names := range now {
		s := r.services[key]
		if s == nil {
			s = &service{key: registry.Key{Name: key}, arrived: r.listing.Expect(), needs: map[question]*query{}}
			r.services[key] = s
		} else if equalNames(s.names, names) {
			continue
		}
		s.names, s.changed = names, true
		r.refresh(s)
	}
}

// need returns the query of a question that a service needs.
func (r *run) need(s *service, needs map[question]*query, name string, record uint16) *query {
	id := question{name, record}
	q := r.queries[id]
	if q == nil {
		q = &query{question: id, users: map[*service]bool{}, due: time.Now(), retry: plugin.Backoff{First: time.Second, Most: 10 * time.Second}}
		r.queries[id] = q
		heap.Push(&r.due, q)
	}
	q.users[s] = true
	needs[id] = q
	return q
}

// release ends what a service needed and needs no more.
func (r *run) release(s *service, needs map[question]*query) {
	for id, q := range s.needs {
		if needs[id] != nil {
			continue
		}
		if delete(q.users, s); len(q.users) == 0 {
			q.dropped = true
			delete(r.queries, id)
			if q.index >= 0 {
				heap.Remove(&r.due, q.index)
			}
			r.faults.Clear(id.String())
		}
	}
	s.needs = needs
}

// take applies what came of a question.
func (r *run) take(res result) {
	q := res.query
	_, answered := errors.AsType[*unusable](res.err)
	if res.err == nil || answered {
		r.catalog.Heard()
		r.reach()
	} else {
		r.away = true
	}
	if q.dropped {
		return
	}
	changed := false
	now := time.Now()
	err := res.err
	if err == nil && res.answer.kind == unproven && !r.mayLack(q) {
		err, answered = unusablef("%s", unproven), true
	}
	switch {
	case err != nil:
		fault := faultServers
		if !answered {
			err = fmt.Errorf("no DNS server answers: %w", err)
		} else {
			fault, err = faultName, fmt.Errorf("%s: %w", q.question, err)
		}
		r.faults.Set(q.String(), fault, fmt.Errorf("%w; what is known is kept", err))
		q.fail(now)
		changed = !q.answered
		q.due = now.Add(q.retry.Next())
	default:
		r.faults.Clear(q.String())
		q.retry.Reset()
		changed = q.take(&res.answer, now, time.Duration(r.config.RemoveGrace))
		q.due = now.Add(r.pause(q, &res.answer, now))
	}
	heap.Push(&r.due, q)
	if changed {
		for s := range q.users {
			r.refresh(s)
		}
	}
}

// mayLack reports whether an unproven answer is good enough: servers such as
// dnsmasq give no SOA with the one of A and AAAA that a name does not have.
func (r *run) mayLack(q *query) bool {
	if q.known != nil || q.record == dns.TypeSRV {
		return false
	}
	other := r.queries[question{q.name, dns.TypeA + dns.TypeAAAA - q.record}]
	return other != nil && (other.known != nil || !other.answered)
}

// reach asks soon what could not be asked while no server answered.
func (r *run) reach() {
	if !r.away {
		return
	}
	r.away = false
	soon := time.Now().Add(2 * time.Second)
	for _, q := range r.due {
		if q.failed && q.due.After(soon) {
			q.due = time.Now().Add(plugin.Jitter(2 * time.Second))
		}
	}
	heap.Init(&r.due)
}

// pause returns how long an answer is used: its TTL within bounds and up to a
// tenth longer, so that questions spread and caches have let it expire.
func (r *run) pause(q *query, a *answer, now time.Time) time.Duration {
	d := min(max(a.ttl, time.Duration(r.config.MinTTL)), time.Duration(r.config.MaxTTL))
	d += 2*plugin.Jitter(d/10) - d/10
	if !q.since.IsZero() && !q.confirmed {
		// Asked again when remove_grace is over.
		d = min(d, max(q.since.Add(q.paused+time.Duration(r.config.RemoveGrace)).Sub(now), time.Second))
	}
	return d
}

// addresses returns what is known of the addresses of a name.
func (r *run) addresses(s *service, needs map[question]*query, name string, types ...uint16) pair {
	var p pair
	for _, t := range types {
		p.add(r.need(s, needs, name, t))
	}
	return p
}

// hosts returns the hosts of SRV records.
func (r *run) hosts(s *service, needs map[question]*query, known *answer) (all []host, settled bool, problem string) {
	settled = true
	lowest := -1 // the priority that is used
	for _, t := range known.targets {
		if lowest >= 0 && int(t.priority) > lowest && r.config.Priorities != prioritiesAll {
			break
		}
		addrs := known.extra[t.host]
		if addrs == nil {
			p := r.addresses(s, needs, t.host, dns.TypeA, dns.TypeAAAA)
			if !p.settled() {
				settled, lowest = false, int(t.priority)
			}
			if reason := p.problem(time.Duration(r.config.RemoveGrace)); reason != "" {
				problem = fmt.Sprintf("SRV records name %s, which cannot be used: %s", strings.TrimSuffix(t.host, "."), reason)
			}
			addrs = p.addrs
		}
		if len(addrs) > 0 {
			lowest = int(t.priority)
			all = append(all, host{t, addrs})
		}
	}
	return all, settled, problem
}

// refresh tells the catalog what is known of a service.
func (r *run) refresh(s *service) {
	needs := map[question]*query{}
	settled, gone := true, true
	problem := ""
	note := func(name, reason string) {
		if problem == "" && reason != "" {
			problem = name + ": " + reason
		}
	}
	var all []registry.Instance
	for _, n := range s.names {
		var p pair
		switch n.Type {
		case typeSRV:
			p = r.addresses(s, needs, n.Name, dns.TypeSRV)
			if p.known != nil {
				hosts, ok, reason := r.hosts(s, needs, p.known)
				settled = settled && ok
				note(n.Name, reason)
				all = append(all, n.srvInstances(hosts, r.config.Priorities == prioritiesAll)...)
			}
		case typeA:
			p = r.addresses(s, needs, n.Name, dns.TypeA)
		case typeAAAA:
			p = r.addresses(s, needs, n.Name, dns.TypeAAAA)
		default:
			p = r.addresses(s, needs, n.Name, dns.TypeA, dns.TypeAAAA)
		}
		all = append(all, n.instances(p.addrs)...)
		settled = settled && p.settled()
		gone = gone && p.gone()
		note(n.Name, p.problem(time.Duration(r.config.RemoveGrace)))
	}
	r.release(s, needs)
	r.problem(s, problem)
	all = merge(all)
	switch {
	case settled:
		s.unsettled = time.Time{}
	case s.unsettled.IsZero():
		s.unsettled = time.Now()
	}
	// What is shown stays until all is known that comes in its place.
	if !settled && (len(all) == 0 || time.Since(s.unsettled) < time.Duration(r.config.RemoveGrace)) {
		all, _ = plugin.UnionInstances(all, s.shown)
	}
	switch {
	case settled && gone:
		if s.exists {
			r.catalog.Remove(s.key)
		}
		s.exists, s.shown = false, nil
	case !s.exists && !settled && len(all) == 0:
	case !s.exists || s.changed || !plugin.EqualInstances(all, s.shown):
		r.catalog.Set(registry.Service{Key: s.key}, all)
		s.exists, s.changed, s.shown = true, false, all
	}
	if settled {
		s.arrived()
	}
}

// problem lists what is wrong with a service.
func (r *run) problem(s *service, reason string) {
	if s.problem != reason {
		s.problem = reason
		r.catalog.Problem("name "+s.key.Name, reason)
	}
}
