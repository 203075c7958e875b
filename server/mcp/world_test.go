package mcp

import (
	"testing"

	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
)

func newWorld(t testing.TB, o state.Options) *servertest.World {
	w := servertest.New(t, o)
	w.Created = 7
	return w
}
