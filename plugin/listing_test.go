package plugin

import (
	"sync"
	"testing"
)

// The registry is synced once, when the last of the answers is in that were
// expected until then.
func TestFirstListing(t *testing.T) {
	c := &told{}
	l := NewFirstListing(c)
	scope, other := l.Expect(), l.Expect()
	other()
	service := l.Expect() // made known by the scope's answer
	scope()
	other() // a further answer
	scope()
	if c.synced != 0 {
		t.Fatal("synced before everything has arrived")
	}
	service()
	if c.synced != 1 {
		t.Fatalf("synced %d times when everything had arrived", c.synced)
	}
	late := l.Expect()
	late()
	late()
	service()
	if c.synced != 1 {
		t.Errorf("synced %d times in the end", c.synced)
	}
}

// Answers may arrive from any goroutine, and make more of them known.
func TestFirstListingConcurrently(t *testing.T) {
	const scopes, services = 10, 200
	c := &told{}
	l := NewFirstListing(c)
	var wg sync.WaitGroup
	last := l.Expect()
	for range scopes {
		scope := l.Expect()
		wg.Go(func() {
			for range services {
				service := l.Expect()
				wg.Go(service)
				wg.Go(service)
			}
			scope()
		})
	}
	wg.Wait()
	if c.synced != 0 {
		t.Error("synced while one answer was awaited")
	}
	for range 4 {
		wg.Go(last)
	}
	wg.Wait()
	if c.synced != 1 {
		t.Errorf("synced %d times", c.synced)
	}
}
