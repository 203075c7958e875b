package testenv

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/hashicorp/consul/api"
)

// The pieces are proved without Isthmus: istiod reads a folder, and what stands
// in the folder reaches the proxies.
func TestIstiodServesProxiesFromFolder(t *testing.T) {
	SkipIfShort(t)
	for _, version := range IstiodVersions() {
		t.Run(version.Name, func(t *testing.T) {
			web, web2 := StartHTTPBackend(t, "web-1"), StartHTTPBackend(t, "web-2")
			rpc := StartGRPCBackend(t, "rpc-1")
			dir := t.TempDir()
			// istiod 1.21 does not see a second endpoint on an address that it
			// knows, unless something of the entry changes with it, such as a
			// label.
			blind := version.Name == Istiod121.Name
			entry := func(name string, protocol string, port int, backends ...Backend) string {
				generation := 0
				if blind {
					generation = len(backends)
				}
				s := fmt.Sprintf(`apiVersion: networking.istio.io/v1alpha3
kind: ServiceEntry
metadata: {name: %s, namespace: consul, labels: {generation: "%d"}}
spec:
  hosts: [%s.service.consul]
  addresses: [240.0.0.%d]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: %d, name: %s, protocol: %s}]
  endpoints:
`, name, generation, name, port%200+1, port, protocol, protocol)
				for _, b := range backends {
					s += fmt.Sprintf("  - {address: %s, ports: {%s: %d}}\n", b.Address, protocol, b.Port)
				}
				return s
			}
			write := func(name, content string) {
				tmp := filepath.Join(t.TempDir(), name)
				if err := os.WriteFile(tmp, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
				if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
			write("web.yaml", entry("web", "http", 80, web))
			write("rpc.yaml", entry("rpc", "grpc", 90, rpc))

			istiod := StartIstiod(t, version, "fs://"+dir)
			istiod.WaitReady(t)
			waitHosts(t, istiod, 2)
			if got := istiod.Configz(t); len(got) != 2 || got["ServiceEntry consul/web"].Kind == "" {
				t.Errorf("configz %v", got)
			}
			if got := istiod.EndpointShards(t)["web.service.consul"]; len(got) != 1 || got[0] != web.Addr() {
				t.Errorf("endpointShardz of web %v, want %s", got, web.Addr())
			}
			recorder := StartRecorder(t, istiod)
			recorder.WaitEndpoints(t, webCluster, web.Addr())
			recorder.WaitSubscribed(t)
			envoy := StartEnvoy(t, istiod)
			envoy.WaitReaches(t, webCluster, "web-1")

			// A push of istiod's start may still be on its way: it tells that
			// it is ready before its debounce is over. It cannot come again.
			var before, after Pushes
			for range 4 {
				before = istiod.PushCounts(t)
				write("web.yaml", entry("web", "http", 80, web, web2))
				recorder.WaitEndpoints(t, webCluster, web.Addr(), web2.Addr())
				envoy.WaitReaches(t, webCluster, "web-1", "web-2")
				after = istiod.PushCounts(t)
				if blind || after.Full() == before.Full() {
					break
				}
				write("web.yaml", entry("web", "http", 80, web))
				recorder.WaitEndpoints(t, webCluster, web.Addr())
			}
			if full := after.Full() != before.Full(); after["eds"] <= before["eds"] || full != blind {
				t.Errorf("an endpoint more: pushes went from %v to %v, want more eds; and anything else: %v", before, after, blind)
			}

			if err := os.Remove(filepath.Join(dir, "web.yaml")); err != nil {
				t.Fatal(err)
			}
			recorder.WaitNoCluster(t, webCluster)
			Eventually(t, Patience, "a full push counted as a host is gone", func() (string, bool) { // counted after it is sent
				now := istiod.PushCounts(t)
				return now.String(), now.Full() > after.Full()
			})

			NewProxyless(t, istiod, "rpc.service.consul", 90).WaitReaches(t, "rpc-1")

			istiod.Kill()
			istiod.Restart(t)
			istiod.WaitReady(t)
			waitHosts(t, istiod, 1)
		})
	}
}

const webCluster = "outbound|80||web.service.consul"

// waitHosts waits for a number of hosts: 1.21.2 says that it is ready before it
// has read its files.
func waitHosts(t *testing.T, istiod *Istiod, want int) {
	t.Helper()
	Eventually(t, Patience, "the hosts of the folder", func() (string, bool) {
		hosts := istiod.Hosts(t)
		return fmt.Sprint(hosts), len(hosts) == want
	})
}

func TestConsulKeepsCatalogOverRestart(t *testing.T) {
	SkipIfShort(t)
	c := StartConsul(t, ConsulConfig{Persistent: true})
	c.Register(t,
		ConsulInstance{Service: "web", ID: "web-1", Address: "10.0.0.1", Port: 80, Weight: 3},
		ConsulInstance{Service: "web", ID: "web-2", Address: "10.0.0.2", Port: 80, Critical: true},
		ConsulInstance{Service: "gone", ID: "gone-1", Address: "10.0.0.3", Port: 80})
	c.Deregister(t, "gone-1")
	check := func() {
		t.Helper()
		if got := c.Services(t); !slices.Equal(got, []string{"consul", "web"}) {
			t.Errorf("services %v, want consul and web", got)
		}
		entries, _, err := c.Client.Health().Service("web", "", false, nil)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for _, e := range entries {
			got[e.Service.ID] = fmt.Sprintf("%s:%d weight %d %s", e.Service.Address, e.Service.Port, e.Service.Weights.Passing, e.Checks.AggregatedStatus())
		}
		want := map[string]string{"web-1": "10.0.0.1:80 weight 3 passing", "web-2": "10.0.0.2:80 weight 1 critical"}
		if !maps.Equal(got, want) {
			t.Errorf("instances of web %v, want %v", got, want)
		}
	}
	check()
	c.Kill()
	if _, err := c.Client.Status().Leader(); err == nil {
		t.Error("the killed server answers")
	}
	c.Restart(t)
	check()
}

func TestConsulWithACLRefusesAnonymous(t *testing.T) {
	SkipIfShort(t)
	c := StartConsul(t, ConsulConfig{ACL: true})
	c.Register(t, ConsulInstance{Service: "web", ID: "web-1", Address: "10.0.0.1", Port: 80})
	if got := c.Services(t); !slices.Contains(got, "web") {
		t.Errorf("services with the management token %v, want web among them", got)
	}
	anonymous, err := api.NewClient(&api.Config{Address: c.Addr})
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := anonymous.Catalog().Services(nil)
	if err != nil || len(got) != 0 {
		t.Errorf("services without a token %v, error %v; want none, and none", got, err)
	}
}

func TestGateCutsAndLetsThrough(t *testing.T) {
	backend := StartHTTPBackend(t, "behind")
	gate := NewGate(t, backend.Addr())
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	get := func() error {
		body, _, err := httpGet(t, client, "http://"+gate.Addr)
		if err == nil && string(body) != "behind" {
			return fmt.Errorf("body %q", body)
		}
		return err
	}
	if get() == nil {
		t.Error("a gate that was never opened lets through")
	}
	for range 2 {
		gate.Open(t)
		if err := get(); err != nil {
			t.Errorf("open: %v", err)
		}
		gate.Shut() // cuts the connection that the client keeps
		if get() == nil {
			t.Error("a shut gate lets through")
		}
	}
}

func TestPinnedVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "go.mod")
	if err := os.WriteFile(path, []byte("module m\n\nrequire (\n\texample.org/a v1.2.3 // indirect\n)\nrequire example.org/b v0.1.0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for module, want := range map[string]string{"example.org/a": "1.2.3", "example.org/b": "0.1.0"} {
		if got, err := pinnedVersion(path, module); got != want || err != nil {
			t.Errorf("version of %s is %q, error %v; want %s", module, got, err, want)
		}
	}
	if got, err := pinnedVersion(path, "example.org"); err == nil {
		t.Errorf("version of a module that is not required is %q, want an error", got)
	}
}

func TestFetchSaysWhatCouldNotBeHad(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	broken := goTool("consul", "consul", "github.com/hashicorp/consul", "./no-such-package")
	_, err := broken.Fetch(t.Context(), io.Discard)
	if err == nil || !strings.Contains(err.Error(), "could not get the test server consul") || !strings.Contains(err.Error(), "no-such-package") {
		t.Errorf("error %v, want one that names the server and the package", err)
	}
	path, err := broken.Path()
	if err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 { // the lock
		t.Errorf("left in the cache: %v, error %v; want the lock only", left, err)
	}
}

func TestFetchWaitsForAnotherProcess(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	var calls atomic.Int32
	tool := Tool{
		name: "made", binary: "made",
		version: func(string) (string, error) { return "1", nil },
		get: func(_ context.Context, _, path string, _ io.Writer) error {
			calls.Add(1)
			return os.WriteFile(path, nil, 0o755)
		},
	}
	path, err := tool.Path()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	// A lock of another open file excludes just as that of another process.
	unlock, err := lockFile(t.Context(), path+".lock", func() { t.Error("nobody has the lock yet") })
	if err != nil {
		t.Fatal(err)
	}
	read, write := io.Pipe()
	fetched := make(chan error, 1)
	// Owned by the test, which waits for it below.
	go func() {
		_, err := tool.Fetch(t.Context(), write)
		fetched <- err
		write.Close()
	}()
	line, err := bufio.NewReader(read).ReadString('\n')
	if err != nil || !strings.Contains(line, "waiting") {
		t.Errorf("progress %q, error %v; want that it waits", line, err)
	}
	go func() { _, _ = io.Copy(io.Discard, read) }() // ends with write, closed by the goroutine above
	if calls.Load() != 0 {
		t.Error("got although another holds the lock")
	}
	unlock()
	if err := <-fetched; err != nil {
		t.Fatal(err)
	}
	if _, err := tool.Fetch(t.Context(), io.Discard); err != nil || calls.Load() != 1 {
		t.Errorf("got %d times, error %v; want once", calls.Load(), err)
	}
}

func TestKubePathNamesOne(t *testing.T) {
	for path, want := range map[string]bool{
		"pods": false, "nodes/n": true, "namespaces/ns/pods": false, "namespaces/ns/pods/p": true, "namespaces": false,
	} {
		if got := namesOne(path); got != want {
			t.Errorf("namesOne(%q) = %v, want %v", path, got, want)
		}
	}
}

// A cluster as tests of it need it: its controllers make EndpointSlices, its
// users have tokens, certificates and what RBAC lets them do, Istio's kinds are
// validated, and it keeps its data when it is killed.
func TestKube(t *testing.T) {
	SkipIfShort(t)
	k := StartKube(t, KubeConfig{Istio: true, Controllers: true})
	status := func(want int, method, path, token string, body any) string {
		t.Helper()
		answer, code, err := k.Do(t.Context(), method, path, token, "", body)
		if err != nil || code != want {
			t.Fatalf("%s %s: status %d, error %v, want %d: %s", method, path, code, err, want, answer)
		}
		return string(answer)
	}
	const services = "/api/v1/namespaces/default/services"
	token := k.ServiceAccount(t, "bridge", "reader")
	status(http.StatusForbidden, http.MethodGet, services, token, nil)
	status(http.StatusUnauthorized, http.MethodGet, services, "unknown", nil)
	k.Apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reader}
rules: [{apiGroups: [""], resources: [services], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}
subjects: [{kind: ServiceAccount, namespace: bridge, name: reader}, {apiGroup: rbac.authorization.k8s.io, kind: Group, name: readers}]
`)
	// The server's own view of roles follows a moment later.
	Eventually(t, Patience, "the role of the service account", func() (string, bool) {
		answer, code, err := k.Do(t.Context(), http.MethodGet, services, token, "", nil)
		return fmt.Sprintf("status %d, error %v: %.200s", code, err, answer), code == http.StatusOK
	})
	review := status(http.StatusCreated, http.MethodPost, "/apis/authentication.k8s.io/v1/tokenreviews", "",
		map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": map[string]any{"token": token}})
	if !strings.Contains(review, `"username":"system:serviceaccount:bridge:reader"`) {
		t.Errorf("review of a service account's token: %s", review)
	}
	someone := k.ClientCertificate(t, "someone", "readers")
	pair, err := tls.LoadX509KeyPair(someone.Cert, someone.Key)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(k.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}}}
	defer client.CloseIdleConnections()
	if body, code, err := httpGet(t, client, k.URL+services); err != nil || code != http.StatusOK {
		t.Errorf("with a certificate: status %d, error %v: %s", code, err, body)
	}

	// The controller wants the pod's node.
	k.Apply(t, `
apiVersion: v1
kind: Node
metadata: {name: n1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: web-1, labels: {app: web}}
spec: {nodeName: n1, containers: [{name: web, image: web}]}
`)
	k.ApplyStatus(t, `
apiVersion: v1
kind: Pod
metadata: {name: web-1}
status: {phase: Running, podIP: 10.1.0.1, podIPs: [{ip: 10.1.0.1}], conditions: [{type: Ready, status: "True"}]}
`)
	const slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name=web"
	endpoint := func() {
		t.Helper()
		Eventually(t, Patience, "the endpoint of web", func() (string, bool) {
			answer, _, err := k.Do(t.Context(), http.MethodGet, slices, "", "", nil)
			return fmt.Sprint(string(answer), err), strings.Contains(string(answer), "10.1.0.1")
		})
	}
	endpoint()
	const entries = "/apis/networking.istio.io/v1/namespaces/default/serviceentries"
	refused := status(http.StatusUnprocessableEntity, http.MethodPost, entries, "", `{"apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry", "metadata": {"name": "none"}, "spec": {"hosts": []}}`)
	if !strings.Contains(refused, "spec.hosts") {
		t.Errorf("an entry without a host: %s", refused)
	}

	k.Kill()
	if _, _, err := k.Do(t.Context(), http.MethodGet, services, "", "", nil); err == nil {
		t.Error("the killed server answers")
	}
	k.Restart(t)
	endpoint()
	k.Kill()
	k.RestartEmpty(t)
	status(http.StatusNotFound, http.MethodGet, services+"/web", "", nil)
}
