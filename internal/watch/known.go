package watch

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	networking "istio.io/api/networking/v1alpha3"
)

// maxFirst is the number of resources of a first response that are printed in
// text one per line.
const maxFirst = 20

// serviceLabel is the label of a WorkloadEntry that names its ServiceEntry.
const serviceLabel = "isthmus.io/service"

// known is what a watch remembers of resources, to print what a change means
// and to tell which resources belong to a host. Without a need for it nothing
// is remembered.
type known struct {
	host, namespace, registry string

	details bool // for people
	seen    map[string]bool
	// By collection and name: hosts of ServiceEntries, the service of
	// WorkloadEntries, and endpoints by address.
	hosts     map[string][]string
	services  map[string]string
	endpoints map[string]map[string]string
	// Whose resources are, by name and kind; left has those of the response
	// being printed that are gone, or another's now.
	registries, left map[string]string
	// said describes the changes of the response being printed, by name and
	// kind.
	said map[string]string
}

func newKnown(o Options) *known {
	return &known{
		host: o.Host, namespace: o.Namespace, registry: o.Registry, details: o.Output == "text", seen: make(map[string]bool), registries: make(map[string]string),
		hosts: make(map[string][]string), services: make(map[string]string), endpoints: make(map[string]map[string]string),
	}
}

// first reports whether this is the first response of a type.
func (k *known) first(url string) bool {
	was := k.seen[url]
	k.seen[url] = true
	return !was
}

// summary describes a first response.
func (k *known) summary(coll string, n int) string {
	text := count(n, "resource", "resources") + " of " + coll[strings.LastIndexByte(coll, '/')+1:]
	if len(k.hosts) > 0 {
		text += ", " + count(len(k.hosts), "service", "services") + " so far"
	}
	return text + ": the first response; changes follow"
}

// note remembers changes, and returns those that are to be printed.
func (k *known) note(coll string, changed []change, removed []string) ([]change, []string) {
	if !k.details && k.host == "" && k.namespace == "" && k.registry == "" {
		return changed, removed
	}
	kind := coll[strings.LastIndexByte(coll, '/')+1:]
	k.said = make(map[string]string)
	k.left = make(map[string]string)
	// Of a name that is gone the host is asked for before it is forgotten.
	removed = slices.DeleteFunc(slices.Clone(removed), func(name string) bool { return !k.wanted(name, kind) })
	for _, name := range removed {
		if was := described(k.endpoints[name]); was != "" {
			k.said[name+" "+kind] = "was " + was
		}
	}
	for _, name := range removed {
		k.left[name+" "+kind] = k.registries[name+" "+kind]
	}
	for _, c := range changed {
		key := c.name + " " + kind
		k.said[key] = k.learn(c)
		if k.registry == "" {
			continue
		}
		was, is := k.registries[key], c.registry()
		if was != "" && was != is {
			k.left[key] = was
			k.said[key] = join("was of "+was, k.said[key])
		}
		k.registries[key] = is
	}
	changed = slices.DeleteFunc(slices.Clone(changed), func(c change) bool { return !k.wanted(c.name, kind) })
	for _, name := range removed {
		delete(k.hosts, name)
		delete(k.services, name)
		delete(k.endpoints, name)
		delete(k.registries, name+" "+kind)
	}
	return changed, removed
}

// wanted reports whether a resource is printed.
func (k *known) wanted(name, kind string) bool {
	namespace, _, _ := strings.Cut(name, "/")
	if ok, _ := path.Match(k.namespace, namespace); k.namespace != "" && !ok { // validated before
		return false
	}
	if k.registry != "" {
		is, _ := path.Match(k.registry, k.registries[name+" "+kind])
		was, _ := path.Match(k.registry, k.left[name+" "+kind])
		if !is && !was {
			return false
		}
	}
	if k.host == "" {
		return true
	}
	hosts := append(slices.Clone(k.hosts[name]), k.hosts[k.services[name]]...)
	return slices.ContainsFunc(hosts, func(h string) bool {
		ok, _ := path.Match(k.host, h)
		return ok
	})
}

// learn remembers a resource, and describes what changed.
func (k *known) learn(c change) string {
	body, err := c.res.GetBody().UnmarshalNew()
	if err != nil {
		return ""
	}
	was, had := k.endpoints[c.name]
	now := make(map[string]string)
	switch body := body.(type) {
	case *networking.ServiceEntry:
		k.hosts[c.name] = body.GetHosts()
		for _, e := range body.GetEndpoints() {
			now[address(e)] = weight(e)
		}
		k.endpoints[c.name] = now
		if !had {
			return join(strings.Join(body.GetHosts(), ","), described(now))
		}
		return join(strings.Join(body.GetHosts(), ","), difference(was, now))
	case *networking.WorkloadEntry:
		namespace, _, _ := strings.Cut(c.name, "/")
		k.services[c.name] = namespace + "/" + body.GetLabels()[serviceLabel]
		now[address(body)] = weight(body)
		k.endpoints[c.name] = now
		text := described(now)
		if had && described(was) != text {
			text += ", was " + described(was)
		}
		return text
	}
	return ""
}

// address returns the address of an endpoint with its only port.
func address(e *networking.WorkloadEntry) string {
	for _, port := range e.GetPorts() {
		if len(e.GetPorts()) == 1 {
			return e.GetAddress() + ":" + strconv.FormatUint(uint64(port), 10)
		}
	}
	return e.GetAddress()
}

// weight describes the weight of an endpoint. Health has no field: what does
// not pass its check is not served.
func weight(e *networking.WorkloadEntry) string {
	if e.GetWeight() == 0 {
		return ""
	}
	return fmt.Sprintf(" weight %d", e.GetWeight())
}

// maxNamed is the number of endpoints that are named.
const maxNamed = 5

// described describes endpoints.
func described(endpoints map[string]string) string {
	if len(endpoints) == 0 {
		return ""
	}
	if len(endpoints) > maxNamed {
		return fmt.Sprintf("%d endpoints", len(endpoints))
	}
	var out []string
	for _, a := range slices.Sorted(maps.Keys(endpoints)) {
		out = append(out, a+endpoints[a])
	}
	return strings.Join(out, ", ")
}

// difference describes what changed of the endpoints of a service.
func difference(was, now map[string]string) string {
	var out []string
	for _, a := range slices.Sorted(maps.Keys(now)) {
		if before, had := was[a]; !had {
			out = append(out, "+"+a+now[a])
		} else if before != now[a] {
			out = append(out, a+cmp.Or(now[a], " no weight")+" (was"+cmp.Or(before, " no weight")+")")
		}
	}
	for _, a := range slices.Sorted(maps.Keys(was)) {
		if _, has := now[a]; !has {
			out = append(out, "-"+a)
		}
	}
	if len(out) > maxNamed {
		out = append(out[:maxNamed], fmt.Sprintf("and %d more", len(out)-maxNamed))
	}
	return join(strings.Join(out, ", "), "("+count(len(now), "endpoint", "endpoints")+")")
}

// count returns a number with its noun.
func count(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// join joins two texts, either of which may be empty.
func join(a, b string) string {
	return strings.TrimSpace(a + "  " + b)
}

// Escape sequences of colours.
const (
	green = "\x1b[32m"
	red   = "\x1b[31m"
	plain = "\x1b[0m"
)

// colored returns the name of an operation for a terminal.
func (wa *watcher) colored(op string) string {
	switch {
	case !wa.o.Color:
		return op
	case op == opRemove:
		return red + op + plain
	default:
		return green + op + plain
	}
}
