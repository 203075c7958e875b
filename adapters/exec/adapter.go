package exec

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

const (
	// mostPause is the longest pause between two starts of a program that is to
	// stay. One that lived longer starts with the shortest pause again.
	mostPause = 30 * time.Second
	// maxBad bounds the distinct problems with lines that are told apart.
	maxBad = 1000
)

// Adapter follows what one program prints. New makes one.
type Adapter struct {
	config Config
	log    *slog.Logger

	starts, lines, bad plugin.Counter
}

// New returns an adapter for a configuration that Validate accepts. It starts
// nothing.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	c.Timeout = cmp.Or(c.Timeout, DefaultConfig.Timeout)
	if err := c.Validate(); err != nil {
		return nil, err
	}
	log := env.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Adapter{
		config: c, log: log,
		starts: env.Metrics.Counter("program_starts_total", "Starts of the program."),
		lines:  env.Metrics.Counter("program_lines_total", "Lines that the program printed."),
		bad:    env.Metrics.Counter("program_bad_lines_total", "Lines, or services in a line, that could not be used."),
	}, nil
}

func (a *Adapter) program() *program {
	p := &program{command: a.config.Command, env: []string{}, dir: a.config.Dir, silence: time.Duration(a.config.Silence), log: a.log}
	for _, name := range slices.Sorted(maps.Keys(a.config.Env)) {
		p.env = append(p.env, name+"="+string(a.config.Env[name]))
	}
	return p
}

// Run follows the program until ctx ends, and then returns nil. No failure of
// the program ends it; the program is started again.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	if a.config.Interval > 0 {
		r := &runs{a: a, program: a.program(), catalog: catalog}
		p := plugin.Poll{
			Fetch: r.fetch, Interval: time.Duration(a.config.Interval), Timeout: time.Duration(a.config.Timeout),
			RemoveGrace: time.Duration(a.config.RemoveGrace), MinShare: a.config.MinShare, AcceptEmpty: a.config.AcceptEmpty, AcceptEmptyField: "accept_empty",
			Detail: func() string {
				return cmp.Or(r.detail, fmt.Sprintf("runs %s every %v", a.config.name(), a.config.Interval))
			},
		}
		return p.Run(ctx, catalog)
	}
	return a.stay(ctx, catalog)
}

// failed says how a program ended.
func (a *Adapter) failed(err error) error { return fmt.Errorf("%s: %w", a.config.name(), err) }

// listed holds the problems that a program has, from what it says itself and
// from lines that cannot be used.
type listed struct {
	catalog plugin.Catalog
	shown   map[string]string // reasons by id
}

// set replaces all problems.
func (l *listed) set(now map[string]string) {
	for id := range l.shown {
		if now[id] == "" {
			l.catalog.Problem(id, "")
		}
	}
	for id, reason := range now {
		if l.shown[id] != reason {
			l.catalog.Problem(id, reason)
		}
	}
	l.shown = maps.Clone(now)
}

// findings are what is wrong with the lines of one run.
type findings struct {
	a    *Adapter
	n    int               // lines so far
	bad  map[string]string // reasons by id, that of lines without a service included
	said map[string]string // by the program itself
}

// fault records what is wrong with the present line.
func (f *findings) fault(id, reason string) {
	f.a.bad.Inc()
	if f.bad == nil {
		f.bad = map[string]string{}
	}
	if f.bad[id] == "" && len(f.bad) >= maxBad {
		id = lineID
	}
	f.bad[id] = fmt.Sprintf("line %d: %s", f.n, reason)
}

// say records a problem that the program states.
func (f *findings) say(p *finding) {
	switch {
	case p.reason == "":
		delete(f.said, p.id)
	case f.said == nil:
		f.said = map[string]string{p.id: p.reason}
	default:
		f.said[p.id] = p.reason
	}
}

// all returns all problems.
func (f *findings) all() map[string]string {
	all := make(map[string]string, len(f.bad)+len(f.said))
	maps.Copy(all, f.said)
	for id, reason := range f.bad {
		all[id] = reason + "; what was known of it is kept"
	}
	return all
}

// doubt returns why a listing is not complete, or nil.
func (f *findings) doubt() error {
	if len(f.bad) == 0 {
		return nil
	}
	ids := slices.Sorted(maps.Keys(f.bad))
	more := ""
	if len(ids) > 1 {
		more = fmt.Sprintf("; and %d more, listed as problems", len(ids)-1)
	}
	return fmt.Errorf("what the program prints cannot be read in full, so nothing is removed: %s: %s%s", ids[0], f.bad[ids[0]], more)
}

// read parses a line and records what is wrong with it. It returns false if
// there is nothing in it.
func (f *findings) read(line []byte, err error) (message, bool) {
	f.n++
	f.a.lines.Inc()
	if len(bytes.TrimSpace(line)) == 0 && err == nil {
		return message{}, false
	}
	var m message
	if err == nil {
		m, err = parse(line)
	}
	if err != nil {
		f.fault(lineID, err.Error())
		return message{}, false
	}
	if m.whole {
		f.bad = nil
	}
	for _, b := range m.bad {
		f.fault(b.id, b.reason)
	}
	for _, s := range m.services {
		delete(f.bad, serviceID(s.Service.Key))
	}
	if m.problem != nil {
		f.say(m.problem)
	}
	return m, true
}

// runs is a program that is started for each listing.
type runs struct {
	a       *Adapter
	program *program
	catalog plugin.Catalog
	detail  string // what the last run says
	listed  listed
}

// fetch runs the program once. It implements plugin.Poll.Fetch.
func (r *runs) fetch(ctx context.Context) (plugin.Listing, error) {
	var (
		f        = findings{a: r.a}
		degraded string
		detail   string
		size     int
		services = map[registry.Key]plugin.Snapshot{}
	)
	err := r.program.run(ctx, func(int) { r.a.starts.Inc() }, func(line []byte, err error) {
		if size += len(line); size > maxOutput {
			f.fault(lineID, fmt.Sprintf("it prints more than %d MiB", maxOutput>>20))
			return
		}
		m, ok := f.read(line, err)
		if !ok {
			return
		}
		if m.whole {
			clear(services)
		}
		for _, s := range m.services {
			services[s.Service.Key] = s
		}
		switch {
		case m.remove != nil:
			delete(services, *m.remove)
		case m.degraded != nil:
			degraded = *m.degraded
		case m.detail != nil:
			detail = *m.detail
		}
	})
	if err == nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("it did not end within %v (timeout)", r.a.config.Timeout)
	}
	if err != nil {
		return plugin.Listing{}, r.a.failed(err)
	}
	r.detail = detail
	r.listed.catalog = r.catalog
	r.listed.set(f.all())
	l := plugin.Listing{Complete: true, Doubt: f.doubt(), Services: slices.Collect(maps.Values(services))}
	slices.SortFunc(l.Services, func(a, b plugin.Snapshot) int {
		return strings.Compare(a.Service.Key.String(), b.Service.Key.String())
	})
	if degraded != "" {
		l.Doubt = r.a.failed(errors.New(degraded))
	}
	return l, nil
}

// maxOutput bounds what one run may print, in bytes.
const maxOutput = 256 << 20

// fault is a kind of fault, in the order shown.
type fault int

const (
	// faultEnded: the program ended, or does not start.
	faultEnded fault = iota
	// faultSaid: the program says that it is cut off.
	faultSaid
	// faultDoubt: a listing is not complete, or empty.
	faultDoubt
	// faultKept: instances are retained after an outage.
	faultKept
)

// follower is a program that stays.
type follower struct {
	*Adapter
	catalog plugin.Catalog
	faults  *plugin.Faults[fault]
	grace   *plugin.Grace
	listed  listed

	// Of the present run:
	findings
	seen     map[registry.Key]int // mentioned so far, with how many instances, until complete
	lists    bool                 // the listing has ended
	complete bool                 // and was applied
	said     string               // why the program is cut off
	synced   bool                 // of any run
}

// stay keeps a program running.
func (a *Adapter) stay(ctx context.Context, catalog plugin.Catalog) error {
	f := &follower{Adapter: a, catalog: catalog, faults: plugin.NewFaults[fault](catalog), listed: listed{catalog: catalog}}
	f.grace = plugin.NewGrace(catalog, time.Duration(a.config.RemoveGrace), func(err error) { f.faults.Set("kept", faultKept, err) })
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Owned by this function; ends with ctx.
	wg.Go(func() { f.grace.Run(ctx) })

	p := a.program()
	retry := plugin.Backoff{First: 500 * time.Millisecond, Most: mostPause}
	for ctx.Err() == nil {
		f.findings, f.seen, f.lists, f.complete, f.said = findings{a: a}, map[registry.Key]int{}, false, false, ""
		begin := time.Now()
		err := p.run(ctx, func(pid int) {
			a.starts.Inc()
			catalog.Detail(fmt.Sprintf("reads %s, process %d", a.config.name(), pid))
		}, f.take)
		if ctx.Err() != nil {
			break
		}
		if err == nil {
			err = errors.New("it ended, with exit status 0; a program that prints everything and ends needs an interval in the config")
		}
		f.grace.Away()
		f.faults.Clear("said")
		f.faults.Set("program", faultEnded, a.failed(err))
		catalog.Detail("waits to start " + a.config.name() + " again")
		if time.Since(begin) > mostPause {
			retry.Reset()
		}
		plugin.Pause(ctx, retry.Next(), nil)
	}
	return nil
}

// take applies a line.
func (f *follower) take(line []byte, err error) {
	f.catalog.Heard()
	m, ok := f.read(line, err)
	if ok {
		if m.whole {
			f.seen, f.complete = make(map[registry.Key]int, len(m.services)), false
		}
		for _, s := range m.services {
			if !f.complete {
				f.seen[s.Service.Key] = len(s.Instances)
			}
			f.grace.Set(s.Service, s.Instances)
		}
		switch {
		case m.remove != nil:
			delete(f.seen, *m.remove)
			f.grace.Remove(*m.remove)
		case m.degraded != nil:
			f.degraded(*m.degraded)
		case m.detail != nil:
			f.catalog.Detail(*m.detail)
		}
		if m.whole || m.synced {
			f.lists = true
		}
	}
	if f.lists && !f.complete {
		f.finish()
	}
	if all := f.all(); f.complete || len(all) > 0 {
		f.listed.set(all)
	}
}

// degraded applies what the program says of its registry.
func (f *follower) degraded(reason string) {
	f.said = reason
	if reason == "" {
		f.faults.Clear("said")
		f.back()
		return
	}
	f.grace.Away()
	f.faults.Set("said", faultSaid, f.failed(errors.New(reason)))
}

// back ends an outage once the program has listed everything and is not cut
// off.
func (f *follower) back() {
	if f.complete && f.said == "" {
		f.grace.Back()
	}
}

// finish applies the end of a listing: what it did not mention goes.
func (f *follower) finish() {
	if err := f.doubt(); err != nil {
		f.faults.Set("listing", faultDoubt, err)
		return
	}
	instances := 0
	for _, n := range f.seen {
		instances += n
	}
	if known, _ := f.grace.Instances(); known > 0 && instances == 0 && !f.config.AcceptEmpty {
		f.faults.Set("listing", faultDoubt, errors.New("the program lists no instance at all, so nothing is removed; if that is right, set accept_empty"))
		return
	}
	f.complete = true
	f.faults.Clear("listing")
	f.faults.Clear("program")
	f.back()
	seen := f.seen
	f.grace.RemoveOthers(func(key registry.Key) bool { _, ok := seen[key]; return ok })
	f.seen = nil
	if !f.synced {
		f.synced = true
		f.catalog.Synced()
	}
}
