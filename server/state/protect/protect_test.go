package protect

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

var start = time.Unix(1_000_000, 0)

func TestSuspicious(t *testing.T) {
	c := Config{MinShare: 0.5, MinServices: 10}
	for _, test := range []struct {
		left, missing, peak int
		complete            bool
		want                bool
	}{
		{5, 0, 10, false, false},
		{4, 0, 10, false, true},
		{0, 0, 9, false, false}, // too few to tell
		{1, 0, 9, true, false},
		{0, 0, 9, true, true}, // an empty listing
		{0, 0, 0, true, false},
		{20, 0, 10, false, false},
		{10, 5 * Whole, 10, false, false},
		{10, 5*Whole + 1, 10, false, true}, // all are there, with less than half of their endpoints
		{9, 9 * Whole, 9, true, false},
	} {
		if got := c.Suspicious(test.left, test.missing, test.peak, test.complete); got != test.want {
			t.Errorf("%+v: %v", test, got)
		}
	}
	if off := (Config{MinServices: 1}); off.Suspicious(0, 0, 100, true) || off.Enabled() {
		t.Error("without a share something is suspicious")
	}
	s := Service{MinShare: 0.5, MinEndpoints: 4}
	for _, test := range []struct {
		left, peak int
		want       bool
	}{{2, 4, false}, {1, 4, true}, {0, 3, false}, {0, 4, true}} {
		if got := s.Suspicious(test.left, test.peak); got != test.want {
			t.Errorf("of a service: %+v: %v", test, got)
		}
	}
	if off := (Service{}); off.Suspicious(0, 100) {
		t.Error("without a share an endpoint is suspicious")
	}
	if on := (Config{Service: s}); !on.Enabled() {
		t.Error("the protection of a service is none")
	}
}

// The peaks agree with the plain list of all values, but for a step of the
// window, and are few.
func TestPeaksModel(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 5))
		type value struct {
			count int
			until time.Time
		}
		var p Peaks
		var all []value
		count, now := 50, start
		for range 2000 {
			now = now.Add(time.Duration(r.IntN(20)) * time.Second)
			next := max(0, count+r.IntN(21)-10)
			if next < count {
				p.Note(count, now)
				all = append(all, value{count, now})
			}
			count = next
			least, most := count, count
			for _, v := range all {
				if age := now.Sub(v.until); age <= Window {
					least = max(least, v.count)
				}
				if now.Sub(v.until) <= Window+Window/steps {
					most = max(most, v.count)
				}
			}
			if got := p.Max(count, now); got < least || got > most {
				t.Fatalf("seed %d: the peak is %d, want %d to %d", seed, got, least, most)
			}
			if len(p) > 2*steps {
				t.Fatalf("seed %d: %d peaks", seed, len(p))
			}
		}
		if got := p.Max(count, now.Add(Window+time.Second)); got != count {
			t.Errorf("seed %d: the peak is %d after the window, want %d", seed, got, count)
		}
	}
}

// A second accident has the whole time; what goes singly goes with the first.
func TestClock(t *testing.T) {
	var c Clock
	first := c.From(3, 10, 0.5, 0, start)
	if single := c.From(2, 3, 0.5, 7, start.Add(time.Minute)); single != first || first != start {
		t.Errorf("a single one counts from %v, the first from %v", single, first)
	}
	if second := c.From(0, 2, 0.5, 8, start.Add(2*time.Minute)); second != start.Add(2*time.Minute) {
		t.Errorf("a second accident counts from %v", second)
	}
	if again := c.From(9, 10, 0.5, 0, start.Add(time.Hour)); again != start.Add(time.Hour) {
		t.Errorf("with nothing pending it counts from %v", again)
	}
}

func TestReason(t *testing.T) {
	for want, item := range map[string]Item{
		"removed it together with most of its services; the removal": {},
		"removed it together with most endpoints of its service":     {Service: true},
		"without it and most other services":                         {Listing: true},
		"without it and most other endpoints of its service":         {Listing: true, Service: true},
		"; an operator keeps it":                                     {Kept: true},
	} {
		if got := item.Reason(); !strings.Contains(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
