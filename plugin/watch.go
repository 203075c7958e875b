package plugin

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Watch follows a registry by listing it and watching it for changes from there
// on. It is a complete Run of an adapter:
//
//	func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
//		return (&plugin.Watch{Follow: a.follow, RemoveGrace: time.Minute}).Run(ctx, catalog)
//	}
//
// It makes all calls to the catalog: Set, Remove, Synced, Degraded, Heard,
// Problem and Detail. When a watch ends, Follow is called again after a
// backoff. Only a complete listing or a change removes anything; a doubtful
// listing and an empty one do not, and what is missing after an outage, or all
// at once, is retained for RemoveGrace.
type Watch struct {
	// Follow opens one session: it lists the registry, passes the listing to
	// take, and passes what the watch reports since as changes until the watch
	// or ctx ends. It returns why. Nil means that changes were missed although
	// no data is lost, as when the revision to continue from was compacted or
	// has expired: the registry is listed again, and was not away. All else is
	// an outage. Calls do not overlap.
	//
	// take reports that the registry answers: call it first when both the
	// listing and the watch exist. A zero Listing reports an answer without a
	// change. Listings may be complete at any time. take must not be called
	// after Follow returned; calls from several goroutines are applied one
	// after the other. Follow bounds the time of its own requests, and detects
	// a watch that is silent. Required.
	Follow func(ctx context.Context, take func(Listing)) error
	// Retry is the backoff between sessions. It begins anew after a session
	// that reported something after its listing, or was as long as the longest
	// step. Zero means from 200 ms to 15 seconds.
	Retry Backoff
	// RemoveGrace, MinShare, AcceptEmpty and AcceptEmptyField are those of
	// [Poll]. An empty first listing counts after RemoveGrace, or with the
	// first instance.
	RemoveGrace      time.Duration
	MinShare         float64
	AcceptEmpty      bool
	AcceptEmptyField string
	// Hint is what to check if nothing is listed at first: "prefix and layout".
	Hint string
	// Detail returns how the registry is followed; it is called at the first
	// listing and at the end of each session. Nil means "watching".
	Detail func() string
}

// Run follows the registry until ctx ends, and then returns nil.
func (w *Watch) Run(ctx context.Context, catalog Catalog) error {
	if w.Follow == nil {
		return errors.New("BUG: a Watch needs Follow")
	}
	retry := w.Retry
	if retry.First <= 0 || retry.Most <= 0 {
		retry = Backoff{First: 200 * time.Millisecond, Most: 15 * time.Second}
	}
	a := newApplier(catalog, believing{w.RemoveGrace, w.MinShare, w.AcceptEmpty, w.AcceptEmptyField, w.Hint})
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Owned by Run; ends with ctx.
	wg.Go(func() { a.grace.Run(ctx) })
	listed := make(chan struct{})
	// Owned by Run; ends with ctx, or with the wait for a first instance.
	wg.Go(func() {
		select {
		case <-listed:
		case <-ctx.Done():
			return
		}
		if Pause(ctx, w.RemoveGrace, nil) {
			a.believeEmpty()
		}
	})
	first := sync.OnceFunc(func() { close(listed) })

	for ctx.Err() == nil {
		begin := time.Now()
		var takes atomic.Int64
		err := w.Follow(ctx, func(l Listing) {
			a.take(l)
			if takes.Add(1) == 1 {
				w.detail(catalog)
			}
			if l.Complete {
				first()
			}
		})
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			a.fail(err)
		}
		w.detail(catalog)
		if takes.Load() > 1 || time.Since(begin) >= retry.Most {
			retry.Reset()
		}
		Pause(ctx, retry.Next(), nil)
	}
	return nil
}

// detail reports how the registry is followed.
func (w *Watch) detail(catalog Catalog) {
	text := "watching"
	if w.Detail != nil {
		text = w.Detail()
	}
	catalog.Detail(text)
}
