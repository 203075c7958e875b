package server

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/server/access"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/lastgood"
	"github.com/isthmus-mesh/isthmus/server/latency"
	mcpserver "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/otlp"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/status"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/xds"
	"github.com/isthmus-mesh/isthmus/translate"
)

// drainWithin bounds the delivery of responses in flight when the server ends.
const drainWithin = 2 * time.Second

// Options are the settings of a server outside its configuration.
type Options struct {
	// Version is the program's version, for display.
	Version string
	// Log receives the logs of the server and its plugins. Nil discards them.
	Log *slog.Logger
	// StateDir is the directory of the last good state; "" disables it.
	StateDir string
	// Load reads the configuration again, for [Server.Reload]. Nil disables
	// reloads.
	Load func() (config.Config, error)
	// Level is the log level, which the API and reloads change. Nil keeps the
	// level of Log.
	Level *slog.LevelVar
	// Shards are the shards of the hosts that this process follows and serves.
	Shards shard.Set
	// Memory is what there is for the bridge and its plugins, in bytes, for
	// limits that the configuration does not have; 0 if it is not known.
	Memory int
	// Metrics is the registry for metrics that the admin server shows. Nil
	// means a new one.
	Metrics *prometheus.Registry
}

// Server is the bridge as a whole.
type Server struct {
	options Options
	log     *slog.Logger
	started time.Time
	limits  config.Limits // of the whole run: a reload does not change them

	db      *state.DB
	view    *view.View
	streams *stream.Server
	xds     *xds.Server
	mcp     *mcpserver.Server
	host    *supervisor.Host // created by Run
	metrics *supervisor.Metrics
	latency *latency.Tracker
	export  *otlp.Exporter // nil if nothing is exported
	loads   *loadMetrics
	wrong   *conditions.List
	crowd   *crowd
	access  *access.Metrics
	audit   *access.Audit
	store   *lastgood.Store // nil if the last good state is disabled; created by Run
	reloads chan reload
	ready   chan struct{} // closed when the supervisors and the store exist
	ended   chan struct{} // closed when reloads are refused
	drained atomic.Bool   // the bridge is ending

	mu      sync.Mutex
	cfg     config.Config // in force; guarded by mu, as the rest
	loaded  admin.Config  // cfg for display
	members []*member     // in the order of the configuration
	ports   []*port       // empty before Listen
	dials   []*dial
	// consumers are those of the configuration, empty before Listen.
	consumers []*consumer
}

// member is a registry with its supervisor.
type member struct {
	registry config.Registry
	spec     supervisor.Spec
	sink     *sink
	sup      *supervisor.Supervisor
	end      context.CancelFunc // ends sup
	ended    chan struct{}      // closed when sup has ended
}

// config returns the configuration in force.
func (s *Server) config() *config.Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	return new(s.cfg)
}

// New returns a server that is not running.
func New(cfg config.Config, o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Metrics == nil {
		o.Metrics = prometheus.NewRegistry()
	}
	s := &Server{
		cfg: cfg, options: o, log: o.Log, started: time.Now(), limits: cfg.Fit(o.Memory),
		reloads: make(chan reload), ready: make(chan struct{}), ended: make(chan struct{}),
	}
	names := make([]string, len(cfg.Registries))
	for i := range cfg.Registries {
		m, err := s.newMember(&cfg, &cfg.Registries[i])
		if err != nil {
			return nil, err
		}
		s.members = append(s.members, m)
		names[i] = m.spec.Registry
	}
	var err error
	if s.loads, err = newLoadMetrics(o.Metrics); err != nil {
		return nil, err
	}
	s.wrong = conditions.NewList(o.Metrics, o.Log)
	if s.export, err = newExporter(&cfg, &o); err != nil {
		return nil, err
	}
	s.latency = latency.New(o.Metrics, s.export.Tracer())
	registerBuild(o.Metrics, o.Version)
	s.crowd = newCrowd(&s.limits, s.log, o.Metrics)
	s.access, s.audit = access.NewMetrics(o.Metrics), access.NewAudit(o.Log)
	s.loaded = admin.Config{File: cfg.File(), Hash: cfg.Hash(), Loaded: s.started, Memory: o.Memory, Limits: s.limits}
	s.loads.succeeded(s.started)
	s.db = state.New(names, state.Options{
		MaxResources: s.limits.ResourcesPerRegistry,
		MaxServices:  s.limits.ServicesPerRegistry,
		MaxBytes:     s.limits.BytesPerRegistry,
		Tombstones:   s.limits.Tombstones,
		Selector:     translate.SelectorValue,
		Validate:     translate.ValidateBody,
		Registries:   registryOptions(&cfg),
		Conflicts:    conflictRules(cfg.Conflicts),
		Addresses:    cfg.Addresses.Network(),
		Applied:      s.latency.Applied,
	}, o.Log, o.Metrics)
	s.view = view.New(s.db, filterOfShards(o.Shards)...)
	s.streams = stream.NewServer(s.view)
	s.xds, err = xds.New(s.view, xds.Config{Streams: s.streams, Profile: cfg.Profile, Acked: s.latency.Acked}, stream.Sparse(s.log), o.Metrics)
	if err != nil {
		return nil, err
	}
	s.mcp, err = mcpserver.New(s.view, mcpserver.Config{
		Streams: s.streams, Profile: cfg.MCP.Profile, SyntheticEntries: cfg.MCP.SyntheticEntries, FullState: cfg.MCP.FullState, Acked: s.latency.Acked,
	}, stream.Sparse(s.log), o.Metrics)
	if err != nil {
		return nil, err
	}
	s.metrics = supervisor.NewMetrics(o.Metrics)
	return s, o.Metrics.Register(newConsumerMetrics(s))
}

func (s *Server) newMember(cfg *config.Config, r *config.Registry) (*member, error) {
	fitted := *cfg
	fitted.Limits = s.limits
	spec, err := Spec(&fitted, r)
	if err != nil {
		return nil, err
	}
	spec.Shards = s.options.Shards
	return &member{registry: *r, spec: spec, sink: new(sink), ended: make(chan struct{})}, nil
}

// conflictRules converts rules of the configuration to those of the state.
func conflictRules(rules []config.Conflict) []state.ConflictRule {
	out := make([]state.ConflictRule, 0, len(rules))
	for _, r := range rules {
		rule := state.ConflictRule{Registry: r.Registry, Hosts: r.Hosts, Policy: state.Policy(r.Policy)}
		if r.Weights != nil {
			rule.Weights = make(map[string]uint32, len(r.Weights))
		}
		for name, share := range r.Weights {
			rule.Weights[name] = uint32(share)
		}
		out = append(out, rule)
	}
	return out
}

// Spec returns the spec of a registry's plugin.
func Spec(cfg *config.Config, r *config.Registry) (supervisor.Spec, error) {
	path, args, err := cfg.Command(r)
	if err != nil {
		return supervisor.Spec{}, err
	}
	return supervisor.Spec{
		Registry: r.Name, Adapter: r.Type, Command: append([]string{path}, args...), SHA256: r.Plugin.SHA256, PublicKey: r.Plugin.PublicKey,
		EnvNames: r.Plugin.Env, User: r.Plugin.User, Unconfined: !r.Plugin.Confine, Confinement: r.Plugin.Confinement,
		Config: r.Config, Translate: r.Translate, Labels: r.Owns.Labels,
		Resources: cfg.Limits.ResourcesPerRegistry, Services: cfg.Limits.ServicesPerRegistry, Bytes: cfg.Limits.BytesPerRegistry, Memory: cfg.Limits.PluginMemory, OpenFiles: cfg.Limits.PluginFiles,
	}, nil
}

// Listen opens the ports. Call it early: an istiod that starts at the same time
// exits if a config source refuses the connection. Without Listen the server
// has no ports.
func (s *Server) Listen() error {
	cfg := s.config()
	ports := wanted(&cfg.Listen)
	rules, found := policies(cfg, ports)
	if found = append(found, cfg.OutOfShards(s.options.Shards)...); len(found) > 0 {
		closePolicies(rules)
		return found.Sort()
	}
	consumers, found := s.newConsumers(cfg)
	if len(found) > 0 {
		closePolicies(rules)
		dropConsumers(consumers)
		return found.Sort()
	}
	s.warnOfGaps(cfg)
	err := s.setAudit(cfg)
	if err == nil {
		err = openPorts(ports, nil)
	}
	if err != nil {
		closePolicies(rules)
		dropConsumers(consumers)
		return err
	}
	for i, p := range ports {
		s.guard(p, rules[i])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ports, s.consumers = ports, consumers
	return nil
}

// addr returns the address of a field's first port, nil if there is none.
func (s *Server) addr(field string) net.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.ports {
		if p.Field == field {
			return p.Addr()
		}
	}
	return nil
}

// MCPAddr returns the address of the legacy protocol after Listen: its port, or
// that of xDS if it has none.
func (s *Server) MCPAddr() net.Addr {
	if a := s.addr(fieldMCP); a != nil {
		return a
	}
	return s.XDSAddr()
}

// XDSAddr returns the address of the first xDS port after Listen.
func (s *Server) XDSAddr() net.Addr { return s.addr(fieldXDS) }

// AdminAddr returns the address of the admin port after Listen.
func (s *Server) AdminAddr() net.Addr { return s.addr(fieldAdmin) }

// sink passes a plugin's stream to its registry.
type sink struct {
	*state.Registry
	name    string
	latency *latency.Tracker
	listed  bool // of this stream
}

func (s *sink) Begin(d supervisor.Description) {
	s.listed = false
	s.Registry.Begin(d.Collections)
}

// Apply measures changes; what a listing has is none.
func (s *sink) Apply(m *pluginv1.WatchResponse) error {
	if s.listed && len(m.GetUpserts())+len(m.GetRemovals()) > 0 {
		message := latency.Message{Received: time.Now()}
		if t := m.GetChanged(); t != nil {
			message.Changed = t.AsTime()
		}
		s.latency.Begin(s.name, message)
		defer s.latency.End(s.name)
	}
	s.listed = s.listed || m.GetSynced()
	return s.Registry.Apply(m)
}

// Run follows the registries and serves sinks until ctx ends, and returns when
// everything it started has ended. When ctx ends, new streams are refused and
// existing ones are drained within the configured time; the registries are
// followed until then.
//
// Sinks can connect from the start and wait for the first listings. Registries
// are followed once every plugin has validated its configuration. If a plugin
// refuses it, Run returns [config.Problems]; a plugin that fails otherwise is
// restarted while the others serve.
func (s *Server) Run(ctx context.Context) error {
	defer close(s.ended)
	if err := s.openStore(); err != nil {
		return errors.Join(err, s.closePorts())
	}
	var err error
	if s.host, err = supervisor.NewHost("", s.log); err != nil {
		return errors.Join(err, s.closeStore(), s.closePorts())
	}
	for _, m := range s.members {
		if err := s.supervise(m); err != nil {
			return errors.Join(err, s.host.Close(), s.closeStore(), s.closePorts())
		}
		m.sink.Registry = s.db.Registry(m.registry.Name)
	}
	close(s.ready)

	// Serving and following continue until the streams have ended.
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	group, inner := errgroup.WithContext(inner)
	if len(s.ports) > 0 {
		for _, p := range s.ports {
			s.start(inner, group, p)
		}
		s.dialSinks(inner, group, s.config().Sinks)
		s.runConsumers(inner, group, s.allConsumers())
		s.log.Info("serving", "xds", s.XDSAddr().String(), "admin", s.AdminAddr().String(), "mcp", s.MCPAddr().String(), "registries", len(s.members), "version", s.options.Version)
	}
	group.Go(func() error {
		select {
		case <-ctx.Done():
			s.drain(time.Duration(s.config().Drain))
			cancel()
		case <-inner.Done(): // an error
			s.drain(0)
		}
		return nil
	})
	group.Go(func() error { return s.db.Run(inner) })
	group.Go(func() error {
		s.assess(inner)
		return nil
	})
	group.Go(func() error {
		s.view.Run(inner)
		return nil
	})
	if s.store == nil {
		s.follow(inner, group)
	} else {
		group.Go(func() error { return s.store.Run(inner) })
		group.Go(func() error {
			timer := time.NewTimer(restoreWithin)
			defer timer.Stop()
			select {
			case <-s.store.Restored():
			case <-timer.C:
				s.log.Error("the last good state was not read in time; the registries are followed without it", "dir", s.options.StateDir, "within", restoreWithin)
			case <-inner.Done():
			}
			s.follow(inner, group)
			return nil
		})
	}
	err = group.Wait()
	s.endExport()
	return errors.Join(err, s.host.Close())
}

// supervise creates the supervisor of a registry.
func (s *Server) supervise(m *member) (err error) {
	m.sink.name, m.sink.latency = m.registry.Name, s.latency
	m.sup, err = supervisor.New(s.host, m.spec, m.sink, s.log.With("registry", m.spec.Registry), s.metrics)
	return err
}

// drain refuses new streams and ends the existing ones, spread over the given
// time. It returns when they have ended, or a bounded time later.
func (s *Server) drain(over time.Duration) {
	s.drained.Store(true)
	s.streams.Drain(over)
	s.mu.Lock()
	ports, dials := slices.Clone(s.ports), slices.Clone(s.dials)
	s.mu.Unlock()
	for _, p := range ports {
		if p.isGRPC() {
			p.end()
		}
	}
	timeout := time.NewTimer(over + drainWithin)
	defer timeout.Stop()
	for _, p := range ports {
		if p.isGRPC() {
			<-p.ended
		}
	}
	for _, d := range dials {
		select {
		case <-d.ended:
		case <-timeout.C:
			return // dialed sinks that are still open are abandoned
		}
	}
}

// restoreWithin bounds how long registries wait for a disk that does not
// respond.
const restoreWithin = 30 * time.Second

// openStore opens the last good state, if enabled.
func (s *Server) openStore() error {
	if s.options.StateDir == "" {
		return nil
	}
	var err error
	s.store, err = lastgood.Open(s.db, lastgood.Options{
		Dir: s.options.StateDir, Registries: keptOf(s.members), Log: s.log, Metrics: s.options.Metrics,
	})
	return err
}

// keptOf returns the registries in the terms of the last good state.
func keptOf(members []*member) []lastgood.Registry {
	out := make([]lastgood.Registry, len(members))
	for i, m := range members {
		out[i] = lastgood.Registry{Name: m.spec.Registry, Type: m.spec.Adapter}
	}
	return out
}

func (s *Server) closeStore() error {
	if s.store == nil {
		return nil
	}
	return s.store.Close()
}

// restoredSince explains why a registry is restored.
func (s *Server) restoredSince(st state.Status) string {
	return fmt.Sprintf("it is served as it was %s ago, until its first listing is complete: %s", time.Since(st.Restored).Truncate(time.Second), s.unlisted(st))
}

// unlisted explains why the first listing of a registry is not complete.
func (s *Server) unlisted(st state.Status) string {
	sup := s.supervisor(st.Registry)
	text := sup.Phase.String()
	if sup.Waiting != "" {
		text += ", " + sup.Waiting
	}
	if why := cmp.Or(st.Error, st.Down, sup.LastError); why != "" {
		text += ": " + why
	}
	return text
}

// follow runs the supervisors in group, once all plugins have validated their
// configurations.
func (s *Server) follow(ctx context.Context, group *errgroup.Group) {
	type answer struct {
		registry int
		err      error
	}
	cfg, members := s.config(), s.members
	answers := make(chan answer, len(members))
	asked := make(chan struct{})
	for i, m := range members {
		var own context.Context
		own, m.end = context.WithCancel(ctx)
		group.Go(func() error {
			defer close(m.ended)
			defer m.end()
			answers <- answer{i, m.sup.Prepare(ctx)}
			select {
			case <-asked:
				return m.sup.Run(own)
			case <-ctx.Done():
				m.sup.Close()
				return nil
			}
		})
	}
	group.Go(func() error {
		var found config.Problems
		for range members {
			a := <-answers // one per member: Prepare ends with ctx
			if e, ok := errors.AsType[*supervisor.ConfigError](a.err); ok {
				for _, v := range e.Violations {
					found = append(found, cfg.Problem(a.registry, v.Field, v.Reason))
				}
			}
		}
		if len(found) > 0 {
			return found.Sort()
		}
		close(asked)
		s.reloadLoop(ctx, group)
		return nil
	})
}

func (s *Server) closePorts() (err error) {
	for _, p := range s.ports {
		err = errors.Join(err, p.Close())
	}
	return err
}

// NotSynced explains for each registry whose first listing is incomplete why
// that is so, and which collections wait for it since when. It omits optional
// registries whose wait is over. Without any, it costs one read of a flag.
func (s *Server) NotSynced() []string {
	select {
	case <-s.ready:
	default:
		return []string{"the server has not started yet"}
	}
	if s.db.Synced() {
		return nil
	}
	var reasons []string
	for _, st := range s.db.Registries() {
		if st.Listed() || st.Released || st.Late {
			continue
		}
		reason := fmt.Sprintf("registry %s: the first listing is not complete: %s", st.Registry, s.unlisted(st))
		if since := time.Since(st.ListingSince).Truncate(time.Second); !st.ListingSince.IsZero() && since > 0 {
			reason += fmt.Sprintf("; it began %s ago", since)
		}
		if len(st.Waits) > 0 {
			reason += "; " + waitingWords(st)
		}
		reasons = append(reasons, reason)
	}
	return reasons
}

// notReady explains why the bridge is not ready for streams.
func (s *Server) notReady() []string {
	if s.drained.Load() {
		return []string{"the bridge is ending; it takes no new streams"}
	}
	return s.NotSynced()
}

// WaitSynced returns when every registry has completed its first listing,
// except for optional ones that cannot be reached. If ctx
// ends first, the error names the registries that are incomplete.
func (s *Server) WaitSynced(ctx context.Context) error {
	started := s.ready
	for {
		changed := s.db.Changed() // closed when a first listing completes
		if len(s.NotSynced()) == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-started:
			started = nil
		case <-ctx.Done():
			return errors.New(strings.Join(s.NotSynced(), "\n"))
		}
	}
}

// Problem is something in a registry that cannot be served unchanged.
type Problem struct {
	Registry string
	state.Problem
}

// Problems returns the problems of all registries in the order of the
// configuration.
func (s *Server) Problems() []Problem {
	var out []Problem
	for _, st := range s.db.Registries() {
		for _, p := range s.problems(st.Registry) {
			out = append(out, Problem{st.Registry, p})
		}
	}
	return out
}

// problems returns the problems of one registry, none if it no longer exists.
func (s *Server) problems(registry string) []state.Problem {
	r := s.db.Registry(registry)
	if r == nil {
		return nil
	}
	return r.Problems()
}

// Skipped returns what the registries have and is not meant to be served, in
// the order of the configuration.
func (s *Server) Skipped() []Problem {
	var out []Problem
	for _, st := range s.db.Registries() {
		for _, p := range s.skipped(st.Registry) {
			out = append(out, Problem{st.Registry, p})
		}
	}
	return out
}

// leftOut returns what one registry has and is not meant to be served.
func (s *Server) skipped(registry string) []state.Problem {
	r := s.db.Registry(registry)
	if r == nil {
		return nil
	}
	return r.Skipped()
}

// supervisor returns the supervisor status of a registry, the zero value if the
// registry no longer exists.
func (s *Server) supervisor(registry string) supervisor.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.members {
		if m.registry.Name == registry {
			return m.sup.Status()
		}
	}
	return supervisor.Status{}
}

// Resource is a resource in the form that sinks receive.
type Resource struct {
	Collection string
	*mcp.Resource
}

// Resources returns all resources in a shape without workarounds, sorted by
// collection and name.
func (s *Server) Resources(shape encode.Shape) ([]Resource, error) {
	var out []Resource
	l := encode.NewLayout(encode.Form{Shape: shape})
	for _, coll := range s.db.Collections() {
		first := len(out)
		for c := range s.db.Changes(state.Kind{Collection: coll, Shape: shape}, new(state.Cursor)) {
			res, err := decode(c.Record, l)
			if err != nil {
				return nil, err
			}
			out = append(out, Resource{coll, res})
		}
		slices.SortFunc(out[first:], func(a, b Resource) int { return strings.Compare(a.GetMetadata().GetName(), b.GetMetadata().GetName()) })
	}
	return out, nil
}

func decode(r *state.Record, l *encode.Layout) (*mcp.Resource, error) {
	var res mcp.Resource
	e := r.Encode(l)
	if err := proto.Unmarshal(e.Append(nil), &res); err != nil {
		return nil, fmt.Errorf("%s %s: %w", r.Collection(), r.Name(), err)
	}
	return &res, nil
}

// Overview returns what the admin pages show; ok is false until [Server.Run]
// has begun.
func (s *Server) Overview() (o admin.Overview, ok bool) {
	select {
	case <-s.ready:
		return source{s}.Overview(), true
	default:
		return o, false
	}
}

// Services yields the services of all registries, by registry and name.
func (s *Server) Services() iter.Seq[status.Service] { return s.db.Services() }

// Explain follows one host from registries to sinks, and asks the plugins.
func (s *Server) Explain(ctx context.Context, host string) admin.Explanation {
	return source{s}.Explain(ctx, host)
}

// source implements admin.Source for a server.
type source struct{ s *Server }

// NotReady implements admin.Source.
func (a source) NotReady() []string { return a.s.notReady() }

// Conditions implements admin.Source.
func (a source) Conditions() []conditions.Condition { return a.s.Conditions() }

// Kept implements admin.Source.
func (a source) Removals(registry string) iter.Seq[status.Removal] { return a.s.db.Removals(registry) }

// Decide implements admin.Source.
func (a source) Decide(registry string, accept bool) (state.Protection, error) {
	r := a.s.db.Registry(registry)
	switch {
	case r == nil:
		return state.Protection{}, admin.ErrNoRegistry
	case accept:
		return r.Allow()
	default:
		return r.Keep()
	}
}

// Overview implements admin.Source.
func (a source) Overview() admin.Overview {
	s := a.s
	o := admin.Overview{
		Version: s.options.Version, Started: s.started, Revision: s.db.Revision(), NotReady: s.notReady(), Conditions: s.Conditions(), Config: s.loadedConfig(),
		Sinks: s.streams.Status(), Conflicts: s.db.Conflicts(), Consumers: s.ofConsumers(),
	}
	for i := range o.Sinks {
		o.Sinks[i].Metadata = nil // the API omits it
	}
	if s.store != nil {
		st := s.store.Status()
		o.State = admin.State{Dir: st.Dir, Bytes: st.Bytes, WrittenAt: st.WrittenAt, Error: cmp.Or(st.Writing, st.Reading)}
	}
	for _, st := range s.db.Registries() {
		sup := s.supervisor(st.Registry)
		if p := st.Protection; p != nil && p.Pending && sup.Phase == supervisor.PhaseLive {
			sup.Phase, sup.Sentence, sup.Since = supervisor.PhaseRemovalPaused, supervisor.PhaseRemovalPaused.Sentence(), p.Since
		}
		if sup.Waiting != "" {
			sup.Sentence += " So far: " + sup.Waiting + "."
		}
		if !st.Restored.IsZero() {
			sup.Phase, sup.Sentence = supervisor.PhaseRestored, "Read from disk: "+s.restoredSince(st)+"."
		}
		r := admin.Registry{Plugin: sup, Served: st, Error: cmp.Or(st.Down, st.Error), Problems: s.problems(st.Registry), Skipped: s.skipped(st.Registry)}
		r.LeftOut = r.Skipped
		for _, n := range st.Resources {
			r.Resources += n
		}
		o.Registries = append(o.Registries, r)
	}
	return o
}

// Services implements admin.Source.
func (a source) Services() iter.Seq[status.Service] { return a.s.db.Services() }

// Resources implements admin.Source. It yields ServiceEntries with their
// endpoints, all WorkloadEntries, with or without a service, and all other
// resources.
func (a source) Resources(profile string) (iter.Seq[admin.Resource], error) {
	inline := encode.Form{}
	if profile != "" {
		var err error
		if inline, err = xds.FormOf(profile); err != nil {
			return nil, err
		}
	}
	workload := inline
	workload.Shape = encode.Workload
	return func(yield func(admin.Resource) bool) {
		for _, coll := range a.s.db.Collections() {
			l := encode.NewLayout(inline)
			if coll == collection.WorkloadEntry {
				l = encode.NewLayout(workload)
			}
			for c := range a.s.db.Changes(state.Kind{Collection: coll, Shape: l.Shape}, new(state.Cursor)) {
				r := c.Record
				if c.Removed { // since the listing began
					continue
				}
				if !yield(admin.Resource{
					Registry: r.Registry(), Collection: coll, Name: r.Name(), Version: r.Encode(l).Version.String(),
					Body: func() (json.RawMessage, error) {
						res, err := decode(r, l)
						if err != nil {
							return nil, err
						}
						return protojson.Marshal(res)
					},
					HasAddress: func(address string, whole bool) bool {
						e := r.Encode(l)
						return hasAddress(e.Append(nil), address, whole)
					},
				}) {
					return
				}
			}
		}
	}, nil
}

// hasAddress reports whether an encoded ServiceEntry has an endpoint with the
// address, or unless whole with one that begins so.
func hasAddress(entry []byte, address string, whole bool) bool {
	const field, most = 0x0a, 127 // the key of WorkloadEntry.address, and its length in one byte
	for at := 0; ; at++ {
		i := bytes.Index(entry[at:], []byte(address))
		if i < 0 {
			return false
		}
		if at += i; at < 2 || entry[at-2] != field {
			continue
		}
		if n := int(entry[at-1]); n == len(address) || !whole && n > len(address) && n <= most {
			return true
		}
	}
}

// Changes implements admin.Source.
func (a source) Changes() iter.Seq[history.Event] { return a.s.db.History() }

// Changed implements admin.Source.
func (a source) Changed() <-chan struct{} { return a.s.db.Changed() }

// Samples implements admin.Source.
func (a source) Samples() []history.Sample { return a.s.db.Samples() }
