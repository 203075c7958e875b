package consul

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// A watch that has no connection to wait on rests, and is told to look when anything in the catalog has changed. What an answer about a service
// says comes from three tables of Consul's: services, checks and nodes. The scope has one blocking query on each of them, and none of them can change
// without waking it: the listing of services, which there is anyway, and two more with a filter that leaves nothing of their answers. To look is
// to ask for the index of the service alone, with such a filter too; only where that is another one than before is the service asked for. So
// nothing is asked for while nothing changes, a change is found within one sweep over the watches that rest, and a service is
// asked for in full as often as it would be by a blocking query.

const (
	// probeEvery bounds the rate of these looks: one sweep begins so long after the one before for each watch that rests, and listEvery at least.
	probeEvery = 2 * time.Millisecond
	// nothingOfService, nothingOfTable are filters that leave nothing of an answer about instances, and of one about checks or nodes.
	nothingOfService = `Node.Node == ""`
	nothingOfTable   = `Node == ""`
)

// rest waits without a connection until the watch is given one, or until there is something to ask for: then index is 0.
func (w *watch) rest(ctx context.Context) error {
	s := w.s
	if w.streamed {
		// Streams have indexes of their own, which say nothing about that of the next look.
		w.index = 0
		return nil
	}
	s.resting.Do(func() {
		s.log.Info("more services than connections; those beyond take turns", slog.String("catalog", s.id),
			slog.Int("max_connections", s.clients.turns.connections))
		close(s.rests)
	})
	ctx, done := w.interruptible(ctx)
	defer done()
	end := time.NewTimer(spread(w.wait))
	defer end.Stop()
	for {
		epoch, sweep, look := s.lookout()
		switch {
		case epoch != w.epoch:
			w.index = 0
			return nil
		case sweep != w.sweep:
			w.sweep = sweep
			same, err := w.look(ctx)
			if err != nil {
				return err
			}
			if !same {
				w.index, w.found = 0, true
				return nil
			}
			continue
		}
		select {
		case <-look:
		case <-w.turn.given:
			return nil
		case <-end.C:
			w.index = 0
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// look asks whether the service is as it was when it was last asked for.
func (w *watch) look(ctx context.Context) (same bool, err error) {
	s := w.s
	var meta *api.QueryMeta
	err = s.query(ctx, 0, 0, func(q *api.QueryOptions) (*api.QueryMeta, error) {
		q.Filter = nothingOfService
		// Not of the leader's own certainty, which costs its followers a round trip each time: what a new leader does not know yet wakes the
		// queries on the tables again once it does.
		q.RequireConsistent = false
		var err error
		_, meta, err = s.clients.of(w.slot).Health().Service(w.name, "", false, q)
		return meta, err
	})
	if err != nil {
		return false, err
	}
	return meta.LastIndex == w.index && meta.ResultsFilteredByACLs == w.filtered, nil
}

// serveRests starts what tells watches that rest to look. All of it is owned by the scope, which waits for it, and ends with ctx.
func (s *scope) serveRests(ctx context.Context) {
	s.wg.Go(func() { s.sweeps(ctx) })
	checks := func(c *api.Client, q *api.QueryOptions) (*api.QueryMeta, error) {
		_, meta, err := c.Health().State(api.HealthAny, q)
		return meta, err
	}
	nodes := func(c *api.Client, q *api.QueryOptions) (*api.QueryMeta, error) {
		_, meta, err := c.Catalog().Nodes(q)
		return meta, err
	}
	s.wg.Go(func() { s.sense(ctx, s.id+" checks", checks) })
	s.wg.Go(func() { s.sense(ctx, s.id+" nodes", nodes) })
}

// lookout returns the epoch, and the number of the last sweep with what is closed when the next one begins.
func (s *scope) lookout() (epoch, sweep uint64, next <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.epoch, s.sweep, s.nextSweep
}

// stirred asks for a sweep: a query on a table was answered at an index. With begun it is the first one after an error, or at all, and what changed
// before it is unknown. Otherwise an index that another table's answer had already is no news, since it was seen before that sweep began.
func (s *scope) stirred(index uint64, begun bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !begun && index <= s.swept {
		return
	}
	s.swept = index
	select {
	case s.stir <- struct{}{}:
	default:
	}
}

// sweeps begins a sweep when one was asked for, until ctx ends.
func (s *scope) sweeps(ctx context.Context) {
	for {
		select {
		case <-s.stir:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		s.sweep++
		close(s.nextSweep)
		s.nextSweep = make(chan struct{})
		s.mu.Unlock()
		if !plugin.Pause(ctx, max(listEvery, time.Duration(s.clients.turns.resting())*probeEvery), nil) {
			return
		}
	}
}

// sense waits for changes of one table, once a watch rests and until ctx ends, and asks for a sweep at each.
func (s *scope) sense(ctx context.Context, part string, call func(*api.Client, *api.QueryOptions) (*api.QueryMeta, error)) {
	select {
	case <-s.rests:
	case <-ctx.Done():
		return
	}
	var (
		index, epoch uint64
		broken       bool // no answer since the last error
		retry        = plugin.Backoff{First: 250 * time.Millisecond, Most: 5 * time.Second}
	)
	for {
		asking, end := context.WithCancelCause(ctx)
		s.mu.Lock()
		if s.epoch != epoch {
			index, epoch = 0, s.epoch
		}
		s.senses[part] = end
		back := s.back
		s.mu.Unlock()
		var meta *api.QueryMeta
		err := s.query(asking, index, time.Duration(s.config.Wait), func(q *api.QueryOptions) (*api.QueryMeta, error) {
			q.Filter = nothingOfTable
			var err error
			meta, err = call(s.clients.of(s.slot), q)
			return meta, err
		})
		end(nil)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errPoked):
			index = 0
		case err != nil:
			f := s.located(classify(err, s.target))
			if f.interrupted && !broken && index > 0 {
				// See scope.run: whether that was an outage shows with the next query, sent at once.
				index, broken = 0, true
				continue
			}
			index, broken = 0, true
			if f.outage {
				s.suspect()
			}
			s.limited(f, nil)
			s.state.set(part, f)
			if !plugin.Pause(ctx, retry.Next(), back) {
				return
			}
			continue
		default:
			broken = false
			retry.Reset()
			s.state.set(part, nil)
			if index != meta.LastIndex {
				s.stirred(meta.LastIndex, index == 0 || meta.LastIndex < index)
			}
			index = meta.LastIndex
		}
		if !plugin.Pause(ctx, listEvery, nil) {
			return
		}
	}
}

// limited takes note of a fault that may say that Consul took no further connection: that of a watch, or with nil of another query.
func (s *scope) limited(f *fault, w *turn) {
	if f.connections && s.clients.turns.refused(w) {
		s.log.Warn("consul refuses more connections; fewer watches hold one", slog.String("catalog", s.id), slog.Any("err", f.err))
	}
}
