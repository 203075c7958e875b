package sim

import (
	"context"
	"log/slog"
	"math"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// tick is the least time between two batches of changes. Below 100 changes
	// per second, every change is a batch.
	tick = 10 * time.Millisecond
	// maxBehind bounds the changes that are made up for after a stall, in
	// seconds; older ones are skipped.
	maxBehind = 1.0
	// heardEvery is the interval at which the registry is reported as heard
	// from without changes.
	heardEvery = 5 * time.Second
)

// adapter is the generated registry.
type adapter struct {
	conf Config
	env  plugin.Env
	log  *slog.Logger
}

// New returns an adapter of the registry that c describes. The error joins a
// *[plugin.FieldError] for each error of c.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c, err := c.Expand()
	return &adapter{conf: c, env: env, log: env.Log}, err
}

// Run builds the registry, passes it to catalog and changes one service at a
// time at the configured rate until ctx ends; then it returns nil. Every run
// starts from the same state.
func (a *adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	w := newWorld(a.conf)
	for _, svc := range w.services {
		if ctx.Err() != nil {
			return nil
		}
		if a.env.Wants(svc.Key) {
			catalog.Set(svc.Service, svc.instances)
		}
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
	made := int64(0) // changes, if they have an end
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
		if total := a.conf.ChangesTotal; total > 0 {
			due = min(due, total-made)
			made += due
		}
		if lost > 0 && !slow {
			slow = true
			a.log.LogAttrs(ctx, slog.LevelWarn, "changes cannot be made at the configured rate; lower changes_per_second",
				slog.Float64("changes_per_second", p.rate), slog.Int64("left_out", lost))
		}
		for range due {
			if ctx.Err() != nil {
				return nil
			}
			switch svc, gone := w.step(); {
			case !a.env.Wants(svc.Key):
			case gone:
				catalog.Remove(svc.Key)
			default:
				catalog.Set(svc.Service, svc.instances)
			}
		}
		if made == 0 || made < a.conf.ChangesTotal {
			timer.Reset(p.wait(time.Since(p.start)))
		}
	}
}

// pacer computes how many changes are due. It counts from the start and not
// from the last batch, so late timers and the duration of changes do not
// accumulate.
type pacer struct {
	rate  float64 // changes per second, above 0
	start time.Time
	done  int64 // number of changes that were due since the start
}

// due returns how many changes became due up to elapsed since the start, and
// how many further ones are skipped because the adapter is too far behind.
func (p *pacer) due(elapsed time.Duration) (due, lost int64) {
	// The addend compensates for products rounded to just below an integer.
	total := int64(math.Floor(p.rate*elapsed.Seconds() + 1e-6))
	due = total - p.done
	if most := max(1, int64(math.Ceil(p.rate*maxBehind))); due > most {
		due, lost = most, due-most
	}
	p.done = total
	return due, lost
}

// wait returns the time from elapsed until the next change is due.
func (p *pacer) wait(elapsed time.Duration) time.Duration {
	next := float64(p.done+1)/p.rate - elapsed.Seconds()
	if next > time.Hour.Seconds() { // longer waits may not fit a Duration
		return time.Hour
	}
	return max(tick, time.Duration(math.Ceil(next*1e9)))
}
