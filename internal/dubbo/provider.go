package dubbo

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Name is what consumers of Dubbo call: an interface in one group and version,
// either of which may be empty.
type Name struct{ Interface, Group, Version string }

// Service returns the service of the name in a namespace of the registry.
// providers are all that offer it.
func (n Name) Service(namespace string, providers []Provider) registry.Service {
	s := registry.Service{
		Key:  registry.Key{Name: n.Interface, Group: n.Group, Namespace: namespace},
		Meta: map[string]string{"interface": n.Interface},
	}
	if n.Version != "" {
		s.Key.Name += ":" + n.Version
		s.Meta["version"] = n.Version
	}
	if n.Group != "" {
		s.Meta["group"] = n.Group
	}
	methods := map[string]bool{}
	for _, p := range providers {
		for m := range strings.SplitSeq(p.Params["methods"], ",") {
			if m = strings.TrimSpace(m); m != "" {
				methods[m] = true
			}
		}
	}
	if len(methods) > 0 {
		s.Meta["methods"] = strings.Join(slices.Sorted(maps.Keys(methods)), ",")
	}
	return s
}

// Host is the template of the host of a Dubbo service, for both registries.
const Host = `{{index .Meta "interface" | lower}}{{with .Group}}-{{. | dash | lower}}{{end}}{{with index .Meta "version"}}-{{replace "." "-" . | dash | lower}}{{end}}.dubbo`

// Provider is one address that offers a service by one protocol.
type Provider struct {
	Name     Name
	Protocol string
	Address  string
	Port     int
	// Params are the parameters of the provider's URL.
	Params map[string]string
}

// anyGroup is what Dubbo writes for every group or version, and for none.
const anyGroup = "*"

// nameOf returns the name that the parameters of a URL state. path is that of
// the URL, which is the interface unless the parameters have one.
func nameOf(path string, params map[string]string) Name {
	return Name{Interface: cmp.Or(params["interface"], strings.TrimPrefix(path, "/")), Group: params["group"], Version: params["version"]}
}

// parse parses a URL of Dubbo. Its parameters are not escaped: the whole text
// is, where a registry wants it.
func parse(text string) (scheme, host string, port int, path string, params map[string]string, err error) {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok || scheme == "" {
		return "", "", 0, "", nil, errors.New("it is not a URL")
	}
	rest, query, _ := strings.Cut(rest, "?")
	host, path, _ = strings.Cut(rest, "/")
	if at := strings.LastIndexByte(host, '@'); at >= 0 {
		host = host[at+1:] // a user is not the mesh's business
	}
	if h, p, err := net.SplitHostPort(host); err == nil {
		n, err := strconv.Atoi(p)
		if err != nil || n < 0 || n > math.MaxUint16 {
			return "", "", 0, "", nil, fmt.Errorf("%.50q is not a port", p)
		}
		host, port = h, n
	}
	host = strings.Trim(host, "[]")
	params = map[string]string{}
	for pair := range strings.SplitSeq(query, "&") {
		key, value, _ := strings.Cut(pair, "=")
		if key != "" {
			params[key] = value
		}
	}
	return scheme, host, port, path, params, nil
}

// ParseProvider parses the URL of a provider, as ZooKeeper has it once its name
// is unescaped.
func ParseProvider(text string) (Provider, error) {
	protocol, host, port, path, params, err := parse(text)
	switch {
	case err != nil:
		return Provider{}, err
	case host == "":
		return Provider{}, errors.New("it has no address")
	case port == 0:
		return Provider{}, errors.New("it has no port")
	}
	p := Provider{Name: nameOf(path, params), Protocol: protocol, Address: host, Port: port, Params: params}
	if p.Name.Interface == "" {
		return Provider{}, errors.New("it names no interface")
	}
	return p, nil
}

// providers is the category of Dubbo's names in Nacos that has instances.
const providers = "providers"

// categories are the first parts of Dubbo's names in Nacos.
var categories = []string{providers, "consumers", "configurators", "routers"}

// ParseName parses the name of a service in Nacos:
// providers:INTERFACE:VERSION:GROUP, of which older versions leave out empty
// parts. offered reports that the name is one of providers, and ok that it is
// one of Dubbo at all.
func ParseName(name string) (n Name, offered, ok bool) {
	parts := strings.Split(name, ":")
	if len(parts) < 2 || len(parts) > 4 || parts[1] == "" || !slices.Contains(categories, parts[0]) {
		return Name{}, false, false
	}
	parts = append(parts, "", "")
	return Name{Interface: parts[1], Version: parts[2], Group: parts[3]}, parts[0] == providers, true
}

// turned are the parameters that become something else than metadata of the
// instance: parts of the service, its port, its weight. The last ones are no
// text that could be a label, and of no use to a mesh.
var turned = map[string]bool{
	"interface": true, "methods": true, "path": true, "protocol": true, "category": true, "weight": true, "disabled": true, "enabled": true,
	endpointsKey: true, "service.name": true, "prefer.serialization": true, "dubbo.metadata-service.url-params": true,
}

// Meta returns the parameters that are metadata of the instance.
func Meta(params map[string]string) map[string]string {
	var meta map[string]string
	for k, v := range params {
		if v == "" || turned[k] || strings.HasSuffix(k, ".methods") {
			continue
		}
		if meta == nil {
			meta = map[string]string{}
		}
		meta[k] = v
	}
	return meta
}

// usual is the weight of a provider that states none.
const usual = 100

// weight returns the weight that the parameters state, in shares of the usual
// one, or nil. bad is a value that is not a weight.
func weight(params map[string]string) (w *float64, bad string) {
	text := params["weight"]
	if text == "" {
		return nil, ""
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return nil, text
	}
	if n == usual {
		return nil, ""
	}
	return new(float64(n) / usual), ""
}

// disabled reports whether the parameters take a provider out of traffic.
func disabled(params map[string]string) bool {
	return params["disabled"] == "true" || params["enabled"] == "false"
}

// Instances returns the instances of a service, sorted by ID: one for each
// address and application, with a port for each protocol. Several of one
// protocol there are instances of their own. problem describes what cannot be
// used, "" for nothing.
func Instances(all []Provider) (instances []registry.Instance, problem string) {
	type place struct{ address, application string }
	places := map[place][]Provider{}
	for _, p := range all {
		at := place{p.Address, p.Params["application"]}
		places[at] = append(places[at], p)
	}
	taken := map[string]bool{}
	for _, at := range slices.SortedFunc(maps.Keys(places), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.address, b.address), cmp.Compare(a.application, b.application))
	}) {
		of := places[at]
		slices.SortFunc(of, compare)
		var here []registry.Instance
		nth := map[string]int{}
		seen := map[string]bool{}
		for _, p := range of {
			id := net.JoinHostPort(p.Address, strconv.Itoa(p.Port))
			same := p.Protocol + "://" + id
			if seen[same] {
				continue // registered twice
			}
			seen[same] = true
			port := registry.Port{Name: p.Protocol, Number: p.Port, Protocol: p.Protocol}
			i := nth[p.Protocol]
			nth[p.Protocol]++
			if i < len(here) {
				here[i].Ports = append(here[i].Ports, port)
				continue
			}
			w, bad := weight(p.Params)
			if bad != "" && problem == "" {
				problem = fmt.Sprintf("the weight %.50q of %s is not a number from 0 on, and counts as %d", bad, id, usual)
			}
			here = append(here, registry.Instance{
				ID: id, Address: p.Address, Ports: []registry.Port{port}, Meta: Meta(p.Params), Weight: w, Disabled: disabled(p.Params),
			})
		}
		for _, in := range here {
			for taken[in.ID] { // another application says that it is there
				in.ID += "/" + cmp.Or(at.application, "again")
			}
			taken[in.ID] = true
			instances = append(instances, in)
		}
	}
	slices.SortFunc(instances, func(a, b registry.Instance) int { return cmp.Compare(a.ID, b.ID) })
	return instances, problem
}

// compare orders the providers of one place.
func compare(a, b Provider) int {
	if c := cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port)); c != 0 {
		return c
	}
	return slices.Compare(flat(a.Params), flat(b.Params))
}

// flat returns parameters in one order.
func flat(params map[string]string) []string {
	out := make([]string, 0, len(params))
	for k, v := range params {
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return out
}
