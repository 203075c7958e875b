package consul_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/adapters/consul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// peering is how a test follows a server as its peer.
type peering struct {
	client *api.Client
	consul.PeeringConfig
}

// newPeering lets a server export everything to a peer, whom it tells to use
// some addresses instead of its own.
func newPeering(t testing.TB, client *api.Client, addresses ...string) peering {
	t.Helper()
	dir := t.TempDir()
	p := peering{client, consul.PeeringConfig{TokenFile: filepath.Join(dir, "token"), SecretFile: filepath.Join(dir, "secret")}}
	p.export(t, "*")
	p.generate(t, client, addresses...)
	return p
}

func (p peering) export(t testing.TB, name string) {
	t.Helper()
	entry := &api.ExportedServicesConfigEntry{Name: "default", Services: []api.ExportedService{{Name: name, Consumers: []api.ServiceConsumer{{Peer: "mesh"}}}}}
	if _, _, err := p.client.ConfigEntries().Set(entry, nil); err != nil {
		t.Fatal(err)
	}
}

// generate puts a new token in place.
func (p peering) generate(t testing.TB, client *api.Client, addresses ...string) {
	t.Helper()
	res, _, err := client.Peerings().GenerateToken(t.Context(), api.PeeringGenerateTokenRequest{PeerName: "mesh", ServerExternalAddresses: addresses}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.TokenFile, []byte(res.PeeringToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// config makes the adapter follow as the peer.
func (p peering) config(c *consul.Config) {
	c.Address, c.Mode, c.Peering = "", "peering", p.PeeringConfig
}

// TestConsulPeeringLife goes through what happens to an instance that an agent
// registers, as a peer of a real server with access control is told of it.
func TestConsulPeeringLife(t *testing.T) {
	t.Parallel()
	server := startConsul(t, testconsul.Config{ACL: true, Peering: true})
	// Who makes a token needs the right to do so, and the peer none.
	policy, _, err := server.Client.ACL().PolicyCreate(&api.ACLPolicy{Name: "peering", Rules: `peering = "write"`}, nil)
	if err != nil {
		t.Fatal(err)
	}
	operator, _, err := server.Client.ACL().TokenCreate(&api.ACLToken{Policies: []*api.ACLLink{{ID: policy.ID}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	client, err := api.NewClient(&api.Config{Address: server.Addr, Token: operator.SecretID})
	if err != nil {
		t.Fatal(err)
	}
	p := newPeering(t, server.Client)
	p.generate(t, client)
	server.Register(t, testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.0.3", Port: 5432, Critical: true})
	c := follow(t, server, p.config, func(c *consul.Config) { c.NodeMeta, c.TaggedAddress = plugin.Globs{"rack"}, "wan" })
	c.await(t, "that this is experimental", func() bool { return strings.Contains(c.Held.Detail, "experimental") })
	if consul.DefaultConfig.Mode == "peering" {
		t.Error("the mode peering is the default")
	}
	c.awaitSynced(t)
	c.await(t, "what was there", func() bool {
		return len(c.Held.Instances) == 1 && len(c.Held.Instances["db"]) == 1 && c.Held.Instances["db"][0].Health == registry.HealthCritical
	})

	agent := server.Client.Agent()
	reg := &api.AgentServiceRegistration{
		ID: "web-1", Name: "web", Address: "10.1.0.1", Port: 80, Tags: []string{"a"}, Meta: map[string]string{"k": "v"},
		Weights:  &api.AgentWeights{Passing: 10, Warning: 2},
		Locality: &api.Locality{Region: "r", Zone: "z"},
		Check:    &api.AgentServiceCheck{CheckID: "c", TTL: "1h", Status: api.HealthPassing},
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(agent.ServiceRegister(reg))
	c.awaitWeb(t, "registered", one(func(i registry.Instance) bool {
		return i.ID == "n1/web-1" && i.Address == "10.1.0.1" && i.Ports[0] == registry.Port{Number: 80} && slices.Equal(i.Tags, []string{"a"}) &&
			i.Meta["k"] == "v" && *i.Weight == 10 && i.Health == registry.HealthPassing && i.Node == "n1" && i.Locality == registry.Locality{Region: "r", Zone: "z"}
	}))
	check(agent.UpdateTTL("c", "", api.HealthWarning))
	c.awaitWeb(t, "warning", one(func(i registry.Instance) bool { return i.Health == registry.HealthWarning && *i.Weight == 2 }))
	check(agent.UpdateTTL("c", "", api.HealthCritical))
	c.awaitWeb(t, "critical", one(func(i registry.Instance) bool { return i.Health == registry.HealthCritical }))
	check(agent.UpdateTTL("c", "", api.HealthPassing))
	c.awaitWeb(t, "passing again", one(func(i registry.Instance) bool { return i.Health == registry.HealthPassing && *i.Weight == 10 }))
	check(agent.EnableServiceMaintenance("web-1", "test"))
	c.awaitWeb(t, "maintenance", one(func(i registry.Instance) bool { return i.Disabled }))
	check(agent.DisableServiceMaintenance("web-1"))
	c.awaitWeb(t, "maintenance over", one(func(i registry.Instance) bool { return !i.Disabled }))

	reg.Port, reg.Ports = 0, api.ServicePorts{{Name: "admin", Port: 9000}, {Name: "http", Port: 8080, Default: true}}
	reg.TaggedAddresses = map[string]api.ServiceAddress{"wan": {Address: "192.0.2.1", Port: 1}}
	check(agent.ServiceRegister(reg))
	c.awaitWeb(t, "named ports, tagged address", one(func(i registry.Instance) bool {
		return i.Address == "192.0.2.1" && slices.Equal(i.Ports, []registry.Port{{Name: "http", Number: 8080}, {Name: "admin", Number: 9000}})
	}))
	if _, err := server.Client.Catalog().Register(&api.CatalogRegistration{
		Node: "n2", Address: "10.2.0.1", NodeMeta: map[string]string{"rack": "r1"}, Service: &api.AgentService{ID: "web-2", Service: "web", Port: 80},
	}, nil); err != nil {
		t.Fatal(err)
	}
	c.awaitWeb(t, "the node's address and metadata", func(i []registry.Instance) bool {
		return len(i) == 2 && i[1].Address == "10.2.0.1" && i[1].Meta["rack"] == "r1"
	})
	if _, err := server.Client.Catalog().Deregister(&api.CatalogDeregistration{Node: "n2"}, nil); err != nil {
		t.Fatal(err)
	}
	c.awaitWeb(t, "one gone", func(i []registry.Instance) bool { return len(i) == 1 })
	check(agent.ServiceDeregister("web-1"))
	c.await(t, "last instance gone", func() bool { return c.Held.Removes == 1 && len(c.Held.Instances) == 1 })
	check(agent.ServiceRegister(reg))
	c.awaitWeb(t, "and back", one(func(i registry.Instance) bool { return i.ID == "n1/web-1" }))

	// What is no longer exported is gone, but for everything at once.
	p.export(t, "web")
	c.await(t, "one is exported", func() bool { return len(c.Held.Instances) == 1 && len(c.Held.Instances["web"]) == 1 })
	if _, err := server.Client.ConfigEntries().Delete(api.ExportedServices, "default", nil); err != nil {
		t.Fatal(err)
	}
	c.awaitState(t, "exports no service")
	p.export(t, "*")
	c.await(t, "everything is exported", func() bool { return len(c.Held.Instances) == 2 && c.Held.Degraded == "" && c.Held.Removes == 2 })
	if _, err := server.Client.Peerings().Delete(t.Context(), "mesh", nil); err != nil {
		t.Fatal(err)
	}
	c.awaitState(t, "does not know the peering")
	p.generate(t, client)
	c.await(t, "peer again", func() bool { return len(c.Held.Instances) == 2 && c.Held.Degraded == "" && c.Held.Removes == 2 })
}

// TestConsulPeeringSecret shows that a token is exchanged once and what it was
// exchanged for is used from then on, by one adapter at a time.
func TestConsulPeeringSecret(t *testing.T) {
	server := startConsul(t, testconsul.Config{Peering: true})
	p := newPeering(t, server.Client)
	server.Register(t, testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80})
	followed := func(t *testing.T) {
		c := follow(t, server, p.config)
		c.awaitSynced(t)
		c.awaitWeb(t, "web", func(i []registry.Instance) bool { return len(i) == 1 })
	}
	t.Run("where the secret cannot be kept", func(t *testing.T) {
		if _, err := os.Stat("/proc"); err != nil {
			t.Skip(err)
		}
		q := p
		q.SecretFile = "/proc/peering-secret" // a folder that takes no file, whoever asks
		follow(t, server, q.config).awaitState(t, "must be writable")
	})
	t.Run("first", followed)
	t.Run("again", func(t *testing.T) {
		followed(t)
		follow(t, server, p.config).awaitState(t, "a peering of its own")
	})
	t.Run("without the secret", func(t *testing.T) {
		if err := os.Remove(p.SecretFile); err != nil {
			t.Fatal(err)
		}
		c := follow(t, server, p.config)
		c.awaitState(t, "new token")
		p.generate(t, server.Client)
		c.awaitSynced(t)
		c.awaitState(t, "")
	})
	t.Run("with another token", func(t *testing.T) {
		p.generate(t, server.Client)
		followed(t)
	})
	t.Run("with a secret that was damaged", func(t *testing.T) {
		if err := os.WriteFile(p.SecretFile, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		c := follow(t, server, p.config)
		c.awaitState(t, "not what the adapter wrote")
		if err := os.Remove(p.SecretFile); err != nil {
			t.Fatal(err)
		}
		p.generate(t, server.Client)
		c.awaitSynced(t)
	})
	if info, err := os.Stat(p.SecretFile); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("secret file: %v, %v", info.Mode(), err)
	}
}

// TestConsulPeeringOutages cuts the stream, restarts the server with and
// without its data, and looks for removals that nobody asked for.
func TestConsulPeeringOutages(t *testing.T) {
	t.Parallel()
	server := startConsul(t, testconsul.Config{Peering: true, Persistent: true})
	relay := newRelay(t, server.PeeringAddr())
	p := newPeering(t, server.Client, relay.Addr().String())
	web := func(n int, of ...testconsul.Instance) {
		for i := range n {
			of = append(of, testconsul.Instance{Service: "web", ID: "web-" + string(rune('a'+i)), Address: "10.1.0.1", Port: 80 + i})
		}
		server.Register(t, of...)
	}
	web(3, testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.0.3", Port: 5432})
	c := follow(t, server, p.config, func(c *consul.Config) { c.RemoveGrace = plugin.Duration(3 * 1e9) })
	c.awaitSynced(t)

	// What goes while the stream is cut is kept for the grace period, and what
	// comes is there at once.
	relay.refuse(true)
	relay.cut()
	c.awaitState(t, "cannot be reached")
	server.Deregister(t, "web-a")
	web(1, testconsul.Instance{Service: "new", ID: "new-1", Address: "10.1.0.4", Port: 1})
	server.Deregister(t, "web-a")
	relay.refuse(false)
	c.await(t, "kept", func() bool { return len(c.Held.Instances["new"]) == 1 && len(c.Held.Instances["web"]) == 3 })
	c.awaitState(t, "remove_grace")
	c.await(t, "gone after the grace period", func() bool { return len(c.Held.Instances["web"]) == 2 && c.Held.Degraded == "" })

	// A cut alone is no outage.
	before := 0
	c.Look(func(h *plugintest.Held) { before = len(h.Reasons) })
	relay.cut()
	server.Register(t, testconsul.Instance{Service: "web", ID: "web-z", Address: "10.1.0.9", Port: 80})
	c.awaitWeb(t, "after a cut", func(i []registry.Instance) bool { return len(i) == 3 })
	c.await(t, "no outage", func() bool { return len(c.Held.Reasons) == before && c.Held.Removes == 0 })

	server.Kill()
	c.awaitState(t, "cannot be reached")
	server.Restart(t)
	server.Register(t, testconsul.Instance{Service: "web", ID: "web-y", Address: "10.1.0.8", Port: 80})
	c.awaitWeb(t, "after a restart", func(i []registry.Instance) bool { return len(i) == 4 })
	c.await(t, "nothing removed", func() bool { return len(c.Held.Instances) == 3 && c.Held.Removes == 0 })

	// A server without its data knows no peering. With a new one, what it lacks
	// goes after the grace period.
	server.RestartEmpty(t)
	c.awaitState(t, "consul") // its authority is another one
	p.export(t, "*")
	server.Register(t, testconsul.Instance{Service: "web", ID: "web-x", Address: "10.1.0.7", Port: 80})
	p.generate(t, server.Client, relay.Addr().String())
	c.awaitWeb(t, "after a restart without data", func(i []registry.Instance) bool { return len(i) == 5 })
	c.await(t, "kept for now", func() bool { return len(c.Held.Instances) == 3 && c.Held.Removes == 0 })
	c.await(t, "gone after the grace period", func() bool {
		return len(c.Held.Instances) == 1 && len(c.Held.Instances["web"]) == 1 && c.Held.Degraded == ""
	})
}
