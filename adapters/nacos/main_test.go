package nacos

import (
	"flag"
	"testing"

	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

func TestMain(m *testing.M) {
	plugintest.Self(func() { Main("test") })
	// Tests of real servers wait for them most of the time, whatever the number
	// of processors.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	// Package testenv has a goroutine of its own from the start, which on Linux
	// starts the servers.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/isthmus-mesh/isthmus/internal/testenv.startAll"))
}
