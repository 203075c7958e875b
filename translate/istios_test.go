package translate

import (
	"maps"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Labels and annotations with a meaning to Istio come from the configuration,
// not from a registry's metadata and tags, unless they are permitted; each that
// is left out is listed, and its instance served.
func TestIstiosLabels(t *testing.T) {
	const mode, locality = "security.istio.io/tlsMode", "istio-locality"
	for name, c := range map[string]struct {
		options  Options
		meta     map[string]string
		tags     []string
		instance []string // labels besides the selector
		service  []string // labels and annotations
		problems int
	}{
		"metadata": {
			meta:     map[string]string{mode: "disabled", locality: "us.us-1", "topology.istio.io/network": "n", "istio.io/use-waypoint": "w", "Service.Istio.io/canonical-name": "x", "istio": "a", "version": "v1", "example.org/istio.io": "b"},
			instance: []string{"example.org/istio.io", "istio", "version"}, problems: 5,
		},
		"tags":            {tags: []string{mode + "=disabled", locality + "=us", "canary"}, instance: []string{"canary"}, problems: 2},
		"made legal":      {meta: map[string]string{"istio-locality!": "us", "-istio-locality": "eu"}, problems: 1},
		"configured":      {options: Options{Labels: LabelOptions{Add: map[string]string{mode: "istio"}}, ClusterID: "c"}, meta: map[string]string{mode: "disabled"}, instance: []string{mode, clusterIDLabel}, problems: 1},
		"permitted":       {options: Options{Permit: []string{"security.istio.io/*"}}, meta: map[string]string{mode: "istio", locality: "us"}, instance: []string{mode}, problems: 1},
		"all permitted":   {options: Options{Permit: []string{"*"}}, meta: map[string]string{mode: "istio", locality: "us"}, instance: []string{locality, mode}},
		"cluster's label": {options: Options{Labels: LabelOptions{Cluster: clusterIDLabel}}, instance: []string{clusterIDLabel}},
		"target of a rule": {
			options: Options{Relabel: RelabelOptions{
				Instances: []RelabelRule{{Source: []string{"__meta_mesh"}, Regex: new("yes"), Target: mode, Replacement: new("istio")}},
				Services:  []RelabelRule{{Source: []string{"__name"}, Target: "annotation.networking.istio.io/exportTo"}},
			}},
			meta: map[string]string{"mesh": "yes", locality: "us"}, instance: []string{"mesh", mode}, service: []string{"networking.istio.io/exportTo"}, problems: 1,
		},
		"target of a rule that does not fit": {
			options: Options{Relabel: RelabelOptions{Instances: []RelabelRule{{Source: []string{"__meta_mesh"}, Regex: new("yes"), Target: mode}}}},
			meta:    map[string]string{mode: "disabled"}, problems: 1,
		},
		"copied by a rule": {
			options: Options{Relabel: RelabelOptions{
				Instances: []RelabelRule{{Action: "labelmap", Regex: new("__meta_x_(.+)")}},
				Services:  []RelabelRule{{Action: "labelmap", Regex: new("__meta_x_(.+)")}, {Action: "labelmap", Regex: new("__meta_x_(.+)"), Replacement: new("annotation.$1")}},
			}},
			meta: map[string]string{"x_" + locality: "us", "x_team": "web"}, instance: []string{"team", "x_istio-locality", "x_team"}, service: []string{"team", "team"}, problems: 1,
		},
		"of a service": {
			options: Options{Labels: LabelOptions{Meta: []string{"none"}}, ServiceLabels: ServiceLabelOptions{Meta: []string{"*"}}}, meta: map[string]string{"istio.io/use-waypoint": "w", "team": "web"}, service: []string{"team"}, problems: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			instance := registry.Instance{ID: "a", Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}}, Meta: c.meta, Tags: c.tags}
			if c.options.Labels.Cluster != "" {
				instance.Cluster = "c"
			}
			r := mustNew(t, c.options).Service(registry.Service{Key: registry.Key{Name: "web"}, Meta: c.meta}, []registry.Instance{instance}, nil)
			if len(r.Endpoints) != 1 {
				t.Fatalf("%d endpoints, problems %v", len(r.Endpoints), r.Problems)
			}
			var entry mcp.Resource
			var workload networking.WorkloadEntry
			if err := proto.Unmarshal(r.Entry.Resource, &entry); err != nil {
				t.Fatal(err)
			}
			var endpoint mcp.Resource
			if err := proto.Unmarshal(r.Endpoints[0].Resource, &endpoint); err != nil {
				t.Fatal(err)
			}
			if err := endpoint.Body.UnmarshalTo(&workload); err != nil {
				t.Fatal(err)
			}
			delete(workload.Labels, SelectorLabel)
			if got := slices.Sorted(maps.Keys(workload.Labels)); !slices.Equal(got, c.instance) {
				t.Errorf("labels of the instance %v, want %v", got, c.instance)
			}
			got := append(slices.Sorted(maps.Keys(entry.Metadata.Labels)), slices.Sorted(maps.Keys(entry.Metadata.Annotations))...)
			if !slices.Equal(got, c.service) {
				t.Errorf("labels and annotations of the service %v, want %v", got, c.service)
			}
			n := 0
			for _, p := range r.Problems {
				if FieldOf(p.Reason) == "owns.labels" {
					n++
				}
			}
			if n != c.problems {
				t.Errorf("problems %v, want %d of owns.labels", r.Problems, c.problems)
			}
		})
	}
}
