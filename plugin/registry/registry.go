// Package registry holds the neutral words in which every adapter describes what its registry knows.
//
// An adapter fills in what the registry says and nothing it does not: no mesh policy, no Istio type and no default
// lives here. Package translate gives each field its meaning in a mesh.
//
// The package imports nothing.
package registry

// Key names one service within one registry. Fields that a registry does not have stay empty. A Key is comparable; two
// keys are the same service exactly when they are equal.
type Key struct {
	// Name is the service's name as the registry spells it.
	Name string
	// Group is the registry's grouping below the namespace (Nacos group).
	Group string
	// Namespace is the registry's namespace (Consul Enterprise namespace, Nacos namespace id). It is not a
	// Kubernetes namespace.
	Namespace string
	// Partition is the registry's tenant above the namespace (Consul admin partition).
	Partition string
	// Datacenter is the registry's site (Consul datacenter). It is empty where the service is local to the
	// registry that is configured and no other datacenter is followed.
	Datacenter string
}

// String returns the key as people write it: its non-empty parts from the widest to the narrowest, joined by "/".
func (k Key) String() string {
	s := ""
	for _, part := range [...]string{k.Datacenter, k.Partition, k.Namespace, k.Group} {
		if part != "" {
			s += part + "/"
		}
	}
	return s + k.Name
}

// Service is what a registry says of a service apart from its instances.
type Service struct {
	Key Key
	// Ports are the service's own ports, where the registry has such a notion. Most registries know ports of
	// instances only; then Ports is empty and translate derives the service's ports from the instances.
	Ports []Port
	// Meta is the registry's metadata of the service (not of an instance).
	Meta map[string]string
	// Tags are the registry's bare labels of the service.
	Tags []string
}

// Instance is one running copy of a service.
type Instance struct {
	// ID is unique within the service and stable for the life of the instance. Required.
	ID string
	// Address is an IP address or a DNS name. An instance without one is left out of the mesh and listed.
	Address string
	// Ports are the ports that the instance listens on. The usual single port has no name. An instance without
	// any, or with a number outside 1-65535, is left out of the mesh and listed.
	Ports []Port
	// Meta is the registry's metadata of the instance.
	Meta map[string]string
	// Tags are the registry's bare labels of the instance.
	Tags []string
	// Weight is the instance's share of traffic relative to its siblings. Nil means that the registry says
	// nothing (translate then uses 1); zero means that the instance takes no traffic.
	Weight *float64
	// Health is what the registry's checks say.
	Health Health
	// Disabled says that an operator took the instance out of traffic (maintenance mode, Nacos enabled=false).
	Disabled bool
	// Locality says where the instance runs.
	Locality Locality
	// Cluster is the registry's grouping of instances within the service (Nacos cluster).
	Cluster string
	// Node is the name of the machine or agent that the instance is registered on.
	Node string
}

// Port is one port of a service or of an instance.
type Port struct {
	// Name tells several ports apart; it may be empty where there is only one.
	Name string
	// Number is the port number; valid ones are 1-65535.
	Number int
	// Protocol is the protocol where the registry states one for this port. It may be empty.
	Protocol string
}

// Locality says where an instance runs, from the widest to the narrowest. Any part may be empty.
type Locality struct {
	Region  string
	Zone    string
	SubZone string
}

// Health is what a registry's checks say of an instance.
type Health uint8

const (
	// HealthUnknown means that the registry has no checks of the instance. It counts as passing.
	HealthUnknown Health = iota
	// HealthPassing means that every check passes.
	HealthPassing
	// HealthWarning means that a check warns and none is worse.
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
