package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
)

func TestMain(m *testing.M) {
	// Package testenv has a goroutine of its own from the start, which on Linux
	// starts the servers.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/isthmus-mesh/isthmus/internal/testenv.startAll"))
}

// cluster is a real API server with what a test's consumer reads. Tests that
// share it have a namespace of their own, and a consumer of that name.
type cluster struct {
	*testkube.Server
	t    testing.TB
	w    *servertest.World
	name string // of the namespace and of the consumer
}

func newCluster(t testing.TB, kube *testkube.Server) *cluster {
	t.Helper()
	c := &cluster{kube, t, servertest.New(t, state.Options{}), strings.ToLower(path.Base(t.Name()))}
	c.Apply(t, fmt.Sprintf("{apiVersion: v1, kind: Namespace, metadata: {name: %s}}", c.name))
	return c
}

// Tests of consumers on one real API server.
func TestAPIServer(t *testing.T) {
	testenv.SkipIfShort(t)
	kube := testkube.Start(t, testkube.Config{Istio: true})
	for name, test := range map[string]func(*testing.T, *cluster){
		"Accepted": testAccepted, "Follows": testFollows, "Foreign": testForeign, "Refused": testRefused,
		"Sweep": testSweep, "Replicas": testReplicas, "Drift": testDrift,
		"Services": testServices, "ForeignService": testForeignService, "Split": testSplit, "Workloads": testWorkloads,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newCluster(t, kube))
		})
	}
}

// start runs a consumer until stop is called for the first time.
func (c *cluster) start(changes ...func(*Options)) (consumer *Consumer, stop func()) {
	c.t.Helper()
	o := Options{
		Make: &Stub{Meta: Meta{Consumer: c.name}, Waypoint: "waypoint"}, Kubeconfig: c.Kubeconfig, WritesPerSecond: 100,
		Has: func(string) bool { return true }, Complete: func() bool { return true },
	}
	for _, change := range changes {
		change(&o)
	}
	log := new(testwait.Buffer)
	consumer, err := New(c.w.View, o, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { consumer.Run(ctx) }) // ends with stop
	stop = sync.OnceFunc(func() {
		cancel()
		group.Wait()
	})
	c.t.Cleanup(func() {
		stop()
		if c.t.Failed() {
			c.t.Logf("---- consumer\n%s", log)
		}
	})
	return consumer, stop
}

// entry is a ServiceEntry of the API server.
type serviceEntry struct {
	Metadata struct {
		Name, UID, ResourceVersion string
		Labels                     map[string]string
	}
	Spec struct {
		Hosts []string
		Ports []struct{ Number int }
	}
}

// entry returns the text of a ServiceEntry of the namespace.
func (c *cluster) entry(metadata, spec string) string {
	return fmt.Sprintf("---\n{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {namespace: %s, name: %s}, %s}\n", c.name, metadata, spec)
}

// entries returns the ServiceEntries of the namespace by name.
func (c *cluster) entries() map[string]serviceEntry {
	c.t.Helper()
	body, code, err := c.Do(c.t.Context(), http.MethodGet, "/apis/networking.istio.io/v1/namespaces/"+c.name+"/serviceentries", "", "", nil)
	var list struct{ Items []serviceEntry }
	if err == nil && code == http.StatusOK {
		err = json.Unmarshal(body, &list)
	}
	if err != nil || code != http.StatusOK {
		c.t.Fatalf("status %d, %v: %s", code, err, body)
	}
	out := map[string]serviceEntry{}
	for _, e := range list.Items {
		out[e.Metadata.Name] = e
	}
	return out
}

// eventually waits for ServiceEntries.
func (c *cluster) eventually(what string, ok func(map[string]serviceEntry) bool) map[string]serviceEntry {
	c.t.Helper()
	var last map[string]serviceEntry
	testwait.Eventually(c.t, testenv.Patience, what, func() (string, bool) {
		last = c.entries()
		return fmt.Sprintf("%+v", last), ok(last)
	})
	return last
}

// settled waits until the consumer has so many objects in a state, and nothing
// to do.
func (c *cluster) settled(of *Consumer, s State, n int) {
	c.t.Helper()
	testwait.Eventually(c.t, testenv.Patience, fmt.Sprintf("%d objects %s", n, s), func() (string, bool) {
		st := of.Status()
		return fmt.Sprintf("%+v", st), st.Writer && st.Objects[s] == n && st.Objects[Pending] == 0
	})
}

// A stub follows its service, and no instance of it.
func testFollows(t *testing.T, c *cluster) {
	c.w.Entry(c.name+"/web", "web.shop")
	c.w.Instance(c.name+"/web", c.name+"/web-1", "10.0.0.1", 1)
	consumer, _ := c.start()
	c.settled(consumer, Written, 1)
	first := c.entries()["web.isthmus-stub"]
	if first.Metadata.Labels[WaypointLabel] != "waypoint" || len(first.Spec.Ports) != 1 {
		t.Fatalf("the stub is %+v", first)
	}

	writes := consumer.Status().Writes
	for i := range 50 {
		c.w.Instance(c.name+"/web", fmt.Sprintf("%s/web-%d", c.name, i), fmt.Sprintf("10.0.1.%d", i+1), 1)
	}
	c.w.Entry(c.name+"/marker", "marker.shop") // is behind them
	c.settled(consumer, Written, 2)
	if now := consumer.Status().Writes; now.Applied != writes.Applied+1 {
		t.Errorf("50 instances and a service were %d writes", now.Applied-writes.Applied)
	}
	if now := c.entries()["web.isthmus-stub"]; now.Metadata.ResourceVersion != first.Metadata.ResourceVersion {
		t.Error("instances changed the stub")
	}

	c.w.Entry(c.name+"/web", "web.shop", servertest.Port{Name: "http", Number: 81})
	c.eventually("another port", func(all map[string]serviceEntry) bool {
		e := all["web.isthmus-stub"]
		return len(e.Spec.Ports) == 1 && e.Spec.Ports[0].Number == 81
	})
	c.w.Remove(c.name + "/web")
	c.eventually("no stub", func(all map[string]serviceEntry) bool {
		return len(all) == 1 && all["marker.isthmus-stub"].Metadata.UID != ""
	})
}

// An object of the name of a stub that is not the consumer's is listed and left
// alone, and a stub takes its place when it goes.
func testForeign(t *testing.T, c *cluster) {
	foreign := c.entry("web.isthmus-stub", "spec: {hosts: [theirs.example.org], ports: [{number: 80, name: http, protocol: HTTP}], resolution: NONE}")
	c.Apply(t, foreign)
	before := c.entries()["web.isthmus-stub"].Metadata
	c.w.Entry(c.name+"/web", "web.shop")
	consumer, _ := c.start()
	c.settled(consumer, Conflict, 1)
	for o := range consumer.Objects() {
		if o.Name != c.name+"/web.isthmus-stub" || o.Entry != c.name+"/web" || !strings.Contains(o.Reason, "not the consumer's") {
			t.Errorf("it is listed as %+v", o)
		}
	}
	c.w.Remove(c.name + "/web")
	c.settled(consumer, Conflict, 0)
	if now := c.entries()["web.isthmus-stub"].Metadata; now.UID != before.UID || now.ResourceVersion != before.ResourceVersion {
		t.Errorf("the object was %+v and is %+v", before, now)
	}
	c.w.Entry(c.name+"/web", "web.shop")
	c.settled(consumer, Conflict, 1)
	c.Delete(t, foreign, "")
	c.settled(consumer, Written, 1)
}

// What the API server refuses is listed with its words, holds back nothing
// else, and is written once it can be.
func testRefused(t *testing.T, c *cluster) {
	c.w.Entry("nowhere/web", "web.nowhere")
	c.w.Entry(c.name+"/web", "web.shop")
	consumer, _ := c.start()
	c.settled(consumer, Refused, 1)
	c.settled(consumer, Written, 1)
	for o := range consumer.Objects() {
		if o.State == Refused && !strings.Contains(o.Reason, `namespaces "nowhere" not found`) {
			t.Errorf("it is listed as %+v", o)
		}
	}
	c.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: nowhere}}")
	c.settled(consumer, Written, 2)
}

// Objects from before are the consumer's own: what is served still is taken
// over without a write, what is not goes once all registries have listed, and
// other consumers' stay.
func testSweep(t *testing.T, c *cluster) {
	stub := func(consumer, name string) string {
		labels := fmt.Sprintf(", labels: {%s: %s}", ConsumerLabel, consumer)
		return c.entry(name+labels, "spec: {hosts: ["+name+".shop], addresses: [10.9.9.9], ports: [{number: 80, name: http, protocol: HTTP}], resolution: STATIC}")
	}
	c.w.Entry(c.name+"/web", "web.shop")
	first, stop := c.start()
	c.settled(first, Written, 1)
	stop()
	web := c.entries()["web.isthmus-stub"].Metadata
	c.Apply(t, stub(c.name, "old")+stub("other", "theirs"))

	var complete atomic.Bool
	c.w.Hold(collection.ServiceEntry, true)
	consumer, _ := c.start(func(o *Options) { o.Complete = complete.Load })
	c.settled(consumer, Left, 2) // of a registry nothing is known yet
	if st := consumer.Status(); !st.Waiting {
		t.Errorf("it does not wait for registries: %+v", st)
	}
	c.w.Hold(collection.ServiceEntry, false)
	c.settled(consumer, Written, 1)
	c.settled(consumer, Left, 1)
	if all := c.entries(); len(all) != 3 {
		t.Fatalf("before all registries have listed there is %+v", all)
	}
	complete.Store(true)
	all := c.eventually("the sweep", func(all map[string]serviceEntry) bool { return len(all) == 2 })
	c.settled(consumer, Left, 0)
	if _, ok := all["theirs"]; !ok || all["web.isthmus-stub"].Metadata.ResourceVersion != web.ResourceVersion {
		t.Errorf("after the sweep there is %+v", all)
	}
	if w := consumer.Status().Writes; w.Applied != 0 || w.Removed != 1 {
		t.Errorf("it wrote %+v", w)
	}
}

// Of two replicas one writes; the other goes on where that one ends.
func testReplicas(t *testing.T, c *cluster) {
	c.w.Entry(c.name+"/web", "web.shop")
	first, stop := c.start()
	c.settled(first, Written, 1)
	second, _ := c.start()
	testwait.Eventually(t, testenv.Patience, "the second to know of the first", func() (string, bool) {
		st := second.Status()
		return fmt.Sprintf("%+v", st), st.Holder == first.lease.identity
	})
	if st := second.Status(); st.Writer {
		t.Errorf("both write: %+v", st)
	}
	stop()
	c.w.Entry(c.name+"/next", "next.shop")
	c.settled(second, Written, 2)
	if w := second.Status().Writes; w.Applied != 1 {
		t.Errorf("the second wrote %+v, want the new service only", w)
	}
}

// With the API server away nothing is removed, and what changed in the meantime
// is written when it is back, its newest state once.
func TestServerAway(t *testing.T) {
	testenv.SkipIfShort(t)
	c := newCluster(t, testkube.Start(t, testkube.Config{Istio: true}))
	c.w.Entry(c.name+"/web", "web.shop")
	c.w.Entry(c.name+"/gone", "gone.shop")
	consumer, _ := c.start()
	c.settled(consumer, Written, 2)
	c.Kill()
	c.w.Entry(c.name+"/new", "new.shop")
	c.w.Remove(c.name + "/gone")
	for port := range uint32(20) {
		c.w.Entry(c.name+"/web", "web.shop", servertest.Port{Name: "http", Number: 1000 + port})
	}
	testwait.Eventually(t, testenv.Patience, "the consumer to say so", func() (string, bool) {
		st := consumer.Status()
		return fmt.Sprintf("%+v", st), st.Error != ""
	})
	c.Restart(t)
	c.settled(consumer, Written, 2)
	all := c.entries()
	if _, ok := all["new.isthmus-stub"]; !ok || len(all) != 2 || all["web.isthmus-stub"].Spec.Ports[0].Number != 1019 {
		t.Errorf("afterwards there is %+v", all)
	}
	testwait.Eventually(t, testenv.Patience, "nothing to be wrong", func() (string, bool) {
		st := consumer.Status()
		return fmt.Sprintf("%+v", st), st.Error == ""
	})
	if w := consumer.Status().Writes; w.Applied != 4 {
		t.Errorf("it wrote %+v, want two stubs before and two after", w)
	}
}

// What others do to a stub is repaired: one that is deleted comes back with the
// next listing, and one that another manager has changed is written with the
// next change.
func testDrift(t *testing.T, c *cluster) {
	c.w.Entry(c.name+"/web", "web.shop")
	consumer, _ := c.start(func(o *Options) { o.listEvery = time.Second })
	c.settled(consumer, Written, 1)
	first := c.entries()["web.isthmus-stub"].Metadata.UID
	c.Delete(t, c.entry("web.isthmus-stub", "spec: {}"), "")
	c.eventually("another stub", func(all map[string]serviceEntry) bool {
		uid := all["web.isthmus-stub"].Metadata.UID
		return uid != "" && uid != first
	})
	c.settled(consumer, Written, 1)
	c.Apply(t, c.entry("web.isthmus-stub", "spec: {hosts: [hijacked.example.org]}"))
	c.w.Entry(c.name+"/web", "web.shop", servertest.Port{Name: "http", Number: 81})
	c.eventually("the stub with another port", func(all map[string]serviceEntry) bool {
		e := all["web.isthmus-stub"]
		return len(e.Spec.Ports) == 1 && e.Spec.Ports[0].Number == 81 && e.Spec.Hosts[0] == "web.shop"
	})
	c.settled(consumer, Written, 1)
}
