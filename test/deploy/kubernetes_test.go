package deploy

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// object is a manifest as far as the tests look into it.
type object struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Data     map[string]string
	Spec     struct {
		Selector any
		Groups   []struct{ Rules []rule }
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				InitContainers []container `yaml:"initContainers"`
				Containers     []container
			}
		}
	}
}

type container struct {
	Name, Image   string
	RestartPolicy string `yaml:"restartPolicy"`
	Args          []string
}

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
	for _, version := range testenv.KubernetesVersions {
		run(t, testenv.KubeconformTool, ".", "-kubernetes-version", version, "-skip", "ServiceMonitor,PrometheusRule", file)
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
	args = append(args, "--kube-version", testenv.KubernetesVersions[0])
	run(t, testenv.HelmTool, chart, append([]string{"lint", ".", "--strict"}, args...)...)
	out := run(t, testenv.HelmTool, chart, append([]string{"template", "isthmus", ".", "--namespace", "istio-system"}, args...)...)
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
	if got := c.Listen.XDS[0].Address + " " + c.Listen.Admin.Address; got != ":15051 :15080" {
		t.Errorf("the bridge listens at %s", got)
	}
	pod := find(t, all, "Deployment").Spec.Template.Spec
	if got := pod.Containers[0].Args; !slices.Equal(got, []string{"serve", "--config", "/etc/isthmus/isthmus.yaml"}) {
		t.Errorf("args: %q", got)
	}
	if len(pod.InitContainers) > 0 {
		t.Error("there are other containers")
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
		"mode=sidecar":                   "agent/container",
		"config.listen.xds=:1":           "/config",
		"image.digest=sha256:1":          "image/digest",
		"networkPolicy.enabled=perhaps":  "networkPolicy/enabled",
		"config.registries[0].name=null": "config/registries/0",
	} {
		path, err := testenv.HelmTool.Fetch(t.Context(), t.Output())
		if err != nil {
			t.Fatal(err)
		}
		out, err := command(t, path, chart, "template", ".", "--set", args).CombinedOutput()
		if err == nil || !strings.Contains(strings.ReplaceAll(string(out), ".", "/"), want) {
			t.Errorf("--set %s: %v, want %s in %s", args, err, want, out)
		}
	}
}

// The base is what the schemas allow, and its ConfigMap what the program reads.
func TestKustomize(t *testing.T) {
	out := run(t, testenv.KustomizeTool, filepath.Join(root, "deploy", "kustomize"), "build", ".")
	conform(t, out)
	all := objects(t, out)
	program(t, all)
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
	kustomize := run(t, testenv.KustomizeTool, filepath.Join(root, "deploy", "kustomize"), "build", ".")
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
