package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// A service moves from one registry to another by weights, under calls through
// Envoy, without a failed one.
func TestMoveBetweenRegistries(t *testing.T) {
	testenv.SkipIfShort(t)
	const host, servicePort = "shop.example.org", 80
	dir := t.TempDir()
	for _, registry := range []string{"old", "new"} {
		text := "services:\n- name: shop\n  ports: [{name: http, number: 80, protocol: http}]\n  instances:\n"
		for n := range 2 {
			b := testenv.StartHTTPBackend(t, fmt.Sprintf("%s-%d", registry, n+1))
			text += fmt.Sprintf("  - {address: %q, port: %d}\n", b.Address, b.Port)
		}
		folder := filepath.Join(dir, registry)
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "shop.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	weights := func(old, next int) string {
		text := ""
		for _, name := range []string{"old", "new"} {
			text += fmt.Sprintf("- {name: %s, type: file, config: {path: %q}, translate: {host: \"{{.Name}}.example.org\"}}\n", name, filepath.Join(dir, name))
		}
		return text + fmt.Sprintf("conflicts: [{hosts: [%q], policy: merge, weights: {old: %d, new: %d}}]\n", host, old, next)
	}
	bridge := testenv.StartIsthmus(t, weights(100, 0))
	bridge.WaitReady(t)
	istiod := testenv.StartIstiod(t, testenv.IstiodVersions[len(testenv.IstiodVersions)-1], bridge.Source())
	istiod.WaitReady(t)
	envoy := testenv.StartEnvoy(t, istiod)
	cluster := testenv.OutboundCluster(host, servicePort)
	envoy.WaitReaches(t, cluster, "old-1", "old-2")

	stop := keepCalling(t, envoy, cluster)
	defer stop()
	bridge.Configure(t, weights(90, 10))
	envoy.WaitReaches(t, cluster, "old-1", "old-2", "new-1", "new-2")
	const sample = 1000
	moved := 0
	for range sample {
		name, err := envoy.Call(t, cluster)
		if err != nil {
			t.Fatal(err)
		}
		if name == "new-1" || name == "new-2" {
			moved++
		}
	}
	if moved < sample/20 || moved > sample/5 {
		t.Errorf("%d of %d calls reach the new registry, want some %d", moved, sample, sample/10)
	}

	bridge.Configure(t, weights(0, 100))
	envoy.WaitReaches(t, cluster, "new-1", "new-2")

	// The old registry has it no longer.
	if err := os.Remove(filepath.Join(dir, "old", "shop.yaml")); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, testenv.Patience, "no conflict is left", func() (string, bool) {
		page := string(bridge.Page(t, "/api/v1/services"))
		n := bridge.Metrics(t)["isthmus_conflicts"].GetMetric()
		left := 0.0
		for _, m := range n {
			left += m.GetGauge().GetValue()
		}
		return page, left == 0
	})
	envoy.WaitReaches(t, cluster, "new-1", "new-2")
	t.Logf("calls: %d; %d of %d reached the new registry at 90/10", stop(), moved, sample)
}
