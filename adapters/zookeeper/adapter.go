package zookeeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Adapter follows one ZooKeeper. New makes one.
type Adapter struct {
	config Config
	layout layout
	env    plugin.Env
}

// New returns an adapter for a configuration that Validate accepts. It reads
// the files that are named and starts nothing.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	c.Dubbo = cmp.Or(c.Dubbo, DefaultConfig.Dubbo)
	c.Apps = cmp.Or(c.Apps, DefaultConfig.Apps)
	c.Auth = cmp.Or(c.Auth, DefaultConfig.Auth)
	c.Timeout = cmp.Or(c.Timeout, DefaultConfig.Timeout)
	if len(c.Hosts) == 0 {
		c.Hosts = DefaultConfig.Hosts
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if _, err := c.TLS.Config("tls"); err != nil {
		return nil, err
	}
	if _, _, err := c.credentials(); err != nil {
		return nil, err
	}
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	return &Adapter{config: c, layout: newLayout(c), env: env}, nil
}

// follower is the state of one Run.
type follower struct {
	*Adapter
	servers *plugin.Servers

	tree *tree
	zxid int64 // the last transaction that was seen, 0 before the first listing
	// old are the servers without watches that stay.
	old map[string]bool
	// avoid is a server that fell silent and would cost another time-out, to be
	// asked after the others.
	avoid string

	told   map[unit][]registry.Key // services of each unit, as last passed on
	denied string                  // the path that may not be read, as last passed on
}

// Run follows the registry until ctx ends, and then returns nil. No failure of
// ZooKeeper ends it.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	f := &follower{Adapter: a, servers: plugin.NewServers(a.config.Servers), old: map[string]bool{}}
	return (&plugin.Watch{
		Follow: f.follow, RemoveGrace: time.Duration(a.config.RemoveGrace), MinShare: a.config.MinShare, AcceptEmpty: a.config.AcceptEmpty, AcceptEmptyField: "accept_empty",
		Hint: "chroot, dubbo and applications", Detail: f.detail,
	}).Run(ctx, catalog)
}

// detail returns how the registry is followed.
func (f *follower) detail() string {
	text := "watching"
	if s := f.servers.String(); s != "" {
		text += " " + s
	}
	return text
}

// follow reads everything in a new session and then what changes, until the
// session ends.
func (f *follower) follow(ctx context.Context, take func(plugin.Listing)) error {
	var r *reading
	err := f.servers.Do(ctx, func(ctx context.Context, address string) (err error) {
		r, err = f.open(ctx, address)
		return err
	})
	if r != nil {
		defer r.s.close()
	}
	if err != nil { // also if ctx ended as the session began
		return err
	}
	take(f.begin(r))
	again := newRetry()
	defer again.Stop()
	err = r.s.receive(ctx, func(m message) (bool, error) {
		if err := r.take(m); err != nil {
			return false, err
		}
		f.zxid = max(f.zxid, r.s.zxid)
		take(f.changes(r))
		return false, nil
	}, due{again.C, r.retry})
	if errors.Is(err, errSilent) {
		f.avoid = r.s.address
	}
	return fmt.Errorf("%s: %w", r.s.address, err)
}

// open reads everything in a new session with one server.
func (f *follower) open(ctx context.Context, address string) (*reading, error) {
	if address == f.avoid {
		f.avoid = ""
		if len(f.config.Servers) > 1 {
			return nil, errSilent
		}
	}
	r, err := f.read(ctx, address, !f.old[address])
	if errors.Is(err, codeUnimplemented) && !f.old[address] {
		f.env.Log.Info("the server is older than 3.6 and has no persistent watches; each node is watched", slog.String("server", address))
		f.old[address] = true
		r, err = f.read(ctx, address, false)
	}
	return r, err
}

// read reads everything in a new session. stay says that watches stay.
func (f *follower) read(ctx context.Context, address string, stay bool) (_ *reading, err error) {
	s, err := f.dial(ctx, address)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	r := newReading(f.layout, s, newTree(f.config, f.env.Wants, f.tree), stay)
	if err := r.start(ctx, f.layout.roots(f.config)); err != nil {
		return nil, err
	}
	return r, s.receive(ctx, func(m message) (bool, error) {
		if err := r.take(m); err != nil {
			return false, err
		}
		return r.listed(), nil
	})
}

// begin takes over what a session has read, and returns it.
func (f *follower) begin(r *reading) plugin.Listing {
	f.tree = r.t
	f.tree.before = nil
	l := f.all(r)
	if r.s.zxid < f.zxid {
		l.Lost = fmt.Errorf("the server's transaction id went back from %#x to %#x", f.zxid, r.s.zxid)
		f.env.Log.Info("the registry has lost data", slog.Any("err", l.Lost))
	}
	f.zxid = r.s.zxid
	return l
}

// all returns everything.
func (f *follower) all(r *reading) plugin.Listing {
	f.told = map[unit][]registry.Key{}
	clear(f.tree.dirty)
	l := plugin.Listing{Complete: true, Problems: map[string]string{}}
	for u := range f.tree.units() {
		f.add(&l, u)
	}
	if f.denied = r.deniedPath(); f.denied != "" {
		l.Doubt = r.refused(codeNoAuth, "read", f.denied)
	}
	return l
}

// changes returns what has changed since it was called last.
func (f *follower) changes(r *reading) plugin.Listing {
	if r.deniedPath() != f.denied {
		return f.all(r)
	}
	if len(f.tree.dirty) == 0 {
		return plugin.Listing{}
	}
	l := plugin.Listing{Problems: map[string]string{}}
	for u := range f.tree.dirty {
		f.add(&l, u)
	}
	clear(f.tree.dirty)
	return l
}

// add adds what a unit says now, and what it no longer says.
func (f *follower) add(l *plugin.Listing, u unit) {
	services, problem := f.tree.compose(u)
	l.Problems[u.String()] = problem
	var now []registry.Key
	for _, s := range services {
		now = append(now, s.Service.Key)
		l.Services = append(l.Services, s)
	}
	for _, key := range f.told[u] {
		if !slices.Contains(now, key) {
			l.Removed = append(l.Removed, key)
		}
	}
	if f.told[u] = now; len(now) == 0 {
		delete(f.told, u)
	}
}

// String returns the id under which the problems of a unit are listed.
func (u unit) String() string {
	if u.app {
		return "application " + u.name
	}
	return "interface " + u.name
}
