package plugin

import (
	"container/heap"
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
// An outage, from [Grace.Away] to [Grace.Back], puts all that is known in
// question. What an answer lists since is confirmed, and its removal applies at
// once. What a complete answer lacks, without having been confirmed, is
// retained for the grace period. The period is measured for each instance,
// from the first complete answer that lacks it, by a clock that an outage stops
// and never sets back:
//
//	                 answer     outage       answer
//	                without a               without a          a is removed
//	instance a   ───────┼────┐           ┌──────┼─────────────────┼──
//	clock of a          0    │  stopped  │                      keep
//	                         └───────────┘
//	age of a            └──────────── age, as explained ──────────┘
//
// So nothing that is retained stays longer than the grace period plus the time
// without complete answers, however often the registry fails. An instance that
// is listed again begins anew. What no answer has lacked for the length of a
// grace period after an outage is no longer in question; a service that the
// registry has not reported since stays unchanged.
//
// Grace is safe for concurrent use.
type Grace struct {
	catalog Catalog
	keep    time.Duration
	report  func(error)

	wake chan struct{} // capacity one: the time of the next release changed

	mu sync.Mutex // guards the fields below and the order of calls to catalog
	// services holds the services in the catalog.
	services  map[registry.Key]*graced
	instances int // of all services, in the catalog
	listed    int // of all services, as last reported by the registry
	away      bool
	outages   uint64 // number of outages so far
	// elapsed is the clock of retention when it last started or stopped, and
	// started the time of that.
	elapsed time.Duration
	started time.Time
	// doubted is that of what was known before the last outage; see graced.
	doubted time.Duration
	// keeping holds the services that are retained, wholly or in part, although
	// missing.
	keeping map[registry.Key]bool
	due     dues
	told    bool   // report was called for them
	packed  []byte // a buffer of pack
}

// graced is one service.
type graced struct {
	service registry.Service
	told    packed // state in the catalog: answer and kept
	// answer is the registry's last report; empty and gone if the service was
	// removed.
	answer packed
	gone   bool
	// kept are the instances in question: known before the outage of this
	// number, and not listed since.
	outage uint64
	kept   []registry.Instance
	// doubted is what the clock shows when they are no longer in question.
	doubted time.Duration
	// lacking are those of kept that a complete answer lacked, by ID. absent is
	// set if the service itself is retained for its own sake.
	lacking map[string]absence
	absent  *absence
	// listed reports that the registry listed the service since the outage.
	listed bool
	// stopped is what the clock showed at an answer that may be incomplete, if
	// that is the last one: it stops the clock of this service.
	stopped *time.Duration
	queued  bool // in due
}

// absence is the first complete answer that lacks an instance.
type absence struct {
	at    time.Time
	clock time.Duration // by the clock of retention
}

// release is when something of a service is to be released, or before.
type release struct {
	clock   time.Duration
	service *graced
}

// dues is a heap of at most one release per service.
type dues []release

func (d dues) Len() int           { return len(d) }
func (d dues) Less(i, j int) bool { return d[i].clock < d[j].clock }
func (d dues) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *dues) Push(x any)        { *d = append(*d, x.(release)) } //nolint:forcetypeassert // nothing else is in the heap
func (d *dues) Pop() any {
	last := len(*d) - 1
	x := (*d)[last]
	(*d)[last] = release{}
	*d = (*d)[:last]
	return x
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
		services: map[registry.Key]*graced{}, keeping: map[registry.Key]bool{}, started: time.Now(),
	}
	recallWith(catalog, g.recall, g.retained)
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
	return Snapshot{s.service, s.told.unpack()}, true
}

// retained returns a sentence for each instance of a service that is retained
// although missing, by ID.
func (g *Grace) retained(key registry.Key) map[string]string {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.services[key]
	if s == nil || len(s.lacking) == 0 {
		return nil
	}
	paused := ""
	switch {
	case g.away:
		paused = ", counted from when the registry answers again"
	case s.stopped != nil:
		paused = ", counted from its next complete answer"
	}
	out := make(map[string]string, len(s.lacking))
	for id, a := range s.lacking {
		out[id] = fmt.Sprintf("missing from the registry for %v after an outage, and kept for another %v%s (remove_grace is %v)",
			time.Since(a.at).Round(time.Second), g.leftLocked(s, a).Round(time.Second), paused, g.keep)
	}
	return out
}

// clockLocked returns what the clock of retention shows: the time in which the
// registry was followed.
func (g *Grace) clockLocked() time.Duration {
	if g.away {
		return g.elapsed
	}
	return g.elapsed + time.Since(g.started)
}

// Run releases what was retained for long enough until ctx ends.
func (g *Grace) Run(ctx context.Context) {
	for {
		g.mu.Lock()
		next, ok := g.releaseLocked()
		g.mu.Unlock()
		if !ok {
			select {
			case <-g.wake:
			case <-ctx.Done():
				return
			}
			continue
		}
		if !Pause(ctx, next, g.wake) {
			return
		}
	}
}

// releaseLocked releases what is due, and returns when to call it again, if
// time alone makes something due.
func (g *Grace) releaseLocked() (next time.Duration, ok bool) {
	for !g.away && len(g.due) > 0 {
		if next := g.due[0].clock - g.clockLocked(); next > 0 {
			return next, true
		}
		s := heap.Pop(&g.due).(release).service //nolint:forcetypeassert // nothing else is in the heap
		s.queued = false
		if g.services[s.service.Key] == s {
			g.tellLocked(s, false, s.answer.unpack())
		}
	}
	return 0, false
}

// Away records that the registry cannot be followed or may have lost data.
// Nothing is removed until Back, and the clock of retention stops.
func (g *Grace) Away() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.away {
		g.elapsed, g.away = g.clockLocked(), true
		g.doubted = g.elapsed + g.keep
		g.outages++
	}
}

// Back records that the registry is followed again: the clock of retention goes
// on. It does nothing without a preceding Away. Call it before reporting what
// the registry returned since.
func (g *Grace) Back() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.away {
		return
	}
	g.away, g.started = false, time.Now()
	g.releaseLocked()
	g.wakeLocked()
}

func (g *Grace) wakeLocked() {
	select {
	case g.wake <- struct{}{}:
	default: // already signaled
	}
}

// Doubt records that what the registry says now may be incomplete: the clock
// stops for each service until the next answer about it, by Set or Remove.
func (g *Grace) Doubt() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for key := range g.keeping {
		g.stopLocked(g.services[key])
	}
}

// Question records that the registry may have lost data of one service, as by
// an outage, and has the service's clock stop until the next answer about it.
func (g *Grace) Question(key registry.Key) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.services[key]; s != nil {
		s.outage, s.kept, s.listed, s.doubted = g.outages, s.told.unpack(), false, g.clockLocked()+g.keep
		g.stopLocked(s)
	}
}

func (g *Grace) stopLocked(s *graced) {
	if s.stopped == nil {
		s.stopped = new(g.clockLocked())
	}
}

// Answer returns what the registry reported of a service at last, sorted by ID:
// nil if it removed the service, or never had it. An adapter that compares
// answers needs no copy of its own; this one is packed.
func (g *Grace) Answer(key registry.Key) []registry.Instance {
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.services[key]; s != nil {
		return s.answer.unpack()
	}
	return nil
}

// Set records the registry's state of a service, as [Catalog].Set, and reports
// whether it differs from the last one. The caller must not modify the
// instances afterwards: the catalog may refer to them.
func (g *Grace) Set(svc registry.Service, instances []registry.Instance) (changed bool) {
	instances = SortInstances(instances)
	g.mu.Lock()
	defer g.mu.Unlock()
	s, isNew := g.serviceLocked(svc.Key)
	g.answerLocked(s, instances, nil)
	return g.setLocked(s, isNew, svc, instances)
}

// SetPart is Set for an answer about a part of a service, which says nothing of
// the known instances that are open: they stay as they are.
func (g *Grace) SetPart(svc registry.Service, instances, open []registry.Instance) {
	instances, open = SortInstances(instances), SortInstances(open)
	g.mu.Lock()
	defer g.mu.Unlock()
	s, isNew := g.serviceLocked(svc.Key)
	confirmed := withoutInstances(s.told.unpack(), s.kept)
	g.answerLocked(s, instances, open)
	all, _ := UnionInstances(instances, withoutInstances(open, withoutInstances(open, confirmed)))
	s.kept = withoutInstances(s.kept, all)
	g.setLocked(s, isNew, svc, all)
}

// Add is Set for an answer that may be incomplete: known instances stay, and
// the clock of what is retained of the service stops.
func (g *Grace) Add(svc registry.Service, instances []registry.Instance) (changed bool) {
	instances = SortInstances(instances)
	g.mu.Lock()
	defer g.mu.Unlock()
	s, isNew := g.serviceLocked(svc.Key)
	g.stopLocked(s)
	all, _ := UnionInstances(instances, withoutInstances(s.told.unpack(), s.kept))
	s.kept = withoutInstances(s.kept, instances)
	return g.setLocked(s, isNew, svc, all)
}

// serviceLocked returns the state of a service, created if necessary.
func (g *Grace) serviceLocked(key registry.Key) (s *graced, isNew bool) {
	s = g.services[key]
	if s == nil {
		s = &graced{outage: g.outages}
		g.services[key] = s
		return s, true
	}
	g.questionLocked(s)
	return s, false
}

// questionLocked puts a service in question if there was an outage since, or
// out of it if that was long ago.
func (g *Grace) questionLocked(s *graced) {
	if s.outage != g.outages {
		s.outage, s.kept, s.listed, s.doubted = g.outages, s.told.unpack(), false, g.doubted
	}
	if !g.away && g.clockLocked() >= s.doubted {
		s.listed = true
		if len(s.kept) != len(s.lacking) {
			s.kept = lackingOf(s)
		}
	}
}

// lackingOf returns the instances in question that an answer lacked.
func lackingOf(s *graced) (out []registry.Instance) {
	for _, i := range s.kept {
		if _, ok := s.lacking[i.ID]; ok {
			out = append(out, i)
		}
	}
	return out
}

// answerLocked takes a complete answer about a service: its clock goes on, what
// it lists is confirmed, and what it lacks, of what is in question and not
// open, is retained from now on.
func (g *Grace) answerLocked(s *graced, instances, open []registry.Instance) {
	now := g.clockLocked()
	if s.stopped != nil {
		passed := now - *s.stopped
		s.stopped = nil
		for id, a := range s.lacking {
			s.lacking[id] = absence{a.at, a.clock + passed}
		}
		if s.absent != nil {
			s.absent = &absence{s.absent.at, s.absent.clock + passed}
		}
	}
	if g.away {
		s.kept = s.told.unpack() // whatever was listed since: nothing is removed
	}
	s.kept = withoutInstances(s.kept, instances)
	for _, i := range withoutInstances(s.kept, open) {
		if _, ok := s.lacking[i.ID]; !ok {
			if s.lacking == nil {
				s.lacking = map[string]absence{}
			}
			s.lacking[i.ID] = absence{time.Now(), now}
		}
	}
}

// setLocked takes what the registry lists of a service, and reports whether it
// is new.
func (g *Grace) setLocked(s *graced, isNew bool, svc registry.Service, instances []registry.Instance) (changed bool) {
	same, was := !isNew && equalServices(s.service, svc), s.answer
	s.service, s.listed, s.gone, s.absent = svc, true, false, nil
	g.listed += len(instances) - s.answer.len()
	s.answer, g.packed = pack(instances, g.packed)
	g.tellLocked(s, !same, instances)
	return !same || s.answer != was
}

// Remove records that the registry removed a service, as [Catalog].Remove.
// It reports whether the registry had the service.
func (g *Grace) Remove(key registry.Key) (changed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.services[key]
	if s == nil {
		return false
	}
	changed = !s.gone
	g.removeLocked(s)
	return changed
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

// Retained returns how long something of a service is still retained although
// the registry lacks it, unless there is another outage, and whether anything
// is.
func (g *Grace) Retained(key registry.Key) (left time.Duration, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.services[key]
	if s == nil {
		return 0, false
	}
	for _, a := range s.lacking {
		left = max(left, g.leftLocked(s, a))
	}
	if s.absent != nil {
		left = max(left, g.leftLocked(s, *s.absent))
	}
	return left, left > 0
}

// leftLocked returns how long what an answer lacked is still retained.
func (g *Grace) leftLocked(s *graced, a absence) time.Duration {
	now := g.clockLocked()
	if s.stopped != nil {
		now = *s.stopped
	}
	return max(a.clock+g.keep-now, 0)
}

func (g *Grace) removeLocked(s *graced) {
	g.questionLocked(s)
	g.answerLocked(s, nil, nil)
	if !s.gone && (g.away || !s.listed) {
		s.absent = &absence{time.Now(), g.clockLocked()}
	}
	s.gone = true
	g.listed -= s.answer.len()
	s.answer = ""
	g.tellLocked(s, false, nil)
}

// expireLocked ends the retention of what was missing for long enough, and
// returns when, by the clock, the next of the service is.
func (g *Grace) expireLocked(s *graced) (next time.Duration, ok bool) {
	if s.absent == nil && len(s.lacking) == 0 {
		return 0, false
	}
	now := g.clockLocked()
	retained := func(a absence) bool {
		due := a.clock + g.keep
		if due <= now && !g.away && s.stopped == nil {
			return false
		}
		if !ok || due < next {
			next, ok = due, true
		}
		return true
	}
	if s.absent != nil && !retained(*s.absent) {
		s.absent = nil
	}
	var kept []registry.Instance
	lacking := make(map[string]absence, len(s.lacking))
	for _, i := range s.kept {
		a, lacks := s.lacking[i.ID]
		if lacks {
			if !retained(a) {
				continue
			}
			lacking[i.ID] = a
		}
		kept = append(kept, i)
	}
	s.kept, s.lacking = kept, lacking
	return next, ok
}

// tellLocked updates the catalog if the instances or, with other, the service
// itself changed. answer is that of the service.
func (g *Grace) tellLocked(s *graced, other bool, answer []registry.Instance) {
	key := s.service.Key
	next, retained := g.expireLocked(s)
	if retained {
		g.keeping[key] = true
		g.queueLocked(s, next)
	} else {
		delete(g.keeping, key)
	}
	all, added := UnionInstances(answer, s.kept)
	told := s.answer
	if added > 0 {
		told, g.packed = pack(all, g.packed)
	}
	stays := !s.gone || s.absent != nil || len(all) > 0
	if stays && (other || told != s.told) {
		g.catalog.Set(s.service, all)
	}
	g.instances -= s.told.len()
	s.told = ""
	if stays {
		s.told = told
		g.instances += len(all)
	} else {
		g.catalog.Remove(key)
		delete(g.services, key)
	}
	g.reportLocked()
}

// queueLocked has Run look at a service when the clock shows next.
func (g *Grace) queueLocked(s *graced, next time.Duration) {
	if s.queued || s.stopped != nil {
		return
	}
	s.queued = true
	heap.Push(&g.due, release{next, s})
	if g.due[0].service == s {
		g.wakeLocked()
	}
}

func (g *Grace) reportLocked() {
	if told := len(g.keeping) > 0; told != g.told {
		g.told = told
		if !told {
			g.report(nil)
			return
		}
		g.report(fmt.Errorf("the registry was away or has lost data, and lacks what it had; each instance is kept until the registry's answers have lacked it for %v (remove_grace), so that it can be registered again", g.keep))
	}
}

func equalServices(a, b registry.Service) bool {
	return a.Key == b.Key && slices.Equal(a.Ports, b.Ports) && slices.Equal(a.Tags, b.Tags) && maps.Equal(a.Meta, b.Meta)
}
