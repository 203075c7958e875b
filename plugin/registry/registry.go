// Package registry defines the neutral model in which adapters describe
// services and instances.
//
// An adapter sets only what the registry states. The model has no mesh policy,
// no Istio types and no defaults; package translate maps each field to the
// mesh.
//
// The package has no imports.
package registry

// Key names one service within a registry. Fields that the registry lacks are
// empty. A Key is comparable; equal keys are the same service.
type Key struct {
	// Name is the service's name as the registry spells it.
	Name string
	// Group is the registry's grouping below the namespace (Nacos group).
	Group string
	// Namespace is the registry's namespace (Consul Enterprise namespace, Nacos
	// namespace id). It is not a Kubernetes namespace.
	Namespace string
	// Partition is the registry's tenant above the namespace (Consul admin
	// partition).
	Partition string
	// Datacenter is the registry's site (Consul datacenter). It is empty for
	// services local to the configured registry if no other datacenter is
	// followed.
	Datacenter string
	// Peer is the other registry that the service is imported from (Consul
	// cluster peering). It is empty for the registry's own services.
	Peer string
}

// String returns the non-empty parts of the key from the widest to the
// narrowest, joined by "/".
func (k Key) String() string {
	s := ""
	if k.Peer != "" {
		s = k.Peer + ".peer/"
	}
	for _, part := range [...]string{k.Datacenter, k.Partition, k.Namespace, k.Group} {
		if part != "" {
			s += part + "/"
		}
	}
	return s + k.Name
}

// Service is the registry's description of a service, without instances.
type Service struct {
	Key Key
	// Ports are the service's own ports, if the registry has such a notion.
	// Most registries have ports of instances only; translate then derives the
	// service's ports from these.
	Ports []Port
	// Meta is the registry's metadata of the service, not of an instance.
	Meta map[string]string
	// Tags are the registry's bare labels of the service.
	Tags []string
	// SubjectAltNames are the names of which the certificate of an instance
	// carries one, if the registry states that its instances require TLS.
	SubjectAltNames []string
}

// Instance is one running copy of a service.
type Instance struct {
	// ID is unique within the service and stable for the life of the instance.
	// Required.
	ID string
	// Address is an IP address or a DNS name. An instance without one is not
	// served and is listed as a problem.
	Address string
	// Ports are the ports that the instance listens on. A single port usually
	// has no name. An instance without ports, or with a number outside 1-65535,
	// is not served and is listed as a problem.
	Ports []Port
	// Meta is the registry's metadata of the instance.
	Meta map[string]string
	// Tags are the registry's bare labels of the instance.
	Tags []string
	// Weight is the instance's relative share of traffic. Nil means unset
	// (translate then uses 1); zero means no traffic.
	Weight *float64
	// Health is the result of the registry's checks.
	Health Health
	// Check is the protocol of the registry's health checks, such as http, grpc
	// or tcp, if known.
	Check string
	// Disabled reports that an operator took the instance out of traffic
	// (maintenance mode, Nacos enabled=false).
	Disabled bool
	// Locality is where the instance runs.
	Locality Locality
	// Cluster is the registry's grouping of instances within the service (Nacos
	// cluster).
	Cluster string
	// ServiceAccount is the identity by which the instance takes mutual TLS, as
	// "namespace/name" of Kubernetes, or "".
	ServiceAccount string
	// Node is the machine or agent that the instance is registered on.
	Node string
}

// Port is one port of a service or of an instance.
type Port struct {
	// Name distinguishes ports; it may be empty for a single port.
	Name string
	// Number is the port number, 1-65535.
	Number int
	// Protocol is the protocol that the registry states for the port, or "".
	Protocol string
}

// Locality is where an instance runs, from the widest part to the narrowest.
// Any part may be empty.
type Locality struct {
	Region  string
	Zone    string
	SubZone string
}

// Health is the result of a registry's checks of an instance.
type Health uint8

const (
	// HealthUnknown means that the registry does not check the instance. It
	// counts as passing.
	HealthUnknown Health = iota
	// HealthPassing means that every check passes.
	HealthPassing
	// HealthWarning means that the worst result of a check is a warning.
	HealthWarning
	// HealthCritical means that a check fails.
	HealthCritical
)

// String returns the state's name in lower case.
func (h Health) String() string {
	switch h {
	case HealthPassing:
		return "passing"
	case HealthWarning:
		return "warning"
	case HealthCritical:
		return "critical"
	default:
		return "unknown"
	}
}
