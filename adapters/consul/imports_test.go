package consul_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/adapters/consul"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// peered starts two peered servers, the first of which imports everything of
// the second, its peer "beta".
func peered(t *testing.T) (importer, exporter *testconsul.Server) {
	t.Helper()
	importer = startConsul(t, testconsul.Config{Peering: true, ACL: true})
	exporter = startConsul(t, testconsul.Config{Peering: true, Persistent: true, ExtraHCL: `datacenter = "dc2"`})
	token, _, err := importer.Client.Peerings().GenerateToken(t.Context(), api.PeeringGenerateTokenRequest{PeerName: "beta"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := exporter.Client.Peerings().Establish(t.Context(), api.PeeringEstablishRequest{PeerName: "alpha", PeeringToken: token.PeeringToken}, nil); err != nil {
		t.Fatal(err)
	}
	export(t, exporter, "*")
	return importer, exporter
}

// export makes a server export services to its peer "alpha".
func export(t *testing.T, server *testconsul.Server, names ...string) {
	t.Helper()
	entry := &api.ExportedServicesConfigEntry{Name: "default"}
	for _, name := range names {
		entry.Services = append(entry.Services, api.ExportedService{Name: name, Consumers: []api.ServiceConsumer{{Peer: "alpha"}}})
	}
	if _, _, err := server.Client.ConfigEntries().Set(entry, nil); err != nil {
		t.Fatal(err)
	}
}

// TestConsulImported shows that services imported from a cluster peer are
// services of their own beside local ones of the same name, with a token that
// may read no more than the documentation says, and that nothing is removed
// while the peer is away.
func TestConsulImported(t *testing.T) {
	t.Parallel()
	importer, exporter := peered(t)
	policy, _, err := importer.Client.ACL().PolicyCreate(&api.ACLPolicy{
		Name: "isthmus", Rules: `service_prefix "" { policy = "read" } node_prefix "" { policy = "read" } peering = "read"`,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	token, _, err := importer.Client.ACL().TokenCreate(&api.ACLToken{Policies: []*api.ACLLink{{ID: policy.ID}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	importer.Register(t, testconsul.Instance{Service: "web", ID: "web-1", Address: "10.1.0.1", Port: 80})
	exporter.Register(t, testconsul.Instance{Service: "web", ID: "web-1", Address: "10.2.0.1", Port: 80, Meta: map[string]string{"k": "v"}},
		testconsul.Instance{Service: "db", ID: "db-1", Address: "10.2.0.2", Port: 5432})
	c := follow(t, importer, func(c *consul.Config) {
		c.Token, c.Peers = plugin.Secret(token.SecretID), []string{"beta"}
	})
	c.awaitSynced(t)
	imported := func(name, what string, cond func([]registry.Instance) bool) {
		t.Helper()
		c.await(t, what, func() bool { return cond(c.Held.Instances["beta.peer/"+name]) })
	}
	imported("web", "imported", one(func(i registry.Instance) bool { return i.Address == "10.2.0.1" && i.Meta["k"] == "v" }))
	imported("db", "imported too", one(func(i registry.Instance) bool { return i.Address == "10.2.0.2" }))
	c.awaitWeb(t, "the local one", one(func(i registry.Instance) bool { return i.Address == "10.1.0.1" }))
	c.await(t, "the key of an imported service", func() bool {
		return c.Held.Services["beta.peer/web"].Key == registry.Key{Name: "web", Peer: "beta"}
	})

	exporter.Register(t, testconsul.Instance{Service: "web", ID: "web-2", Address: "10.2.0.3", Port: 80},
		testconsul.Instance{Service: "web", ID: "web-1", Address: "10.2.0.1", Port: 80, Critical: true},
		testconsul.Instance{Service: "new", ID: "new-1", Address: "10.2.0.4", Port: 80})
	imported("web", "one more, and one that fails", func(i []registry.Instance) bool {
		return len(i) == 2 && i[0].Health == registry.HealthCritical && i[1].Health == registry.HealthPassing
	})
	imported("new", "a new service", func(i []registry.Instance) bool { return len(i) == 1 })
	if err := exporter.Client.Agent().ServiceRegister(&api.AgentServiceRegistration{Name: "own", ID: "own-1", Address: "10.2.0.5", Port: 80}); err != nil {
		t.Fatal(err)
	}
	if err := exporter.Client.Agent().EnableServiceMaintenance("own-1", "test"); err != nil {
		t.Fatal(err)
	}
	imported("own", "in maintenance", one(func(i registry.Instance) bool { return i.Disabled }))
	exporter.Deregister(t, "web-1")
	imported("web", "one less", func(i []registry.Instance) bool { return len(i) == 1 })
	exporter.Deregister(t, "new-1")
	c.await(t, "one service less", func() bool { return len(c.Held.Instances) == 4 && c.Held.Removes == 1 })

	// The peer goes and returns.
	exporter.Kill()
	c.awaitState(t, "the peering is FAILING")
	c.await(t, "all kept", func() bool { return len(c.Held.Instances) == 4 && c.Held.Removes == 1 })
	exporter.Restart(t)
	exporter.Register(t, testconsul.Instance{Service: "web", ID: "web-3", Address: "10.2.0.6", Port: 80})
	imported("web", "changes go on", func(i []registry.Instance) bool { return len(i) == 2 })
	c.awaitState(t, "")

	export(t, exporter, "web")
	c.await(t, "one of the peer is exported", func() bool { return len(c.Held.Instances) == 2 && len(c.Held.Instances["beta.peer/web"]) == 2 })
	if _, err := exporter.Client.ConfigEntries().Delete(api.ExportedServices, "default", nil); err != nil {
		t.Fatal(err)
	}
	c.awaitState(t, "imports no service")
	if _, err := importer.Client.Peerings().Delete(t.Context(), "beta", nil); err != nil {
		t.Fatal(err)
	}
	c.awaitState(t, "no such peering")
	c.awaitWeb(t, "the local one still", func(i []registry.Instance) bool { return len(i) == 1 })
}

// TestConsulServiceDefaults shows that the protocol of a service-defaults entry
// is part of the service from its first appearance on, and that its changes are
// seen.
func TestConsulServiceDefaults(t *testing.T) {
	t.Parallel()
	server := startConsul(t, testconsul.Config{})
	entry := func(name, protocol string) {
		t.Helper()
		if _, _, err := server.Client.ConfigEntries().Set(&api.ServiceConfigEntry{Kind: api.ServiceDefaults, Name: name, Protocol: protocol}, nil); err != nil {
			t.Fatal(err)
		}
	}
	entry("web", "grpc")
	entry("other", "http")
	server.Register(t, testconsul.Instance{Service: "Web", ID: "web-1", Address: "10.1.0.1", Port: 80})
	c := follow(t, server)
	c.awaitSynced(t)
	protocol := func(want string) {
		t.Helper()
		c.await(t, "protocol "+want, func() bool {
			return len(c.Held.Instances["Web"]) == 1 && c.Held.Services["Web"].Meta["protocol"] == want
		})
	}
	protocol("grpc")
	c.await(t, "as it was from the beginning", func() bool { return c.Held.Sets == 1 })
	entry("web", "http2")
	protocol("http2")
	if _, _, err := server.Client.ConfigEntries().Set(&api.ServiceConfigEntry{Kind: api.ServiceDefaults, Name: "web"}, nil); err != nil {
		t.Fatal(err)
	}
	protocol("")
	entry("web", "tcp")
	protocol("tcp")
	if _, err := server.Client.ConfigEntries().Delete(api.ServiceDefaults, "web", nil); err != nil {
		t.Fatal(err)
	}
	protocol("")
	c.await(t, "one service, and no fault", func() bool { return len(c.Held.Instances) == 1 && len(c.Held.Reasons) == 0 })
}

// TestConsulSidecars shows that with connect a service is published at its
// sidecars, under a name that a certificate of Consul's own carries: a client
// with a certificate of that mesh reaches the service through a real sidecar.
func TestConsulSidecars(t *testing.T) {
	t.Parallel()
	server := startConsul(t, testconsul.Config{})
	behind := testproxy.StartHTTPBackend(t, "pay-1")
	port := testenv.FreePort(t)
	agent := server.Client.Agent()
	register := func(r *api.AgentServiceRegistration) {
		t.Helper()
		if err := agent.ServiceRegister(r); err != nil {
			t.Fatal(err)
		}
	}
	register(&api.AgentServiceRegistration{
		Name: "pay", ID: "pay-1", Address: "127.0.0.1", Port: behind.Port, Meta: map[string]string{"version": "v1"},
		Connect: &api.AgentServiceConnect{SidecarService: &api.AgentServiceRegistration{Port: port, Address: "127.0.0.1"}},
	})
	register(&api.AgentServiceRegistration{Name: "plain", ID: "plain-1", Address: "10.1.0.1", Port: 80})
	if _, _, err := server.Client.ConfigEntries().Set(&api.ServiceConfigEntry{Kind: api.ServiceDefaults, Name: "pay", Protocol: "http"}, nil); err != nil {
		t.Fatal(err)
	}
	server.StartSidecar(t, "pay-1")
	c := follow(t, server, func(c *consul.Config) { c.Connect = true })
	c.awaitSynced(t)
	roots, _, err := server.Client.Connect().CARoots(nil)
	if err != nil {
		t.Fatal(err)
	}
	name := "spiffe://" + roots.TrustDomain + "/ns/default/dc/dc1/svc/pay"
	c.await(t, "the sidecar", func() bool {
		i, s := c.Held.Instances["pay"], c.Held.Services["pay"]
		return len(c.Held.Instances) == 1 && len(i) == 1 && i[0].Ports[0].Number == port && i[0].Meta["version"] == "v1" &&
			len(s.SubjectAltNames) == 1 && s.SubjectAltNames[0] == name && s.Meta["protocol"] == "http"
	})
	leaf, _, err := agent.ConnectCALeaf("gateway", nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := throughSidecar(t, port, name, leaf, roots); !strings.Contains(got, behind.Name) {
		t.Errorf("through the sidecar: %q, want the answer of %s", got, behind.Name)
	}

	// A second sidecar, of another name, is in front of the same service.
	register(&api.AgentServiceRegistration{
		Kind: api.ServiceKindConnectProxy, Name: "other-proxy", ID: "other-proxy-1", Address: "10.1.0.2", Port: 21000,
		Proxy: &api.AgentServiceConnectProxyConfig{DestinationServiceName: "pay"},
	})
	c.await(t, "two sidecars", func() bool { return len(c.Held.Instances["pay"]) == 2 })
	register(&api.AgentServiceRegistration{
		Kind: api.ServiceKindConnectProxy, Name: "other-proxy", ID: "other-proxy-1", Address: "10.1.0.2", Port: 21000,
		Proxy: &api.AgentServiceConnectProxyConfig{DestinationServiceName: "plain"},
	})
	c.await(t, "moved to another service", func() bool { return len(c.Held.Instances["pay"]) == 1 && len(c.Held.Instances["plain"]) == 1 })
	register(&api.AgentServiceRegistration{Name: "native", ID: "native-1", Address: "10.1.0.3", Port: 80, Connect: &api.AgentServiceConnect{Native: true}})
	c.await(t, "a service of its own mesh", func() bool { return len(c.Held.Instances["native"]) == 1 })
	for _, id := range []string{"other-proxy-1", "native-1"} {
		if err := agent.ServiceDeregister(id); err != nil {
			t.Fatal(err)
		}
	}
	c.await(t, "those are gone", func() bool {
		return len(c.Held.Instances) == 1 && c.Held.Removes == 2 && len(c.Held.Instances["pay"]) == 1
	})
	c.awaitState(t, "")
}

// throughSidecar calls a sidecar as a gateway does that has a certificate of
// the mesh, and accepts the certificate with the name only. It tries again
// while the sidecar starts.
func throughSidecar(t *testing.T, port int, name string, leaf *api.LeafCert, roots *api.CARootList) string {
	t.Helper()
	cert, err := tls.X509KeyPair([]byte(leaf.CertPEM), []byte(leaf.PrivateKeyPEM))
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	for _, root := range roots.Roots {
		pool.AppendCertsFromPEM([]byte(root.RootCertPEM))
	}
	transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
		Certificates:       []tls.Certificate{cert},
		InsecureSkipVerify: true, // the name is no host's; verified below
		VerifyConnection: func(s tls.ConnectionState) error {
			peer := s.PeerCertificates[0]
			if len(peer.URIs) != 1 || peer.URIs[0].String() != name {
				return fmt.Errorf("the certificate is of %v, not of %s", peer.URIs, name)
			}
			_, err := peer.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
			return err
		},
	}}
	client := &http.Client{Transport: transport, Timeout: within}
	for end := time.Now().Add(within); ; {
		res, err := client.Get(fmt.Sprintf("https://127.0.0.1:%d/", port))
		if err == nil {
			defer res.Body.Close()
			body, err := io.ReadAll(res.Body)
			if err != nil {
				t.Fatal(err)
			}
			return string(body)
		}
		if cause := errors.Unwrap(err); time.Now().After(end) {
			t.Fatalf("through the sidecar: %v", cause)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
