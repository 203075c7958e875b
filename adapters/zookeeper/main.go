package zookeeper

import (
	"github.com/isthmus-mesh/isthmus/internal/dubbo"
	"github.com/isthmus-mesh/isthmus/plugin"
)

// dubboNamespace is the namespace of the keys of Dubbo's interfaces, which sets
// them apart from applications.
const dubboNamespace = "dubbo"

// hostTemplate is the host of a service: Dubbo's interfaces are in the domain
// dubbo whatever registry has them.
const hostTemplate = `{{if index .Meta "interface"}}` + dubbo.Host + `{{else}}{{.Name | lower}}.zookeeper{{end}}`

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	plugin.Main("zookeeper", New, plugin.WithVersion(version), plugin.WithSummary("Follows services of Dubbo, Spring Cloud and Curator in ZooKeeper."), plugin.WithDefaults(DefaultConfig), plugin.WithAccess(Config.access), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
