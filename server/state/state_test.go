package state

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

type env struct {
	t testing.TB
	*DB
}

func newEnv(t testing.TB, o Options, registries ...string) env {
	t.Helper()
	d := New(registries, o, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	return env{t, d}
}

// key names a resource.
type key struct{ collection, name string }

// decode returns a record as a sink of a form gets it.
func decode(t testing.TB, r *Record, f encode.Form) *mcp.Resource {
	t.Helper()
	e := r.Encode(encode.NewLayout(f))
	b := e.Append(nil)
	if segments := bytes.Join(e.Segments(nil), nil); len(b) != e.Size || !bytes.Equal(b, segments) {
		t.Fatalf("%s: Size is %d, there are %d and, in segments, %d bytes", r.Name(), e.Size, len(b), len(segments))
	}
	res := new(mcp.Resource)
	if err := proto.Unmarshal(b, res); err != nil {
		t.Fatal(err)
	}
	return res
}

func raw(name string, spec proto.Message) []byte {
	return testresource.Encode(testresource.Named(name), spec)
}

// entry is a service's ServiceEntry.
func entry(name, host string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: name, Resource: raw(name, &networking.ServiceEntry{Hosts: []string{host}, Resolution: networking.ServiceEntry_STATIC})}
}

func instance(service, name, address string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: service, Resource: raw(name, &networking.WorkloadEntry{Address: address})}
}

// workload is a WorkloadEntry that stands for itself.
func workload(name, address string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Resource: raw(name, &networking.WorkloadEntry{Address: address})}
}

// external is a ServiceEntry that stands for itself.
func external(name, host string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Resource: raw(name, &networking.ServiceEntry{Hosts: []string{host}, Resolution: networking.ServiceEntry_DNS})}
}

func route(name, host string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Resource: raw(name, &networking.VirtualService{Hosts: []string{host}})}
}

func gone(coll, name string) *pluginv1.Removal {
	return &pluginv1.Removal{Collection: coll, Name: name}
}

func upserts(u ...*pluginv1.Upsert) *pluginv1.WatchResponse {
	return &pluginv1.WatchResponse{Upserts: u}
}

const routes = "networking.istio.io/VirtualService"

var synced = &pluginv1.WatchResponse{Synced: true}

// served returns what sinks of both shapes get, as text: host and endpoints by
// name.
func (e env) served() (inline, workload map[string]string) {
	e.t.Helper()
	inline, workload = map[string]string{}, map[string]string{}
	for _, shape := range []encode.Shape{encode.Inline, encode.Workload} {
		out := inline
		if shape == encode.Workload {
			out = workload
		}
		for _, coll := range []string{collection.ServiceEntry, collection.WorkloadEntry, routes} {
			for c := range e.Changes(Kind{coll, shape}, &Cursor{}) {
				res := decode(e.t, c.Record, encode.Form{Shape: shape})
				body, err := res.GetBody().UnmarshalNew()
				if err != nil {
					e.t.Fatal(err)
				}
				switch b := body.(type) {
				case *networking.ServiceEntry:
					text := b.GetHosts()[0]
					for _, ep := range b.GetEndpoints() {
						text += " " + ep.GetAddress()
					}
					if sel := b.GetWorkloadSelector(); sel != nil {
						text += " selector"
					}
					out["se "+c.Name] = text
				case *networking.WorkloadEntry:
					out["we "+c.Name] = b.GetAddress() + " " + b.GetLabels()[encode.SelectorLabel]
				case *networking.VirtualService:
					out["vs "+c.Name] = b.GetHosts()[0]
				}
			}
		}
	}
	return inline, workload
}

func (e env) want(inline, workload map[string]string) {
	e.t.Helper()
	gotInline, gotWorkload := e.served()
	if d := cmp.Diff(inline, gotInline); d != "" {
		e.t.Errorf("inline (-want +got):\n%s", d)
	}
	if d := cmp.Diff(workload, gotWorkload); d != "" {
		e.t.Errorf("workload (-want +got):\n%s", d)
	}
}

// A service and a resource that stands for itself reach both shapes; an entry
// that was published as it is gets no selector.
func TestShapes(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	r.Begin([]string{collection.ServiceEntry})
	r.Apply(upserts(instance("dc1/web", "dc1/web-1", "10.0.0.1"), entry("dc1/web", "web.example.org"), entry("dc1/none", "none.example.org"), external("dc1/external", "api.example.org"), route("dc1/r", "r.example.org")))
	e.want(map[string]string{
		"se dc1/web": "web.example.org 10.0.0.1", "se dc1/none": "none.example.org", "se dc1/external": "api.example.org", "vs dc1/r": "r.example.org",
	}, map[string]string{
		"se dc1/web": "web.example.org selector", "we dc1/web-1": "10.0.0.1 web", "se dc1/none": "none.example.org selector",
		"se dc1/external": "api.example.org", "vs dc1/r": "r.example.org",
	})
}

// A collection is held until every registry that may publish to it has synced;
// a registry that has not said what it may publish holds them all.
func TestReady(t *testing.T) {
	e := newEnv(t, Options{}, "a", "b")
	if e.Initialized(collection.ServiceEntry) || e.Initialized(routes) || !e.Initialized("core/MeshConfig") {
		t.Error("before the first listing: ServiceEntry or VirtualService is open, or an unknown collection is held")
	}
	e.Registry("a").Begin([]string{collection.ServiceEntry})
	e.Registry("b").Begin([]string{collection.ServiceEntry, routes})
	e.Registry("a").Apply(synced)
	if got := e.Waiting(collection.ServiceEntry); !slices.Equal(got, []string{"b"}) || e.Initialized(routes) {
		t.Errorf("waiting for %v, want b", got)
	}
	wake := e.Changed()
	e.Registry("b").Apply(synced)
	if !e.Initialized(collection.ServiceEntry) || !e.Initialized(routes) {
		t.Error("not open although all registries are synced")
	}
	select {
	case <-wake:
	default:
		t.Error("whoever waits for the collection was not woken")
	}
	e.Registry("b").Down(errors.New("killed"))
	e.Registry("b").Begin([]string{collection.ServiceEntry, routes})
	if !e.Initialized(routes) {
		t.Error("a new listing holds a collection that was open")
	}
}

// Whether every registry is synced is known without the lock that a large batch
// holds.
func TestSyncedTakesNoLock(t *testing.T) {
	e := newEnv(t, Options{}, "a", "b")
	for _, step := range []struct {
		registry string
		want     bool
	}{{"a", false}, {"a", false}, {"b", true}} {
		e.Registry(step.registry).Begin(nil)
		e.Registry(step.registry).Apply(synced)
		e.apply.Lock()
		e.mu.Lock()
		if got := e.Synced(); got != step.want {
			t.Errorf("after a listing of %s: %v", step.registry, got)
		}
		e.mu.Unlock()
		e.apply.Unlock()
	}
}

// Only a complete new listing removes what it did not mention.
func TestListing(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), instance("dc1/web", "dc1/web-2", "10.0.0.2"), entry("dc1/old", "old"), route("dc1/r", "r")))
	r.Apply(synced)
	all, _ := e.served()
	r.Down(errors.New("killed"))
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-2", "10.0.0.2")))
	before := e.Revision()
	if now, _ := e.served(); !cmp.Equal(all, now) {
		t.Errorf("an incomplete listing removed something:\n%s", cmp.Diff(all, now))
	}
	r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: "connection refused"}})
	if s := r.Status(); !s.Stale() || e.Revision() != before {
		t.Errorf("degraded: %+v", s)
	}
	r.Apply(synced)
	e.want(map[string]string{"se dc1/web": "web 10.0.0.2"}, map[string]string{"se dc1/web": "web selector", "we dc1/web-2": "10.0.0.2 web"})
	before = e.Revision()
	r.Apply(synced)
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-2", "10.0.0.2")))
	r.Apply(synced)
	if e.Revision() != before {
		t.Errorf("the same listing again cost %d revisions", e.Revision()-before)
	}
}

// An outage is one warning and its end one line, whatever the plugin says in
// between.
func TestOutageIsLoggedOnce(t *testing.T) {
	i, log := logged(t, "dc1")
	r := i.Registry("dc1")
	r.Begin(nil)
	for _, reason := range []string{"", "connection refused", "connection refused", "no leader", "", ""} {
		r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: reason}})
	}
	if n := strings.Count(log.String(), "\n"); n != 2 || !strings.Contains(log.String(), "connection refused") || !strings.Contains(log.String(), "followed again") {
		t.Errorf("%d lines:\n%s", n, log.String())
	}
}

// A plugin whose state changes all the time has as many lines as one with
// problems. The latest state is logged in the end, with the number of changes
// that were left out before it, though the plugin says nothing more.
func TestFlappingIsFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i, log := logged(t, "dc1")
		go func() { _ = i.Run(t.Context()) }()
		r := i.Registry("dc1")
		r.Begin(nil)
		r.Apply(synced)
		lines := func(text string) int { return strings.Count(log.String(), text) }
		const away, back = "the registry cannot be followed", "the registry is followed again"
		flap := func(reason string) {
			r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: reason}})
		}
		const changes = 20_001
		for n := range changes {
			flap([]string{"connection refused", ""}[n%2])
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if got := lines(away) + lines(back); got != problems.MaxLines {
			t.Errorf("%d lines for %d changes within %v, want %d", got, changes, problems.Within, problems.MaxLines)
		}
		sleep(problems.Within)
		if got := lines(away) + lines(back); got != problems.MaxLines+1 || !strings.HasSuffix(log.String(),
			fmt.Sprintf("level=WARN msg=\"the registry cannot be followed; what is known is served\" registry=dc1 not_logged=%d err=\"connection refused\"\n", changes-problems.MaxLines)) {
			t.Errorf("after the window: %d lines:\n%s", got, log)
		}
		sleep(2 * problems.Within)
		flap("")
		if got := lines(away) + lines(back); got != problems.MaxLines+2 || !strings.HasSuffix(log.String(), "msg=\"the registry is followed again\" registry=dc1\n") {
			t.Errorf("afterwards: %d lines:\n%s", got, log)
		}
		// A plugin that ends in between leaves nothing to be said later.
		for n := range 2*problems.MaxLines + 1 {
			flap([]string{"no leader", ""}[n%2])
		}
		r.Down(errors.New("killed"))
		if got := lines("not_logged"); got != 2 {
			t.Errorf("%d lines with what was left out, want 2:\n%s", got, log)
		}
		n := lines("\n")
		sleep(10 * problems.Within)
		if lines("\n") != n {
			t.Errorf("more lines after the end:\n%s", log)
		}
	})
}

// A listing that does not end is told in the log after a minute and whenever
// its age has doubled, and in the state and metrics from its beginning, however
// often the plugin begins anew.
func TestListingThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log text
		reg := prometheus.NewRegistry()
		i := New([]string{"dc1", "dc2"}, Options{}, slog.New(slog.NewTextHandler(&log, nil)), reg)
		go func() { _ = i.Run(t.Context()) }()
		since := func() float64 {
			t.Helper()
			return metric(t, reg, "isthmus_registry_listing_since_timestamp_seconds", "dc1")
		}
		r := i.Registry("dc1")
		if since() != 0 || !r.Status().ListingSince.IsZero() {
			t.Error("a listing is incomplete before one began")
		}
		begun := time.Now()
		r.Begin(nil)
		r.Apply(upserts(entry("ns/web", "web"), instance("ns/web", "ns/web-1", "10.0.0.1")))
		sleep(30 * time.Second)
		r.Down(errors.New("killed"))
		r.Begin(nil)
		if got := r.Status().ListingSince; !got.Equal(begun) || since() != float64(begun.Unix()) {
			t.Errorf("incomplete since %v and %v, want %v", got, since(), begun)
		}
		sleep(20 * time.Second)
		if log.Len() != 0 {
			t.Errorf("too early:\n%s", &log)
		}
		sleep(11*time.Minute - time.Since(begun))
		var ages []string
		for _, m := range regexp.MustCompile(`level=WARN msg="the listing is still not complete; nothing is removed until it is" registry=dc1 for=(\S+) services=1 instances=1`).FindAllStringSubmatch(log.String(), -1) {
			ages = append(ages, m[1])
		}
		if want := []string{"1m0s", "2m0s", "4m0s", "8m0s"}; !slices.Equal(ages, want) {
			t.Errorf("lines at %v, want %v:\n%s", ages, want, &log)
		}
		r.Apply(synced)
		if since() != 0 || !r.Status().ListingSince.IsZero() {
			t.Error("a listing is incomplete after it was complete")
		}
		log.Reset()
		sleep(time.Hour)
		if log.Len() != 0 {
			t.Errorf("afterwards:\n%s", &log)
		}
	})
}

// sleep waits until a time has passed and everything has been done that was due
// by then.
func sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// A limit by bytes refuses what is new and what grows, and never takes away
// what is served, not even to put something else in its place. It is logged
// once and lists what it refused with the field that sets it.
func TestBytes(t *testing.T) {
	var log bytes.Buffer
	reg := prometheus.NewRegistry()
	fill := strings.Repeat("x", 1000)
	d := New([]string{"dc1"}, Options{MaxBytes: 5000}, slog.New(slog.NewTextHandler(&log, nil)), reg)
	e := env{t, d}
	r := e.Registry("dc1")
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), route("dc1/a", fill), route("dc1/b", fill), route("dc1/c", fill), route("dc1/d", fill)))
	r.Apply(synced)
	want, wantWorkload := e.served()
	if len(r.Problems()) != 0 || log.Len() == 0 {
		t.Fatalf("problems %v, log %s", r.Problems(), &log)
	}
	log.Reset()
	bytes := r.Status().Bytes
	if bytes < 4000 || bytes > 5000 {
		t.Errorf("%d bytes are counted", bytes)
	}
	r.Begin(nil)
	r.Apply(upserts(
		entry("dc1/web", "web"), route("dc1/a", fill+fill), route("dc1/b", fill), route("dc1/c", fill), route("dc1/d", fill),
		&pluginv1.Upsert{Service: "dc1/web", Resource: raw("dc1/web-1", &networking.WorkloadEntry{Address: "10.0.0.1", Network: fill})}, // grew
		instance("dc1/web", "dc1/web-2", strings.Repeat("1", 1000)),                                                                     // new
		route("dc1/new", fill),
	))
	// To put something that is larger in the place of an instance would take
	// the instance away.
	r.Apply(upserts(&pluginv1.Upsert{Resource: raw("dc1/web-1", &networking.WorkloadEntry{Address: "10.0.0.1", Network: fill})}))
	r.Apply(upserts(external("dc1/web", fill)))
	r.Apply(synced)
	if inline, workload := e.served(); !cmp.Equal(want, inline) || !cmp.Equal(wantWorkload, workload) {
		t.Errorf("(-want +got):\n%s%s", cmp.Diff(want, inline), cmp.Diff(wantWorkload, workload))
	}
	if got := r.Status(); got.Bytes != bytes || got.ProblemCount != 5 {
		t.Errorf("%d bytes and %d problems afterwards, want %d and 5", got.Bytes, got.ProblemCount, bytes)
	}
	for _, p := range r.Problems() {
		if !strings.Contains(p.Reason, "limits.bytes_per_registry (5000)") || !strings.Contains(p.Reason, "the last good one is served") {
			t.Errorf("%s: %s", p.ID, p.Reason)
		}
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 || !strings.Contains(log.String(), "limit=limits.bytes_per_registry value=5000") {
		t.Errorf("%d warnings:\n%s", n, &log)
	}
	if got := metric(t, reg, "isthmus_rejected_total", "dc1"); got != 6 {
		t.Errorf("%v refusals are counted, want 6", got)
	}
	// What shrinks makes room.
	r.Apply(upserts(route("dc1/b", "b"), route("dc1/new", "new")))
	if inline, _ := e.served(); inline["vs dc1/b"] != "b" || inline["vs dc1/new"] != "new" {
		t.Errorf("served %v", inline)
	}
}

// While a registry has never completed a listing, an outage holds what it may
// publish; that is not called served.
func TestOutageBeforeTheFirstListing(t *testing.T) {
	i, log := logged(t, "dc1")
	r := i.Registry("dc1")
	r.Begin(nil)
	down := &pluginv1.WatchResponse{Status: &pluginv1.Status{Error: "connection refused"}}
	r.Apply(down)
	if want := `msg="the registry cannot be followed; its types wait for its first listing" registry=dc1 err="connection refused"`; !strings.Contains(log.String(), want) {
		t.Errorf("the log lacks %s:\n%s", want, log)
	}
	r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{}, Synced: true})
	log.Reset()
	r.Apply(down)
	if want := `msg="the registry cannot be followed; what is known is served" registry=dc1`; !strings.Contains(log.String(), want) {
		t.Errorf("the log lacks %s:\n%s", want, log)
	}
}

// The first registry of the configuration owns a name, whoever came first; the
// other is served when it goes.
func TestOwnership(t *testing.T) {
	for _, order := range []string{"first", "second"} {
		e := newEnv(t, Options{}, "a", "b")
		a, b := e.Registry("a"), e.Registry("b")
		say := map[*Registry]*pluginv1.WatchResponse{
			a: upserts(entry("ns/web", "a.example.org"), instance("ns/web", "ns/web-a", "10.0.0.1"), route("ns/r", "a")),
			b: upserts(entry("ns/web", "b.example.org"), instance("ns/web", "ns/web-b", "10.0.0.2"), route("ns/r", "b")),
		}
		if order == "first" {
			a.Apply(say[a])
			b.Apply(say[b])
		} else {
			b.Apply(say[b])
			a.Apply(say[a])
		}
		e.want(map[string]string{"se ns/web": "a.example.org 10.0.0.1", "vs ns/r": "a"},
			map[string]string{"se ns/web": "a.example.org selector", "we ns/web-a": "10.0.0.1 web", "vs ns/r": "a"})
		if p := b.Problems(); len(p) != 2 || !strings.Contains(p[0].Reason, `registry "a"`) || len(a.Problems()) != 0 {
			t.Errorf("problems of b: %v, of a: %v", p, a.Problems())
		}
		b.Apply(upserts(instance("ns/web", "ns/web-c", "10.0.0.3"))) // behind the scenes
		a.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "ns/web"), gone(routes, "ns/r")}})
		e.want(map[string]string{"se ns/web": "b.example.org 10.0.0.2 10.0.0.3", "vs ns/r": "b"},
			map[string]string{"se ns/web": "b.example.org selector", "we ns/web-b": "10.0.0.2 web", "we ns/web-c": "10.0.0.3 web", "vs ns/r": "b"})
		if p := b.Problems(); len(p) != 0 {
			t.Errorf("problems of b afterwards: %v", p)
		}
	}
}

// text is the log of a DB.
type text = testwait.Buffer

// logged returns a DB that logs into the text.
func logged(t *testing.T, registries ...string) (*DB, *text) {
	t.Helper()
	var log text
	i := New(registries, Options{}, slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
	return i, &log
}

// metric returns the value of a metric of one registry, 0 if there is none.
func metric(t *testing.T, reg *prometheus.Registry, name, registry string) (value float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == registry {
				value = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	return value
}

func problem(id, reason string) *pluginv1.WatchResponse {
	return &pluginv1.WatchResponse{Problems: []*pluginv1.Problem{{Id: id, Reason: reason}}}
}

// What a plugin leaves out by intention is listed and counted apart from the
// problems, and not logged: an instance that fails its check is no cause for
// concern.
func TestLeftOutIsNoProblem(t *testing.T) {
	i, log := logged(t, "dc1")
	r := i.Registry("dc1")
	leftOut := func(id, reason string) *pluginv1.WatchResponse {
		return &pluginv1.WatchResponse{LeftOut: []*pluginv1.Problem{{Id: id, Reason: reason}}}
	}
	r.Begin(nil)
	r.Apply(synced)
	log.Reset()
	r.Apply(leftOut("instance web/a", "fails its check: left out; translate.health: any would serve it"))
	r.Apply(leftOut("instance web/b", "is disabled in the registry: left out; enable it there"))
	r.Apply(leftOut("instance web/c", "left out by translate.relabel.instances[1]"))
	r.Apply(leftOut("instance web/c", ""))
	want := []Problem{
		{ID: "instance web/a", Reason: "fails its check: left out; translate.health: any would serve it", Field: "translate.health"},
		{ID: "instance web/b", Reason: "is disabled in the registry: left out; enable it there"},
	}
	if d := cmp.Diff(want, r.Skipped()); d != "" {
		t.Errorf("left out (-want +got):\n%s", d)
	}
	if got := r.Status(); got.SkippedCount != 2 || got.ProblemCount != 0 || len(r.Problems()) != 0 {
		t.Errorf("%d left out and %d problems, want 2 and 0: %v", got.SkippedCount, got.ProblemCount, r.Problems())
	}
	if d := cmp.Diff(problems.Kinds{"translate.health": 1, problems.OfRegistry: 1, "translate.relabel.instances": 0}, r.skipped.By); d != "" {
		t.Errorf("counts (-want +got):\n%s", d)
	}
	if log.Len() > 0 {
		t.Errorf("logged:\n%s", log)
	}
	for n := range problems.Max + 5 {
		r.Apply(leftOut(fmt.Sprint("instance web/", n), "is disabled"))
	}
	if got := r.Skipped(); len(got) != problems.Max+1 || got[len(got)-1].ID != "more" {
		t.Errorf("%d are listed, the last %v", len(got), got[len(got)-1])
	}
	r.Down(errors.New("killed"))
	r.Begin(nil)
	r.Apply(synced)
	if got := r.Skipped(); len(got) > 0 || r.Status().SkippedCount > 0 {
		t.Errorf("left out after a listing that leaves nothing out: %v", got)
	}
}

// Problems say which field of the configuration would change them, and are
// counted by it, in a bounded number of series.
func TestProblemReasons(t *testing.T) {
	reg := prometheus.NewRegistry()
	d := New([]string{"dc1"}, Options{}, slog.New(slog.DiscardHandler), reg)
	counts := func() map[string]float64 {
		t.Helper()
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]float64{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				if f.GetName() == "isthmus_registry_problem_reasons" && m.GetGauge().GetValue() != 0 {
					for _, l := range m.GetLabel() {
						if l.GetName() == "reason" {
							out[l.GetValue()] = m.GetGauge().GetValue()
						}
					}
				}
			}
		}
		return out
	}
	r := d.Registry("dc1")
	r.Begin(nil)
	r.Apply(problem("service a", "the host \"translate.x\" is not legal; set translate.host"))
	r.Apply(problem("service b", "left out by translate.relabel.services[12]"))
	r.Apply(problem("service c", "left out by translate.relabel.services[3]"))
	r.Apply(problem("instance a/1", "has no address"))
	r.Apply(upserts(&pluginv1.Upsert{Resource: []byte("x")}))
	want := map[string]float64{"translate.host": 1, "translate.relabel.services": 2, "registry": 1, "refused": 1}
	if diff := cmp.Diff(want, counts()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	fields := map[string]string{}
	for _, p := range r.Problems() {
		fields[p.ID] = p.Field
	}
	if fields["service a"] != "translate.host" || fields["service b"] != "translate.relabel.services" || fields["instance a/1"] != "" {
		t.Errorf("fields %v", fields)
	}
	r.Apply(problem("service a", "set translate.namespace"))
	r.Apply(problem("service b", ""))
	r.Apply(problem("service c", ""))
	want = map[string]float64{"translate.namespace": 1, "registry": 1, "refused": 1}
	if diff := cmp.Diff(want, counts()); diff != "" {
		t.Errorf("after changes (-want +got):\n%s", diff)
	}
	r.Begin(nil)
	for i := range 500 {
		letters := strings.NewReplacer("0", "a", "1", "b", "2", "c", "3", "d", "4", "e", "5", "f", "6", "g", "7", "h", "8", "i", "9", "j").Replace(strconv.Itoa(i))
		r.Apply(problem("service "+letters, "set translate."+letters))
	}
	got, sum := counts(), 0.0
	for _, n := range got {
		sum += n
	}
	if len(got) > problems.MaxFields+4 || sum != 501 || got["others"] < 300 {
		t.Errorf("%d series, the sum is %v, others %v", len(got), sum, got["others"])
	}
}

// A problem is logged when it is new, when its reason changes and when it comes
// back after it was solved; not when the plugin says it again, nor when it does
// so in a new listing, however many broke off in between.
func TestProblemIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i, log := logged(t, "dc1")
		r := i.Registry("dc1")
		for _, step := range []struct {
			do   func()
			want int // lines
		}{
			{func() { r.Begin(nil) }, 0},
			{func() { r.Apply(problem("service web", "no address")) }, 1},
			{func() { r.Apply(problem("service web", "no address")) }, 0},
			{func() { r.Apply(problem("service api", "no port")); r.Apply(synced) }, 2}, // and one for the listing
			{func() { r.Down(errors.New("killed")); r.Begin(nil) }, 0},
			{func() { r.Apply(problem("service web", "no address")) }, 0},
			{func() { r.Down(errors.New("killed")); r.Begin(nil) }, 0},
			{func() { r.Apply(problem("service api", "no port")); r.Apply(problem("service web", "no address")) }, 0},
			{func() { r.Apply(problem("service web", "port 0")) }, 1},
			{func() { r.Apply(problem("service web", "")) }, 0},
			{func() { r.Apply(problem("service web", "port 0")) }, 1},
		} {
			log.Reset()
			step.do()
			if got := strings.Count(log.String(), "\n"); got != step.want {
				t.Errorf("%d lines, want %d:\n%s", got, step.want, log)
			}
		}
		if want := `level=WARN msg="problem in the registry" registry=dc1 id="service web" reason="port 0"`; !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, log)
		}
		if got := len(r.Problems()); got != 2 || r.Status().ProblemCount != got {
			t.Errorf("%d problems are listed", got)
		}
	})
}

// However many problems there are, the log takes 20 lines a minute about those
// of one registry, and one that counts the others and says where all are
// listed. Those of other registries are not concerned.
func TestManyProblemsAreFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i, log := logged(t, "dc1", "dc2")
		r, other := i.Registry("dc1"), i.Registry("dc2")
		lines := func(text string) int { return strings.Count(log.String(), text) }
		const one, summary = "problem in the registry", "more problems than are logged one by one"
		many := func(r *Registry, kind string, n int) {
			for first := 0; first < n; first += 100 {
				m := &pluginv1.WatchResponse{}
				for n := range 100 {
					m.Problems = append(m.Problems, &pluginv1.Problem{Id: fmt.Sprint(kind, " ", first+n), Reason: "no address"})
				}
				r.Apply(m)
			}
		}
		r.Begin(nil)
		many(r, "service", problems.Max)
		if lines(one) != problems.MaxLines || lines(summary) != 0 {
			t.Errorf("during the listing: %d lines and %d summaries", lines(one), lines(summary))
		}
		r.Apply(synced)
		if want := fmt.Sprintf(`registry=dc1 problems=%d all=%d see=/api/v1/registries`, problems.Max-problems.MaxLines, problems.Max); lines(summary) != 1 || !strings.Contains(log.String(), want) {
			t.Errorf("at the end of the listing: %d summaries; want %s", lines(summary), want)
		}
		if got := len(r.Problems()); got != problems.Max {
			t.Errorf("%d problems are listed, want %d", got, problems.Max)
		}

		// Once the window is over there is room for as many again. The first
		// that do not get in are told at once, the others with the next message
		// after the window.
		log.Reset()
		time.Sleep(problems.Within)
		other.Begin(nil)
		other.Apply(synced)
		many(other, "instance", 300)
		if lines(one) != problems.MaxLines || lines("registry=dc2 problems=80 all=100") != 1 || lines(summary) != 1 {
			t.Errorf("after the listing: %d lines:\n%s", lines(one), log)
		}
		time.Sleep(problems.Within)
		other.Apply(&pluginv1.WatchResponse{Services: 1})
		if lines("registry=dc2 problems=200 all=300") != 1 || lines(summary) != 2 {
			t.Errorf("after the window:\n%s", log)
		}
	})
}

// The names that a registry does not own and the resources that are refused are
// under the same bound, wherever the message that makes them problems comes
// from.
func TestManyNamesKeptBackAreFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		i, log := logged(t, "a", "b")
		m := &pluginv1.WatchResponse{}
		for n := range 500 {
			m.Upserts = append(m.Upserts, route(fmt.Sprint("ns/", n), "h"))
		}
		i.Registry("b").Apply(m)
		i.Registry("a").Apply(m)
		for n := range 500 {
			m.Upserts[n] = instance("ns/none", fmt.Sprint("ns/", n), "10.0.0.1")
		}
		i.Registry("a").Apply(m)
		if strings.Count(log.String(), "registry=b") != problems.MaxLines+1 || strings.Count(log.String(), "shadowed") != problems.MaxLines || !strings.Contains(log.String(), "registry=b problems=480 all=500") {
			t.Errorf("names that are shadowed:\n%s", log)
		}
		if strings.Count(log.String(), "registry=a") != problems.MaxLines+1 || !strings.Contains(log.String(), "registry=a problems=480 all=500") {
			t.Errorf("resources that are refused:\n%s", log)
		}
	})
}

// What a plugin says is bounded; the problem of an id that is too long can be
// solved all the same.
func TestLongProblem(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	id := strings.Repeat("é", problems.MaxID)
	r.Apply(problem(id, strings.Repeat("x", 1<<20)))
	p := r.Problems()
	if len(p) != 1 || len(p[0].ID) > problems.MaxID+3 || len(p[0].Reason) > problems.MaxReason+3 || !utf8.ValidString(p[0].ID) {
		t.Fatalf("%d problems; the first of %d and %d bytes", len(p), len(p[0].ID), len(p[0].Reason))
	}
	r.Apply(problem(id, ""))
	if p := r.Problems(); len(p) != 0 {
		t.Errorf("afterwards: %v", p)
	}
}

// A resource that was refused and is gone from the registry is no problem any
// longer.
func TestRefusalEndsWithAListing(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	for _, want := range []int{1, 0} {
		r.Begin(nil)
		if want > 0 {
			r.Apply(upserts(instance("dc1/none", "dc1/none-1", "10.0.0.1")))
		}
		r.Apply(synced)
		if got := len(r.Problems()); got != want || r.Status().ProblemCount != got {
			t.Errorf("%d problems, want %d", got, want)
		}
	}
}

// What cannot be served is refused, counted and listed, and what was good
// before stays, through the next listing too.
func TestRefused(t *testing.T) {
	e := newEnv(t, Options{
		MaxResources: 4,
		Validate: func(body proto.Message) error {
			if se, ok := body.(*networking.ServiceEntry); ok && se.GetHosts()[0] == "bad.example.org" {
				return errors.New("hosts[0]: bad.example.org is a bad host")
			}
			return nil
		},
	}, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1")))
	r.Apply(synced)
	want, _ := e.served()
	r.Begin(nil)
	withEndpoints := &pluginv1.Upsert{Service: "dc1/own", Resource: raw("dc1/own", &networking.ServiceEntry{
		Hosts: []string{"own"}, Endpoints: []*networking.WorkloadEntry{{Address: "10.0.0.1"}},
	})}
	r.Apply(upserts(
		&pluginv1.Upsert{Resource: []byte{0xff}},
		entry("dc1/web", "bad.example.org"),
		instance("dc1/none", "dc1/none-1", "10.0.0.9"),
		&pluginv1.Upsert{Service: "dc1/web", Resource: raw("dc1/r", &networking.VirtualService{})},
		instance("dc1/web", "other/web-9", "10.0.0.9"),
		withEndpoints,
	))
	broken := instance("dc1/web", "dc1/web-1", "10.0.0.1")
	broken.Resource = append(broken.Resource, 0x1a, 0) // a field that does not exist
	r.Apply(upserts(broken))
	r.Apply(synced)
	if got, _ := e.served(); !cmp.Equal(want, got) {
		t.Errorf("(-want +got):\n%s", cmp.Diff(want, got))
	}
	var ids []string
	for _, p := range r.Problems() {
		ids = append(ids, p.ID)
	}
	wantIDs := []string{
		"resource networking.istio.io/ServiceEntry dc1/own", "resource networking.istio.io/ServiceEntry dc1/web", "resource networking.istio.io/VirtualService dc1/r",
		"resource networking.istio.io/WorkloadEntry dc1/none-1", "resource networking.istio.io/WorkloadEntry dc1/web-1", "resource networking.istio.io/WorkloadEntry other/web-9", `resource of unknown kind ""`,
	}
	if d := cmp.Diff(wantIDs, ids); d != "" {
		t.Errorf("problems (-want +got):\n%s", d)
	}
	r.Apply(upserts(entry("dc1/web", "web2"), instance("dc1/web", "dc1/web-2", "10.0.0.2"), instance("dc1/web", "dc1/web-3", "10.0.0.3"), instance("dc1/web", "dc1/web-4", "10.0.0.4")))
	if got, _ := e.served(); got["se dc1/web"] != "web2 10.0.0.1 10.0.0.2 10.0.0.3" {
		t.Errorf("served %v; want the limit of 4 resources kept and the entry mended", got)
	}
}

// large returns an upsert with so many bytes more, in an annotation.
func large(u *pluginv1.Upsert, more int) *pluginv1.Upsert {
	var res mcp.Resource
	if err := proto.Unmarshal(u.GetResource(), &res); err != nil {
		panic(err)
	}
	res.Metadata.Annotations = map[string]string{"a": strings.Repeat("x", more)}
	b, err := proto.Marshal(&res)
	if err != nil {
		panic(err)
	}
	return &pluginv1.Upsert{Service: u.GetService(), Resource: b}
}

// bodyFirst returns an upsert in which the body comes before the metadata,
// which is as legal.
func bodyFirst(u *pluginv1.Upsert) *pluginv1.Upsert {
	var res mcp.Resource
	if err := proto.Unmarshal(u.GetResource(), &res); err != nil {
		panic(err)
	}
	var b []byte
	for _, part := range []*mcp.Resource{{Body: res.GetBody()}, {Metadata: res.GetMetadata()}} {
		encoded, err := proto.Marshal(part)
		if err != nil {
			panic(err)
		}
		b = append(b, encoded...)
	}
	return &pluginv1.Upsert{Service: u.GetService(), Resource: b}
}

func cut(u *pluginv1.Upsert, n int) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: u.GetService(), Resource: u.GetResource()[:n]}
}

// A resource that a new listing mentions in a form that is refused keeps its
// last good one, if its name can be read: whatever is wrong with the rest.
func TestRefusedByName(t *testing.T) {
	good := []*pluginv1.Upsert{entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), workload("dc1/alone", "10.0.0.9"), route("dc1/r", "r")}
	for _, tt := range []struct {
		name   string
		change func(u *pluginv1.Upsert) *pluginv1.Upsert
		kind   bool // the kind can be read, too
	}{
		{"too large", func(u *pluginv1.Upsert) *pluginv1.Upsert { return large(u, encode.MaxSize) }, true},
		{"too large, the name last", func(u *pluginv1.Upsert) *pluginv1.Upsert { return bodyFirst(large(u, encode.MaxSize)) }, true},
		{"too large, the beginning", func(u *pluginv1.Upsert) *pluginv1.Upsert { return cut(large(u, encode.MaxSize), encode.MaxSize+1) }, false},
		{"its end is missing", func(u *pluginv1.Upsert) *pluginv1.Upsert { return cut(u, len(u.GetResource())-1) }, true},
		{"no body", func(u *pluginv1.Upsert) *pluginv1.Upsert { return cut(u, 2+int(u.GetResource()[1])) }, false},
		{"bytes that are no field", func(u *pluginv1.Upsert) *pluginv1.Upsert {
			return &pluginv1.Upsert{Service: u.GetService(), Resource: append(slices.Clone(u.GetResource()), 0xff)}
		}, true},
		{"no kind that is served", func(u *pluginv1.Upsert) *pluginv1.Upsert {
			return &pluginv1.Upsert{Service: u.GetService(), Resource: bytes.Replace(u.GetResource(), []byte("v1alpha3"), []byte("v1alpha4"), 1)}
		}, false},
		{"a body that does not decode", func(u *pluginv1.Upsert) *pluginv1.Upsert {
			var res mcp.Resource
			if err := proto.Unmarshal(u.GetResource(), &res); err != nil {
				panic(err)
			}
			res.Body.Value = []byte{0xff}
			b, err := proto.Marshal(&res)
			if err != nil {
				panic(err)
			}
			return &pluginv1.Upsert{Service: u.GetService(), Resource: b}
		}, true},
		{"an instance that no longer says whose it is", func(u *pluginv1.Upsert) *pluginv1.Upsert {
			return &pluginv1.Upsert{Resource: large(u, encode.MaxSize).GetResource()}
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t, Options{}, "dc1")
			r := e.Registry("dc1")
			r.Begin(nil)
			r.Apply(upserts(good...))
			r.Apply(synced)
			wantInline, wantWorkload := e.served()

			r.Apply(upserts(entry("dc1/old", "old")))
			r.Down(errors.New("killed"))
			r.Begin(nil)
			for _, u := range good {
				r.Apply(upserts(tt.change(u)))
			}
			r.Apply(synced)
			e.want(wantInline, wantWorkload) // dc1/old, which nothing mentioned, is gone
			var ids []string
			for _, p := range r.Problems() {
				ids = append(ids, p.ID)
			}
			want := []string{
				"resource networking.istio.io/ServiceEntry dc1/web", "resource networking.istio.io/VirtualService dc1/r",
				"resource networking.istio.io/WorkloadEntry dc1/alone", "resource networking.istio.io/WorkloadEntry dc1/web-1",
			}
			if !tt.kind {
				want = []string{
					`resource of unknown kind "dc1/alone"`, `resource of unknown kind "dc1/r"`, `resource of unknown kind "dc1/web"`, `resource of unknown kind "dc1/web-1"`,
				}
			}
			if d := cmp.Diff(want, ids); d != "" {
				t.Errorf("problems (-want +got):\n%s", d)
			}

			r.Begin(nil)
			r.Apply(upserts(entry("dc1/web", "web")))
			r.Apply(synced)
			e.want(map[string]string{"se dc1/web": "web"}, map[string]string{"se dc1/web": "web selector"})
			if p := r.Problems(); len(p) != 0 {
				t.Errorf("after a listing without them: %v", p)
			}
		})
	}
}

// An instance whose new form is refused stays although its service's
// ServiceEntry is not mentioned any more.
func TestRefusedInstanceKeepsItsService(t *testing.T) {
	for name, again := range map[string]*pluginv1.Upsert{
		"of another service": large(instance("dc1/other", "dc1/web-1", "10.0.0.1"), encode.MaxSize),
		"by itself":          large(workload("dc1/web-1", "10.0.0.1"), encode.MaxSize),
		"beyond the limit":   workload("dc1/web-1", "10.0.0.1"+strings.Repeat("1", 1000)),
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, Options{MaxBytes: 1000}, "dc1")
			r := e.Registry("dc1")
			r.Begin(nil)
			r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), instance("dc1/web", "dc1/web-2", "10.0.0.2")))
			r.Apply(synced)
			r.Begin(nil)
			r.Apply(upserts(again))
			r.Apply(synced)
			e.want(map[string]string{"se dc1/web": "web 10.0.0.1"}, map[string]string{"se dc1/web": "web selector", "we dc1/web-1": "10.0.0.1 web"})
		})
	}
}

func kept(coll, name string) *pluginv1.Kept { return &pluginv1.Kept{Collection: coll, Name: name} }

// What a listing names without content stays as it was, a service with all its
// instances; the rest goes. The next listing knows nothing of it.
func TestKept(t *testing.T) {
	e := newEnv(t, Options{}, "dc1", "dc2")
	r := e.Registry("dc1")
	first := upserts(
		entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), instance("dc1/web", "dc1/web-2", "10.0.0.2"),
		entry("dc1/api", "api"), instance("dc1/api", "dc1/api-1", "10.0.1.1"), instance("dc1/api", "dc1/api-2", "10.0.1.2"),
		entry("dc1/old", "old"), instance("dc1/old", "dc1/old-1", "10.0.2.1"),
		route("dc1/r", "r"), route("dc1/s", "s"), route("dc1/t", "t"), workload("dc1/t", "10.0.3.1"),
	)
	for _, registry := range []string{"dc1", "dc2"} {
		e.Registry(registry).Begin(nil)
		e.Registry(registry).Apply(first)
		e.Registry(registry).Apply(synced)
	}
	e.Registry("dc2").Begin(nil)
	e.Registry("dc2").Apply(synced)
	r.Begin(nil)
	r.Apply(&pluginv1.WatchResponse{
		Upserts: []*pluginv1.Upsert{entry("dc1/api", "api")},
		Kept: []*pluginv1.Kept{
			kept(collection.ServiceEntry, "dc1/web"), kept(routes, "dc1/r"), kept("", "dc1/t"), kept(collection.WorkloadEntry, "dc1/api-2"),
			kept(collection.ServiceEntry, "dc1/none"), kept("no/such", "dc1/r"), kept("", "none"), kept(collection.ServiceEntry, "\xff/"), kept(routes, "dc1/web"),
		},
	})
	r.Apply(synced)
	e.want(map[string]string{
		"se dc1/web": "web 10.0.0.1 10.0.0.2", "se dc1/api": "api 10.0.1.2", "vs dc1/r": "r", "vs dc1/t": "t", "we dc1/t": "10.0.3.1 ",
	}, map[string]string{
		"se dc1/web": "web selector", "we dc1/web-1": "10.0.0.1 web", "we dc1/web-2": "10.0.0.2 web",
		"se dc1/api": "api selector", "we dc1/api-2": "10.0.1.2 api", "vs dc1/r": "r", "vs dc1/t": "t", "we dc1/t": "10.0.3.1 ",
	})
	// What is kept can still be removed, and counts like the rest.
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "dc1/web")}})
	if got, _ := e.served(); got["se dc1/web"] != "" || e.bytes("dc1") != r.Status().Bytes {
		t.Errorf("after its removal: %v; %d bytes are counted, there are %d", got, r.Status().Bytes, e.bytes("dc1"))
	}
	r.Begin(nil)
	r.Apply(synced)
	e.want(map[string]string{}, map[string]string{})
}

// A listing with something that cannot be named removes nothing.
func TestKeptWithoutName(t *testing.T) {
	d, log := logged(t, "dc1")
	e := env{t, d}
	r := e.Registry("dc1")
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), route("dc1/r", "r")))
	r.Apply(synced)
	inline, byWorkload := e.served()
	r.Begin(nil)
	r.Apply(&pluginv1.WatchResponse{Kept: []*pluginv1.Kept{{}}})
	r.Apply(synced)
	e.want(inline, byWorkload)
	if want := `level=WARN msg="the listing removes nothing, as the name of something in it is not known" registry=dc1`; !strings.Contains(log.String(), want) {
		t.Errorf("the log lacks %s:\n%s", want, log)
	}
	r.Begin(nil)
	r.Apply(synced)
	e.want(map[string]string{}, map[string]string{})
}

// Of a service that was kept and is sent in full later, what was not sent goes
// in the same step, be the listing complete or not and the registry at its
// limit; of any other service nothing goes.
func TestRelisted(t *testing.T) {
	web := func(ids ...string) (all []*pluginv1.Upsert) {
		all = append(all, entry("dc1/web", "web"))
		for _, id := range ids {
			all = append(all, instance("dc1/web", "dc1/web-"+id, "10.0.0."+id))
		}
		return all
	}
	relisted := func(u []*pluginv1.Upsert, names ...string) *pluginv1.WatchResponse {
		return &pluginv1.WatchResponse{Upserts: u, Relisted: names}
	}
	keep := &pluginv1.WatchResponse{Kept: []*pluginv1.Kept{kept(collection.ServiceEntry, "dc1/web")}}
	for name, tt := range map[string]struct {
		messages []*pluginv1.WatchResponse
		want     string
	}{
		"before the listing is complete":   {[]*pluginv1.WatchResponse{keep, relisted(web("3", "4"), "dc1/web"), synced}, "web 10.0.0.3 10.0.0.4"},
		"after it":                         {[]*pluginv1.WatchResponse{keep, synced, relisted(web("2", "3"), "dc1/web")}, "web 10.0.0.2 10.0.0.3"},
		"in several messages":              {[]*pluginv1.WatchResponse{keep, synced, upserts(web("1")...), relisted(web("3")[1:], "dc1/web")}, "web 10.0.0.1 10.0.0.3"},
		"in a message of its own":          {[]*pluginv1.WatchResponse{keep, synced, upserts(web("2")...), relisted(nil, "dc1/web")}, "web 10.0.0.2"},
		"with no instance":                 {[]*pluginv1.WatchResponse{keep, synced, relisted(web(), "dc1/web")}, "web"},
		"twice":                            {[]*pluginv1.WatchResponse{keep, synced, relisted(web("2"), "dc1/web", "dc1/web"), relisted(nil, "dc1/web")}, "web 10.0.0.2"},
		"with an instance that is refused": {[]*pluginv1.WatchResponse{keep, synced, relisted(append(web("2"), large(web("1")[1], encode.MaxSize)), "dc1/web")}, "web 10.0.0.1 10.0.0.2"},
		"with an instance that is kept": {[]*pluginv1.WatchResponse{keep, synced, {
			Upserts: web("3"), Kept: []*pluginv1.Kept{kept(collection.WorkloadEntry, "dc1/web-1")}, Relisted: []string{"dc1/web"},
		}}, "web 10.0.0.1 10.0.0.3"},
		"with one without a name": {[]*pluginv1.WatchResponse{keep, synced, relisted(append(web("2"), &pluginv1.Upsert{}), "dc1/web")}, "web 10.0.0.1 10.0.0.2"},
		"without being said":      {[]*pluginv1.WatchResponse{keep, upserts(web("2")...), synced}, "web 10.0.0.1 10.0.0.2"},
		"another service":         {[]*pluginv1.WatchResponse{keep, synced, relisted(web("2"), "dc1/none", "dc1/web-1", "")}, "web 10.0.0.1 10.0.0.2"},
		"never kept":              {[]*pluginv1.WatchResponse{upserts(web("1", "2")...), synced, relisted(web("2"), "dc1/web")}, "web 10.0.0.1 10.0.0.2"},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, Options{MaxResources: 3}, "dc1")
			r := e.Registry("dc1")
			r.Begin(nil)
			r.Apply(upserts(web("1", "2")...))
			r.Apply(synced)
			r.Begin(nil)
			for _, m := range tt.messages {
				r.Apply(m)
			}
			if got, _ := e.served(); len(got) != 1 || got["se dc1/web"] != tt.want {
				t.Errorf("served %v, want %s", got, tt.want)
			}
			if got, want := r.Status().Bytes, e.bytes("dc1"); got != want {
				t.Errorf("%d bytes are counted, there are %d", got, want)
			}
		})
	}
}

// A new listing in which something was refused that has no legible name may
// have meant anything with it: it removes nothing, and says so.
func TestNamelessRefusal(t *testing.T) {
	web := instance("dc1/web", "dc1/web-1", "10.0.0.1")
	huge := &pluginv1.Upsert{Service: "dc1/web", Resource: raw("dc1/web-1", &networking.WorkloadEntry{
		Address: "10.0.0.1", Labels: map[string]string{"a": strings.Repeat("x", 2*encode.MaxSize)},
	})}
	twice := &pluginv1.Upsert{Service: "dc1/web", Resource: append(slices.Clone(web.GetResource()), instance("dc1/web", "dc1/web-2", "10.0.0.1").GetResource()...)}
	for _, tt := range []struct {
		name string
		u    *pluginv1.Upsert
	}{
		{"nothing", &pluginv1.Upsert{}},
		{"no message", &pluginv1.Upsert{Resource: []byte{0xff}}},
		{"the name cut off", cut(web, 10)},
		{"an illegal name", instance("dc1/web", "dc1/Web-1", "10.0.0.1")},
		{"two names", twice},
		{"the beginning, the name last", cut(bodyFirst(huge), encode.MaxSize+1)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i, log := logged(t, "dc1")
			e := env{t, i}
			r := e.Registry("dc1")
			first := upserts(entry("dc1/web", "web"), web, route("dc1/r", "r"))
			r.Begin(nil)
			r.Apply(first)
			r.Apply(synced)
			wantInline, wantWorkload := e.served()
			r.Down(errors.New("killed"))
			r.Begin(nil)
			r.Apply(upserts(entry("dc1/web", "web"), tt.u))
			log.Reset()
			r.Apply(synced)
			e.want(wantInline, wantWorkload)
			if want := `level=WARN msg="the listing removes nothing, as the name of something in it is not known" registry=dc1`; !strings.Contains(log.String(), want) {
				t.Errorf("the log lacks %s:\n%s", want, log)
			}
			if s := r.Status(); !s.Synced || s.Listing {
				t.Errorf("the listing is not complete: %+v", s)
			}
			if p := r.Problems(); len(p) != 1 || !strings.Contains(p[0].Reason, "a listing with it removes nothing") {
				t.Errorf("problems: %v", p)
			}
			// What is said to be gone goes all the same.
			r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(routes, "dc1/r")}})
			if got, _ := e.served(); got["vs dc1/r"] != "" {
				t.Errorf("served after its removal: %v", got)
			}

			r.Begin(nil)
			r.Apply(upserts(entry("dc1/web", "web")))
			r.Apply(synced)
			e.want(map[string]string{"se dc1/web": "web"}, map[string]string{"se dc1/web": "web selector"})
			if p := r.Problems(); len(p) != 0 {
				t.Errorf("after a listing without it: %v", p)
			}
		})
	}
}

// What is beyond the limit says so, under the name that the field has in the
// configuration: a service that is kept out and each of its instances, whose
// order is not to blame, and one of a service whose entry was refused for what
// is in it.
func TestReasonsOfRefusal(t *testing.T) {
	e := newEnv(t, Options{MaxResources: 2, Validate: func(body proto.Message) error {
		if se, ok := body.(*networking.ServiceEntry); ok && se.GetHosts()[0] == "bad" {
			return errors.New("hosts[0]: bad is a bad host")
		}
		return nil
	}}, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	reasons := func(m *pluginv1.WatchResponse) map[string]string {
		r.Apply(m)
		out := make(map[string]string)
		for _, p := range r.Problems() {
			out[p.ID[strings.LastIndexByte(p.ID, '/')+1:]] = p.Reason
		}
		return out
	}
	got := reasons(upserts(entry("dc1/bad", "bad"), instance("dc1/bad", "dc1/bad-1", "10.0.0.1"), instance("dc1/never", "dc1/never-1", "10.0.0.1")))
	for id, want := range map[string]string{
		"bad":     "hosts[0]: bad is a bad host",
		"bad-1":   `its service "dc1/bad" is not there, as its ServiceEntry was refused`,
		"never-1": `its service "dc1/never" is not there; its ServiceEntry has to come first`,
	} {
		if !strings.Contains(got[id], want) {
			t.Errorf("%s: %q, want %q", id, got[id], want)
		}
	}
	r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1")))
	got = reasons(upserts(entry("dc1/over", "over"), instance("dc1/over", "dc1/over-1", "10.0.0.2")))
	for _, id := range []string{"over", "over-1"} {
		if want := "the registry would exceed limits.resources_per_registry (2)"; !strings.Contains(got[id], want) {
			t.Errorf("%s: %q, want %q", id, got[id], want)
		}
	}
}

// Services have a bound of their own: what comes above is left out with its
// instances, those that are there may have more instances, and one that goes
// makes room. It holds for what is restored as well.
func TestServicesAreBounded(t *testing.T) {
	o := Options{MaxServices: 2}
	e := newEnv(t, o, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	r.Apply(upserts(entry("dc1/a", "a"), instance("dc1/a", "dc1/a-1", "10.0.0.1"), external("dc1/b", "b.example.org"), entry("dc1/c", "c"), instance("dc1/c", "dc1/c-1", "10.0.0.2")))
	r.Apply(synced)
	want := []string{`registry would exceed limits.services_per_registry (2)`, `its service "dc1/c" is not there, as its ServiceEntry was refused`}
	got := fmt.Sprint(r.Problems())
	for _, w := range want {
		if !strings.Contains(got, w) {
			t.Errorf("problems: %s, want %s", got, w)
		}
	}
	r.Apply(upserts(instance("dc1/a", "dc1/a-2", "10.0.0.3"), external("dc1/b", "other.example.org")))
	e.wantCounts(1, 2)
	disk := &savedClaims{}
	disk.follow(e.DB)
	restored := newEnv(t, Options{MaxServices: 1}, "dc1")
	disk.restore(restored)
	if n := restored.Len(Kind{Collection: collection.ServiceEntry}); n != 1 {
		t.Errorf("%d services are restored, want 1", n)
	}
	r.Apply(removed(collection.ServiceEntry, "dc1/b"))
	r.Apply(upserts(entry("dc1/c", "c"), instance("dc1/c", "dc1/c-1", "10.0.0.2")))
	e.wantCounts(2, 3)
}

// The cure for a name that two registries have names conflicts.
func TestCureOfOwnership(t *testing.T) {
	e := newEnv(t, Options{}, "a", "b")
	for _, name := range []string{"a", "b"} {
		e.Registry(name).Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", "10.0.0.1"), workload("ns/alone", "10.0.0.9"), route("ns/r", "r")))
	}
	problems := e.Registry("b").Problems()
	if len(problems) != 3 { // an instance goes with its service
		t.Fatalf("problems: %v", problems)
	}
	for _, p := range problems {
		want := "Rename one of the two"
		if strings.Contains(p.ID, "ServiceEntry") {
			want = "conflicts with policy merge serves the endpoints of both, and its weights move traffic from one to the other; " +
				"with policy isolate and another namespace (translate.namespace) each is served in its own; if they are not, give it another host (translate.host)"
		}
		if !strings.Contains(p.Reason, want) {
			t.Errorf("%s: %s", p.ID, p.Reason)
		}
	}
}

// Each host has an address of its own, whatever others hash to and whoever
// comes first.
func TestAddressConflict(t *testing.T) {
	// Hosts that have the same first choice, small before large, and one whose
	// first choice is the large one's second: found, not made.
	firsts := map[netip.Addr]string{}
	var small, large string
	for n := 0; small == ""; n++ {
		host := fmt.Sprintf("h%07d.example.org", n)
		addr := encode.Addresses(netip.Prefix{}, host)[0]
		if small, large = firsts[addr], host; small == "" {
			firsts[addr] = host
		}
	}
	shared, second := encode.Addresses(netip.Prefix{}, small)[0], encode.Addresses(netip.Prefix{}, large)[1]
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	address := func(name string) string {
		t.Helper()
		res, ok := e.Get(Kind{Collection: collection.ServiceEntry}, name)
		if !ok {
			t.Fatalf("%s is not served", name)
		}
		var se networking.ServiceEntry
		m := decode(t, res, encode.Form{Address: true})
		if err := m.GetBody().UnmarshalTo(&se); err != nil {
			t.Fatal(err)
		}
		return strings.Join(se.GetAddresses(), ",")
	}
	want := func(what, name string, addr netip.Addr) {
		t.Helper()
		if got := address(name); got != addr.String() {
			t.Errorf("%s: %s has address %q, want %s", what, name, got, addr)
		}
	}
	r.Apply(upserts(entry("dc1/large", large)))
	want("alone", "dc1/large", shared)
	r.Apply(upserts(entry("dc1/small", small)))
	want("both", "dc1/small", shared)
	want("both", "dc1/large", second)
	r.Apply(upserts(instance("dc1/large", "dc1/large-1", "10.0.0.1")))
	want("an instance more", "dc1/large", second)
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "dc1/small")}})
	want("alone again", "dc1/large", shared)
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "dc1/large"), gone(collection.WorkloadEntry, "dc1/large-1")}})
	if n := e.DB.addresses.Len(); n > 0 {
		t.Errorf("%d addresses are counted for no host", n)
	}
}

// An instance's name belongs to the first registry that has it, too: a later
// one that keeps the same service and the same instances takes nothing away,
// whatever it says and whoever comes first.
func TestOwnershipOfInstances(t *testing.T) {
	for _, order := range []string{"ab", "ba"} {
		e := newEnv(t, Options{}, "a", "b")
		a, b := e.Registry("a"), e.Registry("b")
		a.Begin(nil)
		b.Begin(nil)
		for _, name := range order {
			e.Registry(string(name)).Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", "10.0.0.1"), instance("ns/web", "ns/web-2", "10.0.0.2")))
			e.Registry(string(name)).Apply(synced)
		}
		inline := map[string]string{"se ns/web": "web.example.org 10.0.0.1 10.0.0.2"}
		workload := map[string]string{"se ns/web": "web.example.org selector", "we ns/web-1": "10.0.0.1 web", "we ns/web-2": "10.0.0.2 web"}
		e.want(inline, workload)
		before := e.Revision()
		b.Apply(upserts(instance("ns/web", "ns/web-1", "10.0.9.9"), instance("ns/web", "ns/web-3", "10.0.9.9")))
		b.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.WorkloadEntry, "ns/web-2")}})
		e.want(inline, workload)
		if n := len(slices.Collect(e.History())); e.Revision() != before || n != 3 && order == "ab" {
			t.Errorf("what is shadowed cost %d revisions; %d changes are shown", e.Revision()-before, n)
		}
		wantServices := []status.Service{{Registry: "a", Name: "ns/web", Endpoints: 2}, {Registry: "b", Name: "ns/web", Endpoints: 2, ShadowedBy: "a"}}
		if d := cmp.Diff(wantServices, slices.Collect(e.Services()), cmpopts.IgnoreFields(status.Service{}, "Version", "Hosts")); d != "" {
			t.Errorf("services (-want +got):\n%s", d)
		}
		a.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "ns/web")}})
		e.want(map[string]string{"se ns/web": "web.example.org 10.0.9.9 10.0.9.9"},
			map[string]string{"se ns/web": "web.example.org selector", "we ns/web-1": "10.0.9.9 web", "we ns/web-3": "10.0.9.9 web"})
	}
}

// A WorkloadEntry that stands for itself and an instance of another registry
// are one name as well.
func TestOwnershipOfWorkloadEntries(t *testing.T) {
	for _, first := range []string{"instance", "plain"} {
		e := newEnv(t, Options{}, "a", "b")
		consul, file := e.Registry("a"), e.Registry("b")
		if first == "plain" {
			consul, file = file, consul
		}
		se, ownInline := "web.example.org selector", map[string]string{"se ns/web": "web.example.org 10.0.0.1"}
		consul.Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", "10.0.0.1")))
		file.Apply(upserts(workload("ns/web-1", "10.9.9.9")))
		aside := file
		if first == "instance" {
			e.want(ownInline, map[string]string{"se ns/web": se, "we ns/web-1": "10.0.0.1 web"})
		} else {
			aside = consul
			e.want(map[string]string{"se ns/web": "web.example.org 10.0.0.1", "we ns/web-1": "10.9.9.9 "}, map[string]string{"se ns/web": se, "we ns/web-1": "10.9.9.9 "})
		}
		if p := aside.Problems(); len(p) != 1 || p[0].ID != "resource networking.istio.io/WorkloadEntry ns/web-1" ||
			!strings.Contains(p[0].Reason, `registry "a"`) || strings.Contains(p[0].Reason, "endpoint of its service") != (first == "plain") {
			t.Errorf("problems: %v", p)
		}
		if got := aside.Status().Resources[collection.WorkloadEntry]; got != 0 {
			t.Errorf("%d WorkloadEntries of the registry that is shadowed are counted as served", got)
		}
		file.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.WorkloadEntry, "ns/web-1")}})
		e.want(ownInline, map[string]string{"se ns/web": se, "we ns/web-1": "10.0.0.1 web"})
	}
}

// When the owner of a name gives it up, what is served is the next one's, also
// where the content is the same to the byte.
func TestHandover(t *testing.T) {
	e := newEnv(t, Options{}, "a", "b")
	for _, name := range []string{"a", "b"} {
		e.Registry(name).Apply(upserts(entry("ns/web", "web.example.org"), instance("ns/web", "ns/web-1", "10.0.0.1"), route("ns/r", "r")))
	}
	fresh, read := Cursor{}, Cursor{}
	e.changesOf(routes, &read)
	e.Registry("a").Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "ns/web"), gone(routes, "ns/r")}})
	if got := e.changesOf(routes, &read); !slices.Equal(got, []string{">ns/r"}) {
		t.Errorf("a reader of the same content from another registry sees %q, want that it was handed over", got)
	}
	if got := e.changesOf(routes, &fresh); !slices.Equal(got, []string{"ns/r"}) {
		t.Errorf("a reader that had not read it sees %q", got)
	}
	for name, k := range map[string]Kind{
		"ns/web-1": {collection.WorkloadEntry, encode.Workload}, "ns/web": {Collection: collection.ServiceEntry}, "ns/r": {Collection: routes},
	} {
		if res, ok := e.Get(k, name); !ok || res.Registry() != "b" {
			t.Errorf("%s is not of registry b", name)
		}
	}
}

// Over random runs of three registries that share namespace and names, with
// services whose instances move, resources that stand for themselves, and
// plugins that die and list again, and a configuration in which registries
// come, go, change places and are renamed, the store holds what a plain model
// says after each message, and so do the lists of what is shadowed. A
// ServiceEntry is shadowed if an earlier registry has its name or its host, or
// an earlier service of its own registry its host.
func TestModel(t *testing.T) {
	type svc struct {
		host      string
		instances map[string]string
	}
	// truth is what a plugin believes.
	type truth struct {
		services map[string]*svc
		plain    map[key]string
	}
	for seed := range uint64(20) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			names := []string{"a", "b", "c"}
			rnd := rand.New(rand.NewPCG(seed, 11))
			e := newEnv(t, Options{}, names...)
			truths := map[string]*truth{}
			for _, name := range names {
				truths[name] = &truth{map[string]*svc{}, map[key]string{}}
				e.Registry(name).Begin(nil)
			}
			for range 300 {
				if rnd.IntN(10) == 0 {
					renamed := map[string]string{}
					rnd.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
					other := string(rune('a' + rnd.IntN(8)))
					switch free := truths[other] == nil; {
					case free && rnd.IntN(2) == 0:
						truths[other], renamed[other] = truths[names[0]], names[0]
						delete(truths, names[0])
						names[0] = other
					case free:
						truths[other] = &truth{map[string]*svc{}, map[key]string{}}
						names = append(names, other)
					case len(names) > 1:
						delete(truths, names[0])
						names = names[1:]
					}
					e.SetRegistries(names, renamed)
				}
				name := names[rnd.IntN(len(names))]
				r, tr := e.Registry(name), truths[name]
				m := &pluginv1.WatchResponse{}
				// A batch names a resource once, and removals are carried out
				// first.
				named := map[key]bool{}
				remove := func(k key) {
					named[k] = true
					m.Removals = append(m.Removals, gone(k.collection, k.name))
					delete(tr.plain, k)
					if k.collection == collection.ServiceEntry {
						delete(tr.services, k.name)
					}
					for _, s := range tr.services {
						delete(s.instances, k.name)
					}
				}
				publish := func(k key, text string) {
					named[k] = true
					switch k.collection {
					case collection.ServiceEntry:
						m.Upserts = append(m.Upserts, external(k.name, text))
						delete(tr.services, k.name)
					case collection.WorkloadEntry:
						m.Upserts = append(m.Upserts, workload(k.name, text))
						for _, s := range tr.services {
							delete(s.instances, k.name)
						}
					default:
						m.Upserts = append(m.Upserts, route(k.name, text))
					}
					tr.plain[k] = text
				}
				setInstance := func(service, id, address string) {
					named[key{collection.WorkloadEntry, id}] = true
					delete(tr.plain, key{collection.WorkloadEntry, id})
					for _, s := range tr.services {
						delete(s.instances, id)
					}
					tr.services[service].instances[id] = address
					m.Upserts = append(m.Upserts, instance(service, id, address))
				}
				n := fmt.Sprintf("ns/s%d", rnd.IntN(4))
				s := tr.services[n]
				switch rnd.IntN(12) {
				case 0: // the plugin dies, misses something, and lists again
					maps.DeleteFunc(tr.services, func(string, *svc) bool { return rnd.IntN(4) == 0 })
					maps.DeleteFunc(tr.plain, func(key, string) bool { return rnd.IntN(4) == 0 })
					keeps := func(k key) bool { // some of it cannot be sent
						keep := rnd.IntN(4) == 0
						if keep {
							m.Kept = append(m.Kept, kept(k.collection, k.name))
						}
						return keep
					}
					r.Down(errors.New("killed"))
					r.Begin(nil)
					for n, s := range tr.services {
						if keeps(key{collection.ServiceEntry, n}) {
							continue
						}
						m.Upserts = append(m.Upserts, entry(n, s.host))
						for w, addr := range s.instances {
							m.Upserts = append(m.Upserts, instance(n, w, addr))
						}
					}
					for k, text := range tr.plain {
						if !keeps(k) {
							publish(k, text)
						}
					}
					m.Synced = true
				case 1:
					if s == nil {
						continue
					}
					for _, w := range slices.Collect(maps.Keys(s.instances)) {
						if rnd.IntN(2) == 0 { // the removal of the entry is enough
							remove(key{collection.WorkloadEntry, w})
						}
					}
					remove(key{collection.ServiceEntry, n})
				case 2, 3: // resources that stand for themselves
					for range 1 + rnd.IntN(3) {
						k := []key{
							{collection.ServiceEntry, n}, {collection.WorkloadEntry, fmt.Sprintf("ns/w%d", rnd.IntN(6))}, {routes, fmt.Sprintf("ns/r%d", rnd.IntN(2))},
						}[rnd.IntN(3)]
						if named[k] {
							continue
						}
						if _, have := tr.plain[k]; have && rnd.IntN(2) == 0 {
							remove(k)
						} else {
							publish(k, fmt.Sprintf("10.0.1.%d", rnd.IntN(3)))
						}
					}
				default:
					if s == nil || rnd.IntN(4) == 0 {
						host := fmt.Sprintf("h%d.example.org", rnd.IntN(4))
						if s == nil {
							s = &svc{instances: map[string]string{}}
							tr.services[n] = s
							delete(tr.plain, key{collection.ServiceEntry, n})
						}
						s.host = host
						m.Upserts = append(m.Upserts, entry(n, host))
					}
					for w := range 6 {
						id := fmt.Sprintf("ns/w%d", w)
						switch rnd.IntN(6) {
						case 0, 1:
							setInstance(n, id, fmt.Sprintf("10.0.0.%d", rnd.IntN(4)))
						case 2:
							remove(key{collection.WorkloadEntry, id})
						}
					}
				}
				rnd.Shuffle(len(m.Upserts), func(i, j int) { m.Upserts[i], m.Upserts[j] = m.Upserts[j], m.Upserts[i] })
				r.Apply(m)

				inline, byWorkload := map[string]string{}, map[string]string{}
				owners := map[key]string{}
				own := func(k key, name string) bool {
					if owners[k] == "" {
						owners[k] = name
					}
					return owners[k] == name
				}
				hosts := map[string]string{}       // registry by host
				byService := map[string][]string{} // hosts of services, by registry
				served, aside := map[string]map[string]int{}, map[string][]string{}
				for _, name := range names {
					tr := truths[name]
					count := map[string]int{collection.ServiceEntry: 0, collection.WorkloadEntry: 0}
					served[name] = count
					claim := func(k key) bool {
						if !own(k, name) {
							aside[name] = append(aside[name], "resource "+k.collection+" "+k.name)
							return false
						}
						count[k.collection]++
						return true
					}
					claimEntry := func(n, host string) bool {
						k := key{collection.ServiceEntry, n}
						if owner := hosts[host]; owners[k] == "" && owner != "" && owner != name {
							aside[name] = append(aside[name], "resource "+k.collection+" "+n)
							return false
						}
						if owners[k] == "" && tr.services[n] != nil && slices.Contains(byService[name], host) {
							aside[name] = append(aside[name], "resource "+k.collection+" "+n)
							return false
						}
						if !claim(k) {
							return false
						}
						if hosts[host] = name; tr.services[n] != nil {
							byService[name] = append(byService[name], host)
						}
						return true
					}
					for k, text := range tr.plain {
						if k.collection == collection.ServiceEntry && !claimEntry(k.name, text) || k.collection != collection.ServiceEntry && !claim(k) {
							continue
						}
						switch k.collection {
						case collection.ServiceEntry:
							inline["se "+k.name], byWorkload["se "+k.name] = text, text
						case collection.WorkloadEntry:
							inline["we "+k.name], byWorkload["we "+k.name] = text+" ", text+" "
						default:
							inline["vs "+k.name], byWorkload["vs "+k.name] = text, text
						}
					}
					for _, n := range slices.Sorted(maps.Keys(tr.services)) {
						s := tr.services[n]
						if !claimEntry(n, s.host) {
							continue
						}
						inline["se "+n] = strings.Join(append([]string{s.host}, slices.Sorted(maps.Values(s.instances))...), " ")
						byWorkload["se "+n] = s.host + " selector"
						for id, addr := range s.instances {
							if claim(key{collection.WorkloadEntry, id}) {
								byWorkload["we "+id] = addr + " " + strings.TrimPrefix(n, "ns/")
							}
						}
					}
				}
				e.want(inline, byWorkload)
				for _, name := range names {
					var listed []string
					for _, p := range e.Registry(name).Problems() {
						listed = append(listed, p.ID)
					}
					slices.Sort(aside[name])
					if d := cmp.Diff(aside[name], listed, cmpopts.EquateEmpty()); d != "" {
						t.Errorf("registry %s: shadowed (-want +got):\n%s", name, d)
					}
					if got, want := e.Registry(name).Status().Bytes, e.bytes(name); got != want {
						t.Errorf("registry %s: %d bytes are counted, there are %d", name, got, want)
					}
					got := e.Registry(name).Status().Resources
					maps.DeleteFunc(got, func(coll string, n int) bool { return coll == routes && n == 0 })
					if d := cmp.Diff(served[name], got); d != "" {
						t.Errorf("registry %s: served (-want +got):\n%s", name, d)
					}
				}
				if t.Failed() {
					t.Fatalf("after registry %s said %v", name, m)
				}
			}
			if e.DB.addresses.Len() > 8 {
				t.Errorf("%d addresses are counted for at most 4 hosts", e.DB.addresses.Len())
			}
		})
	}
}

// bytes adds up what a registry has.
func (e env) bytes(registry string) (n int) {
	e.Registry(registry).claims(func(_ *table, c *Record) { n += c.Size() })
	return n
}

// Whatever a plugin sends, the host goes on, and what it serves decodes.
func FuzzApply(f *testing.F) {
	seed := func(m *pluginv1.WatchResponse) {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	seed(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), route("dc1/r", "r")))
	seed(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, "dc1/web"), gone(collection.WorkloadEntry, "dc1/web-1")}, Synced: true})
	seed(&pluginv1.WatchResponse{
		Upserts:  []*pluginv1.Upsert{workload("dc1/web-1", "10.0.0.2"), external("dc1/web", "web"), entry("dc1/api", "api"), instance("dc1/api", "dc1/web-1", "10.0.0.3")},
		Problems: []*pluginv1.Problem{{Id: "service x", Reason: "no address"}, {Id: "service x"}},
	})
	seed(upserts(&pluginv1.Upsert{Service: "dc1/web", Resource: raw("dc1/web", &networking.WorkloadEntry{})}, entry("dc1/web", "")))
	seed(&pluginv1.WatchResponse{
		Upserts: []*pluginv1.Upsert{instance("dc1/web", "dc1/web-2", "10.0.0.2")},
		Kept:    []*pluginv1.Kept{kept(collection.ServiceEntry, "dc1/web"), kept("", "dc1/r"), {}}, Relisted: []string{"dc1/web", "dc1/r"},
	})
	f.Fuzz(func(t *testing.T, b []byte) {
		var m pluginv1.WatchResponse
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		e := newEnv(t, Options{}, "dc1", "dc2")
		for _, name := range []string{"dc2", "dc1"} {
			r := e.Registry(name)
			r.Begin(nil)
			r.Apply(upserts(entry("dc1/web", "web"), instance("dc1/web", "dc1/web-1", "10.0.0.1"), route("dc1/r", "r")))
			r.Apply(&m)
			r.Apply(synced)
			r.Begin(nil)
			r.Apply(&m)
			r.Apply(synced)
			r.Problems()
			r.Status()
		}
		for _, coll := range e.Collections() {
			for _, shape := range []encode.Shape{encode.Inline, encode.Workload} {
				for c := range e.Changes(Kind{coll, shape}, &Cursor{}) {
					decode(t, c.Record, encode.Form{Shape: shape, Address: true, PortSets: true, EndpointsHash: true})
				}
			}
		}
	})
}

// BenchmarkMergedInstance is one changed instance of a service that is merged
// of two registries with 5,000 instances each.
func BenchmarkMergedInstance(b *testing.B) {
	for name, r := range map[string]ConflictRule{"own weights": rule(Merge, nil), "weights": rule(Merge, map[string]uint32{"a": 90, "b": 10})} {
		b.Run(name, func(b *testing.B) {
			e := newEnv(b, Options{Conflicts: []ConflictRule{r}}, "a", "b")
			for n, name := range []string{"a", "b"} {
				m := upserts(entry(name+"/web", "web.example.org"))
				for w := range 5_000 {
					m.Upserts = append(m.Upserts, instance(name+"/web", fmt.Sprintf("%s/web-%d", name, w), fmt.Sprintf("10.%d.%d.%d", n, w>>8, w&255)))
				}
				e.Registry(name).Apply(m)
			}
			changes := [2]*pluginv1.WatchResponse{upserts(instance("b/web", "b/web-7", "10.200.0.1")), upserts(instance("b/web", "b/web-7", "10.200.0.2"))}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				e.Registry("b").Apply(changes[i&1])
				i++
			}
		})
	}
}

// BenchmarkOneInstance is one changed instance of a registry of 100,000, from
// the plugin's message to the store.
func BenchmarkOneInstance(b *testing.B) {
	e := newEnv(b, Options{}, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	for s := range 10_000 {
		n := fmt.Sprintf("dc1/service-%d", s)
		m := upserts(entry(n, n+".example.org"))
		for w := range 10 {
			m.Upserts = append(m.Upserts, instance(n, fmt.Sprintf("%s-%d", n, w), fmt.Sprintf("10.%d.%d.%d", s>>8, s&255, w)))
		}
		r.Apply(m)
	}
	r.Apply(synced)
	changes := [2]*pluginv1.WatchResponse{
		upserts(instance("dc1/service-7", "dc1/service-7-3", "10.200.0.1")), upserts(instance("dc1/service-7", "dc1/service-7-3", "10.200.0.2")),
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		r.Apply(changes[i&1])
		i++
	}
}
