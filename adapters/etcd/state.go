package etcd

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"strings"
	"unicode/utf8"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// state is what the keys below the prefix say. It is used by one goroutine.
type state struct {
	layout   layout
	selected plugin.Selection
	leftOut  plugin.Unselected
	// keys holds the keys, without the prefix, of selected services, and those
	// that belong to none.
	keys map[string]*record
	// services holds the keys of each service, "" those that belong to none.
	services map[string]map[string]*record
}

// record is one key.
type record struct {
	service   string
	instances []registry.Instance
	problem   string
}

func newState(l layout, selected plugin.Selection) *state {
	return &state{layout: l, selected: selected, keys: map[string]*record{}, services: map[string]map[string]*record{}}
}

// put applies a key with its value and adds the services it affects to touched.
// was is what the key said before, if known: a value that cannot be read leaves
// that as it is.
func (s *state) put(key string, value []byte, was *record, touched map[string]bool) {
	r := &record{}
	var note string
	var err error
	if utf8.ValidString(key) {
		r.service, r.instances, note, err = s.layout.parse(key, value)
	} else {
		err = errNotText
	}
	switch {
	case err != nil && was != nil && len(was.instances) > 0:
		r.service, r.instances = was.service, was.instances
		r.problem = fmt.Sprintf("key %s: %v; what it said before is kept: write it again or delete it", quoteKey(key), err)
	case err != nil:
		r.problem = fmt.Sprintf("key %s: %v; it is left out: write it again or delete it", quoteKey(key), err)
	case note != "":
		r.problem = fmt.Sprintf("key %s: %s", quoteKey(key), note)
	}
	s.remove(key, touched)
	if r.service != "" && !s.leftOut.Match(s.selected, r.service) {
		return
	}
	s.keys[key] = r
	of := s.services[r.service]
	if of == nil {
		of = map[string]*record{}
		s.services[r.service] = of
	}
	of[key] = r
	touched[r.service] = true
}

var errNotText = errors.New("the key is not UTF-8")

// remove removes a key and adds the service it belonged to to touched.
func (s *state) remove(key string, touched map[string]bool) {
	r := s.keys[key]
	if r == nil {
		return
	}
	delete(s.keys, key)
	of := s.services[r.service]
	if delete(of, key); len(of) == 0 {
		delete(s.services, r.service)
	}
	touched[r.service] = true
}

// all returns all services and their problems.
func (s *state) all() plugin.Listing {
	l := s.listing(maps.Keys(s.services))
	l.Complete = true
	return l
}

// listing returns the present state of services, and what is wrong with each.
func (s *state) listing(services iter.Seq[string]) plugin.Listing {
	l := plugin.Listing{Problems: map[string]string{}}
	for name := range services {
		l.Problems[problemID(name)] = s.problem(name)
		if instances := s.listed(name); len(instances) > 0 {
			l.Services = append(l.Services, plugin.Snapshot{Service: registry.Service{Key: registry.Key{Name: name}}, Instances: instances})
		} else {
			l.Removed = append(l.Removed, registry.Key{Name: name})
		}
	}
	return l
}

// listed returns the instances of a service, sorted by ID. A service without
// one is none: etcd has only keys.
func (s *state) listed(service string) (instances []registry.Instance) {
	if service == "" {
		return nil
	}
	for _, r := range s.services[service] {
		instances = append(instances, r.instances...)
	}
	return plugin.SortInstances(instances)
}

// problem describes the problems of a service: the first by key, and the number
// of others. It returns "" for none.
func (s *state) problem(service string) string {
	of, n, first := s.services[service], 0, ""
	for key, r := range of {
		if r.problem == "" {
			continue
		}
		if n++; n == 1 || key < first {
			first = key
		}
	}
	switch n {
	case 0:
		return ""
	case 1:
		return of[first].problem
	}
	return fmt.Sprintf("%s (and %d more like it)", of[first].problem, n-1)
}

// problemID returns the ID under which the problems of a service are listed.
func problemID(service string) string {
	if service == "" {
		return "keys"
	}
	return "service " + service
}

// quoteKey shortens and quotes a key for messages.
func quoteKey(key string) string { return fmt.Sprintf("%.200q", strings.ToValidUTF8(key, "\uFFFD")) }
