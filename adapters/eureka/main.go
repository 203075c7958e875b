package eureka

import "github.com/isthmus-mesh/isthmus/plugin"

// hostTemplate is the host of a service: the name by which Eureka clients call
// it, in the domain eureka.
const hostTemplate = `{{.Name | lower}}.eureka`

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	plugin.Main("eureka", New, plugin.WithVersion(version), plugin.WithSummary("Follows a Eureka registry."), plugin.WithDefaults(DefaultConfig), plugin.WithAccess(Config.access), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
