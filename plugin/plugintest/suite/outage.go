package suite

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// Outage is a time in which the registry cannot be followed. The suite checks
// that the known state is retained: stale beats empty.
type Outage struct {
	// Name describes it in messages.
	Name string
	// Cut starts the outage: it stops or disconnects the registry, or makes its
	// answers invalid. The plugin must then report that it is degraded.
	Cut func(ctx context.Context) error
	// Restore ends the outage. The plugin must then report recovery.
	Restore func(ctx context.Context) error
	// Lasts is the duration of the outage after the plugin has reported it.
	// Zero means five seconds.
	Lasts time.Duration
	// Want returns an error while the expected state after the outage is
	// missing. Nil means exactly the state before.
	Want func(w *World) error
}

func outages(ctx context.Context, cfg Config) error {
	if len(cfg.Outages) == 0 {
		return nil
	}
	return listed(ctx, cfg, func(p *process, s *stream) error {
		if err := s.until(cfg.Within, "a registry that is followed", notDegraded); err != nil {
			return err
		}
		for _, o := range cfg.Outages {
			if err := s.outage(ctx, cfg, o); err != nil {
				return fmt.Errorf("outage %q: %w", o.Name, err)
			}
		}
		return nil
	})
}

func notDegraded(w *World) error {
	if w.Degraded != "" {
		return errors.New("the registry is degraded: " + w.Degraded)
	}
	return nil
}

// outage makes one outage and checks the stream.
func (s *stream) outage(ctx context.Context, cfg Config, o Outage) error {
	before, removals := s.world.keys(), s.world.Removals
	lost := func() error {
		if n := s.world.Removals - removals; n > 0 && !cfg.Changing {
			return fmt.Errorf("%d resources were removed; what is known must stay: stale beats empty", n)
		}
		return nil
	}
	if err := o.Cut(ctx); err != nil {
		return fmt.Errorf("cut: %w", err)
	}
	if err := s.until(cfg.Within, "the degraded state", func(w *World) error {
		if w.Degraded == "" {
			return errors.New("the plugin does not say that the registry cannot be followed")
		}
		return nil
	}); err != nil {
		return errors.Join(err, lost())
	}
	lasts := o.Lasts
	if lasts == 0 {
		lasts = 5 * time.Second
	}
	noticed := time.Now()
	if err := s.until(lasts+2*wire.HeartbeatLimit, "a sign of life during the outage", func(*World) error {
		if left := lasts - time.Since(noticed); left > 0 {
			return fmt.Errorf("the outage lasts another %v", left)
		}
		return nil
	}); err != nil {
		return errors.Join(err, lost())
	}
	if err := lost(); err != nil {
		return err
	}
	if err := o.Restore(ctx); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	if err := s.until(cfg.Within, "the end of the degraded state", notDegraded); err != nil {
		return errors.Join(err, lost())
	}
	if o.Want != nil {
		return s.until(cfg.Within, "what is to be there after it", o.Want)
	}
	if err := lost(); err != nil || cfg.Changing {
		return err
	}
	if after := s.world.keys(); fmt.Sprint(after) != fmt.Sprint(before) {
		return fmt.Errorf("there were %d resources before and %d after, or others", len(before), len(after))
	}
	return nil
}
