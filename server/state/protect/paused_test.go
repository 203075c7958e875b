package protect

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"
)

// What is paused is due when its time is over, unless somebody keeps it or it
// gets another time.
func TestPaused(t *testing.T) {
	p := &Paused[string]{Guard: Guard{Config: Config{MinShare: 0.5, Hold: time.Hour}}}
	if err := p.Keep(); !errors.Is(err, ErrNothingPaused) {
		t.Errorf("nothing is kept: %v", err)
	}
	pause := func(key string, at time.Time) {
		it := &Item{Since: at, From: at}
		p.Begin(it, false)
		p.Set(key, it)
	}
	due := func(now time.Time) (keys []string) {
		if all, ok := p.Due(now); ok {
			keys = slices.Sorted(all)
		}
		return keys
	}
	pause("a", start)
	pause("b", start.Add(time.Minute))
	pause("c", start.Add(30*time.Minute))
	for after, want := range map[time.Duration][]string{
		59 * time.Minute: nil, time.Hour: {"a"}, 61 * time.Minute: {"a", "b"}, 2 * time.Hour: {"a", "b", "c"},
	} {
		if got := due(start.Add(after)); !slices.Equal(got, want) {
			t.Errorf("after %v %v are due, want %v", after, got, want)
		}
	}
	p.Drop("a") // the registry has it again
	if got := due(start.Add(time.Hour)); got != nil || !p.Since.Equal(start.Add(time.Minute)) {
		t.Errorf("%v is due, the first since %v", got, p.Since)
	}
	p.Restart(start.Add(time.Hour))
	if got := due(start.Add(119 * time.Minute)); got != nil {
		t.Errorf("%v is due before the other time is over", got)
	}
	if err := p.Keep(); err != nil || p.Pending != 0 || due(start.Add(9*time.Hour)) != nil {
		t.Errorf("kept: %v, %d pending", err, p.Pending)
	}
	if err := p.Keep(); !errors.Is(err, ErrAlreadyKept) {
		t.Errorf("kept again: %v", err)
	}
	pause("d", start.Add(2*time.Hour))
	if got := due(start.Add(3 * time.Hour)); !slices.Equal(got, []string{"d"}) {
		t.Errorf("%v is due beside what is kept", got)
	}
	if keys := slices.Sorted(p.Keys()); !slices.Equal(keys, []string{"b", "c", "d"}) || p.Len() != 3 {
		t.Errorf("paused are %v", keys)
	}
	taken := p.Take()
	if len(taken) != 3 || p.Len() != 0 || p.Pending != 0 {
		t.Errorf("%d are taken, and %d left", len(taken), p.Len())
	}
	if all := maps.Collect(p.All()); len(all) > 0 {
		t.Errorf("after they were taken: %v", all)
	}
	if p.Update(); !p.Since.IsZero() || p.Of != 0 {
		t.Errorf("without any: %+v", p.Protection())
	}
}

// A line is due for the first paused removal, and for more after a while.
func TestTell(t *testing.T) {
	p := &Paused[int]{}
	told := func(before, pending int, after time.Duration) bool {
		p.Pending = pending
		return p.Tell(before, start.Add(after))
	}
	for _, tt := range []struct {
		before, pending int
		after           time.Duration
		want            bool
	}{
		{0, 0, 0, false},
		{0, 5, 0, true},
		{5, 6, time.Second, false},
		{6, 6, tellAgain, false},
		{6, 7, tellAgain, true},
		{7, 8, tellAgain + time.Second, false},
		{7, 6, 3 * tellAgain, false},
		{0, 1, 3 * tellAgain, true},
	} {
		if got := told(tt.before, tt.pending, tt.after); got != tt.want {
			t.Errorf("%+v: told %v", tt, got)
		}
	}
}
