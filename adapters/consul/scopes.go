package consul

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// findEvery is the interval of queries for all partitions and namespaces, which
// Consul wakes no query for.
const findEvery = 30 * time.Second

// every stands for all partitions or all namespaces.
const every = "*"

// location is a part of a catalog. Empty fields are the agent's, or the
// token's.
type location struct{ datacenter, partition, namespace string }

// scopes are the scopes of a registry. Those of all partitions or namespaces
// come and go.
type scopes struct {
	a       *Adapter
	st      *state
	catalog plugin.Catalog

	wg sync.WaitGroup

	mu  sync.Mutex // guards all
	all []*scope   // by number, ended ones included
}

// followed is a scope that runs.
type followed struct {
	*scope
	end func() // returns once it has ended
}

// number returns the scope of a number.
func (s *scopes) number(n int) *scope {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[n]
}

// run follows all scopes until ctx ends.
func (s *scopes) run(ctx context.Context) {
	defer s.wg.Wait()
	c := s.a.config
	or := func(names []string, otherwise string) []string {
		if len(names) == 0 {
			return []string{otherwise}
		}
		return names
	}
	var fixed, find []location
	for _, dc := range or(c.Datacenters, "") {
		for _, partition := range or(c.Partitions, c.Partition) {
			for _, ns := range or(c.Namespaces, "") {
				if at := (location{dc, partition, ns}); partition == every || ns == every {
					find = append(find, at)
				} else {
					fixed = append(fixed, at)
				}
			}
		}
	}
	// All are awaited before any starts.
	finding := make([]func(), len(find))
	for i := range find {
		finding[i] = s.st.listing.Expect()
	}
	for _, at := range fixed {
		s.add(at, "")
	}
	for _, peer := range c.Peers {
		s.add(location{partition: c.Partition}, peer)
	}
	for _, f := range s.all {
		s.start(ctx, f)
	}
	for i, at := range find {
		f := &finder{scopes: s, within: at, arrived: finding[i], here: map[location]*followed{}}
		// Owned by run; ends with ctx.
		s.wg.Go(func() { f.run(ctx) })
	}
}

// add makes a scope.
func (s *scopes) add(at location, peer string) *scope {
	s.mu.Lock()
	defer s.mu.Unlock()
	added := newScope(s.a, s.st, s.catalog, len(s.all), at, peer)
	if s.all = append(s.all, added); len(s.all) > s.a.config.scopes() {
		s.a.clients.turns.more()
	}
	return added
}

// start runs a scope.
func (s *scopes) start(ctx context.Context, added *scope) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	// Owned by run; ends with ctx, after the watches of its services.
	s.wg.Go(func() {
		defer close(ended)
		defer cancel()
		added.run(ctx)
	})
	return func() {
		cancel()
		<-ended
	}
}

// finder follows all partitions and namespaces of a place.
type finder struct {
	*scopes
	within  location // with every as its partition, its namespace or both
	arrived func()
	here    map[location]*followed
}

// run looks for partitions and namespaces until ctx ends.
func (f *finder) run(ctx context.Context) {
	part := fmt.Sprintf("catalog %s partitions and namespaces", f.within.datacenter)
	retry := plugin.Backoff{First: 250 * time.Millisecond, Most: 5 * time.Second}
	for {
		found, err := f.find(ctx)
		if ctx.Err() != nil {
			return
		}
		wait := findEvery
		if err != nil {
			f.st.set(part, &fault{kind: classify(err, f.a.clients.at()).kind, err: fmt.Errorf("partitions or namespaces: %w", classify(err, f.a.clients.at()))})
			wait = retry.Next()
		} else {
			f.st.set(part, nil)
			retry.Reset()
			f.accept(ctx, found)
		}
		if !plugin.Pause(ctx, wait, nil) {
			return
		}
	}
}

// errCommunity is the answer of a server without partitions and namespaces.
var errCommunity = &fault{kind: faultRequest, err: errors.New(
	"consul has no partitions or namespaces to list, which only Consul Enterprise has; take partitions and namespaces out of the configuration")}

// find returns the places that there are.
func (f *finder) find(ctx context.Context) (map[location]bool, error) {
	slot := f.a.clients.acquire()
	defer f.a.clients.release(slot)
	client := f.a.clients.of(slot)
	ask := func(partition string, call func(q *api.QueryOptions) error) error {
		ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout, errAnswerTimeout)
		defer cancel()
		err := call((&api.QueryOptions{Datacenter: f.within.datacenter, Partition: partition}).WithContext(ctx))
		status, ok := errors.AsType[api.StatusError](err)
		if ok && (status.Code == http.StatusNotFound || status.Code == http.StatusMethodNotAllowed) {
			return errCommunity
		}
		return err
	}
	partitions := []string{f.within.partition}
	if f.within.partition == every {
		partitions = nil
		if err := ask("", func(q *api.QueryOptions) error {
			all, _, err := client.Partitions().List(q.Context(), q)
			for _, p := range all {
				if p.DeletedAt == nil {
					partitions = append(partitions, p.Name)
				}
			}
			return err
		}); err != nil {
			return nil, err
		}
	}
	found := map[location]bool{}
	for _, partition := range partitions {
		at := location{f.within.datacenter, partition, f.within.namespace}
		if at.namespace != every {
			found[at] = true
			continue
		}
		if err := ask(partition, func(q *api.QueryOptions) error {
			all, _, err := client.Namespaces().List(q)
			for _, n := range all {
				if n.DeletedAt == nil {
					found[location{at.datacenter, partition, n.Name}] = true
				}
			}
			return err
		}); err != nil {
			return nil, err
		}
	}
	if len(found) == 0 {
		return nil, &fault{kind: faultFiltered, err: errors.New("consul lists none, so the token may read none; give it a policy for partitions and namespaces")}
	}
	return found, nil
}

// accept begins to follow new places. A place that is gone is followed until
// its own answers have removed all services, as a list may lack what the token
// may not see.
func (f *finder) accept(ctx context.Context, found map[location]bool) {
	var added []*followed
	for at := range found {
		if f.here[at] == nil {
			f.here[at] = &followed{scope: f.add(at, "")}
			added = append(added, f.here[at])
		}
	}
	for _, s := range added {
		s.end = f.start(ctx, s.scope)
	}
	for at, s := range f.here {
		if !found[at] && s.idle() {
			f.a.env.Log.Info("no longer followed, as it is gone", slog.String("catalog", s.id))
			s.end()
			s.state.set(s.id, nil)
			s.arrived()
			delete(f.here, at)
		}
	}
	if len(added) > 0 {
		f.a.env.Log.Info("partitions or namespaces found", slog.Int("new", len(added)), slog.String("datacenter", cmp.Or(f.within.datacenter, "the agent's")))
	}
	f.arrived()
}
