// Package testzookeeper runs ZooKeeper servers for tests.
//
// The newest comes from Maven Central by the pom in tools/zookeeper (seconds),
// 3.4 by that in tools/zookeeper-3.4. Start runs one, which answers in half a
// second; StartEnsemble runs three.
package testzookeeper

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Tool is a ZooKeeper server: jars from Maven and the launcher in this
// repository.
var Tool = testenv.MavenTool("zookeeper", "zookeeper", "zookeeper", "")

// OldTool is a server without watches that stay, of before 3.6.
var OldTool = testenv.MavenTool("zookeeper-3.4", "zookeeper-3.4", "zookeeper", "")

// Config configures a ZooKeeper server. The zero value is a single
// server that everyone may use.
type Config struct {
	// Old starts ZooKeeperOldTool.
	Old bool
	// Users, by name, are the passwords of SASL DIGEST-MD5. With any, a client
	// has to authenticate.
	Users map[string]string
	// KeyStore and TrustStore are PEM files; with them the server has TLS
	// alone, and wants a client certificate. KeyStore has the key before the
	// certificate.
	KeyStore, TrustStore string
}

// Server is a running server.
type Server struct {
	// Addr is its address as host:port. Restarts keep it.
	Addr string
	// Client is a client of another implementation, for a server without TLS
	// and users.
	Client *zk.Conn

	cfg Config
	*testenv.Process
	binary string
	port   int
	plain  int      // the port without TLS, for the operator
	peers  []string // of an ensemble: the lines of the configuration that name its servers
}

// Start starts a server and waits until it serves.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	tool := Tool
	if cfg.Old {
		tool = OldTool
	}
	z := newServer(t, "zookeeper", tool, cfg)
	z.Serve(t, func(t testing.TB) {
		z.port, z.plain = testenv.FreePort(t), testenv.FreePort(t)
		if cfg.KeyStore == "" {
			z.plain = z.port
		}
		z.Addr = testenv.Loopback(z.port)
	})
	if cfg.KeyStore == "" && len(cfg.Users) == 0 {
		z.Client = z.Connect(t)
	}
	return z
}

func newServer(t testing.TB, name string, tool testenv.Tool, cfg Config) *Server {
	t.Helper()
	z := &Server{cfg: cfg, binary: tool.Binary(t)}
	z.Process = testenv.NewServer(t, name, z.launch, z.ready)
	return z
}

// StartEnsemble starts the servers of one ZooKeeper and waits until
// all of them serve. The first one leads.
func StartEnsemble(t testing.TB, servers int) []*Server {
	t.Helper()
	all, peers := make([]*Server, servers), make([]string, servers)
	for i := range all {
		all[i] = newServer(t, fmt.Sprint("zookeeper-", i+1), Tool, Config{})
		all[i].plain = testenv.FreePort(t)
		all[i].Addr = testenv.Loopback(all[i].plain)
		if err := os.WriteFile(filepath.Join(all[i].Data, "myid"), []byte(strconv.Itoa(i+1)), 0o600); err != nil {
			t.Fatal(err)
		}
		peers[i] = fmt.Sprintf("server.%d=%s:%d", i+1, testenv.Loopback(testenv.FreePort(t)), testenv.FreePort(t))
	}
	for _, z := range all {
		z.peers = append(peers, "initLimit=60", "syncLimit=20")
		z.Launch(t)
	}
	for _, z := range all {
		z.WaitReady(t)
		z.Client = z.Connect(t)
	}
	i := slices.IndexFunc(all, (*Server).leads)
	if i < 0 {
		t.Fatal("zookeeper: no server leads")
	}
	all[0], all[i] = all[i], all[0]
	return all
}

// leads reports whether a server is the leader of its ensemble.
func (z *Server) leads() bool {
	text, _ := z.say("srvr")
	return strings.Contains(text, "Mode: leader")
}

func (z *Server) launch(t testing.TB) {
	t.Helper()
	lines := []string{
		"dataDir=" + z.Data, "clientPortAddress=127.0.0.1", "clientPort=" + strconv.Itoa(z.plain), "admin.enableServer=false", "tickTime=500",
		"4lw.commands.whitelist=*", "maxClientCnxns=0", "forceSync=no", "extendedTypesEnabled=true",
	}
	args := []string{"-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.io.tmpdir=" + z.Process.Dir}
	if z.cfg.KeyStore != "" {
		lines = append(lines, "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory", "secureClientPort="+strconv.Itoa(z.port),
			"secureClientPortAddress=127.0.0.1", "ssl.keyStore.location="+z.cfg.KeyStore, "ssl.keyStore.type=PEM",
			"ssl.trustStore.location="+z.cfg.TrustStore, "ssl.trustStore.type=PEM", "ssl.hostnameVerification=false")
	}
	if len(z.cfg.Users) > 0 {
		jaas := "Server {\n  org.apache.zookeeper.server.auth.DigestLoginModule required"
		for name, password := range z.cfg.Users {
			jaas += fmt.Sprintf("\n  user_%s=%q", name, password)
		}
		lines = append(lines, "authProvider.sasl=org.apache.zookeeper.server.auth.SASLAuthenticationProvider", "sessionRequireClientSASLAuth=true")
		args = append(args, "-Djava.security.auth.login.config="+z.Process.WriteFile(t, "jaas.conf", jaas+";\n};\n"))
	}
	lines = append(lines, z.peers...)
	config := z.Process.WriteFile(t, "zoo.cfg", strings.Join(lines, "\n")+"\n")
	z.Process.Start(t, nil, z.binary, append(args, "-Dzookeeper.config="+config)...)
}

func (z *Server) ready() (seen string, ok bool) {
	text, err := z.say("srvr")
	return fmt.Sprint(text, err), err == nil && strings.Contains(text, "Mode: ") // an ensemble has none until it has a leader
}

// sayTime is how long the answer to a command for operators is waited for
// before the next try.
const sayTime = 2 * time.Second

// say sends a command for operators, of four letters, and returns the answer.
func (z *Server) say(word string) (string, error) {
	// A server that is just starting may never answer a connection.
	c, err := net.DialTimeout("tcp", testenv.Loopback(z.plain), sayTime)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(sayTime)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, word); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// Metric returns what mntr says of a name.
func (z *Server) Metric(t testing.TB, name string) string {
	t.Helper()
	var text string
	testenv.Eventually(t, testenv.Patience, "an answer to mntr", func() (string, bool) {
		var err error
		text, err = z.say("mntr")
		return fmt.Sprint(err), err == nil
	})
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+"\t"); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("zookeeper: mntr has no %s", name)
	return ""
}

type silent struct{}

func (silent) Printf(string, ...any) {}

// Connect returns a client with a session of its own, whose ephemeral nodes go
// with it.
func (z *Server) Connect(t testing.TB) *zk.Conn {
	t.Helper()
	for end := time.Now().Add(testenv.Patience); ; {
		c, _, err := zk.Connect([]string{z.Addr}, 4*time.Second, zk.WithLogger(silent{}))
		if err != nil {
			t.Fatalf("zookeeper: connect: %v", err)
		}
		// It waits for an answer ten times as long as for anything else, and a
		// server that just starts may leave it without one.
		if _, ok := testwait.Poll(t, 5*time.Second, nil, func() (string, bool) { return "", c.State() == zk.StateHasSession }); ok {
			t.Cleanup(c.Close)
			return c
		}
		c.Close()
		if time.Now().After(end) {
			t.Fatalf("zookeeper: no session within %v", testenv.Patience)
		}
	}
}

// Put creates a node, with those above it, or changes its data.
func (z *Server) Put(t testing.TB, path, data string) {
	t.Helper()
	z.put(t, z.Client, path, data, zk.FlagPersistent)
}

// PutEphemeral is Put for a node that goes with the session of a client.
func (z *Server) PutEphemeral(t testing.TB, c *zk.Conn, path, data string) {
	t.Helper()
	z.put(t, c, path, data, zk.FlagEphemeral)
}

// put tries again: a client that has lost its server says so once or twice
// before it is connected again.
func (z *Server) put(t testing.TB, c *zk.Conn, path, data string, flags int32) {
	t.Helper()
	testenv.Eventually(t, testenv.AdminTime, "zookeeper to put "+path, func() (string, bool) {
		_, err := c.Create(path, []byte(data), flags, zk.WorldACL(zk.PermAll))
		if errors.Is(err, zk.ErrNoNode) {
			z.put(t, c, filepath.Dir(path), "", zk.FlagPersistent)
			_, err = c.Create(path, []byte(data), flags, zk.WorldACL(zk.PermAll))
		}
		if errors.Is(err, zk.ErrNodeExists) {
			_, err = c.Set(path, []byte(data), -1)
		}
		return fmt.Sprint(err), err == nil
	})
}

// Load creates the nodes, by path, of services 0 to n-1, with those above them,
// some services in each transaction.
func (z *Server) Load(t testing.TB, n int, of func(service int) map[string]string) {
	t.Helper()
	known := map[string]bool{"/": true}
	var all []any
	var create func(path, data string)
	create = func(path, data string) {
		if known[path] {
			return
		}
		create(filepath.Dir(path), "")
		known[path] = true
		all = append(all, &zk.CreateRequest{Path: path, Data: []byte(data), Acl: zk.WorldACL(zk.PermAll)})
	}
	for s := range n {
		nodes := of(s)
		for _, path := range slices.Sorted(maps.Keys(nodes)) {
			create(path, nodes[path])
		}
		if len(all) > 300 || s == n-1 {
			if _, err := z.Client.Multi(all...); err != nil {
				t.Fatalf("zookeeper: create %d nodes: %v", len(all), err)
			}
			all = nil
		}
	}
}

// Delete deletes a node.
func (z *Server) Delete(t testing.TB, path string) {
	t.Helper()
	testenv.Eventually(t, testenv.AdminTime, "zookeeper to delete "+path, func() (string, bool) {
		err := z.Client.Delete(path, -1)
		return fmt.Sprint(err), err == nil || errors.Is(err, zk.ErrNoNode)
	})
}

// RestartEmpty is [testenv.Process.RestartEmpty].
func (z *Server) RestartEmpty(t testing.TB) {
	t.Helper()
	z.Process.RestartEmpty(t)
	// A client refuses a server that has seen less than it has itself.
	z.Client.Close()
	z.Client = z.Connect(t)
}
