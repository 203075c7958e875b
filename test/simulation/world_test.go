package simulation

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/lastgood"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/xds"
	"github.com/isthmus-mesh/isthmus/verify"
)

// world is one simulation. The goroutine of the test does one thing at a time
// and waits until every goroutine of the bridge is blocked; the seed decides
// what and when.
type world struct {
	t          testing.TB
	rand       *rand.Rand
	dir        string
	registries []*registry
	sinks      []*sink
	judge      *verify.Judge
	recording  []byte
	revision   uint64
	streams    int
	starts     int
	saved      time.Time // what the registries have since then is on disk
	began      time.Time
	back       time.Duration // how far the clock was set back
	violations []verify.Violation
	shared     map[served]bool // of the hosts that several registries have
	paused     bool            // removals of a registry may be paused

	disk    bool // the bridge has a last good state
	protect state.Protect
	bridge  *bridge
}

// bridge is one run of the bridge, without sockets and processes.
type bridge struct {
	ctx      context.Context
	cancel   context.CancelFunc
	group    sync.WaitGroup
	db       *state.DB
	streams  *stream.Server
	services services
	dir      string
	host     *supervisor.Host
}

// now returns the time of the judge, whose clock is never set back.
func (w *world) now() time.Time { return time.Now().Add(w.back).UTC() }

// add judges and records an event.
func (w *world) add(e *verify.Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.Add(w.back).UTC()
	w.violations = append(w.violations, w.judge.Add(e)...)
	var err error
	if w.recording, err = e.Append(w.recording); err != nil {
		w.t.Fatal(err)
	}
}

// registrySink is what package server makes of a supervisor's sink.
type registrySink struct{ *state.Registry }

func (s registrySink) Begin(d supervisor.Description) { s.Registry.Begin(d.Collections) }

func (s registrySink) Apply(m *pluginv1.WatchResponse) error {
	return s.Registry.Apply(m)
}

// start starts the bridge. What has been in the registries since then is
// promised to sinks.
func (w *world) start(since time.Time) {
	w.starts++
	log, metrics := slog.New(slog.DiscardHandler), prometheus.NewRegistry()
	b := &bridge{services: services{}, dir: filepath.Join(w.dir, fmt.Sprintf("state%d", w.starts))}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	options := state.Options{Tombstones: 8, Conflicts: conflictRules, Registries: map[string]state.RegistryOptions{}}
	var names []string
	for _, r := range w.registries {
		names = append(names, r.name)
		options.Registries[r.name] = state.RegistryOptions{Protect: w.protect}
	}
	must := func(err error) {
		if err != nil {
			w.t.Fatal(err)
		}
	}
	b.db = state.New(names, options, log, metrics)
	v := view.New(b.db)
	b.streams = stream.NewServer(v)
	x, err := xds.New(v, xds.Config{Streams: b.streams}, log, metrics)
	must(err)
	m, err := mcp.New(v, mcp.Config{Streams: b.streams}, log, metrics)
	must(err)
	x.Register(b.services)
	m.Register(b.services)
	b.host, err = supervisor.NewHost("", log)
	must(err)
	restored := make(chan struct{})
	if w.disk {
		registries := make([]lastgood.Registry, len(names))
		for i, name := range names {
			registries[i] = lastgood.Registry{Name: name, Type: "model"}
		}
		store, err := lastgood.Open(b.db, lastgood.Options{Dir: b.dir, Registries: registries, Log: log, Metrics: metrics})
		must(err)
		b.group.Go(func() { _ = store.Run(b.ctx) })
		go func() {
			<-store.Restored()
			close(restored)
		}()
	} else {
		close(restored)
	}
	b.group.Go(func() { _ = b.db.Run(b.ctx) })
	b.group.Go(func() { v.Run(b.ctx) })
	plugins := supervisor.NewMetrics(metrics)
	for n, r := range w.registries {
		// Two pauses never end at one moment.
		pause := rand.New(rand.NewPCG(w.rand.Uint64(), uint64(n)))
		s, err := supervisor.New(b.host, supervisor.Spec{
			Registry: r.name, Open: r.open,
			Jitter: func(most time.Duration) time.Duration { return time.Duration(pause.Int64N(int64(most))) },
		}, registrySink{b.db.Registry(r.name)}, log, plugins)
		must(err)
		b.group.Go(func() {
			<-restored
			_ = s.Run(b.ctx)
		})
	}
	w.bridge = b
	w.add(&verify.Event{Kind: verify.Start, Since: since})
}

// stop ends the bridge as a signal does, or without a last word: then what was
// written of its state so far is what the next one finds. cut is how much of
// the end of each file is lost.
func (w *world) stop(crash bool, cut func(size int64) int64) {
	b := w.bridge
	next := filepath.Join(w.dir, fmt.Sprintf("state%d", w.starts+1))
	if crash && w.disk {
		w.copyState(next, cut)
	}
	for _, s := range w.sinks {
		s.disconnect("the bridge ended")
	}
	b.cancel()
	b.group.Wait()
	if err := b.host.Close(); err != nil {
		w.t.Fatal(err)
	}
	if !crash && w.disk {
		w.copyState(next, cut)
	}
	if err := os.RemoveAll(b.dir); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) copyState(to string, cut func(int64) int64) {
	entries, err := os.ReadDir(w.bridge.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := os.MkdirAll(to, 0o700); err != nil {
		w.t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() == "lock" {
			continue
		}
		b, err := os.ReadFile(filepath.Join(w.bridge.dir, e.Name()))
		if err != nil {
			w.t.Fatal(err)
		}
		b = b[:int64(len(b))-cut(int64(len(b)))]
		if err := os.WriteFile(filepath.Join(to, e.Name()), b, 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
}

// pass lets time pass and judges what the sinks received.
func (w *world) pass(d time.Duration) {
	time.Sleep(d)
	w.collect()
}

// collect waits until nothing moves, and judges what the sinks received.
func (w *world) collect() {
	for {
		synctest.Wait()
		if now := w.bridge != nil && w.bridge.db.Remarkable(); now || w.paused {
			w.paused = now
			w.share()
		}
		var got []*verify.Event
		of := map[*verify.Event]*sink{}
		for _, s := range w.sinks {
			for _, e := range s.read() {
				got = append(got, e)
				of[e] = s
			}
		}
		if len(got) == 0 {
			return
		}
		slices.SortStableFunc(got, func(a, b *verify.Event) int { return a.Time.Compare(b.Time) })
		for _, e := range got {
			of[e].handle(e)
			w.add(e)
		}
		for _, s := range w.sinks {
			s.answer()
		}
	}
}

// moment is a random pause; no two timers of a simulation meet.
func (w *world) moment(most time.Duration) time.Duration {
	return 1 + time.Duration(w.rand.Int64N(int64(most)))
}

// step does one thing.
func (w *world) step() {
	rand := w.rand
	r := w.registries[rand.IntN(len(w.registries))]
	s := w.sinks[rand.IntN(len(w.sinks))]
	synced := func(r *registry) bool {
		st := w.bridge.db.Registry(r.name).Status()
		return st.Listed()
	}
	switch n := rand.IntN(1000); {
	case n < 400:
		r.churn()
	case n < 410: // a storm
		for range 20 {
			r.churn()
		}
	case n < 430:
		r.crash(errEnd[rand.IntN(len(errEnd))])
	case n < 436:
		r.mute = !r.mute
	case n < 442:
		r.refuses = !r.refuses
	case n < 460:
		r.partitioned = !r.partitioned
	case n < 468:
		// Only what was listed can be protected.
		if w.protect.MinShare > 0 && !r.emptied && synced(r) && r.told() {
			r.emptied, r.emptiedAt = true, time.Now()
			r.crash(errEnd[1])
		}
	case n < 474:
		if r.emptied {
			r.emptied = false
			r.relist()
		}
	case n < 480:
		if p := r.running(); p != nil && !r.mute && !p.listing {
			r.garble(p)
		}
	case n < 520:
		s.disconnect("the sink went")
	case n < 600:
		if s.stream == 0 {
			s.connect()
		}
	case n < 620:
		s.stall(!s.stalled)
	case n < 640:
		s.slow = time.Duration(rand.IntN(10)) * time.Second
	case n < 650:
		s.refuses = !s.refuses
	case n < 660:
		s.deaf = !s.deaf
	case n < 664:
		w.restart()
	case n < 680:
		s.repeat()
	case n < 684:
		r.shrink()
	case n < 704:
		s.ask()
	case n < 800:
		w.pass(w.moment(20 * time.Second))
	default:
	}
	for _, r := range w.registries {
		if r.emptied && time.Since(r.emptiedAt) > w.protect.Hold/2 {
			r.emptied = false // an accident that lasts longer is one that happens
			r.relist()
		}
		for range rand.IntN(3) {
			if r.pass() {
				w.collect()
			}
		}
	}
	w.collect()
	for _, s := range w.sinks {
		s.answer()
	}
	w.pass(w.moment(3 * time.Second))
}

// restart ends the bridge, in an orderly manner or not, and starts it again.
func (w *world) restart() {
	for _, r := range w.registries {
		if r.emptied {
			return // without the disk an empty answer is all that the next one knows
		}
	}
	w.end()
	w.pass(w.moment(5 * time.Second))
	w.again()
}

// end ends the bridge, in an orderly manner or not.
func (w *world) end() {
	crash, keep := w.rand.IntN(2) == 0, func(int64) int64 { return 0 }
	if w.disk && crash && w.rand.IntN(2) == 0 {
		keep = func(size int64) int64 { return w.rand.Int64N(size + 1) }
		w.saved = w.began.Add(-time.Hour)
	}
	w.stop(crash, keep)
}

// again starts a bridge with what is on disk.
func (w *world) again() {
	since := w.saved
	if !w.disk {
		since = w.now()
	}
	w.start(since)
}

// garble sends a resource that does not decode. Its last good content stays.
func (r *registry) garble(p *plugin) {
	names := r.names()
	if len(names) == 0 {
		return
	}
	n := names[r.w.rand.IntN(len(names))]
	i, ok := r.visible(n)
	if !ok || !p.sent[n] {
		return
	}
	u := upsert(n, i)
	u.Resource = u.GetResource()[:len(u.GetResource())-1-r.w.rand.IntN(20)]
	p.last = time.Now()
	select {
	case p.out <- &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{u}, Services: 1}:
		p.changed(n)
	case <-p.ctx.Done():
	}
}

// heal ends all faults and waits until everything must have arrived.
func (w *world) heal() {
	for _, r := range w.registries {
		r.partitioned, r.mute, r.refuses = false, false, false
		if r.emptied {
			r.emptied = false
			r.relist()
		}
	}
	for _, s := range w.sinks {
		s.stall(false)
		s.slow, s.refuses, s.deaf = 0, false, false
		if s.stream == 0 {
			s.connect()
		}
		s.answer()
	}
	// What is held back goes after the hold.
	for end := time.Now().Add(3*time.Minute + w.protect.Hold); time.Now().Before(end); {
		for _, r := range w.registries {
			for r.pass() {
				w.collect()
			}
		}
		w.collect()
		for _, s := range w.sinks {
			if s.stream != 0 && s.pipe.ctx.Err() != nil {
				s.disconnect("the bridge ended it")
			}
			if s.stream == 0 {
				s.connect()
			}
			s.answer()
		}
		w.pass(w.moment(4 * time.Second))
	}
	w.add(&verify.Event{Kind: verify.Settled})
	w.saved = w.now()
}

// result is what came of a seed.
type result struct {
	recording  []byte
	violations []verify.Violation
	simulated  time.Duration
	events     int
}

// simulate runs a seed: some eras of faults, each of which ends with a
// recovery. After half of them, while the bridge is not running, the clock is
// set back to the begin: what is on disk is from a time to come.
func simulate(t *testing.T, seed uint64, eras, steps int) result {
	w := &world{rand: rand.New(rand.NewPCG(seed, 13)), dir: stateDir(t), judge: verify.New()}
	half := func(eras int, start, end func()) {
		synctest.Test(t, func(t *testing.T) { // its clock begins anew
			w.t = t
			began := time.Now()
			start()
			for range eras {
				for range steps {
					w.step()
					if len(w.violations) > 0 {
						break
					}
				}
				if len(w.violations) > 0 {
					break
				}
				w.heal()
			}
			end()
			for _, r := range w.registries {
				r.plugin = nil // and its channels
			}
			w.back += time.Since(began)
		})
	}
	half(eras/2, w.set, w.end)
	if len(w.violations) == 0 {
		half(eras-eras/2, w.again, func() { w.stop(false, func(int64) int64 { return 0 }) })
	}
	return result{w.recording, w.violations, w.back, w.judge.Events()}
}

// set makes the registries and the sinks, and starts the bridge.
func (w *world) set() {
	w.began = time.Now().UTC()
	w.disk = w.rand.IntN(3) > 0
	if w.rand.IntN(3) > 0 {
		w.protect = state.Protect{MinShare: 0.5, MinServices: 4, Hold: 10 * time.Minute}
		w.judge.PutsBack = true
		if w.rand.IntN(2) == 0 {
			w.protect.Service = state.ProtectService{MinShare: 0.3, MinEndpoints: 4}
		}
	}
	for n := range 1 + w.rand.IntN(3) {
		w.registries = append(w.registries, &registry{w: w, name: fmt.Sprintf("dc%d", n), items: map[id]item{}})
	}
	const se, we, gw = "networking.istio.io/v1/ServiceEntry", "networking.istio.io/v1/WorkloadEntry", "networking.istio.io/v1/Gateway"
	istiod := []string{"core/v1alpha1/MeshConfig", gw, se, "extensions.istio.io/v1alpha1/TrafficExtension", we, "networking.istio.io/v1/WorkloadGroup"}
	legacy := []string{"istio/networking/v1alpha3/serviceentries"}
	for _, s := range []*sink{
		{protocol: "sotw", profile: "istio-1.30", types: istiod},
		{protocol: "sotw", types: []string{se, we}},
		{protocol: "delta", types: []string{se, we}},
		{protocol: "delta", shape: "inline", types: []string{se}},
		{protocol: "delta", types: []string{we, se}},
		{protocol: "mcp", types: legacy},
		{protocol: "mcp", profile: "incremental", types: legacy, permits: true},
		{protocol: "sotw", types: []string{se, we}, filter: &view.Filter{Registries: []string{"dc0"}}},
		{protocol: "delta", types: []string{se, we}, filter: &view.Filter{Namespaces: []string{"dc1", "dc2"}}},
		{protocol: "delta", types: []string{se, we}, names: true},
		{protocol: "delta", shape: "inline", types: []string{se}, names: true},
	} {
		s.w, s.have, s.want = w, map[string]map[string]string{}, map[string][]string{}
		w.sinks = append(w.sinks, s)
	}
	w.saved = w.began
	w.introduce()
	for _, r := range w.registries {
		for range 60 {
			r.churn()
		}
	}
	w.pass(w.moment(time.Second))
	w.start(time.Time{})
}

// stateDir returns a directory for the last good state, in memory if there is
// such a place.
func stateDir(t *testing.T) string {
	if _, err := os.Stat("/dev/shm"); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp("/dev/shm", "isthmus-simulation-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// tail returns the last lines of a recording that concern what is violated.
func tail(recording []byte, n int) string {
	lines := bytes.Split(bytes.TrimSpace(recording), []byte("\n"))
	var b strings.Builder
	for _, line := range lines[max(0, len(lines)-n):] {
		fmt.Fprintf(&b, "%.300s\n", line)
	}
	return b.String()
}
