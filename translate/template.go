package translate

import (
	"fmt"
	"strings"
	"text/template"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// ServiceData is the input of the templates of host, namespace and name.
type ServiceData struct {
	// The parts of the service's key, in the registry's spelling.
	Name, Group, Namespace, Partition, Datacenter, Peer string
	// Registry is the configured name of the registry.
	Registry string
	// Meta is the registry's metadata of the service, not of its instances.
	Meta map[string]string
	// Tags are the registry's bare labels of the service, not of its instances.
	Tags []string

	instances []*registry.Instance
	asked     bool // instance metadata was read
}

// InstanceMeta returns the most frequent value of a key in the instances'
// metadata, the first in the alphabet on a tie, or "" if there is none.
func (d *ServiceData) InstanceMeta(key string) string {
	d.asked = true
	best, count := "", map[string]int{}
	for _, inst := range d.instances {
		v := inst.Meta[key]
		if v == "" {
			continue
		}
		count[v]++
		if n := count[v] - count[best]; best == "" || n > 0 || n == 0 && v < best {
			best = v
		}
	}
	return best
}

// PortData is the input of the template of a port's name.
type PortData struct {
	Name     string // the registry's name, made a DNS label; may be empty
	Number   int
	Protocol string // lower case
}

// templateFuncs take the value last, for use in pipes: {{.Group | dash |
// default "main"}}.
var templateFuncs = template.FuncMap{
	"lower": strings.ToLower,
	"upper": strings.ToUpper,
	"dash":  func(s string) string { return strings.ReplaceAll(s, "_", "-") },
	"default": func(fallback, s string) string {
		if s == "" {
			return fallback
		}
		return s
	},
	"replace":    func(from, to, s string) string { return strings.ReplaceAll(s, from, to) },
	"trimPrefix": func(prefix, s string) string { return strings.TrimPrefix(s, prefix) },
	"trimSuffix": func(suffix, s string) string { return strings.TrimSuffix(s, suffix) },
	"join":       func(sep string, list []string) string { return strings.Join(list, sep) },
	"split":      func(sep, s string) []string { return strings.Split(s, sep) },
}

// parseTemplate compiles text and rejects unknown fields.
func parseTemplate(text string) (*template.Template, error) {
	tmpl, err := template.New("").Funcs(templateFuncs).Option("missingkey=error").Parse(text)
	if err != nil {
		return nil, templateError(err)
	}
	// A trial run with every field set detects unknown fields. Other errors
	// depend on the service and are reported then.
	_, err = execute(tmpl, &ServiceData{
		Name: "name", Group: "group", Namespace: "namespace", Partition: "partition", Datacenter: "datacenter", Peer: "peer",
		Registry: "registry", Meta: map[string]string{"key": "value"}, Tags: []string{"tag"},
	})
	if err != nil && strings.Contains(err.Error(), "can't evaluate field") {
		return nil, fmt.Errorf("%w; there are Name, Group, Namespace, Partition, Datacenter, Peer, Registry, Meta, Tags and InstanceMeta", err)
	}
	return tmpl, nil
}

// parsePortName compiles the template of port names.
func parsePortName(text string) (*template.Template, error) {
	tmpl, err := template.New("").Funcs(templateFuncs).Option("missingkey=error").Parse(text)
	if err != nil {
		return nil, templateError(err)
	}
	if _, err = execute(tmpl, &PortData{"name", 80, "http"}); err != nil && strings.Contains(err.Error(), "can't evaluate field") {
		return nil, fmt.Errorf("%w; there are Name, Number and Protocol", err)
	}
	return tmpl, nil
}

func execute(tmpl *template.Template, data any) (string, error) {
	var b strings.Builder
	if err := tmpl.Execute(&b, data); err != nil {
		return "", templateError(err)
	}
	return b.String(), nil
}

// templateError returns err without the template's name, which is always empty.
func templateError(err error) error {
	return fmt.Errorf("%s", strings.TrimPrefix(strings.TrimPrefix(err.Error(), "template: "), ":"))
}
