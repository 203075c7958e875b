package eureka

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

func TestMain(m *testing.M) {
	plugintest.Self(func() { Main("test") })
	// Package testenv has a goroutine of its own from the start, which on Linux
	// starts the servers.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/isthmus-mesh/isthmus/internal/testenv.startAll"))
}
