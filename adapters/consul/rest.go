package consul

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/adapters/consul/plan"
	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// ownQueries is the number of waiting queries of one scope besides those of
	// the plan: the listing, the service-defaults and the sensors. That of
	// Connect's roots takes one of those that do not wait.
	ownQueries = 5
	// manyFetches bounds concurrent queries that do not wait, if they share
	// connections: the first listing of many services, or all of them after an
	// outage.
	manyFetches = 48
	// leastConnections is the minimum of max_connections for one scope: its own
	// queries, some that do not wait, and some watches.
	leastConnections = 16
	// quickMost is how many immediate answers in a row delay the next query,
	// and leave a group to sweeps.
	quickMost = 16
	// noTag is a tag that no instance has, so that an answer contains only an
	// index.
	noTag = "isthmus-asks-for-the-index"
	// ofNodes selects node checks, which concern all services of the node.
	ofNodes = `ServiceID == ""`
	// nothingOfServices selects no service of a node, so that an answer
	// contains only an index.
	nothingOfServices = `Service == ""`
)

// turns executes the plan of a registry.
type turns struct {
	// multiplexed reports that the last answer came over HTTP/2. Queries then
	// share connections, every watch waits, and the plan is unused.
	multiplexed atomic.Bool
	// many and few are semaphores for queries that do not wait: many if
	// connections are shared, few if not.
	many, few chan struct{}
	// connections bounds all connections.
	connections int
	// detail receives a description of how services share places, "" if none
	// does; it may be nil.
	detail func(string)
	// kick wakes run. It has capacity one.
	kick chan struct{}

	mu   sync.Mutex // guards everything below
	plan plan.Plan
	told time.Time // when detail was last told something, zero if that was ""
}

// newTurns divides the connections of a registry among its scopes.
func newTurns(connections, scopes int) *turns {
	connections = max(connections, needed(scopes))
	left := connections - scopes*ownQueries
	few := min(max(left/8, 4), manyFetches)
	return &turns{
		many: make(chan struct{}, manyFetches), few: make(chan struct{}, few), connections: connections,
		kick: make(chan struct{}, 1), plan: plan.New(left-few, few*3/4),
	}
}

// more takes connections from the services for the queries of one more scope
// than there were at the start.
func (t *turns) more() {
	t.do(func(p *plan.Plan) []*plan.Turn {
		p.Take(ownQueries)
		return nil
	})
}

// needed returns the minimum number of connections for the scopes.
func needed(scopes int) int { return leastConnections + (scopes-1)*ownQueries }

// fetch waits until one more query that does not wait may begin. The query's
// end must call done.
func (t *turns) fetch(ctx context.Context) (done func(), err error) {
	places := t.few
	if t.multiplexed.Load() {
		places = t.many
	}
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// do calls fn on the plan, wakes the services that it returns, and makes run
// take the next step.
func (t *turns) do(fn func(p *plan.Plan) (wake []*plan.Turn)) {
	t.mu.Lock()
	wake := fn(&t.plan)
	t.mu.Unlock()
	for _, w := range wake {
		signal(w.Wake)
	}
	signal(t.kick)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// wait returns how long a query on a connection may wait, at most d.
func (t *turns) wait(d time.Duration) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.multiplexed.Load() || t.plan.Settled() {
		return d
	}
	return min(d, plan.TurnTime)
}

// run executes the plan for the scopes, by their numbers, until ctx ends, and
// returns after all its goroutines have ended.
func (t *turns) run(ctx context.Context, scopes func(number int) *scope) {
	var wg sync.WaitGroup
	defer wg.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		now := time.Now()
		var s plan.Steps
		if !t.multiplexed.Load() {
			t.mu.Lock()
			s = t.plan.Step(now)
			t.mu.Unlock()
		}
		for _, w := range s.Wake {
			signal(w.Wake)
		}
		for _, g := range s.Start {
			// Owned by run; ends when the plan withdraws the group's place.
			wg.Go(func() { scopes(g.Scope).follow(ctx, g) })
		}
		for _, l := range s.Look {
			// Owned by run; ends with the answer.
			wg.Go(func() {
				if l.Node != nil {
					scopes(l.Node.Scope).look(ctx, l)
				} else {
					l.Owner.(*watch).look(ctx, l) //nolint:forcetypeassert // newWatch set it
				}
			})
		}
		t.tell(now)
		timer.Stop()
		if !s.At.IsZero() {
			timer.Reset(time.Until(s.At))
		}
		select {
		case <-t.kick:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
}

// tell reports how services that share places are followed, and how to improve
// it.
func (t *turns) tell(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	crowd, crowded := t.plan.Crowd()
	crowded = crowded && !t.multiplexed.Load()
	if t.detail == nil || crowded == !t.told.IsZero() && (!crowded || now.Sub(t.told) < plan.TurnTime) {
		return
	}
	t.told = time.Time{}
	if !crowded {
		t.detail("")
		return
	}
	t.told = now
	t.detail(fmt.Sprintf("%d services share %d connections: a change of health is found about %d ms late, any other %d ms; "+
		"an https address, or limits.http_max_conns_per_client of %d with max_connections %d, would save that",
		crowd.Services, crowd.Places, crowd.Delay.Milliseconds(), crowd.Period.Milliseconds(),
		crowd.Services+t.connections, crowd.Services+t.connections-crowd.Places))
}

// rest waits until the watch may wait on a connection, or must request the
// service in full: then index is 0.
func (w *watch) rest(ctx context.Context) error {
	turns := w.s.clients.turns
	if turns.multiplexed.Load() {
		return nil
	}
	ctx, done := w.interruptible(ctx)
	defer done()
	due := time.Now().Add(spread(w.wait))
	turns.do(func(p *plan.Plan) []*plan.Turn {
		index := w.index
		if w.streamed {
			index = 0
		}
		p.Rest(&w.turn, index, w.nodes, due)
		return nil
	})
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	for {
		turns.mu.Lock()
		next := turns.plan.Decide(&w.turn, time.Now())
		crowd, _ := turns.plan.Crowd()
		turns.mu.Unlock()
		switch {
		case next == plan.DecideHold:
			return nil
		case next == plan.DecideAsk, w.streamed:
			// Indexes of streams cannot be compared with those of looks.
			w.index = 0
			return nil
		}
		w.s.resting.Do(func() { close(w.s.rests) })
		if crowd.Services > crowd.Places { // else it waits until the groups are divided
			w.s.crowding.Do(func() {
				w.s.log.Info("more services than connections; the others share them", slog.String("catalog", w.s.id),
					slog.Int("services", crowd.Services), slog.Int("connections", crowd.Places), slog.Int("max_connections", turns.connections))
			})
		}
		select {
		case <-w.turn.Wake:
		case <-timer.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// look queries the index of the service and reports it to the plan. After a
// failure the service is requested in full, which reports the error.
func (w *watch) look(ctx context.Context, l plan.Look) {
	var index uint64
	err := w.s.query(ctx, 0, 0, func(q *api.QueryOptions) (*api.QueryMeta, error) {
		// Without consistency, which costs the followers a round trip to the
		// leader each time: what a new leader does not have yet wakes the table
		// queries again once it does.
		q.RequireConsistent = false
		_, meta, err := w.s.clients.of(w.slot).Catalog().Service(w.name, noTag, q)
		if err == nil {
			index = meta.LastIndex
		}
		return meta, err
	})
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		index = 0
	}
	w.s.clients.turns.do(func(p *plan.Plan) []*plan.Turn {
		if p.Looked(l, index, time.Now()) {
			return []*plan.Turn{l.Turn}
		}
		return nil
	})
}

// look queries the index of a node and, if it differs, the services registered
// there, and reports them to the plan.
func (s *scope) look(ctx context.Context, l plan.Look) {
	var index uint64
	var there map[string]plan.Registered
	ask := func(filter string) error {
		return s.query(ctx, 0, 0, func(q *api.QueryOptions) (*api.QueryMeta, error) {
			q.RequireConsistent, q.Filter = false, filter // see watch.look
			answer, meta, err := s.clients.of(s.slot).Catalog().NodeServiceList(l.Node.Name, q)
			if err != nil {
				return meta, err
			}
			if meta.ResultsFilteredByACLs {
				return meta, errFiltered
			}
			index, there = meta.LastIndex, make(map[string]plan.Registered, len(answer.Services))
			for _, i := range answer.Services {
				name := strings.ToLower(i.Service)
				there[name] = plan.Registered{Instances: there[name].Instances + 1, Index: max(there[name].Index, i.ModifyIndex)}
			}
			return meta, nil
		})
	}
	err := ask(nothingOfServices)
	if err == nil && l.News(index) {
		err = ask("")
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		index = 0
	}
	s.clients.turns.do(func(p *plan.Plan) []*plan.Turn { return p.LookedNode(l, index, there, time.Now()) })
}

// follow waits for changes of checks in a group until the plan withdraws its
// place or ctx ends.
func (s *scope) follow(ctx context.Context, g *plan.Group) {
	turns := s.clients.turns
	if s.peer != "" {
		s.visit(ctx, g)
		return
	}
	s.sense(ctx, fmt.Sprintf("%s checks %s", s.id, g.Prefix), g, 0, func(c *api.Client, q *api.QueryOptions) (any, *api.QueryMeta, error) {
		checks, meta, err := c.Health().Checks(g.Probe, q)
		return checks, meta, err
	}, func(any, bool) {
		turns.do(func(p *plan.Plan) []*plan.Turn {
			p.Woke(g, time.Now())
			return nil
		})
	})
}

// visit takes the place of follow for imported services, whose checks cannot be
// waited for by prefix: all members are looked at, at an interval.
func (s *scope) visit(ctx context.Context, g *plan.Group) {
	turns := s.clients.turns
	for {
		turns.mu.Lock()
		keep := turns.plan.Keep(g) && !turns.multiplexed.Load()
		turns.mu.Unlock()
		if !keep {
			signal(turns.kick)
			return
		}
		turns.do(func(p *plan.Plan) []*plan.Turn { p.Woke(g, time.Now()); return nil })
		if !plugin.Pause(ctx, listEvery, nil) {
			return
		}
	}
}

// serveRests starts the queries that resting watches need besides their groups.
// They are owned by the scope, which waits for them, and end with ctx.
func (s *scope) serveRests(ctx context.Context) {
	if s.peer != "" {
		// Consul tells neither the nodes nor the checks of imported instances;
		// see visit, which needs no sweep.
		s.clients.turns.do(func(p *plan.Plan) []*plan.Turn { p.SetNodes(s.number, map[string]bool{}); return nil })
		return
	}
	start := func(part string, every time.Duration, call sensor, tell func(answer any, begun bool)) {
		s.wg.Go(func() {
			select {
			case <-s.rests:
				s.sense(ctx, s.id+" "+part, nil, every, call, tell)
			case <-ctx.Done():
			}
		})
	}
	for _, state := range []string{api.HealthWarning, api.HealthCritical} {
		failing := map[plan.NodeCheck]bool{}
		start(state+" nodes", 0, func(c *api.Client, q *api.QueryOptions) (any, *api.QueryMeta, error) {
			q.Filter = ofNodes
			checks, meta, err := c.Health().State(state, q)
			return checks, meta, err
		}, func(answer any, begun bool) {
			now := map[plan.NodeCheck]bool{}
			for _, c := range answer.(api.HealthChecks) { //nolint:forcetypeassert // as made above
				now[plan.NodeCheck{Node: c.Node, Check: c.CheckID}] = true
			}
			before := failing
			if failing = now; begun {
				s.stirred(0)
				return
			}
			s.clients.turns.do(func(p *plan.Plan) (wake []*plan.Turn) {
				p.Doubt()
				return p.NodesChanged(s.number, before, now)
			})
		})
	}
	start("nodes", listEvery, func(c *api.Client, q *api.QueryOptions) (any, *api.QueryMeta, error) {
		nodes, meta, err := c.Catalog().Nodes(q)
		if err != nil || meta.ResultsFilteredByACLs || s.namespace != "" || s.partition != "" {
			return map[string]bool(nil), meta, err // nodes do not show all changes of these services
		}
		names := make(map[string]bool, len(nodes))
		for _, n := range nodes {
			if path.Clean("/"+n.Node) != "/"+n.Node {
				return map[string]bool(nil), meta, nil // the node's name cannot be queried
			}
			names[n.Node] = true
		}
		return names, meta, err
	}, func(answer any, _ bool) {
		s.clients.turns.do(func(p *plan.Plan) []*plan.Turn {
			p.SetNodes(s.number, answer.(map[string]bool)) //nolint:forcetypeassert // as made above
			p.Stir(s.number, 0, time.Now())
			return nil
		})
	})
}

// stirred requests a sweep: a table was changed at an index, or with 0 at an
// unknown one.
func (s *scope) stirred(index uint64) {
	s.clients.turns.do(func(p *plan.Plan) []*plan.Turn {
		p.Stir(s.number, index, time.Now())
		return nil
	})
}

// sensor is a query that waits for a change.
type sensor func(*api.Client, *api.QueryOptions) (answer any, meta *api.QueryMeta, err error)

// sense repeats a query until ctx ends, or until its group loses its place, and
// calls tell for each change. begun is set for the first answer, and the first
// one after an error: earlier changes are unknown.
func (s *scope) sense(ctx context.Context, part string, g *plan.Group, every time.Duration, call sensor, tell func(answer any, begun bool)) {
	turns := s.clients.turns
	var (
		index, epoch uint64
		broken       bool // no answer since the last error
		quick        int  // immediate answers in a row
		retry        = plugin.Backoff{First: 250 * time.Millisecond, Most: 5 * time.Second}
	)
	defer s.state.set(part, nil)
	for {
		if g != nil {
			turns.mu.Lock()
			keep := turns.plan.Keep(g) && !turns.multiplexed.Load()
			turns.mu.Unlock()
			if !keep {
				signal(turns.kick)
				return
			}
		}
		asking, end := context.WithCancelCause(ctx)
		s.mu.Lock()
		if s.epoch != epoch {
			index, epoch = 0, s.epoch
		}
		s.senses[part] = end
		back := s.back
		s.mu.Unlock()
		asked := time.Now()
		var answer any
		var now uint64
		wait := time.Duration(s.config.Wait)
		if g != nil {
			wait = turns.wait(wait)
		}
		err := s.query(asking, index, wait, func(q *api.QueryOptions) (meta *api.QueryMeta, err error) {
			if answer, meta, err = call(s.clients.of(s.slot), q); err == nil {
				now = meta.LastIndex
			}
			return meta, err
		})
		end(nil)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errPoked):
			index = 0
		case errors.Is(err, errEnded):
			continue
		case errors.Is(err, errNotOffered):
			return
		case err != nil:
			f := s.located(classify(err, s.clients.at()))
			if !broken && s.again(f, index) {
				index, broken = 0, true
				continue
			}
			index, broken = 0, true
			if f.outage {
				s.suspect()
			}
			s.limited(f, g, nil)
			s.state.set(part, f)
			if !plugin.Pause(ctx, retry.Next(), back) {
				return
			}
			continue
		default:
			broken = false
			retry.Reset()
			s.state.set(part, nil)
			// A change elsewhere in the table ends a query that had not begun
			// to wait.
			if quick++; time.Since(asked) > 20*time.Millisecond {
				quick = 0
			}
			begun := index == 0 || now < index
			switch {
			case quick > quickMost && g != nil:
				s.stirred(0)
			case begun || now != index:
				tell(answer, begun)
			}
			index = now
		}
		pause := every
		if quick > quickMost {
			// Changes are too frequent for this query to be useful.
			pause = max(every, min(10*time.Millisecond<<min(quick-quickMost, 5), time.Second))
			if g != nil && quick%2 == 0 {
				index = 0 // or a change during the pause would end the next query at once
			}
		}
		if pause > 0 && !plugin.Pause(ctx, pause, nil) {
			return
		}
	}
}

// limited records a fault that may mean that Consul refused a connection: that
// of a group, of a service, or with neither of another query.
func (s *scope) limited(f *fault, g *plan.Group, t *plan.Turn) {
	if !f.connections || s.clients.turns.multiplexed.Load() {
		return
	}
	turns, news := s.clients.turns, false
	turns.do(func(p *plan.Plan) []*plan.Turn {
		if t != nil {
			g = t.Group()
		}
		news = p.Refused(g, turns.connections-p.Most()-cap(turns.few), cap(turns.few), time.Now())
		return nil
	})
	if news {
		s.log.Warn("consul refuses more connections; more watches share one", slog.String("catalog", s.id), slog.Any("err", f.err))
	}
}
