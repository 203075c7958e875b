package static

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

func TestMain(m *testing.M) {
	plugintest.Self(func() { Main("test") })
	goleak.VerifyTestMain(m)
}
