package dubbo

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Metadata of an instance of an application.
const (
	endpointsKey = "dubbo.endpoints"
	revisionKey  = "dubbo.metadata.revision"
	storageKey   = "dubbo.metadata.storage-type"
)

// Revision returns the revision of the metadata that an instance's own refers
// to, if it is kept in the registry, or "".
func Revision(meta map[string]string) string {
	revision := meta[revisionKey]
	if meta[storageKey] != "remote" || revision == "0" { // 0: it offers nothing
		return ""
	}
	return revision
}

// Endpoints returns the ports of an instance of an application, one for each
// protocol, or nil if its metadata is none of Dubbo.
func Endpoints(meta map[string]string) ([]registry.Port, error) {
	text := meta[endpointsKey]
	if text == "" {
		return nil, nil
	}
	var all []struct {
		Port     int    `json:"port"`
		Protocol string `json:"protocol"`
	}
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("%s: %w", endpointsKey, err)
	}
	var ports []registry.Port
	for _, e := range all {
		if e.Port < 1 || e.Port > math.MaxUint16 || e.Protocol == "" {
			return nil, fmt.Errorf("%s: one has the port %d and the protocol %.50q", endpointsKey, e.Port, e.Protocol)
		}
		ports = append(ports, registry.Port{Name: e.Protocol, Number: e.Port, Protocol: e.Protocol})
	}
	slices.SortFunc(ports, func(a, b registry.Port) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Number, b.Number))
	})
	return ports, nil
}

// Offer is what the instances of an application with one revision offer, by
// interface, without addresses.
type Offer map[string][]Provider

// ParseMetadata parses the metadata of a revision of an application.
func ParseMetadata(data []byte) (Offer, error) {
	var m struct {
		Services map[string]struct {
			Name     string            `json:"name"`
			Group    string            `json:"group"`
			Version  string            `json:"version"`
			Protocol string            `json:"protocol"`
			Port     int               `json:"port"`
			Params   map[string]string `json:"params"`
		} `json:"services"`
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, err
	}
	if m.Services == nil {
		return nil, errors.New("it has no services")
	}
	offer := Offer{}
	for _, key := range slices.Sorted(maps.Keys(m.Services)) {
		s := m.Services[key]
		if s.Name == "" || s.Protocol == "" {
			return nil, fmt.Errorf("the service %.200q has no name or no protocol", key)
		}
		offer[s.Name] = append(offer[s.Name], Provider{
			Name: Name{Interface: s.Name, Group: s.Group, Version: s.Version}, Protocol: s.Protocol, Port: s.Port, Params: s.Params,
		})
	}
	return offer, nil
}

// Offers returns what one instance of an application offers of an interface.
// known is what its revision says, nil if that is not in the registry: the
// interface is then offered by every protocol, without group and version.
func Offers(iface string, known Offer, in registry.Instance) []Provider {
	var out []Provider
	add := func(p Provider) {
		p.Address = in.Address
		for _, port := range in.Ports {
			// The port is that of the instance: the metadata of a revision is
			// shared by instances with other ports.
			if port.Protocol == p.Protocol {
				p.Port = port.Number
			}
		}
		if p.Port != 0 {
			out = append(out, p)
		}
	}
	if known == nil {
		for _, port := range in.Ports {
			add(Provider{Name: Name{Interface: iface}, Protocol: port.Protocol, Port: port.Number, Params: in.Meta})
		}
		return out
	}
	for _, p := range known[iface] {
		add(p)
	}
	return out
}

// ParseMapping parses the applications that offer an interface.
func ParseMapping(data []byte) []string {
	var apps []string
	for app := range strings.SplitSeq(string(data), ",") {
		if app = strings.TrimSpace(app); app != "" && !slices.Contains(apps, app) {
			apps = append(apps, app)
		}
	}
	slices.Sort(apps)
	return apps
}
