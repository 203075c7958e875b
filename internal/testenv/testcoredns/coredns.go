// Package testcoredns runs CoreDNS servers for tests.
//
// The server is built from the module pinned in tools/coredns (a minute). Start
// runs one that serves the zones that tests set; it answers in a fifth of a
// second.
package testcoredns

import (
	"crypto/tls"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/miekg/dns"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Tool is CoreDNS with the plugins that tests use, tools/coredns.
var Tool = testenv.OwnTool("coredns", "coredns", ".", "tools", "coredns")

// Server is a running CoreDNS, the authority for zones that tests write. What
// is outside of them it refuses.
type Server struct {
	// Addr serves UDP and TCP, TLSAddr TLS if there is a certificate. Restarts
	// keep both.
	Addr, TLSAddr string

	*testenv.Process
	binary string
	cfg    Config
	zones  map[string]string // names of zones to paths of their files
	serial map[string]int    // of each zone, as last written
	errors map[string]string // codes by name
}

// Config configures a CoreDNS.
type Config struct {
	// Zones are the names of zones to serve, without records at first.
	Zones []string
	// Cert and Key are paths of PEM files, with which it serves TLS too.
	Cert, Key string
}

// Start starts a server and waits until it answers.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	c := &Server{cfg: cfg, binary: Tool.Binary(t), zones: map[string]string{}, serial: map[string]int{}, errors: map[string]string{}}
	c.Process = testenv.NewServer(t, "coredns", c.launch, c.ready)
	for _, zone := range cfg.Zones {
		c.zones[zone] = filepath.Join(c.Process.Dir, zone+".zone")
		c.SetFile(t, zone)
	}
	c.Serve(t, func(t testing.TB) {
		c.Addr, c.TLSAddr = testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t))
	})
	return c
}

func (c *Server) launch(t testing.TB) {
	t.Helper()
	c.Process.Start(t, nil, c.binary, "-conf", c.configure(t))
}

// configure writes the configuration and returns its path.
func (c *Server) configure(t testing.TB) string {
	t.Helper()
	var b strings.Builder
	block := func(address, scheme, extra string) {
		host, port, _ := strings.Cut(address, ":")
		fmt.Fprintf(&b, "%s.:%s {\n  bind %s\n%s", scheme, port, host, extra)
		for _, name := range slices.Sorted(maps.Keys(c.errors)) {
			fmt.Fprintf(&b, "  template ANY ANY %s {\n    rcode %s\n  }\n", name, c.errors[name])
		}
		for _, zone := range slices.Sorted(maps.Keys(c.zones)) {
			fmt.Fprintf(&b, "  file %s %s {\n    reload 50ms\n  }\n", c.zones[zone], zone)
		}
		b.WriteString("}\n")
	}
	block(c.Addr, "", "")
	if c.cfg.Cert != "" {
		block(c.TLSAddr, "tls://", fmt.Sprintf("  tls %s %s\n", c.cfg.Cert, c.cfg.Key))
	}
	return c.Process.WriteFile(t, "Corefile", b.String())
}

// ready reports whether all zones are served as they were last written.
func (c *Server) ready() (seen string, ok bool) {
	for zone := range c.zones {
		answer, _, err := (&dns.Client{Net: "tcp"}).Exchange(new(dns.Msg).SetQuestion(dns.Fqdn(zone), dns.TypeSOA), c.Addr)
		if err != nil {
			return err.Error(), false
		}
		current := slices.ContainsFunc(answer.Answer, func(r dns.RR) bool {
			soa, ok := r.(*dns.SOA)
			return ok && int(soa.Serial) >= c.serial[zone]
		})
		if !current {
			return fmt.Sprintf("zone %s is not served with serial %d: %v", zone, c.serial[zone], answer), false
		}
	}
	return "", true
}

// SetZone replaces the records of a zone, which are lines of a zone file with a
// TTL of a second, and waits until they are served.
func (c *Server) SetZone(t testing.TB, zone string, records ...string) {
	t.Helper()
	c.SetFile(t, zone, records...)
	c.WaitReady(t)
}

// SetFile is SetZone for a server that does not run.
func (c *Server) SetFile(t testing.TB, zone string, records ...string) {
	t.Helper()
	path, ok := c.zones[zone]
	if !ok {
		t.Fatalf("coredns: there is no zone %s", zone)
	}
	c.serial[zone]++
	text := fmt.Sprintf("$ORIGIN %s.\n$TTL 1\n@ IN SOA ns hostmaster %d 3600 600 86400 1\n@ IN NS ns\n%s\n", zone, c.serial[zone], strings.Join(records, "\n"))
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// Fail makes the server answer questions about a name, and what is below it,
// with a code such as SERVFAIL; "" ends that.
func (c *Server) Fail(t testing.TB, name, code string) {
	t.Helper()
	if c.errors[name] = code; code == "" {
		delete(c.errors, name)
	}
	c.Reload(t)
	testenv.Eventually(t, testenv.Patience, "the answer "+code, func() (string, bool) {
		answer, err := dns.Exchange(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), c.Addr)
		if err != nil {
			return err.Error(), false
		}
		got := dns.RcodeToString[answer.Rcode]
		return got, got == code || code == "" && answer.Rcode != dns.RcodeServerFailure && answer.Rcode != dns.RcodeRefused
	})
}

// Reload makes the server read its configuration and its certificate again.
func (c *Server) Reload(t testing.TB) {
	t.Helper()
	c.configure(t)
	c.Process.Signal(syscall.SIGUSR1)
}

// WaitCertificate waits until the server shows the certificate in its file.
func (c *Server) WaitCertificate(t testing.TB) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "the certificate", func() (string, bool) {
		pair, err := tls.LoadX509KeyPair(c.cfg.Cert, c.cfg.Key)
		if err != nil {
			return err.Error(), false
		}
		conn, err := tls.Dial("tcp", c.TLSAddr, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // the certificates are compared
		if err != nil {
			return err.Error(), false
		}
		defer conn.Close()
		return "another one", slices.Equal(conn.ConnectionState().PeerCertificates[0].Raw, pair.Certificate[0])
	})
}
