package plugin

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Grace retains what is missing from a registry for a while after an outage: a
// registry that lost its data needs time until its clients have registered
// again. It sits between an adapter and the catalog, forwards the adapter's
// changes of services and drops no-ops.
//
// Nothing is removed between [Grace.Away] and [Grace.Back]. During the grace
// period, which starts with Back, an instance known before stays until the
// registry lists it; once listed, its removal applies at once. At the end of
// the period the catalog equals the registry, except that a service the
// registry has not reported since stays unchanged.
//
// Grace is safe for concurrent use.
type Grace struct {
	catalog Catalog
	keep    time.Duration
	report  func(error)

	wake chan struct{} // capacity one: until changed

	mu sync.Mutex // guards the fields below and the order of calls to catalog
	// services holds the services in the catalog.
	services  map[registry.Key]*graced
	instances int // of all services, in the catalog
	listed    int // of all services, as last reported by the registry
	away      bool
	outages   uint64    // number of outages so far
	until     time.Time // end of the grace period, zero if none
	// keeping holds the services that are retained, wholly or in part, although
	// missing.
	keeping map[registry.Key]bool
	told    bool // report was called for them
}

// graced is one service.
type graced struct {
	service registry.Service
	told    []registry.Instance // state in the catalog: answer and kept
	// answer is the registry's last report; nil and gone if the service was
	// removed.
	answer []registry.Instance
	gone   bool
	// State since the outage of this number:
	outage   uint64
	answered bool                // the registry reported the service, present or not
	shown    bool                // the registry listed it
	kept     []registry.Instance // known before, not listed since
}

// NewGrace returns a Grace in front of catalog with a grace period of keep;
// with 0 nothing is retained after Back. report, which may be nil, is called
// with an error when retention starts and with nil when it ends; it must not
// call the Grace.
func NewGrace(catalog Catalog, keep time.Duration, report func(error)) *Grace {
	if report == nil {
		report = func(error) {}
	}
	g := &Grace{
		catalog: catalog, keep: keep, report: report, wake: make(chan struct{}, 1),
		services: map[registry.Key]*graced{}, keeping: map[registry.Key]bool{},
	}
	Recall(catalog, g.recall)
	return g
}

// recall returns a service as it is in the catalog.
func (g *Grace) recall(key registry.Key) (Snapshot, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.services[key]
	if s == nil {
		return Snapshot{}, false
	}
	return Snapshot{s.service, s.told}, true
}

// Run ends grace periods on time until ctx ends.
func (g *Grace) Run(ctx context.Context) {
	for {
		g.mu.Lock()
		wait := time.Duration(0)
		if !g.until.IsZero() {
			if wait = time.Until(g.until); wait <= 0 {
				g.releaseLocked()
			}
		}
		g.mu.Unlock()
		if wait <= 0 {
			select {
			case <-g.wake:
			case <-ctx.Done():
				return
			}
			continue
		}
		if !Pause(ctx, wait, g.wake) {
			return
		}
	}
}

// Away records that the registry cannot be followed or may have lost data.
// Nothing is removed until Back.
func (g *Grace) Away() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.away {
		g.away, g.until = true, time.Time{}
		g.outages++
	}
}

// Back records that the registry is followed again and starts the grace period.
// It does nothing without a preceding Away. Call it before reporting what the
// registry returned since.
func (g *Grace) Back() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.away {
		return
	}
	g.away = false
	if g.keep > 0 {
		g.until = time.Now().Add(g.keep)
	} else {
		g.releaseLocked()
	}
	select {
	case g.wake <- struct{}{}:
	default: // already signaled
	}
}

// Set records the registry's state of a service, as [Catalog].Set. It retains
// the instances and what they refer to; the caller must not modify them
// afterwards.
func (g *Grace) Set(svc registry.Service, instances []registry.Instance) {
	instances = SortInstances(instances)
	g.mu.Lock()
	defer g.mu.Unlock()
	s, isNew := g.serviceLocked(svc.Key)
	s.answered = true
	g.setLocked(s, isNew, svc, instances)
}

// Add is Set for an answer that may be incomplete: known instances stay.
func (g *Grace) Add(svc registry.Service, instances []registry.Instance) {
	instances = SortInstances(instances)
	g.mu.Lock()
	defer g.mu.Unlock()
	s, isNew := g.serviceLocked(svc.Key)
	all, _ := UnionInstances(instances, withoutInstances(s.told, s.kept))
	g.setLocked(s, isNew, svc, all)
}

// serviceLocked returns the state of a service since the last outage, created
// if necessary.
func (g *Grace) serviceLocked(key registry.Key) (s *graced, isNew bool) {
	s = g.services[key]
	if s == nil {
		s = &graced{outage: g.outages}
		g.services[key] = s
		return s, true
	}
	g.refreshLocked(s)
	return s, false
}

func (g *Grace) setLocked(s *graced, isNew bool, svc registry.Service, instances []registry.Instance) {
	same := !isNew && equalServices(s.service, svc)
	s.service, s.shown, s.gone = svc, true, false
	s.kept = withoutInstances(s.kept, instances)
	g.answerLocked(s, instances)
	g.tellLocked(s, !same)
}

func (g *Grace) answerLocked(s *graced, instances []registry.Instance) {
	g.listed += len(instances) - len(s.answer)
	s.answer = instances
}

// Remove records that the registry removed a service, as [Catalog].Remove.
func (g *Grace) Remove(key registry.Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.services[key]; s != nil {
		g.removeLocked(s)
	}
}

// RemoveOthers removes all services for which has returns false.
func (g *Grace) RemoveOthers(has func(registry.Key) bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for key, s := range g.services {
		if !has(key) {
			g.removeLocked(s)
		}
	}
}

// Instances returns the number of instances in the catalog, and in the
// registry's last report.
func (g *Grace) Instances() (known, listed int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.instances, g.listed
}

func (g *Grace) removeLocked(s *graced) {
	g.refreshLocked(s)
	s.answered, s.gone = true, true
	g.answerLocked(s, nil)
	g.tellLocked(s, false)
}

// refreshLocked resets the state of a service after an outage.
func (g *Grace) refreshLocked(s *graced) {
	if s.outage != g.outages {
		s.outage, s.answered, s.shown, s.kept = g.outages, false, false, s.told
	}
	if !g.away && g.until.IsZero() {
		s.kept, s.shown = nil, true
	}
}

// tellLocked updates the catalog if the instances or, with other, the service
// itself changed.
func (g *Grace) tellLocked(s *graced, other bool) {
	key := s.service.Key
	all, added := UnionInstances(s.answer, s.kept)
	stays := !s.gone || !s.shown || added > 0
	if added > 0 || s.gone && stays {
		g.keeping[key] = true
	} else {
		delete(g.keeping, key)
	}
	if stays && (other || !EqualInstances(all, s.told)) {
		g.catalog.Set(s.service, all)
	}
	g.instances -= len(s.told)
	s.told = nil
	if stays {
		s.told = all
		g.instances += len(all)
	} else {
		g.catalog.Remove(key)
		delete(g.services, key)
	}
	g.reportLocked()
}

// releaseLocked ends the grace period.
func (g *Grace) releaseLocked() {
	g.until = time.Time{}
	for _, key := range slices.Collect(maps.Keys(g.keeping)) {
		s := g.services[key]
		if s.outage == g.outages && s.answered {
			g.refreshLocked(s)
			g.tellLocked(s, false)
		}
	}
	clear(g.keeping)
	g.reportLocked()
}

func (g *Grace) reportLocked() {
	if told := len(g.keeping) > 0; told != g.told {
		g.told = told
		if !told {
			g.report(nil)
			return
		}
		g.report(fmt.Errorf("the registry was away or has lost data, and lacks what it had; that is kept for %v (remove_grace), so that it can be registered again", g.keep))
	}
}

func equalServices(a, b registry.Service) bool {
	return a.Key == b.Key && slices.Equal(a.Ports, b.Ports) && slices.Equal(a.Tags, b.Tags) && maps.Equal(a.Meta, b.Meta)
}
