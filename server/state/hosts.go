package state

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
	"github.com/isthmus-mesh/isthmus/server/state/record"
	"github.com/isthmus-mesh/isthmus/server/state/status"
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
	d.hosts.Rules = slices.Clone(rules)
	d.merges.Store(slices.ContainsFunc(rules, func(r ConflictRule) bool { return r.Policy == Merge }))
}

// decideAnew decides again on each host of several entries.
func (d *DB) decideAnew() {
	if len(d.registries) == 0 {
		return
	}
	d.hosts.MarkAll()
	d.commit(&batch{r: d.registries[0], db: d})
}

// commit commits a batch that is not one of a registry.
func (d *DB) commit(b *batch) {
	b.commit()
	for _, r := range d.registries {
		r.summarize(false)
	}
}

// entryID identifies the ServiceEntry of a registry.
type entryID struct {
	registry *Registry
	name     string
}

// Of implements [conflict.Entry].
func (id entryID) Of() string { return id.name }

// record returns the ServiceEntry, nil if it is gone.
func (id entryID) record() *Record {
	return id.registry.db.tables[collection.ServiceEntry].claim(id.name, id.registry)
}

// service returns the service of the ServiceEntry, nil if it has none.
func (id entryID) service() *service {
	if c := id.record(); c != nil {
		return c.of
	}
	return nil
}

// id identifies a ServiceEntry, with memory not shared with a buffer.
func (r *Record) id() entryID {
	if r.of != nil {
		return entryID{r.kind.registry, r.of.name}
	}
	return entryID{r.kind.registry, strings.Clone(r.Name())}
}

// entries are the ServiceEntries as package conflict sees them.
type entries struct{ *table }

func newHosts(d *DB, rules conflict.Rules) *conflict.Hosts[entryID] {
	return conflict.NewHosts(&d.book, entries{d.tables[collection.ServiceEntry]}, rules)
}

// Contender implements [conflict.Entries].
func (e entries) Contender(id entryID) *conflict.Contender[entryID] {
	c := id.record()
	if c == nil {
		return nil
	}
	spec, err := encode.ParseEntry(c.Spec())
	if err != nil {
		panic(fmt.Sprintf("BUG: state: %s: %v", id.name, err)) // parsed before by encode.Parse
	}
	return &conflict.Contender[entryID]{
		ID: id, Owner: id.registry.order, Registry: id.registry.name, Namespace: c.Namespace(), Name: id.name, Composed: c.parts != nil, Spec: spec,
	}
}

// Named implements [conflict.Entries].
func (e entries) Named(name string) iter.Seq[entryID] {
	return func(yield func(entryID) bool) {
		for c := e.Head(name); c != nil; c = c.next {
			if !c.Is(record.Tombstone) && !yield(c.id()) {
				return
			}
		}
	}
}

// rehost updates the hosts of a ServiceEntry that is added, replaced or
// removed. old or now may be nil.
func (b *batch) rehost(old, now *Record) {
	var before, after []string
	var id entryID
	service := false
	if old != nil {
		before, id, service = encode.Hosts(old.Spec()), old.id(), old.parts != nil
		if old.of != nil && old.of.merger != nil {
			b.loose = append(b.loose, old.of.merger)
		}
	}
	if now != nil {
		after, id, service = encode.Hosts(now.Spec()), now.id(), service || now.parts != nil
	}
	b.db.hosts.Change(id, before, after, func(other entryID) bool {
		// Of one registry, services are in conflict, and nothing else.
		return other.registry != id.registry || service && other.service() != nil
	})
}

// decide decides on the hosts and names that the batch marked.
func (b *batch) decide() {
	d := b.db
	all := d.hosts.Decide(func(id entryID, was, now *verdict) {
		if was.IsDisputed() {
			id.registry.disputed--
		}
		if now.IsDisputed() {
			id.registry.disputed++
		}
		b.concern(id.registry)
		if now != nil && now.Host != "" {
			b.news = append(b.news, id)
		}
		b.touch(d.tables[collection.ServiceEntry], id.name)
	})
	if len(all)+len(b.loose) > 0 {
		b.merge(all)
		d.book.Change(func() { d.contested = maps.Clone(d.hosts.By) })
	}
}

// verdictOf returns the verdict on a ServiceEntry, nil if it has no conflict.
func (d *DB) verdictOf(c *Record) *verdict {
	if d.hosts.Peaceful() {
		return nil
	}
	return d.hosts.Verdict(entryID{c.kind.registry, c.Name()})
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
func (id entryID) problem(v *verdict) string {
	return v.Problem(id.name, *v.By.registry.shown.Load(), v.By.name)
}

// tellHosts logs the new verdicts of the batch.
func (b *batch) tellHosts() {
	for _, id := range b.news {
		v := b.db.hosts.Verdict(id)
		if v == nil || !id.registry.line() {
			continue
		}
		about := []any{"host", v.Host, "name", id.name, "owner", v.By.registry.name, "owner_name", v.By.name, "policy", string(v.Policy)}
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

// Conflicts returns the hosts that several services have, once for each service
// except the first, by host and in the order of the configuration.
func (d *DB) Conflicts() []status.Conflict {
	type item struct {
		status.Conflict
		order int
	}
	var items []item
	func() {
		d.apply.Lock()
		defer d.apply.Unlock()
		for id, v := range d.hosts.Verdicts() {
			if v.Host != "" {
				items = append(items, item{status.Conflict{
					Host: v.Host, Policy: v.Policy, Registry: id.registry.name, Name: id.name, Outcome: v.Outcome.String(),
					Owner: v.By.registry.name, OwnerName: v.By.name,
				}, id.registry.order})
			}
		}
	}()
	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(strings.Compare(a.Host, b.Host), cmp.Compare(a.order, b.order), strings.Compare(a.Name, b.Name))
	})
	out := make([]status.Conflict, 0, len(items))
	for _, it := range items {
		out = append(out, it.Conflict)
	}
	return out
}
