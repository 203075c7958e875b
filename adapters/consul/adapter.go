package consul

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// listEvery is the shortest interval of listings of services in one scope.
	// Every change of the catalog wakes a listing, whose cost to the server
	// grows with the number of services.
	listEvery = time.Second
	// peeringEvery is the longest wait for a new list of imported services,
	// whose changes Consul does not wake queries for.
	peeringEvery = 2 * time.Second
	// doubtfulWait bounds the wait of a query after an answer that the token
	// may not read in full.
	doubtfulWait = 15 * time.Second
)

// Adapter follows one Consul catalog. New makes one.
type Adapter struct {
	config  Config
	env     plugin.Env
	clients *clients // nil in the mode peering
	convert converter
}

// New returns an adapter for a configuration that Validate accepts. It reads
// the files that are named and starts nothing.
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
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	a := &Adapter{config: c, env: env, convert: newConverter(c)}
	if c.Mode == modePeering {
		return a, c.Peering.check()
	}
	var err error
	a.clients, err = newClients(c)
	return a, err
}

// Run follows the catalog until ctx ends, and then returns nil. No failure of
// Consul ends it; queries are retried.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	st := newState(catalog)
	if a.config.Mode == modePeering {
		newPeer(a, st, catalog).run(ctx)
		return nil
	}
	if !a.preferTLS(ctx, st) {
		return nil
	}
	a.clients.turns.detail, a.clients.waits.detail, a.clients.stale.detail = st.detail(detailShared), st.detail(detailWaits), st.detail(detailStale)
	if a.config.Stale {
		a.clients.stale.accept(0)
	}
	a.tellHosts(st)

	all := &scopes{a: a, st: st, catalog: catalog}
	var wg sync.WaitGroup
	// Owned by Run; ends with ctx.
	wg.Go(func() { a.clients.turns.run(ctx, all.number) })
	all.run(ctx)
	wg.Wait()
	a.clients.closeIdle()
	return nil
}

// errNoPort reports an agent that does not state an https port.
var errNoPort = errors.New("the agent states no https port, to this token; one with agent_prefix \"\" read sees it")

// preferTLS switches to the agent's https port where it can be used. If tls
// asks for it, it waits until it can, unless plain HTTP is permitted. It
// returns false once ctx has ended.
func (a *Adapter) preferTLS(ctx context.Context, st *state) bool {
	const part = "catalog https"
	if a.clients.target.scheme == "https" || a.clients.target.socket != "" || a.config.Mode == modeAddress || len(a.config.Addresses) > 0 {
		return true
	}
	required := a.config.TLS != (plugin.TLS{}) && !a.config.Insecure
	retry := plugin.Backoff{First: 250 * time.Millisecond, Most: 5 * time.Second}
	for {
		f := a.findTLS(ctx, st)
		switch {
		case ctx.Err() != nil:
			return false
		case f == nil:
			st.set(part, nil)
			return true
		case f.kind == faultUnreachable && f.outage:
		case required:
			f = &fault{kind: faultUnreachable, err: fmt.Errorf(
				"tls is set and the agent's https port cannot be used, so nothing is asked for: %w; write an https address, or insecure: true to do without", f.err)}
		default:
			if !errors.Is(f.err, errNoPort) {
				a.env.Log.Info("the agent's https port is not used", slog.Any("err", f.err))
			}
			st.set(part, nil)
			return true
		}
		st.set(part, f)
		if !plugin.Pause(ctx, retry.Next(), nil) {
			return false
		}
	}
}

// findTLS switches to the https port of the agent, or returns why not. That the
// agent at address cannot be reached is an outage.
func (a *Adapter) findTLS(ctx context.Context, st *state) *fault {
	var plain, secure agent
	t := a.clients.target
	err := a.clients.self(ctx, &plain)
	if _, unreachable := errors.AsType[*url.Error](err); unreachable {
		return classify(err, t)
	}
	not := func(err error) *fault { return &fault{kind: faultUnreachable, err: err} }
	if plain.DebugConfig.HTTPSPort <= 0 { // or a token that may not read the agent
		return not(errNoPort)
	}
	host, _, err := net.SplitHostPort(t.host)
	if err != nil {
		return not(err)
	}
	c := a.config
	c.Address = "https://" + net.JoinHostPort(host, strconv.Itoa(plain.DebugConfig.HTTPSPort)) + t.prefix
	cl, err := newClients(c)
	if err != nil {
		return not(err)
	}
	if err := cl.self(ctx, &secure); err != nil {
		cl.closeIdle()
		return not(fmt.Errorf("%w; if its certificate is to be trusted, set tls.ca_file and mode: auto", classify(err, cl.target)))
	}
	if secure.Config != plain.Config {
		cl.closeIdle()
		return not(fmt.Errorf("another agent answers at %s", cl.target))
	}
	a.clients.closeIdle()
	a.clients = cl
	a.env.Log.Info("using the agent's https port", slog.String("address", c.Address))
	st.detail(detailAddress)("over " + c.Address + ", which is the same agent's")
	return nil
}

// agent is the identity and ports that an agent reports.
type agent struct {
	Config      struct{ NodeID, NodeName, Datacenter string }
	DebugConfig struct{ HTTPSPort int }
}

// self queries the agent about itself.
func (c *clients) self(ctx context.Context, into *agent) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	s := c.acquire()
	defer c.release(s)
	_, err := s.client.Raw().Query("/v1/agent/self", into, (&api.QueryOptions{}).WithContext(ctx))
	return err
}

// closeIdle closes the connections of every slot. No query may be in progress.
func (c *clients) closeIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.slots {
		s.closeIdle()
	}
	c.slots = nil
}
