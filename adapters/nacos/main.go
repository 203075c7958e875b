package nacos

import "github.com/isthmus-mesh/isthmus/plugin"

// hostTemplate is the host that bridges of Nacos give a service: NAME.GROUP.NAMESPACE.nacos, with the underscore of groups such as
// DEFAULT_GROUP, which is in nearly every one, made a dash. Anything else that is illegal in a host is mended and listed by translate.
const hostTemplate = `{{.Name}}.{{.Group | dash}}.{{.Namespace}}.nacos`

// Main runs the adapter as a plugin, as plugin.Main does. It does not return. The version is that of the program which the adapter is part of.
func Main(version string) {
	plugin.Main("nacos", New, plugin.WithVersion(version), plugin.WithDefaults(DefaultConfig), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
