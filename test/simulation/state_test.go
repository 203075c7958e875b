package simulation

import (
	"bytes"
	stdcmp "cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path"
	"reflect"
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
	"github.com/isthmus-mesh/isthmus/server/state/saved"
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
// which break the contract, listings, restarts from what was saved, time in
// which paused removals are carried out, and configurations in which registries
// come, go, change places and are renamed. Services of one host have other
// ports, weights or readers (exportTo). Readers read at any pace, through
// filters and in forms that print the registry; removals they have not read may
// be evicted. What has not changed is not sent again, and of a type that a
// reader invents nothing stays.
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

// spec is what a service says beside its instances; of a route it is the host.
type spec struct {
	host     string
	ports    string // as in "http:80,admin:90"
	exportTo string
}

// String returns the text that readers are compared by.
func (s spec) String() string {
	return strings.TrimSpace(strings.Join([]string{s.host, s.ports, s.exportTo}, " "))
}

// endpoint is what an instance says.
type endpoint struct {
	address string
	ports   string // sorted, as in "admin:9001,http:8001"
	weight  uint32
}

// String returns the text that readers are compared by.
func (e endpoint) String() string { return fmt.Sprintf("%s[%s]*%d", e.address, e.ports, e.weight) }

type namedPort struct {
	name   string
	number uint32
}

func namedPorts(text string) (out []namedPort) {
	for p := range strings.SplitSeq(text, ",") {
		name, number, there := strings.Cut(p, ":")
		if n, err := strconv.ParseUint(number, 10, 16); there && err == nil {
			out = append(out, namedPort{name, uint32(n)})
		}
	}
	return out
}

// service is a service of a registry.
type service struct {
	spec
	instances map[string]endpoint // by name
}

// truth is what a plugin believes.
type truth struct {
	services map[string]*service
	routes   map[string]string // host by name
	gone     map[id]last
}

// last is the last content of what was removed.
type last struct {
	spec     spec
	endpoint endpoint
}

func newTruth() *truth {
	return &truth{services: map[string]*service{}, routes: map[string]string{}, gone: map[id]last{}}
}

// model is the plain model of a state.
type model struct {
	t       *testing.T
	rand    *rand.Rand
	extra   *rand.Rand // for what older seeds did not decide
	options state.Options
	db      *state.DB
	stop    func() // ends what runs beside the state
	root    *view.View
	names   []string // of the registries, in order
	truths  map[string]*truth
	readers []*reader
	// content is what a name was under a version, for each form.
	content map[string]string
	invents int    // types that readers invented
	op      string // the latest, for messages
	acted   bool   // the state may have changed since the last check
	now     int    // the step
	// was is what had to be served at the last check, changed the step at which
	// a name or its registry changed last.
	was             map[id]*resource
	changed, handed map[id]int
}

func newModel(t *testing.T, seed uint64) *model {
	w := &model{
		t: t, rand: rand.New(rand.NewPCG(seed, 29)), extra: rand.New(rand.NewPCG(seed, 30)), names: []string{"a", "b", "c"},
		truths: map[string]*truth{}, content: map[string]string{}, was: map[id]*resource{}, changed: map[id]int{}, handed: map[id]int{},
	}
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

// weights are those of hosts whose first letter is w. Registry f has none.
var weights = map[string]uint32{"a": 1, "b": 3, "c": 0, "d": 2, "e": 5}

// rules returns rules by the first letter of a host: p for priority, m for
// merge, w for merge with weights, i for isolate.
func (w *model) rules() []state.ConflictRule {
	return []state.ConflictRule{
		{Hosts: []string{"m*"}, Policy: state.Merge},
		{Hosts: []string{"i*"}, Policy: state.Isolate},
		{Hosts: []string{"w*"}, Policy: state.Merge, Weights: weights},
	}
}

// begin makes an empty state, and ends the one before.
func (w *model) begin() {
	if w.stop != nil {
		w.stop()
	}
	db := state.New(w.names, w.options, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	w.db, w.root = db, view.New(db)
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan struct{})
	go func() { // until stop
		defer close(ended)
		_ = db.Run(ctx)
	}()
	w.stop = func() {
		cancel()
		<-ended
	}
}

func (w *model) run(steps int) {
	defer func() {
		for _, r := range w.readers {
			r.close()
		}
		w.stop()
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
	synctest.Wait()
	if where := reach(reflect.ValueOf(w.root), invented, map[visit]bool{}); where != "" {
		w.t.Errorf("%s has a type that no reader asks for any more", where)
	}
}

// pick returns one of some.
func pick[T any](w *model, some ...T) T { return some[w.rand.IntN(len(some))] }

// also is pick for what older seeds did not decide.
func also[T any](w *model, some ...T) T { return some[w.extra.IntN(len(some))] }

func (w *model) step() {
	switch w.extra.IntN(50) {
	case 0:
		w.op, w.acted = "time passes", true
		w.wait(also(w, time.Minute, state.ProtectWindow+time.Minute, time.Hour+time.Minute))
		return
	case 1:
		w.op = "a reader invents a type"
		w.invent()
		return
	}
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
		_, err := w.db.Registry(name).Allow()
		if w.rand.IntN(2) == 0 {
			_, err = w.db.Registry(name).Keep()
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
				s = &service{instances: map[string]endpoint{}}
				tr.services[n] = s
			}
			host := pick(w, "p0", "p0", "p1", "m0", "i0")
			if host == "m0" {
				host = also(w, "m0", "w0")
			}
			s.spec = spec{
				host + ".example.org", also(w, "", "http:80", "http:80", "web:80", "http:81", "http:80,admin:90"), also(w, "", "", "", "", "*", ".", "ns0", "~"),
			}
			m.Upserts = append(m.Upserts, entry(n, s.spec))
		}
		if s == nil || tr.services[n] == nil {
			continue
		}
		for i := range 3 {
			in := fmt.Sprintf("%s-%d", n, i)
			switch {
			case w.rand.IntN(2) == 0 || !free(id{workloadEntry, in}):
			case s.instances[in].address != "" && w.rand.IntN(2) == 0:
				w.drop(name, m, id{workloadEntry, in})
			default:
				s.instances[in] = endpoint{fmt.Sprintf("10.0.0.%d", i+1+w.rand.IntN(2)), also(w, "", "http:8001", "web:8002"), also[uint32](w, 0, 0, 2, 5)}
				m.Upserts = append(m.Upserts, member(n, in, s.instances[in]))
			}
		}
	}
	w.rand.Shuffle(len(m.Upserts), func(i, j int) { m.Upserts[i], m.Upserts[j] = m.Upserts[j], m.Upserts[i] })
	return m
}

// drain removes most instances of a registry, each in a message of its own.
// What goes may be put back by a later one.
func (w *model) drain(name string) {
	for _, n := range slices.Sorted(maps.Keys(w.truths[name].services)) {
		s := w.truths[name].services[n]
		for _, i := range slices.Sorted(maps.Keys(s.instances)) {
			if m := (&pluginv1.WatchResponse{}); w.rand.IntN(4) > 0 {
				w.drop(name, m, id{workloadEntry, i})
				w.apply(name, m)
				w.note(w.now + 1)
			}
		}
	}
}

// wait lets time pass. Removals that nobody decides on are carried out.
func (w *model) wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
	for k := range w.db.Removals("") {
		if late := time.Since(k.Until); !k.Until.IsZero() && late > 10*time.Second {
			w.t.Errorf("%s: %s %s is served %v after its removal is due", w.op, k.Collection, k.Name, late)
		}
	}
}

// invented is what the types begin with that readers invent.
const invented = "invented/"

// invent reads a type that nobody has.
func (w *model) invent() {
	w.invents++
	r := &reader{w: w, filter: also(w, w.readers...).filter}
	r.options = view.Options{Collection: invented + strconv.Itoa(w.invents), Framing: also(w, view.DeltaXDS, view.XDS)}
	r.connect()
	defer r.close()
	if resp, ok, err := r.sub.Next(); err != nil || !ok || resp.Resources > 0 {
		w.t.Errorf("%s: %v resources, answered %v, %v", w.op, resp.Resources, ok, err)
	}
}

// visit is a place in memory that was looked at.
type visit struct {
	at uintptr
	as reflect.Type
}

// reach returns where a text with a prefix is among what can be reached from a
// value of the bridge's, "" if it is nowhere.
func reach(v reflect.Value, prefix string, seen map[visit]bool) string {
	switch v.Kind() {
	case reflect.String:
		if strings.HasPrefix(v.String(), prefix) {
			return v.String()
		}
	case reflect.Interface:
		return reach(v.Elem(), prefix, seen)
	case reflect.Pointer:
		if at := (visit{v.Pointer(), v.Type()}); !seen[at] {
			seen[at] = true
			return reach(v.Elem(), prefix, seen)
		}
	case reflect.Struct:
		if pkg := v.Type().PkgPath(); pkg != "" && !strings.Contains(pkg, "isthmus/server/") {
			return ""
		}
		for i := range v.NumField() {
			if at := reach(v.Field(i), prefix, seen); at != "" {
				return v.Type().Field(i).Name + "." + at
			}
		}
	case reflect.Map:
		for i := v.MapRange(); i.Next(); {
			if at := stdcmp.Or(reach(i.Key(), prefix, seen), reach(i.Value(), prefix, seen)); at != "" {
				return at
			}
		}
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return ""
		}
		for i := range v.Len() {
			if at := reach(v.Index(i), prefix, seen); at != "" {
				return at
			}
		}
	}
	return ""
}

// drop removes something of a registry; m, if not nil, says so.
func (w *model) drop(name string, m *pluginv1.WatchResponse, n id) {
	tr := w.truths[name]
	switch n.collection {
	case serviceEntry:
		s := tr.services[n.name]
		tr.gone[n] = last{spec: s.spec}
		for i, e := range s.instances {
			tr.gone[id{workloadEntry, i}] = last{endpoint: e}
		}
		delete(tr.services, n.name)
	case virtualService:
		tr.gone[n] = last{spec: spec{host: tr.routes[n.name]}}
		delete(tr.routes, n.name)
	default:
		of := n.name[:strings.LastIndexByte(n.name, '-')]
		tr.gone[n] = last{endpoint: tr.services[of].instances[n.name]}
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
		m := &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{entry(n, tr.services[n].spec)}}
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
	m := &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{entry("ns0/new", spec{host: "new.example.org"})}}
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
		was.services[n] = &service{s.spec, maps.Clone(s.instances)}
	}
	m := w.change(name)
	w.truths[name] = was
	at := w.rand.IntN(len(m.GetUpserts()) + 1)
	m.Upserts = slices.Insert(m.GetUpserts(), at, entry("ns0/"+defect, spec{host: "p0.example.org"}))
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
	parsed, err := w.db.ParseSaved(run)
	if err != nil {
		w.t.Fatal(err)
	}
	var registries []saved.Registry
	for _, name := range w.names {
		registries = append(registries, saved.Registry{Name: name, AsOf: time.Now()})
	}
	if _, err := w.db.Restore([]state.Saved{parsed}, registries); err != nil {
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
	spec      spec     // of its service, for an instance
	endpoint  endpoint // of an instance
	endpoints []string // of a ServiceEntry
	members   []string // the same with the name and the registry of each
}

// text is the resource as a reader of a form holds it.
func (r *resource) text(f encode.Form) string {
	out := r.spec.String()
	switch {
	case r.service != "":
		out = r.endpoint.String()
	case f.Shape == encode.Inline:
		out += " " + strings.Join(r.endpoints, " ")
	}
	out = strings.TrimSpace(out)
	if f.Registry {
		out += " of " + r.registry
	}
	return out
}

// content is all of the resource but its registry. An instance is selected by
// the host of its service.
func (r *resource) content() string {
	if r.service != "" {
		return fmt.Sprint(r.service, " ", r.spec.host, " ", r.endpoint)
	}
	return fmt.Sprint(r.spec, " ", r.members)
}

// contender is a service that a registry claims.
type contender struct {
	registry, name string
	*service
	lead    *contender // that it is merged into
	members []*contender
}

// readers returns the namespaces that see a service. There are others than the
// two of this model.
func (c *contender) readers() []string {
	switch c.exportTo {
	case "", "*":
		return []string{"ns0", "ns1", "others"}
	case ".":
		return []string{path.Dir(c.name)}
	case "~":
		return nil
	}
	return []string{c.exportTo}
}

// after returns what becomes of a service of the same host as one that takes
// precedence.
func (c *contender) after(o *contender) string {
	own, policy := o.registry == c.registry, c.host[0]
	switch {
	case policy == 'i' && !own && path.Dir(o.name) != path.Dir(c.name):
		return "beside"
	case policy == 'i' && !own:
		return "shadowed"
	case slices.ContainsFunc(c.readers(), func(ns string) bool { return !slices.Contains(o.readers(), ns) }):
		return "beside" // who does not see the other one sees this one
	case (policy == 'm' || policy == 'w') && !own && o.takes(c):
		return "merged"
	}
	return "shadowed"
}

// takes reports whether a service can be merged into c.
func (c *contender) takes(o *contender) bool {
	if c.isWeighted() {
		_, first := weights[c.registry]
		_, second := weights[o.registry]
		if !first || !second || slices.ContainsFunc(c.members, func(m *contender) bool { return m.registry == o.registry }) {
			return false
		}
	}
	_, fit := c.portsOf(o, endpoint{})
	return fit
}

func (c *contender) isWeighted() bool { return c.host[0] == 'w' }

// portsOf returns the ports of an endpoint of a member under the names that the
// lead has for them; it is false if the member lacks one.
func (c *contender) portsOf(of *contender, e endpoint) (ports string, fit bool) {
	lead, own := namedPorts(c.ports), namedPorts(of.ports)
	if len(lead) == 0 {
		return e.ports, true
	}
	var out []string
	for _, p := range lead {
		i := slices.IndexFunc(own, func(q namedPort) bool { return q.name == p.name })
		if i < 0 {
			i = slices.IndexFunc(own, func(q namedPort) bool { return q.number == p.number })
		}
		if i < 0 && len(lead) == 1 && len(own) == 1 {
			i = 0
		}
		if i < 0 {
			return "", false
		}
		number := own[i].number
		for _, q := range namedPorts(e.ports) {
			if q.name == own[i].name {
				number = q.number
			}
		}
		out = append(out, fmt.Sprintf("%s:%d", p.name, number))
	}
	slices.Sort(out)
	return strings.Join(out, ","), true
}

// tells returns what distinguishes an endpoint of a member from others: the
// address, and the ports as the lead has them.
func (c *contender) tells(of *contender, e endpoint) string {
	ports, _ := c.portsOf(of, e)
	if c.ports == "" { // their names tell nothing
		_, ports, _ = strings.Cut(ports, ":")
	}
	return e.address + " " + ports
}

// expect returns what has to be served.
func (w *model) expect() map[id]*resource {
	out := map[id]*resource{}
	var known []*contender // served, or merged into one that is
	for _, name := range w.names {
		tr := w.retained(name)
		for _, n := range slices.Sorted(maps.Keys(tr.routes)) {
			if n := (id{virtualService, n}); out[n] == nil {
				out[n] = &resource{registry: name, spec: spec{host: tr.routes[n.name]}}
			}
		}
		for _, n := range slices.Sorted(maps.Keys(tr.services)) {
			c := &contender{registry: name, name: n, service: tr.services[n]}
			var owner *contender
			for _, o := range known {
				if o.name == n && o.lead == nil {
					owner = o
				}
			}
			is, by := "", (*contender)(nil)
			against := func(o *contender) {
				sees := func(ns string) bool { return slices.Contains(o.readers(), ns) }
				if o.host != c.host || !slices.ContainsFunc(c.readers(), sees) || owner != nil && o != owner && o.lead != owner {
					return
				}
				now := c.after(o)
				if now == "beside" && owner != nil {
					now = "shadowed"
				}
				if is == "" || is == "beside" && now != "beside" {
					is, by = now, o
				}
			}
			for _, o := range known {
				if o.registry == name {
					against(o)
				}
			}
			for _, o := range known {
				if o.registry != name && o.lead == nil && (is == "" || is == "beside") {
					against(o)
				}
			}
			switch {
			case is == "merged":
				c.lead = by
				by.members = append(by.members, c)
			case is == "shadowed", owner != nil:
				continue
			}
			known = append(known, c)
		}
	}
	for _, lead := range known {
		if lead.lead == nil {
			lead.serve(out)
		}
	}
	return out
}

// serve adds what is served of a service and those that are merged into it.
func (c *contender) serve(out map[id]*resource) {
	entry := &resource{registry: c.registry, spec: c.spec}
	out[id{serviceEntry, c.name}] = entry
	weighted, total := c.isWeighted() && len(c.members) > 0, uint64(0)
	for _, share := range weights {
		total += uint64(share)
	}
	taken := map[string]bool{}
	for _, of := range append([]*contender{c}, c.members...) {
		share, sum := uint64(weights[of.registry]), uint64(0)
		if weighted && share == 0 {
			continue
		}
		var mine, names []string
		for _, n := range slices.Sorted(maps.Keys(of.instances)) {
			e := of.instances[n]
			if tells := c.tells(of, e); !taken[tells] {
				mine, names = append(mine, tells), append(names, n)
				sum += uint64(max(e.weight, 1))
			}
		}
		for _, n := range names {
			e := of.instances[n]
			if weighted {
				e.weight = uint32((1<<28*share*uint64(max(e.weight, 1)) + total*sum/2) / (total * sum))
			}
			if of != c {
				e.ports, _ = c.portsOf(of, e)
				ns, short, _ := strings.Cut(n, "/")
				n = path.Dir(c.name) + "/" + short + "." + ns + "." + of.registry
			}
			out[id{workloadEntry, n}] = &resource{registry: c.registry, service: c.name, spec: c.spec, endpoint: e}
			entry.endpoints = append(entry.endpoints, e.String())
			entry.members = append(entry.members, fmt.Sprint(e, " ", of.registry, " ", n))
		}
		for _, tells := range mine {
			taken[tells] = true
		}
	}
	slices.Sort(entry.endpoints)
	slices.Sort(entry.members)
}

// retained returns what a registry has, with what is held back of its removals.
func (w *model) retained(name string) *truth {
	tr, out := w.truths[name], newTruth()
	out.routes = maps.Clone(tr.routes)
	for n, s := range tr.services {
		out.services[n] = &service{s.spec, maps.Clone(s.instances)}
	}
	kept := slices.Collect(w.db.Removals(name))
	for _, k := range kept {
		n := id{k.Collection, k.Name}
		switch n.collection {
		case serviceEntry:
			out.services[n.name] = &service{tr.gone[n].spec, map[string]endpoint{}}
		case virtualService:
			out.routes[n.name] = tr.gone[n].spec.host
		}
	}
	for _, k := range kept {
		if k.Collection == workloadEntry {
			out.services[k.Service].instances[k.Name] = tr.gone[id{k.Collection, k.Name}].endpoint
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

// check compares the state with the model, after a step.
func (w *model) check(step int) {
	w.t.Helper()
	w.now = step + 1
	w.note(w.now)
	w.compare(w.was)
}

// note notes what has to be served, and what changed since it did so last.
func (w *model) note(step int) {
	now := w.expect()
	for n := range now {
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
			w.changed[n] = step
		}
		if was.registry != is.registry {
			w.handed[n] = step
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
	full    string            // version of the newest full response
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
	r.sub, r.nonce, r.full = view.NewSubscription(r.view(), o), "", ""
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
		if resp.Version == r.full && !r.again {
			t.Errorf("%s: %+v: all of version %s is sent again", r.w.op, r.filter, r.full)
		}
		r.full = resp.Version
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
			len(f.Namespaces) > 0 && !slices.Contains(f.Namespaces, ns) || !f.Shards.All() && !f.Shards.Has(res.spec.host) ||
			len(f.Hosts) > 0 && !slices.ContainsFunc(f.Hosts, func(p string) bool {
				prefix, suffix, _ := strings.Cut(p, "*")
				return strings.HasPrefix(res.spec.host, prefix) && strings.HasSuffix(res.spec.host, suffix)
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
		var ports, endpoints []string
		for _, p := range b.GetPorts() {
			ports = append(ports, fmt.Sprintf("%s:%d", p.GetName(), p.GetNumber()))
		}
		for _, e := range b.GetEndpoints() {
			endpoints = append(endpoints, endpointOf(e).String())
		}
		slices.Sort(endpoints)
		out = spec{b.GetHosts()[0], strings.Join(ports, ","), strings.Join(b.GetExportTo(), ",")}.String()
		out = strings.TrimSpace(out + " " + strings.Join(endpoints, " "))
	case *networking.WorkloadEntry:
		out = endpointOf(b).String()
	case *networking.VirtualService:
		out = b.GetHosts()[0]
	}
	if registry, printed := res.GetMetadata().GetAnnotations()[encode.RegistryAnnotation]; printed {
		out += " of " + registry
	}
	return out
}

func endpointOf(e *networking.WorkloadEntry) endpoint {
	var ports []string
	for name, number := range e.GetPorts() {
		ports = append(ports, fmt.Sprintf("%s:%d", name, number))
	}
	slices.Sort(ports)
	return endpoint{e.GetAddress(), strings.Join(ports, ","), e.GetWeight()}
}

func entry(name string, s spec) *pluginv1.Upsert {
	se := &networking.ServiceEntry{Hosts: []string{s.host}, Resolution: networking.ServiceEntry_STATIC}
	for _, p := range namedPorts(s.ports) {
		se.Ports = append(se.Ports, &networking.ServicePort{Name: p.name, Number: p.number, Protocol: "HTTP"})
	}
	if s.exportTo != "" {
		se.ExportTo = []string{s.exportTo}
	}
	return &pluginv1.Upsert{Service: name, Resource: testresource.Encode(testresource.Named(name), se)}
}

func member(service, name string, e endpoint) *pluginv1.Upsert {
	we := &networking.WorkloadEntry{Address: e.address, Weight: e.weight}
	for _, p := range namedPorts(e.ports) {
		we.Ports = map[string]uint32{p.name: p.number}
	}
	return &pluginv1.Upsert{Service: service, Resource: testresource.Encode(testresource.Named(name), we)}
}

func route(name, host string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Resource: testresource.Encode(testresource.Named(name), &networking.VirtualService{Hosts: []string{host}})}
}
