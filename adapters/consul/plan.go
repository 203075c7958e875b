package consul

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
)

const (
	// turnTime bounds the waits while connections are being handed over, and
	// how often the same news is told.
	turnTime = 30 * time.Second
	// refusedFor is how long a refused connection keeps the number of
	// connections down.
	refusedFor = time.Hour
	// regroupEvery is the shortest time between two divisions of the services
	// into groups.
	regroupEvery = 2 * time.Second
	// groupGap is the shortest time between two rounds of looks at the members
	// of one group, for each member.
	groupGap = 500 * time.Microsecond
	// sweepEvery is the shortest time from the beginning of one sweep to the
	// next.
	sweepEvery = 750 * time.Millisecond
	// sweepGrace is how long a group has to find what the services' table tells
	// of too.
	sweepGrace = 100 * time.Millisecond
	// sweepAnyway is how long a sweep is put off at most because the last
	// change of the table is known already.
	sweepAnyway = 5 * time.Second
	// sweepInDoubt is how long after a sweep the next one begins if only checks
	// have changed.
	sweepInDoubt = 30 * time.Second
)

// plan decides which service is asked for when, over connections of which each
// carries one query at a time. It is a state machine: it has no goroutine, lock
// or clock, and starts nothing.
//
// Up to as many services as there are places, each waits on a connection of its
// own. Where there are more, each place goes to a group of services whose names
// begin alike. A group waits on the checks of a name that no service has but
// that would sort among its members: Consul wakes such a query when a check
// changes whose service shares the beginning of the name. The members are then
// looked at, which is to ask for the index of the service alone; one whose
// index differs is asked for in full. What changes without a check changing is
// found by sweeps, which look at every service; one begins when the services'
// table has changed.
//
// All of this only decides how soon a change is found. Every service is asked
// for in full once it is due, whatever happened before.
type plan struct {
	most     int // places, as configured
	places   int // the same, less what Consul refused
	lookMost int // looks under way at a time

	turns    map[*turn]bool
	groups   map[groupKey]*group
	crowded  bool // more services than places
	occupied int  // places in use
	dirty    bool // the groups no longer fit
	grouped  int  // how many services there were when they last did
	regroup  time.Time

	urgent    []*turn // to be looked at, in order
	looks     int     // looks under way
	swept     []*turn // what the present sweep has yet to look at
	sweeps    int     // looks under way that belong to the sweep
	sweeping  bool
	found     bool           // the sweep has found a change
	began     time.Time      // when the last sweep began
	sweepAt   time.Time      // when the next one may begin
	took      time.Duration  // what the last one took
	stirred   bool           // a sweep is wanted
	doubted   bool           // checks have changed since one began
	unknown   bool           // for reasons that no index tells
	upTo      map[int]uint64 // by scope, the index of the table's last change
	seen      map[int]uint64 // by scope, the highest index of an answer
	open      map[int]bool   // scopes whose services may wait
	delay     time.Duration  // from a wake to the answer in full, smoothed
	refusedAt time.Time
}

// turn is one service in the plan. All of it but wake belongs to the plan.
type turn struct {
	scope int
	name  string
	// wake is sent to when decide would say something new. It has room for one.
	wake  chan struct{}
	watch *watch // whose turn it is; of no concern to the plan

	group    *group
	index    uint64 // of the last answer, 0 if a look could not be compared with it
	nodes    []string
	due      time.Time
	resting  bool      // nothing is being asked about it
	ask      bool      // is to be asked for in full
	queued   bool      // is in urgent
	maySince time.Time // when a wake first said that it may have changed
}

type groupKey struct {
	scope  int
	prefix string
}

// group is the services that share a place.
type group struct {
	groupKey
	probe   string // the name that the group waits for
	members map[*turn]bool
	retired bool // no longer in the plan
	// running says that the group has a place.
	running bool
	woken   time.Time // when Consul last woke it, zero once its members are queued
	lookAt  time.Time // when its members may be looked at again
}

// single reports whether the group is one service, which then waits by itself
// and finds everything.
func (g *group) single() bool { return len(g.members) == 1 && g.probe == "" }

// decision is what a service is to do next.
type decision uint8

const (
	// decideRest says to do nothing until the service is due, or woken.
	decideRest decision = iota
	// decideHold says to wait for a change on a connection.
	decideHold
	// decideAsk says to ask in full without waiting.
	decideAsk
)

// look is a service that is to be looked at.
type look struct {
	*turn
	sweep bool // as a part of the sweep
}

// steps is what is to be done now.
type steps struct {
	start []*group // each is to wait from now on, until keep says no
	wake  []*turn
	look  []look
	at    time.Time // when to ask again at the latest, zero if only after something happened
}

func newPlan(places, lookMost int) plan {
	return plan{
		most: places, places: places, lookMost: max(lookMost, 2),
		turns: map[*turn]bool{}, groups: map[groupKey]*group{}, seen: map[int]uint64{}, upTo: map[int]uint64{}, open: map[int]bool{},
	}
}

// newTurn makes the turn of a service. Consul sorts names without regard to
// case.
func newTurn(scope int, name string) turn {
	return turn{scope: scope, name: strings.ToLower(name), wake: make(chan struct{}, 1)}
}

// join adds a service.
func (p *plan) join(t *turn) {
	p.turns[t] = true
	if p.open[t.scope] {
		p.find(t)
	}
}

// begin lets the services of a scope wait, now that its first listing is known.
func (p *plan) begin(scope int) {
	p.open[scope], p.dirty, p.regroup = true, true, time.Time{}
}

// find puts a service into its group, or makes the groups be divided again.
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

// rest says that a service was answered for, at an index that a look can be
// compared with, unless it is 0. From due on it is to be asked for in full.
func (p *plan) rest(t *turn, index uint64, nodes []string, due time.Time) {
	t.index, t.nodes, t.due, t.maySince, t.resting = index, nodes, due, time.Time{}, true
	p.seen[t.scope] = max(p.seen[t.scope], index)
}

// decide says what a service does next. One that rests is to ask again when it
// is woken, and when it is due.
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

// keep reports whether a group may wait, and gives it a place or takes it away.
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

// release takes the place of a group.
func (p *plan) release(g *group) {
	if g.running {
		g.running = false
		p.occupied--
	}
}

// settled reports whether every group has its place. As long as not, waits are
// short.
func (p *plan) settled() bool { return p.occupied == len(p.groups) && !p.dirty }

// woke says that a check has changed whose service may be a member of the
// group.
func (p *plan) woke(g *group, now time.Time) {
	if g.woken.IsZero() {
		g.woken = now
	}
}

// stir says that a table has changed, up to an index, or with 0 in an unknown
// way. Where a service is known by that index soon after, it is the one that
// changed last, so the sweep for others may be put off.
func (p *plan) stir(scope int, index uint64, now time.Time) {
	if !p.stirred {
		p.sweepAt = later(p.sweepAt, now.Add(sweepGrace))
	}
	p.stirred = true
	p.unknown = p.unknown || index == 0
	p.upTo[scope] = max(p.upTo[scope], index)
}

// doubt says that checks have changed. Groups find which; a sweep now and then
// makes sure of it, should Consul not wake them as it does today.
func (p *plan) doubt() {
	p.doubted = true
	if !p.settled() {
		p.stirred, p.unknown = true, true
	}
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

// nodesChanged says which checks of nodes fail that did not, and the other way
// around. They concern the services that have instances there.
func (p *plan) nodesChanged(scope int, before, now map[nodeCheck]bool) (wake []*turn) {
	changed := map[string]bool{}
	for _, pair := range [][2]map[nodeCheck]bool{{before, now}, {now, before}} {
		for c := range pair[0] {
			if !pair[1][c] {
				changed[c.node] = true
			}
		}
	}
	return p.askIf(func(t *turn) bool {
		return t.scope == scope && slices.ContainsFunc(t.nodes, func(node string) bool { return changed[node] })
	})
}

// nodeCheck is a check of a node.
type nodeCheck struct{ node, check string }

// askAll makes every service of a scope be asked for in full.
func (p *plan) askAll(scope int) (wake []*turn) {
	return p.askIf(func(t *turn) bool { return t.scope == scope })
}

func (p *plan) askIf(cond func(*turn) bool) (wake []*turn) {
	for t := range p.turns {
		if cond(t) {
			t.ask = true
			wake = append(wake, t)
		}
	}
	return wake
}

// looked takes the index that a look has found, 0 if it failed, and reports
// whether the service is to be asked for in full.
func (p *plan) looked(l look, index uint64, now time.Time) (changed bool) {
	p.looks--
	changed = index == 0 || index != l.index
	if l.sweep {
		p.found = p.found || changed && !l.ask && l.maySince.IsZero()
		if p.sweeps--; p.sweeps == 0 && len(p.swept) == 0 {
			p.endSweep(now)
		}
	}
	if changed {
		l.ask = true
	} else {
		l.maySince = time.Time{}
	}
	return changed
}

// period returns how long after the beginning of a sweep the next one begins:
// Consul has half as much time for others as the sweep takes.
func (p *plan) period() time.Duration { return max(p.took*3/2, sweepEvery) }

// endSweep sets the pace of the next one by what Consul took for this one.
func (p *plan) endSweep(now time.Time) {
	p.sweeping = false
	p.took = now.Sub(p.began)
	p.sweepAt = p.began.Add(p.period())
	if p.found {
		// Where something changes, more does: the table's own query waits a
		// while between its answers.
		p.stirred, p.unknown = true, true
	}
}

// arrived takes note of how long after a wake a change was there.
func (p *plan) arrived(t *turn, now time.Time) {
	if !t.maySince.IsZero() {
		p.delay += (now.Sub(t.maySince) - p.delay) / 8
		t.maySince = time.Time{}
	}
}

// refused says that Consul did not take a connection, that of a group or with
// nil another one. From then on there are so few places that with own other
// connections no more than three quarters are used of those that there were,
// since a limit that is used up leaves nothing to other programs on this
// machine. It reports whether that is news.
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

// restore takes back what refused did: the agent is another one, or has another
// limit.
func (p *plan) restore() {
	p.dirty = p.dirty || p.places != p.most
	p.places = p.most
}

// step returns what is to be done now.
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
					t.ask = true // what is being asked may be older
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

// sweep begins a sweep if one is wanted and its time has come.
func (p *plan) sweep(now time.Time, at func(time.Time)) {
	begin := p.sweepAt
	switch {
	case p.sweeping || !p.stirred && !p.doubted:
		return
	case !p.stirred:
		begin = p.began.Add(sweepInDoubt)
	case p.patient():
		begin = p.began.Add(sweepAnyway)
	}
	if now.Before(begin) {
		at(begin)
		return
	}
	p.stirred, p.doubted, p.unknown, p.found, p.began = false, false, false, false, now
	for t := range p.turns {
		if t.resting {
			p.swept = append(p.swept, t)
		} else if t.group == nil || !t.group.single() || !t.group.running {
			t.ask = true // what is being asked may be older
		}
	}
	p.sweeping = len(p.swept) > 0
}

// hand gives out looks: as many for the wakes as for the sweep, so that neither
// waits for the other.
func (p *plan) hand(s *steps) {
	half := max(p.lookMost/2, 1)
	for ; len(p.urgent) > 0 && p.looks-p.sweeps < half; p.urgent = p.urgent[1:] {
		t := p.urgent[0]
		t.queued = false
		if p.turns[t] {
			p.looks++
			s.look = append(s.look, look{turn: t})
		}
	}
	for ; len(p.swept) > 0 && p.sweeps < half; p.swept = p.swept[1:] {
		p.looks++
		p.sweeps++
		s.look = append(s.look, look{turn: p.swept[0], sweep: true})
	}
}

// divide divides the services into no more groups than there are places, those
// that exist among them where they still fit.
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

// partition divides services into at most n groups of those whose names begin
// alike, the largest as small as that allows. There is at least one group for
// each scope.
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

// commonPrefix returns what the names of services in order all begin with.
func commonPrefix(members []*turn) string {
	first, last := members[0].name, members[len(members)-1].name
	n := 0
	for n < len(first) && n < len(last) && first[n] == last[n] {
		n++
	}
	return first[:n]
}

// nextByte returns the byte of a name after so many, -1 at its end.
func nextByte(name string, at int) int {
	if at == len(name) {
		return -1
	}
	return int(name[at])
}

// free returns a character that none of the names has at the place.
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
