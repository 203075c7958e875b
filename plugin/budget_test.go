package plugin

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/translate"
)

func publishedWorkload(name, address string) *mcp.Resource {
	return published1(name, &networking.WorkloadEntry{Address: address})
}

// Names of endpoints that several services and published resources want, of
// services that fit into a batch and that do not, while streams break off at
// any point: what arrives is what a catalog tells that was never told anything
// else, and nothing is remembered of names that are not contested.
func TestCatalogContestedEndpoints(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(seed, 7))
			type state struct {
				svc       registry.Service
				instances []registry.Instance
			}
			services := map[registry.Key]state{}
			published := map[resourceID]*mcp.Resource{}

			c, m := testCatalog(), newMirror()
			r := c.read()
			batch := func(c *catalog, r *cursor, m *mirror) bool {
				resp, err := r.next()
				if err != nil {
					t.Fatal(err)
				}
				if resp == nil {
					return false
				}
				if err := m.apply(resp, plainID(c)); err != nil {
					t.Fatal(err)
				}
				return true
			}
			pick := func(of ...string) string { return of[rnd.IntN(len(of))] }
			for range 1500 {
				switch rnd.IntN(12) {
				default:
					key := registry.Key{Name: pick("web", "Web", "web-a", "web_a", "my-svc", "my_svc")}
					st := state{svc: registry.Service{Key: key, Ports: ports(80)}}
					n := rnd.IntN(6)
					if rnd.IntN(40) == 0 {
						n = 1500 // more than a batch
					}
					for id := range n {
						if rnd.IntN(4) > 0 {
							st.instances = append(st.instances, registry.Instance{ID: pick("", "a-") + fmt.Sprint(id), Address: pick("10.0.0.1", "10.0.0.2")})
						}
					}
					c.Set(st.svc, st.instances)
					services[key] = st
				case 0:
					key := registry.Key{Name: pick("web", "Web", "web-a", "web_a", "my-svc", "my_svc")}
					c.Remove(key)
					delete(services, key)
				case 1, 2:
					res := publishedWorkload("ns/"+pick("web-1", "web-a-1", "web-a-2", "my-svc-0", "my-svc-a-1", "other-1"), pick("10.1.0.1", "10.1.0.2"))
					c.Publish(res)
					published[resourceID{collection.WorkloadEntry, res.GetMetadata().GetName()}] = res
				case 3:
					res := publishedEntry("ns/"+pick("web", "web-a"), pick("a.example.org", "b.example.org"))
					c.Publish(res)
					published[resourceID{collection.ServiceEntry, res.GetMetadata().GetName()}] = res
				case 4, 5:
					for id := range published {
						c.Withdraw(id.collection, id.name)
						delete(published, id)
						break
					}
				case 6, 7, 8:
					batch(c, r, m)
				case 9:
					switch rnd.IntN(8) {
					case 0:
						r = c.read()
						m.begin()
					case 1: // nobody reads for a while
						r.close()
						key := registry.Key{Name: "web"}
						c.Set(registry.Service{Key: key, Ports: ports(80)}, instances("1", "7"))
						services[key] = state{registry.Service{Key: key, Ports: ports(80)}, instances("1", "7")}
						r = c.read()
						m.begin()
					case 2:
						for batch(c, r, m) {
						}
					}
				}
			}
			c.Synced()
			for batch(c, r, m) {
			}

			model, want := testCatalog(), newMirror()
			for _, st := range services {
				model.Set(st.svc, st.instances)
			}
			for _, res := range published {
				model.Publish(res)
			}
			model.Synced()
			for r := model.read(); batch(model, r, want); {
			}
			if d := cmp.Diff(want.resources, m.resources); d != "" {
				t.Errorf("resources (-model +stream):\n%s", d)
			}
			if d := cmp.Diff(want.problems, m.problems); d != "" {
				t.Errorf("problems (-model +stream):\n%s", d)
			}
			if len(c.slots) != len(model.slots) {
				t.Errorf("%d slots, the model has %d", len(c.slots), len(model.slots))
			}
			for id := range published {
				c.Withdraw(id.collection, id.name)
			}
			for key := range services {
				c.Remove(key)
			}
			for batch(c, r, m) {
			}
			if len(m.resources)+len(m.problems)+len(c.slots) != 0 {
				t.Errorf("after everything was removed: resources %v, problems %v, %d slots", m.resources, m.problems, len(c.slots))
			}
		})
	}
}

// liveBytes returns the bytes of the heap that are in use after a collection.
func liveBytes() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// catalogBytes fills a catalog of services with 10 instances each, sends it to
// a stream, and returns the live bytes per instance, what the adapter holds
// itself apart.
func catalogBytes(tb testing.TB, services int) float64 {
	tb.Helper()
	tr, err := translate.New("consul", translate.Options{})
	if err != nil {
		tb.Fatal(err)
	}
	before := liveBytes()
	c := newCatalog(tr, []string{collection.ServiceEntry, collection.WorkloadEntry}, limits{})
	r := c.read()
	zones := []string{"eu-1a", "eu-1b", "eu-1c"}
	for i := range services {
		name := fmt.Sprintf("%s-%04d", []string{"account", "billing", "catalog", "checkout"}[i%4], i)
		var in []registry.Instance
		for j := range 10 {
			in = append(in, registry.Instance{
				ID: fmt.Sprintf("%s-%d", name, j), Address: fmt.Sprintf("10.%d.%d.%d", i/250, i%250, j+1),
				Ports: []registry.Port{{Name: "http", Number: 8080, Protocol: "http"}}, Meta: map[string]string{"version": fmt.Sprint("v", j%2)},
				Weight: new(1.0), Health: registry.HealthPassing, Locality: registry.Locality{Region: "eu-1", Zone: zones[j%3]},
			})
		}
		c.Set(service1(strings.Clone(name)), in)
	}
	c.Synced()
	for {
		resp, err := r.next()
		if err != nil {
			tb.Fatal(err)
		}
		if resp == nil {
			break
		}
	}
	after := liveBytes()
	if got := c.used.resources; got != uint64(11*services) {
		tb.Fatalf("%d resources", got)
	}
	runtime.KeepAlive(r)
	return (float64(after) - float64(before)) / float64(10*services)
}

// maxInstanceBytes bounds what the catalog keeps of an instance, its share of
// a service of ten included.
const maxInstanceBytes = 210

// An instance costs the catalog no second copy of what the host has.
//
//nolint:paralleltest // it measures the heap
func TestCatalogBytesPerInstance(t *testing.T) {
	if n := catalogBytes(t, 5000); n > maxInstanceBytes {
		t.Errorf("%.0f live bytes per instance, more than %d", n, maxInstanceBytes)
	}
}

// BenchmarkMemory is what 100,000 instances keep live.
func BenchmarkMemory(b *testing.B) {
	var all []float64
	for b.Loop() {
		all = append(all, catalogBytes(b, 10_000))
	}
	b.ReportMetric(slices.Min(all), "B/instance")
}
