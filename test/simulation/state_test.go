package simulation

import (
	"bytes"
	stdcmp "cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcpapi "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/view"
)

const virtualService = "networking.istio.io/VirtualService"

// keptStates are seeds of TestState that found a defect, for what they may
// still find.
var keptStates = []uint64{
	1, // one version had two contents, of two registries
	3, // a view by registry missed that a name of equal content was handed over
	// The first response of a view had one resource, so that a reader which had
	// that one was sent it again.
	5122,
}

// defect is a service that the state panics at, in the middle of a message.
const defect = "defect"

// TestState compares the state and its views with a plain model, over random
// runs of registries that share names, hosts and content: messages, some of
// which break the contract, listings, restarts from what was saved, and
// configurations in which registries come, go, change places and are renamed.
// Readers read at any pace, through filters and in forms that print the
// registry; removals they have not read may be evicted.
func TestState(t *testing.T) {
	one(t)
	all := slices.Clone(keptStates)
	for n := range uint64(*states) {
		if seed := *first + n; !slices.Contains(all, seed) {
			all = append(all, seed)
		}
	}
	for _, seed := range all {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { newModel(t, seed).run(300) })
		})
	}
}

// service is a service of a registry.
type service struct {
	host      string
	instances map[string]string // address by name
}

// truth is what a plugin believes.
type truth struct {
	services map[string]*service
	routes   map[string]string // host by name
	// gone is the last content of what was removed: host or address.
	gone map[id]string
}

func newTruth() *truth {
	return &truth{services: map[string]*service{}, routes: map[string]string{}, gone: map[id]string{}}
}

// model is the plain model of a state.
type model struct {
	t       *testing.T
	rand    *rand.Rand
	options state.Options
	db      *state.DB
	root    *view.View
	names   []string // of the registries, in order
	truths  map[string]*truth
	readers []*reader
	// content is what a name was under a version, for each form.
	content map[string]string
	op      string // the latest, for messages
	acted   bool   // the state may have changed since the last check
	now     int    // the step
	// was is what had to be served at the last check, changed the step at which
	// a name or its registry changed last.
	was             map[id]*resource
	changed, handed map[id]int
}

func newModel(t *testing.T, seed uint64) *model {
	w := &model{t: t, rand: rand.New(rand.NewPCG(seed, 29)), names: []string{"a", "b", "c"}, truths: map[string]*truth{}, content: map[string]string{}, was: map[id]*resource{}, changed: map[id]int{}, handed: map[id]int{}}
	w.options = state.Options{Tombstones: []int{3, 1000}[w.rand.IntN(2)], Conflicts: w.rules()}
	w.options.Selector = func(name string) string {
		if name == defect {
			panic("a defect")
		}
		return name
	}
	if w.rand.IntN(2) == 0 {
		w.options.Addresses = netip.MustParsePrefix("240.1.0.0/30")
	}
	if w.rand.IntN(2) == 0 {
		p := state.Protect{MinShare: 0.5, MinServices: 3, Hold: time.Hour}
		if w.rand.IntN(2) == 0 {
			p.Service = state.ProtectService{MinShare: 0.5, MinEndpoints: 2}
		}
		w.options.Registries = map[string]state.RegistryOptions{}
		for _, name := range strings.Split("a b c d e f", " ") {
			w.options.Registries[name] = state.RegistryOptions{Protect: p}
		}
	}
	w.begin()
	for _, name := range w.names {
		w.truths[name] = newTruth()
		w.relist(name)
	}
	filters := []view.Filter{
		{},
		{Registries: []string{"a"}},
		{Registries: []string{"b"}},
		{Registries: []string{"b", "c"}},
		{Hosts: []string{"p0.*", "m*"}},
		{Namespaces: []string{"ns1"}},
		{Shards: shard.Set{First: 0, Last: 0, Of: 2}},
		{Registries: []string{"a", "c"}, Hosts: []string{"*0.example.org"}},
	}
	for i := range 24 {
		r := &reader{w: w, filter: filters[w.rand.IntN(len(filters))], filters: filters}
		r.options.Collection = []string{serviceEntry, serviceEntry, workloadEntry, virtualService}[i%4]
		r.options.Framing = []view.Framing{view.DeltaXDS, view.XDS}[i/4%2]
		r.options.Form = encode.Form{Registry: i/8%2 == 1, Address: w.rand.IntN(2) == 0}
		if i%4 != 0 {
			r.options.Form.Shape = encode.Workload
		}
		r.connect()
		w.readers = append(w.readers, r)
	}
	return w
}

// rules returns rules by the first letter of a host: p for priority, m for
// merge, i for isolate.
func (w *model) rules() []state.ConflictRule {
	return []state.ConflictRule{{Hosts: []string{"m*"}, Policy: state.Merge}, {Hosts: []string{"i*"}, Policy: state.Isolate}}
}

// begin makes an empty state.
func (w *model) begin() {
	w.db = state.New(w.names, w.options, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	w.root = view.New(w.db)
}

func (w *model) run(steps int) {
	defer func() {
		for _, r := range w.readers {
			r.close()
		}
	}()
	for n := range steps {
		w.step()
		synctest.Wait() // views follow
		if w.acted {
			w.acted = false
			w.check(n)
		}
		if w.t.Failed() {
			w.t.Fatalf("after step %d: %s", n, w.op)
		}
	}
	for _, r := range w.readers {
		r.finish()
	}
}

// pick returns one of some.
func pick[T any](w *model, some ...T) T { return some[w.rand.IntN(len(some))] }

func (w *model) step() {
	name := pick(w, w.names...)
	switch n := w.rand.IntN(100); {
	case n < 3:
		w.op = name + " loses its instances one by one"
		w.drain(name)
	case n < 40:
		w.op = "a message of " + name
		w.apply(name, w.change(name))
	case n < 44:
		w.op = "a listing of " + name
		if w.rand.IntN(2) == 0 {
			w.lose(name)
		}
		w.relist(name)
	case n < 48:
		w.op = "a message of " + name + " that breaks the contract"
		w.breach(name)
	case n < 50:
		w.op = "a message of " + name + " that panics"
		w.panics(name)
	case n < 55:
		w.configure()
	case n < 57:
		w.op = "a decision on " + name
		_, err := w.db.Registry(name).Accept()
		if w.rand.IntN(2) == 0 {
			_, err = w.db.Registry(name).Refuse()
		}
		_ = err // there may be nothing to decide on
	case n < 58:
		w.op = "a restart"
		w.restart()
	default:
		w.op = "a reader"
		pick(w, w.readers...).act()
		return
	}
	w.acted = true
}

func (w *model) apply(name string, m *pluginv1.WatchResponse) {
	w.t.Helper()
	if err := w.db.Registry(name).Apply(m); err != nil {
		w.t.Fatal(err)
	}
}

// change changes what a registry has, and returns the message that says so.
func (w *model) change(name string) *pluginv1.WatchResponse {
	tr, m := w.truths[name], &pluginv1.WatchResponse{}
	named := map[id]bool{}
	free := func(n id) bool {
		was := named[n]
		named[n] = true
		return !was
	}
	for range 1 + w.rand.IntN(4) {
		if n := fmt.Sprintf("ns0/r%d", w.rand.IntN(3)); w.rand.IntN(5) == 0 && free(id{virtualService, n}) {
			if _, there := tr.routes[n]; there && w.rand.IntN(2) == 0 {
				w.drop(name, m, id{virtualService, n})
			} else {
				tr.routes[n] = pick(w, "p0.example.org", "m0.example.org")
				m.Upserts = append(m.Upserts, route(n, tr.routes[n]))
			}
			continue
		}
		n := fmt.Sprintf("ns%d/s%d", w.rand.IntN(2), w.rand.IntN(3))
		s := tr.services[n]
		switch {
		case s != nil && w.rand.IntN(3) == 0 && !named[id{workloadEntry, n + "-0"}] && !named[id{workloadEntry, n + "-1"}] && !named[id{workloadEntry, n + "-2"}] &&
			free(id{serviceEntry, n}):
			all := slices.Sorted(maps.Keys(s.instances))
			w.drop(name, m, id{serviceEntry, n})
			for _, i := range all {
				if free(id{workloadEntry, i}) && w.rand.IntN(2) == 0 {
					m.Removals = append(m.Removals, &pluginv1.Removal{Collection: workloadEntry, Name: i})
				}
			}
			continue
		case (s == nil || w.rand.IntN(4) == 0) && free(id{serviceEntry, n}):
			if s == nil {
				s = &service{instances: map[string]string{}}
				tr.services[n] = s
			}
			s.host = pick(w, "p0", "p0", "p1", "m0", "i0") + ".example.org"
			m.Upserts = append(m.Upserts, entry(n, s.host))
		}
		if s == nil || tr.services[n] == nil {
			continue
		}
		for i := range 3 {
			in := fmt.Sprintf("%s-%d", n, i)
			switch {
			case w.rand.IntN(2) == 0 || !free(id{workloadEntry, in}):
			case s.instances[in] != "" && w.rand.IntN(2) == 0:
				w.drop(name, m, id{workloadEntry, in})
			default:
				s.instances[in] = fmt.Sprintf("10.0.0.%d", i+1+w.rand.IntN(2))
				m.Upserts = append(m.Upserts, member(n, in, s.instances[in]))
			}
		}
	}
	w.rand.Shuffle(len(m.Upserts), func(i, j int) { m.Upserts[i], m.Upserts[j] = m.Upserts[j], m.Upserts[i] })
	return m
}

// drain removes most instances of a registry, each in a message of its own.
// What goes meanwhile may be put back, which is a change.
func (w *model) drain(name string) {
	for n := range w.was {
		w.changed[n] = w.now + 1
	}
	for _, n := range slices.Sorted(maps.Keys(w.truths[name].services)) {
		s := w.truths[name].services[n]
		for _, i := range slices.Sorted(maps.Keys(s.instances)) {
			if m := (&pluginv1.WatchResponse{}); w.rand.IntN(4) > 0 {
				w.drop(name, m, id{workloadEntry, i})
				w.apply(name, m)
			}
		}
	}
}

// drop removes something of a registry; m, if not nil, says so.
func (w *model) drop(name string, m *pluginv1.WatchResponse, n id) {
	tr := w.truths[name]
	switch n.collection {
	case serviceEntry:
		s := tr.services[n.name]
		tr.gone[n] = s.host
		for i, address := range s.instances {
			tr.gone[id{workloadEntry, i}] = address
		}
		delete(tr.services, n.name)
	case virtualService:
		tr.gone[n] = tr.routes[n.name]
		delete(tr.routes, n.name)
	default:
		of := n.name[:strings.LastIndexByte(n.name, '-')]
		tr.gone[n] = tr.services[of].instances[n.name]
		delete(tr.services[of].instances, n.name)
	}
	if m != nil {
		m.Removals = append(m.Removals, &pluginv1.Removal{Collection: n.collection, Name: n.name})
	}
}

// lose removes most of a registry, which its plugin does not see until it lists
// again.
func (w *model) lose(name string) {
	for _, n := range slices.Sorted(maps.Keys(w.truths[name].services)) {
		if w.rand.IntN(3) > 0 {
			w.drop(name, nil, id{serviceEntry, n})
		}
	}
}

// relist lists a registry in a new stream, in several messages.
func (w *model) relist(name string) {
	tr, r := w.truths[name], w.db.Registry(name)
	r.Begin(nil)
	for _, n := range slices.Sorted(maps.Keys(tr.services)) {
		m := &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{entry(n, tr.services[n].host)}}
		for _, i := range slices.Sorted(maps.Keys(tr.services[n].instances)) {
			m.Upserts = append(m.Upserts, member(n, i, tr.services[n].instances[i]))
		}
		w.apply(name, m)
	}
	m := &pluginv1.WatchResponse{Synced: true}
	for _, n := range slices.Sorted(maps.Keys(tr.routes)) {
		m.Upserts = append(m.Upserts, route(n, tr.routes[n]))
	}
	w.apply(name, m)
}

// breach sends a message that names something twice. Nothing of it is applied.
func (w *model) breach(name string) {
	tr := w.truths[name]
	m := &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{entry("ns0/new", "new.example.org")}}
	n := id{virtualService, "ns0/none"}
	for _, s := range slices.Sorted(maps.Keys(tr.services)) {
		for _, i := range slices.Sorted(maps.Keys(tr.services[s].instances)) {
			n = id{workloadEntry, i}
		}
	}
	twice := &pluginv1.Removal{Collection: n.collection, Name: n.name}
	m.Removals = []*pluginv1.Removal{twice, twice}
	if err := w.db.Registry(name).Apply(m); err == nil {
		w.t.Errorf("a message that removes %v twice is no error", n)
	}
	w.relist(name) // the plugin is restarted
}

// panics sends a message in the middle of which the state panics. Nothing of it
// is applied, and readers start over.
func (w *model) panics(name string) {
	before := w.expect()
	tr := w.truths[name]
	was := newTruth()
	was.routes, was.gone = maps.Clone(tr.routes), maps.Clone(tr.gone)
	for n, s := range tr.services {
		was.services[n] = &service{s.host, maps.Clone(s.instances)}
	}
	m := w.change(name)
	w.truths[name] = was
	at := w.rand.IntN(len(m.GetUpserts()) + 1)
	m.Upserts = slices.Insert(m.GetUpserts(), at, entry("ns0/"+defect, "p0.example.org"))
	if err := w.db.Registry(name).Apply(m); err == nil || !strings.Contains(err.Error(), "a defect") {
		w.t.Errorf("a message that panics: %v", err)
	}
	w.compare(before)
	w.relist(name) // the plugin is restarted
}

// configure changes the set of registries, their order or their names.
func (w *model) configure() {
	renamed := map[string]string{}
	names := slices.Clone(w.names)
	w.rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	other := pick(w, "a", "b", "c", "d", "e", "f")
	added := ""
	switch free := w.truths[other] == nil; {
	case free && w.rand.IntN(2) == 0:
		w.truths[other], renamed[other] = w.truths[names[0]], names[0]
		delete(w.truths, names[0])
		names[0] = other
	case free && len(names) < 4:
		w.truths[other], added = newTruth(), other
		names = append(names, other)
	case len(names) > 2:
		delete(w.truths, names[0])
		names = names[1:]
	}
	w.op = fmt.Sprintf("registries %q become %q, renamed %v", w.names, names, renamed)
	w.names = names
	w.db.SetRegistries(names, renamed)
	// What a new order decides may be seen before what has left is gone.
	for _, r := range w.readers {
		r.again = true
	}
	if added != "" {
		w.relist(added)
	}
}

// restart goes on with a state that is restored from what is saved.
func (w *model) restart() {
	was := w.expect()
	number := func(r *state.Record) int { return slices.Index(w.names, r.Registry()) }
	var run []byte
	for _, coll := range collection.All() {
		for c := range w.db.Claims(coll, &state.ClaimsCursor{}) {
			run = c.AppendSaved(run, coll, number)
		}
	}
	for _, r := range w.readers {
		r.close()
	}
	w.begin()
	saved, err := w.db.ParseSaved(run)
	if err != nil {
		w.t.Fatal(err)
	}
	var registries []state.SavedRegistry
	for _, name := range w.names {
		registries = append(registries, state.SavedRegistry{Name: name, AsOf: time.Now()})
	}
	if _, err := w.db.Restore([]state.Saved{saved}, registries); err != nil {
		w.t.Fatal(err)
	}
	w.compare(was)
	for _, r := range w.readers {
		r.connect()
	}
	for _, name := range w.names {
		w.relist(name)
	}
}

// resource is what has to be served under a name.
type resource struct {
	registry  string
	service   string   // of an instance
	host      string   // of its service, for an instance
	address   string   // of an instance
	endpoints []string // of a ServiceEntry
	members   []string // the same with the registry that each is of
}

// text is the resource as a reader of a form holds it.
func (r *resource) text(f encode.Form) string {
	out := r.host
	switch {
	case r.service != "":
		out = r.address
	case f.Shape == encode.Inline:
		out += " " + strings.Join(r.endpoints, " ")
	}
	out = strings.TrimSpace(out)
	if f.Registry {
		out += " of " + r.registry
	}
	return out
}

// content is all of the resource but its registry.
func (r *resource) content() string {
	return fmt.Sprint(r.service, " ", r.host, " ", r.address, " ", r.members)
}

// contender is a service that a registry claims.
type contender struct {
	registry, name string
	*service
	members []*contender
}

// expect returns what has to be served.
func (w *model) expect() map[id]*resource {
	out := map[id]*resource{}
	var served []*contender
	for _, name := range w.names {
		tr := w.retained(name)
		for _, n := range slices.Sorted(maps.Keys(tr.routes)) {
			if n := (id{virtualService, n}); out[n] == nil {
				out[n] = &resource{registry: name, host: tr.routes[n.name]}
			}
		}
		for _, n := range slices.Sorted(maps.Keys(tr.services)) {
			e := &contender{registry: name, name: n, service: tr.services[n]}
			owner := slices.IndexFunc(served, func(o *contender) bool { return o.name == n })
			is, lead := "", (*contender)(nil)
			for _, o := range served {
				for _, s := range append([]*contender{o}, o.members...) {
					if s.registry == name && s.host == e.host && (owner < 0 || o == served[owner]) {
						is = "shadowed"
					}
				}
			}
			for i, o := range served {
				if o.host != e.host || o.registry == name || owner >= 0 && i != owner {
					continue
				}
				now := map[byte]string{'p': "shadowed", 'm': "merged", 'i': "beside"}[e.host[0]]
				if now == "beside" && (owner >= 0 || path.Dir(o.name) == path.Dir(n)) {
					now = "shadowed"
				}
				if is == "" || is == "beside" && now != "beside" {
					is, lead = now, o
				}
			}
			switch {
			case is == "merged":
				lead.members = append(lead.members, e)
			case is == "shadowed", owner >= 0:
			default:
				served = append(served, e)
			}
		}
	}
	for _, lead := range served {
		entry := &resource{registry: lead.registry, host: lead.host}
		out[id{serviceEntry, lead.name}] = entry
		taken := map[string]bool{}
		for _, of := range append([]*contender{lead}, lead.members...) {
			var mine []string
			for _, n := range slices.Sorted(maps.Keys(of.instances)) {
				address := of.instances[n]
				if taken[address] {
					continue
				}
				mine = append(mine, address)
				if of != lead {
					leadNS, _, _ := strings.Cut(lead.name, "/")
					ns, short, _ := strings.Cut(n, "/")
					n = leadNS + "/" + short + "." + ns + "." + of.registry
				}
				out[id{workloadEntry, n}] = &resource{registry: lead.registry, service: lead.name, host: lead.host, address: address}
				entry.endpoints = append(entry.endpoints, address)
				entry.members = append(entry.members, address+" "+of.registry+" "+n)
			}
			for _, address := range mine {
				taken[address] = true
			}
		}
		slices.Sort(entry.endpoints)
		slices.Sort(entry.members)
	}
	return out
}

// retained returns what a registry has, with what is held back of its removals.
func (w *model) retained(name string) *truth {
	tr, out := w.truths[name], newTruth()
	out.routes = maps.Clone(tr.routes)
	for n, s := range tr.services {
		out.services[n] = &service{s.host, maps.Clone(s.instances)}
	}
	kept := slices.Collect(w.db.Kept(name))
	for _, k := range kept {
		n := id{k.Collection, k.Name}
		switch n.collection {
		case serviceEntry:
			out.services[n.name] = &service{tr.gone[n], map[string]string{}}
		case virtualService:
			out.routes[n.name] = tr.gone[n]
		}
	}
	for _, k := range kept {
		if k.Collection == workloadEntry {
			out.services[k.Service].instances[k.Name] = tr.gone[id{k.Collection, k.Name}]
		}
	}
	return out
}

// compare compares the state with the model.
func (w *model) compare(want map[id]*resource) {
	w.t.Helper()
	for _, shape := range []encode.Shape{encode.Inline, encode.Workload} {
		form := encode.Form{Shape: shape, Registry: true}
		got, wanted := map[id]string{}, map[id]string{}
		for _, coll := range []string{serviceEntry, workloadEntry, virtualService} {
			for c := range w.db.Changes(state.Kind{Collection: coll, Shape: shape}, &state.Cursor{}) {
				e := c.Record.Encode(encode.NewLayout(form))
				var res mcpapi.Resource
				if err := proto.Unmarshal(e.Append(nil), &res); err != nil {
					w.t.Fatal(err)
				}
				got[id{coll, c.Name}] = text(w.t, &res)
			}
		}
		for n, r := range want {
			if n.collection != workloadEntry || shape == encode.Workload {
				wanted[n] = r.text(form)
			}
		}
		if d := cmp.Diff(wanted, got, cmp.AllowUnexported(id{})); d != "" {
			w.t.Errorf("%s: %v (-model +state):\n%s", w.op, shape, d)
		}
	}
	for _, st := range w.db.Registries() {
		for coll, n := range st.Resources {
			have := 0
			for i, r := range want {
				if i.collection == coll && r.registry == st.Registry {
					have++
				}
			}
			if n != have {
				w.t.Errorf("%s: %s counts %d of %s, want %d", w.op, st.Registry, n, coll, have)
			}
		}
	}
}

// check compares the state with the model, and notes what changed since the
// last check.
func (w *model) check(step int) {
	w.t.Helper()
	now := w.expect()
	w.compare(now)
	w.now = step + 1
	for n := range maps.All(now) {
		if w.was[n] == nil {
			w.was[n] = &resource{}
		}
	}
	for n, was := range w.was {
		is := now[n]
		if is == nil {
			is = &resource{}
		}
		if was.content() != is.content() {
			w.changed[n] = w.now
		}
		if was.registry != is.registry {
			w.handed[n] = w.now
		}
	}
	w.was = now
}

// reader is a sink of one collection.
type reader struct {
	w       *model
	filter  view.Filter
	filters []view.Filter
	options view.Options
	sub     *view.Subscription
	release func()
	nonce   string
	have    map[string]string // text by name
	vers    map[string]string // version by name
	again   bool              // the next response may repeat what it has
	seen    int               // the step after which it read everything
}

func (r *reader) view() *view.View {
	var v *view.View
	if r.release = func() {}; cmp.Equal(r.filter, view.Filter{}) {
		return r.w.root
	}
	v, r.release = r.w.root.Narrow(r.filter)
	return v
}

// connect subscribes with the versions that the reader has, if its protocol
// says them.
func (r *reader) connect() {
	o := r.options
	if o.Framing == view.DeltaXDS {
		o.Versions = maps.Clone(r.vers)
	}
	r.sub, r.nonce = view.NewSubscription(r.view(), o), ""
	if r.have == nil {
		r.have, r.vers = map[string]string{}, map[string]string{}
	}
}

func (r *reader) close() {
	r.sub.Close()
	r.release()
}

func (r *reader) act() {
	w := r.w
	switch n := w.rand.IntN(20); {
	case r.nonce != "":
		r.sub.Ack(r.nonce, true)
		r.nonce = ""
	case n == 0:
		r.close()
		r.connect()
	case n == 1:
		release := r.release
		r.filter, r.again = pick(w, r.filters...), true
		r.sub.SetView(r.view())
		release()
	default:
		r.next()
	}
}

// next takes the next response, if there is one.
func (r *reader) next() {
	resp, ok, err := r.sub.Next()
	if errors.Is(err, view.ErrFellBehind) {
		r.close()
		r.connect()
		return
	}
	if err != nil {
		r.w.t.Fatal(err)
	}
	if ok {
		r.receive(&resp)
		r.nonce = resp.Nonce
	}
}

// receive applies a response.
func (r *reader) receive(resp *view.Response) {
	t, raw := r.w.t, bytes.Join(resp.Segments, nil)
	var all []*anypb.Any
	if r.options.Framing == view.DeltaXDS {
		var m discovery.DeltaDiscoveryResponse
		if err := proto.Unmarshal(raw, &m); err != nil {
			t.Fatal(err)
		}
		for _, d := range m.GetResources() {
			all = append(all, d.GetResource())
		}
	} else {
		var m discovery.DiscoveryResponse
		if err := proto.Unmarshal(raw, &m); err != nil {
			t.Fatal(err)
		}
		all = m.GetResources()
		clear(r.have)
		clear(r.vers)
	}
	named := map[string]bool{}
	if r.w.options.Addresses.IsValid() && r.options.Collection == serviceEntry {
		r.again = true // the address of a host depends on other hosts, which the model does not follow
	}
	for _, a := range all {
		var res mcpapi.Resource
		if err := a.UnmarshalTo(&res); err != nil {
			t.Fatal(err)
		}
		name, version := res.GetMetadata().GetName(), res.GetMetadata().GetVersion()
		if n := (id{r.options.Collection, name}); r.vers[name] == version && !r.again && r.w.changed[n] <= r.seen &&
			(r.w.handed[n] <= r.seen || len(r.filter.Registries) == 0 && !r.options.Form.Registry) {
			t.Errorf("%s: %+v: %s is sent again in version %s", r.w.op, r.filter, name, version)
		}
		if named[name] {
			t.Errorf("%s is in a response twice", name)
		}
		named[name] = true
		r.have[name], r.vers[name] = text(t, &res), version
		key := fmt.Sprint(r.options.Form, r.options.Collection, name, version)
		if was, known := r.w.content[key]; known && was != string(a.GetValue()) {
			t.Errorf("%s: %s has two contents in version %s of form %s", r.w.op, name, version, r.options.Form)
		}
		r.w.content[key] = string(a.GetValue())
	}
	for _, name := range resp.Removed {
		if named[name] {
			t.Errorf("%s is set and removed in one response", name)
		}
		delete(r.have, name)
		delete(r.vers, name)
	}
	r.again, r.seen = false, r.w.now
}

// finish reads everything that there is, and compares it with the model.
func (r *reader) finish() {
	for range 6 {
		if r.nonce != "" {
			r.sub.Ack(r.nonce, true)
			r.nonce = ""
		}
		r.next()
	}
	want := map[string]string{}
	for n, res := range r.w.expect() {
		ns, _, _ := strings.Cut(stdcmp.Or(res.service, n.name), "/")
		f := &r.filter
		if n.collection != r.options.Collection || len(f.Registries) > 0 && !slices.Contains(f.Registries, res.registry) ||
			len(f.Namespaces) > 0 && !slices.Contains(f.Namespaces, ns) || !f.Shards.All() && !f.Shards.Has(res.host) ||
			len(f.Hosts) > 0 && !slices.ContainsFunc(f.Hosts, func(p string) bool {
				prefix, suffix, _ := strings.Cut(p, "*")
				return strings.HasPrefix(res.host, prefix) && strings.HasSuffix(res.host, suffix)
			}) {
			continue
		}
		want[n.name] = res.text(r.options.Form)
	}
	if d := cmp.Diff(want, r.have); d != "" {
		r.w.t.Errorf("%s: %+v of %s, form %s, framing %d (-model +reader):\n%s", r.w.op, r.filter, r.options.Collection, r.options.Form, r.options.Framing, d)
	}
}

// text is a resource as [resource.text] has it.
func text(t *testing.T, res *mcpapi.Resource) (out string) {
	body, err := res.GetBody().UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	switch b := body.(type) {
	case *networking.ServiceEntry:
		out = b.GetHosts()[0]
		var endpoints []string
		for _, e := range b.GetEndpoints() {
			endpoints = append(endpoints, e.GetAddress())
		}
		slices.Sort(endpoints)
		out = strings.TrimSpace(out + " " + strings.Join(endpoints, " "))
	case *networking.WorkloadEntry:
		out = b.GetAddress()
	case *networking.VirtualService:
		out = b.GetHosts()[0]
	}
	if registry, printed := res.GetMetadata().GetAnnotations()[encode.RegistryAnnotation]; printed {
		out += " of " + registry
	}
	return out
}

func entry(name, host string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: name, Resource: testresource.Encode(testresource.Named(name), &networking.ServiceEntry{Hosts: []string{host}, Resolution: networking.ServiceEntry_STATIC})}
}

func member(service, name, address string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: service, Resource: testresource.Encode(testresource.Named(name), &networking.WorkloadEntry{Address: address})}
}

func route(name, host string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Resource: testresource.Encode(testresource.Named(name), &networking.VirtualService{Hosts: []string{host}})}
}
