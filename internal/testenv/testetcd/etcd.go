package testetcd

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Versions of etcd as tools: the newest, and 3.4.13, the first one whose watch
// can be asked for progress being 3.4.
var (
	Tool   = testenv.GoTool("etcd", "etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3")
	Tool34 = testenv.GoTool("etcd-3.4", "etcd", "go.etcd.io/etcd", "go.etcd.io/etcd")
)

// Version is a version of etcd that tests run against; the zero value is
// the newest.
type Version struct{ old bool }

// Compat returns the version that the tests of the adapter run against: the
// newest, or the oldest if [Compat].
func Compat() Version { return Version{old: testenv.Compat()} }

// Config configures an etcd server. The zero value is a server of one
// member, of the newest version, without authentication and TLS.
type Config struct {
	Version Version
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
	dir    string
	ports  etcdPorts
	// cluster names all members with their peer URLs.
	cluster string
	http    *http.Client
}

type etcdPorts struct{ client, peer, metrics int }

// Start starts a server and waits until it is ready.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	e := newEtcd(t, cfg, "etcd")
	e.Process.StartReady(t, func() {
		e.choosePorts(t)
		e.cluster = e.member()
		e.launch(t)
	}, e.ready)
	e.connect(t, "", "")
	return e
}

// StartCluster starts the members of one etcd and waits until all are
// ready.
func StartCluster(t testing.TB, version Version, members int) []*Server {
	t.Helper()
	var all []*Server
	var names []string
	for i := range members {
		// Elections that a busy machine does not set off.
		e := newEtcd(t, Config{Version: version, Args: []string{"--heartbeat-interval=100", "--election-timeout=1500"}}, "etcd-"+strconv.Itoa(i+1))
		e.choosePorts(t)
		all, names = append(all, e), append(names, e.member())
	}
	for _, e := range all {
		e.cluster = strings.Join(names, ",")
		e.launch(t)
	}
	for _, e := range all {
		if err := e.Process.WaitReady(t, e.ready); err != nil {
			t.Fatal(err)
		}
		e.connect(t, "", "")
	}
	return all
}

func newEtcd(t testing.TB, cfg Config, name string) *Server {
	t.Helper()
	tool := Tool
	if cfg.Version.old {
		tool = Tool34
	}
	e := &Server{cfg: cfg, binary: tool.Binary(t), name: name, dir: t.TempDir(), http: &http.Client{Timeout: testenv.AdminTime, Transport: &http.Transport{}}}
	t.Cleanup(e.http.CloseIdleConnections)
	e.Process = testenv.NewProcess(t, name)
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
}

func (e *Server) peerURL() string { return "http://" + testenv.Loopback(e.ports.peer) }

func (e *Server) member() string { return e.name + "=" + e.peerURL() }

func (e *Server) launch(t testing.TB) {
	t.Helper()
	listen := strings.Replace(e.URL, "localhost", "127.0.0.1", 1)
	args := []string{
		"--name=" + e.name, "--data-dir=" + e.dir, "--listen-client-urls=" + listen, "--advertise-client-urls=" + e.URL,
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
	if e.cfg.Version.old {
		args = append(args, "--logger=zap")
	} else { // 3.4 would then lose at a kill what it has not written yet
		args = append(args, "--unsafe-no-fsync")
	}
	e.Process.Start(t, nil, e.binary, append(args, e.cfg.Args...)...)
}

func (e *Server) ready() (seen string, ok bool) {
	text, err := e.get("/health")
	return fmt.Sprint(text, err), err == nil
}

// get reads a path of the server's HTTP listener for operators.
func (e *Server) get(path string) (string, error) {
	res, err := e.http.Get("http://" + testenv.Loopback(e.ports.metrics) + path)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = errors.New(res.Status)
	}
	return string(b), err
}

// connect makes Client.
func (e *Server) connect(t testing.TB, user, password string) {
	t.Helper()
	if e.cfg.CertFile != "" {
		return
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{e.URL}, Username: user, Password: password, DialTimeout: testenv.AdminTime, Logger: zap.NewNop()})
	if err != nil {
		t.Fatalf("etcd: make a client: %v", err)
	}
	t.Cleanup(func() { _ = client.Close() })
	e.Client = client
}

// Restart starts the server again on the same ports with its data after Kill,
// and waits until it is ready.
func (e *Server) Restart(t testing.TB) {
	t.Helper()
	e.launch(t)
	if err := e.Process.WaitReady(t, e.ready); err != nil {
		t.Fatal(err)
	}
}

// RestartEmpty is Restart without the data.
func (e *Server) RestartEmpty(t testing.TB) {
	t.Helper()
	if err := os.RemoveAll(e.dir); err != nil {
		t.Fatalf("etcd: remove its data: %v", err)
	}
	e.Restart(t)
}

// Put writes a key, with a lease if it is not zero.
func (e *Server) Put(t testing.TB, key, value string, lease ...clientv3.LeaseID) {
	t.Helper()
	if err := e.TryPut(t.Context(), key, value, lease...); err != nil {
		t.Fatal(err)
	}
}

// TryPut is Put, but returns the error.
func (e *Server) TryPut(ctx context.Context, key, value string, lease ...clientv3.LeaseID) error {
	var options []clientv3.OpOption
	for _, id := range lease {
		options = append(options, clientv3.WithLease(id))
	}
	ctx, cancel := context.WithTimeout(ctx, testenv.AdminTime)
	defer cancel()
	if _, err := e.Client.Put(ctx, key, value, options...); err != nil {
		return fmt.Errorf("etcd: put %q: %w", key, err)
	}
	return nil
}

// Delete deletes a key.
func (e *Server) Delete(t testing.TB, key string, options ...clientv3.OpOption) {
	t.Helper()
	if err := e.TryDelete(t.Context(), key, options...); err != nil {
		t.Fatal(err)
	}
}

// TryDelete is Delete, but returns the error.
func (e *Server) TryDelete(ctx context.Context, key string, options ...clientv3.OpOption) error {
	ctx, cancel := context.WithTimeout(ctx, testenv.AdminTime)
	defer cancel()
	if _, err := e.Client.Delete(ctx, key, options...); err != nil {
		return fmt.Errorf("etcd: delete %q: %w", key, err)
	}
	return nil
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
	const root = "root"
	_, err := e.Client.UserAdd(ctx, root, "of-root")
	for _, next := range []func() error{
		func() error { _, err := e.Client.RoleAdd(ctx, root); return err },
		func() error { _, err := e.Client.UserGrantRole(ctx, root, root); return err },
		func() error { _, err := e.Client.UserAdd(ctx, user, password); return err },
		func() error { _, err := e.Client.RoleAdd(ctx, "reader"); return err },
		func() error {
			_, err := e.Client.RoleGrantPermission(ctx, "reader", prefix, clientv3.GetPrefixRangeEnd(prefix), clientv3.PermissionType(clientv3.PermRead))
			return err
		},
		func() error { _, err := e.Client.UserGrantRole(ctx, user, "reader"); return err },
		func() error { _, err := e.Client.AuthEnable(ctx); return err },
	} {
		if err == nil {
			err = next()
		}
	}
	if err != nil {
		t.Fatalf("etcd: enable authentication: %v", err)
	}
	e.Login(t)
}

// Login makes Client anew, with the credentials of root. A client whose token
// is over does so by itself, but not at 3.4, which refuses the request for a
// new token because of the old one.
func (e *Server) Login(t testing.TB) {
	t.Helper()
	e.connect(t, "root", "of-root")
}

// Metric returns the value of a metric without labels.
func (e *Server) Metric(t testing.TB, name string) string {
	t.Helper()
	text, err := e.get("/metrics")
	if err != nil {
		t.Fatalf("etcd: metrics: %v", err)
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("etcd: no metric %s", name)
	return ""
}

// ConnectTLS makes Client for a server that wants a client certificate.
func (e *Server) ConnectTLS(t testing.TB, config *tls.Config) {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{e.URL}, TLS: config, DialTimeout: testenv.AdminTime, Logger: zap.NewNop()})
	if err != nil {
		t.Fatalf("etcd: make a client: %v", err)
	}
	t.Cleanup(func() { _ = client.Close() })
	e.Client = client
}

// ClientsTool is test/etcd/clients: a program that registers instances with
// the libraries of Kratos, go-micro and etcd itself.
var ClientsTool = testenv.OwnTool("etcd-clients", "clients", ".", "test", "etcd", "clients")

// RegisterWith registers an instance in a process of its own with the library
// of kind: kratos, go-micro or grpc. It is kept alive until deregister is
// called, at the latest at the end of the test.
func (e *Server) RegisterWith(t testing.TB, kind, service, id, address string) (deregister func()) {
	t.Helper()
	cmd := exec.Command(ClientsTool.Binary(t), kind, e.URL, service, id, address)
	testenv.OwnGroup(cmd)
	var said bytes.Buffer
	cmd.Stderr = &said
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := testenv.StartCommand(cmd); err != nil {
		t.Fatalf("%s: start: %v", kind, err)
	}
	deregister = sync.OnceFunc(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v\n%s", kind, err, said.String())
		}
	})
	t.Cleanup(deregister)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if lines.Text() == "registered" {
			return deregister
		}
	}
	deregister()
	t.Fatalf("%s: not registered\n%s", kind, said.String())
	return nil
}
