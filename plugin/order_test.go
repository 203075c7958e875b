package plugin

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/translate"
)

// The same services in any order give the same bytes under the same names, and
// the same problems, whatever was there before: also where several services
// want one name.
func TestCatalogOrder(t *testing.T) {
	tr, err := translate.New("r", translate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for round := range uint64(200) {
		random := rand.New(rand.NewPCG(round, 0))
		type described struct {
			svc       registry.Service
			instances []registry.Instance
		}
		var services []described
		seen := map[registry.Key]bool{}
		for range 1 + random.IntN(12) {
			// Few names, of which many become one.
			key := registry.Key{Name: []string{"web", "Web", "web_", "web a", "web-a", "web_a", "\u670d", ""}[random.IntN(8)], Group: []string{"", "a", "A"}[random.IntN(3)]}
			if seen[key] {
				continue
			}
			seen[key] = true
			d := described{svc: registry.Service{Key: key}}
			for i := range random.IntN(4) {
				d.instances = append(d.instances, registry.Instance{ID: fmt.Sprint(i), Address: fmt.Sprintf("10.0.%d.%d", len(services), i), Ports: []registry.Port{{Number: 80 + random.IntN(2)}}})
			}
			services = append(services, d)
		}
		var want map[string]string
		for order := range uint64(4) {
			random := rand.New(rand.NewPCG(round, 1+order))
			c := newCatalog(tr, []string{collection.ServiceEntry, collection.WorkloadEntry}, limits{})
			for range random.IntN(8) { // an earlier state
				d := services[random.IntN(len(services))]
				if random.IntN(4) == 0 {
					c.Remove(d.svc.Key)
				} else {
					c.Set(d.svc, d.instances[:random.IntN(len(d.instances)+1)])
				}
			}
			for _, i := range random.Perm(len(services)) {
				d := services[i]
				shuffled := make([]registry.Instance, 0, len(d.instances))
				for _, n := range random.Perm(len(d.instances)) {
					shuffled = append(shuffled, d.instances[n])
				}
				c.Set(d.svc, shuffled)
			}
			got := map[string]string{}
			for id, sl := range c.slots {
				if w := sl.winner(); w != nil {
					got[id.collection+" "+id.name] = string(w.bytes)
				}
			}
			for id := range c.problems.found {
				got["problem "+id] = c.problems.text(id)
			}
			if want == nil {
				want = got
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("round %d: in another order (-one +another):\n%s", round, diff)
			}
		}
	}
}
