package problems

import "time"

// Bounds on log lines about the problems of one registry. All problems are
// listed regardless.
const (
	MaxLines = 20 // per Within
	Within   = time.Minute
)

// Lines limits and counts log lines. The zero Lines has logged none.
type Lines struct {
	since   time.Time // start of the window
	count   int       // lines in the window
	dropped int       // since the last summary
	told    bool      // summary logged in the window
}

// Allow reports whether another line may be logged.
func (l *Lines) Allow() bool {
	if now := time.Now(); now.Sub(l.since) >= Within {
		*l = Lines{since: now, dropped: l.dropped}
	}
	if l.count >= MaxLines {
		l.dropped++
		return false
	}
	l.count++
	return true
}

// Dropped reports whether lines were dropped since they were last taken.
func (l *Lines) Dropped() bool { return l.dropped > 0 }

// Over reports whether the window is over.
func (l *Lines) Over() bool { return time.Since(l.since) >= Within }

// Take returns the number of lines that were dropped since the last call.
func (l *Lines) Take() (dropped int) {
	dropped, l.dropped = l.dropped, 0
	return dropped
}

// Summary returns the number of dropped lines if it is time to say it, else 0:
// at the end of a listing, after the window, and at once for the first of a
// window, outside of a listing.
func (l *Lines) Summary(listed, listing bool) (dropped int) {
	if l.dropped == 0 || !listed && !l.Over() && (l.told || listing) {
		return 0
	}
	l.told = true
	return l.Take()
}

// limitQuiet is the time without refusals by a limit after which the next one
// is logged again.
const limitQuiet = time.Hour

// Limit is the limit that refused something last.
type Limit struct {
	field string
	at    time.Time
}

// Reached notes a refusal by the limit of a field, and reports whether it is
// worth a line.
func (l *Limit) Reached(field string) (fresh bool) {
	now := time.Now()
	fresh = l.field != field || now.Sub(l.at) >= limitQuiet
	*l = Limit{field, now}
	return fresh
}
