package lastgood

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
)

const (
	// flushEvery is the interval at which changes are written.
	flushEvery = 500 * time.Millisecond
	// beatEvery is the interval of commits without changes.
	beatEvery = 10 * time.Second
	// sliceTime limits how long a new generation is written between two passes
	// of the current one.
	sliceTime = 200 * time.Millisecond
	// minJournal is the size of changes in bytes up to which no new generation
	// is started. The limit grows to the size of the generation's initial data.
	minJournal = 16 << 20
	// endWithin limits the last pass before the program exits.
	endWithin = 3 * time.Second

	minPause, maxPause = time.Second, 30 * time.Second // before a retry
)

// Registry is one registry of the configuration.
type Registry struct {
	Name string
	Type string // of its adapter
}

// Options configures a [Store].
type Options struct {
	// Dir is the directory. It is created if missing.
	Dir string
	// Registries are the configured registries.
	Registries []Registry
	Log        *slog.Logger
	Metrics    prometheus.Registerer
}

// InUseError is returned for a directory that another bridge uses.
type InUseError struct {
	Dir string
	PID string // of the other bridge, "" if unknown
}

// Error names the directory and the other bridge.
func (e *InUseError) Error() string {
	who := "another isthmus"
	if e.PID != "" {
		who += " (pid " + e.PID + ")"
	}
	return fmt.Sprintf("the directory %s of the last good state is in use by %s; end that one, or give each a directory of its own with state.dir", e.Dir, who)
}

// Status describes the store to operators.
type Status struct {
	Dir       string
	Bytes     int64     // size of the current file
	WrittenAt time.Time // last write; zero if none
	// Reading describes a problem with the saved state found at start and its
	// handling; empty if there was none.
	Reading string
	// Writing describes why writing fails; empty if it does not.
	Writing      string
	WritingSince time.Time
}

// Store keeps the last good state in a directory.
type Store struct {
	db       *state.DB
	dir      string
	log      *slog.Logger
	metrics  *metrics
	names    []string          // of the registries, in configuration order
	adapters map[string]string // adapter types by registry

	restored chan struct{} // closed when Run has restored the saved state

	// The following fields are used by one goroutine at a time, in Open, Run
	// and Close.

	lockFile *os.File // nil without a lock
	last     int      // number of the newest generation seen
	current  *generation
	next     *generation // being written
	rotate   bool        // a new generation is due

	resumeGC    func()   // ends what pauseGC began
	rotateAbove int64    // minJournal
	strays      []string // files to delete once all registries are saved in the current one

	mu         sync.Mutex
	status     Status     // guarded by mu
	registries []Registry // guarded by mu: registries of a reloaded configuration, nil if none
}

// Open returns a store with exclusive use of the directory. It returns an
// [*InUseError] if another bridge uses the directory. Any other problem with
// the directory is reported in the status, and [Store.Run] retries.
func Open(db *state.DB, o Options) (*Store, error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("state.dir: %w", err)
	}
	s := &Store{db: db, dir: dir, log: o.Log.With("dir", dir), restored: make(chan struct{}), rotateAbove: minJournal, status: Status{Dir: dir}, metrics: newMetrics(o.Metrics)}
	s.adopt(o.Registries)
	if err := s.acquire(); err != nil {
		if inUse, ok := errors.AsType[*InUseError](err); ok {
			return nil, inUse
		}
		s.failed(err)
	}
	return s, nil
}

// SetRegistries replaces the registries after a configuration reload. The state
// must have them already. It does not wait for the disk. Until everything is
// written under the new names, the previous file remains: a restart restores
// from it the registries still configured.
func (s *Store) SetRegistries(registries []Registry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.registries = slices.Clone(registries)
}

// follow applies the last call of SetRegistries.
func (s *Store) follow() {
	s.mu.Lock()
	registries := s.registries
	s.registries = nil
	s.mu.Unlock()
	if registries == nil {
		return
	}
	before := s.adapters
	s.adopt(registries)
	if maps.Equal(before, s.adapters) {
		return
	}
	for _, g := range []*generation{s.current, s.next} {
		if g != nil {
			_ = g.close() // its data is committed
			s.strays = append(s.strays, g.path)
		}
	}
	s.current, s.next = nil, nil
}

func (s *Store) adopt(registries []Registry) {
	s.names, s.adapters = nil, make(map[string]string)
	for _, r := range registries {
		s.names = append(s.names, r.Name)
		s.adapters[r.Name] = r.Type
	}
}

// acquire creates the directory and acquires its lock.
func (s *Store) acquire() error {
	if s.lockFile != nil {
		return nil
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(s.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	free, err := lock(f)
	if err != nil || !free {
		var pid [32]byte
		n, _ := f.ReadAt(pid[:], 0) // the number is optional
		err = errors.Join(err, f.Close())
		if !free && err == nil {
			err = &InUseError{s.dir, strings.TrimSpace(string(pid[:n]))}
		}
		return err
	}
	// The lock is authoritative; the process number is informational.
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "%d\n", os.Getpid())
	s.lockFile = f
	return nil
}

// Close releases the directory, after Run or instead of it.
func (s *Store) Close() error {
	var err error
	for _, g := range []*generation{s.current, s.next} {
		if g != nil {
			err = errors.Join(err, g.close())
		}
	}
	if s.lockFile != nil {
		err = errors.Join(err, s.lockFile.Close())
	}
	s.current, s.next, s.lockFile = nil, nil, nil
	return err
}

// Status returns a snapshot of the store's status.
func (s *Store) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

var generationName = regexp.MustCompile(`^state-([0-9]{8,9})\.isthmus$`)

// generations returns the numbers of existing files, newest first.
func (s *Store) generations() ([]int, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		return nil, err
	}
	var numbers []int
	for _, e := range entries {
		if m := generationName.FindStringSubmatch(e.Name()); m != nil && e.Type().IsRegular() {
			n, _ := strconv.Atoi(m[1]) // matched as a few digits
			numbers = append(numbers, n)
		}
	}
	slices.SortFunc(numbers, func(a, b int) int { return b - a })
	return numbers, nil
}

// Restored returns a channel that is closed when Run has restored the saved
// state. Registries must not be followed before.
func (s *Store) Restored() <-chan struct{} { return s.restored }

// restoreAll restores the saved state. Problems are logged and reported in the
// status; they do not prevent the bridge from serving. The caller has to call
// resume, which lets garbage be collected again.
func (s *Store) restoreAll() (resume func()) {
	s.resumeGC = func() {}
	s.restoreNewest()
	return s.resumeGC
}

// restoreNewest restores the newest generation that can be used.
func (s *Store) restoreNewest() {
	numbers, err := s.generations()
	if err != nil {
		s.unreadable("the directory cannot be read: " + reason(err))
		return
	}
	if len(numbers) > 0 {
		s.last = numbers[0]
	}
	var wrong []string
	for _, n := range numbers {
		path := generationPath(s.dir, n)
		c, err := s.restore(path)
		if err == nil {
			s.goOn(n, c)
			break
		}
		s.strays = append(s.strays, path)
		wrong = append(wrong, fmt.Sprintf("%s cannot be used: %s", path, reason(err)))
	}
	switch restored := len(wrong) < len(numbers); {
	case len(wrong) == 0:
	case restored:
		// Usually the program ended while writing a new generation.
		s.log.Info("the generation before is used", "because", strings.Join(wrong, "; "))
	default:
		s.unreadable(strings.Join(wrong, "; ") + "; nothing is served from it, each registry is served from its first listing on")
	}
}

// unreadable reports that the saved state cannot be used.
func (s *Store) unreadable(why string) {
	s.metrics.errors.WithLabelValues("read").Inc()
	s.log.Error("the last good state cannot be restored", "err", why)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Reading = why
}

// reason adds a remedy to a file system error.
func reason(err error) string {
	cure := ""
	switch {
	case errors.Is(err, fs.ErrPermission):
		cure = "; make it readable and writable for the user that runs isthmus, or name another directory in state.dir"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		cure = "; make room on the disk, or name another directory in state.dir"
	case errors.Is(err, syscall.EROFS):
		cure = "; name a directory that can be written to in state.dir"
	case errors.Is(err, syscall.ENOTDIR):
		cure = "; something on the way is not a directory: name another one in state.dir"
	}
	return err.Error() + cure
}

// maxFile is the maximum size of a file to read, in bytes.
const maxFile = 8 << 30

// restore restores the content of one file.
func (s *Store) restore(path string) (used *contents, err error) {
	defer func() { recovered(recover(), &err) }()
	began := time.Now()
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if info.Size() > maxFile {
		return nil, fmt.Errorf("it has %d bytes, of at most %d", info.Size(), maxFile)
	}
	file, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	c, err := scan(file)
	if err != nil {
		return nil, err
	}
	s.pauseGC(len(file))

	// The last entry of a name is current; earlier ones are obsolete.
	registries := make([]saved.Registry, len(c.commit.Registries))
	known := make(map[string]bool)
	for n := len(registries) - 1; n >= 0; n-- {
		r := c.commit.Registries[n]
		adapter, configured := s.adapters[r.Name]
		switch {
		case known[r.Name]:
		case !configured:
			s.log.Warn("the registry is no longer in the configuration: its saved state is not served, and is deleted", "registry", r.Name)
		case adapter != r.Type:
			s.log.Warn("the registry has another type: its saved state is not served, and is deleted", "registry", r.Name, "type", adapter, "was", r.Type)
		case r.AsOf.IsZero():
			s.log.Info("the registry had not completed a first listing; nothing of it is restored", "registry", r.Name)
		default:
			registries[n] = saved.Registry{Name: r.Name, AsOf: r.AsOf}
			known[r.Name] = true
			continue
		}
		s.rotate = true
	}
	restored, read, err := s.restoreOf(c.data, registries)
	if err != nil {
		return nil, err
	}
	for _, r := range restored {
		at := s.db.Registry(r.Registry).Status().Restored
		s.log.Info("restored; served until the first listing is complete", "registry", r.Registry, "services", r.Services, "instances", r.Instances,
			"published", r.Published, "age", time.Since(at).Round(time.Second))
		if r.LeftOut > 0 {
			s.rotate = true
			s.log.Warn("a part of the registry is not restored: it exceeds limits of the registry, or its service is missing",
				"registry", r.Registry, "left_out", r.LeftOut)
		}
	}
	took := time.Since(began)
	s.metrics.restore.Set(took.Seconds())
	s.log.Info("the last good state was read", "file", path, "bytes", len(file), "took", took.Round(time.Millisecond), "reading", read.Round(time.Millisecond))
	if c.damage != nil {
		s.rotate = true
		s.metrics.errors.WithLabelValues("read").Inc()
		why := fmt.Sprintf("%s: %v; what was written before that is served, of %s", path, c.damage, c.commit.Time.Format(time.RFC3339))
		s.log.Warn("the last good state is damaged at its end", "err", why)
		s.mu.Lock()
		s.status.Reading = why
		s.mu.Unlock()
	}
	return &c, nil
}

// restoreOf restores data frames, and returns how long they took to parse. What
// was saved of a registry that meets a defect of the bridge is left out: it
// would meet it after each restart again.
func (s *Store) restoreOf(frames [][]byte, registries []saved.Registry) (restored []saved.Restored, read time.Duration, err error) {
	for {
		began := time.Now()
		runs, err := parse(s.db, frames)
		if err != nil {
			return nil, 0, err
		}
		read = time.Since(began)
		restored, err = s.db.Restore(runs, registries)
		of := (*saved.DefectError)(nil)
		if !errors.As(err, &of) || of.Registry == "" {
			return restored, read, err
		}
		s.metrics.errors.WithLabelValues("read").Inc()
		s.log.Warn("a part of the registry is not restored: its saved state meets a defect of the bridge", "registry", of.Registry)
		n := slices.IndexFunc(registries, func(r saved.Registry) bool { return r.Name == of.Registry })
		registries[n], s.rotate = saved.Registry{}, true
	}
}

// collectFrom is the size of a file in bytes from which garbage is collected
// once it is restored.
const collectFrom = 4 << 20

// recovered makes an error of a panic while saved state is read, so that the
// next start does not meet it again.
func recovered(p any, err *error) {
	if p != nil {
		*err = fmt.Errorf("a defect of the bridge, please report it: %v\n%s", p, debug.Stack())
	}
}

// pauseGC stops garbage collection while a file is restored: nearly all of its
// data stays live, so collecting would cost a quarter of the time and free
// little.
//
// The collector would start as soon as it is allowed to, since the heap is many
// times as large as after its last cycle, and have the streams help that are
// being sent everything. Resuming it after one full cycle in the background
// spares them that.
func (s *Store) pauseGC(size int) {
	percent := debug.SetGCPercent(-1)
	if percent < 0 {
		return // paused for a newer file, which cannot be used, or for good
	}
	s.resumeGC = func() {
		if size >= collectFrom {
			runtime.GC()
		}
		debug.SetGCPercent(percent)
	}
}

// parse parses data frames on all processors.
func parse(db *state.DB, frames [][]byte) ([]state.Saved, error) {
	runs := make([]state.Saved, len(frames))
	workers := runtime.GOMAXPROCS(0)
	decoder := newDecoder(workers)
	defer decoder.Close()
	var next atomic.Int64
	var failed error
	var once sync.Once
	var group sync.WaitGroup
	for range workers {
		group.Go(func() {
			var items []byte
			for {
				n := int(next.Add(1)) - 1
				if n >= len(frames) {
					return
				}
				err := func() (err error) {
					defer func() { recovered(recover(), &err) }()
					if items, err = decoder.DecodeAll(frames[n], items[:0]); err == nil {
						runs[n], err = db.ParseSaved(items)
					}
					return err
				}()
				if err != nil {
					once.Do(func() { failed = fmt.Errorf("frame of data %d: %w", n, err) })
					return
				}
			}
		})
	}
	group.Wait()
	return runs, failed
}

// goOn makes a restored file the current one.
func (s *Store) goOn(number int, c *contents) {
	if s.lockFile == nil {
		s.strays = append(s.strays, generationPath(s.dir, number))
		return // not writable; Run retries
	}
	g, err := openGeneration(s.db, s.dir, number, c)
	if err != nil {
		s.strays = append(s.strays, generationPath(s.dir, number))
		s.failed(err)
		return
	}
	s.current = g
}

// Run restores the saved state, then writes changes until ctx ends and once
// more after that.
func (s *Store) Run(ctx context.Context) error {
	done := make(chan struct{})
	// Ends with ctx. If the disk does not respond, Run returns after endWithin
	// without it.
	go func() {
		defer close(done)
		resume := s.restoreAll()
		close(s.restored)
		var background sync.WaitGroup
		background.Go(resume) // ends by itself
		s.loop(ctx)
		background.Wait()
	}()
	<-ctx.Done()
	timer := time.NewTimer(endWithin)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
		s.log.Error("the last changes could not be written in time", "within", endWithin)
		return nil
	}
}

func (s *Store) loop(ctx context.Context) {
	ticker := time.NewTicker(flushEvery)
	defer ticker.Stop()
	var pause time.Duration
	var until time.Time
	for {
		select {
		case <-ctx.Done():
			s.end()
			return
		case <-ticker.C:
		}
		if time.Now().Before(until) {
			continue
		}
		if err := s.pass(false); err != nil {
			s.failed(err)
			pause = min(max(2*pause, minPause), maxPause)
			until = time.Now().Add(pause)
			continue
		}
		pause = 0
		s.succeeded()
	}
}

// end runs the last pass.
func (s *Store) end() {
	err := s.pass(true)
	if err == nil {
		s.succeeded()
	} else {
		s.failed(err)
	}
	if s.next != nil {
		_ = s.next.remove() // the current generation is complete
		s.next = nil
	}
	if err := s.Close(); err != nil {
		s.log.Warn("close the last good state", "err", err)
	}
}

// pass writes changes, and a slice of a new generation if one is due. The last
// pass writes a new generation only if there is no current one.
func (s *Store) pass(last bool) error {
	if err := s.acquire(); err != nil {
		return err
	}
	s.follow()
	if s.current != nil {
		err := s.flush(s.current, last)
		if err != nil {
			s.current.rollback()
			if !errors.Is(err, errLost) {
				return err
			}
			s.rotate = true
		}
		if g := s.current; g.committed.size-g.first > max(s.rotateAbove, g.first) {
			s.rotate = true
		}
	}
	if s.current != nil && (last || !s.rotate) {
		return nil
	}
	if s.next == nil {
		g, err := newGeneration(s.db, s.dir, s.last+1)
		if err != nil {
			return err
		}
		s.last++
		s.next = g
	}
	if err := s.begin(s.next); err != nil {
		err = errors.Join(err, s.next.remove())
		s.next = nil
		return err
	}
	return nil
}

// begin writes a slice of a new generation and makes it the current one when it
// is complete.
func (s *Store) begin(g *generation) error {
	deadline := time.Now().Add(sliceTime)
	if s.current == nil {
		deadline = time.Time{}
	}
	statuses := s.db.Registries()
	complete, err := g.advance(s.adapters, deadline)
	if err != nil || !complete {
		return err
	}
	now := time.Now()
	s.date(g, statuses, now)
	if err := g.commit(now, true); err != nil {
		return err
	}
	if err := syncDir(s.dir); err != nil {
		return err
	}
	old := s.current
	s.current, s.next, s.rotate = g, nil, false
	if old != nil {
		if err := old.remove(); err != nil {
			s.log.Warn("delete the generation before", "file", old.path, "err", err)
		}
	}
	s.wrote(g)
	return nil
}

// flush writes changes to a generation.
func (s *Store) flush(g *generation, last bool) error {
	statuses := s.db.Registries()
	changed := g.behind()
	if changed {
		if _, err := g.advance(s.adapters, time.Time{}); err != nil {
			return err
		}
	}
	now := time.Now()
	changed = s.date(g, statuses, now) || changed
	beat := now.Sub(g.committed.at) >= beatEvery
	if beat {
		// A deleted file is replaced by a new generation.
		if _, err := os.Stat(g.path); errors.Is(err, fs.ErrNotExist) {
			s.rotate = true
		}
	}
	if !changed && !beat && !last {
		return nil
	}
	if err := g.commit(now, changed || last); err != nil {
		return err
	}
	s.wrote(g)
	return nil
}

// date updates the AsOf times of the registries, and reports whether any of
// them became zero or nonzero.
func (s *Store) date(g *generation, statuses []state.Status, now time.Time) (changed bool) {
	for _, st := range statuses {
		r := &g.place.registries[g.registry(st.Registry, s.adapters[st.Registry])]
		asOf := now
		switch {
		case !st.Restored.IsZero():
			asOf = st.Restored
		case !st.Synced:
			asOf = time.Time{}
		case st.Stale():
			asOf = st.Since
		case st.Listing:
			asOf = st.ListingSince
		}
		changed = changed || r.AsOf.IsZero() != asOf.IsZero()
		r.AsOf = asOf
	}
	return changed
}

// wrote updates status and metrics after a write, and deletes files that are no
// longer needed.
func (s *Store) wrote(g *generation) {
	s.mu.Lock()
	s.status.Bytes, s.status.WrittenAt = g.committed.size, g.committed.at
	s.mu.Unlock()
	s.metrics.bytes.Set(float64(g.committed.size))
	s.metrics.written.Set(float64(g.committed.at.UnixMilli()) / 1000)
	if len(s.strays) == 0 {
		return
	}
	// Old files are kept until every registry is saved: another version may be
	// able to read those that this one cannot.
	for _, name := range s.names {
		if g.place.registries[g.registry(name, s.adapters[name])].AsOf.IsZero() {
			return
		}
	}
	for _, path := range s.strays {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.log.Warn("delete an old file", "file", path, "err", err)
		}
	}
	s.strays = nil
}

func (s *Store) failed(err error) {
	why := reason(err)
	s.metrics.errors.WithLabelValues("write").Inc()
	s.metrics.failing.Set(1)
	s.mu.Lock()
	news := s.status.Writing == ""
	s.status.Writing = why
	if news {
		s.status.WritingSince = time.Now()
	}
	s.mu.Unlock()
	if news {
		s.log.Error("the last good state cannot be written; everything is served, and a restart would begin with an older state or none", "err", why)
	}
}

func (s *Store) succeeded() {
	s.metrics.failing.Set(0)
	s.mu.Lock()
	was, since := s.status.Writing, s.status.WritingSince
	s.status.Writing, s.status.WritingSince = "", time.Time{}
	s.mu.Unlock()
	if was != "" {
		s.log.Info("the last good state is written again", "after", time.Since(since).Round(time.Second))
	}
}

// syncDir makes the entries of a directory durable.
func syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // a directory cannot be synced on Windows
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return cmp.Or(d.Sync(), d.Close())
}
