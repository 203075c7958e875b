package plugin

import "sync"

// FirstListing says [Catalog].Synced when the first answer about everything that the registry lists is in. An adapter that has one does not call Synced
// itself.
//
// What is known from the start is expected before anything is asked, and what an answer makes known is expected before that answer counts as arrived, so
// that nothing is missing when no answer is awaited any more. Methods may be called from any goroutine.
type FirstListing struct {
	catalog Catalog

	mu      sync.Mutex // guards everything below
	awaited int
	synced  bool
}

// NewFirstListing returns a FirstListing that tells catalog.
func NewFirstListing(catalog Catalog) *FirstListing { return &FirstListing{catalog: catalog} }

// Expect says that one more answer is awaited. It returns what to call once that is in, or what it is about is gone. Further calls of that do
// nothing, so that it may be called with every answer.
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
