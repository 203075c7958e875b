package plugin

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/translate"
)

// translator is the part of translate.Translator that the catalog needs.
type translator interface {
	Service(svc registry.Service, instances []registry.Instance, prev *translate.Result) *translate.Result
}

// catalog implements [Catalog]. It keeps the present state of the registry, translated, and a cursor of the one stream that
// reads it: the set of names whose state the stream has not sent yet.
type catalog struct {
	translator  translator
	collections map[string]bool // that the plugin announced; immutable
	limits      limits          // that the host told; immutable

	heard atomic.Int64 // when the registry was last heard from, in Unix nanoseconds; 0 if the adapter has not told

	mu sync.Mutex
	// guarded by mu
	services map[registry.Key]*service
	slots    map[resourceID]*slot
	// kept is what cannot be sent, by its registry.Key or by the resourceID that
	// was published; at most maxKept and tooMany.
	kept      map[any]*slot
	problems  *problems
	instances int   // of all services
	used      usage // of limits
	refused   bool  // something was, so there may be problems of source limit
	synced    bool
	degraded  string // why the registry cannot be followed, "" if it is
	detail    string // how it is followed, "" if that is not worth telling
	stream    *cursor
	streams   uint64 // number of cursors so far; the present one's number
}

var (
	_ Catalog  = (*catalog)(nil)
	_ Detailer = (*catalog)(nil)
)

// limits bounds what a catalog holds. Zero is no bound.
type limits struct{ resources, bytes uint64 }

// usage is what counts against limits.
type usage struct{ resources, bytes uint64 }

// usageOf counts what a service is translated to. One of which nothing becomes counts too, since the catalog remembers it.
func usageOf(r *translate.Result) usage {
	u := usage{resources: 1}
	if r.Entry == nil {
		return u
	}
	u.resources, u.bytes = 1+uint64(len(r.Endpoints)), uint64(len(r.Entry.Resource))
	for _, e := range r.Endpoints {
		u.bytes += uint64(len(e.Resource))
	}
	return u
}

// resourceID names one resource.
type resourceID struct{ collection, name string }

// service is one service of the registry.
type service struct {
	key registry.Key

	mu   sync.Mutex // held while the service is translated; taken before catalog.mu
	gone bool       // removed from the catalog; guarded by mu

	// read with mu or catalog.mu, written with both
	result *translate.Result

	// guarded by catalog.mu
	used      usage // by result
	instances int
	serving   bool // its ServiceEntry won its name, so its instances are published
	counted   bool // it is among the services that were counted
}

// slot is one resource name and who wants it.
type slot struct {
	id     resourceID
	group  string  // slots of one group travel together: a ServiceEntry's name, for it and its instances
	claims []claim // the first one is served; empty: the resource is gone
	kept   int     // how many have the name and cannot be sent
	dirty  uint64  // number of the cursor that has yet to send it; of an earlier cursor: nothing to send
	known  bool    // while dirty: the other end holds an earlier state of it
	told   bool    // the stream said to keep it, and nothing else of it since
	// contested says that there was more than one claim, so that problems are listed.
	contested bool
}

// claim is one owner's resource under a name.
type claim struct {
	owner *service // nil: published
	exact bool     // the service's name needed no change to be the resource's name
	bytes []byte   // an encoded istio.mcp.v1alpha1.Resource; immutable
}

func newCatalog(t translator, collections []string, l limits) *catalog {
	c := &catalog{
		translator:  t,
		limits:      l,
		collections: make(map[string]bool, len(collections)),
		services:    make(map[registry.Key]*service),
		slots:       make(map[resourceID]*slot),
		kept:        make(map[any]*slot),
		problems:    newProblems(),
	}
	for _, name := range collections {
		c.collections[name] = true
	}
	return c
}

// Set implements [Catalog].
func (c *catalog) Set(svc registry.Service, instances []registry.Instance) {
	for {
		s := c.service(svc.Key)
		s.mu.Lock()
		if s.gone { // removed after we looked it up
			s.mu.Unlock()
			continue
		}
		defer s.mu.Unlock()
		result := c.translator.Service(svc, instances, s.result)
		c.mu.Lock()
		defer c.mu.Unlock()
		is := usageOf(result)
		if c.refusedLocked(s.used, is, func() string { return serviceProblem(svc.Key) }) {
			if name := entryName(result); name != "" && name != entryName(s.result) {
				c.keepLocked(svc.Key, resourceID{collection.ServiceEntry, name})
			}
			if s.result == nil {
				s.gone = true
				delete(c.services, svc.Key)
			}
			return
		}
		c.useLocked(s.used, is)
		s.used = is
		c.commitLocked(s, result, len(instances))
		c.releaseLocked(svc.Key)
		return
	}
}

// refusedLocked reports whether a new state is beyond a limit, and lists that. What was there before stays then.
func (c *catalog) refusedLocked(was, is usage, id func() string) bool {
	var reason string
	switch l := c.limits; {
	case l.resources > 0 && is.resources > was.resources && c.used.resources+is.resources-was.resources > l.resources:
		reason = fmt.Sprintf("limits.resources_per_registry (%d)", l.resources)
	case l.bytes > 0 && is.bytes > was.bytes && c.used.bytes+is.bytes-was.bytes > l.bytes:
		reason = fmt.Sprintf("limits.bytes_per_registry (%d)", l.bytes)
	}
	if reason != "" {
		c.refused = true
		kept := "it is left out"
		if was.resources > 0 {
			kept = "it is kept as it was"
		}
		reason = fmt.Sprintf("%s, for with it the registry would exceed %s; raise that, or select less in the registry's config", kept, reason)
	}
	if c.refused {
		c.setProblemLocked(limit{}, id(), reason)
	}
	return reason != ""
}

func (c *catalog) useLocked(was, is usage) {
	c.used.resources += is.resources - was.resources
	c.used.bytes += is.bytes - was.bytes
}

// service returns the service of a key, a new one if there is none.
func (c *catalog) service(key registry.Key) *service {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.services[key]
	if s == nil {
		s = &service{key: key}
		c.services[key] = s // the counts follow with its first commit, in one message
	}
	return s
}

// Remove implements [Catalog].
func (c *catalog) Remove(key registry.Key) {
	c.mu.Lock()
	s := c.services[key]
	if s == nil {
		c.forgetRefusedLocked(key, serviceProblem(key))
	}
	c.mu.Unlock()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetRefusedLocked(key, serviceProblem(key))
	if s.gone {
		return
	}
	s.gone = true
	c.useLocked(s.used, usage{})
	c.commitLocked(s, &translate.Result{}, 0)
	delete(c.services, key)
	c.countsChangedLocked()
}

// Publish implements [Catalog].
func (c *catalog) Publish(res *mcp.Resource) {
	id := resourceID{collection.OfBody(res.GetBody().GetTypeUrl()), res.GetMetadata().GetName()}
	enc, err := translate.Resource(res)
	if err == nil && !c.collections[id.collection] {
		err = fmt.Errorf("the adapter did not announce the collection %q; its author must add it to WithCollections", id.collection)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		// What was published under the name before stays: stale beats empty.
		c.setProblemLocked(published{}, publishedProblem(id), err.Error())
		if c.publishedLocked(id) == (usage{}) {
			c.keepLocked(id, id)
		}
		return
	}
	c.setProblemLocked(published{}, publishedProblem(id), "")
	was, is := c.publishedLocked(id), usage{1, uint64(len(enc.Resource))}
	if c.refusedLocked(was, is, func() string { return publishedProblem(id) }) {
		if was == (usage{}) {
			c.keepLocked(id, id)
		}
		return
	}
	c.useLocked(was, is)
	c.putLocked(id, id.name, nil, enc.Resource)
	c.releaseLocked(id)
}

// Withdraw implements [Catalog].
func (c *catalog) Withdraw(collection, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := resourceID{collection, name}
	c.setProblemLocked(published{}, publishedProblem(id), "")
	c.forgetRefusedLocked(id, publishedProblem(id))
	c.useLocked(c.publishedLocked(id), usage{})
	c.dropLocked(id, nil)
}

// forgetRefusedLocked forgets that something was left out that is gone now.
func (c *catalog) forgetRefusedLocked(owner any, problem string) {
	if c.refused {
		c.setProblemLocked(limit{}, problem, "")
	}
	c.releaseLocked(owner)
}

// maxKept is the number of names that are remembered of what cannot be sent.
// With more of them, a listing removes nothing. A name takes about 1 kB.
const maxKept = 20_000

// tooMany owns what is beyond maxKept.
type tooMany struct{}

// keepLocked notes that the registry has something under a name that cannot be
// sent: what the other end has of it, from an earlier process, is to stay.
func (c *catalog) keepLocked(owner any, id resourceID) {
	if translate.CheckName(id.name) != nil {
		id = resourceID{} // whatever it was called before
	}
	if sl := c.kept[owner]; sl != nil && sl.id == id {
		return
	}
	c.releaseLocked(owner)
	if len(c.kept) >= maxKept {
		if owner, id = (tooMany{}), (resourceID{}); c.kept[owner] != nil {
			return
		}
	}
	sl := c.slotLocked(id, id.name)
	sl.kept++
	c.kept[owner] = sl
	if len(sl.claims) == 0 {
		c.markLocked(sl, false)
	}
}

// releaseLocked takes keepLocked back: the owner's resource is sent, or gone.
func (c *catalog) releaseLocked(owner any) {
	sl := c.kept[owner]
	if sl == nil {
		return
	}
	delete(c.kept, owner)
	sl.kept--
	if len(sl.claims) == 0 && sl.told {
		c.markLocked(sl, false)
	}
	c.tidyLocked(sl)
}

// publishedLocked counts what is published under a name.
func (c *catalog) publishedLocked(id resourceID) (u usage) {
	if sl := c.slots[id]; sl != nil {
		if i := sl.index(nil); i >= 0 {
			u = usage{1, uint64(len(sl.claims[i].bytes))}
		}
	}
	return u
}

// Synced implements [Catalog].
func (c *catalog) Synced() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.synced {
		return
	}
	c.synced = true
	if c.stream != nil {
		c.stream.enqueueLocked(&group{synced: true})
	}
}

// Degraded implements [Catalog].
func (c *catalog) Degraded(err error) {
	text := ""
	if err != nil {
		text = cmp.Or(clip(err.Error(), maxReasonBytes), "unknown error")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.degraded == text {
		return
	}
	c.degraded = text
	if c.stream != nil {
		c.stream.status = true
		c.stream.wakeUp()
	}
}

// Detail implements [Detailer].
func (c *catalog) Detail(text string) {
	text = clip(text, maxIDBytes)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.detail == text {
		return
	}
	c.detail = text
	if c.stream != nil {
		c.stream.status = true
		c.stream.wakeUp()
	}
}

// Problem implements [Catalog].
func (c *catalog) Problem(id, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setProblemLocked(adapter{}, id, reason)
}

// Heard implements [Catalog].
func (c *catalog) Heard() { c.heard.Store(time.Now().UnixNano()) }

// Sources of problems besides *service (what translate found) and *slot (who did not get the name).
type (
	adapter   struct{} // what the adapter said itself
	published struct{} // what the adapter published
	limit     struct{} // what was left out because of a limit
)

func serviceProblem(key registry.Key) string { return "service " + key.String() }

func publishedProblem(id resourceID) string {
	return strings.TrimSpace("resource " + cmp.Or(id.collection, "of unknown kind") + " " + id.name)
}

func (c *catalog) setProblemLocked(source any, id, reason string) {
	c.problems.set(source, id, reason, func(id string) {
		if r := c.stream; r != nil {
			r.problems[id] = struct{}{}
			if _, told := r.told[id]; !told && !c.problems.shows(id) {
				delete(r.problems, id) // it came and went before it was sent
			}
			r.wakeUp()
		}
	})
}

func (c *catalog) countsChangedLocked() {
	if c.stream != nil {
		c.stream.counts = true
		c.stream.wakeUp()
	}
}

// commitLocked replaces what a service is translated to.
func (c *catalog) commitLocked(s *service, result *translate.Result, instances int) {
	old := s.result
	if old == nil {
		old = &translate.Result{}
	}
	if !s.counted || instances != s.instances {
		c.instances += instances - s.instances
		s.instances, s.counted = instances, true
		c.countsChangedLocked()
	}

	was, is := entryName(old), entryName(result)
	switch {
	case was != is:
		if was != "" {
			c.dropLocked(resourceID{collection.ServiceEntry, was}, s) // takes the old instances along
		}
		s.result = result
		if is != "" {
			c.putLocked(resourceID{collection.ServiceEntry, is}, is, s, result.Entry.Resource)
		}
	case is != "":
		c.putLocked(resourceID{collection.ServiceEntry, is}, is, s, result.Entry.Resource)
		s.result = result
		if s.serving {
			c.diffLocked(s, is, old.Endpoints, result.Endpoints)
		}
	default:
		s.result = result
	}
	c.findingsLocked(s, old.Problems, result.Problems)
}

// diffLocked publishes the difference between two lists of a service's instances, both sorted by name.
func (c *catalog) diffLocked(s *service, group string, was, is []translate.Encoded) {
	for len(was) > 0 || len(is) > 0 {
		order := 0
		switch {
		case len(was) == 0:
			order = 1
		case len(is) == 0:
			order = -1
		default:
			order = strings.Compare(was[0].Name, is[0].Name)
		}
		if order < 0 {
			c.dropLocked(resourceID{collection.WorkloadEntry, was[0].Name}, s)
			was = was[1:]
			continue
		}
		if order > 0 || !sameBytes(was[0].Resource, is[0].Resource) {
			c.putLocked(resourceID{collection.WorkloadEntry, is[0].Name}, group, s, is[0].Resource)
		}
		if order == 0 {
			was = was[1:]
		}
		is = is[1:]
	}
}

// findingsLocked lists what translate found.
func (c *catalog) findingsLocked(s *service, was, is []translate.Problem) {
	if slices.Equal(was, is) && (len(is) == 0 || !c.problems.wants()) {
		return
	}
	reasons := make(map[string]string, len(is))
	for _, p := range is {
		if r, ok := reasons[p.ID]; ok {
			reasons[p.ID] = r + "; " + p.Reason
		} else {
			reasons[p.ID] = p.Reason
		}
	}
	for _, p := range was {
		if _, ok := reasons[p.ID]; !ok {
			c.setProblemLocked(s, p.ID, "")
		}
	}
	for id, reason := range reasons {
		c.setProblemLocked(s, id, reason)
	}
}

// putLocked gives an owner's resource a name, or a new state under it.
func (c *catalog) putLocked(id resourceID, group string, owner *service, b []byte) {
	sl := c.slotLocked(id, group)
	if i := sl.index(owner); i >= 0 {
		changed := !sameBytes(sl.claims[i].bytes, b)
		sl.claims[i].bytes = b
		if i == 0 && changed {
			c.markLocked(sl, true)
		}
		return
	}
	before := sl.winner()
	cl := claim{owner: owner, bytes: b}
	if owner != nil {
		cl.exact = strings.Contains(id.name, owner.key.Name)
	}
	i, _ := slices.BinarySearchFunc(sl.claims, cl, precedence)
	sl.claims = slices.Insert(sl.claims, i, cl)
	if i == 0 {
		sl.group = group
	}
	c.settleLocked(sl, before)
}

// slotLocked returns the slot of a name, a new one if there is none.
func (c *catalog) slotLocked(id resourceID, group string) *slot {
	sl := c.slots[id]
	if sl == nil {
		sl = &slot{id: id, group: group}
		c.slots[id] = sl
	}
	return sl
}

// tidyLocked forgets a slot that nobody wants and of which nothing is to be sent.
func (c *catalog) tidyLocked(sl *slot) {
	if len(sl.claims) == 0 && sl.kept == 0 && (c.stream == nil || sl.dirty != c.streams) {
		delete(c.slots, sl.id)
	}
}

// dropLocked takes a name away from an owner, if it has it.
func (c *catalog) dropLocked(id resourceID, owner *service) {
	sl := c.slots[id]
	if sl == nil {
		return
	}
	i := sl.index(owner)
	if i < 0 {
		return
	}
	before := sl.winner()
	sl.claims = slices.Delete(sl.claims, i, i+1)
	if sl.contested {
		c.setProblemLocked(sl, sl.loser(owner), "")
	}
	c.settleLocked(sl, before)
	c.tidyLocked(sl)
}

// settleLocked draws the consequences of a change of who wants a name.
func (c *catalog) settleLocked(sl *slot, before *claim) {
	now := sl.winner()
	switch {
	case before == nil && now == nil:
	case before == nil || now == nil:
		c.markLocked(sl, before != nil)
	case !bytes.Equal(before.bytes, now.bytes) || before.owner != now.owner:
		c.markLocked(sl, true)
	}

	// A service's instances are published when its ServiceEntry is.
	if sl.id.collection == collection.ServiceEntry {
		if before != nil && before.owner != nil && (now == nil || now.owner != before.owner) {
			s := before.owner
			s.serving = false
			for _, e := range s.result.Endpoints {
				c.dropLocked(resourceID{collection.WorkloadEntry, e.Name}, s)
			}
		}
		if now != nil && now.owner != nil && !now.owner.serving {
			s := now.owner
			s.serving = true
			for _, e := range s.result.Endpoints {
				c.putLocked(resourceID{collection.WorkloadEntry, e.Name}, sl.id.name, s, e.Resource)
			}
		}
	}

	if len(sl.claims) > 1 || sl.contested && len(sl.claims) > 0 {
		c.setProblemLocked(sl, sl.loser(now.owner), "")
		for _, cl := range sl.claims[1:] {
			c.setProblemLocked(sl, sl.loser(cl.owner), sl.reason())
		}
	}
	sl.contested = len(sl.claims) > 1
}

// markLocked notes that the stream has to send the slot. known says whether the other end holds a state of it, provided that it
// was up to date.
func (c *catalog) markLocked(sl *slot, known bool) {
	if c.stream == nil || sl.dirty == c.streams {
		return
	}
	sl.dirty, sl.known = c.streams, known
	c.stream.addLocked(sl)
}

// service returns the name of the ServiceEntry of the service that the slot's resource is a part of, itself included; "" if it was
// published as it is.
func (sl *slot) service() string {
	if len(sl.claims) == 0 || sl.claims[0].owner == nil {
		return ""
	}
	return sl.claims[0].owner.result.Entry.Name
}

func (sl *slot) index(owner *service) int {
	return slices.IndexFunc(sl.claims, func(cl claim) bool { return cl.owner == owner })
}

// winner returns a copy of the claim that is served, nil if there is none.
func (sl *slot) winner() *claim {
	if len(sl.claims) == 0 {
		return nil
	}
	return new(sl.claims[0])
}

// loser is the id under which it is listed that an owner does not get the name.
func (sl *slot) loser(owner *service) string {
	if owner == nil {
		return publishedProblem(sl.id)
	}
	return serviceProblem(owner.key)
}

// reason says why a claim other than the first is not served.
func (sl *slot) reason() string {
	kind := sl.id.collection[strings.LastIndexByte(sl.id.collection, '/')+1:]
	if w := sl.claims[0].owner; w != nil {
		return fmt.Sprintf("not served: the name %q of its %s is taken by service %q; rename one of the two, or tell them apart with translate.name",
			sl.id.name, kind, w.key)
	}
	return fmt.Sprintf("not served: the name %q of its %s is taken by a resource that is published as it is; rename one of the two",
		sl.id.name, kind)
}

// precedence orders claims by who gets the name.
func precedence(a, b claim) int {
	if a.owner == nil || b.owner == nil {
		return -cmpBool(a.owner == nil, b.owner == nil)
	}
	if c := -cmpBool(a.exact, b.exact); c != 0 {
		return c
	}
	return compareKeys(a.owner.key, b.owner.key)
}

func cmpBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// compareKeys orders keys by their parts, from the widest to the narrowest.
func compareKeys(a, b registry.Key) int {
	return cmp.Or(
		strings.Compare(a.Datacenter, b.Datacenter),
		strings.Compare(a.Partition, b.Partition),
		strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Group, b.Group),
		strings.Compare(a.Name, b.Name),
	)
}

func entryName(r *translate.Result) string {
	if r == nil || r.Entry == nil {
		return ""
	}
	return r.Entry.Name
}

// sameBytes is bytes.Equal that is quick when the two are the same memory, as unchanged instances are.
func sameBytes(a, b []byte) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || bytes.Equal(a, b))
}

// cursor is what one stream has yet to send. Its fields are guarded by the catalog's mu.
type cursor struct {
	c      *catalog
	number uint64
	// queue is the order in which groups are sent. Its length is bounded by the number of resources.
	queue    []*group
	waiting  map[string]*group   // those in queue that nothing was sent of yet, by name
	problems map[string]struct{} // whose text the other end does not have
	told     map[string]struct{} // that the other end has a text of
	status   bool
	counts   bool
	heard    int64 // as in catalog, that was sent
	// wake has room for one: there is something to send.
	wake chan struct{}
}

// group is slots that travel together, or the mark that everything before it is the first full listing.
type group struct {
	name   string
	slots  []*slot
	synced bool
	// relisted says that the other end was told to keep the service of that
	// name: once everything is sent, the rest of what it has goes.
	relisted bool
}

// errSuperseded ends a stream when a newer one begins.
var errSuperseded = errors.New("a newer stream took over")

// read begins a new stream: it has to send everything. The one before it ends.
func (c *catalog) read() *cursor {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stream != nil {
		c.stream.wakeUp()
	}
	c.streams++
	r := &cursor{
		c:        c,
		number:   c.streams,
		waiting:  make(map[string]*group),
		problems: make(map[string]struct{}),
		told:     make(map[string]struct{}),
		status:   true,
		counts:   true,
		wake:     make(chan struct{}, 1),
	}
	c.stream = r
	for id, sl := range c.slots {
		if len(sl.claims) == 0 && sl.kept == 0 {
			delete(c.slots, id)
			continue
		}
		sl.told = false
		c.markLocked(sl, false)
	}
	c.problems.each(func(id string) { r.problems[id] = struct{}{} })
	if c.synced {
		r.enqueueLocked(&group{synced: true})
	}
	r.wakeUp()
	return r
}

func (r *cursor) wakeUp() {
	select {
	case r.wake <- struct{}{}:
	default: // it is awake already
	}
}

func (r *cursor) addLocked(sl *slot) {
	g := r.waiting[sl.group]
	if g == nil {
		g = &group{name: sl.group}
		r.waiting[sl.group] = g
		r.enqueueLocked(g)
	}
	g.slots = append(g.slots, sl)
	// A ServiceEntry goes before its instances, should the group not fit into one batch.
	if last := len(g.slots) - 1; sl.id.collection == collection.ServiceEntry {
		g.slots[0], g.slots[last] = g.slots[last], g.slots[0]
	}
}

func (r *cursor) enqueueLocked(g *group) {
	r.queue = append(r.queue, g)
	r.wakeUp()
}

// close ends the stream; nothing is kept for it from then on.
func (r *cursor) close() {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if r.c.stream == r {
		r.c.stream = nil
	}
}

// next returns the next batch, nil if the other end has everything. It does not block. The error is errSuperseded.
func (r *cursor) next() (*pluginv1.WatchResponse, error) {
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stream != r {
		return nil, errSuperseded
	}

	resp := &pluginv1.WatchResponse{}
	something := false
	n, size := 0, 0
	for len(r.queue) > 0 && !resp.Synced && n < wire.BatchResources && size < wire.BatchBytes {
		g := r.queue[0]
		if g.synced {
			resp.Synced, something = true, true
			r.popLocked()
			break
		}
		if n > 0 && !g.fits(wire.BatchResources-n, wire.BatchBytes-size) {
			break
		}
		// From here on a slot of the group that changes again goes to the end of the queue.
		delete(r.waiting, g.name)
		for len(g.slots) > 0 && n < wire.BatchResources && size < wire.BatchBytes {
			sl := g.slots[0]
			g.slots[0] = nil
			g.slots = g.slots[1:]
			service := sl.service()
			if r.postponeLocked(sl, service) {
				continue
			}
			sl.dirty = 0
			switch {
			case len(sl.claims) > 0:
				b := sl.claims[0].bytes
				up := &pluginv1.Upsert{Resource: b[:min(len(b), wire.MaxResource+1)], Service: service}
				resp.Upserts = append(resp.Upserts, up)
				size += len(up.Resource) + len(up.Service)
				n++
				g.relisted = g.relisted || sl.told && sl.id == (resourceID{collection.ServiceEntry, service})
				sl.told = false
			case sl.known, sl.told && sl.kept == 0 && sl.id.name != "":
				resp.Removals = append(resp.Removals, &pluginv1.Removal{Collection: sl.id.collection, Name: sl.id.name})
				size += len(sl.id.name) + len(sl.id.collection)
				n++
				sl.told = false
			case sl.kept > 0 && !sl.told:
				resp.Kept = append(resp.Kept, &pluginv1.Kept{Collection: sl.id.collection, Name: sl.id.name})
				size += len(sl.id.name) + len(sl.id.collection)
				n++
				sl.told = true
			}
			c.tidyLocked(sl)
		}
		if len(g.slots) == 0 {
			r.popLocked()
			switch later := r.waiting[g.name]; {
			case !g.relisted:
			case later != nil: // something of it changed meanwhile
				later.relisted = true
			default:
				resp.Relisted = append(resp.Relisted, g.name)
				size += len(g.name)
			}
		}
	}
	for id := range r.problems {
		if n >= wire.BatchResources || size >= wire.BatchBytes {
			break
		}
		delete(r.problems, id)
		p := &pluginv1.Problem{Id: id, Reason: c.problems.text(id)}
		if p.Reason == "" {
			delete(r.told, id)
		} else {
			r.told[id] = struct{}{}
		}
		resp.Problems = append(resp.Problems, p)
		size += len(p.Id) + len(p.Reason)
		n++
	}
	if r.status {
		r.status = false
		resp.Status = &pluginv1.Status{Error: c.degraded, Detail: c.detail}
		something = true
	}
	if r.counts {
		r.counts = false
		something = true
	}
	if n == 0 && !something {
		return nil, nil
	}
	resp.LastHeard = r.lastHeard()
	resp.Services, resp.Instances = uint64(len(c.services)), uint64(c.instances)
	return resp, nil
}

// lastHeard returns when the registry was last heard from, nil if the other end knows.
func (r *cursor) lastHeard() *timestamppb.Timestamp {
	heard := r.c.heard.Load()
	if heard == r.heard {
		return nil
	}
	r.heard = heard
	return timestamppb.New(time.Unix(0, heard))
}

// postponeLocked moves an instance whose ServiceEntry was not sent yet to the ServiceEntry's group. It happens only where an
// instance takes over the name of a resource that was published as it is.
func (r *cursor) postponeLocked(sl *slot, service string) bool {
	if service == "" || sl.id.collection != collection.WorkloadEntry {
		return false
	}
	entry := r.c.slots[resourceID{collection.ServiceEntry, service}]
	if entry == nil || entry.dirty != r.number || entry.known {
		return false
	}
	sl.group = service
	r.addLocked(sl)
	return true
}

func (r *cursor) popLocked() {
	r.queue[0] = nil
	r.queue = r.queue[1:]
}

// fits says whether the group is within limits of number and bytes.
func (g *group) fits(number, size int) bool {
	if len(g.slots) > number {
		return false
	}
	for _, sl := range g.slots {
		if len(sl.claims) > 0 {
			size -= min(len(sl.claims[0].bytes), wire.MaxResource+1)
		}
	}
	return size >= 0
}
