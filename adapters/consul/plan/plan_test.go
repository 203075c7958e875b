package plan

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
	p        Plan
	now      time.Time
	wait     time.Duration
	index    uint64                          // of the last change
	actual   map[*Turn]uint64                // the index at which each service last changed
	checked  map[*Turn]uint64                // and its checks
	known    map[*Turn]uint64                // what the last answer said
	holding  map[*Turn]bool                  // waits on a connection
	asking   map[*Turn]uint64                // is being asked about, with what the answer will say
	looking  map[*Look]glance                // the same of looks
	on       map[*Turn]map[string]Registered // what nodes have of each service
	askedOn  map[*Turn]map[string]int        // the same as it was when asked about
	nodes    map[string]uint64               // the index of the last change on each node
	untold   bool                            // the plan does not know of all nodes
	groups   map[*Group]uint64               // waits, from an index on
	deaf     bool                            // no wake arrives
	mute     bool                            // no group is woken
	answered map[*Turn]time.Time
}

// glance is what a look will find.
type glance struct {
	index uint64
	there map[string]Registered // on a node
}

func newPlanModel(t *testing.T, seed uint64, places int) *planModel {
	m := &planModel{
		t: t, random: rand.New(rand.NewPCG(seed, 1)), p: New(places, 4), now: time.Unix(0, 0), wait: 5 * time.Minute, index: 1, //nolint:gosec // the same in each run
		actual: map[*Turn]uint64{}, checked: map[*Turn]uint64{}, known: map[*Turn]uint64{}, holding: map[*Turn]bool{}, asking: map[*Turn]uint64{},
		looking: map[*Look]glance{}, groups: map[*Group]uint64{}, answered: map[*Turn]time.Time{},
		on: map[*Turn]map[string]Registered{}, askedOn: map[*Turn]map[string]int{}, nodes: map[string]uint64{},
	}
	for range sweepNodes {
		m.addNode()
	}
	m.p.Begin(0, m.index)
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
	m.p.SetNodes(0, names)
	m.p.Stir(0, 0, m.now)
}

// place changes what a node has of a service by so many instances.
func (m *planModel) place(t *Turn, node string, by int) {
	r := m.on[t][node]
	if r.Instances += by; by >= 0 {
		r.Index = m.index
	}
	if m.on[t][node] = r; r.Instances <= 0 {
		delete(m.on[t], node)
	}
	m.nodes[node] = m.index
}

func (m *planModel) anyNode() string { return fmt.Sprintf("node-%d", m.random.IntN(len(m.nodes))) }

func (m *planModel) pick(of map[*Turn]uint64) *Turn {
	all := slices.SortedFunc(maps.Keys(of), func(a, b *Turn) int { return strings.Compare(a.Name, b.Name) })
	if len(all) == 0 {
		return nil
	}
	return all[m.random.IntN(len(all))]
}

func (m *planModel) join() {
	t := NewTurn(0, fmt.Sprintf("%s-%d", []string{"web", "api", "api-v2", "db", ""}[m.random.IntN(5)], m.random.IntN(10_000)))
	m.index++
	m.actual[&t], m.checked[&t], m.on[&t] = m.index, m.index, map[string]Registered{}
	for range 1 + m.random.IntN(3) {
		m.place(&t, m.anyNode(), 1)
	}
	m.p.Join(&t)
	m.ask(&t)
}

func (m *planModel) leave() {
	if t := m.pick(m.actual); t != nil {
		m.index++
		for node := range m.on[t] {
			m.nodes[node] = m.index
		}
		delete(m.on, t)
		m.p.Leave(t)
		for _, of := range []map[*Turn]uint64{m.actual, m.checked, m.known, m.asking} {
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
			m.p.Stir(0, m.index, m.now)
		}
		return
	}
	m.checked[t] = m.index
	if !m.deaf {
		m.p.Doubt()
	}
	for g, index := range m.groups {
		if index < m.index && strings.HasPrefix(t.Name, g.Probe[:len(g.Probe)-1]) {
			m.groupAnswered(g)
		}
	}
}

// groupAnswered ends the wait of a group, which begins the next one if it keeps
// its place.
func (m *planModel) groupAnswered(g *Group) {
	if !m.deaf && !m.mute {
		m.p.Woke(g, m.now)
	}
	if m.groups[g] = m.index; !m.p.Keep(g) {
		delete(m.groups, g)
	}
}

// ask sends a question about a service. When Consul looks at it is when the
// answer's index is taken.
func (m *planModel) ask(t *Turn) {
	delete(m.holding, t)
	m.asking[t] = m.actual[t]
	m.askedOn[t] = map[string]int{}
	for node, r := range m.on[t] {
		m.askedOn[t][node] = r.Instances
	}
}

// answer takes the answer about a service, and does what the watch does then.
func (m *planModel) answer(t *Turn) {
	m.known[t] = max(m.known[t], m.asking[t])
	m.answered[t] = m.now
	index := m.asking[t]
	delete(m.asking, t)
	m.p.Rest(t, index, m.askedOn[t], m.now.Add(m.wait))
	m.decide(t)
}

func (m *planModel) decide(t *Turn) {
	switch m.p.Decide(t, m.now) {
	case DecideHold:
		if m.holding[t] = true; m.known[t] != m.actual[t] {
			m.ask(t) // Consul answers at once
		}
	case DecideAsk:
		m.ask(t)
	}
}

// step lets the plan go on, and starts what it says.
func (m *planModel) step() (next time.Time) {
	s := m.p.Step(m.now)
	for _, g := range s.Start {
		m.groups[g] = 0
		m.groupAnswered(g)
	}
	for _, l := range s.Look {
		switch t := l.Turn; {
		case l.Node != nil:
			g := glance{m.nodes[l.Node.Name], map[string]Registered{}}
			for t, on := range m.on {
				if r, ok := on[l.Node.Name]; ok {
					g.there[t.Name] = Registered{g.there[t.Name].Instances + r.Instances, max(g.there[t.Name].Index, r.Index)}
				}
			}
			m.looking[&l] = g
		case m.p.turns[t]:
			m.looking[&l] = glance{index: m.actual[t]}
		default:
			m.p.Looked(l, 1, m.now)
		}
	}
	for _, t := range s.Wake {
		m.wake(t)
	}
	if m.p.looks > m.p.lookMost {
		m.t.Fatalf("%d looks at a time, want %d at most", m.p.looks, m.p.lookMost)
	}
	if n := len(m.groups) + len(m.holding); n > m.p.most {
		m.t.Fatalf("%d wait at a time, want %d at most", n, m.p.most)
	}
	return s.At
}

// wake wakes a service that rests.
func (m *planModel) wake(t *Turn) {
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
		case l.Node != nil:
			for _, t := range m.p.LookedNode(*l, g.index, g.there, m.now) {
				m.wake(t)
			}
		case m.p.Looked(*l, g.index, m.now):
			m.wake(l.Turn)
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
			differs = differs || r.Index > m.known[t] || r.Instances != t.nodes[node]
		}
		if m.known[t] != index && differs {
			names = append(names, fmt.Sprintf("%s: known at %d, changed at %d", t.Name, m.known[t], index))
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
				m.p.Refused(nil, 5, 4, m.now)
			case n < 78:
				m.p.Restore()
			case n < 80:
				m.deaf = !m.deaf
				if !m.deaf {
					m.tellNodes() // what comes back after an error has missed something
				}
			case n < 82:
				for _, s := range m.p.AskAll(0) {
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
		bound := SweepAnyway + 2*time.Second
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
				t.Fatalf("seed %d: %s was not asked for within its wait", seed, s.Name)
			}
		}
	}
}

// TestPartition shows groups of names that begin alike, none larger than need
// be, and a probe for each that is the name of no service.
func TestPartition(t *testing.T) {
	p := New(24, 4)
	p.Begin(0, 1)
	p.Begin(1, 1)
	var all []*Turn
	for i := range 100 {
		s := NewTurn(i%2, fmt.Sprintf("svc-%02d", i))
		all = append(all, &s)
		p.Join(&s)
	}
	for _, name := range []string{"svc", "Web", "web"} {
		s := NewTurn(0, name)
		all = append(all, &s)
		p.Join(&s)
	}
	p.Step(time.Unix(0, 0))
	if len(p.groups) > 24 || len(p.groups) < 20 {
		t.Errorf("%d groups for 24 places", len(p.groups))
	}
	for _, s := range all {
		g := s.group
		if g == nil || g.Scope != s.Scope || !strings.HasPrefix(s.Name, g.Prefix) {
			t.Fatalf("%s is in group %+v", s.Name, g)
		}
		if g.Probe != "" && (!strings.HasPrefix(g.Probe, g.Prefix) || strings.HasPrefix(s.Name, g.Probe)) {
			t.Errorf("%s is waited for by %q, group %q", s.Name, g.Probe, g.Prefix)
		}
	}
}
