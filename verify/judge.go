package verify

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Guarantee is the number of a guarantee in docs/guarantees.md.
type Guarantee int

// The guarantees.
const (
	NoRemovalWithoutCause Guarantee = iota + 1
	NoStaleOverwrite
	NothingInvented
	Convergence
	EqualVersionsEqualBytes
	HoldBeforeFirstListing
	OneInFlight
	Nonces
	WellFormed
	NoNoise
	OnlyWhatIsLacking
)

var guarantees = map[Guarantee]string{
	NoRemovalWithoutCause:   "no removal without cause",
	NoStaleOverwrite:        "no stale overwrite",
	NothingInvented:         "nothing invented",
	Convergence:             "eventual convergence",
	EqualVersionsEqualBytes: "equal versions mean equal bytes",
	HoldBeforeFirstListing:  "hold before the first listing",
	OneInFlight:             "one response in flight",
	Nonces:                  "nonces and types",
	WellFormed:              "well-formed responses",
	NoNoise:                 "no noise",
	OnlyWhatIsLacking:       "only what is lacking",
}

// String returns the title of the guarantee.
func (g Guarantee) String() string { return guarantees[g] }

// Violation is a broken guarantee.
type Violation struct {
	Guarantee Guarantee
	Event     int // number of the event, from 1
	Time      time.Time
	Stream    int // 0 if it is of no single stream
	Text      string
}

// String returns one line.
func (v Violation) String() string {
	return fmt.Sprintf("event %d, %s, stream %d: guarantee %d, %v: %s", v.Event, v.Time.UTC().Format(time.RFC3339Nano), v.Stream, int(v.Guarantee), v.Guarantee, v.Text)
}

// maxPerEvent bounds the violations of one guarantee that one event yields.
const maxPerEvent = 5

// Judge judges events in the order of time. It belongs to one goroutine.
type Judge struct {
	// PutsBack allows that a sink gets again what it was told is gone, as it
	// was before: the bridge has protect and puts back what went of a service
	// before it paused the removal.
	PutsBack bool

	n      int // events
	now    time.Time
	found  []Violation // of the current event
	counts map[Guarantee]int

	streams map[int]*stream
	truth   map[key]*fact
	told    map[string]bool // collections and namespaces that the truth speaks of
	started time.Time       // Since of the newest start, zero before
	starts  int             // number of starts

	// What a name had under a version, and which version a content had, by
	// form, type and name; and what a full response had, by form, type and
	// version.
	under    map[string]known
	versions map[string]string
	sets     map[string]string

	// Responses and Resources count what was judged.
	Responses, Resources int
}

// New returns a judge that has seen nothing.
func New() *Judge {
	return &Judge{
		counts: map[Guarantee]int{}, streams: map[int]*stream{}, truth: map[key]*fact{}, told: map[string]bool{},
		under: map[string]known{}, versions: map[string]string{}, sets: map[string]string{},
	}
}

// known is what a sink may report to hold.
type known struct {
	*Resource
	starts int // when the stream was opened on which it was sent
}

// key identifies what can come and go: a resource, or an endpoint of a
// ServiceEntry.
type key struct{ collection, name, address string }

// space is the collection and the namespace, of which a truth knows all names.
func (k key) space() string {
	namespace, _, _ := strings.Cut(k.name, "/")
	return k.collection + " " + namespace
}

func (k key) String() string {
	if k.address != "" {
		return k.name + " " + k.address
	}
	return k.collection[strings.LastIndex(k.collection, "/")+1:] + " " + k.name
}

// maxKnown bounds the versions that are remembered to be compared with later
// ones.
const maxKnown = 1 << 18

// remembered bounds the changes of one key that are kept.
const remembered = 256

// fact is what the truth says of a key.
type fact struct {
	instance  bool // of a service, as a WorkloadEntry
	present   bool
	since     time.Time // it is present since
	revision  uint64    // of the newest change
	absent    []uint64  // revisions of removals, ascending
	revisions []uint64  // the others, ascending
}

func (f *fact) set(revision uint64, absent bool, now time.Time) {
	switch {
	case absent:
		f.absent = append(f.absent, revision)
	case !f.present:
		f.since = now
		fallthrough
	default:
		f.revisions = append(f.revisions, revision)
	}
	f.present, f.revision = !absent, revision
	if len(f.absent) > 2*remembered {
		f.absent = slices.Delete(f.absent, 0, remembered)
	}
	if len(f.revisions) > 2*remembered {
		f.revisions = slices.Delete(f.revisions, 0, remembered)
	}
}

// removedAfter returns the first removal after a revision, 0 if there is none.
func (f *fact) removedAfter(revision uint64) uint64 {
	i, _ := slices.BinarySearch(f.absent, revision+1)
	if i == len(f.absent) {
		return 0
	}
	return f.absent[i]
}

// said reports whether the registry had this revision, or whether that is no
// longer known.
func (f *fact) said(revision uint64) bool {
	_, found := slices.BinarySearch(f.revisions, revision)
	return found || len(f.revisions) >= remembered && revision < f.revisions[0]
}

// stream is one stream.
type stream struct {
	id   int
	form string
	mcp  bool
	// workload is the shape in which an instance is a resource of its own, and
	// no endpoint of its service.
	workload   bool
	namespaces []string // that its view has; nil is all
	starts     int      // of bridges before it was opened
	subs       map[string]*subscription
}

// subscription is one type of a stream.
type subscription struct {
	collection string
	names      map[string]bool // nil for all; false once they are dropped
	resumed    map[string]string
	nonces     map[string]bool
	waiting    string // the nonce in flight
	responses  int
	version    string // of the newest full response
	have       map[string]*Resource
	held       map[key]uint64 // revision, or a lower bound of it
	floor      map[key]uint64 // the newest removal that was sent
	last       map[key]uint64 // held when that was sent
	before     map[key]bool   // held from before the bridge started
}

// resume notes what the sink reports to hold. Of what it has from before the
// bridge started, the bridge may have an older revision on disk.
func (u *subscription) resume(k key, revision uint64, before bool) {
	if before {
		u.before[k], revision = true, 0
	}
	u.held[k] = revision
}

// legacyCollections are those of the legacy protocol that the truth speaks of.
var legacyCollections = map[string]string{
	"istio/networking/v1alpha3/serviceentries":           "networking.istio.io/ServiceEntry",
	"istio/networking/v1alpha3/synthetic/serviceentries": "networking.istio.io/ServiceEntry",
	"istio/networking/v1alpha3/workloadentries":          "networking.istio.io/WorkloadEntry",
	"istio/networking/v1beta1/workloadentries":           "networking.istio.io/WorkloadEntry",
}

func (s *stream) collectionOf(url string) string {
	if !s.mcp {
		return collection.OfTypeURL(url)
	}
	if coll, ok := legacyCollections[url]; ok {
		return coll
	}
	return url
}

// Add judges the next event and returns what it violates.
func (j *Judge) Add(e *Event) []Violation {
	j.n++
	j.now, j.found = e.Time, nil
	clear(j.counts)
	switch e.Kind {
	case Open:
		j.streams[e.Stream] = &stream{
			id: e.Stream, form: e.Protocol + " " + e.Shape + " " + e.Form, mcp: e.Protocol == "mcp", starts: j.starts, subs: map[string]*subscription{},
			namespaces: e.Namespaces,
			workload:   e.Shape == "workload" || e.Shape == "" && e.Protocol == "delta",
		}
	case End:
		delete(j.streams, e.Stream)
	case Request:
		j.request(e)
	case Response:
		j.response(e)
	case Truth:
		j.tell(e)
	case Start:
		j.starts++
		if j.started = e.Since; j.started.IsZero() {
			j.started = e.Time
		}
	case Settled:
		j.settled(e.Names)
	default:
		j.fail(WellFormed, e.Stream, "there is no event %q", e.Kind)
	}
	return j.found
}

// Events returns the number of events.
func (j *Judge) Events() int { return j.n }

func (j *Judge) fail(g Guarantee, stream int, format string, args ...any) {
	if j.counts[g]++; j.counts[g] > maxPerEvent {
		return
	}
	j.found = append(j.found, Violation{g, j.n, j.now, stream, fmt.Sprintf(format, args...)})
}

func (j *Judge) tell(e *Event) {
	keys := []key{{e.Collection, e.Name, ""}}
	if e.Service != "" {
		keys = append(keys, key{serviceEntry, e.Service, e.Address})
	}
	for _, k := range keys {
		j.told[k.space()] = true
		f := j.truth[k]
		if f == nil {
			f = new(fact)
			j.truth[k] = f
		}
		f.instance = e.Service != "" && k.address == ""
		f.set(e.Revision, e.Absent, e.Time)
	}
}

const serviceEntry = "networking.istio.io/ServiceEntry"

func (j *Judge) request(e *Event) {
	s := j.streams[e.Stream]
	if s == nil {
		j.fail(WellFormed, e.Stream, "a request on a stream that is not open")
		return
	}
	u := s.subs[e.Type]
	if u == nil {
		u = &subscription{
			collection: s.collectionOf(e.Type), nonces: map[string]bool{}, have: map[string]*Resource{},
			held: map[key]uint64{}, floor: map[key]uint64{}, last: map[key]uint64{}, before: map[key]bool{}, resumed: maps.Clone(e.Versions),
		}
		// What the sink reports to hold can be removed from it.
		for name, version := range e.Versions {
			r, ok := j.under[s.form+" "+e.Type+" "+name+" "+version]
			if !ok {
				r.Resource = &Resource{Name: name, Version: version}
			}
			u.have[name] = r.Resource
			u.resume(key{u.collection, name, ""}, r.Revision, r.starts < j.starts)
			for _, p := range r.Endpoints {
				u.resume(key{u.collection, name, p.Address}, p.Revision, r.starts < j.starts)
			}
		}
		s.subs[e.Type] = u
	}
	j.ask(u, e)
	if e.Nonce != "" && e.Nonce == u.waiting {
		u.waiting = ""
	}
}

// ask notes the names that a request subscribes to, and drops. What is dropped
// the sink has no more.
func (j *Judge) ask(u *subscription, e *Event) {
	if slices.Contains(e.Names, "*") {
		u.names = nil
		return
	}
	if u.names == nil && len(e.Names) > 0 {
		u.names = map[string]bool{}
	}
	for _, name := range e.Names {
		u.names[name] = true
	}
	for _, name := range e.Dropped {
		if !u.names[name] {
			continue
		}
		u.names[name] = false
		delete(u.have, name)
		for _, of := range []map[key]uint64{u.held, u.floor} {
			maps.DeleteFunc(of, func(k key, _ uint64) bool { return k.name == name })
		}
	}
}

// asked returns what of a response the sink subscribes to. What was dropped
// may be on its way.
func (j *Judge) asked(s *stream, u *subscription, e *Event) *Event {
	of := *e
	of.Resources, of.Removed = nil, nil
	for _, r := range e.Resources {
		if wanted, ever := u.names[r.Name]; wanted {
			of.Resources = append(of.Resources, r)
		} else if !ever {
			j.fail(Nonces, s.id, "%s %q, which was not asked for", e.Type, r.Name)
		}
	}
	for _, name := range e.Removed {
		wanted, ever := u.names[name]
		switch {
		case !ever:
			j.fail(Nonces, s.id, "%s %q is removed, which was not asked for", e.Type, name)
		case !wanted:
			continue
		case u.have[name] == nil:
			j.unknown(s, u, name)
		}
		of.Removed = append(of.Removed, name)
	}
	return &of
}

// unknown judges that there is nothing of a name that a sink asked for.
func (j *Judge) unknown(s *stream, u *subscription, name string) {
	k := key{u.collection, name, ""}
	if f := j.truth[k]; f != nil && f.present && !j.started.IsZero() && f.since.Before(j.started) && !s.lacks(k, f) {
		j.fail(HoldBeforeFirstListing, s.id, "%v is answered as missing; the registry has it since %v", k, f.since.UTC().Format(time.RFC3339Nano))
	}
}

func (j *Judge) response(e *Event) {
	j.Responses++
	j.Resources += len(e.Resources)
	s := j.streams[e.Stream]
	if s == nil || s.subs[e.Type] == nil {
		j.fail(Nonces, e.Stream, "a response of type %q, which was not asked for", e.Type)
		return
	}
	u := s.subs[e.Type]
	if u.waiting != "" {
		j.fail(OneInFlight, s.id, "%s: response %q, and %q is not answered", e.Type, e.Nonce, u.waiting)
	}
	if e.Nonce == "" || u.nonces[e.Nonce] {
		j.fail(Nonces, s.id, "%s: the nonce %q is empty or was used before", e.Type, e.Nonce)
	}
	u.nonces[e.Nonce], u.waiting = true, e.Nonce
	u.responses++
	j.wellFormed(s, e)
	if u.names == nil {
		j.noise(s, u, e)
	}
	j.compare(s, e)
	if u.names != nil && e.Incremental {
		e = j.asked(s, u, e)
	}
	now := u.have
	if !e.Incremental {
		now = make(map[string]*Resource, len(e.Resources))
	}
	for i := range e.Resources {
		r := &e.Resources[i]
		was := u.have[r.Name]
		now[r.Name] = r
		j.served(s, u, r, was)
	}
	gone := e.Removed
	if !e.Incremental {
		gone = nil
		for name := range u.have {
			if now[name] == nil {
				gone = append(gone, name)
			}
		}
		slices.Sort(gone)
	}
	for _, name := range gone {
		if was := u.have[name]; was != nil {
			j.gone(s, u, was)
		}
		delete(now, name)
	}
	u.have = now
	if u.names == nil {
		j.complete(s, u, e)
		u.resumed = nil
	}
}

// wellFormed judges what can be seen without anything else.
func (j *Judge) wellFormed(s *stream, e *Event) {
	seen := make(map[string]bool, len(e.Resources))
	for i := range e.Resources {
		r := &e.Resources[i]
		namespace, name, ok := strings.Cut(r.Name, "/")
		switch {
		case r.Invalid != "":
			j.fail(WellFormed, s.id, "%s %q: %s", e.Type, r.Name, r.Invalid)
		case !ok || namespace == "" || name == "":
			j.fail(WellFormed, s.id, "%s: the name %q is not NAMESPACE/NAME", e.Type, r.Name)
		case seen[r.Name]:
			j.fail(WellFormed, s.id, "%s %q is there twice", e.Type, r.Name)
		}
		seen[r.Name] = true
		addresses := make(map[string]bool, len(r.Endpoints))
		for _, p := range r.Endpoints {
			if addresses[p.Address] {
				j.fail(WellFormed, s.id, "%s %q has the endpoint %s twice", e.Type, r.Name, p.Address)
			}
			addresses[p.Address] = true
		}
	}
	removed := make(map[string]bool, len(e.Removed))
	for _, name := range e.Removed {
		if seen[name] || removed[name] {
			j.fail(WellFormed, s.id, "%s %q is removed twice, or set and removed", e.Type, name)
		}
		removed[name] = true
	}
}

// noise judges whether the response had to be sent.
func (j *Judge) noise(s *stream, u *subscription, e *Event) {
	for i := range e.Resources {
		r := &e.Resources[i]
		if v, ok := u.resumed[r.Name]; ok && v != "" && v == r.Version {
			j.fail(OnlyWhatIsLacking, s.id, "%s %q: the sink has version %s", e.Type, r.Name, v)
		}
		// Without a revision, and of a service whose endpoints come and go, it
		// may have been different in between; and what is put back was gone.
		told := r.Revision != 0 && (s.workload || u.collection != serviceEntry)
		if f := j.truth[key{u.collection, r.Name, ""}]; j.PutsBack && f != nil && f.removedAfter(r.Revision) != 0 {
			told = false
		}
		if was := u.have[r.Name]; e.Incremental && u.responses > 1 && told && was != nil && was.Sum == r.Sum {
			j.fail(NoNoise, s.id, "%s %q is sent again as it is", e.Type, r.Name)
		}
	}
	switch {
	case u.responses == 1:
	case e.Incremental && len(e.Resources)+len(e.Removed) == 0:
		j.fail(NoNoise, s.id, "%s: response %q is empty", e.Type, e.Nonce)
	case !e.Incremental && !s.mcp && e.Version == u.version:
		j.fail(NoNoise, s.id, "%s: response %q repeats version %s", e.Type, e.Nonce, e.Version)
	}
	if !e.Incremental {
		u.version = e.Version
	}
}

// compare judges versions against all that was sent before, to whomever.
func (j *Judge) compare(s *stream, e *Event) {
	if len(j.under) > maxKnown {
		clear(j.under)
		clear(j.versions)
		clear(j.sets)
	}
	var set []string
	for i := range e.Resources {
		r := &e.Resources[i]
		set = append(set, r.Name+" "+r.Sum)
		if r.Version == "" || r.Sum == "" {
			continue
		}
		name := s.form + " " + e.Type + " " + r.Name + " "
		if was, ok := j.under[name+r.Version]; ok && was.Sum != r.Sum {
			j.fail(EqualVersionsEqualBytes, s.id, "%s %q: version %s had the bytes %s and has %s", e.Type, r.Name, r.Version, was.Sum, r.Sum)
		}
		// A copy, since a pointer would keep the whole response alive.
		if was := j.under[name+r.Version]; was.Resource == nil || was.Sum != r.Sum || was.starts != s.starts {
			j.under[name+r.Version] = known{new(*r), s.starts}
		}
		// The version of a ServiceEntry with endpoints depends on the instances
		// that they are of, which cannot be seen.
		if was, ok := j.versions[name+r.Content]; ok && was != r.Version && len(r.Endpoints) == 0 {
			j.fail(EqualVersionsEqualBytes, s.id, "%s %q: the same content had version %s and has %s", e.Type, r.Name, was, r.Version)
		}
		j.versions[name+r.Content] = r.Version
	}
	if e.Incremental || e.Version == "" || s.mcp {
		return
	}
	slices.Sort(set)
	all, name := sum([]byte(strings.Join(set, "\n"))), s.form+" "+strings.Join(s.namespaces, ",")+" "+e.Type+" "
	if was, ok := j.sets[name+e.Version]; ok && was != all {
		j.fail(EqualVersionsEqualBytes, s.id, "%s: version %s stands for two collections", e.Type, e.Version)
	}
	j.sets[name+e.Version] = all
}

// served judges what a resource says, and what of it is gone.
func (j *Judge) served(s *stream, u *subscription, r, was *Resource) {
	j.present(s, u, key{u.collection, r.Name, ""}, r.Revision)
	now := make(map[string]bool, len(r.Endpoints))
	for _, p := range r.Endpoints {
		now[p.Address] = true
		j.present(s, u, key{u.collection, r.Name, p.Address}, p.Revision)
	}
	if was == nil {
		return
	}
	for _, p := range was.Endpoints {
		if !now[p.Address] {
			j.absent(s, u, key{u.collection, r.Name, p.Address})
		}
	}
}

// gone judges the removal of a resource.
func (j *Judge) gone(s *stream, u *subscription, was *Resource) {
	j.absent(s, u, key{u.collection, was.Name, ""})
	for _, p := range was.Endpoints {
		j.absent(s, u, key{u.collection, was.Name, p.Address})
	}
}

func (j *Judge) present(s *stream, u *subscription, k key, revision uint64) {
	if s.hides(k) {
		j.fail(NothingInvented, s.id, "%v: the view of the stream is of %v", k, s.namespaces)
	}
	if last, gone := u.last[k]; j.PutsBack && gone && revision >= last {
		u.floor[k] = 0
	}
	delete(u.last, k)
	f, floor := j.truth[k], max(u.held[k], u.floor[k])
	u.held[k] = max(revision, floor)
	delete(u.before, k)
	if f == nil {
		if j.told[k.space()] {
			j.fail(NothingInvented, s.id, "%v: no registry ever had it", k)
		}
		return
	}
	if revision == 0 {
		return
	}
	if revision < floor {
		j.fail(NoStaleOverwrite, s.id, "%v: revision %d after %d", k, revision, floor)
	}
	if !f.said(revision) {
		j.fail(NothingInvented, s.id, "%v: no registry ever had revision %d of it", k, revision)
	}
}

func (j *Judge) absent(s *stream, u *subscription, k key) {
	held, before := u.held[k], u.before[k]
	delete(u.held, k)
	delete(u.before, k)
	f := j.truth[k]
	if f == nil || before && !f.since.Before(j.started) {
		return
	}
	cause := f.removedAfter(held)
	switch {
	case before && f.present:
		cause = 0
	case cause == 0 && !f.present: // what the registry does not have may go, how often it was sent or not
		cause = f.revision
	}
	if cause == 0 {
		j.fail(NoRemovalWithoutCause, s.id, "%v is removed; the sink has revision %d, and the registry has %d", k, held, f.revision)
		return
	}
	u.floor[k], u.last[k] = max(u.floor[k], cause), held
}

// complete judges whether the first response of a type could be sent yet.
func (j *Judge) complete(s *stream, u *subscription, e *Event) {
	empty := len(e.Resources)+len(e.Removed) == 0 && len(u.resumed) == 0
	if u.responses > 1 || j.started.IsZero() || e.Incremental && !empty {
		return
	}
	for k, f := range j.truth {
		if k.collection != u.collection || !f.present || !f.since.Before(j.started) || s.lacks(k, f) {
			continue
		}
		if _, ok := u.held[k]; !ok {
			j.fail(HoldBeforeFirstListing, s.id, "%v is missing in the first response; the registry has it since %v", k, f.since.UTC().Format(time.RFC3339Nano))
		}
	}
}

// settled judges that all streams have what the registries have, in some
// namespaces; none is all.
func (j *Judge) settled(namespaces []string) {
	among := func(name string) bool {
		namespace, _, _ := strings.Cut(name, "/")
		return len(namespaces) == 0 || slices.Contains(namespaces, namespace)
	}
	ids := slices.Sorted(maps.Keys(j.streams))
	same := map[string]*subscription{}
	for _, id := range ids {
		s := j.streams[id]
		for _, url := range slices.Sorted(maps.Keys(s.subs)) {
			u := s.subs[url]
			if u.responses == 0 {
				j.fail(Convergence, id, "%s: there is no response", url)
				continue
			}
			if u.names != nil {
				j.converged(s, u, func(name string) bool { return u.names[name] && among(name) })
				continue
			}
			j.converged(s, u, among)
			name := s.form + " " + strings.Join(s.namespaces, ",") + " " + url
			if other := same[name]; other != nil {
				j.alike(s, u, other, among)
			}
			same[name] = u
		}
	}
}

func (j *Judge) converged(s *stream, u *subscription, among func(string) bool) {
	for k, f := range j.truth {
		if k.collection != u.collection {
			continue
		}
		held, ok := u.held[k]
		if s.lacks(k, f) || !among(k.name) {
			continue
		}
		switch {
		case ok != f.present:
			j.fail(Convergence, s.id, "%v: the sink has it: %v, the registry: %v", k, ok, f.present)
		case ok && held != 0 && held != f.revision && f.said(held): // held may be a lower bound
			j.fail(Convergence, s.id, "%v: the sink has revision %d, the registry %d", k, held, f.revision)
		}
	}
}

// hides reports whether the stream's view is without the namespace of a key.
func (s *stream) hides(k key) bool {
	namespace, _, _ := strings.Cut(k.name, "/")
	return s.namespaces != nil && !slices.Contains(s.namespaces, namespace)
}

// lacks reports whether the view or the shape of the stream has no place for a
// key.
func (s *stream) lacks(k key, f *fact) bool {
	if s.hides(k) {
		return true
	}
	if s.workload {
		return k.address != ""
	}
	return f.instance
}

func (j *Judge) alike(s *stream, a, b *subscription, among func(string) bool) {
	for name, r := range a.have {
		if other := b.have[name]; among(name) && (other == nil || other.Version != r.Version) {
			j.fail(Convergence, s.id, "%q: two sinks of one form differ", name)
		}
	}
	for name := range b.have {
		if among(name) && a.have[name] == nil {
			j.fail(Convergence, s.id, "%q: one of two sinks of one form lacks it", name)
		}
	}
}
