package state

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// counters are what is counted of a registry, beside its problems.
func (r *Registry) counters() map[string]int {
	r.db.apply.Lock()
	defer r.db.apply.Unlock()
	g := &r.guard
	out := map[string]int{
		"resources": r.resources, "entries": r.entries, "bytes": r.bytes, "services": r.services, "instances": r.instances, "shadowed": r.shadowed,
		"disputed": r.disputed, "unaddressed": r.unaddressed, "live": g.Live, "kept": g.Len(), "kept services": g.Services,
		"kept endpoints": g.Endpoints, "kept resources": g.Resources, "pending": g.Pending, "mass": g.Mass,
	}
	for coll, n := range r.served {
		out[coll] = n
	}
	return out
}

// A message that names a resource more than once is refused as a whole, and
// says where. With any protection it takes nothing down, and no counter.
func TestMessageNamesOnce(t *testing.T) {
	service, of := dropService(1), dropInstance(1, 0)
	some := []*pluginv1.Removal{of} // enough to be looked at as an accident
	for n := range 7 {
		some = append(some, dropInstance(2+n, 0))
	}
	cut := func(u *pluginv1.Upsert) *pluginv1.Upsert { return large(u, encode.MaxSize) }
	messages := map[string]struct {
		m    *pluginv1.WatchResponse
		want string
	}{
		"an instance is removed twice": {
			&pluginv1.WatchResponse{Removals: append(some, of)},
			`removals[0] and removals[8] of one message are both networking.istio.io/WorkloadEntry "ns/s01-0"`,
		},
		"all instances are removed twice": {&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{of, dropInstance(1, 1), of, dropInstance(1, 1)}}, "removals[0] and removals[2]"},
		"a service is removed twice":      {&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{service, service}}, "removals[0] and removals[1]"},
		"a route is removed twice": {
			&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(routes, "ns/r"), gone(routes, "ns/r")}}, "removals[0] and removals[1]",
		},
		"a service is removed and set": {&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{service}, Upserts: svc(1, 2)}, "removals[0] and upserts[0]"},
		"an instance is set twice":     {upserts(append(svc(1, 2), svc(1, 1)[1])...), "upserts[1] and upserts[3]"},
		"what is refused is set twice": {upserts(cut(svc(1, 1)[1]), svc(1, 1)[1]), "upserts[0] and upserts[1]"},
		"a service is kept and set":    {&pluginv1.WatchResponse{Kept: []*pluginv1.Kept{kept(collection.ServiceEntry, "ns/s01")}, Upserts: svc(1, 1)}, "kept[0] and upserts[0]"},
		"a service is kept and relisted": {
			&pluginv1.WatchResponse{Kept: []*pluginv1.Kept{kept(collection.ServiceEntry, "ns/s01")}, Relisted: []string{"ns/s01"}}, "kept[0] and relisted[0]",
		},
	}
	for protection, o := range map[string]Options{
		"none": {}, "default": protected(),
		"of services": protected(func(p *Protect) { p.Service = ProtectService{MinShare: 0.3, MinEndpoints: 2} }),
	} {
		for name, tt := range messages {
			t.Run(protection+"/"+name, func(t *testing.T) {
				e := newEnv(t, o, "dc1")
				r := e.Registry("dc1")
				list(r, 12)
				if err := r.Apply(upserts(route("ns/r", "r"))); err != nil {
					t.Fatal(err)
				}
				counted := r.counters()
				inline, byWorkload := e.served()
				if err := r.Apply(tt.m); err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("error %v, want %s", err, tt.want)
				}
				e.want(inline, byWorkload)
				if d := cmp.Diff(counted, r.counters()); d != "" {
					t.Errorf("counters (-before +after):\n%s", d)
				}
				if n := len(r.Problems()); n != 0 {
					t.Errorf("%d problems of a message that was not applied", n)
				}
			})
		}
	}
}

// Resources whose name is not legible are several problems, and parts that have
// no effect may be repeated.
func TestMessageWithoutNames(t *testing.T) {
	e := newEnv(t, Options{}, "dc1")
	r := e.Registry("dc1")
	list(r, 1)
	if err := r.Apply(&pluginv1.WatchResponse{
		Upserts: []*pluginv1.Upsert{{}, {}, nil}, Removals: []*pluginv1.Removal{{}, {}, nil}, Kept: []*pluginv1.Kept{{}, {}, kept("", "ns/s00"), kept("", "ns/s00")},
		Relisted: []string{"ns/s00", "ns/s00"},
	}); err != nil {
		t.Error(err)
	}
	e.wantCounts(1, 2)
}
