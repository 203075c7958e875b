package consul

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/adapters/consul/plan"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// watch follows one service. Its goroutine owns it, except the fields guarded
// by scope.mu.
type watch struct {
	s    *scope
	name string
	key  registry.Key
	id   string // identifies the watch in states

	slot *slot
	turn plan.Turn
	// known are the instances of the last answer that counts, sorted by ID, if
	// sidecars are published; else Grace has them.
	known []registry.Instance
	// destinations are those of the instances, by ID, only if sidecars are
	// published. moved reports that the catalog may have others.
	destinations map[string]destined
	moved        bool
	nodes        map[string]int // number of instances by node, selected or not
	// arrived must be called with each complete answer.
	arrived func()
	// index is where the next query waits, valid only in epoch; 0 does not
	// wait.
	index, epoch uint64
	// highest is the last answer's index, retained on errors, by whether the
	// answer came from a stream of Consul: those have separate indexes.
	highest map[bool]uint64
	// streamed reports that index is one of Consul's streams.
	streamed bool
	// wait is how long the next query waits.
	wait time.Duration
	// broken reports that there was no answer since the last error.
	broken bool
	retry  plugin.Backoff
	// odd counts consecutive empty answers about a listed service.
	odd int
	// idle counts consecutive immediate wakes without a change.
	idle int

	// Guarded by scope.mu:
	seen   time.Time               // when a listing last contained the service
	absent bool                    // the last complete listing lacks the service
	again  bool                    // the next query starts at index 0
	cancel context.CancelCauseFunc // cancels the query in progress; nil if there is none
}

func newWatch(s *scope, name string, now time.Time) *watch {
	key := s.key(name)
	w := &watch{
		s: s, name: name, key: key, id: "service " + key.String(), seen: now,
		highest: map[bool]uint64{},
		turn:    plan.NewTurn(s.number, name),
		arrived: s.state.listing.Expect(),
		retry:   plugin.Backoff{First: 500 * time.Millisecond, Most: 30 * time.Second},
	}
	w.turn.Owner = w
	return w
}

// begin makes the watch query at index 0, now. The caller holds scope.mu.
func (w *watch) begin() {
	w.again = true
	if w.cancel != nil {
		w.cancel(errPoked)
	}
}

// run follows the service until ctx ends, or until the service is confirmed as
// removed.
func (w *watch) run(ctx context.Context) {
	w.slot = w.s.clients.acquire()
	defer w.s.clients.release(w.slot)
	turns := w.s.clients.turns
	defer turns.do(func(p *plan.Plan) []*plan.Turn { p.Leave(&w.turn); return nil })
	tried := false
	select {
	case <-w.s.facts.ready:
	case <-ctx.Done():
		return
	}
	for {
		back := w.prepare()
		if w.index > 0 {
			select {
			case <-w.s.gate:
			case <-ctx.Done():
				return
			}
			err := w.rest(ctx)
			if ctx.Err() != nil {
				return
			}
			if err != nil || w.index == 0 {
				continue
			}
		}
		asked := time.Now()
		entries, meta, err := w.ask(ctx, w.s.config.Filter)
		if !tried && ctx.Err() == nil {
			tried = true
			w.s.tried()
		}
		gone, changed := false, false
		if err == nil {
			gone, changed, err = w.take(ctx, entries, meta, asked)
		}
		switch {
		case ctx.Err() != nil:
			return
		case gone:
			w.arrived()
			return
		case errors.Is(err, errPoked), errors.Is(err, errEnded):
			continue
		case errors.Is(err, errMissing):
			w.index = 0
			continue
		case errors.Is(err, errAgain):
			w.index = 0
			if !plugin.Pause(ctx, 100*time.Millisecond, nil) {
				return
			}
			continue
		case err != nil:
			if !w.failed(ctx, err, back) {
				return
			}
			continue
		}
		w.broken = false
		w.retry.Reset()
		if changed {
			turns.do(func(p *plan.Plan) []*plan.Turn { p.Arrived(&w.turn, time.Now()); return nil })
		}
		if changed || time.Since(asked) > time.Second {
			w.idle = 0
			continue
		}
		// Consul also wakes watches for changes that the answer does not
		// contain. This bounds the rate of such wakes.
		w.idle = min(w.idle+1, 8)
		if !plugin.Pause(ctx, min(5*time.Millisecond<<w.idle, time.Second), nil) {
			return
		}
	}
}

// prepare sets the index of the next query. back is closed when the scope is
// reachable again.
func (w *watch) prepare() (back <-chan struct{}) {
	s := w.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.again || w.epoch != s.epoch {
		w.index = 0
	}
	w.again, w.epoch = false, s.epoch
	if w.wait == 0 {
		w.wait = time.Duration(s.config.Wait)
	}
	return s.back
}

// ask requests the service's instances and their health, never with ?passing,
// as health is reported.
func (w *watch) ask(ctx context.Context, filter string) (entries []*api.ServiceEntry, meta *api.QueryMeta, err error) {
	ctx, done := w.interruptible(ctx)
	defer done()
	s := w.s
	err = s.query(ctx, w.index, s.clients.turns.wait(w.wait), func(q *api.QueryOptions) (*api.QueryMeta, error) {
		q.Filter = filter
		if w.index == 0 && filter == s.config.Filter {
			s.clients.turns.do(func(p *plan.Plan) []*plan.Turn { p.Sent(&w.turn); return nil })
		}
		var err error
		entries, meta, err = s.clients.of(w.slot).Health().Service(w.name, "", false, q)
		return meta, err
	})
	return entries, meta, err
}

// interruptible returns a context that begin cancels. done must be called after
// the last use.
func (w *watch) interruptible(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	s := w.s
	s.mu.Lock()
	defer s.mu.Unlock()
	w.cancel = cancel
	if w.again {
		cancel(errPoked)
	}
	return ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		w.cancel = nil
		cancel(nil)
	}
}

var (
	// errAgain means that the answer is inconclusive and a retry may not be.
	errAgain = errors.New("ask again")
	// errMissing means that the answer lacks instances, to be confirmed by a
	// query at index 0.
	errMissing = errors.New("ask at index 0")
)

// take applies an answer. It reports whether the service was removed, and then
// the watch is forgotten, and whether the catalog was updated. On error nothing
// is changed.
func (w *watch) take(ctx context.Context, entries []*api.ServiceEntry, meta *api.QueryMeta, asked time.Time) (gone, changed bool, err error) {
	waited, streamed := w.index > 0, meta.QueryBackend == api.QueryBackendStreaming
	if meta.LastIndex < w.highest[streamed] {
		w.s.question(w)
		w.s.suspect()
		if waited {
			// Older than what is known, or of another server: the answer at
			// index 0 decides, and Consul is asked there again as
			// https://developer.hashicorp.com/consul/api-docs/features/blocking
			// wants it.
			w.highest[streamed] = meta.LastIndex
			return false, false, errAgain
		}
	}
	w.index, w.wait = meta.LastIndex, 0
	w.streamed = streamed
	w.highest[streamed] = meta.LastIndex
	w.nodes = map[string]int{}
	for _, e := range entries {
		if e != nil && e.Node != nil {
			w.nodes[e.Node.Node]++
		}
	}

	next := w.s.convert.instances(entries)
	known := w.known
	if w.s.sidecars == nil {
		known = w.s.grace.Answer(w.key)
	}
	merged, missing := plugin.UnionInstances(next, known)
	if w.s.sidecars != nil {
		all := destinations(entries, merged, w.destinations)
		w.moved = w.moved || !maps.Equal(all, w.destinations)
		w.destinations = all
	}
	if waited && (missing > 0 || len(entries) == 0) {
		// Consul answers waiting queries from streams, which report neither ACL
		// filtering nor a missing leader. So what is missing counts only in the
		// answer to a query that does not wait.
		return false, false, errMissing
	}

	absentSince := time.Time{}
	if len(entries) == 0 {
		if absentSince, err = w.confirmEmpty(ctx, meta, asked); err != nil {
			return false, false, err
		}
	}
	w.odd = 0

	switch {
	case meta.ResultsFilteredByACLs && !w.s.config.AcceptFiltered:
		w.wait = doubtfulWait
		w.fault(&fault{kind: faultFiltered, err: errFiltered})
		return false, w.publish(next, merged, false), nil
	case !absentSince.IsZero():
		// Before forget: afterwards another watch of the same name may set its
		// fault.
		w.fault(nil)
		if !w.s.forget(w, absentSince) {
			return false, false, errAgain
		}
		return true, true, nil
	default:
		w.fault(nil)
		changed = w.publish(next, next, true)
	}
	w.arrived()
	return false, changed, nil
}

// errFiltered reports an answer that Consul filtered by ACL.
var errFiltered = errors.New("consul leaves out instances that the token may not read, so none is removed; " +
	"give the registry a token with service_prefix \"\" read and node_prefix \"\" read, or set accept_filtered if it is meant to see a part only")

// confirmEmpty verifies an answer without instances. It returns the time by
// which a listing lacked the service, the zero time if the service is listed
// and the filter selects no instance, or why the answer does not count.
func (w *watch) confirmEmpty(ctx context.Context, meta *api.QueryMeta, asked time.Time) (absentSince time.Time, err error) {
	if meta.ResultsFilteredByACLs {
		return time.Time{}, &fault{kind: faultFiltered, err: errFiltered}
	}
	if w.s.config.Filter != "" {
		index := w.index
		w.index = 0
		all, meta, err := w.ask(ctx, "")
		if err != nil {
			return time.Time{}, err
		}
		if len(all) > 0 {
			w.index = index
			return time.Time{}, nil
		}
		if meta.ResultsFilteredByACLs {
			return time.Time{}, &fault{kind: faultFiltered, err: errFiltered}
		}
		w.index = index
	}
	l, err := w.s.confirm(ctx, asked)
	if err != nil {
		return time.Time{}, err
	}
	doubt := w.s.doubt(l)
	switch {
	case l.names[w.name] && w.s.peer != "":
		// A peer may export a service that has no instances.
		return time.Time{}, nil
	case l.names[w.name]:
		// The service may have returned between the two queries; if the answer
		// stays empty, it is wrong.
		if w.odd++; w.odd < 3 {
			return time.Time{}, errAgain
		}
		return time.Time{}, &fault{kind: faultEmpty, err: errors.New(
			"consul lists services and answers that they have no instances, which happens to a token that may not read nodes; " +
				"what is known stays; give the registry a token with service_prefix \"\" read and node_prefix \"\" read")}
	case len(l.names) == 0 && doubt != nil:
		return time.Time{}, doubt
	case l.filtered:
		// A restricted token: Consul reports what it filters, and did not
		// report this service.
		return l.asked, nil
	case doubt != nil:
		return time.Time{}, doubt
	case w.s.peer == "" && w.s.clients.auth.anonymous() && !l.names[serversService]:
		// Without a token Consul does not report filtering. Its own service
		// proves that the listing is complete.
		return time.Time{}, &fault{kind: faultFiltered, err: errors.New(
			"consul's own service cannot be seen, so without a token nothing shows whether a service is gone or hidden, and nothing is removed; " +
				"give the registry a token")}
	}
	return l.asked, nil
}

// publish passes on the instances of an answer, and reports whether what is
// known differs from before. An answer that is not whole removes nothing. A
// service without selected instances is not published.
func (w *watch) publish(next, known []registry.Instance, whole bool) (changed bool) {
	s := w.s
	if s.sidecars != nil {
		changed = w.moved || !plugin.EqualInstances(w.known, known)
		w.moved, w.known = false, known
		s.sidecars.set(w, next, known, whole)
		return changed
	}
	switch service := s.service(w.name); {
	case len(known) == 0:
		return s.grace.Remove(w.key)
	case whole:
		return s.grace.Set(service, next)
	default:
		return s.grace.Add(service, next)
	}
}

// fault sets the fault of the watch; nil clears it.
func (w *watch) fault(f *fault) {
	if f != nil {
		f = w.s.located(f)
	}
	w.s.state.set(w.id, f)
}

// lostRetry is when a watch asks again while the listing fails, too: the
// listing retries for all watches, and its success ends their waits.
const lostRetry = 10 * time.Minute

// failed records an error and waits until the next retry, or until the scope is
// reachable again. It returns false once ctx has ended.
func (w *watch) failed(ctx context.Context, err error, back <-chan struct{}) bool {
	f := classify(err, w.s.clients.at())
	first := !w.broken
	again := first && w.s.again(f, w.index)
	w.index, w.broken = 0, true
	if again {
		return true
	}
	if f.outage {
		w.s.question(w)
	}
	if f.outage || first && f.kind == faultDenied {
		// A listing that waits does not learn of a token that was revoked. Its
		// retries, which are soon, find the end of it for all watches.
		w.s.suspect()
	}
	w.s.limited(f, nil, &w.turn)
	w.fault(f)
	if f.kind == faultEmpty || f.kind == faultFiltered {
		// These are answers: the scope is reachable, and its recovery does not
		// concern them.
		back = nil
	}
	wait := w.retry.Next()
	if f.outage && back != nil && w.s.isLost() {
		wait = plugin.Jitter(lostRetry)
	}
	return plugin.Pause(ctx, wait, back)
}
