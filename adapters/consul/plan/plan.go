package plan

import (
	"maps"
	"strings"
	"time"
)

const (
	// TurnTime bounds the waits while connections are being reassigned, and the
	// interval of repeated reports.
	TurnTime = 30 * time.Second
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
	// SweepAnyway bounds the postponement of a sweep because the table's last
	// change is known. For a sweep over nodes the bound is lower in proportion
	// to its cost.
	SweepAnyway = 5 * time.Second
	// sweepInDoubt is the interval of sweeps if only checks have changed.
	sweepInDoubt = 30 * time.Second
)

// Plan is the state of all services, groups and sweeps. New makes one. It is
// not safe for concurrent use.
type Plan struct {
	most     int // places, as configured
	places   int // most, less what Consul refused
	lookMost int // bound of concurrent looks

	turns    map[*Turn]bool
	groups   map[groupKey]*Group
	crowded  bool // more services than places
	occupied int  // places in use
	dirty    bool // the groups must be divided again
	grouped  int  // number of services at the last division
	regroup  time.Time

	nodes  map[nodeKey]*Node // all nodes of the scopes in mapped
	mapped map[int]bool
	at     map[nodeKey]map[*Turn]bool // services known to be on the node
	named  map[nodeKey]map[*Turn]bool // services of a name, as Consul sorts them

	urgent    []*Turn // to look at, in order
	looks     int     // looks in progress
	refusedAt time.Time
	delay     time.Duration // from a wake to the full answer, smoothed

	sweepState
	tableState
}

// Turn is one service in the plan. All of it but Wake and Owner belongs
// to the plan.
type Turn struct {
	Scope int
	Name  string // in lower case
	// Wake is signalled when the result of Decide changes. It has capacity one.
	Wake chan struct{}
	// Owner is the caller's, and not used here.
	Owner any

	group    *Group
	index    uint64         // of the last answer, 0 if looks cannot be compared with it
	nodes    map[string]int // number of instances by node
	due      time.Time
	resting  bool      // no query is in progress
	ask      bool      // to be requested in full
	queued   bool      // is in urgent
	maySince time.Time // time of the first wake for a possible change
}

type groupKey struct {
	Scope  int
	Prefix string
}

// Group is the services that share a place.
type Group struct {
	groupKey
	Probe   string // the name whose checks the group waits for
	members map[*Turn]bool
	retired bool // removed from the plan
	// running reports whether the group has a place.
	running bool
	woken   time.Time // last wake, zero once the members are queued
	lookAt  time.Time // earliest next look at the members
}

// single reports whether the group is one service, which waits on its own query
// and needs no looks.
func (g *Group) single() bool { return len(g.members) == 1 && g.Probe == "" }

// Decision is the next action of a service.
type Decision uint8

const (
	// DecideRest is to do nothing until the service is due or woken.
	DecideRest Decision = iota
	// DecideHold is to wait for a change on a connection.
	DecideHold
	// DecideAsk is to request the service in full without waiting.
	DecideAsk
)

// Steps are the actions to perform now.
type Steps struct {
	Start []*Group // groups that start to wait, until Keep returns false
	Wake  []*Turn
	Look  []Look
	At    time.Time // time of the next step, zero for none
}

// New returns the plan of an agent with so many places for connections, at most
// lookMost of them for looks.
func New(places, lookMost int) Plan {
	return Plan{
		most: places, places: places, lookMost: max(lookMost, 2),
		turns: map[*Turn]bool{}, groups: map[groupKey]*Group{}, nodes: map[nodeKey]*Node{}, mapped: map[int]bool{},
		at: map[nodeKey]map[*Turn]bool{}, named: map[nodeKey]map[*Turn]bool{},
		tableState: tableState{base: map[int]uint64{}, seen: map[int]uint64{}, upTo: map[int]uint64{}, open: map[int]bool{}},
	}
}

// Group returns the group of the service, nil if it has none yet.
func (t *Turn) Group() *Group { return t.group }

// Take takes n places for other queries.
func (p *Plan) Take(n int) {
	p.most = max(p.most-n, 1)
	p.places, p.dirty = min(p.places, p.most), true
}

// Most returns the number of places as configured, less what was taken.
func (p *Plan) Most() int { return p.most }

// Crowd describes services that share places.
type Crowd struct {
	Services, Places int
	// Delay is the smoothed time from a wake to the full answer, and Period the
	// interval of sweeps.
	Delay, Period time.Duration
}

// Crowd returns the services that share places, and whether there are any.
func (p *Plan) Crowd() (c Crowd, crowded bool) {
	return Crowd{len(p.turns), p.places, p.delay, p.period()}, p.crowded
}

// NewTurn returns the turn of a service. Consul sorts names case-insensitively.
func NewTurn(scope int, name string) Turn {
	return Turn{Scope: scope, Name: strings.ToLower(name), Wake: make(chan struct{}, 1)}
}

// Join adds a service.
func (p *Plan) Join(t *Turn) {
	p.turns[t] = true
	put(p.named, nodeKey{t.Scope, t.Name}, t)
	if p.open[t.Scope] {
		p.find(t)
	}
}

// Begin lets the services of a scope wait, after each service of its first
// listing, which had the given index, was requested.
func (p *Plan) Begin(scope int, index uint64) {
	p.open[scope], p.base[scope], p.dirty, p.regroup = true, index, true, time.Time{}
}

// put adds a service to a set; drop removes it.
func put(sets map[nodeKey]map[*Turn]bool, key nodeKey, t *Turn) {
	if sets[key] == nil {
		sets[key] = map[*Turn]bool{}
	}
	sets[key][t] = true
}

func drop(sets map[nodeKey]map[*Turn]bool, key nodeKey, t *Turn) {
	if delete(sets[key], t); len(sets[key]) == 0 {
		delete(sets, key)
	}
}

// Leave removes a service.
func (p *Plan) Leave(t *Turn) {
	delete(p.turns, t)
	drop(p.named, nodeKey{t.Scope, t.Name}, t)
	for name := range t.nodes {
		drop(p.at, nodeKey{t.Scope, name}, t)
	}
	if g := t.group; g != nil {
		delete(g.members, t)
		t.group = nil
		if len(g.members) == 0 {
			g.retired = true
			if p.groups[g.groupKey] == g {
				delete(p.groups, g.groupKey)
			}
			if g.Probe == "" {
				p.release(g)
			}
		}
	}
	p.dirty = p.dirty || p.crowded && len(p.turns) <= p.places
}

// Rest records an answer about a service, at an index that looks can be
// compared with, or 0. From due on the service is requested in full.
func (p *Plan) Rest(t *Turn, index uint64, nodes map[string]int, due time.Time) {
	if p.turns[t] && !maps.Equal(t.nodes, nodes) {
		for name := range t.nodes {
			drop(p.at, nodeKey{t.Scope, name}, t)
		}
		for name := range nodes {
			put(p.at, nodeKey{t.Scope, name}, t)
		}
	}
	t.index, t.nodes, t.due, t.maySince, t.resting = index, nodes, due, time.Time{}, true
	p.seen[t.Scope] = max(p.seen[t.Scope], index)
}

// Sent records that a full request starts now; the answer will contain all
// earlier changes.
func (p *Plan) Sent(t *Turn) { t.ask = false }

// Decide returns the next action of a service. A service at rest asks again
// when woken or due.
func (p *Plan) Decide(t *Turn, now time.Time) Decision {
	g := t.group
	if g != nil && g.single() && p.Keep(g) {
		t.resting = false
		return DecideHold
	}
	if t.ask || !now.Before(t.due) {
		t.ask, t.resting = false, false
		return DecideAsk
	}
	return DecideRest
}

// Keep reports whether a group may wait, and assigns or withdraws its place.
func (p *Plan) Keep(g *Group) bool {
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
func (p *Plan) release(g *Group) {
	if g.running {
		g.running = false
		p.occupied--
	}
}

// Settled reports whether every group has its place. Until then waits are
// short.
func (p *Plan) Settled() bool { return p.occupied == len(p.groups) && !p.dirty }

// Woke records that a check has changed whose service may be a member of the
// group.
func (p *Plan) Woke(g *Group, now time.Time) {
	if g.woken.IsZero() {
		g.woken = now
	}
}

// AskAll requests every service of a scope in full, and discards the state of
// its nodes.
func (p *Plan) AskAll(scope int) (wake []*Turn) {
	for key := range p.nodes {
		if key.Scope == scope {
			p.nodes[key] = &Node{nodeKey: key} // a new one, so that looks in progress are ignored
		}
	}
	p.base[scope] = 0
	return p.askIf(p.turns, func(t *Turn) bool { return t.Scope == scope })
}

func (p *Plan) askIf(of map[*Turn]bool, cond func(*Turn) bool) (wake []*Turn) {
	for t := range of {
		if cond(t) {
			t.ask = true
			wake = append(wake, t)
		}
	}
	return wake
}

// Arrived records the delay from a wake to the change.
func (p *Plan) Arrived(t *Turn, now time.Time) {
	if !t.maySince.IsZero() {
		p.delay += (now.Sub(t.maySince) - p.delay) / 8
		t.maySince = time.Time{}
	}
}

// Refused records that Consul refused a connection: that of a group, or with
// nil another one. It reduces the places so that, with own other connections,
// at most three quarters of the previous number are used: an exhausted limit
// leaves no connections to other programs on this machine. It reports whether
// the limit is new.
func (p *Plan) Refused(g *Group, own, few int, now time.Time) (news bool) {
	if g != nil {
		p.release(g)
	}
	places := max(1, min(p.places, (p.occupied+own)*3/4-few))
	news = places < p.places && now.Sub(p.refusedAt) > TurnTime
	p.dirty = p.dirty || places < p.places
	p.places, p.refusedAt = places, now
	return news
}

// Restore reverses refused: the agent or its limit has changed.
func (p *Plan) Restore() {
	p.dirty = p.dirty || p.places != p.most
	p.places = p.most
}

// Step returns the actions to perform now.
func (p *Plan) Step(now time.Time) (s Steps) {
	at := func(t time.Time) {
		if s.At.IsZero() || t.Before(s.At) {
			s.At = t
		}
	}
	if p.places < p.most {
		if again := p.refusedAt.Add(refusedFor); now.Before(again) {
			at(again)
		} else {
			p.Restore()
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
					s.Wake = append(s.Wake, t)
				}
			} else if p.Keep(g) {
				s.Start = append(s.Start, g)
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
