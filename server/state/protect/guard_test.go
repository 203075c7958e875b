package protect

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Over random runs the counts are what a look at all services counts: of what
// is there, what is served after it was removed, and what went of late.
func TestGuardModel(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 3))
		g := &Guard{Config: Config{MinShare: 0.5, MinServices: 3, Hold: time.Hour}}
		type service struct {
			counts       Endpoints[int]
			live, paused int
			emptied      bool
		}
		services := []*service{}
		var items []*Item
		pending, mass, back := 0, 0, 0
		now := start
		for step := range 500 {
			now = now.Add(time.Duration(r.IntN(90)) * time.Second)
			if len(services) == 0 || r.IntN(10) == 0 {
				s := &service{}
				s.counts.Recount(g)
				services = append(services, s)
			}
			s := services[r.IntN(len(services))]
			n := r.IntN(5)
			switch r.IntN(8) {
			case 0, 1:
				s.counts.Add(g, 1, now)
				s.counts.Note(g, n, false, true, func(old int) bool { return old == n }, now)
				s.live, s.emptied = s.live+1, false
			case 2, 3:
				if s.live > 0 {
					s.counts.Add(g, -1, now)
					s.counts.Note(g, n, true, true, nil, now)
					s.live--
					s.emptied = s.live == 0
				}
			case 4:
				if s.live > 0 {
					s.counts.Pause(g, 1, now)
					s.live, s.paused = s.live-1, s.paused+1
					s.emptied = s.live == 0
				}
			case 5:
				if s.paused > 0 {
					s.counts.Pause(g, -1, now)
					s.live, s.paused, s.emptied = s.live+1, s.paused-1, false
				}
			case 6:
				s.counts.Entry = !s.counts.Entry
				s.counts.Recount(g)
			default:
				s.counts.Expire(g, r.IntN(2) == 0, now)
			}
			if it := (&Item{From: now, Since: now, Kept: r.IntN(3) == 0, Service: r.IntN(2) == 0, Back: r.IntN(2) == 0}); r.IntN(2) == 0 {
				items = append(items, it)
				g.Begin(it, false)
				g.Count(it, 1)
			} else if len(items) > 0 {
				g.Count(items[0], -1)
				items = items[1:]
			}
			live, lost, endpoints, missing := 0, 0, 0, 0
			for _, s := range services {
				endpoints += s.paused
				if s.counts.Entry || s.live == 0 && s.paused > 0 {
					lost++
				}
				if !s.counts.Entry && !s.emptied {
					live++
					missing += Missing(s.live, s.counts.run.Len(0))
				}
			}
			pending, mass, back = 0, 0, 0
			for _, it := range items {
				if !it.Kept {
					pending++
					if !it.Service {
						mass++
					}
				}
				if it.Back {
					back++
				}
			}
			got := fmt.Sprint(g.Live, g.Services, g.Endpoints, g.missing, g.Pending, g.Mass, g.PutBack)
			if want := fmt.Sprint(live, lost, endpoints, missing, pending, mass, back); got != want {
				t.Fatalf("seed %d step %d: counts %s, want %s", seed, step, got, want)
			}
			if p := g.Protection(); p.Pending != (pending > 0) || p.Pending && !p.Until.Equal(p.Since.Add(time.Hour)) || !p.Pending && !p.Until.IsZero() {
				t.Fatalf("seed %d step %d: %+v with %d pending", seed, step, p, pending)
			}
			first := Earliest(slices.Values(items))
			for _, it := range items {
				if due := g.Config.IsDue(it, first.Add(time.Hour)); due != (!it.Kept && it.From.Equal(first)) || g.Config.Until(it).IsZero() != it.Kept {
					t.Fatalf("seed %d step %d: due %v: %+v", seed, step, due, it)
				}
			}
		}
		for _, s := range services {
			s.counts.Leave(g)
		}
		if g.Live != 0 {
			t.Fatalf("seed %d: %d services are left of none", seed, g.Live)
		}
	}
}

// What a batch removes of a service is compared with what it brings.
func TestLoss(t *testing.T) {
	g := &Guard{Config: Config{MinShare: 0.5, MinServices: 1}}
	var e Endpoints[int]
	e.Recount(g)
	e.Add(g, 4, start)
	for name, test := range map[string]struct {
		goes, comes         int
		entry, again, swept bool
		want                Loss
	}{
		"one":                    {goes: 1, want: Loss{Goes: 1, Net: 1}},
		"all":                    {goes: 4, want: Loss{Goes: 4, Net: 4, Whole: true}},
		"all, replaced":          {goes: 4, comes: 4, want: Loss{Goes: 4, Replaced: true}},
		"with the entry":         {entry: true, want: Loss{Goes: 4, Net: 4, Whole: true}},
		"which comes again":      {entry: true, again: true, want: Loss{Goes: 4, Net: 4}},
		"half, by a listing":     {goes: 2, swept: true, want: Loss{Goes: 2, Net: 2, Replaced: true}},
		"most, by a listing":     {goes: 3, swept: true, want: Loss{Goes: 3, Net: 3}},
		"most, and as many come": {goes: 3, comes: 3, want: Loss{Goes: 3, Replaced: true}},
	} {
		test.want.Counted, test.want.Live, test.want.Peak = true, 4, 4
		if got := e.Loss(test.goes, test.comes, test.entry, test.again, test.swept, start); got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}
