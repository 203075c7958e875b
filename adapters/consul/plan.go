package consul

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	// turnTime bounds the waits while connections are being reassigned, and the
	// interval of repeated reports.
	turnTime = 30 * time.Second
	// refusedFor is how long a refused connection lowers the number of
	// connections.
	refusedFor = time.Hour
	// regroupEvery is the shortest interval of divisions of the services into
	// groups.
	regroupEvery = 2 * time.Second
	// groupGap is the shortest interval of rounds of looks at the members of
	// one group, per member.
	groupGap = 500 * time.Microsecond
	// sweepEvery is the shortest interval of sweeps, from start to start.
	sweepEvery = 400 * time.Millisecond
	// Sweeps look at nodes instead of services from sweepNodes nodes and
	// servicesPerNode services per node on.
	sweepNodes, servicesPerNode = 16, 4
	// sweepGrace is how long a group has to find a change that the services'
	// table reports too.
	sweepGrace = 100 * time.Millisecond
	// sweepAnyway bounds the postponement of a sweep because the table's last
	// change is known. For a sweep over nodes the bound is lower in proportion
	// to its cost.
	sweepAnyway = 5 * time.Second
	// sweepInDoubt is the interval of sweeps if only checks have changed.
	sweepInDoubt = 30 * time.Second
)

// plan schedules the queries of services over connections that carry one query
// at a time. It is a state machine: it has no goroutine, lock or clock, and
// starts nothing.
//
// While there are at most as many services as places, each waits on its own
// connection. Otherwise each place serves a group of services whose names have
// a common prefix. A group waits on the checks of a name that no service has
// but that would sort among its members: Consul wakes such a query when a check
// of a service with that prefix changes. Then each member is looked at: its
// index is queried, and if that differs the member is requested in full.
// Changes without a change of a check are found by sweeps over all nodes, if
// these are few, or over all services. A sweep starts when the services' table
// has changed.
//
// All of this affects only how soon a change is found. Every service is
// requested in full when due, regardless of earlier answers.
type plan struct {
	most     int // places, as configured
	places   int // most, less what Consul refused
	lookMost int // bound of concurrent looks

	turns    map[*turn]bool
	groups   map[groupKey]*group
	crowded  bool // more services than places
	occupied int  // places in use
	dirty    bool // the groups must be divided again
	grouped  int  // number of services at the last division
	regroup  time.Time

	nodes  map[nodeKey]*node // all nodes of the scopes in mapped
	mapped map[int]bool
	at     map[nodeKey]map[*turn]bool // services known to be on the node
	named  map[nodeKey]map[*turn]bool // services of a name, as Consul sorts them
	base   map[int]uint64             // by scope, the index up to which everything is known, 0 for none

	urgent    []*turn // to look at, in order
	looks     int     // looks in progress
	swept     []look  // remaining looks of the current sweep
	sweeps    int     // looks in progress that belong to the sweep
	sweeping  bool
	found     bool           // the sweep has found a change
	began     time.Time      // start of the last sweep
	broadAt   time.Time      // start of the last sweep over services
	sweepAt   time.Time      // earliest start of the next sweep
	took      time.Duration  // duration of the last sweep
	stirred   bool           // a sweep is requested
	doubted   bool           // checks have changed since the last sweep began
	unknown   bool           // requested for a reason without an index
	broad     bool           // requested over services, not nodes
	upTo      map[int]uint64 // by scope, the index of the table's last change
	seen      map[int]uint64 // by scope, the highest index of an answer
	open      map[int]bool   // scopes whose services may wait
	delay     time.Duration  // from a wake to the full answer, smoothed
	refusedAt time.Time
}

// turn is one service in the plan. All of it but wake belongs to the plan.
type turn struct {
	scope int
	name  string
	// wake is signalled when the result of decide changes. It has capacity one.
	wake  chan struct{}
	watch *watch // the watch of the service; not used by the plan

	group    *group
	index    uint64         // of the last answer, 0 if looks cannot be compared with it
	nodes    map[string]int // number of instances by node
	due      time.Time
	resting  bool      // no query is in progress
	ask      bool      // to be requested in full
	queued   bool      // is in urgent
	maySince time.Time // time of the first wake for a possible change
}

type groupKey struct {
	scope  int
	prefix string
}

// group is the services that share a place.
type group struct {
	groupKey
	probe   string // the name whose checks the group waits for
	members map[*turn]bool
	retired bool // removed from the plan
	// running reports whether the group has a place.
	running bool
	woken   time.Time // last wake, zero once the members are queued
	lookAt  time.Time // earliest next look at the members
}

// single reports whether the group is one service, which waits on its own query
// and needs no looks.
func (g *group) single() bool { return len(g.members) == 1 && g.probe == "" }

// decision is the next action of a service.
type decision uint8

const (
	// decideRest is to do nothing until the service is due or woken.
	decideRest decision = iota
	// decideHold is to wait for a change on a connection.
	decideHold
	// decideAsk is to request the service in full without waiting.
	decideAsk
)

// look is a service or a node to look at.
type look struct {
	*turn
	node  *node
	known uint64 // the node's index
	base  uint64 // of its scope
	sweep bool   // part of the sweep
}

// news reports whether a node's index shows an unknown change.
func (l look) news(index uint64) bool {
	return index != l.known && (l.known > 0 || index > l.base)
}

// last returns the index of the last known change.
func (l look) last() uint64 {
	if l.node != nil {
		return l.node.index
	}
	return l.index
}

// node is the plan's state of one node.
type node struct {
	nodeKey
	index uint64 // up to which everything on the node is known, 0 for none
}

type nodeKey struct {
	scope int
	name  string
}

// registered is a service as registered on one node.
type registered struct {
	instances int
	index     uint64 // of the last change
}

// steps are the actions to perform now.
type steps struct {
	start []*group // groups that start to wait, until keep returns false
	wake  []*turn
	look  []look
	at    time.Time // time of the next step, zero for none
}

func newPlan(places, lookMost int) plan {
	return plan{
		most: places, places: places, lookMost: max(lookMost, 2),
		turns: map[*turn]bool{}, groups: map[groupKey]*group{}, nodes: map[nodeKey]*node{}, mapped: map[int]bool{},
		at: map[nodeKey]map[*turn]bool{}, named: map[nodeKey]map[*turn]bool{}, base: map[int]uint64{}, seen: map[int]uint64{}, upTo: map[int]uint64{}, open: map[int]bool{},
	}
}

// newTurn returns the turn of a service. Consul sorts names case-insensitively.
func newTurn(scope int, name string) turn {
	return turn{scope: scope, name: strings.ToLower(name), wake: make(chan struct{}, 1)}
}

// join adds a service.
func (p *plan) join(t *turn) {
	p.turns[t] = true
	put(p.named, nodeKey{t.scope, t.name}, t)
	if p.open[t.scope] {
		p.find(t)
	}
}

// begin lets the services of a scope wait, after each service of its first
// listing, which had the given index, was requested.
func (p *plan) begin(scope int, index uint64) {
	p.open[scope], p.base[scope], p.dirty, p.regroup = true, index, true, time.Time{}
}

// put adds a service to a set; drop removes it.
func put(sets map[nodeKey]map[*turn]bool, key nodeKey, t *turn) {
	if sets[key] == nil {
		sets[key] = map[*turn]bool{}
	}
	sets[key][t] = true
}

func drop(sets map[nodeKey]map[*turn]bool, key nodeKey, t *turn) {
	if delete(sets[key], t); len(sets[key]) == 0 {
		delete(sets, key)
	}
}

// find adds a service to its group, or requests a new division into groups.
func (p *plan) find(t *turn) {
	if !p.crowded && len(p.turns) <= p.places {
		key := groupKey{t.scope, t.name}
		if p.groups[key] == nil {
			p.add(&group{groupKey: key}, t)
			return
		}
	}
	if p.crowded && len(p.turns) < p.grouped*5/4 {
		for n := len(t.name); n >= 0; n-- {
			if g := p.groups[groupKey{t.scope, t.name[:n]}]; g != nil && g.probe != "" {
				g.members[t], t.group = true, g
				return
			}
		}
	}
	p.dirty = true
}

func (p *plan) add(g *group, members ...*turn) {
	g.members = make(map[*turn]bool, len(members))
	for _, t := range members {
		g.members[t], t.group = true, g
	}
	p.groups[g.groupKey] = g
}

// leave removes a service.
func (p *plan) leave(t *turn) {
	delete(p.turns, t)
	drop(p.named, nodeKey{t.scope, t.name}, t)
	for name := range t.nodes {
		drop(p.at, nodeKey{t.scope, name}, t)
	}
	if g := t.group; g != nil {
		delete(g.members, t)
		t.group = nil
		if len(g.members) == 0 {
			g.retired = true
			if p.groups[g.groupKey] == g {
				delete(p.groups, g.groupKey)
			}
			if g.probe == "" {
				p.release(g)
			}
		}
	}
	p.dirty = p.dirty || p.crowded && len(p.turns) <= p.places
}

// rest records an answer about a service, at an index that looks can be
// compared with, or 0. From due on the service is requested in full.
func (p *plan) rest(t *turn, index uint64, nodes map[string]int, due time.Time) {
	if p.turns[t] && !maps.Equal(t.nodes, nodes) {
		for name := range t.nodes {
			drop(p.at, nodeKey{t.scope, name}, t)
		}
		for name := range nodes {
			put(p.at, nodeKey{t.scope, name}, t)
		}
	}
	t.index, t.nodes, t.due, t.maySince, t.resting = index, nodes, due, time.Time{}, true
	p.seen[t.scope] = max(p.seen[t.scope], index)
}

// sent records that a full request starts now; the answer will contain all
// earlier changes.
func (p *plan) sent(t *turn) { t.ask = false }

// decide returns the next action of a service. A service at rest asks again
// when woken or due.
func (p *plan) decide(t *turn, now time.Time) decision {
	g := t.group
	if g != nil && g.single() && p.keep(g) {
		t.resting = false
		return decideHold
	}
	if t.ask || !now.Before(t.due) {
		t.ask, t.resting = false, false
		return decideAsk
	}
	return decideRest
}

// keep reports whether a group may wait, and assigns or withdraws its place.
func (p *plan) keep(g *group) bool {
	switch {
	case g.retired || g.running && p.occupied > p.places:
		p.release(g)
	case !g.running && p.occupied < p.places:
		g.running = true
		p.occupied++
	}
	return g.running
}

// release frees the place of a group.
func (p *plan) release(g *group) {
	if g.running {
		g.running = false
		p.occupied--
	}
}

// settled reports whether every group has its place. Until then waits are
// short.
func (p *plan) settled() bool { return p.occupied == len(p.groups) && !p.dirty }

// woke records that a check has changed whose service may be a member of the
// group.
func (p *plan) woke(g *group, now time.Time) {
	if g.woken.IsZero() {
		g.woken = now
	}
}

// stir records that a table has changed, at an index, or with 0 at an unknown
// one. If a service is soon known at that index, it is the one that changed, so
// the sweep may be postponed.
func (p *plan) stir(scope int, index uint64, now time.Time) {
	if !p.stirred {
		p.sweepAt = later(p.sweepAt, now.Add(sweepGrace))
	}
	p.stirred = true
	p.unknown = p.unknown || index == 0
	p.broad = p.broad || index == 0
	p.upTo[scope] = max(p.upTo[scope], index)
}

// doubt records that checks have changed. Groups find which; an occasional
// sweep covers the case that Consul no longer wakes them.
func (p *plan) doubt() {
	p.doubted = true
	if !p.settled() {
		p.stirred, p.unknown, p.broad = true, true, true
	}
}

// setNodes sets all nodes of a scope; nil means that they are unknown.
func (p *plan) setNodes(scope int, names map[string]bool) {
	p.mapped[scope] = names != nil
	for key := range p.nodes {
		if key.scope == scope && !names[key.name] {
			delete(p.nodes, key)
		}
	}
	for name := range names {
		if key := (nodeKey{scope, name}); p.nodes[key] == nil {
			p.nodes[key] = &node{nodeKey: key}
		}
	}
}

// byNode reports whether sweeps go over nodes: these are known and few.
func (p *plan) byNode() bool {
	for scope := range p.open {
		if !p.mapped[scope] {
			return false
		}
	}
	return p.stirred && !p.broad && len(p.nodes) >= sweepNodes && len(p.nodes)*servicesPerNode <= len(p.turns)
}

// patient reports whether the last change of each table is known.
func (p *plan) patient() bool {
	for scope, index := range p.upTo {
		if index > p.seen[scope] {
			return false
		}
	}
	return !p.unknown
}

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// nodesChanged returns the services with instances on nodes where a node check
// has started or ceased to fail.
func (p *plan) nodesChanged(scope int, before, now map[nodeCheck]bool) (wake []*turn) {
	for _, pair := range [][2]map[nodeCheck]bool{{before, now}, {now, before}} {
		for c := range pair[0] {
			if !pair[1][c] {
				wake = append(wake, p.askIf(p.at[nodeKey{scope, c.node}], func(*turn) bool { return true })...)
			}
		}
	}
	return wake
}

// nodeCheck is a check of a node.
type nodeCheck struct{ node, check string }

// askAll requests every service of a scope in full, and discards the state of
// its nodes.
func (p *plan) askAll(scope int) (wake []*turn) {
	for key := range p.nodes {
		if key.scope == scope {
			p.nodes[key] = &node{nodeKey: key} // a new one, so that looks in progress are ignored
		}
	}
	p.base[scope] = 0
	return p.askIf(p.turns, func(t *turn) bool { return t.scope == scope })
}

func (p *plan) askIf(of map[*turn]bool, cond func(*turn) bool) (wake []*turn) {
	for t := range of {
		if cond(t) {
			t.ask = true
			wake = append(wake, t)
		}
	}
	return wake
}

// looked records the index that a look returned, 0 if it failed, and reports
// whether the service is to be requested in full.
func (p *plan) looked(l look, index uint64, now time.Time) (changed bool) {
	p.looks--
	changed = index == 0 || index != l.index
	if l.sweep {
		p.found = p.found || changed && !l.ask && l.maySince.IsZero()
		p.sweptOne(now)
	}
	if changed {
		l.ask = true
	} else {
		l.maySince = time.Time{}
	}
	return changed
}

// lookedNode records the index that a look at a node returned, 0 if it failed,
// and, if the index differs, the services registered there.
func (p *plan) lookedNode(l look, index uint64, there map[string]registered, now time.Time) (wake []*turn) {
	p.looks--
	defer p.sweptOne(now)
	switch {
	case p.nodes[l.node.nodeKey] != l.node:
		return nil
	case index == 0:
		p.stirred, p.unknown, p.broad = true, true, true
		return nil
	}
	l.node.index = index
	if !l.news(index) {
		return nil
	}
	differs := func(t *turn) bool {
		r := there[t.name]
		if r.instances == t.nodes[l.node.name] && r.index <= t.index || t.group != nil && t.group.single() && t.group.running {
			return false
		}
		p.found = p.found || !t.ask && t.maySince.IsZero()
		return true
	}
	wake = p.askIf(p.at[l.node.nodeKey], differs)
	for name := range there {
		wake = append(wake, p.askIf(p.named[nodeKey{l.node.scope, name}], differs)...)
	}
	return wake
}

// sweptOne records the end of a look of the sweep.
func (p *plan) sweptOne(now time.Time) {
	if p.sweeps--; p.sweeps == 0 && len(p.swept) == 0 {
		p.endSweep(now)
	}
}

// period returns the interval of sweeps, from start to start: it leaves Consul
// half as much idle time as the sweep takes.
func (p *plan) period() time.Duration { return max(p.took*3/2, sweepEvery) }

// endSweep sets the interval of sweeps by the duration of this one.
func (p *plan) endSweep(now time.Time) {
	p.sweeping = false
	p.took = now.Sub(p.began)
	p.sweepAt = p.began.Add(p.period())
	if p.found {
		// One change suggests others: the table's own query pauses between its
		// answers.
		p.stirred, p.unknown = true, true
	}
}

// arrived records the delay from a wake to the change.
func (p *plan) arrived(t *turn, now time.Time) {
	if !t.maySince.IsZero() {
		p.delay += (now.Sub(t.maySince) - p.delay) / 8
		t.maySince = time.Time{}
	}
}

// refused records that Consul refused a connection: that of a group, or with
// nil another one. It reduces the places so that, with own other connections,
// at most three quarters of the previous number are used: an exhausted limit
// leaves no connections to other programs on this machine. It reports whether
// the limit is new.
func (p *plan) refused(g *group, own, few int, now time.Time) (news bool) {
	if g != nil {
		p.release(g)
	}
	places := max(1, min(p.places, (p.occupied+own)*3/4-few))
	news = places < p.places && now.Sub(p.refusedAt) > turnTime
	p.dirty = p.dirty || places < p.places
	p.places, p.refusedAt = places, now
	return news
}

// restore reverses refused: the agent or its limit has changed.
func (p *plan) restore() {
	p.dirty = p.dirty || p.places != p.most
	p.places = p.most
}

// step returns the actions to perform now.
func (p *plan) step(now time.Time) (s steps) {
	at := func(t time.Time) {
		if s.at.IsZero() || t.Before(s.at) {
			s.at = t
		}
	}
	if p.places < p.most {
		if again := p.refusedAt.Add(refusedFor); now.Before(again) {
			at(again)
		} else {
			p.restore()
		}
	}
	if p.dirty {
		if now.Before(p.regroup) {
			at(p.regroup)
		} else {
			p.divide()
			p.dirty, p.grouped, p.regroup = false, len(p.turns), now.Add(regroupEvery)
		}
	}
	free := p.places - p.occupied
	for _, g := range p.groups {
		if !g.running && free > 0 {
			free--
			if g.single() {
				for t := range g.members {
					s.wake = append(s.wake, t)
				}
			} else if p.keep(g) {
				s.start = append(s.start, g)
			}
		}
		switch {
		case g.woken.IsZero():
		case now.Before(g.lookAt):
			at(g.lookAt)
		default:
			for t := range g.members {
				if t.maySince.IsZero() {
					t.maySince = g.woken
				}
				if !t.resting {
					t.ask = true // the query in progress may return older state
				} else if !t.queued {
					t.queued = true
					p.urgent = append(p.urgent, t)
				}
			}
			g.woken, g.lookAt = time.Time{}, now.Add(groupGap*time.Duration(len(g.members)))
		}
	}
	p.sweep(now, at)
	p.hand(&s)
	return s
}

// sweep starts a sweep if one is requested and its time has come.
func (p *plan) sweep(now time.Time, at func(time.Time)) {
	begin := p.sweepAt
	sure := p.broadAt.Add(sweepInDoubt)
	p.broad = p.broad || p.doubted && !now.Before(sure)
	switch {
	case p.sweeping || !p.stirred && !p.doubted:
		return
	case !p.stirred:
		begin = later(begin, sure)
	case p.patient() && p.byNode():
		begin = later(begin, p.began.Add(sweepAnyway/servicesPerNode))
	case p.patient():
		begin = p.began.Add(sweepAnyway)
	}
	if now.Before(begin) {
		at(begin)
		return
	}
	if p.byNode() {
		for _, n := range p.nodes {
			p.swept = append(p.swept, look{node: n, sweep: true})
		}
	} else {
		for t := range p.turns {
			if t.resting {
				p.swept = append(p.swept, look{turn: t, sweep: true})
			} else if t.group == nil || !t.group.single() || !t.group.running {
				t.ask = true // the query in progress may return older state
			}
		}
		p.doubted, p.broad, p.broadAt = false, false, now
	}
	// Look first at what changed last: it is the most likely to change next.
	slices.SortFunc(p.swept, func(a, b look) int { return cmp.Compare(b.last(), a.last()) })
	p.stirred, p.unknown, p.found, p.began = false, false, false, now
	p.sweeping = len(p.swept) > 0
}

// hand assigns looks: first to wakes, except for a quarter during a sweep, and
// the rest to the sweep, except for half during a sweep over services, as a
// later wake would have to wait for it.
func (p *plan) hand(s *steps) {
	urgent, share := p.lookMost, p.lookMost
	if len(p.swept) > 0 {
		urgent -= max(p.lookMost/4, 1)
		if p.swept[0].node == nil {
			share = max(p.lookMost/2, 1)
		}
	}
	for ; len(p.urgent) > 0 && p.looks-p.sweeps < urgent && p.looks < p.lookMost; p.urgent = p.urgent[1:] {
		t := p.urgent[0]
		t.queued = false
		if p.turns[t] {
			p.looks++
			s.look = append(s.look, look{turn: t})
		}
	}
	for ; len(p.swept) > 0 && p.sweeps < share && p.looks < p.lookMost; p.swept = p.swept[1:] {
		p.looks++
		p.sweeps++
		l := p.swept[0]
		if l.node != nil {
			l.known, l.base = l.node.index, p.base[l.node.scope]
		}
		s.look = append(s.look, l)
	}
}

// divide divides the services into at most as many groups as there are places,
// and retains existing groups that still fit.
func (p *plan) divide() {
	p.crowded = len(p.turns) > p.places
	old := p.groups
	p.groups = map[groupKey]*group{}
	for t := range p.turns {
		t.group = nil
	}
	waiting := slices.DeleteFunc(slices.Collect(maps.Keys(p.turns)), func(t *turn) bool { return !p.open[t.scope] })
	for _, members := range partition(waiting, p.places) {
		key := groupKey{members[0].scope, commonPrefix(members)}
		g := old[key]
		probe := ""
		if len(members) > 1 {
			probe = key.prefix + free(members, len(key.prefix))
		}
		if g == nil || g.probe != probe {
			g = &group{groupKey: key, probe: probe}
		}
		p.add(g, members...)
	}
	for key, g := range old {
		g.retired = p.groups[key] != g
	}
}

// partition divides services into at most n groups with common prefixes, and
// minimizes the largest group. There is at least one group for each scope.
func partition(turns []*turn, n int) (groups [][]*turn) {
	slices.SortFunc(turns, func(a, b *turn) int {
		return cmp.Or(cmp.Compare(a.scope, b.scope), strings.Compare(a.name, b.name))
	})
	if len(turns) == 0 || n == 0 {
		return nil
	}
	split := func(members []*turn, next func(*turn) int) (parts [][]*turn) {
		for len(members) > 0 {
			end := slices.IndexFunc(members, func(t *turn) bool { return next(t) != next(members[0]) })
			if end < 0 {
				end = len(members)
			}
			parts = append(parts, members[:end])
			members = members[end:]
		}
		return parts
	}
	groups = split(turns, func(t *turn) int { return t.scope })
	for whole := map[*turn]bool{}; ; {
		largest := -1
		for i, g := range groups {
			if len(g) > 1 && !whole[g[0]] && (largest < 0 || len(g) > len(groups[largest])) {
				largest = i
			}
		}
		if largest < 0 {
			return groups
		}
		members := groups[largest]
		length := len(commonPrefix(members))
		parts := split(members, func(t *turn) int { return nextByte(t.name, length) })
		if len(parts) == 1 || len(groups)-1+len(parts) > n {
			whole[members[0]] = true
			continue
		}
		groups = slices.Replace(groups, largest, largest+1, parts...)
	}
}

// commonPrefix returns the common prefix of the names of sorted services.
func commonPrefix(members []*turn) string {
	first, last := members[0].name, members[len(members)-1].name
	n := 0
	for n < len(first) && n < len(last) && first[n] == last[n] {
		n++
	}
	return first[:n]
}

// nextByte returns the byte of a name at an offset, -1 at its end.
func nextByte(name string, at int) int {
	if at == len(name) {
		return -1
	}
	return int(name[at])
}

// free returns a character that none of the names has at the offset.
func free(members []*turn, at int) string {
	used := map[int]bool{}
	for _, t := range members {
		used[nextByte(t.name, at)] = true
	}
	for _, c := range "~!$*+,;=@_-0123456789abcdefghijklmnopqrstuvwxyz" {
		if !used[int(c)] {
			return string(c)
		}
	}
	return "~"
}
