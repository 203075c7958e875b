package nacos

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// serviceID identifies a service in requests. Its namespace is spelled as by
// the server, and may be "".
type serviceID struct{ namespace, group, name string }

// String returns the service for people to read.
func (id serviceID) String() string {
	return canonicalNamespace(id.namespace) + "/" + id.group + "/" + id.name
}

// part identifies the service in the registry's faults.
func (id serviceID) part() string { return "service " + id.namespace + "/" + id.group + "/" + id.name }

// source is where services are queried: a connection, or the HTTP API.
type source interface {
	// subscribe subscribes to a service and returns its current state.
	subscribe(ctx context.Context, namespace, group, name string) (model.Service, error)
	// unsubscribe ends a subscription.
	unsubscribe(ctx context.Context, namespace, group, name string) error
	// query returns the current state of a service.
	query(ctx context.Context, namespace, group, name string) (model.Service, error)
}

// service is the state of one service. Its fields but id, key and queued are
// guarded by the mirror's mu.
type service struct {
	id     serviceID
	key    registry.Key
	meta   map[string]string // of the service, as last answered
	queued *dueItem          // guarded by the queue's mu

	// listed reports that the service was in the last list or was announced
	// since; seen is the time of the last such report.
	listed bool
	seen   time.Time
	// arrived must be called when the first answer has arrived or the service
	// is removed.
	arrived func()
	// published reports that the catalog has the service, with known: the last
	// answer that counts.
	published bool
	known     []registry.Instance

	// session is the one in which it was subscribed, 0 for none.
	session uint64
	// answered reports that latest is an answer of the session.
	answered bool
	latest   []registry.Instance
	// reference is the server's clock in that answer; pushes counts the pushes
	// that were applied.
	reference uint64
	pushes    uint64
	// pushed reports that the session has received a push; without one the
	// subscription is repeated, up to tries times.
	pushed     bool
	subscribed time.Time
	tries      int
	// doubtful reports that latest is empty, that known is not, and that no
	// query has confirmed latest yet.
	doubtful bool
	// unread reports a message that could not be decoded, or not be assigned to
	// a namespace, and that was not followed by a query yet.
	unread bool
	// absent reports that a query was made since the service is unlisted.
	absent bool
	// protected reports that the service's protectThreshold is reached. A
	// server does not push a new threshold, so the service is queried.
	protected bool
	failures  plugin.Backoff
	failed    bool
	problem   string
}

// mirror keeps the catalog equal to the state that the sessions report. It
// outlives them.
type mirror struct {
	config  Config
	log     *slog.Logger
	catalog plugin.Catalog // for problems; services go through grace
	grace   *plugin.Grace
	state   *state
	convert converter
	queue   *queue

	mu       sync.Mutex // guards everything below, and each service
	services map[serviceID]*service
	// unselected are the names that are left out, by namespace.
	unselected map[string]*unselected
	// excluded are the groups that the configuration excludes, by namespace.
	excluded map[string]map[string]bool
	// byKey are the services of one key: two if clients use both names of the
	// public namespace.
	byKey map[registry.Key][]*service
	// byName are the services that a push may refer to, of all namespaces.
	byName map[groupedName][]*service
	// dropped is when a service was unsubscribed to which a late push may
	// refer.
	dropped map[groupedName]time.Time
	// session is the number of the current one, 0 before the first.
	session uint64
	polling bool
	// answered is the service of the session's last answer, nil for none.
	answered *service
}

func newMirror(c Config, log *slog.Logger, catalog plugin.Catalog, st *state) *mirror {
	return &mirror{
		config: c, log: log, catalog: catalog, state: st, convert: newConverter(c), queue: newQueue(),
		grace:    plugin.NewGrace(catalog, time.Duration(c.RemoveGrace), func(err error) { st.faults.Set("grace", faultGrace, err) }),
		services: map[serviceID]*service{}, byKey: map[registry.Key][]*service{},
		byName: map[groupedName][]*service{}, dropped: map[groupedName]time.Time{}, unselected: map[string]*unselected{}, excluded: map[string]map[string]bool{},
	}
}

// begin opens a session and returns its number: every service must be
// subscribed in it, and the clock of what is retained of it stands still until
// it is answered.
func (m *mirror) begin(polling bool) (number uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.session++
	m.polling, m.answered = polling, nil
	now := time.Now()
	for _, s := range m.services {
		s.answered, s.latest, s.reference, s.doubtful, s.unread, s.absent, s.session = false, nil, 0, false, false, false, 0
		s.pushed, s.tries = false, 0
		if s.failed {
			s.failed = false
			m.state.faults.Clear(s.id.part())
		}
		s.failures.Reset()
		m.queue.add(s, now)
	}
	m.grace.Back()
	m.grace.Doubt()
	return m.session
}

// end closes a session: nothing is removed until the next one.
func (m *mirror) end() { m.grace.Away() }

// add records that a service exists.
func (m *mirror) add(id serviceID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.addLocked(id, time.Now())
	m.tellLeftOutLocked(id.namespace)
}

// addLocked reports whether the service is new.
func (m *mirror) addLocked(id serviceID, now time.Time) bool {
	by, followed := m.config.selectedBy(id.name)
	if !followed || !m.config.Groups.Match(id.group) {
		return false
	}
	if m.config.ExcludeGroups.Match(id.group) {
		if m.excluded[id.namespace] == nil {
			m.excluded[id.namespace] = map[string]bool{}
		}
		m.excluded[id.namespace][id.group] = true
		return false
	}
	if !m.unselectedLocked(id.namespace).match(m.config.Services, by, id) {
		return false
	}
	if s := m.services[id]; s != nil {
		was := s.listed
		s.listed, s.seen, s.absent = true, now, false
		return !was
	}
	described := m.convert.service(id)
	s := &service{
		id: id, key: described.Key, meta: described.Meta,
		listed: true, seen: now, arrived: m.state.listing.Expect(),
		failures: plugin.Backoff{First: 250 * time.Millisecond, Most: 15 * time.Second},
	}
	m.services[id] = s
	m.byKey[s.key] = append(m.byKey[s.key], s)
	named := groupedName{Name: id.name, GroupName: id.group}
	m.byName[named] = append(m.byName[named], s)
	m.queue.add(s, now)
	return true
}

// unselectedLocked returns the names of a namespace that are left out.
func (m *mirror) unselectedLocked(namespace string) *unselected {
	u := m.unselected[namespace]
	if u == nil {
		u = &unselected{services: map[serviceID]bool{}, number: map[string]int{}}
		m.unselected[namespace] = u
	}
	return u
}

// unselected are the names that are left out. Several services may have one:
// those of other groups, and other versions of an interface.
type unselected struct {
	plugin.Unselected
	services map[serviceID]bool
	number   map[string]int // of services, by name
}

// match reports whether a service is selected by a name, and notes it if not.
func (u *unselected) match(s plugin.Selection, by string, id serviceID) bool {
	if u.Match(s, by) {
		return true
	}
	if !u.services[id] {
		u.services[id] = true
		u.number[by]++
	}
	return false
}

// forget removes a service that the registry no longer has.
func (u *unselected) forget(by string, id serviceID) {
	if !u.services[id] {
		return
	}
	delete(u.services, id)
	if u.number[by]--; u.number[by] == 0 {
		delete(u.number, by)
		u.Forget(by)
	}
}

// tellLeftOutLocked lists what the configuration leaves out of a namespace.
func (m *mirror) tellLeftOutLocked(namespace string) {
	m.unselectedLocked(namespace).Tell(m.catalog, "services", namespace)
	const by = "config.exclude_groups"
	text := ""
	if groups := slices.Sorted(maps.Keys(m.excluded[namespace])); len(groups) > 0 {
		text = fmt.Sprintf("services of %d groups left out by %s: %.200q", len(groups), by, groups[:min(len(groups), 5)])
	}
	m.catalog.LeftOut(strings.TrimSpace(by+" "+namespace), text)
}

// missing records that a service was announced as removed, or is not listed.
func (m *mirror) missing(id serviceID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.services[id]; s != nil {
		m.missingLocked(s)
		return
	}
	u := m.unselectedLocked(id.namespace)
	by, _ := m.config.selectedBy(id.name)
	u.forget(by, id)
	u.Tell(m.catalog, "services", id.namespace)
}

func (m *mirror) missingLocked(s *service) {
	if s.listed {
		s.listed, s.absent = false, false
		m.queue.add(s, time.Now())
	}
}

// list applies a complete list of a namespace, requested at the given time, and
// reports whether it changed anything. Services announced since are not
// missing.
func (m *mirror) list(namespace string, ids map[serviceID]bool, asked time.Time) (changed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	delete(m.unselected, namespace)
	delete(m.excluded, namespace)
	for id := range ids {
		changed = m.addLocked(id, now) || changed
	}
	m.tellLeftOutLocked(namespace)
	for id, s := range m.services {
		if id.namespace == namespace && s.listed && !ids[id] && s.seen.Before(asked) {
			m.missingLocked(s)
			changed = true
		}
	}
	return changed
}

// addAll adds the services of an incomplete list.
func (m *mirror) addAll(ids map[serviceID]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	namespaces := map[string]bool{}
	for id := range ids {
		m.addLocked(id, now)
		namespaces[id.namespace] = true
	}
	for namespace := range namespaces {
		m.tellLeftOutLocked(namespace)
	}
}

// groups returns the selected groups among the given ones, those of known
// services, and the default one.
func (m *mirror) groups(more []string) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	groups := map[string]bool{defaultGroup: true}
	for _, g := range more {
		groups[g] = true
	}
	for id := range m.services {
		groups[id.group] = true
	}
	out := make([]string, 0, len(groups))
	for g := range groups {
		if m.config.Groups.Match(g) && !m.config.ExcludeGroups.Match(g) {
			out = append(out, g)
		}
	}
	slices.Sort(out)
	return out
}

// push applies a push, or records one that cannot be decoded. A push has no
// namespace: if several services have the name, each is queried.
func (m *mirror) push(session uint64, group, name string, info *model.Service, err error) {
	a := m.convert.answer(name, info)
	m.mu.Lock()
	defer m.mu.Unlock()
	if session != m.session {
		return
	}
	named := groupedName{Name: name, GroupName: group}
	all := m.byName[named]
	since, ambiguous := m.dropped[named]
	if ambiguous && time.Since(since) > droppedFor {
		delete(m.dropped, named)
		ambiguous = false
	}
	// With several services of the name, the push does not prove that any of
	// them is subscribed.
	if len(all) == 1 && !ambiguous {
		all[0].pushed = true
	}
	if err == nil && (ambiguous || len(all) > 1) {
		for _, s := range all {
			s.unread = true
			m.queue.add(s, time.Now())
		}
		return
	}
	for _, s := range all {
		if err != nil {
			m.problemLocked(s, fmt.Sprintf("what the server sends of it cannot be read, so its last state is kept: %v", err))
			s.unread = true
			m.queue.add(s, time.Now().Add(plugin.Jitter(unreadableRetry)))
			continue
		}
		s.pushes++
		m.answerLocked(s, a, false)
	}
}

// droppedFor bounds the delay of pushes after an unsubscription.
const droppedFor = 10 * time.Second

// unreadableRetry is the pause before a service is queried after a message that
// cannot be decoded.
const unreadableRetry = 5 * time.Second

// answerLocked applies an answer about a service. confirmed reports that the
// answer is of a query that verifies an empty one.
func (m *mirror) answerLocked(s *service, a answer, confirmed bool) {
	m.answered = s
	s.answered, s.latest, s.reference = true, a.instances, a.reference
	s.doubtful, s.unread = false, false
	var problems []string
	if s.protected = a.protected; s.protected {
		m.queue.add(s, time.Now().Add(plugin.Jitter(time.Duration(m.config.PollInterval))))
		problems = append(problems, "protectThreshold is reached: too few instances are healthy, so nacos counts all of them as healthy; repair the instances, or lower the threshold")
	}
	if a.problem != "" {
		problems = append(problems, a.problem)
	}
	m.problemLocked(s, strings.Join(problems, "; "))
	// An answer without instances must be confirmed.
	if s.doubtful = len(s.latest) == 0 && len(s.known) > 0 && !confirmed; s.doubtful {
		m.tellLocked(s.key)
		m.queue.add(s, time.Now())
		return
	}
	s.published, s.known = true, s.latest
	if a.meta != nil {
		s.meta = a.meta
	}
	m.tellLocked(s.key)
	s.arrived()
	if !s.listed && len(s.latest) == 0 {
		m.queue.add(s, time.Now())
	}
}

// tellLocked publishes the services of a key, merged. Those without an answer
// that counts stay as they are.
func (m *mirror) tellLocked(key registry.Key) {
	var all, open []registry.Instance
	svc := registry.Service{Key: key}
	published, answered := false, false
	for _, s := range m.byKey[key] {
		svc.Meta = s.meta
		switch {
		case !s.published:
			continue
		case s.answered && !s.doubtful:
			answered = true
			all, _ = plugin.UnionInstances(all, s.known)
		default:
			open, _ = plugin.UnionInstances(open, s.known)
		}
		published = true
	}
	switch {
	case !published:
		m.grace.Remove(key)
	case answered:
		m.grace.SetPart(svc, all, open)
	default:
		m.grace.Add(svc, nil)
	}
}

// problemLocked sets the problem of a service, "" for none. The catalog gets
// the problems of all services of its key.
func (m *mirror) problemLocked(s *service, text string) {
	if s.problem == text {
		return
	}
	s.problem = text
	var all []string
	for _, o := range m.byKey[s.key] {
		if o.problem != "" && !slices.Contains(all, o.problem) {
			all = append(all, o.problem)
		}
	}
	m.catalog.Problem("service "+s.key.String(), strings.Join(all, "; "))
}

// step is the action of a visit.
type step int

const (
	stepNothing step = iota
	stepSubscribe
	stepQuery
	// stepPoll is a periodic query.
	stepPoll
	stepRemove
)

// nextLocked returns the next action for a service. One that is not listed
// stays subscribed while something of it is retained.
func (m *mirror) nextLocked(s *service) step {
	goes := !s.listed
	if goes {
		_, retained := m.grace.Retained(s.key)
		goes = !retained
	}
	switch {
	case s.session != m.session:
		return stepSubscribe
	case s.unread, s.doubtful:
		return stepQuery
	case !m.polling && !s.pushed && s.tries < subscribeTries && time.Since(s.subscribed) >= pushWait:
		return stepSubscribe
	case goes && !s.absent:
		return stepQuery
	case goes && s.answered && len(s.latest) == 0:
		return stepRemove
	case m.polling, s.protected:
		return stepPoll
	}
	return stepNothing
}

const (
	// pushWait bounds the time until the push that follows every subscription.
	// A server that is still registering the connection answers a subscription
	// and then loses it.
	pushWait = 8 * time.Second
	// subscribeTries bounds the subscriptions to a service without a push.
	subscribeTries = 3
)

// errSession ends a session because of a failed request.
var errSession = errors.New("the connection is of no use any more")

// visit performs the next action for a service, with one request. An error ends
// the session.
func (m *mirror) visit(ctx context.Context, src source, s *service) error {
	m.mu.Lock()
	do, session, pushes, doubtful := m.nextLocked(s), m.session, s.pushes, s.doubtful
	if m.services[s.id] != s {
		do = stepNothing
	} else if do == stepNothing {
		m.waitLocked(s)
	}
	m.mu.Unlock()

	var info model.Service
	var err error
	switch do {
	case stepNothing:
		return nil
	case stepSubscribe:
		info, err = src.subscribe(ctx, s.id.namespace, s.id.group, s.id.name)
	case stepQuery, stepPoll:
		info, err = src.query(ctx, s.id.namespace, s.id.group, s.id.name)
	case stepRemove:
		err = src.unsubscribe(ctx, s.id.namespace, s.id.group, s.id.name)
	}
	a := m.convert.answer(s.id.name, &info)
	definite := isRefused(err) && m.showsAnother(ctx, src)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	if session != m.session {
		return errSession
	}
	if err != nil {
		return m.failedLocked(s, err, definite)
	}
	m.mendedLocked(s)
	if do == stepRemove {
		m.removedLocked(s)
		return nil
	}
	s.session = session
	if do == stepSubscribe {
		s.tries++
		s.subscribed = time.Now()
	}
	if do == stepQuery && !s.listed {
		s.absent = true
	}
	// A push during the request is newer unless the server's clock shows
	// otherwise.
	if s.pushes == pushes || a.reference > s.reference {
		m.answerLocked(s, a, do == stepQuery && doubtful)
	}
	switch m.nextLocked(s) {
	case stepNothing:
		if !m.polling && !s.pushed && s.tries < subscribeTries {
			m.queue.add(s, s.subscribed.Add(pushWait)) // the queue holds one visit per service, so any other replaces this one
		}
		m.waitLocked(s)
	case stepPoll:
		m.queue.add(s, time.Now().Add(plugin.Jitter(time.Duration(m.config.PollInterval))))
	default:
		m.queue.add(s, time.Now())
	}
	return nil
}

// waitLocked plans the visit of a service that is not listed for when nothing
// of it is retained any more.
func (m *mirror) waitLocked(s *service) {
	if left, retained := m.grace.Retained(s.key); retained && !s.listed {
		m.queue.add(s, time.Now().Add(left))
	}
}

// showsAnother reports whether the server currently serves another service that
// it has served before. If so, a refusal concerns the refused service.
// Otherwise it may concern the credentials: a wrong password must not look like
// an empty registry.
func (m *mirror) showsAnother(ctx context.Context, src source) bool {
	m.mu.Lock()
	other := m.answered
	m.mu.Unlock()
	if other == nil {
		return false
	}
	_, err := src.query(ctx, other.id.namespace, other.id.group, other.id.name)
	return err == nil
}

// failedLocked records a failed request about a service and schedules a retry.
// The known state is retained. definite reports that only this service was
// refused.
func (m *mirror) failedLocked(s *service, err error, definite bool) error {
	if hasCode(err, codeUnregistered) || isTransport(err) {
		return fmt.Errorf("%w: %w", errSession, err)
	}
	if hasCode(err, codeBadParameter) {
		// A retry cannot succeed, and must not delay the first listing.
		m.problemLocked(s, fmt.Sprintf("the server does not take a request about it, so its last state is kept: %v; rename it, or exclude it under config.services", err))
		m.mendedLocked(s) // clear the failures before
		s.arrived()
		s.session = m.session
		return nil
	}
	if definite {
		// It must not delay the first listing.
		s.arrived()
		if !s.listed && !s.published {
			m.mendedLocked(s)
			m.removedLocked(s)
			return nil
		}
		m.problemLocked(s, fmt.Sprintf("the server refuses to show it, and shows others, so its last state is kept: %v; give the user read on its namespace and group, "+
			"or exclude it by config.groups or config.services", err))
	}
	kind := faultService
	if isRefused(err) {
		kind = faultAuth
		err = fmt.Errorf("the server refuses to show service %s: %w; give the user read on its namespace and group, or exclude it under config", s.id, err)
	} else {
		err = fmt.Errorf("service %s: %w", s.id, err)
	}
	s.failed = true
	m.state.faults.Set(s.id.part(), kind, err)
	m.queue.add(s, time.Now().Add(s.failures.Next()))
	return nil
}

// codeBadParameter is the code for an illegal name.
const codeBadParameter = 400

// mendedLocked clears the fault that failedLocked set.
func (m *mirror) mendedLocked(s *service) {
	if s.failed {
		s.failed = false
		s.failures.Reset()
		m.state.faults.Clear(s.id.part())
	}
}

// removedLocked deletes an unsubscribed service, unless it was announced since.
func (m *mirror) removedLocked(s *service) {
	if s.listed || len(s.latest) > 0 {
		s.session, s.answered, s.latest = 0, false, nil
		m.queue.add(s, time.Now())
		return
	}
	m.queue.drop(s)
	if m.answered == s {
		m.answered = nil
	}
	delete(m.services, s.id)
	same := func(o *service) bool { return o == s }
	m.byKey[s.key] = slices.DeleteFunc(m.byKey[s.key], same)
	named := groupedName{Name: s.id.name, GroupName: s.id.group}
	if m.byName[named] = slices.DeleteFunc(m.byName[named], same); len(m.byName[named]) == 0 {
		delete(m.byName, named)
	} else {
		m.dropped[named] = time.Now()
	}
	m.problemLocked(s, "")
	s.arrived()
	if s.published {
		s.published = false
		m.tellLocked(s.key)
	}
	if len(m.byKey[s.key]) == 0 {
		delete(m.byKey, s.key)
	}
}

// work visits services until ctx ends or a visit ends the session.
func (m *mirror) work(ctx context.Context, src source) error {
	for {
		s := m.queue.take(ctx)
		if s == nil {
			return context.Cause(ctx)
		}
		err := m.visit(ctx, src, s)
		m.queue.done(s)
		if err != nil {
			return err
		}
	}
}
