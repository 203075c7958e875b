package kubernetes

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// A WorkloadEntry has what its instance has, its selector in the labels of the
// object and of the spec, and not the one of the bridge's sinks.
func TestWorkloads(t *testing.T) {
	w := Workloads{Meta: Meta{Consumer: "mesh", Labels: map[string]string{"team": "shop"}}}
	spec := map[string]any{
		"hosts": []any{"web.shop"}, "addresses": []any{"241.0.0.1"}, "resolution": "STATIC",
		"ports": []any{map[string]any{"number": 80, "name": "http", "protocol": "HTTP"}},
	}
	labels := map[string]any{"app": "web", "isthmus.io/service": "web", "note": "no label's value"}
	e := entryFrom(t, "shop/web", spec, map[string]map[string]any{
		"shop/web-1": {"address": "10.0.0.1", "ports": map[string]any{"http": 8080}, "weight": 3, "serviceAccount": "web", "labels": labels},
		"shop/web-2": {"address": "10.0.0.1", "ports": map[string]any{"http": 8081}},
		"shop/web-3": {"address": "::1"},
	})
	p := w.plan(e)
	if len(p.Objects) != 3 || len(p.Without) != 1 || p.Without["shop/web-3"] == "" {
		t.Fatalf("%d objects, without %v", len(p.Objects), p.Without)
	}
	text, err := yaml.Marshal([]any{p.Objects[0].Object["spec"], p.Objects[1].Object})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(`- addresses:
  - 241.0.0.1
  hosts:
  - web.shop
  location: MESH_EXTERNAL
  ports:
  - name: http
    number: 80
    protocol: HTTP
  resolution: STATIC
  workloadSelector:
    labels:
      isthmus.io/workload-of: web
- apiVersion: networking.istio.io/v1
  kind: WorkloadEntry
  metadata:
    annotations:
      isthmus.io/hash: `+p.Objects[1].GetAnnotations()[HashAnnotation]+`
      isthmus.io/host: web.shop
    labels:
      app: web
      isthmus.io/consumer: mesh
      isthmus.io/workload-of: web
      team: shop
    name: web-1.isthmus
    namespace: shop
  spec:
    address: 10.0.0.1
    labels:
      app: web
      isthmus.io/workload-of: web
      note: no label's value
    ports:
      http: 8080
    serviceAccount: web
    weight: 3
`, string(text)); diff != "" {
		t.Error(diff)
	}
	for _, change := range []func(){
		func() { spec["addresses"] = []any{} }, func() { spec["hosts"] = []any{"*.shop"} }, func() { spec["resolution"] = "DNS" },
	} {
		change()
		if p := w.plan(entryFrom(t, "shop/web", spec, nil)); len(p.Objects) > 0 || p.Without["shop/web"] == "" {
			t.Errorf("%v has %d objects, without %v", spec, len(p.Objects), p.Without)
		}
	}
}

// A real API server has a WorkloadEntry for each instance that is no pod of the
// cluster: one that becomes a pod goes, and comes when the pod is gone.
func testWorkloads(t *testing.T, c *cluster) {
	pod := func(name, address string) string {
		return fmt.Sprintf("{apiVersion: v1, kind: Pod, metadata: {namespace: %s, name: %s}, spec: {nodeName: none, containers: [{name: a, image: a}]}, status: {phase: Running, podIP: %[3]s, podIPs: [{ip: %[3]s}]}}", c.name, name, address)
	}
	name := c.name + "/web"
	add := func(of string) {
		c.Apply(t, of)
		c.ApplyStatus(t, of)
	}
	add(pod("web", "10.7.0.2"))
	c.w.Entry(name, "web.shop")
	c.w.Instances(name, "10.7.0.1", "10.7.0.2", "10.7.0.3", "127.0.0.1")
	consumer, _ := c.start(func(o *Options) { o.Make, o.listEvery = &Workloads{Meta{Consumer: c.name}}, testenv.Patience/50 })
	has := func(what string, want ...string) {
		t.Helper()
		testwait.Eventually(t, testenv.Patience, what, func() (string, bool) {
			var list struct {
				Items []struct {
					Spec struct{ Address string }
				}
			}
			c.get("/apis/networking.istio.io/v1/namespaces/"+c.name+"/workloadentries", &list)
			var all []string
			for _, i := range list.Items {
				all = append(all, i.Spec.Address)
			}
			slices.Sort(all)
			return fmt.Sprint(all, consumer.Status()), slices.Equal(all, want)
		})
	}
	has("instances that are no pods", "10.7.0.1", "10.7.0.3")
	c.settled(consumer, Written, 3)
	if st := consumer.Status(); st.Without != 2 {
		t.Errorf("a pod and a loopback address: %+v", st)
	}
	add(pod("next", "10.7.0.3"))
	has("an instance that became a pod", "10.7.0.1")
	c.Delete(t, pod("web", "10.7.0.2"), "gracePeriodSeconds=0")
	has("an instance whose pod is gone", "10.7.0.1", "10.7.0.2")
	c.settled(consumer, Written, 3)
	before := consumer.Status().Writes.Applied
	c.w.Instance(name, name+"-0", "10.7.0.9", 1)
	has("another address", "10.7.0.2", "10.7.0.9")
	c.settled(consumer, Written, 3)
	if w := consumer.Status().Writes.Applied - before; w != 1 {
		t.Errorf("a changed instance was %d writes", w)
	}
	c.w.Remove(name)
	has("nothing")
	c.settled(consumer, Written, 0)
	if len(c.entries()) > 0 {
		t.Errorf("there is still %v", c.entries())
	}
}
