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

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/translate"
)

// translator is the part of translate.Translator that the catalog needs.
type translator interface {
	Service(svc registry.Service, instances []registry.Instance, prev *translate.Result) *translate.Result
	Explain(svc registry.Service, instances []registry.Instance) *translate.Explanation
}

// catalog implements [Catalog]. It holds the translated state of the registry
// and the cursor of its one stream: the set of names whose state is unsent.
//
// Per instance it retains two hashes, for change detection, and a share of the
// service's compressed endpoints, for new streams. Only some names need a slot:
// see slot.
type catalog struct {
	translator  translator
	collections map[string]bool // announced by the plugin; immutable
	limits      limits          // set by the host; immutable

	heard atomic.Int64 // last contact with the registry, in Unix nanoseconds; 0 if unknown

	mu sync.Mutex
	// guarded by mu
	services map[registry.Key]*service
	slots    map[resourceID]*slot // excludes implicit endpoints
	// kept holds what cannot be sent, by registry.Key or published resourceID;
	// at most maxKept entries and tooMany.
	kept      map[any]*slot
	problems  *problems
	leftOut   *problems
	instances int   // of all services
	used      usage // of limits
	refused   bool  // something exceeded a limit, so problems of source limit may exist
	synced    bool
	degraded  string // why the registry cannot be followed, or ""
	detail    string // how the registry is followed, or ""
	stream    *cursor
	streams   uint64     // number of cursors so far, and of the current one
	recall    []recaller // see Recall
}

var _ Publisher = (*catalog)(nil)

// limits bounds what a catalog holds. Zero means no bound.
type limits struct{ resources, services, bytes uint64 }

// usage counts against limits.
type usage struct{ resources, services, bytes uint64 }

// usageOf counts the resources of a service. A service without resources counts
// too, since the catalog retains it.
func usageOf(r *translate.Result) usage {
	u := usage{resources: 1, services: 1}
	if r.Entry == nil {
		return u
	}
	u.resources, u.bytes = 1+uint64(len(r.Endpoints)), uint64(len(r.Entry.Resource))
	for _, e := range r.Endpoints {
		u.bytes += uint64(len(e.Resource))
	}
	if r.Rule != nil {
		u.resources++
		u.bytes += uint64(len(r.Rule.Resource))
	}
	return u
}

// resourceID names one resource.
type resourceID struct{ collection, name string }

// service is one service of the registry.
type service struct {
	key registry.Key

	mu   sync.Mutex // held while the service is translated; locked before catalog.mu
	gone bool       // removed from the catalog; guarded by mu

	// read with mu or catalog.mu, written with both
	result *translate.Result // packed; unpacked with mu only

	// guarded by catalog.mu
	used      usage // by result; written with mu, too
	instances int
	serving   bool // its ServiceEntry owns its name, so its instances are published
	counted   bool // included in the count of services
	// unsent is the number of the cursor that must still send the endpoints
	// with names after sent, except those with a slot. If it is an earlier
	// cursor's, all were sent.
	unsent uint64
	sent   string
}

// slot is one resource name and its claims.
//
// An endpoint of a served service is implicit, without a slot, if it has no
// other claim and is either sent or covered by the service's unsent range. It
// is found by its name: the ServiceEntry's, a dash and a rest without dashes.
// Names of any other form always have a slot.
type slot struct {
	id     resourceID
	group  string  // slots of a group are sent together: the name of a ServiceEntry, for it and its instances
	claims []claim // the first one is served; empty: removed
	kept   int     // number of owners that cannot send this name
	dirty  uint64  // number of the cursor that must send it; an earlier cursor's: nothing to send
	known  bool    // while dirty: the client holds an earlier state
	told   bool    // the last message about it was a keep
	// contested reports more than one claim so far, so problems are listed.
	contested bool
}

// claim is one owner's resource under a name.
type claim struct {
	owner *service // nil: published
	exact bool     // the service's name is unchanged in the resource's name
	// bytes is an encoded istio.mcp.v1alpha1.Resource; immutable. Nil for an
	// endpoint, which is packed in the owner's result.
	bytes []byte
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
		leftOut:     newProblems(),
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
		if s.gone { // removed since the lookup
			s.mu.Unlock()
			continue
		}
		defer s.mu.Unlock()
		result, is := c.translator.Service(svc, instances, s.result), s.used
		if result != s.result {
			if s.result != nil {
				s.result.Unpack()
				defer s.result.Release()
			}
			is = usageOf(result)
			result.Pack(s.result)
			defer result.Release()
		}
		c.mu.Lock()
		defer c.mu.Unlock()
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

// refusedLocked reports whether a new state exceeds a limit, and lists that as
// a problem. The old state is then retained.
func (c *catalog) refusedLocked(was, is usage, id func() string) bool {
	var reason string
	switch l := c.limits; {
	case l.resources > 0 && is.resources > was.resources && c.used.resources+is.resources-was.resources > l.resources:
		reason = fmt.Sprintf("limits.resources_per_registry (%d)", l.resources)
	case l.services > 0 && is.services > was.services && c.used.services >= l.services:
		reason = fmt.Sprintf("limits.services_per_registry (%d)", l.services)
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
	c.used.services += is.services - was.services
	c.used.bytes += is.bytes - was.bytes
}

// service returns the service of a key, created if necessary.
func (c *catalog) service(key registry.Key) *service {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.services[key]
	if s == nil {
		s = &service{key: key}
		c.services[key] = s // counted with its first commit, in one message
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

// Publish implements [Publisher].
func (c *catalog) Publish(res *mcp.Resource) {
	id := resourceID{collection.OfBody(res.GetBody().GetTypeUrl()), res.GetMetadata().GetName()}
	enc, err := translate.Resource(res)
	if err == nil && !c.collections[id.collection] {
		err = fmt.Errorf("the adapter did not announce the collection %q; its author must add it to WithCollections", id.collection)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		// Retain the last good resource: stale beats empty.
		c.setProblemLocked(published{}, publishedProblem(id), err.Error())
		if c.publishedLocked(id) == (usage{}) {
			c.keepLocked(id, id)
		}
		return
	}
	c.setProblemLocked(published{}, publishedProblem(id), "")
	was, is := c.publishedLocked(id), usageOfPublished(id, enc.Resource)
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

// Withdraw implements [Publisher].
func (c *catalog) Withdraw(collection, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := resourceID{collection, name}
	c.setProblemLocked(published{}, publishedProblem(id), "")
	c.forgetRefusedLocked(id, publishedProblem(id))
	c.useLocked(c.publishedLocked(id), usage{})
	c.dropLocked(id, nil)
}

// forgetRefusedLocked clears the record that something was refused.
func (c *catalog) forgetRefusedLocked(owner any, problem string) {
	if c.refused {
		c.setProblemLocked(limit{}, problem, "")
	}
	c.releaseLocked(owner)
}

// maxKept bounds the names retained for what cannot be sent, of about 1 kB
// each. Beyond it, a listing removes nothing.
const maxKept = 20_000

// tooMany owns the names beyond maxKept.
type tooMany struct{}

// keepLocked records that the registry has a resource that cannot be sent, so
// the host must retain its copy from an earlier process.
func (c *catalog) keepLocked(owner any, id resourceID) {
	if translate.CheckName(id.name) != nil {
		id = resourceID{} // whatever its earlier name
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

// releaseLocked undoes keepLocked: the owner's resource is sent or removed.
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

func usageOfPublished(id resourceID, encoded []byte) usage {
	u := usage{resources: 1, bytes: uint64(len(encoded))}
	if id.collection == collection.ServiceEntry {
		u.services = 1
	}
	return u
}

// publishedLocked returns the usage of a published name.
func (c *catalog) publishedLocked(id resourceID) (u usage) {
	if sl := c.slots[id]; sl != nil {
		if i := sl.index(nil); i >= 0 {
			u = usageOfPublished(id, sl.claims[i].bytes)
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
		text = cmp.Or(clip.Text(redact(err.Error()), maxReasonBytes), "unknown error")
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

// Detail implements [Catalog].
func (c *catalog) Detail(text string) {
	text = clip.Text(redact(text), maxIDBytes)
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

// LeftOut implements [Catalog].
func (c *catalog) LeftOut(id, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setLeftOutLocked(adapter{}, id, reason)
}

// Heard implements [Catalog].
func (c *catalog) Heard() { c.heard.Store(time.Now().UnixNano()) }

// Sources of problems besides *service (findings of translate) and *slot (name
// conflicts).
type (
	adapter   struct{} // reported by the adapter
	published struct{} // published by the adapter
	limit     struct{} // refused because of a limit
)

func serviceProblem(key registry.Key) string { return "service " + key.String() }

func publishedProblem(id resourceID) string {
	return strings.TrimSpace("resource " + cmp.Or(id.collection, "of unknown kind") + " " + id.name)
}

func (c *catalog) setProblemLocked(source any, id, reason string) {
	c.problems.set(source, id, reason, func(id string) {
		if r := c.stream; r != nil {
			r.problems.changed(c.problems, id)
			r.wakeUp()
		}
	})
}

func (c *catalog) setLeftOutLocked(source any, id, reason string) {
	c.leftOut.set(source, id, reason, func(id string) {
		if r := c.stream; r != nil {
			r.leftOut.changed(c.leftOut, id)
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

// commitLocked replaces the resources of a service.
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
			c.dropLocked(resourceID{collection.ServiceEntry, was}, s) // drops the old instances too
		}
		s.result = result
		if is != "" {
			c.putLocked(resourceID{collection.ServiceEntry, is}, is, s, result.Entry.Resource)
		}
	case is != "":
		c.putLocked(resourceID{collection.ServiceEntry, is}, is, s, result.Entry.Resource)
		s.result = result
		if s.serving && result != old {
			c.diffLocked(s, is, old.Endpoints, result.Endpoints)
			c.idleLocked(result)
			if old.Rule != nil && result.Rule == nil {
				c.dropRuleLocked(s, old)
			}
			c.putRuleLocked(s, is)
		}
	default:
		s.result = result
	}
	c.findingsLocked(s, old.Problems, result.Problems, c.problems, c.setProblemLocked)
	c.findingsLocked(s, old.LeftOut, result.LeftOut, c.leftOut, c.setLeftOutLocked)
}

// idleLocked notes why instances whose removal is due take no traffic.
func (c *catalog) idleLocked(result *translate.Result) {
	for _, i := range result.Idle {
		sl := c.slots[resourceID{collection.WorkloadEntry, i.Name}]
		if c.stream != nil && sl != nil && sl.dirty == c.streams && len(sl.claims) == 0 {
			c.stream.idle[i.Name] = i
		}
	}
	result.Idle = nil
}

// putRuleLocked publishes the DestinationRule of a service, if it has one.
func (c *catalog) putRuleLocked(s *service, group string) {
	if r := s.result.Rule; r != nil {
		c.putLocked(resourceID{collection.DestinationRule, r.Name}, group, s, r.Resource)
	}
}

// dropRuleLocked withdraws the former DestinationRule of a service, if any.
func (c *catalog) dropRuleLocked(s *service, had *translate.Result) {
	if had.Rule != nil {
		c.dropLocked(resourceID{collection.DestinationRule, had.Rule.Name}, s)
	}
}

// diffLocked publishes the difference between two lists of a service's
// instances, both sorted by name.
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
			c.dropEndpointLocked(s, group, was[0].Name)
			was = was[1:]
			continue
		}
		if order > 0 || !sameBytes(was[0].Resource, is[0].Resource) {
			c.putEndpointLocked(s, group, is[0], order == 0)
		}
		if order == 0 {
			was = was[1:]
		}
		is = is[1:]
	}
}

// regular reports whether an endpoint's name identifies its service.
func regular(entry, name string) bool {
	rest, ok := strings.CutPrefix(name, entry)
	return ok && strings.LastIndexByte(rest, '-') == 0
}

// coversLocked reports whether the stream still has to send all of the service,
// including the named endpoint.
func (c *catalog) coversLocked(s *service, name string) bool {
	return c.stream != nil && s.unsent == c.streams && name > s.sent
}

// implicitLocked returns the service with an implicit endpoint of the name, or
// nil.
func (c *catalog) implicitLocked(name string) *service {
	entry := c.slots[resourceID{collection.ServiceEntry, name[:max(0, strings.LastIndexByte(name, '-'))]}]
	if entry == nil || len(entry.claims) == 0 {
		return nil
	}
	s := entry.claims[0].owner
	if s == nil || !s.serving || !regular(entry.id.name, name) || endpoint(s.result, name) == nil {
		return nil
	}
	return s
}

// endpoint returns the encoded endpoint of the name, or nil.
func endpoint(r *translate.Result, name string) []byte {
	for e := range r.Each() {
		if e.Name >= name {
			if e.Name == name {
				return e.Resource
			}
			break
		}
	}
	return nil
}

// putEndpointLocked adds or replaces an endpoint of a served service.
func (c *catalog) putEndpointLocked(s *service, group string, e translate.Encoded, has bool) {
	id := resourceID{collection.WorkloadEntry, e.Name}
	switch {
	case c.slots[id] != nil || !regular(group, e.Name):
		c.putLocked(id, group, s, e.Resource)
	case c.stream != nil && !c.coversLocked(s, e.Name):
		sl := &slot{id: id, group: group, claims: []claim{{owner: s, exact: s.isExact(e.Name), bytes: e.Resource}}}
		c.slots[id] = sl
		c.markLocked(sl, has)
	}
}

// dropEndpointLocked removes an endpoint of a current or former served service.
func (c *catalog) dropEndpointLocked(s *service, group, name string) {
	id := resourceID{collection.WorkloadEntry, name}
	switch {
	case c.slots[id] != nil || !regular(group, name):
		c.dropLocked(id, s)
	case c.stream != nil && !c.coversLocked(s, name):
		sl := &slot{id: id, group: group}
		c.slots[id] = sl
		c.markLocked(sl, true)
	}
}

// serveLocked publishes the endpoints of a service whose ServiceEntry owns its
// name.
func (c *catalog) serveLocked(s *service, entry string) {
	s.serving = true
	if c.stream != nil {
		c.stream.addAllLocked(s, entry)
	}
	for e := range s.result.Each() {
		id := resourceID{collection.WorkloadEntry, e.Name}
		if c.slots[id] != nil || !regular(entry, e.Name) {
			c.putLocked(id, entry, s, nil)
		}
	}
	c.putRuleLocked(s, entry)
}

// unserveLocked undoes serveLocked.
func (c *catalog) unserveLocked(s *service, entry string) {
	s.serving = false
	for e := range s.result.Each() {
		c.dropEndpointLocked(s, entry, e.Name)
	}
	c.dropRuleLocked(s, s.result)
	s.unsent = 0
}

// findingsLocked lists the findings of translate in a list, by set.
func (c *catalog) findingsLocked(s *service, was, is []translate.Problem, in *problems, set func(source any, id, reason string)) {
	if slices.Equal(was, is) && (len(is) == 0 || !in.wants()) {
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
			set(s, p.ID, "")
		}
	}
	for id, reason := range reasons {
		set(s, id, reason)
	}
}

// putLocked adds or replaces an owner's claim to a name.
func (c *catalog) putLocked(id resourceID, group string, owner *service, b []byte) {
	sl := c.slotLocked(id, group)
	if i := sl.index(owner); i >= 0 {
		changed := owner != nil && id.collection == collection.WorkloadEntry || !sameBytes(sl.claims[i].bytes, b)
		sl.claims[i].bytes = b
		if i == 0 && changed {
			c.markLocked(sl, true)
		}
		return
	}
	before := sl.winner()
	cl := claim{owner: owner, bytes: b}
	if owner != nil {
		cl.exact = owner.isExact(id.name)
	}
	i, _ := slices.BinarySearchFunc(sl.claims, cl, precedence)
	sl.claims = slices.Insert(sl.claims, i, cl)
	if i == 0 {
		sl.group = group
	}
	c.settleLocked(sl, before)
}

// isExact reports whether name contains the service's name unchanged.
func (s *service) isExact(name string) bool { return strings.Contains(name, s.key.Name) }

// slotLocked returns the slot of a name, created if necessary.
func (c *catalog) slotLocked(id resourceID, group string) *slot {
	sl := c.slots[id]
	if sl != nil {
		return sl
	}
	sl = &slot{id: id, group: group}
	if id.collection == collection.WorkloadEntry {
		if s := c.implicitLocked(id.name); s != nil {
			sl.group = s.result.Entry.Name
			sl.claims = []claim{{owner: s, exact: s.isExact(id.name)}}
			if c.coversLocked(s, id.name) {
				c.markLocked(sl, false)
			}
		}
	}
	c.slots[id] = sl
	return sl
}

// tidyLocked removes a slot that has nothing to send and either has no claims
// or can be implicit.
func (c *catalog) tidyLocked(sl *slot) {
	if sl.kept > 0 || c.stream != nil && sl.dirty == c.streams {
		return
	}
	switch len(sl.claims) {
	case 0:
		delete(c.slots, sl.id)
	case 1:
		s := sl.claims[0].owner
		if s == nil || sl.id.collection != collection.WorkloadEntry || !s.serving {
			return
		}
		sl.claims[0].bytes = nil
		if regular(s.result.Entry.Name, sl.id.name) && !c.coversLocked(s, sl.id.name) {
			delete(c.slots, sl.id)
		}
	}
}

// dropLocked removes an owner's claim to a name, if any.
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

// settleLocked applies a change of the claims to a name.
func (c *catalog) settleLocked(sl *slot, before *claim) {
	now := sl.winner()
	switch {
	case before == nil && now == nil:
	case before == nil || now == nil:
		c.markLocked(sl, before != nil)
	case !bytes.Equal(before.bytes, now.bytes) || before.owner != now.owner:
		c.markLocked(sl, true)
	}

	// Instances are published together with their ServiceEntry.
	if sl.id.collection == collection.ServiceEntry {
		if before != nil && before.owner != nil && (now == nil || now.owner != before.owner) {
			c.unserveLocked(before.owner, sl.id.name)
		}
		if now != nil && now.owner != nil && !now.owner.serving {
			c.serveLocked(now.owner, sl.id.name)
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

// markLocked schedules the slot for sending. known reports whether an
// up-to-date client holds a state of it.
func (c *catalog) markLocked(sl *slot, known bool) {
	if c.stream != nil {
		delete(c.stream.idle, sl.id.name)
	}
	if c.stream == nil || sl.dirty == c.streams {
		return
	}
	sl.dirty, sl.known = c.streams, known
	c.stream.addLocked(sl)
}

// service returns the name of the ServiceEntry that the slot's resource belongs
// to (its own name for a ServiceEntry), or "" for a published resource.
func (sl *slot) service() string {
	if len(sl.claims) == 0 || sl.claims[0].owner == nil || sl.id.collection == collection.DestinationRule {
		return ""
	}
	return sl.claims[0].owner.result.Entry.Name
}

func (sl *slot) index(owner *service) int {
	return slices.IndexFunc(sl.claims, func(cl claim) bool { return cl.owner == owner })
}

// winner returns a copy of the served claim, or nil.
func (sl *slot) winner() *claim {
	if len(sl.claims) == 0 {
		return nil
	}
	return new(sl.claims[0])
}

// loser returns the id of the problem that an owner does not get the name.
func (sl *slot) loser(owner *service) string {
	if owner == nil {
		return publishedProblem(sl.id)
	}
	return serviceProblem(owner.key)
}

// reason explains why a claim other than the first is not served.
func (sl *slot) reason() string {
	kind := sl.id.collection[strings.LastIndexByte(sl.id.collection, '/')+1:]
	if w := sl.claims[0].owner; w != nil {
		return fmt.Sprintf("not served: the name %q of its %s is taken by service %q; rename one of the two, or tell them apart with translate.name",
			sl.id.name, kind, w.key)
	}
	return fmt.Sprintf("not served: the name %q of its %s is taken by a resource that is published as it is; rename one of the two",
		sl.id.name, kind)
}

// precedence orders claims: the first is served.
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

// compareKeys orders keys part by part, widest first.
func compareKeys(a, b registry.Key) int {
	return cmp.Or(
		strings.Compare(a.Peer, b.Peer),
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

// bytesLocked returns the served resource of a slot that has claims.
func (sl *slot) bytesLocked() []byte {
	if cl := sl.claims[0]; cl.bytes == nil && cl.owner != nil {
		return endpoint(cl.owner.result, sl.id.name)
	}
	return sl.claims[0].bytes
}

// sameBytes is bytes.Equal with a fast path for shared memory, the case of
// unchanged instances.
func sameBytes(a, b []byte) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || bytes.Equal(a, b))
}

// cursor holds what one stream still has to send. Its fields are guarded by the
// catalog's mu.
type cursor struct {
	c      *catalog
	number uint64
	// queue is the send order of groups. Its length is bounded by the number of
	// resources.
	queue    []*group
	waiting  map[string]*group         // groups in queue that are entirely unsent, by name
	idle     map[string]translate.Idle // of endpoints whose removal is due
	problems texts
	leftOut  texts
	status   bool
	counts   bool
	heard    int64 // last value of catalog.heard that was sent
	// changed is when the oldest change in queue was made, zero without one.
	changed time.Time
	// wake, of capacity one, signals that there is something to send.
	wake chan struct{}
}

// texts is what a stream still has to send of a list of problems.
type texts struct {
	unsent map[string]struct{} // ids whose text is unsent
	told   map[string]struct{} // ids of which the client has a text
}

// textsOf returns the texts of a stream that has sent nothing.
func textsOf(p *problems) texts {
	t := texts{unsent: make(map[string]struct{}), told: make(map[string]struct{})}
	p.each(func(id string) { t.unsent[id] = struct{}{} })
	return t
}

// changed schedules the text of an id for sending.
func (t *texts) changed(p *problems, id string) {
	t.unsent[id] = struct{}{}
	if _, told := t.told[id]; !told && !p.shows(id) {
		delete(t.unsent, id) // removed before it was sent
	}
}

// next removes an unsent id and returns it with its text. It returns nil if
// there is none.
func (t *texts) next(p *problems) *pluginv1.Problem {
	for id := range t.unsent { // any of them
		delete(t.unsent, id)
		out := &pluginv1.Problem{Id: id, Reason: p.text(id)}
		if out.Reason == "" {
			delete(t.told, id)
		} else {
			t.told[id] = struct{}{}
		}
		return out
	}
	return nil
}

// group is a set of slots that are sent together, or the mark that ends the
// first full listing.
type group struct {
	name   string
	slots  []*slot
	all    *service // its unsent endpoints follow; may be nil
	synced bool
	// relisted reports that the client was told to keep the service of that
	// name: once the group is sent, the rest of what it holds is removed.
	relisted bool
}

// errSuperseded ends a stream when a newer one begins.
var errSuperseded = errors.New("a newer stream took over")

// read starts a new stream, which sends everything, and ends the previous one.
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
		idle:     make(map[string]translate.Idle),
		problems: textsOf(c.problems),
		leftOut:  textsOf(c.leftOut),
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
		if c.tidyLocked(sl); c.slots[id] == nil {
			continue
		}
		c.markLocked(sl, false)
		if sl.id.collection == collection.ServiceEntry && len(sl.claims) > 0 && sl.claims[0].owner != nil {
			r.addAllLocked(sl.claims[0].owner, sl.id.name)
		}
	}
	if c.synced {
		r.enqueueLocked(&group{synced: true})
	}
	r.wakeUp()
	return r
}

func (r *cursor) wakeUp() {
	select {
	case r.wake <- struct{}{}:
	default: // already signaled
	}
}

// groupLocked returns the entirely unsent group of a name, created if
// necessary.
func (r *cursor) groupLocked(name string) *group {
	g := r.waiting[name]
	if g == nil {
		g = &group{name: name}
		r.waiting[name] = g
		r.enqueueLocked(g)
	}
	return g
}

// addAllLocked schedules all endpoints of a service for sending.
func (r *cursor) addAllLocked(s *service, entry string) {
	s.unsent, s.sent = r.number, ""
	r.groupLocked(entry).all = s
}

func (r *cursor) addLocked(sl *slot) {
	if r.changed.IsZero() {
		r.changed = time.Now()
	}
	g := r.groupLocked(sl.group)
	g.slots = append(g.slots, sl)
	// A ServiceEntry precedes its instances in case the group spans batches.
	if last := len(g.slots) - 1; sl.id.collection == collection.ServiceEntry {
		g.slots[0], g.slots[last] = g.slots[last], g.slots[0]
	}
}

func (r *cursor) enqueueLocked(g *group) {
	r.queue = append(r.queue, g)
	r.wakeUp()
}

// close ends the stream and releases its cursor.
func (r *cursor) close() {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if r.c.stream == r {
		r.c.stream = nil
	}
}

// next returns the next batch, or nil if the client is up to date. It does not
// block. The only error is errSuperseded.
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
		// A slot of this group that changes from here on is queued again at the
		// end.
		if r.waiting[g.name] == g {
			delete(r.waiting, g.name)
		}
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
				size += upsert(resp, sl.bytesLocked(), service)
				n++
				g.relisted = g.relisted || sl.told && sl.id == (resourceID{collection.ServiceEntry, service})
				sl.told = false
			case sl.known, sl.told && sl.kept == 0 && sl.id.name != "":
				idle := r.idle[sl.id.name]
				delete(r.idle, sl.id.name)
				resp.Removals = append(resp.Removals, &pluginv1.Removal{Collection: sl.id.collection, Name: sl.id.name, Health: idle.Health, Reason: idle.Reason})
				size += len(sl.id.name) + len(sl.id.collection) + len(idle.Reason)
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
		if s := g.all; s != nil && len(g.slots) == 0 && s.unsent == r.number {
			done := true
			for e := range s.result.Each() {
				if e.Name <= s.sent {
					continue
				}
				if n >= wire.BatchResources || size >= wire.BatchBytes {
					done = false
					break
				}
				s.sent = e.Name
				if sl := c.slots[resourceID{collection.WorkloadEntry, e.Name}]; sl != nil {
					c.tidyLocked(sl)
					continue
				}
				size += upsert(resp, e.Resource, g.name)
				n++
			}
			if !done {
				break
			}
			s.unsent, s.sent = 0, ""
		}
		if len(g.slots) == 0 {
			r.popLocked()
			switch later := r.waiting[g.name]; {
			case !g.relisted:
			case later != nil: // part of it changed meanwhile
				later.relisted = true
			default:
				resp.Relisted = append(resp.Relisted, g.name)
				size += len(g.name)
			}
		}
	}
	for _, l := range []struct {
		unsent *texts
		of     *problems
		to     *[]*pluginv1.Problem
	}{{&r.problems, c.problems, &resp.Problems}, {&r.leftOut, c.leftOut, &resp.LeftOut}} {
		for n < wire.BatchResources && size < wire.BatchBytes {
			p := l.unsent.next(l.of)
			if p == nil {
				break
			}
			*l.to = append(*l.to, p)
			size += len(p.Id) + len(p.Reason)
			n++
		}
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
	if len(resp.Upserts)+len(resp.Removals) > 0 && !r.changed.IsZero() {
		resp.Changed = timestamppb.New(r.changed)
	}
	if len(r.queue) == 0 {
		r.changed = time.Time{}
	}
	resp.LastHeard = r.lastHeard()
	resp.Services, resp.Instances = uint64(len(c.services)), uint64(c.instances)
	return resp, nil
}

// upsert adds a resource, truncated to what a host reads, and returns its size.
func upsert(resp *pluginv1.WatchResponse, b []byte, service string) int {
	up := &pluginv1.Upsert{Resource: b[:min(len(b), wire.MaxResource+1)], Service: service}
	resp.Upserts = append(resp.Upserts, up)
	return len(up.Resource) + len(up.Service)
}

// lastHeard returns the time of the last contact with the registry, or nil if
// it was sent.
func (r *cursor) lastHeard() *timestamppb.Timestamp {
	heard := r.c.heard.Load()
	if heard == r.heard {
		return nil
	}
	r.heard = heard
	return timestamppb.New(time.Unix(0, heard))
}

// postponeLocked moves an instance to the group of its ServiceEntry if that is
// unsent. This happens only if an instance takes over the name of a published
// resource.
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
	if r.queue = r.queue[1:]; len(r.queue) == 0 && len(r.waiting) == 0 {
		// Release the memory of a full listing; later queues are small.
		r.queue, r.waiting = nil, make(map[string]*group)
	}
}

// fits reports whether the group is within the limits of count and bytes.
func (g *group) fits(number, size int) bool {
	number -= len(g.slots)
	if s := g.all; s != nil && s.used.resources > 0 {
		number -= int(s.used.resources) - 1 //nolint:gosec // what is in memory fits
		size -= int(s.used.bytes)           //nolint:gosec // likewise
	}
	if number < 0 {
		return false
	}
	for _, sl := range g.slots {
		if len(sl.claims) > 0 {
			size -= min(len(sl.claims[0].bytes), wire.MaxResource+1)
		}
	}
	return size >= 0
}
