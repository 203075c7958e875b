package state

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// slot is a name's place in a log.
type slot struct {
	revision Revision
	record   *Record // nil: empty; a removed name has a record that is not visible
}

// changeLog lists each name of a collection once, in the order of the last
// change, as sinks of some shapes see it. DB.mu guards it.
type changeLog struct {
	shape encode.Shape // its places are in Record.place[shape]
	slots []slot
	live  int // present names
	dead  int // removed names that are retained
	// horizon is the revision of the newest evicted removal.
	horizon Revision
	// oldest is an index before which no removal is retained.
	oldest int
	// handed has the records that took a name over from another registry with
	// the content that it had, by the revision of that content.
	handed map[*Record]Revision
}

// after returns the index of the first slot with a greater revision.
func (l *changeLog) after(r Revision) int {
	i, found := slices.BinarySearchFunc(l.slots, r, func(s slot, r Revision) int {
		switch {
		case s.revision < r:
			return -1
		case s.revision > r:
			return 1
		}
		return 0
	})
	if found {
		i++
	}
	return i
}

// at returns the slot of a record that has a place.
func (l *changeLog) at(r *Record) *slot { return &l.slots[l.after(r.place[l.shape])-1] }

// count adds n to live or dead, whichever counts the record.
func (l *changeLog) count(r *Record, n int) {
	if r.visible(l.shape) {
		l.live += n
	} else {
		l.dead += n
	}
}

// leave frees the place of a record, if it has one.
func (l *changeLog) leave(r *Record) {
	if r == nil || r.place[l.shape] == 0 {
		return
	}
	l.at(r).record = nil
	l.count(r, -1)
	r.place[l.shape] = 0
	delete(l.handed, r)
}

// swap moves the place of a record to another of the same content.
func (l *changeLog) swap(old, with *Record) {
	if old == with {
		return
	}
	l.count(old, -1)
	l.count(with, 1)
	l.at(old).record = with
	with.place[l.shape], old.place[l.shape] = old.place[l.shape], 0
	if content, ok := l.handed[old]; ok {
		delete(l.handed, old)
		l.handed[with] = content
	}
}

// hand moves a present name to the end of the log, for a record of the same
// content whose registry has another name. Both may be the same record.
func (l *changeLog) hand(old, with *Record, at Revision) {
	content, again := l.handed[old]
	if !again {
		content = old.place[l.shape]
	}
	l.leave(old)
	l.enter(with, at)
	if l.handed == nil {
		l.handed = make(map[*Record]Revision)
	}
	l.handed[with] = content
}

// enter appends a record without a place to the log.
func (l *changeLog) enter(r *Record, at Revision) {
	if len(l.slots) > 2*(l.live+l.dead)+64 {
		l.compact()
	}
	l.slots = append(l.slots, slot{at, r})
	r.place[l.shape] = at
	l.count(r, 1)
}

// compact drops the empty slots.
func (l *changeLog) compact() {
	kept := make([]slot, 0, l.live+l.dead+(l.live+l.dead)/4+64)
	oldest := 0
	for i, s := range l.slots {
		if i == l.oldest {
			oldest = len(kept)
		}
		if s.record != nil {
			kept = append(kept, s)
		}
	}
	l.slots, l.oldest = kept, min(oldest, len(kept))
}

// forget evicts the oldest removals until at most limit are retained, and calls
// f for each.
func (l *changeLog) forget(limit int, f func(*Record)) {
	for l.dead > limit {
		s := &l.slots[l.oldest]
		if s.record != nil && !s.record.visible(l.shape) {
			r := s.record
			l.horizon = s.revision
			l.leave(r)
			f(r)
		}
		l.oldest++
	}
}
