package translate

import (
	"fmt"
	"strings"
	"text/template"
)

// ServiceData is what the templates of host, namespace and name see.
type ServiceData struct {
	// The parts of the service's key, as the registry spells them.
	Name, Group, Namespace, Partition, Datacenter string
	// Registry is the configured name of the registry.
	Registry string
	// Meta is the registry's metadata of the service (not of its instances).
	Meta map[string]string
	// Tags are the registry's bare labels of the service (not of its instances).
	Tags []string
}

// templateFuncs take the value last, so that they can stand in a pipe: {{.Group | dash | default "main"}}.
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

// parseTemplate compiles text and finds out whether it names fields that do not exist.
func parseTemplate(text string) (*template.Template, error) {
	tmpl, err := template.New("").Funcs(templateFuncs).Option("missingkey=error").Parse(text)
	if err != nil {
		return nil, templateError(err)
	}
	// A trial with every field set shows a misspelt one. Other failures depend on the service, and show when it comes.
	_, err = execute(tmpl, &ServiceData{
		Name: "name", Group: "group", Namespace: "namespace", Partition: "partition", Datacenter: "datacenter",
		Registry: "registry", Meta: map[string]string{"key": "value"}, Tags: []string{"tag"},
	})
	if err != nil && strings.Contains(err.Error(), "can't evaluate field") {
		return nil, fmt.Errorf("%w; there are Name, Group, Namespace, Partition, Datacenter, Registry, Meta and Tags", err)
	}
	return tmpl, nil
}

func execute(tmpl *template.Template, data *ServiceData) (string, error) {
	var b strings.Builder
	if err := tmpl.Execute(&b, data); err != nil {
		return "", templateError(err)
	}
	return b.String(), nil
}

// templateError is err without the name of the template, which is always empty here.
func templateError(err error) error {
	return fmt.Errorf("%s", strings.TrimPrefix(strings.TrimPrefix(err.Error(), "template: "), ":"))
}
