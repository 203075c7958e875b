package state

import (
	"cmp"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
)

// maxRemovalsShown bounds the retained resources of a claim that are listed.
const maxRemovalsShown = 100

// Claim is a ServiceEntry of a registry, with what became of it.
type Claim struct {
	Registry  string   `json:"registry"`
	Name      string   `json:"name"`
	Hosts     []string `json:"hosts"`
	Endpoints int      `json:"endpoints"`
	Version   string   `json:"version"`
	// Outcome is served, served too, merged or shadowed.
	Outcome string `json:"outcome"`
	// Rule is the configuration field that decided on a conflict, Reason what
	// it decided and the remedy. Both are empty without a conflict.
	Rule   string `json:"rule,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Owner is the registry that takes precedence, and OwnerName the name of
	// its ServiceEntry.
	Owner     string `json:"owner,omitempty"`
	OwnerName string `json:"owner_name,omitempty"`
	// Rejected is why the registry's newest version is not served.
	Rejected string `json:"rejected,omitempty"`
	// Removals is what is served of it after its registry removed it, at most
	// 100 of RemovalCount.
	Removals     []Removal `json:"removals,omitempty"`
	RemovalCount int       `json:"removal_count,omitempty"`
	// The same under the names that these fields had before, for this release.
	Refused   string    `json:"refused,omitempty"`
	Kept      []Removal `json:"kept,omitempty"`
	KeptCount int       `json:"kept_count,omitempty"`
	// Inline and Workload are the revisions of the newest change, in each
	// shape.
	Inline   Revision `json:"-"`
	Workload Revision `json:"-"`
}

// Explain returns the claims on a host of all registries, in the order of
// precedence. The host may also be the name of a ServiceEntry. It does not wait
// for a batch in progress, but for one that is written to the logs.
func (d *DB) Explain(host string) []Claim {
	d.mu.RLock()
	defer d.mu.RUnlock()
	d.book.RLock()
	defer d.book.RUnlock()
	t := d.tables[collection.ServiceEntry]
	var records []*Record
	for id := range d.hosts.OfShared(host) {
		if r := t.claimShared(id.name, id.registry); r != nil && !slices.Contains(records, r) {
			records = append(records, r)
		}
	}
	if len(records) == 0 {
		records = t.claimsShared(host)
	}
	slices.SortFunc(records, func(a, b *Record) int {
		return cmp.Or(cmp.Compare(a.kind.registry.order, b.kind.registry.order), strings.Compare(a.Name(), b.Name()))
	})
	out := make([]Claim, 0, len(records))
	for _, r := range records {
		out = append(out, d.explainLocked(r))
	}
	return out
}

// explainLocked describes one claim. The caller holds mu and the book for
// reading.
func (d *DB) explainLocked(r *Record) Claim {
	of := r.kind.registry
	c := Claim{
		Registry: r.Registry(), Name: r.Name(), Hosts: r.Hosts(), Endpoints: r.Endpoints(), Version: r.Version().String(), Outcome: "served",
		Inline: r.place[encode.Inline], Workload: r.place[encode.Workload],
		Rejected: of.rejected[problems.ResourceID(collection.ServiceEntry, r.Name())].Reason,
	}
	for i := range r.Instances() {
		c.Workload = max(c.Workload, i.place[encode.Workload])
	}
	if v := d.hosts.VerdictShared(entryID{of, r.Name()}); v != nil {
		c.Outcome, c.Owner, c.OwnerName = v.Outcome.String(), *v.By.registry.shown.Load(), v.By.name
		c.Reason = entryID{of, r.Name()}.problem(v)
		rule := v.Says()
		if c.Rule = "conflicts"; strings.HasPrefix(rule, "conflicts[") {
			c.Rule, _, _ = strings.Cut(rule, " ")
		}
		if c.Reason == "" {
			c.Reason = rule
		}
	}
	for name, item := range of.guard.paused {
		k := Removal{Registry: r.Registry(), Collection: name.table.name, Name: name.name, Since: item.Since, Until: of.guard.Config.Until(item), Reason: item.Reason()}
		paused := name.table.claimShared(name.name, of)
		if paused != r && (paused == nil || !paused.IsInstance() || r.of == nil || paused.of != r.of) {
			continue
		}
		if paused != r {
			k.Service = paused.of.name
		}
		c.Removals = append(c.Removals, k)
	}
	slices.SortFunc(c.Removals, func(a, b Removal) int { return strings.Compare(a.Name, b.Name) })
	c.RemovalCount = len(c.Removals)
	c.Removals = c.Removals[:min(len(c.Removals), maxRemovalsShown)]
	c.Refused, c.Kept, c.KeptCount = c.Rejected, c.Removals, c.RemovalCount
	return c
}

// Similar returns up to n hosts that resemble a name, the most similar first.
// It does not wait for a batch in progress.
func (d *DB) Similar(host string, n int) []string {
	d.book.RLock()
	all := d.hosts.Shared()
	d.book.RUnlock()
	type candidate struct {
		host     string
		distance int
	}
	most := max(2, len(host)/4)
	first, _, _ := strings.Cut(host, ".")
	var found []candidate
	for _, h := range all {
		label, _, _ := strings.Cut(h, ".")
		distance := most + 1
		switch {
		case first == "":
		case label == first:
			distance = 0
		case strings.Contains(label, first), len(label) > 2 && strings.Contains(first, label):
			distance = 1
		case max(len(h)-len(host), len(host)-len(h)) <= most:
			distance = min(distance, edits(h, host, most))
		}
		if d := edits(label, first, 2); d <= 2 && d < len(first) {
			distance = min(distance, d+1)
		}
		if distance <= most {
			found = append(found, candidate{h, distance})
		}
	}
	slices.SortFunc(found, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.distance, b.distance), strings.Compare(a.host, b.host))
	})
	out := make([]string, 0, n)
	for _, c := range found[:min(n, len(found))] {
		out = append(out, c.host)
	}
	return out
}

// edits returns the number of insertions, deletions and replacements of bytes
// that turn a into b, or more than limit if it exceeds that.
func edits(a, b string, limit int) int {
	if max(len(a)-len(b), len(b)-len(a)) > limit {
		return limit + 1
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal, least := row[0], i+1
		row[0] = i + 1
		for j := range len(b) {
			above := row[j+1]
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(above+1, row[j]+1, diagonal+cost)
			least = min(least, row[j+1])
			diagonal = above
		}
		if least > limit {
			return limit + 1
		}
	}
	return row[len(b)]
}
