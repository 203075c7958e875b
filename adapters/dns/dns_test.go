package dns_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/isthmus-mesh/isthmus/adapters/dns"
	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testcoredns"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// within is how long a change may take on a busy machine.
const within = testenv.Patience

const zone = "example.org"

// grace is remove_grace.
const grace = 3 * time.Second

// follow runs an adapter until the test ends.
func follow(t *testing.T, change func(c *dns.Config)) *plugintest.Catalog {
	t.Helper()
	c := dns.DefaultConfig
	c.MinTTL, c.RemoveGrace, c.Timeout = plugin.Duration(time.Second), plugin.Duration(grace), plugin.Duration(20*time.Second)
	change(&c)
	a, err := dns.New(c, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	catalog := plugintest.NewCatalog()
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, catalog) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return catalog
}

// wantLeast fails if a service had fewer instances since ForgetLeast.
func wantLeast(t *testing.T, c *plugintest.Catalog, service string, want int) {
	t.Helper()
	c.Look(func(h *plugintest.Held) {
		if h.Least[service] != want {
			t.Errorf("%s had %d instances meanwhile, want %d", service, h.Least[service], want)
		}
	})
}

// TestAddresses follows A and AAAA records of a real server through what
// happens to them.
func TestAddresses(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
	server.SetZone(t, zone, "web A 10.0.0.1", "web A 10.0.0.2", "alias CNAME hop", "hop CNAME web", "old A 10.9.0.1", "empty TXT x")
	c := follow(t, func(c *dns.Config) {
		c.Servers = []string{server.Addr}
		c.Names = []dns.Name{
			{Name: "web.example.org", Port: 8080, PortName: "http", Metadata: map[string]string{"version": "v2"}},
			{Name: "Alias.Example.ORG.", Port: 80, Service: "shop"},
			{Name: "old.example.org", Port: 80},
		}
	})
	c.AwaitSynced(t, within)
	c.AwaitIDs(t, within, "the first listing", "web.example.org", "10.0.0.1:8080 10.0.0.2:8080")
	c.AwaitIDs(t, within, "a chain of aliases", "shop", "10.0.0.1:80 10.0.0.2:80")
	c.Look(func(h *plugintest.Held) {
		want := registry.Instance{ID: "10.0.0.1:8080", Address: "10.0.0.1", Ports: []registry.Port{{Name: "http", Number: 8080}}, Meta: map[string]string{"version": "v2"}}
		if got := h.Instances["web.example.org"][0]; fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Errorf("instance %+v, want %+v", got, want)
		}
		if h.Degraded != "" || h.Heard == 0 || h.Detail != "polling "+server.Addr {
			t.Errorf("degraded %q, heard %d, detail %q", h.Degraded, h.Heard, h.Detail)
		}
	})
	server.SetZone(t, zone, "web A 10.0.0.1", "web A 10.0.0.3", "web AAAA 2001:db8::1", "alias CNAME web", "old A 10.9.0.1")
	c.AwaitIDs(t, within, "scaled out and in", "web.example.org", "10.0.0.1:8080 10.0.0.3:8080 [2001:db8::1]:8080")
	c.AwaitIDs(t, within, "scaled out and in", "shop", "10.0.0.1:80 10.0.0.3:80 [2001:db8::1]:80")

	// NODATA and NXDOMAIN, which are believed after a while.
	earliest := time.Now().Add(grace)
	server.SetZone(t, zone, "web TXT x", "alias CNAME web")
	wantProblem(t, c, "NODATA", "web.example.org", "NODATA")
	wantProblem(t, c, "NXDOMAIN", "old.example.org", "NXDOMAIN")
	c.Await(t, within, "a removal", func(h *plugintest.Held) bool {
		return h.IDs("web.example.org") == "" || h.IDs("old.example.org") == "-" || h.IDs("shop") == ""
	})
	if early := time.Until(earliest); early > 0 {
		t.Errorf("removed %v before the end of remove_grace", early)
	}
	c.AwaitIDs(t, within, "no address for longer", "web.example.org", "")
	c.AwaitIDs(t, within, "no such name for longer", "old.example.org", "-")
	c.AwaitIDs(t, within, "the end of a chain has none", "shop", "")
	server.SetZone(t, zone, "web A 10.0.0.1", "old A 10.9.0.1")
	c.AwaitIDs(t, within, "back", "web.example.org", "10.0.0.1:8080")
	c.AwaitIDs(t, within, "back", "old.example.org", "10.9.0.1:80")
	c.Await(t, within, "no more problems", func(h *plugintest.Held) bool { return h.Problems["name web.example.org"] == "" })
}

func wantProblem(t *testing.T, c *plugintest.Catalog, what, name, text string) {
	t.Helper()
	c.Await(t, within, what, func(h *plugintest.Held) bool { return strings.Contains(h.Problems["name "+name], text) })
}

// TestSRV follows SRV records of a real server.
func TestSRV(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone, "hosts.test"}})
	server.SetZone(t, "hosts.test", "far A 10.2.0.1", "both A 10.2.0.2", "both AAAA 2001:db8::2")
	server.SetZone(t, zone, "a A 10.1.0.1", "b A 10.1.0.2", "_grpc._tcp.shop SRV 10 30 9001 a", "_grpc._tcp.shop SRV 10 0 9002 b",
		"_grpc._tcp.shop SRV 10 20 9003 both.hosts.test.", "_grpc._tcp.shop SRV 20 5 9009 far.hosts.test.", "_x._udp.none SRV 0 0 0 .")
	all := func(priorities string, grace time.Duration) *plugintest.Catalog {
		return follow(t, func(c *dns.Config) {
			c.Servers, c.Priorities, c.RemoveGrace = []string{server.Addr}, priorities, plugin.Duration(grace)
			c.Names = []dns.Name{{Name: "_grpc._tcp.shop.example.org"}, {Name: "_x._udp.none.example.org"}}
		})
	}
	c, quick := all("", time.Hour), all("", time.Second)
	const shop = "shop.example.org"
	c.AwaitIDs(t, within, "the lowest priority", shop, "10.1.0.1:9001 10.1.0.2:9002 10.2.0.2:9003 [2001:db8::2]:9003")
	c.Look(func(h *plugintest.Held) {
		var got []string
		for _, i := range h.Instances[shop] {
			got = append(got, fmt.Sprintf("%s %v %v %s", i.Address, i.Ports, *i.Weight, i.Node))
		}
		want := "[10.1.0.1 [{grpc 9001 }] 30 a.example.org 10.1.0.2 [{grpc 9002 }] 1 b.example.org 10.2.0.2 [{grpc 9003 }] 10 both.hosts.test 2001:db8::2 [{grpc 9003 }] 10 both.hosts.test]"
		if fmt.Sprint(got) != want {
			t.Errorf("instances\n%v\nwant\n%s", got, want)
		}
	})
	quick.AwaitIDs(t, within, `the target "."`, "none.example.org", "")
	quick.AwaitSynced(t, within)
	every := all("all", time.Hour)
	every.AwaitIDs(t, within, "all priorities", shop, "10.1.0.1:9001 10.1.0.2:9002 10.2.0.1:9009 10.2.0.2:9003 [2001:db8::2]:9003")
	every.Look(func(h *plugintest.Held) {
		if got := h.Instances[shop][2].Meta["priority"]; got != "20" {
			t.Errorf("the priority is %q", got)
		}
	})

	// All targets at once are others, whose addresses come later.
	c.ForgetLeast()
	server.SetZone(t, zone, "_grpc._tcp.shop SRV 0 0 9001 c.hosts.test.")
	wantProblem(t, c, "a target without an address", shop, "c.hosts.test")
	wantLeast(t, c, shop, 4)
	server.SetZone(t, "hosts.test", "far A 10.2.0.1", "c A 10.3.0.1")
	c.AwaitIDs(t, within, "it has one", shop, "10.3.0.1:9001")
	c.Look(func(h *plugintest.Held) {
		if i := h.Instances[shop][0]; i.Weight != nil {
			t.Errorf("weight %v, want none where all are 0", *i.Weight)
		}
	})
	server.SetZone(t, zone, "_grpc._tcp.shop SRV 0 0 9001 gone", "_grpc._tcp.shop SRV 1 0 9009 far.hosts.test.")
	quick.AwaitIDs(t, within, "the next priority, as the lowest has no address", shop, "10.2.0.1:9009")
	server.SetZone(t, zone)
	quick.AwaitIDs(t, within, "no such name for longer", shop, "-")
}

// TestNoAnswer shows that neither error codes nor silence nor a server that is
// gone remove anything, that the reason is shown, and that the end of it is
// noticed.
func TestNoAnswer(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
	web := []string{"web A 10.0.0.1", "web A 10.0.0.2", "db A 10.0.1.1"}
	server.SetZone(t, zone, web...)
	gate := testenv.NewGate(t, server.Addr)
	gate.Open(t)
	names := []dns.Name{{Name: "web.example.org", Type: "a", Port: 80}, {Name: "db.example.org", Type: "a", Port: 80}}
	catalogs := map[string]*plugintest.Catalog{}
	for _, address := range []string{server.Addr, "tcp://" + gate.Addr} {
		catalogs[address] = follow(t, func(c *dns.Config) {
			c.Servers, c.Names, c.Timeout = []string{address}, names, plugin.Duration(2*time.Second)
		})
		catalogs[address].AwaitIDs(t, within, "the first listing", "web.example.org", "10.0.0.1:80 10.0.0.2:80")
		catalogs[address].AwaitIDs(t, within, "the first listing", "db.example.org", "10.0.1.1:80")
		catalogs[address].ForgetLeast()
	}
	degraded := func(what, text string) {
		t.Helper()
		for _, c := range catalogs {
			c.AwaitDegraded(t, within, what, text)
		}
	}
	for _, code := range []string{"SERVFAIL", "REFUSED"} {
		server.Fail(t, "web.example.org", code)
		degraded(code, "answers "+code)
		server.Fail(t, "web.example.org", "")
		degraded("no more "+code, "")
	}
	server.Pause()
	degraded("frozen", "no answer within 2s")
	server.Continue()
	degraded("no more frozen", "")
	server.Kill()
	catalogs[server.Addr].AwaitDegraded(t, within, "killed", "connection refused")
	catalogs["tcp://"+gate.Addr].AwaitDegraded(t, within, "killed", "tcp://"+gate.Addr)
	server.Restart(t)
	degraded("started again", "")
	gate.Shut()
	catalogs["tcp://"+gate.Addr].AwaitDegraded(t, within, "cut off", "connection refused")
	gate.Open(t)
	degraded("no more cut off", "")
	server.SetZone(t, zone, append(web, "web A 10.0.0.3")...)
	for _, c := range catalogs {
		c.AwaitIDs(t, within, "it goes on", "web.example.org", "10.0.0.1:80 10.0.0.2:80 10.0.0.3:80")
		wantLeast(t, c, "web.example.org", 2)
		wantLeast(t, c, "db.example.org", 1)
	}
}

// TestFirstListing shows that what was never answered holds the first listing,
// and nothing else.
func TestFirstListing(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
	server.SetZone(t, zone, "web A 10.0.0.1", "db A 10.0.1.1")
	server.Fail(t, "db.example.org", "SERVFAIL")
	c := follow(t, func(c *dns.Config) {
		c.Servers, c.Names = []string{server.Addr}, []dns.Name{{Name: "web.example.org"}, {Name: "db.example.org"}}
	})
	c.AwaitIDs(t, within, "the other", "web.example.org", "10.0.0.1")
	c.AwaitDegraded(t, within, "no answer", "answers SERVFAIL")
	c.Look(func(h *plugintest.Held) {
		if h.Synced || h.IDs("db.example.org") != "-" {
			t.Errorf("no answer is taken for one: %s", h)
		}
	})
	server.Fail(t, "db.example.org", "")
	c.AwaitSynced(t, within)
	c.AwaitIDs(t, within, "it answers", "db.example.org", "10.0.1.1")
}

// TestFailOver shows that a server that fails is left for another one, and that
// one that refuses a question is not.
func TestFailOver(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	a := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
	b := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone, "only-b.test"}})
	for _, s := range []*testcoredns.Server{a, b} {
		s.SetZone(t, zone, "web A 10.0.0.1")
	}
	b.SetZone(t, "only-b.test", "x A 10.0.0.9")
	c := follow(t, func(c *dns.Config) {
		c.Servers, c.Names = []string{a.Addr, b.Addr}, []dns.Name{{Name: "web.example.org", Type: "a"}, {Name: "x.only-b.test", Type: "a"}}
	})
	c.AwaitSynced(t, within)
	c.AwaitIDs(t, within, "refused by the first", "x.only-b.test", "10.0.0.9")
	c.Look(func(h *plugintest.Held) {
		if h.Detail != "polling "+a.Addr || h.Degraded != "" {
			t.Errorf("detail %q, degraded %q", h.Detail, h.Degraded)
		}
	})
	c.ForgetLeast()
	a.Kill()
	c.Await(t, within, "fail-over", func(h *plugintest.Held) bool {
		return strings.HasPrefix(h.Detail, "polling "+b.Addr+", "+a.Addr+" cannot be used since")
	})
	b.SetZone(t, zone, "web A 10.0.0.1", "web A 10.0.0.2")
	c.AwaitIDs(t, within, "a change at the other one", "web.example.org", "10.0.0.1 10.0.0.2")
	b.Kill()
	c.AwaitDegraded(t, within, "no server", a.Addr)
	a.SetFile(t, zone, "web A 10.0.0.1", "web A 10.0.0.3")
	a.Restart(t)
	c.AwaitIDs(t, within, "the first again", "web.example.org", "10.0.0.1 10.0.0.3")
	wantLeast(t, c, "web.example.org", 1)
}

// TestTruncated shows that an answer that does not fit is asked for over TCP.
func TestTruncated(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
	var records []string
	for i := range 500 {
		records = append(records, fmt.Sprintf("web A 10.0.%d.%d", i/200, i%200))
	}
	server.SetZone(t, zone, records...)
	c := follow(t, func(c *dns.Config) { c.Servers, c.Names = []string{server.Addr}, []dns.Name{{Name: "web.example.org"}} })
	c.AwaitSynced(t, within)
	c.Look(func(h *plugintest.Held) {
		if n := len(h.Instances["web.example.org"]); n != 500 || h.Degraded != "" {
			t.Errorf("%d instances, degraded %q", n, h.Degraded)
		}
	})
}

// TestTLS shows that servers are asked over TLS, and that a certificate and its
// authority are replaced while the adapter runs.
func TestTLS(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	dir := t.TempDir()
	put := func(from, to string) string {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, to)
		if err := os.WriteFile(path+".new", b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	one, two := testcert.New(t, "dns.example.org"), testcert.New(t, "dns.example.org")
	cert, key, ca := put(one.Cert, "cert"), put(one.Key, "key"), put(one.Cert, "ca")
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}, Cert: cert, Key: key})
	server.SetZone(t, zone, "web A 10.0.0.1")
	gate := testenv.NewGate(t, server.TLSAddr)
	gate.Open(t)
	at := func(name string) *plugintest.Catalog {
		return follow(t, func(c *dns.Config) {
			c.Servers, c.TLS = []string{"tls://" + gate.Addr}, plugin.TLS{CAFile: ca, ServerName: name}
			c.Names = []dns.Name{{Name: "web.example.org", Port: 80}}
		})
	}
	at("other.example.org").AwaitDegraded(t, within, "another name", "certificate is valid for dns.example.org, not other.example.org")
	c := at("dns.example.org")
	c.AwaitSynced(t, within)
	c.AwaitIDs(t, within, "over TLS", "web.example.org", "10.0.0.1:80")
	c.ForgetLeast()
	put(two.Cert, "cert")
	put(two.Key, "key")
	server.Reload(t)
	server.WaitCertificate(t)
	gate.Shut() // connections that were made with the old one
	c.AwaitDegraded(t, within, "cut off", "connection refused")
	gate.Open(t)
	c.AwaitDegraded(t, within, "an authority that is not trusted", "certificate")
	put(two.Cert, "ca")
	c.AwaitDegraded(t, within, "it is trusted", "")
	server.SetZone(t, zone, "web A 10.0.0.1", "web A 10.0.0.2")
	c.AwaitIDs(t, within, "it goes on", "web.example.org", "10.0.0.1:80 10.0.0.2:80")
	wantLeast(t, c, "web.example.org", 1)
}

// TestNamesFile shows that names come from a file too, which is read again when
// it changes, and that one that cannot be used changes nothing.
func TestNamesFile(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
	server.SetZone(t, zone, "a A 10.0.0.1", "b A 10.0.0.2", "c A 10.0.0.3")
	path := filepath.Join(t.TempDir(), "names.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	c := follow(t, func(c *dns.Config) {
		c.Servers, c.Names, c.NamesFile = []string{server.Addr}, []dns.Name{{Name: "a.example.org"}}, path
	})
	c.AwaitIDs(t, within, "without the file", "a.example.org", "10.0.0.1")
	c.AwaitDegraded(t, within, "without the file", "names_file: open "+path)
	c.Look(func(h *plugintest.Held) {
		if h.Synced {
			t.Error("the first listing does not wait for the file")
		}
	})
	write("- b.example.org:8080\n- {name: c.example.org, port: 80, service: sea}\n")
	c.AwaitSynced(t, within)
	c.AwaitIDs(t, within, "text", "b.example.org", "10.0.0.2:8080")
	c.AwaitIDs(t, within, "a block", "sea", "10.0.0.3:80")
	c.AwaitDegraded(t, within, "the file is there", "")
	for _, wrong := range []string{"", "names: [x]", "[{name: c.example.org, prot: 1}]", "[a.example.org]", "[not a name]"} {
		write(wrong)
		c.AwaitDegraded(t, within, wrong, path)
	}
	c.AwaitIDs(t, within, "a file that cannot be used", "sea", "10.0.0.3:80")
	write("[{name: c.example.org, port: 81, service: sea}]")
	c.AwaitIDs(t, within, "another port", "sea", "10.0.0.3:81")
	c.AwaitIDs(t, within, "no more listed", "b.example.org", "-")
	c.AwaitIDs(t, within, "listed elsewhere", "a.example.org", "10.0.0.1")
	c.AwaitDegraded(t, within, "mended", "")
}

// TestManyNames shows that 10,000 names are followed within bounds of memory,
// and that a change among them is one service.
func TestManyNames(t *testing.T) {
	testenv.SkipIfShort(t)
	const count = 10_000
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{"many.test", zone}})
	var records []string
	var names []dns.Name
	for i := range count {
		name := fmt.Sprint("app-", i)
		for n := range 3 {
			records = append(records, fmt.Sprintf("%s 60 A 10.%d.%d.%d", name, i/250, i%250, n+1))
		}
		names = append(names, dns.Name{Name: name + ".many.test", Port: 80})
	}
	server.SetZone(t, "many.test", records...)
	server.SetZone(t, zone, "web A 10.0.0.1")
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	begin := time.Now()
	c := follow(t, func(c *dns.Config) {
		c.Servers, c.Names = []string{server.Addr}, append(names, dns.Name{Name: "web.example.org", Port: 80})
	})
	c.Await(t, 4*within, "the first listing", func(h *plugintest.Held) bool { return h.Synced && len(h.Services) == count+1 })
	used := heap() - before
	t.Logf("listed in %v; %d MiB, the test's own catalog included", time.Since(begin).Round(time.Millisecond), used>>20)
	if used > 100<<20 {
		t.Errorf("%d MiB are held for %d names", used>>20, count)
	}
	c.Look(func(h *plugintest.Held) {
		h.Sets = 0
		if h.Degraded != "" {
			t.Errorf("degraded: %s", h.Degraded)
		}
	})
	begin = time.Now()
	server.SetZone(t, zone, "web A 10.0.0.1", "web A 10.0.0.2")
	c.AwaitIDs(t, within, "a change", "web.example.org", "10.0.0.1:80 10.0.0.2:80")
	t.Logf("a change was seen after %v", time.Since(begin).Round(time.Millisecond))
	c.Look(func(h *plugintest.Held) {
		if h.Sets != 1 || h.Removes != 0 {
			t.Errorf("one change came to %d sets and %d removals", h.Sets, h.Removes)
		}
	})
}

// TestConformance shows that the adapter as a plugin keeps the contract,
// against a real server.
func TestConformance(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
	records := func(n int, more ...int) []string {
		all := []string{"_db._tcp SRV 0 0 5432 db", "db A 10.3.0.1"}
		for i := range n {
			all = append(all, fmt.Sprintf("web A 10.1.0.%d", i+1))
		}
		for _, i := range more {
			all = append(all, fmt.Sprintf("web A 10.1.0.%d", i))
		}
		return all
	}
	var joined []int
	server.SetZone(t, zone, records(2)...)
	config, err := json.Marshal(map[string]any{
		"servers": []string{server.Addr}, "names": []any{"web.example.org:80", map[string]any{"name": "_db._tcp.example.org"}}, "min_ttl": "1s",
	})
	if err != nil {
		t.Fatal(err)
	}
	endpoints := func(want int) func(*plugintest.World) error {
		return func(w *plugintest.World) error { return w.WantInstances("web.example.org", want) }
	}
	plugintest.Conformance(t, plugintest.Config{
		Config: config, Adapter: "dns", Within: within,
		Changes: []plugintest.Change{
			{Name: "scaled out", MaxUpserts: 1, Want: endpoints(3), Do: func(context.Context) error { server.SetZone(t, zone, records(3)...); return nil }},
			{Name: "scaled in", Want: endpoints(2), Do: func(context.Context) error { server.SetZone(t, zone, records(2)...); return nil }},
		},
		Outages: []plugintest.Outage{
			{
				Name: "killed and started again", Want: endpoints(2),
				Cut:     func(context.Context) error { server.Kill(); return nil },
				Restore: func(context.Context) error { server.Restart(t); return nil },
			},
			{
				Name:    "an error code",
				Cut:     func(context.Context) error { server.Fail(t, "web.example.org", "SERVFAIL"); return nil },
				Restore: func(context.Context) error { server.Fail(t, "web.example.org", ""); return nil },
			},
		},
		Flaps: &plugintest.Flaps{
			Grace:   6 * time.Second,
			Cut:     func(context.Context) error { server.Fail(t, "web.example.org", "SERVFAIL"); return nil },
			Restore: func(context.Context) error { server.Fail(t, "web.example.org", ""); return nil },
			Host:    "web.example.org",
			Join: func(_ context.Context, n int) error {
				joined = append(joined, n)
				server.SetZone(t, zone, records(2, joined...)...)
				return nil
			},
			Leave: func(context.Context, int) error {
				joined = nil
				server.SetZone(t, zone, records(2)...)
				return nil
			},
		},
	})
}

// TestForeignMessages shows that messages that are no answers, from a server
// that sends what it likes, remove nothing and do not keep the answer from
// being found.
func TestForeignMessages(t *testing.T) {
	t.Parallel()
	server := newLiar(t)
	follows := make([]*plugintest.Catalog, len(lies))
	for i := range lies {
		follows[i] = follow(t, func(c *dns.Config) {
			c.Servers, c.Timeout = []string{server.addr}, plugin.Duration(time.Second)
			c.Names = []dns.Name{{Name: fmt.Sprintf("web.%d.example.org", i), Type: "a", Port: 80, Service: "web"}}
		})
	}
	for _, c := range follows {
		c.AwaitSynced(t, within)
		c.AwaitIDs(t, within, "the first listing", "web", "10.0.0.1:80")
		c.ForgetLeast()
	}
	server.lying.Store(true)
	for i, lie := range lies {
		if lie.reason != "" {
			follows[i].AwaitDegraded(t, within, lie.name, lie.reason)
			continue
		}
		heard := 0
		follows[i].Look(func(h *plugintest.Held) { heard = h.Heard })
		follows[i].Await(t, within, lie.name, func(h *plugintest.Held) bool { return h.Heard > heard+1 && h.Degraded == "" })
	}
	server.lying.Store(false)
	for i, c := range follows {
		c.AwaitDegraded(t, within, lies[i].name+", then the truth", "")
		c.AwaitIDs(t, within, "the truth", "web", "10.0.0.1:80")
		wantLeast(t, c, "web", 1)
	}
}

// liar is a server over UDP that tells lie i about web.i.example.org.
type liar struct {
	addr  string
	lying atomic.Bool
}

func newLiar(t *testing.T) *liar {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &liar{addr: conn.LocalAddr().String()}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buffer := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			query, truth := new(mdns.Msg), new(mdns.Msg)
			if query.Unpack(buffer[:n]) != nil {
				continue
			}
			truth.SetReply(query)
			truth.Answer = []mdns.RR{record(query.Question[0].Name + " 1 IN A 10.0.0.1")}
			packets := [][]byte{pack(truth)}
			var i int
			if _, err := fmt.Sscanf(query.Question[0].Name, "web.%d.", &i); err == nil && l.lying.Load() {
				packets = lies[i].answer(query, truth)
			}
			for _, p := range packets {
				_, _ = conn.WriteTo(p, from)
			}
		}
	}()
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	return l
}

func record(text string) mdns.RR {
	rr, err := mdns.NewRR(text)
	if err != nil {
		panic(err)
	}
	return rr
}

func pack(m *mdns.Msg) []byte {
	b, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return b
}

// lies are what a server sends to a question, and what is shown of it; "" if
// the answer is found.
var lies = []struct {
	name, reason string
	answer       func(query, truth *mdns.Msg) [][]byte
}{
	{"another id", "no answer within 1s", func(_, m *mdns.Msg) [][]byte { m.Id++; return [][]byte{pack(m)} }},
	{"another id before the answer", "", func(_, m *mdns.Msg) [][]byte {
		lie := m.Copy()
		lie.Id++
		lie.Answer = nil
		return [][]byte{pack(lie), pack(m)}
	}},
	{"another question", "no answer within 1s", func(_, m *mdns.Msg) [][]byte { m.Question[0].Name = "x.example.org."; return [][]byte{pack(m)} }},
	{"the query itself before the answer", "", func(q, m *mdns.Msg) [][]byte { return [][]byte{pack(q), {1}, pack(m)} }},
	{"a cut message", "malformed answer", func(_, m *mdns.Msg) [][]byte { b := pack(m); return [][]byte{b[:len(b)-2]} }},
	{"garbage behind the header", "malformed answer", func(_, m *mdns.Msg) [][]byte {
		b := pack(m)
		for i := 12; i < len(b); i++ {
			b[i] = 0xff
		}
		return [][]byte{b}
	}},
	{"truncated, and no TCP", "answers truncated, and over TCP: dial: connect: connection refused", func(_, m *mdns.Msg) [][]byte {
		m.Truncated, m.Answer = true, nil
		return [][]byte{pack(m)}
	}},
	{"NXDOMAIN without SOA", "which proves nothing", func(_, m *mdns.Msg) [][]byte { m.Rcode, m.Answer = mdns.RcodeNameError, nil; return [][]byte{pack(m)} }},
	{"an empty answer", "which proves nothing", func(_, m *mdns.Msg) [][]byte { m.Answer = nil; return [][]byte{pack(m)} }},
	{"a referral", "which proves nothing", func(_, m *mdns.Msg) [][]byte {
		m.Answer, m.Ns = nil, []mdns.RR{record("org. 1 IN NS ns.example.org.")}
		return [][]byte{pack(m)}
	}},
	{"the SOA of another zone", "which proves nothing", func(_, m *mdns.Msg) [][]byte {
		m.Answer, m.Ns = nil, []mdns.RR{record("example.net. 1 IN SOA ns hostmaster 1 1 1 1 1")}
		return [][]byte{pack(m)}
	}},
	{"an alias that the server does not follow", "", func(q, m *mdns.Msg) [][]byte {
		m.Answer = []mdns.RR{record(q.Question[0].Name + " 1 IN CNAME alias.example.org.")}
		return [][]byte{pack(m)}
	}},
	{"what filters answer", "filters answer so", func(q, m *mdns.Msg) [][]byte {
		m.Answer = []mdns.RR{record(q.Question[0].Name + " 1 IN A 0.0.0.0")}
		return [][]byte{pack(m)}
	}},
	{"a circle of aliases", "circle", func(q, m *mdns.Msg) [][]byte {
		name := q.Question[0].Name
		m.Answer = []mdns.RR{record(name + " 1 IN CNAME x.example.org."), record("x.example.org. 1 IN CNAME " + name)}
		return [][]byte{pack(m)}
	}},
	{"an error of a server without EDNS0", "", func(q, m *mdns.Msg) [][]byte {
		if q.IsEdns0() != nil {
			m.Rcode, m.Answer, m.Question = mdns.RcodeFormatError, nil, nil
		}
		return [][]byte{pack(m)}
	}},
}

// TestForeignStreams shows the same of connections: one that is cut within an
// answer, or has another one, removes nothing.
func TestForeignStreams(t *testing.T) {
	t.Parallel()
	for _, lie := range streamLies {
		t.Run(lie.name, func(t *testing.T) {
			t.Parallel()
			server, lying := newStreamLiar(t, lie)
			c := follow(t, func(c *dns.Config) {
				c.Servers, c.Names = []string{"tcp://" + server}, []dns.Name{{Name: "web.example.org", Type: "a"}}
				c.Timeout = plugin.Duration(2 * time.Second)
			})
			c.AwaitIDs(t, within, "the first listing", "web.example.org", "10.0.0.1")
			c.ForgetLeast()
			lying.Store(true)
			c.AwaitDegraded(t, within, "the lie", lie.reason)
			lying.Store(false)
			c.AwaitDegraded(t, within, "the truth", "")
			c.AwaitIDs(t, within, "the truth", "web.example.org", "10.0.0.1")
			wantLeast(t, c, "web.example.org", 1)
		})
	}
}

// newStreamLiar starts a server over TCP that tells a lie while lying is set.
func newStreamLiar(t *testing.T, lie streamLie) (address string, lying *atomic.Bool) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	lying = new(atomic.Bool)
	var running sync.WaitGroup
	serve := func(conn *mdns.Conn) {
		defer conn.Close()
		for {
			query, err := conn.ReadMsg()
			if err != nil {
				return
			}
			m := new(mdns.Msg).SetReply(query)
			m.Answer = []mdns.RR{record("web.example.org. 1 IN A 10.0.0.1")}
			b := framed(m)
			lies := lying.Load()
			if lies {
				b = lie.answer(m)
			}
			if _, err := conn.Conn.Write(b); err != nil || lies && lie.cut {
				return
			}
		}
	}
	running.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { serve(&mdns.Conn{Conn: conn}) })
		}
	})
	t.Cleanup(func() { // after follow, which ends the connections
		listener.Close()
		running.Wait()
	})
	return listener.Addr().String(), lying
}

type streamLie struct {
	name, reason string
	answer       func(m *mdns.Msg) []byte
	cut          bool // the connection, afterwards
}

func framed(m *mdns.Msg) []byte {
	b := pack(m)
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

var streamLies = []streamLie{
	{"nothing", "closed the connection", func(*mdns.Msg) []byte { return nil }, true},
	{"a part of the length", "closed the connection", func(m *mdns.Msg) []byte { return framed(m)[:1] }, true},
	{"a part of the answer", "closed the connection", func(m *mdns.Msg) []byte { b := framed(m); return b[:len(b)-3] }, true},
	{"an empty answer", "not asked", func(*mdns.Msg) []byte { return []byte{0, 0} }, false},
	{"another id", "not asked", func(m *mdns.Msg) []byte { m.Id++; return framed(m) }, false},
	{"a truncated answer", "truncated", func(m *mdns.Msg) []byte { m.Truncated = true; return framed(m) }, false},
	{"a longer length than there is", "no answer within 2s", func(m *mdns.Msg) []byte { b := framed(m); b[0]++; return b }, false},
}

// TestNothingIsLeft shows that all connections are closed when Run ends.
func TestNothingIsLeft(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testcoredns.Start(t, testcoredns.Config{Zones: []string{zone}})
	server.SetZone(t, zone, "web A 10.0.0.1")
	gate := testenv.NewGate(t, server.Addr)
	gate.Open(t)
	t.Run("run", func(t *testing.T) {
		c := follow(t, func(c *dns.Config) {
			c.Servers, c.Names = []string{"tcp://" + gate.Addr}, []dns.Name{{Name: "web.example.org"}}
		})
		c.AwaitSynced(t, within)
		if len(gate.LocalPorts()) == 0 {
			t.Error("no connection is kept for the next question")
		}
	})
	testenv.Eventually(t, within, "the end of all connections", func() (string, bool) {
		return fmt.Sprint(gate.LocalPorts()), len(gate.LocalPorts()) == 0
	})
}
