package legacy

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
)

// A Pilot that is sent more than it receives comes back for the same, again and
// again: doctor says why in one step, whichever moment it looks at.
func TestOversizeFound(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const registry = "\n- {name: load, type: sim, config: {services: %d, instances: 1000, changes_per_second: 0}}"
	bridge := testisthmus.Start(t, fmt.Sprintf(registry, 3))
	bridge.WaitReady(t)
	pilot := testpilot.Start(t, testpilot.Options{}, bridge.XDS)
	pilot.WaitReady(t)
	bridge.Configure(t, fmt.Sprintf(registry, 48)) // 4.4 MB
	metrics := func() float64 {
		n := 0.0
		for _, m := range bridge.Metrics(t)["isthmus_mcp_oversize_total"].GetMetric() {
			n += m.GetCounter().GetValue()
		}
		return n
	}
	testenv.Eventually(t, testenv.Patience, "responses that are too large", func() (string, bool) {
		n := metrics()
		return fmt.Sprintf("%v of them", n), n >= 2
	})
	for range 2 {
		found := bridge.Doctor(t, "--address", bridge.Admin)
		if text := found["sink-size"]; !strings.Contains(text, "4194304 bytes") || !strings.Contains(text, "--mcpMaxMsgSize") {
			t.Errorf("doctor says %v", found)
		}
	}
	_, services := bridge.Get(t, "/api/v1/services?limit=1")
	host := regexp.MustCompile(`[a-z-]+\d+\.load`).FindString(services)
	testenv.Eventually(t, testenv.Patience, "explain to say so", func() (string, bool) { // the sink is away for moments
		_, text := bridge.Get(t, "/api/v1/explain?host="+host)
		var e struct{ Summary []string }
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			return err.Error(), false
		}
		return fmt.Sprintf("%q", e.Summary), strings.Contains(strings.Join(e.Summary, "\n"), "(the response is larger than it receives, ")
	})
}
