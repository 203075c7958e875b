package deploy

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testdeploy"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
)

// consumers renders the chart with consumers of the configuration, and returns
// its grants as YAML, and the objects.
func consumers(t *testing.T, list string, args ...string) (grants string, all []object) {
	t.Helper()
	args = append([]string{"--set-json", "config.consumers.kubernetes=" + list}, args...)
	all = template(t, args...)
	out := run(t, testdeploy.HelmTool, chart, append([]string{"template", "isthmus", ".", "--namespace", "istio-system", "--kube-version", testdeploy.KubernetesVersions[0]}, args...)...)
	return onlyGrants(out), all
}

// onlyGrants returns what grants rights of some manifests.
func onlyGrants(manifests string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(manifests, "\n---\n"), func(doc string) bool {
		return !strings.Contains(doc, "apiVersion: rbac.authorization.k8s.io/v1\n")
	}), "\n---\n")
}

// rights are the kinds of objects that grant some.
var rights = []string{"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}

// Without a consumer of its own cluster a pod has no token and no rights; with
// some, each has its own in the namespaces of its view, or in all without any,
// and its Lease.
func TestChartConsumers(t *testing.T) {
	token := func(all []object, want bool) {
		t.Helper()
		if got := find(t, all, "Deployment").Spec.Template.Spec.Token; got == nil || *got != want {
			t.Errorf("the pods' token: %v, want %v", got, want)
		}
	}
	all := template(t)
	token(all, false)
	if got := names(all, rights...); len(got) > 0 {
		t.Errorf("without a consumer there is %q", got)
	}
	_, all = consumers(t, `[{"name":"elsewhere","kubeconfig":"/etc/extra/kubeconfig"}]`)
	token(all, false)
	if got := names(all, rights...); len(got) > 0 {
		t.Errorf("for another cluster there is %q", got)
	}

	const list = `[{"name":"ambient","view":{"namespaces":["shop","pay"]}},{"name":"all","lease_namespace":"other"}]`
	grants, all := consumers(t, list)
	token(all, true)
	program(t, all)
	want := []string{
		"Role istio-system/isthmus-ambient-lease", "Role shop/isthmus-ambient", "Role pay/isthmus-ambient",
		"Role other/isthmus-all-lease", "ClusterRole /isthmus-all",
	}
	var got []string
	for _, o := range objects(t, grants) {
		if !strings.HasSuffix(o.Kind, "Binding") {
			got = append(got, o.Kind+" "+o.Metadata.Namespace+"/"+strings.Replace(o.Metadata.Name, "istio-system-", "", 1))
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	grants, _ = consumers(t, `[{"name":"gateways","publish":"services","view":{"namespaces":["shop"]}}]`)
	if !strings.Contains(grants, "endpointslices") || !strings.Contains(grants, "services") || strings.Contains(grants, "serviceentries") {
		t.Errorf("for Services there are the rights %s", grants)
	}
	_, all = consumers(t, list, "--set", "rbac.create=false")
	token(all, true)
	if got := names(all, rights...); len(got) > 0 {
		t.Errorf("with rbac.create=false there is %q", got)
	}
	grants, _ = consumers(t, list, "--set", "shards.count=2")
	if !strings.Contains(grants, "isthmus-ambient-0-of-2") || !strings.Contains(grants, "isthmus-ambient-1-of-2") {
		t.Errorf("with two shards there is no Lease for each: %s", grants)
	}
}

// What the chart, and the component of Kustomize, grant is enough to write
// stubs and the Lease on a real API server, and nothing besides.
func TestConsumerRights(t *testing.T) {
	testenv.SkipIfShort(t)
	kube := testkube.Start(t, testkube.Config{Istio: true})
	for _, namespace := range []string{"istio-system", "shop", "other"} {
		kube.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+namespace+"}}")
	}
	token := kube.ServiceAccount(t, "istio-system", "isthmus")
	kubeconfig := kube.KubeconfigOf(t, map[string]any{"token": token})
	const (
		some       = `{"name":"ambient","view":{"namespaces":["shop"]}}`
		everywhere = `{"name":"ambient"}`
		services   = `{"name":"ambient","publish":"services","view":{"namespaces":["shop"]}}`
		workloads  = `{"name":"ambient","publish":"workloads","view":{"namespaces":["shop"]}}`
		entries    = "/apis/networking.istio.io/v1/namespaces/shop/serviceentries"
	)
	for name, tt := range map[string]struct {
		grants, consumer string
		stubs            int // 0: other objects, of which there are more
		list             string
	}{
		"chart, one namespace":      {first(consumers(t, "["+some+"]")), some, 2, entries},
		"chart, all namespaces":     {first(consumers(t, "["+everywhere+"]")), everywhere, 4, entries},
		"chart, services":           {first(consumers(t, "["+services+"]")), services, 0, "/api/v1/namespaces/shop/services"},
		"chart, workloads":          {first(consumers(t, "["+workloads+"]")), workloads, 0, entries},
		"kustomize, one namespace":  {kustomized(t, "RoleBinding", "shop"), some, 2, entries},
		"kustomize, all namespaces": {kustomized(t, "ClusterRoleBinding", ""), everywhere, 4, entries},
	} {
		t.Run(name, func(t *testing.T) {
			kube.Apply(t, tt.grants)
			defer kube.Delete(t, tt.grants, "")
			consumer := strings.Replace(tt.consumer, "{", fmt.Sprintf(`{"kubeconfig":%q,"lease_namespace":"istio-system",`, kubeconfig), 1)
			const shop, other = "- {name: shop, type: sim, config: {services: 2, changes_per_second: 0}}\n", "- {name: other, type: sim, config: {services: 2, changes_per_second: 0}}\n"
			consumers := "consumers: {kubernetes: [" + consumer + "]}\n"
			bridge := testisthmus.Start(t, shop+other+consumers)
			testenv.Eventually(t, testenv.Patience, "the objects", func() (string, bool) {
				_, body := bridge.Get(t, "/api/v1/consumers")
				several := tt.stubs == 0 && !strings.Contains(body, `"written": 0`) && strings.Contains(body, `"pending": 0`) && strings.Contains(body, `"refused": 0`)
				return body, (several || tt.stubs > 0 && strings.Contains(body, fmt.Sprintf(`"written": %d`, tt.stubs))) && strings.Contains(body, `"writer": true`) && !strings.Contains(body, `"error"`)
			})
			// It removes what it has written, too.
			bridge.Configure(t, other+consumers)
			testenv.Eventually(t, testenv.Patience, "the objects of the other registry", func() (string, bool) {
				body, code, err := kube.Do(t.Context(), http.MethodGet, tt.list, "", "", nil)
				return fmt.Sprintf("%d %v %.500s", code, err, body), code == http.StatusOK && strings.Contains(string(body), `"items":[]`)
			})
			bridge.Stop(t)

			const istio, lease = "/apis/networking.istio.io/v1", "/apis/coordination.k8s.io/v1/namespaces/"
			refused := []string{
				"/api/v1/namespaces/shop/secrets", "/api/v1/namespaces/istio-system/configmaps", istio + "/namespaces/shop/virtualservices",
				istio + "/namespaces/shop/serviceentries?watch=true", istio + "/namespaces/shop/serviceentries/web/status",
				lease + "istio-system/leases", lease + "istio-system/leases/istio-leader", lease + "shop/leases/isthmus-ambient",
				"/apis/rbac.authorization.k8s.io/v1/namespaces/istio-system/roles",
			}
			if tt.consumer != everywhere {
				refused = append(refused, istio+"/namespaces/other/serviceentries", istio+"/serviceentries")
			}
			for _, path := range refused {
				if body, code, err := kube.Do(t.Context(), http.MethodGet, path, token, "", nil); err != nil || code != http.StatusForbidden {
					t.Errorf("GET %s as the bridge: status %d, %v: %.200s", path, code, err, body)
				}
			}
		})
	}
}

func first[A, B any](a A, _ B) A { return a }

// kustomized builds the base with the component ambient, and a binding of the
// ClusterRole as the component says, and returns its grants.
func kustomized(t *testing.T, kind, namespace string) string {
	t.Helper()
	base, err := filepath.Abs(filepath.Join(root, "deploy", "kustomize"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if base, err = filepath.Rel(dir, base); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{
		"kustomization.yaml": "resources: [" + base + ", binding.yaml]\ncomponents: [" + filepath.Join(base, "ambient") + "]\n",
		"binding.yaml": `apiVersion: rbac.authorization.k8s.io/v1
kind: ` + kind + `
metadata: {name: isthmus-ambient, namespace: "` + namespace + `"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: isthmus-ambient}
subjects: [{kind: ServiceAccount, name: isthmus, namespace: istio-system}]
`,
	} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out := run(t, testdeploy.KustomizeTool, dir, "build", ".")
	conform(t, out)
	if token := find(t, objects(t, out), "Deployment").Spec.Template.Spec.Token; token == nil || !*token {
		t.Error("the pods have no token")
	}
	return onlyGrants(out)
}
