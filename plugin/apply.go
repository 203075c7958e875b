package plugin

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// believing is when a complete listing is applied as it is, and when what it
// lacks is retained.
type believing struct {
	removeGrace time.Duration
	minShare    float64
	acceptEmpty bool
	emptyField  string // of the configuration, which sets acceptEmpty, or ""
	hint        string // what to check if nothing is listed, or ""
}

// ifRight returns what to do if a registry without an instance is right.
func (b *believing) ifRight() string {
	if b.emptyField == "" {
		return "this adapter cannot be told that it is right; its author can add a field that sets AcceptEmpty, and name it in AcceptEmptyField"
	}
	return "if that is right, set " + b.emptyField
}

// listFault is a kind of fault of a registry that is listed, in the order
// shown.
type listFault int

const (
	// listAway: no usable answer.
	listAway listFault = iota
	// listDoubt: the answer may be incomplete.
	listDoubt
	// listKept: instances are retained after an outage.
	listKept
)

// applier applies listings and changes to a catalog: what Poll and Watch have
// in common.
type applier struct {
	believing
	catalog Catalog
	faults  *Faults[listFault]
	grace   *Grace
	// lost is why the registry lacks data, for the report of grace, which other
	// goroutines make.
	lost atomic.Pointer[string]

	mu     sync.Mutex // guards the fields below and the order of listings
	synced bool
	away   bool      // since the last listing
	began  time.Time // time of the first listing, or zero
	// held are the services of a registry that listed no instance, which is not
	// believed; nil otherwise.
	held     map[registry.Key]registry.Service
	problems map[string]bool // currently reported
}

func newApplier(catalog Catalog, b believing) *applier {
	a := &applier{believing: b, catalog: catalog, faults: NewFaults[listFault](catalog), problems: map[string]bool{}}
	a.grace = NewGrace(catalog, b.removeGrace, func(err error) {
		if lost := a.lost.Load(); lost != nil && err != nil {
			err = fmt.Errorf("%s; %w", *lost, err)
		}
		a.faults.Set("kept", listKept, err)
	})
	return a
}

// fail records an outage.
func (a *applier) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failLocked(err)
}

func (a *applier) failLocked(err error) {
	a.away = true
	a.grace.Away()
	a.faults.Set("registry", listAway, err)
}

// take applies a listing or changes.
func (a *applier) take(l Listing) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l.Away != nil {
		a.failLocked(l.Away)
	} else {
		a.catalog.Heard()
		a.away = false
		a.faults.Clear("registry")
	}
	a.problemsLocked(l)
	if l.Lost != nil {
		a.lost.Store(new(l.Lost.Error()))
	} else if l.Complete {
		a.lost.Store(nil)
	}
	known, before := a.grace.Instances()
	listed := 0
	for _, s := range l.Services {
		listed += len(s.Instances)
	}
	switch {
	case l.Complete:
		if a.began.IsZero() {
			a.began = time.Now()
		}
		if a.held = nil; listed == 0 && l.Doubt == nil && a.holdLocked(known > 0) {
			a.keepLocked(l)
			return
		}
	case a.held != nil && l.Doubt == nil:
		a.keepLocked(l)
		if l.Away == nil && (listed > 0 || !a.synced && time.Since(a.began) >= a.removeGrace) {
			a.believeLocked(l.Services)
		}
		return
	}
	if l.Lost != nil || l.Complete && before-listed >= 2 && float64(listed) < a.minShare*float64(before) {
		a.grace.Away() // immediately followed by Back: puts in question what it lacks
	}
	if l.Away == nil {
		a.grace.Back()
	}
	if l.Complete || l.Doubt != nil {
		a.faults.Set("listing", listDoubt, l.Doubt)
	}
	switch {
	case l.Doubt != nil:
		for _, s := range l.Services {
			a.grace.Add(s.Service, s.Instances)
		}
		a.grace.Doubt()
	case l.Complete:
		a.completeLocked(l.Services)
	default:
		for _, s := range l.Services {
			a.grace.Set(s.Service, s.Instances)
		}
		for _, key := range l.Removed {
			a.grace.Remove(key)
		}
	}
}

// holdLocked decides about a listing without an instance, and reports whether
// it is not applied.
func (a *applier) holdLocked(known bool) bool {
	switch {
	case a.acceptEmpty:
	case known:
		a.grace.Away() // until it lists an instance
		a.faults.Set("listing", listDoubt, fmt.Errorf("the registry lists no instance at all, so nothing is removed; %s", a.ifRight()))
		return true
	case !a.synced && time.Since(a.began) < a.removeGrace:
		a.grace.Back()
		hint := a.hint
		if hint != "" {
			hint = "; check " + hint
		}
		a.faults.Set("listing", listDoubt, fmt.Errorf("the registry lists no instance at all, which is believed %v after the start (remove_grace)%s; %s", a.removeGrace, hint, a.ifRight()))
		return true
	}
	return false
}

// keepLocked applies a listing or changes to what is held.
func (a *applier) keepLocked(l Listing) {
	if a.held == nil {
		a.held = make(map[registry.Key]registry.Service, len(l.Services))
	}
	for _, s := range l.Services {
		a.held[s.Service.Key] = s.Service
	}
	for _, key := range l.Removed {
		delete(a.held, key)
	}
}

// believeLocked applies what is held as a complete listing, with the instances
// of some services.
func (a *applier) believeLocked(some []Snapshot) {
	all := make([]Snapshot, 0, len(a.held))
	for _, s := range some {
		delete(a.held, s.Service.Key)
		all = append(all, s)
	}
	for _, s := range a.held {
		all = append(all, Snapshot{Service: s})
	}
	a.held = nil
	a.grace.Back()
	a.faults.Clear("listing")
	a.completeLocked(all)
}

// believeEmpty applies a first listing without an instance, unless the registry
// is away: the next listing is judged on its own.
func (a *applier) believeEmpty() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.held != nil && !a.synced && !a.away {
		a.believeLocked(nil)
	}
}

// completeLocked applies all services of the registry.
func (a *applier) completeLocked(all []Snapshot) {
	listed := make(map[registry.Key]bool, len(all))
	for _, s := range all {
		listed[s.Service.Key] = true
		a.grace.Set(s.Service, s.Instances)
	}
	a.grace.RemoveOthers(func(key registry.Key) bool { return listed[key] })
	if !a.synced {
		a.synced = true
		a.catalog.Synced()
	}
}

// problemsLocked reports the problems of a listing.
func (a *applier) problemsLocked(l Listing) {
	if l.Complete {
		for id := range a.problems {
			if l.Problems[id] == "" {
				delete(a.problems, id)
				a.catalog.Problem(id, "")
			}
		}
	}
	for id, reason := range l.Problems {
		switch {
		case reason != "":
			a.problems[id] = true
			a.catalog.Problem(id, reason)
		case a.problems[id]:
			delete(a.problems, id)
			a.catalog.Problem(id, "")
		}
	}
}
