package state

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// webService returns a state with the service web, without instances.
func webService(t testing.TB) env {
	e := newEnv(t, Options{}, "dc1")
	e.say(labelled(web, web, webEntry()))
	return e
}

func (e env) setInstance(name string, w *networking.WorkloadEntry) { e.say(labelled(web, name, w)) }

func (e env) removeInstance(name string) {
	e.Registry("dc1").Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.WorkloadEntry, name)}})
}

// endpointsLabel returns what sinks get as the label, and the endpoints.
func endpointsLabel(t testing.TB, s env) (label string, endpoints []*networking.WorkloadEntry) {
	t.Helper()
	_, entry, meta := s.web(encode.Form{EndpointsHash: true})
	label = meta.GetLabels()[encode.EndpointsLabel]
	if label == "" || meta.GetLabels()["a"] != "b" {
		t.Fatalf("labels %v", meta.GetLabels())
	}
	return label, entry.GetEndpoints()
}

// Whatever changes of an endpoint that stays shows in the label, and so does
// one of two on one address. An ordinary endpoint that comes or goes does not.
func TestEndpointsLabel(t *testing.T) {
	set := func(name string, e *networking.WorkloadEntry) func(env) {
		return func(s env) { s.setInstance("consul/"+name, e) }
	}
	remove := func(name string) func(env) { return func(s env) { s.removeInstance("consul/" + name) } }
	with := func(change func(*networking.WorkloadEntry)) *networking.WorkloadEntry {
		e := webInstance("10.0.0.1", 80)
		change(e)
		return e
	}
	heavy := with(func(e *networking.WorkloadEntry) { e.Weight = 5 })
	for _, tt := range []struct {
		name    string
		before  []func(env)
		change  []func(env)
		changes bool
	}{
		{"ordinary one comes", nil, []func(env){set("4", webInstance("10.0.0.4", 80))}, false},
		{"ordinary one goes", nil, []func(env){remove("1")}, false},
		{"ordinary one has another address", nil, []func(env){set("1", webInstance("10.0.0.9", 80))}, false},
		{"weight", nil, []func(env){set("1", heavy)}, true},
		{"weight of an exceptional one", []func(env){set("1", heavy)}, []func(env){set("1", with(func(e *networking.WorkloadEntry) { e.Weight = 6 }))}, true},
		{"exceptional one becomes ordinary", []func(env){set("1", heavy)}, []func(env){set("1", webInstance("10.0.0.1", 80))}, true},
		{"two swap weights", []func(env){set("1", heavy)}, []func(env){
			set("1", webInstance("10.0.0.1", 80)), set("2", &networking.WorkloadEntry{Address: "10.0.0.2", Ports: map[string]uint32{"http": 80}, Weight: 5}),
		}, true},
		{"port", nil, []func(env){set("1", webInstance("10.0.0.1", 81))}, true},
		{"label", nil, []func(env){set("1", with(func(e *networking.WorkloadEntry) { e.Labels = map[string]string{"version": "v2"} }))}, true},
		{"locality", nil, []func(env){set("1", with(func(e *networking.WorkloadEntry) { e.Locality = "eu/a" }))}, true},
		{"network", nil, []func(env){set("1", with(func(e *networking.WorkloadEntry) { e.Network = "n2" }))}, true},
		{"account", nil, []func(env){set("1", with(func(e *networking.WorkloadEntry) { e.ServiceAccount = "web" }))}, true},
		{"weight of all", nil, []func(env){
			set("1", heavy),
			set("2", &networking.WorkloadEntry{Address: "10.0.0.2", Ports: map[string]uint32{"http": 80}, Weight: 5}),
			set("3", &networking.WorkloadEntry{Address: "10.0.0.3", Ports: map[string]uint32{"http": 80}, Weight: 5}),
		}, true},
		{"second one on an address", nil, []func(env){set("4", webInstance("10.0.0.1", 81))}, true},
		{"second one on an address, the same but for its name", nil, []func(env){set("4", webInstance("10.0.0.1", 80))}, true},
		{"one of two on an address goes", []func(env){set("4", webInstance("10.0.0.1", 81))}, []func(env){remove("1")}, true},
		{"the other one goes", []func(env){set("4", webInstance("10.0.0.1", 81))}, []func(env){remove("4")}, true},
		{
			"one of three on an address goes",
			[]func(env){set("4", webInstance("10.0.0.1", 81)), set("5", webInstance("10.0.0.1", 82))},
			[]func(env){remove("5")},
			true,
		},
		{"ordinary one comes beside two on an address", []func(env){set("4", webInstance("10.0.0.1", 81))}, []func(env){set("5", webInstance("10.0.0.5", 80))}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := webService(t)
			for i := range 3 {
				s.setInstance(fmt.Sprintf("consul/%d", i+1), webInstance(fmt.Sprintf("10.0.0.%d", i+1), 80))
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
			s := webService(t)
			model := map[string]*networking.WorkloadEntry{}
			seen := map[string]string{} // addresses and label: endpoints
			same := 0
			for step := range 1500 {
				name := fmt.Sprintf("consul/web-%d", r.IntN(names))
				if r.IntN(3) == 0 {
					s.removeInstance(name)
					delete(model, name)
				} else {
					a := r.IntN(addresses)
					e := &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.%d.%d", a/100, a%100), Weight: 1 + r.Uint32N(weights)}
					s.setInstance(name, e)
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
					again := webService(t)
					for _, name := range slices.SortedFunc(maps.Keys(model), func(a, b string) int { return strings.Compare(b, a) }) {
						again.setInstance(name, model[name])
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
	s := webService(t)
	set := func(i int, weight uint32) {
		s.setInstance(fmt.Sprintf("consul/web-%d", i), &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.%d.%d", i/100, i%100), Weight: weight})
	}
	for i := range 300 {
		set(i, uint32(1+i)) // each has attributes of its own
	}
	for i := 300; i < 310; i++ {
		set(i, 1000)
	}
	before, _ := endpointsLabel(t, s)
	set(310, 1000)
	s.removeInstance("consul/web-300")
	if after, _ := endpointsLabel(t, s); after != before {
		t.Error("an endpoint with the most frequent attributes shows in the label")
	}
	s.removeInstance("consul/web-7")
	if after, _ := endpointsLabel(t, s); after == before {
		t.Error("an endpoint with attributes of its own does not show in the label")
	}
}

// An entry that states its endpoints itself is labelled with all that it says,
// in this form only.
func TestEndpointsLabelAsPublished(t *testing.T) {
	labels := func(f encode.Form, weight uint32) string {
		entry := webEntry()
		entry.Endpoints = []*networking.WorkloadEntry{{Address: "10.0.0.1", Weight: weight}}
		e := newEnv(t, Options{}, "dc1")
		e.say(labelled("", web, entry))
		_, _, meta := e.web(f)
		return meta.GetLabels()[encode.EndpointsLabel]
	}
	one, two := labels(encode.Form{EndpointsHash: true}, 1), labels(encode.Form{EndpointsHash: true}, 2)
	if one == "" || one == two {
		t.Errorf("labels %q and %q", one, two)
	}
	if plain := labels(encode.Form{}, 1); plain != "" {
		t.Errorf("without the form: label %q", plain)
	}
}
