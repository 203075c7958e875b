package translate

import (
	"maps"
	"slices"
)

// Options is the translate block of a registry's configuration. All fields are
// optional; with the zero value the rules of the package comment apply. An
// adapter may set other defaults, which [Options.Over] combines with the
// configuration.
//
// A template is a Go text/template over [ServiceData], with the functions
// lower, upper, dash ("_" becomes "-"), default, replace, trimPrefix,
// trimSuffix, join, split. A missing map key is an error: the service is not
// served and is listed as a problem.
type Options struct {
	// Adapter is the type of the registry, used by presets. It is set by the
	// plugin, not configured.
	Adapter string `json:"-"`
	// Permit are patterns of the labels with a meaning to Istio that the
	// registry may set: owns.labels, which the bridge sends.
	Permit []string `json:"-"`

	Preset string `json:"preset,omitempty" jsonschema:"enum=consul,enum=nacos,enum=istio-consul,enum=aeraki-consul,enum=higress,enum=slime,enum=slime-gateway,enum=nacos-istio,enum=aeraki-dubbo,enum=registry-sync" jsonschema_description:"The conventions of another bridge, for all fields that are not set; see docs/migrate. Default: consul or nacos, with these adapters."`

	Host      string `json:"host,omitempty" jsonschema_description:"Template of the service's host. A host that is not valid is made valid and listed. Default: {{.Name}}.{{.Registry}}, unless the adapter has its own."`
	HostCase  string `json:"host_case,omitempty" jsonschema:"enum=lower,enum=keep" jsonschema_description:"The case of the letters of hosts. lower: lower case, as usual in DNS. keep: that of the template, for a mesh whose policies use it: a DestinationRule or the destination of a VirtualService applies only to a host in the same case. Default: lower; keep with the presets whose bridge keeps them."`
	Namespace string `json:"namespace,omitempty" jsonschema_description:"Template of the namespace of the service's resources. Default: {{.Registry}}."`
	Name      string `json:"name,omitempty" jsonschema_description:"Template of the name of the service's ServiceEntry within its namespace. Default: the non-empty ones of name, group, namespace, partition, datacenter and PEER-peer, joined by dashes."`

	Aliases []string `json:"aliases,omitempty" jsonschema_description:"Templates of further hosts of the service. Istio supports several hosts only on ports of HTTP or TLS: with others the aliases are left out and listed. An empty alias is ignored."`

	Ports        []PortOptions `json:"ports,omitempty" jsonschema_description:"Fixes number or protocol of ports by name, for every service of the registry."`
	FallbackPort int           `json:"fallback_port,omitempty" jsonschema:"minimum=1,maximum=65535" jsonschema_description:"Number of a service port whose instances do not agree on one (dynamic ports). Default: 80."`
	PortPolicy   string        `json:"port_policy,omitempty" jsonschema:"enum=auto,enum=instance,enum=fixed" jsonschema_description:"How the number of a service port is chosen. auto: that of more than half of the instances, else fallback_port. fixed: fallback_port, whatever the instances have. instance: each number that an instance has is a service port, and leads to the one port of every instance; a change of these numbers is a full push in the mesh. Numbers that ports fixes, or that the registry states for the service, win in any case. Default: auto."`
	PortName     string        `json:"port_name,omitempty" jsonschema_description:"Template of a service port's name, over .Name (in the registry), .Number and .Protocol (lower case). Default: the name in the registry, of a port without one the protocol."`
	ExtraPorts   []ExtraPort   `json:"extra_ports,omitempty" jsonschema_description:"Further ports of every service, each of which leads to a port of the instances."`

	Protocol ProtocolOptions `json:"protocol,omitempty" jsonschema_description:"Where a port's protocol is found."`

	Labels        LabelOptions        `json:"labels,omitempty" jsonschema_description:"What becomes a label of a WorkloadEntry."`
	ServiceLabels ServiceLabelOptions `json:"service_labels,omitempty" jsonschema_description:"What becomes a label of the ServiceEntry resource."`
	Annotations   AnnotationOptions   `json:"annotations,omitempty" jsonschema_description:"Annotations of the ServiceEntry resource."`

	Locality LocalityOptions `json:"locality,omitempty" jsonschema_description:"Where an instance's locality is found."`

	Instances InstanceOptions `json:"instances,omitempty" jsonschema_description:"Which instances are served. The others are ignored, also for the service's ports."`
	Relabel   RelabelOptions  `json:"relabel,omitempty" jsonschema_description:"Rules as in Prometheus (relabel_config), for what templates and lists cannot express."`
	Subsets   SubsetOptions   `json:"subsets,omitempty" jsonschema_description:"A DestinationRule for each service, with a subset for each version."`

	Weights string `json:"weights,omitempty" jsonschema:"enum=exact,enum=whole,enum=none" jsonschema_description:"exact: as in the registry, all multiplied by 100 if one is not a whole number. whole: without the fraction, but at least 1. none: every instance gets the same share. An instance of weight 0 gets no traffic in any case. Default: exact."`

	Health     string `json:"health,omitempty" jsonschema:"enum=passing,enum=warning,enum=any" jsonschema_description:"The worst health that still gets traffic. An instance of unknown health counts as passing; a disabled one never gets any. Default: warning."`
	Resolution string `json:"resolution,omitempty" jsonschema:"enum=auto,enum=static,enum=dns" jsonschema_description:"auto: dns if an instance's address is a host name, else static. static leaves out instances with host names. Default: auto."`
	Location   string `json:"location,omitempty" jsonschema:"enum=internal,enum=external" jsonschema_description:"Whether the services count as part of the mesh. Default: internal."`

	ExportTo        []string `json:"export_to,omitempty" jsonschema_description:"Namespaces that see the services: a name, . (its own), * (all) or ~ (none). Default: the mesh's own default."`
	SubjectAltNames []string `json:"subject_alt_names,omitempty" jsonschema_description:"Names, one of which a server certificate must carry if clients use TLS, in addition to those that the registry states for a service."`
	ServiceAccount  string   `json:"service_account,omitempty" jsonschema_description:"Service account of every instance. Clients then use mutual TLS to it: leave it empty for instances without a sidecar. none removes that of the preset."`
	// ServiceAccountKey is looked up per instance.
	ServiceAccountKey string `json:"service_account_key,omitempty" jsonschema_description:"Metadata key of instances that holds the service account. It wins over service_account. none removes that of the preset."`
	Network           string `json:"network,omitempty" jsonschema_description:"Network of the instances, if the mesh spans several."`
	ClusterID         string `json:"cluster_id,omitempty" jsonschema_description:"ID of the mesh's cluster to which the instances belong, as their label topology.istio.io/cluster."`
	Revision          string `json:"revision,omitempty" jsonschema_description:"Revision of istiod that the resources are for, as their label istio.io/rev. An istiod of another revision ignores them."`
}

// ExtraPort is an additional port of every service.
type ExtraPort struct {
	Name     string `json:"name" jsonschema:"required" jsonschema_description:"The port's name, a DNS label."`
	Number   int    `json:"number" jsonschema:"required,minimum=1,maximum=65535" jsonschema_description:"The service port's number. If the service already has a port of this number, the further one is left out."`
	Protocol string `json:"protocol,omitempty" jsonschema_description:"The port's protocol. Default: that of the port that it leads to."`
	To       string `json:"to,omitempty" jsonschema_description:"Name in the registry of the instances' port that it leads to. Empty: the first one by name."`
}

// InstanceOptions selects the instances that are served.
type InstanceOptions struct {
	Selector     string   `json:"selector,omitempty" jsonschema_description:"Selector over the metadata of instances in the syntax of Kubernetes: version in (v1,v2),!canary,team=blue."`
	CIDRs        []string `json:"cidrs,omitempty" jsonschema_description:"Networks; one of them has to contain the instance's address."`
	ExcludeCIDRs []string `json:"exclude_cidrs,omitempty" jsonschema_description:"Networks that must not contain the instance's address; they win over cidrs."`
}

// RelabelOptions holds relabeling rules in the syntax of Prometheus.
type RelabelOptions struct {
	Services  []RelabelRule `json:"services,omitempty" jsonschema_description:"Rules over a service. Targets: host, namespace, name; annotation.KEY of the ServiceEntry; any other is a label of the ServiceEntry. Sources: these, and __name, __group, __namespace, __partition, __datacenter, __peer, __registry, __tags (,a,b,), __meta_KEY; __instance_meta_KEY is the value of most instances."`
	Instances []RelabelRule `json:"instances,omitempty" jsonschema_description:"Rules over an instance. Targets: labels of the WorkloadEntry, and __region, __zone, __sub_zone, __network. Sources: these, those of the service that begin with __, and __id, __address, __port, __node, __cluster, __health; __meta_KEY and __tags are the instance's own. The labels of the labels block are there at the start."`
}

// RelabelRule is one rule, as in Prometheus' relabel_config. Names that begin
// with __ do not become labels.
type RelabelRule struct {
	Source      []string `json:"source,omitempty" jsonschema_description:"Names of values, which are joined by the separator."`
	Separator   *string  `json:"separator,omitempty" jsonschema_description:"Default: ;."`
	Regex       *string  `json:"regex,omitempty" jsonschema_description:"Regular expression (RE2) that the whole joined value is matched with. Default: (.*)."`
	Target      string   `json:"target,omitempty" jsonschema_description:"Name of the value that is set, or compared (keepequal, dropequal)."`
	Replacement *string  `json:"replacement,omitempty" jsonschema_description:"The new value; $1 is the first group of regex. An empty result removes the target. Default: $1."`
	Action      string   `json:"action,omitempty" jsonschema:"enum=replace,enum=keep,enum=drop,enum=keepequal,enum=dropequal,enum=lowercase,enum=uppercase,enum=labelmap,enum=labeldrop,enum=labelkeep" jsonschema_description:"replace: set target if regex matches. keep, drop: leave out what does not match, or what does. keepequal, dropequal: the same by comparing with target. lowercase, uppercase: set target. labelmap: copy each name that matches to the name that replacement gives. labeldrop, labelkeep: remove labels by name. Default: replace."`
}

// SubsetOptions groups a service's instances.
type SubsetOptions struct {
	Key             string `json:"key,omitempty" jsonschema_description:"Label of instances by which a service's instances are grouped, such as version. Each value is the name of a subset, made valid if it is not a DNS label."`
	DestinationRule bool   `json:"destination_rule,omitempty" jsonschema_description:"Whether a DestinationRule with the subsets is made for each service; it has the name and namespace of its ServiceEntry."`
}

// PortOptions fixes a port's number or protocol.
type PortOptions struct {
	Name     string `json:"name,omitempty" jsonschema_description:"The port's name in the registry, made a DNS label; for a port without one, the name under which it is served. Empty: the port that has no name in the registry."`
	Number   int    `json:"number,omitempty" jsonschema:"minimum=1,maximum=65535" jsonschema_description:"The service port's number. Default: worked out from the instances."`
	Protocol string `json:"protocol,omitempty" jsonschema_description:"The port's protocol. Default: worked out as the protocol block says."`
}

// ProtocolOptions configures the sources of a port's protocol.
type ProtocolOptions struct {
	Default string   `json:"default,omitempty" jsonschema_description:"Protocol of a port for which the registry states none, or an unknown one. Default: tcp."`
	Keys    []string `json:"keys,omitempty" jsonschema_description:"Metadata keys with the protocol, best first. [none] for none. Default: [protocol]."`
	Tags    []string `json:"tags,omitempty" jsonschema_description:"Tags with the protocol: one that ends in =, : or | is a prefix, any other is the name of a protocol. [none] for none. Default: [protocol=, protocol:, http, http2, grpc, grpc-web, https, tcp, tls, mongo, mysql, redis]."`
	Guess   []string `json:"guess,omitempty" jsonschema_description:"What a protocol is guessed from if none is stated, best first. check: the registry's checks (http, grpc). name: the service's name, if it begins or ends with a protocol (orders-grpc). number: the instances' port, if it is one that is registered for a protocol. A guess is listed with its source. Default: [none]."`
}

// LabelOptions configures the labels of a WorkloadEntry.
type LabelOptions struct {
	Meta []string `json:"meta,omitempty" jsonschema_description:"Metadata keys of instances that become labels, as globs (* any run, ? one character). [none] for none. Those with a meaning to Istio need owns.labels. Default: ['*']."`
	Tags string   `json:"tags,omitempty" jsonschema:"enum=all,enum=pairs,enum=none" jsonschema_description:"Tags of instances that become labels. pairs: those of the form k=v, k:v or k|v. all: bare ones too, with the value true. Default: all."`
	// Illegal applies to labels from the registry.
	Illegal string `json:"illegal,omitempty" jsonschema:"enum=mend,enum=drop" jsonschema_description:"What to do with a key or a value that is not valid in a label. mend: it is made valid. drop: the label is left out. Both are listed. Default: mend."`
	// Separators are single characters.
	Separators string            `json:"separators,omitempty" jsonschema_description:"Characters of which the first one in a tag separates the key from the value. Default: =:|."`
	Cluster    string            `json:"cluster,omitempty" jsonschema_description:"Label with the instance's cluster, if the registry has clusters. none for no label. Default: cluster."`
	Add        map[string]string `json:"add,omitempty" jsonschema_description:"Labels that every instance gets; they win over those of the registry. An empty value removes one that the preset adds."`
}

// ServiceLabelOptions configures the labels of the ServiceEntry resource.
type ServiceLabelOptions struct {
	Meta []string          `json:"meta,omitempty" jsonschema_description:"Metadata keys of the service that become labels, as globs. A changed label is a full push in the mesh. Default: [none]."`
	Add  map[string]string `json:"add,omitempty" jsonschema_description:"Labels that every ServiceEntry gets; they win over those of the registry. An empty value removes one that the preset adds."`
}

// AnnotationOptions holds annotations of the ServiceEntry resource.
type AnnotationOptions struct {
	Add map[string]string `json:"add,omitempty" jsonschema_description:"Annotations that every ServiceEntry gets."`
}

// LocalityOptions configures sources of an instance's locality besides the
// registry's own.
type LocalityOptions struct {
	Keys       []string `json:"keys,omitempty" jsonschema_description:"Metadata keys of instances with a whole locality, region/zone/subzone, best first. They win over the registry's own. Default: none."`
	RegionKey  string   `json:"region_key,omitempty" jsonschema_description:"Metadata key with the region. It wins over the registry's own."`
	ZoneKey    string   `json:"zone_key,omitempty" jsonschema_description:"Metadata key with the zone. It wins over the registry's own."`
	SubZoneKey string   `json:"sub_zone_key,omitempty" jsonschema_description:"Metadata key with the sub-zone. It wins over the registry's own."`
	Region     string   `json:"region,omitempty" jsonschema_description:"Region of an instance if nothing else states one."`

	CIDRs []LocalityCIDR `json:"cidrs,omitempty" jsonschema_description:"Localities by network; the narrowest that contains the instance's address counts. They win over the registry's own, and metadata wins over them."`
}

// LocalityCIDR is the locality of a network.
type LocalityCIDR struct {
	CIDR     string `json:"cidr" jsonschema:"required" jsonschema_description:"Network, such as 10.1.0.0/16."`
	Locality string `json:"locality" jsonschema:"required" jsonschema_description:"region, region/zone or region/zone/subzone."`
}

// Over returns o merged over its preset, and that over defaults: the first that
// sets a field wins. Lists are replaced as a whole, a non-nil empty list counts
// as set, and maps are merged by key. The operands are neither modified nor
// shared with the result.
func (o Options) Over(defaults Options) Options {
	o.Adapter, o.Preset = over(o.Adapter, defaults.Adapter), over(o.Preset, defaults.Preset)
	if preset, ok := presets[o.Preset]; ok {
		o = o.over(preset(o.Adapter))
	}
	return o.over(defaults)
}

func (o Options) over(defaults Options) Options {
	return Options{
		Adapter:      over(o.Adapter, defaults.Adapter),
		Permit:       overList(o.Permit, defaults.Permit),
		Preset:       over(o.Preset, defaults.Preset),
		Host:         over(o.Host, defaults.Host),
		HostCase:     over(o.HostCase, defaults.HostCase),
		Namespace:    over(o.Namespace, defaults.Namespace),
		Name:         over(o.Name, defaults.Name),
		Aliases:      overList(o.Aliases, defaults.Aliases),
		Ports:        overList(o.Ports, defaults.Ports),
		FallbackPort: over(o.FallbackPort, defaults.FallbackPort),
		PortPolicy:   over(o.PortPolicy, defaults.PortPolicy),
		PortName:     over(o.PortName, defaults.PortName),
		ExtraPorts:   overList(o.ExtraPorts, defaults.ExtraPorts),
		Protocol: ProtocolOptions{
			Default: over(o.Protocol.Default, defaults.Protocol.Default),
			Keys:    overList(o.Protocol.Keys, defaults.Protocol.Keys),
			Tags:    overList(o.Protocol.Tags, defaults.Protocol.Tags),
			Guess:   overList(o.Protocol.Guess, defaults.Protocol.Guess),
		},
		Labels: LabelOptions{
			Meta: overList(o.Labels.Meta, defaults.Labels.Meta),
			Tags: over(o.Labels.Tags, defaults.Labels.Tags),

			Illegal:    over(o.Labels.Illegal, defaults.Labels.Illegal),
			Separators: over(o.Labels.Separators, defaults.Labels.Separators),

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
			CIDRs:      overList(o.Locality.CIDRs, defaults.Locality.CIDRs),
		},
		Instances: InstanceOptions{
			Selector:     over(o.Instances.Selector, defaults.Instances.Selector),
			CIDRs:        overList(o.Instances.CIDRs, defaults.Instances.CIDRs),
			ExcludeCIDRs: overList(o.Instances.ExcludeCIDRs, defaults.Instances.ExcludeCIDRs),
		},
		Relabel: RelabelOptions{
			Services:  overList(o.Relabel.Services, defaults.Relabel.Services),
			Instances: overList(o.Relabel.Instances, defaults.Relabel.Instances),
		},
		Subsets: SubsetOptions{
			Key:             over(o.Subsets.Key, defaults.Subsets.Key),
			DestinationRule: o.Subsets.DestinationRule || defaults.Subsets.DestinationRule,
		},
		Weights:         over(o.Weights, defaults.Weights),
		Health:          over(o.Health, defaults.Health),
		Resolution:      over(o.Resolution, defaults.Resolution),
		Location:        over(o.Location, defaults.Location),
		ExportTo:        overList(o.ExportTo, defaults.ExportTo),
		SubjectAltNames: overList(o.SubjectAltNames, defaults.SubjectAltNames),
		ServiceAccount:  over(o.ServiceAccount, defaults.ServiceAccount),
		Network:         over(o.Network, defaults.Network),
		ClusterID:       over(o.ClusterID, defaults.ClusterID),
		Revision:        over(o.Revision, defaults.Revision),

		ServiceAccountKey: over(o.ServiceAccountKey, defaults.ServiceAccountKey),
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

// defaults applies where neither the configuration nor the adapter sets a
// field.
var defaults = Options{
	Host:         "{{.Name}}.{{.Registry}}",
	HostCase:     "lower",
	Namespace:    "{{.Registry}}",
	FallbackPort: 80,
	PortPolicy:   "auto",
	Protocol: ProtocolOptions{
		Default: "tcp",
		Keys:    []string{"protocol"},
		Tags:    []string{"protocol=", "protocol:", "http", "http2", "grpc", "grpc-web", "https", "tcp", "tls", "mongo", "mysql", "redis"},
		Guess:   []string{"none"},
	},
	Labels:        LabelOptions{Meta: []string{"*"}, Tags: "all", Illegal: "mend", Separators: "=:|", Cluster: "cluster"},
	ServiceLabels: ServiceLabelOptions{Meta: []string{"none"}},
	Weights:       "exact",
	Health:        "warning",
	Resolution:    "auto",
	Location:      "internal",
}
