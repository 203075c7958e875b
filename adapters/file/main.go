package file

import (
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// Main runs the adapter as a plugin and does not return. The version is that of
// the program that contains the adapter.
func Main(version string) {
	plugin.Main("file", New, plugin.WithVersion(version), plugin.WithSummary("Follows a directory of YAML files."), plugin.WithDefaults(Defaults), plugin.WithAccess(Config.access), plugin.WithCollections(slices.Sorted(slices.Values(collection.All()))...))
}
