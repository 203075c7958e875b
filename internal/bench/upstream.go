package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/procfs"
)

// server is a real server of a registry.
type server interface {
	// registry is the server in the configuration of a bridge, without a name.
	// It selects the services of the benchmark.
	registry() map[string]any
	// put registers services with all of their instances.
	put(ctx context.Context, services ...*service) error
	// change registers one instance again.
	change(ctx context.Context, s *service, instance int) error
	// follow calls told with the time at which the server told of a change to a
	// service, and with the times that its instances carry then, until ctx
	// ends.
	follow(ctx context.Context, s *service, told func(at time.Time, stamps []int64)) error
	// requests is the number of requests that others sent to the server in the
	// last seconds, for a minute; 0 if it does not say.
	requests(ctx context.Context) (float64, error)
	// clear removes what was put.
	clear(ctx context.Context) error
}

// service is one service of the benchmark.
type service struct {
	number int
	name   string
	stamps []int64 // when each instance changed last, 0 for never
}

// address is the address of an instance. No two have the same.
func (s *service) address(instance int) string {
	n := s.number*len(s.stamps) + instance
	return fmt.Sprintf("10.%d.%d.%d", n>>16&255, n>>8&255, n&255)
}

// Prefix is how the names of a benchmark's services begin.
const Prefix = "isthmus-bench-"

// followed is the number of services that change. Each of them has a bare
// subscriber, and over plain HTTP one costs Consul a connection.
const followed = 40

// upstream is a real registry that a run changes.
type upstream struct {
	server   server
	services []*service
}

// connect returns the registry of options, filled.
func connect(ctx context.Context, o Options) (*upstream, error) {
	u := new(upstream)
	for i := range o.Services {
		u.services = append(u.services, &service{number: i, name: fmt.Sprintf("%s%d", Prefix, i), stamps: make([]int64, o.Instances)})
	}
	var err error
	if o.Registry == "nacos" {
		u.server, err = newNacos(ctx, o)
	} else {
		u.server, err = newConsul(o)
	}
	if err != nil {
		return nil, fmt.Errorf("%s at %s: %w", o.Registry, o.Address, err)
	}
	if err := u.server.put(ctx, u.services...); err != nil {
		return nil, errors.Join(fmt.Errorf("%s at %s: register %d services: %w", o.Registry, o.Address, o.Services, err), u.clear(ctx))
	}
	return u, nil
}

// clear removes what the benchmark has registered, also after ctx has ended.
func (u *upstream) clear(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if err := u.server.clear(ctx); err != nil {
		return fmt.Errorf("remove the services %s* from the registry: %w", Prefix, err)
	}
	return nil
}

// fed is a bridge that follows a real registry.
type fed struct {
	*bridge
	*upstream

	cancel  context.CancelFunc
	running sync.WaitGroup

	mu     sync.Mutex // guards everything below
	told   map[int64]int64
	failed error
}

// change lets changes begin, and bare subscribers before.
func (f *fed) change(ctx context.Context, o Options) error {
	ctx, f.cancel = context.WithCancel(ctx)
	changing := f.services[:min(followed, len(f.services))]
	fail := func(err error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if ctx.Err() == nil {
			f.failed = errors.Join(f.failed, err)
		}
	}
	for _, s := range changing {
		f.running.Go(func() { fail(f.server.follow(ctx, s, f.record)) })
	}
	f.running.Go(func() {
		begin := time.Now()
		for n := range o.total() {
			due := begin.Add(time.Duration(float64(n) / o.Rate * float64(time.Second)))
			for time.Now().Before(due) {
				if pause(ctx, time.Until(due)) != nil {
					return
				}
			}
			s := changing[n%int64(len(changing))]
			i := int(n/int64(len(changing))) % len(s.stamps)
			s.stamps[i] = time.Now().UnixNano()
			if err := f.server.change(ctx, s, i); err != nil {
				fail(fmt.Errorf("change %s: %w", s.name, err))
				return
			}
		}
	})
	return nil
}

// record records when the registry told of changes.
func (f *fed) record(at time.Time, stamps []int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, stamp := range stamps {
		if _, ok := f.told[stamp]; !ok {
			f.told[stamp] = at.UnixNano()
		}
	}
}

func (f *fed) stop() {
	if f.cancel != nil {
		f.cancel()
	}
	f.running.Wait()
	f.bridge.stop()
}

// report adds what the registry was seen to do.
func (f *fed) report(r *Result, l *latencies, w *window) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	own, added := newHistogram(), newHistogram()
	for stamp, at := range f.told {
		if w.has(stamp) {
			record(own, at-stamp)
		}
	}
	for _, a := range l.arrivals {
		if at, ok := f.told[a.stamp]; ok {
			record(added, a.at-at)
		}
	}
	r.Upstream.Notified, r.Upstream.Added = percentiles(own), percentiles(added)
	return f.failed
}

// load adds what the registry has to do for the plugin.
func (f *fed) load(ctx context.Context, r *Result) (err error) {
	r.Upstream = new(Upstream)
	if r.Upstream.Connections, err = connections(f.pids()["plugin"]); err != nil {
		return err
	}
	r.Upstream.Requests, err = f.server.requests(ctx)
	return err
}

// connections is the number of TCP connections that a process has. Where there
// is no /proc it is 0.
func connections(pid int) (n int, err error) {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0, nil //nolint:nilerr // not on Linux
	}
	open, err := p.FileDescriptorTargets()
	if err != nil {
		return 0, err
	}
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		text, err := os.ReadFile(table)
		if errors.Is(err, os.ErrNotExist) {
			continue // no IPv6
		} else if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(text)) {
			// proc_pid_net(5): the state is field 4, the inode field 10.
			const established = "01"
			if f := strings.Fields(line); len(f) > 9 && f[3] == established && slices.Contains(open, "socket:["+f[9]+"]") {
				n++
			}
		}
	}
	return n, nil
}
