package sim

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

var update = flag.Bool("update", false, "write the golden files")

func TestMain(m *testing.M) {
	plugintest.Self(func() { Main("test") })
	goleak.VerifyTestMain(m)
}

// held is what a catalog knows of one service.
type held struct {
	Service   registry.Service
	Instances []registry.Instance
}

// catalog is a catalog of a registry that is always well, and has nothing to
// tell but services.
type catalog struct {
	*plugintest.Catalog
	// onSet, if not nil, runs on each Set.
	onSet func()
}

func newCatalog() *catalog { return &catalog{Catalog: plugintest.NewCatalog()} }

func (c *catalog) Set(svc registry.Service, instances []registry.Instance) {
	if c.onSet != nil {
		c.onSet()
	}
	c.Catalog.Set(svc, instances)
}

func (c *catalog) Detail(string)      { panic("the sim registry has nothing to tell") }
func (c *catalog) Degraded(err error) { panic(fmt.Sprintf("the sim registry is degraded: %v", err)) }

func (c *catalog) Problem(id, r string) {
	panic(fmt.Sprintf("the sim registry has a problem: %s: %s", id, r))
}

// changes returns how many services were set or removed since Synced, and how
// many were set before it; -1 if it was not called.
func (c *catalog) changes() (n, before int) {
	before = -1
	c.Look(func(h *plugintest.Held) {
		if i := slices.Index(h.Calls, "synced"); i >= 0 {
			n, before = len(h.Calls)-i-1, i
		}
	})
	return n, before
}

// holds returns what the catalog holds.
func (c *catalog) holds() map[registry.Key]held {
	all := map[registry.Key]held{}
	c.Look(func(h *plugintest.Held) {
		for key, svc := range h.Services {
			all[svc.Key] = held{svc, h.Instances[key]}
		}
	})
	return all
}

func clone(svc registry.Service, instances []registry.Instance) held {
	svc.Ports, svc.Meta, svc.Tags = slices.Clone(svc.Ports), maps.Clone(svc.Meta), slices.Clone(svc.Tags)
	h := held{Service: svc, Instances: slices.Clone(instances)}
	for i := range h.Instances {
		inst := &h.Instances[i]
		inst.Ports, inst.Meta, inst.Tags = slices.Clone(inst.Ports), maps.Clone(inst.Meta), slices.Clone(inst.Tags)
		if inst.Weight != nil {
			inst.Weight = new(*inst.Weight)
		}
	}
	return h
}

// snapshot returns the world as a catalog would hold it.
func snapshot(w *world) map[registry.Key]held {
	all := make(map[registry.Key]held, len(w.services))
	for _, svc := range w.services {
		all[svc.Key] = clone(svc.Service, svc.instances)
	}
	return all
}

// everyChange draws all kinds of change.
var everyChange = &Changes{
	InstanceAdded: 3, InstanceRemoved: 3, Health: 3, Weight: 1, Port: 1, Label: 1, ServiceAdded: 1, ServiceRemoved: 1,
}

func TestSameSeedSameWorldAfterEachChange(t *testing.T) {
	conf := Config{Services: 20, Instances: 5, Seed: 7, Changes: everyChange}
	a, b := newWorld(conf), newWorld(conf)
	for k := range 2000 {
		if k%100 == 0 {
			if diff := cmp.Diff(snapshot(a), snapshot(b)); diff != "" {
				t.Fatalf("after %d changes the worlds differ (-a +b):\n%s", k, diff)
			}
		}
		sa, gone := a.step()
		sb, goneB := b.step()
		if sa.Key != sb.Key || gone != goneB {
			t.Fatalf("change %d is of %v (gone: %v) in one world and of %v (gone: %v) in the other", k, sa.Key, gone, sb.Key, goneB)
		}
	}
}

func TestRateDoesNotChangeTheWorld(t *testing.T) {
	conf := Config{Services: 5, Instances: 5, Seed: 7, ChangesPerSecond: 1}
	fast := conf
	fast.ChangesPerSecond = 50_000
	a, b := newWorld(conf), newWorld(fast)
	for range 500 {
		a.step()
		b.step()
	}
	if diff := cmp.Diff(snapshot(a), snapshot(b)); diff != "" {
		t.Fatalf("the rate changed the world (-slow +fast):\n%s", diff)
	}
}

func TestOtherSeedOtherWorld(t *testing.T) {
	conf := Config{Services: 20, Instances: 5, Seed: 1}
	other := conf
	other.Seed = 2
	a, b := newWorld(conf), newWorld(other)
	if cmp.Equal(snapshot(a), snapshot(b)) {
		t.Error("seeds 1 and 2 build the same world")
	}
	same := 0
	for range 100 {
		sa, _ := a.step()
		sb, _ := b.step()
		if sa.Key == sb.Key {
			same++
		}
	}
	if same == 100 {
		t.Error("seeds 1 and 2 change the same services")
	}
}

// TestGolden pins what a seed means: a change of it is a change of every user's
// world, to be made on purpose.
func TestGolden(t *testing.T) {
	w := newWorld(Config{Services: 3, Instances: 2, Seed: 1, Changes: everyChange, Meta: map[string]string{"team": "load"}})
	var b strings.Builder
	line := func(svc *service) {
		fmt.Fprintf(&b, "%s %+v\n", svc.Key, svc.Ports)
		for _, i := range svc.instances {
			fmt.Fprintf(&b, "  %s %s %d %v %s weight=%v %v\n", i.ID, i.Address, i.Ports[0].Number, i.Meta, i.Health, *i.Weight, i.Locality)
		}
	}
	for _, svc := range w.services {
		line(svc)
	}
	for k := range 25 {
		svc, gone := w.step()
		fmt.Fprintf(&b, "-- change %d", k+1)
		if gone {
			fmt.Fprintf(&b, ": %s is gone\n", svc.Key)
			continue
		}
		b.WriteByte('\n')
		line(svc)
	}
	file := filepath.Join("testdata", "seed1.golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("the world of seed 1 (-want +got; -update writes it):\n%s", diff)
	}
}

// TestEachStepChangesOneService holds the promises of the world over a long
// random run: each step changes exactly the service that it names, addresses
// and IDs are unique, and the numbers stay within their bounds.
func TestEachStepChangesOneService(t *testing.T) {
	for _, conf := range []Config{
		{Services: 10, Instances: 5, Changes: everyChange, CIDR: "10.0.0.0/24"},
		{Services: 1, Instances: 1, Changes: everyChange},
		{Services: 3, Instances: 0, Changes: everyChange},
		{Services: 4, Instances: 3, Changes: &Changes{InstanceAdded: 1}},
		{Services: 4, Instances: 3, Changes: &Changes{InstanceRemoved: 1}},
		{Services: 4, Instances: 3, Changes: &Changes{Health: 1}},
		{Services: 4, Instances: 3, Changes: &Changes{ServiceRemoved: 1}},
		{Services: 2, Instances: 1, CIDR: "fd00::/120", ChangesPerSecond: 1},
	} {
		for seed := range uint64(3) {
			conf.Seed = seed
			if err := conf.Validate(); err != nil {
				t.Fatal(err)
			}
			w := newWorld(conf)
			prefix := netip.MustParsePrefix("10.0.0.0/8")
			if conf.CIDR != "" {
				prefix = netip.MustParsePrefix(conf.CIDR)
			}
			minI, maxI := conf.instanceBounds()
			minS, maxS := conf.serviceBounds()
			before := snapshot(w)
			for k := range 1500 {
				svc, gone := w.step()
				after := snapshot(w)
				if _, there := after[svc.Key]; there == gone {
					t.Fatalf("%+v: change %d: %s gone is %v, but it is there: %v", conf, k, svc.Key, gone, there)
				}
				if reflect.DeepEqual(before[svc.Key], after[svc.Key]) {
					t.Fatalf("%+v: change %d of %s changed nothing", conf, k, svc.Key)
				}
				addresses, failing := map[string]bool{}, map[registry.Key]int{}
				for key, h := range after {
					if key != svc.Key && !reflect.DeepEqual(before[key], h) {
						t.Fatalf("%+v: change %d of %s changed %s too", conf, k, svc.Key, key)
					}
					ids := map[string]bool{}
					for _, i := range h.Instances {
						if ids[i.ID] || addresses[i.Address] {
							t.Fatalf("%+v: change %d: id %q or address %s is there twice", conf, k, i.ID, i.Address)
						}
						ids[i.ID], addresses[i.Address] = true, true
						if !prefix.Contains(netip.MustParseAddr(i.Address)) {
							t.Fatalf("%+v: address %s is outside %s", conf, i.Address, prefix)
						}
						if i.Health != registry.HealthPassing {
							failing[key]++
						}
					}
					if n := len(h.Instances); n < minI || n > maxI {
						t.Fatalf("%+v: change %d: %s has %d instances, not %d to %d", conf, k, key, n, minI, maxI)
					}
				}
				if n := len(after); n < minS || n > maxS {
					t.Fatalf("%+v: change %d: %d services, not %d to %d", conf, k, n, minS, maxS)
				}
				for _, s := range w.services {
					if s.failing != failing[s.Key] {
						t.Fatalf("%+v: change %d: %s counts %d failing instances of %d", conf, k, s.Key, s.failing, failing[s.Key])
					}
				}
				before = after
			}
		}
	}
}

func TestEveryKindOfChangeHappens(t *testing.T) {
	w := newWorld(Config{Services: 10, Instances: 5, Changes: everyChange})
	seen := map[string]bool{}
	before := snapshot(w)
	for range 2000 {
		svc, gone := w.step()
		after := snapshot(w)
		was, existed := before[svc.Key]
		is := after[svc.Key]
		switch {
		case gone:
			seen["service removed"] = true
		case !existed:
			seen["service added"] = true
		case len(is.Instances) > len(was.Instances):
			seen["instance added"] = true
		case len(is.Instances) < len(was.Instances):
			seen["instance removed"] = true
		default:
			for i := range is.Instances {
				a, b := was.Instances[i], is.Instances[i]
				for what, differs := range map[string]bool{
					"health: " + b.Health.String(): a.Health != b.Health,
					"weight":                       *a.Weight != *b.Weight,
					"port":                         a.Ports[0] != b.Ports[0],
					"label":                        a.Meta["version"] != b.Meta["version"],
				} {
					if differs {
						seen[what] = true
					}
				}
			}
		}
		before = after
	}
	want := []string{
		"health: critical", "health: passing", "health: warning", "instance added", "instance removed", "label",
		"port", "service added", "service removed", "weight",
	}
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(seen))); diff != "" {
		t.Errorf("kinds of change seen (-want +got):\n%s", diff)
	}
}

func TestAddressesRestBeforeTheyComeBack(t *testing.T) {
	a := newAddresses(netip.MustParsePrefix("10.0.0.0/8"))
	held := map[string]bool{}
	first := a.take()
	if first != "10.0.0.1" {
		t.Errorf("first address is %s", first)
	}
	a.free(first)
	back := 0
	for back = 1; back < 10*resting; back++ {
		s := a.take()
		if s == first {
			break
		}
		if held[s] {
			t.Fatalf("%s was given out while it was held or rested", s)
		}
		held[s] = true
		a.free(s)
		if n := len(a.freed); n > 3*resting {
			t.Fatalf("%d addresses are kept for later", n)
		}
	}
	if back != resting+1 {
		t.Errorf("the address came back after %d others, not %d", back, resting+1)
	}
}

func TestAddressesOfANetwork(t *testing.T) {
	for cidr, want := range map[string][]string{
		"192.0.2.0/30":       {"192.0.2.1", "192.0.2.2"},
		"192.0.2.254/31":     {"192.0.2.254", "192.0.2.255"},
		"192.0.2.9/32":       {"192.0.2.9"},
		"2001:db8::ff00/127": {"2001:db8::ff00", "2001:db8::ff01"},
	} {
		p := netip.MustParsePrefix(cidr).Masked()
		a := newAddresses(p)
		var got []string
		for range addressCount(p) {
			got = append(got, a.take())
		}
		if diff := cmp.Diff(want, got); diff != "" || a.next != a.end {
			t.Errorf("%s (-want +got):\n%s", cidr, diff)
		}
	}
	a := newAddresses(netip.MustParsePrefix("10.0.0.0/8"))
	a.next = 256
	if got := a.take(); got != "10.0.1.0" {
		t.Errorf("address 256 is %s", got)
	}
}

func TestValidateReturnsEverythingAtOnce(t *testing.T) {
	for _, tt := range []struct {
		name string
		conf Config
		want []string
	}{
		{"zero value", Config{}, nil},
		{"defaults", Defaults, nil},
		{"large", Config{Services: 10_000, Instances: 100, ChangesPerSecond: 50_000}, nil},
		{"all", Config{
			Services: -1, Instances: 100_001, ChangesPerSecond: -0.5, Changes: &Changes{}, Protocols: &Protocols{HTTP: 1, TCP: -1},
			CIDR: "10.0.0.0", Zones: []string{"a/b", "a/b/c/d", ""},
		}, []string{
			"services: -1 is not between 0 and 1000000",
			"instances: 100001 is not between 0 and 100000",
			"changes_per_second: -0.5 is not between 0 and 1000000",
			"changes: no kind of change can be drawn; give at least one of them a finite number above 0 and none a negative one",
			"protocols: no protocol can be drawn; give at least one of them a finite number above 0 and none a negative one",
			`zones[1]: "a/b/c/d" is not region, region/zone or region/zone/subzone`,
			`zones[2]: "" is not region, region/zone or region/zone/subzone`,
			`cidr: "10.0.0.0" is not a network such as 10.0.0.0/8`,
		}},
		{"narrow network", Config{Services: 10, Instances: 25, CIDR: "10.0.0.7/24", ChangesPerSecond: 1}, []string{
			"cidr: 10.0.0.0/24 holds 254 addresses, and up to 300 are needed; take a wider network, or fewer services or instances",
		}},
		{"narrow network, no changes", Config{Services: 10, Instances: 25, CIDR: "10.0.0.0/24"}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			if _, err := New(tt.conf, plugin.Env{Log: slog.New(slog.DiscardHandler)}); err != nil {
				for line := range strings.Lines(err.Error()) {
					got = append(got, strings.TrimSuffix(line, "\n"))
				}
				if _, ok := errors.AsType[*plugin.FieldError](err); !ok {
					t.Errorf("%v is not a FieldError", err)
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("errors (-want +got):\n%s", diff)
			}
		})
	}
}

// run runs the adapter and returns what ends it.
func run(t *testing.T, conf Config, c *catalog) (stop func()) {
	t.Helper()
	a, err := New(conf, plugin.Env{Registry: "load", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, c) }() // ends with ctx
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	}
}

func TestSyncedAfterTheWholeWorld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCatalog()
		stop := run(t, Config{Services: 50, Instances: 3, Seed: 1}, c)
		defer stop()
		synctest.Wait()
		if _, before := c.changes(); before != 50 {
			t.Errorf("%d services were there at Synced (-1: it was not called)", before)
		}
		if diff := cmp.Diff(snapshot(newWorld(Config{Services: 50, Instances: 3, Seed: 1})), c.holds()); diff != "" {
			t.Errorf("the catalog differs from the world (-want +got):\n%s", diff)
		}
		time.Sleep(24 * time.Hour) // of fake time: without a rate nothing happens
		if n, _ := c.changes(); n != 0 {
			t.Errorf("%d changes at rate 0", n)
		}
		var heard int
		c.Look(func(h *plugintest.Held) { heard = h.Heard })
		if n := int(24*time.Hour/heardEvery) - heard; n < -1 || n > 1 {
			t.Errorf("heard %d times in a day", heard)
		}
	})
}

func TestRateIsHeldWithoutDrift(t *testing.T) {
	for _, tt := range []struct {
		rate float64
		wait time.Duration
		want int
	}{
		{0.001, 999 * time.Second, 0},
		{0.001, 2001 * time.Second, 2},
		{0.3, 101 * time.Second, 30},
		{5, 1900 * time.Millisecond, 9},
		{5, time.Hour + tick, 18000},
		{99.9, 100*time.Second + tick, 9990},
		{333, 100*time.Second + tick/10, 33300},
		{20_000, 10*time.Second + tick/2, 200_000},
	} {
		t.Run(fmt.Sprintf("%v for %v", tt.rate, tt.wait), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCatalog()
				stop := run(t, Config{Services: 2, Instances: 1, ChangesPerSecond: tt.rate}, c)
				defer stop()
				time.Sleep(tt.wait) // of fake time
				synctest.Wait()
				if got, _ := c.changes(); got != tt.want {
					t.Errorf("%d changes, want %d", got, tt.want)
				}
			})
		})
	}
}

// TestCatalogFollowsTheWorld shows that one Set or Remove per change is enough
// to keep a catalog equal to the world.
func TestCatalogFollowsTheWorld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conf := Config{Services: 20, Instances: 4, ChangesPerSecond: 1000, Seed: 3, Changes: everyChange}
		c := newCatalog()
		stop := run(t, conf, c)
		time.Sleep(3*time.Second + tick/2) // of fake time
		stop()
		w := newWorld(conf)
		n, _ := c.changes()
		for range n {
			w.step()
		}
		if n, _ := c.changes(); n != 3000 {
			t.Errorf("%d changes", n)
		}
		if diff := cmp.Diff(snapshot(w), c.holds()); diff != "" {
			t.Errorf("the catalog differs from the world (-want +got):\n%s", diff)
		}
	})
}

// TestStallIsNotMadeUpForWithoutBound shows that after a stall of a minute one
// second's worth of changes comes at once, and the rate holds again from then
// on.
func TestStallIsNotMadeUpForWithoutBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCatalog()
		var stall atomic.Bool
		c.onSet = func() {
			if stall.Swap(false) {
				time.Sleep(time.Minute) // of fake time
			}
		}
		stop := run(t, Config{Services: 5, Instances: 2, ChangesPerSecond: 1000}, c)
		defer stop()
		time.Sleep(time.Second + tick/2)
		synctest.Wait()
		stall.Store(true)
		time.Sleep(time.Minute + 100*time.Millisecond)
		synctest.Wait()
		// A second before the stall, a second's worth after it, and the rate
		// for what is left.
		if n, _ := c.changes(); n < 2000 || n > 2200 {
			t.Errorf("%d changes, want about 2100", n)
		}
	})
}

func TestWaitIsNeverShorterThanATick(t *testing.T) {
	p := pacer{rate: 1e6}
	if w := p.wait(time.Hour); w != tick {
		t.Errorf("waits %v", w)
	}
	p = pacer{rate: 1e-300}
	if w := p.wait(0); w != time.Hour {
		t.Errorf("waits %v for a change in ages", w)
	}
}

func BenchmarkStep(b *testing.B) {
	w := newWorld(Config{Services: 10_000, Instances: 10})
	b.ReportAllocs()
	for b.Loop() {
		w.step()
	}
}

// The services that the bridge wants change as they do for one that wants all,
// and the others are not set.
func TestWanted(t *testing.T) {
	run := func(only func(registry.Key) bool) map[string]held {
		c := newCatalog()
		synctest.Test(t, func(t *testing.T) {
			a, err := New(Config{Services: 40, ChangesPerSecond: 100, Seed: 3}, plugin.Env{Log: slog.New(slog.DiscardHandler), Only: only})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if err := a.Run(ctx, c); err != nil {
				t.Error(err)
			}
		})
		out := map[string]held{}
		c.Look(func(h *plugintest.Held) {
			for key, svc := range h.Services {
				out[key] = held{svc, h.Instances[key]}
			}
		})
		return out
	}
	wants := func(key registry.Key) bool { return len(key.Name)%2 == 0 }
	all, part := run(nil), run(wants)
	maps.DeleteFunc(all, func(_ string, h held) bool { return !wants(h.Service.Key) })
	if d := cmp.Diff(all, part); d != "" || len(part) == 0 {
		t.Errorf("%d services; -of all +wanted:\n%s", len(part), d)
	}
}
