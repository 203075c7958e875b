package state

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

// heldSeries returns isthmus_waiting by collection, where it is 1.
func heldSeries(t *testing.T, reg *prometheus.Registry) (held []string) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "isthmus_waiting" && m.GetGauge().GetValue() == 1 {
				held = append(held, m.GetLabel()[0].GetValue())
			}
		}
	}
	return held
}

// An optional registry that cannot be reached is not waited for, a required one
// is; what the optional one lists later is added.
func TestOptional(t *testing.T) {
	unreachable := &pluginv1.WatchResponse{Status: &pluginv1.Status{Error: "connection refused"}}
	for name, tt := range map[string]struct {
		say    *pluginv1.WatchResponse // what the plugin says of its registry
		begun  bool
		opened time.Duration
	}{
		"unreachable": {unreachable, true, 0}, "silent": {nil, true, time.Minute}, "no plugin": {nil, false, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log text
				reg := prometheus.NewRegistry()
				o := Options{Registries: map[string]RegistryOptions{"dc2": {Optional: true}}}
				d := New([]string{"dc1", "dc2"}, o, slog.New(slog.NewTextHandler(&log, nil)), reg)
				begun := time.Now()
				e := env{t, d}
				go func() { _ = d.Run(t.Context()) }()
				services := []string{collection.ServiceEntry}
				dc1, dc2 := d.Registry("dc1"), d.Registry("dc2")
				dc1.Begin(services)
				if tt.begun {
					dc2.Begin(services)
				}
				if tt.say != nil {
					dc2.Apply(tt.say)
				}
				if tt.opened > 0 {
					time.Sleep(tt.opened - tickEvery - time.Second)
					if got := d.Waiting(collection.ServiceEntry); len(got) != 2 {
						t.Errorf("%v hold the services, want both registries", got)
					}
					time.Sleep(2*tickEvery + time.Second)
				}
				if diff := cmp.Diff([]status.Wait{{Registry: "dc1", Collections: services, Since: begun}}, d.Waits()); diff != "" {
					t.Errorf("holds (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(services, heldSeries(t, reg)); diff != "" {
					t.Errorf("isthmus_waiting (-want +got):\n%s", diff)
				}
				dc1.Apply(upserts(entry("ns/web", "web.example.org")))
				dc1.Apply(synced)
				if !d.Synced() || d.Waits() != nil || !d.Initialized(collection.ServiceEntry) || heldSeries(t, reg) != nil {
					t.Errorf("with the required registry, %v is held", d.Waits())
				}
				if want := "the registry is optional and its first listing is not complete; its types are served without it"; strings.Count(log.String(), want) != 1 {
					t.Errorf("the log lacks %q, or has it more than once:\n%s", want, &log)
				}
				// It comes, and fails again: additions, and nothing is held.
				if !tt.begun {
					dc2.Begin(services)
				}
				dc2.Apply(upserts(entry("ns/api", "api.example.org")))
				e.want(map[string]string{"se ns/web": "web.example.org", "se ns/api": "api.example.org"},
					map[string]string{"se ns/web": "web.example.org selector", "se ns/api": "api.example.org selector"})
				dc2.Apply(synced)
				dc2.Apply(unreachable)
				if !d.Synced() || !d.Initialized(collection.ServiceEntry) || !dc2.Status().Synced {
					t.Error("a collection that was open is held")
				}
			})
		})
	}
}

// A required registry holds for as long as it takes; the log says so when
// sync_timeout has passed.
func TestRequiredHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log text
		o := Options{Registries: map[string]RegistryOptions{"dc1": {SyncTimeout: 20 * time.Second}}}
		d := New([]string{"dc1"}, o, slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
		go func() { _ = d.Run(t.Context()) }()
		r := d.Registry("dc1")
		r.Begin([]string{collection.ServiceEntry})
		r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: "connection refused"}})
		if want := "its types wait for its first listing"; !strings.Contains(log.String(), want) ||
			!strings.Contains(log.String(), "waiting=[networking.istio.io/ServiceEntry]") || !strings.Contains(log.String(), "waiting_since=") {
			t.Errorf("the log lacks %q with what is held and since when:\n%s", want, &log)
		}
		const overdue = "types wait for a required registry"
		time.Sleep(19 * time.Second)
		if strings.Contains(log.String(), overdue) {
			t.Errorf("the log says too early:\n%s", &log)
		}
		time.Sleep(time.Hour)
		if strings.Count(log.String(), overdue) != 1 || d.Initialized(collection.ServiceEntry) {
			t.Errorf("the log has %q not once, or the services are served:\n%s", overdue, &log)
		}
	})
}

// A registry that was restored holds nothing, and an optional one is no less
// served for being away; whether collections were opened without it before that
// makes no difference.
func TestHeldAndRestored(t *testing.T) {
	before := newEnv(t, Options{}, "dc1")
	list(before.Registry("dc1"), 3)
	disk := &savedClaims{}
	disk.follow(before.DB)
	for name, late := range map[string]bool{"in time": false, "after sync_timeout": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log text
				o := Options{Registries: map[string]RegistryOptions{"dc1": {Optional: true}, "dc2": {}}}
				d := New([]string{"dc1", "dc2"}, o, slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
				e := env{t, d}
				go func() { _ = d.Run(t.Context()) }()
				r, other := d.Registry("dc1"), d.Registry("dc2")
				if late {
					time.Sleep(DefaultSyncTimeout + tickEvery)
					if !r.Status().Released || !d.Remarkable() {
						t.Error("it is waited for")
					}
				}
				disk.restore(e)
				r.Begin(nil)
				r.Apply(&pluginv1.WatchResponse{Status: &pluginv1.Status{Error: "connection refused"}})
				time.Sleep(time.Hour)
				if st := r.Status(); st.Released || len(st.Waits) > 0 || d.Remarkable() {
					t.Errorf("released %v, holds %v, remarkable %v; want nothing of it", st.Released, st.Waits, d.Remarkable())
				}
				if released := strings.Contains(log.String(), "served without it\" registry=dc1"); released != late {
					t.Errorf("the log says that it is served without the registry: %v\n%s", released, &log)
				}
				e.wantCounts(3, 6)
				// The other one alone holds, until it is listed.
				if st := other.Status(); d.Synced() || len(st.Waits) == 0 {
					t.Error("dc2 holds nothing")
				}
				list(other, 0)
				if !d.Synced() || len(d.Waits()) > 0 {
					t.Errorf("held: %v", d.Waits())
				}
				list(r, 3)
				if !d.Synced() || d.behind.Load() != 0 || d.restored.Load() != 0 {
					t.Errorf("at the end %d are behind, %d restored", d.behind.Load(), d.restored.Load())
				}
			})
		})
	}
}
