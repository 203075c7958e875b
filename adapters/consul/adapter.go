package consul

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// listEvery is the shortest time between two listings of services in one scope. A listing wakes for every change of the catalog and
	// costs the server time that grows with the number of services.
	listEvery = time.Second
	// doubtfulWait is how long a query waits after an answer that the token did not see whole.
	doubtfulWait = 15 * time.Second
)

// Adapter follows one Consul catalog. New makes one.
type Adapter struct {
	config  Config
	env     plugin.Env
	clients *clients
	convert converter
}

// New returns an adapter for a configuration that Validate accepts. It reads the files that are named and starts nothing.
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
	cl, err := newClients(c)
	if err != nil {
		return nil, err
	}
	if env.Log == nil {
		env.Log = slog.New(slog.DiscardHandler)
	}
	return &Adapter{config: c, env: env, clients: cl, convert: newConverter(c)}, nil
}

// Run follows the catalog until ctx ends and returns nil then. It has no other end: whatever Consul does is a matter for trying again.
func (a *Adapter) Run(ctx context.Context, catalog plugin.Catalog) error {
	st := newState(catalog)
	if d, ok := catalog.(plugin.Detailer); ok {
		a.clients.turns.crowded = func(crowded bool) { d.Detail(map[bool]string{true: inTurns}[crowded]) }
	}

	scopes := a.scopes(st, catalog)
	var wg sync.WaitGroup
	for _, s := range scopes {
		// Owned by Run; ends with ctx, after the watches of its services.
		wg.Go(func() { s.run(ctx) })
	}
	wg.Wait()
	a.clients.closeIdle()
	return nil
}

// inTurns is how a registry with more services than connections is followed.
const inTurns = "more services than max_connections: those that changed last are followed at once, the others within seconds; " +
	"an https address has room for all of them"

// closeIdle closes the connections of every slot. Nothing may be under way.
func (c *clients) closeIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.slots {
		s.closeIdle()
	}
	c.slots = nil
}

// scopes returns one scope for each datacenter and namespace that is configured. All of them are expected before any begins.
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
			scopes = append(scopes, newScope(a, st, catalog, dc, ns))
		}
	}
	return scopes
}
