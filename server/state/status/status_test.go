package status

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/state/conflict"
	"github.com/isthmus-mesh/isthmus/server/state/problems"
	"github.com/isthmus-mesh/isthmus/server/state/protect"
)

type fixed []Registry

func (f fixed) Registries() []Registry { return f }
func (f fixed) Waiting(coll string) []string {
	if coll == collection.ServiceEntry {
		return []string{"new"}
	}
	return nil
}

func (f fixed) Contested() map[conflict.Policy]int { return map[conflict.Policy]int{conflict.Merge: 2} }
func (f fixed) Revision() changelog.Revision       { return 7 }

// Metrics are what the source says when they are read. What a registry does not
// have yet has no series, and a former name has the values of the new one.
func TestMetrics(t *testing.T) {
	at := time.Unix(100, 0)
	reg := prometheus.NewPedanticRegistry()
	var upserts atomic.Uint64
	upserts.Store(8)
	reg.MustRegister(Metrics{fixed{
		{
			Registry: "old", Synced: true, Services: 3, Restored: at, Error: "cut", Rejected: 4, Bytes: 5, Removals: 6,
			Resources: map[string]int{collection.ServiceEntry: 2}, Changes: map[Change]*atomic.Uint64{{collection.ServiceEntry, "upsert"}: &upserts},
			Protection: &protect.Protection{Pending: true}, Reasons: problems.Kinds{"a": 1}, Skips: problems.Kinds{"b": 2},
		},
		{Registry: "new", ListingSince: at, Protection: &protect.Protection{}},
	}})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, strings.TrimPrefix(l.GetValue(), "networking.istio.io/"))
			}
			value := m.GetGauge().GetValue() + m.GetCounter().GetValue()
			if f.GetName() != "isthmus_waiting" && f.GetName() != "isthmus_held" || value > 0 {
				name := strings.TrimPrefix(f.GetName(), "isthmus_")
				got[name] = append(got[name], strings.TrimSpace(fmt.Sprint(strings.Join(labels, " "), " ", value)))
			}
		}
	}
	for _, all := range got {
		slices.Sort(all)
	}
	want := map[string][]string{
		"changes_total": {"ServiceEntry upsert old 8"}, "resources": {"ServiceEntry old 2"},
		"rejected_total": {"new 0", "old 4"}, "refused_total": {"new 0", "old 4"},
		"registry_bytes": {"new 0", "old 5"}, "registry_synced": {"new 0", "old 1"}, "registry_stale": {"new 0", "old 1"},
		"registry_listing_since_timestamp_seconds": {"new 100"}, "registry_restored_timestamp_seconds": {"old 100"},
		"registry_problems": {"new 0", "old 0"}, "registry_problem_reasons": {"a old 1"},
		"registry_skipped": {"b old 2"}, "registry_left_out": {"b old 2"},
		"registry_services": {"old 3"}, "registry_instances": {"old 0"},
		"registry_removal_paused": {"new 0", "old 1"}, "registry_protected": {"new 0", "old 1"},
		"registry_removals": {"new 0", "old 6"}, "registry_kept": {"new 0", "old 6"},
		"waiting": {"ServiceEntry 1"}, "held": {"ServiceEntry 1"},
		"conflicts": {"isolate 0", "merge 2", "priority 0"}, "store_revision": {"7"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// A claim says what decided, and the first of what is paused of it.
func TestClaim(t *testing.T) {
	for rule, want := range map[string][2]string{
		"conflicts[3] says merge":         {"conflicts[3]", "conflicts[3] says merge"},
		"no rule of conflicts fits":       {"conflicts", "no rule of conflicts fits"},
		"conflicts[0] says isolate, but!": {"conflicts[0]", "conflicts[0] says isolate, but!"},
	} {
		var c Claim
		if c.SetConflict(rule, ""); c.Rule != want[0] || c.Reason != want[1] {
			t.Errorf("%q: %+v", rule, c)
		}
		if c.SetConflict(rule, "a problem"); c.Rule != want[0] || c.Reason != "a problem" {
			t.Errorf("%q with a problem: %+v", rule, c)
		}
	}
	var all []Removal
	for n := range 150 {
		all = append(all, Removal{Name: fmt.Sprintf("ns/%03d", 149-n)})
	}
	c := Claim{Rejected: "too large"}
	c.SetRemovals(all)
	if c.RemovalCount != 150 || len(c.Removals) != 100 || c.Removals[0].Name != "ns/000" || len(c.Kept) != 100 || c.KeptCount != 150 || c.Refused != "too large" {
		t.Errorf("%d of %d removals from %s", len(c.Removals), c.RemovalCount, c.Removals[0].Name)
	}
}
