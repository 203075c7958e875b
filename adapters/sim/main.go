package sim

import "github.com/isthmus-mesh/isthmus/plugin"

// Main runs the adapter as a plugin. It does not return. The version is that of the program which the adapter is part of.
func Main(version string) {
	plugin.Main("sim", New, plugin.WithVersion(version), plugin.WithDefaults(Defaults))
}
