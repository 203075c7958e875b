// Package testnacos runs Nacos servers for tests.
//
// The servers come from Maven Central, by the poms in tools/nacos-3.1.0 and
// tools/nacos-2.1.1 (a minute, 200 MB). Start runs one of a node, ready in 13
// to 18 seconds with a gigabyte of memory; StartCluster runs several of 3.x.
package testnacos

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/internal/nacosapp"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Version is a version of Nacos that tests run against.
type Version struct {
	// Name is used in names of tests.
	Name string
	// Tool is jars from Maven and the launcher in this repository.
	Tool testenv.Tool
	// V3 reports that its HTTP API is that of 3.x.
	V3 bool
}

// The versions of Nacos.
var (
	V3 = Version{Name: "nacos-3.1.0", Tool: testenv.MavenTool("nacos", "nacos-3.1.0", "nacos-3.1.0", "hessian-4.0.63.jar"), V3: true}
	V2 = Version{Name: "nacos-2.1.1", Tool: testenv.MavenTool("nacos-2", "nacos-2.1.1", "nacos-2.1.1", "")}
)

// Versions returns the versions that a test of every version runs
// against: the newest, or the older if [Compat].
func Versions() []Version {
	if testenv.Compat() {
		return []Version{V2}
	}
	return []Version{V3}
}

// Config configures a Nacos server. The zero value is the newest version,
// without access control and without the delay of pushes.
type Config struct {
	Version Version
	// Auth enables access control.
	Auth bool
	// TokenLife is the lifetime of tokens, in whole seconds; 0 means Nacos'
	// default, five hours.
	TokenLife time.Duration
	// DefaultPushDelay keeps Nacos' delay of half a second before a push.
	DefaultPushDelay bool
	// Istio enables the server's own bridge, at Nacos.IstioAddr.
	Istio bool
	// Properties are appended to the server's configuration.
	Properties map[string]string
}

// Server is a running Nacos server.
type Server struct {
	// Version is its version.
	Version Version
	// Addr is the HTTP API's address, host:port. Restarts keep it. GRPC is the
	// address for clients.
	Addr, GRPC string
	// IstioAddr is the address of the server's own bridge.
	IstioAddr string
	// Auth reports whether the server has access control, and Password is that
	// of the user nacos.
	Auth     bool
	Password string

	cfg Config
	*testenv.Process
	binary  string
	port    int
	cluster []string // the addresses of all nodes, empty for a single server

	mu        sync.Mutex // guards everything below
	token     string
	tokenTime time.Time
}

// nacosStart serializes the starts of servers: each occupies two processors,
// and fails if it cannot create its database within ten seconds.
var nacosStart sync.Mutex

// Start starts a Nacos server of one node and waits until it is ready.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	n := newServer(t, cfg)
	func() {
		nacosStart.Lock()
		defer nacosStart.Unlock()
		n.Serve(t, n.choosePorts)
	}()
	if cfg.Auth {
		n.createAdmin(t)
	}
	return n
}

// StartCluster starts a cluster of the given number of nodes, without
// access control, and waits until all are ready. It requires 3.x: the build of
// 2.x waits for a leader forever, as its Raft does nothing (see
// Nacos.DeleteService).
func StartCluster(t testing.TB, cfg Config, nodes int) []*Server {
	t.Helper()
	all := make([]*Server, nodes)
	for i := range all {
		all[i] = newServer(t, cfg)
	}
	nacosStart.Lock()
	defer nacosStart.Unlock()
	const attempts = 3
	for attempt := 1; ; attempt++ {
		var addrs []string
		for _, n := range all {
			n.choosePorts(t)
			addrs = append(addrs, n.Addr)
		}
		for _, n := range all {
			n.cluster = addrs
			n.launch(t)
		}
		var failed error
		clash := false
		for _, n := range all {
			if failed == nil {
				failed = n.TryReady(t, n.ready)
			}
			clash = clash || strings.Contains(n.Log(), "already in use")
		}
		if failed == nil {
			return all
		}
		for _, n := range all {
			n.Process.Signal(syscall.SIGKILL)
			<-n.Process.Exited()
		}
		if !clash || attempt == attempts {
			t.Fatal(failed)
		}
		t.Log("nacos: a port was taken by another process, trying others")
	}
}

func newServer(t testing.TB, cfg Config) *Server {
	t.Helper()
	if cfg.Version.Name == "" {
		cfg.Version = V3
	}
	n := &Server{Version: cfg.Version, Auth: cfg.Auth, cfg: cfg, binary: cfg.Version.Tool.Binary(t)}
	n.Process = testenv.NewServer(t, cfg.Version.Name, n.launch, n.ready)
	return n
}

// choosePorts reserves a port such that the ports that Nacos derives from it
// are free too, and removes what a start on others that failed has left.
func (n *Server) choosePorts(t testing.TB) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(n.Process.Dir, "data")); err != nil {
		t.Fatalf("nacos: %v", err)
	}
	for {
		n.port = testenv.FreePort(t)
		if testenv.ReservePorts(n.port+1000, n.port+1001, n.port-1000) {
			break
		}
	}
	n.Addr, n.GRPC = testenv.Loopback(n.port), testenv.Loopback(n.port+1000)
	n.IstioAddr = testenv.Loopback(testenv.FreePort(t))
}

func (n *Server) launch(t testing.TB) {
	t.Helper()
	properties := map[string]string{
		"server.port": strconv.Itoa(n.port), "nacos.server.main.port": strconv.Itoa(n.port), "server.servlet.contextPath": "/nacos",
		"nacos.inetutils.ip-address":                    "127.0.0.1",
		"nacos.core.auth.enabled":                       strconv.FormatBool(n.Auth),
		"nacos.core.auth.admin.enabled":                 strconv.FormatBool(n.Auth),
		"nacos.core.auth.system.type":                   "nacos",
		"nacos.core.auth.server.identity.key":           "isthmus",
		"nacos.core.auth.server.identity.value":         "test",
		"nacos.core.auth.plugin.nacos.token.secret.key": base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("k"), 48)),
		"nacos.core.auth.default.token.secret.key":      base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("k"), 48)),
		"nacos.istio.mcp.server.enabled":                strconv.FormatBool(n.cfg.Istio),
		"nacos.extension.naming.istio.enabled":          strconv.FormatBool(n.cfg.Istio),
		"nacos.istio.mcp.server.port":                   n.IstioAddr[strings.LastIndexByte(n.IstioAddr, ':')+1:],
		// The default waits of 3 s, in 3.1 for its own database and in a
		// cluster for a leader, are too short when many servers start at once.
		"db.pool.config.connectionTimeout":    "60000",
		"nacos.namespace.migrate.retry.times": "60",
		// The default is one attempt per 30 s to load the other nodes' data.
		"nacos.core.protocol.distro.data.load.retryDelayMs": "500",
		// As in the properties of the Nacos distribution.
		"nacos.security.ignore.urls": "/,/error,/v1/auth/**,/v3/auth/**,/actuator/**",
	}
	if life := int(n.cfg.TokenLife / time.Second); life > 0 {
		properties["nacos.core.auth.plugin.nacos.token.expire.seconds"] = strconv.Itoa(life)
		properties["nacos.core.auth.default.token.expire.seconds"] = strconv.Itoa(life)
	}
	if !n.Version.V3 { // see DeleteService
		properties["nacos.naming.clean.empty-service.interval"] = "1000"
		properties["nacos.naming.clean.empty-service.expired-time"] = "1000"
	}
	maps.Copy(properties, n.cfg.Properties)
	var text strings.Builder
	for k, v := range properties {
		fmt.Fprintf(&text, "%s=%s\n", k, v)
	}
	if err := os.MkdirAll(filepath.Join(n.Process.Dir, "conf"), 0o755); err != nil {
		t.Fatalf("nacos: %v", err)
	}
	n.Process.WriteFile(t, "conf/application.properties", text.String())
	args := []string{
		"-Xms512m", "-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.io.tmpdir=" + n.Process.Dir,
		"--add-opens", "java.base/java.lang=ALL-UNNAMED", "--add-opens", "java.base/java.util=ALL-UNNAMED",
		"--add-opens", "java.base/java.util.concurrent=ALL-UNNAMED", "--add-opens", "java.base/java.util.concurrent.atomic=ALL-UNNAMED",
		"--add-opens", "java.base/java.math=ALL-UNNAMED", "--add-opens", "java.base/java.time=ALL-UNNAMED",
		"-Dnacos.home=" + n.Process.Dir, "-Dnacos.logs.path=" + n.Process.Dir + "/logs",
		"-Dspring.config.additional-location=file:" + n.Process.Dir + "/conf/",
	}
	if len(n.cluster) == 0 {
		args = append(args, "-Dnacos.standalone=true")
	} else {
		n.Process.WriteFile(t, "conf/cluster.conf", strings.Join(n.cluster, "\n")+"\n")
		if err := os.Remove(n.distroLog()); err != nil && !errors.Is(err, os.ErrNotExist) { // of an earlier life, see ready
			t.Fatalf("nacos: %v", err)
		}
		args = append(args, "-Dnacos.standalone=false", "-DembeddedStorage=true")
	}
	if !n.cfg.DefaultPushDelay {
		args = append(args, "-Dnacos.naming.push.pushTaskDelay=0")
	}
	n.Process.Start(t, nil, n.binary, args...)
}

// ready reports whether the server serves its HTTP API and gRPC.
func (n *Server) ready() (seen string, ok bool) {
	path := "/v1/ns/operator/metrics"
	if n.Version.V3 {
		path = "/v3/admin/core/state/readiness"
	}
	if seen, ok := testenv.Answers("http://" + n.Addr + "/nacos" + path); !ok && !strings.Contains(seen, "status 403") {
		return seen, false
	}
	if len(n.cluster) > 0 {
		// A node loads the others' registrations at its start, but reports
		// itself ready earlier. The loaded data then permanently overwrites
		// registrations by its own clients (seen in 3.1.0).
		log, err := os.ReadFile(n.distroLog())
		if err != nil || !bytes.Contains(log, []byte("[DISTRO-INIT] load snapshot data success")) {
			return fmt.Sprintf("the other nodes' registrations are not loaded yet, error %v", err), false
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	c, err := nacosapp.Dial(ctx, n.GRPC, nil)
	if err != nil {
		return err.Error(), false
	}
	c.Close()
	return "", true
}

// distroLog is the log in which a cluster node reports that it has loaded the
// other nodes' registrations.
func (n *Server) distroLog() string {
	return filepath.Join(n.Process.Dir, "logs", "protocol-distro.log")
}

// createAdmin sets the password of the user nacos and waits until a login
// succeeds.
func (n *Server) createAdmin(t testing.TB) {
	t.Helper()
	n.Password = "nacos" // set by the database's schema in 2.x; only the console may change it
	if n.Version.V3 {
		n.Password = "nacos-test"
		if _, err := n.request(t.Context(), http.MethodPost, "/v3/auth/user/admin", url.Values{"password": {n.Password}}); err != nil {
			t.Fatal(err)
		}
	}
	n.awaitUsers(t)
}

// Login returns a token of a user.
func (n *Server) Login(user, password string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.AdminTime)
	defer cancel()
	body, err := n.request(ctx, http.MethodPost, "/v1/auth/users/login", url.Values{"username": {user}, "password": {password}})
	if err != nil {
		return "", err
	}
	var answer struct {
		AccessToken string `json:"accessToken"`
	}
	if json.Unmarshal([]byte(body), &answer) != nil || answer.AccessToken == "" {
		return "", fmt.Errorf("login as %s: %.200s", user, body)
	}
	return answer.AccessToken, nil
}

// Token returns an administrator's token that does not expire at once; ""
// without access control.
func (n *Server) Token(t testing.TB) (token string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "nacos to let its administrator log in", func() (seen string, ok bool) {
		var err error
		token, err = n.freshToken()
		return fmt.Sprint(err), err == nil
	})
	return token
}

// freshToken logs in as administrator, unless it did so just before.
func (n *Server) freshToken() (string, error) {
	if !n.Auth {
		return "", nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.token != "" && time.Since(n.tokenTime) < 2*time.Second {
		return n.token, nil
	}
	token, err := n.Login("nacos", n.Password)
	if err != nil {
		return "", err
	}
	n.token, n.tokenTime = token, time.Now()
	return token, nil
}

// Admin makes a request to the HTTP API as administrator, and returns the body
// of the answer. The path is without /nacos.
func (n *Server) Admin(t testing.TB, method, path string, form url.Values) string {
	t.Helper()
	body, err := n.TryAdmin(t, method, path, form)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// TryAdmin is Admin, but returns the error.
func (n *Server) TryAdmin(t testing.TB, method, path string, form url.Values) (string, error) {
	t.Helper()
	all := url.Values{"accessToken": {n.Token(t)}}
	maps.Copy(all, form)
	return n.request(t.Context(), method, path, all)
}

func (n *Server) request(ctx context.Context, method, path string, form url.Values) (string, error) {
	return testenv.Try(ctx, method, "http://"+n.Addr+"/nacos"+path+"?"+form.Encode(), nil, nil)
}

// CreateUser creates a user with read access to the namespaces, or only to
// NAMESPACE:GROUP:*. The login works within 15 s.
func (n *Server) CreateUser(t testing.TB, name, password string, namespaces ...string) {
	t.Helper()
	users, roles, permissions := "/v1/auth/users", "/v1/auth/roles", "/v1/auth/permissions"
	if n.Version.V3 {
		users, roles, permissions = "/v3/auth/user", "/v3/auth/role", "/v3/auth/permission"
	}
	role := "role-" + name
	n.Admin(t, http.MethodPost, users, url.Values{"username": {name}, "password": {password}})
	n.Admin(t, http.MethodPost, roles, url.Values{"username": {name}, "role": {role}})
	for _, ns := range namespaces {
		if !strings.Contains(ns, ":") {
			ns += ":*:*"
		}
		// 2.1.1 may not see a role at once that was just made.
		testenv.Eventually(t, testenv.Patience, "the permission of "+role, func() (string, bool) {
			_, err := n.TryAdmin(t, http.MethodPost, permissions, url.Values{"role": {role}, "resource": {ns}, "action": {"r"}})
			if err != nil && !strings.Contains(err.Error(), "not found") {
				t.Fatal(err)
			}
			return fmt.Sprint(err), err == nil
		})
	}
}

// CreateNamespace creates a namespace, if the version has an API for it outside
// of the console.
func (n *Server) CreateNamespace(t testing.TB, id string) {
	t.Helper()
	if n.Version.V3 {
		n.Admin(t, http.MethodPost, "/v3/admin/core/namespace", url.Values{"namespaceId": {id}, "namespaceName": {id}})
	}
}

// Protect sets a service's protection threshold: the ratio of healthy instances
// below which all count as healthy. It requires 3.x, see DeleteService.
func (n *Server) Protect(t testing.TB, namespace, group, name string, threshold float64) {
	t.Helper()
	form := url.Values{
		"namespaceId": {namespace}, "groupName": {group}, "serviceName": {name}, "ephemeral": {"true"},
		"protectThreshold": {strconv.FormatFloat(threshold, 'f', -1, 64)},
	}
	method := http.MethodPut
	if _, err := n.TryAdmin(t, http.MethodGet, "/v3/admin/ns/service", form); err != nil {
		method = http.MethodPost
	}
	n.Admin(t, method, "/v3/admin/ns/service", form)
}

// Connections returns the ids of the connections of clients with the given
// name. An id ends in the connection's source port.
func (n *Server) Connections(t testing.TB, app string) []string {
	t.Helper()
	path, _ := n.loader()
	type connections map[string]struct{ MetaInfo struct{ AppName string } }
	var answer struct{ Data connections } // 2.x answers with the connections themselves
	into := any(&answer)
	if !n.Version.V3 {
		into = &answer.Data
	}
	body := n.Admin(t, http.MethodGet, path+"/current", nil)
	if err := json.Unmarshal([]byte(body), into); err != nil {
		t.Fatalf("nacos: connections: %v: %.500s", err, body)
	}
	var ids []string
	for id, c := range answer.Data {
		if c.MetaInfo.AppName == app {
			ids = append(ids, id)
		}
	}
	return ids
}

// SendAway makes the server redirect a connection to the server at an address,
// or with "" to any.
func (n *Server) SendAway(t testing.TB, id, to string) {
	t.Helper()
	path, method := n.loader()
	n.Admin(t, method, path+"/reloadClient", url.Values{"connectionId": {id}, "redirectAddress": {to}})
}

// loader returns the endpoint that moves connections between servers.
func (n *Server) loader() (path, method string) {
	if n.Version.V3 {
		return "/v3/admin/core/loader", http.MethodPost
	}
	return "/v2/core/loader", http.MethodGet
}

// Restart restarts the server on the same ports after Kill, and waits until it
// is ready. Ephemeral instances are missing until their clients register them
// again.
func (n *Server) Restart(t testing.TB) {
	t.Helper()
	n.Process.Restart(t)
	if n.Auth {
		n.awaitUsers(t)
	}
}

// awaitUsers waits until the server has loaded its users, shortly after it is
// ready.
func (n *Server) awaitUsers(t testing.TB) {
	t.Helper()
	n.mu.Lock()
	n.token = ""
	n.mu.Unlock()
	n.Token(t)
	probe := n.Client(t)
	defer probe.Close()
	testenv.Eventually(t, testenv.Patience, "nacos to know its users", func() (seen string, ok bool) {
		err := probe.TryRegister(t.Context(), "public", "PROBE", "probe", Up("127.0.0.1", 1))
		return fmt.Sprint(err), err == nil
	})
}

// Instance is one instance to register.
type Instance = model.Instance

// Up returns a healthy, enabled, ephemeral instance.
func Up(ip string, port int) Instance {
	return Instance{Ip: ip, Port: uint64(port), Weight: 1, Healthy: true, Enable: true, Ephemeral: true, ClusterName: "DEFAULT", Metadata: map[string]string{}}
}

// Persist registers or removes a persistent instance. It requires 3.x, see
// DeleteService.
func (n *Server) Persist(t testing.TB, namespace, group, name string, i Instance, remove bool) {
	t.Helper()
	method := http.MethodPost
	if remove {
		method = http.MethodDelete
	}
	form := url.Values{
		"namespaceId": {namespace}, "groupName": {group}, "serviceName": {name}, "ip": {i.Ip}, "port": {strconv.FormatUint(i.Port, 10)},
		"ephemeral": {"false"}, "clusterName": {i.ClusterName}, "healthy": {strconv.FormatBool(i.Healthy)}, "enabled": {strconv.FormatBool(i.Enable)},
		"weight": {strconv.FormatFloat(i.Weight, 'f', -1, 64)},
	}
	n.Admin(t, method, "/v3/admin/ns/instance", form)
}

// DeleteService deletes a service, which must have no instance. The 2.x build
// has no Raft (its JRaftProtocol.addRequestProcessors does nothing), so it
// supports neither persistent instances nor deletion: the server itself deletes
// empty services, from one minute after its start on.
func (n *Server) DeleteService(t testing.TB, namespace, group, name string) {
	t.Helper()
	if n.Version.V3 {
		n.Admin(t, http.MethodDelete, "/v3/admin/ns/service", url.Values{"namespaceId": {namespace}, "groupName": {group}, "serviceName": {name}})
	}
}

// Client is a connection of an application. Its registrations last as long
// as the connection.
type Client struct{ *nacosapp.Client }

// Client connects as an application does. The test's end closes the connection.
func (n *Server) Client(t testing.TB) *Client {
	t.Helper()
	var c *nacosapp.Client
	testenv.Eventually(t, testenv.Patience, "a client to connect to nacos", func() (seen string, ok bool) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		var err error
		c, err = nacosapp.Dial(ctx, n.GRPC, n.freshToken)
		return fmt.Sprint(err), err == nil
	})
	t.Cleanup(c.Close)
	return &Client{c}
}

// Register replaces the client's instances of the service. Without instances it
// deregisters all.
func (c *Client) Register(t testing.TB, namespace, group, name string, instances ...Instance) {
	t.Helper()
	if err := c.TryRegister(t.Context(), namespace, group, name, instances...); err != nil {
		t.Fatalf("nacos: register %d instances of %s/%s/%s: %v", len(instances), namespace, group, name, err)
	}
}

// TryRegister is Register, but returns the error.
func (c *Client) TryRegister(ctx context.Context, namespace, group, name string, instances ...Instance) error {
	return c.Client.Register(ctx, namespace, group, name, instances...)
}

// Subscribe subscribes to a service and sets onPush, which receives the pushes
// of all subscribed services.
func (c *Client) Subscribe(t testing.TB, namespace, group, name string, onPush func(model.Service)) {
	t.Helper()
	c.OnPush(onPush)
	if err := c.Client.Subscribe(t.Context(), namespace, group, name); err != nil {
		t.Fatalf("nacos: subscribe to %s/%s/%s: %v", namespace, group, name, err)
	}
}
