package consul

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// planModel is a Consul of numbers, and what a plan makes known of it. Time
// passes in it only.
type planModel struct {
	t        *testing.T
	random   *rand.Rand
	p        plan
	now      time.Time
	wait     time.Duration
	index    uint64                          // of the last change
	actual   map[*turn]uint64                // the index at which each service last changed
	checked  map[*turn]uint64                // and its checks
	known    map[*turn]uint64                // what the last answer said
	holding  map[*turn]bool                  // waits on a connection
	asking   map[*turn]uint64                // is being asked about, with what the answer will say
	looking  map[*look]glance                // the same of looks
	on       map[*turn]map[string]registered // what nodes have of each service
	askedOn  map[*turn]map[string]int        // the same as it was when asked about
	nodes    map[string]uint64               // the index of the last change on each node
	untold   bool                            // the plan does not know of all nodes
	groups   map[*group]uint64               // waits, from an index on
	deaf     bool                            // no wake arrives
	mute     bool                            // no group is woken
	answered map[*turn]time.Time
}

// glance is what a look will find.
type glance struct {
	index uint64
	there map[string]registered // on a node
}

func newPlanModel(t *testing.T, seed uint64, places int) *planModel {
	m := &planModel{
		t: t, random: rand.New(rand.NewPCG(seed, 1)), p: newPlan(places, 4), now: time.Unix(0, 0), wait: 5 * time.Minute, index: 1, //nolint:gosec // the same in each run
		actual: map[*turn]uint64{}, checked: map[*turn]uint64{}, known: map[*turn]uint64{}, holding: map[*turn]bool{}, asking: map[*turn]uint64{},
		looking: map[*look]glance{}, groups: map[*group]uint64{}, answered: map[*turn]time.Time{},
		on: map[*turn]map[string]registered{}, askedOn: map[*turn]map[string]int{}, nodes: map[string]uint64{},
	}
	for range sweepNodes {
		m.addNode()
	}
	m.p.begin(0, m.index)
	m.tellNodes()
	return m
}

// addNode adds a node, of which the plan knows once it is told.
func (m *planModel) addNode() {
	m.nodes[fmt.Sprintf("node-%d", len(m.nodes))] = m.index
	m.untold = true
}

// tellNodes tells the plan of the nodes, as the answer of their table does.
func (m *planModel) tellNodes() {
	names := map[string]bool{}
	for name := range m.nodes {
		names[name] = true
	}
	m.untold = false
	m.p.setNodes(0, names)
	m.p.stir(0, 0, m.now)
}

// place changes what a node has of a service by so many instances.
func (m *planModel) place(t *turn, node string, by int) {
	r := m.on[t][node]
	if r.instances += by; by >= 0 {
		r.index = m.index
	}
	if m.on[t][node] = r; r.instances <= 0 {
		delete(m.on[t], node)
	}
	m.nodes[node] = m.index
}

func (m *planModel) anyNode() string { return fmt.Sprintf("node-%d", m.random.IntN(len(m.nodes))) }

func (m *planModel) pick(of map[*turn]uint64) *turn {
	all := slices.SortedFunc(maps.Keys(of), func(a, b *turn) int { return strings.Compare(a.name, b.name) })
	if len(all) == 0 {
		return nil
	}
	return all[m.random.IntN(len(all))]
}

func (m *planModel) join() {
	t := newTurn(0, fmt.Sprintf("%s-%d", []string{"web", "api", "api-v2", "db", ""}[m.random.IntN(5)], m.random.IntN(10_000)))
	m.index++
	m.actual[&t], m.checked[&t], m.on[&t] = m.index, m.index, map[string]registered{}
	for range 1 + m.random.IntN(3) {
		m.place(&t, m.anyNode(), 1)
	}
	m.p.join(&t)
	m.ask(&t)
}

func (m *planModel) leave() {
	if t := m.pick(m.actual); t != nil {
		m.index++
		for node := range m.on[t] {
			m.nodes[node] = m.index
		}
		delete(m.on, t)
		m.p.leave(t)
		for _, of := range []map[*turn]uint64{m.actual, m.checked, m.known, m.asking} {
			delete(of, t)
		}
		delete(m.holding, t)
	}
}

// change changes one service, by its checks or in another way, and wakes what
// Consul wakes.
func (m *planModel) change(check bool) {
	t := m.pick(m.actual)
	if t == nil {
		return
	}
	m.index++
	m.actual[t] = m.index
	if m.holding[t] {
		m.ask(t)
	}
	if !check {
		nodes := slices.Sorted(maps.Keys(m.on[t]))
		switch n := m.random.IntN(3); {
		case n == 0 || len(nodes) == 0:
			m.place(t, m.anyNode(), 1)
		case n == 1:
			m.place(t, nodes[0], -1)
		default:
			m.place(t, nodes[0], 0)
		}
		if !m.deaf {
			m.p.stir(0, m.index, m.now)
		}
		return
	}
	m.checked[t] = m.index
	if !m.deaf {
		m.p.doubt()
	}
	for g, index := range m.groups {
		if index < m.index && strings.HasPrefix(t.name, g.probe[:len(g.probe)-1]) {
			m.groupAnswered(g)
		}
	}
}

// groupAnswered ends the wait of a group, which begins the next one if it keeps
// its place.
func (m *planModel) groupAnswered(g *group) {
	if !m.deaf && !m.mute {
		m.p.woke(g, m.now)
	}
	if m.groups[g] = m.index; !m.p.keep(g) {
		delete(m.groups, g)
	}
}

// ask sends a question about a service. When Consul looks at it is when the
// answer's index is taken.
func (m *planModel) ask(t *turn) {
	delete(m.holding, t)
	m.asking[t] = m.actual[t]
	m.askedOn[t] = map[string]int{}
	for node, r := range m.on[t] {
		m.askedOn[t][node] = r.instances
	}
}

// answer takes the answer about a service, and does what the watch does then.
func (m *planModel) answer(t *turn) {
	m.known[t] = max(m.known[t], m.asking[t])
	m.answered[t] = m.now
	index := m.asking[t]
	delete(m.asking, t)
	m.p.rest(t, index, m.askedOn[t], m.now.Add(m.wait))
	m.decide(t)
}

func (m *planModel) decide(t *turn) {
	switch m.p.decide(t, m.now) {
	case decideHold:
		if m.holding[t] = true; m.known[t] != m.actual[t] {
			m.ask(t) // Consul answers at once
		}
	case decideAsk:
		m.ask(t)
	}
}

// step lets the plan go on, and starts what it says.
func (m *planModel) step() (next time.Time) {
	s := m.p.step(m.now)
	for _, g := range s.start {
		m.groups[g] = 0
		m.groupAnswered(g)
	}
	for _, l := range s.look {
		switch t := l.turn; {
		case l.node != nil:
			g := glance{m.nodes[l.node.name], map[string]registered{}}
			for t, on := range m.on {
				if r, ok := on[l.node.name]; ok {
					g.there[t.name] = registered{g.there[t.name].instances + r.instances, max(g.there[t.name].index, r.index)}
				}
			}
			m.looking[&l] = g
		case m.p.turns[t]:
			m.looking[&l] = glance{index: m.actual[t]}
		default:
			m.p.looked(l, 1, m.now)
		}
	}
	for _, t := range s.wake {
		m.wake(t)
	}
	if m.p.looks > m.p.lookMost {
		m.t.Fatalf("%d looks at a time, want %d at most", m.p.looks, m.p.lookMost)
	}
	if n := len(m.groups) + len(m.holding); n > m.p.most {
		m.t.Fatalf("%d wait at a time, want %d at most", n, m.p.most)
	}
	return s.at
}

// wake wakes a service that rests.
func (m *planModel) wake(t *turn) {
	if _, asking := m.asking[t]; !asking && !m.holding[t] && m.p.turns[t] {
		m.decide(t)
	}
}

// looked ends some look, which may fail.
func (m *planModel) looked(fail bool) {
	for l, g := range m.looking {
		delete(m.looking, l)
		if fail {
			g.index = 0
		}
		switch {
		case l.node != nil:
			for _, t := range m.p.lookedNode(*l, g.index, g.there, m.now) {
				m.wake(t)
			}
		case m.p.looked(*l, g.index, m.now):
			m.wake(l.turn)
		}
		return
	}
}

// settle lets everything that is under way end, and time pass up to a bound.
func (m *planModel) settle(bound time.Duration) {
	for end := m.now.Add(bound); ; {
		next := m.step()
		for len(m.looking) > 0 {
			m.now = m.now.Add(time.Millisecond)
			m.looked(false)
			next = m.step()
		}
		for t := range m.asking {
			m.answer(t)
		}
		for t := range m.actual {
			if _, asking := m.asking[t]; !asking && !m.holding[t] {
				if t.ask || !m.now.Before(t.due) {
					m.wake(t)
				}
				if next.IsZero() || t.due.Before(next) {
					next = t.due
				}
			}
		}
		if len(m.asking) > 0 || len(m.looking) > 0 {
			continue
		}
		if next.After(end) || next.IsZero() {
			m.now = end
			return
		}
		m.now = later(m.now, next)
	}
}

func (m *planModel) missed() (names []string) {
	for t, index := range m.actual {
		differs := m.checked[t] > m.known[t] || len(t.nodes) != len(m.on[t]) // and not only its index, of what came and went
		for node, r := range m.on[t] {
			differs = differs || r.index > m.known[t] || r.instances != t.nodes[node]
		}
		if m.known[t] != index && differs {
			names = append(names, fmt.Sprintf("%s: known at %d, changed at %d", t.name, m.known[t], index))
		}
	}
	return names
}

// TestPlanModel runs random interleavings of changes, answers, failures,
// services that come and go and connections that are refused: no change is
// missed for longer than a sweep may be put off, even if no group is woken, and
// where no wake ever arrives every service is asked for within its wait.
func TestPlanModel(t *testing.T) {
	for seed := range uint64(300) {
		m := newPlanModel(t, seed, 1+int(seed)%40)
		m.mute = seed%3 == 0
		for range 5 + m.random.IntN(80) + int(seed%2)*sweepNodes*servicesPerNode {
			m.join()
		}
		for range 600 {
			switch n := m.random.IntN(100); {
			case n < 15:
				m.change(true)
			case n < 30:
				m.change(false)
			case n < 45:
				if s := m.pick(m.asking); s != nil {
					m.answer(s)
				}
			case n < 65:
				m.looked(m.random.IntN(10) == 0)
			case n < 70:
				m.join()
			case n < 74:
				m.leave()
			case n < 76:
				m.p.refused(nil, ownQueries, 4, m.now)
			case n < 78:
				m.p.restore()
			case n < 80:
				m.deaf = !m.deaf
				if !m.deaf {
					m.tellNodes() // what comes back after an error has missed something
				}
			case n < 82:
				for _, s := range m.p.askAll(0) {
					m.wake(s)
				}
			case n == 83 && m.random.IntN(4) == 0:
				m.addNode()
			case n < 85 && !m.deaf && m.untold:
				m.tellNodes()
			default:
				m.now = m.now.Add(time.Duration(m.random.IntN(400)) * time.Millisecond)
				m.step()
			}
		}
		deaf := m.deaf
		if !deaf && m.untold {
			m.tellNodes()
		}
		bound := sweepAnyway + 2*time.Second
		switch {
		case deaf:
			bound = m.wait + time.Second // looks take time too
		case m.mute:
			bound = sweepInDoubt + 2*time.Second
		}
		m.settle(bound)
		for range 3 {
			if missed := m.missed(); len(missed) > 0 {
				t.Fatalf("seed %d, deaf %t: after %v not known: %s", seed, deaf, bound, strings.Join(missed, "; "))
			}
			// Out of rest, after which nothing is to be found but what changes.
			for range m.random.IntN(10) {
				m.change(m.mute && m.random.IntN(2) == 0)
				m.now = m.now.Add(time.Second)
				m.step()
			}
			m.settle(bound)
		}
		before := m.now
		m.settle(m.wait)
		for s := range m.actual {
			if !m.holding[s] && m.answered[s].Before(before) {
				t.Fatalf("seed %d: %s was not asked for within its wait", seed, s.name)
			}
		}
	}
}

// TestPartition shows groups of names that begin alike, none larger than need
// be, and a probe for each that is the name of no service.
func TestPartition(t *testing.T) {
	p := newPlan(24, 4)
	p.begin(0, 1)
	p.begin(1, 1)
	var all []*turn
	for i := range 100 {
		s := newTurn(i%2, fmt.Sprintf("svc-%02d", i))
		all = append(all, &s)
		p.join(&s)
	}
	for _, name := range []string{"svc", "Web", "web"} {
		s := newTurn(0, name)
		all = append(all, &s)
		p.join(&s)
	}
	p.step(time.Unix(0, 0))
	if len(p.groups) > 24 || len(p.groups) < 20 {
		t.Errorf("%d groups for 24 places", len(p.groups))
	}
	for _, s := range all {
		g := s.group
		if g == nil || g.scope != s.scope || !strings.HasPrefix(s.name, g.prefix) {
			t.Fatalf("%s is in group %+v", s.name, g)
		}
		if g.probe != "" && (!strings.HasPrefix(g.probe, g.prefix) || strings.HasPrefix(s.name, g.probe)) {
			t.Errorf("%s is waited for by %q, group %q", s.name, g.probe, g.prefix)
		}
	}
}
