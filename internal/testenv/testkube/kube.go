// Package testkube runs API servers of Kubernetes for tests.
//
// kube-apiserver, controller manager and kubectl are built from the module
// pinned in tools/kube (ten minutes of processor time, once); etcd is that of
// package testetcd. Start runs both, ready in four seconds.
package testkube

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	yamlv3 "go.yaml.in/yaml/v3"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testetcd"
)

// The parts of a Kubernetes control plane.
var (
	// Tool is the API server.
	Tool = kubeTool("kube-apiserver")
	// ControllersTool is the controller manager.
	ControllersTool = kubeTool("kube-controller-manager")
	// KubectlTool is the client.
	KubectlTool = kubeTool("kubectl")
	// IstioCRDsTool is no program but a file: the custom resource definitions
	// of the newest Istio.
	IstioCRDsTool = crdTool("istio-crds", "istiod", "istio.io/istio", "manifests/charts/base/files/crd-all.gen.yaml")
	// MonitoringCRDsTool is the same of the Prometheus operator, those kinds of
	// it that the chart makes.
	MonitoringCRDsTool = crdTool("monitoring-crds", "prometheus-operator", "github.com/prometheus-operator/prometheus-operator",
		"example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml", "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml")
	// GatewayCRDsTool is the same of the Gateway API, of which waypoints are
	// made, in the version that istiod is built of.
	GatewayCRDsTool = crdTool("gateway-crds", "istiod", "sigs.k8s.io/gateway-api", gatewayCRD+"gatewayclasses.yaml", gatewayCRD+"gateways.yaml",
		gatewayCRD+"httproutes.yaml", gatewayCRD+"grpcroutes.yaml", gatewayCRD+"referencegrants.yaml")
	// MultiClusterCRDsTool is the same of services of several clusters.
	MultiClusterCRDsTool = crdTool("mcs-crds", "mcs-api", "sigs.k8s.io/mcs-api",
		"config/crd/multicluster.x-k8s.io_serviceexports.yaml", "config/crd/multicluster.x-k8s.io_serviceimports.yaml")
)

// kubeTool is a program of tools/kube. It is told its version, by which clients
// know what it can do.
func kubeTool(binary string) testenv.Tool {
	const module = "k8s.io/kubernetes"
	version := func(root string) (string, error) {
		return testenv.PinnedVersion(filepath.Join(root, "tools", "kube", "go.mod"), module)
	}
	return testenv.Tool{
		Name: binary, Program: binary, Version: version,
		Get: func(ctx context.Context, root, path string) error {
			pinned, err := version(root)
			if err != nil {
				return err
			}
			parts := strings.SplitN(pinned, ".", 3)
			if len(parts) != 3 {
				return fmt.Errorf("tools/kube/go.mod: %s is not a version with three parts", pinned)
			}
			const in = "-X k8s.io/component-base/version."
			flags := fmt.Sprintf("-ldflags=-s -w %sgitVersion=v%s %sgitMajor=%s %sgitMinor=%s", in, pinned, in, parts[0], in, parts[1])
			return testenv.GoBuild(ctx, filepath.Join(root, "tools", "kube"), module+"/cmd/"+binary, path, slices.Concat(testenv.RarelyRun, []string{flags})...)
		},
		Built: true,
	}
}

const gatewayCRD = "config/crd/standard/gateway.networking.k8s.io_"

// crdTool is a file that joins those of a module which tools/FOLDER/go.mod
// requires.
func crdTool(name, folder, module string, files ...string) testenv.Tool {
	return testenv.Tool{
		Name: name, Program: "crds.yaml",
		Version: func(root string) (string, error) {
			return testenv.PinnedVersion(filepath.Join(root, "tools", folder, "go.mod"), module)
		},
		Get: func(ctx context.Context, root, path string) error {
			dir, err := testenv.ModuleDir(ctx, filepath.Join(root, "tools", folder), module)
			if err != nil {
				return err
			}
			var all []byte
			for _, file := range files {
				b, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(file)))
				if err != nil {
					return err
				}
				all = append(append(all, "---\n"...), b...)
			}
			return os.WriteFile(path, all, 0o755) //nolint:gosec // the cache holds executables
		},
	}
}

// Config configures a Kubernetes API server. The zero value is one without
// controllers: nobody makes EndpointSlices, and namespaces do not end.
type Config struct {
	// Istio adds the custom resource definitions of Istio.
	Istio bool
	// Monitoring adds the Prometheus operator's kinds that the chart makes.
	Monitoring bool
	// Controllers starts the controllers of EndpointSlices, of Deployments and
	// StatefulSets, of namespaces that end, and of what goes with its owner.
	// Pods are scheduled and run by nobody; one counts if its node exists.
	Controllers bool
	// Args are appended to the command line of the API server.
	Args []string
}

// Server is a running Kubernetes API server with RBAC, on an etcd of its own.
type Server struct {
	// URL is https://127.0.0.1:PORT, Addr the same as host:port. Restarts keep
	// both.
	URL, Addr string
	// CAFile has the certificate that signs the server's.
	CAFile string
	// Token is that of a user who may do everything.
	Token string
	// Kubeconfig is the path of a kubeconfig with Token.
	Kubeconfig string
	// Etcd has the server's data.
	Etcd *testetcd.Server

	cfg Config
	*testenv.Process
	binary          string
	controllers     *testenv.Process
	port            int
	server          *testcert.Certificate
	accounts, users *testcert.Certificate // sign tokens of service accounts, and certificates of users
	client          *http.Client

	mu      sync.Mutex
	plurals map[string]kubeResource // guarded by mu; by apiVersion and kind
}

type kubeResource struct {
	name       string
	namespaced bool
}

// Start starts a Kubernetes API server and waits until it is ready.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	k := &Server{
		cfg: cfg, binary: Tool.Binary(t), Token: rand.Text(), plurals: map[string]kubeResource{},
		accounts: testcert.New(t, "accounts"), users: testcert.New(t, "users-ca"),
		// Clients in pods ask for the first address of services.
		server: testcert.New(t, "localhost", func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 96, 0, 1)} }),
	}
	k.CAFile = k.server.Cert
	pool := x509.NewCertPool()
	pool.AddCert(k.server.Leaf())
	// A server that is killed ends connections one by one; HTTP/2 would have
	// one for all requests, and keep it.
	k.client = &http.Client{Timeout: testenv.AdminTime, Transport: &http.Transport{TLSClientConfig: &tls.Config{
		RootCAs: pool, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
	}}}
	t.Cleanup(k.client.CloseIdleConnections)
	// Elections that a busy machine does not set off.
	k.Etcd = testetcd.Start(t, testetcd.Config{Args: []string{"--heartbeat-interval=50", "--election-timeout=1000"}})
	k.Process = testenv.NewServer(t, "kube-apiserver", k.launch, k.ready)
	k.Serve(t, func(t testing.TB) {
		k.port = testenv.FreePort(t)
		k.Addr = testenv.Loopback(k.port)
		k.URL = "https://" + k.Addr
	})
	k.Kubeconfig = k.KubeconfigOf(t, map[string]any{"token": k.Token})
	if cfg.Controllers {
		k.controllers = testenv.NewServer(t, "kube-controller-manager", k.launchControllers, nil)
	}
	k.finish(t)
	return k
}

func (k *Server) launch(t testing.TB) {
	t.Helper()
	args := []string{
		"--etcd-servers=" + k.Etcd.URL, "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=" + strconv.Itoa(k.port),
		"--tls-cert-file=" + k.server.Cert, "--tls-private-key-file=" + k.server.Key, "--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + k.accounts.Cert, "--service-account-signing-key-file=" + k.accounts.Key,
		"--token-auth-file=" + k.Process.WriteFile(t, "tokens.csv", k.Token+`,admin,admin,"system:masters"`+"\n"),
		"--client-ca-file=" + k.users.Cert, "--authorization-mode=RBAC", "--endpoint-reconciler-type=none",
		// Pods without a service account, which nobody makes.
		"--disable-admission-plugins=ServiceAccount",
		// What is killed may come back at once.
		"--shutdown-delay-duration=0s",
	}
	k.Process.Start(t, nil, k.binary, append(args, k.cfg.Args...)...)
}

func (k *Server) launchControllers(t testing.TB) {
	t.Helper()
	k.controllers.Start(t, nil, ControllersTool.Binary(t), "--kubeconfig="+k.Kubeconfig, "--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port="+strconv.Itoa(testenv.FreePort(t)),
		"--cert-dir="+k.controllers.Dir, "--controllers=endpointslice-controller,namespace-controller,garbage-collector-controller,deployment-controller,replicaset-controller,statefulset-controller",
		"--kube-api-qps=500", "--kube-api-burst=1000")
}

// ready reports whether the server answers, RBAC included.
func (k *Server) ready() (seen string, ok bool) {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.AdminTime)
	defer cancel()
	body, code, err := k.Do(ctx, http.MethodGet, "/readyz", "", "", nil)
	return fmt.Sprintf("/readyz: status %d, error %v: %.500s", code, err, body), code == http.StatusOK
}

// finish adds what the server has from its start.
func (k *Server) finish(t testing.TB) {
	t.Helper()
	// The server makes it by itself, a moment after it is ready.
	testenv.Eventually(t, testenv.Patience, "the namespace default", func() (string, bool) {
		body, code, err := k.Do(t.Context(), http.MethodGet, "/api/v1/namespaces/default", "", "", nil)
		return fmt.Sprintf("status %d, error %v: %.200s", code, err, body), code == http.StatusOK
	})
	var files []testenv.Tool
	if k.cfg.Istio {
		files = append(files, IstioCRDsTool)
	}
	if k.cfg.Monitoring {
		files = append(files, MonitoringCRDsTool)
	}
	k.ApplyKinds(t, files...)
	if k.controllers != nil {
		k.controllers.Launch(t)
	}
}

// ApplyKinds adds custom resource definitions and waits until their kinds are
// there.
func (k *Server) ApplyKinds(t testing.TB, files ...testenv.Tool) {
	t.Helper()
	for _, f := range files {
		b, err := os.ReadFile(f.Binary(t))
		if err != nil {
			t.Fatal(err)
		}
		k.Apply(t, string(b))
	}
	if len(files) == 0 {
		return
	}
	testenv.Eventually(t, testenv.Patience, "the kinds that were added", func() (string, bool) {
		body, code, err := k.Do(t.Context(), http.MethodGet, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "", "", nil)
		if err != nil || code != http.StatusOK {
			return fmt.Sprintf("status %d, error %v: %.200s", code, err, body), false
		}
		var list struct {
			Items []struct {
				Metadata struct{ Name string }
				Spec     struct {
					Group    string
					Names    struct{ Plural string }
					Versions []struct{ Name string }
				}
			}
		}
		if err := json.Unmarshal(body, &list); err != nil {
			return err.Error(), false
		}
		for _, crd := range list.Items {
			for _, version := range crd.Spec.Versions {
				path := "/apis/" + crd.Spec.Group + "/" + version.Name + "/" + crd.Spec.Names.Plural + "?limit=1"
				if body, code, err := k.Do(t.Context(), http.MethodGet, path, "", "", nil); err != nil || code != http.StatusOK {
					return fmt.Sprintf("%s: status %d, error %v: %.200s", path, code, err, body), false
				}
			}
		}
		return fmt.Sprintf("%d kinds", len(list.Items)), len(list.Items) > 0
	})
}

// Do is [testenv.Do] with a token, or without one if it is "-"; "" is Token.
// The content type is JSON unless named.
func (k *Server) Do(ctx context.Context, method, path, token, contentType string, body any) (answer []byte, code int, err error) {
	header := map[string]string{}
	if token != "-" {
		header["Authorization"] = "Bearer " + cmp.Or(token, k.Token)
	}
	if contentType != "" {
		header["Content-Type"] = contentType
	}
	return testenv.Do(ctx, k.client, method, k.URL+path, header, body)
}

// must is Do, decodes the answer if into is not nil, and ends the test if that
// is no success.
func (k *Server) must(t testing.TB, method, path, contentType string, body, into any) {
	t.Helper()
	answer, code, err := k.Do(t.Context(), method, path, "", contentType, body)
	if err == nil && code < 300 && into != nil {
		err = json.Unmarshal(answer, into)
	}
	if err != nil || code >= 300 {
		t.Fatalf("kube: %s %s: status %d, error %v: %.2000s", method, path, code, err, answer)
	}
}

// Apply applies objects, written in YAML, as kubectl apply --server-side
// --force-conflicts does.
func (k *Server) Apply(t testing.TB, objects string) {
	t.Helper()
	for _, o := range k.parse(t, objects) {
		k.must(t, http.MethodPatch, o.path+"?fieldManager=test&force=true", "application/apply-patch+yaml", o.json, nil)
	}
}

// ApplyStatus applies the status of objects, which Apply leaves alone.
func (k *Server) ApplyStatus(t testing.TB, objects string) {
	t.Helper()
	for _, o := range k.parse(t, objects) {
		k.must(t, http.MethodPatch, o.path+"/status?fieldManager=test&force=true", "application/apply-patch+yaml", o.json, nil)
	}
}

// Delete deletes objects, of which apiVersion, kind and metadata matter, and
// does not wait for their end. Options are those of the query.
func (k *Server) Delete(t testing.TB, objects, options string) {
	t.Helper()
	for _, o := range k.parse(t, objects) {
		answer, code, err := k.Do(t.Context(), http.MethodDelete, o.path+"?"+options, "", "", nil)
		if err != nil || code >= 300 && code != http.StatusNotFound {
			t.Fatalf("kube: delete %s: status %d, error %v: %.2000s", o.path, code, err, answer)
		}
	}
}

type kubeObject struct {
	path string
	json []byte
}

func (k *Server) parse(t testing.TB, objects string) (all []kubeObject) {
	t.Helper()
	for decoder := yamlv3.NewDecoder(strings.NewReader(objects)); ; {
		var value map[string]any
		err := decoder.Decode(&value)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("kube: %v in\n%.2000s", err, objects)
		}
		if value == nil {
			continue
		}
		b, err := json.Marshal(value)
		var o struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
			Metadata   struct{ Name, Namespace string }
		}
		if err := errors.Join(err, json.Unmarshal(b, &o)); err != nil || o.Metadata.Name == "" {
			t.Fatalf("kube: %v: no object with a name: %s", err, b)
		}
		base := "/apis/" + o.APIVersion
		if !strings.Contains(o.APIVersion, "/") {
			base = "/api/" + o.APIVersion
		}
		resource := k.resource(t, base, o.Kind)
		path := base
		if resource.namespaced {
			path += "/namespaces/" + cmp.Or(o.Metadata.Namespace, "default")
		}
		all = append(all, kubeObject{path + "/" + resource.name + "/" + o.Metadata.Name, b})
	}
}

// resource returns the resource of a kind.
func (k *Server) resource(t testing.TB, base, kind string) kubeResource {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	if known, ok := k.plurals[base+" "+kind]; ok {
		return known
	}
	var list struct {
		Resources []struct {
			Name, Kind string
			Namespaced bool
		}
	}
	k.must(t, http.MethodGet, base, "", nil, &list)
	for _, r := range list.Resources {
		if !strings.Contains(r.Name, "/") {
			k.plurals[base+" "+r.Kind] = kubeResource{r.Name, r.Namespaced}
		}
	}
	known, ok := k.plurals[base+" "+kind]
	if !ok {
		t.Fatalf("kube: %s has no kind %s", base, kind)
	}
	return known
}

// ServiceAccount makes a service account, with its namespace, and returns a
// token of it, valid for an hour, for audiences or the API server.
func (k *Server) ServiceAccount(t testing.TB, namespace, name string, audiences ...string) (token string) {
	t.Helper()
	k.Apply(t, fmt.Sprintf(`{apiVersion: v1, kind: Namespace, metadata: {name: %[1]s}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {namespace: %[1]s, name: %[2]s}}
`, namespace, name))
	var request struct{ Status struct{ Token string } }
	k.must(t, http.MethodPost, fmt.Sprintf("/api/v1/namespaces/%s/serviceaccounts/%s/token", namespace, name), "",
		map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": map[string]any{"audiences": audiences, "expirationSeconds": 3600}}, &request)
	return request.Status.Token
}

// ClientCertificate returns a certificate with which a client is a user of
// groups.
func (k *Server) ClientCertificate(t testing.TB, user string, groups ...string) *testcert.Certificate {
	t.Helper()
	return k.users.Issue(t, user, func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: user, Organization: groups} })
}

// KubeconfigOf writes a kubeconfig for a user, as it writes users, and returns
// its path.
func (k *Server) KubeconfigOf(t testing.TB, user map[string]any) string {
	t.Helper()
	who, err := json.Marshal(user)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: k.server.Leaf().Raw})
	b := fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: test
clusters: [{name: test, cluster: {server: %q, certificate-authority-data: %s}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
users: [{name: test, user: %s}]
`, k.URL, base64.StdEncoding.EncodeToString(ca), who)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Load creates headless Services app-0, app-1 and so on in the namespace
// default, with an EndpointSlice of that name with some endpoints each.
func (k *Server) Load(t testing.TB, services, each int) {
	t.Helper()
	var group errgroup.Group
	group.SetLimit(8) // more gain nothing
	for n := range services {
		group.Go(func() error {
			name := fmt.Sprintf("app-%d", n)
			for path, body := range map[string]any{
				"/api/v1/namespaces/default/services": map[string]any{
					"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": name},
					"spec": map[string]any{"clusterIP": "None", "ports": []any{map[string]any{"name": "http", "port": 80}}},
				},
				kubeSlices: Slice(n, each, 0),
			} {
				if answer, code, err := k.Do(t.Context(), http.MethodPost, path, "", "", body); err != nil || code != http.StatusCreated {
					return fmt.Errorf("create %s: status %d, error %w: %.500s", name, code, err, answer)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatalf("kube: %v", err)
	}
}

// kubeSlices is the path of the EndpointSlices of the namespace default.
const kubeSlices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"

// Slice is the EndpointSlice app-N of [Kube.Load]. After a change, one of
// its endpoints has another address.
func Slice(n, each, change int) any {
	var endpoints []any
	for i := range each {
		host := i + 1
		if i == 0 && change > 0 {
			host = 100 + change%100
		}
		endpoints = append(endpoints, map[string]any{"addresses": []string{fmt.Sprintf("10.%d.%d.%d", n/250, n%250, host)}})
	}
	name := fmt.Sprintf("app-%d", n)
	return map[string]any{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": endpoints,
		"metadata": map[string]any{"name": name, "labels": map[string]string{"kubernetes.io/service-name": name}},
		"ports":    []any{map[string]any{"name": "http", "port": 8080}},
	}
}

// Change replaces an EndpointSlice of [Kube.Load]: see [Slice].
func (k *Server) Change(t testing.TB, n, each, change int) {
	t.Helper()
	k.must(t, http.MethodPut, fmt.Sprintf("%s/app-%d", kubeSlices, n), "", Slice(n, each, change), nil)
}

// Watch returns when each change of an EndpointSlice of the namespace default
// arrives at a watch of its own.
func (k *Server) Watch(t testing.TB) <-chan time.Time {
	t.Helper()
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	k.must(t, http.MethodGet, kubeSlices+"?limit=1", "", nil, &list)
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, k.URL+kubeSlices+"?watch=true&resourceVersion="+list.Metadata.ResourceVersion, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+k.Token)
	client := &http.Client{Transport: k.client.Transport} // without a limit of time
	res, err := client.Do(req)                            //nolint:bodyclose // the goroutine below closes it
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("kube: watch: %v %v", res, err)
	}
	arrived, done := make(chan time.Time, 16), make(chan struct{})
	// Owned by the test; ends with ctx.
	go func() {
		defer close(done)
		defer res.Body.Close()
		lines := bufio.NewScanner(res.Body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			arrived <- time.Now()
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return arrived
}

// Kill ends the server as kill -9 does. Its data stays.
func (k *Server) Kill() {
	if k.controllers != nil {
		k.controllers.Kill()
	}
	k.Process.Kill()
}

// Restart starts the server again on the same port with its data after Kill,
// and waits until it is ready.
func (k *Server) Restart(t testing.TB) {
	t.Helper()
	k.Process.Restart(t)
	k.finish(t)
}

// RestartEmpty is Restart without the data.
func (k *Server) RestartEmpty(t testing.TB) {
	t.Helper()
	k.Etcd.RestartEmpty(t)
	k.Restart(t)
}
