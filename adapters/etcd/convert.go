package etcd

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// maxValue bounds a value, in bytes. Instances are some hundred bytes; those of
// go-micro describe their methods too.
const maxValue = 1 << 20

// layout is one way to write instances to etcd.
type layout struct {
	// prefix is the default of Config.Prefix.
	prefix string
	// parse reads a key, without the prefix, and its value. IDs of the
	// instances are unique within the service for different keys. note is a
	// defect that does not prevent the use of the instances.
	parse func(key string, value []byte) (service string, instances []registry.Instance, note string, err error)
}

// layouts are the values of Config.Layout.
var layouts = map[string]layout{
	layoutJSON:    {"/services/", parseJSON},
	layoutKratos:  {"/microservices/", parseKratos},
	layoutGoMicro: {"/micro/registry/", parseGoMicro},
	layoutGRPC:    {"", parseGRPC},
}

var errNoService = errors.New("the key has no service and instance behind the prefix (SERVICE/INSTANCE)")

// splitKey splits a key at its last slash.
func splitKey(key string) (service, id string, err error) {
	i := strings.LastIndexByte(key, '/')
	if i <= 0 || i == len(key)-1 {
		return "", "", errNoService
	}
	return key[:i], key[i+1:], nil
}

// serviceOf returns the service that a key probably belongs to whose value
// cannot be read, or "".
func serviceOf(key string) string {
	service, _, err := splitKey(key)
	if err != nil {
		return ""
	}
	return service
}

// unmarshal decodes a value.
func unmarshal(value []byte, into any) error {
	if len(value) > maxValue {
		return fmt.Errorf("the value has %d bytes, more than %d", len(value), maxValue)
	}
	if v := bytes.TrimLeft(value, " \t\r\n"); len(v) == 0 || v[0] != '{' {
		return errors.New("the value is not a JSON object")
	}
	if err := json.Unmarshal(value, into); err != nil {
		return fmt.Errorf("the value is not as the layout has it: %w", err)
	}
	return nil
}

// text is a JSON string; any other value is its JSON text, null is "".
type text string

// UnmarshalJSON implements json.Unmarshaler.
func (t *text) UnmarshalJSON(b []byte) error {
	switch {
	case bytes.Equal(b, []byte("null")):
		*t = ""
	case len(b) > 0 && b[0] == '"':
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*t = text(s)
	default:
		*t = text(b)
	}
	return nil
}

// texts is metadata.
type texts map[string]text

// strings returns the metadata as the registry's model has it.
func (m texts) strings() map[string]string {
	if len(m) == 0 {
		return nil
	}
	out := make(map[string]string, len(m))
	for k, v := range m {
		out[k] = string(v)
	}
	return out
}

// splitAddress splits host:port. Without a usable port it returns none, and
// translate lists the instance.
func splitAddress(addr string) (host string, ports []registry.Port) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return strings.Trim(addr, "[]"), nil
	}
	if n, ok := portOf(port); ok {
		ports = []registry.Port{{Number: n}}
	}
	return host, ports
}

// portOf parses a port number.
func portOf(value string) (number int, ok bool) {
	n, err := strconv.Atoi(value)
	return n, err == nil && n >= 1 && n <= math.MaxUint16
}

// jsonInstance is the value of a key of layout json.
type jsonInstance struct {
	Address  string     `json:"address"`
	Port     *int       `json:"port"`
	Ports    []jsonPort `json:"ports"`
	Meta     texts      `json:"meta"`
	Tags     []string   `json:"tags"`
	Weight   *float64   `json:"weight"`
	Health   string     `json:"health"`
	Disabled bool       `json:"disabled"`
	Locality string     `json:"locality"`
	Cluster  string     `json:"cluster"`
	Node     string     `json:"node"`
}

type jsonPort struct {
	Name     string `json:"name"`
	Number   int    `json:"number"`
	Protocol string `json:"protocol"`
}

var healths = map[string]registry.Health{
	"": registry.HealthUnknown, "unknown": registry.HealthUnknown, "passing": registry.HealthPassing,
	"warning": registry.HealthWarning, "critical": registry.HealthCritical,
}

// parseJSON reads PREFIX/SERVICE/ID.
func parseJSON(key string, value []byte) (service string, _ []registry.Instance, note string, _ error) {
	service, id, err := splitKey(key)
	if err != nil {
		return "", nil, "", err
	}
	var v jsonInstance
	if err := unmarshal(value, &v); err != nil {
		return service, nil, "", err
	}
	in := registry.Instance{
		ID: id, Address: v.Address, Meta: v.Meta.strings(), Tags: v.Tags, Disabled: v.Disabled, Cluster: v.Cluster, Node: v.Node,
	}
	switch {
	case v.Port != nil && v.Ports != nil:
		return service, nil, "", errors.New("the value has port and ports; keep one of them")
	case v.Port != nil:
		in.Ports = []registry.Port{{Number: *v.Port}}
	}
	for _, p := range v.Ports {
		in.Ports = append(in.Ports, registry.Port{Name: p.Name, Number: p.Number, Protocol: p.Protocol})
	}
	if w := v.Weight; w != nil {
		if *w < 0 {
			return service, nil, "", fmt.Errorf("weight must not be negative, but is %v", *w)
		}
		in.Weight = w
	}
	health, ok := healths[v.Health]
	if !ok {
		return service, nil, "", fmt.Errorf("health must be passing, warning, critical or unknown, not %.100q", v.Health)
	}
	in.Health = health
	parts := strings.Split(v.Locality, "/")
	if len(parts) > 3 || v.Locality != "" && parts[0] == "" {
		return service, nil, "", fmt.Errorf("locality must be region, region/zone or region/zone/subzone, not %.100q", v.Locality)
	}
	parts = append(parts, "", "")
	in.Locality = registry.Locality{Region: parts[0], Zone: parts[1], SubZone: parts[2]}
	return service, []registry.Instance{in}, "", nil
}

// kratosInstance is registry.ServiceInstance of Kratos.
type kratosInstance struct {
	Name      string   `json:"name"`
	Version   string   `json:"version"`
	Metadata  texts    `json:"metadata"`
	Endpoints []string `json:"endpoints"`
}

// parseKratos reads NAMESPACE/NAME/ID. The name may have slashes; clients
// compare the one in the value.
func parseKratos(key string, value []byte) (service string, _ []registry.Instance, note string, _ error) {
	var v kratosInstance
	if err := unmarshal(value, &v); err != nil {
		return serviceOf(key), nil, "", err
	}
	id, ok := strings.CutPrefix(key, v.Name+"/")
	if !ok || v.Name == "" || id == "" {
		return serviceOf(key), nil, "", fmt.Errorf("the value names the service %.100q, and the key another", v.Name)
	}
	in := registry.Instance{ID: id, Meta: withVersion(v.Metadata.strings(), v.Version)}
	for _, endpoint := range v.Endpoints {
		u, err := url.Parse(endpoint)
		if err != nil || u.Hostname() == "" {
			note = fmt.Sprintf("endpoint %.100q is not a URL with a host, and is left out", endpoint)
			continue
		}
		number, ok := portOf(u.Port())
		switch {
		case !ok:
			note = fmt.Sprintf("endpoint %.100q has no port, and is left out", endpoint)
			continue
		case in.Address == "":
			in.Address = u.Hostname()
		case in.Address != u.Hostname():
			note = fmt.Sprintf("endpoint %.100q has another host than the first one, %.100q, and is left out", endpoint, in.Address)
			continue
		}
		port := registry.Port{Name: u.Scheme, Number: number, Protocol: u.Scheme}
		// Older versions say so in the query, later ones in the scheme.
		if secure, _ := strconv.ParseBool(u.Query().Get("isSecure")); secure && (u.Scheme == "http" || u.Scheme == "grpc") {
			port.Protocol += "s"
		}
		in.Ports = addPort(in.Ports, port)
	}
	return v.Name, []registry.Instance{in}, note, nil
}

// addPort adds a port, with a name of its own.
func addPort(ports []registry.Port, p registry.Port) []registry.Port {
	for _, o := range ports {
		if o.Number == p.Number {
			return ports
		}
		if o.Name == p.Name {
			p.Name = fmt.Sprintf("%s-%d", p.Name, p.Number)
		}
	}
	return append(ports, p)
}

// withVersion adds the version to the metadata if that has none.
func withVersion(meta map[string]string, version string) map[string]string {
	if version == "" || meta["version"] != "" {
		return meta
	}
	if meta == nil {
		meta = map[string]string{}
	}
	meta["version"] = version
	return meta
}

// microService is registry.Service of go-micro, of which each key has one node.
type microService struct {
	Name     string      `json:"name"`
	Version  string      `json:"version"`
	Metadata texts       `json:"metadata"`
	Nodes    []microNode `json:"nodes"`
}

type microNode struct {
	ID       string `json:"id"`
	Address  string `json:"address"`
	Metadata texts  `json:"metadata"`
}

// parseGoMicro reads /micro/registry/NAME/ID, where slashes of name and ID are
// written as dashes.
func parseGoMicro(key string, value []byte) (service string, instances []registry.Instance, note string, _ error) {
	written, id, err := splitKey(key)
	if err != nil {
		return "", nil, "", err
	}
	var v microService
	if err := unmarshal(value, &v); err != nil {
		return written, nil, "", err
	}
	if v.Name == "" || strings.ReplaceAll(v.Name, "/", "-") != written {
		return written, nil, "", fmt.Errorf("the value names the service %.100q, and the key another", v.Name)
	}
	for i, node := range v.Nodes {
		in := registry.Instance{ID: id}
		if i > 0 {
			in.ID = fmt.Sprintf("%s/%d", id, i)
		}
		in.Address, in.Ports = splitAddress(node.Address)
		in.Meta = v.Metadata.strings()
		if in.Meta == nil {
			in.Meta = node.Metadata.strings()
		} else {
			maps.Copy(in.Meta, node.Metadata.strings())
		}
		in.Meta = withVersion(in.Meta, v.Version)
		instances = append(instances, in)
	}
	return v.Name, instances, "", nil
}

// grpcUpdate is what etcd's naming/endpoints writes. Field names are matched
// without regard to case, as its own client does.
type grpcUpdate struct {
	Op       int
	Addr     string
	Metadata json.RawMessage
}

// grpcDelete is the Op of an address that is gone. Current clients delete the
// key instead.
const grpcDelete = 1

// parseGRPC reads TARGET/ANY; with AddEndpoint, ANY is whatever the program
// chose, usually the address.
func parseGRPC(key string, value []byte) (service string, _ []registry.Instance, note string, _ error) {
	service, id, err := splitKey(key)
	if err != nil {
		return "", nil, "", err
	}
	var v grpcUpdate
	if err := unmarshal(value, &v); err != nil {
		return service, nil, "", err
	}
	if v.Op == grpcDelete {
		return service, nil, "", nil
	}
	if v.Addr == "" {
		return service, nil, "", errors.New("the value has no Addr")
	}
	in := registry.Instance{ID: id}
	in.Address, in.Ports = splitAddress(v.Addr)
	for i := range in.Ports {
		in.Ports[i].Protocol = "grpc"
	}
	var all texts
	switch m := bytes.TrimSpace(v.Metadata); {
	case len(m) == 0:
	case m[0] == '{':
		if err := json.Unmarshal(m, &all); err != nil {
			return service, nil, "", fmt.Errorf("the value's Metadata: %w", err)
		}
	default:
		var t text
		if err := json.Unmarshal(m, &t); err != nil {
			return service, nil, "", fmt.Errorf("the value's Metadata: %w", err)
		}
		if t != "" {
			all = texts{"metadata": t}
		}
	}
	in.Meta = all.strings()
	return service, []registry.Instance{in}, "", nil
}
