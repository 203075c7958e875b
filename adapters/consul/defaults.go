package consul

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// protocolKey is the key of a service's metadata that holds the protocol of its
// service-defaults entry.
const protocolKey = "protocol"

// defaultsPart ends the name of the part that follows service-defaults.
const defaultsPart = " service-defaults"

// defaultsTries is how many server errors in a row of one kind of facts the
// watches wait for before they do without.
const defaultsTries = 5

// errNotOffered is the end of a sensor whose endpoint the server does not have.
var errNotOffered = errors.New("the server does not have it")

// facts is what a scope states of services besides their instances. Watches
// publish nothing before it was read once, or a restart of the plugin would
// change every protocol twice.
type facts struct {
	// ready is closed once the facts were read or cannot be read.
	ready   chan struct{}
	missing int // guarded by scope.mu, like the rest: kinds not read yet
	// protocols are those of service-defaults entries, by service in lower
	// case, as Consul compares these names; grace retains what is missing after
	// an outage.
	protocols map[string]string
	grace     *plugin.Grace
	// trustDomain is that of Connect, only if sidecars are published.
	trustDomain string
}

// learned records that one kind of facts was read.
func (s *scope) learned() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.facts.missing--; s.facts.missing == 0 {
		close(s.facts.ready)
	}
}

// followFacts follows the facts until ctx ends. The queries are owned by the
// scope, which waits for them.
func (s *scope) followFacts(ctx context.Context) {
	if s.peer != "" {
		return // the entries are those of the peer, which does not state them
	}
	s.fact(ctx, s.id+defaultsPart, false, func(c *api.Client, q *api.QueryOptions) (any, *api.QueryMeta, error) {
		var entries []struct{ Name, Protocol string }
		meta, err := c.Raw().Query("/v1/config/service-defaults", &entries, q)
		if err != nil {
			return nil, meta, err
		}
		protocols := map[string]string{}
		for _, e := range entries {
			if e.Protocol != "" {
				protocols[strings.ToLower(e.Name)] = e.Protocol
			}
		}
		return defaults{protocols, meta.ResultsFilteredByACLs && !s.config.AcceptFiltered}, meta, nil
	}, func(answer any) {
		s.setProtocols(answer.(defaults)) //nolint:forcetypeassert // as made above
	})
	if s.sidecars == nil {
		return
	}
	s.fact(ctx, s.id+" connect", true, func(c *api.Client, q *api.QueryOptions) (any, *api.QueryMeta, error) {
		roots, meta, err := c.Connect().CARoots(q)
		switch {
		case err != nil && strings.Contains(err.Error(), "Connect must be enabled"):
			err = &fault{kind: faultRequest, err: errors.New("consul's Connect is not enabled, so no service has a sidecar; enable it on the servers, or remove connect")}
		case err == nil && roots.TrustDomain == "":
			err = &fault{kind: faultServer, err: errors.New("consul states no trust domain yet")}
		}
		return roots, meta, err
	}, func(answer any) {
		domain := answer.(*api.CARootList).TrustDomain //nolint:forcetypeassert // as made above
		s.mu.Lock()
		news := s.facts.trustDomain != domain
		s.facts.trustDomain = domain
		s.mu.Unlock()
		if news {
			s.sidecars.tellAll()
		}
	})
}

// defaults are the protocols of an answer, and whether Consul left out others.
type defaults struct {
	protocols map[string]string
	filtered  bool
}

// fact follows one kind of facts. Unless it is required, watches do without it
// if Consul refuses it.
func (s *scope) fact(ctx context.Context, part string, required bool, call sensor, tell func(answer any)) {
	known, tries := false, 0 // of the goroutine below
	know := func() {
		if !known {
			known = true
			s.learned()
		}
	}
	s.wg.Go(func() {
		s.sense(ctx, part, nil, listEvery, func(c *api.Client, q *api.QueryOptions) (any, *api.QueryMeta, error) {
			answer, meta, err := call(c, q)
			if err == nil || required {
				return answer, meta, err
			}
			if status, ok := errors.AsType[api.StatusError](err); ok && status.Code == http.StatusNotFound {
				know()
				return nil, meta, errNotOffered // Consul before 1.5
			}
			f := classify(err, s.clients.at())
			if tries++; f.kind != faultUnreachable && (!f.outage || tries >= defaultsTries) {
				know()
			}
			return answer, meta, err
		}, func(answer any, _ bool) {
			tries = 0
			tell(answer)
			know()
		})
	})
}

// protocols is the catalog of service-defaults entries: services by the name of
// the entry, with its protocol as metadata.
type protocols struct {
	plugin.Catalog // only Set and Remove are called

	s *scope
}

// Set implements [plugin.Catalog].
func (p protocols) Set(entry registry.Service, _ []registry.Instance) {
	p.s.setProtocol(entry.Key.Name, entry.Meta[protocolKey])
}

// Remove implements [plugin.Catalog].
func (p protocols) Remove(key registry.Key) { p.s.setProtocol(key.Name, "") }

// setProtocols applies an answer. What it lacks is retained as instances are.
func (s *scope) setProtocols(d defaults) {
	g := s.facts.grace
	g.Back()
	for name, protocol := range d.protocols {
		g.Set(registry.Service{Key: registry.Key{Name: name}, Meta: map[string]string{protocolKey: protocol}}, nil)
	}
	if d.filtered {
		g.Doubt()
		return
	}
	g.RemoveOthers(func(key registry.Key) bool { return d.protocols[key.Name] != "" })
}

// setProtocol applies the protocol of a name in lower case; "" is none.
func (s *scope) setProtocol(name, protocol string) {
	s.mu.Lock()
	s.facts.protocols[name] = protocol
	if s.sidecars == nil {
		for _, w := range s.named[name] {
			w.begin()
		}
	}
	s.mu.Unlock()
	if s.sidecars != nil {
		s.sidecars.tell(name)
	}
}

// protocolOf returns the protocol that Consul states of a service, or "".
func (s *scope) protocolOf(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.facts.protocols[strings.ToLower(name)]
}
