// Package testetcd runs etcd servers for tests.
//
// The newest is built from the module pinned in tools/etcd (half a minute), 3.4
// from that in tools/etcd-3.4. Start runs one that answers in a tenth of a
// second, StartCluster several.
package testetcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Versions of etcd as tools: the newest, and 3.4.13, the first one whose watch
// can be asked for progress being 3.4.
var (
	Tool   = testenv.GoTool("etcd", "etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3")
	Tool34 = testenv.GoTool("etcd-3.4", "etcd", "go.etcd.io/etcd", "go.etcd.io/etcd")
)

// Config configures an etcd server. The zero value is a server of one
// member, of the newest version, without authentication and TLS.
type Config struct {
	// Old starts Tool34.
	Old bool
	// CertFile and KeyFile make clients use TLS. ClientCA, if set, signs the
	// certificates that clients must have.
	CertFile, KeyFile, ClientCA string
	// TokenTTL is how long a login counts without being used; zero means the
	// server's default, five minutes.
	TokenTTL time.Duration
	// Args are appended to the command line.
	Args []string
}

// Server is a running etcd server.
type Server struct {
	// URL is where clients connect; Addr is the same as host:port. Restarts
	// keep both.
	URL, Addr string
	// Client has no credentials until EnableAuth was called, and then those of
	// root. It is nil if the server wants client certificates.
	Client *clientv3.Client

	cfg Config
	*testenv.Process
	binary string
	name   string
	ports  etcdPorts
	// cluster names all members with their peer URLs.
	cluster string
}

type etcdPorts struct{ client, peer, metrics int }

// Start starts a server and waits until it is ready.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	e := newServer(t, cfg, "etcd")
	e.Serve(t, e.choosePorts)
	e.connect(t, clientv3.Config{})
	return e
}

// StartCluster starts the members of one etcd and waits until all are
// ready.
func StartCluster(t testing.TB, old bool, members int) []*Server {
	t.Helper()
	var all []*Server
	var names []string
	for i := range members {
		// Elections that a busy machine does not set off.
		e := newServer(t, Config{Old: old, Args: []string{"--heartbeat-interval=100", "--election-timeout=1500"}}, "etcd-"+strconv.Itoa(i+1))
		e.choosePorts(t)
		all, names = append(all, e), append(names, e.cluster)
	}
	for _, e := range all {
		e.cluster = strings.Join(names, ",")
		e.Launch(t)
	}
	for _, e := range all {
		e.WaitReady(t)
		e.connect(t, clientv3.Config{})
	}
	return all
}

func newServer(t testing.TB, cfg Config, name string) *Server {
	t.Helper()
	tool := Tool
	if cfg.Old {
		tool = Tool34
	}
	e := &Server{cfg: cfg, binary: tool.Binary(t), name: name}
	e.Process = testenv.NewServer(t, name, e.launch, e.ready)
	return e
}

func (e *Server) choosePorts(t testing.TB) {
	e.ports = etcdPorts{client: testenv.FreePort(t), peer: testenv.FreePort(t), metrics: testenv.FreePort(t)}
	e.Addr = testenv.Loopback(e.ports.client)
	e.URL = "http://" + e.Addr
	if e.cfg.CertFile != "" {
		e.Addr = "localhost:" + strconv.Itoa(e.ports.client)
		e.URL = "https://" + e.Addr
	}
	e.cluster = e.name + "=" + e.peerURL()
}

func (e *Server) peerURL() string { return "http://" + testenv.Loopback(e.ports.peer) }

func (e *Server) launch(t testing.TB) {
	t.Helper()
	listen := strings.Replace(e.URL, "localhost", "127.0.0.1", 1)
	args := []string{
		"--name=" + e.name, "--data-dir=" + e.Data, "--listen-client-urls=" + listen, "--advertise-client-urls=" + e.URL,
		"--listen-peer-urls=" + e.peerURL(), "--initial-advertise-peer-urls=" + e.peerURL(), "--initial-cluster=" + e.cluster,
		"--listen-metrics-urls=http://" + testenv.Loopback(e.ports.metrics), "--log-level=warn",
		"--heartbeat-interval=10", "--election-timeout=100",
	}
	if e.cfg.CertFile != "" {
		args = append(args, "--cert-file="+e.cfg.CertFile, "--key-file="+e.cfg.KeyFile)
	}
	if e.cfg.ClientCA != "" {
		args = append(args, "--client-cert-auth", "--trusted-ca-file="+e.cfg.ClientCA)
	}
	if e.cfg.TokenTTL > 0 {
		args = append(args, fmt.Sprintf("--auth-token-ttl=%d", int(e.cfg.TokenTTL.Seconds())))
	}
	if e.cfg.Old {
		args = append(args, "--logger=zap")
	} else { // 3.4 would then lose at a kill what it has not written yet
		args = append(args, "--unsafe-no-fsync")
	}
	e.Process.Start(t, nil, e.binary, append(args, e.cfg.Args...)...)
}

// page returns the URL of a page for operators.
func (e *Server) page(path string) string {
	return "http://" + testenv.Loopback(e.ports.metrics) + path
}

func (e *Server) ready() (seen string, ok bool) { return testenv.Answers(e.page("/health")) }

// connect makes Client, unless the server has TLS and the client has not.
func (e *Server) connect(t testing.TB, cfg clientv3.Config) {
	t.Helper()
	if e.cfg.CertFile != "" && cfg.TLS == nil {
		return
	}
	cfg.Endpoints, cfg.DialTimeout, cfg.Logger = []string{e.URL}, testenv.AdminTime, zap.NewNop()
	client, err := clientv3.New(cfg)
	if err != nil {
		t.Fatalf("etcd: make a client: %v", err)
	}
	t.Cleanup(func() { _ = client.Close() })
	e.Client = client
}

// ConnectTLS makes Client for a server that wants a client certificate.
func (e *Server) ConnectTLS(t testing.TB, config *tls.Config) {
	t.Helper()
	e.connect(t, clientv3.Config{TLS: config})
}

// Put writes a key, with a lease if it is not zero.
func (e *Server) Put(t testing.TB, key, value string, lease ...clientv3.LeaseID) {
	t.Helper()
	var options []clientv3.OpOption
	for _, id := range lease {
		options = append(options, clientv3.WithLease(id))
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.AdminTime)
	defer cancel()
	if _, err := e.Client.Put(ctx, key, value, options...); err != nil {
		t.Fatalf("etcd: put %q: %v", key, err)
	}
}

// Delete deletes a key.
func (e *Server) Delete(t testing.TB, key string, options ...clientv3.OpOption) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.AdminTime)
	defer cancel()
	if _, err := e.Client.Delete(ctx, key, options...); err != nil {
		t.Fatalf("etcd: delete %q: %v", key, err)
	}
}

// Grant makes a lease that nobody keeps alive.
func (e *Server) Grant(t testing.TB, ttl time.Duration) clientv3.LeaseID {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.AdminTime)
	defer cancel()
	lease, err := e.Client.Grant(ctx, int64(ttl.Seconds()))
	if err != nil {
		t.Fatalf("etcd: grant a lease: %v", err)
	}
	return lease.ID
}

// EnableAuth enables authentication: root with a password of its own, which
// Client then uses, and a user who may read the keys with a prefix.
func (e *Server) EnableAuth(t testing.TB, user, password, prefix string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.AdminTime)
	defer cancel()
	_, user1 := e.Client.UserAdd(ctx, "root", "of-root")
	_, role1 := e.Client.RoleAdd(ctx, "root")
	_, grant1 := e.Client.UserGrantRole(ctx, "root", "root")
	_, user2 := e.Client.UserAdd(ctx, user, password)
	_, role2 := e.Client.RoleAdd(ctx, "reader")
	_, permission := e.Client.RoleGrantPermission(ctx, "reader", prefix, clientv3.GetPrefixRangeEnd(prefix), clientv3.PermissionType(clientv3.PermRead))
	_, grant2 := e.Client.UserGrantRole(ctx, user, "reader")
	_, enable := e.Client.AuthEnable(ctx)
	if err := errors.Join(user1, role1, grant1, user2, role2, permission, grant2, enable); err != nil {
		t.Fatalf("etcd: enable authentication: %v", err)
	}
	e.Login(t)
}

// Login makes Client anew, with the credentials of root. A client whose token
// is over does so by itself, but not at 3.4, which refuses the request for a
// new token because of the old one.
func (e *Server) Login(t testing.TB) {
	t.Helper()
	e.connect(t, clientv3.Config{Username: "root", Password: "of-root"})
}

// Metric returns the value of a gauge without labels.
func (e *Server) Metric(t testing.TB, name string) float64 {
	t.Helper()
	all := testenv.Metrics(t, e.page("/metrics"))[name].GetMetric()
	if len(all) != 1 {
		t.Fatalf("etcd: no metric %s", name)
	}
	return all[0].GetGauge().GetValue()
}

// ClientsTool is test/etcd/clients: a program that registers instances with
// the libraries of Kratos, go-micro and etcd itself.
var ClientsTool = testenv.OwnTool("etcd-clients", "clients", ".", "test", "etcd", "clients")

// RegisterWith registers an instance in a process of its own with the library
// of kind: kratos, go-micro or grpc. It is kept alive until deregister is
// called.
func (e *Server) RegisterWith(t testing.TB, kind, service, id, address string) (deregister func()) {
	t.Helper()
	in, held, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p := testenv.NewProcess(t, kind)
	p.Stdin = in
	p.Start(t, nil, ClientsTool.Binary(t), kind, e.URL, service, id, address)
	in.Close() // the child has its own descriptor
	p.Await(t, func() (string, bool) { return "its output", strings.Contains(p.Output(), "registered\n") })
	return func() {
		p.MayEnd()
		held.Close()
		testwait.Receive(t, testenv.Patience, "the end of "+kind, p.Exited())
	}
}
