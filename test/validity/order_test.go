package validity

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/translate"
)

// described is a service as a registry has it.
type described struct {
	svc       registry.Service
	instances []registry.Instance
}

// The same services in any order, their instances, ports and tags in any order,
// whatever was there before, give the same bytes to every sink. (Which of two
// services of one registry gets a name that both want is the catalog's, and
// tested there.)
func TestOrder(t *testing.T) {
	all := translators(t)
	for round := range uint64(100) {
		g := newGenerator(round)
		tr := all[g.rand.IntN(len(all))]
		var services []described
		taken := map[string]bool{}
		for range 1 + g.rand.IntN(30) {
			svc, instances := g.service()
			slices.SortFunc(instances, func(a, b registry.Instance) int { return bytes.Compare([]byte(a.ID), []byte(b.ID)) })
			// Of several instances with one ID only one is served, by rule; the
			// problem says how many there were.
			r := tr.Service(svc, instances, nil)
			if r.Entry == nil || taken[r.Entry.Name] {
				continue
			}
			taken[r.Entry.Name] = true
			services = append(services, described{svc, instances})
		}
		var want map[string]string
		for order := range uint64(4) {
			got := served(t, tr, services, rand.New(rand.NewPCG(round, order)))
			if want == nil {
				want = got
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("round %d: in another order (-one +another):\n%s", round, diff)
			}
		}
	}
}

// served returns what sinks get of services that arrive in a random order,
// after a random earlier state of some of them.
func served(t *testing.T, tr *translate.Translator, services []described, random *rand.Rand) map[string]string {
	t.Helper()
	db := state.New([]string{"r"}, state.Options{Selector: translate.SelectorValue, Validate: translate.ValidateBody}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	r := db.Registry("r")
	for _, i := range random.Perm(len(services)) {
		d := services[i]
		var prev *translate.Result
		if random.IntN(2) == 0 && len(d.instances) > 0 {
			earlier := slices.Clone(d.instances)
			earlier[0].Address, earlier[0].Weight = "10.99.0.1", new(7.0)
			prev = tr.Service(d.svc, earlier, nil)
			r.Apply(&pluginv1.WatchResponse{Upserts: upserts(prev, random)})
		}
		now := tr.Service(shuffledService(d.svc, random), shuffled(d.instances, random), prev)
		if prev != nil {
			has := map[string]bool{}
			for _, e := range now.Endpoints {
				has[e.Name] = true
			}
			for _, e := range prev.Endpoints {
				if !has[e.Name] {
					r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{{Collection: collection.WorkloadEntry, Name: e.Name}}})
				}
			}
			if prev.Entry != nil && now.Entry != nil && prev.Entry.Name != now.Entry.Name {
				r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{{Collection: collection.ServiceEntry, Name: prev.Entry.Name}}})
			}
		}
		r.Apply(&pluginv1.WatchResponse{Upserts: upserts(now, random)})
	}
	r.Apply(&pluginv1.WatchResponse{Synced: true})
	for _, p := range r.Problems() {
		if !strings.Contains(p.Reason, "of the same registry") { // one host twice: the first by name, in any order
			t.Errorf("the bridge refuses: %v", p)
		}
	}
	out := map[string]string{}
	for _, form := range []encode.Form{{Shape: encode.Inline}, {Shape: encode.Workload}} {
		for _, coll := range []string{collection.ServiceEntry, collection.WorkloadEntry} {
			for c := range db.Changes(state.Kind{Collection: coll, Shape: form.Shape}, &state.Cursor{}) {
				e := c.Record.Encode(encode.NewLayout(form))
				out[fmt.Sprintf("%v %s %s", form.Shape, coll, c.Record.Name())] = string(e.Append(nil))
			}
		}
	}
	return out
}

// upserts are those of a service, its instances in a random order.
func upserts(r *translate.Result, random *rand.Rand) []*pluginv1.Upsert {
	if r.Entry == nil {
		return nil
	}
	all := []*pluginv1.Upsert{{Service: r.Entry.Name, Resource: r.Entry.Resource}}
	for _, i := range random.Perm(len(r.Endpoints)) {
		all = append(all, &pluginv1.Upsert{Service: r.Entry.Name, Resource: r.Endpoints[i].Resource})
	}
	return all
}

func shuffledService(svc registry.Service, random *rand.Rand) registry.Service {
	svc.Ports, svc.Tags, svc.Meta = shuffled(svc.Ports, random), slices.Clone(svc.Tags), maps.Clone(svc.Meta)
	return svc
}

func shuffled[T any](list []T, random *rand.Rand) []T {
	out := make([]T, 0, len(list))
	for _, i := range random.Perm(len(list)) {
		out = append(out, list[i])
	}
	if instances, ok := any(out).([]registry.Instance); ok {
		for i := range instances {
			instances[i].Ports, instances[i].Tags = shuffled(instances[i].Ports, random), shuffled(instances[i].Tags, random)
			instances[i].Meta = maps.Clone(instances[i].Meta)
		}
	}
	return out
}
