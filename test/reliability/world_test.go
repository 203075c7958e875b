package reliability

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/internal/watch"
	"github.com/isthmus-mesh/isthmus/verify"
)

const (
	serviceEntry  = "networking.istio.io/ServiceEntry"
	workloadEntry = "networking.istio.io/WorkloadEntry"
	entryType     = "networking.istio.io/v1/ServiceEntry"
	perService    = 10
)

// registry is one that a world changes.
type registry struct {
	name     string // of the registry, and its namespace
	services int
	net      int    // second number of the addresses
	host     string // of a service, without its name
	gate     *testenv.Gate
	down     bool // it cannot be changed now
}

// world is a Consul and a Nacos behind gates, a sim registry beside them, a
// bridge, and sinks behind gates that the judge listens to.
type world struct {
	t          *testing.T
	rand       *rand.Rand
	consul     *testconsul.Server
	nacos      *testnacos.Server
	registries []*registry
	answers    *answers // what Consul's answers are replaced by
	bridge     *testisthmus.Server
	istiod     *testistiod.Server
	gates      []*testenv.Gate // between the bridge and its sinks
	state      string          // directory of the last good state
	sim        string          // configuration of the registry beside
	began      time.Time       // the first instance of each service is there since
	known      time.Time       // all that the registries had then is in the bridge, and on disk
	token      token

	client *testnacos.Client // registers all instances of Nacos
	nacosN map[int]map[int]testnacos.Instance

	mu         sync.Mutex // guards the fields below
	judge      *verify.Judge
	revision   uint64
	there      map[string]uint64 // revisions in the registries, by service and address
	since      map[string]time.Time
	sinks      []*sink
	mesh       mesh
	streams    int // of sinks that come and go
	violations []verify.Violation
	record     io.Writer
}

// sink is what one sink has of the registries, by service.
type sink struct {
	protocol string
	have     map[string][]verify.Endpoint
	waits    bool // for the first response of its stream
}

// options are those of a world.
type options struct {
	sim   string // config block of the registry beside
	seed  uint64 // decides the changes
	state string // directory of the last good state
}

// newWorld starts everything.
func newWorld(t *testing.T, o options) *world {
	w := &world{
		t: t, rand: rand.New(rand.NewPCG(o.seed, 13)), judge: verify.New(), there: map[string]uint64{}, since: map[string]time.Time{}, state: o.state, nacosN: map[int]map[int]testnacos.Instance{},
	}
	w.judge.PutsBack = true
	file, err := os.Create(filepath.Join(t.ArtifactDir(), "recording.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		file.Close()
		if t.Failed() {
			t.Logf("what was judged, without sim: %s, kept with -artifacts", file.Name())
		}
	})
	w.record = file
	w.consul = testconsul.Start(t, testconsul.Config{Persistent: true, ACL: true})
	w.token.create(w)
	w.answers = newAnswers(t, w.consul.Addr)
	front := httptest.NewServer(w.answers)
	t.Cleanup(front.Close)
	w.nacos = testnacos.Start(t, testnacos.Config{})
	t.Cleanup(func() {
		if t.Failed() {
			for s := range w.nacosN {
				name := fmt.Sprintf("s%d", s)
				t.Logf("Nacos has of %s: %s", name, w.nacos.Admin(t, http.MethodGet, "/v3/client/ns/instance/list", url.Values{"serviceName": {name}}))
			}
		}
	})
	w.client = w.nacos.Client(t)
	w.registries = []*registry{
		{name: "dc1", services: 20, net: 7, host: ".service.consul", gate: testenv.NewGate(t, front.Listener.Addr().String())},
		{name: "dc2", services: 12, net: 8, host: ".nacos", gate: testenv.NewGate(t, w.nacos.GRPC)},
	}
	w.add(&verify.Event{Kind: verify.Start})
	for _, r := range w.registries {
		r.gate.Open(t)
		for s := range r.services {
			w.add(&verify.Event{Kind: verify.Truth, Collection: serviceEntry, Name: r.service(s), Revision: 1})
			for n := range perService {
				if n == 0 || w.rand.IntN(2) == 0 {
					w.set(r, s, n, true)
				}
			}
		}
	}
	w.began = time.Now()
	w.sim = o.sim
	w.bridge = testisthmus.StartWithViews(t, w.configuration(*consulGrace, ""), "{registries: [dc1, dc2]}")
	for _, address := range []string{w.bridge.XDS, w.bridge.Views[0]} {
		g := testenv.NewGate(t, address)
		g.Open(t)
		w.gates = append(w.gates, g)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		group.Wait()
	})
	for n, p := range []struct {
		protocol string
		gate     int
	}{{"delta", 0}, {"sotw", 0}, {"delta", 1}, {"sotw", 1}} {
		if p.protocol == "sotw" && p.gate == 0 && *worlds > 1 {
			continue // too much for several worlds on one machine
		}
		s := &sink{protocol: p.protocol, have: map[string][]verify.Endpoint{}}
		w.sinks = append(w.sinks, s)
		// The names of instances are the adapter's; their addresses are ours.
		o := watch.Options{Address: w.gates[p.gate].Addr, Protocol: p.protocol, Shape: "inline", Types: []string{entryType}}
		o.Record = recorder(func(e *verify.Event) error {
			if e.Kind == verify.Open && p.protocol == "sotw" { // its versions are those of a view
				e.Form = fmt.Sprint("view ", p.gate)
			}
			e.Stream = (e.Stream-1)*4 + n + 1
			w.mu.Lock()
			defer w.mu.Unlock()
			w.addLocked(e)
			s.apply(e)
			return nil
		})
		group.Go(func() { // ends with cancel
			if err := watch.Run(ctx, o, io.Discard); err != nil {
				t.Error(err)
			}
		})
	}
	w.bridge.WaitReady(t)
	w.istiod = testistiod.Start(t, testistiod.Newest, "xds://"+w.gates[1].Addr)
	w.istiod.WaitReady(t)
	w.mesh.have = map[string][]string{}
	proxy := testistiod.StartRecorder(t, w.istiod)
	proxy.OnEndpoints(w.meshHas)
	return w
}

// configuration returns the registries of the bridge, with another remove_grace
// of Consul and further ones.
func (w *world) configuration(grace time.Duration, more string) string {
	consul, nacos := w.registries[0].gate.Addr, w.registries[1].gate.Addr
	return fmt.Sprintf(`
- {name: dc1, type: consul, config: {address: "http://%s", mode: address, token_file: %q, remove_grace: %v}, translate: {namespace: dc1}}
- {name: dc2, type: nacos, config: {servers: [%q], protocol: grpc, grpc_port_offset: %d, remove_grace: %v}, translate: {namespace: dc2, name: "{{.Name}}", host: "{{.Name}}.nacos"}}
- {name: load, type: sim, config: %s, translate: {namespace: load}}
%s
state: {dir: %q}
`, consul, w.token.file, grace, w.nacos.Addr, portOf(nacos)-portOf(w.nacos.Addr), *nacosGrace, w.sim, more, w.state)
}

func portOf(address string) int {
	n, _ := strconv.Atoi(address[strings.LastIndexByte(address, ':')+1:])
	return n
}

// recorder passes on the events of a recording.
type recorder func(*verify.Event) error

// Write implements io.Writer for whole lines.
func (r recorder) Write(line []byte) (int, error) {
	return len(line), verify.Read(bytes.NewReader(line), func(_ int, e *verify.Event) error { return r(e) })
}

func (w *world) add(e *verify.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.addLocked(e)
}

func (w *world) addLocked(e *verify.Event) {
	e.Time = time.Now() // the order in which the judge hears of it
	w.violations = append(w.violations, w.judge.Add(e)...)
	short := *e
	short.Resources = nil
	for _, r := range e.Resources {
		if w.judged(r.Name) {
			short.Resources = append(short.Resources, r)
		}
	}
	short.Versions = nil
	for name, v := range e.Versions {
		if w.judged(name) {
			if short.Versions == nil {
				short.Versions = map[string]string{}
			}
			short.Versions[name] = v
		}
	}
	line, err := short.Append(nil)
	if err == nil {
		_, err = w.record.Write(line)
	}
	if err != nil {
		w.t.Error(err)
	}
}

// judged reports whether the name is of a registry that the world changes.
func (w *world) judged(name string) bool {
	return strings.HasPrefix(name, "dc1/") || strings.HasPrefix(name, "dc2/")
}

func (r *registry) service(s int) string     { return fmt.Sprintf("%s/s%d", r.name, s) }
func (r *registry) instance(s, n int) string { return fmt.Sprintf("%s/s%d-%d", r.name, s, n) }
func (r *registry) address(s, n int) string  { return fmt.Sprintf("10.%d.%d.%d", r.net, s, n+1) }

// key is what is there under w.there.
func (r *registry) key(s, n int) string { return r.service(s) + " " + r.address(s, n) + ":8080" }

// set registers an instance with a new revision, or removes it; the truth says
// so first.
func (w *world) set(r *registry, s, n int, there bool) {
	w.t.Helper()
	w.mu.Lock()
	w.revision++
	revision := w.revision + 1
	w.addLocked(&verify.Event{
		Kind: verify.Truth, Collection: workloadEntry, Name: r.instance(s, n), Service: r.service(s), Address: r.address(s, n) + ":8080", Revision: revision, Absent: !there,
	})
	key := r.key(s, n)
	if _, was := w.there[key]; there && !was {
		w.since[key] = time.Now()
	}
	if there {
		w.there[key] = revision
	} else {
		delete(w.there, key)
	}
	w.mu.Unlock()
	id := strings.TrimPrefix(r.instance(s, n), r.name+"/")
	meta := map[string]string{verify.RevisionLabel: strconv.FormatUint(revision, 10), "protocol": "http"}
	switch {
	case r.name == "dc2":
		if w.nacosN[s] == nil {
			w.nacosN[s] = map[int]testnacos.Instance{}
		}
		delete(w.nacosN[s], n)
		if there {
			i := testnacos.Up(r.address(s, n), 8080)
			i.Metadata = meta
			w.nacosN[s][n] = i
		}
		w.registerNacos(s)
	case there:
		w.consul.Register(w.t, testconsul.Instance{
			Service: fmt.Sprintf("s%d", s), ID: id, Address: r.address(s, n), Port: 8080, Tags: []string{"http"}, Meta: meta,
		})
	default:
		w.consul.Deregister(w.t, id)
	}
}

// registerNacos registers the instances of a service. A client whose connection
// ended connects again and registers everything, as those of applications do.
func (w *world) registerNacos(s int) {
	w.t.Helper()
	register := func(s int) error {
		all := slices.Collect(maps.Values(w.nacosN[s]))
		ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Second)
		defer cancel()
		return w.client.TryRegister(ctx, "public", "DEFAULT_GROUP", fmt.Sprintf("s%d", s), all...)
	}
	if register(s) == nil {
		return
	}
	testenv.Eventually(w.t, 2*testenv.Patience, "the instances to be registered in Nacos again", func() (string, bool) {
		w.client.Close()
		w.client = w.nacos.Client(w.t)
		for s := range w.nacosN {
			if err := register(s); err != nil {
				return err.Error(), false
			}
		}
		return "", true
	})
}

// churn makes changes; the first instance of each service stays.
func (w *world) churn(changes int) {
	w.t.Helper()
	for range changes {
		r := w.registries[min(w.rand.IntN(3), 1)]
		s, n := w.rand.IntN(r.services), 1+w.rand.IntN(perService-1)
		keep := w.rand.IntN(3) > 0
		if r.down {
			continue
		}
		w.mu.Lock()
		_, there := w.there[r.key(s, n)]
		w.mu.Unlock()
		w.set(r, s, n, !there || keep)
	}
}

// apply keeps what the sink has of the registries.
func (s *sink) apply(e *verify.Event) {
	switch e.Kind {
	case verify.Open:
		s.waits = true
		return
	case verify.Response:
		s.waits = false
	default:
		return
	}
	if !e.Incremental {
		clear(s.have)
	}
	for _, r := range e.Resources {
		if strings.HasPrefix(r.Name, "dc") {
			s.have[r.Name] = r.Endpoints
		}
	}
	for _, name := range e.Removed {
		delete(s.have, name)
	}
}

// serves reports whether any sink has an instance.
func (w *world) serves(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.sinks, func(s *sink) bool {
		_, has := s.instances()[key]
		return has
	})
}

// instances returns the revisions that the sink has, by service and address.
func (s *sink) instances() map[string]uint64 {
	out := make(map[string]uint64)
	for name, endpoints := range s.have {
		for _, p := range endpoints {
			out[name+" "+p.Address] = p.Revision
		}
	}
	return out
}

// mesh is what a proxy behind istiod has: one stream whose resources are the
// endpoints of a service, without revisions.
//
// A bridge that starts may be behind what the one before has served, see
// docs/guarantees.md, and what that one served may reach the proxy later. So
// from such a start until all have converged there is no stream, and what the
// registries have had all the time since what was saved must not be missing.
type mesh struct {
	stream, n int                 // stream is 0 after a start
	saved     time.Time           // what the bridge that started has on disk
	have      map[string][]string // endpoints by name
}

// judgeLocked begins the stream with what the proxy has.
func (m *mesh) judgeLocked(w *world) {
	if m.stream != 0 {
		return
	}
	w.streams++
	m.stream = firstExtra + w.streams
	w.addLocked(&verify.Event{Kind: verify.Open, Stream: m.stream, Protocol: "eds", Shape: "inline"})
	w.addLocked(&verify.Event{Kind: verify.Request, Stream: m.stream, Type: entryType})
	all := make([]verify.Resource, 0, len(m.have))
	for _, name := range slices.Sorted(maps.Keys(m.have)) {
		all = append(all, m.resource(name))
	}
	m.respondLocked(w, all)
}

// resource is what the proxy has of a service. Each has a version of its own,
// as istiod sends endpoints again that are as they were.
func (m *mesh) resource(name string) verify.Resource {
	m.n++
	version := fmt.Sprint(m.n)
	r := verify.Resource{Name: name, Version: version, Sum: version, Content: version}
	for _, address := range m.have[name] {
		r.Endpoints = append(r.Endpoints, verify.Endpoint{Address: address})
	}
	return r
}

func (m *mesh) respondLocked(w *world, set []verify.Resource, removed ...string) {
	m.n++
	nonce := fmt.Sprint(m.n)
	w.addLocked(&verify.Event{Kind: verify.Response, Stream: m.stream, Type: entryType, Nonce: nonce, Incremental: true, Resources: set, Removed: removed})
	w.addLocked(&verify.Event{Kind: verify.Request, Stream: m.stream, Type: entryType, Nonce: nonce})
}

// firstExtra is before the numbers of the streams that no watch has.
const firstExtra = 1_000_000

// meshHas tells the judge what istiod sent to a proxy.
func (w *world) meshHas(cluster string, endpoints []string) {
	name := w.nameOf(cluster)
	if name == "" {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m := &w.mesh
	if endpoints == nil {
		delete(m.have, name)
	} else {
		m.have[name] = endpoints
	}
	switch {
	case m.stream == 0:
		for key := range w.there {
			service, address, _ := strings.Cut(key, " ")
			if service == name && w.since[key].Before(m.saved) && !slices.Contains(endpoints, address) {
				w.violations = append(w.violations, verify.Violation{
					Guarantee: verify.NoRemovalWithoutCause, Time: time.Now(), Text: fmt.Sprintf("a proxy behind istiod lacks %s, which is there since %v", key, w.since[key]),
				})
			}
		}
	case endpoints == nil:
		m.respondLocked(w, nil, name)
	default:
		m.respondLocked(w, []verify.Resource{m.resource(name)})
	}
}

// nameOf returns the name of the ServiceEntry of a cluster, "" if it is of
// another registry.
func (w *world) nameOf(cluster string) string {
	_, host, _ := strings.Cut(cluster, "||")
	for _, r := range w.registries {
		if service, ok := strings.CutSuffix(host, r.host); ok {
			return r.name + "/" + service
		}
	}
	return ""
}

// missingLocked says what a proxy behind istiod does not have as it is in the
// registries.
func (w *world) missingLocked() string {
	have := map[string]bool{}
	for name, endpoints := range w.mesh.have {
		for _, address := range endpoints {
			have[name+" "+address] = true
		}
	}
	for key := range w.there {
		if !have[key] {
			return "lacks " + key
		}
		delete(have, key)
	}
	if len(have) > 0 {
		return fmt.Sprintf("still has %v", slices.Sorted(maps.Keys(have)))
	}
	return ""
}

// converge waits until every sink has what the registries have and returns how
// long that took.
func (w *world) converge(what string) time.Duration {
	w.t.Helper()
	began := time.Now()
	testenv.Eventually(w.t, 4*testenv.Patience, "all sinks to have what the registries have after "+what, func() (string, bool) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for n, s := range w.sinks {
			if s.waits {
				return fmt.Sprintf("sink %d (%s) waits for the first response of its stream", n, s.protocol), false
			}
			have := s.instances()
			if maps.Equal(w.there, have) {
				continue
			}
			var differ []string
			for key, revision := range w.there {
				if have[key] != revision {
					differ = append(differ, fmt.Sprintf("%s: %d, want %d", key, have[key], revision))
				}
			}
			for key, revision := range have {
				if _, ok := w.there[key]; !ok {
					differ = append(differ, fmt.Sprintf("%s: %d, want none", key, revision))
				}
			}
			slices.Sort(differ)
			return fmt.Sprintf("sink %d (%s) has %d of %d: %.600v", n, s.protocol, len(have), len(w.there), differ), false
		}
		if differs := w.missingLocked(); differs != "" {
			return "a proxy behind istiod " + differs, false
		}
		w.mesh.judgeLocked(w)
		w.addLocked(&verify.Event{Kind: verify.Settled, Names: []string{"dc1", "dc2"}})
		return "", true
	})
	return time.Since(began)
}

// started tells the judge that a bridge starts, with what it saved until then.
func (w *world) started(since time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.addLocked(&verify.Event{Kind: verify.Start, Since: since})
	if w.mesh.stream != 0 {
		w.addLocked(&verify.Event{Kind: verify.End, Stream: w.mesh.stream})
	}
	w.mesh.stream, w.mesh.saved = 0, since
}

// parent returns the parent of a process.
func parent(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	if pid, err = strconv.Atoi(strings.Fields(rest)[1]); err != nil {
		t.Fatal(err)
	}
	return pid
}

// found returns the violations since the last call.
func (w *world) found() []verify.Violation {
	w.mu.Lock()
	defer w.mu.Unlock()
	v := w.violations
	w.violations = nil
	return v
}

// token is the one of the plugin of Consul.
type token struct {
	file   string
	policy *api.ACLPolicy
	acl    *api.ACLToken
}

func (k *token) create(w *world) {
	w.t.Helper()
	acl := w.consul.Client.ACL()
	var err error
	if k.policy, _, err = acl.PolicyCreate(&api.ACLPolicy{Name: "bridge", Rules: `service_prefix "" { policy = "read" } node_prefix "" { policy = "read" }`}, nil); err != nil {
		w.t.Fatal(err)
	}
	k.grant(w, "")
	k.file = filepath.Join(w.t.TempDir(), "token")
	if err := os.WriteFile(k.file, []byte(k.acl.SecretID), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// grant makes the token, with a new secret if it is "".
func (k *token) grant(w *world, secret string) {
	w.t.Helper()
	var err error
	if k.acl, _, err = w.consul.Client.ACL().TokenCreate(&api.ACLToken{SecretID: secret, Policies: []*api.ACLTokenPolicyLink{{ID: k.policy.ID}}}, nil); err != nil {
		w.t.Fatal(err)
	}
}

func (k *token) revoke(w *world) {
	w.t.Helper()
	if _, err := w.consul.Client.ACL().TokenDelete(k.acl.AccessorID, nil); err != nil {
		w.t.Fatal(err)
	}
}
