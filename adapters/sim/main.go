package sim

import "github.com/isthmus-mesh/isthmus/plugin"

// Main runs the adapter as a plugin and does not return. The version is that of
// the program that contains the adapter.
func Main(version string) {
	plugin.Main("sim", New, plugin.WithVersion(version), plugin.WithSummary("Generates a registry that changes, for trials and load tests."), plugin.WithDefaults(Defaults), plugin.WithAccess(Config.access))
}
