package translate

import (
	"maps"
	"slices"
)

// Options is the translate block of a registry's configuration. Everything is optional; the zero value gives every service a
// host, its ports and its labels by the rules of the package comment. An adapter may set other defaults, over which the
// configuration is laid by [Options.Over].
//
// A template is a Go text/template over [ServiceData], with the functions lower, upper, dash ("_" becomes "-"), default,
// replace, trimPrefix, trimSuffix, join, split. A key that a map does not hold is an error, which is listed; the service
// is then left out.
type Options struct {
	Host      string `json:"host,omitempty" jsonschema_description:"Template of the service's host. What is no legal host is mended and listed. Default: {{.Name}}.{{.Registry}}, unless the adapter has its own."`
	Namespace string `json:"namespace,omitempty" jsonschema_description:"Template of the namespace of the service's resources. Default: {{.Registry}}."`
	Name      string `json:"name,omitempty" jsonschema_description:"Template of the name of the service's ServiceEntry within its namespace. Default: the non-empty ones of name, group, namespace, partition, datacenter, joined by dashes."`

	Ports        []PortOptions `json:"ports,omitempty" jsonschema_description:"Fixes number or protocol of ports by name, for every service of the registry."`
	FallbackPort int           `json:"fallback_port,omitempty" jsonschema:"minimum=1,maximum=65535" jsonschema_description:"Number of a service port whose instances do not agree on one (dynamic ports). Default: 80."`

	Protocol ProtocolOptions `json:"protocol,omitempty" jsonschema_description:"Where a port's protocol is found."`

	Labels        LabelOptions        `json:"labels,omitempty" jsonschema_description:"What becomes a label of a WorkloadEntry."`
	ServiceLabels ServiceLabelOptions `json:"service_labels,omitempty" jsonschema_description:"What becomes a label of the ServiceEntry resource."`
	Annotations   AnnotationOptions   `json:"annotations,omitempty" jsonschema_description:"Annotations of the ServiceEntry resource."`

	Locality LocalityOptions `json:"locality,omitempty" jsonschema_description:"Where an instance's locality is found."`

	Health     string `json:"health,omitempty" jsonschema:"enum=passing,enum=warning,enum=any" jsonschema_description:"The worst health that still takes traffic. An instance of unknown health counts as passing; a disabled one never takes any. Default: warning."`
	Resolution string `json:"resolution,omitempty" jsonschema:"enum=auto,enum=static,enum=dns" jsonschema_description:"auto: dns if an instance's address is a host name, else static. static leaves instances with host names out. Default: auto."`
	Location   string `json:"location,omitempty" jsonschema:"enum=internal,enum=external" jsonschema_description:"Whether the services count as part of the mesh. Default: internal."`

	ExportTo        []string `json:"export_to,omitempty" jsonschema_description:"Namespaces that see the services: a name, . (its own), * (all) or ~ (none). Default: the mesh's own default."`
	SubjectAltNames []string `json:"subject_alt_names,omitempty" jsonschema_description:"Names of which a server certificate must carry one, if clients use TLS."`
	ServiceAccount  string   `json:"service_account,omitempty" jsonschema_description:"Service account of every instance. Clients then use mutual TLS to it: leave it empty for instances without a sidecar."`
	Network         string   `json:"network,omitempty" jsonschema_description:"Network that the instances are in, where the mesh spans several."`
}

// PortOptions fixes a port's number or protocol.
type PortOptions struct {
	Name     string `json:"name,omitempty" jsonschema_description:"The port's name in the registry, made a DNS label; for a port without one, its name as it is served finds the number. Empty: the port that has no name in the registry."`
	Number   int    `json:"number,omitempty" jsonschema:"minimum=1,maximum=65535" jsonschema_description:"The service port's number. Default: worked out from the instances."`
	Protocol string `json:"protocol,omitempty" jsonschema_description:"The port's protocol. Default: worked out as the protocol block says."`
}

// ProtocolOptions says where a port's protocol is found.
type ProtocolOptions struct {
	Default string   `json:"default,omitempty" jsonschema_description:"Protocol of a port of which the registry says nothing, or something unknown. Default: tcp."`
	Keys    []string `json:"keys,omitempty" jsonschema_description:"Metadata keys that hold the protocol, best first. [none] for none. Default: [protocol]."`
	Tags    []string `json:"tags,omitempty" jsonschema_description:"Tags that say the protocol: one that ends in =, : or | is a prefix before it, any other is a protocol's name. [none] for none. Default: [protocol=, protocol:, http, http2, grpc, grpc-web, https, tcp, tls, mongo, mysql, redis]."`
}

// LabelOptions says what becomes a label of a WorkloadEntry.
type LabelOptions struct {
	Meta    []string          `json:"meta,omitempty" jsonschema_description:"Metadata keys of instances that become labels, as globs (* any run, ? one character). [none] for none. Default: ['*']."`
	Tags    string            `json:"tags,omitempty" jsonschema:"enum=all,enum=pairs,enum=none" jsonschema_description:"Tags of instances that become labels. pairs: those of the form k=v, k:v or k|v. all: bare ones too, with the value true. Default: all."`
	Cluster string            `json:"cluster,omitempty" jsonschema_description:"Label that holds the instance's cluster, where the registry has such. none for no label. Default: cluster."`
	Add     map[string]string `json:"add,omitempty" jsonschema_description:"Labels that every instance gets; they win over what the registry says."`
}

// ServiceLabelOptions says what becomes a label of the ServiceEntry resource.
type ServiceLabelOptions struct {
	Meta []string          `json:"meta,omitempty" jsonschema_description:"Metadata keys of the service that become labels, as globs. A changed label is a full push in the mesh. Default: [none]."`
	Add  map[string]string `json:"add,omitempty" jsonschema_description:"Labels that every ServiceEntry gets; they win over what the registry says."`
}

// AnnotationOptions holds annotations of the ServiceEntry resource.
type AnnotationOptions struct {
	Add map[string]string `json:"add,omitempty" jsonschema_description:"Annotations that every ServiceEntry gets."`
}

// LocalityOptions says where an instance's locality is found, besides the registry's own notion of it.
type LocalityOptions struct {
	Keys       []string `json:"keys,omitempty" jsonschema_description:"Metadata keys of instances that hold a whole locality, region/zone/subzone, best first. They win over the registry's own. Default: none."`
	RegionKey  string   `json:"region_key,omitempty" jsonschema_description:"Metadata key that holds the region. It wins over the registry's own."`
	ZoneKey    string   `json:"zone_key,omitempty" jsonschema_description:"Metadata key that holds the zone. It wins over the registry's own."`
	SubZoneKey string   `json:"sub_zone_key,omitempty" jsonschema_description:"Metadata key that holds the sub-zone. It wins over the registry's own."`
	Region     string   `json:"region,omitempty" jsonschema_description:"Region of an instance of which nothing else says one."`
}

// Over returns o laid over defaults: what o sets is taken from o, the rest from defaults. Lists are taken whole, an empty list that
// is not nil counts as set, and maps are merged key by key. Neither operand is changed or shared with the result.
func (o Options) Over(defaults Options) Options {
	return Options{
		Host:         over(o.Host, defaults.Host),
		Namespace:    over(o.Namespace, defaults.Namespace),
		Name:         over(o.Name, defaults.Name),
		Ports:        overList(o.Ports, defaults.Ports),
		FallbackPort: over(o.FallbackPort, defaults.FallbackPort),
		Protocol: ProtocolOptions{
			Default: over(o.Protocol.Default, defaults.Protocol.Default),
			Keys:    overList(o.Protocol.Keys, defaults.Protocol.Keys),
			Tags:    overList(o.Protocol.Tags, defaults.Protocol.Tags),
		},
		Labels: LabelOptions{
			Meta:    overList(o.Labels.Meta, defaults.Labels.Meta),
			Tags:    over(o.Labels.Tags, defaults.Labels.Tags),
			Cluster: over(o.Labels.Cluster, defaults.Labels.Cluster),
			Add:     overMap(o.Labels.Add, defaults.Labels.Add),
		},
		ServiceLabels: ServiceLabelOptions{
			Meta: overList(o.ServiceLabels.Meta, defaults.ServiceLabels.Meta),
			Add:  overMap(o.ServiceLabels.Add, defaults.ServiceLabels.Add),
		},
		Annotations: AnnotationOptions{Add: overMap(o.Annotations.Add, defaults.Annotations.Add)},
		Locality: LocalityOptions{
			Keys:       overList(o.Locality.Keys, defaults.Locality.Keys),
			RegionKey:  over(o.Locality.RegionKey, defaults.Locality.RegionKey),
			ZoneKey:    over(o.Locality.ZoneKey, defaults.Locality.ZoneKey),
			SubZoneKey: over(o.Locality.SubZoneKey, defaults.Locality.SubZoneKey),
			Region:     over(o.Locality.Region, defaults.Locality.Region),
		},
		Health:          over(o.Health, defaults.Health),
		Resolution:      over(o.Resolution, defaults.Resolution),
		Location:        over(o.Location, defaults.Location),
		ExportTo:        overList(o.ExportTo, defaults.ExportTo),
		SubjectAltNames: overList(o.SubjectAltNames, defaults.SubjectAltNames),
		ServiceAccount:  over(o.ServiceAccount, defaults.ServiceAccount),
		Network:         over(o.Network, defaults.Network),
	}
}

func over[T comparable](v, fallback T) T {
	var zero T
	if v == zero {
		return fallback
	}
	return v
}

func overList[T any](v, fallback []T) []T {
	if v == nil {
		v = fallback
	}
	return slices.Clone(v)
}

func overMap(v, fallback map[string]string) map[string]string {
	merged := maps.Clone(fallback)
	if merged == nil {
		return maps.Clone(v)
	}
	maps.Copy(merged, v)
	return merged
}

// defaults is what holds where neither the configuration nor the adapter says anything.
var defaults = Options{
	Host:         "{{.Name}}.{{.Registry}}",
	Namespace:    "{{.Registry}}",
	FallbackPort: 80,
	Protocol: ProtocolOptions{
		Default: "tcp",
		Keys:    []string{"protocol"},
		Tags:    []string{"protocol=", "protocol:", "http", "http2", "grpc", "grpc-web", "https", "tcp", "tls", "mongo", "mysql", "redis"},
	},
	Labels:        LabelOptions{Meta: []string{"*"}, Tags: "all", Cluster: "cluster"},
	ServiceLabels: ServiceLabelOptions{Meta: []string{"none"}},
	Health:        "warning",
	Resolution:    "auto",
	Location:      "internal",
}
