package file

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Main runs the adapter as a plugin. It does not return. The version is that of the program which the adapter is part of.
func Main(version string) {
	plugin.Main("file", New, plugin.WithVersion(version), plugin.WithDefaults(Defaults), plugin.WithCollections(slices.Sorted(slices.Values(collection.All()))...))
}
