package protect

import "time"

// Whole is the weight of a service that has all its endpoints. One that has
// fewer than before weighs less, so that a registry that loses endpoints
// everywhere is one that loses services.
const Whole = 1 << 16

// Missing returns the weight that a service with so many endpoints has lost
// with others.
func Missing(live, less int) int {
	if less <= 0 {
		return 0
	}
	return Whole * less / (live + less)
}

// Loss is what a batch removes of one service.
type Loss struct {
	Counted bool // as a service that the registry has
	Whole   bool // it goes as a whole, or its last endpoint does
	Live    int  // endpoints before, except retained ones
	Goes    int  // of them, those that the batch removes
	Less    int  // endpoints that went within [Window], and nothing replaced
	Net     int  // of Goes, those that nothing replaces
	// Replaced reports that as many endpoints come as go.
	Replaced bool
	Peak     int // of Live within [Window]
}

// Batch is what a registry removes at once.
type Batch struct {
	Services int // before, with those that the batch adds
	Missing  int // weight that these have lost already, in parts of [Whole]
	Peak     int // of Services within [Window]
	Plain    int // services without endpoints of their own that go
	Complete bool
	Pending  int // retained, awaiting a decision
	Mass     bool
	Losses   []Loss
}

// Verdict is a decision on a [Loss].
type Verdict struct {
	Hold    bool
	Service bool // due to Config.Service
	From    time.Time
}

// Decide returns whether the services that a batch removes are retained as an
// accident of the whole registry, and from when on their time counts; and what
// becomes of each loss. While an accident is retained (Mass), what goes as a
// whole, or down to less than the share of its endpoints, is of it.
func (c *Config) Decide(b *Batch, clock *Clock, now time.Time) (accident bool, from time.Time, verdicts []Verdict) {
	left, missing := b.Services-b.Plain, b.Missing
	for i := range b.Losses {
		if l := &b.Losses[i]; l.Counted {
			missing -= Missing(l.Live, l.Less)
			if l.Whole {
				left--
			} else {
				missing += Missing(l.Live-l.Net, l.Less+l.Net)
			}
		}
	}
	if accident = c.MinShare > 0 && b.Mass || c.Suspicious(left, missing, b.Peak, b.Complete); accident {
		from = clock.From(left*Whole-missing, b.Services*Whole-b.Missing, c.MinShare, b.Pending, now)
	}
	verdicts = make([]Verdict, len(b.Losses))
	for i := range b.Losses {
		l, v := &b.Losses[i], &verdicts[i]
		v.Hold, v.From = accident && (l.Whole || c.Few(l.Live-l.Net, l.Less+l.Net)), from
		stay := l.Live - l.Goes
		if !v.Hold && !l.Replaced && c.Service.Suspicious(stay, l.Peak) {
			*v = Verdict{Hold: true, Service: true, From: clock.From(stay, l.Live, c.Service.MinShare, b.Pending, now)}
		}
	}
	return accident, from, verdicts
}

// Few reports whether a service has lost more endpoints than the share allows:
// what an accident of its registry retains of it is all that it had.
func (c *Config) Few(live, less int) bool {
	return less > 0 && float64(live) < c.endpointShare()*float64(live+less)
}
