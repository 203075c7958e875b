package view

import (
	"sync"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// PageSize is the target size of a page of a full response, in bytes. A change
// copies one page and a response has one segment per page, so larger pages make
// changes dearer and responses cheaper.
const PageSize = 32 << 10

// Snapshot is a whole collection, framed. It is immutable and shared by all
// sinks.
type Snapshot struct {
	// Version is a hash of all names and versions.
	Version string
	// Segments are the framed resources, in no order.
	Segments [][]byte
	// Resources is the number of resources.
	Resources int
	// Size is the total length of the segments, in bytes.
	Size int
	// Revision is the revision of the state that the snapshot reflects.
	Revision state.Revision
}

type pagesKey struct {
	collection string
	form       encode.Form
	framing    Framing
}

// slot is the position of one resource in a page.
type slot struct {
	name     string
	version  encode.Hash
	hash     encode.Hash     // of name and version
	encoding *state.Encoding // until written
	at       int             // offset in the page, once written
	size     int             // framed, in bytes
}

// page is a run of framed resources. Its bytes are replaced, never modified.
type page struct {
	slots    []slot
	size     int
	segments [][]byte // one, unless the page is a single large resource
	dirty    bool
	place    int // index in pages.list
}

// pages holds a collection, framed, page by page.
type pages struct {
	kind    state.Kind
	framing Framing
	layout  *encode.Layout
	key     pagesKey
	users   int // guarded by View.mu

	mu       sync.Mutex
	cursor   state.Cursor     // mu guards the fields below
	of       map[string]*page // by resource name
	list     []*page
	sum      encode.Hash
	size     int
	snapshot *Snapshot
	dirty    []*page
	scratch  []byte
}

// current applies the changes of the state and returns the snapshot.
func (p *pages) current(db data) *Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed := p.snapshot == nil
	for c := range db.Changes(p.kind, &p.cursor) {
		p.change(&c)
		changed = true
	}
	if p.cursor.Lost || len(p.list) > 16 && p.size < len(p.list)*PageSize/4 { // or mostly free space
		p.of, p.list, p.dirty, p.sum, p.size = make(map[string]*page), nil, nil, 0, 0
		p.cursor, changed = state.Cursor{}, true
		for c := range db.Changes(p.kind, &p.cursor) {
			p.change(&c)
		}
	}
	if !changed {
		return p.snapshot
	}
	p.flush()
	p.snapshot = &Snapshot{Version: p.sum.String(), Resources: len(p.of), Size: p.size, Revision: p.cursor.Revision}
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

func (p *pages) change(c *state.Change) {
	old := p.of[c.Name]
	var e state.Encoding
	if !c.Removed {
		e = c.Record.Encode(p.layout)
	}
	if c.Removed || e.Absent {
		if old != nil {
			p.take(old, c.Name)
			delete(p.of, c.Name)
		}
		return
	}
	var version [versionSize]byte
	s := slot{name: c.Name, version: e.Version, encoding: &e}
	s.hash = encode.HashOf([]byte(c.Name), e.Version.Append(version[:0]))
	p.scratch = p.framing.append(p.scratch[:0], c.Name, &e)
	s.size = len(p.scratch) + e.Size
	if old != nil {
		for i := range old.slots {
			if was := &old.slots[i]; was.name == c.Name {
				if was.version == s.version {
					return
				}
				p.sum += s.hash - was.hash
				p.size += s.size - was.size
				old.size += s.size - was.size
				*was = s
				p.mark(old)
				break
			}
		}
		if old.size <= 2*PageSize || len(old.slots) == 1 {
			return
		}
		p.take(old, c.Name) // outgrew its page
	}
	p.of[c.Name] = p.put(s)
}

func (p *pages) mark(pg *page) {
	if !pg.dirty {
		pg.dirty = true
		p.dirty = append(p.dirty, pg)
	}
}

func (p *pages) put(s slot) *page {
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
	p.sum += s.hash
	p.mark(pg)
	return pg
}

func (p *pages) take(pg *page, name string) {
	for i := range pg.slots {
		if s := pg.slots[i]; s.name == name {
			last := len(pg.slots) - 1
			pg.slots[i] = pg.slots[last]
			pg.slots[last] = slot{}
			pg.slots = pg.slots[:last]
			pg.size -= s.size
			p.size -= s.size
			p.sum -= s.hash
			break
		}
	}
	p.mark(pg)
}

// flush writes each changed page once and drops empty ones.
func (p *pages) flush() {
	for _, pg := range p.dirty {
		pg.dirty = false
		switch {
		case len(pg.slots) == 0:
			last := len(p.list) - 1
			p.list[pg.place] = p.list[last]
			p.list[pg.place].place = pg.place
			p.list[last] = nil
			p.list = p.list[:last]
		case len(pg.slots) == 1 && pg.size > PageSize && pg.slots[0].encoding != nil:
			// The endpoints of a service larger than a page are not copied.
			s := &pg.slots[0]
			e := s.encoding
			s.encoding = nil
			pg.segments = e.Segments(p.framing.append(make([]byte, 0, maxFrame+len(s.name)+e.HeadSize()), s.name, e))
		default:
			pg.write(p)
		}
	}
	clear(p.dirty)
	p.dirty = p.dirty[:0]
}

// write copies unchanged resources and encodes changed ones.
func (pg *page) write(p *pages) {
	b := make([]byte, 0, pg.size)
	for i := range pg.slots {
		s := &pg.slots[i]
		at := len(b)
		if s.encoding == nil {
			b = pg.appendOld(b, s)
		} else {
			b = s.encoding.Append(p.framing.append(b, s.name, s.encoding))
			s.encoding = nil
		}
		s.at = at
	}
	pg.segments = [][]byte{b}
}

// appendOld appends an unchanged resource.
func (pg *page) appendOld(b []byte, s *slot) []byte {
	if len(pg.segments) == 1 {
		return append(b, pg.segments[0][s.at:][:s.size]...)
	}
	for _, segment := range pg.segments {
		b = append(b, segment...)
	}
	return b
}
