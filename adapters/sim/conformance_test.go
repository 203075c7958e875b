package sim

import (
	"encoding/json"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

func TestConformance(t *testing.T) {
	for name, conf := range map[string]plugintest.Config{
		"still":    {Config: json.RawMessage(`{"services": 20, "instances": 5, "changes_per_second": 0}`)},
		"changing": {Config: json.RawMessage(`{"services": 20, "instances": 5, "changes_per_second": 500}`), Changing: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it waits for signs of life, mostly
			conf.Adapter = "sim"
			plugintest.Conformance(t, conf)
		})
	}
}
