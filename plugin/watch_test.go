package plugin_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// watched is a registry whose sessions a test conducts.
type watched struct {
	catalog *plugintest.Catalog
	began   chan time.Time
	takes   chan plugin.Listing
	ends    chan error
	stop    func()
}

// startWatch runs w in the bubble of synctest. Its first session has begun.
func startWatch(t *testing.T, w plugin.Watch) *watched {
	t.Helper()
	s := &watched{catalog: plugintest.NewCatalog(), began: make(chan time.Time, 1000), takes: make(chan plugin.Listing), ends: make(chan error)}
	w.Follow = func(ctx context.Context, take func(plugin.Listing)) error {
		s.began <- time.Now()
		for {
			select {
			case l := <-s.takes:
				take(l)
			case err := <-s.ends:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := w.Run(ctx, s.catalog); err != nil {
			t.Error(err)
		}
	})
	s.stop = func() {
		cancel()
		wg.Wait()
	}
	synctest.Wait()
	return s
}

// take passes a listing or changes to the present session, or the next one.
func (s *watched) take(l plugin.Listing) {
	s.takes <- l
	synctest.Wait()
}

// end ends the present session.
func (s *watched) end(err error) {
	s.ends <- err
	synctest.Wait()
}

// shows checks what the catalog has, and what is said of the registry.
func (s *watched) shows(t *testing.T, when string, want services, degraded string) {
	t.Helper()
	s.catalog.WantIDs(t, when, want)
	s.catalog.WantDegraded(t, when, degraded)
}

// doubtful is a complete listing that is not believed to be one.
func doubtful(l plugin.Listing, why string) plugin.Listing {
	l.Doubt = errors.New(why)
	return l
}

var errCut = errors.New("cut")

// TestWatch shows the life of a watched registry: listing, changes, an outage
// from which it comes back with less, and a compaction, which is none.
func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := startWatch(t, plugin.Watch{RemoveGrace: time.Minute, MinShare: 0.5, AcceptEmptyField: "accept_empty"})
		defer s.stop()
		s.take(all(services{"web": "a b", "db": "x"}))
		s.shows(t, "listed", services{"web": "a b", "db": "x"}, "")
		if h := look(s.catalog); !h.Synced || h.Detail != "watching" || h.Heard != 1 {
			t.Errorf("synced %t, detail %q, heard %d", h.Synced, h.Detail, h.Heard)
		}
		s.take(some(services{"web": "b c"}, "db", "never"))
		s.shows(t, "a change", services{"web": "b c"}, "")
		sets := look(s.catalog).Sets
		s.take(plugin.Listing{})
		s.take(some(services{"web": "b c"}))
		if h := look(s.catalog); h.Sets != sets || h.Heard != 4 {
			t.Errorf("what changes nothing: %d more sets, heard %d", h.Sets-sets, h.Heard)
		}

		s.end(errCut)
		s.shows(t, "cut", services{"web": "b c"}, "cut")
		s.take(all(services{"web": "c d"}))
		s.shows(t, "back with less", services{"web": "b c d"}, "remove_grace")
		s.take(some(services{"web": "d"}))
		s.shows(t, "removed once it was listed", services{"web": "b d"}, "remove_grace")
		time.Sleep(time.Minute)
		synctest.Wait()
		s.shows(t, "the time is over", services{"web": "d"}, "")

		before := len(look(s.catalog).Reasons)
		s.end(nil)
		s.take(all(services{"web": "e", "db": "x"}))
		s.shows(t, "compacted", services{"web": "e", "db": "x"}, "")
		s.end(nil)
		s.take(plugin.Listing{})
		s.take(some(services{"web": "e f"}))
		s.shows(t, "a session that goes on without a listing", services{"web": "e f", "db": "x"}, "")
		if n := len(look(s.catalog).Reasons); n != before {
			t.Errorf("missed changes are an outage: %q", look(s.catalog).Reasons[before:])
		}

		s.take(all(services{"web": "a b c d e f"}))
		s.take(all(services{"web": "a"}))
		s.shows(t, "shrunk at once", services{"web": "a b c d e f"}, "remove_grace")
		time.Sleep(time.Minute)
		synctest.Wait()
		s.shows(t, "shrunk for long", services{"web": "a"}, "")

		lost := all(services{"db": "x"})
		lost.Lost = errors.New("the revision went back")
		s.take(lost)
		s.shows(t, "lost", services{"web": "a", "db": "x"}, "the revision went back; the registry was away or has lost data")
		s.take(all(services{"web": "a", "db": "x"}))
		s.shows(t, "found", services{"web": "a", "db": "x"}, "")
	})
}

// TestWatchAway shows a session that goes on while a part of the registry
// cannot be followed: changes apply, and what leaves is retained until
// remove_grace after everything is followed again.
func TestWatchAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := startWatch(t, plugin.Watch{RemoveGrace: time.Minute, MinShare: 0.5, AcceptEmptyField: "accept_empty"})
		defer s.stop()
		away := func(l plugin.Listing) plugin.Listing {
			l.Away = errors.New("forbidden")
			return l
		}
		s.take(away(plugin.Listing{}))
		s.shows(t, "before the first listing", services{}, "forbidden")
		if h := look(s.catalog); h.Synced {
			t.Error("it is synced before its first listing")
		}
		s.take(all(services{"web": "a b", "db": "x"}))
		s.shows(t, "listed", services{"web": "a b", "db": "x"}, "")
		s.take(away(some(services{"web": "b c"})))
		s.shows(t, "a change in a part", services{"web": "a b c", "db": "x"}, "forbidden")
		s.take(away(some(services{}, "db")))
		s.shows(t, "a removal in a part", services{"web": "a b c", "db": "x"}, "forbidden")
		time.Sleep(time.Hour)
		s.take(all(services{"web": "b c"}))
		s.shows(t, "followed again", services{"web": "a b c", "db": "x"}, "remove_grace")
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		s.shows(t, "after the grace period", services{"web": "b c"}, "")
		if began := len(s.began); began != 1 {
			t.Errorf("%d sessions, want one", began)
		}
	})
}

// TestWatchFails shows that no order of failures removes anything, that each is
// shown, and that its end is noticed.
func TestWatchFails(t *testing.T) {
	whole := services{"web": "a b", "db": "x"}
	for name, fail := range map[string]func(t *testing.T, s *watched){
		"before its listing": func(t *testing.T, s *watched) {
			for range 3 {
				s.end(errCut)
				s.shows(t, "cut", whole, "cut")
				<-s.began
			}
		},
		"behind its listing": func(t *testing.T, s *watched) {
			for range 3 {
				s.end(errCut)
				s.take(all(services{"web": "a"}))
			}
			s.shows(t, "again and again", whole, "remove_grace")
		},
		"between an empty listing and its end": func(t *testing.T, s *watched) {
			s.take(all(nil))
			s.shows(t, "empty", whole, "accept_empty")
			s.end(errCut)
			s.shows(t, "empty, and cut", whole, "cut; the registry lists no instance")
			s.take(all(services{"web": ""}))
			s.shows(t, "a service without instances", whole, "accept_empty")
			s.take(some(services{"db": ""}, "web"))
			time.Sleep(time.Hour)
			synctest.Wait()
			s.shows(t, "empty for long", whole, "accept_empty")
		},
		"empty, and one comes": func(t *testing.T, s *watched) {
			s.take(all(nil))
			s.take(some(services{"db": ""}))
			s.take(some(services{"web": "a c"}))
			s.shows(t, "one comes", services{"web": "a b c", "db": "x"}, "remove_grace")
		},
		"in doubt": func(t *testing.T, s *watched) {
			s.take(doubtful(all(services{"web": "c"}), "filtered"))
			s.shows(t, "doubt", services{"web": "a b c", "db": "x"}, "filtered")
			s.take(some(services{"web": "a b"}))
			s.shows(t, "a change does not end it", whole, "filtered")
			s.end(nil)
			s.take(doubtful(all(nil), "filtered"))
			s.shows(t, "empty and in doubt", whole, "filtered")
		},
		"a doubtful change of an empty registry": func(t *testing.T, s *watched) {
			s.take(all(nil))
			s.take(doubtful(some(services{"web": "b"}), "filtered"))
			s.shows(t, "doubt", whole, "filtered")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := startWatch(t, plugin.Watch{RemoveGrace: time.Minute, MinShare: 0.5, AcceptEmptyField: "accept_empty"})
				defer s.stop()
				s.take(all(whole))
				<-s.began
				fail(t, s)
				s.take(all(whole))
				s.take(some(services{"web": "a b"}))
				s.shows(t, "right again", whole, "")
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				s.shows(t, "right for long", whole, "")
				if h := look(s.catalog); h.Removes != 0 || h.Least["web"] != 2 || h.Least["db"] != 1 {
					t.Errorf("%d removed, least %v", h.Removes, h.Least)
				}
			})
		})
	}
}

// TestWatchBegins shows when the first listing counts: only a complete one, and
// an empty one after the time of grace, with the first instance, or at once if
// that is accepted.
func TestWatchBegins(t *testing.T) {
	for name, c := range map[string]struct {
		watch plugin.Watch
		begin func(t *testing.T, s *watched)
	}{
		"after failures": {plugin.Watch{}, func(_ *testing.T, s *watched) {
			s.end(errCut)
			s.end(nil)
			s.take(some(services{"web": "a"}))
			s.end(errCut)
			s.take(doubtful(all(services{"web": "a"}), "filtered"))
		}},
		"empty for long": {plugin.Watch{RemoveGrace: time.Minute, Hint: "the prefix", AcceptEmptyField: "empty_is_right"}, func(t *testing.T, s *watched) {
			s.take(all(services{"web": ""}))
			s.shows(t, "empty", services{}, "the start (remove_grace); check the prefix; if that is right, set empty_is_right")
			time.Sleep(59 * time.Second)
		}},
		"empty, and away as the time is over": {plugin.Watch{RemoveGrace: time.Minute}, func(_ *testing.T, s *watched) {
			s.take(all(nil))
			s.end(errCut)
			time.Sleep(2 * time.Minute)
		}},
		"empty, and then not": {plugin.Watch{RemoveGrace: time.Hour}, func(_ *testing.T, s *watched) {
			s.take(all(nil))
			s.take(plugin.Listing{})
		}},
		"empty accepted": {plugin.Watch{RemoveGrace: time.Hour, AcceptEmpty: true}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := startWatch(t, c.watch)
				defer s.stop()
				if c.begin != nil {
					c.begin(t, s)
					if look(s.catalog).Synced {
						t.Error("synced too early")
					}
				}
				switch {
				case name == "empty for long":
					time.Sleep(2 * time.Second)
					synctest.Wait()
				case strings.HasPrefix(name, "empty, and away"):
					s.take(plugin.Listing{}) // continues without a listing
				case name == "empty, and then not":
					s.take(some(services{"web": "a"}))
				case c.watch.AcceptEmpty:
					s.take(all(nil))
				default:
					s.take(all(services{"web": "a"}))
				}
				if h := look(s.catalog); !h.Synced || h.Degraded != "" {
					t.Errorf("synced %t, degraded %q", h.Synced, h.Degraded)
				}
			})
		})
	}
}

// TestWatchProblems shows that problems end with their reason, or with a
// complete listing that does not have them.
func TestWatchProblems(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := startWatch(t, plugin.Watch{AcceptEmpty: true})
		defer s.stop()
		want := func(when string, ids ...string) {
			t.Helper()
			var got []string
			for id := range look(s.catalog).Problems {
				got = append(got, id)
			}
			if slices.Sort(got); !slices.Equal(got, ids) {
				t.Errorf("%s: problems %q, want %q", when, got, ids)
			}
		}
		with := func(l plugin.Listing, problems map[string]string) plugin.Listing {
			l.Problems = problems
			return l
		}
		s.take(with(all(nil), map[string]string{"a": "bad", "b": "bad", "c": ""}))
		want("listed", "a", "b")
		s.take(with(some(nil), map[string]string{"a": "", "c": "bad", "d": ""}))
		want("changed", "b", "c")
		s.take(some(nil))
		want("no change", "b", "c")
		s.end(errCut)
		want("away", "b", "c")
		s.take(with(all(nil), map[string]string{"c": "worse"}))
		want("listed again", "c")
		if h := look(s.catalog); slices.Contains(h.Calls, "problem d") {
			t.Error("a problem that never was is cleared")
		}
	})
}

// TestWatchBacksOff shows the pauses between sessions: growing and spread while
// sessions fail, and short after one that lived.
func TestWatchBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := startWatch(t, plugin.Watch{Retry: plugin.Backoff{First: time.Second, Most: 8 * time.Second}})
		defer s.stop()
		paused := func(what string, live func(), err error, most time.Duration) {
			t.Helper()
			<-s.began
			live()
			ended := time.Now()
			s.end(err)
			if d := (<-s.began).Sub(ended); d < most/2 || d > most {
				t.Errorf("%s: a pause of %v, want %v to %v", what, d, most/2, most)
			}
			s.began <- time.Time{}
		}
		fails := func() {}
		for _, most := range []time.Duration{1, 2, 4, 8, 8} {
			paused("no listing", fails, errCut, most*time.Second)
		}
		paused("a listing alone", func() { s.take(all(services{"web": "a"})) }, errCut, 8*time.Second)
		paused("changes missed again", func() { s.take(all(services{"web": "a"})) }, nil, 8*time.Second)
		paused("a change", func() {
			s.take(all(services{"web": "a"}))
			s.take(plugin.Listing{})
		}, errCut, time.Second)
		paused("no listing", fails, nil, 2*time.Second)
		paused("quiet for long", func() {
			s.take(all(services{"web": "a"}))
			time.Sleep(8 * time.Second)
		}, errCut, time.Second)
	})
}

// TestWatchTakesAtOnce shows that several goroutines may report.
func TestWatchTakesAtOnce(t *testing.T) {
	catalog := plugintest.NewCatalog()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := plugin.Watch{Follow: func(ctx context.Context, take func(plugin.Listing)) error {
		take(all(services{"web": "a"}))
		var wg sync.WaitGroup
		for _, id := range []string{"a", "b", "c", "d"} {
			wg.Go(func() {
				take(plugin.Listing{Services: []plugin.Snapshot{{Service: registry.Service{Key: registry.Key{Name: id}}, Instances: ids(id)}}})
			})
		}
		wg.Wait()
		cancel()
		return ctx.Err()
	}, Detail: func() string { return "here" }}
	if err := w.Run(ctx, catalog); err != nil {
		t.Error(err)
	}
	catalog.WantIDs(t, "all", services{"web": "a", "a": "a", "b": "b", "c": "c", "d": "d"})
	if h := look(catalog); h.Detail != "here" {
		t.Errorf("detail %q", h.Detail)
	}
	if (&plugin.Watch{}).Run(t.Context(), catalog) == nil {
		t.Error("a Watch without Follow runs")
	}
}
