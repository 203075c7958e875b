package zookeeper

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/dubbo"
	"github.com/isthmus-mesh/isthmus/plugin"
)

// retryDenied is how often a node is read again that may not be read: what may
// be read changes without an event.
const retryDenied = 15 * time.Second

// read is one request for a node.
type read struct {
	op   int32
	path string
}

// reading keeps a tree equal to the nodes in one session: it reads what it does
// not know, and again what an event names.
type reading struct {
	layout
	s    *session
	t    *tree
	stay bool // watches stay and are for everything below

	queue []read
	// queued are the reads in the queue, and flight those without an answer; a
	// true value is for one that the first listing waits for.
	queued map[read]bool
	flight map[int32]flying
	// first is how many reads the first listing waits for; it is over once done
	// is set.
	first int
	done  bool

	denied map[string]bool // paths that may not be read
}

// flying is a read that is sent.
type flying struct {
	read
	first bool
}

func newReading(l layout, s *session, t *tree, stay bool) *reading {
	return &reading{layout: l, s: s, t: t, stay: stay, queued: map[read]bool{}, flight: map[int32]flying{}, denied: map[string]bool{}}
}

// start sets the watches that stay, if there are such, and reads the roots.
func (r *reading) start(ctx context.Context, roots []string) error {
	// Changes that were acknowledged before are seen from here on.
	awaited := map[int32]bool{r.s.request(opSync, "/", nil): true}
	if r.stay {
		for _, root := range roots {
			awaited[r.s.request(opAddWatch, cmp.Or(root, "/"), func(w *writer) { w.int(watchBelow) })] = true
		}
	}
	err := r.s.receive(ctx, func(m message) (bool, error) {
		switch {
		case m.xid == xidEvent: // of something that is read yet
			_, err := parseEvent(m.body)
			return false, err
		case !awaited[m.xid]:
		case m.code != 0:
			return false, r.refused(m.code, "watch", roots[0])
		default:
			delete(awaited, m.xid)
		}
		return len(awaited) == 0, nil
	})
	if err != nil {
		return err
	}
	for _, root := range roots {
		r.refresh(r.place(root), true)
		if r.place(root).kind == kindInterfaces {
			r.refresh(place{kind: kindMappings}, true)
		}
	}
	r.send()
	return nil
}

// refused returns the error that an answer is.
func (r *reading) refused(c code, what, path string) error {
	err := fmt.Errorf("%s %s: %w", what, path, c)
	switch c {
	case codeNoAuth:
		return fmt.Errorf("%w: give the user the right to read it (setAcl), or check username and password_file", err)
	case codeNeedsAuth, codeAuthFailed:
		return fmt.Errorf("%w: set auth to sasl, with username and password_file", err)
	default:
		return err
	}
}

// refresh reads a node, or what belongs to it.
func (r *reading) refresh(p place, first bool) {
	switch {
	case p.kind == kindNone:
	case p.kind == kindInterface:
		r.refresh(place{kind: kindProviders, name: p.name}, first)
		r.refresh(place{kind: kindRules, name: p.name}, first)
	case p.kind.isList():
		r.add(read{opGetChildren, r.path(p)}, first)
	default:
		r.add(read{opGetData, r.path(p)}, first)
	}
}

// add queues a read, once. The first listing waits for it if any that wants it
// is of the listing.
func (r *reading) add(want read, first bool) {
	awaited, queued := r.queued[want]
	first = first && !r.done && !awaited
	if first {
		r.first++
	}
	r.queued[want] = first || awaited
	if !queued {
		r.queue = append(r.queue, want)
	}
}

// send sends what is queued, as far as so much may be in flight.
func (r *reading) send() {
	for len(r.queue) > 0 && len(r.flight) < maxInFlight {
		next := r.queue[0]
		r.queue = r.queue[1:]
		first := r.queued[next]
		delete(r.queued, next)
		watch := !r.stay
		xid := r.s.request(next.op, next.path, func(w *writer) { w.bool(watch) })
		r.flight[xid] = flying{next, first}
	}
	if len(r.queue) == 0 {
		r.queue = nil
	}
}

// take applies a message. The session is of no more use after an error.
func (r *reading) take(m message) error {
	if m.xid == xidEvent {
		e, err := parseEvent(m.body)
		if err != nil {
			return err
		}
		r.event(e)
		r.send()
		return nil
	}
	f, ok := r.flight[m.xid]
	if !ok {
		return nil // a ping
	}
	delete(r.flight, m.xid)
	if err := r.answer(f, m); err != nil {
		return err
	}
	if f.first {
		r.first--
	}
	r.send()
	return nil
}

// event reads what an event may have changed.
func (r *reading) event(e event) {
	p := r.place(e.path)
	switch e.kind {
	case eventChildren:
		r.refresh(p, false)
	case eventData:
		if !p.kind.isList() && p.kind != kindInterface && r.wanted(p) {
			r.refresh(p, false)
		}
	case eventCreated, eventDeleted:
		created := e.kind == eventCreated
		up := r.place(parent(e.path))
		switch {
		// Lists that are long are not read for one that comes or goes.
		case p.kind == kindInterface && created:
			if r.t.addInterface(p.name) {
				r.refresh(p, false)
			}
		case p.kind == kindInterface:
			r.t.removeInterface(p.name)
		case p.kind == kindApp && created:
			if r.t.list(p.name) {
				r.refresh(p, false)
			}
		case p.kind == kindApp:
			delete(r.t.listed, p.name)
			r.t.removeApp(p.name)
		case p.kind == kindMapping && created:
			if r.t.selects(unescape(p.name)) {
				r.refresh(p, false)
			}
		case p.kind == kindMapping:
			r.t.setMapping(p.name, nil)
		case p.kind == kindInstance && !created:
			r.t.removeInstance(p.name, p.id)
		case p.kind == kindNone && (up.kind == kindProviders || up.kind == kindRules):
			if r.wanted(up) {
				r.refresh(up, false)
			}
		case r.wanted(p):
			r.refresh(p, false)
		}
	}
}

// parent returns the path above.
func parent(path string) string {
	i := strings.LastIndexByte(path, '/')
	return path[:max(i, 0)]
}

// wanted reports whether a node is of anything that is followed.
func (r *reading) wanted(p place) bool {
	switch p.kind {
	case kindNone:
		return false
	case kindInterface, kindProviders, kindRules:
		return r.t.interfaces[p.name] != nil
	case kindMapping:
		return r.t.selects(unescape(p.name))
	case kindApp, kindInstance:
		return r.t.apps[p.name] != nil
	case kindRevision:
		return r.t.apps[p.name] != nil && r.t.apps[p.name].revisions[p.id] != nil
	default:
		return true
	}
}

// answer applies the answer to a read.
func (r *reading) answer(f flying, m message) error {
	p := r.place(f.path)
	if f.op == opExists {
		if m.code == 0 { // it came meanwhile
			r.refresh(p, f.first)
			return nil
		}
		if m.code == codeNoNode {
			return nil
		}
	}
	if !r.wanted(p) {
		return nil
	}
	delete(r.denied, f.path)
	switch m.code {
	case 0:
	case codeNoNode:
		if !r.stay {
			r.add(read{opExists, f.path}, f.first)
		}
		r.gone(p)
		return nil
	case codeNoAuth:
		if p.kind == kindInterfaces || p.kind == kindApps || p.kind == kindMappings {
			return r.refused(m.code, "read", f.path)
		}
		r.denied[f.path] = true
		r.t.keep(p)
		return nil
	default:
		return r.refused(m.code, "read", f.path)
	}
	if p.kind.isList() {
		names := m.body.strings()
		if m.body.err != nil {
			return m.body.err
		}
		r.children(p, names, f.first)
		return nil
	}
	data := m.body.bytes()
	if m.body.err != nil {
		return m.body.err
	}
	switch p.kind {
	case kindMapping:
		if len(data) > maxValue {
			data = nil
		}
		for _, name := range r.t.setMapping(p.name, dubbo.ParseMapping(data)) {
			r.refresh(place{kind: kindApp, name: name}, f.first)
		}
	case kindInstance:
		if wanted := r.t.setInstance(p.name, p.id, data); wanted != "" {
			r.refresh(place{kind: kindRevision, name: p.name, id: wanted}, f.first)
		}
	case kindRevision:
		if data == nil {
			data = []byte{}
		}
		r.t.setRevision(p.name, p.id, data)
	}
	return nil
}

// children applies a list.
func (r *reading) children(p place, names []string, first bool) {
	all := func(kind kind, names []string) {
		for _, name := range names {
			r.refresh(place{kind: kind, name: name}, first)
		}
	}
	switch p.kind {
	case kindInterfaces:
		all(kindInterface, r.t.setInterfaces(names))
	case kindProviders:
		r.t.setProviders(p.name, names)
	case kindRules:
		r.t.setRules(p.name, names)
	case kindMappings:
		all(kindMapping, r.t.setMappings(names))
	case kindApps:
		all(kindApp, r.t.setApps(names))
	case kindApp:
		for _, id := range r.t.setInstances(p.name, names) {
			r.refresh(place{kind: kindInstance, name: p.name, id: id}, first)
		}
	}
}

// gone applies that a node does not exist.
func (r *reading) gone(p place) {
	switch p.kind {
	case kindMapping:
		r.t.setMapping(p.name, nil)
	case kindInstance:
		r.t.removeInstance(p.name, p.id)
	case kindRevision:
		r.t.setRevision(p.name, p.id, nil)
	default:
		r.children(p, nil, false)
	}
}

// listed reports whether the first listing is over; it says so once.
func (r *reading) listed() bool {
	if r.done || r.first > 0 {
		return false
	}
	r.done = true
	return true
}

// deniedPath returns the first path that may not be read, "" for none.
func (r *reading) deniedPath() string {
	if len(r.denied) == 0 {
		return ""
	}
	return slices.Min(slices.Collect(maps.Keys(r.denied)))
}

// retry reads again what may not have been read.
func (r *reading) retry() {
	for path := range r.denied {
		r.refresh(r.place(path), false)
	}
	r.send()
}

// newRetry returns a timer of which each tick is for retry.
func newRetry() *time.Ticker { return time.NewTicker(plugin.Jitter(retryDenied)) }
