package plan

import (
	"cmp"
	"slices"
	"time"
)

// sweepState is that of sweeps, of which there is one at a time.
type sweepState struct {
	swept    []Look // remaining looks of the current sweep
	sweeps   int    // looks in progress that belong to it
	sweeping bool
	found    bool          // it has found a change
	began    time.Time     // start of the last one
	took     time.Duration // duration of the last one
	broadAt  time.Time     // start of the last one over services
	sweepAt  time.Time     // earliest start of the next one

	stirred bool // one is requested
	doubted bool // checks have changed since the last one began
	unknown bool // requested for a reason without an index
	broad   bool // requested over services, not nodes
}

// tableState is what is known, by scope, of the table of services, whose index
// every change raises.
type tableState struct {
	upTo map[int]uint64 // the index of the last change
	seen map[int]uint64 // the highest index of an answer
	base map[int]uint64 // the index up to which everything is known, 0 for none
	open map[int]bool   // services may wait
}

// Look is a service or a node to look at.
type Look struct {
	*Turn
	Node  *Node
	known uint64 // the node's index
	base  uint64 // of its scope
	sweep bool   // part of the sweep
}

// News reports whether a node's index shows an unknown change.
func (l Look) News(index uint64) bool {
	return index != l.known && (l.known > 0 || index > l.base)
}

// last returns the index of the last known change.
func (l Look) last() uint64 {
	if l.Node != nil {
		return l.Node.index
	}
	return l.index
}

// Node is the plan's state of one node.
type Node struct {
	nodeKey
	index uint64 // up to which everything on the node is known, 0 for none
}

type nodeKey struct {
	Scope int
	Name  string
}

// Registered is a service as registered on one node.
type Registered struct {
	Instances int
	Index     uint64 // of the last change
}

// Stir records that a table has changed, at an index, or with 0 at an unknown
// one. If a service is soon known at that index, it is the one that changed, so
// the sweep may be postponed.
func (p *Plan) Stir(scope int, index uint64, now time.Time) {
	if !p.stirred {
		p.sweepAt = later(p.sweepAt, now.Add(sweepGrace))
	}
	p.stirred = true
	p.unknown = p.unknown || index == 0
	p.broad = p.broad || index == 0
	p.upTo[scope] = max(p.upTo[scope], index)
}

// Doubt records that checks have changed. Groups find which; an occasional
// sweep covers the case that Consul no longer wakes them.
func (p *Plan) Doubt() {
	p.doubted = true
	if !p.Settled() {
		p.stirred, p.unknown, p.broad = true, true, true
	}
}

// SetNodes sets all nodes of a scope; nil means that they are unknown.
func (p *Plan) SetNodes(scope int, names map[string]bool) {
	p.mapped[scope] = names != nil
	for key := range p.nodes {
		if key.Scope == scope && !names[key.Name] {
			delete(p.nodes, key)
		}
	}
	for name := range names {
		if key := (nodeKey{scope, name}); p.nodes[key] == nil {
			p.nodes[key] = &Node{nodeKey: key}
		}
	}
}

// byNode reports whether sweeps go over nodes: these are known and few.
func (p *Plan) byNode() bool {
	for scope := range p.open {
		if !p.mapped[scope] {
			return false
		}
	}
	return p.stirred && !p.broad && len(p.nodes) >= sweepNodes && len(p.nodes)*servicesPerNode <= len(p.turns)
}

// patient reports whether the last change of each table is known.
func (p *Plan) patient() bool {
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

// NodesChanged returns the services with instances on nodes where a node check
// has started or ceased to fail.
func (p *Plan) NodesChanged(scope int, before, now map[NodeCheck]bool) (wake []*Turn) {
	for _, pair := range [][2]map[NodeCheck]bool{{before, now}, {now, before}} {
		for c := range pair[0] {
			if !pair[1][c] {
				wake = append(wake, p.askIf(p.at[nodeKey{scope, c.Node}], func(*Turn) bool { return true })...)
			}
		}
	}
	return wake
}

// NodeCheck is a check of a node.
type NodeCheck struct{ Node, Check string }

// Looked records the index that a look returned, 0 if it failed, and reports
// whether the service is to be requested in full.
func (p *Plan) Looked(l Look, index uint64, now time.Time) (changed bool) {
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

// LookedNode records the index that a look at a node returned, 0 if it failed,
// and, if the index differs, the services registered there.
func (p *Plan) LookedNode(l Look, index uint64, there map[string]Registered, now time.Time) (wake []*Turn) {
	p.looks--
	defer p.sweptOne(now)
	switch {
	case p.nodes[l.Node.nodeKey] != l.Node:
		return nil
	case index == 0:
		p.stirred, p.unknown, p.broad = true, true, true
		return nil
	}
	l.Node.index = index
	if !l.News(index) {
		return nil
	}
	differs := func(t *Turn) bool {
		r := there[t.Name]
		if r.Instances == t.nodes[l.Node.Name] && r.Index <= t.index || t.group != nil && t.group.single() && t.group.running {
			return false
		}
		p.found = p.found || !t.ask && t.maySince.IsZero()
		return true
	}
	wake = p.askIf(p.at[l.Node.nodeKey], differs)
	for name := range there {
		wake = append(wake, p.askIf(p.named[nodeKey{l.Node.Scope, name}], differs)...)
	}
	return wake
}

// sweptOne records the end of a look of the sweep.
func (p *Plan) sweptOne(now time.Time) {
	if p.sweeps--; p.sweeps == 0 && len(p.swept) == 0 {
		p.endSweep(now)
	}
}

// period returns the interval of sweeps, from start to start: it leaves Consul
// half as much idle time as the sweep takes.
func (p *Plan) period() time.Duration { return max(p.took*3/2, sweepEvery) }

// endSweep sets the interval of sweeps by the duration of this one.
func (p *Plan) endSweep(now time.Time) {
	p.sweeping = false
	p.took = now.Sub(p.began)
	p.sweepAt = p.began.Add(p.period())
	if p.found {
		// One change suggests others: the table's own query pauses between its
		// answers.
		p.stirred, p.unknown = true, true
	}
}

// sweep starts a sweep if one is requested and its time has come.
func (p *Plan) sweep(now time.Time, at func(time.Time)) {
	begin := p.sweepAt
	sure := p.broadAt.Add(sweepInDoubt)
	p.broad = p.broad || p.doubted && !now.Before(sure)
	switch {
	case p.sweeping || !p.stirred && !p.doubted:
		return
	case !p.stirred:
		begin = later(begin, sure)
	case p.patient() && p.byNode():
		begin = later(begin, p.began.Add(SweepAnyway/servicesPerNode))
	case p.patient():
		begin = p.began.Add(SweepAnyway)
	}
	if now.Before(begin) {
		at(begin)
		return
	}
	if p.byNode() {
		for _, n := range p.nodes {
			p.swept = append(p.swept, Look{Node: n, sweep: true})
		}
	} else {
		for t := range p.turns {
			if t.resting {
				p.swept = append(p.swept, Look{Turn: t, sweep: true})
			} else if t.group == nil || !t.group.single() || !t.group.running {
				t.ask = true // the query in progress may return older state
			}
		}
		p.doubted, p.broad, p.broadAt = false, false, now
	}
	// Look first at what changed last: it is the most likely to change next.
	slices.SortFunc(p.swept, func(a, b Look) int { return cmp.Compare(b.last(), a.last()) })
	p.stirred, p.unknown, p.found, p.began = false, false, false, now
	p.sweeping = len(p.swept) > 0
}

// hand assigns looks: first to wakes, except for a quarter during a sweep, and
// the rest to the sweep, except for half during a sweep over services, as a
// later wake would have to wait for it.
func (p *Plan) hand(s *Steps) {
	urgent, share := p.lookMost, p.lookMost
	if len(p.swept) > 0 {
		urgent -= max(p.lookMost/4, 1)
		if p.swept[0].Node == nil {
			share = max(p.lookMost/2, 1)
		}
	}
	for ; len(p.urgent) > 0 && p.looks-p.sweeps < urgent && p.looks < p.lookMost; p.urgent = p.urgent[1:] {
		t := p.urgent[0]
		t.queued = false
		if p.turns[t] {
			p.looks++
			s.Look = append(s.Look, Look{Turn: t})
		}
	}
	for ; len(p.swept) > 0 && p.sweeps < share && p.looks < p.lookMost; p.swept = p.swept[1:] {
		p.looks++
		p.sweeps++
		l := p.swept[0]
		if l.Node != nil {
			l.known, l.base = l.Node.index, p.base[l.Node.Scope]
		}
		s.Look = append(s.Look, l)
	}
}
