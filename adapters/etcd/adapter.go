package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
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

// fault is a kind of fault, in the order shown.
type fault int

const (
	// faultAway: no server can be followed.
	faultAway fault = iota
	// faultEmpty: the registry lists no instance.
	faultEmpty
	// faultKept: instances are retained after an outage.
	faultKept
)

// follower is the state of one Run.
type follower struct {
	*Adapter
	catalog plugin.Catalog
	faults  *plugin.Faults[fault]
	grace   *plugin.Grace
	servers *plugin.Servers

	state    *state
	cluster  uint64 // whose revision it is
	revision int64  // 0 before the first listing
	// avoid is a server that fell silent and would cost another time-out, to be
	// asked after the others.
	avoid string
	// lost is how the registry has lost data, for the report of grace, which
	// other goroutines make.
	lost atomic.Pointer[string]

	synced bool
	// empty reports that the listing had no instance, and that none has come
	// since. Nothing is removed meanwhile.
	empty bool
	// begin is when the first listing was complete, or zero.
	begin time.Time

	problems map[string]bool // by service, currently reported
}

func newFollower(a *Adapter, catalog plugin.Catalog) *follower {
	f := &follower{
		Adapter: a, catalog: catalog, faults: plugin.NewFaults[fault](catalog), servers: plugin.NewServers(a.config.Endpoints),
		state: newState(a.layout, a.config.Services), problems: map[string]bool{},
	}
	f.grace = plugin.NewGrace(catalog, time.Duration(a.config.RemoveGrace), func(err error) {
		if lost := f.lost.Load(); lost != nil && err != nil {
			err = fmt.Errorf("%s; %w", *lost, err)
		}
		f.faults.Set("kept", faultKept, err)
	})
	return f
}

// Run follows the registry until ctx ends, and then returns nil. No failure of
// etcd ends it.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	f := newFollower(a, catalog)
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Owned by Run; ends with ctx.
	wg.Go(func() { f.grace.Run(ctx) })

	retry := plugin.Backoff{First: 200 * time.Millisecond, Most: 15 * time.Second}
	for ctx.Err() == nil {
		var s *session
		compacted := false
		err := f.servers.Do(ctx, func(ctx context.Context, address string) (err error) {
			s, err = f.open(ctx, address)
			return err
		})
		if err != nil && s != nil { // ctx ended as the session began
			s.close()
		}
		if err == nil {
			f.detail()
			f.faults.Clear("registry")
			err = f.follow(s, retry.Reset)
			s.close()
			compacted = errors.Is(err, rpctypes.ErrCompacted)
		}
		if ctx.Err() != nil {
			break
		}
		if compacted {
			// Changes were missed. Nothing says that any data is lost.
			f.env.Log.Info("the revision to go on from is compacted; everything is listed again", slog.Any("err", err))
		} else {
			f.grace.Away()
			f.faults.Set("registry", faultAway, err)
			f.detail()
		}
		plugin.Pause(ctx, retry.Next(), nil)
	}
	return nil
}

// detail reports how the registry is followed.
func (f *follower) detail() {
	text := "watching"
	if s := f.servers.String(); s != "" {
		text += " " + s
	}
	f.catalog.Detail(text)
}

// open begins a session with one server, and applies its listing.
func (f *follower) open(ctx context.Context, address string) (_ *session, err error) {
	if address == f.avoid {
		f.avoid = ""
		if len(f.config.Endpoints) > 1 {
			return nil, errSilent
		}
	}
	s, err := f.dial(ctx, address)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	l, err := s.list(f.prefix, f.state, newState(f.layout, f.config.Services))
	if err != nil {
		return nil, err
	}
	f.catalog.Heard()
	if err := s.watch(f.prefix); err != nil {
		return nil, err
	}
	f.list(l)
	return s, nil
}

// follow applies what the watch of a session reports until the session ends.
func (f *follower) follow(s *session, lives func()) error {
	var believe <-chan time.Time
	if f.empty && !f.synced {
		wait := time.NewTimer(max(0, time.Until(f.begin.Add(time.Duration(f.config.RemoveGrace)))))
		defer wait.Stop()
		believe = wait.C
	}
	err := s.follow(believe, f.believeEmpty, func() {
		lives()
		f.catalog.Heard()
		f.revision = s.revision
	}, f.apply)
	if errors.Is(err, errSilent) {
		f.avoid = s.address
	}
	return fmt.Errorf("%s: %w", s.address, err)
}

// list applies a listing. Only here something is removed that no event named.
func (f *follower) list(l *listing) {
	f.lost.Store(nil)
	switch {
	case f.revision == 0:
	case l.cluster != f.cluster:
		f.loses(fmt.Sprintf("another cluster answers (%x, was %x)", l.cluster, f.cluster))
	case l.revision < f.revision:
		f.loses(fmt.Sprintf("the revision went back from %d to %d", f.revision, l.revision))
	}
	f.cluster, f.revision = l.cluster, l.revision
	if f.begin.IsZero() {
		f.begin = time.Now()
	}
	known, before := f.grace.Instances()
	f.state = l.state
	listed := f.state.instances
	f.empty = false
	if listed == 0 && !f.config.AcceptEmpty {
		switch {
		case known > 0:
			f.empty = true
			f.grace.Away() // until it has an instance
			f.faults.Set("listing", faultEmpty, errors.New("the registry lists no instance at all, so nothing is removed; if that is right, set accept_empty"))
		case !f.synced && time.Since(f.begin) < time.Duration(f.config.RemoveGrace):
			f.empty = true
			f.faults.Set("listing", faultEmpty, fmt.Errorf("the registry lists no instance at all below %q, which is believed %v after the start (remove_grace); check prefix and layout, and if that is right, set accept_empty",
				f.prefix, f.config.RemoveGrace))
		}
		if f.empty {
			f.listProblems()
			return
		}
	}
	if before-listed >= 2 && float64(listed) < f.config.MinShare*float64(before) {
		f.grace.Away() // Back follows at once, and starts the grace period
	}
	f.complete()
}

// loses records how the registry has lost data, and starts a grace period.
func (f *follower) loses(how string) {
	f.env.Log.Info("the registry has lost data", slog.String("how", how))
	f.lost.Store(&how)
	f.grace.Away()
}

// complete applies the whole state to the catalog.
func (f *follower) complete() {
	f.empty = false
	f.grace.Back()
	f.faults.Clear("listing")
	listed := map[string]bool{}
	for name := range f.state.services {
		listed[name] = f.tell(name)
	}
	f.grace.RemoveOthers(func(key registry.Key) bool { return listed[key.Name] })
	f.listProblems()
	if !f.synced {
		f.synced = true
		f.catalog.Synced()
	}
}

// believeEmpty ends the wait for the first instance of an empty registry.
func (f *follower) believeEmpty() {
	if f.empty && !f.synced {
		f.complete()
	}
}

// apply applies events.
func (f *follower) apply(events []*clientv3.Event) {
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
	switch {
	case f.empty && f.state.instances > 0:
		f.complete()
	case f.empty:
	default:
		for name := range touched {
			f.tell(name)
		}
	}
	for name := range touched {
		f.listProblem(name)
	}
}

// tell passes the present state of a service to the catalog, and reports
// whether there is such a service.
func (f *follower) tell(name string) bool {
	key := registry.Key{Name: name}
	instances := f.state.listed(name)
	if len(instances) == 0 {
		f.grace.Remove(key)
		return false
	}
	f.grace.Set(registry.Service{Key: key}, instances)
	return true
}

// listProblems reports the problems of all services.
func (f *follower) listProblems() {
	for name := range f.problems {
		f.listProblem(name)
	}
	for name := range f.state.services {
		f.listProblem(name)
	}
}

// listProblem reports the problem of a service, or that it has none.
func (f *follower) listProblem(name string) {
	reason := f.state.problem(name)
	if reason == "" && !f.problems[name] {
		return
	}
	if reason == "" {
		delete(f.problems, name)
	} else {
		f.problems[name] = true
	}
	f.catalog.Problem(problemID(name), reason)
}
