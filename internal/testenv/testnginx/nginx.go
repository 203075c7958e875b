// Package testnginx runs nginx as a proxy before the servers of tests.
//
// It is Debian's, unpacked and not installed (seconds), and starts at once.
package testnginx

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Tool is nginx, the proxy.
var Tool = testenv.DebianTool("nginx", "nginx", "/usr/sbin/nginx")

// Config configures an nginx.
type Config struct {
	// Upstreams are the servers that requests are spread over, host:port.
	Upstreams []string
	// Timeout is how long it waits for an answer before it answers with 504.
	Timeout time.Duration
	// Cert and Key are paths of PEM files, with which it serves https, too.
	Cert, Key string
}

// Server is a running nginx that forwards requests.
type Server struct {
	// Addr is where it serves, host:port, and HTTPSAddr localhost:port, where
	// there is a certificate.
	Addr, HTTPSAddr string

	*testenv.Process
	cfg Config
}

// Start starts an nginx and waits until it answers.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	binary := Tool.Binary(t)
	n := &Server{cfg: cfg, Process: testenv.NewProcess(t, "nginx")}
	n.Process.StartReady(t, func() {
		n.Addr = testenv.Loopback(testenv.FreePort(t))
		listen := fmt.Sprintf("listen %s;", n.Addr)
		if cfg.Cert != "" {
			port := testenv.FreePort(t)
			n.HTTPSAddr = fmt.Sprintf("localhost:%d", port)
			listen += fmt.Sprintf("\n    listen %s ssl http2; ssl_certificate %s; ssl_certificate_key %s;", testenv.Loopback(port), cfg.Cert, cfg.Key)
		}
		servers := ""
		for _, u := range cfg.Upstreams {
			servers += fmt.Sprintf("server %s max_fails=0; ", u)
		}
		config := n.Process.WriteFile(t, "nginx.conf", fmt.Sprintf(`
daemon off; master_process off; pid nginx.pid; error_log stderr error;
events { worker_connections 8192; }
http {
  log_format plain "$status $request_time $request_uri"; access_log access.log plain;
  client_body_temp_path tmp; proxy_temp_path tmp; fastcgi_temp_path tmp; uwsgi_temp_path tmp; scgi_temp_path tmp;
  keepalive_requests 1000000;
  upstream servers { %s keepalive 512; }
  server {
    %s
    location = /nginx-is-ready { access_log off; return 200; }
    location / {
      proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_read_timeout %dms; proxy_next_upstream off;
    }
  }
}
`, servers, listen, cfg.Timeout.Milliseconds()))
		n.Process.Start(t, nil, binary, "-p", n.Process.Dir, "-c", config)
	}, func() (string, bool) { return testenv.Answers("http://" + n.Addr + "/nginx-is-ready") })
	return n
}

// Answers returns how many requests were answered so far, and how many of them
// with a status of nginx's own, of 500 and more.
func (n *Server) Answers(t testing.TB) (all, failed int) {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(n.Process.Dir, "access.log"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		all++
		if strings.HasPrefix(line, "5") {
			failed++
		}
	}
	return all, failed
}
