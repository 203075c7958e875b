package file

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Main runs the adapter as a plugin. It does not return.
func Main() {
	plugin.Main("file", New, plugin.WithDefaults(Defaults), plugin.WithCollections(slices.Sorted(slices.Values(collection.All()))...))
}
