package sim

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// The test binary is the plugin too: the variable says so.
const asPlugin = "ISTHMUS_TEST_SIM"

func TestConformance(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, conf := range map[string]plugintest.Config{
		"still":    {Config: json.RawMessage(`{"services": 20, "instances": 5, "changes_per_second": 0}`)},
		"changing": {Config: json.RawMessage(`{"services": 20, "instances": 5, "changes_per_second": 500}`), Changing: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it waits for signs of life, mostly
			conf.Command, conf.Env, conf.Adapter = []string{self}, []string{asPlugin + "=1"}, "sim"
			plugintest.Conformance(t, conf)
		})
	}
}
