package sim

import "github.com/isthmus-mesh/isthmus/plugin"

// Main runs the adapter as a plugin. It does not return.
func Main() {
	plugin.Main("sim", New, plugin.WithDefaults(Defaults))
}
