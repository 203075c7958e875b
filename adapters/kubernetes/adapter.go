package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// rediscover is how often the kubeconfig, and the kinds of Istio that the
// server has, are looked at.
const rediscover = time.Minute

// Adapter follows one cluster, or one for each context. New makes one.
type Adapter struct {
	config Config
	env    plugin.Env

	runs       []*run        // one for each cluster
	ends       time.Duration // see client.ends
	rediscover time.Duration
}

// New returns an adapter for a configuration that Validate accepts. It reads
// the files that are named, and starts nothing but the helper of a login, which
// Run ends.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	c.Follow = cmp.Or(c.Follow, DefaultConfig.Follow)
	c.Timeout = cmp.Or(c.Timeout, DefaultConfig.Timeout)
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	a := &Adapter{config: c, env: env, rediscover: rediscover}
	for _, of := range c.clusters() {
		r := &run{Adapter: a, config: of, log: env.Log, revisions: map[string]string{}}
		if len(c.Contexts) > 0 {
			r.log = env.Log.With(slog.String("context", of.Context))
		}
		if err := r.prepare(); err != nil {
			a.stop()
			return nil, err
		}
		a.runs = append(a.runs, r)
	}
	return a, nil
}

// prepare reads what the configuration of a cluster names, and starts the
// helper of its login.
func (r *run) prepare() error {
	if r.config.KubeconfigFile == "" && r.config.Server == "" {
		return nil // what a pod is given may come later
	}
	k, err := r.config.cluster()
	if err != nil {
		return err
	}
	if _, err := k.tlsConfig(); err != nil {
		return err
	}
	if k.exec != nil {
		if r.login, err = startLogin(r.config.Exec, k); err != nil {
			return &plugin.FieldError{Field: "exec", Reason: err.Error()}
		}
	}
	return nil
}

// stop ends the helpers.
func (a *Adapter) stop() {
	for _, r := range a.runs {
		if r.login != nil {
			r.login.stop()
		}
	}
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

// follower holds what a cluster has of what is followed. Only read may be
// called by several goroutines at a time.
type follower interface {
	// sources returns what is listed and watched.
	sources() []source
	// read reads an object, in place of its bytes.
	read(kind string, o *object)
	// put applies an object that was read, and adds the services it affects to
	// touched; remove removes one.
	put(kind string, o *object, touched map[registry.Key]bool)
	remove(kind string, n name, touched map[registry.Key]bool)
	// all returns everything; changed the present state of some services.
	all() plugin.Listing
	changed(keys iter.Seq[registry.Key]) plugin.Listing
	// tell lists what is left out.
	tell(catalog plugin.Catalog)
	// identity identifies the cluster, or is "".
	identity() string
}

// run follows one cluster.
type run struct {
	*Adapter
	config  Config // with the context of the cluster
	login   *login // nil if no program is needed
	log     *slog.Logger
	catalog plugin.Catalog

	server    atomic.Pointer[string] // of the latest session
	identity  string                 // of the cluster before
	revisions map[string]string      // by path; empty before the first listing
}

// Run follows the registry until ctx ends, and then returns nil. No failure of
// the cluster ends it.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	defer a.stop()
	if a.config.Follow == followIstio {
		to, ok := catalog.(plugin.Publisher)
		if !ok {
			return errors.New("BUG: the catalog takes no resources in Istio's words")
		}
		catalog = &publisher{Publisher: to}
	}
	catalogs := []plugin.Catalog{catalog}
	if len(a.config.Contexts) > 0 {
		catalogs = plugin.NewUnion(catalog, "context", a.config.Contexts).Parts()
	}
	errs := make([]error, len(a.runs))
	var all sync.WaitGroup
	for i, r := range a.runs {
		r.catalog = catalogs[i]
		// Owned by Run; ends with ctx.
		all.Go(func() { errs[i] = r.run(ctx) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// hints are what to check if nothing is listed at first.
var hints = map[string]string{
	followServices: "namespaces, labels and select",
	followExports:  "namespaces, labels, select, and the ServiceExports",
	followImports:  "namespaces, labels and select",
	followIstio:    "namespaces, labels, select and revision",
}

// run follows the cluster until ctx ends.
func (r *run) run(ctx context.Context) error {
	w := plugin.Watch{
		Follow:      r.follow,
		RemoveGrace: time.Duration(r.config.RemoveGrace), MinShare: r.config.MinShare, AcceptEmpty: r.config.AcceptEmpty, AcceptEmptyField: "accept_empty",
		Hint: hints[r.config.Follow],
		Detail: func() string {
			if server := r.server.Load(); server != nil {
				return "watching " + *server
			}
			return "watching"
		},
	}
	return w.Run(ctx, r.catalog)
}

// follow implements plugin.Watch.Follow: it lists and watches every source,
// each on its own, until the configuration of the cluster or its kinds change.
func (r *run) follow(ctx context.Context, take func(plugin.Listing)) error {
	k, err := r.config.cluster()
	if err != nil {
		return err
	}
	server := k.url().Redacted()
	r.server.Store(&server)
	// Who needs to know is told by the catalog.
	ctx = klog.NewContext(ctx, klog.Logger{})
	c, err := k.connect(time.Duration(r.config.Timeout), r.login)
	if err != nil {
		return err
	}
	c.ends = r.ends
	defer c.close()
	f, err := r.follower(ctx, c)
	if err != nil {
		return fmt.Errorf("%s: %w", server, explain(err))
	}
	return r.session(ctx, k, c, f, take)
}

// follower returns an empty follower of a session.
func (r *run) follower(ctx context.Context, c *client) (follower, error) {
	found, err := r.discover(ctx, c)
	switch {
	case err != nil:
		return nil, err
	case r.config.Follow == followIstio:
		return newObjects(r.Adapter, found), nil
	}
	return newState(r.Adapter, found), nil
}
