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
	if err := a.preferTLS(ctx, st, catalog.Detail); err != nil {
		a.env.Log.Info("the agent's https port is not used", slog.Any("err", err))
	}
	a.clients.turns.detail = catalog.Detail

	scopes := a.scopes(st, catalog)
	var wg sync.WaitGroup
	// Owned by Run; ends with ctx.
	wg.Go(func() { a.clients.turns.run(ctx, scopes) })
	for _, s := range scopes {
		plugin.Recall(catalog, s.recall)
		// Owned by Run; ends with ctx, after the watches of its services.
		wg.Go(func() { s.run(ctx) })
	}
	wg.Wait()
	a.clients.closeIdle()
	return nil
}

// preferTLS switches to the agent's https port if the configuration names a
// plain one and both belong to the same agent. If there is such a port that
// cannot be used, it returns the reason. It waits until the agent is reachable.
func (a *Adapter) preferTLS(ctx context.Context, st *state, detail func(string)) error {
	const part = "catalog https"
	t := a.clients.target
	if t.scheme == "https" || t.socket != "" || a.config.Mode == modeAddress {
		return nil
	}
	var plain, secure agent
	retry := plugin.Backoff{First: 250 * time.Millisecond, Most: 5 * time.Second}
	for {
		err := a.clients.self(ctx, &plain)
		if _, unreachable := errors.AsType[*url.Error](err); !unreachable || ctx.Err() != nil {
			break // a token that may not read the agent gets no port
		}
		st.set(part, classify(err, t))
		if !plugin.Pause(ctx, retry.Next(), nil) {
			break
		}
	}
	st.set(part, nil)
	if plain.DebugConfig.HTTPSPort <= 0 {
		return nil
	}
	host, _, err := net.SplitHostPort(t.host)
	if err != nil {
		return err
	}
	c := a.config
	c.Address = "https://" + net.JoinHostPort(host, strconv.Itoa(plain.DebugConfig.HTTPSPort)) + t.prefix
	cl, err := newClients(c)
	if err != nil {
		return err
	}
	if err := cl.self(ctx, &secure); err != nil {
		cl.closeIdle()
		return fmt.Errorf("%w; if its certificate is to be trusted, set tls.ca_file and mode: auto", classify(err, cl.target))
	}
	if secure.Config != plain.Config {
		cl.closeIdle()
		return fmt.Errorf("another agent answers at %s", cl.target)
	}
	a.clients.closeIdle()
	a.clients = cl
	a.env.Log.Info("using the agent's https port", slog.String("address", c.Address))
	detail("over " + c.Address + ", which is the same agent's")
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

// scopes returns one scope for each configured datacenter and namespace, and
// for each peer. All are awaited before any starts.
func (a *Adapter) scopes(st *state, catalog plugin.Catalog) []*scope {
	orNone := func(names []string) []string {
		if len(names) == 0 {
			return []string{""}
		}
		return names
	}
	var scopes []*scope
	for _, dc := range orNone(a.config.Datacenters) {
		for _, ns := range orNone(a.config.Namespaces) {
			scopes = append(scopes, newScope(a, st, catalog, len(scopes), dc, ns, ""))
		}
	}
	for _, peer := range a.config.Peers {
		scopes = append(scopes, newScope(a, st, catalog, len(scopes), "", "", peer))
	}
	return scopes
}
