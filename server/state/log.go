package state

import (
	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// changeLog is the log of a collection as sinks of some shapes see it. A record
// keeps its own place. DB.mu guards both.
type changeLog struct {
	changelog.Log[*Record]
	shape encode.Shape // its places are in Record.place[shape]
}

// leave frees the place of a record, if it has one.
func (l *changeLog) leave(r *Record) {
	if r != nil && r.place[l.shape] != 0 {
		l.Leave(r.place[l.shape])
		r.place[l.shape] = 0
	}
}

// swap moves the place of a record to another of the same content.
func (l *changeLog) swap(old, with *Record) {
	if old != with {
		l.Set(old.place[l.shape], with)
		with.place[l.shape], old.place[l.shape] = old.place[l.shape], 0
	}
}

// hand moves a present name to the end of the log, for a record of the same
// content whose registry has another name. Both may be the same record.
func (l *changeLog) hand(old, with *Record, at Revision) {
	l.Hand(old.place[l.shape], at, with)
	old.place[l.shape] = 0
	with.place[l.shape] = at
}

// enter appends a record without a place to the log.
func (l *changeLog) enter(r *Record, at Revision) {
	l.Append(at, r, !r.visible(l.shape))
	r.place[l.shape] = at
}

// forget evicts the oldest removals until at most limit are retained, and calls
// f for each.
func (l *changeLog) forget(limit int, f func(*Record)) {
	l.Evict(limit, func(r *Record) {
		r.place[l.shape] = 0
		f(r)
	})
}
