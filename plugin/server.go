package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/translate"
)

var adapterName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// server implements the contract's service for one adapter.
type server struct {
	pluginv1.UnimplementedAdapterServiceServer

	describe    *pluginv1.DescribeResponse
	translate   *conf.Type[Translate]
	collections []string
	newAdapter  func(config []byte, env Env) (Adapter, *Access, error) // an error is about the configuration
	log         *slog.Logger
	restore     func() // called before any code of the adapter runs; may be nil
	alone       bool   // the process is this plugin's, which may give up its rights

	watched chan struct{} // closed at the first stream: the adapter may run
	ended   chan struct{} // closed when the adapter returned

	restoreOnce sync.Once
	mu          sync.Mutex
	// guarded by mu; adapter, catalog, given and metrics are set once, before
	// watched is closed
	configured bool
	running    bool
	adapter    Adapter
	catalog    *catalog
	given      Catalog // what the adapter gets: catalog, or a part of it
	metrics    *Metrics
	confined   *confinement // nil if it kept its rights; set once, before watched is closed
	// written before ended is closed
	err error
}

func newServer[C any](name string, o options, newAdapter func(C, Env) (Adapter, error)) (*server, error) {
	if !adapterName.MatchString(name) {
		return nil, fmt.Errorf("name %q: must be lower-case letters, digits and dashes", name)
	}
	known := collection.All()
	for _, c := range o.collections {
		if !slices.Contains(known, c) {
			return nil, fmt.Errorf("collection %q: must be one of %s", c, strings.Join(slices.Sorted(slices.Values(known)), ", "))
		}
	}
	defaults, _ := o.defaults.(C)
	config, err := conf.New("config", defaults, conf.JSON)
	if err != nil {
		return nil, err
	}
	o.translate.Adapter = name
	trans, err := conf.New("translate", o.translate, conf.JSON)
	if err != nil {
		return nil, err
	}
	s := &server{
		describe: &pluginv1.DescribeResponse{
			Name:            name,
			Version:         o.version,
			Summary:         o.summary,
			ConfigSchema:    config.Schema,
			TranslateSchema: trans.Schema,
			Collections:     o.collections,
		},
		translate:   trans,
		collections: o.collections,
		watched:     make(chan struct{}),
		ended:       make(chan struct{}),
	}
	s.newAdapter = func(raw []byte, env Env) (Adapter, *Access, error) {
		c, err := config.Decode(raw)
		if err != nil {
			return nil, nil, err
		}
		a, err := newAdapter(c, env)
		if err != nil {
			return nil, nil, config.ErrorOf(err)
		}
		if a == nil {
			return nil, nil, errors.New("BUG: newAdapter returned neither an adapter nor an error")
		}
		if o.access == nil {
			return a, nil, nil
		}
		return a, new(o.access(c)), nil
	}
	return s, nil
}

// Describe implements the contract.
func (s *server) Describe(context.Context, *pluginv1.DescribeRequest) (*pluginv1.DescribeResponse, error) {
	return s.describe, nil
}

// Configure implements the contract.
func (s *server) Configure(_ context.Context, req *pluginv1.ConfigureRequest) (resp *pluginv1.ConfigureResponse, err error) {
	if s.restore != nil {
		s.restoreOnce.Do(s.restore)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.configured {
		return nil, status.Error(codes.FailedPrecondition, "the plugin is configured already; it takes one configuration in its life")
	}
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("the adapter panicked on its configuration", "panic", fmt.Sprint(p), "stack", stack())
			resp, err = nil, status.Errorf(codes.Internal, "the adapter panicked: %v", p)
		}
	}()
	if req.GetRegistry() == "" {
		return nil, status.Error(codes.InvalidArgument, "the registry has no name")
	}

	var all []error
	resp = &pluginv1.ConfigureResponse{}
	var translator *translate.Translator
	_, err = s.translate.DecodeAlone(req.GetTranslate(), func(o Translate) (err error) {
		o.Permit = req.GetLabels()
		if translator, err = translate.New(req.GetRegistry(), o.Over(s.translate.Defaults)); err == nil && o.Host != "" {
			resp.Warnings = s.oneHost(req.GetRegistry(), translator)
		}
		return err
	})
	all = append(all, err)
	metrics := &Metrics{}
	env := Env{Registry: req.GetRegistry(), Log: s.log, Metrics: metrics}
	shards := shard.Set{First: int(req.GetShards().GetFirst()), Last: int(req.GetShards().GetLast()), Of: int(req.GetShards().GetOf())}
	if err := shards.Validate(); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "shards: %v", err)
	}
	if !shards.All() && translator != nil {
		env.Only = func(key registry.Key) bool {
			host, ok := translator.HostOf(key)
			return !ok || shards.Has(host)
		}
	}
	a, access, err := s.newAdapter(req.GetConfig(), env)
	all = append(all, err)
	if err := errors.Join(all...); err != nil {
		return &pluginv1.ConfigureResponse{Violations: violations(err)}, nil
	}
	if access == nil && req.GetConfinementRequired() {
		return &pluginv1.ConfigureResponse{Violations: violations(unconfinable("the adapter does not say what it needs"))}, nil
	}
	if access != nil && s.alone && !req.GetUnconfined() {
		s.confined = newConfinement(*access)
		version, seccomp, err := s.confined.enforce(*access)
		if err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		if err := access.gaps(version, seccomp); err != nil && req.GetConfinementRequired() {
			return &pluginv1.ConfigureResponse{Violations: violations(err)}, nil
		}
		resp.Confinement = s.confined.phrases(*access, version, seccomp)
	}
	s.metrics = metrics
	s.adapter, s.catalog, s.configured = a, newCatalog(translator, s.collections, limits{resources: req.GetLimits().GetResources(), services: req.GetLimits().GetServices(), bytes: req.GetLimits().GetBytes()}), true
	s.given = s.catalog
	if !shards.All() {
		s.given = &sharded{s.catalog, translator, shards}
	}
	return resp, nil
}

// oneHost warns of a template of hosts that leaves out what the adapter's own
// has.
func (s *server) oneHost(name string, t *translate.Translator) []*pluginv1.Violation {
	usual, err := translate.New(name, s.translate.Defaults)
	if err != nil {
		return nil
	}
	parts := t.OneHost(usual)
	if len(parts) == 0 {
		return nil
	}
	of := strings.Join(parts, ", ")
	reason := fmt.Sprintf("services that differ only in %s have one host, and the first of them by name is served (see conflicts); "+
		"if the registry has such, use %[1]s in the template too", of)
	if parts[0] == "Name" {
		reason = "services of different names have one host, and the first of them by name is served (see conflicts); use Name in the template"
	}
	return []*pluginv1.Violation{{Field: "translate.host", Reason: reason}}
}

// Watch implements the contract.
func (s *server) Watch(_ *pluginv1.WatchRequest, stream grpc.ServerStreamingServer[pluginv1.WatchResponse]) error {
	s.mu.Lock()
	if !s.configured {
		s.mu.Unlock()
		return status.Error(codes.FailedPrecondition, "the plugin is not configured")
	}
	if !s.running {
		s.running = true
		close(s.watched)
	}
	s.mu.Unlock()

	r := s.catalog.read()
	defer r.close()
	heartbeat := time.NewTimer(wire.Heartbeat)
	defer heartbeat.Stop()
	ended, told := false, toldMetrics{}
	for {
		resp, err := r.next()
		switch {
		case err != nil:
			return status.Error(codes.Aborted, err.Error())
		case resp != nil:
		case ended:
			if errors.Is(s.err, errMoved) {
				return status.Error(wire.Renew, s.err.Error())
			}
			return status.Errorf(codes.Aborted, "the adapter ended: %v", s.err)
		default:
			select {
			case <-stream.Context().Done():
				return status.FromContextError(stream.Context().Err()).Err()
			case <-r.wake:
				continue
			case <-s.ended:
				ended = true // send its last changes first
				continue
			case <-heartbeat.C:
				resp = &pluginv1.WatchResponse{LastHeard: r.lastHeard()}
			}
		}
		resp.Metrics = s.metrics.changed(told)
		if err := stream.Send(resp); err != nil {
			return err
		}
		heartbeat.Reset(wire.Heartbeat)
	}
}

// end records the end of the adapter.
func (s *server) end(err error) {
	s.err = err
	close(s.ended)
}

// violations returns every FieldError in err's tree, and other errors as text.
func violations(err error) []*pluginv1.Violation {
	var out []*pluginv1.Violation
	for _, f := range conf.FieldErrors(err) {
		out = append(out, &pluginv1.Violation{Field: clip.Text(f.Field, maxIDBytes), Reason: clip.Text(redact(f.Reason), maxReasonBytes)})
	}
	slices.SortStableFunc(out, func(a, b *pluginv1.Violation) int { return strings.Compare(a.GetField(), b.GetField()) })
	return out
}
