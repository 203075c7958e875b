package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/adapters/consul/plan"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// serversService is the service under which Consul's servers register
// themselves. Any complete listing of the default namespace and partition
// contains it.
const serversService = "consul"

// errPoked is the cause of a query's cancellation when its index may no longer
// be valid.
var errPoked = errors.New("asked to begin again")

// scope follows one datacenter and namespace: it lists the services and runs
// one watch for each.
type scope struct {
	config  Config
	log     *slog.Logger
	clients *clients
	convert converter
	state   *state
	catalog plugin.Catalog // for problems; services go through grace
	grace   *plugin.Grace
	wants   func(registry.Key) bool

	sidecars *sidecars // nil unless services are published at these

	number                           int // among the scopes of the registry
	datacenter, partition, namespace string
	peer                             string // whose imported services the scope follows, "" for the catalog's own
	id                               string // names the scope in states, "catalog", "catalog dc2/ns" or "catalog peer p"

	// arrived must be called with each complete listing.
	arrived func()

	// gate is closed once every service of the first listing was requested.
	// Watches wait for it before they hold a connection, so that a limit of
	// connections affects the watches and not the first listing.
	gate chan struct{}

	// listing is a semaphore of one, held while a listing is requested to
	// confirm an answer.
	listing chan struct{}
	fresh   listing // the last one requested under listing

	mu        sync.Mutex // guards everything below
	facts     facts
	watches   map[string]*watch
	named     map[string][]*watch // watches by name in lower case
	unaskable map[string]bool     // services reported as problems, as HTTP cannot carry their names
	unwanted  map[string]bool     // services that the bridge does not want
	untried   int                 // services of the first listing not requested yet
	gateOpen  bool
	first     uint64 // the index of the first listing
	// epoch counts possible changes of the server. An index is valid only in
	// its epoch: one above the server's would block for the whole wait.
	epoch uint64
	// lost is set while the listing fails with an outage: its retries find the
	// end of it for all watches.
	lost bool
	// back is closed and replaced when the scope is reachable again.
	back chan struct{}
	// poke cancels the listing query in progress; nil if there is none.
	poke context.CancelCauseFunc
	// suspected makes the next listing begin at index 0.
	suspected bool
	// senses cancel the queries of sense in progress, by part.
	senses map[string]context.CancelCauseFunc

	// rests is closed by resting, once a watch rests.
	rests   chan struct{}
	resting sync.Once
	// crowding is of the log line that says so of more services than places.
	crowding sync.Once

	slot *slot          // of the scope's own queries; set by run
	wg   sync.WaitGroup // the watches and their helpers
}

// listing is one answer of /v1/catalog/services.
type listing struct {
	asked time.Time // when the query was sent
	names map[string]bool
	index uint64
	// filtered reports that Consul omitted services that the token may not
	// read.
	filtered bool
	// broken is what keeps a peering from bringing changes, "" for nothing.
	broken string
}

func newScope(a *Adapter, st *state, catalog plugin.Catalog, number int, at location, peer string) *scope {
	id := "catalog"
	where := []string{at.datacenter, at.partition, at.namespace}
	if len(a.config.Partitions) == 0 {
		where[1] = "" // that of all scopes
	}
	if where := strings.Join(slices.DeleteFunc(where, func(s string) bool { return s == "" }), "/"); where != "" {
		id += " " + where
	}
	if peer != "" {
		id += " peer " + peer
	}
	s := &scope{
		config: a.config, log: a.env.Log, clients: a.clients, convert: a.convert,
		state: st, catalog: catalog, wants: a.env.Wants,
		number: number, datacenter: at.datacenter, partition: at.partition, namespace: at.namespace, peer: peer, id: id,
		arrived:   st.listing.Expect(),
		gate:      make(chan struct{}),
		listing:   make(chan struct{}, 1),
		facts:     facts{ready: make(chan struct{}), protocols: map[string]string{}},
		watches:   map[string]*watch{},
		named:     map[string][]*watch{},
		unaskable: map[string]bool{},
		unwanted:  map[string]bool{},
		back:      make(chan struct{}),
		senses:    map[string]context.CancelCauseFunc{},
		rests:     make(chan struct{}),
	}
	s.grace = plugin.NewGrace(catalog, time.Duration(a.config.RemoveGrace), func(err error) {
		if err == nil {
			st.set(id+" grace", nil)
			return
		}
		st.set(id+" grace", s.located(&fault{kind: faultHeld, err: err}))
	})
	s.facts.grace = plugin.NewGrace(protocols{s: s}, time.Duration(a.config.RemoveGrace), nil)
	switch {
	case peer != "":
		close(s.facts.ready)
	case a.config.Connect:
		s.sidecars = &sidecars{s: s, of: map[string]*behind{}}
		s.facts.missing = 2
	default:
		s.facts.missing = 1
	}
	return s
}

// run follows the listing of services until ctx ends, and returns after every
// watch has ended.
func (s *scope) run(ctx context.Context) {
	s.slot = s.clients.acquire()
	defer s.clients.release(s.slot)
	defer s.wg.Wait()
	// Owned by the scope, which waits for them; they end with ctx.
	s.wg.Go(func() { s.grace.Run(ctx) })
	s.wg.Go(func() { s.facts.grace.Run(ctx) })
	s.followFacts(ctx)
	s.serveRests(ctx)
	if s.config.Stale {
		s.wg.Go(func() { s.measureStaleness(ctx) })
	}
	var (
		index, epoch uint64
		highest      uint64 // the last answer's index, retained on errors
		broken       bool   // no answer since the last error
		away         bool   // one of those errors was an outage
		retry        = plugin.Backoff{First: 250 * time.Millisecond, Most: 5 * time.Second}
		wait         = time.Duration(s.config.Wait)
	)
	for {
		if now, again := s.takeSuspicion(); again || now != epoch {
			index, epoch = 0, now
		}
		l, err := s.list(ctx, index, wait)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errPoked):
			// The cause is in suspected. The pause bounds repeated suspicions.
			if !plugin.Pause(ctx, listEvery, nil) {
				return
			}
			continue
		case errors.Is(err, errEnded):
			continue
		case err != nil:
			f := s.located(classify(err, s.clients.at()))
			if !broken && s.again(f, index) {
				index, broken = 0, true
				continue
			}
			index, broken, away = 0, true, away || f.outage
			s.newEpoch(f.outage)
			s.setLost(f.outage)
			s.limited(f, nil, nil)
			s.state.set(s.id, f)
			if !plugin.Pause(ctx, retry.Next(), nil) {
				return
			}
			continue
		}

		replaced := l.index < highest
		if replaced {
			s.log.Warn("consul's index went backwards: the server was replaced or restored; beginning again",
				slog.String("catalog", s.id))
		}
		if replaced || away {
			s.newEpoch(true)
			s.recovered()
		}
		if replaced {
			s.pokeAll()
		}
		if away {
			s.clients.turns.do(func(p *plan.Plan) []*plan.Turn { p.Restore(); return nil })
		}
		if broken {
			s.announceBack()
		}
		broken, away = false, false
		retry.Reset()
		if index != l.index && s.peer == "" {
			since := l.index
			if index == 0 || replaced {
				since = 0
			}
			s.stirred(since)
		}
		index, highest, epoch = l.index, l.index, s.currentEpoch()
		wait = time.Duration(s.config.Wait)
		if s.accept(ctx, l) == nil {
			s.removeOthers()
		} else {
			// Consul does not wake queries when a token or policy changes.
			wait = doubtfulWait
		}
		if !plugin.Pause(ctx, listEvery, nil) {
			return
		}
	}
}

// again reports whether a query that failed at index is sent once more at once,
// which shows whether that was an outage: the connection broke while it waited,
// or there is another address.
func (s *scope) again(f *fault, index uint64) bool {
	return f.interrupted && (index > 0 || len(s.clients.hosts.all) > 1)
}

// accept starts a watch for each new service, and makes the watches of services
// that a complete listing lacks query again. It returns why the listing is
// doubtful, or nil.
func (s *scope) accept(ctx context.Context, l listing) *fault {
	doubt := s.doubt(l)
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.first = cmp.Or(s.first, l.index)
	var leftOut plugin.Unselected
	for name := range l.names {
		if s.sidecars == nil && !leftOut.Match(s.config.Services, name) {
			continue // by the name of its service, a sidecar is selected later
		}
		if w := s.watches[name]; w != nil {
			w.seen, w.absent = now, false
			continue
		}
		if s.unwanted[name] {
			continue
		}
		if s.sidecars == nil && !s.wants(s.key(name)) {
			s.unwanted[name] = true
			continue
		}
		if path.Clean("/"+name) != "/"+name {
			s.unaskable[name] = true
			s.catalog.Problem("service "+s.key(name).String(),
				"its name cannot be asked for over HTTP (Consul cleans the path); register it under a name without empty or dotted path elements")
			continue
		}
		w := newWatch(s, name, now)
		s.watches[name] = w
		lower := strings.ToLower(name)
		s.named[lower] = append(s.named[lower], w)
		s.clients.turns.do(func(p *plan.Plan) []*plan.Turn { p.Join(&w.turn); return nil })
		if !s.gateOpen {
			s.untried++
		}
		// Owned by the scope, which waits for it; ends with ctx or once the
		// service is confirmed as removed.
		s.wg.Go(func() { w.run(ctx) })
	}
	if len(s.unwanted) > len(l.names) { // mostly services that are gone
		clear(s.unwanted)
	}
	if !s.gateOpen && s.untried == 0 && doubt == nil {
		s.openGateLocked()
	}
	s.state.set(s.id, doubt)
	if doubt != nil {
		return doubt
	}
	if l.broken != "" {
		s.state.set(s.id+" peering", &fault{kind: faultUnreachable, err: fmt.Errorf("%s; its services stay as consul last knew them", l.broken)})
	} else if s.peer != "" {
		s.state.set(s.id+" peering", nil)
	}
	leftOut.Tell(s.catalog, "services", strings.TrimSpace(strings.TrimPrefix(s.id, "catalog")))
	for name, w := range s.watches {
		if !l.names[name] && !w.absent {
			w.absent = true
			w.begin()
		}
	}
	for name := range s.unaskable {
		if !l.names[name] {
			delete(s.unaskable, name)
			s.catalog.Problem("service "+s.key(name).String(), "")
		}
	}
	s.arrived()
	return nil
}

// doubt returns why the listing may be incomplete, or nil.
func (s *scope) doubt(l listing) *fault {
	const cure = "give the registry a token with service_prefix \"\" read and node_prefix \"\" read"
	servers := s.hasServers()
	if s.peer != "" {
		if len(l.names) == 0 {
			return s.located(&fault{kind: faultEmpty, err: fmt.Errorf(
				"consul imports no service from it, so nothing is removed (%s); write an exported-services entry there, with this cluster as a consumer", cmp.Or(l.broken, "the peering is active"))})
		}
		return nil
	}
	switch {
	case len(l.names) == 0 && l.filtered:
		return s.located(&fault{kind: faultFiltered, err: errors.New("the token sees no service at all; " + cure)})
	case len(l.names) == 0 && (servers || s.clients.auth.anonymous()):
		return s.located(&fault{kind: faultEmpty, err: errors.New(
			"consul lists no service at all, not even its own, which happens without a token that may read; " + cure)})
	case s.config.AcceptFiltered:
		return nil
	case l.filtered:
		return s.located(&fault{kind: faultFiltered, err: errors.New(
			"consul leaves out services that the token may not read, so nothing is removed; " + cure + ", or set accept_filtered if it is meant to see a part only")})
	case servers && !l.names[serversService]:
		return s.located(&fault{kind: faultFiltered, err: errors.New(
			"consul's own service is missing in its listing, so services are left out silently, and nothing is removed; " + cure +
				", or set accept_filtered if a part is all that is wanted")})
	}
	return nil
}

// hasServers reports whether Consul's servers register in this scope.
func (s *scope) hasServers() bool {
	return (s.namespace == "" || s.namespace == "default") && (s.partition == "" || s.partition == "default")
}

// located adds the scope's name to the error if there are several scopes.
func (s *scope) located(f *fault) *fault {
	if where := strings.TrimPrefix(s.id, "catalog"); where != "" {
		g := *f
		if s.peer == "" {
			where = " datacenter, partition or namespace" + where
		}
		g.err = fmt.Errorf("%s: %w", strings.TrimSpace(where), f.err)
		return &g
	}
	return f
}

// list requests the services, and waits for a change beyond index unless it is
// 0.
func (s *scope) list(ctx context.Context, index uint64, wait time.Duration) (listing, error) {
	if index == 0 {
		return s.ask(ctx, 0, 0)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s.mu.Lock()
	s.poke = cancel
	if s.suspected {
		cancel(errPoked)
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.poke = nil
		s.mu.Unlock()
	}()
	return s.ask(ctx, index, wait)
}

// ask is list without cancellation by poke.
func (s *scope) ask(ctx context.Context, index uint64, wait time.Duration) (listing, error) {
	if s.peer != "" {
		return s.askPeering(ctx, index, wait)
	}
	l := listing{asked: time.Now()}
	var names map[string][]string
	err := s.query(ctx, index, wait, func(q *api.QueryOptions) (*api.QueryMeta, error) {
		var meta *api.QueryMeta
		var err error
		names, meta, err = s.clients.of(s.slot).Catalog().Services(q)
		if err == nil {
			l.index, l.filtered = meta.LastIndex, meta.ResultsFilteredByACLs
		}
		return meta, err
	})
	if err != nil {
		return listing{}, err
	}
	l.names = make(map[string]bool, len(names))
	for name := range names {
		l.names[name] = true
	}
	return l, nil
}

// askPeering is ask for the services that are imported from a peer. Consul
// states their names with the peering, and wakes a query for changes of the
// peering's own only.
func (s *scope) askPeering(ctx context.Context, index uint64, wait time.Duration) (listing, error) {
	l := listing{asked: time.Now()}
	var peering *api.Peering
	err := s.query(ctx, index, min(wait, peeringEvery), func(q *api.QueryOptions) (*api.QueryMeta, error) {
		q.Peer = ""
		var meta *api.QueryMeta
		var err error
		peering, meta, err = s.clients.of(s.slot).Peerings().Read(ctx, s.peer, q)
		if err == nil && peering == nil {
			return nil, &fault{kind: faultRequest, err: errors.New("consul has no such peering, so nothing is removed; establish it, or take it out of peers")}
		}
		if err == nil {
			l.index = meta.LastIndex
		}
		return meta, err
	})
	if err != nil {
		return listing{}, err
	}
	if peering.State != api.PeeringStateActive {
		l.broken = fmt.Sprintf("the peering is %s", peering.State)
	}
	l.names = make(map[string]bool, len(peering.StreamStatus.ImportedServices))
	for _, name := range peering.StreamStatus.ImportedServices {
		l.names[name] = true
	}
	return l, nil
}

// query runs one query of the API. It applies the timeout, limits concurrent
// queries that do not wait, and rejects the answer of a server without a
// leader.
func (s *scope) query(ctx context.Context, index uint64, wait time.Duration, call func(*api.QueryOptions) (*api.QueryMeta, error)) error {
	limit, try, parent, stale := answerTimeout, false, ctx, s.config.Stale && index > 0 && !s.clients.stale.lags(s.datacenter)
	if index == 0 {
		done, err := s.clients.turns.fetch(ctx)
		if err != nil {
			return err
		}
		defer done()
	} else {
		wait, try = s.clients.waits.next(wait)
		wait = spread(wait)
		limit += wait + wait/16 // the server adds at most this
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errAnswerTimeout)
	defer cancel()
	q := &api.QueryOptions{
		Datacenter: s.datacenter, Namespace: s.namespace, Partition: s.partition, Peer: s.peer,
		WaitIndex: index,
		// A new leader answers any other query with the part of the catalog
		// that it has restored so far. Later queries block at the index of this
		// answer, so they cannot return older state.
		RequireConsistent: index == 0,
		AllowStale:        stale,
	}
	if index > 0 {
		q.WaitTime = wait
	}
	asked, host := time.Now(), s.clients.hosts.current()
	meta, err := call(q.WithContext(ctx))
	if index > 0 {
		var replaced bool
		if replaced, err = s.clients.waits.done(err, wait, time.Since(asked), try); replaced {
			s.suspect()
		}
	}
	if err != nil && parent.Err() == nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		// What breaks off is no failure before it was asked for again.
		if f := classify(err, s.clients.at()); !errors.Is(err, errEnded) && f.outage && (!f.interrupted || index == 0) {
			s.clients.hosts.fail(host, f.err)
		}
	}
	switch {
	case parent.Err() != nil && err != nil:
		return context.Cause(parent)
	case err != nil:
		return err
	case meta.LastIndex == 0:
		return &fault{kind: faultServer, err: errors.New("answer without X-Consul-Index; what is at address is no Consul, or a proxy before it removes its headers")}
	case stale && (!s.clients.stale.accept(meta.LastContact) || meta.LastIndex < index):
		// Of a server that is behind, or of another one than before. The leader
		// says which.
		return s.query(parent, 0, 0, call)
	case !meta.KnownLeader && !stale && meta.QueryBackend != api.QueryBackendStreaming:
		return &fault{kind: faultServer, outage: true, err: errors.New("consul has no leader")}
	}
	s.catalog.Heard()
	return nil
}

// spread shortens a wait by up to a tenth, so that queries with a common start
// do not end together.
func spread(wait time.Duration) time.Duration {
	return wait - time.Duration(rand.Int64N(int64(wait/10)+1))
}

// confirm returns a listing requested after the given time. Concurrent callers
// share it, and there is at most one per listEvery.
func (s *scope) confirm(ctx context.Context, after time.Time) (listing, error) {
	select {
	case s.listing <- struct{}{}:
		defer func() { <-s.listing }()
	case <-ctx.Done():
		return listing{}, context.Cause(ctx)
	}
	if s.fresh.asked.After(after) {
		return s.fresh, nil
	}
	if !plugin.Pause(ctx, listEvery-time.Since(s.fresh.asked), nil) {
		return listing{}, context.Cause(ctx)
	}
	l, err := s.ask(ctx, 0, 0)
	if err != nil {
		return listing{}, err
	}
	s.fresh = l
	return l, nil
}

// key returns the key of a service of this scope.
func (s *scope) key(name string) registry.Key {
	return registry.Key{Name: name, Namespace: s.namespace, Partition: s.partition, Datacenter: s.datacenter, Peer: s.peer}
}

// service returns what Consul states of a service besides its instances.
func (s *scope) service(name string) registry.Service {
	svc := registry.Service{Key: s.key(name)}
	if protocol := s.protocolOf(name); protocol != "" {
		svc.Meta = map[string]string{protocolKey: protocol}
	}
	return svc
}

// tried records that a service of the first listing was requested.
func (s *scope) tried() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gateOpen {
		return
	}
	if s.untried--; s.untried == 0 {
		s.openGateLocked()
	}
}

func (s *scope) openGateLocked() {
	s.gateOpen = true
	if s.epoch > 0 {
		s.first = 0 // it may be of another server
	}
	s.clients.turns.do(func(p *plan.Plan) []*plan.Turn { p.Begin(s.number, s.first); return nil })
	close(s.gate)
}

// forget ends the watch of a service that was removed by the given time, unless
// a later listing contains the service.
func (s *scope) forget(w *watch, since time.Time) bool {
	s.mu.Lock()
	if w.seen.After(since) {
		s.mu.Unlock()
		return false
	}
	delete(s.watches, w.name)
	lower := strings.ToLower(w.name)
	if s.named[lower] = slices.DeleteFunc(s.named[lower], func(v *watch) bool { return v == w }); len(s.named[lower]) == 0 {
		delete(s.named, lower)
	}
	if s.sidecars != nil {
		s.mu.Unlock()
		s.sidecars.set(w, nil, nil, true)
		return true
	}
	defer s.mu.Unlock()
	// Under mu, so that it precedes updates by the next watch of the same name.
	s.grace.Remove(w.key)
	return true
}

func (s *scope) currentEpoch() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.epoch
}

// newEpoch invalidates all indexes and, after an outage, puts in question what
// is known.
func (s *scope) newEpoch(outage bool) {
	if outage {
		s.grace.Away()
		s.facts.grace.Away()
		if s.sidecars != nil {
			s.sidecars.question()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epoch++
	s.clients.turns.do(func(p *plan.Plan) []*plan.Turn { return p.AskAll(s.number) })
}

// recovered ends an outage. The clock of what is retained of a service goes on
// with the next answer about it, which a query that waits would delay, and so
// does that of service-defaults.
func (s *scope) recovered() {
	s.grace.Back()
	s.grace.Doubt()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.watches {
		if _, retained := s.grace.Retained(w.key); retained || s.sidecars != nil {
			w.begin()
		}
	}
	if end := s.senses[s.id+defaultsPart]; end != nil {
		end(errPoked)
	}
}

// question puts in question what is known of a service, by its watch.
func (s *scope) question(w *watch) {
	if s.sidecars != nil {
		s.sidecars.question(w)
		return
	}
	s.grace.Question(w.key)
}

// removeOthers tells grace of the services that are retained and have no watch
// any more that a complete listing lacks them.
func (s *scope) removeOthers() {
	if s.sidecars != nil {
		s.sidecars.removeOthers()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.grace.RemoveOthers(func(key registry.Key) bool { return s.watches[key.Name] != nil })
}

func (s *scope) setLost(lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = lost
}

func (s *scope) isLost() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// announceBack wakes the watches that wait to retry.
func (s *scope) announceBack() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = false
	close(s.back)
	s.back = make(chan struct{})
}

// pokeAll makes every watch, and every query that serves resting ones, start
// over at index 0.
func (s *scope) pokeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.watches {
		w.begin()
	}
	for _, end := range s.senses {
		end(errPoked)
	}
}

// suspect makes the listing start over: a watch found signs that the server is
// unreachable or was replaced.
func (s *scope) suspect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.suspected = true
	if s.poke != nil {
		s.poke(errPoked)
	}
}

// takeSuspicion returns the epoch, and whether suspect was called since the
// last call.
func (s *scope) takeSuspicion() (epoch uint64, suspected bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	suspected = s.suspected
	s.suspected = false
	return s.epoch, suspected
}

// idle reports whether no service is followed, and nothing retained.
func (s *scope) idle() bool {
	known, _ := s.grace.Instances()
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.watches) == 0 && known == 0
}
