package deploy

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testdeploy"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// object is a manifest as far as the tests look into it.
type object struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Data     map[string]string
	Spec     struct {
		Selector any
		Ingress  []ingress
		Groups   []struct{ Rules []rule }
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				InitContainers []container `yaml:"initContainers"`
				Containers     []container
				Token          *bool `yaml:"automountServiceAccountToken"`
			}
		}
	}
}

type container struct {
	Name, Image    string
	RestartPolicy  string `yaml:"restartPolicy"`
	Args           []string
	Ports          []struct{ Name string }
	ReadinessProbe struct {
		Exec struct{ Command []string }
	} `yaml:"readinessProbe"`
}

type ingress struct {
	Ports []port
	From  []any
}

type port struct{ Port string }

func objects(t *testing.T, manifests string) (all []object) {
	t.Helper()
	for dec := yaml.NewDecoder(strings.NewReader(manifests)); ; {
		var o object
		if err := dec.Decode(&o); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if o.Kind != "" {
			all = append(all, o)
		}
	}
}

// names returns kind and name of the objects of a kind, or of all.
func names(all []object, kinds ...string) (out []string) {
	for _, o := range all {
		if len(kinds) == 0 || slices.Contains(kinds, o.Kind) {
			out = append(out, o.Kind+" "+o.Metadata.Name)
		}
	}
	return out
}

func find(t *testing.T, all []object, kind string) object {
	t.Helper()
	for _, o := range all {
		if o.Kind == kind {
			return o
		}
	}
	t.Fatalf("no %s among %q", kind, names(all))
	return object{}
}

// conform checks manifests against the schemas of Kubernetes. Those of the
// Prometheus operator have none here.
func conform(t *testing.T, manifests string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "manifests.yaml")
	if err := os.WriteFile(file, []byte(manifests), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, version := range testdeploy.KubernetesVersions {
		run(t, testdeploy.KubeconformTool, ".", "-kubernetes-version", version, "-skip", "ServiceMonitor,PrometheusRule", file)
	}
}

// program parses the configuration of a ConfigMap as the program does.
func program(t *testing.T, all []object) config.Config {
	t.Helper()
	c, err := config.Parse("isthmus.yaml", []byte(find(t, all, "ConfigMap").Data["isthmus.yaml"]), config.Options{Adapters: []string{"consul", "nacos"}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const chart = root + "/deploy/helm/isthmus"

// template lints the chart with a file of values and renders it.
func template(t *testing.T, args ...string) []object {
	t.Helper()
	args = append(args, "--kube-version", testdeploy.KubernetesVersions[0])
	run(t, testdeploy.HelmTool, chart, append([]string{"lint", ".", "--strict"}, args...)...)
	out := run(t, testdeploy.HelmTool, chart, append([]string{"template", "isthmus", ".", "--namespace", "istio-system"}, args...)...)
	conform(t, out)
	return objects(t, out)
}

// The chart as it is makes a Deployment that two nodes share.
func TestChartStandalone(t *testing.T) {
	all := template(t)
	want := []string{
		"NetworkPolicy isthmus", "PodDisruptionBudget isthmus", "ServiceAccount isthmus",
		"ConfigMap isthmus", "Service isthmus", "Deployment isthmus",
	}
	if diff := cmp.Diff(want, names(all)); diff != "" {
		t.Error(diff)
	}
	c := program(t, all)
	if got := c.Listen.XDS[0].Address + " " + c.Listen.Admin.Address; got != ":15051 127.0.0.1:15080" {
		t.Errorf("the bridge listens at %s", got)
	}
	pod := find(t, all, "Deployment").Spec.Template.Spec
	if got := pod.Containers[0].Args; !slices.Equal(got, []string{"serve", "--config", "/etc/isthmus/isthmus.yaml"}) {
		t.Errorf("args: %q", got)
	}
	if len(pod.InitContainers) > 0 {
		t.Error("there are other containers")
	}
	if c.Listen.Admin.Insecure || len(c.Listen.Admin.Allow) > 0 {
		t.Errorf("administration: %+v", c.Listen.Admin)
	}
	if ports := pod.Containers[0].Ports; len(ports) != 1 || len(pod.Containers[0].ReadinessProbe.Exec.Command) == 0 {
		t.Errorf("ports %+v, probe %+v: administration is asked from outside the pod", ports, pod.Containers[0].ReadinessProbe)
	}
}

// A rule opens administration, to the namespace of the release.
func TestChartAdmin(t *testing.T) {
	all := template(t, "--set-json", `access.admin=[{"peer":{"cidr":"10.0.0.0/8"},"role":"read"}]`)
	admin := program(t, all).Listen.Admin
	if admin.Address != ":15080" || len(admin.Allow) != 1 || admin.Insecure {
		t.Errorf("administration: %+v", admin)
	}
	rules := find(t, all, "NetworkPolicy").Spec.Ingress
	want := []ingress{
		{Ports: []port{{"grpc-xds"}}, From: []any{map[string]any{"namespaceSelector": map[string]any{"matchLabels": map[string]any{"kubernetes.io/metadata.name": "istio-system"}}}}},
		{Ports: []port{{"http-admin"}}, From: []any{map[string]any{"podSelector": map[string]any{}}}},
	}
	if diff := cmp.Diff(want, rules); diff != "" {
		t.Error(diff)
	}
}

// One value makes an authority, a certificate for the Services and a token:
// both ports speak TLS, and whoever sends the token operates.
func TestChartGenerate(t *testing.T) {
	all := template(t, "--set", "tls.generate=true,shards.count=2,serviceMonitor.enabled=true")
	c := program(t, all)
	const files = "/etc/isthmus-tls/"
	if c.Listen.XDS[0].TLS.CertFile != files+"tls.crt" || c.Listen.Admin.TLS.KeyFile != files+"tls.key" {
		t.Errorf("listeners: %+v, %+v", c.Listen.XDS[0], c.Listen.Admin)
	}
	if diff := cmp.Diff([]config.Allow{{Peer: config.Peer{TokenFile: files + "token"}, Role: config.RoleOperate}}, c.Listen.Admin.Allow); diff != "" {
		t.Error(diff)
	}
	secret := find(t, all, "Secret")
	file := func(name string) []byte {
		t.Helper()
		b, err := base64.StdEncoding.DecodeString(secret.Data[name])
		if err != nil || len(b) == 0 {
			t.Fatalf("%s of the secret: %v", name, err)
		}
		return b
	}
	if len(file("token")) < 32 {
		t.Errorf("the token is %q", file("token"))
	}
	if _, err := tls.X509KeyPair(file("tls.crt"), file("tls.key")); err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(file("ca.crt")) {
		t.Fatal("no authority")
	}
	block, _ := pem.Decode(file("tls.crt"))
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"isthmus-shard-0.istio-system.svc", "isthmus-shard-1.istio-system.svc", "localhost"} {
		if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, DNSName: name}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Beside a registry's agent, that starts first and goes on.
func TestChartSidecar(t *testing.T) {
	all := template(t, "--values", "ci/sidecar-values.yaml")
	program(t, all)
	agents := find(t, all, "Deployment").Spec.Template.Spec.InitContainers
	if len(agents) != 1 || agents[0].Name != "consul" || agents[0].RestartPolicy != "Always" {
		t.Errorf("agents: %+v", agents)
	}
}

// With everything: a StatefulSet, a Service and a budget for each shard, TLS,
// the alerts and the dashboard as they are in deploy.
func TestChartFull(t *testing.T) {
	t.Setenv("CONSUL_TOKEN", "of a secret")
	all := template(t, "--values", "ci/full-values.yaml")
	for _, kind := range []string{"StatefulSet", "Service", "PodDisruptionBudget"} {
		want := []string{kind + " isthmus-shard-0", kind + " isthmus-shard-1", kind + " isthmus-shard-2"}
		if diff := cmp.Diff(want, names(all, kind)); diff != "" {
			t.Error(diff)
		}
	}
	shards := map[string]bool{}
	for _, o := range all {
		if o.Kind == "StatefulSet" {
			args := o.Spec.Template.Spec.Containers[0].Args
			shards[args[len(args)-1]] = slices.Contains(args, "--shards")
		}
	}
	if diff := cmp.Diff(map[string]bool{"0/3": true, "1/3": true, "2/3": true}, shards); diff != "" {
		t.Error(diff)
	}
	c := program(t, all)
	if c.Listen.XDS[0].TLS.ClientCAFile != "/etc/isthmus-tls/ca.crt" || c.Listen.Admin.TLS.CertFile != "/etc/isthmus-tls/tls.crt" {
		t.Errorf("TLS of the listeners: %+v, %+v", c.Listen.XDS[0].TLS, c.Listen.Admin.TLS)
	}
	rules := decode[ruleFile](t, "deploy", "alerts", "isthmus.rules.yaml")
	if diff := cmp.Diff(rules.Groups[0].Rules, find(t, all, "PrometheusRule").Spec.Groups[0].Rules); diff != "" {
		t.Error(diff)
	}
	board := read(t, "deploy", "grafana", "isthmus.json")
	if !slices.ContainsFunc(all, func(o object) bool { return o.Data["isthmus.json"] == string(board) }) {
		t.Error("no ConfigMap has the dashboard")
	}
	find(t, all, "ServiceMonitor")
}

// Values that cannot work are refused with the place.
func TestChartRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"replica=2":                      "replica",
		"shards.count=0":                 "shards/count",
		"tls.enabled=true":               "tls/secretName",
		"serviceMonitor.enabled=true":    "access/admin",
		"mode=sidecar":                   "agent/container",
		"config.listen.xds=:1":           "/config",
		"image.digest=sha256:1":          "image/digest",
		"networkPolicy.enabled=perhaps":  "networkPolicy/enabled",
		"config.registries[0].name=null": "config/registries/0",
	} {
		path, err := testdeploy.HelmTool.Fetch(t.Context(), t.Output())
		if err != nil {
			t.Fatal(err)
		}
		out, err := command(t, path, chart, "template", ".", "--kube-version", testdeploy.KubernetesVersions[0], "--set", args).CombinedOutput()
		if err == nil || !strings.Contains(strings.ReplaceAll(string(out), ".", "/"), want) {
			t.Errorf("--set %s: %v, want %s in %s", args, err, want, out)
		}
	}
}

// The base is what the schemas allow, and its ConfigMap what the program reads.
func TestKustomize(t *testing.T) {
	out := run(t, testdeploy.KustomizeTool, filepath.Join(root, "deploy", "kustomize"), "build", ".")
	conform(t, out)
	all := objects(t, out)
	if admin := program(t, all).Listen.Admin; admin.Address != "127.0.0.1:15080" {
		t.Errorf("administration: %+v", admin)
	}
	for _, o := range all {
		if o.Metadata.Namespace != "istio-system" {
			t.Errorf("%s %s is in namespace %q", o.Kind, o.Metadata.Name, o.Metadata.Namespace)
		}
	}
	conform(t, string(read(t, "examples", "istiod", "kubernetes.yaml")))
	program(t, objects(t, string(read(t, "examples", "istiod", "kubernetes.yaml"))))
}

// Every manifest pulls the image of the same release.
func TestImages(t *testing.T) {
	version := decode[struct {
		AppVersion string `yaml:"appVersion"`
		Version    string
	}](t, "deploy", "helm", "isthmus", "Chart.yaml")
	want := "ghcr.io/isthmus-mesh/isthmus:" + version.AppVersion
	kustomize := run(t, testdeploy.KustomizeTool, filepath.Join(root, "deploy", "kustomize"), "build", ".")
	for where, all := range map[string][]object{
		"the chart":       template(t),
		"kustomize":       objects(t, kustomize),
		"kubernetes.yaml": objects(t, string(read(t, "examples", "istiod", "kubernetes.yaml"))),
	} {
		if got := find(t, all, "Deployment").Spec.Template.Spec.Containers[0].Image; got != want {
			t.Errorf("%s runs %s, want %s", where, got, want)
		}
	}
	if !bytes.Contains(read(t, "deploy", "kustomize", "kustomization.yaml"), []byte("newTag: "+version.AppVersion)) {
		t.Error("kustomization.yaml has another version")
	}
}
