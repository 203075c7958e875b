package plugin

import "sync"

// FirstListing calls [Catalog].Synced once everything that the registry lists
// has been answered. An adapter that uses it does not call Synced itself.
//
// Call Expect for everything known initially before sending requests, and for
// everything an answer reveals before that answer is marked as arrived, so that
// the count reaches zero only at the end. FirstListing is safe for concurrent
// use.
type FirstListing struct {
	catalog Catalog

	mu      sync.Mutex // guards the fields below
	awaited int
	synced  bool
}

// NewFirstListing returns a FirstListing that reports to catalog.
func NewFirstListing(catalog Catalog) *FirstListing { return &FirstListing{catalog: catalog} }

// Expect adds one pending answer. Call arrived when the answer is in or its
// subject was removed. Further calls of arrived do nothing, so it may be called
// with every answer.
func (l *FirstListing) Expect() (arrived func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.synced {
		return func() {}
	}
	l.awaited++
	return sync.OnceFunc(l.arrived)
}

func (l *FirstListing) arrived() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.awaited--
	if l.awaited == 0 && !l.synced {
		l.synced = true
		l.catalog.Synced()
	}
}
