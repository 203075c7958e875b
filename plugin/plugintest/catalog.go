package plugintest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Catalog is a catalog for tests of an adapter's Run: it records calls and lets
// a test wait for a condition. Create it with NewCatalog.
type Catalog struct {
	// Held is the content. Access it only within [Catalog.Await] and
	// [Catalog.Look], which hold the lock.
	Held Held

	mu      sync.Mutex    // guards Held and the fields below
	changed chan struct{} // closed and replaced at each call
}

var _ plugin.Publisher = (*Catalog)(nil)

// Held is the content of a [Catalog].
type Held struct {
	// Services are the services, and Instances their instances as reported, by
	// the string form of the key.
	Services  map[string]registry.Service
	Instances map[string][]registry.Instance
	// Least is the smallest number of instances of each service since it was
	// added or since ForgetLeast; 0 after its removal.
	Least map[string]int
	// Resources are the published resources, by "collection namespace/name".
	Resources map[string]*mcp.Resource
	// Problems are reasons by id.
	Problems map[string]string
	// LeftOut are reasons by id.
	LeftOut map[string]string
	Synced  bool
	// Degraded is the present reason, or ""; Reasons are all so far, in order,
	// with "" for each recovery.
	Degraded string
	Reasons  []string
	Detail   string
	// Sets, Removes and Heard count calls.
	Sets, Removes, Heard int
	// Calls are all calls but Heard and LeftOut, in order: "set web",
	// "remove web", "publish COLLECTION NAME", "withdraw COLLECTION NAME",
	// "synced", "degraded", "detail TEXT", "problem ID".
	Calls []string
}

// NewCatalog returns an empty catalog.
func NewCatalog() *Catalog {
	return &Catalog{changed: make(chan struct{}), Held: Held{
		Services: map[string]registry.Service{}, Instances: map[string][]registry.Instance{}, Least: map[string]int{},
		Resources: map[string]*mcp.Resource{}, Problems: map[string]string{}, LeftOut: map[string]string{},
	}}
}

func (c *Catalog) do(call string, fn func(h *Held)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if call != "" {
		c.Held.Calls = append(c.Held.Calls, call)
	}
	fn(&c.Held)
	close(c.changed)
	c.changed = make(chan struct{})
}

// Set implements [plugin.Catalog].
func (c *Catalog) Set(svc registry.Service, instances []registry.Instance) {
	svc.Ports, svc.Meta, svc.Tags = slices.Clone(svc.Ports), maps.Clone(svc.Meta), slices.Clone(svc.Tags)
	all := slices.Clone(instances)
	for i := range all {
		in := &all[i]
		in.Ports, in.Meta, in.Tags = slices.Clone(in.Ports), maps.Clone(in.Meta), slices.Clone(in.Tags)
		if in.Weight != nil {
			in.Weight = new(*in.Weight)
		}
	}
	key := svc.Key.String()
	c.do("set "+key, func(h *Held) {
		h.Sets++
		h.Services[key], h.Instances[key] = svc, all
		if least, ok := h.Least[key]; !ok || len(all) < least {
			h.Least[key] = len(all)
		}
	})
}

// Remove implements [plugin.Catalog].
func (c *Catalog) Remove(key registry.Key) {
	c.do("remove "+key.String(), func(h *Held) {
		h.Removes++
		delete(h.Services, key.String())
		delete(h.Instances, key.String())
		h.Least[key.String()] = 0
	})
}

// Publish implements [plugin.Publisher].
func (c *Catalog) Publish(res *mcp.Resource) {
	id := collection.OfBody(res.GetBody().GetTypeUrl()) + " " + res.GetMetadata().GetName()
	c.do("publish "+id, func(h *Held) { h.Resources[id] = res })
}

// Withdraw implements [plugin.Publisher].
func (c *Catalog) Withdraw(collection, name string) {
	id := collection + " " + name
	c.do("withdraw "+id, func(h *Held) { delete(h.Resources, id) })
}

// Synced implements [plugin.Catalog].
func (c *Catalog) Synced() { c.do("synced", func(h *Held) { h.Synced = true }) }

// Degraded implements [plugin.Catalog].
func (c *Catalog) Degraded(err error) {
	c.do("degraded", func(h *Held) {
		h.Degraded = ""
		if err != nil {
			h.Degraded = err.Error()
		}
		h.Reasons = append(h.Reasons, h.Degraded)
	})
}

// Detail implements [plugin.Catalog].
func (c *Catalog) Detail(text string) { c.do("detail "+text, func(h *Held) { h.Detail = text }) }

// Problem implements [plugin.Catalog].
func (c *Catalog) Problem(id, reason string) {
	c.do("problem "+id, func(h *Held) {
		if h.Problems[id] = reason; reason == "" {
			delete(h.Problems, id)
		}
	})
}

// LeftOut implements [plugin.Catalog].
func (c *Catalog) LeftOut(id, reason string) {
	c.do("", func(h *Held) {
		if h.LeftOut[id] = reason; reason == "" {
			delete(h.LeftOut, id)
		}
	})
}

// Heard implements [plugin.Catalog].
func (c *Catalog) Heard() { c.do("", func(h *Held) { h.Heard++ }) }

// Look calls see with the content, which see must not retain.
func (c *Catalog) Look(see func(h *Held)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	see(&c.Held)
}

// ForgetLeast resets Held.Least to the present numbers.
func (c *Catalog) ForgetLeast() {
	c.do("", func(h *Held) {
		clear(h.Least)
		for key, all := range h.Instances {
			h.Least[key] = len(all)
		}
	})
}

// Await waits until cond holds, evaluating it at once and after each call.
// After the timeout the test fails with what and the content of the catalog.
func (c *Catalog) Await(t testing.TB, within time.Duration, what string, cond func(h *Held) bool) {
	t.Helper()
	end := time.NewTimer(within)
	defer end.Stop()
	for {
		c.mu.Lock()
		ok, changed := cond(&c.Held), c.changed
		c.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-end.C:
			c.mu.Lock()
			defer c.mu.Unlock()
			t.Fatalf("%s: not within %v; the catalog holds %s", what, within, &c.Held)
		}
	}
}

// AwaitSynced waits for the end of the first listing.
func (c *Catalog) AwaitSynced(t testing.TB, within time.Duration) {
	t.Helper()
	c.Await(t, within, "the first listing", func(h *Held) bool { return h.Synced })
}

// AwaitIDs waits until a service has exactly these instances, as [Held.IDs]
// returns them.
func (c *Catalog) AwaitIDs(t testing.TB, within time.Duration, what, service, want string) {
	t.Helper()
	c.Await(t, within, what, func(h *Held) bool { return h.IDs(service) == want })
}

// AwaitInstance waits until a service has an instance that cond accepts.
func (c *Catalog) AwaitInstance(t testing.TB, within time.Duration, what, service, id string, cond func(registry.Instance) bool) {
	t.Helper()
	c.Await(t, within, what, func(h *Held) bool {
		for _, i := range h.Instances[service] {
			if i.ID == id {
				return cond(i)
			}
		}
		return false
	})
}

// AwaitDegraded waits until the registry is degraded with a reason that
// contains part, or with "" until it is not degraded.
func (c *Catalog) AwaitDegraded(t testing.TB, within time.Duration, what, part string) {
	t.Helper()
	c.Await(t, within, what, func(h *Held) bool {
		return (h.Degraded == "") == (part == "") && strings.Contains(h.Degraded, part)
	})
}

// WantIDs fails the test unless the catalog holds exactly the services of want:
// the IDs of the instances by key, as [Held.IDs] returns them.
func (c *Catalog) WantIDs(t testing.TB, when string, want map[string]string) {
	t.Helper()
	c.Look(func(h *Held) {
		got := make(map[string]string, len(h.Services))
		for key := range h.Services {
			got[key] = h.IDs(key)
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: the catalog holds %v, want %v", when, got, want)
		}
	})
}

// WantDegraded fails the test unless the registry is degraded with a reason
// that contains part, or with "" is not degraded.
func (c *Catalog) WantDegraded(t testing.TB, when, part string) {
	t.Helper()
	c.Look(func(h *Held) {
		if part == "" && h.Degraded != "" || !strings.Contains(h.Degraded, part) {
			t.Errorf("%s: degraded with %q, want %q", when, h.Degraded, part)
		}
	})
}

// IDs returns the IDs of a service's instances, joined by spaces, or "-" if
// there is no such service.
func (h *Held) IDs(key string) string {
	all, ok := h.Instances[key]
	if !ok {
		return "-"
	}
	ids := make([]string, 0, len(all))
	for _, i := range all {
		ids = append(ids, i.ID)
	}
	return strings.Join(ids, " ")
}

// String returns a summary of a few lines.
func (h *Held) String() string {
	const most = 20
	var b strings.Builder
	fmt.Fprintf(&b, "%d services, %d resources; synced %t, degraded %q, detail %q, problems %v", len(h.Services), len(h.Resources), h.Synced, h.Degraded, h.Detail, h.Problems)
	for i, key := range slices.Sorted(maps.Keys(h.Services)) {
		if i == most {
			fmt.Fprintf(&b, "\n...")
			break
		}
		fmt.Fprintf(&b, "\n%s: %.200s", key, h.IDs(key))
	}
	return b.String()
}

// Start runs an adapter on a new catalog until stop is called, which returns
// once Run has. Another call of stop does nothing.
func Start(t testing.TB, adapter plugin.Adapter) (_ *Catalog, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	catalog := NewCatalog()
	done := make(chan error, 1)
	// Ends with ctx; stop waits for it.
	go func() { done <- adapter.Run(ctx, catalog) }()
	return catalog, sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}
