package testenv

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
)

// ConsulConfig says which Consul a test wants. Its zero value is a development server that forgets everything when it
// ends.
type ConsulConfig struct {
	// ACL turns access control on, denying by default. The server's Client then uses the management token, which is
	// in Consul.Token.
	ACL bool
	// Persistent keeps the catalog on disk, so that it is still there after Kill and Restart. Such a server takes
	// some seconds to elect itself leader, and forms no opinion of health without a check's status being set.
	Persistent bool
	// CertFile and KeyFile make the server listen over https too, with this certificate.
	CertFile, KeyFile string
	// ExtraHCL is configuration that is added to the server's.
	ExtraHCL string
}

// Consul is a running Consul server.
type Consul struct {
	// Addr is the HTTP API's address, host:port. It stays the same over restarts.
	Addr string
	// Client speaks to the server with every right.
	Client *api.Client
	// Token is the management token, empty without ACL.
	Token string
	// HTTPSAddr is the address over https, localhost:port, empty without a certificate.
	HTTPSAddr string

	proc   *process
	binary string
	cfg    ConsulConfig
	dir    string // data of a persistent server
	ports  consulPorts
}

type consulPorts struct{ http, https, grpc, serf, server int }

// StartConsul starts a Consul server of one node and waits until it has elected itself leader.
func StartConsul(t testing.TB, cfg ConsulConfig) *Consul {
	t.Helper()
	c := &Consul{cfg: cfg, binary: ConsulTool.fetch(t), dir: t.TempDir()}
	if cfg.ACL {
		c.Token = uuid()
	}
	c.proc = newProcess(t, "consul")
	c.proc.startReady(t, func() {
		c.ports = consulPorts{http: FreePort(t), https: FreePort(t), grpc: FreePort(t), serf: FreePort(t), server: FreePort(t)}
		c.Addr = loopback(c.ports.http)
		if cfg.CertFile != "" {
			c.HTTPSAddr = fmt.Sprintf("localhost:%d", c.ports.https)
		}
		client, err := api.NewClient(&api.Config{Address: c.Addr, Token: c.Token, Transport: &http.Transport{MaxIdleConns: 8}})
		if err != nil {
			t.Fatalf("consul: make a client: %v", err)
		}
		c.Client = client
		c.launch(t)
	}, c.ready)
	return c
}

func (c *Consul) launch(t testing.TB) {
	t.Helper()
	args := []string{
		"agent", "-node=n1", "-bind=127.0.0.1", "-client=127.0.0.1",
		fmt.Sprintf("-http-port=%d", c.ports.http), fmt.Sprintf("-grpc-port=%d", c.ports.grpc), "-grpc-tls-port=-1", "-dns-port=-1",
		fmt.Sprintf("-serf-lan-port=%d", c.ports.serf), "-serf-wan-port=-1", fmt.Sprintf("-server-port=%d", c.ports.server),
		"-log-level=warn",
	}
	if c.cfg.Persistent {
		args = append(args, "-server", "-bootstrap-expect=1", "-data-dir="+c.dir, "-hcl=performance { raft_multiplier = 1 }",
			"-hcl=connect { enabled = false }")
	} else {
		args = append(args, "-dev")
	}
	// Tests load many services in one transaction.
	args = append(args, "-hcl=limits { txn_max_req_len = 8388608 kv_max_value_size = 8388608 }")
	if c.cfg.ACL {
		args = append(args, fmt.Sprintf("-hcl=acl { enabled = true default_policy = \"deny\" tokens { initial_management = %q agent = %q } }", c.Token, c.Token))
	}
	if c.cfg.CertFile != "" {
		args = append(args, fmt.Sprintf("-https-port=%d", c.ports.https),
			fmt.Sprintf("-hcl=tls { https { cert_file = %q key_file = %q } }", c.cfg.CertFile, c.cfg.KeyFile))
	}
	if c.cfg.ExtraHCL != "" {
		args = append(args, "-hcl="+c.cfg.ExtraHCL)
	}
	c.proc.start(t, nil, c.binary, args...)
}

// ready reports whether the server leads and answers from its catalog, its own registration included.
func (c *Consul) ready() (seen string, ok bool) {
	leader, err := c.Client.Status().Leader()
	if err != nil || leader == "" {
		return fmt.Sprintf("leader %q, error %v", leader, err), false
	}
	// A consistent read waits until the new leader has replayed its log; any other may see a part of the catalog.
	checks, _, err := c.Client.Health().Service("consul", "", false, &api.QueryOptions{RequireConsistent: true})
	if err != nil || len(checks) == 0 {
		return fmt.Sprintf("leader %s, %d instances of service consul, error %v", leader, len(checks), err), false
	}
	return leader, true
}

// CPU returns how much processor time the server has used since it was started. It is known on Linux only, and 0 elsewhere.
func (c *Consul) CPU() time.Duration {
	c.proc.mu.Lock()
	pid := c.proc.run.cmd.Process.Pid
	c.proc.mu.Unlock()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name of the program is in parentheses; the times are the 12th and 13th field after it, in hundredths of a second.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

// Kill ends the server as kill -9 does.
func (c *Consul) Kill() { c.proc.kill() }

// Restart starts the server again on the same ports after Kill, and waits until it is ready. One that is not Persistent
// comes back empty.
func (c *Consul) Restart(t testing.TB) {
	t.Helper()
	c.Launch(t)
	c.WaitReady(t)
}

// Launch is Restart without the wait.
func (c *Consul) Launch(t testing.TB) {
	t.Helper()
	c.proc.kill()
	c.launch(t)
}

// WaitReady waits until the server leads and has replayed its log.
func (c *Consul) WaitReady(t testing.TB) {
	t.Helper()
	if err := c.proc.waitReady(t, c.ready); err != nil {
		t.Fatal(err)
	}
}

// RestartEmpty starts the server again on the same ports without anything that it knew, as when its machine was replaced.
func (c *Consul) RestartEmpty(t testing.TB) {
	t.Helper()
	c.proc.kill()
	if err := os.RemoveAll(c.dir); err != nil {
		t.Fatalf("consul: remove its data: %v", err)
	}
	c.Restart(t)
}

// ConsulInstance is one instance of a service as a test registers it.
type ConsulInstance struct {
	// Service is the service's name, ID the instance's (unique in the server).
	Service, ID string
	// Address is an IP address; Port the number it listens on.
	Address string
	Port    int
	// Weight is the share of a passing instance; 0 leaves it to Consul, which says 1.
	Weight int
	Tags   []string
	Meta   map[string]string
	// Critical says that its check fails. Without it the check passes.
	Critical bool
}

// txnMax is how many operations Consul takes in one transaction.
const txnMax = 128

// Register registers the instances, or changes those that exist. They are entered into the catalog with a check each, as
// external services, so that a test decides about their health.
func (c *Consul) Register(t testing.TB, instances ...ConsulInstance) {
	t.Helper()
	ops := api.TxnOps{{Node: &api.NodeTxnOp{Verb: api.NodeSet, Node: api.Node{ID: externalNodeID, Node: externalNode, Address: "127.0.0.1"}}}}
	for _, i := range instances {
		svc := api.AgentService{ID: i.ID, Service: i.Service, Address: i.Address, Port: i.Port, Tags: i.Tags, Meta: i.Meta}
		if i.Weight > 0 {
			svc.Weights = api.AgentWeights{Passing: i.Weight, Warning: 1}
		}
		status := api.HealthPassing
		if i.Critical {
			status = api.HealthCritical
		}
		ops = append(ops,
			&api.TxnOp{Service: &api.ServiceTxnOp{Verb: api.ServiceSet, Node: externalNode, Service: svc}},
			&api.TxnOp{Check: &api.CheckTxnOp{Verb: api.CheckSet, Check: api.HealthCheck{
				Node: externalNode, CheckID: "check-" + i.ID, Name: "test", Status: status, ServiceID: i.ID, ServiceName: i.Service,
			}}})
	}
	c.txn(t, ops)
}

// externalNode is the node that the instances are registered on.
const (
	externalNode   = "external"
	externalNodeID = "5f1e8a4c-6d0b-4b7e-9c57-0f3b8b1f2a10"
)

// Deregister removes instances by their ids, one after the other.
func (c *Consul) Deregister(t testing.TB, ids ...string) {
	t.Helper()
	for _, id := range ids {
		if _, err := c.Client.Catalog().Deregister(&api.CatalogDeregistration{Node: externalNode, ServiceID: id}, nil); err != nil {
			t.Fatalf("consul: deregister %s: %v", id, err)
		}
	}
}

func (c *Consul) txn(t testing.TB, ops api.TxnOps) {
	t.Helper()
	for part := range slices.Chunk(ops, txnMax) {
		ok, answer, _, err := c.Client.Txn().Txn(part, nil)
		if err != nil {
			t.Fatalf("consul: transaction of %d operations: %v", len(part), err)
		}
		if !ok {
			var reasons []string
			for _, e := range answer.Errors {
				reasons = append(reasons, fmt.Sprintf("operation %d: %s", e.OpIndex, e.What))
			}
			t.Fatalf("consul: transaction of %d operations refused: %s", len(part), strings.Join(reasons, "; "))
		}
	}
}

// Services returns the names that the server lists, sorted.
func (c *Consul) Services(t testing.TB) []string {
	t.Helper()
	services, _, err := c.Client.Catalog().Services(nil)
	if err != nil {
		t.Fatalf("consul: list services: %v", err)
	}
	return slices.Sorted(maps.Keys(services))
}

func uuid() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
