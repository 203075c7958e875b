package view

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"runtime"
	"slices"
	"sync"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// View is shared by all subscriptions. Its methods may be called from any
// goroutine.
type View struct {
	db      *state.DB
	filters []Filter
	data    data
	part    *selection // data of a view with filters, else nil

	mu    sync.Mutex
	pages map[pagesKey]*pages   // guarded by mu
	named map[state.Kind]*named // guarded by mu

	narrower *narrower // shared with the views that were made of this one
}

// data is what a view shows: a [state.DB], or a [selection] of it.
type data interface {
	Changes(k state.Kind, c *state.Cursor) iter.Seq[state.Change]
	Get(k state.Kind, name string) (*state.Record, bool)
	Len(k state.Kind) int
	Revision() state.Revision
	Changed() <-chan struct{}
	Initialized(coll string) bool
}

// Kind is a collection in the shape of some sinks.
type Kind = state.Kind

// New returns a view of all of the state, or of the part that all filters
// select.
func New(db *state.DB, filters ...Filter) *View {
	v := &View{
		db: db, filters: filters, data: db, pages: make(map[pagesKey]*pages), named: make(map[state.Kind]*named),
		narrower: &narrower{of: make(map[string]*shared)},
	}
	if len(filters) > 0 {
		v.part = newSelection(db, filters...)
		v.data = v.part
	}
	return v
}

// Shows reports whether the view has a resource. It is nil for a view of all of
// the state.
func (v *View) Shows() func(k Kind, name string) bool {
	if v.part == nil {
		return nil
	}
	return func(k Kind, name string) bool {
		_, ok := v.data.Get(k, name)
		return ok
	}
}

// narrower holds the views that are narrower than one.
type narrower struct {
	mu sync.Mutex
	of map[string]*shared // guarded by mu; by their filters
}

// shared is a view that several streams use.
type shared struct {
	view  *View
	users int // guarded by narrower.mu
	end   context.CancelFunc
	ended chan struct{}
}

// Narrow returns the part of the view that all filters select, the view itself
// without any. Callers with equal filters share it, and what it costs; release
// has to be called when it is no longer used.
func (v *View) Narrow(filters ...Filter) (part *View, release func()) {
	if len(filters) == 0 {
		return v, func() {}
	}
	n, key := v.narrower, fmt.Sprintf("%q", filters)
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.of[key]
	if s == nil {
		ctx, end := context.WithCancel(context.Background())
		s = &shared{view: New(v.db, slices.Concat(v.filters, filters)...), end: end, ended: make(chan struct{})}
		n.of[key] = s
		// The last user ends it.
		go func() {
			defer close(s.ended)
			s.view.Run(ctx)
		}()
	}
	s.users++
	return s.view, sync.OnceFunc(func() { n.release(key, s) })
}

func (n *narrower) release(key string, s *shared) {
	n.mu.Lock()
	s.users--
	last := s.users == 0
	if last {
		delete(n.of, key)
	}
	n.mu.Unlock()
	if last {
		s.end()
		<-s.ended
	}
}

// Changed returns a channel that is closed when any subscription may have
// something to send.
func (v *View) Changed() <-chan struct{} { return v.data.Changed() }

// Changes returns the changes of a kind after a cursor; see [state.DB.Changes].
// It is for consumers that are no sinks and keep a cursor of their own.
func (v *View) Changes(k Kind, c *state.Cursor) iter.Seq[state.Change] {
	return v.data.Changes(k, c)
}

// Initialized reports whether the registries of a collection have completed a
// first listing; see [state.DB.Initialized].
func (v *View) Initialized(coll string) bool { return v.data.Initialized(coll) }

// Revision returns the revision of what the view shows.
func (v *View) Revision() state.Revision { return v.data.Revision() }

func (v *View) acquire(key pagesKey) *pages {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.pages[key]
	if p == nil {
		p = &pages{
			key: key, kind: state.Kind{Collection: key.collection, Shape: key.form.Shape}, framing: key.framing,
			layout: encode.NewLayout(key.form), of: make(map[string]*page),
		}
		v.pages[key] = p
	}
	p.users++
	return p
}

func (v *View) release(p *pages) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if p.users--; p.users == 0 {
		delete(v.pages, p.key)
	}
}

// named follows a kind for all subscriptions to names of it. View.mu guards it.
type named struct {
	cursor state.Cursor
	of     map[string]askers          // subscriptions by name
	most   int                        // names in of since it was made
	subs   map[*Subscription]struct{} // subscriptions to any name
}

// askers are the subscriptions to a name: one, which needs no memory of its own
// and is what most names have, or a set.
type askers struct {
	one  *Subscription
	more map[*Subscription]struct{} // nil for one
}

// with returns the askers and one more.
func (a askers) with(s *Subscription) askers {
	switch {
	case a.more != nil:
		a.more[s] = struct{}{}
	case a.one == nil || a.one == s:
		a.one = s
	default:
		a = askers{more: map[*Subscription]struct{}{a.one: {}, s: {}}}
	}
	return a
}

// leave removes a subscription from a set, and reports whether it was the last.
func (a askers) leave(s *Subscription) (last bool) {
	delete(a.more, s)
	return len(a.more) == 0 && (a.one == nil || a.one == s)
}

// changed marks the name as changed for all of them. The caller holds View.mu.
func (a askers) changed(c *state.Change) {
	if a.one != nil {
		a.one.changed(c)
	}
	for s := range a.more {
		s.changed(c)
	}
}

// askAtOnce is the number of names registered per hold of [View.mu], so that a
// subscription to a million names delays no other.
const askAtOnce = 1000

// ask registers names of a subscription.
func (v *View) ask(s *Subscription, names []string) {
	v.askSome(s, names[:min(len(names), askAtOnce)])
	for len(names) > askAtOnce {
		names = names[askAtOnce:]
		runtime.Gosched()
		v.askSome(s, names[:min(len(names), askAtOnce)])
	}
}

func (v *View) askSome(s *Subscription, names []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := v.named[s.kind]
	if n == nil {
		n = &named{
			cursor: state.At(v.data.Revision()),
			of:     make(map[string]askers), subs: make(map[*Subscription]struct{}),
		}
		v.named[s.kind] = n
	}
	n.subs[s] = struct{}{}
	for _, name := range names {
		n.of[name] = n.of[name].with(s)
	}
	n.most = max(n.most, len(n.of))
}

// drop unregisters names of a subscription.
func (v *View) drop(s *Subscription, names []string) {
	for some := range slices.Chunk(names, askAtOnce) {
		v.dropSome(s, some)
	}
}

func (v *View) dropSome(s *Subscription, names []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := v.named[s.kind]
	if n == nil {
		return
	}
	for _, name := range names {
		if n.of[name].leave(s) {
			delete(n.of, name)
		}
	}
	// A map keeps the memory of what was in it. A copy that is rare and small
	// delays no other subscription.
	if n.most > 64*max(len(n.of), askAtOnce) {
		of := make(map[string]askers, len(n.of))
		maps.Copy(of, n.of)
		n.of, n.most = of, len(of)
	}
}

// leave unregisters a subscription.
func (v *View) leave(s *Subscription) {
	v.drop(s, slices.Collect(maps.Keys(s.names)))
	v.mu.Lock()
	defer v.mu.Unlock()
	if n := v.named[s.kind]; n != nil {
		if delete(n.subs, s); len(n.subs) == 0 {
			delete(v.named, s.kind)
		}
	}
}

// Follow applies the state's changes to all subscriptions to names: it marks
// changed names and calls [Options.Wake] of their subscriptions.
// [Subscription.Next] calls it too; calling it whenever [View.Changed] is
// closed wakes exactly the subscriptions concerned.
func (v *View) Follow() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for kind, n := range v.named {
		v.followLocked(kind, n)
	}
}

func (v *View) followLocked(kind state.Kind, n *named) {
	for c := range v.data.Changes(kind, &n.cursor) {
		n.of[c.Name].changed(&c)
	}
	if n.cursor.Lost {
		n.cursor = state.At(v.data.Revision())
		for name, of := range n.of {
			of.changed(&state.Change{Name: name})
		}
	}
}

// changes returns the names that changed since the last call, and the revision
// up to which the list is complete.
func (v *View) changes(s *Subscription) (names map[string]struct{}, at state.Revision) {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := v.named[s.kind]
	if n == nil {
		return nil, v.data.Revision()
	}
	v.followLocked(s.kind, n)
	names, s.marked = s.marked, nil
	return names, n.cursor.Revision
}

// changed marks a requested name as changed. The caller holds View.mu.
func (s *Subscription) changed(c *state.Change) {
	if !s.concerns(c) {
		return
	}
	if s.marked == nil {
		s.marked = make(map[string]struct{})
	}
	s.marked[c.Name] = struct{}{}
	if s.options.Wake != nil {
		s.options.Wake()
	}
}

// Run follows the state for subscriptions to names until ctx ends.
// A view with filters wakes its readers while it runs only.
func (v *View) Run(ctx context.Context) {
	if v.part != nil {
		v.part.run(ctx, v.Follow)
		return
	}
	for {
		changed := v.Changed() // read before Follow, so that no change is missed
		v.Follow()
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
