package conflict

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/state/book"
)

// Entry identifies a ServiceEntry.
type Entry interface {
	comparable
	// Of returns its name.
	Of() (name string)
}

// Entries are the ServiceEntries of all registries.
type Entries[ID Entry] interface {
	// Contender returns an entry as it is now, nil if it is gone.
	Contender(id ID) *Contender[ID]
	// Named returns the entries of a name.
	Named(name string) iter.Seq[ID]
}

// Hosts has the entries of each host, and the verdicts on those in conflict.
// The caller of what does not end in Shared is the writer of the book.
type Hosts[ID Entry] struct {
	Rules        Rules
	entries      Entries[ID]
	of           *book.Map[string, *claim[ID]] // by [HostKey]
	verdicts     *book.Map[ID, *Verdict[ID]]   // nil: served, without a conflict
	policies     map[string]Policy             // of contested hosts
	By           map[Policy]int                // contested hosts by policy
	hosts, names map[string]bool               // to decide on
	doubtful     []ID                          // have a verdict, and may be gone
}

// claim is an entry in the list of those with one host. It is immutable.
type claim[ID Entry] struct {
	id   ID
	next *claim[ID] // in no order
}

// without returns the list without an entry.
func (c *claim[ID]) without(id ID) *claim[ID] {
	switch {
	case c == nil:
		return nil
	case c.id == id:
		return c.next
	}
	return &claim[ID]{c.id, c.next.without(id)}
}

func (c *claim[ID]) all() iter.Seq[ID] {
	return func(yield func(ID) bool) {
		for ; c != nil && yield(c.id); c = c.next {
		}
	}
}

// NewHosts returns no hosts.
func NewHosts[ID Entry](b *book.Book, entries Entries[ID], rules Rules) *Hosts[ID] {
	return &Hosts[ID]{
		Rules: rules, entries: entries, of: book.NewMap[string, *claim[ID]](b), verdicts: book.NewMap[ID, *Verdict[ID]](b),
		policies: make(map[string]Policy), By: make(map[Policy]int), hosts: make(map[string]bool), names: make(map[string]bool),
	}
}

// Add adds an entry to each of its hosts.
func (h *Hosts[ID]) Add(id ID, hosts []string) {
	for _, host := range HostKeys(hosts) {
		h.of.Set(host, &claim[ID]{id, h.of.Now[host]})
	}
}

func (h *Hosts[ID]) remove(id ID, hosts []string) {
	for _, host := range HostKeys(hosts) {
		if rest := h.of.Now[host].without(id); rest == nil {
			h.of.Remove(host)
		} else {
			h.of.Set(host, rest)
		}
	}
}

// Change replaces the hosts of an entry that changed, or is gone, and marks
// what is to be decided on: its name if several have it, and each host that it
// had or has together with one that opposes it.
func (h *Hosts[ID]) Change(id ID, before, after []string, opposes func(ID) bool) {
	if !slices.Equal(before, after) {
		h.remove(id, before)
		h.Add(id, after)
	}
	for _, host := range HostKeys(slices.Concat(before, after)) {
		for c := h.of.Now[host]; c != nil; c = c.next {
			if c.id != id && opposes(c.id) {
				h.hosts[host] = true
				break
			}
		}
	}
	several := h.verdicts.Now[id] != nil
	if several {
		h.doubtful = append(h.doubtful, id)
	}
	for other := range h.entries.Named(id.Of()) {
		several = several || other != id
	}
	if several {
		h.names[strings.Clone(id.Of())] = true
	}
}

// MarkName marks a name to decide on.
func (h *Hosts[ID]) MarkName(name string) { h.names[name] = true }

// MarkAll marks each host of several entries, and each name with a verdict.
func (h *Hosts[ID]) MarkAll() {
	for host, c := range h.of.Now {
		if c.next != nil {
			h.hosts[host] = true
		}
	}
	for id := range h.verdicts.Now {
		h.names[id.Of()] = true
	}
}

// Marked returns the entries that are marked by their hosts, several times
// possibly.
func (h *Hosts[ID]) Marked() iter.Seq[ID] {
	return func(yield func(ID) bool) {
		for host := range h.hosts {
			for id := range h.of.Now[host].all() {
				if !yield(id) {
					return
				}
			}
		}
	}
}

// Decide decides on what is marked, and on all that shares a host or a name
// with it, directly or through others. It returns these entries in order of
// precedence, and calls changed for each verdict that is another one. The
// result depends only on the entries and the rules.
func (h *Hosts[ID]) Decide(changed func(id ID, was, now *Verdict[ID])) []*Contender[ID] {
	if len(h.hosts)+len(h.names) == 0 {
		return nil
	}
	found := make(map[ID]*Contender[ID])
	var all []*Contender[ID]
	var add func(id ID)
	var next []*Contender[ID]
	add = func(id ID) {
		if found[id] != nil {
			return
		}
		if c := h.entries.Contender(id); c != nil {
			found[id] = c
			all, next = append(all, c), append(next, c)
		}
	}
	host := func(key string) {
		for id := range h.of.Now[key].all() {
			add(id)
		}
	}
	name := func(name string) {
		for id := range h.entries.Named(name) {
			add(id)
		}
	}
	for key := range h.hosts {
		host(key)
	}
	for n := range h.names {
		name(n)
	}
	for len(next) > 0 {
		c := next[0]
		next = next[1:]
		for _, key := range HostKeys(c.Spec.Hosts) {
			if !h.hosts[key] {
				h.hosts[key] = true
				host(key)
			}
		}
		if !h.names[c.Name] {
			h.names[c.Name] = true
			name(c.Name)
		}
	}
	slices.SortFunc(all, func(x, y *Contender[ID]) int {
		return cmp.Or(cmp.Compare(x.Owner, y.Owner), strings.Compare(x.Name, y.Name))
	})
	contested := Decide(all, h.Rules)
	set := func(id ID, now *Verdict[ID]) {
		was := h.verdicts.Now[id]
		switch {
		case was == now || was != nil && now != nil && *was == *now:
			return
		case now == nil:
			h.verdicts.Remove(id)
		default:
			h.verdicts.Set(id, now)
		}
		changed(id, was, now)
	}
	for _, id := range h.doubtful {
		if found[id] == nil {
			set(id, nil)
		}
	}
	for _, c := range all {
		set(c.ID, c.Verdict)
	}
	for key := range h.hosts {
		h.contest(key, contested[key])
	}
	h.hosts, h.names, h.doubtful = make(map[string]bool), make(map[string]bool), nil
	return all
}

// contest sets the policy of a contested host; "" means that it is not
// contested.
func (h *Hosts[ID]) contest(host string, p Policy) {
	was := h.policies[host]
	if was == p {
		return
	}
	if was != "" {
		h.By[was]--
		delete(h.policies, host)
	}
	if p != "" {
		h.By[p]++
		h.policies[strings.Clone(host)] = p
	}
}

// Verdict returns the verdict on an entry, nil if it has no conflict.
func (h *Hosts[ID]) Verdict(id ID) *Verdict[ID] { return h.verdicts.Now[id] }

// Peaceful reports whether there is no verdict.
func (h *Hosts[ID]) Peaceful() bool { return len(h.verdicts.Now) == 0 }

// Verdicts returns all verdicts.
func (h *Hosts[ID]) Verdicts() iter.Seq2[ID, *Verdict[ID]] { return maps.All(h.verdicts.Now) }

// OfShared returns the committed entries of a host, and VerdictShared the
// committed verdict on one. The caller holds the book for reading.
func (h *Hosts[ID]) OfShared(host string) iter.Seq[ID] { return h.of.Shared(host).all() }

// VerdictShared returns the committed verdict on an entry, nil if it has no
// conflict. The caller holds the book for reading.
func (h *Hosts[ID]) VerdictShared(id ID) *Verdict[ID] { return h.verdicts.Shared(id) }

// Shared returns all hosts, as the batch in progress has them. The caller holds
// the book for reading.
func (h *Hosts[ID]) Shared() []string { return h.of.Keys() }

// Len returns the number of hosts, and whatever else there is of them.
func (h *Hosts[ID]) Len() int { return len(h.of.Now) + len(h.verdicts.Now) + len(h.policies) }

// Begun returns the number of changes of the batch in progress.
func (h *Hosts[ID]) Begun() int { return h.of.Begun() + h.verdicts.Begun() }
