package state

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
)

// protected are options with the defaults of the configuration.
func protected(change ...func(*Protect)) Options {
	p := Protect{MinShare: 0.5, MinServices: 10, Hold: 10 * time.Minute}
	for _, c := range change {
		c(&p)
	}
	return Options{Registries: map[string]RegistryOptions{"dc1": {Protect: p}}}
}

// service returns the n-th service with instances.
func svc(n, instances int) []*pluginv1.Upsert {
	name := fmt.Sprintf("ns/s%02d", n)
	out := []*pluginv1.Upsert{entry(name, fmt.Sprintf("s%02d.example.org", n))}
	for i := range instances {
		out = append(out, instance(name, fmt.Sprintf("%s-%d", name, i), fmt.Sprintf("10.0.%d.%d", n, i)))
	}
	return out
}

// list is a complete listing of n services with two instances each.
func list(r *Registry, n int) {
	r.Begin(nil)
	var all []*pluginv1.Upsert
	for s := range n {
		all = append(all, svc(s, 2)...)
	}
	r.Apply(upserts(all...))
	r.Apply(synced)
}

func dropService(n int) *pluginv1.Removal {
	return gone(collection.ServiceEntry, fmt.Sprintf("ns/s%02d", n))
}

func dropInstance(n, i int) *pluginv1.Removal {
	return gone(collection.WorkloadEntry, fmt.Sprintf("ns/s%02d-%d", n, i))
}

// counts returns how many ServiceEntries and endpoints are served.
func (e env) counts() (services, endpoints int) {
	for s := range e.Services() {
		services++
		endpoints += s.Endpoints
	}
	return services, endpoints
}

func (e env) wantCounts(services, endpoints int) {
	e.t.Helper()
	if s, i := e.counts(); s != services || i != endpoints {
		e.t.Errorf("%d services with %d endpoints are served, want %d with %d", s, i, services, endpoints)
	}
}

func wantProtection(t *testing.T, r *Registry, want string) {
	t.Helper()
	p, ok := r.Protection()
	got := "none"
	if ok {
		got = p.String()
		if !p.Pending {
			got = "refused: " + got
		}
	}
	if got != want {
		t.Errorf("protection is %q, want %q", got, want)
	}
}

// A sweep that would leave less than half of the services is held back; what
// comes back is no longer held, and when all is back, nothing is.
func TestSweepIsHeldBack(t *testing.T) {
	e := newEnv(t, protected(), "dc1")
	r := e.Registry("dc1")
	list(r, 20)
	r.Down(errors.New("killed"))
	list(r, 9)
	e.wantCounts(20, 40)
	wantProtection(t, r, "would remove 11 of 20 services, 22 endpoints")
	if kept := slices.Collect(e.Removals("")); len(kept) != 33 {
		t.Errorf("%d resources are listed as kept, want 11 services and 22 endpoints", len(kept))
	}
	// Additions and updates go on, and one service is back with one endpoint.
	r.Apply(upserts(append(svc(30, 1), svc(19, 1)...)...))
	r.Apply(upserts(instance("ns/s00", "ns/s00-0", "10.9.9.9")))
	e.wantCounts(21, 41)
	wantProtection(t, r, "would remove 10 of 20 services, 21 endpoints")
	var back []*pluginv1.Upsert
	for s := range 20 {
		back = append(back, svc(s, 2)...)
	}
	r.Apply(upserts(back...))
	wantProtection(t, r, "none")
	e.wantCounts(21, 41)
	if _, err := r.Allow(); !errors.Is(err, protect.ErrNothingPaused) {
		t.Errorf("Accept = %v, want that there is nothing to accept", err)
	}
}

// Half of the services may go at once, and as many as come under other names.
func TestSweepThatIsNoAccident(t *testing.T) {
	for name, tt := range map[string]struct {
		before, after, more int
	}{
		"half stays": {20, 10, 0}, "other names": {20, 0, 20}, "few services": {9, 1, 0}, "none before": {0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, protected(), "dc1")
			r := e.Registry("dc1")
			list(r, tt.before)
			r.Begin(nil)
			var all []*pluginv1.Upsert
			for s := range tt.after {
				all = append(all, svc(s, 2)...)
			}
			for s := range tt.more {
				all = append(all, svc(50+s, 2)...)
			}
			r.Apply(upserts(all...))
			r.Apply(synced)
			wantProtection(t, r, "none")
			e.wantCounts(tt.after+tt.more, 2*(tt.after+tt.more))
		})
	}
}

// A complete listing of no removal is paused in a small registry too. Said in a
// running stream it is believed.
func TestEmptyListingOfSmallRegistry(t *testing.T) {
	e := newEnv(t, protected(), "dc1")
	r := e.Registry("dc1")
	list(r, 2)
	list(r, 0)
	wantProtection(t, r, "would remove 2 of 2 services, 4 endpoints")
	list(r, 2)
	wantProtection(t, r, "none")
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropService(0), dropService(1)}})
	wantProtection(t, r, "none")
	e.wantCounts(0, 0)
}

// Services that keep their name and lose every endpoint count as lost.
func TestListingWithoutEndpoints(t *testing.T) {
	e := newEnv(t, protected(), "dc1")
	r := e.Registry("dc1")
	list(r, 12)
	r.Begin(nil)
	for s := range 12 {
		r.Apply(upserts(svc(s, 0)...))
	}
	r.Apply(synced)
	e.wantCounts(12, 24)
	wantProtection(t, r, "would remove 12 of 12 services, 24 endpoints")
	if _, err := r.Allow(); err != nil {
		t.Fatal(err)
	}
	e.wantCounts(12, 0)
	wantProtection(t, r, "none")
}

// A registry that is emptied instance by instance is one that loses its
// services: what is held back of a service is all that it had, and what was
// gone before that was seen is served again.
func TestEmptiedInstanceByInstance(t *testing.T) {
	for name, after := range map[string]func(*testing.T, env, *Registry){
		"held": func(*testing.T, env, *Registry) {},
		"accepted": func(t *testing.T, e env, r *Registry) {
			if _, err := r.Allow(); err != nil {
				t.Fatal(err)
			}
			e.wantCounts(38, 15)
		},
		"back": func(t *testing.T, e env, r *Registry) {
			list(r, 0)
			for s := range 38 {
				r.Apply(upserts(svc(s, 3)...))
			}
			wantProtection(t, r, "none")
			e.wantCounts(38, 114)
		},
		"kept": func(t *testing.T, e env, r *Registry) {
			if _, err := r.Keep(); err != nil {
				t.Fatal(err)
			}
			before, _ := r.Protection()
			time.Sleep(time.Hour)
			if after, _ := r.Protection(); after != before {
				t.Errorf("after an hour %+v, was %+v", after, before)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, entries := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					e := newEnv(t, protected(), "dc1")
					go func() { _ = e.Run(t.Context()) }()
					r := e.Registry("dc1")
					r.Begin(nil)
					for s := range 38 {
						r.Apply(upserts(svc(s, 3)...))
					}
					r.Apply(synced)
					has := map[string]int{}
					var gone []int
					for n := range 114 {
						gone = append(gone, n)
						has[fmt.Sprintf("ns/s%02d", n/3)]++
					}
					rand.New(rand.NewPCG(30, 3)).Shuffle(len(gone), func(i, j int) { gone[i], gone[j] = gone[j], gone[i] })
					for _, n := range gone[:99] {
						time.Sleep(20 * time.Millisecond)
						m := &pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropInstance(n/3, n%3)}}
						s := fmt.Sprintf("ns/s%02d", n/3)
						if has[s]--; has[s] == 0 && entries {
							m.Removals = append(m.Removals, dropService(n/3))
						}
						r.Apply(m)
					}
					services := 0
					for s := range e.Services() {
						services++
						if s.Endpoints != 3 && (s.Endpoints != has[s.Name] || s.Endpoints < 2) {
							t.Errorf("%s is served with %d endpoints of 3, and its registry has %d", s.Name, s.Endpoints, has[s.Name])
						}
					}
					p, ok := r.Protection()
					back := 0
					for s := range 38 {
						for _, c := range e.Explain(fmt.Sprintf("s%02d.example.org", s)) {
							for _, k := range c.Kept {
								if strings.Contains(k.Reason, "was put back") {
									back++
								}
							}
						}
					}
					if services != 38 || !ok || p.PutBack == 0 || p.PutBack != back {
						t.Errorf("%d of 38 services, %d explained as put back, protection %+v", services, back, p)
					}
					if !entries {
						after(t, e, r)
					}
				})
			}
		})
	}
}

// A rolling restart of everything is no accident, whichever comes first, the
// new instance or the end of the old one; nor is what it replaced put back by
// an accident after it.
func TestRollingRestart(t *testing.T) {
	for _, surge := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t, protected(), "dc1")
			r := e.Registry("dc1")
			list(r, 20)
			for n := range 40 {
				s, i := n/2, n%2
				time.Sleep(time.Second)
				name := fmt.Sprintf("ns/s%02d", s)
				come := upserts(instance(name, fmt.Sprintf("%s-new%d", name, i), "10.9.0.1"))
				leave := &pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropInstance(s, i)}}
				if surge {
					come, leave = leave, come
				}
				r.Apply(leave)
				r.Apply(come)
			}
			wantProtection(t, r, "none")
			e.wantCounts(20, 40)
			list(r, 0)
			wantProtection(t, r, "would remove 20 of 20 services, 40 endpoints")
			for k := range e.Removals("") {
				if k.Collection == collection.WorkloadEntry && !strings.Contains(k.Name, "new") {
					t.Errorf("%s is put back, which was replaced", k.Name)
				}
			}
		})
	}
}

// Removals one by one are seen as what they are together, by entry or by
// endpoint, if they come within the window.
func TestRunOfRemovals(t *testing.T) {
	for name, drop := range map[string]func(n int) []*pluginv1.Removal{
		"entries":   func(n int) []*pluginv1.Removal { return []*pluginv1.Removal{dropService(n)} },
		"endpoints": func(n int) []*pluginv1.Removal { return []*pluginv1.Removal{dropInstance(n, 0), dropInstance(n, 1)} },
		"entries, endpoints": func(n int) []*pluginv1.Removal {
			return []*pluginv1.Removal{dropService(n), dropInstance(n, 0), dropInstance(n, 1)}
		},
	} {
		for _, pause := range []time.Duration{time.Second, 29 * time.Second, time.Minute} {
			t.Run(fmt.Sprint(name, pause), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					e := newEnv(t, protected(), "dc1")
					r := e.Registry("dc1")
					list(r, 20)
					for n := range 20 {
						time.Sleep(pause)
						r.Apply(&pluginv1.WatchResponse{Removals: drop(n)})
					}
					services := 0
					for s := range e.Services() {
						if s.Endpoints > 0 {
							services++
						}
					}
					// All of ten minutes is put back; with a pause of a minute
					// the window moves on, and it is half of fewer.
					if _, ok := r.Protection(); !ok || services < 10 || pause < 30*time.Second && services != 20 {
						t.Errorf("%d services are left with a pause of %s", services, pause)
					}
				})
			})
		}
	}
	t.Run("slowly", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t, protected(), "dc1")
			r := e.Registry("dc1")
			list(r, 20)
			for n := range 20 {
				time.Sleep(6 * time.Minute)
				r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropService(n)}})
			}
			wantProtection(t, r, "none")
			e.wantCounts(0, 0)
		})
	})
}

// While a removal is held back, an endpoint that goes from a service with
// others goes, and a replacement is one.
func TestChurnWhileProtected(t *testing.T) {
	e := newEnv(t, protected(), "dc1")
	r := e.Registry("dc1")
	list(r, 20)
	list(r, 5)
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropInstance(0, 0)}})
	e.wantCounts(20, 39)
	r.Apply(&pluginv1.WatchResponse{
		Removals: []*pluginv1.Removal{dropInstance(0, 1)}, Upserts: []*pluginv1.Upsert{instance("ns/s00", "ns/s00-new", "10.0.0.99")},
	})
	e.wantCounts(20, 39)
	wantProtection(t, r, "would remove 15 of 20 services, 30 endpoints")
	// The last endpoint of a service is another matter: it has all again.
	r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.WorkloadEntry, "ns/s00-new")}})
	e.wantCounts(20, 40)
	wantProtection(t, r, "would remove 16 of 20 services, 32 endpoints; 1 resources of these had gone and are put back")
}

// What nobody decides on goes after the time that is configured, and the log
// says all of it.
func TestHoldEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log text
		d := New([]string{"dc1"}, protected(), slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
		e := env{t, d}
		go func() { _ = e.Run(t.Context()) }()
		r := e.Registry("dc1")
		list(r, 20)
		list(r, 0)
		p, _ := r.Protection()
		if want := time.Now().Add(10 * time.Minute); !p.Until.Equal(want) || !p.Pending {
			t.Errorf("until %s, want %s", p.Until, want)
		}
		time.Sleep(10*time.Minute - time.Second)
		e.wantCounts(20, 40)
		time.Sleep(time.Second + tickEvery)
		e.wantCounts(0, 0)
		wantProtection(t, r, "none")
		for _, want := range []string{
			`level=WARN msg="a removal looks like an accident and is paused" registry=dc1 services=20 of=20 endpoints=40`,
			`level=WARN msg="nobody decided on the paused removal; it is carried out" registry=dc1 services=20 endpoints=40`,
		} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("the log lacks %s:\n%s", want, &log)
			}
		}
	})
}

// A second accident is held back for the whole time, not for what is left of
// the first one's. A single service that goes in between goes with the first.
func TestSecondAccident(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log text
		d := New([]string{"dc1"}, protected(), slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
		e := env{t, d}
		go func() { _ = e.Run(t.Context()) }()
		r := e.Registry("dc1")
		list(r, 20)
		list(r, 9)
		time.Sleep(3 * time.Minute)
		r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropService(8)}})
		time.Sleep(3 * time.Minute)
		list(r, 1)
		wantProtection(t, r, "would remove 19 of 20 services, 38 endpoints")
		e.wantCounts(20, 40)
		time.Sleep(4*time.Minute + tickEvery)
		e.wantCounts(8, 16)
		wantProtection(t, r, "would remove 7 of 20 services, 14 endpoints")
		if want := `it is carried out" registry=dc1 services=12 endpoints=24`; !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, &log)
		}
		for k := range e.Removals("") {
			if left := time.Until(k.Until); left < 5*time.Minute {
				t.Errorf("%s is kept for %v more", k.Name, left)
			}
		}
		// What is there again no longer decides when the rest goes.
		r.Apply(upserts(svc(7, 2)...))
		time.Sleep(6 * time.Minute)
		e.wantCounts(2, 4)
		wantProtection(t, r, "none")
	})
}

// What was refused stays for as long as its registry does not have it, and what
// remains is what later removals are compared with.
func TestRefuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, protected(), "dc1")
		go func() { _ = e.Run(t.Context()) }()
		r := e.Registry("dc1")
		list(r, 40)
		list(r, 15)
		if _, err := r.Keep(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Keep(); !errors.Is(err, protect.ErrAlreadyKept) {
			t.Errorf("a second Refuse = %v", err)
		}
		wantProtection(t, r, "refused: would remove 25 of 40 services, 50 endpoints")
		for k := range e.Removals("dc1") {
			if !strings.Contains(k.Reason, "an operator keeps it") || !k.Until.IsZero() {
				t.Fatalf("kept %+v, want that it was refused", k)
			}
		}
		time.Sleep(time.Hour)
		e.wantCounts(40, 80)
		// Another listing, and removals that are no accident.
		list(r, 15)
		r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropService(0), dropService(1)}})
		e.wantCounts(38, 76)
		wantProtection(t, r, "refused: would remove 25 of 40 services, 50 endpoints")
		// Another accident is a decision of its own, with what went before it.
		list(r, 1)
		wantProtection(t, r, "would remove 39 of 40 services, 78 endpoints; 3 resources of these had gone and are put back")
		r.Apply(upserts(svc(39, 2)...))
		wantProtection(t, r, "would remove 38 of 40 services, 76 endpoints; 3 resources of these had gone and are put back")
		time.Sleep(10*time.Minute + tickEvery)
		wantProtection(t, r, "refused: would remove 24 of 40 services, 48 endpoints")
		if _, err := r.Allow(); err != nil {
			t.Fatal(err)
		}
		e.wantCounts(2, 4)
		wantProtection(t, r, "none")
	})
}

// What was restored is protected from the first listing.
func TestFirstListingAfterRestore(t *testing.T) {
	before := newEnv(t, protected(), "dc1")
	list(before.Registry("dc1"), 20)
	before.Registry("dc1").Apply(upserts(external("ns/ext", "ext.example.org")))
	e := newEnv(t, protected(), "dc1")
	disk := &savedClaims{}
	disk.follow(before.DB)
	disk.restore(e)
	r := e.Registry("dc1")
	list(r, 4)
	wantProtection(t, r, "would remove 17 of 21 services, 32 endpoints")
	e.wantCounts(20, 40)
	list(r, 20)
	wantProtection(t, r, "would remove 1 of 21 services, 0 endpoints")
	r.Apply(upserts(external("ns/ext", "ext.example.org")))
	wantProtection(t, r, "none")
	if r.guard.Live != 21 {
		t.Errorf("%d services are counted, want 21", r.guard.Live)
	}
}

// Off means off.
func TestProtectionOff(t *testing.T) {
	e := newEnv(t, protected(func(p *Protect) { p.MinShare = 0 }), "dc1")
	r := e.Registry("dc1")
	list(r, 100)
	list(r, 0)
	e.wantCounts(0, 0)
	wantProtection(t, r, "none")
}

// The emptying of one service is believed unless it is configured otherwise;
// with the rule it is held back however it comes.
func TestEmptyingOfOneService(t *testing.T) {
	on := func(p *Protect) { p.Service = ProtectService{MinShare: 0.5, MinEndpoints: 4} }
	all := func(from, to int) (out []*pluginv1.Removal) {
		for i := from; i < to; i++ {
			out = append(out, dropInstance(0, i))
		}
		return out
	}
	for name, tt := range map[string]struct {
		options  Options
		messages [][]*pluginv1.Removal
		want     int // endpoints that are left
		kept     string
	}{
		"off":       {protected(), [][]*pluginv1.Removal{all(0, 8)}, 0, "none"},
		"at once":   {protected(on), [][]*pluginv1.Removal{all(0, 8)}, 8, "would remove 1 of 20 services, 8 endpoints"},
		"half":      {protected(on), [][]*pluginv1.Removal{all(0, 4)}, 4, "none"},
		"in a run":  {protected(on), [][]*pluginv1.Removal{all(0, 3), all(3, 5), all(5, 6), all(6, 8)}, 5, "would remove 1 of 20 services, 5 endpoints"},
		"the entry": {protected(on), [][]*pluginv1.Removal{{dropService(0)}}, 8, "would remove 1 of 20 services, 8 endpoints"},
		"the registry's own rule is off": {
			protected(on, func(p *Protect) { p.MinShare = 0 }), [][]*pluginv1.Removal{all(0, 8)}, 8, "would remove 1 of 20 services, 8 endpoints",
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, tt.options, "dc1")
			r := e.Registry("dc1")
			list(r, 20)
			r.Apply(upserts(svc(0, 8)...))
			for _, m := range tt.messages {
				r.Apply(&pluginv1.WatchResponse{Removals: m})
			}
			got := 0
			for s := range e.Services() {
				if s.Name == "ns/s00" {
					got = s.Endpoints
				}
			}
			if got != tt.want {
				t.Errorf("%d endpoints are left, want %d", got, tt.want)
			}
			wantProtection(t, r, tt.kept)
			// Another service may go meanwhile.
			r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropService(5)}})
			e.wantCounts(19, tt.want+2*18)
		})
	}
}

// After a decision, what is left is what a service is compared with.
func TestDecisionOnOneService(t *testing.T) {
	for name, decide := range map[string]func(*Registry) (Protection, error){"accept": (*Registry).Allow, "refuse": (*Registry).Keep} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, protected(func(p *Protect) { p.Service = ProtectService{MinShare: 0.5, MinEndpoints: 4} }), "dc1")
			r := e.Registry("dc1")
			list(r, 20)
			r.Apply(upserts(svc(0, 40)...))
			var m pluginv1.WatchResponse
			for i := 10; i < 40; i++ {
				m.Removals = append(m.Removals, dropInstance(0, i))
			}
			r.Apply(&m)
			wantProtection(t, r, "would remove 0 of 20 services, 30 endpoints")
			if _, err := decide(r); err != nil {
				t.Fatal(err)
			}
			before, _ := r.Protection()
			r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropInstance(0, 0), dropInstance(0, 1)}})
			if after, _ := r.Protection(); after != before {
				t.Errorf("two of ten endpoints more, and protection is %+v, was %+v", after, before)
			}
		})
	}
}

// The time does not run out on a registry that cannot be followed, nor in the
// middle of a listing.
func TestHoldWaitsForTheRegistry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEnv(t, protected(), "dc1")
		go func() { _ = e.Run(t.Context()) }()
		r := e.Registry("dc1")
		list(r, 20)
		list(r, 2)
		r.Down(errors.New("killed"))
		time.Sleep(time.Hour)
		e.wantCounts(20, 40)
		r.Begin(nil)
		r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: "connection refused"}})
		time.Sleep(time.Hour)
		r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{}})
		for s := range 15 {
			r.Apply(upserts(svc(s, 2)...))
		}
		time.Sleep(time.Minute)
		e.wantCounts(20, 40)
		wantProtection(t, r, "would remove 5 of 20 services, 10 endpoints")
		r.Apply(synced)
		time.Sleep(2 * tickEvery)
		e.wantCounts(15, 30)
		wantProtection(t, r, "none")
	})
}

// Every endpoint replaced by another, in a message or in a listing, is no
// accident.
func TestReplacedEndpoints(t *testing.T) {
	e := newEnv(t, protected(func(p *Protect) { p.Service = ProtectService{MinShare: 0.5, MinEndpoints: 2} }), "dc1")
	r := e.Registry("dc1")
	list(r, 20)
	var m pluginv1.WatchResponse
	for s := range 20 {
		m.Removals = append(m.Removals, dropInstance(s, 0), dropInstance(s, 1))
		for i := range 2 {
			m.Upserts = append(m.Upserts, instance(fmt.Sprintf("ns/s%02d", s), fmt.Sprintf("ns/s%02d-new%d", s, i), "10.8.0.1"))
		}
	}
	r.Apply(&m)
	wantProtection(t, r, "none")
	e.wantCounts(20, 40)
	list(r, 20)
	wantProtection(t, r, "none")
	e.wantCounts(20, 40)
}

// Resources that are of no service go and stay with the services.
func TestSweepOfOtherResources(t *testing.T) {
	e := newEnv(t, protected(), "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	for n := range 10 {
		r.Apply(upserts(external(fmt.Sprintf("ns/e%d", n), fmt.Sprintf("e%d.example.org", n)), route(fmt.Sprintf("ns/r%d", n), "x")))
	}
	r.Apply(synced)
	list(r, 0)
	wantProtection(t, r, "would remove 10 of 10 services, 0 endpoints, 10 other resources")
	if _, err := r.Allow(); err != nil {
		t.Fatal(err)
	}
	e.want(map[string]string{}, map[string]string{})
}

// What the registry has and its plugin cannot send is not gone.
func TestKeptByThePluginIsNotHeld(t *testing.T) {
	e := newEnv(t, protected(), "dc1")
	r := e.Registry("dc1")
	list(r, 20)
	list(r, 0)
	wantProtection(t, r, "would remove 20 of 20 services, 40 endpoints")
	r.Begin(nil)
	var m pluginv1.WatchResponse
	for s := range 20 {
		m.Kept = append(m.Kept, kept(collection.ServiceEntry, fmt.Sprintf("ns/s%02d", s)))
	}
	m.Synced = true
	r.Apply(&m)
	wantProtection(t, r, "none")
	e.wantCounts(20, 40)
}

// Whatever a plugin says, in whatever order it is decided on: what it has is
// served, what is served beyond that is listed as kept, and no batch removes
// more than the rule allows.
func TestProtectionModel(t *testing.T) {
	const share, least = 0.5, 6
	for seed := range uint64(40) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rnd := rand.New(rand.NewPCG(seed, 5))
				o := protected(func(p *Protect) { p.MinShare, p.MinServices = share, least })
				e := newEnv(t, o, "dc1")
				r := e.Registry("dc1")
				go func() { _ = e.Run(t.Context()) }()
				truth := map[string]map[string]bool{} // instances by service
				emptied := map[string]bool{}
				type sample struct {
					at    time.Time
					count int
				}
				var samples []sample // of what the registry had, since the last decision
				live := func() (n int) {
					for name := range truth {
						if !emptied[name] {
							n++
						}
					}
					return n
				}
				add := func(m *pluginv1.WatchResponse, name string, instances int) {
					m.Upserts = append(m.Upserts, entry(name, name[3:]+".example.org"))
					if truth[name] == nil {
						truth[name] = map[string]bool{}
					}
					for i := range instances {
						id := fmt.Sprintf("%s-%d", name, i)
						truth[name][id] = true
						m.Upserts = append(m.Upserts, instance(name, id, "10.0.0.1"))
						delete(emptied, name)
					}
				}
				listing := func(m *pluginv1.WatchResponse) {
					r.Begin(nil)
					emptied = map[string]bool{}
					for name, instances := range truth {
						m.Upserts = append(m.Upserts, entry(name, name[3:]+".example.org"))
						for id := range instances {
							m.Upserts = append(m.Upserts, instance(name, id, "10.0.0.1"))
						}
					}
					m.Synced = true
				}
				// had is what is served, by service.
				served := func() map[string]int {
					out := map[string]int{}
					for s := range e.Services() {
						out[s.Name] = s.Endpoints
					}
					return out
				}
				var first pluginv1.WatchResponse
				for n := range 20 {
					add(&first, fmt.Sprintf("ns/s%02d", n), 1+rnd.IntN(3))
				}
				r.Begin(nil)
				first.Synced = true
				r.Apply(&first)
				held := 0
				var shrunk time.Time // a service that stays lost endpoints
				for range 200 {
					had := map[string]int{}
					for name, instances := range truth {
						had[name] = len(instances)
					}
					samples = append(samples, sample{time.Now(), live()})
					time.Sleep([]time.Duration{0, time.Second, 20 * time.Second, 4 * time.Minute, 20 * time.Minute}[rnd.IntN(5)])
					synctest.Wait()
					if p, _ := r.Protection(); held > 0 && !p.Pending { // the time ran out
						samples = []sample{{time.Now(), live()}}
					}
					m := new(pluginv1.WatchResponse)
					before := served()
					beforeEmptied := maps.Clone(emptied)
					name := fmt.Sprintf("ns/s%02d", rnd.IntN(20))
					swept := false
					switch rnd.IntN(9) {
					case 0: // an accident, or none, while nobody followed
						swept = true
						odds := rnd.IntN(4)
						maps.DeleteFunc(truth, func(string, map[string]bool) bool { return rnd.IntN(4) < odds })
						for name := range truth {
							if rnd.IntN(6) == 0 {
								clear(truth[name])
							}
						}
						listing(m)
					case 1: // a run of removals
						for name := range truth {
							if rnd.IntN(3) == 0 {
								delete(truth, name)
								delete(emptied, name)
								m.Removals = append(m.Removals, gone(collection.ServiceEntry, name))
							}
						}
					case 2:
						for id := range truth[name] {
							if rnd.IntN(3) > 0 {
								delete(truth[name], id)
								m.Removals = append(m.Removals, gone(collection.WorkloadEntry, id))
							}
						}
						if len(m.Removals) > 0 && len(truth[name]) == 0 {
							emptied[name] = true
						}
					case 3:
						if truth[name] != nil {
							delete(truth, name)
							delete(emptied, name)
							m.Removals = append(m.Removals, gone(collection.ServiceEntry, name))
						}
					case 4:
						if _, err := r.Allow(); err == nil {
							samples = []sample{{time.Now(), live()}}
							for _, k := range slices.Collect(e.Removals("")) {
								t.Errorf("kept after Accept: %+v", k)
							}
							before, held = served(), 0
						}
					case 5:
						if _, err := r.Keep(); err == nil {
							samples = []sample{{time.Now(), live()}}
							if diff := cmp.Diff(before, served()); diff != "" {
								t.Errorf("Refuse changed what is served (-before +after):\n%s", diff)
							}
						}
					default:
						for n := range 20 {
							if rnd.IntN(3) == 0 {
								add(m, fmt.Sprintf("ns/s%02d", n), 1+rnd.IntN(3))
							}
						}
					}
					if swept {
						// A service that is listed without the instances that
						// it had is emptied.
						for name, instances := range truth {
							if len(instances) == 0 && (before[name] > 0 || beforeEmptied[name]) {
								emptied[name] = true
							}
						}
					}
					for name, instances := range truth {
						if len(instances) < had[name] {
							shrunk = time.Now()
						}
					}
					r.Apply(m)

					// What is served is what the registry has and what is kept.
					want, kept := map[string]int{}, map[string]int{}
					for name, instances := range truth {
						want[name] += len(instances)
					}
					counted := Protection{}
					lost := map[string]bool{}
					for k := range e.Removals("") {
						switch {
						case k.Service != "":
							counted.Endpoints++
							kept[k.Service]++
							want[k.Service]++
							if truth[k.Service][k.Name] {
								t.Errorf("the registry has %s, which is listed as kept", k.Name)
							}
							lost[k.Service] = lost[k.Service] || len(truth[k.Service]) == 0
						default:
							want[k.Name] += 0
							lost[k.Name] = true
							if truth[k.Name] != nil {
								t.Errorf("the registry has %s, which is listed as kept", k.Name)
							}
						}
					}
					for _, l := range lost {
						if l {
							counted.Services++
						}
					}
					after := served()
					if diff := cmp.Diff(want, after); diff != "" {
						t.Errorf("served (-want +got):\n%s", diff)
					}
					p, _ := r.Protection()
					if p.Services != counted.Services || p.Endpoints != counted.Endpoints {
						t.Errorf("protection %s, the list has %d services and %d endpoints", p, counted.Services, counted.Endpoints)
					}
					e.apply.Lock()
					known := r.guard.Live
					e.apply.Unlock()
					if known != live() {
						t.Errorf("%d services are counted, the registry has %d", known, live())
					}
					// The rule.
					high, most := 0, 0
					for i, s := range samples {
						most = max(most, s.count)
						until := time.Now()
						if i+1 < len(samples) {
							until = samples[i+1].at
						}
						if time.Since(until) <= ProtectWindow {
							high = max(high, s.count)
						}
					}
					if left := live(); high >= least && float64(left) < share*float64(high) {
						for name, endpoints := range before {
							if n, there := after[name]; !there || endpoints > 0 && n == 0 {
								t.Errorf("%s was removed or emptied, although %d of %d services are left", name, left, high)
							}
						}
					} else if float64(left) >= share*float64(most) && held == 0 && p.Pending && left > 0 && time.Since(shrunk) > ProtectWindow {
						t.Errorf("%s, although %d of %d are left", p, left, most)
					}
					if held = 0; p.Pending {
						held = p.Services + p.Endpoints
					}
					if t.Failed() {
						t.Fatalf("after %v", m)
					}
				}
				if _, err := r.Allow(); err == nil || errors.Is(err, protect.ErrNothingPaused) {
					want := map[string]int{}
					for name, instances := range truth {
						want[name] = len(instances)
					}
					if diff := cmp.Diff(want, served()); diff != "" {
						t.Errorf("after the last Accept (-want +got):\n%s", diff)
					}
				}
			})
		})
	}
}

// BenchmarkOneRemoval is an instance of 100,000 that goes, and one that comes.
func BenchmarkOneRemoval(b *testing.B) {
	for name, o := range map[string]Options{
		"off": {}, "registry": protected(), "service": protected(func(p *Protect) { p.Service = ProtectService{MinShare: 0.5, MinEndpoints: 4} }),
	} {
		b.Run("protect="+name, func(b *testing.B) {
			e := newEnv(b, o, "dc1")
			r := e.Registry("dc1")
			r.Begin(nil)
			for s := range 10_000 {
				r.Apply(upserts(svc(s, 10)...))
			}
			r.Apply(synced)
			drop := &pluginv1.WatchResponse{Removals: []*pluginv1.Removal{dropInstance(7, 3)}}
			add := upserts(svc(7, 4)[4])
			b.ReportAllocs()
			for b.Loop() {
				r.Apply(drop)
				r.Apply(add)
			}
			if _, ok := r.Protection(); ok {
				b.Error("it is held back")
			}
		})
	}
}
