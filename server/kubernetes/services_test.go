package kubernetes

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/txtar"
	networking "istio.io/api/networking/v1alpha3"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/server/servertest"
)

// entryFrom returns the entry of a golden: a ServiceEntry and its instances by
// name.
func entryFrom(t *testing.T, name string, spec map[string]any, instances map[string]map[string]any) *entry {
	t.Helper()
	e := &entry{spec: new(networking.ServiceEntry)}
	e.namespace, e.name, _ = strings.Cut(name, "/")
	if err := parsed(t, name, spec, e.spec).GetBody().UnmarshalTo(e.spec); err != nil {
		t.Fatal(err)
	}
	for _, n := range slices.Sorted(maps.Keys(instances)) {
		w := new(networking.WorkloadEntry)
		if err := parsed(t, n, instances[n], w).GetBody().UnmarshalTo(w); err != nil {
			t.Fatal(err)
		}
		e.instances = append(e.instances, instance{n, w})
	}
	e.inline()
	return e
}

// Each archive in testdata/services holds a ServiceEntry with its instances
// (in.yaml), its objects (out.yaml), and what has none with the reason
// (without).
func TestServicesGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/services/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("testdata: %d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(file)
			if err != nil || len(archive.Files) == 0 || archive.Files[0].Name != "in.yaml" {
				t.Fatalf("in.yaml is missing: %v", err)
			}
			var in struct {
				Services  Services                  `json:"services"`
				Name      string                    `json:"name"`
				Spec      map[string]any            `json:"spec"`
				Instances map[string]map[string]any `json:"instances"`
			}
			if err := yaml.UnmarshalStrict(archive.Files[0].Data, &in); err != nil {
				t.Fatal(err)
			}
			p := in.Services.plan(entryFrom(t, in.Name, in.Spec, in.Instances))
			want := slices.Clone(archive.Files[:1])
			var out, without strings.Builder
			for _, o := range p.Objects {
				text, err := yaml.Marshal(o.Object)
				if err != nil {
					t.Fatal(err)
				}
				out.WriteString("---\n" + string(text))
			}
			for _, n := range slices.Sorted(maps.Keys(p.Without)) {
				fmt.Fprintf(&without, "%s: %s\n", n, p.Without[n])
			}
			for name, text := range map[string]string{"out.yaml": out.String(), "without": without.String()} {
				if text != "" {
					want = append(want, txtar.File{Name: name, Data: []byte(text)})
				}
			}
			slices.SortFunc(want[1:], func(a, b txtar.File) int { return strings.Compare(a.Name, b.Name) })
			golden(t, file, archive, want)
		})
	}
}

// Which slice an instance is in depends on the names of the instances alone.
// All are in one slice each, none has more than 100, and what happens to an
// instance changes one slice; now and then one becomes two, or two one.
func TestSlices(t *testing.T) {
	random := rand.New(rand.NewPCG(31, 100))
	s := Services{Meta: Meta{Consumer: "gateways"}}
	all := map[string]instance{}
	set := func(i int) {
		name := fmt.Sprintf("shop/web-%d", i)
		all[name] = instance{name, &networking.WorkloadEntry{
			Address: fmt.Sprintf("10.%d.%d.%d", random.IntN(250), i/250, i%250), Ports: map[string]uint32{"http": 8080},
		}}
	}
	planned := func() map[string]string { // hashes by name
		e := &entry{namespace: "shop", name: "web", spec: &networking.ServiceEntry{
			Hosts: []string{"web.shop"}, Resolution: networking.ServiceEntry_STATIC, Ports: []*networking.ServicePort{{Name: "http", Number: 80, Protocol: "HTTP"}},
		}}
		for _, i := range all { // in any order
			e.instances = append(e.instances, i)
		}
		p := s.plan(e)
		hashes, seen := map[string]string{}, 0
		for _, o := range p.Objects[1:] {
			n := len(o.Object["endpoints"].([]any))
			if n == 0 || n > maxEndpoints || hashes[o.GetName()] != "" {
				t.Fatalf("%s is there before, or has %d endpoints", o.GetName(), n)
			}
			seen += n
			hashes[o.GetName()] = o.GetAnnotations()[HashAnnotation]
		}
		if seen != len(all) || len(p.Without) > 0 {
			t.Fatalf("%d of %d instances are in slices, without: %v", seen, len(all), p.Without)
		}
		return hashes
	}
	differ := func(a, b map[string]string) (n int) {
		for name := range b {
			if a[name] != b[name] {
				n++
			}
		}
		for name := range a {
			if b[name] == "" {
				n++
			}
		}
		return n
	}
	writes := 0
	before := planned()
	for i := range 350 {
		set(i)
		now := planned()
		n := differ(before, now)
		if n < 1 || n > 1 && len(now) == len(before) {
			t.Fatalf("instance %d changed %d of %d slices", i, n, len(now))
		}
		writes += n
		before = now
	}
	if len(before) > 12 || writes > 400 {
		t.Errorf("350 instances are in %d slices, after %d writes", len(before), writes)
	}
	for range 50 {
		set(random.IntN(350)) // another address
		now := planned()
		if n := differ(before, now); n > 1 {
			t.Fatalf("a changed instance changed %d slices", n)
		}
		before = now
	}
}

// kubeService is a Service with what its slices have.
type kubeService struct {
	Spec struct {
		ClusterIP string
		Ports     []struct{ Name, AppProtocol string }
	}
	slices map[string]kubeSlice
}

type kubeSlice struct {
	Metadata    struct{ Name, ResourceVersion string }
	AddressType string
	Endpoints   []struct {
		Addresses  []string
		Conditions struct{ Ready, Serving, Terminating *bool }
	}
	Ports []struct {
		Name, Protocol string
		Port           int
	}
}

// get decodes an object of the API server, and reports whether it is there.
func (c *cluster) get(path string, into any) bool {
	c.t.Helper()
	body, code, err := c.Do(c.t.Context(), http.MethodGet, path, "", "", nil)
	if err == nil && code == http.StatusOK {
		err = json.Unmarshal(body, into)
	}
	if err != nil || code != http.StatusOK && code != http.StatusNotFound {
		c.t.Fatalf("%s: status %d, %v: %s", path, code, err, body)
	}
	return code == http.StatusOK
}

// service returns the Service web with its slices, nil if there is none.
func (c *cluster) service() *kubeService {
	c.t.Helper()
	s := &kubeService{slices: map[string]kubeSlice{}}
	var list struct{ Items []kubeSlice }
	c.get("/apis/discovery.k8s.io/v1/namespaces/"+c.name+"/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dweb", &list)
	for _, i := range list.Items {
		s.slices[i.Metadata.Name] = i
	}
	if !c.get("/api/v1/namespaces/"+c.name+"/services/web", s) {
		if len(s.slices) > 0 {
			c.t.Logf("there is no Service, but %d slices", len(s.slices))
		}
		return nil
	}
	return s
}

// until waits for the Service web.
func (c *cluster) until(what string, ok func(*kubeService) bool) (last *kubeService) {
	c.t.Helper()
	testwait.Eventually(c.t, testenv.Patience, what, func() (string, bool) {
		last = c.service()
		return fmt.Sprintf("%+v", last), ok(last)
	})
	return last
}

// A real API server takes Services with slices; a changed instance writes one
// slice, and only what is there no more is removed.
func testServices(t *testing.T, c *cluster) {
	const instances = 230
	name := c.name + "/web"
	c.w.Entry(name, "web.shop", servertest.Port{Name: "http", Number: 80}, servertest.Port{Name: "grpc", Number: 9090})
	var addresses []string
	for i := range instances {
		addresses = append(addresses, fmt.Sprintf("10.1.0.%d", i+1))
	}
	c.w.Instances(name, addresses...)
	c.w.Instance(name, name+"-six", "2001:db8::1", 1)
	c.w.Instance(name, name+"-other", "10.1.1.1", 1, servertest.Port{Name: "http", Number: 81})
	c.w.Instance(name, name+"-loopback", "127.0.0.1", 1)
	c.w.Instance(name, name+"-link", "169.254.1.1", 1)
	made := &Services{Meta: Meta{Consumer: c.name, Labels: map[string]string{"team": "shop"}}}
	consumer, stop := c.start(func(o *Options) { o.Make = made })
	ready := func(s *kubeService, n int) bool {
		if s == nil {
			return false
		}
		for _, i := range s.slices {
			n -= len(i.Endpoints)
		}
		return n == 0
	}
	s := c.until("the Service", func(s *kubeService) bool { return ready(s, instances+2) })
	c.settled(consumer, Written, len(s.slices)+1)
	if s.Spec.ClusterIP != "None" || len(s.Spec.Ports) != 2 || s.Spec.Ports[1].AppProtocol != "kubernetes.io/h2c" {
		t.Errorf("the Service is %+v", s.Spec)
	}
	families := map[string]int{}
	for _, i := range s.slices {
		families[i.AddressType]++
		for _, e := range i.Endpoints {
			if on := e.Conditions; len(e.Addresses) != 1 || on.Ready == nil || !*on.Ready || on.Serving == nil || !*on.Serving || on.Terminating == nil || *on.Terminating {
				t.Errorf("an endpoint is %+v", e)
			}
		}
		if len(i.Ports) != 2 || i.Ports[0].Name != "http" || i.Ports[0].Protocol != "TCP" || i.Ports[1].Port != 9090 {
			t.Errorf("ports are %+v", i.Ports)
		}
	}
	if families["IPv6"] != 1 || families["IPv4"] < 4 {
		t.Errorf("slices by family: %v", families)
	}
	reasons := 0
	for o := range consumer.Objects() {
		if o.State == Without && strings.Contains(o.Reason, "own machine or link") {
			reasons++
		}
	}
	if reasons != 2 {
		t.Errorf("%d instances are listed as without, want loopback and link-local", reasons)
	}

	before := consumer.Status().Writes.Applied
	c.w.Instance(name, name+"-7", "10.1.2.7", 1)
	after := c.until("another address", func(s *kubeService) bool { return strings.Contains(fmt.Sprint(s), "10.1.2.7") })
	changed := 0
	for name, i := range after.slices {
		if i.Metadata.ResourceVersion != s.slices[name].Metadata.ResourceVersion {
			changed++
		}
	}
	c.settled(consumer, Written, len(s.slices)+1)
	if w := consumer.Status().Writes.Applied - before; changed != 1 || w != 1 {
		t.Errorf("a changed instance changed %d slices with %d writes", changed, w)
	}

	// A new process finds all of it.
	stop()
	consumer, stop = c.start(func(o *Options) { o.Make = made })
	c.settled(consumer, Written, len(s.slices)+1)
	if w := consumer.Status().Writes; w.Applied != 0 || w.Removed != 0 {
		t.Errorf("a restart wrote %+v", w)
	}

	// A Service cannot get an address; another one takes its place.
	stop()
	consumer, _ = c.start(func(o *Options) { o.Make = &Services{Meta: made.Meta, ClusterIP: true} })
	c.until("an address", func(s *kubeService) bool {
		return ready(s, instances+2) && s.Spec.ClusterIP != "None" && s.Spec.ClusterIP != ""
	})
	c.settled(consumer, Written, len(s.slices)+1)

	c.w.Remove(name)
	testwait.Eventually(t, testenv.Patience, "no Service", func() (string, bool) {
		return fmt.Sprintf("%+v", consumer.Status()), c.service() == nil && len(consumer.Status().Objects) > 0 && consumer.Status().Objects[Written] == 0
	})
	c.settled(consumer, Pending, 0)
	var left struct{ Items []kubeSlice }
	if c.get("/apis/discovery.k8s.io/v1/namespaces/"+c.name+"/endpointslices", &left); len(left.Items) > 0 {
		t.Errorf("%d slices are left", len(left.Items))
	}
}

// A slice that becomes two stays until both are written: here the API server
// refuses new ones for a while.
func testSplit(t *testing.T, c *cluster) {
	name := c.name + "/web"
	c.w.Entry(name, "web.shop")
	var addresses []string
	for i := range maxEndpoints {
		addresses = append(addresses, fmt.Sprintf("10.1.0.%d", i+1))
	}
	c.w.Instances(name, addresses...)
	start := func() (*Consumer, func()) {
		return c.start(func(o *Options) {
			o.Make, o.minPause, o.maxPause = &Services{Meta: Meta{Consumer: c.name}}, testenv.Patience/1000, testenv.Patience/100
		})
	}
	consumer, stop := start()
	c.settled(consumer, Written, 2)
	refusal := fmt.Sprintf(`{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicy, metadata: {name: %[1]s}, spec: {
  matchConstraints: {resourceRules: [{apiGroups: [discovery.k8s.io], apiVersions: [v1], operations: [CREATE], resources: [endpointslices]}]},
  validations: [{expression: "false", message: no more slices}]}}
---
{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicyBinding, metadata: {name: %[1]s}, spec: {
  policyName: %[1]s, validationActions: [Deny], matchResources: {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %[1]s}}}}}`, c.name)
	c.Apply(t, refusal)
	testwait.Eventually(t, testenv.Patience, "the policy", func() (string, bool) {
		_, code, err := c.Do(t.Context(), http.MethodPost, "/apis/discovery.k8s.io/v1/namespaces/"+c.name+"/endpointslices", "", "application/json",
			map[string]any{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": map[string]any{"generateName": "test-"}, "addressType": "IPv4", "endpoints": []any{}})
		return fmt.Sprint(code, err), code == http.StatusUnprocessableEntity || code == http.StatusForbidden
	})
	served := func() (n int) {
		all := map[string]bool{}
		for _, i := range c.service().slices {
			for _, e := range i.Endpoints {
				all[e.Addresses[0]] = true
			}
		}
		return len(all)
	}
	waits := func() {
		t.Helper()
		testwait.Eventually(t, testenv.Patience, "two slices that are refused, and one that waits for them", func() (string, bool) {
			if n := served(); n != maxEndpoints {
				t.Fatalf("%d endpoints while new slices are refused, want %d", n, maxEndpoints)
			}
			st := consumer.Status()
			return fmt.Sprintf("%+v", st), st.Objects[Refused] == 2 && st.Objects[Pending] == 1
		})
	}
	c.w.Instance(name, name+"-one-more", "10.1.1.1", 1)
	waits()
	stop()
	consumer, _ = start() // to which the former slice is one that was left
	waits()
	c.Delete(t, refusal, "")
	testwait.Eventually(t, testenv.Patience, "two slices in place of one", func() (string, bool) {
		n := served()
		if n < maxEndpoints {
			t.Errorf("%d endpoints meanwhile", n)
		}
		return fmt.Sprint(n), n == maxEndpoints+1 && len(c.service().slices) == 2
	})
	c.settled(consumer, Written, 3)
}

// To a Service of somebody else no slice is added, and those of the consumer
// are taken from one that takes its place.
func testForeignService(t *testing.T, c *cluster) {
	foreign := fmt.Sprintf("{apiVersion: v1, kind: Service, metadata: {namespace: %s, name: web}, spec: {selector: {app: theirs}, ports: [{port: 80}]}}", c.name)
	c.Apply(t, foreign)
	name := c.name + "/web"
	c.w.Entry(name, "web.shop")
	c.w.Instance(name, name+"-1", "10.0.0.1", 1)
	consumer, _ := c.start(func(o *Options) {
		o.Make, o.listEvery = &Services{Meta: Meta{Consumer: c.name}}, testenv.Patience/50
	})
	c.settled(consumer, Conflict, 2)
	if s := c.service(); s == nil || len(s.slices) > 0 || s.Spec.ClusterIP == "None" {
		t.Errorf("their Service is %+v", s)
	}
	c.Delete(t, foreign, "")
	c.settled(consumer, Written, 2)

	c.Delete(t, foreign, "") // the consumer's by now
	c.Apply(t, foreign)
	c.until("their Service without slices", func(s *kubeService) bool { return s != nil && len(s.slices) == 0 && s.Spec.ClusterIP != "None" })
	c.settled(consumer, Conflict, 2)
}
