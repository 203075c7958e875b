// Package protect decides which removals look like an accident.
//
// From counts, past values of them, and what a registry removes follows whether
// it is removed at once, or retained until somebody decides or time is up. A
// [Guard] counts what a registry has, and [Endpoints] do so for a service. The
// package has no lock and no clock: the time is an argument.
package protect

import "time"

// Config says which removals are treated as accidental and retained. The zero
// value retains nothing.
type Config struct {
	// MinShare, from 0 to 1, is the share of the peak number of services in
	// [Window] that must remain. 0 retains nothing.
	MinShare float64
	// MinServices is the number of services from which MinShare applies. A
	// complete listing without any service is retained regardless.
	MinServices int
	// Hold is how long removals are retained.
	Hold time.Duration
	// Service protects the endpoints of a single service.
	Service Service
}

// Service says which endpoint removals of a service are retained.
type Service struct {
	// MinShare, from 0 to 1, is the share of the service's peak number of
	// endpoints in [Window] that must remain. 0 retains nothing.
	MinShare float64
	// MinEndpoints is the number of endpoints from which MinShare applies.
	MinEndpoints int
}

// Enabled reports whether any protection is configured.
func (c *Config) Enabled() bool { return c.MinShare > 0 || c.Service.MinShare > 0 }

// Suspicious reports whether a decrease of the services from a peak looks like
// an accident; those left miss a weight, in parts of [Whole], with endpoints
// that they lost. Complete means that a listing without the others is complete.
func (c *Config) Suspicious(left, missing, peak int, complete bool) bool {
	weight := float64(left) - float64(missing)/Whole
	if c.MinShare <= 0 || float64(left) >= c.MinShare*float64(peak) && weight >= c.endpointShare()*float64(peak) {
		return false
	}
	return peak >= c.MinServices || complete && left == 0
}

// endpointShare is the share of the endpoints that must remain: half at most,
// as single endpoints come and go more than services do.
func (c *Config) endpointShare() float64 { return min(c.MinShare, 0.5) }

// Suspicious reports whether a decrease of the endpoints of a service from a
// peak looks like an accident.
func (s *Service) Suspicious(left, peak int) bool {
	return s.MinShare > 0 && peak >= s.MinEndpoints && float64(left) < s.MinShare*float64(peak)
}

// Window is how far back the number of services, or of a service's endpoints,
// is compared with.
const Window = 10 * time.Minute

// Peaks holds past values of a count in [Window], in decreasing order: a value
// is dropped when one at least as large follows. There are at most 2 x steps.
type Peaks []peak

type peak struct {
	count       int
	first, last time.Time // when the count fell from it; of merged values, the first and last time
}

// steps is the number of steps in which the window advances.
const steps = 60

// Note records that the count had a value until now.
func (p *Peaks) Note(count int, now time.Time) {
	for len(*p) > 0 && now.Sub((*p)[0].last) > Window {
		*p = (*p)[1:]
	}
	for len(*p) > 0 && (*p)[len(*p)-1].count <= count {
		*p = (*p)[:len(*p)-1]
	}
	// Merge a value that ended shortly after a higher one into that one.
	if n := len(*p); n > 0 && now.Sub((*p)[n-1].first) < Window/steps {
		(*p)[n-1].last = now
		return
	}
	*p = append(*p, peak{count, now, now})
}

// Max returns the highest value in the window that ends now, including the
// current count.
func (p Peaks) Max(count int, now time.Time) int {
	for _, q := range p {
		if now.Sub(q.last) <= Window {
			return max(count, q.count)
		}
	}
	return count
}

// Clock says from when on the time of a retained removal counts.
type Clock struct{ newest time.Time }

// From returns that of a removal now that leaves so many of those before.
// Pending is the number of removals that wait already. A further removal of a
// share that is an accident by itself is retained for the whole time. Single
// ones go with those before, so that a registry that loses a service now and
// then is not held up for ever.
func (c *Clock) From(left, before int, share float64, pending int, now time.Time) time.Time {
	if pending == 0 || float64(left) < share*float64(before) {
		c.newest = now
	}
	return c.newest
}

// Item says why a resource is retained.
type Item struct {
	Since   time.Time
	From    time.Time // Config.Hold counts from here
	Listing bool      // missing from a complete listing, rather than removed explicitly
	Service bool      // due to Config.Service
	Kept    bool      // an operator keeps it
	Back    bool      // it was gone before its removal looked like an accident
}

// Reason returns it in words.
func (i *Item) Reason() string {
	what := "the registry removed it together with most of its services"
	switch {
	case i.Listing && i.Service:
		what = "a complete listing was without it and most other endpoints of its service"
	case i.Listing:
		what = "a complete listing was without it and most other services"
	case i.Service:
		what = "the registry removed it together with most endpoints of its service"
	}
	if i.Back {
		what = "the registry removed it before the run of removals looked like an accident, and it was put back"
	}
	if i.Kept {
		return what + "; an operator keeps it"
	}
	return what + "; the removal is paused"
}
