package eureka

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// state is the content of a server as last reported.
type state struct {
	convert converter
	// records are all instances, including those of services that are not
	// selected: they count in the hash code.
	records map[recordKey]record
	counts  map[string]int // of records, by status
	// services are the selected services by name, with instances sorted by ID.
	// The slices are shared and immutable.
	services map[string][]registry.Instance
	problems map[string]string // reasons by id
	leftOut  plugin.Unselected
}

// recordKey identifies an instance in Eureka.
type recordKey struct{ app, id string }

// record is one instance.
type record struct {
	status   string
	services []string          // that it belongs to
	instance registry.Instance // if services is not empty
}

func newState(c converter) *state {
	return &state{
		convert: c, records: map[recordKey]record{}, counts: map[string]int{},
		services: map[string][]registry.Instance{}, problems: map[string]string{},
	}
}

func (s *state) record(app string, in *instance) (recordKey, record) {
	key := recordKey{app, idOf(in)}
	r := record{status: statusOf(in), services: slices.DeleteFunc(s.convert.services(app, in), func(name string) bool {
		return !s.leftOut.Match(s.convert.config.Services, name)
	})}
	if len(r.services) > 0 {
		r.instance = s.convert.instance(app, key.id, in)
	}
	return key, r
}

// put stores a record, or deletes it if r is nil, and returns the previous one.
func (s *state) put(key recordKey, r *record) (before record, was bool) {
	before, was = s.records[key]
	if was {
		if s.counts[before.status]--; s.counts[before.status] == 0 {
			delete(s.counts, before.status)
		}
		delete(s.records, key)
	}
	if r != nil {
		s.records[key] = *r
		s.counts[r.status]++
	}
	return before, was
}

// hash returns Eureka's hash code of the records: STATUS_COUNT_ for each
// status, in order.
func (s *state) hash() string {
	var b strings.Builder
	for _, status := range slices.Sorted(maps.Keys(s.counts)) {
		fmt.Fprintf(&b, "%s_%d_", status, s.counts[status])
	}
	return b.String()
}

// nameless sets the problem that n instances of an application have no ID; with
// 0 it clears it.
func (s *state) nameless(app string, n int) {
	id := "application " + app
	if n == 0 {
		delete(s.problems, id)
		return
	}
	s.problems[id] = fmt.Sprintf("%d of its instances have neither an instanceId nor a hostName and are left out; register them with an instanceId", n)
}

// add adds an application of a full list.
func (s *state) add(a *application) {
	nameless := 0
	for i := range a.Instances {
		key, r := s.record(a.Name, &a.Instances[i])
		if key.id == "" {
			nameless++
			continue
		}
		before, was := s.put(key, &r)
		for _, name := range before.services {
			if was { // listed twice; the last one counts
				s.services[name] = slices.DeleteFunc(s.services[name], func(i registry.Instance) bool { return i.ID == before.instance.ID })
			}
		}
		for _, name := range r.services {
			s.services[name] = append(s.services[name], r.instance)
		}
	}
	s.nameless(a.Name, nameless)
}

// listing completes a full list and returns it.
func (s *state) listing() plugin.Listing {
	l := plugin.Listing{Complete: true, Services: make([]plugin.Snapshot, 0, len(s.services))}
	for name, all := range s.services {
		if len(all) == 0 {
			delete(s.services, name)
			continue
		}
		s.services[name] = plugin.SortInstances(all)
		s.findProblem(name)
		l.Services = append(l.Services, s.snapshot(name))
	}
	l.Problems = maps.Clone(s.problems)
	return l
}

func keyOf(name string) registry.Key { return registry.Key{Name: name} }

func (s *state) snapshot(name string) plugin.Snapshot {
	return plugin.Snapshot{Service: registry.Service{Key: keyOf(name)}, Instances: s.services[name]}
}

// problemID returns the ID of the problem of a service.
func problemID(name string) string { return "service " + name }

func (s *state) findProblem(name string) {
	id := problemID(name)
	if reason := s.convert.config.Ports.Problem(s.services[name]); reason != "" {
		s.problems[id] = reason
	} else {
		delete(s.problems, id)
	}
}

// apply applies a delta and returns the resulting changes. Servers repeat the
// changes of the last minutes; known ones have no effect.
func (s *state) apply(changes []application) plugin.Listing {
	// Changed instances by service and ID; nil for a removed one.
	edits := map[string]map[string]*registry.Instance{}
	edit := func(names []string, id string, to *registry.Instance) {
		for _, name := range names {
			if edits[name] == nil {
				edits[name] = map[string]*registry.Instance{}
			}
			edits[name][id] = to
		}
	}
	for _, a := range changes {
		for i := range a.Instances {
			in := &a.Instances[i]
			key, r := s.record(a.Name, in)
			if key.id == "" {
				continue // reported with the full list
			}
			if in.ActionType == "DELETED" {
				if before, was := s.put(key, nil); was {
					edit(before.services, before.instance.ID, nil)
				}
				continue
			}
			before, was := s.put(key, &r)
			if was && slices.Equal(before.services, r.services) && plugin.EqualInstances([]registry.Instance{before.instance}, []registry.Instance{r.instance}) {
				continue
			}
			edit(before.services, before.instance.ID, nil)
			edit(r.services, r.instance.ID, &r.instance)
		}
	}
	l := plugin.Listing{Problems: map[string]string{}}
	for name, of := range edits {
		if s.edit(name, of); len(s.services[name]) == 0 {
			delete(s.services, name)
			l.Removed = append(l.Removed, keyOf(name))
		} else {
			l.Services = append(l.Services, s.snapshot(name))
		}
		s.findProblem(name)
		l.Problems[problemID(name)] = s.problems[problemID(name)]
	}
	return l
}

// edit rebuilds the list of a service.
func (s *state) edit(name string, of map[string]*registry.Instance) {
	old := s.services[name]
	all := make([]registry.Instance, 0, len(old)+len(of))
	for _, i := range old {
		if _, ok := of[i.ID]; !ok {
			all = append(all, i)
		}
	}
	for _, i := range of {
		if i != nil {
			all = append(all, *i)
		}
	}
	slices.SortFunc(all, func(a, b registry.Instance) int { return cmp.Compare(a.ID, b.ID) })
	s.services[name] = all
}
