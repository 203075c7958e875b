package nacos

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// asPlugin makes the test binary the plugin, for TestConformance.
const asPlugin = "ISTHMUS_TEST_NACOS"

func TestMain(m *testing.M) {
	if os.Getenv(asPlugin) != "" {
		Main("test")
	}
	// Tests of real servers wait for them most of the time, whatever the number of processors.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	// Package testenv has a goroutine of its own from the start, which on Linux starts the servers.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/isthmus-mesh/isthmus/internal/testenv.init.func1.1"))
}
