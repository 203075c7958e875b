package kubernetes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// rediscover is how often the kinds of Istio that the server has are looked at.
const rediscover = time.Minute

// Adapter follows one cluster. New makes one.
type Adapter struct {
	config Config
	env    plugin.Env

	watching   func() time.Duration // replaces client.watching in tests
	rediscover time.Duration
}

// New returns an adapter for a configuration that Validate accepts. It reads
// the files that are named and starts nothing.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	c.Follow = cmp.Or(c.Follow, DefaultConfig.Follow)
	c.Timeout = cmp.Or(c.Timeout, DefaultConfig.Timeout)
	if err := c.Validate(); err != nil {
		return nil, err
	}
	// What a pod is given may come later; what is configured is there.
	if c.KubeconfigFile != "" || c.Server != "" {
		k, err := c.cluster()
		if err != nil {
			return nil, err
		}
		if _, err := k.config(); err != nil {
			return nil, err
		}
	}
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	return &Adapter{config: c, env: env, rediscover: rediscover}, nil
}

// namespaces returns the namespaces to follow as parts of paths, "" for all.
func (c Config) namespaces() (paths []string) {
	for _, ns := range c.Namespaces {
		paths = append(paths, "/namespaces/"+ns)
	}
	if len(paths) == 0 {
		return []string{""}
	}
	return paths
}

// follower holds what a cluster has of what is followed.
type follower interface {
	// sources returns what is listed and watched.
	sources() []source
	// put applies an object, and adds the services it affects to touched;
	// remove removes one.
	put(kind string, object json.RawMessage, touched map[registry.Key]bool)
	remove(kind string, object json.RawMessage, touched map[registry.Key]bool)
	// all returns everything; changed the present state of some services.
	all() plugin.Listing
	changed(keys iter.Seq[registry.Key]) plugin.Listing
	// tell lists what is left out.
	tell(catalog plugin.Catalog)
	// identity identifies the cluster, or is "".
	identity() string
}

// run is the state of one Run.
type run struct {
	*Adapter
	catalog plugin.Catalog

	server    atomic.Pointer[string] // of the latest session
	identity  string                 // of the cluster before
	revisions map[string]string      // by path; empty before the first listing
}

// Run follows the registry until ctx ends, and then returns nil. No failure of
// the cluster ends it.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	r := &run{Adapter: a, catalog: catalog, revisions: map[string]string{}}
	hint := "namespaces, labels and select"
	if a.config.Follow == followIstio {
		to, ok := catalog.(plugin.Publisher)
		if !ok {
			return errors.New("BUG: the catalog takes no resources in Istio's words")
		}
		r.catalog = &publisher{Publisher: to}
		hint += ", and revision"
	}
	w := plugin.Watch{
		Follow:      r.follow,
		RemoveGrace: time.Duration(a.config.RemoveGrace), MinShare: a.config.MinShare, AcceptEmpty: a.config.AcceptEmpty,
		Hint: hint,
		Detail: func() string {
			if server := r.server.Load(); server != nil {
				return "watching " + *server
			}
			return "watching"
		},
	}
	return w.Run(ctx, r.catalog)
}

// follow implements plugin.Watch.Follow: it lists every source, watches it from
// there on, and applies what the watches report until one of them ends.
func (r *run) follow(ctx context.Context, take func(plugin.Listing)) error {
	k, err := r.config.cluster()
	if err != nil {
		return err
	}
	server := k.server.Redacted()
	r.server.Store(&server)
	c := connect(k, time.Duration(r.config.Timeout))
	if r.watching != nil {
		c.watching = r.watching
	}
	defer c.close()
	err = r.session(ctx, c, take)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errExpired):
		// Changes were missed. Nothing says that any data is lost.
		r.env.Log.Info("the revision to go on from has expired; everything is listed again", slog.Any("err", err))
		return nil
	}
	return fmt.Errorf("%s: %w", server, err)
}

// session is follow with a client.
func (r *run) session(ctx context.Context, c *client, take func(plugin.Listing)) error {
	f, err := r.follower(ctx, c)
	if err != nil {
		return err
	}
	revisions, err := list(ctx, c, f)
	if err != nil {
		return err
	}

	ctx, cancel := context.WithCancelCause(ctx)
	var watches sync.WaitGroup
	defer func() {
		cancel(nil)
		watches.Wait()
	}()
	events := make(chan event)
	var opening sync.WaitGroup
	for _, s := range f.sources() {
		opening.Add(1)
		opened := sync.OnceFunc(opening.Done)
		// Owned by session; ends with ctx, or ends that.
		watches.Go(func() {
			defer opened()
			err := c.watch(ctx, s, revisions[s.path], opened, func(e event) {
				select {
				case events <- e:
				case <-ctx.Done():
				}
			})
			cancel(err)
		})
	}
	opening.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	l := f.all()
	l.Lost = r.lost(f, revisions)
	r.identity = cmp.Or(f.identity(), r.identity)
	maps.Copy(r.revisions, revisions)
	f.tell(r.catalog)
	take(l)

	var again <-chan time.Time
	if r.config.Follow == followIstio {
		ticker := time.NewTicker(r.rediscover)
		defer ticker.Stop()
		again = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case e := <-events:
			touched := map[registry.Key]bool{}
			switch e.Type {
			case "ADDED", "MODIFIED":
				f.put(e.source.kind, e.Object, touched)
			case "DELETED":
				f.remove(e.source.kind, e.Object, touched)
			}
			r.revisions[e.source.path] = cmp.Or(e.revision, r.revisions[e.source.path])
			take(f.changed(maps.Keys(touched)))
			if e.source.kind != "EndpointSlice" { // which is never left out
				f.tell(r.catalog)
			}
		case <-again:
			found, err := r.discover(ctx, c)
			if err != nil {
				return err
			}
			if !slices.Equal(found, f.sources()) {
				r.env.Log.Info("the cluster has other kinds of Istio than before; everything is listed again", slog.Int("kinds", len(found)))
				return nil
			}
		}
	}
}

// follower returns an empty follower of a session.
func (r *run) follower(ctx context.Context, c *client) (follower, error) {
	if r.config.Follow != followIstio {
		return newState(r.Adapter), nil
	}
	found, err := r.discover(ctx, c)
	if err != nil {
		return nil, err
	}
	return newObjects(r.Adapter, found), nil
}

// list lists every source, several at once, and returns their revisions. Its
// error is the first one by text, but names everything that is forbidden.
func list(ctx context.Context, c *client, f follower) (revisions map[string]string, err error) {
	var mu sync.Mutex // guards f, revisions and errs
	revisions = map[string]string{}
	var errs, forbidden []error
	var names []string // of what is forbidden
	var lists sync.WaitGroup
	turns := make(chan struct{}, 8)
	for _, s := range f.sources() {
		// Owned by list, which waits for it; ends with its last page.
		lists.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			touched := map[registry.Key]bool{}
			revision, err := c.list(ctx, s, func(object json.RawMessage) {
				mu.Lock()
				defer mu.Unlock()
				f.put(s.kind, object, touched)
			})
			mu.Lock()
			defer mu.Unlock()
			revisions[s.path] = revision
			if e, ok := errors.AsType[*apiError](err); ok && e.code == http.StatusForbidden {
				forbidden, names = append(forbidden, err), append(names, path.Base(s.path))
			} else if err != nil {
				errs = append(errs, err)
			}
		})
	}
	lists.Wait()
	slices.SortFunc(errs, byText)
	if len(forbidden) > 0 {
		slices.Sort(names)
		first := slices.MinFunc(forbidden, byText)
		errs = append(errs, fmt.Errorf("it may not list %s: %w", strings.Join(slices.Compact(names), ", "), first))
	}
	if len(errs) > 0 {
		return nil, errs[0]
	}
	return revisions, nil
}

func byText(a, b error) int { return cmp.Compare(a.Error(), b.Error()) }

// lost returns how the cluster has lost data before a listing, or nil.
func (r *run) lost(f follower, revisions map[string]string) (err error) {
	if is := f.identity(); is != "" && r.identity != "" && is != r.identity {
		err = errors.New("another cluster answers: its Service default/kubernetes has another UID")
	}
	for path, revision := range revisions {
		if was := r.revisions[path]; err == nil && goesBack(was, revision) {
			err = fmt.Errorf("the revision went back from %s to %s", was, revision)
		}
	}
	if err != nil {
		clear(r.revisions)
		r.env.Log.Info("the cluster has lost data", slog.Any("err", err))
	}
	return err
}
