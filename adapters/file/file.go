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
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// quiet is how long nothing may have changed before the files are read, so that one that is being written is read whole.
	quiet = 100 * time.Millisecond
	// patience is how long reading is put off at most while something keeps changing.
	patience = time.Second
	// rescan is how often the files are read although no change was reported, give or take a tenth, for file systems that report
	// none.
	rescan = 30 * time.Second
	// retryMin and retryMax bound the time between attempts while the directory cannot be read.
	retryMin = 500 * time.Millisecond
	retryMax = 10 * time.Second
)

// adapter follows a directory, or one file.
type adapter struct {
	conf Config
	path string // absolute
	log  *slog.Logger

	quiet, patience time.Duration // as the constants say; tests take others
}

// New returns an adapter that follows c.Path, which need not exist yet. The error joins a *[plugin.FieldError] for each thing that is
// wrong with c.
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

// Run keeps catalog equal to the files until ctx ends; then it returns nil. A directory that cannot be read, or is not there, makes the
// catalog degraded and removes nothing.
func (a *adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	w := newWatcher() // its goroutine ends with close
	defer w.close()
	f := &follower{
		catalog: catalog,
		tree:    tree{path: a.path, namespace: a.conf.Namespace},
		watcher: w,
		applied: &state{},
	}
	retry := retryMin
	timer := time.NewTimer(0)
	defer timer.Stop()
	var deadline time.Time // when reading is put off no longer; zero: nothing has changed
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

// follower brings what the files hold into the catalog.
type follower struct {
	catalog plugin.Catalog
	tree    tree
	watcher *watcher

	listing  listing
	degraded bool
	synced   bool
	applied  *state            // what the catalog was told of services and resources
	listed   map[string]string // what it was told of problems
}

// step reads the files once and tells the catalog what changed. An error means that they cannot be read; the catalog was told.
func (f *follower) step() error {
	// Watches come first: what changes after them is reported, what changed before them is read.
	_, watching := f.watcher.set(wanted(f.tree.path, f.listing))
	var err error
	for range 3 { // more often only if links keep being moved; the next event or listing comes after that
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
	// A file that was never fit for use may hold what an earlier run of the adapter knew: the listing is not complete without it.
	if broken := f.tree.unread(); !f.synced && len(broken) > 0 {
		f.degraded = true
		f.catalog.Degraded(fmt.Errorf("read %s: the first listing waits for %s, which cannot be used (the list of problems says why); mend or remove it",
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

// apply brings the catalog from what it was told to s. What is new comes first, so that what moves from one name to another is
// there all the time.
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
	f.list(s.problems, watching)
}

// list makes the catalog's list of problems be those of the files and those of watching them.
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
