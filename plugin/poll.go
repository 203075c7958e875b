package plugin

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Snapshot is a service with all its instances.
type Snapshot struct {
	Service   registry.Service
	Instances []registry.Instance
}

// Listing is the content of a registry, or its changes since the last listing.
// The receiver owns it.
type Listing struct {
	// Complete reports that Services are all services. Otherwise they are those
	// changed since the previous listing; after one with Doubt, only another
	// complete listing ends the doubt.
	Complete bool
	Services []Snapshot
	// Removed are removed services. It matters only if Complete is false.
	Removed []registry.Key
	// Doubt is why the listing may be incomplete: it was filtered, cut off or
	// read during a change. Its content is applied, and nothing is removed. Nil
	// if it is complete.
	Doubt error
	// Lost is why the registry may lack data that it had: a different server
	// answered, or its revision went back. What it lacks is retained as after
	// an outage, with this reason. Nil if it lacks nothing.
	Lost error
	// Away is why a part of the registry cannot be followed, although the
	// session goes on, for [Watch]: an outage until a listing without it. The
	// content is applied, and what it lacks retained as in an outage. Nil if
	// everything is followed.
	Away error
	// Problems are what cannot be used unchanged, as for [Catalog].Problem:
	// reasons by id. An empty reason clears one, and a complete listing clears
	// those that it does not have.
	Problems map[string]string
}

// Poll follows a registry by polling it for everything, or for changes. It is a
// complete Run of an adapter:
//
//	func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
//		return (&plugin.Poll{Fetch: a.fetch, Interval: 30 * time.Second, RemoveGrace: time.Minute}).Run(ctx, catalog)
//	}
//
// It makes all calls to the catalog: Set, Remove, Synced, Degraded, Heard,
// Problem and Detail. An error, a doubtful listing and an empty one remove
// nothing; what is missing after an error, or all at once, is retained for
// RemoveGrace.
type Poll struct {
	// Fetch queries the registry. Calls do not overlap; the context ends after
	// Timeout. Any error counts as an outage. Required.
	Fetch func(ctx context.Context) (Listing, error)
	// Interval is the time between the starts of two fetches, with a jitter of
	// ten percent. A slow registry is polled less often: the pause after a
	// fetch is at least four times its duration. Required.
	Interval time.Duration
	// Timeout bounds one fetch. Zero means a minute.
	Timeout time.Duration
	// Retry is the backoff after errors. Zero means from half a second to
	// Interval, and at least to a second.
	Retry Backoff
	// RemoveGrace is how long missing instances are retained after an outage.
	RemoveGrace time.Duration
	// MinShare is the share of the known instances, 0 to 1, below which a
	// complete listing that lacks at least two of them is not applied at once:
	// missing instances are then retained for RemoveGrace. Zero means no
	// minimum.
	MinShare float64
	// AcceptEmpty applies a complete listing without instances. Otherwise such
	// a listing removes nothing and, if it is the first, counts only after
	// RemoveGrace.
	AcceptEmpty bool
	// AcceptEmptyField is the field of the configuration that sets AcceptEmpty,
	// "accept_empty", which an operator is told to set where that may be right.
	// Empty: there is none.
	AcceptEmptyField string
	// Detail returns how the registry is followed; it is called after each
	// fetch. Nil means "polling".
	Detail func() string
}

// Run follows the registry until ctx ends, and then returns nil.
func (p *Poll) Run(ctx context.Context, catalog Catalog) error {
	if p.Fetch == nil || p.Interval <= 0 {
		return errors.New("BUG: a Poll needs Fetch and a positive Interval")
	}
	a := newApplier(catalog, believing{removeGrace: p.RemoveGrace, minShare: p.MinShare, acceptEmpty: p.AcceptEmpty, emptyField: p.AcceptEmptyField})
	retry := p.Retry
	if retry.First <= 0 || retry.Most <= 0 {
		retry = Backoff{First: 500 * time.Millisecond, Most: max(p.Interval, time.Second)}
	}
	timeout := p.Timeout
	if timeout <= 0 {
		timeout = time.Minute
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Owned by Run; ends with ctx.
	wg.Go(func() { a.grace.Run(ctx) })

	for ctx.Err() == nil {
		begin := time.Now()
		asked, done := context.WithTimeout(ctx, timeout)
		listing, err := p.Fetch(asked)
		done()
		if ctx.Err() != nil {
			break
		}
		p.detail(catalog)
		if err != nil {
			a.fail(err)
			Pause(ctx, retry.Next(), nil)
			continue
		}
		retry.Reset()
		a.take(listing)
		took := time.Since(begin)
		// From 95 to 105 % of the interval.
		interval := p.Interval*95/100 + 2*(Jitter(p.Interval/10)-p.Interval/20)
		Pause(ctx, max(interval-took, 4*took), nil)
	}
	return nil
}

// detail reports how the registry is followed.
func (p *Poll) detail(catalog Catalog) {
	text := "polling"
	if p.Detail != nil {
		text = p.Detail()
	}
	catalog.Detail(text)
}
