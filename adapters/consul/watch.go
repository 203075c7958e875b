package consul

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// watch follows one service. Its goroutine owns it, but for what scope.mu guards.
type watch struct {
	s    *scope
	name string
	key  registry.Key
	id   string // names the watch in states

	slot *slot
	turn turn
	// known is what the catalog was told, sorted by ID; published says that it was told at all.
	known     []registry.Instance
	published bool
	// arrived is to be called with each complete answer.
	arrived func()
	// index is where the next query waits, good in epoch only; 0 asks without waiting.
	index, epoch uint64
	// highest is the last answer's index, which survives errors, by whether the answer came from Consul's streams: the two count differently.
	highest map[bool]uint64
	// streamed says that index is one of Consul's streams.
	streamed bool
	// wait is how long the next query waits.
	wait time.Duration
	// lastOutage is when this watch last found the registry away or replaced.
	lastOutage time.Time
	// broken says that there was no answer since the last error.
	broken bool
	retry  plugin.Backoff
	// odd counts the empty answers in a row about a service that is listed.
	odd int
	// idle counts the wakes in a row that came at once and changed nothing.
	idle int

	// Guarded by scope.mu:
	seen   time.Time               // when a listing last showed the service
	absent bool                    // the last complete listing lacks the service
	again  bool                    // the next query begins at index 0
	cancel context.CancelCauseFunc // ends the query under way; nil while there is none
}

func newWatch(s *scope, name string, now time.Time) *watch {
	key := s.key(name)
	w := &watch{
		s: s, name: name, key: key, id: "service " + key.String(), seen: now,
		highest: map[bool]uint64{},
		turn:    newTurn(s.number, name),
		arrived: s.state.listing.Expect(),
		retry:   plugin.Backoff{First: 500 * time.Millisecond, Most: 30 * time.Second},
	}
	w.turn.watch = w
	return w
}

// begin makes the watch ask again at index 0, now. The caller holds scope.mu.
func (w *watch) begin() {
	w.again = true
	if w.cancel != nil {
		w.cancel(errPoked)
	}
}

// run follows the service until ctx ends, or until the service is gone for certain.
func (w *watch) run(ctx context.Context) {
	w.slot = w.s.clients.acquire()
	defer w.s.clients.release(w.slot)
	turns := w.s.clients.turns
	defer turns.do(func(p *plan) []*turn { p.leave(&w.turn); return nil })
	tried := false
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
		case errors.Is(err, errPoked):
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
			turns.do(func(p *plan) []*turn { p.arrived(&w.turn, time.Now()); return nil })
		}
		if changed || time.Since(asked) > time.Second {
			w.idle = 0
			continue
		}
		// Consul wakes watches for what does not show in the answer too. The pace of such wakes is bounded here.
		w.idle = min(w.idle+1, 8)
		if !plugin.Pause(ctx, min(5*time.Millisecond<<w.idle, time.Second), nil) {
			return
		}
	}
}

// prepare settles where the next query begins. The channel is closed when the scope is reached again after a failure.
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

// ask asks for the service's instances and their health, never with ?passing: health is a part of what is reported.
func (w *watch) ask(ctx context.Context, filter string) (entries []*api.ServiceEntry, meta *api.QueryMeta, err error) {
	ctx, done := w.interruptible(ctx)
	defer done()
	s := w.s
	err = s.query(ctx, w.index, s.clients.turns.wait(w.wait), func(q *api.QueryOptions) (*api.QueryMeta, error) {
		q.Filter = filter
		var err error
		entries, meta, err = s.clients.of(w.slot).Health().Service(w.name, "", false, q)
		return meta, err
	})
	return entries, meta, err
}

// interruptible returns a context that begin ends. The function that it returns must be called once nothing uses it any more.
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
	// errAgain says that the answer does not settle anything and another one may.
	errAgain = errors.New("ask again")
	// errMissing says that the answer lacks something, and that a query at index 0 tells whether that is so.
	errMissing = errors.New("ask at index 0")
)

// take takes over what an answer says. It reports whether the service is gone, in which case the watch is forgotten, and whether
// the catalog was told anything. An error leaves everything as it is.
func (w *watch) take(ctx context.Context, entries []*api.ServiceEntry, meta *api.QueryMeta, asked time.Time) (gone, changed bool, err error) {
	waited, streamed := w.index > 0, meta.QueryBackend == api.QueryBackendStreaming
	if meta.LastIndex < w.highest[streamed] {
		w.lastOutage = time.Now()
		w.s.suspect()
	}
	w.index, w.wait = meta.LastIndex, 0
	w.streamed = streamed
	w.highest[streamed] = meta.LastIndex

	next := w.s.convert.instances(entries)
	merged, missing := plugin.UnionInstances(next, w.known)
	if waited && (missing > 0 || len(entries) == 0) {
		// Consul answers queries that wait from streams, which say neither what was filtered by ACL nor whether there is a leader. What is
		// missing therefore counts only in the answer to a query that does not wait.
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
		return false, w.publish(merged), nil
	case missing > 0 && w.held() > 0:
		w.wait = max(w.held(), time.Second)
		w.fault(&fault{kind: faultHeld, err: fmt.Errorf(
			"consul was away or was replaced, and lacks instances that it had; they are kept for %s (remove_grace), so that they can be registered again",
			w.s.config.RemoveGrace)})
		changed = w.publish(merged)
	case !absentSince.IsZero():
		// Before forget: from then on another watch of the same name may have a fault of its own.
		w.fault(nil)
		if !w.s.forget(w, absentSince) {
			return false, false, errAgain
		}
		return true, true, nil
	default:
		w.fault(nil)
		changed = w.publish(next)
	}
	w.arrived()
	return false, changed, nil
}

// errFiltered is the error of an answer that Consul filtered by ACL.
var errFiltered = errors.New("consul leaves out instances that the token may not read, so none is removed; " +
	"give the registry a token with service_prefix \"\" read and node_prefix \"\" read, or set accept_filtered if it is meant to see a part only")

// confirmEmpty finds out what an answer without instances means. It returns when the service was found to be listed no more, the
// zero time if it is there and the filter selects none of its instances, or why the answer does not count.
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
	case l.names[w.name]:
		// Between the two queries the service may have come back; an answer that stays empty is no truth.
		if w.odd++; w.odd < 3 {
			return time.Time{}, errAgain
		}
		return time.Time{}, &fault{kind: faultEmpty, err: errors.New(
			"consul lists services and answers that they have no instances, which happens to a token that may not read nodes; " +
				"what is known stays; give the registry a token with service_prefix \"\" read and node_prefix \"\" read")}
	case len(l.names) == 0 && doubt != nil:
		return time.Time{}, doubt
	case l.filtered:
		// A token that sees a part only: what Consul filters it says, and it did not say so of this service.
		return l.asked, nil
	case doubt != nil:
		return time.Time{}, doubt
	case w.s.clients.auth.anonymous() && !l.names[serversService]:
		// Without a token Consul does not say that it filters. Its own service proves that the view is whole.
		return time.Time{}, &fault{kind: faultFiltered, err: errors.New(
			"consul's own service cannot be seen, so without a token nothing shows whether a service is gone or hidden, and nothing is removed; " +
				"give the registry a token")}
	}
	return l.asked, nil
}

// held returns for how long what is missing is still kept, not positive if it is not.
func (w *watch) held() time.Duration {
	w.s.mu.Lock()
	last := w.s.lastOutage
	w.s.mu.Unlock()
	if w.lastOutage.After(last) {
		last = w.lastOutage
	}
	if last.IsZero() {
		return 0
	}
	return time.Duration(w.s.config.RemoveGrace) - time.Since(last)
}

// publish tells the catalog of instances that it does not know like that yet, and reports whether it did. A service of which nothing
// is selected does not exist for the bridge.
func (w *watch) publish(next []registry.Instance) bool {
	if len(next) == 0 {
		if !w.published {
			return false
		}
		w.known, w.published = nil, false
		w.s.catalog.Remove(w.key)
		return true
	}
	if w.published && plugin.EqualInstances(w.known, next) {
		return false
	}
	w.known, w.published = next, true
	w.s.catalog.Set(registry.Service{Key: w.key}, next)
	return true
}

// fault shows what is wrong with the watch, or with nil that nothing is.
func (w *watch) fault(f *fault) {
	if f != nil {
		f = w.s.located(f)
	}
	w.s.state.set(w.id, f)
}

// failed takes note of an error and waits until it is time to try again, or until the scope is reached again. It reports whether ctx
// still goes on.
func (w *watch) failed(ctx context.Context, err error, back <-chan struct{}) bool {
	f := classify(err, w.s.target)
	waited := w.index > 0
	w.index = 0
	if f.interrupted && !w.broken && waited {
		// See scope.run: whether that was an outage shows with the next query, sent at once.
		w.broken = true
		return true
	}
	w.broken = true
	if f.outage {
		w.lastOutage = time.Now()
		w.s.suspect()
	}
	w.s.limited(f, nil, &w.turn)
	w.fault(f)
	if f.kind == faultEmpty || f.kind == faultFiltered {
		// These are answers: the scope is there, and its news is not about this.
		back = nil
	}
	return plugin.Pause(ctx, w.retry.Next(), back)
}
