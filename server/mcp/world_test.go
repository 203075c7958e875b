package mcp

import (
	"testing"

	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// created is the create_time of resources, in seconds.
const created = 7

func newWorld(t testing.TB, o state.Options) *servertest.World {
	w := servertest.New(t, o)
	w.Created = created
	return w
}
