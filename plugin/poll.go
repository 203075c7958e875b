package plugin

import (
	"context"
	"errors"
	"fmt"
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
	// changed since the previous listing, which must have had an instance and
	// no Doubt: after a listing that may have been distrusted, return a
	// complete one.
	Complete bool
	Services []Snapshot
	// Removed are removed services. It matters only if Complete is false.
	Removed []registry.Key
	// Doubt is why the listing may be incomplete: it was filtered, cut off or
	// read during a change. Its content is applied, and nothing is removed. Nil
	// if it is complete.
	Doubt error
	// Moved reports that a different server answered, which may not have all
	// data yet: what it lacks is retained as after an outage.
	Moved bool
}

// Poll follows a registry by polling it for everything, or for changes. It is a
// complete Run of an adapter:
//
//	func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
//		return (&plugin.Poll{Fetch: a.fetch, Interval: 30 * time.Second, RemoveGrace: time.Minute}).Run(ctx, catalog)
//	}
//
// It makes all calls to the catalog: Set, Remove, Synced, Degraded, Heard and
// Detail. An error, a doubtful listing and an empty one remove nothing; what is
// missing after an error, or all at once, is retained for RemoveGrace.
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
	// Detail returns how the registry is followed; it is called after each
	// fetch. Nil means "polling".
	Detail func() string
}

// pollFault is a kind of fault of a polled registry, in the order shown.
type pollFault int

const (
	// pollAway: no usable answer.
	pollAway pollFault = iota
	// pollDoubt: the answer may be incomplete.
	pollDoubt
	// pollKept: instances are retained after an outage.
	pollKept
)

// polling is one Run of a Poll.
type polling struct {
	*Poll
	catalog Catalog
	faults  *Faults[pollFault]
	grace   *Grace
	synced  bool
	began   time.Time // time of the first answer
}

// Run follows the registry until ctx ends, and then returns nil.
func (p *Poll) Run(ctx context.Context, catalog Catalog) error {
	if p.Fetch == nil || p.Interval <= 0 {
		return errors.New("BUG: a Poll needs Fetch and a positive Interval")
	}
	r := &polling{Poll: p, catalog: catalog, faults: NewFaults[pollFault](catalog)}
	r.grace = NewGrace(catalog, p.RemoveGrace, func(err error) { r.faults.Set("kept", pollKept, err) })
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
	wg.Go(func() { r.grace.Run(ctx) })

	for ctx.Err() == nil {
		begin := time.Now()
		asked, done := context.WithTimeout(ctx, timeout)
		listing, err := p.Fetch(asked)
		done()
		if ctx.Err() != nil {
			break
		}
		r.detail()
		if err != nil {
			r.grace.Away()
			r.faults.Set("registry", pollAway, err)
			Pause(ctx, retry.Next(), nil)
			continue
		}
		catalog.Heard()
		retry.Reset()
		r.faults.Clear("registry")
		r.take(listing)
		took := time.Since(begin)
		// From 95 to 105 % of the interval.
		interval := p.Interval*95/100 + 2*(Jitter(p.Interval/10)-p.Interval/20)
		Pause(ctx, max(interval-took, 4*took), nil)
	}
	return nil
}

// detail reports how the registry is followed.
func (r *polling) detail() {
	text := "polling"
	if r.Detail != nil {
		text = r.Detail()
	}
	r.catalog.Detail(text)
}

// take applies a listing to the catalog.
func (r *polling) take(l Listing) {
	if r.began.IsZero() {
		r.began = time.Now()
	}
	known, before := r.grace.Instances()
	listed := 0
	for _, s := range l.Services {
		listed += len(s.Instances)
	}
	doubt := l.Doubt
	if l.Complete && listed == 0 && !r.AcceptEmpty && doubt == nil {
		switch {
		case known > 0:
			r.grace.Away() // until it lists an instance
			r.faults.Set("listing", pollDoubt, errors.New("the registry lists no instance at all, so nothing is removed; if that is right, set accept_empty"))
			return
		case !r.synced && time.Since(r.began) < r.RemoveGrace:
			doubt = fmt.Errorf("the registry lists no instance at all, which is believed %v after the start (remove_grace); if that is right, set accept_empty", r.RemoveGrace)
		}
	}
	if l.Moved || l.Complete && before-listed >= 2 && float64(listed) < r.MinShare*float64(before) {
		r.grace.Away() // immediately followed by Back: starts the grace period
	}
	r.grace.Back()
	r.faults.Set("listing", pollDoubt, doubt)
	if doubt != nil {
		for _, s := range l.Services {
			r.grace.Add(s.Service, s.Instances)
		}
		return
	}
	listedKeys := make(map[registry.Key]bool, len(l.Services))
	for _, s := range l.Services {
		listedKeys[s.Service.Key] = true
		r.grace.Set(s.Service, s.Instances)
	}
	if !l.Complete {
		for _, key := range l.Removed {
			r.grace.Remove(key)
		}
		return
	}
	r.grace.RemoveOthers(func(key registry.Key) bool { return listedKeys[key] })
	if !r.synced {
		r.synced = true
		r.catalog.Synced()
	}
}
