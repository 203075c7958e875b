package state

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
)

// A panic while a message is parsed, applied or written to the logs is an error
// of that plugin. What other registries have, with what is held back of it and
// merged from it, is served as before, and their changes go on.
func TestPanicIsOfOneRegistry(t *testing.T) {
	for _, where := range []string{"parse", "apply", "log"} {
		t.Run(where, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				armed := false
				meet := func(at string) {
					if armed && at == where {
						armed = false // a panic of the same place again ends the bridge
						panic("a defect")
					}
				}
				o := protected()
				o.Conflicts = []ConflictRule{{Hosts: []string{"s0*"}, Policy: Merge}}
				o.Validate = func(body proto.Message) error {
					if se, ok := body.(*networking.ServiceEntry); ok && se.GetHosts()[0] == "s77.example.org" {
						meet("parse")
					}
					return nil
				}
				o.Selector = func(name string) string {
					if name == "s77" {
						meet("apply")
					}
					return name
				}
				o.Applied = func(string, uint64) { meet("log") }
				e := newEnv(t, o, "dc1", "dc2")
				r, bad := e.Registry("dc1"), e.Registry("dc2")
				list(r, 20)
				list(r, 9) // and what is missing is held back
				bad.Begin(nil)
				if err := bad.Apply(&pluginv1.WatchResponse{Upserts: append(svc(0, 3), entry("dc2/s01", "s01.example.org"), instance("dc2/s01", "dc2/s01-9", "10.0.9.9"))}); err != nil {
					t.Fatal(err)
				}
				if err := bad.Apply(synced); err != nil {
					t.Fatal(err)
				}
				inline, byWorkload := e.served()
				counted, of2 := r.counters(), bad.counters()
				kept := slices.Collect(e.Removals("dc1"))
				var c Cursor
				e.changesOf(collection.ServiceEntry, &c)

				armed = true
				err := bad.Apply(upserts(append(svc(30, 2), svc(77, 0)...)...))
				if err == nil || !strings.Contains(err.Error(), "a defect") {
					t.Fatalf("error %v", err)
				}
				if where == "log" { // the claims are complete
					for n, u := range map[string]string{"30": "s30.example.org 10.0.30.0 10.0.30.1", "77": "s77.example.org"} {
						inline["se ns/s"+n] = u
						byWorkload["se ns/s"+n] = "s" + n + ".example.org selector"
					}
					byWorkload["we ns/s30-0"], byWorkload["we ns/s30-1"] = "10.0.30.0 s30", "10.0.30.1 s30"
				} else if d := cmp.Diff(of2, bad.counters()); d != "" {
					t.Errorf("counters of the registry (-before +after):\n%s", d)
				}
				e.want(inline, byWorkload)
				if d := cmp.Diff(counted, r.counters()); d != "" {
					t.Errorf("counters of the other registry (-before +after):\n%s", d)
				}
				if now := slices.Collect(e.Removals("dc1")); len(now) != len(kept) {
					t.Errorf("%d resources are held back, want %d", len(now), len(kept))
				}
				if where != "parse" {
					if e.changesOf(collection.ServiceEntry, &c); !c.Lost {
						t.Error("a reader goes on where it was")
					}
				}

				// Both go on.
				if err := r.Apply(upserts(instance("ns/s01", "ns/s01-0", "10.7.7.7"))); err != nil {
					t.Fatal(err)
				}
				if got, _ := e.served(); got["se ns/s01"] != "s01.example.org 10.0.1.1 10.0.9.9 10.7.7.7" {
					t.Errorf("after a change of the other registry: %s", got["se ns/s01"])
				}
				if _, err := r.Allow(); err != nil {
					t.Error(err)
				}
				if st := r.Status(); st.Kept != 0 || st.Resources[collection.ServiceEntry] != 9 {
					t.Errorf("after an accept: %+v", st)
				}
				bad.Begin(nil)
				if err := bad.Apply(&pluginv1.WatchResponse{Upserts: svc(77, 1), Synced: true}); err != nil {
					t.Fatal(err)
				}
				if got, _ := e.served(); got["se ns/s77"] != "s77.example.org 10.0.77.0" || got["se ns/s30"] != "" {
					t.Errorf("after a new listing: %v", got)
				}
			})
		})
	}
}

// A panic while what is held back is removed, as an operator accepts it or its
// time is over, ends nothing: it is held back as before, or removed if only the
// logs lacked it.
func TestPanicInDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		armed := false
		o := protected()
		o.Applied = func(string, uint64) {
			if armed {
				armed = false
				panic("a defect")
			}
		}
		e := newEnv(t, o, "dc1", "dc2")
		r := e.Registry("dc1")
		list(r, 20)
		list(r, 9)
		inline, byWorkload := e.served()
		kept := len(slices.Collect(e.Removals("dc1")))
		decide := func(f func() error) error {
			e.apply.Lock()
			defer e.apply.Unlock()
			return f()
		}
		seen := 0
		if err := decide(func() error {
			return r.removePaused(func(yield func(claimName) bool) {
				for name := range r.guard.Keys() {
					if seen++; seen == kept/2 {
						panic("a defect")
					}
					yield(name)
				}
			})
		}); err == nil || !strings.Contains(err.Error(), "a defect") {
			t.Fatalf("error %v", err)
		}
		e.want(inline, byWorkload)
		if now := len(slices.Collect(e.Removals("dc1"))); now != kept || kept == 0 {
			t.Errorf("%d resources are held back, want %d", now, kept)
		}
		armed = true
		if _, err := r.Allow(); err == nil || !strings.Contains(err.Error(), "a defect") {
			t.Fatalf("error %v", err)
		}
		if now, _ := e.served(); len(slices.Collect(e.Removals("dc1"))) != 0 || len(now) >= len(inline) {
			t.Errorf("%d of %d are served after the removal was written", len(now), len(inline))
		}
		list(r, 20)
		e.want(inline, byWorkload)
	})
}

// A panic while another configuration is applied to what the registries have
// ends nothing: it is served as that configuration has it.
func TestPanicInReload(t *testing.T) {
	for _, next := range [][]string{{"dc2", "dc1"}, {"dc2"}} {
		t.Run(strings.Join(next, " "), func(t *testing.T) {
			served := func(armed bool) map[string]string {
				o := protected()
				met := false
				o.Applied = func(string, uint64) {
					if armed && !met {
						met = true
						panic("a defect")
					}
				}
				was := armed
				armed = false
				e := newEnv(t, o, "dc1", "dc2")
				list(e.Registry("dc1"), 5)
				e.Registry("dc2").Begin(nil)
				if err := e.Registry("dc2").Apply(&pluginv1.WatchResponse{
					Upserts: append(svc(9, 1), entry("dc2/s01", "s01.example.org"), instance("dc2/s01", "dc2/s01-9", "10.0.9.9")), Synced: true,
				}); err != nil {
					t.Fatal(err)
				}
				armed = was
				e.Configure(next, nil, nil, o.Addresses)
				if met != armed {
					t.Fatal("the defect was not met")
				}
				if err := e.Registry("dc2").Apply(upserts(instance("dc2/s01", "dc2/s01-8", "10.0.9.8"))); err != nil {
					t.Fatal(err)
				}
				inline, byWorkload := e.served()
				maps.Copy(inline, byWorkload)
				return inline
			}
			if d := cmp.Diff(served(false), served(true)); d != "" {
				t.Errorf("what is served after a defect (-want +got):\n%s", d)
			}
		})
	}
}
