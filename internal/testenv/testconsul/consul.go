// Package testconsul runs Consul servers for tests.
//
// The server is Consul itself, built from the module pinned in tools/consul
// (four minutes on two cores, once per version). Start runs one with a catalog
// in memory, leader in a fifth of a second; a persistent one takes some
// seconds.
package testconsul

import (
	"crypto/rand"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Tool is the Consul server.
var Tool = testenv.GoTool("consul", "consul", "github.com/hashicorp/consul", "github.com/hashicorp/consul")

// Config configures a Consul server. The zero value is a development
// server that stores nothing on disk.
type Config struct {
	// ACL enables access control, denying by default. Client then uses the
	// management token, Consul.Token.
	ACL bool
	// Persistent keeps the catalog on disk across Kill and Restart. Such a
	// server takes some seconds to elect itself leader, and does not compute
	// health unless a check's status is set.
	Persistent bool
	// CertFile and KeyFile add a listener for https with this certificate.
	CertFile, KeyFile string
	// Peering lets other clusters follow the server: it enables Connect, which
	// peering requires, and a gRPC port with TLS.
	Peering bool
	// ExtraHCL is appended to the server's configuration.
	ExtraHCL string
}

// Server is a running Consul server.
type Server struct {
	// Addr is the HTTP API's address, host:port. Restarts keep it.
	Addr string
	// Client is a client with all permissions.
	Client *api.Client
	// Token is the management token, empty without ACL.
	Token string
	// HTTPSAddr is the address over https, localhost:port, empty without a
	// certificate.
	HTTPSAddr string

	*testenv.Process
	binary string
	cfg    Config
	ports  consulPorts
	// joins are the addresses at which the servers of a cluster gossip.
	joins []string
}

// outside is where the servers of a cluster reach each other.
const outside = "127.0.0.2"

type consulPorts struct{ http, https, grpc, grpcTLS, serf, server int }

// Start starts a Consul server of one node and waits until it is leader.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	c := newServer(t, "consul", cfg)
	c.Serve(t, c.choosePorts)
	return c
}

func newServer(t testing.TB, name string, cfg Config) *Server {
	t.Helper()
	c := &Server{cfg: cfg, binary: Tool.Binary(t)}
	if cfg.ACL {
		c.Token = rand.Text()
	}
	c.Process = testenv.NewServer(t, name, c.launch, c.ready)
	return c
}

// choosePorts chooses the ports, and makes Client.
func (c *Server) choosePorts(t testing.TB) {
	t.Helper()
	c.ports = consulPorts{http: testenv.FreePort(t), https: testenv.FreePort(t), grpc: testenv.FreePort(t), grpcTLS: -1, serf: testenv.FreePort(t), server: testenv.FreePort(t)}
	c.Addr = testenv.Loopback(c.ports.http)
	if c.cfg.Peering {
		c.ports.grpcTLS = testenv.FreePort(t)
	}
	if c.cfg.CertFile != "" {
		c.HTTPSAddr = fmt.Sprintf("localhost:%d", c.ports.https)
	}
	client, err := api.NewClient(&api.Config{Address: c.Addr, Token: c.Token, Transport: &http.Transport{MaxIdleConns: 8}})
	if err != nil {
		t.Fatalf("consul: make a client: %v", err)
	}
	c.Client = client
}

func (c *Server) launch(t testing.TB) {
	t.Helper()
	args := []string{
		"agent", "-bind=127.0.0.1", "-client=127.0.0.1",
		fmt.Sprintf("-http-port=%d", c.ports.http), fmt.Sprintf("-grpc-port=%d", c.ports.grpc), fmt.Sprintf("-grpc-tls-port=%d", c.ports.grpcTLS), "-dns-port=-1",
		fmt.Sprintf("-serf-lan-port=%d", c.ports.serf), "-serf-wan-port=-1", fmt.Sprintf("-server-port=%d", c.ports.server),
		"-log-level=warn",
	}
	switch {
	case len(c.joins) > 0:
		args = append(args, "-server", fmt.Sprintf("-bootstrap-expect=%d", len(c.joins)), "-data-dir="+c.Data, "-hcl=performance { raft_multiplier = 1 }",
			fmt.Sprintf("-node=n%d", c.ports.server), "-advertise="+outside, "-serf-lan-bind="+outside, fmt.Sprintf("-hcl=retry_join = [%s]", `"`+strings.Join(c.joins, `", "`)+`"`))
	case c.cfg.Persistent:
		args = append(args, "-node=n1", "-server", "-bootstrap-expect=1", "-data-dir="+c.Data, "-hcl=performance { raft_multiplier = 1 }",
			fmt.Sprintf("-hcl=connect { enabled = %t }", c.cfg.Peering))
	default:
		args = append(args, "-node=n1", "-dev")
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
	c.Process.Start(t, nil, c.binary, args...)
}

// ready reports whether the server is leader and answers from its catalog,
// including its own registration.
func (c *Server) ready() (seen string, ok bool) {
	leader, err := c.Client.Status().Leader()
	if err != nil || leader == "" {
		return fmt.Sprintf("leader %q, error %v", leader, err), false
	}
	// A consistent read waits until a new leader has replayed its log; other
	// reads may return a part of the catalog.
	checks, _, err := c.Client.Health().Service("consul", "", false, &api.QueryOptions{RequireConsistent: true})
	if err != nil || len(checks) == 0 {
		return fmt.Sprintf("leader %s, %d instances of service consul, error %v", leader, len(checks), err), false
	}
	return leader, true
}

// Instance is one instance to register.
type Instance struct {
	// Service is the service's name, ID the instance's, unique in the server.
	Service, ID string
	// Address is an IP address, Port a port number.
	Address string
	Port    int
	// Weight is the weight of a passing instance; 0 means Consul's default, 1.
	Weight int
	Tags   []string
	Meta   map[string]string
	// Critical makes its check fail; otherwise the check passes.
	Critical bool
}

// txnMax is how many operations Consul accepts in one transaction.
const txnMax = 128

// Register registers or updates the instances. They are external services with
// one check each, so that the test sets their health.
func (c *Server) Register(t testing.TB, instances ...Instance) {
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
	for part := range slices.Chunk(ops, txnMax) {
		ok, answer, _, err := c.Client.Txn().Txn(part, nil)
		if err != nil || !ok {
			t.Fatalf("consul: transaction of %d operations: %v, refused: %+v", len(part), err, answer)
		}
	}
}

// externalNode is the node that the instances are registered on.
const (
	externalNode   = "external"
	externalNodeID = "5f1e8a4c-6d0b-4b7e-9c57-0f3b8b1f2a10"
)

// Deregister removes instances by ID, one at a time.
func (c *Server) Deregister(t testing.TB, ids ...string) {
	t.Helper()
	for _, id := range ids {
		if _, err := c.Client.Catalog().Deregister(&api.CatalogDeregistration{Node: externalNode, ServiceID: id}, nil); err != nil {
			t.Fatalf("consul: deregister %s: %v", id, err)
		}
	}
}

// Services returns the names that the server lists, sorted.
func (c *Server) Services(t testing.TB) []string {
	t.Helper()
	services, _, err := c.Client.Catalog().Services(nil)
	if err != nil {
		t.Fatalf("consul: list services: %v", err)
	}
	return slices.Sorted(maps.Keys(services))
}

// PeeringAddr returns the address for other clusters, host:port. It requires
// ConsulConfig.Peering.
func (c *Server) PeeringAddr() string { return testenv.Loopback(c.ports.grpcTLS) }

// StartSidecar runs Consul's own proxy as the sidecar of an instance that the
// agent has registered with one.
func (c *Server) StartSidecar(t testing.TB, id string) {
	t.Helper()
	args := []string{"connect", "proxy", "-http-addr=" + c.Addr, "-sidecar-for=" + id, "-log-level=warn"}
	if c.Token != "" {
		args = append(args, "-token="+c.Token)
	}
	testenv.NewProcess(t, "sidecar-"+id).Start(t, nil, c.binary, args...)
}
