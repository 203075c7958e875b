package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// triggerAPI is the trigger of a request to the admin API.
const triggerAPI = "API"

// Errors of [Server.Reload].
var (
	// ErrEnding refuses a reload because the bridge is ending.
	ErrEnding = errors.New("the bridge is ending")
	// ErrNoFile refuses a reload because there is no configuration file.
	ErrNoFile = errors.New("the configuration does not come from a file that can be read again")
)

// reload is a request to reload the configuration.
type reload struct {
	trigger string
	answer  chan reloaded // capacity one
}

// reloaded is the outcome of a reload.
type reloaded struct {
	difference config.Difference
	hash       string // of the configuration in force
	err        error
}

// Reload loads the configuration again and applies all of it, or nothing if the
// error is not nil. Errors in the configuration are returned as
// [config.Problems]. The trigger appears in the log.
//
// Unchanged registries keep their plugins and streams; unchanged listeners stay
// open. A changed registry gets a new plugin, whose first full listing removes
// the resources that it does not mention.
func (s *Server) Reload(ctx context.Context, trigger string) (config.Difference, error) {
	r := s.reload(ctx, trigger)
	return r.difference, r.err
}

func (s *Server) reload(ctx context.Context, trigger string) reloaded {
	if s.options.Load == nil {
		return reloaded{err: ErrNoFile}
	}
	r := reload{trigger, make(chan reloaded, 1)}
	select {
	case s.reloads <- r:
	case <-s.ended:
		return reloaded{err: ErrEnding}
	case <-ctx.Done():
		return reloaded{err: context.Cause(ctx)}
	}
	select {
	case answer := <-r.answer:
		return answer
	case <-s.ended:
		return reloaded{err: ErrEnding}
	case <-ctx.Done():
		return reloaded{err: context.Cause(ctx)}
	}
}

// reloadLoop handles requests to reload one by one until ctx ends. What they
// start runs in group.
func (s *Server) reloadLoop(ctx context.Context, group *errgroup.Group) {
	for {
		select {
		case r := <-s.reloads:
			d, err := s.load(ctx, group)
			if ctx.Err() != nil {
				err = ErrEnding
			}
			s.note(r.trigger, &d, err)
			r.answer <- reloaded{d, s.config().Hash(), err}
		case <-ctx.Done():
			return
		}
	}
}

// note records the outcome of a reload.
func (s *Server) note(trigger string, d *config.Difference, err error) {
	if trigger != triggerAPI { // which the audit has as a request
		result, more := access.AuditDone, slog.String("detail", "sha256="+s.config().Hash())
		if err != nil {
			result, more = access.AuditFailed, slog.String("why", problemsOf(err)[0].Reason)
		}
		s.audit.Record("configuration "+trigger, "", "reload", result, more)
	}
	now := time.Now()
	last := &admin.Reload{Time: now, Trigger: trigger, Result: resultSuccess}
	cfg := s.config()
	if err != nil {
		last.Result, last.Problems = resultFailure, problemsOf(err)
		s.loads.total.WithLabelValues(resultFailure).Inc()
		s.log.Error("the configuration was not reloaded; the previous one stays in force", "trigger", trigger, "err", err)
	} else {
		s.loads.succeeded(now)
		s.loads.total.WithLabelValues(resultSuccess).Inc()
		s.log.Info("configuration reloaded", "trigger", trigger, "sha256", cfg.Hash(), "changed", !d.Empty(),
			"added", d.Added, "removed", d.Removed, "changed_registries", changedNames(d), "listeners_added", d.ListenersAdded,
			"listeners_removed", d.ListenersRemoved, "listeners_changed", d.ListenersChanged, "fields", d.Fields)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.loaded.File, s.loaded.Hash, s.loaded.Loaded = cfg.File(), cfg.Hash(), now
	}
	s.loaded.LastReload = last
}

// setAudit has the audit go where a configuration says.
func (s *Server) setAudit(cfg *config.Config) error {
	if err := s.audit.SetFile(cfg.Audit.File); err != nil {
		return config.Problems{{File: cfg.File(), Position: cfg.Position("audit.file"), Field: "audit.file", Reason: err.Error()}}
	}
	return nil
}

func changedNames(d *config.Difference) []string {
	names := make([]string, len(d.Changed))
	for i, c := range d.Changed {
		names[i] = c.Name
	}
	return names
}

// load implements Reload. All checks that can fail come before the first
// change.
func (s *Server) load(ctx context.Context, group *errgroup.Group) (config.Difference, error) {
	next, err := s.read()
	if err != nil {
		return config.Difference{}, err
	}
	now := s.config()
	d := now.Diff(&next)
	if found := next.Restart(&d); len(found) > 0 {
		return d, found
	}

	members, fresh, err := s.plan(&next, &d)
	if err == nil {
		err = s.prepare(ctx, &next, members, fresh)
	}
	ports, opened, going := s.planPorts(&next)
	var rules []*access.Policy
	if err == nil {
		var found config.Problems
		rules, found = policies(&next, wanted(&next.Listen))
		if found = append(found, next.OutOfShards(s.options.Shards)...); len(found) > 0 {
			err = found.Sort()
		}
	}
	var consumers []*consumer
	if err == nil && len(ports) > 0 {
		var found config.Problems
		if consumers, found = s.newConsumers(&next); len(found) > 0 {
			err = found.Sort()
		}
	}
	if err == nil {
		err = s.open(&next, opened, going)
	}
	if err == nil {
		if err = s.setAudit(&next); err != nil {
			for _, p := range opened {
				err = errors.Join(err, p.listener.Close())
			}
		}
	}
	if err != nil {
		closePolicies(rules)
		dropConsumers(consumers)
		for _, m := range fresh {
			if m.sup != nil {
				m.sup.Close()
			}
		}
		return d, err
	}

	s.replace(ctx, group, &next, &d, members, fresh)
	s.warnOfGaps(&next)
	for i, p := range ports {
		if p.gate == nil {
			s.guard(p, rules[i])
		} else {
			p.gate.Set(rules[i])
		}
	}
	s.mu.Lock()
	s.cfg, s.ports = next, ports
	for _, p := range opened {
		s.start(ctx, group, p) // before drain can see it
	}
	s.mu.Unlock()
	for _, p := range going {
		p.end()
	}
	if len(ports) > 0 {
		s.dialSinks(ctx, group, next.Sinks)
		s.runConsumers(ctx, group, consumers)
	}
	if s.options.Level != nil {
		s.options.Level.Set(next.Log.SlogLevel())
	}
	return d, nil
}

// read reads and checks the next configuration. A panic there, which is a
// defect of the bridge, is an error: nothing has changed yet.
func (s *Server) read() (next config.Config, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("the bridge has met a defect of its own and goes on", "doing", "read the configuration", "err", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = fmt.Errorf("the configuration meets a defect of the bridge: %v", p)
		}
	}()
	return s.options.Load()
}

// plan returns the registries of a configuration, and those of them that need a
// new plugin.
func (s *Server) plan(next *config.Config, d *config.Difference) (members, fresh []*member, err error) {
	before := make(map[string]*member)
	for _, m := range s.members {
		before[m.registry.Name] = m
	}
	changed := make(map[string]bool)
	for _, c := range d.Changed {
		changed[c.Name] = c.NeedsPlugin()
	}
	for i := range next.Registries {
		m, err := s.newMember(next, &next.Registries[i])
		if err != nil {
			return nil, fresh, err
		}
		old := before[m.registry.Name]
		if old != nil && !changed[m.registry.Name] && slices.Equal(old.spec.Command, m.spec.Command) {
			members = append(members, old)
			continue
		}
		m.spec.Successor = old != nil
		members, fresh = append(members, m), append(fresh, m)
	}
	return members, fresh, nil
}

// maxAsked bounds the number of plugins that are prepared concurrently.
const maxAsked = 16

// prepare starts the plugins of registries and validates their configurations.
func (s *Server) prepare(ctx context.Context, next *config.Config, members, fresh []*member) error {
	errs := make([]error, len(fresh))
	var group errgroup.Group
	group.SetLimit(maxAsked)
	for _, m := range fresh {
		if err := s.supervise(m); err != nil {
			return err
		}
	}
	for i, m := range fresh {
		group.Go(func() error {
			errs[i] = m.sup.Prepare(ctx)
			return nil
		})
	}
	_ = group.Wait() // errs has the errors
	var found config.Problems
	for i, m := range fresh {
		at := slices.Index(members, m)
		if e, ok := errors.AsType[*supervisor.ConfigError](errs[i]); ok {
			for _, v := range e.Violations {
				found = append(found, next.Problem(at, v.Field, v.Reason))
			}
		} else if errs[i] != nil {
			found = append(found, next.Problem(at, "", fmt.Sprintf("its plugin cannot be asked: %v", errs[i])))
		}
	}
	if len(found) > 0 {
		return found.Sort()
	}
	return ctx.Err()
}

// planPorts returns the ports of a configuration, those to open, and those to
// close. A bridge without ports gets none.
func (s *Server) planPorts(next *config.Config) (ports, opened, going []*port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ports) == 0 {
		return nil, nil, nil
	}
	going = slices.Clone(s.ports)
	for _, p := range wanted(&next.Listen) {
		if i := slices.IndexFunc(going, func(g *port) bool { return g.String() == p.String() }); i >= 0 {
			p = going[i]
			going = slices.Delete(going, i, i+1)
		} else {
			opened = append(opened, p)
		}
		ports = append(ports, p)
	}
	return ports, opened, going
}

// open opens ports of a configuration; those in going release their addresses.
func (s *Server) open(next *config.Config, opened, going []*port) error {
	if err := openPorts(opened, going); err != nil {
		return config.Problems{&config.Problem{File: next.File(), Position: next.Position("listen"), Field: "listen", Reason: err.Error()}}
	}
	return nil
}

// replace applies the registries of a configuration. Replaced plugins end
// before their successors, whose processes already run, are followed.
func (s *Server) replace(ctx context.Context, group *errgroup.Group, next *config.Config, d *config.Difference, members, fresh []*member) {
	succeeded := make(map[string]bool)
	for _, m := range fresh {
		succeeded[m.registry.Name] = m.spec.Successor
	}
	var going []*member
	for _, m := range s.members {
		if !slices.Contains(members, m) {
			if succeeded[m.registry.Name] {
				m.sup.StepAside()
			}
			m.end()
			going = append(going, m)
		}
	}
	for _, m := range going {
		<-m.ended
	}
	names := make([]string, len(members))
	for i := range members {
		names[i] = next.Registries[i].Name
	}
	s.db.Configure(names, d.Renamed(), conflictRules(next.Conflicts), next.Addresses.Network())
	for _, m := range going {
		if !slices.Contains(names, m.registry.Name) {
			s.latency.Forget(m.registry.Name)
		}
	}
	s.db.SetOptions(registryOptions(next))
	if s.store != nil {
		s.store.SetRegistries(keptOf(members))
	}
	s.mu.Lock()
	s.members = members
	s.mu.Unlock()
	for _, m := range fresh {
		m.sink.Registry = s.db.Registry(m.registry.Name)
		var own context.Context
		own, m.end = context.WithCancel(ctx)
		group.Go(func() error {
			defer close(m.ended)
			defer m.end()
			return m.sup.Run(own)
		})
	}
}

// loadedConfig describes the configuration in force for display.
func (s *Server) loadedConfig() admin.Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loaded
}

// Results of a reload.
const (
	resultSuccess = "success"
	resultFailure = "failure"
)

// loadMetrics are the metrics of the configuration.
type loadMetrics struct {
	total *prometheus.CounterVec
	last  prometheus.Gauge
}

func newLoadMetrics(reg prometheus.Registerer) (*loadMetrics, error) {
	m := &loadMetrics{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_config_reloads_total", Help: "Reloads of the configuration by result: success, or failure, which leaves the one before in force.",
		}, []string{"result"}),
		last: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "isthmus_config_last_reload_success_timestamp_seconds", Help: "When the configuration was loaded last, at the start or by a reload.",
		}),
	}
	for _, result := range []string{resultSuccess, resultFailure} {
		m.total.WithLabelValues(result)
	}
	if err := errors.Join(reg.Register(m.total), reg.Register(m.last)); err != nil {
		return nil, fmt.Errorf("configuration metrics: %w", err)
	}
	return m, nil
}

func (m *loadMetrics) succeeded(at time.Time) { m.last.Set(float64(at.UnixMilli()) / 1000) }

// problemsOf returns an error as problems, one per line, with positions in the
// file where known.
func problemsOf(err error) []admin.ConfigProblem {
	all, ok := errors.AsType[config.Problems](err)
	if !ok {
		return []admin.ConfigProblem{{Reason: err.Error()}}
	}
	out := make([]admin.ConfigProblem, len(all))
	for i, p := range all {
		out[i] = admin.ConfigProblem{File: p.File, Line: p.Line, Column: p.Column, Field: p.Field, Reason: p.Reason}
	}
	return out
}

// operator implements the operations of the admin API.
type operator struct{ s *Server }

// Reload implements admin.Operator.
func (o operator) Reload(ctx context.Context, trigger string) (admin.Reloaded, error) {
	r := o.s.reload(ctx, trigger)
	if errors.Is(r.err, ErrEnding) || ctx.Err() != nil {
		return admin.Reloaded{}, r.err
	}
	return answer(r), nil
}

// SetLogLevel implements admin.Operator.
func (o operator) SetLogLevel(level string) (was string, err error) {
	switch {
	case o.s.options.Level == nil:
		return "", errors.New("this bridge has one log level only")
	case !slices.Contains(config.Levels(), level):
		return "", fmt.Errorf("level %q: must be one of %s", level, strings.Join(config.Levels(), ", "))
	}
	was = strings.ToLower(o.s.options.Level.Level().String())
	o.s.log.Info("log level changed", "level", level, "was", was)
	o.s.options.Level.Set(config.Log{Level: level}.SlogLevel())
	if !slices.Contains([]string{"debug", "info"}, was) {
		o.s.log.Info("log level changed", "level", level, "was", was)
	}
	return was, nil
}

// Compare implements admin.Operator.
func (o operator) Compare(text []byte) admin.Reloaded {
	now := o.s.config()
	was, err := now.Unexpanded()
	r := reloaded{hash: now.Hash(), err: err}
	if err == nil {
		var next config.Config
		if next, r.err = config.Parse("", text, config.Options{Adapters: now.Adapters(), Unexpanded: true}); r.err == nil {
			r.difference = was.Diff(&next)
		}
	}
	return answer(r)
}

func answer(r reloaded) admin.Reloaded {
	a := admin.Reloaded{Result: resultSuccess, Hash: r.hash}
	if r.err != nil {
		a.Result, a.Problems = resultFailure, problemsOf(r.err)
		return a
	}
	a.Changed, a.Changes = !r.difference.Empty(), r.difference
	return a
}
