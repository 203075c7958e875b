package plugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/translate"
)

// plainTranslator translates so simply that a test can foretell the outcome:
// the name is lower-cased, "_" becomes "-", and the bytes are what an instance
// says.
type plainTranslator struct{}

func (plainTranslator) Service(svc registry.Service, instances []registry.Instance, _ *translate.Result) *translate.Result {
	r := &translate.Result{}
	if len(instances) == 0 && len(svc.Ports) == 0 {
		return r
	}
	name := "ns/" + strings.ReplaceAll(strings.ToLower(svc.Key.Name), "_", "-")
	r.Entry = &translate.Encoded{Name: name, Resource: fmt.Appendf(nil, "entry %s %v", svc.Key, svc.Meta)}
	for _, i := range instances {
		if i.Address == "" {
			r.Problems = append(r.Problems, translate.Problem{ID: "instance " + svc.Key.String() + "/" + i.ID, Reason: "no address"})
			continue
		}
		if i.Disabled {
			r.LeftOut = append(r.LeftOut, translate.Problem{ID: "instance " + svc.Key.String() + "/" + i.ID, Reason: "disabled"})
			continue
		}
		r.Endpoints = append(r.Endpoints, translate.Encoded{Name: name + "-" + i.ID, Resource: fmt.Appendf(nil, "%s %s", svc.Key, i.Address)})
	}
	slices.SortFunc(r.Endpoints, func(a, b translate.Encoded) int { return strings.Compare(a.Name, b.Name) })
	return r
}

func (plainTranslator) Explain(registry.Service, []registry.Instance) *translate.Explanation {
	return nil
}

// mirror is the other end of a stream: what a host has after it applied every
// batch.
type mirror struct {
	resources map[resourceID]string
	mentioned map[resourceID]bool
	kept      map[resourceID]bool
	nameless  bool // something was kept that has no name
	problems  map[string]string
	leftOut   map[string]string
	synced    bool
	status    *pluginv1.Status
	counts    [2]uint64
}

func newMirror() *mirror {
	return &mirror{resources: map[resourceID]string{}, mentioned: map[resourceID]bool{}, kept: map[resourceID]bool{}, problems: map[string]string{}, leftOut: map[string]string{}}
}

// begin is what a host does at a new stream.
func (m *mirror) begin() {
	m.mentioned, m.problems, m.synced = map[resourceID]bool{}, map[string]string{}, false
	m.kept, m.nameless, m.leftOut = map[resourceID]bool{}, false, map[string]string{}
}

// apply applies a batch as the contract says, and returns what is wrong with
// it.
func (m *mirror) apply(resp *pluginv1.WatchResponse, idOf func(*pluginv1.Upsert) resourceID) error {
	if n := len(resp.GetUpserts()) + len(resp.GetRemovals()) + len(resp.GetProblems()) + len(resp.GetLeftOut()) + len(resp.GetKept()); n > wire.BatchResources {
		return fmt.Errorf("a batch of %d", n)
	}
	named := map[resourceID]bool{}
	once := func(id resourceID) error {
		if named[id] && id.name != "" {
			return fmt.Errorf("%v is twice in one message", id)
		}
		named[id] = true
		return nil
	}
	for _, r := range resp.GetRemovals() {
		if err := once(resourceID{r.GetCollection(), r.GetName()}); err != nil {
			return err
		}
	}
	for _, u := range resp.GetUpserts() {
		if err := once(idOf(u)); err != nil {
			return err
		}
	}
	for _, k := range resp.GetKept() {
		if err := once(resourceID{k.GetCollection(), k.GetName()}); err != nil {
			return err
		}
	}
	for _, r := range resp.GetRemovals() {
		id := resourceID{r.GetCollection(), r.GetName()}
		if _, ok := m.resources[id]; !ok && !m.kept[id] {
			return fmt.Errorf("removal of %v, which was never sent", id)
		}
		delete(m.resources, id)
		delete(m.mentioned, id)
		delete(m.kept, id)
		if id.collection == collection.ServiceEntry { // it takes instances along that the plugin does not know
			m.sweep(id.name)
		}
	}
	for _, u := range resp.GetUpserts() {
		id := idOf(u)
		m.resources[id] = u.GetService() + "|" + string(u.GetResource())
		m.mentioned[id] = true
	}
	for _, u := range resp.GetUpserts() {
		if s := u.GetService(); s != "" && !m.mentioned[resourceID{collection.ServiceEntry, s}] {
			return fmt.Errorf("instance %v of %q, which was not sent", idOf(u), s)
		}
	}
	for _, name := range resp.GetRelisted() {
		id := resourceID{collection.ServiceEntry, name}
		if !m.kept[id] {
			return fmt.Errorf("%s is relisted, which was not kept", name)
		}
		delete(m.kept, id)
		m.sweep(name)
	}
	for _, k := range resp.GetKept() {
		switch id := (resourceID{k.GetCollection(), k.GetName()}); {
		case id.name == "":
			m.nameless = true
		case m.mentioned[id]:
			return fmt.Errorf("%v is kept, which was sent", id)
		default:
			m.mentioned[id], m.kept[id] = true, true
		}
	}
	note := func(list map[string]string, problems []*pluginv1.Problem) {
		for _, p := range problems {
			if list[p.GetId()] = p.GetReason(); p.GetReason() == "" {
				delete(list, p.GetId())
			}
		}
	}
	note(m.problems, resp.GetProblems())
	note(m.leftOut, resp.GetLeftOut())
	if resp.GetSynced() {
		if m.synced {
			return errors.New("synced twice")
		}
		m.synced = true
		if !m.nameless {
			m.sweep("")
		}
	}
	if resp.GetStatus() != nil {
		m.status = resp.GetStatus()
	}
	if proto.Size(resp) > 0 {
		m.counts = [2]uint64{resp.GetServices(), resp.GetInstances()}
	}
	return nil
}

// sweep removes what was not mentioned: of one service, or of all that are not
// kept.
func (m *mirror) sweep(service string) {
	for id, text := range m.resources {
		of, _, _ := strings.Cut(text, "|")
		if !m.mentioned[id] && (service == "" && !m.kept[resourceID{collection.ServiceEntry, of}] || of == service && service != "") {
			delete(m.resources, id)
		}
	}
}

// plainID tells the name of a resource of plainTranslator. The bytes do not
// hold it, so it is looked up in the catalog by the identity of the bytes;
// published resources hold it.
func plainID(c *catalog) func(u *pluginv1.Upsert) resourceID {
	return func(u *pluginv1.Upsert) resourceID {
		var res mcp.Resource
		if err := proto.Unmarshal(u.GetResource(), &res); err == nil && res.GetMetadata() != nil {
			return resourceID{collection.OfBody(res.GetBody().GetTypeUrl()), res.GetMetadata().GetName()}
		}
		panic(fmt.Sprintf("no name in %q", u.GetResource()))
	}
}

// named wraps a translator's bytes into resources that hold their name, so that
// a mirror can tell it.
type named struct{ translator }

func (n named) Service(svc registry.Service, instances []registry.Instance, prev *translate.Result) *translate.Result {
	r := n.translator.Service(svc, instances, prev)
	wrap := func(e *translate.Encoded, coll string) {
		e.Resource = encode(coll, e.Name, string(e.Resource))
	}
	if r.Entry != nil {
		wrap(r.Entry, collection.ServiceEntry)
	}
	for i := range r.Endpoints {
		wrap(&r.Endpoints[i], collection.WorkloadEntry)
	}
	return r
}

func encode(coll, name, text string) []byte {
	url := "type.googleapis.com/istio.networking.v1alpha3." + coll[strings.LastIndexByte(coll, '/')+1:]
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(&mcp.Resource{
		Metadata: &mcp.Metadata{Name: name},
		Body:     &anypb.Any{TypeUrl: url, Value: []byte(text)},
	})
	if err != nil {
		panic(err)
	}
	return b
}

// drain applies everything that a cursor has to send and returns the batches.
func drain(t *testing.T, r *cursor, m *mirror) []*pluginv1.WatchResponse {
	t.Helper()
	var all []*pluginv1.WatchResponse
	for {
		resp, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		if resp == nil {
			return all
		}
		if err := m.apply(resp, plainID(r.c)); err != nil {
			t.Fatal(err)
		}
		all = append(all, resp)
	}
}

func testCatalog() *catalog {
	return newCatalog(named{plainTranslator{}}, []string{collection.ServiceEntry, collection.WorkloadEntry, "networking.istio.io/VirtualService"}, limits{})
}

func instances(ids ...string) []registry.Instance {
	var out []registry.Instance
	for _, id := range ids {
		out = append(out, registry.Instance{ID: id, Address: "10.0.0." + id})
	}
	return out
}

func service1(name string) registry.Service { return registry.Service{Key: registry.Key{Name: name}} }

func publishedEntry(name, host string) *mcp.Resource {
	return published1(name, &networking.ServiceEntry{
		Hosts:      []string{host},
		Ports:      []*networking.ServicePort{{Name: "http", Number: 80, Protocol: "HTTP"}},
		Resolution: networking.ServiceEntry_STATIC,
	})
}

// published1 returns a resource as an adapter publishes it.
func published1(name string, spec proto.Message) *mcp.Resource {
	body, err := anypb.New(spec)
	if err != nil {
		panic(err)
	}
	return &mcp.Resource{Metadata: &mcp.Metadata{Name: name}, Body: body}
}

// A slow stream that is broken off now and then ends up with exactly what plain
// maps hold, whatever was set, removed and published meanwhile by several
// goroutines, with names that several services want.
func TestCatalogEqualsPlainMaps(t *testing.T) {
	t.Parallel()
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			c := testCatalog()
			names := []string{"web", "Web", "WEB", "my_svc", "my-svc", "api", "API", "a_b-c", "a-b_c", "a-b-c"}

			// The model. Each goroutine owns some keys, so that the last Set of
			// a key is known.
			var mu sync.Mutex
			type state struct {
				svc       registry.Service
				instances []registry.Instance
			}
			model := map[registry.Key]state{}
			pubs := map[string][]byte{}

			ctx, stop := context.WithCancel(t.Context())
			var writers, reader sync.WaitGroup
			for w := range 4 {
				writers.Go(func() {
					rnd := rand.New(rand.NewPCG(seed, uint64(w)))
					for range 2000 {
						key := registry.Key{Name: names[rnd.IntN(len(names))], Group: fmt.Sprint("g", w)}
						switch rnd.IntN(10) {
						default:
							svc := registry.Service{Key: key, Meta: map[string]string{"v": fmt.Sprint(rnd.IntN(3))}}
							var in []registry.Instance
							for id := range rnd.IntN(6) {
								if rnd.IntN(3) > 0 {
									in = append(in, registry.Instance{ID: fmt.Sprint(id), Address: []string{"", "10.0.0.1", "10.0.0.2"}[rnd.IntN(3)]})
								}
							}
							c.Set(svc, in)
							mu.Lock()
							model[key] = state{svc, in}
							mu.Unlock()
						case 0, 1:
							c.Remove(key)
							mu.Lock()
							delete(model, key)
							mu.Unlock()
						case 2:
							if w != 0 {
								continue // one owner of published names
							}
							res := publishedEntry("ns/"+[]string{"web", "pub", "api"}[rnd.IntN(3)], fmt.Sprintf("h%d.example.org", rnd.IntN(3)))
							enc, err := translate.Resource(res)
							if err != nil {
								t.Error(err)
								return
							}
							c.Publish(res)
							mu.Lock()
							pubs[enc.Name] = enc.Resource
							mu.Unlock()
						case 3:
							if w != 0 {
								continue
							}
							name := "ns/" + []string{"web", "pub", "api"}[rnd.IntN(3)]
							c.Withdraw(collection.ServiceEntry, name)
							mu.Lock()
							delete(pubs, name)
							mu.Unlock()
						case 4:
							if rnd.IntN(50) == 0 {
								c.Synced()
							}
						}
					}
				})
			}

			// The slow stream.
			m := newMirror()
			r := c.read()
			reader.Go(func() {
				rnd := rand.New(rand.NewPCG(seed, 99))
				for ctx.Err() == nil {
					for range rnd.IntN(200) {
						runtime.Gosched()
					}
					if rnd.IntN(100) == 0 {
						r = c.read()
						m.begin()
					}
					resp, err := r.next()
					if err != nil {
						t.Error(err)
						return
					}
					if resp == nil {
						continue
					}
					if err := m.apply(resp, plainID(c)); err != nil {
						t.Error(err)
						return
					}
				}
			})
			writers.Wait()
			stop()
			reader.Wait()
			if t.Failed() {
				return
			}
			c.Synced()
			drain(t, r, m)

			// What should be there: for each name the published resource, else
			// the best of the services.
			want := map[resourceID]string{}
			for name, b := range pubs {
				want[resourceID{collection.ServiceEntry, name}] = "|" + string(b)
			}
			keys := slices.SortedFunc(maps.Keys(model), func(a, b registry.Key) int {
				exact := func(k registry.Key) int {
					if strings.ToLower(k.Name) == k.Name && !strings.Contains(k.Name, "_") {
						return 0
					}
					return 1
				}
				if d := exact(a) - exact(b); d != 0 {
					return d
				}
				return compareKeys(a, b)
			})
			n := 0
			losers := map[string]bool{}
			for _, key := range keys {
				st := model[key]
				n += len(st.instances)
				res := named{plainTranslator{}}.Service(st.svc, st.instances, nil)
				if res.Entry == nil {
					continue
				}
				if _, taken := want[resourceID{collection.ServiceEntry, res.Entry.Name}]; taken {
					losers["service "+key.String()] = true
					continue
				}
				want[resourceID{collection.ServiceEntry, res.Entry.Name}] = res.Entry.Name + "|" + string(res.Entry.Resource)
				for _, e := range res.Endpoints {
					want[resourceID{collection.WorkloadEntry, e.Name}] = res.Entry.Name + "|" + string(e.Resource)
				}
			}
			if d := cmp.Diff(want, m.resources); d != "" {
				t.Errorf("the stream's state differs from the model (-model +stream):\n%s", d)
			}
			if !m.synced {
				t.Error("not synced")
			}
			if got := [2]uint64{uint64(len(model)), uint64(n)}; got != m.counts {
				t.Errorf("services and instances: %v, want %v", m.counts, got)
			}
			gotLosers := map[string]bool{}
			for id := range m.problems {
				if strings.HasPrefix(id, "service ") {
					gotLosers[id] = true
				}
			}
			if d := cmp.Diff(losers, gotLosers); d != "" {
				t.Errorf("services listed as not served (-model +stream):\n%s", d)
			}

			// A new stream says the same once more, and only that.
			fresh := newMirror()
			drain(t, c.read(), fresh)
			if d := cmp.Diff(m.resources, fresh.resources); d != "" {
				t.Errorf("a new stream differs from the old one (-old +new):\n%s", d)
			}
			if d := cmp.Diff(m.problems, fresh.problems); d != "" {
				t.Errorf("problems of a new stream differ from the old one's (-old +new):\n%s", d)
			}
			// Everything goes.
			for key := range model {
				c.Remove(key)
			}
			for name := range pubs {
				c.Withdraw(collection.ServiceEntry, name)
			}
			r2 := c.stream
			drain(t, r2, fresh)
			if len(fresh.resources) != 0 || len(fresh.problems) != 0 || len(c.slots) != 0 || len(c.services) != 0 {
				t.Errorf("after everything was removed: resources %v, problems %v, %d slots, %d services",
					fresh.resources, fresh.problems, len(c.slots), len(c.services))
			}
		})
	}
}

// A call that changes nothing sends nothing.
func TestCatalogSendsNothingForNothing(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	m := newMirror()
	r := c.read()
	c.Set(service1("web"), instances("1", "2"))
	c.Publish(publishedEntry("ns/pub", "pub.example.org"))
	c.Problem("x", "y")
	c.Synced()
	c.Degraded(errors.New("gone"))
	drain(t, r, m)

	c.Set(service1("web"), instances("2", "1"))
	c.Publish(publishedEntry("ns/pub", "pub.example.org"))
	c.Problem("x", "y")
	c.Problem("unknown", "")
	c.Synced()
	c.Degraded(errors.New("gone"))
	c.Remove(registry.Key{Name: "unknown"})
	c.Withdraw(collection.ServiceEntry, "ns/unknown")
	if all := drain(t, r, m); len(all) != 0 {
		t.Errorf("sent %v", all)
	}
	// What comes and goes between two batches was never there.
	c.Set(service1("brief"), instances("1"))
	c.Remove(registry.Key{Name: "brief"})
	for _, resp := range drain(t, r, m) {
		if len(resp.GetUpserts())+len(resp.GetRemovals()) != 0 {
			t.Errorf("sent %v", resp)
		}
	}
}

// A service and its instances travel in one batch if they fit, and the
// ServiceEntry first if they do not.
func TestCatalogKeepsServicesTogether(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	many := func(n int) []registry.Instance {
		var out []registry.Instance
		for i := range n {
			out = append(out, registry.Instance{ID: fmt.Sprint(i), Address: "10.0.0.1"})
		}
		return out
	}
	c.Set(service1("a"), many(600))
	c.Set(service1("b"), many(600))
	c.Set(service1("c"), many(2500))
	m := newMirror()
	for i, resp := range drain(t, c.read(), m) {
		seen := map[string]bool{}
		for _, u := range resp.GetUpserts() {
			if u.GetService() != "" {
				seen[u.GetService()] = true
			}
		}
		if seen["ns/a"] && seen["ns/b"] {
			t.Errorf("batch %d holds parts of two services that do not fit together: %v", i, seen)
		}
	}
	if len(m.resources) != 3+600+600+2500 {
		t.Errorf("%d resources", len(m.resources))
	}
}

// Synced goes out when everything that was there before it has gone out, even
// if the registry never rests.
func TestCatalogSyncedUnderChurn(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	for i := range 3000 {
		c.Set(service1(fmt.Sprint("svc-", i)), instances("1"))
	}
	r := c.read()
	m := newMirror()
	c.Synced()
	for batch := 0; ; batch++ {
		if batch > 20 {
			t.Fatal("synced was not sent")
		}
		for i := range 1200 { // more than fits into a batch
			c.Set(registry.Service{Key: registry.Key{Name: fmt.Sprint("churn-", batch, "-", i)}}, instances("1"))
		}
		resp, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		if err := m.apply(resp, plainID(c)); err != nil {
			t.Fatal(err)
		}
		if resp.GetSynced() {
			break
		}
	}
	for i := range 3000 {
		if _, ok := m.resources[resourceID{collection.ServiceEntry, fmt.Sprint("ns/svc-", i)}]; !ok {
			t.Fatalf("synced came before svc-%d", i)
		}
	}
}

// A name that two services want goes to the one whose name needed no change,
// the other is listed, and gets it afterwards; the order in which they came
// does not matter.
func TestCatalogNameTakenTwice(t *testing.T) {
	t.Parallel()
	for _, order := range [][]string{{"my_svc", "my-svc"}, {"my-svc", "my_svc"}} {
		c := testCatalog()
		m := newMirror()
		r := c.read()
		for _, name := range order {
			c.Set(service1(name), instances("1"))
		}
		drain(t, r, m)
		entry := resourceID{collection.ServiceEntry, "ns/my-svc"}
		if got := m.resources[entry]; !strings.Contains(got, "entry my-svc ") {
			t.Errorf("%v: served %q", order, got)
		}
		if got := m.problems["service my_svc"]; !strings.Contains(got, `taken by service "my-svc"`) || len(m.problems) != 1 {
			t.Errorf("%v: problems %v", order, m.problems)
		}
		c.Remove(registry.Key{Name: "my-svc"})
		drain(t, r, m)
		if got := m.resources[entry]; !strings.Contains(got, "entry my_svc ") {
			t.Errorf("%v: served %q after the winner went", order, got)
		}
		if got := m.resources[resourceID{collection.WorkloadEntry, "ns/my-svc-1"}]; !strings.Contains(got, "my_svc 10.0.0.1") {
			t.Errorf("%v: instance %q after the winner went", order, got)
		}
		if len(m.problems) != 0 {
			t.Errorf("%v: problems %v after the winner went", order, m.problems)
		}
	}
}

// What cannot be published is listed, and what was published under the name
// before stays.
func TestCatalogPublishInvalid(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	m := newMirror()
	r := c.read()
	c.Publish(publishedEntry("ns/pub", "pub.example.org"))
	drain(t, r, m)
	before := maps.Clone(m.resources)
	c.Publish(publishedEntry("ns/pub", "not a host"))
	c.Publish(&mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/x"}, Body: &anypb.Any{TypeUrl: "type.googleapis.com/example.Nothing"}})
	c.Publish(nil)
	c.Publish(published1("ns/gw", &networking.Gateway{}))
	drain(t, r, m)
	if d := cmp.Diff(before, m.resources); d != "" {
		t.Errorf("resources changed:\n%s", d)
	}
	for _, id := range []string{
		"resource networking.istio.io/ServiceEntry ns/pub", "resource of unknown kind ns/x", "resource of unknown kind",
		"resource networking.istio.io/Gateway ns/gw",
	} {
		if m.problems[id] == "" {
			t.Errorf("%q is not listed; listed are %v", id, m.problems)
		}
	}
	c.Publish(publishedEntry("ns/pub", "other.example.org"))
	drain(t, r, m)
	if _, ok := m.problems["resource networking.istio.io/ServiceEntry ns/pub"]; ok {
		t.Error("the problem is still listed after the resource was mended")
	}
}

// What is left out by intention is listed apart from the problems, on each
// stream anew, and no longer once it is served or gone.
func TestCatalogListsWhatIsLeftOut(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	web := registry.Service{Key: registry.Key{Name: "web"}}
	up := registry.Instance{ID: "a", Address: "10.0.0.1"}
	down := registry.Instance{ID: "b", Address: "10.0.0.2", Disabled: true}
	c.Set(web, []registry.Instance{up, down})
	m := newMirror()
	r := c.read()
	drain(t, r, m)
	want := map[string]string{"instance web/b": "disabled"}
	if d := cmp.Diff(want, m.leftOut); d != "" || len(m.problems) > 0 {
		t.Errorf("left out (-want +got):\n%s\nproblems %v", d, m.problems)
	}
	again := newMirror()
	r = c.read()
	drain(t, r, again)
	if d := cmp.Diff(want, again.leftOut); d != "" {
		t.Errorf("left out on a new stream (-want +got):\n%s", d)
	}
	c.Set(web, []registry.Instance{up, {ID: "b", Address: "10.0.0.2"}})
	drain(t, r, again)
	if len(again.leftOut) > 0 {
		t.Errorf("left out once it is served: %v", again.leftOut)
	}
	c.Set(web, []registry.Instance{down})
	drain(t, r, again)
	c.Remove(web.Key)
	drain(t, r, again)
	if len(again.leftOut) > 0 || len(c.leftOut.found) > 0 {
		t.Errorf("left out once the service is gone: %v", again.leftOut)
	}
}

// Problems are bounded; those beyond are counted, and move up when others are
// solved. Text of any bytes can be sent.
func TestCatalogProblemsBounded(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	m := newMirror()
	r := c.read()
	for i := range maxProblems + 5 {
		c.Problem(fmt.Sprint("p", i), "bad")
	}
	drain(t, r, m)
	if len(m.problems) != maxProblems+1 || m.problems[moreID] != "and 5 more" {
		t.Errorf("%d problems, closing entry %q", len(m.problems), m.problems[moreID])
	}
	for i := range 7 {
		c.Problem(fmt.Sprint("p", i), "")
	}
	drain(t, r, m)
	if len(m.problems) != maxProblems-2 || m.problems[moreID] != "" {
		t.Errorf("%d problems, closing entry %q", len(m.problems), m.problems[moreID])
	}
	c.Problem("\xff", strings.Repeat("ä", 10_000))
	c.Degraded(errors.New("\xfe"))
	for _, resp := range drain(t, r, m) {
		if _, err := proto.Marshal(resp); err != nil {
			t.Error(err)
		}
	}
}

// The state of the connection to the registry is part of a new stream.
func TestCatalogStatus(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	m := newMirror()
	r := c.read()
	drain(t, r, m)
	if m.status == nil || m.status.GetError() != "" {
		t.Errorf("status %v at the beginning", m.status)
	}
	c.Degraded(errors.New("unreachable"))
	drain(t, r, m)
	if m.status.GetError() != "unreachable" {
		t.Errorf("status %v", m.status)
	}
	m = newMirror()
	drain(t, c.read(), m)
	if m.status.GetError() != "unreachable" {
		t.Errorf("status %v of a new stream", m.status)
	}
	if _, err := r.next(); !errors.Is(err, errSuperseded) {
		t.Errorf("the old stream: %v", err)
	}
	c.Degraded(nil)
	drain(t, c.stream, m)
	if m.status.GetError() != "" {
		t.Errorf("status %v when it is followed again", m.status)
	}
}

// One changed instance of a service with 1000 is one small message.
func TestCatalogOneChangeIsSmall(t *testing.T) {
	t.Parallel()
	tr, err := translate.New("consul", translate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := newCatalog(tr, []string{collection.ServiceEntry, collection.WorkloadEntry}, limits{})
	in := make([]registry.Instance, 1000)
	for i := range in {
		in[i] = registry.Instance{ID: fmt.Sprint("web-", i), Address: fmt.Sprintf("10.0.%d.%d", i/250, 1+i%250), Ports: []registry.Port{{Number: 8080}}}
	}
	c.Set(service1("web"), in)
	r := c.read()
	for resp, err := r.next(); resp != nil || err != nil; resp, err = r.next() {
		if err != nil {
			t.Fatal(err)
		}
	}
	in[500].Weight = new(7.0)
	c.Set(service1("web"), in)
	resp, err := r.next()
	if err != nil {
		t.Fatal(err)
	}
	if n, size := len(resp.GetUpserts()), proto.Size(resp); n != 1 || len(resp.GetRemovals()) != 0 || size > 400 {
		t.Errorf("%d upserts, %d removals, %d bytes; want 1, 0, at most 400", n, len(resp.GetRemovals()), size)
	}
	if resp.GetUpserts()[0].GetService() != "consul/web" || !bytes.Contains(resp.GetUpserts()[0].GetResource(), []byte("WorkloadEntry")) {
		t.Errorf("upsert %v", resp.GetUpserts()[0])
	}
	if resp, err := r.next(); resp != nil || err != nil {
		t.Errorf("then %v, %v", resp, err)
	}
}

// The removal of an instance says why it takes no traffic, unless the registry
// no longer has it, and only as long as that is so.
func TestCatalogSaysWhyInstancesGo(t *testing.T) {
	t.Parallel()
	tr, err := translate.New("consul", translate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := newCatalog(tr, []string{collection.ServiceEntry, collection.WorkloadEntry}, limits{})
	all := func(change ...func(*registry.Instance)) []registry.Instance {
		out := make([]registry.Instance, 5)
		for i := range out {
			out[i] = registry.Instance{ID: fmt.Sprint("web-", i), Address: fmt.Sprintf("10.0.0.%d", 1+i), Ports: ports(8080)}
			if i < len(change) {
				change[i](&out[i])
			}
		}
		return out
	}
	same := func(*registry.Instance) {}
	c.Set(service1("web"), all())
	r := c.read()
	drain(t, r, newMirror())
	removals := func() (why []string) {
		for {
			resp, err := r.next()
			if err != nil {
				t.Fatal(err)
			}
			if resp == nil {
				slices.Sort(why)
				return why
			}
			for _, rm := range resp.GetRemovals() {
				reason, _, _ := strings.Cut(rm.GetReason(), ":")
				why = append(why, rm.GetHealth()+" "+reason)
			}
		}
	}
	for _, step := range []struct {
		name      string
		instances []registry.Instance
		want      []string
	}{
		{"health, maintenance, weight", all(
			func(i *registry.Instance) { i.Health = registry.HealthCritical },
			func(i *registry.Instance) { i.Disabled = true },
			func(i *registry.Instance) { i.Weight = new(0.0) },
		)[:4], []string{" ", " has weight 0", "critical fails its check", "disabled is disabled in the registry"}},
		{"back", all(), nil},
		{"gone", all()[:1], []string{" ", " ", " ", " "}},
		{"another one", all(same, func(i *registry.Instance) { i.Health = registry.HealthCritical })[:2], nil},
	} {
		c.Set(service1("web"), step.instances)
		if d := cmp.Diff(step.want, removals()); d != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, d)
		}
	}
	// Of one that failed and went before it was sent, nothing is said, nor
	// of its ServiceEntry.
	c.Set(service1("web"), all(func(i *registry.Instance) { i.Health = registry.HealthCritical })[:1])
	c.Set(service1("web"), all()[:1])
	c.Set(service1("web"), nil)
	if d := cmp.Diff([]string{" ", " "}, removals()); d != "" || len(r.idle) > 0 {
		t.Errorf("failed, back and gone (-want +got):\n%s\nkept %v", d, r.idle)
	}
}

// A resource that no host accepts is sent as far as one reads it to know what
// to keep: the whole would exceed what a message may have, and end the stream
// again and again.
func TestCatalogSendsTheBeginningOfWhatIsTooLarge(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	large := publishedEntry("ns/large", "large.example.org")
	large.Metadata.Annotations = map[string]string{"a": strings.Repeat("x", wire.MaxMessage+1)}
	c.Publish(large)
	c.Publish(publishedEntry("ns/small", "small.example.org"))
	c.Synced()
	r := c.read()
	sizes := map[string]int{}
	for done := false; !done; {
		resp, err := r.next()
		if err != nil || resp == nil {
			t.Fatalf("before synced: %v, %v", resp, err)
		}
		done = resp.GetSynced()
		if n := proto.Size(resp); n > 2*wire.BatchBytes+wire.MaxResource {
			t.Errorf("a message of %d bytes", n)
		}
		for _, u := range resp.GetUpserts() {
			for _, name := range []string{"ns/large", "ns/small"} {
				if bytes.Contains(u.GetResource()[:64], []byte(name)) {
					sizes[name] = len(u.GetResource())
				}
			}
		}
	}
	if sizes["ns/large"] != wire.MaxResource+1 || sizes["ns/small"] == 0 || sizes["ns/small"] > 1000 {
		t.Errorf("sizes %v", sizes)
	}
}

func ports(number int) []registry.Port { return []registry.Port{{Number: number}} }

// benchCatalog is a catalog of services with 10 instances each, translated for
// real.
func benchCatalog(b *testing.B, services int) (*catalog, [][]registry.Instance) {
	b.Helper()
	tr, err := translate.New("consul", translate.Options{})
	if err != nil {
		b.Fatal(err)
	}
	c := newCatalog(tr, []string{collection.ServiceEntry, collection.WorkloadEntry}, limits{})
	all := make([][]registry.Instance, services)
	for i := range all {
		for j := range 10 {
			all[i] = append(all[i], registry.Instance{
				ID: fmt.Sprintf("svc-%d-%d", i, j), Address: fmt.Sprintf("10.%d.%d.%d", i/250, i%250, j+1), Ports: ports(8080),
				Meta: map[string]string{"version": "v1"},
			})
		}
		c.Set(service1(fmt.Sprint("svc-", i)), all[i])
	}
	return c, all
}

// BenchmarkOneChange is one changed instance among 100,000, from Set to the
// message.
func BenchmarkOneChange(b *testing.B) {
	c, all := benchCatalog(b, 10_000)
	r := c.read()
	for resp, _ := r.next(); resp != nil; resp, _ = r.next() {
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		n := i % len(all)
		all[n][3].Weight = new(float64(2 + i))
		c.Set(service1(fmt.Sprint("svc-", n)), all[n])
		resp, err := r.next()
		if err != nil || len(resp.GetUpserts()) != 1 {
			b.Fatal(resp, err)
		}
	}
}

// BenchmarkNoChange is a Set that changes nothing.
func BenchmarkNoChange(b *testing.B) {
	c, all := benchCatalog(b, 1000)
	svc := service1("svc-7")
	b.ReportAllocs()
	for b.Loop() {
		c.Set(svc, all[7])
	}
}

// BenchmarkFullListing is a new stream over 110,000 resources: all its
// messages, encoded.
func BenchmarkFullListing(b *testing.B) {
	c, _ := benchCatalog(b, 10_000)
	b.ReportAllocs()
	size := 0
	for b.Loop() {
		size = 0
		r := c.read()
		for resp, _ := r.next(); resp != nil; resp, _ = r.next() {
			raw, err := proto.Marshal(resp)
			if err != nil {
				b.Fatal(err)
			}
			size += len(raw)
		}
	}
	b.ReportMetric(float64(size)/1e6, "MB/listing")
}

// Set and Remove of one key from several goroutines leave nothing behind that
// the key no longer reaches.
func TestCatalogSetAgainstRemove(t *testing.T) {
	t.Parallel()
	c := testCatalog()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for range 3000 {
				if w%2 == 0 {
					c.Set(service1("web"), instances("1", "2"))
				} else {
					c.Remove(registry.Key{Name: "web"})
				}
			}
		})
	}
	wg.Wait()
	c.Remove(registry.Key{Name: "web"})
	if len(c.slots) != 0 || len(c.services) != 0 || c.instances != 0 {
		t.Errorf("%d resources, %d services, %d instances are left", len(c.slots), len(c.services), c.instances)
	}
}
