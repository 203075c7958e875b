package nacos

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/migrate"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// A mesh leaves the module istio of Nacos for Isthmus with its preset, and goes
// back, as docs/migrate says: no call fails, and a DestinationRule that names
// the host as the module does selects its subsets before, between and after.
func TestCutOverFromNacosIstio(t *testing.T) {
	testenv.SkipIfShort(t)
	server := testnacos.Start(t, testnacos.Config{Version: testnacos.V2, Istio: true})
	app := server.Client(t)
	backends := testproxy.StartHTTPBackends(t, "one", "two")
	var instances []testnacos.Instance
	for n, b := range backends {
		i := testnacos.Up(b.Address, b.Port)
		i.Metadata = map[string]string{"version": fmt.Sprintf("v%d", n+1)}
		instances = append(instances, i)
	}
	app.Register(t, "public", "DEFAULT_GROUP", "echo", instances...)
	const host = "echo.DEFAULT-GROUP.public.nacos"
	rules := t.TempDir()
	if err := os.WriteFile(filepath.Join(rules, "echo.yaml"), fmt.Appendf(nil, `
apiVersion: networking.istio.io/v1beta1
kind: DestinationRule
metadata: {name: echo, namespace: public}
spec:
  host: %s
  subsets:
  - {name: first, labels: {version: v1}}
  - {name: second, labels: {version: v2}}
`, host), 0o600); err != nil {
		t.Fatal(err)
	}
	older, files := "xds://"+server.IstioAddr, "fs://"+rules

	isthmus := testisthmus.Start(t, fmt.Sprintf(`- {name: nacos, type: nacos, config: {servers: [%q]}, translate: {preset: nacos-istio}}`, server.Addr))
	isthmus.WaitReady(t)
	waitEqual(t, server.IstioAddr, isthmus.XDS, 1)

	istiod := testistiod.Start(t, testistiod.V121, older, files)
	istiod.WaitReady(t)
	envoy := testproxy.StartEnvoy(t, istiod)
	port := backends[0].Port
	whole := testistiod.OutboundCluster(host, port)
	subset := func(name string) string { return fmt.Sprintf("outbound|%d|%s|%s", port, name, host) }
	reaches := func() {
		t.Helper()
		envoy.WaitReaches(t, whole, "one", "two")
		envoy.WaitReaches(t, subset("first"), "one")
		envoy.WaitReaches(t, subset("second"), "two")
	}
	reaches()

	stop := make(chan struct{})
	var callers sync.WaitGroup
	calls := make([]int, 2)
	for n, cluster := range []string{whole, subset("second")} {
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := envoy.Call(t, cluster); err != nil {
					t.Errorf("a call to %s failed: %v", cluster, err)
					return
				}
				calls[n]++
			}
		})
	}
	for _, source := range []string{isthmus.Source(), older} {
		istiod.RestartWith(t, source, files)
		// What the sidecar has now is from the new source: another proxy, which
		// has nothing from before, reaches the same.
		fresh := testproxy.StartEnvoy(t, istiod)
		fresh.WaitReaches(t, whole, "one", "two")
		fresh.WaitReaches(t, subset("first"), "one")
		fresh.WaitReaches(t, subset("second"), "two")
		reaches()
	}
	close(stop)
	callers.Wait()
	t.Logf("calls: %v, none failed", calls)
}

// waitEqual waits until `isthmus diff` of two sources finds the services equal,
// and each difference explained.
func waitEqual(t *testing.T, older, newer string, services int) *migrate.Report {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel()
	var both []*migrate.Source
	for _, address := range []string{older, newer} {
		s, err := migrate.Open(address)
		if err != nil {
			t.Fatal(err)
		}
		both = append(both, s)
		group.Go(func() { // owned by this function, which waits above
			if err := s.Run(ctx, io.Discard); err != nil {
				t.Errorf("follow a source: %v", err)
			}
		})
	}
	limited, stop := context.WithTimeout(ctx, testenv.Patience)
	defer stop()
	for _, s := range both {
		if err := s.Wait(limited, time.Second); err != nil {
			t.Fatal(err)
		}
	}
	var r *migrate.Report
	testenv.Eventually(t, testenv.Patience, "the two bridges to be equal", func() (string, bool) {
		r = migrate.Compare(both[0], both[1])
		text := r.String()
		for _, d := range r.Differences {
			text += "\n" + d.String()
		}
		return text, r.Services == services && r.Equal() >= 99.9 && r.Explained == len(r.Differences)
	})
	return r
}
