package nacos

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
)

// One service that Nacos says is empty is empty; all of them at once, as when
// the connections of every client break, are held back.
func TestEmptiedNacosIsHeldBack(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	for _, version := range testnacos.Versions() {
		t.Run(version.Name, func(t *testing.T) {
			server := testnacos.Start(t, testnacos.Config{Version: version})
			app, other := server.Client(t), server.Client(t)
			want := map[string]int{}
			register := func(c *testnacos.Client, n int) {
				c.Register(t, "public", "DEFAULT_GROUP", fmt.Sprintf("s%02d", n),
					testnacos.Up(fmt.Sprintf("10.1.%d.1", n), 80), testnacos.Up(fmt.Sprintf("10.1.%d.2", n), 80))
			}
			const services = 16
			for n := range services {
				register(app, n)
				want[fmt.Sprintf("nacos/s%02d-default-group-public", n)] = 2
			}
			register(other, 40)
			isthmus := testisthmus.Start(t, fmt.Sprintf(
				`- {name: nacos, type: nacos, config: {servers: [%q], list_interval: 1s}}`, server.Addr))
			isthmus.WaitReady(t)
			endpoints := func() map[string]int {
				now := isthmus.Endpoints(t)
				for name := range now {
					if _, ours := want[name]; !ours {
						delete(now, name)
					}
				}
				return now
			}
			testenv.Eventually(t, testenv.Patience, "every service with its instances", func() (string, bool) {
				return cmp.Diff(want, isthmus.Endpoints(t)), maps.Equal(want, endpoints())
			})
			other.Close()
			testenv.Eventually(t, testenv.Patience, "one service without an endpoint", func() (string, bool) {
				all := isthmus.Endpoints(t)
				n := 0
				for _, endpoints := range all {
					n += endpoints
				}
				return fmt.Sprint(all), n == 2*services
			})
			if p := isthmus.Registry(t, "nacos").Protection; p != nil {
				t.Errorf("the emptying of one service is held back: %+v", p)
			}

			app.Close()
			isthmus.WaitPhase(t, "nacos", "removal-paused")
			// Whatever was served as empty before is put back, and so is the
			// one that went a moment ago.
			testenv.Eventually(t, testenv.Patience, "every loss to be seen", func() (string, bool) {
				r := isthmus.Registry(t, "nacos")
				return fmt.Sprintf("%s %+v", cmp.Diff(want, endpoints()), r.Protection),
					r.Instances == 0 && maps.Equal(want, endpoints()) && r.Protection.Services == services+1
			})
			again := server.Client(t)
			for n := range services {
				register(again, n)
			}
			testenv.Eventually(t, testenv.Patience, "every service but that one to be back", func() (string, bool) {
				p := isthmus.Registry(t, "nacos").Protection
				return fmt.Sprintf("%s %+v", cmp.Diff(want, endpoints()), p), maps.Equal(want, endpoints()) && p.Services == 1
			})
			isthmus.Decide(t, "allow", "nacos")
			isthmus.WaitPhase(t, "nacos", "live")

			again.Close()
			isthmus.WaitPhase(t, "nacos", "removal-paused")
			testenv.Eventually(t, testenv.Patience, "nacos to have no instance", func() (string, bool) {
				r := isthmus.Registry(t, "nacos")
				return fmt.Sprintf("%+v", r), r.Instances == 0
			})
			if out := isthmus.Decide(t, "allow", "nacos"); !strings.Contains(out, "removal allowed") {
				t.Errorf("accept printed %s", out)
			}
			for name, n := range endpoints() {
				if n > 0 {
					t.Errorf("%s has %d endpoints after accept", name, n)
				}
			}
		})
	}
}
