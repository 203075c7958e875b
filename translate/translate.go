package translate

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"text/template"
	"unicode"
	"unicode/utf8"
)

// Translator turns one registry's services into resources. It is immutable and may be used from any goroutine.
type Translator struct {
	registry string
	o        Options // complete: defaults are in

	host, namespace, name *template.Template // name is nil where the key's parts make the name
	portRules             map[string]PortOptions
	protocolTags          protocolTags
	defaultProtocol       string
	meta, serviceMeta     globs
	addLabels             []pair // sorted by key
	bareTags, pairTags    bool
	clusterLabel          string
}

// New returns a translator for the registry of the given name. The error joins a *[FieldError] for each thing that is wrong with
// the options.
func New(registryName string, o Options) (*Translator, error) {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &FieldError{"translate." + field, fmt.Sprintf(format, args...)})
	}
	if registryName == "" {
		errs = append(errs, &FieldError{"name", "is empty; give the registry a name"})
	}
	o = o.Over(defaults)
	t := &Translator{registry: registryName, o: o, portRules: map[string]PortOptions{}}

	parse := func(field, text string) *template.Template {
		tmpl, err := parseTemplate(text)
		if err != nil {
			bad(field, "is no usable template: %v", err)
		}
		return tmpl
	}
	t.host = parse("host", o.Host)
	t.namespace = parse("namespace", o.Namespace)
	if o.Name != "" {
		t.name = parse("name", o.Name)
	}

	for i, p := range o.Ports {
		field := fmt.Sprintf("ports[%d]", i)
		if p.Name != "" && !isDNSLabel(p.Name) {
			bad(field+".name", "%s is no DNS label; use lower-case letters, digits and dashes, at most 63", quote(p.Name))
		}
		if _, ok := t.portRules[p.Name]; ok {
			bad(field+".name", "%s is given twice; keep one", quote(p.Name))
		}
		if p.Number != 0 && !validPort(p.Number) {
			bad(field+".number", "%d is no port number; give one from 1 to 65535, or none", p.Number)
		}
		if p.Protocol != "" {
			if _, ok := normalProtocol(p.Protocol); !ok {
				bad(field+".protocol", "%s", unknownProtocol(p.Protocol))
			}
		}
		if p.Number == 0 && p.Protocol == "" {
			bad(field, "fixes nothing; give number, protocol or both")
		}
		t.portRules[p.Name] = p
	}
	if !validPort(o.FallbackPort) {
		bad("fallback_port", "%d is no port number; give one from 1 to 65535", o.FallbackPort)
	}

	var ok bool
	if t.defaultProtocol, ok = normalProtocol(o.Protocol.Default); !ok {
		bad("protocol.default", "%s", unknownProtocol(o.Protocol.Default))
	}
	t.o.Protocol.Keys = orNone(o.Protocol.Keys)
	for i, k := range t.o.Protocol.Keys {
		if k == "" {
			bad(fmt.Sprintf("protocol.keys[%d]", i), "is empty; give a metadata key")
		}
	}
	for i, tag := range orNone(o.Protocol.Tags) {
		if _, known := normalProtocol(tag); known {
			t.protocolTags.bare = append(t.protocolTags.bare, tag)
		} else if len(tag) > 1 && strings.ContainsAny(tag[len(tag)-1:], "=:|") {
			t.protocolTags.prefixes = append(t.protocolTags.prefixes, tag)
		} else {
			bad(fmt.Sprintf("protocol.tags[%d]", i), "%s is neither a known protocol nor a prefix that ends in =, : or |", quote(tag))
		}
	}

	t.meta = orNone(o.Labels.Meta)
	t.serviceMeta = orNone(o.ServiceLabels.Meta)
	switch o.Labels.Tags {
	case "all":
		t.bareTags, t.pairTags = true, true
	case "pairs":
		t.pairTags = true
	case "none":
	default:
		bad("labels.tags", "%s", notOneOf(o.Labels.Tags, "all", "pairs", "none"))
	}
	if o.Labels.Cluster != "none" {
		t.clusterLabel = o.Labels.Cluster
		if reason := checkLabelKey(o.Labels.Cluster); reason != "" {
			bad("labels.cluster", "%s", reason)
		}
	}
	checkAdded := func(field string, labels map[string]string) {
		for _, l := range sortedPairs(labels) {
			if reason := checkLabelKey(l.key); reason != "" {
				bad(field+"."+plain(l.key), "%s", reason)
			} else if !isLabelValue(l.value) {
				bad(field+"."+plain(l.key), "%s is no legal label value; use at most 63 letters, digits, - _ and ., beginning and ending with a letter or digit", quote(l.value))
			}
		}
	}
	checkAdded("labels.add", o.Labels.Add)
	checkAdded("service_labels.add", o.ServiceLabels.Add)
	t.addLabels = sortedPairs(o.Labels.Add)
	for _, a := range sortedPairs(o.Annotations.Add) {
		field := "annotations.add." + plain(a.key)
		switch {
		case a.key == healthChecksAnnotation:
			bad(field, "cannot be served: it makes Istio expect health from the workload; remove it")
		case !isLabelKey(a.key):
			bad(field, "is no legal annotation key; use at most 63 letters, digits, - _ and ., after an optional DNS name and /")
		case !utf8.ValidString(a.value):
			bad(field, "is not UTF-8")
		}
	}

	if strings.ContainsFunc(o.Locality.Region, badInLocality) {
		bad("locality.region", "%s has characters that a region cannot have (/ is one)", quote(o.Locality.Region))
	}
	if !slices.Contains([]string{"passing", "warning", "any"}, o.Health) {
		bad("health", "%s", notOneOf(o.Health, "passing", "warning", "any"))
	}
	if !slices.Contains([]string{"auto", "static", "dns"}, o.Resolution) {
		bad("resolution", "%s", notOneOf(o.Resolution, "auto", "static", "dns"))
	}
	if !slices.Contains([]string{"internal", "external"}, o.Location) {
		bad("location", "%s", notOneOf(o.Location, "internal", "external"))
	}
	for i, e := range o.ExportTo {
		if !isExportTo(e) {
			bad(fmt.Sprintf("export_to[%d]", i), "%s is neither ., *, ~ nor a namespace", quote(e))
		}
	}
	for i, n := range o.SubjectAltNames {
		if n == "" || strings.ContainsFunc(n, notPrintable) {
			bad(fmt.Sprintf("subject_alt_names[%d]", i), "%s is no name; give a DNS name or a URI", quote(n))
		}
	}
	if o.ServiceAccount != "" && !isSubdomain(o.ServiceAccount) {
		bad("service_account", "%s is no name of a service account; use lower-case letters, digits, - and .", quote(o.ServiceAccount))
	}
	if o.Network != "" && !isLabelValue(o.Network) {
		bad("network", "%s is no name of a network; use at most 63 letters, digits, - _ and .", quote(o.Network))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return t, nil
}

func unknownProtocol(p string) string {
	return quote(p) + " is no protocol that Istio knows; use one of tcp, udp, http, http2, https, http_proxy, grpc, grpc-web, tls, mongo, redis, mysql"
}

func notOneOf(value string, names ...string) string {
	return quote(value) + " is unknown; use one of " + strings.Join(names, ", ")
}

// orNone returns list, or nothing if it says none.
func orNone(list []string) []string {
	if len(list) == 1 && list[0] == "none" {
		return nil
	}
	return list
}

// checkLabelKey says why key cannot be a configured label, or "".
func checkLabelKey(key string) string {
	switch {
	case key == SelectorLabel, key == revisionLabel:
		return "is reserved; use another label"
	case !isLabelKey(key):
		return quote(key) + " is no legal label; use at most 63 letters, digits, - _ and ., after an optional DNS name and /"
	}
	return ""
}

func isExportTo(s string) bool {
	return s == "." || s == "*" || s == "~" || isDNSLabel(s)
}

func notPrintable(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }

func badInLocality(r rune) bool { return r == '/' || notPrintable(r) }
