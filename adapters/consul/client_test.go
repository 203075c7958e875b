package consul

import (
	"bytes"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// startHTTP runs an adapter against a server, over a real network.
func startHTTP(t *testing.T, server *httptest.Server, change ...func(*Config)) *recorder {
	t.Helper()
	a, err := newAdapter(config(append([]func(*Config){func(c *Config) { c.Address = server.URL }}, change...)...), plugin.Env{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	r, _ := start(t, a)
	return r
}

// connections counts the connections that a server has accepted.
func connections(server *httptest.Server) *atomic.Int64 {
	n := new(atomic.Int64)
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			n.Add(1)
		}
	}
	return n
}

// TestHTTPSConnections shows that over https hundreds of watches share a few
// connections, and that the authority and name of the configuration are what is
// verified.
func TestHTTPSConnections(t *testing.T) {
	const n = 450
	f := newFake(t)
	for i := range n {
		f.set("svc"+strconv.Itoa(i), entry("svc", "i", 80))
	}
	server := httptest.NewUnstartedServer(f)
	server.EnableHTTP2 = true
	conns := connections(server)
	server.StartTLS()
	t.Cleanup(server.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(ca, block, 0o600); err != nil {
		t.Fatal(err)
	}
	r := startHTTP(t, server, func(c *Config) { c.TLS = plugin.TLS{CAFile: ca, ServerName: "example.com"} })
	r.AwaitSynced(t, 30*time.Second)
	f.set("svc7", entry("svc", "i", 81))
	r.Await(t, 30*time.Second, "the change", func(h *plugintest.Held) bool { return h.Sets == n+1 })
	if got := conns.Load(); got > 2*(n/perTransport+1) {
		t.Errorf("%d connections for %d watches, want about one for each %d", got, n, perTransport)
	}
}

// TestUntrustedCertificate shows that a certificate of another authority is
// refused, with words.
func TestUntrustedCertificate(t *testing.T) {
	server := httptest.NewUnstartedServer(newFake(t))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	t.Cleanup(server.Close)
	r := startHTTP(t, server)
	r.Await(t, 30*time.Second, "degraded", func(h *plugintest.Held) bool { return h.Degraded != "" })
	wantState(t, r, "certificate")
}

// TestAuthorityRotated shows that an authority that is exchanged in its file
// counts from the next connection on.
func TestAuthorityRotated(t *testing.T) {
	f := newFake(t)
	f.set("web", entry("web", "web-1", 80))
	server := httptest.NewUnstartedServer(f)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	t.Cleanup(server.Close)
	other, err := os.ReadFile(testcert.New(t, "example.com").Cert)
	if err != nil {
		t.Fatal(err)
	}
	ca := filepath.Join(t.TempDir(), "ca.pem")
	write := func(pem []byte) {
		if err := os.WriteFile(ca, pem, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(other)
	r := startHTTP(t, server, func(c *Config) { c.TLS.CAFile, c.TLS.ServerName = ca, "example.com" })
	r.Await(t, 30*time.Second, "degraded", func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, "certificate") })
	write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	r.AwaitSynced(t, 30*time.Second)
}

// TestRequests shows that the token file is read again for each request, and
// that nothing of the environment reaches Consul.
func TestRequests(t *testing.T) {
	for name, value := range map[string]string{
		"CONSUL_HTTP_ADDR": "127.0.0.1:1", "CONSUL_HTTP_TOKEN": "env", "CONSUL_HTTP_TOKEN_FILE": "/does/not/exist", "CONSUL_HTTP_AUTH": "u:p",
		"CONSUL_NAMESPACE": "env", "CONSUL_PARTITION": "env", "CONSUL_HTTP_SSL": "true", "CONSUL_CACERT": "/does/not/exist",
	} {
		t.Setenv(name, value)
	}
	file := filepath.Join(t.TempDir(), "token")
	write := func(token string) {
		if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("one")
	f := newFake(t)
	f.set("web", entry("web", "web-1", 80))
	var mu sync.Mutex
	tokens := map[string]bool{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		tokens[r.Header.Get(httpTokenHeader)] = true
		mu.Unlock()
		if q := r.URL.Query(); q.Has("ns") || q.Has("partition") || q.Has("token") || r.Header.Get("Authorization") != "" {
			t.Errorf("%s: carries what nobody configured", r.URL)
		}
		f.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	r := startHTTP(t, server, func(c *Config) { c.TokenFile = file })
	r.AwaitSynced(t, 30*time.Second)
	write("two")
	f.set("web", entry("web", "web-1", 81))
	r.Await(t, 30*time.Second, "the change", func(h *plugintest.Held) bool { return h.Sets == 2 })
	f.set("web", entry("web", "web-1", 82))
	r.Await(t, 30*time.Second, "the second change", func(h *plugintest.Held) bool { return h.Sets == 3 })
	mu.Lock()
	if len(tokens) != 2 || !tokens["one"] || !tokens["two"] {
		t.Errorf("tokens %v, want one and two only", tokens)
	}
	mu.Unlock()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	f.set("web", entry("web", "web-1", 83))
	r.Await(t, 30*time.Second, "degraded", func(h *plugintest.Held) bool { return h.Degraded != "" })
	wantState(t, r, "token_file")
}

// TestUnixSocket shows that a socket is followed like an address.
func TestUnixSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "isthmus") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	f := newFake(t)
	f.set("web", entry("web", "web-1", 80))
	server := &httptest.Server{Listener: l, Config: &http.Server{Handler: f}}
	server.Start()
	t.Cleanup(server.Close)
	r := startHTTP(t, server, func(c *Config) { c.Address = "unix://" + socket })
	r.AwaitSynced(t, 30*time.Second)
	wantView(t, r, map[string][]string{"web": {"n1/web-1 10.0.0.1:80 passing"}})
}

// TestConnectionRefused shows a server that answers connections before they ask
// anything, as Consul does above its limit: it is said what that is, and
// net/http has nothing to wonder about.
func TestConnectionRefused(t *testing.T) {
	const answer = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/plain\r\nContent-Length: 23\r\nConnection: close\r\n\r\ntoo many, and from here"
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, answer)
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	var wondered bytes.Buffer
	defer log.SetOutput(log.Writer())
	log.SetOutput(&wondered)

	c := config(func(c *Config) { c.Address = "http://" + l.Addr().String() })
	cl, err := newClients(c)
	if err != nil {
		t.Fatal(err)
	}
	transport := cl.newTransport()
	dial := transport.(*http.Transport).DialContext
	conn, err := dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = conn.Read(make([]byte, 4096))
	if f := classify(err, cl.target); f.kind != faultLimit || f.outage || !f.connections || !strings.Contains(f.Error(), "too many, and from here") {
		t.Errorf("before a question: %+v", f)
	}

	for range 100 {
		s := cl.acquire()
		_, _, err := s.client.Catalog().Services(nil)
		cl.release(s)
		// The connection may also be gone when the question is written, which
		// tells nothing.
		if f := classify(err, cl.target); f.kind != faultLimit && !f.interrupted {
			t.Fatalf("%v: %+v", err, f)
		}
	}
	cl.closeIdle()
	if wondered.Len() > 0 {
		t.Errorf("net/http wondered: %s", wondered.String())
	}
}

// TestClassifyWithoutCause shows that an error which wraps nothing is one like
// others.
func TestClassifyWithoutCause(t *testing.T) {
	f := classify(&url.Error{Op: "Get", URL: "http://x", Err: &net.OpError{Op: "read"}}, target{scheme: "http", host: "x:1"})
	if f.kind != faultUnreachable || !f.interrupted || strings.Contains(f.Error(), "%!") {
		t.Errorf("%+v", f)
	}
}

// TestClassifyTooLong shows that an answer without end is the server's fault,
// and no outage.
func TestClassifyTooLong(t *testing.T) {
	body := http.MaxBytesReader(nil, io.NopCloser(strings.NewReader("too long")), 3)
	_, err := io.ReadAll(body)
	if f := classify(err, target{scheme: "http", host: "x:1"}); f.kind != faultServer || f.outage || f.interrupted || !strings.Contains(f.Error(), "longer than 512 MiB") {
		t.Errorf("%+v", f)
	}
}

// TestPlainRefused shows what follows from tls beside a plain address if the
// https port cannot be used: nothing is asked for in plain text but the port,
// unless that is permitted, and the port is used once it can be.
func TestPlainRefused(t *testing.T) {
	self := func(node string, port int) func(w http.ResponseWriter, r *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != "/v1/agent/self" {
				return false
			}
			fmt.Fprintf(w, `{"Config": {"NodeID": %q}, "DebugConfig": {"HTTPSPort": %d}}`, node, port)
			return true
		}
	}
	for name, test := range map[string]struct {
		node     string // that answers at the https port
		foreign  bool   // its certificate is another authority's
		port     bool   // it is stated
		insecure bool
		reason   string
	}{
		"another agent":      {"b", false, true, false, "another agent answers"},
		"not trusted":        {"a", true, true, false, "certificate"},
		"no port":            {"a", false, false, false, "no https port"},
		"another, permitted": {"b", false, true, true, ""},
		"the same":           {"a", false, true, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f, g := newFake(t), newFake(t)
			f.set("web", entry("web", "web-1", 80))
			g.set("web", entry("web", "web-1", 80))
			secure := httptest.NewUnstartedServer(g)
			secure.Config.ErrorLog = log.New(io.Discard, "", 0)
			secure.StartTLS()
			t.Cleanup(secure.Close)
			port := 0
			if test.port {
				port = secure.Listener.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // it listens on TCP
			}
			f.setAnswer(self("a", port))
			g.setAnswer(self(test.node, port))
			plain := httptest.NewServer(f)
			t.Cleanup(plain.Close)
			ca := testcert.New(t, "elsewhere").Cert
			if !test.foreign {
				ca = filepath.Join(t.TempDir(), "ca.pem")
				if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			r := startHTTP(t, plain, func(c *Config) { c.Mode, c.Insecure, c.TLS.CAFile, c.Token = "auto", test.insecure, ca, "t" })
			if test.reason == "" {
				r.AwaitSynced(t, 10*time.Second)
				return
			}
			r.Await(t, 10*time.Second, "degraded", func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, test.reason) })
			f.count("/v1/agent/self")
			if n := f.requests(); n > 0 {
				t.Errorf("%d queries in plain text", n)
			}
			if r.held().Synced || !strings.Contains(r.held().Degraded, "insecure: true") {
				t.Errorf("synced %t, degraded %q", r.held().Synced, r.held().Degraded)
			}
			if test.node == "b" {
				g.setAnswer(self("a", port))
				r.AwaitSynced(t, 20*time.Second)
				if n := f.count("/v1/catalog/services"); n > 0 {
					t.Errorf("%d listings in plain text", n)
				}
			}
		})
	}
}
