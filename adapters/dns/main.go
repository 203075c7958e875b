package dns

import "github.com/isthmus-mesh/isthmus/plugin"

// hostTemplate is the host of a service: the name that was asked for.
const hostTemplate = `{{.Name}}`

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	plugin.Main("dns", New, plugin.WithVersion(version), plugin.WithSummary("Follows names in the DNS: A, AAAA and SRV records."), plugin.WithDefaults(DefaultConfig), plugin.WithAccess(Config.access), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
