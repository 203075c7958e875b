package nacos_test

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
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

// quickest is the shortest interval of lists, and so of looks for namespaces,
// that a configuration may have.
const quickest = plugin.Duration(500 * time.Millisecond)

// kept fails the test if a service was removed, or had fewer instances than so
// many, at any time since ForgetLeast.
func (c *catalog) kept(t testing.TB, atLeast map[string]int) {
	t.Helper()
	for key, want := range atLeast {
		if least, ok := c.leastOf(key); ok && least < want {
			t.Errorf("%s was down to %d instances, want %d at least", key, least, want)
		}
	}
}

// saidNothing fails the test if the registry was ever degraded.
func (c *catalog) saidNothing(t testing.TB) {
	t.Helper()
	c.Look(func(*plugintest.Held) {
		if len(c.reasons()) > 0 {
			t.Errorf("degraded meanwhile: %q", c.reasons())
		}
	})
}

// passing reports whether there are n instances, and all of them take traffic.
func passing(n int) func([]registry.Instance) bool {
	return func(all []registry.Instance) bool {
		return len(all) == n && !slices.ContainsFunc(all, func(i registry.Instance) bool { return i.Health != registry.HealthPassing })
	}
}

// allNamespaces follows whatever namespaces there are, as they come. It is for
// both versions: this build of 2.1.1 has no API that lists them, since it comes
// without the console, and that is said.
func allNamespaces(t *testing.T, server *testnacos.Server) {
	all := func(c *nacos.Config) {
		c.Namespaces, c.Groups, c.ListInterval = []string{"*"}, []string{"N"}, quickest
	}
	app := server.Client(t)
	app.Register(t, "public", "N", "web", testnacos.Up("10.1.0.1", 80))
	if !server.Version.V3 {
		c := follow(t, server, all)
		c.awaitState(t, "list the namespaces: ")
		c.awaitState(t, "the server has no API for it; name them under config.namespaces")
		c.await(t, "not synced", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 })
		return
	}
	if server.Auth {
		server.CreateUser(t, "namespaces-reader", "reader-password", "public")
	}
	server.CreateNamespace(t, "all-before")
	app.Register(t, "all-before", "N", "web", testnacos.Up("10.1.0.2", 80))
	c := follow(t, server, all)
	c.awaitSynced(t)
	c.awaitService(t, "the public namespace", "public/N/web", count(1))
	c.awaitService(t, "one that was there before", "all-before/N/web", count(1))
	server.CreateNamespace(t, "all-later")
	app.Register(t, "all-later", "N", "web", testnacos.Up("10.1.0.3", 80))
	c.awaitService(t, "one that came later", "all-later/N/web", count(1))
	c.ForgetLeast()
	app.Register(t, "all-later", "N", "web", testnacos.Up("10.1.0.3", 80), testnacos.Up("10.1.0.4", 80))
	c.awaitService(t, "a change there", "all-later/N/web", count(2))

	// Nacos deletes a namespace without its services, which are there until
	// they go themselves.
	server.Admin(t, http.MethodDelete, "/v3/admin/core/namespace", url.Values{"namespaceId": {"all-before"}})
	app.Register(t, "all-before", "N", "web", testnacos.Up("10.1.0.2", 80), testnacos.Up("10.1.0.5", 80))
	c.awaitService(t, "a change in a namespace that was deleted", "all-before/N/web", count(2))
	c.kept(t, map[string]int{"public/N/web": 1, "all-before/N/web": 1, "all-later/N/web": 1})
	app.Register(t, "all-before", "N", "web")
	server.DeleteService(t, "all-before", "N", "web")
	c.await(t, "gone from there", func() bool { _, ok := c.Held.Instances["all-before/N/web"]; return !ok })
	c.saidNothing(t)

	if !server.Auth {
		return
	}
	refused := follow(t, server, all, func(c *nacos.Config) { c.Username, c.Password = "namespaces-reader", "reader-password" })
	refused.awaitState(t, "list the namespaces: ")
	refused.awaitState(t, "give the user the right to, or name them under config.namespaces")
	refused.await(t, "not synced", func() bool { return !refused.Held.Synced && len(refused.Held.Instances) == 0 })
}

// protect shows a service of which so few instances are healthy that Nacos says
// that all are. It is for 3.x: 2.1.1 without Raft has no threshold.
func protect(t *testing.T, server *testnacos.Server) {
	if !server.Version.V3 {
		t.Skip("this build of 2.1.1 comes without Raft, and so without settings of a service (see testenv.Nacos.DeleteService)")
	}
	const web = "public/PT/web"
	server.Protect(t, "public", "PT", "web", 0.8)
	app := server.Client(t)
	i := []testnacos.Instance{testnacos.Up("10.1.0.1", 80), testnacos.Up("10.1.0.2", 80)}
	app.Register(t, "public", "PT", "web", i...)
	c := follow(t, server, func(c *nacos.Config) { c.Groups, c.PollInterval = []string{"PT"}, plugin.Duration(time.Second) })
	c.awaitSynced(t)
	c.awaitService(t, "healthy", web, passing(2))
	protected := func() bool {
		p := c.Held.Problems["service "+web]
		return strings.Contains(p, "protectThreshold is reached") && strings.Contains(p, "repair the instances, or lower the threshold")
	}
	mended := func() bool { return len(c.Held.Problems) == 0 }
	c.await(t, "no problem", mended)

	i[0].Healthy = false
	app.Register(t, "public", "PT", "web", i...)
	c.await(t, "the problem", protected)
	c.awaitService(t, "all count as healthy", web, passing(2))

	// The server does not push this.
	server.Protect(t, "public", "PT", "web", 0.2)
	c.await(t, "the problem gone", mended)
	c.awaitService(t, "one of them is not healthy", web, func(all []registry.Instance) bool { return len(all) == 2 && !passing(2)(all) })

	server.Protect(t, "public", "PT", "web", 0.8)
	i[1].Weight = 2
	app.Register(t, "public", "PT", "web", i...)
	c.await(t, "the problem", protected)
	i[0].Healthy = true
	app.Register(t, "public", "PT", "web", i...)
	c.await(t, "the problem gone", mended)
	c.awaitService(t, "healthy again", web, passing(2))
	c.saidNothing(t)
}

// manyGlobbed follows groups by a glob where there are more services than 3.x
// tells of for a pattern, 500. With access control it also shows what is said
// when the right to list them is lost: nothing is removed. It is for both
// versions; on 2.1.1 a service goes a minute after the server's start at the
// earliest.
func manyGlobbed(t *testing.T, server *testnacos.Server) {
	const n = 700
	server.CreateNamespace(t, "globbed")
	if server.Auth {
		server.CreateUser(t, "globbed-reader", "reader-password", "globbed:Q0:*")
	}
	app := server.Client(t)
	all := map[string]int{}
	for i := range n {
		all[fmt.Sprintf("globbed/Q%d/svc-%d", i%2, i)] = 1
	}
	each(t, n, func(i int) error {
		return app.TryRegister(t.Context(), "globbed", "Q"+strconv.Itoa(i%2), "svc-"+strconv.Itoa(i), testnacos.Up("10.1.0.1", 1+i))
	})
	token := filepath.Join(t.TempDir(), "token")
	become := tokenFile(t, server, token)
	c := follow(t, server, func(c *nacos.Config) {
		c.Namespaces, c.Groups, c.ListInterval = []string{"globbed"}, []string{"Q?"}, quickest
		if server.Auth {
			c.Username, c.Password, c.TokenFile = "", "", token
		}
	})
	c.awaitSynced(t)
	instances := func() int {
		total := 0
		for _, i := range c.Held.Instances {
			total += len(i)
		}
		return total
	}
	c.await(t, "all services", func() bool { return len(c.Held.Instances) == n && instances() == n })
	c.ForgetLeast()

	app.Register(t, "globbed", "Q1", "later", testnacos.Up("10.1.0.2", 80), testnacos.Up("10.1.0.3", 80))
	c.awaitService(t, "one that comes later", "globbed/Q1/later", count(2))
	app.Register(t, "globbed", "other", "later", testnacos.Up("10.1.0.2", 80)) // not selected
	app.Register(t, "globbed", "Q1", "later")
	c.await(t, "its instances gone", func() bool { return len(c.Held.Instances["globbed/Q1/later"]) == 0 })
	server.DeleteService(t, "globbed", "Q1", "later")
	c.await(t, "gone", func() bool { return len(c.Held.Instances) == n && instances() == n })
	c.awaitState(t, "")
	c.kept(t, all)
	if !server.Auth {
		return
	}

	become("globbed-reader", "reader-password")
	c.awaitState(t, `the server refuses to list the services of namespace "globbed"`)
	c.awaitState(t, "name the groups under config.groups")
	app.Register(t, "globbed", "Q0", "svc-0", testnacos.Up("10.1.0.1", 1), testnacos.Up("10.1.0.2", 1))
	c.awaitService(t, "what is known is followed", "globbed/Q0/svc-0", count(2))
	become("nacos", server.Password)
	c.awaitState(t, "")
	c.await(t, "everything is there", func() bool { return len(c.Held.Instances) == n && instances() == n+1 })
	c.kept(t, all)
}

// tokenFile keeps a token in a file, renewed until the end of the test, and
// returns a function that makes it that of another user. At first it is the
// administrator's.
func tokenFile(t *testing.T, server *testnacos.Server, name string) (become func(user, password string)) {
	t.Helper()
	if !server.Auth {
		return nil
	}
	var mu sync.Mutex // guards user and password, and the order of what is written
	user, password := "nacos", server.Password
	write := func() error {
		token, err := server.Login(user, password)
		if err != nil {
			return err
		}
		if err := os.WriteFile(name+".new", []byte(token), 0o600); err != nil {
			return err
		}
		return os.Rename(name+".new", name)
	}
	become = func(u, p string) {
		t.Helper()
		testenv.Eventually(t, within, "the login of "+u, func() (string, bool) {
			_, err := server.Login(u, p)
			return fmt.Sprint(err), err == nil
		})
		mu.Lock()
		defer mu.Unlock()
		user, password = u, p
		if err := write(); err != nil {
			t.Fatal(err)
		}
	}
	become(user, password)
	stop, stopped := make(chan struct{}), make(chan struct{})
	// Owned by the test, whose cleanup ends it and waits for it.
	go func() {
		defer close(stopped)
		tick := time.NewTicker(tokenLife / 5)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				mu.Lock()
				_ = write() // the next time then, well before the token ends
				mu.Unlock()
			case <-stop:
				return
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-stopped })
	return become
}

// groupReader shows that read on a group is enough to follow that group, if it
// is named. It is for servers of both versions with access control.
func groupReader(t *testing.T, server *testnacos.Server) {
	server.CreateUser(t, "group-reader", "reader-password", "public:R1:*", ":R1:*") // the latter for 2.1.1, where "" is not "public"
	app := server.Client(t)
	app.Register(t, "public", "R1", "web", testnacos.Up("10.1.0.1", 80))
	app.Register(t, "public", "R2", "web", testnacos.Up("10.1.0.1", 80))
	as := func(groups ...string) func(*nacos.Config) {
		return func(c *nacos.Config) {
			c.Username, c.Password, c.Groups, c.ListInterval = "group-reader", "reader-password", groups, quickest
		}
	}
	c, other, glob := follow(t, server, as("R1")), follow(t, server, as("R2")), follow(t, server, as("R?"))
	c.awaitSynced(t)
	c.awaitService(t, "the group", "public/R1/web", count(1))
	app.Register(t, "public", "R1", "later", testnacos.Up("10.1.0.2", 80))
	c.awaitService(t, "one that comes later", "public/R1/later", count(1))
	app.Register(t, "public", "R1", "later", testnacos.Up("10.1.0.2", 80), testnacos.Up("10.1.0.3", 80))
	c.awaitService(t, "its change", "public/R1/later", count(2))
	c.awaitState(t, "")
	for _, refused := range []*catalog{other, glob} {
		refused.awaitState(t, `the server refuses to list the services of namespace "public"`)
		refused.awaitState(t, "give the user read on it")
		refused.await(t, "not synced", func() bool { return !refused.Held.Synced && len(refused.Held.Instances) == 0 })
	}
	glob.awaitState(t, "config.groups")
}

// wrongNamespaceStays shows that what is said of a namespace that does not
// exist stays the same, however often it is looked at. It is for both versions:
// 2.1.1, without its console, cannot be asked for the namespaces that there
// are.
func wrongNamespaceStays(t *testing.T, server *testnacos.Server) {
	p := newProxy(t, server)
	c := follow(t, server, p.behind(t, server), func(c *nacos.Config) {
		c.Namespaces, c.Groups, c.ListInterval, c.Protocol = []string{"no-such"}, []string{"G"}, quickest, "grpc"
	})
	want, look := `namespace "no-such" does not exist; write its id`, "NamingFuzzyWatchRequest"
	if !server.Version.V3 {
		want, look = `namespace "no-such" lists no service, and whether it exists cannot be asked, so that counts for nothing`, "ServiceListRequest"
	}
	c.awaitState(t, want)
	c.awaitState(t, "write its id as the console shows it, not its name")
	testenv.Eventually(t, within, "more looks", func() (string, bool) {
		n := p.counts()[look]
		return fmt.Sprintf("%d of %s", n, look), n >= 4
	})
	c.await(t, "said once", func() bool { return !c.Held.Synced && len(c.Held.Instances) == 0 && len(c.reasons()) == 1 })
}

// emptyNamespace shows services that clients registered with an empty namespace
// at 2.1.1: in a group that nothing else has, found by its name and by a glob;
// and what a user is told who may read "public" only.
func emptyNamespace(t *testing.T, server *testnacos.Server) {
	if server.Version.V3 {
		t.Skip("from 2.4 on the empty namespace is not followed")
	}
	app := server.Client(t)
	app.Register(t, "public", "E0", "web", testnacos.Up("10.1.0.1", 80))
	app.Register(t, "", "E1", "web", testnacos.Up("10.1.0.2", 80))
	groups := func(groups ...string) func(*nacos.Config) {
		return func(c *nacos.Config) {
			c.Groups, c.ListInterval, c.Protocol = groups, plugin.Duration(500*time.Millisecond), "grpc"
		}
	}
	for _, c := range []*catalog{follow(t, server, groups("E0", "E1")), follow(t, server, groups("E?"))} {
		c.awaitSynced(t)
		c.awaitService(t, "public", "public/E0/web", count(1))
		c.awaitService(t, "by the empty name", "public/E1/web", count(1))
		c.awaitState(t, "")
	}
	app.Register(t, "", "E2", "web", testnacos.Up("10.1.0.3", 80))
	c := follow(t, server, groups("E?"))
	c.awaitService(t, "a later group", "public/E2/web", count(1))
	if !server.Auth {
		return
	}
	server.CreateUser(t, "empty-public", "reader-password", "public")
	server.CreateUser(t, "empty-both", "reader-password", "public", ":*:*")
	as := func(user string) func(*nacos.Config) {
		return func(c *nacos.Config) { c.Username, c.Password = user, "reader-password" }
	}
	half, both := follow(t, server, groups("E0", "E1"), as("empty-public")), follow(t, server, groups("E?"), as("empty-both"))
	half.awaitSynced(t)
	half.awaitService(t, "public", "public/E0/web", count(1))
	half.awaitState(t, `give the user read on it too, by the resource ":*:*"`)
	both.awaitSynced(t)
	both.awaitService(t, "by the empty name", "public/E1/web", count(1))
	both.awaitState(t, "")
	// Named services of a group that may not be read.
	server.CreateUser(t, "empty-some", "reader-password", "public:E0:*", ":*:*")
	app.Register(t, "public", "E3", "secret", testnacos.Up("10.1.0.3", 80))
	some := follow(t, server, groups("E?"), as("empty-some"))
	some.awaitSynced(t)
	some.awaitService(t, "public", "public/E0/web", count(1))
	some.awaitState(t, "refuses to show service public/E3/secret")
	some.await(t, "the problem", func() bool { return some.Held.Problems["service public/E3/secret"] != "" })
}

// sentAwayReal shows that a server that asks for another connection gets it,
// that each service is subscribed there, and that nothing else is seen of it.
// It is for both versions.
func sentAwayReal(t *testing.T, server *testnacos.Server) {
	const n = 20
	name := func(i int) string { return "svc-" + strconv.Itoa(i) }
	app := server.Client(t)
	atLeast := map[string]int{}
	for i := range n {
		app.Register(t, "public", "Z", name(i), testnacos.Up("10.1.0.1", 80), testnacos.Up("10.1.0.2", 80))
		atLeast["public/Z/"+name(i)] = 2
	}
	gate := testenv.NewGate(t, server.GRPC)
	gate.Open(t)
	c := follow(t, server, through(t, server, gate), func(c *nacos.Config) { c.Groups, c.Protocol = []string{"Z"}, "grpc" })
	c.awaitSynced(t)
	c.await(t, "all", func() bool { return len(c.Held.Instances) == n })
	c.ForgetLeast()
	ports := gate.LocalPorts()
	if len(ports) != 1 {
		t.Fatalf("connections from ports %v, want one", ports)
	}
	before := ports[0]
	all := server.Connections(t, "isthmus")
	// A server names them by the port that they come from, last.
	i := slices.IndexFunc(all, func(id string) bool { return strings.HasSuffix(id, "_"+strconv.Itoa(before)) })
	if i < 0 {
		t.Fatalf("the server knows no connection from port %d: %q", before, all)
	}
	server.SendAway(t, all[i], "")
	testenv.Eventually(t, within, "another connection", func() (string, bool) {
		ports := gate.LocalPorts()
		return fmt.Sprintf("%v, before %d", ports, before), len(ports) == 1 && ports[0] != before
	})
	for i := range n {
		app.Register(t, "public", "Z", name(i), testnacos.Up("10.1.0.1", 80), testnacos.Up("10.1.0.2", 80), testnacos.Up("10.1.0.3", 80))
	}
	for i := range n {
		c.awaitService(t, "subscribed again", "public/Z/"+name(i), count(3))
	}
	c.kept(t, atLeast)
	c.saidNothing(t)
}

// through makes the adapter reach gRPC through the gate.
func through(t testing.TB, server *testnacos.Server, gate *testenv.Gate) func(*nacos.Config) {
	t.Helper()
	return (&proxy{addr: gate.Addr}).behind(t, server)
}

// TestRotation shows what is left of several servers when the one that is
// followed is killed: everything, and the next one is followed. With 3.1.0 they
// are a cluster; the build of 2.1.1 cannot be one, so there they are two with
// the same applications.
func TestRotation(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Run("nacos-3.1.0/cluster", func(t *testing.T) {
		t.Parallel()
		nodes := testnacos.StartCluster(t, testnacos.Config{Version: testnacos.V3}, 3)
		sentTo(t, nodes)
		rotate(t, nodes[:2], nodes[2:])
	})
	t.Run("nacos-2.1.1/alone", func(t *testing.T) {
		t.Parallel()
		servers := make([]*testnacos.Server, 2)
		for i := range servers {
			servers[i] = testnacos.Start(t, testnacos.Config{Version: testnacos.V2})
		}
		rotate(t, servers, servers)
	})
}

// rotate follows two servers, and kills the one that is followed twice.
// Applications register at all of the others.
func rotate(t *testing.T, servers, others []*testnacos.Server) {
	clients := map[*testnacos.Server]*testnacos.Client{}
	register := func(except *testnacos.Server, name string, instances int) {
		t.Helper()
		var all []testnacos.Instance
		for i := range instances {
			all = append(all, testnacos.Up("10.1.0."+strconv.Itoa(1+i), 80))
		}
		for _, o := range others {
			if o == except {
				continue
			}
			if clients[o] == nil {
				clients[o] = o.Client(t)
			}
			clients[o].Register(t, "public", "RO", name, all...)
		}
	}
	register(nil, "web", 2)
	register(nil, "db", 1)
	c := follow(t, servers[0], func(c *nacos.Config) {
		c.Servers, c.Groups, c.Protocol = []string{servers[0].Addr, servers[1].Addr}, []string{"RO"}, "grpc"
	})
	c.awaitSynced(t)
	const web, db = "public/RO/web", "public/RO/db"
	c.await(t, "both", func() bool { return len(c.Held.Instances[web]) == 2 && len(c.Held.Instances[db]) == 1 })
	c.ForgetLeast()
	kill := func(dead *testnacos.Server, instances int) {
		t.Helper()
		dead.Kill()
		delete(clients, dead)
		register(dead, "web", instances)
		c.awaitService(t, "followed at the other", web, count(instances))
		c.awaitState(t, "")
	}
	kill(servers[0], 3)
	servers[0].Restart(t)
	register(servers[1], "web", 3)
	register(servers[1], "db", 1)
	kill(servers[1], 4) // the one that came back is followed
	register(servers[1], "later", 1)
	c.awaitService(t, "one that comes later", "public/RO/later", count(1))
	c.kept(t, map[string]int{web: 2, db: 1})
	c.await(t, "the outages were said", func() bool { return len(c.reasons()) >= 2 })
}

// sentTo shows that a server that recommends another one is left for that one,
// which is not the next in turn.
func sentTo(t *testing.T, nodes []*testnacos.Server) {
	app := nodes[1].Client(t)
	app.Register(t, "public", "ST", "web", testnacos.Up("10.1.0.1", 80))
	c, stop := followUntil(t, nodes[0], func(c *nacos.Config) {
		c.Servers, c.Groups, c.Protocol = []string{nodes[0].Addr, nodes[1].Addr, nodes[2].Addr}, []string{"ST"}, "grpc"
	})
	defer stop()
	c.awaitSynced(t)
	const web = "public/ST/web"
	c.awaitService(t, "followed", web, count(1))
	c.ForgetLeast()
	from, to := nodes[0], nodes[2]
	ids := from.Connections(t, "isthmus")
	if len(ids) != 1 {
		t.Fatalf("connections of isthmus %v, want one", ids)
	}
	from.SendAway(t, ids[0], to.Addr)
	testenv.Eventually(t, within, "a connection to the recommended server", func() (string, bool) {
		var at []int
		for _, n := range nodes {
			at = append(at, len(n.Connections(t, "isthmus")))
		}
		return fmt.Sprint("connections at each: ", at), slices.Equal(at, []int{0, 0, 1})
	})
	app.Register(t, "public", "ST", "web", testnacos.Up("10.1.0.1", 80), testnacos.Up("10.1.0.2", 80))
	c.awaitService(t, "followed there", web, count(2))
	c.kept(t, map[string]int{web: 1})
	c.saidNothing(t)
}
