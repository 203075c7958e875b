package nacos

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// book is a catalog of which tests in fake time read Held.
type book struct{ *plugintest.Catalog }

func newBook() *book { return &book{plugintest.NewCatalog()} }

// script is a source whose answers a test sets.
type script struct {
	mu      sync.Mutex // guards everything below
	answers map[serviceID]string
	err     error
	refused map[serviceID]bool // these are answered by a refusal
	asked   []string
	clock   uint64
	hold    chan struct{} // not nil: answers wait until it is closed
}

func info(clock uint64, id serviceID, ips string) model.Service {
	s := model.Service{Name: id.name, GroupName: id.group, LastRefTime: clock, Hosts: []model.Instance{}}
	for ip := range strings.FieldsSeq(ips) {
		s.Hosts = append(s.Hosts, model.Instance{Ip: ip, Port: 80, Weight: 1, Healthy: true, Enable: true})
	}
	return s
}

func (s *script) set(id serviceID, ips string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[id] = ips
}

func (s *script) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func (s *script) refuse(ids ...serviceID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = map[serviceID]bool{}
	for _, id := range ids {
		s.refused[id] = true
	}
}

func (s *script) took() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked := s.asked
	s.asked = nil
	return asked
}

func (s *script) answer(how string, id serviceID) (model.Service, error) {
	s.mu.Lock()
	s.asked = append(s.asked, how+" "+id.String())
	a, err, hold := info(s.clock, id, s.answers[id]), s.err, s.hold
	if err == nil && s.refused[id] {
		err = &serverError{code: codeForbidden, message: "authorization failed!"}
	}
	s.mu.Unlock()
	if hold != nil {
		<-hold
	}
	return a, err
}

func (s *script) subscribe(_ context.Context, namespace, group, name string) (model.Service, error) {
	return s.answer("subscribe", serviceID{namespace, group, name})
}

func (s *script) unsubscribe(_ context.Context, namespace, group, name string) error {
	_, err := s.answer("unsubscribe", serviceID{namespace, group, name})
	return err
}

func (s *script) query(_ context.Context, namespace, group, name string) (model.Service, error) {
	return s.answer("query", serviceID{namespace, group, name})
}

// bench is a mirror at work in fake time.
type bench struct {
	t   *testing.T
	m   *mirror
	b   *book
	src *script
	end func()
}

var (
	web = serviceID{publicNamespace, "G", "web"}
	db  = serviceID{publicNamespace, "G", "db"}
)

func newBench(t *testing.T, c Config) *bench {
	b := newBook()
	log := slog.New(slog.DiscardHandler)
	be := &bench{t: t, b: b, src: &script{answers: map[serviceID]string{}, clock: 1}, end: func() {}}
	be.m = newMirror(c.withDefaults(), log, b, newState(b))
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { be.m.grace.Run(ctx) })
	t.Cleanup(func() { be.end(); cancel(); wg.Wait() })
	return be
}

// session begins another session, after the end of the one before.
func (be *bench) session() {
	be.end()
	ctx, cancel := context.WithCancel(context.Background())
	be.m.begin(false)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { _ = be.m.work(ctx, be.src) })
	}
	be.end = func() { cancel(); wg.Wait(); be.m.end() }
}

func (be *bench) push(id serviceID, clock uint64, ips string) {
	i := info(clock, id, ips)
	be.m.push(be.m.session, id.group, id.name, &i, nil)
	synctest.Wait()
}

func (be *bench) list(ids ...serviceID) {
	set := map[serviceID]bool{}
	for _, id := range ids {
		set[id] = true
	}
	be.m.list(publicNamespace, set, time.Now().Add(time.Millisecond))
	synctest.Wait()
}

// TestEmptyIsConfirmed shows that a push without instances counts only once a
// query says the same.
func TestEmptyIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		be.src.set(web, "10.0.0.1 10.0.0.2")
		be.session()
		be.list(web)
		both := map[string]string{"public/G/web": "10.0.0.1:80 10.0.0.2:80"}
		be.b.WantIDs(t, "listed", both)

		be.push(web, 2, "")
		be.b.WantIDs(t, "an empty push, and a query that has both", both)

		be.src.fail(&serverError{code: 500, message: "broken"})
		be.push(web, 3, "")
		be.b.WantIDs(t, "an empty push, and a query that fails", both)
		be.b.WantDegraded(t, "an empty push, and a query that fails", "broken")

		be.src.fail(nil)
		be.src.set(web, "")
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantIDs(t, "the query says the same", map[string]string{"public/G/web": ""})
		be.b.WantDegraded(t, "the query says the same", "")
	})
}

// TestMissingInAList shows that a service goes only if it is missing in a
// complete list and a query has no instance of it.
func TestMissingInAList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		be.src.set(web, "10.0.0.1")
		be.src.set(db, "10.0.0.2")
		be.session()
		be.list(web, db)
		be.list(db)
		be.b.WantIDs(t, "missing, but it has an instance", map[string]string{"public/G/web": "10.0.0.1:80", "public/G/db": "10.0.0.2:80"})
		be.src.took()
		be.src.set(web, "")
		be.push(web, 2, "")
		be.b.WantIDs(t, "missing, and empty", map[string]string{"public/G/db": "10.0.0.2:80"})
		if asked := be.src.took(); asked[len(asked)-1] != "unsubscribe public/G/web" {
			t.Errorf("asked %q, want an unsubscription at the end", asked)
		}
		be.src.set(web, "10.0.0.3")
		be.list(web, db)
		be.b.WantIDs(t, "back", map[string]string{"public/G/web": "10.0.0.3:80", "public/G/db": "10.0.0.2:80"})
	})
}

// TestGrace shows another session: everything is subscribed again and kept,
// what the server shows is believed, and what it lacks is kept for the grace
// period, unless the session has shown it once.
func TestGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{RemoveGrace: plugin.Duration(30 * time.Second)})
		be.src.set(web, "10.0.0.1 10.0.0.2")
		be.src.set(db, "10.0.0.9")
		be.session()
		be.list(web, db)
		before := map[string]string{"public/G/web": "10.0.0.1:80 10.0.0.2:80", "public/G/db": "10.0.0.9:80"}
		be.b.WantIDs(t, "listed", before)

		be.src.took()
		be.src.set(web, "")
		be.src.set(db, "")
		be.session()
		be.list()
		asked := be.src.took()
		slices.Sort(asked)
		if diff := cmp.Diff([]string{"query public/G/db", "query public/G/web", "subscribe public/G/db", "subscribe public/G/web"}, asked); diff != "" {
			t.Errorf("asked (-want +got):\n%s", diff)
		}
		be.b.WantIDs(t, "an empty server", before)
		be.b.WantDegraded(t, "an empty server", "remove_grace")

		be.m.add(web)
		be.push(web, 2, "10.0.0.1")
		be.b.WantIDs(t, "one is back", before)
		be.push(web, 3, "10.0.0.1 10.0.0.3")
		be.push(web, 4, "10.0.0.1")
		be.b.WantIDs(t, "what this session has shown goes at once", before)
		be.src.set(web, "10.0.0.1")

		time.Sleep(30 * time.Second)
		synctest.Wait()
		be.b.WantIDs(t, "grace is over", map[string]string{"public/G/web": "10.0.0.1:80"})
		be.b.WantDegraded(t, "grace is over", "")
	})
}

// TestGraceEnds shows that sessions that end before the grace period does set
// nothing back: what they all lack goes, and what is there stays.
func TestGraceEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{RemoveGrace: plugin.Duration(30 * time.Second)})
		be.src.set(web, "10.0.0.1 10.0.0.2")
		be.src.set(db, "10.0.0.9")
		be.session()
		be.list(web, db)
		before := map[string]string{"public/G/web": "10.0.0.1:80 10.0.0.2:80", "public/G/db": "10.0.0.9:80"}
		be.src.set(web, "10.0.0.1")
		be.src.set(db, "")
		for range 2 {
			be.session()
			be.list(web)
			time.Sleep(14 * time.Second)
			synctest.Wait()
			be.end()
			time.Sleep(time.Hour)
			synctest.Wait()
			be.b.WantIDs(t, "28 seconds of sessions, and two hours without", before)
		}
		be.src.took()
		be.src.fail(&serverError{code: 500, message: "broken"})
		be.session()
		be.list(web)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		be.b.WantIDs(t, "a session without an answer", before)
		be.src.fail(nil)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		be.b.WantIDs(t, "what 30 seconds of sessions lacked", map[string]string{"public/G/web": "10.0.0.1:80"})
		be.b.WantDegraded(t, "nothing is retained", "")
		if asked := be.src.took(); !slices.Contains(asked, "unsubscribe public/G/db") {
			t.Errorf("asked %q, want an unsubscription", asked)
		}
	})
}

// TestStaleReply shows that an answer that is older than a push which overtook
// it is dropped.
func TestStaleReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		be.src.set(web, "10.0.0.1")
		be.src.hold = make(chan struct{})
		be.session()
		be.list(web)
		be.push(web, 5, "10.0.0.2")
		close(be.src.hold)
		synctest.Wait()
		be.b.WantIDs(t, "the push counts", map[string]string{"public/G/web": "10.0.0.2:80"})
	})
}

// TestPushOfTwoNamespaces shows that a push, which does not say its namespace,
// is never taken for that of another one.
func TestPushOfTwoNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		dev := serviceID{"dev", "G", "web"}
		be.src.set(web, "10.0.0.1")
		be.src.set(dev, "10.1.0.1")
		be.session()
		be.m.add(web)
		be.m.add(dev)
		synctest.Wait()
		be.src.set(dev, "10.1.0.2")
		be.push(dev, 2, "10.1.0.2")
		be.b.WantIDs(t, "one of two changed", map[string]string{"public/G/web": "10.0.0.1:80", "dev/G/web": "10.1.0.2:80"})
	})
}

// TestBothNamesOfPublic shows that what clients register under the empty name
// and under "public" is one service.
func TestBothNamesOfPublic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		nameless := serviceID{"", "G", "web"}
		be.src.set(web, "10.0.0.1")
		be.src.set(nameless, "10.0.0.2")
		be.session()
		be.m.add(web)
		be.m.add(nameless)
		synctest.Wait()
		be.b.WantIDs(t, "both", map[string]string{"public/G/web": "10.0.0.1:80 10.0.0.2:80"})
		be.src.set(nameless, "")
		be.m.list("", nil, time.Now().Add(time.Second))
		synctest.Wait()
		be.b.WantIDs(t, "one of them gone", map[string]string{"public/G/web": "10.0.0.1:80"})
	})
}

// TestGraceOfBothNames shows that what one of the two lacks in another session
// is kept like that of a service of its own.
func TestGraceOfBothNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{RemoveGrace: plugin.Duration(30 * time.Second)})
		nameless := serviceID{"", "G", "web"}
		be.src.set(web, "10.0.0.1")
		be.src.set(nameless, "10.0.0.2")
		be.session()
		be.m.add(web)
		be.m.add(nameless)
		synctest.Wait()
		be.src.set(web, "10.0.0.3")
		be.src.set(nameless, "")
		be.session()
		synctest.Wait()
		be.b.WantIDs(t, "another session", map[string]string{"public/G/web": "10.0.0.1:80 10.0.0.2:80 10.0.0.3:80"})
		be.b.WantDegraded(t, "another session", "remove_grace")
		be.src.set(web, "10.0.0.4")
		be.push(web, 2, "10.0.0.4")
		be.b.WantIDs(t, "a change within the grace period", map[string]string{"public/G/web": "10.0.0.1:80 10.0.0.2:80 10.0.0.4:80"})
		time.Sleep(30 * time.Second)
		synctest.Wait()
		be.b.WantIDs(t, "grace is over", map[string]string{"public/G/web": "10.0.0.4:80"})
		be.b.WantDegraded(t, "grace is over", "")
	})
}

// TestGraceOfOneName shows that what one of the two no longer shows is kept as
// it was, and does not hold up what the other one loses.
func TestGraceOfOneName(t *testing.T) {
	for _, grace := range []time.Duration{0, 30 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			be := newBench(t, Config{RemoveGrace: plugin.Duration(grace)})
			nameless := serviceID{"", "G", "web"}
			be.src.set(web, "10.0.0.1")
			be.src.set(nameless, "10.0.0.2")
			be.session()
			be.m.add(web)
			be.m.add(nameless)
			synctest.Wait()
			be.src.refuse(nameless)
			be.src.set(web, "10.0.0.3")
			be.session()
			time.Sleep(time.Minute)
			synctest.Wait()
			be.b.WantIDs(t, "one refused", map[string]string{"public/G/web": "10.0.0.2:80 10.0.0.3:80"})
			be.src.set(web, "10.0.0.4")
			be.push(web, 2, "10.0.0.4")
			be.b.WantIDs(t, "one refused, a change of the other", map[string]string{"public/G/web": "10.0.0.2:80 10.0.0.4:80"})
		})
	}
}

// TestSubscriptionWithoutPush shows that a subscription that no push follows is
// made again, a few times.
func TestSubscriptionWithoutPush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		be.src.set(web, "10.0.0.1")
		be.src.set(db, "10.0.0.2")
		be.session()
		be.list(web, db)
		be.push(db, 1, "10.0.0.2")
		time.Sleep(time.Hour)
		synctest.Wait()
		n := map[string]int{}
		for _, a := range be.src.took() {
			n[a]++
		}
		if diff := cmp.Diff(map[string]int{"subscribe public/G/web": subscribeTries, "subscribe public/G/db": 1}, n); diff != "" {
			t.Errorf("asked (-want +got):\n%s", diff)
		}
	})
}

// TestSubscriptionWithoutPushOfTwoNamespaces shows that the push of one service
// is not taken for a sign that another of the same name is subscribed.
func TestSubscriptionWithoutPushOfTwoNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		dev := serviceID{"dev", "G", "web"}
		be.src.set(web, "10.0.0.1")
		be.src.set(dev, "10.1.0.1")
		be.session()
		be.m.add(web)
		be.m.add(dev)
		synctest.Wait()
		be.push(web, 1, "10.0.0.1")
		be.src.set(dev, "10.1.0.2") // the server forgot the subscription, and pushes nothing
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantIDs(t, "the change of the other", map[string]string{"public/G/web": "10.0.0.1:80", "dev/G/web": "10.1.0.2:80"})
	})
}

// TestFailures shows which failures end a session, which are tried again, and
// that none removes anything.
func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		be.src.fail(&serverError{code: codeForbidden, message: "authorization failed!"})
		be.session()
		be.list(web)
		time.Sleep(time.Minute)
		be.b.WantDegraded(t, "refused", "refuses to show service public/G/web")
		be.src.fail(nil)
		be.src.set(web, "10.0.0.1")
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantIDs(t, "allowed", map[string]string{"public/G/web": "10.0.0.1:80"})
		be.b.WantDegraded(t, "allowed", "")

		be.src.fail(&serverError{code: codeForbidden, message: "authorization failed!"})
		be.list(web, db)
		be.b.WantDegraded(t, "another one, refused", "refuses to show service public/G/db")
		be.src.fail(&serverError{code: 500, message: "broken"})
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantDegraded(t, "no more refused, but broken", "service public/G/db: ")
		if strings.Contains(be.b.Held.Degraded, "refuses") {
			t.Errorf("what is over is still shown: %s", be.b.Held.Degraded)
		}
		be.src.fail(&serverError{code: codeBadParameter, message: "illegal"})
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantDegraded(t, "an illegal name", "")
		if be.b.Held.Problems["service public/G/db"] == "" {
			t.Error("an illegal name is not listed")
		}
		be.src.fail(&serverError{code: codeUnregistered, message: "Connection is unregistered."})
		s := be.m.services[web]
		s.unread = true
		if err := be.m.visit(t.Context(), be.src, s); !errors.Is(err, errSession) {
			t.Errorf("an unknown connection: error %v, want one that ends the session", err)
		}
		be.b.WantIDs(t, "all of these", map[string]string{"public/G/web": "10.0.0.1:80"})
	})
}

// TestServiceRefused shows that the refusal of one service, while another is
// shown, does not hold up the first listing, that it is listed with its cure,
// and that it removes nothing.
func TestServiceRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		be.src.set(web, "10.0.0.1")
		be.src.set(db, "10.0.0.2")
		be.src.refuse(db)
		be.session()
		be.list(db)
		time.Sleep(time.Hour)
		synctest.Wait()
		if be.b.Held.Synced {
			t.Error("synced, though nothing was shown")
		}
		be.b.WantDegraded(t, "nothing but the one refused", "refuses to show service public/G/db")
		be.list(web, db)
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantIDs(t, "another one shown", map[string]string{"public/G/web": "10.0.0.1:80"})
		be.b.WantDegraded(t, "another one shown", "refuses to show service public/G/db")
		if !be.b.Held.Synced {
			t.Error("a refused service holds up the first listing")
		}
		if p := be.b.Held.Problems["service public/G/db"]; !strings.Contains(p, "refuses to show it") || !strings.Contains(p, "give the user read") {
			t.Errorf("the problem is %q", p)
		}

		be.src.refuse()
		time.Sleep(time.Minute)
		synctest.Wait()
		both := map[string]string{"public/G/web": "10.0.0.1:80", "public/G/db": "10.0.0.2:80"}
		be.b.WantIDs(t, "allowed", both)
		be.b.WantDegraded(t, "allowed", "")
		if len(be.b.Held.Problems) > 0 {
			t.Errorf("problems %q", be.b.Held.Problems)
		}

		be.src.refuse(db)
		be.push(db, 2, "")
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantIDs(t, "refused later", both)
		be.b.WantDegraded(t, "refused later", "refuses to show service public/G/db")

		cache := serviceID{publicNamespace, "G", "cache"}
		be.src.refuse(cache)
		be.list(web, db, cache)
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantDegraded(t, "a third one", "refuses to show service public/G/cache")
		be.list(web, db)
		time.Sleep(time.Minute)
		synctest.Wait()
		be.b.WantIDs(t, "the third one gone", both)
		be.b.WantDegraded(t, "the third one gone", "")
		if len(be.b.Held.Problems) > 0 {
			t.Errorf("problems %q", be.b.Held.Problems)
		}
	})
}

// TestEverythingRefused shows that a password that does not hold, from the
// start or from some time on, never makes a first listing.
func TestEverythingRefused(t *testing.T) {
	for name, before := range map[string]bool{"from the start": false, "after one answer": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				be := newBench(t, Config{})
				be.src.set(web, "10.0.0.1")
				list := be.m.state.listing.Expect()
				be.session()
				if before {
					be.list(web)
					be.b.WantIDs(t, "answered", map[string]string{"public/G/web": "10.0.0.1:80"})
				}
				be.src.refuse(web, db)
				be.list(web, db)
				list()
				time.Sleep(time.Hour)
				synctest.Wait()
				be.b.WantDegraded(t, name, "refuses to show service")
				if be.b.Held.Synced || len(be.b.Held.Problems) > 0 {
					t.Errorf("synced %t, problems %q", be.b.Held.Synced, be.b.Held.Problems)
				}
			})
		})
	}
}

// TestPortsOfMetadata shows that a configured port whose metadata is not a port
// number is listed.
func TestPortsOfMetadata(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{Ports: plugin.PortKeys{{Name: "grpc", Key: "gRPC_port"}}})
		be.session()
		be.list(web)
		for _, test := range []struct {
			values []string
			want   string
		}{
			{[]string{"90"}, ""},
			{[]string{"abc"}, `instance 10.0.0.1:80 has "abc" as gRPC_port in its metadata`},
			{[]string{"0"}, `has "0" as gRPC_port`},
			{[]string{"70000"}, `has "70000" as gRPC_port`},
			{[]string{""}, `has "" as gRPC_port`},
			{[]string{"90", "x", "y"}, `instance 10.0.0.2:80 has "x" as gRPC_port in its metadata, which is not a port number, so it is served without the port "grpc": ` +
				`register it with 1 to 65535, or change config.ports (and 1 more like it)`},
			{[]string{"80"}, ""},
		} {
			i := info(2, web, "10.0.0.1 10.0.0.2 10.0.0.3")
			i.Hosts = i.Hosts[:len(test.values)]
			for n, v := range test.values {
				i.Hosts[n].Metadata = map[string]string{"gRPC_port": v}
			}
			be.m.push(be.m.session, "G", "web", &i, nil)
			synctest.Wait()
			p := be.b.Held.Problems["service public/G/web"]
			if !strings.Contains(p, test.want) || (p == "") != (test.want == "") {
				t.Errorf("%q: problem %q, want %q", test.values, p, test.want)
			}
			if got := be.b.Held.Instances["public/G/web"]; len(got) != len(test.values) {
				t.Errorf("%q: %d instances", test.values, len(got))
			}
		}
		i := info(2, web, "10.0.0.1")
		i.ReachProtectionThreshold, i.Hosts[0].Metadata = true, map[string]string{"gRPC_port": "abc"}
		be.m.push(be.m.session, "G", "web", &i, nil)
		synctest.Wait()
		if p := be.b.Held.Problems["service public/G/web"]; !strings.Contains(p, "protectThreshold") || !strings.Contains(p, "abc") {
			t.Errorf("both at once: problem %q", p)
		}
	})
}

// TestManyInFlight shows that no more than so many requests are under way at
// once.
func TestManyInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{})
		be.src.hold = make(chan struct{})
		be.session() // with 4 workers
		for i := range 100 {
			be.m.add(serviceID{publicNamespace, "G", fmt.Sprint(i)})
		}
		synctest.Wait()
		if n := len(be.src.took()); n != 4 {
			t.Errorf("%d requests under way, want 4", n)
		}
		close(be.src.hold)
		synctest.Wait()
		if n := len(be.src.took()); n != 96 {
			t.Errorf("%d more requests, want 96", n)
		}
	})
}

// TestNamespaces shows which empty lists are believed, by what a server says of
// its namespaces.
func TestNamespaces(t *testing.T) {
	for name, test := range map[string]struct {
		status int
		body   string
		accept bool
		want   string
	}{
		"it exists":            {200, `{"code":0,"data":[{"namespace":"dev"}]}`, false, ""},
		"it does not":          {200, `{"code":200,"data":[{"namespace":"other"}]}`, false, "does not exist; write its id"},
		"refused":              {403, `{"code":403}`, false, "cannot be asked"},
		"refused in envelope":  {200, `{"code":403,"message":"no"}`, false, "cannot be asked"},
		"an error page":        {200, `<html>login</html>`, false, "not JSON"},
		"no such API":          {404, ``, false, "cannot be asked"},
		"refused, but allowed": {403, ``, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(test.status)
				_, _ = w.Write([]byte(test.body))
			}))
			defer s.Close()
			target, err := parseServer(s.URL, "/nacos", 1000)
			if err != nil {
				t.Fatal(err)
			}
			be := newBench(t, Config{})
			c := Config{AcceptEmpty: test.accept}
			d := &discovery{
				config: c, log: be.m.log, mirror: be.m, state: be.m.state,
				api: &httpAPI{server: target, client: testClient(t), auth: newAuth(c, testClient(t), be.m.log)},
			}
			ok, _ := d.complete(t.Context(), &scope{namespace: "dev", wire: "dev", arrived: be.m.state.listing.Expect()}, nil, time.Now())
			if ok != (test.want == "") || be.b.Held.Synced != ok {
				t.Errorf("believed %t, synced %t", ok, be.b.Held.Synced)
			}
			be.b.WantDegraded(t, name, test.want)
		})
	}
}

// TestListsThatAreNone shows that error pages, refusals and lists that change
// while they are read remove nothing over the HTTP API.
func TestListsThatAreNone(t *testing.T) {
	var mu sync.Mutex
	answers := []string{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(r.URL.Path, "/v3/") {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		a := answers[0]
		if len(answers) > 1 {
			answers = answers[1:]
		}
		if a == "403" {
			w.WriteHeader(http.StatusForbidden)
		}
		_, _ = w.Write([]byte(a))
	}))
	defer s.Close()
	target, err := parseServer(s.URL, "/nacos", 1000)
	if err != nil {
		t.Fatal(err)
	}
	be := newBench(t, Config{})
	c := Config{}.withDefaults()
	d := &discovery{
		config: c, log: be.m.log, mirror: be.m, state: be.m.state,
		api: &httpAPI{server: target, client: testClient(t), auth: newAuth(c, testClient(t), be.m.log)},
	}
	l := lister{d: d, scope: &scope{namespace: publicNamespace, wire: publicNamespace, arrived: be.m.state.listing.Expect()}}
	listed := func() []string {
		var names []string
		for id, s := range be.m.services {
			if s.listed {
				names = append(names, id.name)
			}
		}
		slices.Sort(names)
		return names
	}
	for _, step := range []struct {
		what    string
		answers []string
		wrong   bool
		want    string
	}{
		{"a list", []string{`{"count":2,"serviceList":[{"name":"a","groupName":"G"},{"name":"b","groupName":"G"}]}`}, false, "a b"},
		{"an error page", []string{`<html>`}, true, "a b"},
		{"a refusal", []string{"403"}, true, "a b"},
		{"no list at all", []string{`{}`}, true, "a b"},
		{"a half", []string{`{"count":3,"serviceList":[{"name":"c","groupName":"G"}]}`, `{"count":3,"serviceList":[]}`}, true, "a b c"},
		{"a list again", []string{`{"count":1,"serviceList":[{"name":"b","groupName":"G"}]}`}, false, "b"},
		{"pages that do not agree", []string{
			`{"count":501,"serviceList":[{"name":"d","groupName":"G"}]}`, `{"count":502,"serviceList":[{"name":"e","groupName":"G"}]}`,
		}, true, "b d e"},
	} {
		mu.Lock()
		answers = slices.Clone(step.answers)
		mu.Unlock()
		_, err := l.once(t.Context())
		if (err != nil) != step.wrong {
			t.Errorf("%s: error %v", step.what, err)
		}
		if diff := cmp.Diff(strings.Fields(step.want), slices.Clip(append([]string{}, listed()...))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.what, diff)
		}
	}
	if n := len(be.m.services); n != 5 {
		t.Errorf("%d services are known, want 5: a list alone removes nothing", n)
	}
}

// TestExcludedGroups shows that services of excluded groups are left out, and
// that their groups are listed while there are any.
func TestExcludedGroups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{ExcludeGroups: DefaultConfig.ExcludeGroups})
		be.session()
		tool := serviceID{publicNamespace, "mcp-endpoints", "tool"}
		want := func(when, want string) {
			t.Helper()
			be.b.Look(func(h *plugintest.Held) {
				if got := h.LeftOut["config.exclude_groups public"]; got != want {
					t.Errorf("%s: %q, want %q", when, got, want)
				}
			})
			if n := len(be.m.services); n != 1 {
				t.Errorf("%s: %d services are followed, want 1", when, n)
			}
		}
		be.list(web, tool)
		want("listed", `services of 1 groups left out by config.exclude_groups: ["mcp-endpoints"]`)
		be.m.add(serviceID{publicNamespace, "agent-endpoints", "agent"})
		want("announced", `services of 2 groups left out by config.exclude_groups: ["agent-endpoints" "mcp-endpoints"]`)
		be.list(web)
		want("listed again", "")
	})
}

// TestLeftOut shows that names that the selection leaves out are listed by
// their number, as lists and announcements have them.
func TestLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{Services: plugin.Selection{Exclude: []string{"d*"}}})
		be.session()
		be.list(web, db)
		want := func(when, want string) {
			t.Helper()
			be.b.Look(func(h *plugintest.Held) {
				if got := h.LeftOut["config.services.exclude public"]; got != want {
					t.Errorf("%s: %q, want %q", when, got, want)
				}
			})
		}
		want("listed", `1 name left out by config.services.exclude: "db"`)
		be.m.add(serviceID{publicNamespace, "G", "dns"})
		want("announced", `2 names left out by config.services.exclude: "db", "dns"`)
		be.m.missing(db)
		want("gone", `1 name left out by config.services.exclude: "dns"`)
		be.list(web)
		want("listed again", "")
	})
}

// TestLeftOutOfOneInterface shows that an interface is left out for as long as
// one of its versions is there, and that its consumers do not count.
func TestLeftOutOfOneInterface(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		be := newBench(t, Config{Dubbo: true, Services: plugin.Selection{Exclude: []string{"org.*"}}})
		be.session()
		of := func(name string) serviceID { return serviceID{publicNamespace, "G", name} }
		one, two := of("providers:org.Shop:1.0.0:"), of("providers:org.Shop:2.0.0:")
		be.list(web, one, two)
		want := func(when, want string) {
			t.Helper()
			be.b.Look(func(h *plugintest.Held) {
				if got := h.LeftOut["config.services.exclude public"]; got != want {
					t.Errorf("%s: %q, want %q", when, got, want)
				}
			})
		}
		const left = `1 name left out by config.services.exclude: "org.Shop"`
		want("listed", left)
		be.m.missing(of("consumers:org.Shop:1.0.0:"))
		want("a consumer is gone", left)
		be.m.missing(one)
		be.m.missing(one)
		want("one of two is gone", left)
		be.m.missing(two)
		want("both are gone", "")
	})
}
