package kubernetes

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// testPods shows what endpoints get of their pods: the labels that the
// configuration names, and the service account of those with a sidecar.
func testPods(t *testing.T, k *testkube.Server, config Config) {
	const service = "default/described"
	object := func(name, labels string) string {
		return fmt.Sprintf("{apiVersion: v1, kind: Pod, metadata: {name: %s, labels: {app: described, %s}}, spec: {nodeName: n1, serviceAccountName: buyer, containers: [{name: c, image: c}]}}\n---\n", name, labels)
	}
	run := func(name, address string) {
		_, status := podOf(name, address, true)
		k.ApplyStatus(t, strings.Replace(status, "labels: {app: live}", "namespace: default", 1))
	}
	k.Apply(t, "{apiVersion: v1, kind: Service, metadata: {name: described}, spec: {selector: {app: described}, ports: [{name: http, port: 80, targetPort: 8080}]}}\n---\n"+
		object("one", "version: v1, team: blue, security.istio.io/tlsMode: istio")+object("two", "version: v1, team: red"))
	run("one", "10.4.0.1")
	run("two", "10.4.0.2")
	is := func(version, account string) func(registry.Instance) bool {
		return func(i registry.Instance) bool {
			return maps.Equal(i.Meta, map[string]string{"version": version}) && i.ServiceAccount == account
		}
	}
	plain, stopPlain := start(t, config)
	defer stopPlain()
	config.Pods = Pods{Labels: plugin.Globs{"vers*"}, ServiceAccounts: true}
	c, stop := start(t, config)
	defer stop()
	c.AwaitSynced(t, within)
	c.AwaitInstance(t, within, "with a sidecar", service, "one", is("v1", "default/buyer"))
	c.AwaitInstance(t, within, "without a sidecar", service, "two", is("v1", ""))
	// A pod that is labeled otherwise changes its endpoint, and no other.
	c.Look(func(h *plugintest.Held) { h.Sets = 0 })
	k.Apply(t, object("two", "version: v2, team: red"))
	c.AwaitInstance(t, within, "another version", service, "two", is("v2", ""))
	k.Apply(t, object("two", "version: v2, team: green"))
	k.Apply(t, object("three", "version: v3"))
	run("three", "10.4.0.3")
	c.AwaitInstance(t, within, "a new pod", service, "three", is("v3", ""))
	c.Look(func(h *plugintest.Held) {
		if h.Sets > 3 { // a new pod may be seen after its endpoint
			t.Errorf("a label, one that does not count, and a new pod came to %d sets", h.Sets)
		}
	})
	// What is known of a pod stays for as long as it is an endpoint.
	k.Delete(t, "{apiVersion: v1, kind: Pod, metadata: {name: one}}", "gracePeriodSeconds=0")
	c.Await(t, within, "a pod that is gone", func(h *plugintest.Held) bool {
		for _, i := range h.Instances[service] {
			if i.ID == "one" && !is("v1", "default/buyer")(i) {
				t.Errorf("it is %+v meanwhile", i)
			}
		}
		return h.IDs(service) == "three two"
	})
	plain.Await(t, within, "without pods", func(h *plugintest.Held) bool { return h.IDs(service) == "three two" })
	plain.Look(func(h *plugintest.Held) {
		for _, i := range h.Instances[service] {
			if i.Meta != nil || i.ServiceAccount != "" {
				t.Errorf("without pods in the configuration: %+v", i)
			}
		}
	})
}

// TestPodOrder shows that it does not matter in which order a pod and the
// EndpointSlices that refer to it come and go, and that nothing is left.
func TestPodOrder(t *testing.T) {
	s := newState(&Adapter{config: Config{Pods: Pods{Labels: plugin.Globs{"version"}}}}, nil)
	touched := map[registry.Key]bool{}
	const slices = `{"metadata":{"namespace":"default","name":%q,"labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","ports":[{"port":8080}],"endpoints":[{"addresses":["10.1.0.1"],"targetRef":{"kind":"Pod","name":"p"}}]}`
	do := map[string]func(){
		"pod v1":   func() { s.put("Pod", objectOf(t, s, "Pod", podJSON("p", "v1")), touched) },
		"pod v2":   func() { s.put("Pod", objectOf(t, s, "Pod", podJSON("p", "v2")), touched) },
		"no pod":   func() { s.remove("Pod", name{"default", "p"}, touched) },
		"slice a":  func() { s.put("EndpointSlice", objectOf(t, s, "EndpointSlice", fmt.Sprintf(slices, "a")), touched) },
		"slice b":  func() { s.put("EndpointSlice", objectOf(t, s, "EndpointSlice", fmt.Sprintf(slices, "b")), touched) },
		"no a":     func() { s.remove("EndpointSlice", name{"default", "a"}, touched) },
		"no b":     func() { s.remove("EndpointSlice", name{"default", "b"}, touched) },
		"no label": func() { s.put("Pod", objectOf(t, s, "Pod", podJSON("p", "")), touched) },
	}
	s.put("Service", objectOf(t, s, "Service", serviceJSON("web")), touched)
	for _, x := range []struct{ steps, want string }{
		{"pod v1, slice a", "v1"},
		{"slice a, pod v1", "v1"},
		{"slice a, pod v1, pod v2", "v2"},
		{"slice a", ""},
		{"pod v1, slice a, no pod", "v1"},
		{"pod v1, slice a, no pod, slice a", "v1"},
		{"pod v1, slice a, no pod, slice b, no a", "v1"},
		{"pod v1, slice a, no pod, no a, slice a", ""},
		{"pod v1, slice a, no pod, pod v2", "v2"},
		{"pod v1, slice a, no label", ""},
	} {
		for step := range strings.SplitSeq(x.steps, ", ") {
			clear(touched)
			do[step]()
			if known := len(s.slices) > 0; strings.HasPrefix(step, "pod") && known && len(touched) != 1 {
				t.Errorf("%s: %s touches %v", x.steps, step, touched)
			}
		}
		l := s.all()
		if got := l.Services[0].Instances; len(got) != 1 || got[0].Meta["version"] != x.want {
			t.Errorf("%s: %+v, want %q", x.steps, got, x.want)
		}
		for _, step := range []string{"no pod", "no a", "no b"} {
			do[step]()
		}
		if len(s.pods.byName)+len(s.pods.alike) != 0 {
			t.Errorf("%s: left are %v, %v", x.steps, s.pods.byName, s.pods.alike)
		}
	}
}

func podJSON(name, version string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"default","name":%q,"labels":{"version":%q}},"spec":{"serviceAccountName":"default"}}`, name, version)
}

// testMultiCluster follows ServiceExports and ServiceImports.
func testMultiCluster(t *testing.T, k *testkube.Server) {
	config := Config{KubeconfigFile: k.Kubeconfig, Follow: followExports, AcceptEmpty: true}
	fast := func(a *Adapter) { a.rediscover = 100 * time.Millisecond }
	exports, stop := start(t, config, fast)
	defer stop()
	config.Follow = followImports
	imports, stop := start(t, config, fast)
	defer stop()
	for what, c := range map[string]*plugintest.Catalog{"exports": exports, "imports": imports} {
		c.Await(t, within, what+" without the kinds", func(h *plugintest.Held) bool { return h.Synced && strings.Contains(h.Problems["kinds"], "none") })
	}
	k.ApplyKinds(t, testkube.MultiClusterCRDsTool)
	export := func(version, name string) string {
		return fmt.Sprintf("{apiVersion: multicluster.x-k8s.io/%s, kind: ServiceExport, metadata: {name: %s, namespace: default}}\n---\n", version, name)
	}
	k.Apply(t, svc("default", "shown")+slice("default", "shown", "shown-a", "10.5.0.1")+svc("default", "hidden")+slice("default", "hidden", "hidden-a", "10.5.0.2")+
		"{apiVersion: v1, kind: Service, metadata: {name: outside, namespace: default}, spec: {type: ExternalName, externalName: db.example.org, ports: [{port: 5432}]}}\n---\n"+
		export("v1alpha1", "shown")+export("v1beta1", "outside")+export("v1beta1", "absent"))
	exports.Await(t, within, "what is exported", func(h *plugintest.Held) bool {
		return h.Problems["kinds"] == "" && h.IDs("default/shown") == "10.5.0.1:8080" && len(h.Services) == 1 &&
			strings.Contains(h.LeftOut["exports"], "2 ServiceExports") && strings.Contains(h.LeftOut["exports"], "default/outside a Service of type ExternalName")
	})
	k.Apply(t, export("v1beta1", "hidden"))
	exports.AwaitIDs(t, within, "exported", "default/hidden", "10.5.0.2:8080")
	k.ApplyStatus(t, "{apiVersion: multicluster.x-k8s.io/v1beta1, kind: ServiceExport, metadata: {name: hidden, namespace: default}, status: {conditions: [{type: Valid, status: 'False', reason: NoService, message: of two minds, lastTransitionTime: '2026-01-01T00:00:00Z'}]}}")
	exports.Await(t, within, "no valid export", func(h *plugintest.Held) bool {
		return h.IDs("default/hidden") == "-" && strings.Contains(h.LeftOut["exports"], "default/hidden of two minds")
	})
	k.Delete(t, export("v1beta1", "shown"), "")
	exports.AwaitIDs(t, within, "no longer exported", "default/shown", "-")

	imported := func(cluster, address string) string {
		return strings.Replace(strings.Replace(slice("default", "brought", "brought-"+cluster, address),
			"kubernetes.io/service-name", "multicluster.kubernetes.io/service-name", 1), "labels: {", "labels: {multicluster.kubernetes.io/source-cluster: "+cluster+", ", 1)
	}
	k.Apply(t, "{apiVersion: multicluster.x-k8s.io/v1beta1, kind: ServiceImport, metadata: {name: brought, namespace: default}, spec: {type: ClusterSetIP, ips: [10.7.0.1], ports: [{name: http, port: 80, protocol: TCP, appProtocol: kubernetes.io/h2c}]}}\n---\n"+
		imported("east", "10.6.0.1")+imported("west", "10.6.0.1"))
	imports.AwaitIDs(t, within, "what is imported", "default/brought", "east/10.6.0.1:8080 west/10.6.0.1:8080")
	imports.Look(func(h *plugintest.Held) {
		if len(h.Services) != 1 || h.Instances["default/brought"][0].Cluster != "east" || h.Services["default/brought"].Ports[0] != (registry.Port{Name: "http", Number: 80, Protocol: "http2"}) {
			t.Errorf("services %+v, instances %+v", h.Services, h.Instances)
		}
	})
	k.Delete(t, imported("west", ""), "")
	imports.AwaitIDs(t, within, "of one cluster", "default/brought", "east/10.6.0.1:8080")
}

// TestPodsMemory shows what it takes to know 20,000 pods, of which all that
// belong together have the same labels.
func TestPodsMemory(t *testing.T) {
	testenv.SkipIfShort(t)
	const services, each, most = 2_000, 10, 12 << 20
	fill := func(c Config) (*state, uint64) {
		before := heap()
		s := newState(&Adapter{config: c}, nil)
		touched := map[registry.Key]bool{}
		for n := range services {
			endpoints := make([]string, each)
			for i := range endpoints {
				pod := fmt.Sprintf("app-%d-5d4f8c7b9-%05d", n, i)
				endpoints[i] = fmt.Sprintf(`{"addresses":["10.%d.%d.%d"],"targetRef":{"kind":"Pod","name":%q}}`, n/250, n%250, i, pod)
				if c.Pods.watched() {
					s.put("Pod", objectOf(t, s, "Pod", strings.Replace(podJSON(pod, "v1"), `"labels":{`, fmt.Sprintf(`"labels":{"app":"app-%d",`, n), 1)), touched)
				}
			}
			s.put("EndpointSlice", objectOf(t, s, "EndpointSlice", fmt.Sprintf(`{"metadata":{"namespace":"default","name":"app-%[1]d-x","labels":{"kubernetes.io/service-name":"app-%[1]d"}},"ports":[{"port":80}],"endpoints":[%[2]s]}`, n, strings.Join(endpoints, ","))), touched)
			clear(touched)
		}
		return s, heap() - before
	}
	without, off := fill(Config{})
	with, on := fill(Config{Pods: Pods{Labels: plugin.Globs{"*"}}})
	t.Logf("%d MiB without pods, %d MiB with them", off>>20, on>>20)
	if on-off > most {
		t.Errorf("%d pods take %d MiB", services*each, (on-off)>>20)
	}
	if n := len(with.pods.byName); n != services*each || without.pods != nil {
		t.Errorf("%d pods are known", n)
	}
}
