package state

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// changesOf returns what a reader of a collection sees from its cursor on, as
// "name", with a minus where it is removed, and > where it is handed over with
// the content that it had.
func (e env) changesOf(coll string, c *Cursor) (names []string) {
	for change := range e.Changes(Kind{coll, encode.Inline}, c) {
		name := change.Name
		if change.Removed {
			name = "-" + name
		}
		if change.Handed {
			name = ">" + name
		}
		names = append(names, name)
	}
	return names
}

func (e env) publishAs(name, host string) {
	r := e.Registry(name)
	r.Begin(nil)
	r.Apply(upserts(external("ns/"+name, name+".example.org"), external("ns/both", host)))
	r.Apply(synced)
}

// A registry that is removed takes what it has along and nothing else; a name
// that another one has too changes hands without a removal. The order decides
// who has a name, at once.
func TestSetRegistries(t *testing.T) {
	e := newEnv(t, Options{}, "a", "b")
	e.publishAs("a", "of-a")
	e.publishAs("b", "of-b")
	var c Cursor
	e.changesOf(collection.ServiceEntry, &c)
	see := func(what string, names []string, renamed map[string]string, want ...string) {
		t.Helper()
		e.SetRegistries(names, renamed)
		if got := e.changesOf(collection.ServiceEntry, &c); !slices.Equal(got, want) {
			t.Errorf("%s: a reader sees %q, want %q", what, got, want)
		}
	}
	owner := func(want string) {
		t.Helper()
		r, ok := e.Get(Kind{collection.ServiceEntry, encode.Inline}, "ns/both")
		if !ok || r.Registry() != want {
			t.Errorf("ns/both is of %v %v, want %s", r, ok, want)
		}
	}
	see("nothing changed", []string{"a", "b"}, nil)
	see("one added", []string{"a", "c", "b"}, nil)
	if !e.Synced() || len(e.Waiting(collection.ServiceEntry)) > 0 {
		t.Error("a registry that was added holds what was open")
	}
	e.Registry("c").Begin(nil)
	if !e.Synced() {
		t.Error("a registry that was added holds what was open when its plugin runs")
	}
	owner("a")
	see("another order", []string{"b", "c", "a"}, nil, "ns/both")
	owner("b")
	see("renamed", []string{"z", "c", "a"}, map[string]string{"z": "b"}, ">ns/b", ">ns/both")
	owner("z")
	if got := e.Registry("z").Status(); got.Registry != "z" || !got.Synced || got.Resources[collection.ServiceEntry] != 2 || e.Registry("b") != nil {
		t.Errorf("after the renaming: %+v", got)
	}
	see("the owner removed", []string{"c", "a"}, nil, "ns/both", "-ns/b")
	owner("a")
	see("all but one removed", []string{"c"}, nil, "-ns/a", "-ns/both")
	see("names exchanged", []string{"d", "c"}, nil)
	see("names exchanged", []string{"c", "d"}, map[string]string{"c": "d", "d": "c"})
}

// What was held before stays held, by what is added too: nothing of it was ever
// served.
func TestAddedWhileHeld(t *testing.T) {
	e := newEnv(t, Options{}, "a")
	e.Registry("a").Begin([]string{collection.ServiceEntry})
	e.SetRegistries([]string{"a", "b"}, nil)
	e.Registry("b").Begin(nil)
	if got := e.Waiting(collection.ServiceEntry); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("ServiceEntries wait for %q", got)
	}
	if got := e.Waiting(routes); len(got) > 0 {
		t.Errorf("what was open is held by %q", got)
	}
	e.Registry("a").Apply(synced)
	if e.Synced() {
		t.Error("ServiceEntries are open without the registry that was added")
	}
	e.SetRegistries([]string{"a"}, nil)
	if !e.Synced() || !e.Initialized(collection.ServiceEntry) {
		t.Error("a registry that is gone holds something")
	}
}

// A registry that is gone leaves no series behind, nor does an old name.
func TestSeriesOfRegistries(t *testing.T) {
	reg := prometheus.NewRegistry()
	e := newEnv(t, Options{}, "other")
	e.DB = New([]string{"a", "b"}, Options{}, e.log, reg)
	e.publishAs("a", "of-a")
	e.publishAs("b", "of-b")
	e.SetRegistries([]string{"z"}, map[string]string{"z": "b"})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	of := map[string]int{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "registry" {
					of[l.GetValue()]++
				}
			}
		}
	}
	if len(of) != 1 || of["z"] < 8 {
		t.Errorf("series by registry: %v", of)
	}
}

// What is held back can be listed while the registries change places; the race
// detector sees whether both use one lock.
func TestKeptDuringReload(t *testing.T) {
	e := newEnv(t, protected(), "dc1", "dc2")
	list(e.Registry("dc1"), 20)
	list(e.Registry("dc1"), 5)
	done := make(chan struct{})
	go func() { // ends by itself
		defer close(done)
		for range 100 {
			e.SetRegistries([]string{"dc2", "dc1"}, nil)
			e.SetRegistries([]string{"dc1", "dc2"}, nil)
		}
	}()
	for range 100 {
		if n := len(slices.Collect(e.Removals(""))); n != 45 {
			t.Errorf("%d resources are held back, want 15 services and 30 endpoints", n)
		}
	}
	<-done
}
