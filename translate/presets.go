package translate

import "strings"

// presets are the conventions of other bridges, made legal for community Istio,
// as functions of the adapter. docs/migrate has a page for each, with its
// limits.
var presets = map[string]func(adapter string) Options{
	"consul": func(string) Options {
		return Options{Host: `{{.Name}}.service{{with .Namespace}}.{{.}}.ns{{end}}{{with .Partition}}.{{.}}.ap{{end}}{{with .Datacenter}}.{{.}}{{if or $.Namespace $.Partition}}.dc{{end}}{{end}}{{with .Peer}}.{{.}}.peer{{end}}.consul`}
	},
	"nacos": func(string) Options {
		return Options{Host: `{{.Name}}.{{.Group | dash}}.{{.Namespace}}.nacos`}
	},
	"istio-consul":  istioConsul,
	"aeraki-consul": aerakiConsul,
	"higress":       higress,
	"slime":         slime,
	"slime-gateway": slimeGateway,
	"nacos-istio":   nacosIstio,
	"aeraki-dubbo":  aerakiDubbo,
	"registry-sync": registrySync,
}

// dubboInterface is the interface of a Dubbo service of the adapter zookeeper,
// whose name has the version behind it.
const dubboInterface = `{{index (split ":" .Name) 0}}`

// istioConsul is the Consul registry of Istio 1.0 to 1.7, and consul-mcp.
func istioConsul(string) Options {
	return Options{
		Host: "{{.Name}}.service.consul", HostCase: "keep", Namespace: "default",
		PortPolicy: "instance", PortName: "{{.Protocol}}",
		Protocol: ProtocolOptions{Tags: []string{"none"}},
		Labels:   LabelOptions{Meta: []string{"none"}, Tags: "pairs", Separators: "|", Cluster: "none"},
		Relabel:  RelabelOptions{Instances: []RelabelRule{{Source: []string{"__datacenter"}, Regex: new("(.+)"), Target: "__region"}}},
		Weights:  "none",
	}
}

// aerakiConsul is consul2istio.
func aerakiConsul(string) Options {
	return Options{
		Host: "{{.Name}}", HostCase: "keep", Namespace: "istio-system",
		PortPolicy: "instance", PortName: "{{.Protocol}}-{{.Number}}",
		Protocol:      ProtocolOptions{Tags: []string{"none"}},
		Labels:        LabelOptions{Meta: []string{"none"}, Tags: "pairs", Separators: "|", Cluster: "none"},
		ServiceLabels: ServiceLabelOptions{Add: map[string]string{"manager": "Aeraki", "registry": "consul"}},
		Weights:       "none",
	}
}

// higress is the registry part of Higress (McpBridge).
func higress(adapter string) Options {
	o := Options{
		HostCase: "keep", Namespace: "mcp", PortName: "{{.Protocol}}",
		Protocol: ProtocolOptions{Default: "http", Tags: []string{"none"}},
		Labels:   LabelOptions{Tags: "none", Cluster: "none"},
		Weights:  "none",
	}
	switch adapter {
	case "consul":
		o.Host = `{{.Name | dash}}.{{.Datacenter | default "dc1" | dash}}.consul`
	case "eureka":
		o.Host = "{{.Name | dash}}.eureka"
	case "zookeeper":
		// Higress joins the parts by colons, which are illegal in a host.
		o.Host = `{{if or .Group (eq .Namespace "dubbo")}}providers-` + dubboInterface + `{{with index .Meta "version"}}-{{.}}{{end}}{{with .Group}}-{{.}}{{end}}.zookeeper{{else}}{{.Name | dash}}.services.zookeeper{{end}}`
	case "file", "static":
		o.Host = "{{.Name | dash}}.static"
	default:
		o.Host = "{{.Name}}.{{.Group | dash}}.{{.Namespace | dash}}.nacos"
	}
	o.Name = o.Host
	return o
}

// slime is slime's meshregistry for sidecars.
func slime(adapter string) Options {
	o := Options{
		PortPolicy: "instance", PortName: "{{.Protocol}}-{{.Number}}",
		ExtraPorts:    []ExtraPort{{Name: "http-80", Number: 80, Protocol: "http"}},
		Protocol:      ProtocolOptions{Default: "http", Keys: []string{"none"}, Tags: []string{"none"}},
		Labels:        LabelOptions{Tags: "none", Cluster: "none"},
		ServiceLabels: ServiceLabelOptions{Add: map[string]string{"registry": registryOf(adapter)}},
		Weights:       "none",
	}
	if adapter == "zookeeper" {
		return dubboOfSlime(o, "")
	}
	ns := `{{.InstanceMeta "k8sNs" | default "` + registryOf(adapter) + `"}}`
	o.Host, o.Namespace, o.Name = "{{.Name | lower | dash}}."+ns+".svc.cluster.local", ns, "{{.Name | lower | dash}}."+ns
	return o
}

// slimeGateway is slime's meshregistry for gateways.
func slimeGateway(adapter string) Options {
	o := slime(adapter)
	if adapter == "zookeeper" {
		return dubboOfSlime(o, ".dubbo")
	}
	o.PortPolicy, o.FallbackPort, o.PortName, o.ExtraPorts = "fixed", 80, "http-80", nil
	o.Host = "{{.Name | lower | dash}}." + registryOf(adapter)
	o.Name, o.Namespace = o.Host, registryOf(adapter)
	return o
}

// dubboOfSlime replaces slime's colons, illegal in a host, by dashes.
func dubboOfSlime(o Options, suffix string) Options {
	o.Host = dubboInterface + `{{with .Group}}-{{.}}{{end}}{{with index .Meta "version"}}-{{replace "." "-" .}}{{end}}` + suffix
	o.Name, o.Namespace = o.Host, "dubbo"
	o.Protocol.Default, o.PortName, o.PortPolicy, o.ExtraPorts = "tcp", "dubbo-{{.Number}}", "instance", nil
	o.ServiceLabels.Add = map[string]string{"registry": "zookeeper"}
	return o
}

// registryOf is the name of the registry in slime's hosts and labels.
func registryOf(adapter string) string {
	if adapter == "eureka" || adapter == "zookeeper" {
		return adapter
	}
	return "nacos"
}

// nacosIstio is the module istio of Nacos 2.
func nacosIstio(string) Options {
	const name = `{{.Name}}.{{if eq .Group "DEFAULT_GROUP"}}DEFAULT-GROUP{{else}}{{.Group}}{{end}}.{{.Namespace}}`
	return Options{
		Host: `{{with .InstanceMeta "istio.hostname"}}{{.}}{{else}}` + name + `{{end}}.nacos`, HostCase: "keep", Namespace: "{{.Namespace}}", Name: name,
		PortName:      "{{.Protocol}}",
		Protocol:      ProtocolOptions{Default: "http", Tags: []string{"none"}},
		Labels:        LabelOptions{Tags: "none", Illegal: "drop"},
		ServiceLabels: ServiceLabelOptions{Add: map[string]string{"registryType": "nacos"}},
		Annotations:   AnnotationOptions{Add: map[string]string{"virtual": "1"}},
		Weights:       "whole",
	}
}

// aerakiDubbo is dubbo2istio. In Nacos a Dubbo service is named
// providers:INTERFACE:VERSION:GROUP; other services are not Dubbo's.
func aerakiDubbo(adapter string) Options {
	o := Options{
		Namespace: `{{.InstanceMeta "aeraki_meta_app_namespace" | default "dubbo"}}`,
		PortName:  "tcp-metaprotocol-dubbo",
		Protocol:  ProtocolOptions{Default: "tcp", Keys: []string{"none"}, Tags: []string{"none"}},
		Labels:    LabelOptions{Tags: "none", Illegal: "drop", Cluster: "none"},
		Locality:  LocalityOptions{Keys: []string{"aeraki_meta_locality"}},
		ServiceLabels: ServiceLabelOptions{
			Add: map[string]string{"manager": "aeraki", "registry": "dubbo2istio"},
		},
		Weights: "none", ServiceAccount: "default", ServiceAccountKey: "aeraki_meta_app_service_account",
	}
	version := RelabelRule{Source: []string{"__meta_aeraki_meta_app_version"}, Regex: new("(.+)"), Target: "version"}
	drop := RelabelRule{Regex: new("service|ip|port|aeraki_meta_app_service_account|aeraki_meta_app_namespace|aeraki_meta_workload_selector|aeraki_meta_locality|aeraki_meta_app_version"), Action: "labeldrop"}
	o.Relabel.Instances = []RelabelRule{version, drop}
	if adapter != "nacos" && adapter != "" {
		o.Host = dubboInterface + `{{with .Group}}-{{.}}{{end}}{{with .InstanceMeta "version"}}-{{replace "." "-" .}}{{end}}`
		o.Name = `aeraki-{{replace "." "-" (index (split ":" .Name) 0)}}{{with .Group}}-{{.}}{{end}}{{with .InstanceMeta "version"}}-{{replace "." "-" .}}{{end}}`
		o.Relabel.Services = []RelabelRule{{Source: []string{"__name"}, Regex: new("([^:]+).*"), Target: "annotation.interface"}}
		return o
	}
	const groups = `{{if ne .Group "DEFAULT_GROUP"}}SEP{{.Group}}{{end}}{{if and .Namespace (ne .Namespace "public")}}SEP{{.Namespace}}{{end}}`
	const rest = `{{with index $p 3}}-{{.}}{{end}}{{with index $p 2}}-{{replace "." "-" .}}{{end}}`
	// The rules below exclude services that are not Dubbo's, after the
	// templates.
	const begin, otherwise = `{{$p := split ":" .Name}}{{if eq (len $p) 4}}`, `{{else}}{{.Name}}{{end}}`
	o.Host = begin + `{{index $p 1}}` + rest + strings.ReplaceAll(groups, "SEP", ".") + otherwise
	o.Name = begin + `aeraki-{{index $p 1 | replace "." "-"}}` + rest + strings.ReplaceAll(groups, "SEP", "-") + otherwise
	o.Relabel.Services = []RelabelRule{
		{Source: []string{"__name"}, Regex: new("providers:[^:]+:[^:]*:[^:]*"), Action: "keep"},
		{Source: []string{"__name"}, Regex: new("[^:]*:([^:]+):.*"), Target: "annotation.interface"},
	}
	return o
}

// registrySync is istio-registry-sync: services outside the mesh.
func registrySync(string) Options {
	return Options{
		Host: "{{.Name}}", Location: "external",
		PortPolicy: "instance", PortName: "{{.Protocol}}",
		Protocol: ProtocolOptions{Guess: []string{"number"}},
		Labels:   LabelOptions{Meta: []string{"none"}, Tags: "none", Cluster: "none"},
		Weights:  "none",
	}
}
