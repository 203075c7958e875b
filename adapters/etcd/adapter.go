package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Adapter follows one etcd. New makes one.
type Adapter struct {
	config Config
	prefix string
	layout layout
	env    plugin.Env
}

// New returns an adapter for a configuration that Validate accepts. It reads
// the files that are named and starts nothing.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	c.Layout = cmp.Or(c.Layout, DefaultConfig.Layout)
	c.Timeout = cmp.Or(c.Timeout, DefaultConfig.Timeout)
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
	return &Adapter{config: c, prefix: c.prefix(), layout: layouts[c.Layout], env: env}, nil
}

// follower is the state of one Run.
type follower struct {
	*Adapter
	catalog plugin.Catalog
	servers *plugin.Servers

	state    *state
	cluster  uint64 // whose revision it is
	revision int64  // 0 before the first listing
	// avoid is a server that fell silent and would cost another time-out, to be
	// asked after the others.
	avoid string
}

// Run follows the registry until ctx ends, and then returns nil. No failure of
// etcd ends it.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	f := &follower{Adapter: a, catalog: catalog, servers: plugin.NewServers(a.config.Endpoints), state: newState(a.layout, a.config.Services)}
	w := plugin.Watch{
		Follow:      f.follow,
		RemoveGrace: time.Duration(a.config.RemoveGrace), MinShare: a.config.MinShare, AcceptEmpty: a.config.AcceptEmpty, AcceptEmptyField: "accept_empty",
		Hint: fmt.Sprintf("prefix (%q) and layout", a.prefix),
		Detail: func() string {
			if s := f.servers.String(); s != "" {
				return "watching " + s
			}
			return "watching"
		},
	}
	return w.Run(ctx, catalog)
}

// follow implements plugin.Watch.Follow: it begins a session with one server
// and applies what its watch reports until it ends.
func (f *follower) follow(ctx context.Context, take func(plugin.Listing)) error {
	var s *session
	var l *listing
	err := f.servers.Do(ctx, func(ctx context.Context, address string) (err error) {
		s, l, err = f.open(ctx, address)
		return err
	})
	if s != nil { // also if ctx ended as the session began
		defer s.close()
	}
	if err != nil {
		return err
	}
	take(f.accept(l))
	err = s.follow(f.prefix, func(events []*clientv3.Event) {
		f.revision = s.revision
		take(f.apply(events))
	})
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		// Changes were missed. Nothing says that any data is lost.
		f.env.Log.Info("the revision to continue from is compacted; everything is listed again", slog.Any("err", err))
		return nil
	case errors.Is(err, errSilent):
		f.avoid = s.address
	}
	return fmt.Errorf("%s: %w", s.address, err)
}

// open begins a session with one server: its listing, and the watch behind it.
func (f *follower) open(ctx context.Context, address string) (_ *session, _ *listing, err error) {
	if address == f.avoid {
		f.avoid = ""
		if len(f.config.Endpoints) > 1 {
			return nil, nil, errSilent
		}
	}
	s, err := f.dial(ctx, address)
	if err != nil {
		return nil, nil, err
	}
	l, err := s.list(f.prefix, f.state, newState(f.layout, f.config.Services))
	if err == nil {
		err = s.watch(f.prefix)
	}
	if err != nil {
		s.close()
		return nil, nil, err
	}
	return s, l, nil
}

// accept makes a listing the present state and returns it.
func (f *follower) accept(l *listing) plugin.Listing {
	lost := f.lost(l)
	f.cluster, f.revision, f.state = l.cluster, l.revision, l.state
	f.state.leftOut.Tell(f.catalog, "services", "")
	all := f.state.all()
	all.Lost = lost
	return all
}

// lost returns how the registry has lost data before a listing, or nil.
func (f *follower) lost(l *listing) (err error) {
	switch {
	case f.revision == 0:
		return nil
	case l.cluster != f.cluster:
		err = fmt.Errorf("another cluster answers (%x, was %x)", l.cluster, f.cluster)
	case l.revision < f.revision:
		err = fmt.Errorf("the revision went back from %d to %d", f.revision, l.revision)
	default:
		return nil
	}
	f.env.Log.Info("the registry has lost data", slog.Any("err", err))
	return err
}

// apply applies events and returns what has changed.
func (f *follower) apply(events []*clientv3.Event) plugin.Listing {
	touched := map[string]bool{}
	for _, e := range events {
		key, ok := strings.CutPrefix(string(e.GetKv().GetKey()), f.prefix)
		if !ok {
			continue // not asked for
		}
		if e.Type == clientv3.EventTypeDelete {
			f.state.remove(key, touched)
		} else {
			f.state.put(key, e.Kv.Value, f.state.keys[key], touched)
		}
	}
	f.state.leftOut.Tell(f.catalog, "services", "")
	return f.state.listing(maps.Keys(touched))
}
