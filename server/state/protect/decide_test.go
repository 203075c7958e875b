package protect

import (
	"math/rand/v2"
	"testing"
	"time"
)

// A registry whose services all lose endpoints is one that loses services, and
// what is retained of one then is what goes down below the share.
func TestDecide(t *testing.T) {
	c := Config{MinShare: 0.5, MinServices: 10}
	loses := func(n, live, less, goes int) []Loss {
		out := make([]Loss, n)
		for i := range out {
			out[i] = Loss{Counted: true, Whole: goes == live, Live: live, Less: less, Goes: goes, Net: goes, Peak: live + less}
		}
		return out
	}
	for name, test := range map[string]struct {
		batch    Batch
		accident bool
		held     int
	}{
		"nothing":                 {Batch{Services: 10, Peak: 10}, false, 0},
		"half of each":            {Batch{Services: 10, Peak: 10, Losses: loses(10, 4, 0, 2)}, false, 0},
		"most of each":            {Batch{Services: 10, Peak: 10, Losses: loses(10, 4, 0, 3)}, true, 10},
		"most of each, in a run":  {Batch{Services: 10, Peak: 10, Missing: 10 * Missing(2, 2), Losses: loses(1, 2, 2, 1)}, true, 1},
		"most of each of a few":   {Batch{Services: 9, Peak: 9, Losses: loses(9, 4, 0, 3)}, false, 0},
		"all of less than half":   {Batch{Services: 10, Peak: 10, Losses: loses(5, 4, 0, 4)}, false, 0},
		"most of a large one":     {Batch{Services: 10, Peak: 10, Losses: loses(1, 1000, 0, 999)}, false, 0},
		"one, while others wait":  {Batch{Services: 10, Peak: 10, Mass: true, Pending: 1, Losses: loses(1, 4, 0, 1)}, true, 0},
		"most, while others wait": {Batch{Services: 10, Peak: 10, Mass: true, Pending: 1, Losses: loses(1, 2, 2, 1)}, true, 1},
	} {
		accident, from, verdicts := c.Decide(&test.batch, new(Clock), start)
		held := 0
		for _, v := range verdicts {
			if v.Hold {
				held++
			}
		}
		if accident != test.accident || held != test.held || accident && test.batch.Pending == 0 && !from.Equal(start) {
			t.Errorf("%s: accident %v from %v, %d held; want %v and %d", name, accident, from, held, test.accident, test.held)
		}
	}
	// With a share of more than half single endpoints come and go as they did.
	strict := Config{MinShare: 1, MinServices: 10}
	if accident, _, _ := strict.Decide(&Batch{Services: 10, Peak: 10, Losses: loses(10, 4, 0, 1)}, new(Clock), start); accident {
		t.Error("a share of 1: one endpoint of four is an accident")
	}
	if accident, _, _ := strict.Decide(&Batch{Services: 10, Peak: 10, Losses: loses(1, 1, 0, 1)}, new(Clock), start); !accident {
		t.Error("a share of 1: a service that goes is no accident")
	}
}

// A run has what a plain list of all events has: removals that no addition
// before or after them stands for.
func TestRunModel(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 30))
		type event struct {
			what int
			at   time.Time
			open bool // stands for nothing yet
			add  bool
		}
		var run Run[int]
		var all []event
		now := start
		for range 500 {
			now = now.Add(time.Duration(r.IntN(60)) * time.Second)
			e := event{what: r.IntN(10), at: now, open: true, add: r.IntN(2) == 0}
			live := func(i int) bool {
				window := Window
				if all[i].add {
					window = Overlap
				}
				return all[i].open && now.Sub(all[i].at) <= window
			}
			match := -1
			for i := range all {
				if live(i) && all[i].add != e.add && (match < 0 || e.add && all[i].what == e.what && all[match].what != e.what) {
					match = i
				}
			}
			if match >= 0 {
				all[match].open, e.open = false, false
			}
			all = append(all, e)
			if e.add {
				run.Add(func(what int) bool { return what == e.what }, now)
			} else {
				run.Remove(e.what, now)
			}
			var gone []int // newest first
			came := 0
			for i := len(all) - 1; i >= 0; i-- {
				switch {
				case !live(i):
				case all[i].add:
					came++
				default:
					gone = append(gone, all[i].what)
				}
			}
			run.Expire(now)
			more := r.IntN(4)
			if got, want := run.Len(more), len(gone)+max(0, more-came); got != want {
				t.Fatalf("seed %d: after %d more %d, want %d", seed, more, got, want)
			}
			if r.IntN(50) > 0 {
				continue
			}
			for i, got := range run.Take() {
				if got != gone[i] {
					t.Fatalf("seed %d: taken %d, want %v", seed, got, gone)
				}
			}
			all = nil
		}
	}
	if n := (*Run[int])(nil).Len(3); n != 3 {
		t.Errorf("a run that is not there has %d of 3", n)
	}
}
