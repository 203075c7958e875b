package testkube

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	yamlv3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testetcd"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
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
	IstioCRDsTool = testenv.Tool{
		Name: "istio-crds", Program: "crd-all.yaml",
		Version: testistiod.NewestTool.Version, Get: getIstioCRDs,
	}
	// MonitoringCRDsTool is the same of the Prometheus operator, those kinds of
	// it that the chart makes.
	MonitoringCRDsTool = testenv.Tool{
		Name: "monitoring-crds", Program: "crds.yaml",
		Version: func(root string) (string, error) {
			return testenv.PinnedVersion(filepath.Join(root, "tools", monitoringFolder, "go.mod"), monitoringModule)
		},
		Get: getMonitoringCRDs,
	}
	// GatewayCRDsTool is the same of the Gateway API, of which waypoints are
	// made.
	GatewayCRDsTool = testenv.Tool{
		Name: "gateway-crds", Program: "crds.yaml",
		Version: func(root string) (string, error) {
			return testenv.PinnedVersion(filepath.Join(root, "tools", "istiod", "go.mod"), gatewayModule)
		},
		Get: getGatewayCRDs,
	}
	// MultiClusterCRDsTool is the same of services of several clusters.
	MultiClusterCRDsTool = testenv.Tool{
		Name: "mcs-crds", Program: "crds.yaml",
		Version: func(root string) (string, error) {
			return testenv.PinnedVersion(filepath.Join(root, "tools", mcsFolder, "go.mod"), mcsModule)
		},
		Get: getMultiClusterCRDs,
	}
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

// getIstioCRDs takes the file out of the module that istiod is built of.
func getIstioCRDs(ctx context.Context, root, path string) error {
	dir, err := moduleDir(ctx, root, "istiod", "istio.io/istio")
	if err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(dir, "manifests", "charts", "base", "files", "crd-all.gen.yaml"))
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o755) //nolint:gosec // the cache holds executables
}

const (
	monitoringFolder = "prometheus-operator"
	monitoringModule = "github.com/prometheus-operator/prometheus-operator"
)

const (
	mcsFolder = "mcs-api"
	mcsModule = "sigs.k8s.io/mcs-api"
)

// gatewayModule is one of those that istiod is built of.
const gatewayModule = "sigs.k8s.io/gateway-api"

func getGatewayCRDs(ctx context.Context, root, path string) error {
	var files []string
	for _, kind := range []string{"gatewayclasses", "gateways", "httproutes", "grpcroutes", "referencegrants"} {
		files = append(files, "config/crd/standard/gateway.networking.k8s.io_"+kind+".yaml")
	}
	return getCRDs(ctx, root, path, "istiod", gatewayModule, files...)
}

func getMonitoringCRDs(ctx context.Context, root, path string) error {
	return getCRDs(ctx, root, path, monitoringFolder, monitoringModule, "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml", "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml")
}

func getMultiClusterCRDs(ctx context.Context, root, path string) error {
	return getCRDs(ctx, root, path, mcsFolder, mcsModule, "config/crd/multicluster.x-k8s.io_serviceexports.yaml", "config/crd/multicluster.x-k8s.io_serviceimports.yaml")
}

// getCRDs joins files of a module that a folder of tools pins.
func getCRDs(ctx context.Context, root, path, folder, module string, files ...string) error {
	dir, err := moduleDir(ctx, root, folder, module)
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
}

// moduleDir downloads a module that a folder of tools pins, and returns where
// its files are.
func moduleDir(ctx context.Context, root, folder, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Dir = filepath.Join(root, "tools", folder)
	cmd.Env = append(os.Environ(), testenv.GoEnv...)
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("download the module %s: %w: %s", module, err, out)
	}
	var downloaded struct{ Dir string }
	err = json.Unmarshal(out, &downloaded)
	return downloaded.Dir, err
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
	binary      string
	controllers *testenv.Process
	manager     string // the program of controllers
	port        int
	dir         string // keys and certificates
	users       *testcert.Certificate
	client      *http.Client

	mu      sync.Mutex
	plurals map[string]kubeResource // guarded by mu; by apiVersion and kind
}

type kubeResource struct {
	name       string
	namespaced bool
}

// kubeIssuer names the server in the tokens of service accounts.
const kubeIssuer = "https://kubernetes.default.svc"

// Start starts a Kubernetes API server and waits until it is ready.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	k := &Server{cfg: cfg, binary: Tool.Binary(t), Token: rand.Text(), dir: t.TempDir(), plurals: map[string]kubeResource{}}
	if cfg.Controllers {
		k.manager = ControllersTool.Binary(t)
	}
	k.CAFile = filepath.Join(k.dir, "apiserver.crt")
	k.writeKeys(t)
	// Elections that a busy machine does not set off.
	k.Etcd = testetcd.Start(t, testetcd.Config{Args: []string{"--heartbeat-interval=50", "--election-timeout=1000"}})
	t.Cleanup(func() {
		if k.client != nil {
			k.client.CloseIdleConnections()
		}
	})
	k.Process = testenv.NewProcess(t, "kube-apiserver")
	k.Process.StartReady(t, func() {
		k.port = testenv.FreePort(t)
		k.Addr = testenv.Loopback(k.port)
		k.URL = "https://" + k.Addr
		k.launch(t)
	}, k.ready)
	k.Kubeconfig = k.KubeconfigOf(t, map[string]any{"token": k.Token})
	k.finish(t)
	if cfg.Controllers {
		k.controllers = testenv.NewProcess(t, "kube-controller-manager")
		k.launchControllers(t)
	}
	return k
}

// writeKeys makes the key of service accounts, the CA of users with
// certificates, and the file of users with tokens.
func (k *Server) writeKeys(t testing.TB) {
	t.Helper()
	private, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	public, err := x509.MarshalPKIXPublicKey(&private.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	k.users = testcert.New(t, "users-ca")
	for file, content := range map[string][]byte{
		"sa.key":     pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		"sa.pub":     pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
		"tokens.csv": fmt.Appendf(nil, "%s,admin,admin,\"system:masters\"\n", k.Token),
	} {
		if err := os.WriteFile(filepath.Join(k.dir, file), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func (k *Server) launch(t testing.TB) {
	t.Helper()
	in := func(file string) string { return filepath.Join(k.dir, file) }
	args := []string{
		"--etcd-servers=" + k.Etcd.URL, "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--secure-port=" + strconv.Itoa(k.port),
		"--cert-dir=" + k.dir, "--service-cluster-ip-range=10.96.0.0/16", "--service-account-issuer=" + kubeIssuer,
		"--service-account-key-file=" + in("sa.pub"), "--service-account-signing-key-file=" + in("sa.key"), "--token-auth-file=" + in("tokens.csv"),
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
	port := testenv.FreePort(t)
	k.controllers.Start(t, nil, k.manager, "--kubeconfig="+k.Kubeconfig, "--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port="+strconv.Itoa(port),
		"--cert-dir="+k.controllers.Dir, "--controllers=endpointslice-controller,namespace-controller,garbage-collector-controller,deployment-controller,replicaset-controller,statefulset-controller",
		"--kube-api-qps=500", "--kube-api-burst=1000")
}

// ready reports whether the server answers, RBAC included.
func (k *Server) ready() (seen string, ok bool) {
	ca, err := os.ReadFile(k.CAFile)
	if err != nil {
		return err.Error(), false
	}
	// The file may just be written.
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	if k.client != nil {
		k.client.CloseIdleConnections()
	}
	// A server that is killed ends connections one by one; HTTP/2 would have
	// one for all requests, and keep it.
	k.client = &http.Client{Timeout: testenv.AdminTime, Transport: &http.Transport{TLSClientConfig: &tls.Config{
		RootCAs: pool, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
	}}}
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
	k.applyKinds(t, files...)
}

// ApplyIstio adds the custom resource definitions of Istio, as
// KubeConfig.Istio does.
func (k *Server) ApplyIstio(t testing.TB) {
	t.Helper()
	k.applyKinds(t, IstioCRDsTool)
}

// ApplyGateway adds the custom resource definitions of the Gateway API.
func (k *Server) ApplyGateway(t testing.TB) {
	t.Helper()
	k.applyKinds(t, GatewayCRDsTool)
}

// ApplyMultiCluster adds ServiceExport and ServiceImport (KEP-1645).
func (k *Server) ApplyMultiCluster(t testing.TB) {
	t.Helper()
	k.applyKinds(t, MultiClusterCRDsTool)
}

// applyKinds adds custom resource definitions and waits until their kinds are
// there.
func (k *Server) applyKinds(t testing.TB, files ...testenv.Tool) {
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

// Do sends a request with a token, or without one if it is "-"; "" is Token. A
// body is sent as it is if it is text or bytes, and as JSON otherwise. The
// content type is JSON unless named.
func (k *Server) Do(ctx context.Context, method, path, token, contentType string, body any) (answer []byte, code int, err error) {
	var b []byte
	switch body := body.(type) {
	case nil:
	case string:
		b = []byte(body)
	case []byte:
		b = body
	default:
		if b, err = json.Marshal(body); err != nil {
			return nil, 0, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, k.URL+path, bytes.NewReader(b))
	if err != nil {
		return nil, 0, err
	}
	if token == "" {
		token = k.Token
	}
	if token != "-" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if contentType == "" {
		contentType = "application/json"
	}
	req.Header.Set("Content-Type", contentType)
	res, err := k.client.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer res.Body.Close()
	answer, err = io.ReadAll(res.Body)
	return answer, res.StatusCode, err
}

// must is Do, and ends the test if the answer is no success.
func (k *Server) must(t testing.TB, method, path, contentType string, body any) []byte {
	t.Helper()
	answer, code, err := k.Do(t.Context(), method, path, "", contentType, body)
	if err != nil || code >= 300 {
		t.Fatalf("kube: %s %s: status %d, error %v: %.2000s", method, path, code, err, answer)
	}
	return answer
}

// Apply applies objects, written in YAML, as kubectl apply --server-side
// --force-conflicts does.
func (k *Server) Apply(t testing.TB, objects string) {
	t.Helper()
	for _, o := range k.parse(t, objects) {
		k.must(t, http.MethodPatch, o.path+"?fieldManager=test&force=true", "application/apply-patch+yaml", o.json)
	}
}

// ApplyStatus applies the status of objects, which Apply leaves alone.
func (k *Server) ApplyStatus(t testing.TB, objects string) {
	t.Helper()
	for _, o := range k.parse(t, objects) {
		k.must(t, http.MethodPatch, o.path+"/status?fieldManager=test&force=true", "application/apply-patch+yaml", o.json)
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
		if err != nil {
			t.Fatalf("kube: %v", err)
		}
		var o struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
			Metadata   struct{ Name, Namespace string }
		}
		if err := json.Unmarshal(b, &o); err != nil || o.Metadata.Name == "" {
			t.Fatalf("kube: %v: no object with a name: %s", err, b)
		}
		base := "/apis/" + o.APIVersion
		if !strings.Contains(o.APIVersion, "/") {
			base = "/api/" + o.APIVersion
		}
		resource := k.resource(t, base, o.Kind)
		path := base
		if resource.namespaced {
			if o.Metadata.Namespace == "" {
				o.Metadata.Namespace = "default"
			}
			path += "/namespaces/" + o.Metadata.Namespace
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
	if err := json.Unmarshal(k.must(t, http.MethodGet, base, "", nil), &list); err != nil {
		t.Fatalf("kube: %s: %v", base, err)
	}
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
	answer := k.must(t, http.MethodPost, fmt.Sprintf("/api/v1/namespaces/%s/serviceaccounts/%s/token", namespace, name), "",
		map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": map[string]any{"audiences": audiences, "expirationSeconds": 3600}})
	var request struct{ Status struct{ Token string } }
	if err := json.Unmarshal(answer, &request); err != nil || request.Status.Token == "" {
		t.Fatalf("kube: no token in %s: %v", answer, err)
	}
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
	ca, err := os.ReadFile(k.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	named := func(key string, value any) []any { return []any{map[string]any{"name": "test", key: value}} }
	b, err := yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": named("cluster", map[string]any{"server": k.URL, "certificate-authority-data": base64.StdEncoding.EncodeToString(ca)}),
		"contexts": named("context", map[string]any{"cluster": "test", "user": "test"}),
		"users":    named("user", user),
	})
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
	next := make(chan int)
	var workers sync.WaitGroup
	// More of them gain nothing. They end with the last service.
	for range 8 {
		workers.Go(func() {
			for n := range next {
				name := fmt.Sprintf("app-%d", n)
				for path, body := range map[string]any{
					"/api/v1/namespaces/default/services": map[string]any{
						"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": name},
						"spec": map[string]any{"clusterIP": "None", "ports": []any{map[string]any{"name": "http", "port": 80}}},
					},
					kubeSlices: Slice(n, each, 0),
				} {
					if answer, code, err := k.Do(t.Context(), http.MethodPost, path, "", "", body); err != nil || code != http.StatusCreated {
						t.Errorf("kube: create %s: status %d, error %v: %.500s", name, code, err, answer)
						return
					}
				}
			}
		})
	}
	for n := range services {
		select {
		case next <- n:
		case <-t.Context().Done():
		}
	}
	close(next)
	workers.Wait()
	if t.Failed() {
		t.FailNow()
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
	k.must(t, http.MethodPut, fmt.Sprintf("%s/app-%d", kubeSlices, n), "", Slice(n, each, change))
}

// Watch returns when each change of an EndpointSlice of the namespace default
// arrives at a watch of its own.
func (k *Server) Watch(t testing.TB) <-chan time.Time {
	t.Helper()
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	if err := json.Unmarshal(k.must(t, http.MethodGet, kubeSlices+"?limit=1", "", nil), &list); err != nil {
		t.Fatal(err)
	}
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
	k.launch(t)
	if err := k.Process.WaitReady(t, k.ready); err != nil {
		t.Fatal(err)
	}
	k.finish(t)
	if k.controllers != nil {
		k.launchControllers(t)
	}
}

// RestartEmpty is Restart without the data.
func (k *Server) RestartEmpty(t testing.TB) {
	t.Helper()
	k.Etcd.Kill()
	k.Etcd.RestartEmpty(t)
	k.Restart(t)
}
