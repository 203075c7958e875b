package bench

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
)

// A benchmark with a real Consul registers its services beside those that are
// there, measures the way from Consul to the sinks, and leaves Consul as it
// was.
func TestConsul(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	cert := testcert.New(t, "localhost")
	server := testconsul.Start(t, testconsul.Config{CertFile: cert.Cert, KeyFile: cert.Key})
	_, err := server.Client.Catalog().Register(&api.CatalogRegistration{Node: "own", Address: "127.0.0.1", Service: &api.AgentService{Service: "own", Port: 80}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	before := strings.Join(server.Services(t), " ")
	measure(t, "consul", "--address", "https://"+server.HTTPSAddr, "--ca-file", cert.Cert)
	if after := strings.Join(server.Services(t), " "); after != before {
		t.Errorf("the catalog has %q afterwards, and had %q", after, before)
	}
	nodes, _, err := server.Client.Catalog().Nodes(nil)
	if err != nil || len(nodes) != 2 {
		t.Errorf("the catalog has nodes %v afterwards, error %v", nodes, err)
	}
}

// A benchmark with a real Nacos measures the way from Nacos to the sinks. The
// scenario is that of Consul but for the registry, whose start takes long.
func TestNacos(t *testing.T) {
	testenv.SkipIfShort(t)
	if !testenv.Compat() {
		t.Skip("make compat runs it")
	}
	server := testnacos.Start(t, testnacos.Config{})
	measure(t, "nacos", "--address", "http://"+server.Addr)
}

// Many streams are measured beside as many bare ones, also if listeners with a
// shard each have a part of them.
func TestStreams(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	if m := run(t, "streams", "--services", "30", "--instances", "3", "--sinks", "120", "--names", "2", "--shards", "3"); m.BareStream <= 0 {
		t.Errorf("measured %+v", m)
	}
}

// measure runs a scenario with a real registry.
func measure(t *testing.T, scenario string, args ...string) {
	t.Helper()
	m := run(t, scenario, append(args, "--services", "30", "--instances", "3", "--sinks", "2")...)
	if u := m.Upstream; m.Latency.Max <= 0 || u.Notified.Max <= 0 || u.Added.Max <= 0 || u.Connections < 1 {
		t.Errorf("measured %+v", m)
	}
}

type percentiles struct {
	Max float64 `json:"max_ms"`
}

type median struct {
	Updates, Differences int
	Latency              percentiles
	BareStream           float64 `json:"bare_stream_bytes"`
	Upstream             struct {
		Notified, Added percentiles
		Connections     int
	}
}

// run runs a scenario for a second.
func run(t *testing.T, scenario string, args ...string) median {
	t.Helper()
	args = append([]string{"bench", scenario, "--rate", "50", "--duration", "1s", "--runs", "1", "--output", "json"}, args...)
	out, err := exec.CommandContext(t.Context(), testisthmus.Binary(t), args...).Output() //nolint:gosec // a program of this repository
	if err != nil {
		if e, ok := err.(*exec.ExitError); ok { //nolint:errorlint // of Output itself
			t.Fatalf("isthmus %v: %v\n%s", args, err, e.Stderr)
		}
		t.Fatal(err)
	}
	var result struct{ Median median }
	if err := json.Unmarshal(out, &result); err != nil {
		t.Fatal(err)
	}
	m := result.Median
	// Changes of an instance that follow each other closely may come as one.
	if m.Updates < 1 || m.Differences != 0 {
		t.Errorf("%d updates and %d differences", m.Updates, m.Differences)
	}
	return m
}

// BenchmarkConsul prints the tables of the scenario consul: over https, and
// over plain HTTP with as few services as have a connection each.
//
//	make bench-registries
func BenchmarkConsul(b *testing.B) {
	cert := testcert.New(b, "localhost")
	server := testconsul.Start(b, testconsul.Config{CertFile: cert.Cert, KeyFile: cert.Key})
	for b.Loop() {
		table(b, "consul", "--address", "https://"+server.HTTPSAddr, "--ca-file", cert.Cert)
		table(b, "consul", "--address", "http://"+server.Addr, "--services", "100")
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkNacos prints the table of the scenario nacos, with Nacos' own delay
// before a push.
//
//	make bench-registries
func BenchmarkNacos(b *testing.B) {
	server := testnacos.Start(b, testnacos.Config{DefaultPushDelay: true})
	for b.Loop() {
		table(b, "nacos", "--address", "http://"+server.Addr)
	}
	b.ReportMetric(0, "ns/op")
}

func table(b *testing.B, scenario string, args ...string) {
	b.Helper()
	args = append([]string{"bench", scenario}, args...)
	out, err := exec.CommandContext(b.Context(), testisthmus.Binary(b), args...).CombinedOutput() //nolint:gosec // a program of this repository
	if b.Logf("isthmus %s\n%s", strings.Join(args, " "), out); err != nil {
		b.Fatal(err)
	}
}
