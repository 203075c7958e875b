package exec

import "github.com/isthmus-mesh/isthmus/plugin"

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	plugin.Main("exec", New, plugin.WithVersion(version), plugin.WithSummary("Follows what a program prints."), plugin.WithDefaults(DefaultConfig))
}
