package nacos

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// grpcProbeEvery is the interval of gRPC attempts at a polled server.
	grpcProbeEvery = 30 * time.Second
	// strikesFirst and strikesLater are how often gRPC must fail in a row,
	// while the HTTP API answers, before services are polled: at the start, and
	// once gRPC has worked.
	strikesFirst = 2
	strikesLater = 4
	// steady is how long a session must last to reset the count of failures.
	steady = 10 * time.Second
)

// Adapter follows one Nacos cluster. New makes one.
type Adapter struct {
	config  Config
	env     plugin.Env
	client  *plugin.HTTPClient
	servers []server
}

// New returns an adapter for a configuration that Validate accepts. It reads
// the TLS files and starts nothing.
func New(c Config, env plugin.Env) (plugin.Adapter, error) {
	a, err := newAdapter(c, env)
	if err != nil {
		return nil, err
	}
	return a, nil
}

func newAdapter(c Config, env plugin.Env) (*Adapter, error) {
	c = c.withDefaults()
	if err := c.Validate(); err != nil {
		return nil, err
	}
	client, err := newHTTPClient(c.TLS.TLS)
	if err != nil {
		return nil, err
	}
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	a := &Adapter{config: c, env: env, client: client}
	for i, address := range c.Servers {
		s, err := parseServer(address, c.ContextPath, c.GRPCPortOffset)
		if err != nil {
			return nil, &plugin.FieldError{Field: fmt.Sprintf("servers[%d]", i), Reason: err.Error()}
		}
		a.servers = append(a.servers, s)
	}
	return a, nil
}

// run is the state of one Run, across its sessions.
type run struct {
	config  Config
	log     *slog.Logger
	adapter *Adapter
	catalog plugin.Catalog
	state   *state
	mirror  *mirror
	scopes  *scopes
	servers *servers
	client  *plugin.HTTPClient
	auth    *auth

	hadGRPC bool
	strikes int // consecutive gRPC failures while the HTTP API answered
}

// Run follows the servers until ctx ends, and then returns nil. No failure of
// Nacos ends it; connections are retried.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	st := newState(catalog)
	defer a.client.Close()
	r := &run{
		config: a.config, log: a.env.Log, adapter: a, catalog: catalog, state: st,
		mirror:  newMirror(a.config, a.env.Log, catalog, st),
		scopes:  &scopes{state: st, all: map[string]*scope{}},
		servers: &servers{all: a.servers}, client: a.client,
		auth: newAuth(a.config, a.client, a.env.Log),
	}
	// Register all that is awaited before any of it can arrive.
	if a.config.allNamespaces() {
		r.scopes.named = st.listing.Expect()
	} else {
		for _, n := range a.config.Namespaces {
			r.scopes.get(canonicalNamespace(n), canonicalNamespace(n))
		}
	}

	var wg sync.WaitGroup
	defer wg.Wait()
	// Owned by Run; ends with ctx, as the loop below.
	wg.Go(func() { r.mirror.grace.Run(ctx) })
	retry := plugin.Backoff{First: 250 * time.Millisecond, Most: 5 * time.Second}
	for failures := 0; ctx.Err() == nil; {
		begin := time.Now()
		err := r.session(ctx, r.servers.take())
		if ctx.Err() != nil {
			break
		}
		if time.Since(begin) > steady {
			retry.Reset()
			failures = 0
		}
		if reset, ok := errors.AsType[*errReset](err); ok {
			r.log.Info("the server asked for a connection to another one", slog.String("to", reset.to))
			if reset.to != "" {
				r.servers.recommend(reset.to)
			}
			if failures == 0 {
				failures++
				continue // retry at once unless sessions keep ending early
			}
		}
		r.log.Debug("session ended", slog.Any("err", err))
		kind := faultAway
		if _, ok := errors.AsType[*errLogin](err); ok || isRefused(err) {
			kind = faultAuth
		}
		st.faults.Set("server", kind, err)
		// Try the other servers at once.
		if failures++; failures%len(a.servers) == 0 && !plugin.Pause(ctx, retry.Next(), nil) {
			break
		}
	}
	return nil
}

// group runs the goroutines of a session. The first error cancels all.
type group struct {
	wg     sync.WaitGroup
	cancel context.CancelCauseFunc
}

// do runs fn. The owner of the group waits for it.
func (g *group) do(fn func() error) {
	g.wg.Go(func() {
		if err := fn(); err != nil {
			g.cancel(err)
		}
	})
}

// session connects to a server and follows it until ctx ends or the connection
// fails, and returns the reason.
func (r *run) session(ctx context.Context, s server) error {
	if err := r.auth.ensure(ctx, s); err != nil {
		return fmt.Errorf("server %s: %w", s.address(), err)
	}
	api := &httpAPI{server: s, client: r.client, auth: r.auth, heard: r.catalog.Heard}
	polling := r.config.Protocol == protocolHTTP
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	var c *conn
	if !polling {
		var err error
		c, err = dial(ctx, s, r.config.TLS, r.auth, r.log)
		if err != nil {
			if ctx.Err() != nil || !r.mayPoll(ctx, api, err) {
				return fmt.Errorf("cannot follow %s: %w", s.address(), err)
			}
			polling = true
		} else {
			defer c.close()
			c.heard = r.catalog.Heard
			r.hadGRPC, r.strikes = true, 0
		}
	}
	if polling {
		if err := api.answers(ctx); err != nil {
			return fmt.Errorf("cannot follow %s: %w", s.address(), err)
		}
	}

	g := &group{cancel: cancel}
	d := &discovery{
		config: r.config, log: r.log, mirror: r.mirror, state: r.state, api: api, conn: c, scopes: r.scopes,
		patterns: map[string]*pattern{},
	}
	number := r.mirror.begin(polling)
	r.detail(polling)
	r.state.faults.Clear("server")
	var src source = polled{api}
	if c != nil {
		src = c
		r.log.Info("connected", slog.String("server", s.address()), slog.Any("abilities", c.abilityNames()))
		// Owned by the session, which waits for them below; they end with ctx
		// or the connection.
		g.do(func() error {
			return c.receive(func(typ string, req *serverRequest, err error) { r.receive(d, number, typ, req, err) })
		})
		g.do(func() error { return c.keepHealthy(ctx) })
	} else {
		r.log.Info("the server is polled over HTTP", slog.String("server", s.address()))
		if r.config.Protocol == protocolAuto {
			g.do(func() error { return r.probe(ctx, s) })
		}
	}
	for range r.config.InFlight {
		g.do(func() error { return r.mirror.work(ctx, src) })
	}
	g.do(func() error {
		r.auth.keepFresh(ctx, s, func(err error) { r.state.faults.Set("login", faultAuth, err) })
		return nil
	})
	d.run(ctx, g)

	<-ctx.Done()
	if c != nil {
		c.close() // ends the stream
	}
	g.wg.Wait()
	r.mirror.end()
	r.state.faults.Clear("login")
	return fmt.Errorf("server %s: %w", s.address(), context.Cause(ctx))
}

// receive handles a message of the server's stream.
func (r *run) receive(d *discovery, session uint64, typ string, req *serverRequest, err error) {
	if err == nil {
		r.catalog.Heard()
	}
	switch typ {
	case typePush:
		group, name := splitGrouped(req.ServiceInfo.GroupName, req.ServiceInfo.Name)
		if group == "" {
			group = defaultGroup
		}
		r.mirror.push(session, group, name, &req.ServiceInfo, err)
	case typeFuzzySync, typeFuzzyChange:
		if err == nil {
			d.fuzzy(typ, req)
		}
	}
	if err != nil {
		r.log.Warn("the server sent something that cannot be read", slog.String("type", plugin.Excerpt(typ)), slog.Any("err", err))
	}
}

// detail reports how the registry is followed.
func (r *run) detail(polling bool) {
	text := ""
	if polling {
		text = "polling"
	}
	r.catalog.Detail(text)
}

// mayPoll reports whether to poll a server that is unreachable over gRPC.
func (r *run) mayPoll(ctx context.Context, api *httpAPI, err error) bool {
	if r.config.Protocol != protocolAuto || isRefused(err) || api.answers(ctx) != nil {
		return false
	}
	r.strikes++
	if r.hadGRPC {
		return r.strikes >= strikesLater
	}
	return r.strikes >= strikesFirst
}

// errGRPC ends the polling of a server whose gRPC port answers again.
var errGRPC = &errReset{}

// probe periodically tries a polled server over gRPC.
func (r *run) probe(ctx context.Context, s server) error {
	for {
		if !plugin.Pause(ctx, plugin.Jitter(grpcProbeEvery), nil) {
			return context.Cause(ctx)
		}
		probeCtx, cancel := context.WithCancel(ctx)
		c, err := dial(probeCtx, s, r.config.TLS, r.auth, r.log)
		cancel()
		if err == nil {
			c.close()
			r.log.Info("the server answers over gRPC again", slog.String("server", s.address()))
			return errGRPC
		}
	}
}

// polled is the HTTP API as a source without pushes.
type polled struct{ *httpAPI }

// subscribe implements source.
func (p polled) subscribe(ctx context.Context, namespace, group, name string) (model.Service, error) {
	return p.query(ctx, namespace, group, name)
}

// unsubscribe implements source.
func (polled) unsubscribe(context.Context, string, string, string) error { return nil }
