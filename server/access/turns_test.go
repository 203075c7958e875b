package access

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// record is the networks that were served, in order.
type record struct {
	mu  sync.Mutex
	all []string
}

func (r *record) add(network string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, network)
}

// after returns those after the first n.
func (r *record) after(n int) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[n:]
}

// queue has so many callers of a network wait for turns that take a while each,
// and adds the network to served when one begins.
func queue(t *testing.T, turns *Turns, network string, callers int, takes time.Duration, served *record) {
	t.Helper()
	for range callers {
		go func() {
			pass, err := turns.Enter(t.Context(), network)
			if err != nil {
				return
			}
			defer pass.Leave()
			served.add(network)
			time.Sleep(takes) // of a fake clock
		}()
	}
	synctest.Wait()
}

// Of many networks that ask without end each has as much time as another, and
// one that has had little is served before any of them is again.
func TestTurnsAreFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := NewTurns(1, 0, 0)
		var served record
		// One of them has long turns, and one many callers.
		for i := range 32 {
			callers, takes := 100, time.Second
			switch i {
			case 0:
				takes = 10 * time.Second
			case 1:
				callers = 1000
			}
			queue(t, turns, fmt.Sprint("flood ", i), callers, takes, &served)
		}
		const good = "good"
		for range 10 {
			time.Sleep(100*time.Second + time.Millisecond) // within a turn
			synctest.Wait()
			before := len(served.after(0))
			queue(t, turns, good, 1, time.Millisecond, &served)
			time.Sleep(10 * time.Second) // the one under way ends
			synctest.Wait()
			if i := slices.Index(served.after(before), good); i != 0 {
				t.Fatalf("the good network is served as number %d of those after it came", i)
			}
		}
		count := make(map[string]int)
		for _, network := range served.after(0) {
			count[network]++
		}
		for i := 1; i < 32; i++ {
			if n := count[fmt.Sprint("flood ", i)]; n < count["flood 1"]-1 || n > count["flood 1"]+1 {
				t.Errorf("network %d has had %d turns, another %d", i, n, count["flood 1"])
			}
		}
		if long, short := count["flood 0"]*10, count["flood 1"]; long > short+10 || long < short-10 {
			t.Errorf("one has had %d s in long turns, another %d s in short ones", long, short)
		}
		// One that left its time to others does not catch up on it.
		before := len(served.after(0))
		queue(t, turns, "late", 100, time.Second, &served)
		time.Sleep(100 * time.Second)
		synctest.Wait()
		late := 0
		for _, network := range served.after(before) {
			if network == "late" {
				late++
			}
		}
		if late < 1 || late > 5 {
			t.Errorf("one that comes late has %d of the next 100 turns, of 33 networks", late)
		}
		// What is left ends when nobody waits any longer.
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		if len(turns.of) != 0 || turns.free != 1 {
			t.Errorf("%d networks and %d slots are left", len(turns.of), 1-turns.free)
		}
	})
}

// A caller that gives up leaves the queue, and whoever had his turn by then
// hands it on.
func TestTurnsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := NewTurns(1, 0, 0)
		pass, err := turns.Enter(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		waits := make(chan error)
		go func() {
			_, err := turns.Enter(ctx, "b")
			waits <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-waits; !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		pass.Leave()
		if len(turns.of) != 0 || turns.free != 1 {
			t.Errorf("%d networks and %d slots are left", len(turns.of), 1-turns.free)
		}
	})
}

// Many that ask without end, and come back as soon as they have waited in vain,
// do not keep out one that comes once.
func TestTurnsComingBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const patience, takes = 10 * time.Second, time.Second
		turns := NewTurns(1, 1, 8)
		all, end := context.WithCancel(t.Context())
		defer end()
		enter := func(network string, patience time.Duration) bool {
			ctx, cancel := context.WithTimeout(all, patience)
			defer cancel()
			pass, err := turns.Enter(ctx, network)
			if err != nil {
				return false
			}
			defer pass.Leave()
			time.Sleep(takes) // of a fake clock
			pass.FreeAfter(takes)
			pass.RestAfter(takes)
			return true
		}
		for i := range 32 {
			go func() {
				for time.Sleep(time.Duration(i) * patience / 32); all.Err() == nil; {
					enter(fmt.Sprint("guesser ", i), patience)
				}
			}()
		}
		for i := range 10 {
			time.Sleep(3*patience + takes/2)
			if !enter(fmt.Sprint("newcomer ", i), patience) {
				t.Errorf("newcomer %d waits for %v in vain", i, patience)
			}
		}
	})
}

// Networks that come once and give up are forgotten, while others wait too.
func TestTurnsForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := NewTurns(1, 1, 0)
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		pass, err := turns.Enter(t.Context(), "first")
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			for n := range maxSpared / 2 {
				if _, err := turns.Enter(gone, fmt.Sprint(i, " ", n)); err == nil {
					t.Fatal("a slot is free")
				}
			}
			next := make(chan *Pass)
			go func() {
				pass, err := turns.Enter(t.Context(), fmt.Sprint("next ", i))
				if err != nil {
					t.Error(err)
				}
				next <- pass
			}()
			synctest.Wait()
			pass.Leave()
			pass = <-next
		}
		if n := len(turns.of); n > 2*maxSpared {
			t.Errorf("%d networks are remembered", n)
		}
		pass.Leave()
	})
}

// Whatever happens, the network that is served next is the one that a look at
// all of them finds.
func TestTurnsModel(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 0))
			turns := NewTurns(1+r.IntN(3), r.IntN(3), 0)
			passes := make(chan *Pass, 1000)
			cancels := []func(){func() {}}
			var held []*Pass
			for range 500 {
				switch r.IntN(6) {
				case 0, 1:
					network := fmt.Sprint(r.IntN(20))
					ctx, cancel := context.WithCancel(t.Context())
					cancels = append(cancels, cancel)
					go func() {
						if pass, err := turns.Enter(ctx, network); err == nil {
							passes <- pass
						}
					}()
				case 2:
					cancels[r.IntN(len(cancels))]()
				case 3:
					time.Sleep(time.Duration(r.IntN(1000)) * time.Millisecond)
				default:
					for len(passes) > 0 {
						held = append(held, <-passes)
					}
					if len(held) == 0 {
						break
					}
					i := r.IntN(len(held))
					held[i].RestAfter(time.Duration(r.IntN(2)) * time.Second)
					if held[i].FreeAfter(time.Duration(r.IntN(2)) * time.Second); r.IntN(2) == 0 {
						held[i].Leave()
						held = slices.Delete(held, i, i+1)
					}
				}
				synctest.Wait()
				turns.check(t)
			}
			for _, cancel := range cancels {
				cancel()
			}
			synctest.Wait()
			for len(passes) > 0 {
				held = append(held, <-passes)
			}
			for _, pass := range held {
				pass.Leave()
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			if len(turns.of) != 0 || turns.free != turns.slots {
				t.Errorf("%d networks and %d slots are left", len(turns.of), turns.slots-turns.free)
			}
		})
	}
}

// check compares the network that is served next with all others.
func (t *Turns) check(test *testing.T) {
	test.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	var want *share
	for _, s := range t.of {
		if len(s.queue) == 0 || t.each > 0 && s.going >= t.each {
			continue
		}
		if want == nil || cmp.Or(cmp.Compare(s.going, want.going), cmp.Compare(max(s.had, t.now), max(want.had, t.now)), cmp.Compare(want.queue[0].came, s.queue[0].came)) < 0 {
			want = s
		}
	}
	if got := t.firstLocked(); got != want {
		test.Fatalf("%+v is served next, want %+v; now is %v", got, want, t.now)
	}
	if want != nil && t.free > 0 {
		test.Fatalf("%+v waits beside %d free slots", want, t.free)
	}
}

// BenchmarkTurns is one turn while so many networks wait for theirs.
func BenchmarkTurns(b *testing.B) {
	for _, networks := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("networks=%d", networks), func(b *testing.B) {
			turns := NewTurns(1, 0, 0)
			ctx, cancel := context.WithCancel(b.Context())
			passes := make(chan *Pass)
			var all sync.WaitGroup
			for i := range networks {
				all.Go(func() { // ends with ctx
					for {
						pass, err := turns.Enter(ctx, fmt.Sprint(i))
						if err != nil {
							return
						}
						select {
						case passes <- pass:
						case <-ctx.Done():
							pass.Leave()
						}
					}
				})
			}
			for b.Loop() {
				(<-passes).Leave()
			}
			cancel()
			all.Wait()
		})
	}
}
