package simulation

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/verify"
)

// sharedHosts are the services that several registries have, each with another
// policy; their names begin alike.
var sharedHosts = []string{"shared-priority", "shared-merge", "shared-isolate"}

var conflictRules = []state.ConflictRule{
	{Hosts: []string{"shared-merge.example.org"}, Policy: state.Merge},
	{Hosts: []string{"shared-isolate.example.org"}, Policy: state.Isolate},
}

// isShared reports whether a name is that of a shared service, or of an
// instance of one.
func isShared(name string) bool { return strings.Contains(name, "/shared-") }

// hostOf returns the host of a service.
func hostOf(name string) string {
	_, name, _ = strings.Cut(name, "/")
	return name + ".example.org"
}

// served is a resource that has to be served, of a shared host.
type served struct {
	id
	service, address string // of an instance
}

// share tells the truth about the shared hosts: what is served of what the
// registries have, with what of their removals is paused. Who leads a host
// depends on both: a service that is put back has its host again, and what
// another registry had in its place goes.
func (w *world) share() {
	now := map[served]bool{}
	for _, host := range sharedHosts {
		w.decide(host, now)
	}
	// What goes, first: another instance may have its address from then on.
	for _, absent := range []bool{true, false} {
		from, other := w.shared, now
		if !absent {
			from, other = now, w.shared
		}
		for _, s := range sorted(from) {
			if !other[s] {
				w.tell(s, absent)
			}
		}
	}
	w.shared = now
}

func (w *world) tell(s served, absent bool) {
	w.revision++
	w.add(&verify.Event{
		Kind: verify.Truth, Collection: s.collection, Name: s.name, Service: s.service, Address: s.address, Revision: w.revision, Absent: absent,
	})
}

func sorted(of map[served]bool) []served {
	return slices.SortedFunc(maps.Keys(of), func(a, b served) int {
		return cmp.Or(cmp.Compare(a.collection, b.collection), cmp.Compare(a.name, b.name), cmp.Compare(a.service, b.service), cmp.Compare(a.address, b.address))
	})
}

// decide adds what is served of a host. Registries are in the order of
// precedence.
func (w *world) decide(host string, out map[served]bool) {
	var lead string
	taken := map[string]bool{}
	for _, r := range w.registries {
		service, items := r.name+"/"+host, w.retained(r)
		if _, ok := items[id{serviceEntry, service}]; !ok {
			continue
		}
		first := lead == ""
		if first || host == "shared-isolate" {
			lead, taken = service, map[string]bool{}
			out[served{id: id{serviceEntry, service}}] = true
		} else if host == "shared-priority" {
			return
		}
		names := sortedNames(items)
		for _, n := range names {
			i := items[n]
			if i.service != service || taken[i.address] {
				continue
			}
			name := n.name
			if service != lead {
				name = derived(lead, r.name, name)
			}
			out[served{id{workloadEntry, name}, lead, i.address}] = true
		}
		for _, n := range names {
			if i := items[n]; i.service == service {
				taken[i.address] = true
			}
		}
	}
}

// retained returns what a registry has, with what is served of the shared hosts
// although it removed it.
func (w *world) retained(r *registry) map[id]item {
	if !w.paused {
		return r.items
	}
	items := maps.Clone(r.items)
	for k := range w.bridge.db.Removals(r.name) {
		i := item{service: k.Service}
		switch {
		case !isShared(k.Name):
			continue
		case i.service != "":
			i.address = r.address(i.service, int(k.Name[len(k.Name)-1]-'0'))
		}
		items[id{k.Collection, k.Name}] = i
	}
	return items
}

// derived is the name of an instance that is served with another registry's
// service.
func derived(lead, registry, name string) string {
	namespace, _, _ := strings.Cut(lead, "/")
	_, name, _ = strings.Cut(name, "/")
	return fmt.Sprintf("%s/%s.%s", namespace, name, registry)
}

// introduce tells of everything that may be served of the shared hosts. The
// bridge may know of one registry what is older than what it knows of another,
// and serve what follows from both.
func (w *world) introduce() {
	all := map[served]bool{}
	for l, lead := range w.registries {
		for _, host := range sharedHosts {
			service := lead.name + "/" + host
			all[served{id: id{serviceEntry, service}}] = true
			for _, r := range w.registries[l:] {
				for number := range instances {
					name := fmt.Sprintf("%s/%s-%d", r.name, host, number)
					if r != lead {
						name = derived(service, r.name, name)
					}
					all[served{id{workloadEntry, name}, service, r.address(service, number)}] = true
				}
			}
		}
	}
	for _, absent := range []bool{false, true} {
		for _, s := range sorted(all) {
			w.tell(s, absent)
		}
	}
}

// anyName returns a name that a registry has or may have.
func (w *world) anyName(url string) string {
	r := w.registries[w.rand.IntN(len(w.registries))]
	name := fmt.Sprintf("%s/s%d-%s", r.name, w.rand.IntN(7), r.name)
	if w.rand.IntN(4) == 0 {
		name = r.name + "/" + sharedHosts[w.rand.IntN(len(sharedHosts))]
	}
	if strings.HasSuffix(url, "/WorkloadEntry") {
		name = fmt.Sprintf("%s-%d", name, w.rand.IntN(instances))
		if isShared(name) && w.rand.IntN(2) == 0 {
			name += ".dc1"
		}
	}
	return name
}
