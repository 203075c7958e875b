package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// Sink takes what a plugin streams. Its methods are called one after the other.
type Sink interface {
	// Begin says that a new stream begins, which will mention everything again. What the sink has stays; what the stream has not
	// mentioned when it says synced is gone.
	Begin(d Description)
	// Apply takes a message that is more than a sign of life. It is the sink's own from then on. An error says that the plugin broke the
	// contract in a way that makes the rest of the stream useless: the plugin is restarted.
	Apply(resp *pluginv1.WatchResponse) error
	// Down says that the plugin died, broke the contract, or could not be started, and why. Everything stays as it is.
	Down(err error)
}

// Supervisor runs the plugin of one registry.
type Supervisor struct {
	host    *Host
	spec    Spec
	sink    Sink
	log     *slog.Logger
	metrics *Metrics

	mu     sync.Mutex
	status Status // guarded by mu
}

// New returns a supervisor that is not running. The logger should be bound to the registry. Metrics may be nil.
func New(host *Host, spec Spec, sink Sink, log *slog.Logger, metrics *Metrics) (*Supervisor, error) {
	if err := spec.Validate(); err != nil {
		return nil, fmt.Errorf("registry %q: %w", spec.Registry, err)
	}
	s := &Supervisor{host: host, spec: spec, sink: sink, log: log, metrics: metrics}
	s.status = Status{Registry: spec.Registry, Adapter: spec.Adapter}
	s.setPhase(PhaseStopped)
	return s, nil
}

// Status returns a snapshot.
func (s *Supervisor) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// Run keeps the plugin running until ctx ends, which is when it returns nil. The plugin has ended by then.
func (s *Supervisor) Run(ctx context.Context) error {
	defer s.stopped()
	b := backoff{limits: s.host.limits}
	for {
		live, err := s.session(ctx)
		if ctx.Err() != nil {
			return nil
		}
		phase, pause := PhaseRestarting, b.restart(live)
		var violations []Violation
		if e, ok := errors.AsType[*ConfigError](err); ok {
			phase, pause, violations = PhaseFailed, b.refused(), e.Violations
		}
		s.failed(phase, err, violations, pause)
		s.sink.Down(err)

		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
		s.update(func(st *Status) { st.Restarts++ })
	}
}

// backoff works out the pauses between processes.
type backoff struct {
	limits limits
	last   time.Duration // before jitter; zero: none yet
}

// restart returns the pause after a process that was live for the given time: twice as long each time, shortened by up to a
// half at random so that several plugins do not start at once.
func (b *backoff) restart(live time.Duration) time.Duration {
	if live >= b.limits.healthy {
		b.last = 0
	}
	b.last = min(max(2*b.last, b.limits.minBackoff), b.limits.maxBackoff)
	return b.last - rand.N(b.last/2)
}

// refused returns the pause after a configuration was refused.
func (b *backoff) refused() time.Duration {
	b.last = 0
	return b.limits.refused - rand.N(b.limits.refused/10)
}

// session runs one process to its end. It returns for how long the process was live, and what ended it.
func (s *Supervisor) session(ctx context.Context) (live time.Duration, err error) {
	s.setPhase(PhaseStarting)
	if s.metrics != nil {
		s.metrics.starts.WithLabelValues(s.spec.Registry).Inc()
	}
	c, err := open(ctx, s.host, s.spec, s.log)
	defer func() {
		c.close()
		s.update(func(st *Status) { st.PID = 0 })
	}()
	if err != nil {
		return 0, err
	}
	s.update(func(st *Status) { st.PID = c.pid() })

	d, err := c.describe(ctx, s.spec)
	if err != nil {
		return 0, err
	}
	s.update(func(st *Status) { st.Adapter, st.Version = d.Name, d.Version })
	s.log.Info("plugin started", "adapter", d.Name, "version", d.Version, "pid", c.pid())
	s.setPhase(PhaseConfiguring)
	if err := c.configure(ctx, s.spec); err != nil {
		return 0, err
	}
	s.setPhase(PhaseSyncing)
	return s.watch(ctx, c, d)
}

// watch hands what the plugin streams to the sink until the stream ends.
func (s *Supervisor) watch(ctx context.Context, c *client, d Description) (live time.Duration, err error) {
	call, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := c.api.Watch(call, &pluginv1.WatchRequest{})
	if err != nil {
		return 0, c.explain(ctx, fmt.Errorf("watch: %w", plain(err, s.host.limits.answer)))
	}
	s.sink.Begin(d)

	st := streamState{}
	hung := time.AfterFunc(s.host.limits.silence, func() { cancel(ErrHung) })
	defer hung.Stop()
	for {
		hung.Reset(s.host.limits.silence)
		resp, err := stream.Recv()
		hung.Stop() // the time that the sink takes is not the plugin's
		if err != nil {
			return st.live(), s.streamError(ctx, call, c, err)
		}
		if err := s.take(&st, resp); err != nil {
			return st.live(), fmt.Errorf("%w: %w", ErrContract, err)
		}
	}
}

// streamError says why a stream ended.
func (s *Supervisor) streamError(ctx, call context.Context, c *client, err error) error {
	if cause := context.Cause(call); errors.Is(cause, ErrHung) {
		return fmt.Errorf("%w for %v", ErrHung, s.host.limits.silence)
	}
	if errors.Is(err, io.EOF) {
		return c.explain(ctx, fmt.Errorf("%w: watch: the plugin ended the stream", ErrContract))
	}
	st, _ := status.FromError(err)
	switch st.Code() {
	case codes.ResourceExhausted:
		return fmt.Errorf("%w: a message is larger than %d MiB: %s", ErrContract, wire.MaxMessage>>20, st.Message())
	case codes.Internal:
		// What grpc-go makes of bytes that do not decode.
		return c.explain(ctx, fmt.Errorf("%w: watch: %s", ErrContract, st.Message()))
	case codes.Aborted:
		return fmt.Errorf("watch: %s", st.Message()) // what the SDK ends a stream with; it says all
	}
	return c.explain(ctx, fmt.Errorf("watch: %w", plain(err, s.host.limits.answer)))
}

// streamState is what the supervisor remembers of a stream.
type streamState struct {
	synced   bool
	degraded string
	since    time.Time // when it became synced
}

func (st *streamState) live() time.Duration {
	if st.since.IsZero() {
		return 0
	}
	return time.Since(st.since)
}

var errSyncedTwice = errors.New("watch: it said synced twice on one stream")

// take handles one message.
func (s *Supervisor) take(st *streamState, resp *pluginv1.WatchResponse) error {
	size := proto.Size(resp)
	now := time.Now()
	if m := s.metrics; m != nil {
		m.messages.WithLabelValues(s.spec.Registry).Inc()
		m.bytes.WithLabelValues(s.spec.Registry).Add(float64(size))
		m.upserts.WithLabelValues(s.spec.Registry).Add(float64(len(resp.GetUpserts())))
		m.removals.WithLabelValues(s.spec.Registry).Add(float64(len(resp.GetRemovals())))
	}
	if size == 0 {
		s.update(func(st *Status) { st.LastMessage = now })
		return nil
	}
	if resp.GetSynced() && st.synced {
		return errSyncedTwice
	}
	synced := resp.GetSynced()
	// The message is the sink's after this.
	services, instances, state := resp.GetServices(), resp.GetInstances(), resp.GetStatus()
	if err := s.sink.Apply(resp); err != nil {
		return err
	}
	if s.metrics != nil {
		s.metrics.apply.WithLabelValues(s.spec.Registry).Observe(time.Since(now).Seconds())
	}

	if synced {
		st.synced, st.since = true, now
	}
	if state != nil {
		st.degraded = state.GetError() // the sink logs it
	}
	phase := PhaseSyncing
	switch {
	case st.degraded != "":
		phase = PhaseDegraded
	case st.synced:
		phase = PhaseLive
	}
	s.update(func(status *Status) {
		status.LastMessage, status.Services, status.Instances = now, services, instances
		if st.degraded != "" && status.LastError != st.degraded {
			status.LastError, status.LastErrorAt = st.degraded, now
		}
	})
	s.setPhase(phase)
	return nil
}

func (s *Supervisor) update(f func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.status)
}

// setPhase enters a phase, if it is not that one already.
func (s *Supervisor) setPhase(p Phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setPhaseLocked(p)
}

func (s *Supervisor) setPhaseLocked(p Phase) {
	if s.status.Phase == p && !s.status.Since.IsZero() {
		return
	}
	s.status.Phase, s.status.Sentence, s.status.Since = p, p.Sentence(), time.Now()
	s.status.RetryAt = time.Time{}
	if p != PhaseFailed {
		s.status.Violations = nil
	}
	if s.metrics != nil {
		for _, other := range Phases() {
			v := 0.0
			if other == p {
				v = 1
			}
			s.metrics.phase.WithLabelValues(s.spec.Registry, other.String()).Set(v)
		}
	}
}

// failed notes that a process ended, and when the next one is started.
func (s *Supervisor) failed(p Phase, err error, violations []Violation, pause time.Duration) {
	if s.metrics != nil {
		s.metrics.failures.WithLabelValues(s.spec.Registry).Inc()
	}
	if p == PhaseFailed {
		s.log.Error("the plugin refuses its configuration", "err", err, "retry_in", pause.Round(time.Millisecond))
	} else {
		s.log.Error("the plugin ended; what is known is kept", "err", err, "retry_in", pause.Round(time.Millisecond))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.setPhaseLocked(p)
	now := time.Now()
	s.status.LastError, s.status.LastErrorAt = err.Error(), now
	s.status.RetryAt = now.Add(pause)
	s.status.Violations = violations
}

func (s *Supervisor) stopped() {
	s.setPhase(PhaseStopped)
	if s.metrics != nil {
		s.metrics.forget(s.spec.Registry)
	}
}
