package push

import (
	"sync"

	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
)

// PageSize is the size to which pages of a state-of-the-world response are filled, in bytes. A change copies one page, so it is the
// cost of a change; a response has one segment per page, so its inverse is the cost of a response.
const PageSize = 32 << 10

// Snapshot is all of a collection, framed. It is immutable and shared by all sinks.
type Snapshot struct {
	// Version is a hash of all names and versions.
	Version string
	// Segments are the framed resources, in no order.
	Segments [][]byte
	// Resources is the number of resources.
	Resources int
	// Size is the length of all segments together, in bytes.
	Size int
	// Revision is that of the store up to which the snapshot is complete.
	Revision store.Revision
}

type pagesKey struct {
	store   string // the store's collection
	form    resource.Form
	framing Framing
}

// slot is one resource's place in a page.
type slot struct {
	name string
	enc  *resource.Encoding
	hash resource.Hash // of name and version
	size int           // framed
}

// page is a run of framed resources. Its segments are replaced, never changed.
type page struct {
	slots    []slot
	size     int
	segments [][]byte
	dirty    bool
	place    int // index in pages.list
}

// pages keeps a collection framed, page by page.
type pages struct {
	key   pagesKey
	users int // guarded by Hub.mu

	mu       sync.Mutex
	cursor   store.Revision   // the rest is guarded by mu
	begun    bool             // cursor means something
	of       map[string]*page // by resource name
	list     []*page
	sum      resource.Hash
	size     int
	snapshot *Snapshot
	dirty    []*page
}

// current brings the pages up to the store and returns their content.
func (p *pages) current(st *store.Store[*resource.Resource]) *Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	changes, now, ok := st.Since(p.key.store, p.cursor)
	switch {
	case !p.begun || !ok:
		now = p.rebuildLocked(st)
	case len(changes) == 0:
		p.cursor = now
		return p.snapshot
	default:
		for i := range changes {
			p.changeLocked(&changes[i])
		}
		if len(p.list) > 16 && p.size < len(p.list)*PageSize/4 { // mostly holes
			now = p.rebuildLocked(st)
		}
	}
	p.cursor, p.begun = now, true
	p.flushLocked()
	p.snapshot = &Snapshot{Version: p.sum.String(), Resources: len(p.of), Size: p.size, Revision: now}
	segments := 0
	for _, pg := range p.list {
		segments += len(pg.segments)
	}
	p.snapshot.Segments = make([][]byte, 0, segments)
	for _, pg := range p.list {
		p.snapshot.Segments = append(p.snapshot.Segments, pg.segments...)
	}
	return p.snapshot
}

func (p *pages) rebuildLocked(st *store.Store[*resource.Resource]) store.Revision {
	all, now := st.All(p.key.store)
	p.of, p.list, p.dirty = make(map[string]*page), nil, nil
	p.sum, p.size = resource.Hash{}, 0
	for c := range all {
		p.changeLocked(&c)
	}
	return now
}

func (p *pages) changeLocked(c *store.Change[*resource.Resource]) {
	old := p.of[c.Name]
	var enc *resource.Encoding
	if !c.Removed {
		enc = c.Value.Encode(p.key.form)
	}
	if enc == nil || enc.Absent {
		if old != nil {
			p.takeLocked(old, c.Name)
			delete(p.of, c.Name)
		}
		return
	}
	s := slot{name: c.Name, enc: enc, hash: resource.HashOf([]byte(c.Name), []byte(enc.Version))}
	var frame [maxFrame]byte
	s.size = len(p.key.framing.appendFrame(frame[:0], c.Name, enc)) + enc.Size
	if old != nil {
		for i := range old.slots {
			if was := &old.slots[i]; was.name == c.Name {
				if was.enc.Version == enc.Version {
					return
				}
				p.sum = p.sum.Sub(was.hash).Add(s.hash)
				p.size += s.size - was.size
				old.size += s.size - was.size
				*was = s
				p.markLocked(old)
				break
			}
		}
		if old.size <= 2*PageSize || len(old.slots) == 1 {
			return
		}
		p.takeLocked(old, c.Name) // outgrew its page
	}
	p.of[c.Name] = p.putLocked(s)
}

func (p *pages) markLocked(pg *page) {
	if !pg.dirty {
		pg.dirty = true
		p.dirty = append(p.dirty, pg)
	}
}

func (p *pages) putLocked(s slot) *page {
	var pg *page
	if n := len(p.list); n > 0 && p.list[n-1].size+s.size <= PageSize {
		pg = p.list[n-1]
	} else {
		pg = &page{place: n}
		p.list = append(p.list, pg)
	}
	pg.slots = append(pg.slots, s)
	pg.size += s.size
	p.size += s.size
	p.sum = p.sum.Add(s.hash)
	p.markLocked(pg)
	return pg
}

func (p *pages) takeLocked(pg *page, name string) {
	for i := range pg.slots {
		if s := pg.slots[i]; s.name == name {
			last := len(pg.slots) - 1
			pg.slots[i] = pg.slots[last]
			pg.slots[last] = slot{}
			pg.slots = pg.slots[:last]
			pg.size -= s.size
			p.size -= s.size
			p.sum = p.sum.Sub(s.hash)
			break
		}
	}
	p.markLocked(pg)
}

// flushLocked encodes the pages that changed, each once, and drops the empty ones.
func (p *pages) flushLocked() {
	for _, pg := range p.dirty {
		pg.dirty = false
		switch {
		case len(pg.slots) == 0:
			last := len(p.list) - 1
			p.list[pg.place] = p.list[last]
			p.list[pg.place].place = pg.place
			p.list[last] = nil
			p.list = p.list[:last]
		case len(pg.slots) == 1 && pg.size > PageSize:
			// A resource that is larger than a page is not copied.
			s := &pg.slots[0]
			frame := p.key.framing.appendFrame(make([]byte, 0, maxFrame), s.name, s.enc)
			pg.segments = append([][]byte{frame}, s.enc.Segments...)
		default:
			b := make([]byte, 0, pg.size)
			for i := range pg.slots {
				s := &pg.slots[i]
				b = p.key.framing.appendFrame(b, s.name, s.enc)
				for _, seg := range s.enc.Segments {
					b = append(b, seg...)
				}
			}
			pg.segments = [][]byte{b}
		}
	}
	clear(p.dirty)
	p.dirty = p.dirty[:0]
}

// Hub is what all subscriptions share: the store, the gate that holds collections back, and the pages. Its methods may be
// called from any goroutine.
type Hub struct {
	store *store.Store[*resource.Resource]
	ready func(collection string) bool

	mu    sync.Mutex
	pages map[pagesKey]*pages // guarded by mu
}

// NewHub returns a hub over st. Collections for which ready returns false are held: a subscription's first response waits. Whoever
// opens a collection calls [store.Store.Wake].
func NewHub(st *store.Store[*resource.Resource], ready func(collection string) bool) *Hub {
	return &Hub{store: st, ready: ready, pages: make(map[pagesKey]*pages)}
}

// Changed returns a channel that is closed when a subscription may have something to send.
func (h *Hub) Changed() <-chan struct{} { return h.store.Changed() }

// Revision returns the store's revision.
func (h *Hub) Revision() store.Revision { return h.store.Revision() }

func (h *Hub) acquire(key pagesKey) *pages {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.pages[key]
	if p == nil {
		p = &pages{key: key}
		h.pages[key] = p
	}
	p.users++
	return p
}

func (h *Hub) release(p *pages) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.users--; p.users == 0 {
		delete(h.pages, p.key)
	}
}
