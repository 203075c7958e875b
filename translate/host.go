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

// wholeData matches a template's use of all its input at once.
var wholeData = regexp.MustCompile(`[\s{(|][.$][\s})|]`)

// readsKeyOnly reports whether a template of [ServiceData] cannot read anything
// but the key and the registry.
func readsKeyOnly(text string) bool {
	return !strings.Contains(text, "Meta") && !strings.Contains(text, "Tags") && !wholeData.MatchString(text)
}
