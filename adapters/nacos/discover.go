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
	// pageSize is how many services are asked for at once. A server looks at all of them for each page. One that gives fewer is asked on.
	pageSize = 5000
	// longList is the number of services from which on a list is read in full now and then only.
	longList = 500
	// maxPages bounds a list.
	maxPages = 20_000
	// fullEvery is which list of a long one is read in full if the number of services did not change.
	fullEvery = 6
	// quickRounds is how many lists follow each other quickly after a change.
	quickRounds = 3
	// costFactor is how much longer than reading a list the pause after it is at least.
	costFactor = 10
	// fuzzyResync is how often the server is asked for what a fuzzy watch missed.
	fuzzyResync = 30 * time.Second
	// fuzzyWait is how long the first batches of a fuzzy watch may take.
	fuzzyWait = 30 * time.Second
	// maxPatterns is how many groups are watched by a pattern each; a server takes 20 patterns of all its clients together.
	maxPatterns = 4
	// namespacesEvery is how often namespaces are listed, or each namespacesRounds list intervals if that is sooner.
	namespacesEvery  = 30 * time.Second
	namespacesRounds = 6
	// refusedWait is the pause after a refusal.
	refusedWait = 15 * time.Second
)

// defaultGroup is the group of a service that names none.
const defaultGroup = "DEFAULT_GROUP"

// scope is one namespace, over all sessions.
type scope struct {
	// namespace is its id as people write it, wire as requests do: "" besides "public" for old clients of servers before 2.4.
	namespace, wire string

	// arrived is to be called with each complete list.
	arrived func()

	mu sync.Mutex // guards everything below
	// exists says that the namespace is known to exist.
	exists bool
}

// id names the scope in states.
func (s *scope) id() string { return "namespace " + s.namespace + " " + s.wire }

// discovery learns which services there are, for the length of one session.
type discovery struct {
	config Config
	log    *slog.Logger
	mirror *mirror
	state  *state
	api    *httpAPI
	conn   *conn // nil where everything is polled
	scopes *scopes

	mu       sync.Mutex // guards everything below
	patterns map[string]*pattern
}

// pattern is one fuzzy watch.
type pattern struct {
	scope    *scope
	text     string
	received map[serviceID]bool
	// finished is closed when the first batches are in.
	finished chan struct{}
}

// scopes are the namespaces that are followed, over all sessions.
type scopes struct {
	state *state
	// named is to be called when all namespaces are known, where they have to be asked for.
	named func()

	mu  sync.Mutex // guards everything below
	all map[string]*scope
}

// get returns the scope of a namespace as requests write it. Its list is awaited from then on.
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

// leave forgets a scope that the server at hand does not have.
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

// run learns of services until ctx ends, or an error ends the session.
func (d *discovery) run(ctx context.Context, group *group) {
	follow := func(namespace string) {
		all := []*scope{d.scopes.get(namespace, namespace)}
		switch {
		case namespace != publicNamespace:
		case d.conn != nil && d.conn.abilities == nil:
			// Awaited before the list of the other can arrive.
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
	// As above.
	group.do(func() error {
		known := map[string]bool{}
		// What earlier sessions have learnt is followed at once, and also if it is listed no more: its services may yet go.
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

// follow learns of a namespace's services by the best way that the server has.
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

// fuzzyFollow learns of a namespace's services by fuzzy watches. It returns nil if the server has none.
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
				// Read on the group alone is enough for a list.
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
			// What the server leaves out is learnt by lists until the next look.
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

// awaitFuzzy waits for the first batches of the patterns, which together are a complete list, and reports whether it could be believed.
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
			// Another connection begins again.
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

// received returns what a pattern's server need not tell again.
func (d *discovery) received(p *pattern) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	keys := make([]string, 0, len(p.received))
	for id := range p.received {
		keys = append(keys, id.namespace+serviceKeySeparator+id.group+serviceKeySeparator+id.name)
	}
	return keys
}

// fuzzy takes in what the server tells of a fuzzy watch. It does not block.
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

// fuzzyOne takes in that one service came or went. A nil pattern stands for all that match.
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

// complete takes in a complete list, which holds what is not selected too, and reports whether it was believed and whether it changed
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

// doubt says why a namespace that lists nothing cannot be taken for empty, or nil.
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

// listFault says what is wrong with learning a namespace's services.
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

// listFollow learns of a namespace's services by lists until ctx ends.
func (d *discovery) listFollow(ctx context.Context, sc *scope) error {
	l := lister{d: d, scope: sc}
	for {
		if err := l.runFor(ctx, time.Hour); err != nil {
			return err
		}
	}
}

// lister reads one namespace's lists again and again.
type lister struct {
	d     *discovery
	scope *scope

	total  int // of the last complete list
	round  int
	groups []string // those that were asked for last, where they are not all
	look   int      // rounds to the next look for the groups of the empty namespace
	quick  int      // rounds that follow quickly yet
	retry  plugin.Backoff
}

// errHalf is a list that was not whole, because it changed while it was read.
var errHalf = errors.New("the list changed while it was read")

// runFor reads lists for a while. An error ends the session.
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

// once reads the list, or only the number of services where that says that a long list is as it was.
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

// failed says what is wrong with a list.
func (l *lister) failed(ctx context.Context, err error) {
	if l.scope.wire == "" && isRefused(err) {
		// A user may well read "public" only, as requests write it. Such a user is shown all else. Where the same is refused there too, that is what
		// is wrong, and is said of it.
		for _, g := range l.groups {
			if _, _, err := l.d.conn.listPage(ctx, l.scope.namespace, g, 1, 1); err != nil {
				return
			}
		}
		l.scope.arrived()
	}
	l.d.listFault(l.scope, err)
}

// emptyProblem is the id of the problem that groups of the empty namespace cannot be found.
const emptyProblem = `namespace ""`

// emptyGroups returns the groups of the empty namespace that are to be followed: those of services that are known, and those that a look now and then
// finds. The server's lists of all groups take that namespace for "public".
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

// cure says what to do where the list of all groups cannot be had.
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

// page asks for one page of a group's services.
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

// readPages reads a list to its end, into ids. It reports whether the list was whole: as many services as every page said that there are.
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
