package consul

import "github.com/isthmus-mesh/isthmus/plugin"

// hostTemplate gives a service its name in Consul's DNS:
//
//	NAME.service.consul
//	NAME.service.DATACENTER.consul
//	NAME.service.NAMESPACE.ns.PARTITION.ap.DATACENTER.dc.consul
//	NAME.service.PEER.peer.consul
//
// without the parts that the key does not have. Consul Enterprise requires the
// long form if a namespace or partition is named.
const hostTemplate = `{{.Name}}.service` +
	`{{with .Namespace}}.{{.}}.ns{{end}}{{with .Partition}}.{{.}}.ap{{end}}` +
	`{{with .Datacenter}}.{{.}}{{if or $.Namespace $.Partition}}.dc{{end}}{{end}}{{with .Peer}}.{{.}}.peer{{end}}.consul`

// Main runs the adapter as a plugin, as plugin.Main does, and does not return.
// version is the version of the program that contains the adapter.
func Main(version string) {
	plugin.Main("consul", New, plugin.WithVersion(version), plugin.WithSummary("Follows a Consul catalog."), plugin.WithDefaults(DefaultConfig), plugin.WithAccess(Config.access), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
