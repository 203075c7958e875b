package hostile

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

var (
	long = flag.Duration("long", 0, "how long each attack lasts at full size, for the table of docs/security.md; 0: short ones, without a table")
	only = flag.String("attack", "", "the one attack to run")
)

const (
	patience = time.Minute
	// services are those that a sink that asks for everything is sent.
	services = 10_000
	// shortly is how long an attack of the short form lasts, at a tenth of its
	// size.
	shortly = 1500 * time.Millisecond
	// most is what the bridge may take, in bytes: 64 MiB for each request that
	// is being received would be more than this machine has.
	most = 4 << 30
)

// attackKey is the environment variable that makes the test binary the
// attacker, a process of its own.
const attackKey = "ISTHMUS_TEST_ATTACK"

func TestMain(m *testing.M) {
	name := os.Getenv(attackKey)
	if name == "" {
		os.Exit(m.Run())
	}
	var g target
	if err := json.NewDecoder(os.Stdin).Decode(&g); err != nil {
		panic(err)
	}
	// The test kills the process; this is for a test that was killed.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	dialer = dialerFrom(g.From)
	for _, a := range append(attacks, burner) {
		if a.name == name {
			a.run(ctx, &g)
		}
	}
}

// bridge is a running isthmus serve with 10,000 services, and one that the test
// changes.
type bridge struct {
	target
	cmd    *exec.Cmd
	log    string
	feed   *os.File // of the service
	server *testcert.Certificate
	ended  chan struct{}
	seq    int
}

// startBridge starts a bridge, in a cgroup unless it is nil, with more of an
// environment than the test.
func startBridge(t *testing.T, in *testenv.Cgroup, env ...string) *bridge {
	t.Helper()
	dir := t.TempDir()
	b := &bridge{log: filepath.Join(dir, "log"), ended: make(chan struct{}), server: testcert.New(t, "localhost")}
	address := func() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(testenv.FreePort(t))) }
	good, other := testcert.New(t, "sink"), testcert.New(t, "stranger")
	expired := testcert.New(t, "late", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	b.target = target{
		XDS: address(), TLS: address(), MCP: address(), Admin: address(), From: "127.0.0.2",
		Good: pair{good.Cert, good.Key}, Other: pair{other.Cert, other.Key}, Expired: pair{expired.Cert, expired.Key},
	}
	more := ""
	if os.Getenv(within) != "" {
		b.XDS6 = net.JoinHostPort("::1", strconv.Itoa(testenv.FreePort(t)))
		more = fmt.Sprintf("\n  - %q", b.XDS6)
	}
	var authorities []byte
	for _, c := range []*testcert.Certificate{good, expired} {
		authorities = append(authorities, read(t, c.Cert)...)
	}
	fifo, ca, config := filepath.Join(dir, "feed"), filepath.Join(dir, "ca.pem"), filepath.Join(dir, "isthmus.yaml")
	must(t, os.WriteFile(ca, authorities, 0o600))
	must(t, syscall.Mkfifo(fifo, 0o600))
	must(t, os.WriteFile(config, fmt.Appendf(nil, `
listen:
  xds:
  - %q
  - {address: %q, tls: {cert_file: %s, key_file: %s, client_ca_file: %s}}%s
  mcp: %q
  admin: {address: %q, allow: [{peer: {password_file: %s}, role: operate}, {peer: {cidr: 127.0.0.2}, role: read}, {peer: {cidr: 127.0.2.0/24}, role: read}]}
state: {dir: %s}
registries:
- {name: crowd, type: sim, config: {services: %d, instances: 2}}
- {name: feed, type: exec, config: {command: [/bin/cat, %s]}}
`, b.XDS, b.TLS, b.server.Cert, b.server.Key, ca, more, b.MCP, b.Admin, passwords(t, dir), filepath.Join(dir, "state"), services, fifo), 0o600))
	var err error
	b.feed, err = os.OpenFile(fifo, os.O_RDWR, 0)
	must(t, err)
	out, err := os.Create(b.log)
	must(t, err)
	b.cmd = in.Command(testisthmus.Binary(t), "serve", "--config", config)
	b.cmd.Env = append(os.Environ(), env...)
	b.cmd.Stdout, b.cmd.Stderr = out, out
	must(t, b.cmd.Start())
	go func() {
		defer close(b.ended)
		_ = b.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = b.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-b.ended:
		case <-time.After(patience):
			t.Error("the bridge does not end")
			_ = b.cmd.Process.Kill()
			<-b.ended
		}
		_, _ = out.Close(), b.feed.Close()
		if t.Failed() {
			text := read(t, b.log)
			t.Logf("log, its end:\n%s", text[max(0, len(text)-4000):])
		}
	})
	b.change(t)
	_, err = fmt.Fprintln(b.feed, `{"synced": true}`)
	must(t, err)
	testwait.Eventually(t, patience, "the first listings", func() (string, bool) {
		text := string(read(t, b.log))
		return text, strings.Count(text, `msg="listing complete"`) == 2
	})
	return b
}

// change writes the next state of the service, and returns what it has in it.
func (b *bridge) change(t *testing.T) string {
	t.Helper()
	b.seq++
	address := fmt.Sprintf("10.%d.%d.%d", 100+b.seq>>16, b.seq>>8&255, b.seq&255)
	_, err := fmt.Fprintf(b.feed, `{"service": {"name": "measured", "instances": [{"address": %q, "port": 80}]}}`+"\n", address)
	must(t, err)
	return address
}

// running fails if the bridge or a plugin has ended, or panicked.
func (b *bridge) running(t *testing.T) {
	t.Helper()
	select {
	case <-b.ended:
		t.Fatalf("the bridge has ended: %v", b.cmd.ProcessState)
	default:
	}
	if m := regexp.MustCompile(`(?m)^.*(panic|DATA RACE|the plugin ended|goroutine \d+ \[).*$`).Find(read(t, b.log)); m != nil {
		t.Fatalf("the log has %q", m)
	}
}

// memory returns the most memory that the bridge has had since the last reset,
// in bytes.
func (b *bridge) memory(t *testing.T) int {
	t.Helper()
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(read(t, fmt.Sprintf("/proc/%d/status", b.cmd.Process.Pid)))
	if m == nil {
		t.Fatal("no VmHWM in the status of the bridge")
	}
	n, err := strconv.Atoi(string(m[1]))
	must(t, err)
	return n << 10
}

// resetMemory begins a new maximum. Only root may, as the memory of the bridge
// is nobody else's.
func (b *bridge) resetMemory() {
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", b.cmd.Process.Pid), []byte("5"), 0)
}

// sink is a good sink, which subscribes to everything.
type sink struct {
	got chan *discovery.DeltaDiscoveryResponse
	err chan error
}

func (b *bridge) sink(t *testing.T, address string, creds credentials.TransportCredentials) *sink {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	must(t, err)
	for _, url := range []string{serviceEntry, workloadEntry} {
		must(t, stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: url}))
	}
	s := &sink{make(chan *discovery.DeltaDiscoveryResponse, 1000), make(chan error, 1)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			r, err := stream.Recv()
			if err == nil {
				s.got <- r
				err = stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: r.GetTypeUrl(), ResponseNonce: r.GetNonce()})
			}
			if err != nil {
				s.err <- err
				return
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		conn.Close()
	})
	return s
}

// secured returns the credentials of a good sink, which trusts the certificate
// that the server has now.
func (b *bridge) secured(t *testing.T) credentials.TransportCredentials {
	t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(read(t, b.server.Cert))
	cert, err := tls.LoadX509KeyPair(b.Good.Cert, b.Good.Key)
	must(t, err)
	return credentials.NewTLS(&tls.Config{RootCAs: pool, ServerName: "localhost", Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13})
}

// await waits until the service has an address at the sink.
func (s *sink) await(t *testing.T, address string) {
	t.Helper()
	// The field as it is encoded: the text alone is a part of other addresses.
	field := append([]byte{1<<3 | 2, byte(len(address))}, address...)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case r := <-s.got:
			for _, res := range r.GetResources() {
				if strings.Contains(res.GetName(), "measured") && bytes.Contains(res.GetResource().GetValue(), field) {
					return
				}
			}
		case err := <-s.err:
			t.Fatalf("the stream of a good sink has ended: %v", err)
		case <-timer.C:
			t.Fatalf("a good sink has not got %s", address)
		}
	}
}

// measure makes changes for a time, each of which both sinks must get, and
// returns how long the first of them had to wait.
func (b *bridge) measure(t *testing.T, lasts time.Duration, plain, secure *sink) (took []time.Duration) {
	t.Helper()
	for end := time.Now().Add(lasts); time.Now().Before(end); {
		began := time.Now()
		address := b.change(t)
		plain.await(t, address)
		took = append(took, time.Since(began))
		secure.await(t, address)
		time.Sleep(10 * time.Millisecond) // as registries change, and not as fast as the bridge can
	}
	slices.Sort(took)
	return took
}

func percentile(took []time.Duration, p int) time.Duration { return took[(len(took)-1)*p/100] }

// TestHostile shows that sinks get every change while each attack goes on, and
// that the bridge does not crash and takes a bounded amount of memory.
func TestHostile(t *testing.T) {
	if private(t, "TestHostile") {
		return
	}
	b := startBridge(t, nil)
	plain, secure := b.sink(t, b.XDS, insecure.NewCredentials()), b.sink(t, b.TLS, b.secured(t))
	address := b.change(t)
	plain.await(t, address)
	secure.await(t, address)

	lasts, quiet := shortly, shortly
	b.Scale = 0.1
	if *long > 0 {
		lasts, quiet, b.Scale = *long, *long, 1
	}
	before := b.measure(t, quiet, plain, secure)
	base := percentile(before, 99)
	if *long > 0 {
		fmt.Printf("| attack | changes | p50 | p99 | to quiet | processors of the attacker | p99 beside them busy | to that | most memory |\n|---|---|---|---|---|---|---|---|---|\n")
		fmt.Printf("| none | %d | %.1f ms | %.1f ms | 1 | 0 | | | %d MB |\n", len(before), ms(percentile(before, 50)), ms(base), b.memory(t)/1e6)
	}
	for _, a := range attacks {
		if *only != "" && a.name != *only || a.name == "network" && b.XDS6 == "" {
			continue
		}
		b.resetMemory()
		stop := b.attack(t, a)
		if a.name == "handshakes" {
			b.server.Renew(t)
		}
		took := b.measure(t, lasts, plain, secure)
		used := stop()
		b.running(t)
		memory := b.memory(t)
		if memory > most {
			t.Errorf("%s: the bridge took %d MB, want at most %d MB", a.name, memory/1e6, most/1_000_000)
		}
		if *long > 0 {
			// The attacker shares the machine: a part of what the sinks see is
			// that he is busy.
			b.Burn = used
			stop := b.attack(t, burner)
			alone := percentile(b.measure(t, lasts, plain, secure), 99)
			stop()
			p99 := percentile(took, 99)
			fmt.Printf("| %s: %s | %d | %.1f ms | %.1f ms | %.1f | %.2f | %.1f ms | %.1f | %d MB |\n", a.name, a.what,
				len(took), ms(percentile(took, 50)), ms(p99), float64(p99)/float64(base), used, ms(alone), float64(p99)/float64(alone), memory/1e6)
		} else {
			t.Logf("%s: %d changes, p99 %v, %d MB", a.name, len(took), percentile(took, 99), memory/1e6)
		}
	}
	// Whoever comes after the attacks is served, with the renewed certificate.
	late := b.sink(t, b.TLS, b.secured(t))
	late.await(t, b.change(t))
	b.running(t)
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// attack starts an attacker, and returns what ends it and tells how many
// processors it has kept busy.
func (b *bridge) attack(t *testing.T, a attack) (stop func() float64) {
	t.Helper()
	described, err := json.Marshal(b.target)
	must(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), attackKey+"="+a.name)
	cmd.Stdin = bytes.NewReader(described)
	cmd.Stderr = os.Stderr
	must(t, cmd.Start())
	// An attacker has machines of his own, and does not take this one's time.
	must(t, syscall.Setpriority(syscall.PRIO_PROCESS, cmd.Process.Pid, 19))
	began, ended := time.Now(), time.Duration(0)
	stop = func() float64 {
		if ended == 0 {
			ended = time.Since(began)
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		return float64(cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()) / float64(ended)
	}
	t.Cleanup(func() { stop() })
	return stop
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
