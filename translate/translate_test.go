package translate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

func mustNew(t testing.TB, o Options) *Translator {
	t.Helper()
	tr, err := New("r", o)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// service returns a service of n plain HTTP instances.
func service(n int) (registry.Service, []registry.Instance) {
	instances := make([]registry.Instance, n)
	for i := range instances {
		instances[i] = registry.Instance{
			ID:       fmt.Sprintf("web-%04d", i),
			Address:  fmt.Sprintf("10.0.%d.%d", i/250, i%250+1),
			Ports:    []registry.Port{{Number: 8080}},
			Meta:     map[string]string{"version": "v1", "protocol": "http", "team": "blue"},
			Tags:     []string{"primary", "env=prod"},
			Health:   registry.HealthPassing,
			Locality: registry.Locality{Region: "eu", Zone: "eu-a"},
			Node:     fmt.Sprintf("node-%d", i),
		}
	}
	return registry.Service{Key: registry.Key{Name: "web"}}, instances
}

// clone makes a copy that shares nothing which a test changes.
func clone(instances []registry.Instance) []registry.Instance {
	out := slices.Clone(instances)
	for i := range out {
		out[i].Ports = slices.Clone(out[i].Ports)
	}
	return out
}

// One instance that changes is one WorkloadEntry that changes: the ServiceEntry
// and the others keep their very bytes.
func TestOneInstanceChanges(t *testing.T) {
	tests := map[string]func(*registry.Instance){
		"address": func(i *registry.Instance) { i.Address = "10.9.9.9" },
		"port":    func(i *registry.Instance) { i.Ports[0].Number = 9999 },
		"weight":  func(i *registry.Instance) { i.Weight = new(7.0) },
		"meta": func(i *registry.Instance) {
			i.Meta = map[string]string{"version": "v2", "protocol": "http", "team": "blue"}
		},
		"meta key": func(i *registry.Instance) {
			i.Meta = map[string]string{"version": "v1", "protocol": "http", "squad": "blue"}
		},
		"tags":     func(i *registry.Instance) { i.Tags = nil },
		"locality": func(i *registry.Instance) { i.Locality.SubZone = "r1" },
		"cluster":  func(i *registry.Instance) { i.Cluster = "c1" },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			tr := mustNew(t, Options{})
			svc, instances := service(5)
			instances[2].Weight = new(5.0)
			before := tr.Service(svc, instances, nil)
			changed := clone(instances)
			change(&changed[2])
			after := tr.Service(svc, changed, before)
			if diff := diffResults(tr.Service(svc, changed, nil), after); diff != "" {
				t.Errorf("with prev (-without +with):\n%s", diff)
			}
			decodeResult(t, after)
			if after.Entry != before.Entry {
				t.Errorf("the ServiceEntry is not the one from before")
			}
			differ := 0
			for i := range after.Endpoints {
				if after.Endpoints[i].Name != before.Endpoints[i].Name {
					t.Fatalf("endpoint %d was %q and is %q", i, before.Endpoints[i].Name, after.Endpoints[i].Name)
				}
				if string(after.Endpoints[i].Resource) != string(before.Endpoints[i].Resource) {
					differ++
				} else if &after.Endpoints[i].Resource[0] != &before.Endpoints[i].Resource[0] {
					t.Errorf("endpoint %d is encoded anew and equal", i)
				}
			}
			if differ != 1 {
				t.Errorf("%d endpoints changed, want 1", differ)
			}
		})
	}
}

// What does not show in the mesh changes nothing, and gives the earlier result
// itself.
func TestNothingChanges(t *testing.T) {
	tests := map[string]func(*registry.Instance){
		"nothing":             func(*registry.Instance) {},
		"node":                func(i *registry.Instance) { i.Node = "other" },
		"passing to unknown":  func(i *registry.Instance) { i.Health = registry.HealthUnknown },
		"passing to warning":  func(i *registry.Instance) { i.Health = registry.HealthWarning },
		"an undefined health": func(i *registry.Instance) { i.Health = 77 },
		"an equal map of meta": func(i *registry.Instance) {
			i.Meta = map[string]string{"team": "blue", "version": "v1", "protocol": "http"}
		},
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			tr := mustNew(t, Options{})
			svc, instances := service(5)
			instances[4].Address = "" // a problem stays one
			before := tr.Service(svc, instances, nil)
			changed := clone(instances)
			change(&changed[2])
			slices.Reverse(changed)
			if after := tr.Service(svc, changed, before); after != before {
				t.Errorf("a new result:\n%s", diffResults(before, after))
			}
		})
	}
}

// An instance that comes, goes, or stops taking traffic leaves all other
// resources as they are.
func TestInstanceComesAndGoes(t *testing.T) {
	tr := mustNew(t, Options{})
	svc, all := service(6)
	critical := clone(all)
	critical[1].Health = registry.HealthCritical
	other := clone(all)
	other[0].ID = "another"
	steps := []struct {
		name      string
		instances []registry.Instance
		want      int
	}{
		{"some", all[:3], 3},
		{"more", all, 6},
		{"critical", critical, 5},
		{"back", all, 6},
		{"one other", other, 6},
		{"first gone", all[1:], 5},
		{"first back", all, 6},
		{"last gone", all[:5], 5},
		{"middle gone", slices.Delete(clone(all), 2, 3), 5},
	}
	var prev *Result
	for _, step := range steps {
		r := tr.Service(svc, step.instances, prev)
		if diff := diffResults(tr.Service(svc, step.instances, nil), r); diff != "" {
			t.Errorf("%s: with prev (-without +with):\n%s", step.name, diff)
		}
		decodeResult(t, r)
		if len(r.Endpoints) != step.want {
			t.Errorf("%s: %d endpoints, want %d", step.name, len(r.Endpoints), step.want)
		}
		if prev != nil && prev.Entry != r.Entry {
			t.Errorf("%s: the ServiceEntry was encoded anew", step.name)
		}
		prev = r
	}
}

// What the service's own words change shows, although no instance changed.
func TestServiceChanges(t *testing.T) {
	tr := mustNew(t, Options{Host: `{{.Name}}{{range .Tags}}.{{.}}{{end}}.{{.Registry}}`, ServiceLabels: ServiceLabelOptions{Meta: []string{"*"}}})
	svc, instances := service(2)
	var prev *Result
	for _, step := range []struct {
		meta  map[string]string
		tags  []string
		ports []registry.Port
	}{
		{},
		{meta: map[string]string{"owner": "a"}},
		{meta: map[string]string{"owner": "b"}},
		{tags: []string{"x"}},
		{},
		{ports: []registry.Port{{Number: 81}}},
		{ports: []registry.Port{{Number: 81, Protocol: "tcp"}}},
	} {
		svc.Meta, svc.Tags, svc.Ports = step.meta, step.tags, step.ports
		r := tr.Service(svc, instances, prev)
		if diff := diffResults(tr.Service(svc, instances, nil), r); diff != "" {
			t.Errorf("%+v: with prev (-without +with):\n%s", step, diff)
		}
		if prev != nil && string(prev.Entry.Resource) == string(r.Entry.Resource) {
			t.Errorf("%+v: the ServiceEntry did not change", step)
		}
		prev = r
	}
}

// prev of another service or another translator is as good as none.
func TestPrevOfAnother(t *testing.T) {
	svc, instances := service(3)
	a, b := mustNew(t, Options{}), mustNew(t, Options{Labels: LabelOptions{Tags: "none"}})
	if diff := diffResults(b.Service(svc, instances, nil), b.Service(svc, instances, a.Service(svc, instances, nil))); diff != "" {
		t.Errorf("another translator's (-without +with):\n%s", diff)
	}
	other := registry.Service{Key: registry.Key{Name: "web", Group: "g"}}
	if diff := diffResults(a.Service(svc, instances, nil), a.Service(svc, instances, a.Service(other, instances, nil))); diff != "" {
		t.Errorf("another service's (-without +with):\n%s", diff)
	}
}

// The caller may reuse what it handed over.
func TestKeepsNothing(t *testing.T) {
	tr := mustNew(t, Options{})
	svc, instances := service(3)
	r := tr.Service(svc, instances, nil)
	want := tr.Service(svc, instances, nil)
	for i := range instances {
		clear(instances[i].Meta)
		clear(instances[i].Tags)
		clear(instances[i].Ports)
	}
	clear(instances)
	_, fresh := service(3)
	if diff := diffResults(want, r); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
	if tr.Service(svc, fresh, r) != r {
		t.Errorf("the same instances are taken for changed ones")
	}
}

// Weights that are no numbers of use count as 1 and are listed.
func TestWeights(t *testing.T) {
	w := func(f float64) *float64 { return &f }
	tests := []struct {
		name     string
		weights  []*float64
		want     []uint32 // served; 0 is unset
		problems int
	}{
		{"none", []*float64{nil, nil}, []uint32{0, 0}, 0},
		{"whole", []*float64{w(1), w(10), nil}, []uint32{0, 10, 0}, 0},
		{"zero is left out", []*float64{w(0), w(3)}, []uint32{3}, 0},
		{"fractional", []*float64{w(0.5), w(1), nil, w(0.25)}, []uint32{50, 100, 100, 25}, 0},
		{"tiny", []*float64{w(1e-300), w(0)}, []uint32{0}, 0},
		{"nonsense", []*float64{w(math.NaN()), w(math.Inf(1)), w(math.Inf(-1)), w(-2), w(3)}, []uint32{0, 0, 0, 0, 3}, 4},
		{"huge", []*float64{w(1e300), w(1_000_000)}, []uint32{1_000_000, 1_000_000}, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			svc, instances := service(len(tt.weights))
			for i, weight := range tt.weights {
				instances[i].Weight = weight
			}
			r := mustNew(t, Options{}).Service(svc, instances, nil)
			_, workloads := decodeResult(t, r)
			slices.SortFunc(workloads, func(a, b *networking.WorkloadEntry) int { return strings.Compare(a.Address, b.Address) })
			var got []uint32
			for _, workload := range workloads {
				got = append(got, workload.Weight)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("weights (-want +got):\n%s", diff)
			}
			if len(r.Problems) != tt.problems {
				t.Errorf("problems %v, want %d", r.Problems, tt.problems)
			}
		})
	}
}

func TestNormalProtocol(t *testing.T) {
	tests := []struct{ in, want string }{
		{"HTTP/1.1", "http"},
		{" Http ", "http"},
		{"h2c", "http2"},
		{"triple", "grpc"},
		{"tri", "grpc"},
		{"dubbo", "tcp"},
		{"grpc-web", "grpc-web"},
		{"mongodb", "mongo"},
		{"wss", "https"},
		{"udp", "udp"},
		{"http_proxy", "http_proxy"},
		{"smtp", ""},
		{"", ""},
	}
	for _, tt := range tests {
		if got, ok := normalProtocol(tt.in); got != tt.want || ok != (tt.want != "") {
			t.Errorf("normalProtocol(%q) = %q, %v, want %q", tt.in, got, ok, tt.want)
		}
	}
	for alias, p := range protocols {
		if !knownRE.MatchString(p) || !istioProtocols[p] || protocols[p] != p {
			t.Errorf("%q stands for %q, which Istio does not know", alias, p)
		}
		if alias != lower(alias) {
			t.Errorf("%q is not in lower case and never found", alias)
		}
	}
}

func TestVotes(t *testing.T) {
	tests := []struct {
		said []string
		want string
	}{
		{nil, ""},
		{[]string{"", "http"}, "http"},
		{[]string{"http", "grpc"}, "grpc"},
		{[]string{"grpc", "http"}, "grpc"},
		{[]string{"http", "grpc", "HTTP/1.1"}, "http"},
		{[]string{"smtp", "smtp", "http"}, "http"},
		{[]string{"smtp"}, ""},
	}
	for _, tt := range tests {
		var v votes
		for _, s := range tt.said {
			v.add(s)
		}
		if got := v.winner(); got != tt.want {
			t.Errorf("of %q %q wins, want %q", tt.said, got, tt.want)
		}
	}
}

func TestProtocolOfName(t *testing.T) {
	tests := []struct{ in, want string }{
		{"http", "http"},
		{"http-admin", "http"},
		{"grpc-web", "grpc-web"},
		{"grpc-web-ui", "grpc-web"},
		{"grpc-website", "grpc"},
		{"tcp-metaprotocol-dubbo", "tcp"},
		{"metrics", ""},
		{"httpx", ""},
	}
	for _, tt := range tests {
		if got, _ := protocolOfName(tt.in); got != tt.want {
			t.Errorf("protocolOfName(%q) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

// A registry full of errors does not make a list without end.
func TestProblemsAreBounded(t *testing.T) {
	svc, instances := service(1000)
	for i := range instances {
		instances[i].Address = ""
		instances[i].Meta = map[string]string{}
	}
	for i := range 500 {
		instances[i].Address = "10.0.0.1"
		instances[i].Meta[fmt.Sprintf("key %03d", i)] = "x"
	}
	r := mustNew(t, Options{}).Service(svc, instances, nil)
	decodeResult(t, r)
	i := slices.IndexFunc(r.Problems, func(p Problem) bool { return p.ID == "service web more problems" })
	if len(r.Problems) != 201 || i < 0 || !strings.HasPrefix(r.Problems[i].Reason, "800 more problems") {
		t.Errorf("%d problems; the last: %v", len(r.Problems), r.Problems[len(r.Problems)-1])
	}

	svc, instances = service(1000)
	for i := range instances {
		instances[i].Disabled = true
	}
	r = mustNew(t, Options{}).Service(svc, instances, nil)
	decodeResult(t, r)
	i = slices.IndexFunc(r.LeftOut, func(p Problem) bool { return p.ID == "service web more left out" })
	if len(r.LeftOut) != 101 || i < 0 || !strings.HasPrefix(r.LeftOut[i].Reason, "900 more instances") {
		t.Errorf("%d are left out; the last: %v", len(r.LeftOut), r.LeftOut[len(r.LeftOut)-1])
	}
}

// Why an instance is left out is told anew when only that changes.
func TestReasonOfWhatIsLeftOutChanges(t *testing.T) {
	svc, instances := service(3)
	tr := mustNew(t, Options{Health: "passing"})
	instances[1].Health = registry.HealthWarning
	first := tr.Service(svc, instances, nil)
	instances[1].Health = registry.HealthCritical
	second := tr.Service(svc, instances, first)
	if len(first.LeftOut) != 1 || len(second.LeftOut) != 1 || first.LeftOut[0] == second.LeftOut[0] {
		t.Errorf("left out with a warning: %v; with a failing check: %v", first.LeftOut, second.LeftOut)
	}
	if again := tr.Service(svc, instances, second); again != second {
		t.Error("equal instances give another result")
	}
}

// The hand-written encoder writes what package proto writes.
func TestEncodeWorkload(t *testing.T) {
	long := strings.Repeat("x", 300)
	tests := []workload{
		{},
		{address: "10.0.0.1", ports: []portNumber{{"http", 80}}, labels: []pair{{"a", "b"}}},
		{
			address: long, network: "n", locality: "a/b/c", weight: 1_000_000, serviceAccount: "sa",
			ports:  []portNumber{{"", 1}, {"a", 127}, {"b", 128}, {long, 65535}},
			labels: []pair{{"", ""}, {"a", long}, {long, "b"}},
		},
	}
	for i, w := range tests {
		ports := map[string]uint32{}
		for _, p := range w.ports {
			ports[p.name] = p.number
		}
		for _, name := range []string{"ns/name", "", long} {
			want, err := encodeResource(&mcp.Metadata{Name: name}, &networking.WorkloadEntry{
				Address: w.address, Ports: ports, Labels: toMap(w.labels), Network: w.network, Locality: w.locality, Weight: w.weight, ServiceAccount: w.serviceAccount,
			})
			if err != nil {
				t.Fatal(err)
			}
			got := w.encode(name)
			if string(got) != string(want) {
				t.Errorf("workload %d, name %.10q: %x, want %x", i, name, got, want)
			}
			if len(got) != cap(got) {
				t.Errorf("workload %d, name %.10q: %d bytes in an allocation of %d", i, name, len(got), cap(got))
			}
		}
	}
	if createSeconds != CreateTime.Unix() {
		t.Errorf("createSeconds is not CreateTime")
	}
}

func FuzzNormalProtocol(f *testing.F) {
	for alias := range protocols {
		f.Add(alias)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if p, ok := normalProtocol(s); ok != (p != "") || ok && !knownRE.MatchString(p) {
			t.Errorf("normalProtocol(%q) = %q, %v", s, p, ok)
		}
	})
}

func FuzzParseAddress(f *testing.F) {
	for _, s := range []string{"", "10.0.0.1", "::1", "[::1]", "[", "[]", "fe80::1%eth0", "::ffff:1.2.3.4", "db.example.org.", "unix:///x", "1.2.3", "010.0.0.1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a := parseAddress(s)
		if (a.text == "") == (a.reason == "") {
			t.Fatalf("%q: %+v", s, a)
		}
		if a.text == "" {
			return
		}
		w := &networking.WorkloadEntry{Address: a.text, Ports: map[string]uint32{"http": 80}}
		e := &networking.ServiceEntry{Ports: []*networking.ServicePort{{Name: "http"}}}
		if a.isName {
			e.Resolution = networking.ServiceEntry_DNS
		}
		if err := validWorkload(w, e); err != nil {
			t.Errorf("%q: %v", s, err)
		}
		if again := parseAddress(a.text); again != a {
			t.Errorf("%q: %+v, then %+v", s, a, again)
		}
	})
}

func FuzzHostTemplate(f *testing.F) {
	for _, s := range []string{"{{.Name}}", "{{.Meta.x}}", "{{index .Tags 5}}", "{{with .Group}}{{.}}.{{end}}x", "{{", "{{.Name | replace \"a\" \"\"}}", "{{template \"x\"}}"} {
		f.Add(s, "web", "x", "y")
	}
	f.Fuzz(func(t *testing.T, text, name, key, value string) {
		// A pattern like {{range 1000000000}} or %99999999d is the
		// configuration's own doing, and slow.
		if strings.Contains(text, "range") || strings.Contains(text, "%") || strings.Contains(text, "template") || strings.Contains(text, "block") {
			t.Skip()
		}
		tr, err := New("r", Options{Host: text, Namespace: text, Name: text})
		if err != nil {
			return
		}
		svc, instances := service(1)
		svc.Key.Name, svc.Meta, svc.Tags = name, map[string]string{key: value}, []string{value}
		decodeResult(t, tr.Service(svc, instances, nil))
	})
}

// serviceTranslators have options that take different ways through the package.
func serviceTranslators(t testing.TB) (all []*Translator) {
	for _, o := range []Options{
		{},
		{
			Host: "{{.Name}}.service{{with .Datacenter}}.{{.}}{{end}}.consul", Health: "any", Resolution: "static",
			Labels: LabelOptions{Tags: "pairs", Add: map[string]string{"version": "x"}},
		},
		{
			Host: "{{.Meta.protocol}}.x", Name: "{{.Name}}.{{.Group}}", ServiceLabels: ServiceLabelOptions{Meta: []string{"*"}},
			Resolution: "dns", FallbackPort: 65535,
		},
		{
			Ports:    []PortOptions{{Name: "http", Number: 80}, {Number: 80, Protocol: "grpc"}},
			Locality: LocalityOptions{Keys: []string{"version"}, ZoneKey: "team", Region: "eu"}, Health: "passing",
		},
		{
			Preset: "slime", Aliases: []string{"{{.Name}}.alias"}, Subsets: SubsetOptions{Key: "version", DestinationRule: true}, Revision: "r", ClusterID: "c",
			Instances: InstanceOptions{Selector: "team!=http", ExcludeCIDRs: []string{"10.0.0.2/32"}}, Protocol: ProtocolOptions{Guess: []string{"check", "name", "number"}},
		},
		{
			Preset: "nacos-istio", Subsets: SubsetOptions{Key: "version", DestinationRule: true}, Locality: LocalityOptions{CIDRs: []LocalityCIDR{{"10.0.0.0/31", "eu/a"}}},
			Relabel: RelabelOptions{
				Services: []RelabelRule{
					{Source: []string{"__instance_meta_team"}, Regex: new("(.+)"), Target: "host"},
					{Action: "labelmap", Regex: new("__meta_(.+)"), Replacement: new("annotation.$1")},
					{Source: []string{"__tags"}, Target: "tags"},
				},
				Instances: []RelabelRule{
					{Source: []string{"__node"}, Regex: new("(web|grpc)"), Action: "drop"},
					{Source: []string{"__health", "team"}, Target: "version"},
					{Source: []string{"__cluster"}, Target: "__region"},
				},
			},
		},
	} {
		all = append(all, mustNew(t, o))
	}
	return all
}

// checkService builds a service, and a second state of it, from bytes: strings
// from a pool that holds a, b and c, everything else from numbers. Whatever
// comes, the outcome is valid, does not depend on order, and not on prev.
func checkService(t *testing.T, translators []*Translator, data []byte, a, b, c string) {
	g := &source{data: data, pool: []string{
		"", a, b, c, "web", "http", "grpc", "tcp", "protocol", "version", "v1", "team", "10.0.0.1", "10.0.0.2", "2001:db8::1", "db.example.org",
		"0.0.0.0", "foo bar", "foo-bar", "k=v", "protocol=h2c", "a/b", SelectorLabel, "istio.io/rev", "eu", strings.Repeat("long", 20), a + "." + b, b + "=" + c,
	}}
	tr := translators[g.n(len(translators))]
	svc, instances := g.service()
	first := tr.Service(svc, instances, nil)
	decodeResult(t, first)
	shuffled := slices.Clone(instances)
	slices.Reverse(shuffled)
	if diff := diffResults(first, tr.Service(svc, shuffled, nil)); diff != "" {
		t.Errorf("in another order (-straight +reverse):\n%s", diff)
	}
	if tr.Service(svc, shuffled, first) != first {
		t.Errorf("the same again is a new result")
	}

	changed := slices.Clone(instances)
	for range 1 + g.n(3) {
		switch {
		case len(changed) == 0 || g.n(3) == 0:
			changed = append(changed, g.instance())
		case g.n(3) == 0:
			i := g.n(len(changed))
			changed = slices.Delete(changed, i, i+1)
		default:
			i := g.n(len(changed))
			id := changed[i].ID
			changed[i] = g.instance()
			changed[i].ID = id
		}
	}
	if g.n(8) == 1 {
		key := svc.Key
		svc, _ = g.service()
		svc.Key = key
	}
	want := tr.Service(svc, changed, nil)
	decodeResult(t, want)
	if diff := diffResults(want, tr.Service(svc, changed, first)); diff != "" {
		t.Errorf("with prev (-without +with):\n%s", diff)
	}
}

func FuzzService(f *testing.F) {
	random := rand.NewChaCha8([32]byte{})
	for range 20 {
		data := make([]byte, 1000)
		random.Read(data)
		f.Add(data, "Web_1", "a b", "\u670d\u52a1")
	}
	f.Add([]byte(strings.Repeat("\x02\x01\x00\x09\x04", 90)), "", "k=v", "\xff/\xfe")
	translators := serviceTranslators(f)
	f.Fuzz(func(t *testing.T, data []byte, a, b, c string) { checkService(t, translators, data, a, b, c) })
}

// Random services, more of them and fuller ones than the fuzzer comes by in a
// short time.
func TestRandomServices(t *testing.T) {
	translators := serviceTranslators(t)
	random := rand.NewChaCha8([32]byte{1})
	for n := range 3000 {
		data := make([]byte, 1500)
		random.Read(data)
		checkService(t, translators, data, "Web_1", "a b", "\xffx")
		if t.Failed() {
			t.Fatalf("in run %d", n)
		}
	}
}

// source makes a service of bytes.
type source struct {
	data []byte
	pool []string
}

func (s *source) n(limit int) int {
	if len(s.data) == 0 {
		return 0
	}
	b := s.data[0]
	s.data = s.data[1:]
	return int(b) % limit
}

func (s *source) text() string { return s.pool[s.n(len(s.pool))] }

func (s *source) texts(limit int) (out []string) {
	for range s.n(limit) {
		out = append(out, s.text())
	}
	return out
}

func (s *source) meta() map[string]string {
	m := map[string]string{}
	for range s.n(4) {
		m[s.text()] = s.text()
	}
	return m
}

func (s *source) ports() (out []registry.Port) {
	for range s.n(4) {
		out = append(out, registry.Port{
			Name: s.text(), Number: []int{80, 80, 80, 8080, 8081, 0, 65535, 65536, -1, s.n(256)}[s.n(10)], Protocol: s.text(),
		})
	}
	return out
}

func (s *source) instance() registry.Instance {
	i := registry.Instance{
		ID: string(rune('a' + s.n(8))), Address: s.text(), Ports: s.ports(), Meta: s.meta(), Tags: s.texts(4), Health: registry.Health(s.n(5)), Disabled: s.n(5) == 4,
		Locality: registry.Locality{Region: s.text(), Zone: s.text(), SubZone: s.text()}, Cluster: s.text(), Node: s.text(),
	}
	if len(i.Ports) == 0 && s.n(2) == 0 {
		i.Ports = []registry.Port{{Number: 8080}}
	}
	if s.n(9) == 8 {
		i.ID = s.text()
	}
	if w := s.n(9); w > 0 {
		i.Weight = new([]float64{0, 1, 2.5, -1, math.NaN(), math.Inf(1), 1e300, 1e-300}[w-1])
	}
	return i
}

func (s *source) service() (registry.Service, []registry.Instance) {
	svc := registry.Service{
		Key:  registry.Key{Name: s.text(), Group: s.text(), Namespace: s.text(), Partition: s.text(), Datacenter: s.text(), Peer: s.text()},
		Meta: s.meta(), Tags: s.texts(3), SubjectAltNames: s.texts(3),
	}
	if s.n(3) == 2 {
		svc.Ports = s.ports()
	}
	var instances []registry.Instance
	for range s.n(7) {
		instances = append(instances, s.instance())
	}
	return svc, instances
}

// BenchmarkService translates a service of which one instance changes each
// time.
func BenchmarkService(b *testing.B) {
	for _, n := range []int{10, 1000} {
		svc, instances := service(n)
		moved := clone(instances)
		moved[n/2].Address = "10.9.9.9"
		states := [2][]registry.Instance{instances, moved}
		tr := mustNew(b, Options{})
		run := func(name string, step func(i int, prev *Result) *Result) {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				prev := tr.Service(svc, instances, nil)
				for i := 1; b.Loop(); i++ {
					prev = step(i, prev)
				}
			})
		}
		run("first", func(i int, _ *Result) *Result { return tr.Service(svc, states[i%2], nil) })
		run("changed", func(i int, prev *Result) *Result { return tr.Service(svc, states[i%2], prev) })
		run("same", func(_ int, prev *Result) *Result { return tr.Service(svc, instances, prev) })
	}
}

// BenchmarkPreset translates a service of ten instances for the first time, by
// the defaults and by each preset.
func BenchmarkPreset(b *testing.B) {
	const n = 10
	svc, instances := service(n)
	svc.Key.Group, svc.Key.Namespace, svc.Key.Datacenter = "DEFAULT_GROUP", "public", "dc1"
	for _, preset := range append([]string{""}, sortedNames(presets)...) {
		b.Run("preset="+preset, func(b *testing.B) {
			tr, svc := mustNew(b, Options{Preset: preset}), svc
			if preset == "aeraki-dubbo" { // others are none of Dubbo's
				svc.Key.Name = "providers:org.example.Shop:1.0.0:"
			}
			b.ReportAllocs()
			for b.Loop() {
				tr.Service(svc, instances, nil)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/instance")
		})
	}
}

// BenchmarkEncode compares the hand-written encoder with package proto.
func BenchmarkEncode(b *testing.B) {
	w := workload{
		address: "10.0.0.1", ports: []portNumber{{"http", 8080}}, locality: "eu/eu-a", weight: 10,
		labels: []pair{{"env", "prod"}, {SelectorLabel, "web"}, {"team", "blue"}, {"version", "v1"}},
	}
	b.Run("hand", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			w.encode("ns/web-abcdefghij")
		}
	})
	b.Run("proto", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			body := &networking.WorkloadEntry{Address: w.address, Ports: map[string]uint32{"http": 8080}, Locality: w.locality, Weight: w.weight, Labels: toMap(w.labels)}
			if _, err := encodeResource(&mcp.Metadata{Name: "ns/web-abcdefghij"}, body); err != nil {
				b.Fatal(err)
			}
		}
	})
}
