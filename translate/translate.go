package translate

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"text/template"
	"unicode"
	"unicode/utf8"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Translator translates the services of one registry. It is immutable and safe
// for concurrent use.
type Translator struct {
	registry string
	o        Options // with defaults applied

	host, namespace, name *template.Template // name is nil for the default, the key's parts
	aliases               []*template.Template
	portName              *template.Template // nil for default names
	portRules             map[string]PortOptions
	protocolTags          protocolTags
	defaultProtocol       string
	meta, serviceMeta     globs
	addLabels             []pair // sorted by key
	bareTags, pairTags    bool
	clusterLabel          string

	selector            selector
	cidrs, excludeCIDRs []netip.Prefix
	localities          []locatedCIDR // narrowest first
	services, instances rules
	hostOfKey           bool   // the host depends on the key alone
	metadataLabels      []pair // of every resource
}

// locatedCIDR is a network and its locality.
type locatedCIDR struct {
	prefix   netip.Prefix
	locality registry.Locality
}

// New returns a translator for the named registry. The error joins a
// *[FieldError] for each error in the options.
func New(registryName string, o Options) (*Translator, error) {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &FieldError{"translate." + field, fmt.Sprintf(format, args...)})
	}
	if registryName == "" {
		errs = append(errs, &FieldError{"name", "is empty; give the registry a name"})
	}
	if _, ok := presets[o.Preset]; !ok && o.Preset != "" {
		bad("preset", "%s", notOneOf(o.Preset, sortedNames(presets)...))
	}
	o = o.Over(defaults)
	for _, s := range []*string{&o.ServiceAccount, &o.ServiceAccountKey} {
		if *s == "none" {
			*s = ""
		}
	}
	takeBack(o.Labels.Add)
	takeBack(o.ServiceLabels.Add)
	t := &Translator{registry: registryName, o: o, portRules: map[string]PortOptions{}}

	parse := func(field, text string) *template.Template {
		tmpl, err := parseTemplate(text)
		if err != nil {
			bad(field, "is not a usable template: %v", err)
		}
		return tmpl
	}
	t.host = parse("host", o.Host)
	t.namespace = parse("namespace", o.Namespace)
	if o.Name != "" {
		t.name = parse("name", o.Name)
	}

	for i, a := range o.Aliases {
		t.aliases = append(t.aliases, parse(fmt.Sprintf("aliases[%d]", i), a))
	}
	if o.PortName != "" {
		var err error
		if t.portName, err = parsePortName(o.PortName); err != nil {
			bad("port_name", "is not a usable template: %v", err)
		}
	}

	for i, p := range o.Ports {
		field := fmt.Sprintf("ports[%d]", i)
		if p.Name != "" && !isDNSLabel(p.Name) {
			bad(field+".name", "%s is not a DNS label; use lower-case letters, digits and dashes, at most 63", quote(p.Name))
		}
		if _, ok := t.portRules[p.Name]; ok {
			bad(field+".name", "%s is given twice; keep one", quote(p.Name))
		}
		if p.Number != 0 && !validPort(p.Number) {
			bad(field+".number", "%d is not a port number; give one from 1 to 65535, or none", p.Number)
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
	for i, p := range o.ExtraPorts {
		field := fmt.Sprintf("extra_ports[%d]", i)
		if !isDNSLabel(p.Name) {
			bad(field+".name", "%s is not a DNS label; use lower-case letters, digits and dashes, at most 63", quote(p.Name))
		}
		if !validPort(p.Number) {
			bad(field+".number", "%d is not a port number; give one from 1 to 65535", p.Number)
		}
		if p.Protocol != "" {
			if _, ok := normalProtocol(p.Protocol); !ok {
				bad(field+".protocol", "%s", unknownProtocol(p.Protocol))
			}
		}
		if slices.ContainsFunc(o.ExtraPorts[:i], func(q ExtraPort) bool { return q.Name == p.Name || q.Number == p.Number }) {
			bad(field, "another one has its name or its number; keep one")
		}
	}
	if !slices.Contains([]string{"lower", "keep"}, o.HostCase) {
		bad("host_case", "%s", notOneOf(o.HostCase, "lower", "keep"))
	}
	if !slices.Contains([]string{"auto", "instance", "fixed"}, o.PortPolicy) {
		bad("port_policy", "%s", notOneOf(o.PortPolicy, "auto", "instance", "fixed"))
	}
	if !validPort(o.FallbackPort) {
		bad("fallback_port", "%d is not a port number; give one from 1 to 65535", o.FallbackPort)
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

	t.o.Protocol.Guess = orNone(o.Protocol.Guess)
	for i, g := range t.o.Protocol.Guess {
		if !slices.Contains([]string{"check", "name", "number"}, g) {
			bad(fmt.Sprintf("protocol.guess[%d]", i), "%s", notOneOf(g, "check", "name", "number"))
		}
	}

	t.meta = orNone(o.Labels.Meta)
	if o.Labels.Illegal != "mend" && o.Labels.Illegal != "drop" {
		bad("labels.illegal", "%s", notOneOf(o.Labels.Illegal, "mend", "drop"))
	}
	if strings.ContainsFunc(o.Labels.Separators, func(r rune) bool { return r > unicode.MaxASCII }) {
		bad("labels.separators", "%s has characters beyond ASCII; use others", quote(o.Labels.Separators))
	}
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
				bad(field+"."+plain(l.key), "%s is not a legal label value; use at most 63 letters, digits, - _ and ., beginning and ending with a letter or digit", quote(l.value))
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
			bad(field, "is not a legal annotation key; use at most 63 letters, digits, - _ and ., after an optional DNS name and /")
		case !utf8.ValidString(a.value):
			bad(field, "is not UTF-8")
		}
	}

	if strings.ContainsFunc(o.Locality.Region, badInLocality) {
		bad("locality.region", "%s has characters that a region cannot have (/ is one)", quote(o.Locality.Region))
	}
	t.compileRules(bad)
	t.hostOfKey = len(t.services) == 0 && readsKeyOnly(o.Host)
	if !slices.Contains([]string{"exact", "whole", "none"}, o.Weights) {
		bad("weights", "%s", notOneOf(o.Weights, "exact", "whole", "none"))
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
			bad(fmt.Sprintf("subject_alt_names[%d]", i), "%s is not a name; give a DNS name or a URI", quote(n))
		}
	}
	if o.ServiceAccount != "" && !isSubdomain(o.ServiceAccount) {
		bad("service_account", "%s is not a name of a service account; use lower-case letters, digits, - and .", quote(o.ServiceAccount))
	}
	if o.Network != "" && !isLabelValue(o.Network) {
		bad("network", "%s is not a name of a network; use at most 63 letters, digits, - _ and .", quote(o.Network))
	}
	if o.ClusterID != "" {
		if !isLabelValue(o.ClusterID) {
			bad("cluster_id", "%s is no id of a cluster; use at most 63 letters, digits, - _ and .", quote(o.ClusterID))
		}
		t.addLabels = append(slices.DeleteFunc(t.addLabels, func(p pair) bool { return p.key == clusterIDLabel }), pair{clusterIDLabel, o.ClusterID})
	}
	if o.Revision != "" {
		if !isLabelValue(o.Revision) {
			bad("revision", "%s is not a revision; use at most 63 letters, digits, - _ and .", quote(o.Revision))
		}
		t.metadataLabels = []pair{{revisionLabel, o.Revision}}
	}
	if o.Subsets.Key != "" && !isLabelKey(o.Subsets.Key) {
		bad("subsets.key", "%s is not a label; use at most 63 letters, digits, - _ and ., after an optional DNS name and /", quote(o.Subsets.Key))
	}
	if o.Subsets.DestinationRule && o.Subsets.Key == "" {
		bad("subsets.key", "is missing; name the label that tells the versions apart, or leave subsets.destination_rule out")
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return t, nil
}

// takeBack deletes the labels with an empty value, which cancels a default.
func takeBack(labels map[string]string) {
	maps.DeleteFunc(labels, func(_, v string) bool { return v == "" })
}

// compileRules compiles selectors and rules.
func (t *Translator) compileRules(bad func(field, format string, args ...any)) {
	prefixes := func(field string, list []string) (all []netip.Prefix) {
		for i, text := range list {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				bad(fmt.Sprintf("%s[%d]", field, i), "%s is not a network; write it like 10.1.0.0/16", quote(text))
				continue
			}
			all = append(all, p.Masked())
		}
		return all
	}
	o := &t.o
	t.cidrs = prefixes("instances.cidrs", o.Instances.CIDRs)
	t.excludeCIDRs = prefixes("instances.exclude_cidrs", o.Instances.ExcludeCIDRs)
	for i, l := range o.Locality.CIDRs {
		field := fmt.Sprintf("locality.cidrs[%d]", i)
		p, err := netip.ParsePrefix(l.CIDR)
		if err != nil {
			bad(field+".cidr", "%s is not a network; write it like 10.1.0.0/16", quote(l.CIDR))
		}
		if slices.ContainsFunc(t.localities, func(x locatedCIDR) bool { return err == nil && x.prefix == p.Masked() }) {
			bad(field+".cidr", "%s is given twice; keep one", quote(l.CIDR))
		}
		parts := strings.Split(l.Locality, "/")
		if len(parts) > 3 || slices.ContainsFunc(parts, func(s string) bool { return s == "" || strings.ContainsFunc(s, badInLocality) }) {
			bad(field+".locality", "%s is not a locality; write region, region/zone or region/zone/subzone", quote(l.Locality))
		}
		parts = append(parts, "", "")
		t.localities = append(t.localities, locatedCIDR{p.Masked(), registry.Locality{Region: parts[0], Zone: parts[1], SubZone: parts[2]}})
	}
	slices.SortStableFunc(t.localities, func(a, b locatedCIDR) int { return b.prefix.Bits() - a.prefix.Bits() })
	var err error
	if t.selector, err = parseSelector(o.Instances.Selector); err != nil {
		bad("instances.selector", "%v", err)
	}
	t.services = compile("relabel.services", o.Relabel.Services, serviceFacts, bad)
	t.instances = compile("relabel.instances", o.Relabel.Instances, instanceFacts, bad)
}

func unknownProtocol(p string) string {
	return quote(p) + " is not a protocol that Istio knows; use one of tcp, udp, http, http2, https, http_proxy, grpc, grpc-web, tls, mongo, redis, mysql"
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

// checkLabelKey returns why key cannot be a configured label, or "".
func checkLabelKey(key string) string {
	switch {
	case key == SelectorLabel, key == revisionLabel:
		return "is reserved; use another label"
	case !isLabelKey(key):
		return quote(key) + " is not a legal label; use at most 63 letters, digits, - _ and ., after an optional DNS name and /"
	}
	return ""
}

func isExportTo(s string) bool {
	return s == "." || s == "*" || s == "~" || isDNSLabel(s)
}

func notPrintable(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }

func badInLocality(r rune) bool { return r == '/' || notPrintable(r) }
