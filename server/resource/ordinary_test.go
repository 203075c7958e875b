package resource

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"
)

// endpointsLabel returns what sinks get as the label, and the endpoints.
func endpointsLabel(t testing.TB, s *Service) (label string, endpoints []*networking.WorkloadEntry) {
	t.Helper()
	var entry networking.ServiceEntry
	meta := decode(t, s.Resource(Inline).Encode(Form{EndpointsHash: true}), &entry)
	label = meta.GetLabels()[EndpointsLabel]
	if label == "" || meta.GetLabels()["a"] != "b" {
		t.Fatalf("labels %v", meta.GetLabels())
	}
	return label, entry.GetEndpoints()
}

// Whatever changes of an endpoint that stays shows in the label, and so does
// one of two on one address. An ordinary endpoint that comes or goes does not.
func TestEndpointsLabel(t *testing.T) {
	set := func(name string, e *networking.WorkloadEntry) func(*Service) {
		return func(s *Service) { s.SetInstance(part(t, "consul/"+name, e)) }
	}
	remove := func(name string) func(*Service) { return func(s *Service) { s.RemoveInstance("consul/" + name) } }
	with := func(change func(*networking.WorkloadEntry)) *networking.WorkloadEntry {
		e := workload("10.0.0.1", 80)
		change(e)
		return e
	}
	heavy := with(func(e *networking.WorkloadEntry) { e.Weight = 5 })
	for _, tt := range []struct {
		name    string
		before  []func(*Service)
		change  []func(*Service)
		changes bool
	}{
		{"ordinary one comes", nil, []func(*Service){set("4", workload("10.0.0.4", 80))}, false},
		{"ordinary one goes", nil, []func(*Service){remove("1")}, false},
		{"ordinary one has another address", nil, []func(*Service){set("1", workload("10.0.0.9", 80))}, false},
		{"weight", nil, []func(*Service){set("1", heavy)}, true},
		{"weight of an exceptional one", []func(*Service){set("1", heavy)}, []func(*Service){set("1", with(func(e *networking.WorkloadEntry) { e.Weight = 6 }))}, true},
		{"exceptional one becomes ordinary", []func(*Service){set("1", heavy)}, []func(*Service){set("1", workload("10.0.0.1", 80))}, true},
		{"two swap weights", []func(*Service){set("1", heavy)}, []func(*Service){
			set("1", workload("10.0.0.1", 80)), set("2", &networking.WorkloadEntry{Address: "10.0.0.2", Ports: map[string]uint32{"http": 80}, Weight: 5}),
		}, true},
		{"port", nil, []func(*Service){set("1", workload("10.0.0.1", 81))}, true},
		{"label", nil, []func(*Service){set("1", with(func(e *networking.WorkloadEntry) { e.Labels = map[string]string{"version": "v2"} }))}, true},
		{"locality", nil, []func(*Service){set("1", with(func(e *networking.WorkloadEntry) { e.Locality = "eu/a" }))}, true},
		{"network", nil, []func(*Service){set("1", with(func(e *networking.WorkloadEntry) { e.Network = "n2" }))}, true},
		{"account", nil, []func(*Service){set("1", with(func(e *networking.WorkloadEntry) { e.ServiceAccount = "web" }))}, true},
		{"weight of all", nil, []func(*Service){
			set("1", heavy),
			set("2", &networking.WorkloadEntry{Address: "10.0.0.2", Ports: map[string]uint32{"http": 80}, Weight: 5}),
			set("3", &networking.WorkloadEntry{Address: "10.0.0.3", Ports: map[string]uint32{"http": 80}, Weight: 5}),
		}, true},
		{"second one on an address", nil, []func(*Service){set("4", workload("10.0.0.1", 81))}, true},
		{"second one on an address, the same but for its name", nil, []func(*Service){set("4", workload("10.0.0.1", 80))}, true},
		{"one of two on an address goes", []func(*Service){set("4", workload("10.0.0.1", 81))}, []func(*Service){remove("1")}, true},
		{"the other one goes", []func(*Service){set("4", workload("10.0.0.1", 81))}, []func(*Service){remove("4")}, true},
		{
			"one of three on an address goes",
			[]func(*Service){set("4", workload("10.0.0.1", 81)), set("5", workload("10.0.0.1", 82))},
			[]func(*Service){remove("5")},
			true,
		},
		{"ordinary one comes beside two on an address", []func(*Service){set("4", workload("10.0.0.1", 81))}, []func(*Service){set("5", workload("10.0.0.5", 80))}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := service(t, "web.service.consul")
			for i := range 3 {
				s.SetInstance(part(t, fmt.Sprintf("consul/%d", i+1), workload(fmt.Sprintf("10.0.0.%d", i+1), 80)))
			}
			for _, f := range tt.before {
				f(s)
			}
			before, _ := endpointsLabel(t, s)
			for _, f := range tt.change {
				f(s)
			}
			if after, _ := endpointsLabel(t, s); (after != before) != tt.changes {
				t.Errorf("the label goes from %s to %s, want another one: %v", before, after, tt.changes)
			}
		})
	}
}

// Over random runs two states of a service with the same addresses and the same
// label have the same endpoints, and the label is that of a service that was
// made of the same instances in another order.
func TestEndpointsLabelModel(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 11))
			// Few and many kinds of attributes and addresses, so that groups
			// tie, are large, and are many.
			names, addresses, weights := []int{6, 6, 200}[seed%3], []int{4, 300}[seed%2], []uint32{3, 40}[seed/3]
			s := service(t, "web.service.consul")
			model := map[string]*networking.WorkloadEntry{}
			seen := map[string]string{} // addresses and label: endpoints
			same := 0
			for step := range 1500 {
				name := fmt.Sprintf("consul/web-%d", r.IntN(names))
				if r.IntN(3) == 0 {
					s.RemoveInstance(name)
					delete(model, name)
				} else {
					a := r.IntN(addresses)
					e := &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.%d.%d", a/100, a%100), Weight: 1 + r.Uint32N(weights)}
					s.SetInstance(part(t, name, e))
					model[name] = e
				}
				label, endpoints := endpointsLabel(t, s)
				var at, all []string
				for _, e := range endpoints {
					at = append(at, e.GetAddress())
					text, err := proto.MarshalOptions{Deterministic: true}.Marshal(e)
					if err != nil {
						t.Fatal(err)
					}
					all = append(all, string(text))
				}
				slices.Sort(all)
				key, content := strings.Join(slices.Compact(at), " ")+" "+label, strings.Join(all, " ")
				if was, ok := seen[key]; ok {
					same++
					if was != content {
						t.Fatalf("step %d: other endpoints with the same addresses and label %s", step, key)
					}
				}
				seen[key] = content
				if step%100 == 0 {
					again := service(t, "web.service.consul")
					for _, name := range slices.SortedFunc(maps.Keys(model), func(a, b string) int { return strings.Compare(b, a) }) {
						again.SetInstance(part(t, name, model[name]))
					}
					if want, _ := endpointsLabel(t, again); want != label {
						t.Fatalf("step %d: label %s, in another order of changes %s", step, label, want)
					}
				}
			}
			if names == 6 && addresses == 4 && same == 0 {
				t.Error("no state came twice")
			}
		})
	}
}

// The most frequent attributes are ordinary, however many others there are.
func TestMostFrequentIsOrdinary(t *testing.T) {
	s := service(t, "web.service.consul")
	set := func(i int, weight uint32) {
		s.SetInstance(part(t, fmt.Sprintf("consul/web-%d", i), &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.%d.%d", i/100, i%100), Weight: weight}))
	}
	for i := range 300 {
		set(i, uint32(1+i)) // each has attributes of its own
	}
	for i := 300; i < 310; i++ {
		set(i, 1000)
	}
	before, _ := endpointsLabel(t, s)
	set(310, 1000)
	s.RemoveInstance("consul/web-300")
	if after, _ := endpointsLabel(t, s); after != before {
		t.Error("an endpoint with the most frequent attributes shows in the label")
	}
	s.RemoveInstance("consul/web-7")
	if after, _ := endpointsLabel(t, s); after == before {
		t.Error("an endpoint with attributes of its own does not show in the label")
	}
}

// An entry that states its endpoints itself is labelled with all that it says,
// in this form only.
func TestEndpointsLabelAsPublished(t *testing.T) {
	labels := func(f Form, weight uint32) string {
		e := entry("web.example.org")
		e.Endpoints = []*networking.WorkloadEntry{{Address: "10.0.0.1", Weight: weight}}
		var got networking.ServiceEntry
		return decode(t, NewResource(part(t, "ns/web", e), "dc1").Encode(f), &got).GetLabels()[EndpointsLabel]
	}
	one, two := labels(Form{EndpointsHash: true}, 1), labels(Form{EndpointsHash: true}, 2)
	if one == "" || one == two {
		t.Errorf("labels %q and %q", one, two)
	}
	if plain := labels(Form{}, 1); plain != "" {
		t.Errorf("without the form: label %q", plain)
	}
}
