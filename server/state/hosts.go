package state

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Policy is the handling of a host that several registries have.
type Policy string

// Policies of a [ConflictRule].
const (
	// Priority serves the entry of the first registry that has the host.
	Priority Policy = "priority"
	// Isolate serves the entry of each registry in its own namespace.
	Isolate Policy = "isolate"
	// Merge serves the entry of the first registry with the endpoints of all.
	Merge Policy = "merge"
)

// DefaultPolicy applies to hosts that match no rule.
const DefaultPolicy = Priority

var policies = []Policy{Priority, Isolate, Merge}

// ConflictRule sets the policy of hosts that several registries have.
type ConflictRule struct {
	// Hosts are patterns of [path.Match]; * matches any run of characters, dots
	// included. The case of letters does not matter.
	Hosts  []string
	Policy Policy
	// Weights are the shares of traffic by registry, for Merge. Nil keeps the
	// weights of the endpoints.
	Weights map[string]uint32
}

func (r *ConflictRule) fits(host string) bool {
	return slices.ContainsFunc(r.Hosts, func(pattern string) bool {
		ok, _ := path.Match(strings.ToLower(pattern), hostKey(host))
		return ok
	})
}

// hostKey returns what hosts are compared by. Proxies route requests, and DNS
// resolves names, whatever the case of the letters: of two hosts that differ
// only in it, istiod gives a route to one.
func hostKey(host string) string { return strings.ToLower(host) }

// hostKeys returns the keys of hosts, each once.
func hostKeys(hosts []string) []string {
	if len(hosts) == 1 && hostKey(hosts[0]) == hosts[0] {
		return hosts
	}
	keys := make([]string, 0, len(hosts))
	for _, host := range hosts {
		if key := hostKey(host); !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	return keys
}

func (r *ConflictRule) total() (n uint64) {
	for _, w := range r.Weights {
		n += uint64(w)
	}
	return n
}

var defaultRule = ConflictRule{Policy: DefaultPolicy}

// SetConflicts replaces the rules; the first that matches a host applies. All
// resulting changes are published at once.
func (d *DB) SetConflicts(rules []ConflictRule) {
	d.apply.Lock()
	defer d.apply.Unlock()
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

// ruleOf returns the rule that applies to a host and its index in the
// configuration, -1 for the default.
func (d *DB) ruleOf(host string) (*ConflictRule, int) {
	for n := range d.rules {
		if d.rules[n].fits(host) {
			return &d.rules[n], n
		}
	}
	return &defaultRule, -1
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
	for _, host := range hostKeys(hosts) {
		d.claims.set(host, &hostClaim{id, d.claims.now[host]})
	}
}

// disclaimHosts removes the hosts of a ServiceEntry from the index. The caller
// holds apply.
func (d *DB) disclaimHosts(id entryID, hosts []string) {
	for _, host := range hostKeys(hosts) {
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
	for _, hosts := range [][]string{before, after} {
		for _, host := range hostKeys(hosts) {
			// Entries of one registry do not conflict, and may be many.
			for c := d.claims.now[host]; c != nil; c = c.next {
				if c.registry != b.r {
					b.markHost(host)
					break
				}
			}
		}
	}
	head := d.tables[collection.ServiceEntry].index[name]
	others := false
	for c := head; c != nil; c = c.next {
		others = others || !c.is(isTombstone) && c.kind.registry != b.r
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

// verdict is the decision on a ServiceEntry that conflicts with another
// registry's.
type verdict struct {
	state stateOfEntry
	by    entryID // the entry that takes precedence
	host  string  // shared by both; "" if only the name is
	rule  int     // index of the rule that applies, -1 for none
	why   string  // reason why it is not merged despite the rule
	notes string  // differences between the two
}

// stateOfEntry is the outcome of a conflict for a ServiceEntry.
type stateOfEntry uint8

const (
	beside   stateOfEntry = iota // both are served
	keptBack                     // not served
	merged                       // served as part of the other
)

// String returns the outcome as logs and pages show it.
func (s stateOfEntry) String() string { return [...]string{"served too", "kept back", "merged"}[s] }

// visibility is the set of namespaces that see a ServiceEntry.
type visibility struct {
	all bool
	in  []string
}

func visibilityOf(se *encode.Entry, namespace string) (v visibility) {
	v.all = len(se.ExportTo) == 0
	for _, to := range se.ExportTo {
		switch to {
		case "*":
			v.all = true
		case ".":
			v.in = append(v.in, namespace)
		case "~":
		default:
			v.in = append(v.in, to)
		}
	}
	return v
}

// overlaps reports whether a namespace sees both.
func (v *visibility) overlaps(w *visibility) bool {
	switch {
	case v.all:
		return w.all || len(w.in) > 0
	case w.all:
		return len(v.in) > 0
	}
	return slices.ContainsFunc(v.in, func(ns string) bool { return slices.Contains(w.in, ns) })
}

// covers reports whether each namespace that sees w also sees v.
func (v *visibility) covers(w *visibility) bool {
	return v.all || !w.all && !slices.ContainsFunc(w.in, func(ns string) bool { return !slices.Contains(v.in, ns) })
}

// contender is a ServiceEntry that may conflict with others.
type contender struct {
	entryID
	record  *Record
	spec    encode.Entry
	visible visibility
	verdict *verdict  // nil: served, without a conflict
	members []*member // merged into it, without itself
	rule    *ConflictRule
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
		e := &contender{entryID: entryID{c.kind.registry, strings.Clone(c.Name())}, record: c}
		if found[e.entryID] {
			return
		}
		found[e.entryID] = true
		var err error
		if e.spec, err = encode.ParseEntry(c.Spec()); err != nil {
			panic(fmt.Sprintf("BUG: state: %s: %v", e.name, err)) // parsed before by encode.Parse
		}
		e.visible = visibilityOf(&e.spec, c.Namespace())
		all = append(all, e)
		for _, h := range hostKeys(e.spec.Hosts) {
			host(h)
		}
		name(e.name)
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
				if !c.is(isTombstone) {
					add(c)
				}
			}
		}
	}
	b.decided = hosts
	slices.SortFunc(all, func(x, y *contender) int {
		return cmp.Or(cmp.Compare(x.registry.order, y.registry.order), strings.Compare(x.name, y.name))
	})
	return all
}

// decide sets the verdicts of contenders, which are in order of precedence, and
// returns the contested hosts with their policies.
func (d *DB) decide(all []*contender) (contested map[string]Policy) {
	contested = make(map[string]Policy)
	hosts, names := make(map[string][]*contender), make(map[string]*contender)
	for _, e := range all {
		owner := names[e.name]
		var into *contender
		var part *member
		for _, host := range hostKeys(e.spec.Hosts) {
			rule, n := d.ruleOf(host)
			for _, o := range hosts[host] {
				if o.registry == e.registry || !o.visible.overlaps(&e.visible) {
					continue
				}
				contested[host] = rule.Policy
				if owner != nil && o != owner {
					continue // the name decides
				}
				v, m := oppose(e, o, host, rule, n)
				if owner != nil && v.state == beside {
					v.state, v.notes = keptBack, ""
				}
				if e.verdict == nil || e.verdict.state == beside && v.state != beside {
					e.verdict, into, part = v, o, m
				}
			}
		}
		switch {
		case part != nil:
			into.members = append(into.members, part)
			if into.rule == nil {
				into.rule, _ = d.ruleOf(e.verdict.host)
			}
			continue
		case owner != nil && e.verdict == nil:
			e.verdict = &verdict{state: keptBack, by: owner.entryID, rule: -1}
			continue
		case e.verdict != nil && e.verdict.state != beside:
			continue
		}
		names[e.name] = e
		for _, host := range hostKeys(e.spec.Hosts) {
			hosts[host] = append(hosts[host], e)
		}
	}
	return contested
}

// oppose returns the verdict on e, given that o takes precedence and has the
// same host. If e is merged, it also returns e as a member.
func oppose(e, o *contender, host string, rule *ConflictRule, n int) (*verdict, *member) {
	v := &verdict{state: beside, by: o.entryID, host: host, rule: n}
	switch {
	case rule.Policy == Isolate:
	case !o.visible.covers(&e.visible):
		v.notes = "it is visible in namespaces that do not see the other one"
	case rule.Policy == Priority:
		v.state = keptBack
	default:
		m, notes, err := newMember(e, o, rule, n)
		if err != nil {
			v.state, v.why = keptBack, err.Error()
			break
		}
		v.state, v.notes = merged, notes
		return v, m
	}
	return v, nil
}

// settleHosts decides on the hosts and names that the batch marked.
func (b *batch) settleHosts() {
	if len(b.marked)+len(b.markedNames)+len(b.loose) == 0 {
		return
	}
	d := b.db
	all := b.contenders()
	contested := d.decide(all)
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
		d.setVerdict(b, e.entryID, e.verdict)
		if s := e.record.of; s != nil && s.merger != nil {
			mergers = append(mergers, s.merger)
		}
	}
	for _, e := range all {
		if len(e.members) > 0 {
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
	if old.isDisputed() {
		id.registry.disputed--
	}
	if v.isDisputed() {
		id.registry.disputed++
	}
	if id.registry != b.r && !slices.Contains(b.others, id.registry) {
		b.others = append(b.others, id.registry)
	}
	if v == nil {
		d.verdicts.remove(id)
	} else {
		d.verdicts.set(id, v)
		if v.host != "" {
			b.news = append(b.news, id)
		}
	}
	b.touch(d.tables[collection.ServiceEntry], id.name)
}

// isDisputed reports whether the entry is listed as a problem although it is
// served.
func (v *verdict) isDisputed() bool { return v != nil && v.state != keptBack && v.notes != "" }

// verdictOf returns the verdict on a ServiceEntry, nil if it has no conflict.
func (d *DB) verdictOf(c *Record) *verdict {
	if len(d.verdicts.now) == 0 {
		return nil
	}
	return d.verdicts.now[entryID{c.kind.registry, c.Name()}]
}

// isAside reports whether a ServiceEntry is not served on its own.
func (d *DB) isAside(c *Record) bool {
	v := d.verdictOf(c)
	return v != nil && v.state != beside
}

// policyOf returns the policy that led to the verdict, and the rule in words.
func (v *verdict) policyOf(rules []ConflictRule) (policy Policy, rule string) {
	if v.rule < 0 || v.rule >= len(rules) {
		return DefaultPolicy, "no rule of conflicts fits the host, so the first registry of the configuration has it"
	}
	return rules[v.rule].Policy, fmt.Sprintf("conflicts[%d] says %s", v.rule, rules[v.rule].Policy)
}

// problem describes the conflict of an entry and its remedy; "" means
// that there is no problem.
func (v *verdict) problem(id entryID, rules []ConflictRule) string {
	other := fmt.Sprintf("registry %q, which comes first in the configuration, has the host %s too (%s)", *v.by.registry.shown.Load(), v.host, v.by.name)
	policy, rule := v.policyOf(rules)
	isolate := "with policy isolate each is served in its namespace"
	if v.by.name == id.name {
		isolate = "with policy isolate and another namespace (translate.namespace) each is served in its own"
	}
	switch {
	case v.host == "":
		return fmt.Sprintf("registry %q, which comes first in the configuration, has a resource of the same name; kept back. "+
			"Give it another name (translate.name), or remove one of the two", *v.by.registry.shown.Load())
	case v.state == keptBack && v.why != "":
		return fmt.Sprintf("%s; %s, but %s; kept back", other, rule, v.why)
	case v.state == keptBack && v.rule >= 0 && policy == Isolate:
		return fmt.Sprintf("%s; %s, but both have one name; kept back. Give one of the two another namespace (translate.namespace)", other, rule)
	case v.state == keptBack:
		return fmt.Sprintf("%s; %s; kept back. If both are one service, conflicts with policy merge serves the endpoints of both, "+
			"and its weights move traffic from one to the other; %s; if they are not, give it another host (translate.host)", other, rule, isolate)
	case v.state == merged && v.notes != "":
		return fmt.Sprintf("%s; merged, as %s; %s", other, rule, v.notes)
	case v.notes != "":
		return fmt.Sprintf("%s; both are served, as %s. Give both the same exportTo, or write a rule of conflicts with policy isolate if that is meant", other, v.notes)
	}
	return ""
}

// tellHosts logs the new verdicts of the batch.
func (b *batch) tellHosts() {
	for _, id := range b.news {
		v := b.db.verdicts.now[id]
		if v == nil || !id.registry.line() {
			continue
		}
		policy, _ := v.policyOf(b.db.rules)
		about := []any{"host", v.host, "name", id.name, "owner", v.by.registry.name, "owner_name", v.by.name, "policy", string(policy)}
		if reason := cmp.Or(v.why, v.notes); reason != "" {
			about = append(about, "reason", reason)
		}
		switch v.state {
		case keptBack:
			id.registry.log.Warn("another registry has the host; kept back", about...)
		case merged:
			id.registry.log.Info("another registry has the host; merged", about...)
		default:
			id.registry.log.Info("another registry has the host; served too", about...)
		}
	}
	b.news = nil
}

// Conflict is a host that a second registry has.
type Conflict struct {
	Host     string
	Policy   Policy
	Registry string // the second one
	Name     string // of its ServiceEntry
	Outcome  string // kept back, merged or served too
	// Owner is the registry that takes precedence, and OwnerName the name of
	// its ServiceEntry.
	Owner, OwnerName string
}

// Conflicts returns the hosts that several registries have, once for each
// registry except the first, by host and in the order of the configuration.
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
			if v.host == "" {
				continue
			}
			policy, _ := v.policyOf(d.rules)
			items = append(items, item{Conflict{
				Host: v.host, Policy: policy, Registry: id.registry.name, Name: id.name, Outcome: v.state.String(),
				Owner: v.by.registry.name, OwnerName: v.by.name,
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
