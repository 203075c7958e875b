package nacos

import (
	"github.com/isthmus-mesh/isthmus/internal/dubbo"
	"github.com/isthmus-mesh/isthmus/plugin"
)

// hostTemplate is the host that other Nacos bridges give a service:
// NAME.GROUP.NAMESPACE.nacos, with a dash for the underscore that most groups
// contain, such as DEFAULT_GROUP. translate replaces and reports any other
// illegal character. With dubbo, an interface has the host that it has from
// ZooKeeper.
const hostTemplate = `{{if index .Meta "interface"}}` + dubbo.Host + `{{else}}{{.Name}}.{{.Group | dash}}.{{.Namespace}}.nacos{{end}}`

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	plugin.Main("nacos", New, plugin.WithVersion(version), plugin.WithSummary("Follows one or several namespaces of a Nacos."), plugin.WithDefaults(DefaultConfig), plugin.WithAccess(Config.access), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
