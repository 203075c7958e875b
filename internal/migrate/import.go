package migrate

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Import converts the configuration of another bridge: McpBridge objects of
// Higress, the configuration of slime's meshregistry, the properties of Nacos
// with its module istio, or the flags of consul2istio (a command line, or a
// Deployment that contains it). builtIn are the types of registries of this
// program. Fields without an equivalent become comments with their lines.
// Secrets are never copied; environment variables replace them.
func Import(data []byte, builtIn []string) (string, error) {
	im := &importer{builtIn: builtIn}
	docs, yamlErr := documents(data)
	switch {
	case yamlErr == nil && slices.ContainsFunc(docs, isKind("McpBridge")):
		for _, d := range docs {
			im.mcpBridge(d)
		}
	case yamlErr == nil && slices.ContainsFunc(docs, func(n *yaml.Node) bool { return slimeSources(n) != nil }):
		for _, d := range docs {
			if m := slimeSources(d); m != nil {
				im.slime(m)
			}
		}
	case bytes.Contains(data, []byte("consulAddress")):
		im.consul2istio(data)
	case properties.Match(data):
		im.nacosIstio(data)
	case yamlErr != nil:
		return "", fmt.Errorf("neither YAML nor properties nor flags: %w", yamlErr)
	default:
		return "", errors.New("nothing in it is known: give McpBridge objects, slime's meshregistry configuration (NacosSource, ...), " +
			"Nacos' application.properties with nacos.istio..., or consul2istio's flags (--consulAddress)")
	}
	return im.text(), nil
}

// importer collects the registries of the new configuration.
type importer struct {
	builtIn    []string
	head       []string // comments on the whole file
	registries []*imported
	names      map[string]bool
}

// imported is one registry.
type imported struct {
	name, kind string
	config     []string // lines in config
	translate  []string // lines in translate
	comments   []string
}

func (r *imported) set(key, value string)  { r.config = append(r.config, key+": "+value) }
func (r *imported) rule(key, value string) { r.translate = append(r.translate, key+": "+value) }
func (r *imported) host(template string) {
	r.rule("host", quoted(template))
	r.rule("name", quoted(template))
}

func (r *imported) note(format string, a ...any) {
	r.comments = append(r.comments, fmt.Sprintf(format, a...))
}

var badInName = regexp.MustCompile(`[^a-z0-9]+`)

// add adds a registry with a unique name.
func (im *importer) add(name, kind string) *imported {
	if im.names == nil {
		im.names = map[string]bool{}
	}
	name = strings.Trim(badInName.ReplaceAllString(strings.ToLower(name), "-"), "-")
	name = strings.Trim(name[:min(len(name), 55)], "-")
	if name == "" {
		name = kind
	}
	unique := name
	for n := 2; im.names[unique]; n++ {
		unique = name + "-" + strconv.Itoa(n)
	}
	im.names[unique] = true
	r := &imported{name: unique, kind: kind}
	im.registries = append(im.registries, r)
	return r
}

// text returns the configuration.
func (im *importer) text() string {
	var b strings.Builder
	for _, c := range im.head {
		fmt.Fprintf(&b, "# %s\n", c)
	}
	b.WriteString("listen: {xds: 127.0.0.1:15051, admin: 127.0.0.1:15080}\n")
	if slices.ContainsFunc(im.registries, func(r *imported) bool { return slices.Contains(im.builtIn, r.kind) }) {
		b.WriteString("registries:\n")
	} else {
		b.WriteString("registries: [] # none of them has an adapter in this program\n")
	}
	for _, r := range im.registries {
		prefix := ""
		if !slices.Contains(im.builtIn, r.kind) {
			prefix = "# "
			fmt.Fprintf(&b, "# There is no adapter %s in this program: with an executable isthmus-adapter-%s in plugin_dir take the marks away.\n", r.kind, r.kind)
		}
		line := func(format string, a ...any) { b.WriteString(prefix + fmt.Sprintf(format, a...) + "\n") }
		line("- name: %s", r.name)
		line("  type: %s", r.kind)
		if len(r.config) > 0 {
			line("  config:")
		}
		for _, l := range r.config {
			line("    %s", l)
		}
		if len(r.translate) > 0 {
			line("  translate:")
		}
		for _, l := range r.translate {
			line("    %s", l)
		}
		for _, c := range r.comments {
			fmt.Fprintf(&b, "  # %s\n", c)
		}
	}
	return b.String()
}

// quoted returns a text as YAML that is read back unchanged, even with ${.
func quoted(s string) string { return strconv.Quote(strings.ReplaceAll(s, "${", "$${")) }

func list(items []string) string {
	out := make([]string, 0, len(items))
	for _, s := range items {
		out = append(out, quoted(s))
	}
	return "[" + strings.Join(out, ", ") + "]"
}

func documents(data []byte) (docs []*yaml.Node, err error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var n yaml.Node
		switch err := dec.Decode(&n); {
		case errors.Is(err, io.EOF):
			return docs, nil
		case err != nil:
			return nil, err
		}
		if len(n.Content) > 0 {
			docs = append(docs, n.Content[0])
		}
	}
}

// block is a mapping whose fields are consumed one by one; the remaining fields
// have no equivalent. As in Go's JSON, names are case-insensitive.
type block struct {
	path   string
	fields map[string]*yaml.Node // by name in lower case
	names  []string              // as spelled, in order
}

func newBlock(path string, n *yaml.Node) *block {
	b := &block{path: path, fields: map[string]*yaml.Node{}}
	if n != nil && n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			b.names = append(b.names, n.Content[i].Value)
			b.fields[strings.ToLower(n.Content[i].Value)] = n.Content[i+1]
		}
	}
	return b
}

// take consumes a field and returns it, nil if it is missing.
func (b *block) take(name string) *yaml.Node {
	n := b.fields[strings.ToLower(name)]
	delete(b.fields, strings.ToLower(name))
	return n
}

// text consumes a scalar.
func (b *block) text(name string) string {
	if n := b.take(name); n != nil && n.Kind == yaml.ScalarNode && n.Tag != "!!null" {
		return n.Value
	}
	return ""
}

// texts consumes a list of scalars, or a single one.
func (b *block) texts(name string) (out []string) {
	n := b.take(name)
	switch {
	case n == nil:
	case n.Kind == yaml.SequenceNode:
		for _, c := range n.Content {
			if c.Kind == yaml.ScalarNode && c.Value != "" {
				out = append(out, c.Value)
			}
		}
	case n.Kind == yaml.ScalarNode && n.Value != "":
		out = []string{n.Value}
	}
	return out
}

// rest notes the remaining fields as those without an equivalent.
func (b *block) rest(r *imported, why map[string]string) {
	for _, name := range b.names {
		n := b.fields[strings.ToLower(name)]
		if n == nil {
			continue
		}
		value := "..."
		if n.Kind == yaml.ScalarNode {
			value = n.Value
			if secret.MatchString(name) {
				value = "<secret>"
			}
		}
		reason := why[strings.ToLower(name)]
		if reason == "" {
			reason = "no equal"
		}
		r.note("line %d: %s.%s: %s: %s", n.Line, b.path, name, oneLine(value), reason)
	}
}

var secret = regexp.MustCompile(`(?i)password|secret|token|accesskey`)

// oneLine returns s on one line, for a comment.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0x85 || r == 0x2028 || r == 0x2029 {
			return ' '
		}
		return r
	}, s)
}

func isKind(kind string) func(*yaml.Node) bool {
	return func(n *yaml.Node) bool { return newBlock("", n).text("kind") == kind }
}

// variable returns an environment variable that replaces a secret.
func variable(r *imported, word string) string {
	return "${" + strings.ToUpper(strings.ReplaceAll(r.name, "-", "_")) + "_" + word + "}"
}

// mcpBridge converts an object of Higress.
func (im *importer) mcpBridge(doc *yaml.Node) {
	if !isKind("McpBridge")(doc) {
		im.head = append(im.head, fmt.Sprintf("line %d: an object that is no McpBridge: no equal", doc.Line))
		return
	}
	spec := newBlock("spec", newBlock("", doc).take("spec"))
	registries := spec.take("registries")
	if registries == nil {
		return
	}
	for i, n := range registries.Content {
		b := newBlock(fmt.Sprintf("spec.registries[%d]", i), n)
		kind, name, domain, port := b.text("type"), b.text("name"), b.text("domain"), b.text("port")
		address := domain
		if port != "" {
			address += ":" + port
		}
		why := map[string]string{
			"nacosrefreshinterval": "changes are pushed", "consulrefreshinterval": "changes are pushed by blocking queries",
			"protocol": "set translate.protocol.default, if the registry does not say it", "sni": "set it in a DestinationRule",
			"vport": "set translate.ports with the number; that of single services needs a registry of their own",
		}
		switch kind {
		case "nacos", "nacos2", "nacos3":
			r := im.add(name, "nacos")
			r.set("servers", list([]string{address}))
			if kind == "nacos" {
				r.set("protocol", "http")
			}
			namespaces := b.texts("nacosNamespaceId")
			b.text("nacosNamespace") // the id is sufficient
			if len(namespaces) == 0 {
				namespaces = []string{"public"}
			}
			r.set("namespaces", list(namespaces))
			if groups := b.texts("nacosGroups"); len(groups) > 0 {
				r.set("groups", list(groups))
			} else {
				r.set("groups", list([]string{"DEFAULT_GROUP"}))
			}
			if b.text("nacosAccessKey") != "" {
				b.text("nacosSecretKey")
				r.set("access_key", quoted2(variable(r, "ACCESS_KEY")))
				r.set("secret_key", quoted2(variable(r, "SECRET_KEY")))
			}
			if s := b.text("authSecretName"); s != "" {
				r.set("username", quoted2(variable(r, "USERNAME"))+" # nacosUsername of the secret "+oneLine(s))
				r.set("password", quoted2(variable(r, "PASSWORD"))+" # nacosPassword of the secret "+oneLine(s))
			}
			why["nacosaddressserver"] = "name the servers themselves in config.servers"
			r.rule("preset", "higress")
			im.vport(b, r)
			b.rest(r, why)
		case "consul":
			r := im.add(name, "consul")
			r.set("address", quoted(address))
			if dc := b.text("consulDatacenter"); dc != "" {
				r.set("datacenters", list([]string{dc}))
			}
			if tag := b.text("consulServiceTag"); tag != "" {
				r.set("tags", list([]string{tag}))
			}
			if s := b.text("authSecretName"); s != "" {
				r.set("token", quoted2(variable(r, "TOKEN"))+" # consulToken of the secret "+oneLine(s))
				r.set("insecure", "true # the token is readable on the way, as before; better is an https address")
			}
			r.rule("preset", "higress")
			im.vport(b, r)
			b.rest(r, why)
		case "eureka", "zookeeper":
			r := im.add(name, kind)
			r.set("servers", list([]string{address}))
			r.rule("preset", "higress")
			im.vport(b, r)
			if kind == "zookeeper" {
				im.zkServicesPath(b, r)
			}
			b.rest(r, why)
		case "static", "dns":
			r := im.add(name, "static")
			endpoints := strings.Split(domain, ",")
			for i, e := range endpoints {
				if endpoints[i] = strings.TrimSpace(e); port != "" && !strings.Contains(e, ":") {
					endpoints[i] += ":" + port
				}
			}
			r.set("services", fmt.Sprintf("[{name: %s, endpoints: %s}]", quoted(name), list(endpoints)))
			r.rule("preset", "higress")
			if kind == "dns" {
				r.host("{{.Name | dash}}.dns")
			}
			im.vport(b, r)
			b.rest(r, why)
		default:
			im.head = append(im.head, fmt.Sprintf("line %d: spec.registries[%d] %s of type %s: no equal; write %s into a file of the adapter file (docs/registries/file.md), with translate: {preset: higress}",
				n.Line, i, oneLine(name), oneLine(kind), oneLine(domain)))
		}
	}
}

// zkServicesPath converts the paths of applications that Higress follows
// besides /dubbo and /services, each to a registry of its own.
func (im *importer) zkServicesPath(b *block, r *imported) {
	n, done := b.fields["zkservicespath"], map[string]bool{"/dubbo": true, "/services": true}
	for _, text := range b.texts("zkServicesPath") {
		path := strings.TrimSuffix(text, "/")
		if done[path] {
			continue
		}
		done[path] = true
		words, absolute := strings.CutPrefix(path, "/")
		if words = strings.ReplaceAll(words, "/", "-"); !absolute || words == "" || strings.HasPrefix(path, "/dubbo/") || strings.Contains(path, "{{") {
			r.note("line %d: %s.zkServicesPath: %s: no equal; config.applications is a path outside of /dubbo, below the root", n.Line, b.path, oneLine(text))
			continue
		}
		more := im.add(r.name+"-"+words, r.kind)
		more.config, more.translate = slices.Clone(r.config), slices.Clone(r.translate)
		more.set("hosts", "[applications]")
		more.set("applications", quoted(path))
		more.host("{{.Name | dash}}." + words + ".zookeeper")
	}
}

// vport converts the port under which Higress serves a registry's services.
func (im *importer) vport(b *block, r *imported) {
	n := b.fields["vport"]
	if n == nil {
		return
	}
	v := newBlock(b.path+".vport", n)
	if number, err := strconv.Atoi(v.text("default")); err == nil && number > 0 && number < 65536 {
		b.take("vport")
		r.rule("port_policy", "fixed")
		r.rule("fallback_port", strconv.Itoa(number))
		v.rest(r, map[string]string{"services": "a service with a number of its own needs a registry entry of its own (services.include)"})
	}
}

// quoted2 returns a text as YAML in which variables are expanded.
func quoted2(s string) string { return strconv.Quote(s) }

// slimeSources returns the block with slime's sources.
func slimeSources(n *yaml.Node) *yaml.Node {
	if n == nil {
		return nil
	}
	if n.Kind == yaml.MappingNode {
		b := newBlock("", n)
		for _, name := range []string{"nacossource", "eurekasource", "zookeepersource"} {
			if b.fields[name] != nil {
				return n
			}
		}
	}
	for _, c := range n.Content {
		if found := slimeSources(c); found != nil {
			return found
		}
	}
	return nil
}

// slime converts the configuration of meshregistry.
func (im *importer) slime(n *yaml.Node) {
	all := newBlock("", n)
	sources := 0
	for _, kind := range []string{"nacos", "eureka", "zookeeper"} {
		name := map[string]string{"nacos": "NacosSource", "eureka": "EurekaSource", "zookeeper": "ZookeeperSource"}[kind]
		node := all.take(name)
		if node == nil {
			continue
		}
		b := newBlock(name, node)
		if enabled := b.text("Enabled"); enabled != "true" {
			im.head = append(im.head, fmt.Sprintf("line %d: %s is not enabled", node.Line, name))
			continue
		}
		sources++
		r := im.add(kind, kind)
		r.set("servers", list(b.texts("Address")))
		why := map[string]string{
			"refreshperiod": "changes are pushed where the registry can", "waittime": "a type is held until the first listing is complete",
			"mode": "changes are pushed where the registry can", "labelpatch": "labels are made legal in any case",
			"endpointselectors": "write it as translate.instances.selector", "allnamespaces": `set config.namespaces to ["*"]`,
			"defaultservicens": "set translate.namespace", "resourcens": "set translate.namespace",
		}
		preset := "slime"
		if b.text("GatewayModel") == "true" {
			preset = "slime-gateway"
		}
		r.rule("preset", preset)
		if kind == "nacos" {
			if ns := b.text("Namespace"); ns != "" {
				r.set("namespaces", list([]string{ns}))
			}
			if group := b.text("Group"); group != "" {
				r.set("groups", list([]string{group}))
			}
			if user := b.text("Username"); user != "" {
				r.set("username", quoted(user))
				b.text("Password")
				r.set("password", quoted2(variable(r, "PASSWORD")))
			}
		}
		suffix := b.text("K8sDomainSuffix")
		if nsHost := b.text("NsHost"); preset == "slime" && kind != "zookeeper" && (suffix == "false" || nsHost == "false") {
			host := "{{.Name | lower | dash}}"
			if nsHost != "false" {
				host += `.{{.InstanceMeta "k8sNs" | default "` + kind + `"}}`
			}
			if suffix != "false" {
				host += ".svc.cluster.local"
			}
			r.rule("host", strconv.Quote(host))
		}
		if port := b.text("SvcPort"); port != "" && port != "80" && kind != "zookeeper" {
			r.rule("extra_ports", "[{name: http-"+port+", number: "+port+", protocol: http}]")
		}
		b.rest(r, why)
	}
	whole := &imported{}
	all.rest(whole, map[string]string{"revision": "set translate.revision", "mcp": "set listen.xds"})
	for _, c := range whole.comments {
		im.head = append(im.head, strings.Replace(c, ": .", ": ", 1))
	}
	if sources == 0 {
		im.head = append(im.head, "no source is enabled")
	}
}

var (
	properties = regexp.MustCompile(`(?m)^\s*nacos\.[\w.-]+\s*[=:]`)
	property   = regexp.MustCompile(`^\s*([\w.\[\]-]+)\s*[=:]\s*(.*?)\s*$`)
)

// nacosIstio converts the properties of a Nacos server with the module istio.
func (im *importer) nacosIstio(data []byte) {
	r := im.add("nacos", "nacos")
	port, context, auth := "8848", "/nacos", false
	type left struct {
		line       int
		key, value string
	}
	var rest []left
	n := 0
	for line := range strings.Lines(string(data)) {
		n++
		text := strings.TrimSpace(line)
		m := property.FindStringSubmatch(text)
		if text == "" || text[0] == '#' || text[0] == '!' || m == nil {
			continue
		}
		switch key, value := m[1], m[2]; key {
		case "server.port", "nacos.server.main.port":
			port = value
		case "server.servlet.context-path", "server.servlet.contextPath", "nacos.server.contextPath":
			context = value
		case "nacos.core.auth.enabled":
			auth = value == "true"
		case "nacos.istio.mcp.server.enabled":
			if value != "true" {
				im.head = append(im.head, fmt.Sprintf("line %d: %s: %s: the module istio is off", n, key, oneLine(value)))
			}
		default:
			if strings.HasPrefix(key, "nacos.istio.") {
				rest = append(rest, left{n, key, value})
			}
		}
	}
	r.set("servers", list([]string{"127.0.0.1:" + port})+" # the servers of this cluster")
	if context != "/nacos" {
		r.set("context_path", quoted(context))
	}
	r.set("namespaces", `["*"]`)
	if auth {
		r.set("username", quoted2(variable(r, "USERNAME")))
		r.set("password", quoted2(variable(r, "PASSWORD")))
	}
	r.rule("preset", "nacos-istio")
	why := map[string]string{
		"nacos.istio.server.port": "set listen.xds; istiod's configSource names this address", "nacos.istio.domain.suffix": "set translate.host",
		"nacos.istio.server.full":    "a sink gets what it can take: no choice",
		"nacos.istio.debounce.after": "changes are sent at once, in one message while a sink is slow", "nacos.istio.debounce.max": "as debounce.after",
	}
	for _, l := range rest {
		switch reason := why[l.key]; {
		case l.key == "nacos.istio.domain.suffix" && l.value != "nacos":
			r.rule("host", strconv.Quote(`{{with .InstanceMeta "istio.hostname"}}{{.}}{{else}}{{.Name}}.{{.Group | dash}}.{{.Namespace}}{{end}}.`+l.value))
		case reason != "":
			r.note("line %d: %s: %s: %s", l.line, l.key, oneLine(l.value), reason)
		default:
			r.note("line %d: %s: %s: no equal", l.line, l.key, oneLine(l.value))
		}
	}
}

var flag = regexp.MustCompile(`--?([A-Za-z][\w-]*)(?:[= ]+"?([^\s"',\]]+))?`)

// consul2istio converts the flags of the program, anywhere in a file.
func (im *importer) consul2istio(data []byte) {
	r := im.add("consul", "consul")
	address := "127.0.0.1:8500"
	n := 0
	// A flag and its value may be consecutive items of a list.
	joined := regexp.MustCompile(`(--?consulAddress)"?\s*\n\s*-\s*`).ReplaceAllString(string(data), "$1=")
	for line := range strings.Lines(joined) {
		n++
		if strings.HasPrefix(strings.TrimSpace(line), "#") {
			continue
		}
		for _, m := range flag.FindAllStringSubmatchIndex(line, -1) {
			if m[0] > 0 && !strings.ContainsRune(" \t\"'[-", rune(line[m[0]-1])) {
				continue // a dash inside a word
			}
			value := ""
			if m[4] >= 0 {
				value = line[m[4]:m[5]]
			}
			switch name := line[m[2]:m[3]]; name {
			case "consulAddress":
				address = value
			case "fqdn", "enableDefaultPort":
				r.note("line %d: --%s %s: see docs/migrate/aeraki-consul.md", n, name, oneLine(value))
			default:
				r.note("line %d: --%s %s: no equal", n, name, oneLine(value))
			}
		}
	}
	r.set("address", quoted(address))
	r.rule("preset", "aeraki-consul")
}
