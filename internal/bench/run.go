package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Percentiles are times in milliseconds.
type Percentiles struct {
	P50 float64 `json:"p50_ms"`
	P90 float64 `json:"p90_ms"`
	P99 float64 `json:"p99_ms"`
	Max float64 `json:"max_ms"`
}

// Result is what one run has shown.
type Result struct {
	// Latency is from a change in the plugin until a sink has received it, over
	// all sinks.
	Latency Percentiles `json:"latency"`
	// PingPong is a bare gRPC message of 100 bytes to another process and back,
	// just before, at the same pace but at most 1,000 a second.
	PingPong Percentiles `json:"ping_pong"`
	// Ready is from the start of the bridge until every sink had everything, in
	// seconds.
	Ready float64 `json:"ready_s"`
	// Updates is the number of changes that sinks have received, over all
	// sinks. Those of one instance that followed each other closely came as
	// one.
	Updates int64 `json:"updates"`
	// UpdatesPerSecond is that of the sink with the fewest.
	UpdatesPerSecond float64 `json:"updates_per_second_and_sink"`
	// Responses and Bytes are those of all sinks.
	Responses int64 `json:"responses"`
	Bytes     int64 `json:"bytes"`
	// Differences is the number of resources that sinks held otherwise than a
	// new sink, after everything was quiet.
	Differences int `json:"differences"`
	// Processes are bridge, plugin and sinks.
	Processes []Process `json:"processes"`
	// Stream is the memory of the bridge for each sink, in bytes: by how much
	// more was resident at most than in a run with one sink. BareStream is that
	// of a bare gRPC stream on as many connections. Both are 0 if there are
	// fewer than a hundred sinks.
	Stream     float64 `json:"stream_bytes,omitempty"`
	BareStream float64 `json:"bare_stream_bytes,omitempty"`
	// Upstream is what a real registry was seen to do, nil for sim.
	Upstream *Upstream `json:"upstream,omitempty"`
}

// Upstream is what a real registry was seen to do.
type Upstream struct {
	// Notified is from a change until the registry has told a bare subscriber
	// of it, Added from then until a sink has received it, over all sinks.
	Notified Percentiles `json:"notified"`
	Added    Percentiles `json:"added"`
	// Connections is the number of connections of the plugin.
	Connections int `json:"connections"`
	// Requests is the number of requests of the plugin in a minute, by the
	// registry's own count; 0 if it has none.
	Requests float64 `json:"requests_per_minute"`
}

const (
	// lead is how long changes go on before they count.
	lead = time.Second
	// settle is how long nothing arrives until everything has arrived, and
	// patience how long that is waited for, beside twice the duration: a bridge
	// that takes half of the changes needs as long again for the rest.
	settle   = 2 * time.Second
	patience = 10 * time.Minute
	// mostPingPong is how long the ping-pong goes on at most.
	mostPingPong = 30 * time.Second
	// mostAlone is how long changes go on with one sink, to compare the memory.
	mostAlone = 5 * time.Second
)

// bridge is the memory of the bridge, in bytes; 0 for none.
func (r *Result) bridge() int64 {
	for _, p := range r.Processes {
		if p.Name == "bridge" {
			return p.Memory
		}
	}
	return 0
}

// served is what the sinks connect to.
type served interface {
	// address is where the sinks of a listener connect to.
	address(o Options, listener int) string
	// change lets changes begin.
	change(ctx context.Context, o Options) error
	// pids are its processes, by name.
	pids() map[string]int
	// profile writes a profile of it into a file of a folder.
	profile(ctx context.Context, folder, name, query string) error
	// stop ends it and waits for that.
	stop()
}

// Run measures o.Runs times. Each run is reported to progress in a line.
// program is the path of isthmus.
func Run(ctx context.Context, program string, o Options, progress io.Writer) (results []Result, err error) {
	if o, err = o.expand(); err != nil {
		return nil, err
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Registry != "" {
		u, err := connect(ctx, o)
		if err != nil {
			return nil, err
		}
		o.upstream = u
		defer func() { err = errors.Join(err, u.clear(ctx)) }()
	}
	for i := range o.Runs {
		r, err := run(ctx, program, o)
		if err != nil {
			return results, err
		}
		tell(progress, "run", i, o.Runs, r)
		results = append(results, r)
	}
	return results, nil
}

func tell(progress io.Writer, what string, i, n int, r Result) {
	fmt.Fprintf(progress, "%s %d of %d: p50 %.3g ms, p99 %.3g ms\n", what, i+1, n, r.Latency.P50, r.Latency.P99)
}

// errLate means that the changes were about to end before they could count.
var errLate = errors.New("the first change arrived too late")

// run measures once. A machine on which a new plugin is listed slowly is given
// more time.
func run(ctx context.Context, program string, o Options) (r Result, err error) {
	for o.slack = lead; ; o.slack *= 4 {
		if r, err = try(ctx, program, o); !errors.Is(err, errLate) || o.slack > patience {
			return r, err
		}
	}
}

func try(ctx context.Context, program string, o Options) (r Result, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dir, err := os.MkdirTemp("", "isthmus-bench-")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	ping, err := pingPong(ctx, program, o.Rate, min(o.Duration/2, mostPingPong))
	if err != nil {
		return r, err
	}
	r.PingPong = percentiles(ping)
	var alone Result
	if o.Sinks >= perConnection {
		if r.BareStream, err = bareStreams(ctx, program, o.Sinks); err != nil {
			return r, err
		}
		one := o
		one.Sinks, one.Duration, one.Profile = 1, min(o.Duration, mostAlone), ""
		if alone, err = run(ctx, program, one); err != nil {
			return r, fmt.Errorf("with one sink: %w", err)
		}
	}

	begin := time.Now()
	var b served
	var f *fed // nil for sim and for peers
	if o.peer != nil {
		b, err = startPeer(ctx, *o.peer, o)
	} else {
		var own *bridge
		own, err = startBridge(ctx, program, dir, o)
		if b = own; o.upstream != nil {
			f = &fed{bridge: own, upstream: o.upstream, told: make(map[int64]int64)}
			b = f
		}
	}
	if err != nil {
		return r, err
	}
	defer b.stop()
	var count window
	var heard atomic.Int64
	all, err := startSinks(ctx, b, o, &count, &heard)
	if err != nil {
		return r, err
	}
	defer all.end()
	r.Ready = time.Since(begin).Seconds()

	if err := b.change(ctx, o); err != nil {
		return r, err
	}
	if err := all.await(ctx, all.changed); err != nil {
		return r, fmt.Errorf("no change arrives: %w", err)
	}
	if all.oldest() < time.Now().Add(-o.slack).UnixNano() {
		return r, errLate
	}
	// The first ones had to wait for the listing of the new plugin.
	for end := time.Now().Add(lead); time.Now().Before(end); {
		if err := pause(ctx, time.Until(end)); err != nil {
			return r, err
		}
	}
	for _, s := range all.sinks {
		s.restart()
	}
	count.open(time.Now(), o.Duration)
	profiled := make(chan error, 1)
	if o.Profile != "" {
		go func() {
			profiled <- b.profile(ctx, o.Profile, "cpu.pprof", fmt.Sprintf("profile?seconds=%d", int(o.Duration.Seconds())))
		}()
	}
	pids := b.pids()
	pids["sinks"] = os.Getpid()
	m := newMeter(pids)
	for end := time.Now().Add(o.Duration); time.Now().Before(end); m.sample() {
		if err := pause(ctx, time.Until(end)); err != nil {
			return r, err
		}
	}
	r.Processes = m.end()
	if before := alone.bridge(); before > 0 {
		r.Stream = float64(r.bridge()-before) / float64(o.Sinks-1)
	}
	if f != nil {
		if err := f.load(ctx, &r); err != nil {
			return r, err
		}
	}
	if o.Profile != "" {
		if err := errors.Join(<-profiled, b.profile(ctx, o.Profile, "heap.pprof", "heap?gc=1")); err != nil {
			return r, err
		}
	}
	if err := all.quiet(ctx); err != nil {
		return r, err
	}
	r.Differences, err = all.compare(ctx, b, o)
	all.report(&r, o)
	if f != nil {
		err = errors.Join(err, f.report(&r, all.latency, &count))
	}
	return r, err
}

// pause waits, at most a second.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(min(max(d, 0), time.Second))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// group is the sinks of a run.
type group struct {
	sinks   []*sink
	latency *latencies
	heard   *atomic.Int64
	limit   time.Duration // of what is waited for
	running sync.WaitGroup
	cancel  context.CancelFunc
	hangUp  []func() error
}

// end ends all streams and waits for that.
func (g *group) end() {
	g.cancel()
	g.running.Wait()
	for _, f := range g.hangUp {
		_ = f()
	}
}

// start starts sinks.
func (g *group) start(ctx context.Context, address string, sinks ...*sink) error {
	conns, hangUp, err := dial(address, len(sinks))
	if err != nil {
		return err
	}
	g.hangUp = append(g.hangUp, hangUp)
	for i, s := range sinks {
		g.running.Go(func() { s.run(ctx, conns[i]) })
	}
	return nil
}

// startSinks starts the sinks and waits until each has everything.
func startSinks(ctx context.Context, b served, o Options, w *window, heard *atomic.Int64) (*group, error) {
	ctx, cancel := context.WithCancel(ctx)
	g := &group{heard: heard, limit: patience + 2*o.Duration, latency: &latencies{h: newHistogram(), keep: o.upstream != nil}, cancel: cancel}
	if err := g.fill(ctx, b, o, w); err != nil {
		g.end()
		return nil, err
	}
	return g, nil
}

func (g *group) fill(ctx context.Context, b served, o Options, w *window) error {
	// The first sinks show what there is.
	first, end, err := g.probe(ctx, b, o, w)
	defer end()
	if err != nil {
		return fmt.Errorf("nothing is served: %w", err)
	}
	n := o.listeners()
	have := make([][]string, n)
	for l := range n {
		have[l] = first[l].keys()
	}
	of := make([][]*sink, n)
	for i := range o.Sinks {
		l := i % n
		s := newSink(o.protocol(), part(have[l], i/n, o.Names), w, g.latency, g.heard)
		g.sinks, of[l] = append(g.sinks, s), append(of[l], s)
	}
	for l, sinks := range of {
		if err := g.start(ctx, b.address(o, l), sinks...); err != nil {
			return err
		}
	}
	return g.await(ctx, func() bool {
		for i, s := range g.sinks {
			if size, _ := s.size(); s.names == nil && size < len(have[i%n]) || size < len(s.names) {
				return false
			}
		}
		return true
	})
}

// probe returns a new sink of each listener that has all there is. They end
// with end, which is never nil.
func (g *group) probe(ctx context.Context, b served, o Options, w *window) (fresh []*sink, end func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	probe := &group{heard: g.heard, limit: g.limit, cancel: cancel}
	g.heard.Store(0)
	for l := range o.listeners() {
		s := newSink(o.protocol(), nil, w, g.latency, g.heard)
		probe.sinks = append(probe.sinks, s)
		if err := probe.start(ctx, b.address(o, l), s); err != nil {
			return nil, probe.end, err
		}
	}
	return probe.sinks, probe.end, probe.quiet(ctx)
}

// keys returns the types and names of what the sink holds, sorted.
func (s *sink) keys() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.have))
}

// part returns the i-th n names of workloads, from the beginning again after
// the last one, or nil for n = 0.
func part(keys []string, i, n int) (names []string) {
	if n == 0 {
		return nil
	}
	var workloads []string
	at := slices.IndexFunc(keys, func(k string) bool { return typeOf(k) == workloadEntry })
	if at >= 0 {
		workloads = keys[at:]
	}
	if len(workloads) == 0 {
		return []string{}
	}
	for j := range min(n, len(workloads)) {
		names = append(names, strings.TrimPrefix(workloads[(i*n+j)%len(workloads)], workloadEntry+" "))
	}
	return names
}

// await waits for a condition, and for streams that end.
func (g *group) await(ctx context.Context, cond func() bool) error {
	for end := time.Now().Add(g.limit); ; {
		if cond() {
			return nil
		}
		for _, s := range g.sinks {
			if _, err := s.size(); err != nil {
				return fmt.Errorf("the stream of a sink ended: %w", err)
			}
		}
		if time.Now().After(end) {
			return fmt.Errorf("within %v", g.limit)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}

// quiet waits until something was heard and nothing more is.
func (g *group) quiet(ctx context.Context) error {
	err := g.await(ctx, func() bool {
		at := g.heard.Load()
		return at > 0 && time.Since(time.Unix(0, at)) > settle
	})
	if err != nil {
		return fmt.Errorf("what arrives has no end: %w", err)
	}
	return nil
}

// changed reports whether a change has arrived.
func (g *group) changed() bool { return g.oldest() > 0 }

// oldest returns the time of the first of the changes that have arrived, in
// nanoseconds since 1970, 0 if none has.
func (g *group) oldest() (at int64) {
	for _, s := range g.sinks {
		s.mu.Lock()
		if s.oldest > 0 && (at == 0 || s.oldest < at) {
			at = s.oldest
		}
		s.mu.Unlock()
	}
	return at
}

// compare returns the number of resources that sinks hold otherwise than a new
// one.
func (g *group) compare(ctx context.Context, b served, o Options) (n int, err error) {
	fresh, end, err := g.probe(ctx, b, o, new(window))
	defer end()
	if err != nil {
		return 0, err
	}
	for i, s := range g.sinks {
		if _, failed := s.size(); failed != nil {
			err = errors.Join(err, failed)
		}
		n += s.differences(fresh[i%len(fresh)])
	}
	return n, err
}

// report adds what the sinks have counted.
func (g *group) report(r *Result, o Options) {
	fewest := int64(-1)
	for _, s := range g.sinks {
		s.mu.Lock()
		r.Updates += s.updates
		r.Responses += s.responses
		r.Bytes += s.bytes
		if fewest < 0 || s.updates < fewest {
			fewest = s.updates
		}
		s.mu.Unlock()
	}
	r.UpdatesPerSecond = float64(fewest) / o.Duration.Seconds()
	r.Latency = percentiles(g.latency.h)
}

func percentiles(h *hdrhistogram.Histogram) Percentiles {
	ms := func(ns int64) float64 { return float64(ns) / 1e6 }
	return Percentiles{ms(h.ValueAtQuantile(50)), ms(h.ValueAtQuantile(90)), ms(h.ValueAtQuantile(99)), ms(h.Max())}
}
