package access

import (
	"context"
	"errors"
	"fmt"
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
