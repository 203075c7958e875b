package translate

import (
	"regexp"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Host returns the host of a service, "" if it cannot be served.
func (t *Translator) Host(svc registry.Service, instances []registry.Instance) string {
	c := &call{t: t, svc: &svc}
	c.labels.call = c
	n := c.nameService(nil, c.choose(c.sort(instances)))
	if !n.ok {
		return ""
	}
	return n.host
}

// HostOf returns the host of a service, given its key alone. It reports false
// if the host may depend on more than the key.
func (t *Translator) HostOf(key registry.Key) (host string, ok bool) {
	if !t.hostOfKey {
		return "", false
	}
	host = t.Host(registry.Service{Key: key}, nil)
	return host, host != ""
}

// OneHost returns the parts of a key that make a difference to the host of
// another Translator and none to that of this one: services that differ in
// these alone have one host. It returns none if the host may depend on more
// than the key.
func (t *Translator) OneHost(other *Translator) (parts []string) {
	differ := func(t *Translator, key registry.Key) bool {
		a, b := registry.Key{Name: "a", Group: "a", Namespace: "a", Partition: "a", Datacenter: "a", Peer: "a"}, key
		return t.Host(registry.Service{Key: a}, nil) != t.Host(registry.Service{Key: b}, nil)
	}
	if !t.hostOfKey {
		return nil
	}
	for _, p := range []struct {
		name string
		key  registry.Key
	}{
		{"Name", registry.Key{Name: "b", Group: "a", Namespace: "a", Partition: "a", Datacenter: "a", Peer: "a"}},
		{"Group", registry.Key{Name: "a", Group: "b", Namespace: "a", Partition: "a", Datacenter: "a", Peer: "a"}},
		{"Namespace", registry.Key{Name: "a", Group: "a", Namespace: "b", Partition: "a", Datacenter: "a", Peer: "a"}},
		{"Partition", registry.Key{Name: "a", Group: "a", Namespace: "a", Partition: "b", Datacenter: "a", Peer: "a"}},
		{"Datacenter", registry.Key{Name: "a", Group: "a", Namespace: "a", Partition: "a", Datacenter: "b", Peer: "a"}},
		{"Peer", registry.Key{Name: "a", Group: "a", Namespace: "a", Partition: "a", Datacenter: "a", Peer: "b"}},
	} {
		if !differ(t, p.key) && differ(other, p.key) {
			parts = append(parts, p.name)
		}
	}
	return parts
}

// wholeData matches a template's use of all its input at once.
var wholeData = regexp.MustCompile(`[\s{(|][.$][\s})|]`)

// readsKeyOnly reports whether a template of [ServiceData] cannot read anything
// but the key and the registry.
func readsKeyOnly(text string) bool {
	return !strings.Contains(text, "Meta") && !strings.Contains(text, "Tags") && !wholeData.MatchString(text)
}
