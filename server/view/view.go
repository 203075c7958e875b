package view

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// View is shared by all subscriptions. Its methods may be called from any
// goroutine.
type View struct {
	db *state.DB

	mu    sync.Mutex
	pages map[pagesKey]*pages   // guarded by mu
	named map[state.Kind]*named // guarded by mu
}

// New returns a view of all of the state.
func New(db *state.DB) *View {
	return &View{db: db, pages: make(map[pagesKey]*pages), named: make(map[state.Kind]*named)}
}

// Changed returns a channel that is closed when any subscription may have
// something to send.
func (v *View) Changed() <-chan struct{} { return v.db.Changed() }

// Revision returns the state's revision.
func (v *View) Revision() state.Revision { return v.db.Revision() }

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
	of     map[string]map[*Subscription]struct{} // subscriptions by name
	subs   map[*Subscription]struct{}            // subscriptions to any name
}

// askAtOnce is the number of names registered per hold of [View.mu], so that a
// subscription to a million names delays no other.
const askAtOnce = 1000

// ask registers names of a subscription.
func (v *View) ask(s *Subscription, names []string) {
	v.askSome(s, nil)
	for some := range slices.Chunk(names, askAtOnce) {
		v.askSome(s, some)
	}
}

func (v *View) askSome(s *Subscription, names []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := v.named[s.kind]
	if n == nil {
		n = &named{
			cursor: state.At(v.db.Revision()),
			of:     make(map[string]map[*Subscription]struct{}), subs: make(map[*Subscription]struct{}),
		}
		v.named[s.kind] = n
	}
	n.subs[s] = struct{}{}
	for _, name := range names {
		of := n.of[name]
		if of == nil {
			of = make(map[*Subscription]struct{}, 1)
			n.of[name] = of
		}
		of[s] = struct{}{}
	}
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
		if of := n.of[name]; of != nil {
			if delete(of, s); len(of) == 0 {
				delete(n.of, name)
			}
		}
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
	for c := range v.db.Changes(kind, &n.cursor) {
		for s := range n.of[c.Name] {
			s.changed(c.Name)
		}
	}
	if n.cursor.Lost {
		n.cursor = state.At(v.db.Revision())
		for name, of := range n.of {
			for s := range of {
				s.changed(name)
			}
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
		return nil, v.db.Revision()
	}
	v.followLocked(s.kind, n)
	names, s.marked = s.marked, nil
	return names, n.cursor.Revision
}

// changed marks a requested name as changed. The caller holds View.mu.
func (s *Subscription) changed(name string) {
	if s.marked == nil {
		s.marked = make(map[string]struct{})
	}
	s.marked[name] = struct{}{}
	if s.options.Wake != nil {
		s.options.Wake()
	}
}

// Run follows the state for subscriptions to names until ctx ends.
func (v *View) Run(ctx context.Context) {
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
