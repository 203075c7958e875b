package deploy

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testdeploy"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testetcd"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// installer is all that who installs the chart may do: docs/install.md says so.
const installer = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {namespace: istio-system, name: installer}
rules:
- {apiGroups: [""], resources: [configmaps, secrets, services, serviceaccounts], verbs: [get, list, watch, create, patch, update, delete]}
- {apiGroups: [apps], resources: [deployments, statefulsets], verbs: [get, list, watch, create, patch, update, delete]}
- {apiGroups: [apps], resources: [replicasets], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [pods], verbs: [get, list, watch]}
- {apiGroups: [policy], resources: [poddisruptionbudgets], verbs: [get, list, watch, create, patch, update, delete]}
- {apiGroups: [networking.k8s.io], resources: [networkpolicies], verbs: [get, list, watch, create, patch, update, delete]}
- {apiGroups: [monitoring.coreos.com], resources: [servicemonitors, prometheusrules], verbs: [get, list, watch, create, patch, update, delete]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {namespace: istio-system, name: installer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: installer}
subjects: [{kind: ServiceAccount, namespace: istio-system, name: installer}]
`

// webPort is the port of the service's instances.
const webPort = 8080

// cluster is a control plane, a node, and Consul with a service.
type cluster struct {
	*node
	consul *testconsul.Server
	// dir is where users are: it has the repository's deploy and examples.
	dir string
	env []string
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
	network(t)
	c := &cluster{dir: t.TempDir()}
	// Pods reach the API server at the address of its service.
	kube := testkube.Start(t, testkube.Config{Istio: true, Monitoring: true, Controllers: true, Args: []string{"--bind-address=0.0.0.0"}})
	// Kubernetes' strictest rules for pods hold in both namespaces.
	for _, namespace := range []string{"istio-system", "modes"} {
		kube.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+namespace+", labels: {pod-security.kubernetes.io/enforce: restricted}}}")
	}
	token := kube.ServiceAccount(t, "istio-system", "installer")
	kube.Apply(t, installer)
	c.node = startNode(t, kube, "istio-system")

	c.consul = testconsul.Start(t, testconsul.Config{ExtraHCL: `addresses { http = "127.0.0.1 ` + gateway + `" }`})
	_, port, _ := strings.Cut(c.consul.Addr, ":")
	_, apiPort, _ := strings.Cut(kube.Addr, ":")
	kube.Apply(t, `
{apiVersion: v1, kind: Namespace, metadata: {name: consul}}
---
{apiVersion: v1, kind: Service, metadata: {namespace: consul, name: consul-server}, spec: {ports: [{name: http, port: 8500}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: consul, name: consul-server, labels: {kubernetes.io/service-name: consul-server}}
addressType: IPv4
ports: [{name: http, port: `+port+`}]
endpoints: [{addresses: ["`+gateway+`"]}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: default, name: kubernetes, labels: {kubernetes.io/service-name: kubernetes}}
addressType: IPv4
ports: [{name: https, port: `+apiPort+`}]
endpoints: [{addresses: ["`+gateway+`"]}]
`)
	c.web(t, gateway)

	bin := filepath.Join(c.dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tool := range []testenv.Tool{testdeploy.HelmTool, testkube.KubectlTool} {
		path, err := tool.Fetch(t.Context(), t.Output())
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(bin, tool.String())); err != nil {
			t.Fatal(err)
		}
	}
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"deploy", "examples"} {
		if err := os.Symlink(filepath.Join(here, name), filepath.Join(c.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	c.env = append(os.Environ(), "KUBECONFIG="+kube.KubeconfigOf(t, map[string]any{"token": token}), "PATH="+bin+":"+os.Getenv("PATH"), "HOME="+c.dir)
	return c
}

// web starts an instance of the service, which answers with its address, and
// registers it.
func (c *cluster) web(t *testing.T, address string) {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(webPort)))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, address) })}
	// Owned by the test's process, which is there for this test only.
	go func() { _ = server.Serve(l) }()
	c.consul.Register(t, testconsul.Instance{Service: "web", ID: address, Address: address, Port: webPort, Meta: map[string]string{"protocol": "http"}})
}

// sh runs a script where users are, with the installer's rights.
func (c *cluster) sh(t *testing.T, script string) string {
	t.Helper()
	cmd := command(t, "sh", c.dir, "-e", "-c", script)
	cmd.Env = c.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s\n%v: %s", script, err, out)
	}
	return string(out)
}

// list returns the names of the objects in a namespace, of one kind per path,
// with a label.
func (c *cluster) list(t *testing.T, namespace, label string, kinds ...string) (names []string) {
	t.Helper()
	for _, kind := range kinds {
		api, plural, _ := strings.Cut(kind, " ")
		var list struct {
			Items []struct{ Metadata struct{ Name string } }
		}
		if err := c.get(t.Context(), api+"/namespaces/"+namespace+"/"+plural+"?labelSelector="+label, &list); err != nil {
			t.Fatal(err)
		}
		for _, o := range list.Items {
			names = append(names, plural+" "+o.Metadata.Name)
		}
	}
	return names
}

// made are the kinds that the chart makes, and those that come of them.
var made = []string{
	"/api/v1 configmaps", "/api/v1 secrets", "/api/v1 services", "/api/v1 serviceaccounts", "/api/v1 pods", "/apis/apps/v1 deployments", "/apis/apps/v1 statefulsets",
	"/apis/apps/v1 replicasets", "/apis/policy/v1 poddisruptionbudgets", "/apis/networking.k8s.io/v1 networkpolicies",
	"/apis/monitoring.coreos.com/v1 servicemonitors", "/apis/monitoring.coreos.com/v1 prometheusrules", "/apis/discovery.k8s.io/v1 endpointslices",
}

// gone waits until nothing with a label is left.
func (c *cluster) gone(t *testing.T, label string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "nothing to be left", func() (string, bool) {
		left := c.list(t, "istio-system", label, made...)
		return fmt.Sprint(left), len(left) == 0
	})
}

// ready waits until the Deployment has what it wants.
func (c *cluster) ready(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "the Deployment", func() (string, bool) {
		var d struct {
			Metadata struct{ Generation int }
			Status   struct{ ObservedGeneration, Replicas, UpdatedReplicas, ReadyReplicas int }
		}
		if err := c.get(t.Context(), "/apis/apps/v1/namespaces/istio-system/deployments/isthmus", &d); err != nil {
			return err.Error(), false
		}
		s := d.Status
		return fmt.Sprintf("%+v", d), s.ObservedGeneration == d.Metadata.Generation && s.Replicas == 2 && s.UpdatedReplicas == 2 && s.ReadyReplicas == 2
	})
}

// services returns what a pod serves, by its port of administration, which is
// on its loopback.
func (c *cluster) services(t *testing.T) string {
	t.Helper()
	const ask = `exec 3<>/dev/tcp/127.0.0.1/15080; printf 'GET /api/v1/services HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3; cat <&3`
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pods {
		select {
		case <-p.ended:
			continue
		default:
		}
		out, err := p.exec(t.Context(), "bash", "-c", ask).CombinedOutput()
		if err != nil {
			return fmt.Sprint(string(out), err)
		}
		return string(out)
	}
	return "no pods"
}

// serves waits until the bridge serves a service of this name.
func (c *cluster) serves(t *testing.T, name string) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "the bridge to serve "+name, func() (string, bool) {
		all := c.services(t)
		return all, strings.Contains(all, `"`+name+`"`)
	})
}

// clusterTools are what a cluster needs.
var clusterTools = []testenv.Tool{
	testkube.Tool, testkube.ControllersTool, testkube.KubectlTool, testkube.MonitoringCRDsTool, testetcd.Tool,
	testconsul.Tool, testistiod.Newest.Tool, testproxy.EnvoyTool, testdeploy.HelmTool, testdeploy.KustomizeTool,
}

// On a real control plane: what the README says installs the chart, with rights
// in one namespace; its pods run as the cluster made them and become ready;
// istiod follows them with the lines that the chart prints; upgrades, the way
// back and the end do what they say.
func TestCluster(t *testing.T) {
	testenv.SkipIfShort(t)
	if _, inside := private(t, "TestCluster", clusterTools...); !inside {
		return
	}
	c := startCluster(t)
	t.Run("chart", c.chart)
	t.Run("consumer", c.consumer)
	t.Run("modes", c.modes)
	t.Run("manifests", c.manifests)
}

func (c *cluster) chart(t *testing.T) {
	block := regexp.MustCompile("(?s)```sh\n(cat > values.yaml.*?helm install.*?)```").FindSubmatch(read(t, "README.md"))
	if block == nil {
		t.Fatal("the README has no block that installs the chart")
	}
	begin := time.Now()
	out := c.sh(t, string(block[1]))
	_, mesh, _ := strings.Cut(out, "\n  configSources:\n")
	mesh, _, ok := strings.Cut(mesh, "\n\n")
	if !ok {
		t.Fatalf("no configSources in %s", out)
	}
	mesh = strings.ReplaceAll("configSources:\n"+mesh, "\n  ", "\n")
	// istiod exits if a source cannot be reached at its start, and is started
	// again by a cluster.
	c.ready(t)
	istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: mesh, Kubeconfig: c.kube.Kubeconfig})
	istiod.WaitReady(t)
	envoy := testproxy.StartEnvoy(t, istiod)
	answers := func(name string) {
		t.Helper()
		testenv.Eventually(t, testenv.Patience, name+" to be called", func() (string, bool) {
			answer, err := envoy.Call(t, "outbound|"+strconv.Itoa(webPort)+"||web.service.consul")
			return fmt.Sprint(answer, err), answer == name
		})
	}
	answers(gateway)
	t.Logf("%s%v", firstCall, time.Since(begin))
	c.serves(t, "consul/web")

	// A configuration is loaded by the pods that are there.
	first := c.running()
	const upgrade = "helm upgrade isthmus deploy/helm/isthmus --namespace istio-system --values values.yaml --wait"
	c.sh(t, "sed -i 's/namespace: consul/namespace: other/' values.yaml; "+upgrade)
	c.serves(t, "other/web")
	if now := c.running(); !slices.Equal(first, now) {
		t.Errorf("pods %q were replaced by %q for a configuration", first, now)
	}
	// Another template replaces them, and istiod goes on with the new ones.
	c.sh(t, upgrade+" --set podLabels.new=one")
	c.ready(t)
	if now := c.list(t, "istio-system", "new=one", "/api/v1 pods"); len(now) != 2 {
		t.Errorf("pods with the new label: %q", now)
	}
	c.web(t, machine)
	answers(machine)
	answers(gateway)
	// Back to the first.
	c.sh(t, "helm rollback isthmus 1 -n istio-system --wait")
	c.ready(t)
	c.serves(t, "consul/web")
	if now := c.list(t, "istio-system", "new=one", "/api/v1 pods"); len(now) > 0 {
		testenv.Eventually(t, testenv.Patience, "the pods of the upgrade to end", func() (string, bool) {
			now := c.list(t, "istio-system", "new=one", "/api/v1 pods")
			return fmt.Sprint(now), len(now) == 0
		})
	}
	answers(machine)
	c.sh(t, "helm uninstall isthmus -n istio-system --wait")
	c.gone(t, "app.kubernetes.io/instance=isthmus")
	if left := c.list(t, "istio-system", "owner=helm", "/api/v1 secrets"); len(left) > 0 {
		t.Errorf("helm leaves %q", left)
	}
}

// With a consumer one of the pods writes stubs, in the namespaces of its view
// only, with the token and the rights that the chart gives them. They stay when
// the chart goes.
func (c *cluster) consumer(t *testing.T) {
	block := regexp.MustCompile("(?s)```sh\n(cat > ambient.yaml.*?)```").FindSubmatch(read(t, "docs", "ambient.md"))
	if block == nil {
		t.Fatal("docs/ambient.md has no block that adds the consumer")
	}
	c.kube.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: load}}")
	c.admin(t, `cat > values.yaml <<'EOF'
config:
  registries:
  - {name: dc1, type: consul, config: {address: "http://consul-server.consul.svc:8500"}, translate: {namespace: consul}}
  - {name: load, type: sim, config: {services: 1, changes_per_second: 0}}
EOF
`+string(block[1]))
	stubs := func(want ...string) {
		t.Helper()
		testenv.Eventually(t, testenv.Patience, "the stubs", func() (string, bool) {
			have := append(c.list(t, "consul", "isthmus.io/consumer=ambient", "/apis/networking.istio.io/v1 serviceentries"),
				c.list(t, "load", "", "/apis/networking.istio.io/v1 serviceentries")...)
			return fmt.Sprintf("%q", have), slices.Equal(have, want)
		})
	}
	const web = "serviceentries web.isthmus-stub"
	stubs(web)
	c.ready(t)
	var lease struct {
		Spec struct{ HolderIdentity string }
	}
	if err := c.get(t.Context(), "/apis/coordination.k8s.io/v1/namespaces/istio-system/leases/isthmus-ambient", &lease); err != nil || lease.Spec.HolderIdentity == "" {
		t.Errorf("the Lease is %+v, %v", lease, err)
	}
	c.admin(t, "helm uninstall isthmus -n istio-system --wait")
	c.gone(t, "app.kubernetes.io/instance=isthmus")
	stubs(web) // stays
}

// The chart's other modes are admitted, and so are their pods.
func (c *cluster) modes(t *testing.T) {
	pods := 0
	for mode, n := range map[string]int{"sidecar": 2, "full": 6} {
		rendered := run(t, testdeploy.HelmTool, chart, "template", mode, ".", "--namespace", "modes", "--values", "ci/"+mode+"-values.yaml", "--kube-version", testdeploy.KubernetesVersions[0])
		file := filepath.Join(t.TempDir(), mode+".yaml")
		if err := os.WriteFile(file, []byte(rendered), 0o600); err != nil {
			t.Fatal(err)
		}
		c.admin(t, "kubectl apply --server-side --namespace modes --filename "+file)
		pods += n
	}
	testenv.Eventually(t, testenv.Patience, strconv.Itoa(pods)+" pods", func() (string, bool) {
		names := c.list(t, "modes", "app.kubernetes.io/name=isthmus", "/api/v1 pods")
		return fmt.Sprint(names), len(names) == pods
	})
	for _, kind := range []string{"/apis/monitoring.coreos.com/v1 servicemonitors", "/apis/monitoring.coreos.com/v1 prometheusrules"} {
		if names := c.list(t, "modes", "", kind); len(names) != 1 {
			t.Errorf("%s: %q", kind, names)
		}
	}
}

// admin is sh with all rights.
func (c *cluster) admin(t *testing.T, script string) string {
	t.Helper()
	return c.sh(t, "export KUBECONFIG="+c.kube.Kubeconfig+"\n"+script)
}

// The base of Kustomize and the one file are applied, run, and are what they
// were when they are applied again.
func (c *cluster) manifests(t *testing.T) {
	for what, label := range map[string]string{"-k deploy/kustomize": "app.kubernetes.io/name=isthmus", "-f examples/istiod/kubernetes.yaml": "app=isthmus"} {
		c.sh(t, "kubectl apply --server-side "+what)
		c.ready(t)
		c.serves(t, "consul/web")
		first := c.running()
		if out := c.sh(t, "kubectl diff --server-side "+what); out != "" {
			t.Errorf("%s: applied again it would change\n%s", what, out)
		}
		c.sh(t, "kubectl apply --server-side "+what)
		if now := c.running(); !slices.Equal(first, now) {
			t.Errorf("%s: applied again, pods %q were replaced by %q", what, first, now)
		}
		c.sh(t, "kubectl delete --wait=false "+what)
		c.gone(t, label)
	}
}

const firstCall = "first call: "

// From helm install to the first call, with istiod and an Envoy started once
// the pods are ready.
func BenchmarkFirstCallByChart(b *testing.B) {
	var total time.Duration
	for b.Loop() {
		out, inside := private(b, "TestCluster", clusterTools...)
		if inside {
			b.Fatal("a benchmark runs in no network of its own")
		}
		found := regexp.MustCompile(firstCall + `(\S+)`).FindStringSubmatch(out)
		if found == nil {
			b.Fatalf("no time in %s", out)
		}
		took, err := time.ParseDuration(found[1])
		if err != nil {
			b.Fatal(err)
		}
		total += took
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(total.Seconds()/float64(b.N), "s/call")
}
