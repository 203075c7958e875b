package consul

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// asPlugin makes the test binary the plugin, for TestConformance.
const asPlugin = "ISTHMUS_TEST_CONSUL"

func TestMain(m *testing.M) {
	if os.Getenv(asPlugin) != "" {
		Main("test")
	}
	// Package testenv has a goroutine of its own from the start, which on Linux
	// starts the servers.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/isthmus-mesh/isthmus/internal/testenv.startAll"))
}
