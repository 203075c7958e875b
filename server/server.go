package server

import (
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
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/encode"
	mcpserver "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/xds"
	"github.com/isthmus-mesh/isthmus/translate"
)

// drainWithin is how long sinks have to take what is on its way when the server ends.
const drainWithin = 2 * time.Second

// Options are what a server needs besides its configuration.
type Options struct {
	// Version is the program's version, for people.
	Version string
	// Log takes everything that the server and its plugins have to say. Nil drops it.
	Log *slog.Logger
	// Metrics is where metrics are registered, and what the admin server shows. Nil means a registry of its own.
	Metrics *prometheus.Registry
}

// Server is the whole bridge.
type Server struct {
	cfg     config.Config
	options Options
	log     *slog.Logger
	started time.Time

	db          *state.DB
	view        *view.View
	xds         *xds.Server
	mcp         *mcpserver.Server
	specs       []supervisor.Spec
	metrics     *supervisor.Metrics
	supervisors []*supervisor.Supervisor // in the order of the configuration; made by Run

	xdsListeners  []net.Listener
	adminListener net.Listener
	mcpListener   net.Listener  // nil if they are the same as xdsListeners
	ready         chan struct{} // closed when supervisors is set
}

// New returns a server that does nothing yet.
func New(cfg config.Config, o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Metrics == nil {
		o.Metrics = prometheus.NewRegistry()
	}
	s := &Server{cfg: cfg, options: o, log: o.Log, started: time.Now(), ready: make(chan struct{})}
	names := make([]string, len(cfg.Registries))
	for i := range cfg.Registries {
		spec, err := Spec(&cfg, &cfg.Registries[i])
		if err != nil {
			return nil, err
		}
		s.specs = append(s.specs, spec)
		names[i] = spec.Registry
	}
	var err error
	s.db, err = state.New(names, state.Options{
		MaxResources: cfg.Limits.ResourcesPerRegistry,
		MaxBytes:     cfg.Limits.BytesPerRegistry,
		Tombstones:   cfg.Limits.Tombstones,
		Selector:     translate.SelectorValue,
		Validate:     translate.ValidateBody,
	}, o.Log, o.Metrics)
	if err != nil {
		return nil, err
	}
	s.view = view.New(s.db)
	s.xds, err = xds.New(s.view, xds.Config{Profile: cfg.Profile}, o.Log, o.Metrics)
	if err != nil {
		return nil, err
	}
	s.mcp, err = mcpserver.New(s.view, mcpserver.Config{
		Profile: cfg.MCP.Profile, SyntheticEntries: cfg.MCP.SyntheticEntries, FullState: cfg.MCP.FullState,
	}, o.Log, o.Metrics)
	if err != nil {
		return nil, err
	}
	s.metrics = supervisor.NewMetrics(o.Metrics)
	return s, nil
}

// Spec returns what runs the plugin of a registry.
func Spec(cfg *config.Config, r *config.Registry) (supervisor.Spec, error) {
	path, args, err := cfg.Command(r)
	if err != nil {
		return supervisor.Spec{}, err
	}
	return supervisor.Spec{
		Registry: r.Name, Adapter: r.Type, Command: append([]string{path}, args...), SHA256: r.Plugin.SHA256,
		Config: r.Config, Translate: r.Translate,
		Resources: cfg.Limits.ResourcesPerRegistry, Bytes: cfg.Limits.BytesPerRegistry,
	}, nil
}

// Listen opens the ports, so that an istiod that starts at the same time finds somebody: at its own start an istiod exits
// when a config source refuses the connection. Without it the server serves nobody.
func (s *Server) Listen() (failed error) {
	open := func(field, address string) net.Listener {
		l, err := net.Listen("tcp", address)
		if err != nil {
			failed = fmt.Errorf("%s: %w", field, errors.Join(err, s.closeListeners()))
			return nil
		}
		return l
	}
	for _, l := range s.cfg.Listen.XDS {
		opened := open("listen.xds", l.Address)
		if failed != nil {
			return failed
		}
		s.xdsListeners = append(s.xdsListeners, opened)
	}
	if failed == nil {
		s.adminListener = open("listen.admin", s.cfg.Listen.Admin.Address)
	}
	if failed == nil && s.cfg.Listen.MCP.Address != "" {
		s.mcpListener = open("listen.mcp", s.cfg.Listen.MCP.Address)
	}
	return failed
}

// MCPAddr returns the address of the port of the legacy protocol after Listen: that of xDS unless it has one of its own.
func (s *Server) MCPAddr() net.Addr {
	if s.mcpListener == nil {
		return s.XDSAddr()
	}
	return s.mcpListener.Addr()
}

// XDSAddr returns the address of the first xDS port after Listen.
func (s *Server) XDSAddr() net.Addr { return s.xdsListeners[0].Addr() }

// AdminAddr returns the address of the admin port after Listen.
func (s *Server) AdminAddr() net.Addr { return s.adminListener.Addr() }

// sink hands a plugin's stream to the registry that it is for.
type sink struct{ *state.Registry }

func (s sink) Begin(d supervisor.Description) { s.Registry.Begin(d.Collections) }

func (s sink) Apply(m *pluginv1.WatchResponse) error {
	s.Registry.Apply(m)
	return nil
}

// Run follows the registries and serves sinks until ctx ends, and returns when everything that it started has ended.
//
// Sinks are served from the beginning, whatever the plugins do: they wait for the first listings. No registry is followed before every
// plugin was asked about its configuration. If one refuses it, the server ends with a [config.Problems]; one that cannot be asked is
// started again while the others serve.
func (s *Server) Run(ctx context.Context) error {
	host, err := supervisor.NewHost("", s.log)
	if err != nil {
		return errors.Join(err, s.closeListeners())
	}
	for _, spec := range s.specs {
		sup, err := supervisor.New(host, spec, sink{s.db.Registry(spec.Registry)}, s.log.With("registry", spec.Registry), s.metrics)
		if err != nil {
			return errors.Join(err, host.Close(), s.closeListeners())
		}
		s.supervisors = append(s.supervisors, sup)
	}
	close(s.ready)

	group, ctx := errgroup.WithContext(ctx)
	if s.xdsListeners != nil {
		group.Go(func() error { return s.serveXDS(ctx) })
		if s.mcpListener != nil {
			group.Go(func() error { return s.serveMCP(ctx) })
		}
		s.dialSinks(ctx, group)
		group.Go(func() error {
			a := admin.New(source{s}, admin.Options{Gatherer: s.options.Metrics, Pprof: s.cfg.Admin.Pprof, Log: s.log})
			return a.Run(ctx, s.adminListener)
		})
		s.log.Info("serving", "xds", s.XDSAddr().String(), "admin", s.AdminAddr().String(), "mcp", s.MCPAddr().String(), "registries", len(s.specs), "version", s.options.Version)
	}
	group.Go(func() error { return s.db.Run(ctx) })
	group.Go(func() error {
		s.view.Run(ctx)
		return nil
	})
	s.follow(ctx, group)
	err = group.Wait()
	return errors.Join(err, host.Close())
}

// follow runs the supervisors in group, once all plugins were asked about their configurations.
func (s *Server) follow(ctx context.Context, group *errgroup.Group) {
	type answer struct {
		registry int
		err      error
	}
	answers := make(chan answer, len(s.supervisors))
	asked := make(chan struct{})
	for i, sup := range s.supervisors {
		group.Go(func() error {
			answers <- answer{i, sup.Prepare(ctx)}
			select {
			case <-asked:
				return sup.Run(ctx)
			case <-ctx.Done():
				sup.Close()
				return nil
			}
		})
	}
	group.Go(func() error {
		var found config.Problems
		for range s.supervisors {
			a := <-answers // there is one for each, as Prepare ends with ctx
			if e, ok := errors.AsType[*supervisor.ConfigError](a.err); ok {
				for _, v := range e.Violations {
					found = append(found, s.cfg.Problem(a.registry, v.Field, v.Reason))
				}
			}
		}
		if len(found) > 0 {
			return found.Sort()
		}
		close(asked)
		return nil
	})
}

func (s *Server) closeListeners() (err error) {
	for _, l := range append(s.xdsListeners, s.adminListener, s.mcpListener) {
		if l != nil {
			err = errors.Join(err, l.Close())
		}
	}
	s.xdsListeners, s.adminListener, s.mcpListener = nil, nil, nil
	return err
}

func (s *Server) serveXDS(ctx context.Context) error {
	server := grpc.NewServer(xds.ServerOptions()...)
	s.xds.Register(server)
	shutdown := s.xds.Shutdown
	if s.mcpListener == nil {
		s.mcp.Register(server)
		shutdown = func() {
			s.xds.Shutdown()
			s.mcp.Shutdown()
		}
	}
	return serveGRPC(ctx, server, s.xdsListeners, "xds", shutdown)
}

// serveGRPC serves until ctx ends. Streams last as long as the sink wants; at the end they are cut after what is on its way.
func serveGRPC(ctx context.Context, server *grpc.Server, listeners []net.Listener, name string, shutdown func()) error {
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(drainWithin, server.Stop)
		defer timer.Stop()
		shutdown()
		server.GracefulStop()
	})
	defer stop()
	var group errgroup.Group
	for _, l := range listeners {
		group.Go(func() error {
			if err := server.Serve(l); err != nil && ctx.Err() == nil {
				server.Stop() // the others end with it
				return fmt.Errorf("%s %v: %w", name, l.Addr(), err)
			}
			return nil
		})
	}
	return group.Wait()
}

// NotSynced says of each registry whose first listing is not complete why that is so. Once there is none it reads a flag.
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
	for i, st := range s.db.Registries() {
		if st.Synced {
			continue
		}
		sup := s.supervisors[i].Status()
		reason := fmt.Sprintf("registry %s: the first listing is not complete: %s", st.Registry, sup.Phase)
		if sup.Waiting != "" {
			reason += ", " + sup.Waiting
		}
		if why := cmp.Or(st.Error, st.Down, sup.LastError); why != "" {
			reason += ": " + why
		}
		if since := time.Since(st.ListingSince).Truncate(time.Second); !st.ListingSince.IsZero() && since > 0 {
			reason += fmt.Sprintf("; it began %s ago", since)
		}
		reasons = append(reasons, reason)
	}
	return reasons
}

// WaitSynced returns when every registry has completed its first listing. The error says which ones have not when ctx ends.
func (s *Server) WaitSynced(ctx context.Context) error {
	started := s.ready
	for {
		changed := s.db.Changed() // woken when a registry completes its first listing
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

// Problem is something in a registry that cannot be served as it is.
type Problem struct {
	Registry string
	state.Problem
}

// Problems returns everything that cannot be served as it is, registry by registry in the order of the configuration.
func (s *Server) Problems() []Problem {
	var out []Problem
	for _, spec := range s.specs {
		for _, p := range s.db.Registry(spec.Registry).Problems() {
			out = append(out, Problem{spec.Registry, p})
		}
	}
	return out
}

// Resource is one resource as sinks get it.
type Resource struct {
	Collection string
	*mcp.Resource
}

// Resources returns everything that sinks of a shape get without workarounds,
// by collection and name.
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

// source shows a server in the admin pages.
type source struct{ s *Server }

// NotReady implements admin.Source.
func (a source) NotReady() []string { return a.s.NotSynced() }

// Overview implements admin.Source.
func (a source) Overview() admin.Overview {
	s := a.s
	o := admin.Overview{
		Version: s.options.Version, Started: s.started, Revision: uint64(s.db.Revision()), NotReady: s.NotSynced(),
		Registries: []admin.Registry{}, Sinks: a.sinks(),
	}
	for i, st := range s.db.Registries() {
		sup := s.supervisors[i].Status()
		if sup.Waiting != "" {
			sup.Sentence += " So far: " + sup.Waiting + "."
		}
		r := admin.Registry{
			Name: st.Registry, Adapter: sup.Adapter, Version: sup.Version, Phase: sup.Phase.String(), Explanation: sup.Sentence, Since: sup.Since,
			Error: cmp.Or(st.Down, st.Error), LastError: sup.LastError, LastErrorAt: sup.LastErrorAt, Detail: st.Detail, Synced: st.Synced, ListingSince: st.ListingSince, LastHeard: sup.LastHeard, Bytes: st.Bytes, PID: sup.PID, Restarts: sup.Restarts,
			Revision: uint64(st.Revision), Services: int(st.Services), Instances: int(st.Instances), ProblemCount: st.Problems,
			Problems: []admin.Problem{},
		}
		for _, n := range st.Resources {
			r.Resources += n
		}
		for _, p := range s.db.Registry(st.Registry).Problems() {
			r.Problems = append(r.Problems, admin.Problem{ID: p.ID, Reason: p.Reason})
		}
		o.Registries = append(o.Registries, r)
	}
	return o
}

// Services implements admin.Source.
func (a source) Services() iter.Seq[admin.Service] {
	return func(yield func(admin.Service) bool) {
		for s := range a.s.db.Services() {
			if !yield(admin.Service{Registry: s.Registry, Name: s.Name, Hosts: s.Hosts, Endpoints: s.Endpoints, Version: s.Version, ShadowedBy: s.ShadowedBy}) {
				return
			}
		}
	}
}

// Resources implements admin.Source: ServiceEntries with their endpoints, WorkloadEntries whether they belong to a service or not, and
// whatever else there is.
func (a source) Resources() iter.Seq[admin.Resource] {
	return func(yield func(admin.Resource) bool) {
		for _, coll := range a.s.db.Collections() {
			l := encode.NewLayout(encode.Form{})
			if coll == collection.WorkloadEntry {
				l = encode.NewLayout(encode.Form{Shape: encode.Workload})
			}
			for c := range a.s.db.Changes(state.Kind{Collection: coll, Shape: l.Shape}, new(state.Cursor)) {
				r := c.Record
				if !yield(admin.Resource{
					Registry: a.s.db.RegistryOf(r), Collection: coll, Name: r.Name(), Version: r.Encode(l).Version.String(),
					Body: func() (json.RawMessage, error) {
						res, err := decode(r, l)
						if err != nil {
							return nil, err
						}
						return protojson.Marshal(res)
					},
				}) {
					return
				}
			}
		}
	}
}

// Changes implements admin.Source.
func (a source) Changes() iter.Seq[admin.Change] {
	return func(yield func(admin.Change) bool) {
		for _, c := range a.s.db.History() {
			if !yield(admin.Change{
				Revision: uint64(c.Revision), Time: c.Time, Registry: c.Registry, Collection: c.Collection, Name: c.Name, Version: c.Version, Op: c.Op,
			}) {
				return
			}
		}
	}
}

func (a source) sinks() []admin.Sink {
	out := []admin.Sink{}
	for _, st := range slices.Concat(a.s.xds.Status(), a.s.mcp.Status()) {
		sink := admin.Sink{
			Address: st.Address, Node: st.Node, Version: st.Version, Protocol: st.Protocol, Profile: st.Profile, Shape: st.Shape,
			Connected: st.Connected, StaleNonces: st.StaleNonces, Subscriptions: []admin.Subscription{},
		}
		for _, sub := range st.Subscriptions {
			sink.Subscriptions = append(sink.Subscriptions, admin.Subscription{
				TypeURL: sub.TypeURL, Collection: sub.Collection, State: sub.State, Sent: sub.Sent,
				SentVersion: sub.SentVersion, SentRevision: uint64(sub.SentRevision),
				AckedVersion: sub.AckedVersion, AckedRevision: uint64(sub.AckedRevision),
				Lag: sub.Lag, Nacks: sub.Nacks, LastNack: sub.LastNack, Resources: sub.Resources, Bytes: sub.Bytes,
				Incremental: sub.Incremental, Oversize: sub.Oversize, Waiting: sub.Waiting,
			})
		}
		out = append(out, sink)
	}
	return out
}
