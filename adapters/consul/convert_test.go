package consul

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"text/template"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// TestConvert shows what each field of an answer becomes. The answers are
// written as Consul writes them.
func TestConvert(t *testing.T) {
	const node = `"Node":{"Node":"n1","Address":"10.0.0.1","Meta":{"rack":"r1","secret":"x"},"TaggedAddresses":{"wan":"198.51.100.1"}}`
	passing := registry.HealthPassing
	base := registry.Instance{ID: "n1/web-1", Address: "10.1.0.1", Ports: []registry.Port{{Number: 80}}, Node: "n1", Health: passing, Weight: new(1.0)}
	with := func(change func(*registry.Instance)) []registry.Instance {
		i := base
		change(&i)
		return []registry.Instance{i}
	}
	const ok = `"Checks":[{"CheckID":"serfHealth","Status":"passing"}]`
	const weights = `"Weights":{"Passing":1,"Warning":1}`
	tests := map[string]struct {
		config Config
		answer string
		want   []registry.Instance
	}{
		"usual": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Service":"web","Address":"10.1.0.1","Port":80,"Tags":["a","b"],"Meta":{"k":"v"},` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Tags, i.Meta = []string{"a", "b"}, map[string]string{"k": "v"} }),
		},
		"what checks speak": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Service":"web","Address":"10.1.0.1","Port":80,` + weights + `},"Checks":[{"CheckID":"serfHealth","Status":"passing","Type":"http"},` +
				`{"CheckID":"a","Status":"passing","ServiceID":"web-1","Type":"http"},{"CheckID":"b","Status":"passing","ServiceID":"web-1","Type":"grpc"}]}]`,
			want: with(func(i *registry.Instance) { i.Check = "grpc" }),
		},
		"node's address": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Port":80,` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Address = "10.0.0.1" }),
		},
		"no port": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1",` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Ports = nil }),
		},
		"named ports, default first": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Ports":[{"Name":"admin","Port":9},{"Name":"http","Port":80,"Default":true},{"Name":"grpc","Port":90}],` + weights + `},` + ok + `}]`,
			want: with(func(i *registry.Instance) {
				i.Ports = []registry.Port{{Name: "http", Number: 80}, {Name: "admin", Number: 9}, {Name: "grpc", Number: 90}}
			}),
		},
		"tagged address of the service": {
			config: Config{TaggedAddress: "wan"},
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"TaggedAddresses":{"wan":{"Address":"203.0.113.1","Port":8080}},` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Address, i.Ports = "203.0.113.1", []registry.Port{{Number: 8080}} }),
		},
		"tagged address without port": {
			config: Config{TaggedAddress: "wan"},
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"TaggedAddresses":{"wan":{"Address":"203.0.113.1","Port":0}},` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Address = "203.0.113.1" }),
		},
		"tagged address of the node": {
			config: Config{TaggedAddress: "wan"},
			answer: `[{` + node + `,"Service":{"ID":"web-1","Port":80,` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Address = "198.51.100.1" }),
		},
		"tagged address that is missing": {
			config: Config{TaggedAddress: "other"},
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,` + weights + `},` + ok + `}]`,
			want:   with(func(*registry.Instance) {}),
		},
		"node metadata beneath the service's": {
			config: Config{NodeMeta: []string{"r*"}},
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Meta":{"k":"v"},` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Meta = map[string]string{"k": "v", "rack": "r1"} }),
		},
		"service's metadata wins": {
			config: Config{NodeMeta: []string{"*"}},
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Meta":{"rack":"mine"},` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Meta = map[string]string{"rack": "mine", "secret": "x"} }),
		},
		"service's locality": {
			answer: `[{"Node":{"Node":"n1","Locality":{"Region":"r","Zone":"z"}},"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Locality":{"Region":"r2","Zone":"z2"},` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Locality = registry.Locality{Region: "r2", Zone: "z2"} }),
		},
		"node's locality": {
			answer: `[{"Node":{"Node":"n1","Locality":{"Region":"r","Zone":"z"}},"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Locality = registry.Locality{Region: "r", Zone: "z"} }),
		},
		"weight when passing": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Weights":{"Passing":10,"Warning":2}},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Weight = new(10.0) }),
		},
		"weight when warning": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Weights":{"Passing":10,"Warning":2}},"Checks":[{"Status":"passing"},{"Status":"warning"}]}]`,
			want:   with(func(i *registry.Instance) { i.Weight, i.Health = new(2.0), registry.HealthWarning }),
		},
		"no traffic when warning": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Weights":{"Passing":10,"Warning":0}},"Checks":[{"Status":"warning"}]}]`,
			want:   with(func(i *registry.Instance) { i.Weight, i.Health = new(0.0), registry.HealthWarning }),
		},
		"no weight when critical": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Weights":{"Passing":10,"Warning":2}},"Checks":[{"Status":"warning"},{"Status":"critical"},{"Status":"passing"}]}]`,
			want:   with(func(i *registry.Instance) { i.Weight, i.Health = nil, registry.HealthCritical }),
		},
		"no weights": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Weights":null},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Weight = nil }),
		},
		"no checks": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,` + weights + `},"Checks":[]}]`,
			want:   with(func(i *registry.Instance) { i.Health = registry.HealthUnknown }),
		},
		"service in maintenance": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,` + weights + `},"Checks":[{"CheckID":"_service_maintenance:web-1","Status":"critical"},{"CheckID":"serfHealth","Status":"passing"}]}]`,
			want:   with(func(i *registry.Instance) { i.Disabled = true }),
		},
		"node in maintenance, nothing else checked": {
			answer: `[{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,` + weights + `},"Checks":[{"CheckID":"_node_maintenance","Status":"critical"}]}]`,
			want:   with(func(i *registry.Instance) { i.Disabled, i.Health = true, registry.HealthUnknown }),
		},
		"proxies and gateways are left out": {
			answer: `[{` + node + `,"Service":{"Kind":"connect-proxy","ID":"p","Port":1}},{` + node + `,"Service":{"Kind":"mesh-gateway","ID":"g","Port":1}}]`,
			want:   []registry.Instance{},
		},
		"kinds that are asked for": {
			config: Config{Kinds: []string{"connect-proxy"}},
			answer: `[{` + node + `,"Service":{"Kind":"connect-proxy","ID":"web-1","Address":"10.1.0.1","Port":80,` + weights + `},` + ok + `},{` + node + `,"Service":{"ID":"plain","Port":1}}]`,
			want:   with(func(*registry.Instance) {}),
		},
		"tags, all of them": {
			config: Config{Tags: []string{"a", "b"}},
			answer: `[{` + node + `,"Service":{"ID":"x","Port":1,"Tags":["a"]}},{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Tags":["b","c","a"],` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Tags = []string{"b", "c", "a"} }),
		},
		"meta, exactly": {
			config: Config{Meta: map[string]string{"mesh": "yes", "e": ""}},
			answer: `[{` + node + `,"Service":{"ID":"x","Port":1,"Meta":{"mesh":"yes"}}},{` + node + `,"Service":{"ID":"web-1","Address":"10.1.0.1","Port":80,"Meta":{"mesh":"yes","e":""},` + weights + `},` + ok + `}]`,
			want:   with(func(i *registry.Instance) { i.Meta = map[string]string{"mesh": "yes", "e": ""} }),
		},
		"entries that say nothing":      {answer: `[null,{"Node":null,"Service":{"ID":"x"}},{"Node":{"Node":"n1"}}]`, want: []registry.Instance{}},
		"one id on two nodes, in order": {answer: `[{"Node":{"Node":"n2"},"Service":{"ID":"i"}},{"Node":{"Node":"n1"},"Service":{"ID":"i"}}]`, want: []registry.Instance{{ID: "n1/i", Node: "n1"}, {ID: "n2/i", Node: "n2"}}},
		"one id twice is one, the last": {answer: `[{"Node":{"Node":"n1"},"Service":{"ID":"i","Port":1}},{"Node":{"Node":"n1"},"Service":{"ID":"i","Port":2}}]`, want: []registry.Instance{{ID: "n1/i", Node: "n1", Ports: []registry.Port{{Number: 2}}}}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			var entries []*api.ServiceEntry
			if err := json.Unmarshal([]byte(test.answer), &entries); err != nil {
				t.Fatal(err)
			}
			got := newConverter(test.config.withDefaults()).instances(entries)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("instances (-want +got):\n%s", diff)
			}
		})
	}
}

// TestHostTemplate shows the default hosts, which are the names that Consul's
// own DNS has.
func TestHostTemplate(t *testing.T) {
	tmpl := template.Must(template.New("").Parse(hostTemplate))
	for want, key := range map[string]registry.Key{
		"web.service.consul":                  {Name: "web"},
		"web.service.dc2.consul":              {Name: "web", Datacenter: "dc2"},
		"web.service.team.ns.consul":          {Name: "web", Namespace: "team"},
		"web.service.part.ap.consul":          {Name: "web", Partition: "part"},
		"web.service.team.ns.part.ap.consul":  {Name: "web", Namespace: "team", Partition: "part"},
		"web.service.team.ns.dc2.dc.consul":   {Name: "web", Namespace: "team", Datacenter: "dc2"},
		"web.service.n.ns.p.ap.dc2.dc.consul": {Name: "web", Namespace: "n", Partition: "p", Datacenter: "dc2"},
		"web.service.part.ap.dc2.dc.consul":   {Name: "web", Partition: "part", Datacenter: "dc2"},
	} {
		var b strings.Builder
		if err := tmpl.Execute(&b, key); err != nil || b.String() != want {
			t.Errorf("%v: %q, %v; want %q", key, b.String(), err, want)
		}
	}
}

// FuzzConvert shows that no answer makes the conversion panic, that its result
// is sorted by unique IDs, and that it equals itself.
func FuzzConvert(f *testing.F) {
	for _, seed := range []string{
		`[]`, `null`, `[null]`, `[{}]`, `[{"Node":{},"Service":{}}]`,
		`[{"Node":{"Node":"n1","Address":"10.0.0.1","Locality":{"Region":"r"}},"Service":{"ID":"a","Port":-1,"Ports":[{"Name":"x","Port":99999,"Default":true},{}],"Weights":{"Passing":-5,"Warning":-1},"TaggedAddresses":{"wan":{}}},"Checks":[null,{"Status":"?"},{"CheckID":"_node_maintenance"}]},{"Node":{"Node":"n1"},"Service":{"ID":"a"}}]`,
	} {
		f.Add([]byte(seed))
	}
	c := newConverter(Config{TaggedAddress: "wan", NodeMeta: []string{"*"}}.withDefaults())
	f.Add([]byte(strings.Repeat(`[{"Node":{"Meta":`, 3000) + "1" + strings.Repeat("}}]", 3000)))
	f.Fuzz(func(t *testing.T, answer []byte) {
		var entries []*api.ServiceEntry
		if json.Unmarshal(answer, &entries) != nil {
			return
		}
		got := c.instances(entries)
		if !slices.IsSortedFunc(got, func(a, b registry.Instance) int { return strings.Compare(a.ID, b.ID) }) {
			t.Errorf("not sorted: %v", got)
		}
		for i := 1; i < len(got); i++ {
			if got[i].ID == got[i-1].ID {
				t.Errorf("id %q twice", got[i].ID)
			}
		}
		if !plugin.EqualInstances(got, c.instances(entries)) {
			t.Errorf("converted twice, it differs: %v", got)
		}
	})
}

// BenchmarkConvert converts an answer of 20 instances, as a wake does.
func BenchmarkConvert(b *testing.B) {
	var entries []*api.ServiceEntry
	for i := range 20 {
		entries = append(entries, entry("web", string(rune('a'+i)), 80+i))
	}
	c := newConverter(DefaultConfig)
	b.ReportAllocs()
	for b.Loop() {
		c.instances(entries)
	}
}
