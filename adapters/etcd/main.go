package etcd

import "github.com/isthmus-mesh/isthmus/plugin"

// hostTemplate is the host of a service. etcd has no names of its own that
// callers use.
const hostTemplate = `{{.Name | lower}}.etcd`

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	plugin.Main("etcd", New, plugin.WithVersion(version), plugin.WithSummary("Follows services that are registered in etcd."), plugin.WithDefaults(DefaultConfig), plugin.WithAccess(Config.access), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
