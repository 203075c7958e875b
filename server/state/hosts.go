package state

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// Policy is the handling of a host that several services have.
type Policy = conflict.Policy

// Policies of a [ConflictRule].
const (
	Priority = conflict.Priority
	Isolate  = conflict.Isolate
	Merge    = conflict.Merge
)

// ConflictRule sets the policy of hosts that several services have.
type ConflictRule = conflict.Rule

// verdict is the decision on a ServiceEntry that conflicts with another one.
type verdict = conflict.Verdict[entryID]

// SetConflicts replaces the rules; the first that matches a host applies. All
// resulting changes are published at once.
func (d *DB) SetConflicts(rules []ConflictRule) {
	d.apply.Lock()
	defer d.unlock()
	d.setRules(rules)
	d.decideAnew()
}

func (d *DB) setRules(rules []ConflictRule) {
	d.rules = slices.Clone(rules)
	d.merges.Store(slices.ContainsFunc(rules, func(r ConflictRule) bool { return r.Policy == Merge }))
}

// decideAnew decides again on each host of several entries.
func (d *DB) decideAnew() {
	if len(d.registries) == 0 {
		return
	}
	b := &batch{r: d.registries[0], db: d}
	b.markAll()
	d.decideOn(b)
}

// decideOn decides on what the batch marked.
func (d *DB) decideOn(b *batch) {
	b.commit()
	for _, r := range d.registries {
		d.metrics.setServed(r)
		r.countProblems()
		r.summarize(false)
	}
}

// markAll marks each host of several entries and each name with a verdict.
func (b *batch) markAll() {
	for host, c := range b.db.claims.now {
		if c.next != nil {
			b.markHost(host)
		}
	}
	for id := range b.db.verdicts.now {
		b.markName(id.name)
	}
}

// entryID identifies the ServiceEntry of a registry.
type entryID struct {
	registry *Registry
	name     string
}

// hostClaim is a ServiceEntry in the list of those with one host. It is
// immutable.
type hostClaim struct {
	entryID
	next *hostClaim // in no order
}

// without returns the list without an entry.
func (c *hostClaim) without(id entryID) *hostClaim {
	switch {
	case c == nil:
		return nil
	case c.entryID == id:
		return c.next
	}
	return &hostClaim{c.entryID, c.next.without(id)}
}

// claimHosts indexes the hosts of a ServiceEntry. The caller holds apply.
func (d *DB) claimHosts(id entryID, hosts []string) {
	for _, host := range conflict.HostKeys(hosts) {
		d.claims.set(host, &hostClaim{id, d.claims.now[host]})
	}
}

// disclaimHosts removes the hosts of a ServiceEntry from the index. The caller
// holds apply.
func (d *DB) disclaimHosts(id entryID, hosts []string) {
	for _, host := range conflict.HostKeys(hosts) {
		if rest := d.claims.now[host].without(id); rest == nil {
			d.claims.remove(host)
		} else {
			d.claims.set(host, rest)
		}
	}
}

// rehost updates the index of hosts when a ServiceEntry is added, replaced or
// removed, and marks what has to be decided on. old or now may be nil.
func (b *batch) rehost(old, now *Record) {
	d := b.db
	var before, after []string
	name := ""
	if old != nil {
		before, name = encode.Hosts(old.Spec()), old.Name()
	}
	if now != nil {
		after, name = encode.Hosts(now.Spec()), now.Name()
	}
	id := entryID{b.r, name}
	if now != nil {
		if id.name = strings.Clone(name); now.of != nil {
			id.name = now.of.name // so that the key does not retain a buffer
		}
	}
	if !slices.Equal(before, after) {
		d.disclaimHosts(id, before)
		d.claimHosts(id, after)
	}
	entries := d.tables[collection.ServiceEntry]
	isService := func(c *Record) bool { return c != nil && c.parts != nil }
	for _, hosts := range [][]string{before, after} {
		for _, host := range conflict.HostKeys(hosts) {
			for c := d.claims.now[host]; c != nil; c = c.next {
				// Of one registry, services are in conflict, and nothing else.
				if c.registry != b.r || c.entryID != id && (isService(old) || isService(now)) && isService(entries.claim(c.name, c.registry)) {
					b.markHost(host)
					break
				}
			}
		}
	}
	head := entries.index[name]
	others := false
	for c := head; c != nil; c = c.next {
		others = others || !c.Is(record.Tombstone) && c.kind.registry != b.r
	}
	if _, decided := d.verdicts.now[id]; decided || others || old != nil && old.of != nil && old.of.merger != nil {
		b.markName(name)
	}
	if old != nil && old.of != nil && old.of.merger != nil && (now == nil || now.of != old.of) {
		b.loose = append(b.loose, old.of.merger)
	}
}

func (b *batch) markHost(host string) {
	if b.marked == nil {
		b.marked = make(map[string]bool)
	}
	b.marked[host] = true
}

func (b *batch) markName(name string) {
	if b.markedNames == nil {
		b.markedNames = make(map[string]bool)
	}
	b.markedNames[name] = true
}

// contender is a ServiceEntry that may conflict with others, with its record.
type contender struct {
	conflict.Contender[entryID]
	record *Record
}

// contenders returns all entries that share a host or a name with what the
// batch marked, directly or through others, in order of precedence. The result
// depends only on the state of the registries.
func (b *batch) contenders() []*contender {
	d := b.db
	t := d.tables[collection.ServiceEntry]
	found := make(map[entryID]bool)
	hosts, names := make(map[string]bool), make(map[string]bool)
	var all []*contender
	var nextHosts, nextNames []string
	host := func(h string) {
		if !hosts[h] {
			hosts[h] = true
			nextHosts = append(nextHosts, h)
		}
	}
	name := func(n string) {
		if !names[n] {
			names[n] = true
			nextNames = append(nextNames, n)
		}
	}
	add := func(c *Record) {
		r, id := c.kind.registry, entryID{c.kind.registry, strings.Clone(c.Name())}
		if found[id] {
			return
		}
		found[id] = true
		spec, err := encode.ParseEntry(c.Spec())
		if err != nil {
			panic(fmt.Sprintf("BUG: state: %s: %v", id.name, err)) // parsed before by encode.Parse
		}
		all = append(all, &contender{conflict.Contender[entryID]{
			ID: id, Owner: r.order, Registry: r.name, Namespace: c.Namespace(), Name: id.name, Composed: c.parts != nil, Spec: spec,
		}, c})
		for _, h := range conflict.HostKeys(spec.Hosts) {
			host(h)
		}
		name(id.name)
	}
	for h := range b.marked {
		host(h)
	}
	for n := range b.markedNames {
		name(n)
	}
	for len(nextHosts)+len(nextNames) > 0 {
		var h, n []string
		h, nextHosts, n, nextNames = nextHosts, nil, nextNames, nil
		for _, h := range h {
			for c := d.claims.now[h]; c != nil; c = c.next {
				if r := t.claim(c.name, c.registry); r != nil {
					add(r)
				}
			}
		}
		for _, n := range n {
			for c := t.index[n]; c != nil; c = c.next {
				if !c.Is(record.Tombstone) {
					add(c)
				}
			}
		}
	}
	b.decided = hosts
	slices.SortFunc(all, func(x, y *contender) int {
		return cmp.Or(cmp.Compare(x.Owner, y.Owner), strings.Compare(x.Name, y.Name))
	})
	return all
}

// settleHosts decides on the hosts and names that the batch marked.
func (b *batch) settleHosts() {
	if len(b.marked)+len(b.markedNames)+len(b.loose) == 0 {
		return
	}
	d := b.db
	all := b.contenders()
	decide := make([]*conflict.Contender[entryID], len(all))
	for n, e := range all {
		decide[n] = &e.Contender
	}
	contested := conflict.Decide(decide, d.rules)
	t := d.tables[collection.ServiceEntry]
	for name := range b.markedNames {
		for id := range d.verdictsOf(name) {
			if t.claim(name, id.registry) == nil {
				d.setVerdict(b, id, nil)
			}
		}
	}
	mergers := b.loose
	for _, e := range all {
		d.setVerdict(b, e.ID, e.Verdict)
		if s := e.record.of; s != nil && s.merger != nil {
			mergers = append(mergers, s.merger)
		}
	}
	for _, e := range all {
		if len(e.Members) > 0 {
			b.mergeInto(e)
		}
	}
	for _, m := range mergers {
		if !m.wanted {
			b.dissolve(m)
		}
	}
	for _, e := range all {
		if s := e.record.of; s != nil && s.merger != nil {
			s.merger.wanted = false
		}
	}
	for host := range b.decided {
		d.contest(host, contested[host])
	}
	d.metrics.setConflicts(d.contestedBy)
}

// contest sets the policy of a contested host; "" means that it is not
// contested.
func (d *DB) contest(host string, p Policy) {
	was := d.contested[host]
	if was == p {
		return
	}
	if was != "" {
		d.contestedBy[was]--
	}
	if p == "" {
		delete(d.contested, host)
		return
	}
	d.contestedBy[p]++
	d.contested[strings.Clone(host)] = p
}

func (d *DB) verdictsOf(name string) map[entryID]*verdict {
	out := make(map[entryID]*verdict)
	for _, r := range d.registries {
		id := entryID{r, name}
		if v := d.verdicts.now[id]; v != nil {
			out[id] = v
		}
	}
	return out
}

// setVerdict sets the verdict on an entry; nil removes it.
func (d *DB) setVerdict(b *batch, id entryID, v *verdict) {
	old := d.verdicts.now[id]
	if old == v || old != nil && v != nil && *old == *v {
		return
	}
	if old.IsDisputed() {
		id.registry.disputed--
	}
	if v.IsDisputed() {
		id.registry.disputed++
	}
	b.concern(id.registry)
	if v == nil {
		d.verdicts.remove(id)
	} else {
		d.verdicts.set(id, v)
		if v.Host != "" {
			b.news = append(b.news, id)
		}
	}
	b.touch(d.tables[collection.ServiceEntry], id.name)
}

// verdictOf returns the verdict on a ServiceEntry, nil if it has no conflict.
func (d *DB) verdictOf(c *Record) *verdict {
	if len(d.verdicts.now) == 0 {
		return nil
	}
	return d.verdicts.now[entryID{c.kind.registry, c.Name()}]
}

// isAside reports whether a ServiceEntry is not served on its own.
func (d *DB) isAside(c *Record) bool {
	return d.verdictOf(c).IsAside()
}

// seenFrom returns the registry of an entry, or its name in the same registry.
func (id entryID) seenFrom(r *Record) string {
	if id.registry == r.kind.registry {
		return id.name
	}
	return id.registry.name
}

// problem describes the conflict of an entry and its remedy; "" means that
// there is no problem.
func (id entryID) problem(v *verdict, rules conflict.Rules) string {
	return v.Problem(id.name, *v.By.registry.shown.Load(), v.By.name, rules)
}

// tellHosts logs the new verdicts of the batch.
func (b *batch) tellHosts() {
	for _, id := range b.news {
		v := b.db.verdicts.now[id]
		if v == nil || !id.registry.line() {
			continue
		}
		policy, _ := v.Says(b.db.rules)
		about := []any{"host", v.Host, "name", id.name, "owner", v.By.registry.name, "owner_name", v.By.name, "policy", string(policy)}
		if reason := cmp.Or(v.Why, v.Notes); reason != "" {
			about = append(about, "reason", reason)
		}
		switch v.Outcome {
		case conflict.Shadowed:
			id.registry.log.Warn("another service has the host; shadowed", about...)
		case conflict.Merged:
			id.registry.log.Info("another service has the host; merged", about...)
		default:
			id.registry.log.Info("another service has the host; served too", about...)
		}
	}
	b.news = nil
}

// Conflict is a host that a second service has, of another registry or of the
// same one.
type Conflict struct {
	Host     string
	Policy   Policy
	Registry string // the second one's
	Name     string // of its ServiceEntry
	Outcome  string // shadowed, merged or served too
	// Owner is the registry that takes precedence, and OwnerName the name of
	// its ServiceEntry.
	Owner, OwnerName string
}

// Conflicts returns the hosts that several services have, once for each service
// except the first, by host and in the order of the configuration.
func (d *DB) Conflicts() []Conflict {
	type item struct {
		Conflict
		order int
	}
	var items []item
	func() {
		d.apply.Lock()
		defer d.apply.Unlock()
		for id, v := range d.verdicts.now {
			if v.Host == "" {
				continue
			}
			policy, _ := v.Says(d.rules)
			items = append(items, item{Conflict{
				Host: v.Host, Policy: policy, Registry: id.registry.name, Name: id.name, Outcome: v.Outcome.String(),
				Owner: v.By.registry.name, OwnerName: v.By.name,
			}, id.registry.order})
		}
	}()
	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(strings.Compare(a.Host, b.Host), cmp.Compare(a.order, b.order), strings.Compare(a.Name, b.Name))
	})
	out := make([]Conflict, 0, len(items))
	for _, it := range items {
		out = append(out, it.Conflict)
	}
	return out
}
