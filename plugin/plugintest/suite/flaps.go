package suite

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// Flaps is a registry that fails again and again after an instance of a service
// has left, while others come. The suite checks that the one that left is gone
// after the grace period, which outages pause and do not start again, and that
// no other is removed.
type Flaps struct {
	// Config is a config block with a grace period of Grace, which must be at
	// least 6 seconds: the registry is followed for a third of it at a time,
	// and up to two seconds longer. Empty means Config.Config.
	Config json.RawMessage
	Grace  time.Duration
	// Cut and Restore are those of an [Outage].
	Cut, Restore func(ctx context.Context) error
	// Host is a host of the service.
	Host string
	// Join registers another instance of the service; n is different for each.
	// Leave deregisters the first of them. It is called once, after Cut.
	Join, Leave func(ctx context.Context, n int) error
}

// flapping is a stream while the registry flaps.
type flapping struct {
	*stream
	Flaps
	within time.Duration
	joined int
	live   []string // names of the instances in the registry
	left   string   // name of the one that left
	outage string   // what the plugin said of the outage before
}

func flaps(ctx context.Context, cfg Config) error {
	if cfg.Flaps == nil {
		return nil
	}
	if len(cfg.Flaps.Config) > 0 {
		cfg.Config = cfg.Flaps.Config
	}
	return listed(ctx, cfg, func(_ *process, s *stream) error {
		f := &flapping{stream: s, Flaps: *cfg.Flaps, within: cfg.Within, joined: 100}
		if err := s.until(cfg.Within, "a registry that is followed", notDegraded); err != nil {
			return err
		}
		f.live = s.world.instancesOf(f.Host)
		if err := f.join(ctx); err != nil {
			return err
		}
		last := len(f.live) - 1
		f.left, f.live = f.live[last], f.live[:last]
		if err := f.cut(ctx); err != nil {
			return err
		}
		if err := f.Leave(ctx, f.joined); err != nil {
			return fmt.Errorf("leave: %w", err)
		}
		for outages, followed := 1, time.Duration(0); ; outages++ {
			if err := f.Restore(ctx); err != nil {
				return fmt.Errorf("restore: %w", err)
			}
			// Another instance shows that the registry is followed, and comes
			// after all that was due before.
			if err := f.join(ctx); err != nil {
				return err
			}
			if !slices.Contains(s.world.instancesOf(f.Host), f.left) {
				return nil
			}
			if followed > 2*f.Grace {
				return fmt.Errorf("%s left before the first of %d outages ended, and was retained while the registry was followed for %v in between; the grace period is %v, and an outage must not start it again",
					f.left, outages, followed.Round(time.Millisecond), f.Grace)
			}
			began := time.Now()
			if err := f.until(f.Grace+2*wire.HeartbeatLimit, "a sign of life", func(*World) error {
				if left := f.Grace/3 - time.Since(began); left > 0 {
					return fmt.Errorf("the registry is followed for another %v", left)
				}
				return nil
			}); err != nil {
				return err
			}
			followed += time.Since(began)
			if err := f.cut(ctx); err != nil {
				return err
			}
		}
	})
}

// cut starts an outage and waits until the plugin reports it.
func (f *flapping) cut(ctx context.Context) error {
	before := f.world.Degraded // may say what is retained
	if err := f.Cut(ctx); err != nil {
		return fmt.Errorf("cut: %w", err)
	}
	// It may not have said yet that the outage before is over.
	reason := func(degraded string) string {
		r, _, _ := strings.Cut(degraded, "; ")
		return r
	}
	goesOn := before != "" && reason(before) == f.outage
	return f.until(f.within, "the degraded state", func(w *World) error {
		if w.Degraded == "" || w.Degraded == before && !goesOn {
			return errors.New("the plugin does not say that the registry cannot be followed")
		}
		f.outage = reason(w.Degraded)
		return nil
	})
}

// join registers another instance and waits until it is there.
func (f *flapping) join(ctx context.Context) error {
	f.joined++
	if err := f.Join(ctx, f.joined); err != nil {
		return fmt.Errorf("join: %w", err)
	}
	return f.until(f.within, "an instance that joined", func(w *World) error {
		for _, name := range w.instancesOf(f.Host) {
			if name != f.left && !slices.Contains(f.live, name) {
				f.live = append(f.live, name)
				return nil
			}
		}
		return fmt.Errorf("%s has no instance but %q, of the services %q", f.Host, f.live, w.Names(collection.ServiceEntry))
	})
}

// until is that of the stream while all live instances stay.
func (f *flapping) until(within time.Duration, what string, want func(w *World) error) error {
	var lost error
	return errors.Join(f.stream.until(within, what, func(w *World) error {
		have := w.instancesOf(f.Host)
		for _, name := range f.live {
			if !slices.Contains(have, name) {
				lost = fmt.Errorf("%s was removed, which is in the registry: stale beats empty", name)
				return nil
			}
		}
		return want(w)
	}), lost)
}
