package nacos_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/adapters/nacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// within bounds every wait of these tests. What they wait for takes some
// seconds, but the 2.x server deletes no service in its first minute (see
// testenv.Nacos.DeleteService), and many tests run side by side.
const within = 3 * time.Minute

// catalog is a catalog that is waited for.
type catalog struct{ *plugintest.Catalog }

// await waits until cond, which may read Held, holds.
func (c *catalog) await(t testing.TB, what string, cond func() bool) {
	t.Helper()
	c.Await(t, within, what, func(*plugintest.Held) bool { return cond() })
}

// awaitService waits until cond holds of a service's instances.
func (c *catalog) awaitService(t testing.TB, what, key string, cond func([]registry.Instance) bool) {
	t.Helper()
	defer func() {
		if t.Failed() {
			c.Look(func(h *plugintest.Held) { t.Logf("%s: %+v", key, h.Instances[key]) })
		}
	}()
	c.await(t, what, func() bool { return cond(c.Held.Instances[key]) })
}

func (c *catalog) awaitSynced(t testing.TB) {
	t.Helper()
	c.AwaitSynced(t, within)
}

// awaitState waits until the registry is degraded with a text, or with "" is
// not.
func (c *catalog) awaitState(t testing.TB, part string) {
	t.Helper()
	c.await(t, fmt.Sprintf("degraded with %q", part), func() bool {
		return part == "" && c.Held.Degraded == "" || part != "" && strings.Contains(c.Held.Degraded, part)
	})
}

// reasons returns every text that the degraded state had. The caller may read
// Held.
func (c *catalog) reasons() (all []string) {
	for _, reason := range c.Held.Reasons {
		if reason != "" {
			all = append(all, reason)
		}
	}
	return all
}

func (c *catalog) leastOf(key string) (n int, ok bool) {
	c.Look(func(h *plugintest.Held) { n, ok = h.Least[key] })
	return n, ok
}

// follow runs the adapter against the server for the rest of the test.
func follow(t testing.TB, server *testnacos.Server, change ...func(*nacos.Config)) *catalog {
	t.Helper()
	c, stop := followUntil(t, server, change...)
	t.Cleanup(stop)
	return c
}

func followUntil(t testing.TB, server *testnacos.Server, change ...func(*nacos.Config)) (*catalog, func()) {
	t.Helper()
	config := nacos.DefaultConfig
	config.Servers = []string{server.Addr}
	config.ListInterval = plugin.Duration(time.Second)
	if server.Auth {
		config.Username, config.Password = "nacos", plugin.Secret(server.Password)
	}
	for _, fn := range change {
		fn(&config)
	}
	var log *slog.Logger
	if os.Getenv("NACOS_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	adapter, err := nacos.New(config, plugin.Env{Registry: "test", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	c := &catalog{plugintest.NewCatalog()}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- adapter.Run(ctx, c) }()
	return c, sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

func one(cond func(registry.Instance) bool) func([]registry.Instance) bool {
	return func(i []registry.Instance) bool { return len(i) == 1 && cond(i[0]) }
}

func count(n int) func([]registry.Instance) bool {
	return func(i []registry.Instance) bool { return len(i) == n }
}

// tokenLife is how long tokens hold at the servers with access control.
const tokenLife = 10 * time.Second

// TestNacos runs one suite against each version, open and with access control.
// One server each serves all of it. Nearly all of the time is spent waiting for
// them, so that everything runs side by side (see TestMain).
func TestNacos(t *testing.T) {
	testenv.SkipIfShort(t)
	for _, version := range testnacos.Versions() {
		for _, auth := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/auth=%t", version.Name, auth), func(t *testing.T) {
				t.Parallel()
				suite(t, testnacos.Start(t, testnacos.Config{
					Version: version, Auth: auth, TokenLife: tokenLife,
					// More than 20 follow at once here.
					Properties: map[string]string{"nacos.naming.fuzzy.watch.max.pattern.count": "200"},
				}))
			})
		}
	}
}

// suite is what must hold of every server.
func suite(t *testing.T, server *testnacos.Server) {
	side := func(t *testing.T, name string, fn func(*testing.T, *testnacos.Server)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fn(t, server)
		})
	}
	t.Run("many", func(t *testing.T) {
		side(t, "a thousand services", func(t *testing.T, n *testnacos.Server) { many(t, n, 1000, 10) })
		side(t, "come and go", func(t *testing.T, n *testnacos.Server) {
			services := 1000
			if n.Auth {
				services = 50 // who may do what makes no difference to what is left behind
			}
			comeAndGo(t, n, services)
		})
		side(t, "globbed", manyGlobbed)
	})
	t.Run("one", func(t *testing.T) {
		side(t, "life of an instance", life)
		side(t, "groups and namespaces", groups)
		side(t, "all namespaces", allNamespaces)
		side(t, "groups of the AI registry", aiRegistry)
		side(t, "wrong namespace", wrongNamespace)
		side(t, "wrong namespace stays", wrongNamespaceStays)
		side(t, "empty namespace", emptyNamespace)
		side(t, "persistent", persistent)
		side(t, "protect threshold", protect)
		side(t, "polled", polled)
		side(t, "sent away", sentAwayReal)
		side(t, "signed", signed)
		cut(t, server)
		if server.Auth {
			side(t, "reader of a group", groupReader)
			access(t, server)
		}
	})
	t.Run("killed", func(t *testing.T) { killed(t, server) }) // the last one: nobody else's data is there afterwards
}

// polled shows the HTTP API as the only one, by choice and because gRPC is
// closed.
func polled(t *testing.T, server *testnacos.Server) {
	app := server.Client(t)
	app.Register(t, "public", "H", "web", testnacos.Up("10.1.0.1", 80))
	for _, protocol := range []string{"http", "auto"} {
		t.Run(protocol, func(t *testing.T) {
			c := follow(t, server, func(c *nacos.Config) {
				c.Protocol, c.PollInterval, c.GRPCPortOffset, c.Groups = protocol, plugin.Duration(time.Second), 5, []string{"H*"}
			})
			c.awaitSynced(t)
			c.await(t, "polling is told", func() bool { return c.Held.Detail == "polling" })
			c.awaitService(t, "listed", "public/H/web", count(1))
			i := testnacos.Up("10.1.0.1", 80)
			i.Weight, i.Metadata = 0.5, map[string]string{"k": protocol}
			app.Register(t, "public", "H", "web", i, testnacos.Up("10.1.0.2", 80))
			c.awaitService(t, "changed", "public/H/web", func(i []registry.Instance) bool {
				return len(i) == 2 && *i[0].Weight == 0.5 && i[0].Meta["k"] == protocol
			})
			app.Register(t, "public", "H", "new-"+protocol, testnacos.Up("10.1.0.3", 80))
			c.awaitService(t, "a service that appears", "public/H/new-"+protocol, count(1))
			app.Register(t, "public", "H", "new-"+protocol)
			c.await(t, "its instance gone", func() bool { return len(c.Held.Instances["public/H/new-"+protocol]) == 0 })
			app.Register(t, "public", "H", "web", testnacos.Up("10.1.0.1", 80))
			c.awaitService(t, "scaled in", "public/H/web", count(1))
			c.awaitState(t, "")
		})
	}
}

// killed shows a server killed and started again, which then holds nothing:
// what is known stays for the grace period, and what registers again within it
// never leaves.
func killed(t *testing.T, server *testnacos.Server) {
	app := server.Client(t)
	web := []testnacos.Instance{testnacos.Up("10.1.0.1", 80), testnacos.Up("10.1.0.2", 80)}
	app.Register(t, "public", "K", "web", web...)
	app.Register(t, "public", "K", "db", testnacos.Up("10.1.0.3", 80))
	c := follow(t, server, func(c *nacos.Config) {
		c.Groups, c.RemoveGrace, c.PollInterval = []string{"K"}, plugin.Duration(12*time.Second), plugin.Duration(time.Second)
	})
	c.awaitSynced(t)
	c.await(t, "both", func() bool {
		return len(c.Held.Instances["public/K/web"]) == 2 && len(c.Held.Instances["public/K/db"]) == 1
	})
	c.ForgetLeast()
	server.Kill()
	c.awaitState(t, "cannot follow")
	server.Restart(t)
	c.awaitState(t, "remove_grace")
	c.await(t, "everything kept", func() bool {
		return len(c.Held.Instances) == 2 && len(c.Held.Instances["public/K/web"]) == 2 && c.Held.Removes == 0
	})
	again := server.Client(t)
	again.Register(t, "public", "K", "web", web[0])
	again.Register(t, "public", "K", "web", web...)
	c.await(t, "what did not return is gone", func() bool { return len(c.Held.Instances["public/K/db"]) == 0 })
	c.awaitState(t, "")
	if least, ok := c.leastOf("public/K/web"); ok && least < 2 {
		t.Errorf("web was down to %d instances while its clients registered again", least)
	}
	again.Register(t, "public", "K", "web", web[0])
	c.awaitService(t, "followed again", "public/K/web", count(1))
}

// life goes through what happens to an instance of an application.
func life(t *testing.T, server *testnacos.Server) {
	app := server.Client(t)
	app.Register(t, "public", "G", "other", testnacos.Up("10.1.0.9", 80)) // the namespace is not empty
	c := follow(t, server)
	c.awaitSynced(t)
	const web = "public/G/web"
	i := testnacos.Up("10.1.0.1", 80)
	register := func() {
		t.Helper()
		app.Register(t, "public", "G", "web", i)
	}
	register()
	c.awaitService(t, "a service that appears", web, one(func(i registry.Instance) bool {
		return i.ID == "10.1.0.1:80" && i.Address == "10.1.0.1" && i.Ports[0] == registry.Port{Number: 80} && *i.Weight == 1 &&
			i.Health == registry.HealthPassing && !i.Disabled && i.Cluster == "DEFAULT"
	}))
	i.Weight = 0.25
	register()
	c.awaitService(t, "weight", web, one(func(i registry.Instance) bool { return *i.Weight == 0.25 }))
	i.Weight = 0
	register()
	c.awaitService(t, "weight zero", web, one(func(i registry.Instance) bool { return *i.Weight == 0 }))
	i.Weight, i.Enable = 3, false
	register()
	// Nacos shows a disabled instance to nobody.
	c.await(t, "disabled", func() bool { i, ok := c.Held.Instances[web]; return ok && len(i) == 0 })
	i.Enable, i.Metadata = true, map[string]string{"protocol": "grpc", "version": "v2"}
	register()
	c.awaitService(t, "metadata", web, one(func(i registry.Instance) bool {
		return !i.Disabled && i.Meta["protocol"] == "grpc" && i.Meta["version"] == "v2"
	}))
	i.Healthy = false
	register()
	c.awaitService(t, "unhealthy", web, one(func(i registry.Instance) bool { return i.Health == registry.HealthCritical }))
	i.Healthy, i.ClusterName = true, "blue"
	register()
	c.awaitService(t, "another cluster is another instance", web, one(func(i registry.Instance) bool {
		return i.ID == "10.1.0.1:80/blue" && i.Cluster == "blue" && i.Health == registry.HealthPassing
	}))
	app.Register(t, "public", "G", "web", i, testnacos.Up("10.1.0.2", 80))
	c.awaitService(t, "scaled out", web, count(2))
	app.Register(t, "public", "G", "web", i)
	c.awaitService(t, "scaled in", web, count(1))
	app.Register(t, "public", "G", "web")
	c.await(t, "the last one deregistered", func() bool { return len(c.Held.Instances[web]) == 0 })
	server.DeleteService(t, "public", "G", "web")
	c.await(t, "service deleted", func() bool { _, ok := c.Held.Instances[web]; return !ok })
	i.ClusterName = "DEFAULT"
	register()
	c.awaitService(t, "and back", web, count(1))
	c.awaitState(t, "")
}

// groups shows that groups and namespaces are told apart, although a push does
// not say its namespace.
func groups(t *testing.T, server *testnacos.Server) {
	server.CreateNamespace(t, "dev")
	app := server.Client(t)
	for _, ns := range []string{"public", "dev"} {
		for _, g := range []string{"G1", "G2"} {
			app.Register(t, ns, g, "web", testnacos.Up("10.2.0.1", 80))
		}
	}
	c := follow(t, server, func(c *nacos.Config) { c.Namespaces = []string{"", "dev"}; c.Groups = []string{"G*"} })
	named := follow(t, server, func(c *nacos.Config) { c.Namespaces = []string{"dev"}; c.Groups = []string{"G1", "G3"} })
	c.awaitSynced(t)
	named.awaitSynced(t)
	app.Register(t, "dev", "G2", "web", testnacos.Up("10.2.0.1", 80), testnacos.Up("10.2.0.2", 80))
	app.Register(t, "dev", "G3", "web", testnacos.Up("10.2.0.3", 80))
	c.awaitService(t, "the change of one", "dev/G2/web", count(2))
	for _, key := range []string{"public/G1/web", "public/G2/web", "dev/G1/web", "dev/G3/web"} {
		c.awaitService(t, "the others", key, count(1))
	}
	named.await(t, "the named groups only", func() bool {
		return len(named.Held.Instances) == 2 && len(named.Held.Instances["dev/G1/web"]) == 1 && len(named.Held.Instances["dev/G3/web"]) == 1
	})
	c.awaitState(t, "")
	named.awaitState(t, "")
}

// persistent shows an instance that no connection holds.
func persistent(t *testing.T, server *testnacos.Server) {
	if !server.Version.V3 {
		t.Skip("this build of 2.1.1 comes without Raft, and so without persistent instances (see testenv.Nacos.DeleteService)")
	}
	i := testnacos.Up("127.0.0.1", 9)
	i.ClusterName = "DEFAULT"
	server.Persist(t, "public", "P", "db", i, false)
	c := follow(t, server)
	c.awaitService(t, "registered", "public/P/db", one(func(i registry.Instance) bool { return i.ID == "127.0.0.1:9" }))
	server.Persist(t, "public", "P", "db", i, true)
	c.await(t, "deregistered", func() bool { return len(c.Held.Instances["public/P/db"]) == 0 })
}

// wrongNamespace shows that a namespace that does not exist is an error, and no
// empty registry.
func wrongNamespace(t *testing.T, server *testnacos.Server) {
	c := follow(t, server, func(c *nacos.Config) { c.Namespaces = []string{"typo"} })
	c.awaitState(t, `namespace "typo"`)
	c.awaitState(t, "write its id")
	c.await(t, "not synced", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 })
	empty := follow(t, server, func(c *nacos.Config) { c.Namespaces = []string{"typo"}; c.AcceptEmpty = true })
	empty.awaitSynced(t)
	empty.awaitState(t, "")
}

// aiRegistry shows that the groups of the AI registry are left out unless they
// are wanted.
func aiRegistry(t *testing.T, server *testnacos.Server) {
	app := server.Client(t)
	for group, name := range map[string]string{"mcp-endpoints": "tool::1.0.0", "agent-endpoints": "agent::1.0.0", "AI-web": "web"} {
		app.Register(t, "public", group, name, testnacos.Up("10.1.0.1", 80))
	}
	groups := plugin.Globs{"*-endpoints", "AI-*"}
	c := follow(t, server, func(c *nacos.Config) { c.Groups = groups })
	all := follow(t, server, func(c *nacos.Config) { c.Groups, c.ExcludeGroups = groups, nil })
	c.awaitSynced(t)
	all.awaitSynced(t)
	all.await(t, "all three", func() bool { return len(all.Held.Instances) == 3 })
	c.await(t, "one", func() bool { return len(c.Held.Instances) == 1 && len(c.Held.Instances["public/AI-web/web"]) == 1 })
}

// many shows many services, that one change among them is one Set, and that all
// of them go.
func many(t *testing.T, server *testnacos.Server, n, per int) {
	app := server.Client(t)
	load(t, app, n, per)
	c := follow(t, server, func(c *nacos.Config) { c.Groups = []string{"M*"} })
	c.awaitSynced(t)
	c.await(t, "all services", func() bool {
		total := 0
		for _, i := range c.Held.Instances {
			total += len(i)
		}
		return len(c.Held.Instances) == n && total == n*per
	})
	var sets int
	c.Look(func(h *plugintest.Held) { sets = h.Sets })
	// A server that is not quite done with a registration shows the service
	// without it, and pushes it then.
	if sets < n || sets > n+n/20 {
		t.Errorf("%d sets for %d services, want about one each", sets, n)
	}
	app.Register(t, "public", "M", "svc-500", testnacos.Up("10.9.9.9", 99))
	c.awaitService(t, "the change", "public/M/svc-500", count(1))
	c.Look(func(h *plugintest.Held) {
		if now := h.Sets - sets; now < 1 || now > 3 {
			t.Errorf("%d sets for one change", now)
		}
	})
}

// load registers n services with per instances each.
func load(t testing.TB, app *testnacos.Client, n, per int) {
	t.Helper()
	each(t, n, func(s int) error {
		return app.TryRegister(t.Context(), "public", "M", "svc-"+strconv.Itoa(s), instancesOf(s, per)...)
	})
}

// each calls fn with 0 to n-1, some at a time, and ends the test if one fails.
func each(t testing.TB, n int, fn func(int) error) {
	t.Helper()
	var wg sync.WaitGroup
	next := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range next {
				if err := fn(i); err != nil {
					t.Errorf("%d: %v", i, err)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

func instancesOf(s, per int) []testnacos.Instance {
	var all []testnacos.Instance
	for i := range per {
		all = append(all, testnacos.Up(fmt.Sprintf("10.%d.%d.%d", 10+s/65536, s/256%256, s%256), 1000+i))
	}
	return all
}

// access shows what each kind of access leads to.
func access(t *testing.T, server *testnacos.Server) {
	as := func(user, password string) func(*nacos.Config) {
		return func(c *nacos.Config) { c.Username, c.Password = user, plugin.Secret(password) }
	}
	app := server.Client(t)
	app.Register(t, "public", "A", "web", testnacos.Up("10.1.0.1", 80))
	t.Run("wrong password", func(t *testing.T) {
		t.Parallel()
		c := follow(t, server, as("nacos", "wrong"))
		c.awaitState(t, `login refused: user "nacos"`)
		c.await(t, "not synced", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 })
	})
	t.Run("nobody", func(t *testing.T) {
		t.Parallel()
		c := follow(t, server, as("", ""))
		c.awaitState(t, "403")
		c.await(t, "not synced", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 })
	})
	t.Run("least privilege", func(t *testing.T) {
		t.Parallel()
		server.CreateUser(t, "reader", "reader-password", "public", ":*:*") // the latter for 2.1.1, where "" is not "public"
		file := t.TempDir() + "/password"
		if err := os.WriteFile(file, []byte("reader-password\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		c := follow(t, server, func(c *nacos.Config) {
			c.Username, c.Password, c.PasswordFile, c.Groups = "reader", "", file, []string{"A"}
		})
		c.awaitSynced(t)
		c.awaitService(t, "what it may see", "public/A/web", count(1))
		c.awaitState(t, "")
		other := follow(t, server, func(c *nacos.Config) {
			c.Username, c.Password, c.PasswordFile, c.Namespaces, c.Groups = "reader", "", file, []string{"secret"}, []string{"A"}
		})
		other.awaitState(t, "refuses")
		other.await(t, "not synced", func() bool { return !other.Held.Synced })
	})
	t.Run("token renewed in time", func(t *testing.T) {
		t.Parallel()
		app.Register(t, "public", "T", "web", testnacos.Up("10.1.0.1", 80))
		c := follow(t, server, func(c *nacos.Config) { c.Groups = []string{"T"} })
		c.awaitSynced(t)
		i := testnacos.Up("10.1.0.1", 80)
		for end := time.Now().Add(5 * tokenLife / 2); time.Now().Before(end); {
			i.Weight++
			app.Register(t, "public", "T", "web", i)
			c.awaitService(t, "the change", "public/T/web", one(func(got registry.Instance) bool { return *got.Weight == i.Weight }))
		}
		c.Look(func(*plugintest.Held) {
			if len(c.reasons()) > 0 {
				t.Errorf("degraded meanwhile: %q", c.reasons())
			}
		})
	})
	t.Run("token from a file", func(t *testing.T) {
		t.Parallel()
		file := t.TempDir() + "/token"
		if err := os.WriteFile(file, []byte("no-token"), 0o600); err != nil {
			t.Fatal(err)
		}
		c := follow(t, server, as("", ""), func(c *nacos.Config) { c.TokenFile = file })
		c.awaitState(t, "403")
		tokenFile(t, server, file)
		c.awaitSynced(t)
		c.awaitState(t, "")
		before := 0
		c.Look(func(*plugintest.Held) { before = len(c.reasons()) })
		// The token with which the connection began ends meanwhile. A new
		// service takes a request.
		for end := time.Now().Add(5 * tokenLife / 2); time.Now().Before(end); {
			name := "later-" + strconv.FormatInt(time.Now().UnixMilli(), 10)
			app.Register(t, "public", "F", name, testnacos.Up("10.1.0.1", 80))
			c.awaitService(t, "a new service", "public/F/"+name, count(1))
		}
		c.await(t, "no more reasons", func() bool { return len(c.reasons()) == before })
	})
}

// signed shows keys that come with a security token, of files. The server's own
// access control does not know them, and an open server takes what is signed.
func signed(t *testing.T, server *testnacos.Server) {
	dir := t.TempDir()
	file := func(name string) string {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, name)
	}
	server.Client(t).Register(t, "public", "S", "web", testnacos.Up("10.1.0.1", 80))
	c := follow(t, server, func(c *nacos.Config) {
		c.Username, c.Password, c.Groups = "", "", []string{"S"}
		c.AccessKeyFile, c.SecretKeyFile, c.SecurityTokenFile = file("access"), file("secret"), file("security")
	})
	if server.Auth {
		c.awaitState(t, "403")
		return
	}
	c.awaitSynced(t)
	c.awaitService(t, "of an open server", "public/S/web", count(1))
	c.saidNothing(t)
}
