package sim

import (
	"context"
	"log/slog"
	"math"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// tick is the least time between two batches of changes. At a rate of fewer than 100 changes a second every change
	// has a batch of its own.
	tick = 10 * time.Millisecond
	// maxBehind is how many seconds' worth of changes are made up for after a stall; what is older never happens.
	maxBehind = 1.0
	// heardEvery is how often the world is heard from although nothing changes.
	heardEvery = 5 * time.Second
)

// adapter is the registry that does not exist.
type adapter struct {
	conf Config
	log  *slog.Logger
}

// New returns an adapter that follows the world that c describes. The error joins a *[plugin.FieldError] for each thing that is
// wrong with c.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return &adapter{conf: c, log: env.Log}, nil
}

// Run builds the world, hands it to catalog and then changes one service at a time, at the configured rate, until ctx ends; then it
// returns nil. Each run begins again with the world after no change.
func (a *adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	w := newWorld(a.conf)
	for _, svc := range w.services {
		if ctx.Err() != nil {
			return nil
		}
		catalog.Set(svc.Service, svc.instances)
	}
	catalog.Synced()
	catalog.Heard()
	heard := time.NewTicker(heardEvery)
	defer heard.Stop()

	if a.conf.ChangesPerSecond == 0 || len(w.services) == 0 {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-heard.C:
				catalog.Heard()
			}
		}
	}
	p := pacer{rate: a.conf.ChangesPerSecond, start: time.Now()}
	timer := time.NewTimer(p.wait(0))
	defer timer.Stop()
	slow := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-heard.C:
			catalog.Heard()
			continue
		case <-timer.C:
		}
		due, lost := p.due(time.Since(p.start))
		if lost > 0 && !slow {
			slow = true
			a.log.LogAttrs(ctx, slog.LevelWarn, "changes cannot be made at the configured rate; lower changes_per_second",
				slog.Float64("changes_per_second", p.rate), slog.Int64("left_out", lost))
		}
		for range due {
			if ctx.Err() != nil {
				return nil
			}
			if svc, gone := w.step(); gone {
				catalog.Remove(svc.Key)
			} else {
				catalog.Set(svc.Service, svc.instances)
			}
		}
		timer.Reset(p.wait(time.Since(p.start)))
	}
}

// pacer says how many changes are due. It counts from the start and not from the last batch, so that late timers and the time
// that changes take do not add up.
type pacer struct {
	rate  float64 // changes per second, above 0
	start time.Time
	done  int64 // changes that were due since start
}

// due returns how many changes have fallen due by the time elapsed since the start, and how many more than that are left out because
// the adapter is too far behind.
func (p *pacer) due(elapsed time.Duration) (due, lost int64) {
	// The small addition is for products that rounding left just below a whole number.
	total := int64(math.Floor(p.rate*elapsed.Seconds() + 1e-6))
	due = total - p.done
	if most := max(1, int64(math.Ceil(p.rate*maxBehind))); due > most {
		due, lost = most, due-most
	}
	p.done = total
	return due, lost
}

// wait returns how long it is, elapsed after the start, until there is something to do.
func (p *pacer) wait(elapsed time.Duration) time.Duration {
	next := float64(p.done+1)/p.rate - elapsed.Seconds()
	if next > time.Hour.Seconds() { // longer waits need not fit a Duration
		return time.Hour
	}
	return max(tick, time.Duration(math.Ceil(next*1e9)))
}
