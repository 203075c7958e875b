package plugin_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// asked is a registry that is asked for what a test sets.
type asked struct {
	mu    sync.Mutex
	times int
	next  plugin.Listing
	err   error
	takes time.Duration
}

func (a *asked) set(l plugin.Listing, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.next, a.err = l, err
}

func (a *asked) fetch(ctx context.Context) (plugin.Listing, error) {
	a.mu.Lock()
	takes := a.takes
	a.mu.Unlock()
	if !plugin.Pause(ctx, takes, nil) {
		return plugin.Listing{}, context.Cause(ctx)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times++
	return a.next, a.err
}

// count returns how often it was asked.
func (a *asked) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.times
}

// all is a complete listing.
func all(s services) plugin.Listing {
	l := some(s)
	l.Complete = true
	return l
}

// some is a listing of what has changed.
func some(s services, removed ...string) plugin.Listing {
	var l plugin.Listing
	for name, instances := range s {
		l.Services = append(l.Services, plugin.Snapshot{Service: svcNamed(name), Instances: ids(instances)})
	}
	for _, name := range removed {
		l.Removed = append(l.Removed, registry.Key{Name: name})
	}
	return l
}

// TestPoll shows each answer that a registry may give, and that what is no
// answer removes nothing.
func TestPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, a := plugintest.NewCatalog(), &asked{}
		p := &plugin.Poll{Fetch: a.fetch, Interval: 10 * time.Second, RemoveGrace: time.Minute, MinShare: 0.5, AcceptEmptyField: "accept_empty"}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := p.Run(ctx, c); err != nil {
				t.Error(err)
			}
		})
		defer wg.Wait()
		defer cancel()
		say := func(l plugin.Listing, err error) {
			a.set(l, err)
			time.Sleep(11 * time.Second) // an interval and its spread
			synctest.Wait()
		}

		say(plugin.Listing{}, errors.New("refused"))
		c.WantDegraded(t, "refused", "refused")
		say(all(nil), nil)
		c.WantDegraded(t, "empty at the start", "if that is right, set accept_empty")
		if look(c).Synced {
			t.Error("an empty first listing was believed at once")
		}
		say(all(services{"web": "a b c d", "db": "x"}), nil)
		c.WantDegraded(t, "listed", "")
		c.WantIDs(t, "listed", services{"web": "a b c d", "db": "x"})
		if h := look(c); !h.Synced || h.Detail != "polling" || h.Heard == 0 {
			t.Errorf("synced %t, detail %q, heard %d", h.Synced, h.Detail, h.Heard)
		}
		time.Sleep(2 * time.Minute)

		before := a.count()
		time.Sleep(100 * time.Second)
		if n := a.count() - before; n < 9 || n > 11 {
			t.Errorf("asked %d times in ten intervals", n)
		}

		say(some(services{"web": "a b c e"}, "db"), nil)
		c.WantIDs(t, "a change", services{"web": "a b c e"})
		say(some(nil), nil)
		c.WantIDs(t, "no change", services{"web": "a b c e"})
		say(all(services{"web": "a b c"}), nil)
		c.WantIDs(t, "one is gone", services{"web": "a b c"})

		say(plugin.Listing{}, errors.New("refused"))
		c.WantIDs(t, "away", services{"web": "a b c"})
		say(all(services{"web": "a", "db": "x"}), nil)
		c.WantIDs(t, "back with less", services{"web": "a b c", "db": "x"})
		c.WantDegraded(t, "back with less", "remove_grace")
		time.Sleep(time.Minute)
		synctest.Wait()
		c.WantIDs(t, "the time is over", services{"web": "a", "db": "x"})
		c.WantDegraded(t, "the time is over", "")

		say(all(services{"web": "a b c d", "db": "x"}), nil)
		say(all(services{"web": "a", "db": "x"}), nil)
		c.WantIDs(t, "shrunk at once", services{"web": "a b c d", "db": "x"})
		time.Sleep(80 * time.Second)
		synctest.Wait()
		c.WantIDs(t, "shrunk for long", services{"web": "a", "db": "x"})

		l := all(services{"db": "x"})
		l.Lost = errors.New("another server answers")
		say(l, nil)
		c.WantIDs(t, "another server, which lacks one", services{"web": "a", "db": "x"})
		c.WantDegraded(t, "another server, which lacks one", "another server answers; ")
		say(all(services{"web": "a", "db": "x"}), nil)

		say(all(nil), nil)
		time.Sleep(time.Hour)
		synctest.Wait()
		c.WantIDs(t, "empty", services{"web": "a", "db": "x"})
		c.WantDegraded(t, "empty", "if that is right, set accept_empty")
		say(all(services{"db": "y"}), nil)
		c.WantIDs(t, "no more empty", services{"web": "a", "db": "x y"})
		time.Sleep(80 * time.Second)
		synctest.Wait()
		c.WantIDs(t, "no more empty, for long", services{"db": "y"})

		l = all(services{"web": "b"})
		l.Doubt = errors.New("filtered")
		say(l, nil)
		time.Sleep(time.Hour)
		synctest.Wait()
		c.WantIDs(t, "filtered", services{"web": "b", "db": "y"})
		c.WantDegraded(t, "filtered", "filtered")
		say(all(services{"web": "b"}), nil)
		c.WantIDs(t, "not filtered", services{"web": "b"})
		c.WantDegraded(t, "not filtered", "")

		a.mu.Lock()
		a.takes = 20 * time.Second
		a.mu.Unlock()
		time.Sleep(5 * time.Minute)
		before = a.count()
		time.Sleep(1000 * time.Second)
		if n := a.count() - before; n < 9 || n > 11 {
			t.Errorf("a slow registry was asked %d times in 1000 s", n)
		}
	})
}

// TestPollEmpty shows an empty registry: it is believed at once where that is
// accepted, and else after the time of grace. An adapter without a field for it
// advises none.
func TestPollEmpty(t *testing.T) {
	for _, accept := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			c, a := plugintest.NewCatalog(), &asked{next: all(nil)}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			go func() {
				_ = (&plugin.Poll{Fetch: a.fetch, Interval: time.Second, RemoveGrace: time.Minute, AcceptEmpty: accept}).Run(ctx, c)
			}()
			synctest.Wait()
			if synced := look(c).Synced; synced != accept {
				t.Errorf("accept %t: synced %t at the start", accept, synced)
			}
			if text := look(c).Degraded; !accept && (!strings.Contains(text, "its author can add a field") || strings.Contains(text, "set accept_empty")) {
				t.Errorf("without a field the advice is %q", text)
			}
			time.Sleep(time.Minute + 2*time.Second)
			synctest.Wait()
			if !look(c).Synced {
				t.Errorf("accept %t: not synced after the time of grace", accept)
			}
			c.WantDegraded(t, "in the end", "")
		})
	}
}

// TestPollStops shows that Run ends with its context in the midst of a fetch,
// and that a fetch that hangs is an outage.
func TestPollStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, a := plugintest.NewCatalog(), &asked{next: all(services{"web": "a"}), takes: time.Hour}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- (&plugin.Poll{Fetch: a.fetch, Interval: time.Second, Timeout: 5 * time.Second}).Run(ctx, c)
		}()
		time.Sleep(6 * time.Second)
		synctest.Wait()
		c.WantDegraded(t, "hanging", "deadline")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
