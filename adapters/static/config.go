package static

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type static.
type Config struct {
	Services []Service `json:"services,omitempty" jsonschema:"required" jsonschema_description:"The services. An empty list is a registry without services."`
}

// Service is a service.
type Service struct {
	Name      string            `json:"name,omitempty" jsonschema:"required" jsonschema_description:"Its name, which is its host too unless translate says otherwise."`
	Ports     []Port            `json:"ports,omitempty" jsonschema_description:"Ports of endpoints without their own."`
	Metadata  map[string]string `json:"metadata,omitempty" jsonschema_description:"Metadata of the service."`
	Endpoints []Endpoint        `json:"endpoints,omitempty" jsonschema_description:"Its endpoints, each as text, ADDRESS or ADDRESS:PORT, or as a block. None: the service has no endpoints."`
	Instances []Endpoint        `json:"instances,omitempty" jsonschema_description:"The same as endpoints, as other adapters say it. Not together with it."`
}

// endpoints returns the endpoints, and the field that has them.
func (s Service) endpoints() (all []Endpoint, field string) {
	if s.Endpoints == nil && s.Instances != nil {
		return s.Instances, "instances"
	}
	return s.Endpoints, "endpoints"
}

// Port is a port of endpoints.
type Port struct {
	Name     string `json:"name,omitempty" jsonschema_description:"Its name; several ports need one each."`
	Number   int    `json:"number,omitempty" jsonschema:"required,minimum=1,maximum=65535" jsonschema_description:"Its number."`
	Protocol string `json:"protocol,omitempty" jsonschema_description:"Its protocol. Default: what its name says."`
}

// Endpoint is an endpoint of a service.
type Endpoint struct {
	Address  string            `json:"address,omitempty" jsonschema:"required" jsonschema_description:"IP address or host name."`
	Ports    []Port            `json:"ports,omitempty" jsonschema_description:"Its ports. Default: those of the service."`
	ID       string            `json:"id,omitempty" jsonschema_description:"Its ID, unique within the service. Default: the address, with the first of its own ports."`
	Metadata map[string]string `json:"metadata,omitempty" jsonschema_description:"Its metadata, from which translate makes labels."`
	Weight   *float64          `json:"weight,omitempty" jsonschema:"minimum=0" jsonschema_description:"Its share of the traffic, relative to the others; 0 means none. Default: 1."`
	Locality string            `json:"locality,omitempty" jsonschema_description:"Where it runs: region, region/zone or region/zone/subzone."`
	Disabled bool              `json:"disabled,omitempty" jsonschema_description:"It is out of service."`
}

// JSONSchemaExtend allows text in place of the block.
func (Endpoint) JSONSchemaExtend(s *jsonschema.Schema) {
	block := *s
	*s = jsonschema.Schema{AnyOf: []*jsonschema.Schema{{Type: "string", MinLength: new(uint64(1)), Description: "ADDRESS or ADDRESS:PORT"}, &block}}
}

// UnmarshalJSON decodes text ("ADDRESS", "ADDRESS:PORT") or the block.
func (e *Endpoint) UnmarshalJSON(b []byte) error {
	type block Endpoint
	if b = bytes.TrimSpace(b); len(b) > 0 && b[0] != '"' {
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		return d.Decode((*block)(e))
	}
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	*e = Endpoint{Address: text}
	if _, err := netip.ParseAddr(text); err == nil { // an IPv6 address has colons
		return nil
	}
	if host, port, err := net.SplitHostPort(text); err == nil {
		n, _ := strconv.Atoi(port) // Validate refuses 0
		*e = Endpoint{Address: host, Ports: []Port{{Number: n}}}
	}
	return nil
}

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}
	if c.Services == nil {
		bad("services", "is missing; write [] for no services")
	}
	ports := func(at string, ports []Port) {
		names, numbers := map[string]bool{}, map[int]bool{}
		for i, p := range ports {
			at := fmt.Sprintf("%s[%d]", at, i)
			if p.Number < 1 || p.Number > math.MaxUint16 {
				bad(at+".number", "%d is not a port; give one from 1 to 65535", p.Number)
			} else if numbers[p.Number] {
				bad(at+".number", "%d is listed twice", p.Number)
			}
			if names[p.Name] {
				bad(at+".name", "%q is listed twice; several ports need a name each", p.Name)
			}
			names[p.Name], numbers[p.Number] = true, true
		}
	}
	services := map[string]bool{}
	for i, s := range c.Services {
		at := fmt.Sprintf("services[%d]", i)
		switch {
		case s.Name == "":
			bad(at+".name", "is missing")
		case services[s.Name]:
			bad(at+".name", "%q is listed twice", s.Name)
		}
		services[s.Name] = true
		ports(at+".ports", s.Ports)
		if s.Endpoints != nil && s.Instances != nil {
			bad(at+".instances", "endpoints is set too, which is the same; keep one of them")
		}
		ids := map[string]bool{}
		all, field := s.endpoints()
		for j, e := range all {
			at := fmt.Sprintf("%s.%s[%d]", at, field, j)
			if !isAddress(e.Address) {
				bad(at+".address", "%q is neither an IP address nor a host name", e.Address)
			}
			ports(at+".ports", e.Ports)
			if len(e.Ports) == 0 && len(s.Ports) == 0 {
				bad(at+".ports", "is missing; give it a port, or the service")
			}
			if e.Weight != nil && !(*e.Weight >= 0 && !math.IsInf(*e.Weight, 1)) {
				bad(at+".weight", "%v is no share; give a number from 0 on", *e.Weight)
			}
			if parts := strings.Split(e.Locality, "/"); e.Locality != "" && (len(parts) > 3 || parts[0] == "") {
				bad(at+".locality", "%q is not region, region/zone or region/zone/subzone", e.Locality)
			}
			if id := e.id(); ids[id] {
				bad(at+".id", "%q is listed twice; give each an id", id)
			} else {
				ids[id] = true
			}
		}
	}
	return errors.Join(errs...)
}

// isAddress reports whether text is an IP address or a host name.
func isAddress(text string) bool {
	if _, err := netip.ParseAddr(text); err == nil {
		return true
	}
	if len(text) > 253 {
		return false
	}
	for label := range strings.SplitSeq(strings.TrimSuffix(text, "."), ".") {
		if label == "" || len(label) > 63 || strings.Trim(strings.ToLower(label), "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return true
}

// access returns what the adapter needs of its machine: nothing.
func (Config) access() plugin.Access { return plugin.Access{} }
