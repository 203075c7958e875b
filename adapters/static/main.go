package static

import "github.com/isthmus-mesh/isthmus/plugin"

// hostTemplate is the host of a service: its name.
const hostTemplate = `{{.Name}}`

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	plugin.Main("static", New, plugin.WithVersion(version), plugin.WithSummary("Serves services that are written in the configuration."), plugin.WithDefaults(Config{}), plugin.WithAccess(Config.access), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
