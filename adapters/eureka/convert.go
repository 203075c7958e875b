package eureka

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// portNameSecure is the name and the protocol of an instance's secure port.
const portNameSecure = "https"

// Status of an instance. Servers map any other status to UNKNOWN.
const (
	statusUp           = "UP"
	statusDown         = "DOWN"
	statusStarting     = "STARTING"
	statusOutOfService = "OUT_OF_SERVICE"
	statusUnknown      = "UNKNOWN"
)

// statusOf returns the status as it enters the hash code.
func statusOf(in *instance) string {
	switch s := strings.ToUpper(string(in.Status)); s {
	case statusUp, statusDown, statusStarting, statusOutOfService:
		return s
	}
	return statusUnknown
}

// converter converts instances of Eureka to instances of package registry.
type converter struct{ config Config }

// idOf returns the ID of an instance, unique in its application, or "" if it
// has none.
func idOf(in *instance) string {
	return cmp.Or(string(in.InstanceID), string(in.DataCenterInfo.Metadata["instance-id"]), string(in.HostName))
}

// services returns the services of an instance, sorted by name.
func (c converter) services(app string, in *instance) []string {
	names := []string{app}
	switch c.config.ServiceBy {
	case byVIP:
		names = strings.Split(string(in.VIPAddress), ",")
	case bySecureVIP:
		names = strings.Split(string(in.SecureVIPAddress), ",")
	}
	for i := range names {
		names[i] = strings.TrimSpace(names[i])
	}
	slices.Sort(names)
	names = slices.Compact(names)
	return slices.DeleteFunc(names, func(name string) bool { return name == "" })
}

// instance converts one instance of an application; id is its ID.
func (c converter) instance(app, id string, in *instance) registry.Instance {
	out := registry.Instance{ID: id, Cluster: string(in.ASGName), Node: string(in.HostName)}
	if c.config.ServiceBy == byVIP || c.config.ServiceBy == bySecureVIP {
		out.ID = app + "/" + id // a service may have instances of several applications
	}
	out.Address = cmp.Or(string(in.IPAddr), string(in.HostName))
	if c.config.Address == addressHostname {
		out.Address = cmp.Or(string(in.HostName), string(in.IPAddr))
	}
	if in.Port.enabled && c.config.ServiceBy != bySecureVIP {
		out.Ports = append(out.Ports, registry.Port{Number: in.Port.number})
	}
	if in.SecurePort.enabled {
		out.Ports = append(out.Ports, registry.Port{Name: portNameSecure, Number: in.SecurePort.number, Protocol: portNameSecure})
	}
	if len(in.Metadata) > 0 {
		out.Meta = make(map[string]string, len(in.Metadata))
		for k, v := range in.Metadata {
			if k != "@class" { // some servers add this type name to the map
				out.Meta[k] = string(v)
			}
		}
	}
	out.Ports = c.config.Ports.Append(out.Ports, out.Meta)
	switch statusOf(in) {
	case statusUp:
		out.Health = registry.HealthPassing
	case statusOutOfService:
		out.Health, out.Disabled = registry.HealthPassing, true
	default: // Eureka clients use only instances that are up
		out.Health = registry.HealthCritical
	}
	if zone := string(in.DataCenterInfo.Metadata["availability-zone"]); zone != "" {
		out.Locality = registry.Locality{Region: awsRegion.FindString(zone), Zone: zone}
	}
	return out
}

// awsRegion matches the region at the start of an availability zone.
var awsRegion = regexp.MustCompile(`^[a-z]{2}(?:-[a-z]+)+?-[0-9]+`)
