package consul

import "github.com/isthmus-mesh/isthmus/plugin"

// hostTemplate gives a service the name that Consul's own DNS answers to:
//
//	NAME.service.consul
//	NAME.service.DATACENTER.consul
//	NAME.service.NAMESPACE.ns.PARTITION.ap.DATACENTER.dc.consul
//
// where what the key does not have is left out. The long form, with a word after each part, is what Consul Enterprise asks for
// once a namespace or partition is named.
const hostTemplate = `{{.Name}}.service` +
	`{{with .Namespace}}.{{.}}.ns{{end}}{{with .Partition}}.{{.}}.ap{{end}}` +
	`{{with .Datacenter}}.{{.}}{{if or $.Namespace $.Partition}}.dc{{end}}{{end}}.consul`

// Main runs the adapter as a plugin, as plugin.Main does. It does not return. The version is that of the program which the adapter is part of.
func Main(version string) {
	plugin.Main("consul", New, plugin.WithVersion(version), plugin.WithDefaults(DefaultConfig), plugin.WithTranslate(plugin.Translate{Host: hostTemplate}))
}
