package plugin_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// look returns what a catalog holds, once nothing else happens.
func look(c *plugintest.Catalog) (held plugintest.Held) {
	c.Look(func(h *plugintest.Held) { held = *h })
	return held
}

func svcNamed(name string) registry.Service { return registry.Service{Key: registry.Key{Name: name}} }

func ids(text string) (all []registry.Instance) {
	for id := range strings.FieldsSeq(text) {
		all = append(all, registry.Instance{ID: id, Address: "10.0.0.1"})
	}
	return all
}

type services = map[string]string

// TestGrace shows an outage from which a registry comes back without its data:
// what is missing stays until it is shown, or until the time is over.
func TestGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := plugintest.NewCatalog()
		g := plugin.NewGrace(c, time.Minute, c.Degraded)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go g.Run(ctx)
		set := func(name, instances string) { g.Set(svcNamed(name), ids(instances)) }
		remove := func(name string) { g.Remove(svcNamed(name).Key) }

		set("web", "b a")
		set("db", "x")
		set("idle", "")
		c.WantIDs(t, "before any outage", services{"web": "a b", "db": "x", "idle": ""})
		set("web", "a")
		c.WantIDs(t, "before any outage nothing is kept", services{"web": "a", "db": "x", "idle": ""})
		set("web", "a b")
		sets := look(c).Sets
		set("web", "a b")
		if look(c).Sets != sets {
			t.Error("what changes nothing was told")
		}

		g.Away()
		time.Sleep(time.Hour)
		synctest.Wait()
		c.WantIDs(t, "away", services{"web": "a b", "db": "x", "idle": ""})
		g.Back()
		set("web", "c")
		remove("db")
		remove("idle")
		c.WantIDs(t, "back, empty", services{"web": "a b c", "db": "x", "idle": ""})
		c.WantDegraded(t, "back, empty", "remove_grace")
		set("web", "b c")
		set("web", "c")
		c.WantIDs(t, "what was shown and went is gone", services{"web": "a c", "db": "x", "idle": ""})
		set("web", "a c")
		set("db", "x")
		set("idle", "")
		c.WantDegraded(t, "all is back", "")
		remove("idle")
		set("web", "c")
		c.WantIDs(t, "what was shown and went is gone", services{"web": "c", "db": "x"})

		g.Away()
		g.Back()
		remove("web")
		set("db", "")
		time.Sleep(50 * time.Second)
		g.Away()
		g.Back()
		remove("web")
		time.Sleep(50 * time.Second)
		synctest.Wait()
		c.WantIDs(t, "another outage begins the time again", services{"web": "c", "db": "x"})
		time.Sleep(11 * time.Second)
		synctest.Wait()
		c.WantIDs(t, "the time is over; of db nothing was said", services{"db": "x"})
		c.WantDegraded(t, "the time is over", "")
		set("db", "")
		c.WantIDs(t, "db is empty", services{"db": ""})

		set("db", "x y")
		g.Away()
		g.Back()
		g.Add(svcNamed("db"), ids("z"))
		c.WantIDs(t, "an answer that may lack something", services{"db": "x y z"})
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		c.WantIDs(t, "it is no answer", services{"db": "x y z"})
		g.RemoveOthers(func(registry.Key) bool { return false })
		c.WantIDs(t, "nothing is left", services{})
		if known, listed := g.Instances(); known != 0 || listed != 0 {
			t.Errorf("%d instances are known, %d listed", known, listed)
		}
	})
}

// TestNoGrace shows that without time everything is believed as soon as the
// registry is back.
func TestNoGrace(t *testing.T) {
	c := plugintest.NewCatalog()
	g := plugin.NewGrace(c, 0, nil)
	g.Set(svcNamed("web"), ids("a b"))
	g.Away()
	g.Set(svcNamed("web"), ids("a"))
	c.WantIDs(t, "away", services{"web": "a b"})
	g.Back()
	c.WantIDs(t, "back", services{"web": "a"})
}

// TestGraceModel compares a random life with a model that goes by the text of
// Grace: what was known before the outage and was not shown since is kept.
func TestGraceModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(1, 2))
		c := plugintest.NewCatalog()
		g := plugin.NewGrace(c, time.Minute, c.Degraded)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go g.Run(ctx)
		type account struct{ answer, kept map[string]bool }
		model := map[string]account{}
		holding := false
		told := func(a account) map[string]bool {
			all := maps.Clone(a.answer)
			maps.Copy(all, a.kept)
			return all
		}
		for step := range 5000 {
			name := fmt.Sprint("s", random.IntN(3))
			a, known := model[name]
			switch n := random.IntN(20); {
			case n == 0:
				g.Away()
				g.Back()
				holding = true
				for name, a := range model {
					model[name] = account{map[string]bool{}, told(a)}
				}
				// Every service is answered at once, as by a full listing.
				for name, a := range model {
					g.Set(svcNamed(name), nil)
					model[name] = a
				}
			case n == 1:
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				holding = false
				for name, a := range model {
					model[name] = account{a.answer, nil}
				}
			case n == 2 && known && !holding:
				g.Remove(svcNamed(name).Key)
				delete(model, name)
			default:
				answer := map[string]bool{}
				for i := range 4 {
					if random.IntN(2) == 0 {
						answer[fmt.Sprint("i", i)] = true
					}
				}
				kept := maps.Clone(a.kept)
				maps.DeleteFunc(kept, func(id string, _ bool) bool { return answer[id] })
				model[name] = account{answer, kept}
				g.Set(svcNamed(name), ids(strings.Join(slices.Sorted(maps.Keys(answer)), " ")))
			}
			want, instances := services{}, 0
			for name, a := range model {
				want[name] = strings.Join(slices.Sorted(maps.Keys(told(a))), " ")
				instances += len(told(a))
			}
			c.WantIDs(t, fmt.Sprint("step ", step), want)
			if known, _ := g.Instances(); known != instances {
				t.Errorf("step %d: %d instances are known, want %d", step, known, instances)
			}
			if t.Failed() {
				return
			}
		}
	})
}
