package consul_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/adapters/consul"
	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnginx"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// within bounds every wait of these tests for something that takes a moment at
// most.
const within = 30 * time.Second

// catalog is a catalog that is waited for.
type catalog struct {
	*plugintest.Catalog

	mu sync.Mutex // guards everything below
	// waiting is for a change of one service: what it waits for, and what is
	// closed then.
	waiting map[string]waiter
}

// waiter waits for a change of one service.
type waiter struct {
	shows   func([]registry.Instance) bool
	arrived chan time.Time // has room for one
}

// told tells who waits for the service.
func (c *catalog) told(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w, ok := c.waiting[name]
	if !ok {
		return
	}
	c.Look(func(h *plugintest.Held) { ok = w.shows(h.Instances[name]) })
	if ok {
		delete(c.waiting, name)
		w.arrived <- time.Now()
	}
}

// when returns when a change of a service has arrived.
func (c *catalog) when(t testing.TB, name string, shows func([]registry.Instance) bool) time.Time {
	w := waiter{shows, make(chan time.Time, 1)}
	c.mu.Lock()
	c.waiting[name] = w
	c.mu.Unlock()
	c.told(name)
	select {
	case at := <-w.arrived:
		return at
	case <-time.After(2 * within):
		t.Errorf("a change of %s has not arrived after %v", name, 2*within)
		return time.Now()
	}
}

// Set implements plugin.Catalog.
func (c *catalog) Set(svc registry.Service, instances []registry.Instance) {
	c.Catalog.Set(svc, instances)
	c.told(svc.Key.String())
}

// await waits until cond, which may read Held, holds.
func (c *catalog) await(t testing.TB, what string, cond func() bool) {
	t.Helper()
	c.Await(t, within, what, func(*plugintest.Held) bool { return cond() })
}

// awaitWeb waits until cond holds of web's instances.
func (c *catalog) awaitWeb(t testing.TB, what string, cond func([]registry.Instance) bool) {
	t.Helper()
	c.await(t, what, func() bool { return cond(c.Held.Instances["web"]) })
}

func (c *catalog) awaitSynced(t testing.TB) {
	t.Helper()
	c.AwaitSynced(t, within)
}

func (c *catalog) awaitState(t testing.TB, part string) {
	t.Helper()
	c.await(t, fmt.Sprintf("degraded with %q", part), func() bool {
		return part == "" && c.Held.Degraded == "" || part != "" && strings.Contains(c.Held.Degraded, part)
	})
}

// follow runs the adapter against the server for the rest of the test.
func follow(t testing.TB, server *testconsul.Server, change ...func(*consul.Config)) *catalog {
	t.Helper()
	config := consul.DefaultConfig
	config.Address = server.Addr
	for _, fn := range change {
		fn(&config)
	}
	adapter, err := consul.New(config, plugin.Env{Registry: "test"})
	if err != nil {
		t.Fatal(err)
	}
	c := &catalog{Catalog: plugintest.NewCatalog(), waiting: map[string]waiter{}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- adapter.Run(ctx, c) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return c
}

// startConsul starts a server, unless -short is given.
func startConsul(t testing.TB, config testconsul.Config) *testconsul.Server {
	t.Helper()
	testenv.SkipIfShort(t)
	return testconsul.Start(t, config)
}

func one(cond func(registry.Instance) bool) func([]registry.Instance) bool {
	return func(i []registry.Instance) bool { return len(i) == 1 && cond(i[0]) }
}

// TestConsulLife goes through what happens to an instance that an agent
// registers, on a real server.
func TestConsulLife(t *testing.T) {
	t.Parallel()
	server := startConsul(t, testconsul.Config{})
	c := follow(t, server)
	c.awaitSynced(t)
	agent := server.Client.Agent()
	reg := &api.AgentServiceRegistration{
		ID: "web-1", Name: "web", Address: "10.1.0.1", Port: 80, Tags: []string{"a"}, Meta: map[string]string{"k": "v"},
		Weights:  &api.AgentWeights{Passing: 10, Warning: 2},
		Locality: &api.Locality{Region: "r", Zone: "z"},
		Check:    &api.AgentServiceCheck{CheckID: "c", TTL: "1h", Status: api.HealthPassing},
	}
	register := func() {
		t.Helper()
		if err := agent.ServiceRegister(reg); err != nil {
			t.Fatal(err)
		}
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	register()
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
	c.awaitWeb(t, "maintenance", one(func(i registry.Instance) bool { return i.Disabled && i.Health == registry.HealthPassing }))
	check(agent.DisableServiceMaintenance("web-1"))
	c.awaitWeb(t, "maintenance over", one(func(i registry.Instance) bool { return !i.Disabled }))
	check(agent.EnableNodeMaintenance("test"))
	c.awaitWeb(t, "node maintenance", one(func(i registry.Instance) bool { return i.Disabled }))
	check(agent.DisableNodeMaintenance())
	c.awaitWeb(t, "node maintenance over", one(func(i registry.Instance) bool { return !i.Disabled }))

	reg.Port, reg.Tags, reg.Meta, reg.Weights, reg.Locality = 81, []string{"b"}, map[string]string{"k": "w"}, &api.AgentWeights{Passing: 5, Warning: 1}, nil
	register()
	c.awaitWeb(t, "changed", one(func(i registry.Instance) bool {
		return i.Ports[0].Number == 81 && slices.Equal(i.Tags, []string{"b"}) && i.Meta["k"] == "w" && *i.Weight == 5
	}))
	reg.Port, reg.Ports = 0, api.ServicePorts{{Name: "admin", Port: 9000}, {Name: "http", Port: 8080, Default: true}}
	register()
	c.awaitWeb(t, "named ports", one(func(i registry.Instance) bool {
		return slices.Equal(i.Ports, []registry.Port{{Name: "http", Number: 8080}, {Name: "admin", Number: 9000}})
	}))

	check(agent.ServiceDeregister("web-1"))
	c.await(t, "last instance gone", func() bool { return c.Held.Removes == 1 && len(c.Held.Instances) == 0 })
	register()
	c.awaitWeb(t, "and back", one(func(i registry.Instance) bool { return i.ID == "n1/web-1" }))
	c.awaitState(t, "")
}

// TestConsulACL shows what each kind of token leads to on a real server with
// access control.
func TestConsulACL(t *testing.T) {
	server := startConsul(t, testconsul.Config{ACL: true})
	server.Register(t,
		testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80},
		testconsul.Instance{Service: "web", ID: "web-2", Address: "10.1.0.2", Port: 80},
		testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.0.3", Port: 5432})
	policy := func(name, rules string) (id string) {
		t.Helper()
		p, _, err := server.Client.ACL().PolicyCreate(&api.ACLPolicy{Name: name, Rules: rules}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return p.ID
	}
	token := func(policies ...string) *api.ACLToken {
		t.Helper()
		tok := &api.ACLToken{}
		for _, p := range policies {
			tok.Policies = append(tok.Policies, &api.ACLLink{ID: p})
		}
		tok, _, err := server.Client.ACL().TokenCreate(tok, nil)
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	services := policy("services", `service_prefix "" { policy = "read" }`)
	nodes := policy("nodes", `node_prefix "" { policy = "read" }`)
	web := policy("web", `service "web" { policy = "read" }`)
	as := func(secret string) func(*consul.Config) {
		return func(c *consul.Config) { c.Token = plugin.Secret(secret) }
	}

	t.Run("unknown", func(t *testing.T) {
		c := follow(t, server, as("00000000-1111-2222-3333-444444444444"))
		c.awaitState(t, "refuses the token")
		c.await(t, "not synced", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 })
	})
	t.Run("without node read", func(t *testing.T) {
		c := follow(t, server, as(token(services).SecretID))
		c.awaitState(t, `node_prefix "" read`)
		c.await(t, "not synced", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 })
	})
	t.Run("anonymous", func(t *testing.T) {
		c := follow(t, server)
		c.awaitState(t, "no service at all")
		c.await(t, "not synced", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 })
	})
	t.Run("a part", func(t *testing.T) {
		c := follow(t, server, as(token(web, nodes).SecretID))
		c.awaitState(t, "accept_filtered")
		c.awaitWeb(t, "what it may see", func(i []registry.Instance) bool { return len(i) == 2 })
		c.await(t, "not synced", func() bool { return !c.Held.Synced })
	})
	t.Run("a part that is all that is wanted", func(t *testing.T) {
		c := follow(t, server, as(token(web, nodes).SecretID), func(c *consul.Config) { c.AcceptFiltered = true })
		c.awaitSynced(t)
		c.await(t, "web only", func() bool {
			return len(c.Held.Instances) == 1 && len(c.Held.Instances["web"]) == 2 && c.Held.Degraded == ""
		})
	})
	t.Run("loses and regains its rights", func(t *testing.T) {
		tok, file := token(services, nodes), filepath.Join(t.TempDir(), "token")
		write := func(tok *api.ACLToken) {
			t.Helper()
			if err := os.WriteFile(file, []byte(tok.SecretID+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write(tok)
		c := follow(t, server, func(c *consul.Config) { c.TokenFile = file })
		c.awaitSynced(t)
		update := func(policies ...string) {
			t.Helper()
			tok.Policies = nil
			for _, p := range policies {
				tok.Policies = append(tok.Policies, &api.ACLLink{ID: p})
			}
			if _, _, err := server.Client.ACL().TokenUpdate(tok, nil); err != nil {
				t.Fatal(err)
			}
		}
		update(services)
		// A change of db wakes db's watch, and of the catalog the listing: both
		// see nothing from now on.
		server.Register(t, testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.0.9", Port: 5432})
		c.awaitState(t, `node_prefix "" read`)
		c.await(t, "everything kept", func() bool {
			return len(c.Held.Instances) == 2 && len(c.Held.Instances["web"]) == 2 && c.Held.Removes == 0
		})
		update(services, nodes)
		c.await(t, "the change", func() bool {
			return len(c.Held.Instances["db"]) == 1 && c.Held.Instances["db"][0].Address == "10.1.0.9"
		})
		c.awaitState(t, "")
		// Deleted altogether.
		if _, err := server.Client.ACL().TokenDelete(tok.AccessorID, nil); err != nil {
			t.Fatal(err)
		}
		server.Register(t, testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.0.3", Port: 5432})
		c.awaitState(t, "refuses the token")
		c.await(t, "everything kept", func() bool {
			return len(c.Held.Instances) == 2 && len(c.Held.Instances["web"]) == 2 && c.Held.Removes == 0
		})
		// Another one takes its place.
		write(token(services, nodes))
		c.awaitState(t, "")
		c.await(t, "the change", func() bool { return c.Held.Instances["db"][0].Address == "10.1.0.3" })
	})
}

// TestConsulKilled shows a development server killed and started again, which
// then holds nothing: what is known stays for the grace period, and what
// registers again within it never leaves.
func TestConsulKilled(t *testing.T) {
	t.Parallel()
	server := startConsul(t, testconsul.Config{})
	web := testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80}
	db := testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.0.2", Port: 80}
	server.Register(t, web, db)
	c := follow(t, server, func(c *consul.Config) { c.RemoveGrace = plugin.Duration(8 * time.Second) })
	c.awaitSynced(t)
	server.Kill()
	c.awaitState(t, "cannot be reached")
	server.Restart(t)
	c.awaitState(t, "remove_grace")
	c.await(t, "everything kept", func() bool { return len(c.Held.Instances) == 2 && c.Held.Removes == 0 })
	server.Register(t, web)
	c.await(t, "what did not return is removed", func() bool { return len(c.Held.Instances) == 1 && c.Held.Removes == 1 })
	c.awaitWeb(t, "what returned is there", func(i []registry.Instance) bool { return len(i) == 1 })
	c.awaitState(t, "")
}

// TestConsulKeepsItsCatalog shows a server with a disk killed and started
// again: nothing changes but the state, there and back.
func TestConsulKeepsItsCatalog(t *testing.T) {
	t.Parallel()
	server := startConsul(t, testconsul.Config{Persistent: true})
	server.Register(t, testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80})
	c := follow(t, server)
	c.awaitSynced(t)
	server.Kill()
	c.awaitState(t, "cannot be reached")
	server.Restart(t)
	c.awaitState(t, "")
	c.await(t, "nothing touched", func() bool { return c.Held.Sets == 1 && c.Held.Removes == 0 })
	server.Register(t, testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 81})
	c.awaitWeb(t, "followed again", one(func(i registry.Instance) bool { return i.Ports[0].Number == 81 }))
}

// relay forwards connections to a server, and counts them.
type relay struct {
	net.Listener
	target  string
	running sync.WaitGroup

	mu      sync.Mutex // guards everything below
	open    int        // connections that the client has not closed
	most    int        // the most of them at a time
	refuses bool
	conns   map[net.Conn]bool
}

// refuse makes the relay close new connections at once, or no longer.
func (r *relay) refuse(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuses = yes
}

// cut closes the connections that there are.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		_ = c.Close()
	}
}

// peak returns how many connections there were at most.
func (r *relay) peak() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.most
}

// newRelay starts a relay for the rest of the test.
func newRelay(t testing.TB, target string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{Listener: l, target: target, conns: map[net.Conn]bool{}}
	// Owned by the test; ends when the listener is closed.
	r.running.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			// Owned by the test; ends with either side of the connection, which
			// both have ended before the relay does.
			r.running.Go(func() { r.forward(client) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		r.running.Wait()
	})
	return r
}

func (r *relay) forward(client net.Conn) {
	defer client.Close()
	r.mu.Lock()
	refuses := r.refuses
	r.conns[client] = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.conns, client)
	}()
	if refuses {
		return
	}
	server, err := net.Dial("tcp", r.target)
	if err != nil {
		return
	}
	defer server.Close()
	r.count(1)
	r.running.Go(func() {
		_, _ = io.Copy(client, server)
		_ = client.Close()
	})
	_, _ = io.Copy(server, client)
	r.count(-1)
}

func (r *relay) count(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open += n
	r.most = max(r.most, r.open)
}

// TestConsulTurns shows plain HTTP with more services than connections, at
// Consul's own limits: all are followed, there are never more connections than
// configured, and other programs on the machine go on registering.
func TestConsulTurns(t *testing.T) {
	const n = 400
	server := startConsul(t, testconsul.Config{})
	instances := make([]testconsul.Instance, n)
	for i := range instances {
		id := strconv.Itoa(i)
		instances[i] = testconsul.Instance{Service: "svc" + id, ID: id, Address: "10.1.0.1", Port: 80}
	}
	// set registers the services of every step-th number again, with a port and
	// a check.
	set := func(step, port int, critical bool) {
		t.Helper()
		var some []testconsul.Instance
		for i := 0; i < n; i += step {
			instances[i].Port, instances[i].Critical = port, critical
			some = append(some, instances[i])
		}
		server.Register(t, some...)
	}
	set(1, 80, false)

	// The other program makes a connection for each of its requests, without a
	// pause.
	other, err := api.NewClient(&api.Config{Address: server.Addr, Transport: &http.Transport{DisableKeepAlives: true}})
	if err != nil {
		t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	registered := 0
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := other.Agent().ServiceRegister(&api.AgentServiceRegistration{Name: "other", Address: "10.1.0.2", Port: 1 + registered%1000}); err != nil {
				t.Errorf("another program cannot register: %v", err)
				return
			}
			registered++
		}
	}()

	relay := newRelay(t, server.Addr)
	c := follow(t, server, func(c *consul.Config) { c.Address = relay.Addr().String() })
	all := func(cond func(registry.Instance) bool) func() bool {
		return func() bool {
			for i := range n {
				if got := c.Held.Instances["svc"+strconv.Itoa(i)]; len(got) != 1 || !cond(got[0]) {
					return false
				}
			}
			return true
		}
	}
	c.awaitSynced(t)
	c.await(t, "all services", all(func(i registry.Instance) bool { return i.Ports[0].Number == 80 }))
	set(1, 81, false)
	c.await(t, "a change of each service", all(func(i registry.Instance) bool { return i.Ports[0].Number == 81 }))
	set(1, 81, true)
	c.await(t, "a failed check of each service", all(func(i registry.Instance) bool { return i.Health == registry.HealthCritical }))
	if _, err := server.Client.Catalog().Register(&api.CatalogRegistration{
		Node: "external", Address: "127.0.0.1", SkipNodeUpdate: true,
		Service: &api.AgentService{ID: "399", Service: "svc399", Port: 82},
	}, nil); err != nil {
		t.Fatal(err)
	}
	c.await(t, "one more change", func() bool { return c.Held.Instances["svc399"][0].Ports[0].Number == 82 })
	server.Deregister(t, "398")
	c.await(t, "one service gone", func() bool { return len(c.Held.Instances["svc398"]) == 0 })

	close(stop)
	<-stopped
	most := relay.peak()
	t.Logf("%d connections at most; another program registered %d times", most, registered)
	if most > 128 {
		t.Errorf("%d connections at a time, want 128 at most", most)
	}
	if registered == 0 {
		t.Error("another program registered nothing")
	}
	c.awaitState(t, "")
	c.await(t, "nothing else removed", func() bool { return c.Held.Removes == 1 })
}

// TestConsulPrefersHTTPS shows a plain address of an agent that has an https
// port: it is used if its certificate is trusted.
func TestConsulPrefersHTTPS(t *testing.T) {
	cert := testcert.New(t, "localhost")
	server := startConsul(t, testconsul.Config{CertFile: cert.Cert, KeyFile: cert.Key})
	_, port, _ := strings.Cut(server.HTTPSAddr, ":")
	server.Register(t, testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80})
	for name, test := range map[string]struct {
		change func(*consul.Config)
		used   bool
	}{
		"trusted": {func(c *consul.Config) {
			c.Mode, c.TLS = "auto", plugin.TLS{CAFile: cert.Cert, ServerName: "localhost"}
		}, true},
		"not trusted, permitted": {func(c *consul.Config) {
			c.Mode, c.TLS, c.Insecure = "auto", plugin.TLS{CAFile: testcert.New(t, "localhost").Cert}, true
		}, false},
		"not trusted": {func(*consul.Config) {}, false},
		"not wanted":  {func(c *consul.Config) { c.Mode = "address" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := follow(t, server, test.change)
			c.awaitSynced(t)
			c.awaitWeb(t, "web", func(all []registry.Instance) bool { return len(all) == 1 })
			c.await(t, "the detail", func() bool { return strings.Contains(c.Held.Detail, port) == test.used })
			c.awaitState(t, "")
		})
	}
	t.Run("not trusted, and not permitted", func(t *testing.T) {
		c := follow(t, server, func(c *consul.Config) {
			c.Mode, c.TLS = "auto", plugin.TLS{CAFile: testcert.New(t, "localhost").Cert, ServerName: "localhost"}
		})
		c.awaitState(t, "insecure: true")
		c.await(t, "nothing", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 })
	})
}

// TestConsulConnectionLimit shows a server that takes fewer connections than
// are configured: the first listing is complete, the state names the cures, and
// then all services are followed over fewer connections.
func TestConsulConnectionLimit(t *testing.T) {
	const n = 120
	server := startConsul(t, testconsul.Config{ExtraHCL: "limits { http_max_conns_per_client = 80 }"})
	instances := make([]testconsul.Instance, n)
	for i := range instances {
		id := strconv.Itoa(i)
		instances[i] = testconsul.Instance{Service: "svc" + id, ID: id, Address: "10.1.0.1", Port: 80}
	}
	server.Register(t, instances...)
	c := follow(t, server)
	c.awaitSynced(t)
	c.await(t, "the limit and its cures", func() bool {
		reasons := strings.Join(c.Held.Reasons, "\n")
		return strings.Contains(reasons, "https") && strings.Contains(reasons, "max_connections") && strings.Contains(reasons, "limits.http_max_conns_per_client")
	})
	for i := range instances {
		instances[i].Port = 81
	}
	server.Register(t, instances...)
	c.await(t, "a change of each service", func() bool {
		for i := range n {
			if got := c.Held.Instances["svc"+strconv.Itoa(i)]; len(got) != 1 || got[0].Ports[0].Number != 81 {
				return false
			}
		}
		return true
	})
	c.awaitState(t, "")
	c.await(t, "nothing removed", func() bool { return c.Held.Removes == 0 })
}

// TestConsulFilter shows a filter expression in Consul's language, a wrong one,
// and a service that is there and not selected.
func TestConsulFilter(t *testing.T) {
	server := startConsul(t, testconsul.Config{})
	server.Register(t,
		testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80, Tags: []string{"mesh"}},
		testconsul.Instance{Service: "web", ID: "web-2", Address: "10.1.0.2", Port: 80},
		testconsul.Instance{Service: "db", ID: "db-1", Address: "10.1.0.3", Port: 5432})
	t.Run("right", func(t *testing.T) {
		c := follow(t, server, func(c *consul.Config) { c.Filter = `"mesh" in Service.Tags` })
		c.awaitSynced(t)
		c.await(t, "web-1 only", func() bool {
			return len(c.Held.Instances) == 1 && len(c.Held.Instances["web"]) == 1 && c.Held.Instances["web"][0].ID == "external/web-1"
		})
	})
	t.Run("wrong", func(t *testing.T) {
		c := follow(t, server, func(c *consul.Config) { c.Filter = `Service.Tag =` })
		c.awaitState(t, "does not accept filter")
		c.await(t, "not synced", func() bool { return !c.Held.Synced })
	})
}

// TestConsulElsewhere shows that a server without namespaces, or without the
// datacenter, says so.
func TestConsulElsewhere(t *testing.T) {
	server := startConsul(t, testconsul.Config{})
	t.Run("namespace", func(t *testing.T) {
		c := follow(t, server, func(c *consul.Config) { c.Namespaces = []string{"team"} })
		c.awaitState(t, "namespaces")
		c.await(t, "not synced", func() bool { return !c.Held.Synced })
	})
	t.Run("all namespaces", func(t *testing.T) {
		c := follow(t, server, func(c *consul.Config) { c.Namespaces = []string{"*"} })
		c.awaitState(t, "only Consul Enterprise has")
		c.await(t, "not synced", func() bool { return !c.Held.Synced })
	})
	t.Run("datacenter", func(t *testing.T) {
		c := follow(t, server, func(c *consul.Config) { c.Datacenters = []string{"dc1", "dc9"} })
		c.awaitState(t, "dc9")
		c.await(t, "not synced", func() bool { return !c.Held.Synced })
	})
}

// TestConsulMany shows a thousand services of ten instances, and that one
// change among them is one Set with what changed.
func TestConsulMany(t *testing.T) {
	c, change := many(t, 1000, 10)
	sets := func() (n int) { c.Look(func(h *plugintest.Held) { n = h.Sets }); return n }
	if n := sets(); n != 1000 {
		t.Errorf("%d sets for the first listing, want one for each service", n)
	}
	change(9999)
	c.await(t, "the change", func() bool { return c.Held.Instances["svc500"][0].Ports[0].Number == 9999 })
	change(9998)
	c.await(t, "the second change", func() bool { return c.Held.Instances["svc500"][0].Ports[0].Number == 9998 })
	if n := sets(); n != 1002 {
		t.Errorf("%d sets for two changes", n-1000)
	}
}

// many starts a server with n services of m instances and follows it until
// synced. change sets the port of the first instance of svc500.
func many(t testing.TB, n, m int) (c *catalog, change func(port int)) {
	server := startConsul(t, testconsul.Config{})
	// One node for each hundred services: a transaction takes Consul a time
	// that grows with what its node has.
	op := func(s, i, port int) *api.TxnOp {
		name := "svc" + strconv.Itoa(s)
		return &api.TxnOp{Service: &api.ServiceTxnOp{Verb: api.ServiceSet, Node: "node" + strconv.Itoa(s/100), Service: api.AgentService{
			ID: fmt.Sprintf("%s-%d", name, i), Service: name, Address: fmt.Sprintf("10.%d.%d.%d", s/256, s%256, i), Port: port,
		}}}
	}
	var ops api.TxnOps
	for node := range n/100 + 1 {
		ops = append(ops, &api.TxnOp{Node: &api.NodeTxnOp{Verb: api.NodeSet, Node: api.Node{
			ID: fmt.Sprintf("5f1e8a4c-6d0b-4b7e-9c57-%012d", node), Node: "node" + strconv.Itoa(node), Address: "127.0.0.1",
		}}})
	}
	for s := range n {
		for i := range m {
			ops = append(ops, op(s, i, 80))
		}
	}
	send := func(ops api.TxnOps) {
		t.Helper()
		if ok, answer, _, err := server.Client.Txn().Txn(ops, nil); err != nil || !ok {
			t.Fatalf("transaction: %v, %+v", err, answer)
		}
	}
	start := time.Now()
	for part := range slices.Chunk(ops, 128) {
		send(part)
	}
	registered := time.Now()
	c = follow(t, server)
	c.awaitSynced(t)
	t.Logf("%d services of %d registered in %v, first listing in %v", n, m, registered.Sub(start), time.Since(registered))
	return c, func(port int) { send(api.TxnOps{op(500, 0, port)}) }
}

// BenchmarkConsulChange measures a change from the request that makes it to the
// catalog, in a registry of 1,000 services of 10.
func BenchmarkConsulChange(b *testing.B) {
	c, change := many(b, 1000, 10)
	port := 1000
	// The first change arrives once every watch waits, which takes a moment for
	// a thousand connections.
	change(port)
	c.await(b, "the first change", func() bool { return c.Held.Instances["svc500"][0].Ports[0].Number == port })
	for b.Loop() {
		port = 1000 + (port-999)%60000
		change(port)
		c.await(b, "the change", func() bool { return c.Held.Instances["svc500"][0].Ports[0].Number == port })
	}
}

// TestConsulBalancer shows a real nginx before Consul that ends each query that
// waits for longer than a few seconds: that is no outage, a removal is as quick
// as without it, queries soon wait for less, and the detail says so.
func TestConsulBalancer(t *testing.T) {
	const n, timeout = 60, 3 * time.Second
	cert := testcert.New(t, "localhost")
	server := startConsul(t, testconsul.Config{})
	proxy := testnginx.Start(t, testnginx.Config{Upstreams: []string{server.Addr}, Timeout: timeout, Cert: cert.Cert, Key: cert.Key})
	instances := make([]testconsul.Instance, 2*n)
	for i := range instances {
		instances[i] = testconsul.Instance{Service: "svc" + strconv.Itoa(i/2), ID: strconv.Itoa(i), Address: "10.1.0.1", Port: 80}
	}
	server.Register(t, instances...)
	for scheme, change := range map[string]func(*consul.Config){
		"http":  func(c *consul.Config) { c.Address, c.Mode = "http://"+proxy.Addr, "address" },
		"https": func(c *consul.Config) { c.Address, c.TLS.CAFile = "https://"+proxy.HTTPSAddr, cert.Cert },
	} {
		t.Run(scheme, func(t *testing.T) {
			c := follow(t, server, change)
			c.awaitSynced(t)
			c.await(t, "all services", func() bool { return len(c.Held.Instances) == n })
			pause(t, 3*timeout) // until the limit is known
			all, failed := proxy.Answers(t)
			pause(t, 5*timeout)
			quiet, ended := proxy.Answers(t)
			server.Deregister(t, "0")
			began := time.Now()
			c.await(t, "the removal", func() bool { return len(c.Held.Instances["svc0"]) == 1 })
			removal := time.Since(began)
			server.Register(t, instances[0])
			c.await(t, "its return", func() bool { return len(c.Held.Instances["svc0"]) == 2 })
			var reasons []string
			var detail string
			c.Look(func(h *plugintest.Held) { reasons, detail = h.Reasons, h.Detail })
			t.Logf("%d requests an hour, %d of them ended by nginx; %d changes of the degraded text; a removal took %v; %s",
				(quiet-all)*3600/15, (ended-failed)*3600/15, len(reasons), removal.Round(time.Millisecond), detail)
			if len(reasons) > 0 {
				t.Errorf("degraded %d times: %s", len(reasons), reasons[0])
			}
			if ended-failed > n/10 {
				t.Errorf("nginx still ended %d queries", ended-failed)
			}
			if !strings.Contains(detail, "after 3s (504)") {
				t.Errorf("the detail does not say what nginx does: %q", detail)
			}
		})
	}
}

// TestConsulStale shows a real server that is asked for answers of any server,
// at the second of two addresses once the first one is gone.
func TestConsulStale(t *testing.T) {
	server := startConsul(t, testconsul.Config{})
	web := testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80}
	server.Register(t, web, testconsul.Instance{Service: "web", ID: "web-2", Address: "10.1.0.2", Port: 80})
	one, two := testenv.NewGate(t, server.Addr), testenv.NewGate(t, server.Addr)
	one.Open(t)
	two.Open(t)
	c := follow(t, server, func(c *consul.Config) {
		c.Address, c.Addresses, c.Stale = "", []string{"http://" + one.Addr, "http://" + two.Addr}, true
	})
	c.awaitSynced(t)
	c.awaitWeb(t, "both instances", func(i []registry.Instance) bool { return len(i) == 2 })
	one.Shut()
	c.await(t, "the second address", func() bool {
		return strings.Contains(c.Held.Detail, "at "+two.Addr) && strings.Contains(c.Held.Detail, "any server answers")
	})
	web.Port = 81
	server.Register(t, web)
	c.awaitWeb(t, "a change", func(i []registry.Instance) bool { return len(i) == 2 && i[0].Ports[0].Number == 81 })
	server.Deregister(t, "web-2")
	c.awaitWeb(t, "a removal", func(i []registry.Instance) bool { return len(i) == 1 })
	c.Look(func(h *plugintest.Held) {
		if len(h.Reasons) > 0 || h.Removes > 0 {
			t.Errorf("degraded %q, %d removed", h.Reasons, h.Removes)
		}
	})
}
