package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// A service moves from one registry to another by weights, under calls through
// Envoy, without a failed one. With ROUND_ROBIN calls follow the weights; with
// Istio's default, LEAST_REQUEST, about.
func TestMoveBetweenRegistries(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	for _, tt := range []struct {
		policy      string
		least, most int // of 1000 calls at 90/10 that reach the new registry
	}{
		{"LEAST_REQUEST", 50, 250},
		{"ROUND_ROBIN", 60, 150},
	} {
		t.Run(tt.policy, func(t *testing.T) {
			moved := moveShop(t, tt.policy)
			if moved < tt.least || moved > tt.most {
				t.Errorf("%d of %d calls reach the new registry at 90/10, want %d to %d", moved, sampleOfMove, tt.least, tt.most)
			}
		})
	}
}

const sampleOfMove = 1000

// moveShop moves the service shop from the registry old to the registry new,
// and returns how many of so many calls reached the new one at 90/10.
func moveShop(t *testing.T, policy string) (moved int) {
	t.Helper()
	const host, servicePort = "shop.example.org", 80
	dir := t.TempDir()
	for _, registry := range []string{"old", "new"} {
		text := "services:\n- name: shop\n  ports: [{name: http, number: 80, protocol: http}]\n  instances:\n"
		for n := range 2 {
			b := testproxy.StartHTTPBackend(t, fmt.Sprintf("%s-%d", registry, n+1))
			text += fmt.Sprintf("  - {address: %q, port: %d}\n", b.Address, b.Port)
		}
		rule := fmt.Sprintf("apiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: shop, namespace: %s}\n"+
			"spec: {host: %s, trafficPolicy: {loadBalancer: {simple: %s}}}\n", registry, host, policy)
		folder := filepath.Join(dir, registry)
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "shop.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, "rule.yaml"), []byte(rule), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	weights := func(old, next int) string {
		text := ""
		for _, name := range []string{"old", "new"} {
			text += fmt.Sprintf("- {name: %s, type: file, config: {path: %q}, translate: {host: \"{{.Name}}.example.org\"}, owns: {collections: [networking.istio.io/*]}}\n", name, filepath.Join(dir, name))
		}
		return text + fmt.Sprintf("conflicts: [{hosts: [%q], policy: merge, weights: {old: %d, new: %d}}]\n", host, old, next)
	}
	bridge := testisthmus.Start(t, weights(100, 0))
	bridge.WaitReady(t)
	istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
	istiod.WaitReady(t)
	envoy := testproxy.StartEnvoy(t, istiod)
	cluster := testistiod.OutboundCluster(host, servicePort)
	envoy.WaitReaches(t, cluster, "old-1", "old-2")
	envoy.WaitPolicy(t, cluster, policy)

	stop := keepCalling(t, envoy, cluster)
	defer stop()
	bridge.Configure(t, weights(90, 10))
	envoy.WaitReaches(t, cluster, "old-1", "old-2", "new-1", "new-2")
	for range sampleOfMove {
		name, err := envoy.Call(t, cluster)
		if err != nil {
			t.Fatal(err)
		}
		if name == "new-1" || name == "new-2" {
			moved++
		}
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
	t.Logf("calls: %d; with %s %d of %d reached the new registry at 90/10", stop(), policy, moved, sampleOfMove)
	return moved
}
