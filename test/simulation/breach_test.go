package simulation

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/verify"
)

// A message that removes an instance twice ends the plugin that sent it, and
// nothing else: its registry is served as before and listed again, and the
// other one's changes go on.
func TestBreach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, rand: rand.New(rand.NewPCG(1, 13)), judge: verify.New()}
		log := slog.New(slog.DiscardHandler)
		protect := state.RegistryOptions{Protect: state.Protect{MinShare: 0.5, MinServices: 1, Hold: time.Hour}}
		db := state.New([]string{"dc0", "dc1"}, state.Options{Registries: map[string]state.RegistryOptions{"dc0": protect, "dc1": protect}}, log, prometheus.NewRegistry())
		host, err := supervisor.NewHost("", log)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		defer func() {
			cancel()
			group.Wait()
			if err := host.Close(); err != nil {
				t.Error(err)
			}
		}()
		pass := func() {
			synctest.Wait()
			for _, r := range w.registries {
				for r.pass() {
					synctest.Wait()
				}
			}
		}
		for _, name := range []string{"dc0", "dc1"} {
			r := &registry{w: w, name: name, items: map[id]item{}}
			w.registries = append(w.registries, r)
			service := id{serviceEntry, name + "/s0-" + name}
			r.set(service, item{}, false)
			for i := range 3 {
				r.set(id{workloadEntry, service.name + "-" + string(rune('0'+i))}, item{service: service.name, address: r.address(service.name, i)}, false)
			}
			s, err := supervisor.New(host, supervisor.Spec{Registry: name, Open: r.open}, registrySink{db.Registry(name)}, log, nil)
			if err != nil {
				t.Fatal(err)
			}
			group.Go(func() { _ = s.Run(ctx) })
		}
		want := func(when string, down string, instances ...int) {
			t.Helper()
			for i, st := range db.Registries() {
				if !st.Synced || st.Resources[workloadEntry] != instances[i] {
					t.Errorf("%s, %s has %d instances, synced %v; want %d", when, st.Registry, st.Resources[workloadEntry], st.Synced, instances[i])
				}
				if i == 0 && !strings.Contains(st.Down, down) || (st.Down == "") != (down == "" || i == 1) {
					t.Errorf("%s, %s is down as %q", when, st.Registry, st.Down)
				}
			}
		}
		pass()
		want("at first", "", 3, 3)

		twice := &pluginv1.Removal{Collection: workloadEntry, Name: "dc0/s0-dc0-0"}
		w.registries[0].running().out <- &pluginv1.WatchResponse{Removals: []*pluginv1.Removal{twice, twice}, Services: 1}
		w.registries[1].set(id{workloadEntry, "dc1/s0-dc1-0"}, item{}, true)
		pass()
		want("after the breach", `removals[0] and removals[1] of one message are both networking.istio.io/WorkloadEntry "dc0/s0-dc0-0"`, 3, 2)

		w.pass(time.Second) // the plugin is started again
		pass()
		want("after the restart", "", 3, 2)
	})
}
