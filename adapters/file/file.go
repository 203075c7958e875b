package file

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

const (
	// quiet is the time without changes after which the files are read, so that
	// files are read whole.
	quiet = 100 * time.Millisecond
	// patience bounds the delay of reading while files keep changing.
	patience = time.Second
	// rescan is the interval, varied by a tenth, at which the files are read
	// without a reported change, for file systems that report none.
	rescan = 30 * time.Second
	// retryMin and retryMax bound the time between attempts while the directory
	// cannot be read.
	retryMin = 500 * time.Millisecond
	retryMax = 10 * time.Second
)

// adapter follows a directory or one file.
type adapter struct {
	conf Config
	path string // absolute
	log  *slog.Logger

	quiet, patience time.Duration // the constants, except in tests
}

// New returns an adapter that follows c.Path, which need not exist yet. The
// error joins a *[plugin.FieldError] for each error of c.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	path, err := filepath.Abs(c.Path)
	if err != nil {
		return nil, &plugin.FieldError{Field: "path", Reason: fmt.Sprintf("%v; give an absolute path", err)}
	}
	if c.Namespace == "" {
		c.Namespace = Defaults.Namespace
	}
	return &adapter{conf: c, path: path, log: env.Log, quiet: quiet, patience: patience}, nil
}

// Run updates catalog from the files until ctx ends, and returns nil. A
// directory that is missing or cannot be read makes the catalog degraded and
// removes nothing.
func (a *adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	publisher, ok := catalog.(plugin.Publisher)
	if !ok {
		return errors.New("BUG: the catalog takes no resources in Istio's words")
	}
	w := newWatcher() // its goroutine ends with close
	defer w.close()
	f := &follower{
		catalog: publisher,
		tree:    tree{path: a.path, namespace: a.conf.Namespace},
		watcher: w,
		applied: &state{},
	}
	plugin.Recall(catalog, f.recall)
	retry := retryMin
	timer := time.NewTimer(0)
	defer timer.Stop()
	var deadline time.Time // latest time of the next reading; zero if nothing has changed
	for {
		select {
		case <-ctx.Done():
			return nil
		case ev := <-w.events():
			if !w.concerns(ev) {
				continue
			}
		case err := <-w.errors():
			a.log.LogAttrs(ctx, slog.LevelDebug, "watching the files: something may have gone unseen", slog.Any("err", err))
		case <-timer.C:
			deadline = time.Time{}
			next := rescan
			if err := f.step(); err != nil {
				next, retry = retry, min(2*retry, retryMax)
			} else {
				retry = retryMin
			}
			timer.Reset(next + time.Duration((rand.Float64()-0.5)*0.2*float64(next)))
			continue
		}
		now := time.Now()
		if deadline.IsZero() {
			deadline = now.Add(a.patience)
		}
		timer.Reset(min(a.quiet, deadline.Sub(now)))
	}
}

// follower applies the content of the files to the catalog.
type follower struct {
	catalog plugin.Publisher
	tree    tree
	watcher *watcher

	listing  listing
	degraded bool
	synced   bool
	applied  *state                // services and resources that the catalog has
	shown    atomic.Pointer[state] // applied, for recall
	listed   map[string]string     // problems that the catalog has
}

// step reads the files once and applies changes to the catalog. The error is
// that the files cannot be read; the catalog has recorded it.
func (f *follower) step() error {
	// Watches are set first: later changes are reported, earlier ones are read.
	_, watching := f.watcher.set(wanted(f.tree.path, f.listing))
	var err error
	for range 3 { // links that keep moving are covered by the next event or listing
		var l listing
		if l, err = f.tree.refresh(); err != nil {
			if errors.Is(err, errReplaced) {
				continue
			}
			break
		}
		f.listing = l
		var began bool
		began, watching = f.watcher.set(wanted(f.tree.path, l))
		if !began {
			break
		}
	}
	if err != nil {
		f.degraded = true
		f.catalog.Degraded(fmt.Errorf("read %s: %w; nothing is removed", f.tree.path, err))
		f.list(f.applied.problems, watching)
		return err
	}
	f.catalog.Heard()
	f.apply(f.tree.merge(), watching)
	// A file without a good version may hold what an earlier run of the adapter
	// published, so the listing is incomplete without it.
	if broken := f.tree.unread(); !f.synced && len(broken) > 0 {
		f.degraded = true
		f.catalog.Degraded(fmt.Errorf("read %s: the first listing waits for %s, which cannot be used (the list of problems says why); correct or remove it",
			f.tree.path, strings.Join(broken, ", ")))
		return nil
	}
	if f.degraded {
		f.degraded = false
		f.catalog.Degraded(nil)
	}
	if !f.synced {
		f.synced = true
		f.catalog.Synced()
	}
	return nil
}

// apply updates the catalog to s. Additions come first, so that a resource that
// moves between names is present at all times.
func (f *follower) apply(s *state, watching map[string]string) {
	for _, svc := range s.serviceOrder {
		if f.applied.services[svc.Key] != svc {
			f.catalog.Set(svc.Service, svc.instances)
		}
	}
	for _, res := range s.resourceOrder {
		if f.applied.resources[res.id] != res {
			f.catalog.Publish(res.res)
		}
	}
	for _, svc := range f.applied.serviceOrder {
		if s.services[svc.Key] == nil {
			f.catalog.Remove(svc.Key)
		}
	}
	for _, res := range f.applied.resourceOrder {
		if s.resources[res.id] == nil {
			f.catalog.Withdraw(res.id.collection, res.id.name)
		}
	}
	f.applied = s
	f.shown.Store(s)
	f.list(s.problems, watching)
}

// recall returns a service as it is in the catalog.
func (f *follower) recall(key registry.Key) (plugin.Snapshot, bool) {
	s := f.shown.Load()
	if s == nil || s.services[key] == nil {
		return plugin.Snapshot{}, false
	}
	svc := s.services[key]
	return plugin.Snapshot{Service: svc.Service, Instances: svc.instances}, true
}

// list updates the problems in the catalog to those of the files and of
// watching them.
func (f *follower) list(ofFiles, ofWatching map[string]string) {
	now := maps.Clone(ofWatching)
	maps.Copy(now, ofFiles)
	for _, id := range slices.Sorted(maps.Keys(now)) {
		if f.listed[id] != now[id] {
			f.catalog.Problem(id, now[id])
		}
	}
	for _, id := range slices.Sorted(maps.Keys(f.listed)) {
		if now[id] == "" {
			f.catalog.Problem(id, "")
		}
	}
	f.listed = now
}
