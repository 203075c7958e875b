package consul

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/adapters/consul/plan"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// fakeConsul answers the queries that the adapter makes as Consul does, waits
// included. Any other query fails the test.
type fakeConsul struct {
	t testing.TB
	// http1 makes each query take a connection, as over plain HTTP.
	http1 bool

	mu       sync.Mutex        // guards everything below
	index    uint64            // of the services' table
	checks   uint64            // of the checks' table, which every change of an instance changes too
	nodes    uint64            // of the nodes' table
	configs  uint64            // of the table of configuration entries
	defaults map[string]string // protocols of service-defaults entries
	now      int               // queries under way
	most     int               // the most of them at a time
	changed  chan struct{}     // closed and replaced at each change of anything below
	services map[string]*fakeService
	gone     map[string]uint64           // the index at which a service lost its last instance
	failing  map[string]api.HealthChecks // of nodes, by the path that shows them
	// answer, when it returns true, has answered in Consul's stead.
	answer func(w http.ResponseWriter, r *http.Request) bool
	// down makes every request fail, those that wait too, without an answer:
	// err is what the client sees.
	down  error
	tries int            // requests that failed for it
	calls map[string]int // by path
	// passes is how long a balancer in front lets a query wait, 0 for any time.
	// It ends such a query, and what is cut, with the status ends, which is not
	// Consul's.
	passes time.Duration
	ends   int
	// stale permits queries of any server, which is so far behind the leader.
	stale   bool
	behind  time.Duration
	leaders int // queries that only the leader may answer
	// cuts counts the times that what waited was cut off, and cutting is the
	// path that the last one was about, "" for all.
	cuts    int
	cutting string
}

type fakeService struct {
	index   uint64
	checked uint64 // when its checks last changed
	entries []*api.ServiceEntry
	// filtered says that the token may not read everything: it sees only the
	// first instances, as many as visible says.
	filtered bool
	visible  int
}

func newFake(t testing.TB) *fakeConsul {
	f := &fakeConsul{t: t, index: 100, changed: make(chan struct{}), services: map[string]*fakeService{}, gone: map[string]uint64{}, calls: map[string]int{}}
	f.set("consul", entry("consul", "server1", 8300))
	return f
}

// entry is one passing instance on node n1.
func entry(service, id string, port int) *api.ServiceEntry {
	return &api.ServiceEntry{
		Node:    &api.Node{Node: "n1", Address: "10.0.0.1", Datacenter: "dc1"},
		Service: &api.AgentService{ID: id, Service: service, Port: port, Weights: api.AgentWeights{Passing: 1, Warning: 1}},
		Checks:  api.HealthChecks{{CheckID: "serfHealth", Status: api.HealthPassing}},
	}
}

// change runs fn on the fake's state and wakes what waits.
func (f *fakeConsul) change(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
	close(f.changed)
	f.changed = make(chan struct{})
}

// set replaces the instances of a service; none takes it off the listing.
func (f *fakeConsul) set(name string, entries ...*api.ServiceEntry) {
	f.change(func() { f.setLocked(name, entries...) })
}

func (f *fakeConsul) setLocked(name string, entries ...*api.ServiceEntry) {
	f.index = max(f.index, f.checks, f.nodes) + 1
	if len(entries) == 0 {
		delete(f.services, name)
		f.gone[name] = f.index
		return
	}
	f.services[name] = &fakeService{index: f.index, checked: f.index, entries: entries}
}

// flip changes a service in one table alone: its checks', the nodes', or with
// index the services'.
func (f *fakeConsul) flip(table *uint64, name string, entries ...*api.ServiceEntry) {
	f.change(func() {
		*table = max(f.index, f.checks, f.nodes) + 1
		s := &fakeService{index: *table, entries: entries}
		if s.checked = *table; table != &f.checks {
			s.checked = f.services[name].checked
		}
		f.services[name] = s
	})
}

// replace puts an empty server in the place of this one: everything but its own
// service is gone, and its index is low.
func (f *fakeConsul) replace(index uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.services = map[string]*fakeService{"consul": f.services["consul"]}
	f.services["consul"].index = index
	f.gone = map[string]uint64{}
	f.index, f.checks, f.nodes = index, 0, 0
}

func (f *fakeConsul) setDown(err error) { f.change(func() { f.down = err }) }
func (f *fakeConsul) setAnswer(fn func(w http.ResponseWriter, r *http.Request) bool) {
	f.change(func() { f.answer = fn })
}

// tried returns how many requests failed because of setDown.
func (f *fakeConsul) tried() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tries
}

// cut breaks the connections of the requests that wait, those to one path or
// with "" all.
func (f *fakeConsul) cut(path string) { f.change(func() { f.cuts++; f.cutting = path }) }

// count returns how many requests there were to the path since the last call.
func (f *fakeConsul) count(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.calls[path]
	f.calls[path] = 0
	return n
}

func (f *fakeConsul) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.calls[r.URL.Path]++
	answer, cuts, passes, ends, stale, behind := f.answer, f.cuts, f.passes, f.ends, f.stale, f.behind
	lags := behind > time.Duration(DefaultConfig.MaxStale)
	if !r.URL.Query().Has("stale") {
		f.leaders++
		behind = 0
	}
	f.mu.Unlock()
	if answer != nil && answer(w, r) {
		return
	}
	if r.URL.Path == "/v1/agent/self" {
		w.WriteHeader(http.StatusForbidden)
		return
	}
	q := r.URL.Query()
	index, _ := strconv.ParseUint(q.Get("index"), 10, 64)
	var wait time.Duration
	if index > 0 {
		ms, err := time.ParseDuration(q.Get("wait"))
		if err != nil {
			f.t.Errorf("%s: blocking query without wait", r.URL)
		}
		wait = ms
	}
	if q.Has("passing") || q.Has("cached") {
		f.t.Errorf("%s: passing and cached gain nothing and cost the server", r.URL)
	}
	measures := stale && r.URL.Path == healthPath+serversService && index == 0
	if q.Has("stale") != (stale && index > 0) && !measures && !lags {
		f.t.Errorf("%s: any server may answer what waits, where that is permitted, and nothing else", r.URL)
	}
	path := r.URL.Path
	if peer := q.Get("peer"); peer != "" { // imported services are in f.services as peer@name
		for _, begin := range []string{healthPath, lookPath} {
			path = strings.Replace(path, begin, begin+peer+"@", 1)
		}
		if path == r.URL.Path {
			f.t.Errorf("Consul does not tell %s of peers", r.URL)
		}
	}
	name, isHealth := strings.CutPrefix(path, healthPath)
	switch {
	case isHealth, r.URL.Path == listPath:
	case strings.HasPrefix(r.URL.Path, checksPath) && !q.Has("filter"):
	case strings.HasPrefix(r.URL.Path, lookPath) && q.Get("tag") == noTag && index == 0:
	case (r.URL.Path == criticalPath || r.URL.Path == warningPath) && q.Get("filter") == ofNodes:
	case r.URL.Path == nodesPath, r.URL.Path == defaultsPath, strings.HasPrefix(r.URL.Path, peeringPath):
	default:
		f.t.Errorf("unknown call %s %s", r.Method, r.URL)
		w.WriteHeader(http.StatusNotFound)
		return
	}
	ended := false
	if passes > 0 && wait > passes {
		wait, ended = passes, true
	}
	end := time.NewTimer(wait)
	defer end.Stop()
	for expired, began := wait == 0, true; ; began = false {
		f.mu.Lock()
		body, now, filtered := f.look(path, name, q.Get("filter"))
		wakes := now > index
		if probe, ok := strings.CutPrefix(r.URL.Path, checksPath); ok && !began {
			wakes = f.probed(probe) > index
		}
		changed, down := f.changed, f.down
		if down == nil && (expired || wakes) && (f.cuts == cuts || f.cutting != "" && f.cutting != r.URL.Path) {
			f.mu.Unlock()
			if behind > 0 && !wakes {
				now = index - 1 // of a server that has not everything yet
			}
			w.Header().Set("X-Consul-Index", strconv.FormatUint(now, 10))
			w.Header().Set("X-Consul-Lastcontact", strconv.FormatInt(behind.Milliseconds(), 10))
			w.Header().Set("X-Consul-Query-Backend", "blocking-query")
			w.Header().Set("X-Consul-Knownleader", strconv.FormatBool(behind == 0))
			if streamed := isHealth && index > 0; streamed {
				// As Consul 1.22 does: a stream's answer knows of no leader,
				// and of nothing that was filtered.
				w.Header().Set("X-Consul-Query-Backend", "streaming")
				w.Header().Set("X-Consul-Knownleader", "false")
			} else if filtered {
				w.Header().Set("X-Consul-Results-Filtered-By-Acls", "true")
			}
			_ = json.NewEncoder(w).Encode(body)
			return
		}
		cut := f.cuts > cuts && (f.cutting == "" || f.cutting == r.URL.Path)
		f.mu.Unlock()
		if cut && ends != 0 {
			http.Error(w, "bad gateway", ends)
			return
		}
		if down != nil || cut {
			panic(http.ErrAbortHandler)
		}
		select {
		case <-changed:
		case <-end.C:
			if expired = true; ended {
				http.Error(w, "upstream request timeout", ends)
				return
			}
		case <-r.Context().Done():
		}
		if r.Context().Err() != nil {
			return
		}
	}
}

// The paths of the queries that are about no service.
const (
	listPath     = "/v1/catalog/services"
	criticalPath = "/v1/health/state/critical"
	warningPath  = "/v1/health/state/warning"
	nodesPath    = "/v1/catalog/nodes"
	defaultsPath = "/v1/config/service-defaults"
	peeringPath  = "/v1/peering/"
	healthPath   = "/v1/health/service/"
	// checksPath and lookPath begin those of the queries about groups, and of
	// looks.
	checksPath = "/v1/health/checks/"
	lookPath   = "/v1/catalog/service/"
)

// probed returns when the checks last changed of a service that sorts beside a
// name which no service has, and begins as it does. The caller holds mu.
func (f *fakeConsul) probed(probe string) (index uint64) {
	prefix := probe[:len(probe)-1]
	for name, s := range f.services {
		if strings.HasPrefix(name, probe) {
			f.t.Errorf("service %s is among what %q asks for", name, probe)
		}
		if strings.HasPrefix(name, prefix) {
			index = max(index, s.checked)
		}
	}
	for name, at := range f.gone {
		if strings.HasPrefix(name, prefix) {
			index = max(index, at)
		}
	}
	return index
}

// look returns the body and the index of an answer. The caller holds mu.
func (f *fakeConsul) look(path, name, filter string) (body any, index uint64, filtered bool) {
	if strings.HasPrefix(path, checksPath) {
		return []any{}, max(f.index, f.checks), false
	}
	if peer, ok := strings.CutPrefix(path, peeringPath); ok {
		p := api.Peering{Name: peer, State: api.PeeringStateActive}
		for n := range f.services {
			if imported, ok := strings.CutPrefix(n, peer+"@"); ok {
				p.StreamStatus.ImportedServices = append(p.StreamStatus.ImportedServices, imported)
			}
		}
		return p, 1, false
	}
	var isLook bool
	if of, ok := strings.CutPrefix(path, lookPath); ok {
		name, isLook = of, true
	}
	switch path {
	case criticalPath, warningPath:
		return f.failing[path], max(f.index, f.checks, 1), false
	case nodesPath:
		return []any{}, max(f.nodes, 1), false
	case defaultsPath:
		entries := []map[string]string{}
		for name, protocol := range f.defaults {
			entries = append(entries, map[string]string{"Kind": "service-defaults", "Name": name, "Protocol": protocol})
		}
		return entries, max(f.configs, 1), false
	case listPath:
		names := map[string][]string{}
		for n := range f.services {
			if !strings.Contains(n, "@") {
				names[n] = []string{}
			}
		}
		return names, f.index, false
	}
	s := f.services[name]
	switch {
	case s == nil && f.gone[name] > 0:
		return []*api.ServiceEntry{}, f.gone[name], false
	case s == nil:
		return []*api.ServiceEntry{}, f.index, false
	case isLook:
		return []*api.CatalogService{}, s.index, false
	case s.filtered:
		return s.entries[:s.visible], s.index, true
	case filter != "":
		// The only filter that the fake knows is a tag.
		entries := slices.DeleteFunc(slices.Clone(s.entries), func(e *api.ServiceEntry) bool { return !slices.Contains(e.Service.Tags, filter) })
		return entries, s.index, false
	}
	return s.entries, s.index, false
}

// direct is a transport that calls the fake without a network, so that time can
// be fake too.
type direct struct{ f *fakeConsul }

func (d direct) RoundTrip(r *http.Request) (*http.Response, error) {
	d.f.mu.Lock()
	down := d.f.down
	d.f.now++
	d.f.most = max(d.f.most, d.f.now)
	if down != nil {
		d.f.tries++
	}
	d.f.mu.Unlock()
	defer func() {
		d.f.mu.Lock()
		d.f.now--
		d.f.mu.Unlock()
	}()
	if down != nil {
		return nil, down
	}
	rec := httptest.NewRecorder()
	done := make(chan error, 1)
	// Ends with the request's context at the latest; the caller of RoundTrip
	// waits for it.
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- io.ErrUnexpectedEOF
				return
			}
			done <- nil
		}()
		d.f.ServeHTTP(rec, r)
	}()
	if err := <-done; err != nil {
		return nil, err
	}
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	res := rec.Result()
	if !d.f.http1 {
		res.ProtoMajor = 2
	}
	return res, nil
}

// recorder is a catalog that tests look at.
type recorder struct{ *plugintest.Catalog }

func newRecorder() *recorder { return &recorder{plugintest.NewCatalog()} }

// held returns what the catalog holds.
func (r *recorder) held() (held plugintest.Held) {
	r.Look(func(h *plugintest.Held) { held = *h })
	return held
}

// state returns the present reason of the degraded state, "" for none, and how
// often it was set.
func (r *recorder) state() (reason string, calls int) {
	h := r.held()
	return h.Degraded, len(h.Reasons)
}

// view returns what the catalog holds: by service, "id address:port health" of
// each instance in order.
func (r *recorder) view() map[string][]string {
	v := map[string][]string{}
	r.Look(func(h *plugintest.Held) {
		for key, instances := range h.Instances {
			lines := []string{}
			for _, i := range instances {
				port := 0
				if len(i.Ports) > 0 {
					port = i.Ports[0].Number
				}
				line := i.ID + " " + i.Address + ":" + strconv.Itoa(port) + " " + i.Health.String()
				if i.Disabled {
					line += " disabled"
				}
				lines = append(lines, line)
			}
			v[key] = lines
		}
	})
	return v
}

func (r *recorder) counts() (sets, removes int, synced bool) {
	h := r.held()
	return h.Sets, h.Removes, h.Synced
}

// config is DefaultConfig with changes.
func config(change ...func(*Config)) Config {
	c := DefaultConfig
	for _, fn := range change {
		fn(&c)
	}
	return c
}

// start runs an adapter until the test, or the function that it returns, ends
// it.
func start(t testing.TB, a *Adapter) (r *recorder, stop func()) {
	t.Helper()
	r = newRecorder()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, r) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return r, stop
}

// atRest makes startFake leave no connection to any watch, so that all of them
// rest. TestAtRest sets it.
var atRest bool

// startFake runs an adapter against the fake, without a network.
func startFake(t testing.TB, f *fakeConsul, change ...func(*Config)) (*recorder, func()) {
	t.Helper()
	a, err := newAdapter(config(change...), plugin.Env{Registry: "test", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return startOver(t, a, f)
}

// startOver is startFake of an adapter that was made before.
func startOver(t testing.TB, a *Adapter, f *fakeConsul) (*recorder, func()) {
	t.Helper()
	a.clients.newTransport = func() http.RoundTripper { return direct{f} }
	a.clients.slots = nil
	if atRest {
		f.http1 = true
		a.clients.turns.plan = plan.New(0, cap(a.clients.turns.few)*3/4)
	}
	return start(t, a)
}

// errRefused is what a client sees where nothing listens.
var errRefused = &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connect: connection refused")}
