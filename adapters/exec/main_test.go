package exec

import (
	"context"
	"encoding/json"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// aloneKey makes the test binary a process that does nothing but to run the
// adapter with the configuration in it.
const aloneKey = "ISTHMUS_TEST_EXEC_ALONE"

func TestMain(m *testing.M) {
	plugintest.Self(func() { Main("test") })
	if config := os.Getenv(aloneKey); config != "" {
		var c Config
		if err := json.Unmarshal([]byte(config), &c); err != nil {
			panic(err)
		}
		a, err := New(c, plugin.Env{})
		if err != nil {
			panic(err)
		}
		if err := a.Run(context.Background(), plugintest.NewCatalog()); err != nil {
			panic(err)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}
