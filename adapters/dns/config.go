package dns

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/invopop/jsonschema"
	"github.com/miekg/dns"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type dns. Missing fields default
// to DefaultConfig.
type Config struct {
	Names     []Name `json:"names,omitempty" jsonschema_description:"Names to follow, each as text or as a block: web.example.org:8080, whose addresses (A, AAAA) are instances with this port, or _http._tcp.example.org, whose SRV records name hosts and ports. All are absolute; no search domain is added."`
	NamesFile string `json:"names_file,omitempty" jsonschema_description:"YAML or JSON file with more names, a list in the form of names. It is read again when it changes. If it cannot be used, nothing changes."`

	Servers []string   `json:"servers,omitempty" jsonschema_description:"Servers to ask, all with the same data: HOST, HOST:PORT or udp://HOST:PORT, which is asked over TCP, too, if an answer does not fit; tcp://HOST:PORT; tls://HOST:PORT. One is used at a time. The port is 53, for tls 853. Default: those of /etc/resolv.conf."`
	TLS     plugin.TLS `json:"tls,omitempty" jsonschema_description:"TLS towards servers that are written with tls://."`

	Timeout  plugin.Duration `json:"timeout,omitempty" jsonschema_description:"How long one attempt to get an answer may take, 100ms to 1m. Over UDP each server has two. Default: 2s."`
	MinTTL   plugin.Duration `json:"min_ttl,omitempty" jsonschema_description:"How long an answer is used at least, 1s to 1h, whatever its TTL. Default: 5s."`
	MaxTTL   plugin.Duration `json:"max_ttl,omitempty" jsonschema_description:"How long an answer is used at most, 1s to 24h. Default: 5m."`
	InFlight int             `json:"in_flight,omitempty" jsonschema:"minimum=1,maximum=1024" jsonschema_description:"How many queries may be under way at once. Default: 64."`

	Priorities  string          `json:"priorities,omitempty" jsonschema:"enum=lowest,enum=all" jsonschema_description:"Which SRV records are instances: those of the lowest priority that has an address, or all, with their priority as metadata. Default: lowest."`
	RemoveGrace plugin.Duration `json:"remove_grace,omitempty" jsonschema_description:"How long every answer must say that a name does not exist, or has no record, before it is removed. 0s removes at once. Default: 1m."`
}

// Name is a name to follow.
type Name struct {
	Name     string            `json:"name,omitempty" jsonschema:"required" jsonschema_description:"The name, absolute."`
	Type     string            `json:"type,omitempty" jsonschema:"enum=address,enum=a,enum=aaaa,enum=srv" jsonschema_description:"Records to ask for: address (A and AAAA), a, aaaa or srv. Default: srv for a name that begins with an underscore, otherwise address."`
	Port     int               `json:"port,omitempty" jsonschema:"minimum=1,maximum=65535" jsonschema_description:"Port of the instances. SRV records have their own."`
	PortName string            `json:"port_name,omitempty" jsonschema_description:"Name of the port. Default: none, and for SRV that of the service: http of _http._tcp."`
	Protocol string            `json:"protocol,omitempty" jsonschema_description:"Protocol of the port. Default: what its name says; udp for _udp."`
	Service  string            `json:"service,omitempty" jsonschema_description:"Name of the service. The instances of all names with the same service are one service. Default: the name, for SRV without _http._tcp."`
	Metadata map[string]string `json:"metadata,omitempty" jsonschema_description:"Metadata of the instances, from which translate makes labels."`
}

// Values of Name.Type.
const (
	typeAddress = "address"
	typeA       = "a"
	typeAAAA    = "aaaa"
	typeSRV     = "srv"
)

// Values of Config.Priorities.
const (
	prioritiesLowest = "lowest"
	prioritiesAll    = "all"
)

// DefaultConfig holds the defaults that a configuration is decoded over.
var DefaultConfig = Config{
	Timeout:     plugin.Duration(2 * time.Second),
	MinTTL:      plugin.Duration(5 * time.Second),
	MaxTTL:      plugin.Duration(5 * time.Minute),
	InFlight:    64,
	Priorities:  prioritiesLowest,
	RemoveGrace: plugin.Duration(time.Minute),
}

// JSONSchemaExtend allows text in place of the block.
func (Name) JSONSchemaExtend(s *jsonschema.Schema) {
	block := *s
	*s = jsonschema.Schema{AnyOf: []*jsonschema.Schema{{Type: "string", MinLength: new(uint64(1)), Description: "NAME or NAME:PORT"}, &block}}
}

// UnmarshalJSON decodes text ("NAME", "NAME:PORT") or the block.
func (n *Name) UnmarshalJSON(b []byte) error {
	type block Name
	if b = bytes.TrimSpace(b); len(b) > 0 && b[0] != '"' {
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		return d.Decode((*block)(n))
	}
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	*n = Name{Name: text}
	if i := strings.LastIndexByte(text, ':'); i >= 0 {
		n.Name = text[:i]
		n.Port, _ = strconv.Atoi(text[i+1:])
		if n.Port < 1 || n.Port > 65535 {
			n.Port = -1 // Validate refuses it
		}
	}
	return nil
}

// withDefaults returns the name in canonical form with all defaults.
func (n Name) withDefaults() Name {
	n.Name = dns.CanonicalName(n.Name)
	if n.Type == "" {
		n.Type = typeAddress
		if strings.HasPrefix(n.Name, "_") {
			n.Type = typeSRV
		}
	}
	host := strings.TrimSuffix(n.Name, ".")
	if n.Type == typeSRV {
		labels := strings.SplitN(host, ".", 3)
		if len(labels) == 3 && strings.HasPrefix(labels[0], "_") && strings.HasPrefix(labels[1], "_") {
			host = labels[2]
			n.PortName = cmp.Or(n.PortName, labels[0][1:])
			if labels[1] == "_udp" {
				n.Protocol = cmp.Or(n.Protocol, "udp")
			}
		}
	}
	n.Service = cmp.Or(n.Service, host)
	return n
}

// Validate returns all errors of the configuration, as *plugin.FieldError
// joined.
func (c Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &plugin.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)})
	}
	if len(c.Names) == 0 && c.NamesFile == "" {
		bad("names", "is empty; list names such as web.example.org:8080, or set names_file")
	}
	errs = append(errs, checkNames("names", nil, c.Names)...)
	tls := false
	seen := map[string]bool{}
	for i, text := range c.Servers {
		s, err := parseServer(text)
		at := fmt.Sprintf("servers[%d]", i)
		switch {
		case err != nil:
			bad(at, "%v", err)
		case seen[s.String()]:
			bad(at, "%q is listed twice", text)
		}
		seen[s.String()] = true
		tls = tls || s.network == networkTLS
	}
	errs = append(errs, c.TLS.Check("tls")...)
	if c.TLS != (plugin.TLS{}) && !tls {
		bad("tls", "no server is written with tls://, so TLS would not be used")
	}
	if c.InFlight < 0 || c.InFlight > 1024 {
		bad("in_flight", "%d is outside 1 to 1024", c.InFlight)
	}
	if !slices.Contains([]string{"", prioritiesLowest, prioritiesAll}, c.Priorities) {
		bad("priorities", "%q is neither lowest nor all", c.Priorities)
	}
	within := func(field string, d plugin.Duration, least, most time.Duration) {
		if d != 0 && (time.Duration(d) < least || time.Duration(d) > most) {
			bad(field, "%v is outside %v to %v", d, least, most)
		}
	}
	within("timeout", c.Timeout, 100*time.Millisecond, time.Minute)
	within("min_ttl", c.MinTTL, time.Second, time.Hour)
	within("max_ttl", c.MaxTTL, time.Second, 24*time.Hour)
	within("remove_grace", c.RemoveGrace, 0, time.Hour)
	if c.MaxTTL != 0 && c.MaxTTL < c.MinTTL {
		bad("max_ttl", "%v is less than min_ttl, %v", c.MaxTTL, c.MinTTL)
	}
	return errors.Join(errs...)
}

// checkNames validates names of the given field, besides others that are valid,
// and returns each error as a *plugin.FieldError.
func checkNames(field string, others, names []Name) (errs []error) {
	type asked struct {
		name, kind string
		port       int
	}
	// The first name of each service, which the others must agree with.
	services, all := map[string]Name{}, map[asked]bool{}
	for _, o := range others {
		o = o.withDefaults()
		all[asked{o.Name, o.Type, o.Port}], services[o.Service] = true, o
	}
	for i, n := range names {
		bad := func(sub, format string, args ...any) {
			errs = append(errs, &plugin.FieldError{Field: fmt.Sprintf("%s[%d]%s", field, i, sub), Reason: fmt.Sprintf(format, args...)})
		}
		written := n
		n = n.withDefaults()
		if reason := wrongName(written.Name); reason != "" {
			bad("", "%q %s", written.Name, reason)
			continue
		}
		if n.Port < 0 || n.Port > 65535 {
			bad("", "the port must be a number from 1 to 65535")
		}
		if !slices.Contains([]string{typeAddress, typeA, typeAAAA, typeSRV}, n.Type) {
			bad(".type", "%q is none of address, a, aaaa, srv", n.Type)
		}
		if n.Type == typeSRV && n.Port != 0 {
			bad(".port", "is not used: SRV records bring the port; remove it, or set the type address")
		}
		id := asked{n.Name, n.Type, n.Port}
		if all[id] {
			bad("", "%s is listed twice", strings.TrimSuffix(n.Name, "."))
			continue
		}
		all[id] = true
		if first, ok := services[n.Service]; !ok {
			services[n.Service] = n
		} else if first.PortName != n.PortName || first.Protocol != n.Protocol {
			bad(".service", "%s is the service of %s too, whose port has another name or protocol; give each a service of its own", n.Service, strings.TrimSuffix(first.Name, "."))
		}
	}
	return errs
}

// wrongName returns why a name cannot be followed, or "".
func wrongName(name string) string {
	const cure = "; write a host name, without scheme or path"
	if name == "" {
		return "is not a name" + cure
	}
	if _, err := netip.ParseAddr(strings.Trim(name, "[]")); err == nil {
		return "is an address; addresses go into a registry of type static"
	}
	if _, ok := dns.IsDomainName(name); !ok || name == "." {
		return "is not a name in the DNS" + cure
	}
	for label := range strings.SplitSeq(strings.TrimSuffix(name, "."), ".") {
		if label == "" || strings.Trim(strings.ToLower(label), "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return fmt.Sprintf("has the label %q, which is no host's%s", label, cure)
		}
	}
	return ""
}

// Transports of a server.
const (
	networkUDP = "udp"
	networkTCP = "tcp"
	networkTLS = "tls"
)

// server is a server to ask.
type server struct {
	network string // one of the above
	host    string
	port    string
}

// parseServer parses an item of Config.Servers.
func parseServer(text string) (server, error) {
	s := server{network: networkUDP, port: "53"}
	rest := text
	if network, after, ok := strings.Cut(text, "://"); ok {
		s.network, rest = network, after
	}
	switch s.network {
	case networkUDP, networkTCP:
	case networkTLS:
		s.port = "853"
	default:
		return s, fmt.Errorf("%q is none of udp, tcp, tls; write tls://HOST:PORT", s.network)
	}
	if _, err := netip.ParseAddr(rest); err == nil { // an IPv6 address has colons
		s.host = rest
	} else if host, port, err := net.SplitHostPort(rest); err == nil {
		s.host, s.port = host, port
	} else {
		s.host = strings.TrimSuffix(strings.TrimPrefix(rest, "["), "]")
	}
	if n, err := strconv.Atoi(s.port); err != nil || n < 1 || n > 65535 {
		return s, fmt.Errorf("%q is not a port; give one from 1 to 65535", s.port)
	}
	if _, err := netip.ParseAddr(s.host); err != nil && wrongName(s.host) != "" {
		return s, fmt.Errorf("%q is neither an address nor a host name; write HOST:PORT", s.host)
	}
	return s, nil
}

// String returns the server as it is written and shown.
func (s server) String() string {
	if s.network == networkUDP {
		return s.address()
	}
	return s.network + "://" + s.address()
}

func (s server) address() string { return net.JoinHostPort(s.host, s.port) }

// groupNames returns the names of each service.
func groupNames(names ...[]Name) map[string][]Name {
	out := map[string][]Name{}
	for _, list := range names {
		for _, n := range list {
			n = n.withDefaults()
			out[n.Service] = append(out[n.Service], n)
		}
	}
	return out
}

func equalNames(a, b []Name) bool {
	return slices.EqualFunc(a, b, func(a, b Name) bool {
		return a.Name == b.Name && a.Type == b.Type && a.Port == b.Port && a.PortName == b.PortName && a.Protocol == b.Protocol && maps.Equal(a.Metadata, b.Metadata)
	})
}

// access returns what the adapter needs of its machine.
func (c Config) access() plugin.Access {
	a := plugin.Access{Ports: []uint16{53}} // of the system's servers
	for _, text := range c.Servers {
		if s, err := parseServer(text); err == nil { // else refused before
			n, _ := strconv.ParseUint(s.port, 10, 16) // parseServer bounds it
			a.Ports = append(a.Ports, uint16(n))
		}
	}
	return a
}
