package plugin_test

import (
	"context"
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

		set("quiet", "q")
		g.Away()
		g.Back()
		remove("web")
		set("db", "")
		time.Sleep(50 * time.Second)
		g.Away()
		time.Sleep(time.Hour)
		g.Back()
		remove("web")
		time.Sleep(9 * time.Second)
		synctest.Wait()
		c.WantIDs(t, "another outage stops the clock", services{"web": "c", "db": "x", "quiet": "q"})
		time.Sleep(2 * time.Second)
		synctest.Wait()
		c.WantIDs(t, "and does not set it back; of quiet nothing was said", services{"db": "", "quiet": "q"})
		c.WantDegraded(t, "the time is over", "")
		time.Sleep(time.Minute)
		set("quiet", "r")
		c.WantIDs(t, "long after the outage nothing is in question", services{"db": "", "quiet": "r"})
		remove("quiet")

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

// TestGraceAnswers shows which answers count: one that may be incomplete stops
// the clock, one during an outage removes nothing, and an instance that is back
// begins anew.
func TestGraceAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := plugintest.NewCatalog()
		g := plugin.NewGrace(c, time.Minute, c.Degraded)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go g.Run(ctx)
		set := func(name, instances string) { g.Set(svcNamed(name), ids(instances)) }
		pass := func(d time.Duration) {
			time.Sleep(d)
			synctest.Wait()
		}
		set("web", "a b")
		set("db", "x")
		set("idle", "")
		g.Away()
		set("web", "a b")
		set("web", "a")
		g.Remove(svcNamed("idle").Key)
		pass(time.Hour)
		c.WantIDs(t, "listed and not, while away", services{"web": "a b", "db": "x", "idle": ""})
		g.Back()
		pass(40 * time.Second)
		g.Add(svcNamed("web"), ids("a"))
		pass(time.Hour)
		c.WantIDs(t, "an answer that may be incomplete stops the clock of its service", services{"web": "a b", "db": "x"})
		set("web", "a")
		pass(19 * time.Second)
		c.WantIDs(t, "a complete one has it go on", services{"web": "a b", "db": "x"})
		g.Doubt()
		pass(time.Hour)
		c.WantIDs(t, "doubt stops the clocks", services{"web": "a b", "db": "x"})
		set("web", "a")
		pass(2 * time.Second)
		c.WantIDs(t, "a complete answer ends the doubt", services{"web": "a", "db": "x"})

		set("web", "a b")
		g.Away()
		g.Back()
		set("web", "a")
		pass(50 * time.Second)
		set("web", "a b")
		g.Away()
		g.Back()
		set("web", "a")
		pass(59 * time.Second)
		c.WantIDs(t, "what was back begins anew", services{"web": "a b", "db": "x"})
		pass(time.Second)
		c.WantIDs(t, "and ends", services{"web": "a", "db": "x"})
		c.WantDegraded(t, "nothing is retained", "")
	})
}

// TestGraceEnds shows that what left a registry that is away again and again
// goes all the same: one that fails one answer in five, and one whose watch is
// cut every 50 s. The instance c leaves in the first outage.
func TestGraceEnds(t *testing.T) {
	listing := func(left bool) plugin.Listing {
		if left {
			return all(services{"web": "a b"})
		}
		return all(services{"web": "a b c"})
	}
	for name, run := range map[string]func(context.Context, *plugintest.Catalog) error{
		"one answer in five": func(ctx context.Context, c *plugintest.Catalog) error {
			asked := 0
			p := plugin.Poll{Interval: 10 * time.Second, RemoveGrace: time.Minute, MinShare: 0.5, Fetch: func(context.Context) (plugin.Listing, error) {
				if asked++; asked%5 == 0 {
					return plugin.Listing{}, errCut
				}
				return listing(asked > 5), nil
			}}
			return p.Run(ctx, c)
		},
		"a watch of 50 s": func(ctx context.Context, c *plugintest.Catalog) error {
			sessions := 0
			w := plugin.Watch{RemoveGrace: time.Minute, MinShare: 0.5, Follow: func(ctx context.Context, take func(plugin.Listing)) error {
				sessions++
				take(listing(sessions > 1))
				plugin.Pause(ctx, 50*time.Second, nil)
				return errCut
			}}
			return w.Run(ctx, c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				c := plugintest.NewCatalog()
				done := make(chan error, 1)
				go func() { done <- run(ctx, c) }()
				time.Sleep(95 * time.Second)
				synctest.Wait()
				c.WantIDs(t, "it may still register again", services{"web": "a b c"})
				c.WantDegraded(t, "it may still register again", "remove_grace")
				time.Sleep(35 * time.Second)
				synctest.Wait()
				c.WantIDs(t, "the registry's answers have lacked it for a minute", services{"web": "a b"})
				time.Sleep(2 * time.Hour)
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
				if h := look(c); h.Least["web"] != 2 {
					t.Errorf("what lives was removed: %v", h.Least)
				}
			})
		})
	}
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

// What a report changes is compared with the one before, and not with what is
// kept besides.
func TestGraceAnswer(t *testing.T) {
	g := plugin.NewGrace(plugintest.NewCatalog(), time.Minute, nil)
	key := svcNamed("web").Key
	want := func(what string, changed, wantChanged bool, answer string) {
		t.Helper()
		if got := g.Answer(key); changed != wantChanged || !plugin.EqualInstances(got, ids(answer)) {
			t.Errorf("%s: changed %v, the answer is %v", what, changed, got)
		}
	}
	want("nothing", g.Remove(key), false, "")
	want("the first", g.Set(svcNamed("web"), ids("a b")), true, "a b")
	want("the same", g.Set(svcNamed("web"), ids("a b")), false, "a b")
	g.Away()
	g.Back()
	want("one less, which is kept", g.Set(svcNamed("web"), ids("a")), true, "a")
	want("the same", g.Set(svcNamed("web"), ids("a")), false, "a")
	want("removed, and kept", g.Remove(key), true, "")
	want("again", g.Remove(key), false, "")
}
