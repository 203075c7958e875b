package nacos

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// pageSize is how many services a list request asks for. A server scans all
	// services for each page. A shorter page is followed by further requests.
	pageSize = 5000
	// longList is the number of services above which a list is read in full
	// only periodically.
	longList = 500
	// maxPages bounds a list.
	maxPages = 20_000
	// fullEvery is the number of rounds after which a long list is read in full
	// even if the number of services has not changed.
	fullEvery = 6
	// quickRounds is how many lists follow at a short interval after a change.
	quickRounds = 3
	// costFactor is the least ratio of the pause after a list to the time it
	// took.
	costFactor = 10
	// fuzzyResync is the interval of requests for what a fuzzy watch missed.
	fuzzyResync = 30 * time.Second
	// fuzzyWait bounds the initial batches of a fuzzy watch.
	fuzzyWait = 30 * time.Second
	// maxPatterns bounds the groups that get a pattern each; a server accepts
	// 20 patterns of all its clients together.
	maxPatterns = 4
	// Namespaces are listed every namespacesEvery, or every namespacesRounds
	// list intervals if that is sooner.
	namespacesEvery  = 30 * time.Second
	namespacesRounds = 6
	// refusedWait is the pause after a refusal.
	refusedWait = 15 * time.Second
)

// defaultGroup is the group of a service without one.
const defaultGroup = "DEFAULT_GROUP"

// scope is one namespace, across sessions.
type scope struct {
	// namespace is its canonical id, wire its id in requests: "" in addition to
	// "public" for old clients of servers before 2.4.
	namespace, wire string

	// arrived must be called with each complete list.
	arrived func()

	mu sync.Mutex // guards everything below
	// exists reports whether the namespace is known to exist.
	exists bool
}

// id identifies the scope in states.
func (s *scope) id() string { return "namespace " + s.namespace + " " + s.wire }

// discovery discovers services during one session.
type discovery struct {
	config Config
	log    *slog.Logger
	mirror *mirror
	state  *state
	api    *httpAPI
	conn   *conn // nil if everything is polled
	scopes *scopes

	mu       sync.Mutex // guards everything below
	patterns map[string]*pattern
}

// pattern is one fuzzy watch.
type pattern struct {
	scope    *scope
	text     string
	received map[serviceID]bool
	// finished is closed when the initial batches have arrived.
	finished chan struct{}
}

// scopes are the followed namespaces, across sessions.
type scopes struct {
	state *state
	// named must be called when all namespaces are known, if they have to be
	// listed.
	named func()

	mu  sync.Mutex // guards everything below
	all map[string]*scope
}

// get returns the scope of a namespace with its id in requests. From then on
// its list is awaited.
func (s *scopes) get(namespace, wire string) *scope {
	s.mu.Lock()
	defer s.mu.Unlock()
	sc := s.all[wire]
	if sc == nil {
		sc = &scope{namespace: namespace, wire: wire, exists: namespace == publicNamespace, arrived: s.state.listing.Expect()}
		s.all[wire] = sc
	}
	return sc
}

// leave removes a scope that the current server does not have.
func (s *scopes) leave(wire string) {
	s.mu.Lock()
	sc := s.all[wire]
	delete(s.all, wire)
	s.mu.Unlock()
	if sc != nil {
		s.state.faults.Clear(sc.id())
		sc.arrived()
	}
}

// namespaces returns the namespaces that have been followed, sorted.
func (s *scopes) namespaces() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for _, sc := range s.all {
		if sc.wire != "" {
			names = append(names, sc.namespace)
		}
	}
	slices.Sort(names)
	return names
}

// run discovers services until ctx ends or an error ends the session.
func (d *discovery) run(ctx context.Context, group *group) {
	follow := func(namespace string) {
		all := []*scope{d.scopes.get(namespace, namespace)}
		switch {
		case namespace != publicNamespace:
		case d.conn != nil && d.conn.abilities == nil:
			// Awaited before the other list can arrive.
			all = append(all, d.scopes.get(namespace, ""))
		default:
			d.scopes.leave("")
			d.mirror.catalog.Problem(emptyProblem, "")
			d.mirror.list("", nil, time.Now())
		}
		for _, sc := range all {
			// Owned by the session, whose group waits for it; ends with ctx.
			group.do(func() error { return d.follow(ctx, sc) })
		}
	}
	if !d.config.allNamespaces() {
		for _, n := range d.config.Namespaces {
			follow(canonicalNamespace(n))
		}
		return
	}
	// Owned as above.
	group.do(func() error {
		known := map[string]bool{}
		// Namespaces of earlier sessions are followed at once, and also if no
		// longer listed: their services may still be removed.
		for _, n := range d.scopes.namespaces() {
			known[n] = true
			follow(n)
		}
		for {
			names, err := d.api.namespaces(ctx)
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			wait := min(namespacesEvery, namespacesRounds*time.Duration(d.config.ListInterval))
			switch {
			case isAbsent(err):
				err = fmt.Errorf("list the namespaces: %w: the server has no API for it; name them under config.namespaces", err)
			case err != nil:
				err = fmt.Errorf("list the namespaces: %w; give the user the right to, or name them under config.namespaces", err)
			}
			if err != nil {
				wait = refusedWait
			}
			d.state.faults.Set("namespaces", faultNamespace, err)
			for _, n := range names {
				if !known[n] {
					known[n] = true
					sc := d.scopes.get(n, n)
					sc.mu.Lock()
					sc.exists = true
					sc.mu.Unlock()
					follow(n)
				}
			}
			if err == nil {
				d.scopes.named()
			}
			if !plugin.Pause(ctx, plugin.Jitter(wait), nil) {
				return context.Cause(ctx)
			}
		}
	})
}

// follow discovers a namespace's services by the best method that the server
// supports.
func (d *discovery) follow(ctx context.Context, sc *scope) error {
	if d.conn != nil && d.conn.abilities[abilityFuzzyWatch] {
		if err := d.fuzzyFollow(ctx, sc); err != nil {
			return err
		}
		d.log.Info("the server has no fuzzy watch; services are listed", slog.String("namespace", sc.namespace))
	}
	return d.listFollow(ctx, sc)
}

// patternsOf returns the patterns that cover the groups.
func (d *discovery) patternsOf(sc *scope) []*pattern {
	groups := []string{"*"}
	if named, ok := d.config.namedGroups(); ok && len(named) <= maxPatterns {
		groups = named
	}
	var all []*pattern
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range groups {
		p := &pattern{
			scope: sc, text: sc.wire + patternSeparator + g + patternSeparator + "*",
			received: map[serviceID]bool{}, finished: make(chan struct{}),
		}
		d.patterns[p.text] = p
		all = append(all, p)
	}
	return all
}

// fuzzyFollow discovers a namespace's services by fuzzy watches. It returns nil
// if the server does not support them.
func (d *discovery) fuzzyFollow(ctx context.Context, sc *scope) error {
	patterns := d.patternsOf(sc)
	_, named := d.config.namedGroups()
	retry := plugin.Backoff{First: time.Second, Most: refusedWait}
	lists := lister{d: d, scope: sc}
	begun, settled := false, false
	for {
		asked := time.Now()
		over, refused := false, false
		var fault error
		for _, p := range patterns {
			err := d.conn.fuzzyWatch(ctx, sc.wire, p.text, d.received(p), !begun)
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case hasCode(err, codeNoHandler):
				return nil
			case hasCode(err, codeMatchesOverLimit), hasCode(err, codePatternsOverLimit):
				over = true
			case named && isForbidden(err):
				// A list needs only read access to the group.
				over, refused = true, true
			case err != nil && (isTransport(err) || hasCode(err, codeUnregistered)):
				return fmt.Errorf("%w: %w", errSession, err)
			case isForbidden(err):
				fault = fmt.Errorf("%w; name the groups that the user may read under config.groups", err)
			case err != nil:
				fault = err
			}
		}
		if fault != nil {
			settled = false
			d.listFault(sc, fault)
			if !plugin.Pause(ctx, retry.Next(), nil) {
				return context.Cause(ctx)
			}
			continue
		}
		retry.Reset()
		begun = begun || !refused
		if over {
			// Lists cover what the server leaves out until the next resync.
			if err := lists.runFor(ctx, fuzzyResync); err != nil {
				return err
			}
			settled = false
			continue
		}
		if !settled {
			var err error
			if settled, err = d.awaitFuzzy(ctx, sc, patterns, asked); err != nil {
				return err
			}
		}
		wait := fuzzyResync
		if !settled {
			wait = time.Duration(d.config.ListInterval)
		}
		if !plugin.Pause(ctx, plugin.Jitter(wait), nil) {
			return context.Cause(ctx)
		}
	}
}

// awaitFuzzy waits for the initial batches of the patterns, which together are
// a complete list, and reports whether the list was accepted.
func (d *discovery) awaitFuzzy(ctx context.Context, sc *scope, patterns []*pattern, asked time.Time) (bool, error) {
	late := time.NewTimer(fuzzyWait)
	defer late.Stop()
	ids := map[serviceID]bool{}
	for _, p := range patterns {
		select {
		case <-p.finished:
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-late.C:
			// A new connection starts over.
			return false, fmt.Errorf("%w: the server does not say which services there are", errSession)
		}
		d.mu.Lock()
		for id := range p.received {
			ids[id] = true
		}
		d.mu.Unlock()
	}
	ok, _ := d.complete(ctx, sc, ids, asked)
	return ok, nil
}

// received returns the services that the server need not announce again.
func (d *discovery) received(p *pattern) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	keys := make([]string, 0, len(p.received))
	for id := range p.received {
		keys = append(keys, id.namespace+serviceKeySeparator+id.group+serviceKeySeparator+id.name)
	}
	return keys
}

// fuzzy handles a message of a fuzzy watch. It does not block.
func (d *discovery) fuzzy(typ string, r *serverRequest) {
	if typ == typeFuzzyChange {
		d.fuzzyOne(nil, r.ServiceKey, r.ChangedType)
		return
	}
	d.mu.Lock()
	p := d.patterns[r.GroupKeyPattern]
	d.mu.Unlock()
	if p == nil {
		return
	}
	for _, c := range r.Contexts {
		d.fuzzyOne(p, c.ServiceKey, c.ChangedType)
	}
	if r.SyncType == fuzzyInitFinished {
		d.mu.Lock()
		defer d.mu.Unlock()
		select {
		case <-p.finished:
		default:
			close(p.finished)
		}
	}
}

// fuzzyOne handles the announcement that one service was added or removed. A
// nil pattern stands for all that match.
func (d *discovery) fuzzyOne(p *pattern, key, change string) {
	namespace, group, name, ok := splitServiceKey(key)
	if !ok {
		return
	}
	id := serviceID{namespace, group, name}
	d.mu.Lock()
	for _, q := range d.patterns {
		if q != p && (p != nil || q.scope.wire != namespace) {
			continue
		}
		if p == nil && q.text != namespace+patternSeparator+group+patternSeparator+"*" && q.text != namespace+patternSeparator+"*"+patternSeparator+"*" {
			continue
		}
		if change == fuzzyDelete {
			delete(q.received, id)
		} else {
			q.received[id] = true
		}
	}
	d.mu.Unlock()
	if change == fuzzyDelete {
		d.mirror.missing(id)
	} else {
		d.mirror.add(id)
	}
}

// complete applies a complete list, which includes services that are not
// selected. It reports whether the list was accepted and whether it changed
// anything.
func (d *discovery) complete(ctx context.Context, sc *scope, ids map[serviceID]bool, asked time.Time) (ok, changed bool) {
	if len(ids) == 0 {
		if err := d.doubt(ctx, sc); err != nil {
			if ctx.Err() == nil {
				d.state.faults.Set(sc.id(), faultNamespace, err)
			}
			return false, false
		}
	}
	changed = d.mirror.list(sc.wire, ids, asked)
	d.state.faults.Clear(sc.id())
	sc.mu.Lock()
	sc.exists = sc.exists || len(ids) > 0
	sc.mu.Unlock()
	sc.arrived()
	return true, changed
}

// doubt returns why an empty list of a namespace is not trusted, or nil.
func (d *discovery) doubt(ctx context.Context, sc *scope) error {
	sc.mu.Lock()
	exists := sc.exists
	sc.mu.Unlock()
	if exists || d.config.AcceptEmpty {
		return nil
	}
	const cure = "write its id as the console shows it, not its name"
	names, err := d.api.namespaces(ctx)
	if err != nil {
		return fmt.Errorf("namespace %q lists no service, and whether it exists cannot be asked, so that counts for nothing: %w; %s, or set accept_empty if it is right and empty",
			sc.namespace, err, cure)
	}
	for _, n := range names {
		if n == sc.namespace {
			sc.mu.Lock()
			sc.exists = true
			sc.mu.Unlock()
			return nil
		}
	}
	return fmt.Errorf("namespace %q does not exist; %s", sc.namespace, cure)
}

// listFault reports an error of discovering a namespace's services.
func (d *discovery) listFault(sc *scope, err error) {
	kind := faultList
	switch {
	case isRefused(err) && sc.wire == "":
		kind = faultAuth
		err = fmt.Errorf(`the server refuses to list the services of namespace "", which is "public" as some clients write it: %w; give the user read on it too, `+
			`by the resource ":*:*"`, err)
	case isRefused(err):
		kind = faultAuth
		err = fmt.Errorf("the server refuses to list the services of namespace %q: %w; give the user read on it", sc.wire, err)
	default:
		err = fmt.Errorf("list the services of namespace %q: %w", sc.wire, err)
	}
	d.state.faults.Set(sc.id(), kind, err)
}

// listFollow discovers a namespace's services by lists until ctx ends.
func (d *discovery) listFollow(ctx context.Context, sc *scope) error {
	l := lister{d: d, scope: sc}
	for {
		if err := l.runFor(ctx, time.Hour); err != nil {
			return err
		}
	}
}

// lister reads one namespace's lists periodically.
type lister struct {
	d     *discovery
	scope *scope

	total  int // of the last complete list
	round  int
	groups []string // those requested last, unless all
	look   int      // rounds until the groups of the empty namespace are looked up
	quick  int      // remaining rounds at the short interval
	retry  plugin.Backoff
}

// errHalf reports a list that is incomplete because it changed during reading.
var errHalf = errors.New("the list changed while it was read")

// runFor reads lists for the duration. An error ends the session.
func (l *lister) runFor(ctx context.Context, d time.Duration) error {
	l.retry.First, l.retry.Most = 500*time.Millisecond, refusedWait
	for end := time.Now().Add(d); time.Now().Before(end); {
		begin := time.Now()
		changed, err := l.once(ctx)
		took := time.Since(begin)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil && (errors.Is(err, errSession) || l.d.conn == nil && isTransport(err)) {
			return err
		}
		interval := time.Duration(l.d.config.ListInterval)
		wait := plugin.Jitter(interval)
		switch {
		case err != nil:
			l.failed(ctx, err)
			wait = l.retry.Next()
		case changed:
			l.quick = quickRounds
			fallthrough
		default:
			l.retry.Reset()
			if l.quick > 0 {
				l.quick--
				wait = plugin.Jitter(interval / 5)
			}
		}
		if !plugin.Pause(ctx, max(wait, costFactor*took), nil) {
			return context.Cause(ctx)
		}
	}
	return nil
}

// once reads the list; of a long list only the number of services, if that is
// unchanged.
func (l *lister) once(ctx context.Context) (changed bool, err error) {
	l.round++
	groups, named := l.d.config.namedGroups()
	if !named && l.scope.wire == "" {
		if groups, err = l.emptyGroups(ctx); err != nil {
			return false, err
		}
		named = true
	}
	l.groups = groups
	if l.total > longList && l.round%fullEvery != 0 {
		total := 0
		if named {
			for _, g := range groups {
				_, n, err := l.page(ctx, g, 1, 1)
				if err != nil {
					return false, err
				}
				total += n
			}
		} else if _, total, err = l.d.api.listAllPage(ctx, l.scope.wire, 1, 1); err != nil {
			return false, l.cure(err)
		}
		if total == l.total {
			return false, nil
		}
	}

	asked := time.Now()
	ids := map[serviceID]bool{}
	whole := true
	total := 0
	if named {
		for _, g := range groups {
			n, ok, err := readPages(func(page int) (names []groupedName, total int, err error) { return l.page(ctx, g, page, pageSize) }, l.scope.wire, ids)
			if err != nil {
				l.d.mirror.addAll(ids)
				return false, err
			}
			total += n
			whole = whole && ok
		}
	} else {
		total, whole, err = readPages(func(page int) ([]groupedName, int, error) {
			return l.d.api.listAllPage(ctx, l.scope.wire, page, pageSize)
		}, l.scope.wire, ids)
		if err != nil {
			l.d.mirror.addAll(ids)
			return false, l.cure(err)
		}
	}
	if !whole {
		l.d.mirror.addAll(ids)
		return false, errHalf
	}
	_, changed = l.d.complete(ctx, l.scope, ids, asked)
	l.total = total
	return changed, nil
}

// failed reports a failed list.
func (l *lister) failed(ctx context.Context, err error) {
	if l.scope.wire == "" && isRefused(err) {
		// Some users may read only the spelling "public", and see everything
		// but these groups. If that spelling is refused too, its own scope
		// reports the refusal.
		for _, g := range l.groups {
			if _, _, err := l.d.conn.listPage(ctx, l.scope.namespace, g, 1, 1); err != nil {
				return
			}
		}
		l.scope.arrived()
	}
	l.d.listFault(l.scope, err)
}

// emptyProblem is the id of the problem that the groups of the empty namespace
// cannot be listed.
const emptyProblem = `namespace ""`

// emptyGroups returns the selected groups of the empty namespace: those of
// known services, and those found by a periodic lookup. The server's lists of
// all groups read that namespace as "public".
func (l *lister) emptyGroups(ctx context.Context) ([]string, error) {
	if l.look--; l.look > 0 {
		return l.d.mirror.groups(l.groups), nil
	}
	found, err := l.d.api.emptyGroups(ctx)
	problem := ""
	switch {
	case isAbsent(err), isRefused(err):
		problem = fmt.Sprintf(`the server does not say which groups the namespace "" has, which is "public" as some clients write it: %v; `+
			"name the groups under config.groups to have all of its services", err)
	case err != nil:
		return nil, err
	}
	l.d.mirror.catalog.Problem(emptyProblem, problem)
	l.look = fullEvery
	return l.d.mirror.groups(found), nil
}

// cure adds advice to the error of a list of all groups.
func (l *lister) cure(err error) error {
	switch {
	case l.d.conn == nil, !isRefused(err) && !isAbsent(err):
		return err
	case l.d.conn.abilities[abilityFuzzyWatch]:
		return fmt.Errorf("%w; the server tells of a part of its services only: name the groups under config.groups, give the user the right to list, "+
			"or raise nacos.naming.fuzzy.watch.max.pattern.match.service.count at the servers", err)
	}
	return fmt.Errorf("%w; name the groups under config.groups, which are then listed without the HTTP API", err)
}

// page requests one page of a group's services.
func (l *lister) page(ctx context.Context, group string, page, size int) ([]groupedName, int, error) {
	var names []string
	var total int
	var err error
	if l.d.conn != nil {
		names, total, err = l.d.conn.listPage(ctx, l.scope.wire, group, page, size)
		if err != nil && (isTransport(err) || hasCode(err, codeUnregistered)) {
			err = fmt.Errorf("%w: %w", errSession, err)
		}
	} else {
		names, total, err = l.d.api.listGroupPage(ctx, l.scope.wire, group, page, size)
	}
	all := make([]groupedName, len(names))
	for i, n := range names {
		g, name := splitGrouped(group, n)
		all[i] = groupedName{Name: name, GroupName: g}
	}
	return all, total, err
}

// readPages reads a list to its end, into ids. It reports whether the list was
// complete: as many services as every page states.
func readPages(fetch func(page int) (names []groupedName, total int, err error), namespace string, ids map[serviceID]bool) (total int, whole bool, err error) {
	distinct := map[serviceID]bool{}
	whole = true
	got := 0
	for page := 1; page <= maxPages; page++ {
		names, n, err := fetch(page)
		if err != nil {
			return 0, false, err
		}
		if page == 1 {
			total = n
		}
		whole = whole && n == total
		for _, name := range names {
			g, s := splitGrouped(name.GroupName, name.Name)
			if s == "" {
				return 0, false, errors.New("the list holds a service without a name")
			}
			id := serviceID{namespace, g, s}
			distinct[id], ids[id] = true, true
		}
		if got += len(names); len(names) == 0 || got >= n {
			break
		}
	}
	return total, whole && len(distinct) == total, nil
}
