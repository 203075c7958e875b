package supervisor

import (
	"cmp"
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
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// Sink receives the stream of a plugin. Its methods are never called
// concurrently.
type Sink interface {
	// Begin starts a new stream, which will mention everything again. The sink
	// retains its resources until the stream is synced, then removes those that
	// the stream did not mention.
	Begin(d Description)
	// Apply handles a message other than a keep-alive, and owns it. After an
	// error the plugin broke the contract and is restarted.
	Apply(resp *pluginv1.WatchResponse) error
	// Down reports why the plugin ended, broke the contract, or could not be
	// started. The sink retains its resources.
	Down(err error)
}

// Supervisor runs the plugin of one registry.
type Supervisor struct {
	host    *Host
	spec    Spec
	sink    Sink
	log     *slog.Logger
	metrics *Metrics

	prepared *prepared // by Prepare, for the first session

	explaining chan struct{} // a semaphore of one, held during a call of Explain

	mu sync.Mutex
	// guarded by mu
	status  Status
	awaited awaited
	aside   bool    // another supervisor has the series
	live    *client // whose stream is read; nil if none is
}

// prepared is the outcome of starting a process.
type prepared struct {
	client *client
	Description
	err error
}

// awaited is the pending step.
type awaited struct {
	lack   string // "no handshake"; empty: no step is pending
	since  time.Time
	atMost time.Duration
}

// String returns [Status.Waiting].
func (a awaited) String() string {
	n := time.Since(a.since).Truncate(time.Second)
	if a.lack == "" || n == 0 {
		return ""
	}
	return fmt.Sprintf("%s for %d s, of at most %d s", a.lack, n/time.Second, (a.atMost+time.Second-1)/time.Second)
}

// New returns a supervisor that is not running. The logger should be bound to
// the registry; metrics may be nil.
func New(host *Host, spec Spec, sink Sink, log *slog.Logger, metrics *Metrics) (*Supervisor, error) {
	if err := spec.Validate(); err != nil {
		return nil, fmt.Errorf("registry %q: %w", spec.Registry, err)
	}
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	s := &Supervisor{host: host, spec: spec, sink: sink, log: log, metrics: metrics, aside: spec.Successor, explaining: make(chan struct{}, 1)}
	s.status = Status{Registry: spec.Registry, Adapter: spec.Adapter}
	s.setPhase(PhaseStopped)
	return s, nil
}

// StepAside leaves the registry's metrics to its successor. See
// [Spec.Successor].
func (s *Supervisor) StepAside() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.aside = true
}

// takeOver claims the registry's series for this supervisor.
func (s *Supervisor) takeOver() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.aside {
		return
	}
	s.aside = false
	if s.prepared != nil {
		s.metrics.starts.WithLabelValues(s.spec.Registry).Inc()
	}
	s.showPhaseLocked()
}

// isAside reports whether another supervisor has the series.
func (s *Supervisor) isAside() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.aside
}

// Status returns a snapshot.
func (s *Supervisor) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.status
	st.Waiting = s.awaited.String()
	return st
}

// await sets the pending step; "" means none.
func (s *Supervisor) await(lack string, atMost time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awaited = awaited{lack, time.Now(), atMost}
}

// Prepare starts and configures the plugin. [Supervisor.Run] continues with the
// outcome, even an error. The error is a *[ConfigError] if the plugin refuses
// its configuration. In every case the caller must call Run or
// [Supervisor.Close] next.
func (s *Supervisor) Prepare(ctx context.Context) error {
	p := s.begin(ctx)
	s.prepared = &p
	if p.err == nil {
		return nil
	}
	p.client.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.PID = 0
	s.setPhaseLocked(PhaseRestarting)
	if e, ok := errors.AsType[*ConfigError](p.err); ok {
		s.setPhaseLocked(PhaseFailed)
		s.status.Violations = e.Violations
	}
	s.status.LastError, s.status.LastErrorAt = p.err.Error(), time.Now()
	return p.err
}

// Close ends a prepared process that is not run.
func (s *Supervisor) Close() {
	if s.prepared != nil {
		s.prepared.client.close()
		s.prepared = nil
	}
	s.update(func(st *Status) { st.PID = 0 })
	s.stopped()
}

// Run keeps the plugin running until ctx ends, then ends the plugin and returns
// nil.
func (s *Supervisor) Run(ctx context.Context) error {
	s.takeOver()
	defer s.stopped()
	b := backoff{limits: s.host.limits, jitter: s.spec.Jitter}
	if b.jitter == nil {
		b.jitter = rand.N[time.Duration]
	}
	for {
		began := time.Now()
		live, err := s.session(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, ErrRenew) && time.Since(began) > renewAfter {
			s.log.Info("the plugin is replaced", "err", err)
			continue
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

// renewAfter is how long a process has to have run to be renewed at once. One
// that asks for it sooner is started again like one that failed.
const renewAfter = time.Second

// backoff computes the pauses between processes.
type backoff struct {
	limits limits
	last   time.Duration // before jitter; zero: none yet
	jitter func(most time.Duration) time.Duration
}

// restart returns the pause after a process that was live for the given time.
// It doubles each time and is shortened by up to half at random, so that
// plugins do not restart together.
func (b *backoff) restart(live time.Duration) time.Duration {
	if live >= b.limits.healthy {
		b.last = 0
	}
	b.last = min(max(2*b.last, b.limits.minBackoff), b.limits.maxBackoff)
	return b.last - b.jitter(b.last/2)
}

// refused returns the pause after a refused configuration.
func (b *backoff) refused() time.Duration {
	b.last = 0
	return b.limits.refused - b.jitter(b.limits.refused/10)
}

// begin starts and configures a process. The caller must close the client even
// after an error.
func (s *Supervisor) begin(ctx context.Context) (p prepared) {
	s.setPhase(PhaseStarting)
	if !s.isAside() {
		s.metrics.starts.WithLabelValues(s.spec.Registry).Inc()
	}
	defer s.await("", 0)
	s.await("no handshake", s.host.limits.start)
	p.client, p.err = open(ctx, s.host, s.spec, s.log, func(pid int) {
		s.update(func(st *Status) { st.PID = pid })
	}, s.metrics.dropped.WithLabelValues(s.spec.Registry))
	if p.err != nil {
		return p
	}
	s.await("no answer to Describe", s.host.limits.answer)
	p.Description, p.err = p.client.describe(ctx, s.spec)
	if p.err != nil {
		return p
	}
	s.update(func(st *Status) { st.Adapter, st.Version = p.Name, p.Version })
	s.log.Info("plugin started", "adapter", p.Name, "version", p.Version, "pid", s.Status().PID)
	s.setPhase(PhaseConfiguring)
	s.await("no answer to Configure", s.host.limits.answer)
	p.err = p.client.configure(ctx, s.spec)
	if p.err == nil {
		confinement := p.client.inForce(s.spec)
		s.update(func(st *Status) { st.Confinement = confinement })
	}
	return p
}

// session runs one process to its end. It returns how long the process was live
// and why it ended.
func (s *Supervisor) session(ctx context.Context) (live time.Duration, err error) {
	var p prepared
	if s.prepared != nil {
		p, s.prepared = *s.prepared, nil
	} else {
		p = s.begin(ctx)
	}
	defer func() {
		p.client.close()
		s.update(func(st *Status) { st.PID, st.Confinement = 0, nil })
	}()
	if p.err != nil {
		return 0, p.err
	}
	s.setPhase(PhaseSyncing)
	s.setLive(p.client)
	defer s.setLive(nil)
	return s.watch(ctx, p.client, p.Description)
}

// watch passes the plugin's stream to the sink until it ends.
func (s *Supervisor) watch(ctx context.Context, c *client, d Description) (live time.Duration, err error) {
	call, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := c.api.Watch(call, &pluginv1.WatchRequest{})
	if err != nil {
		return 0, c.explain(ctx, fmt.Errorf("watch: %w", plain(err, s.host.limits.answer)))
	}
	s.sink.Begin(d)
	s.metrics.own.forget(s.spec.Registry) // the stream tells all of them

	st := streamState{}
	hung := time.AfterFunc(s.host.limits.silence, func() { cancel(ErrHung) })
	defer hung.Stop()
	for {
		hung.Reset(s.host.limits.silence)
		resp, err := stream.Recv()
		hung.Stop() // excludes the time that the sink needs
		if err != nil {
			return st.live(), s.streamError(ctx, call, c, err)
		}
		began, changes := time.Now(), len(resp.GetUpserts())+len(resp.GetRemovals())
		if err := s.take(&st, resp); err != nil {
			return st.live(), fmt.Errorf("%w: %w", ErrContract, err)
		}
		st.changes += changes
		if changes > 0 && (st.synced || st.changes > s.spec.Resources) {
			s.rest(call, time.Since(began))
		}
	}
}

// DefaultPace is the default of [Spec.Pace].
const DefaultPace = 2

// maxRest bounds the pause after a message, so that a plugin is heard often
// enough.
const maxRest = time.Second

// rest waits after a message that took so long.
func (s *Supervisor) rest(ctx context.Context, took time.Duration) {
	timer := time.NewTimer(min(time.Duration(max(cmp.Or(s.spec.Pace, DefaultPace), 0))*took, maxRest))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done(): // read of the stream says why
	}
}

// streamError explains why a stream ended.
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
		// The status of grpc-go for undecodable messages.
		return c.explain(ctx, fmt.Errorf("%w: watch: %s", ErrContract, st.Message()))
	case wire.Renew:
		return fmt.Errorf("%w: %s", ErrRenew, st.Message())
	case codes.Aborted:
		return fmt.Errorf("watch: %s", st.Message()) // the SDK's status needs no addition
	}
	return c.explain(ctx, fmt.Errorf("watch: %w", plain(err, s.host.limits.answer)))
}

// streamState is the state of one stream.
type streamState struct {
	synced   bool
	changes  int // upserts and removals
	degraded string
	since    time.Time // start of the synced state
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
	s.metrics.messages.WithLabelValues(s.spec.Registry).Inc()
	s.metrics.bytes.WithLabelValues(s.spec.Registry).Add(float64(size))
	s.metrics.upserts.WithLabelValues(s.spec.Registry).Add(float64(len(resp.GetUpserts())))
	s.metrics.removals.WithLabelValues(s.spec.Registry).Add(float64(len(resp.GetRemovals())))
	if t := resp.GetLastHeard(); t != nil {
		size -= protowire.SizeTag(lastHeardField) + protowire.SizeBytes(proto.Size(t))
		s.heard(t.AsTime(), now)
		resp.LastHeard = nil // not for the sink
	}
	if m := resp.GetMetrics(); len(m) > 0 {
		s.metrics.own.set(s.spec.Registry, m)
		resp.Metrics = nil // not for the sink
		size = proto.Size(resp)
	}
	if size == 0 {
		s.update(func(st *Status) { st.LastMessage = now })
		return nil
	}
	if resp.GetSynced() && st.synced {
		return errSyncedTwice
	}
	synced := resp.GetSynced()
	// The sink owns the message after Apply.
	services, instances, state := resp.GetServices(), resp.GetInstances(), resp.GetStatus()
	if err := s.sink.Apply(resp); err != nil {
		return err
	}
	s.metrics.apply.WithLabelValues(s.spec.Registry).Observe(time.Since(now).Seconds())
	if synced {
		st.synced, st.since = true, now
	}
	was := st.degraded
	if state != nil {
		st.degraded = state.GetError() // logged by the sink
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
		if st.degraded != "" && st.degraded != was {
			status.LastError, status.LastErrorAt = st.degraded, now
		}
	})
	s.setPhase(phase)
	return nil
}

// lastHeardField is the number of WatchResponse.last_heard.
const lastHeardField = 8

// heard records when the registry last sent anything. A time in the future
// counts as now; an invalid one is ignored.
func (s *Supervisor) heard(t, now time.Time) {
	if t.After(now) {
		t = now
	}
	if t.Unix() <= 0 {
		return
	}
	s.update(func(st *Status) { st.LastHeard = t })
	s.metrics.heard.WithLabelValues(s.spec.Registry).Set(float64(t.UnixMilli()) / 1000)
}

func (s *Supervisor) update(f func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.status)
}

// setPhase enters a phase, unless it is the current one.
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
	s.showPhaseLocked()
}

func (s *Supervisor) showPhaseLocked() {
	if s.aside {
		return
	}
	for _, other := range Phases() {
		v := 0.0
		if other == s.status.Phase {
			v = 1
		}
		s.metrics.phase.WithLabelValues(s.spec.Registry, other.String()).Set(v)
	}
}

// failed records the end of a process and the time of the next start.
func (s *Supervisor) failed(p Phase, err error, violations []Violation, pause time.Duration) {
	s.metrics.failures.WithLabelValues(s.spec.Registry).Inc()
	if p == PhaseFailed {
		s.log.Error("the plugin refuses its configuration", "err", err, "retry_in", pause.Round(time.Millisecond))
	} else {
		s.log.Error("the plugin ended; what it has listed is served meanwhile", "err", err, "retry_in", pause.Round(time.Millisecond))
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
	if !s.isAside() {
		s.metrics.forget(s.spec.Registry)
	}
}
