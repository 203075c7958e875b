package state

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// slot is one name's place in a log.
type slot struct {
	revision Revision
	record   *Record // nil: the name has moved on; see record.visible for one that is gone
}

// changeLog is the names of a collection as sinks of some shapes see them, each once,
// in the order in which they changed last. DB.mu guards it.
type changeLog struct {
	shape encode.Shape // the one whose places it keeps
	slots []slot
	live  int // names that are there
	dead  int // names that are gone and remembered
	// horizon is the revision of the newest removal that is no longer
	// remembered.
	horizon Revision
	// oldest is an index before which no name that is gone is remembered.
	oldest int
}

// after returns the index of the first slot whose revision is greater.
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

// count adds n to what is counted for a record.
func (l *changeLog) count(r *Record, n int) {
	if r.visible(l.shape) {
		l.live += n
	} else {
		l.dead += n
	}
}

// leave gives up a record's place, if it has one.
func (l *changeLog) leave(r *Record) {
	if r == nil || r.place[l.shape] == 0 {
		return
	}
	l.at(r).record = nil
	l.count(r, -1)
	r.place[l.shape] = 0
}

// swap gives a record the place of another one, whose content is the same.
func (l *changeLog) swap(old, with *Record) {
	if old == with {
		return
	}
	l.count(old, -1)
	l.count(with, 1)
	l.at(old).record = with
	with.place[l.shape], old.place[l.shape] = old.place[l.shape], 0
}

// enter puts a record without a place at the end of the log.
func (l *changeLog) enter(r *Record, at Revision) {
	if len(l.slots) > 2*(l.live+l.dead)+64 {
		l.compact()
	}
	l.slots = append(l.slots, slot{at, r})
	r.place[l.shape] = at
	l.count(r, 1)
}

// compact drops the slots that nobody is in.
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

// forget drops the oldest names that are gone until no more than limit are
// remembered, and calls f for each.
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
