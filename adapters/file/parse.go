package file

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	_ "istio.io/api/networking/v1alpha3" // registers the messages of documents
	_ "istio.io/api/networking/v1beta1"
	_ "istio.io/api/security/v1beta1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// content is the content of one file. It is immutable.
type content struct {
	services  []*service
	resources []*resource
}

// service is a service in the neutral model.
type service struct {
	registry.Service
	instances []registry.Instance
	line      int
}

// resource is an Istio resource.
type resource struct {
	id   resourceID
	res  *mcp.Resource
	line int
}

// resourceID identifies a resource for removal.
type resourceID struct {
	collection string
	name       string // "namespace/name"
}

// broken is the error of an invalid file.
type broken struct {
	findings []finding
	more     int // number of further findings
}

// Error returns the findings as "LINE: TEXT", joined by "; ".
func (b *broken) Error() string { return b.in("") }

// in returns the findings as "NAME:LINE: TEXT", joined by "; ".
func (b *broken) in(name string) string {
	parts := make([]string, 0, len(b.findings)+1)
	for _, f := range b.findings {
		switch {
		case f.line == 0 && name == "":
			parts = append(parts, f.text)
		case f.line == 0:
			parts = append(parts, name+": "+f.text)
		case name == "":
			parts = append(parts, fmt.Sprintf("%d: %s", f.line, f.text))
		default:
			parts = append(parts, fmt.Sprintf("%s:%d: %s", name, f.line, f.text))
		}
	}
	if b.more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", b.more))
	}
	return strings.Join(parts, "; ")
}

// parser reads the documents of one file.
type parser struct {
	reader
	namespace string // of resources without one
	content   content
	services  map[registry.Key]int // lines
	resources map[resourceID]int
}

// yamlLine matches the line in an error of the YAML library.
var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// grammar matches errors of the YAML library whose lines count from 0, with 0
// omitted. Lines of all others count from 1.
var grammar = regexp.MustCompile(`^did not find expected (<stream-start>|<document start>|node content|'-' indicator|key|',' or .*)$|^found (undefined tag handle|duplicate %|incompatible YAML)`)

// encoding matches errors of the YAML library about invalid text, which have no
// line. All other errors without a line are in the first.
var encoding = regexp.MustCompile(`UTF-|octet|surrogate|control characters|input error`)

// syntaxError parses an error of the YAML library. Line 0 stands for an unknown
// position.
func syntaxError(err error) finding {
	text := err.Error()
	m := yamlLine.FindStringSubmatch(text)
	if m == nil {
		return finding{0, text}
	}
	f := finding{text: text[len(m[0]):]}
	f.line, _ = strconv.Atoi(m[1])
	if grammar.MatchString(f.text) || m[1] == "" && !encoding.MatchString(f.text) {
		f.line++
	}
	return f
}

// parse reads a file. Istio resources without a namespace get the given one.
// The error is a *broken.
func parse(data []byte, namespace string) (*content, error) {
	p := &parser{
		reader:    reader{budget: 4*len(data) + 1<<20},
		namespace: namespace,
		services:  map[registry.Key]int{},
		resources: map[resourceID]int{},
	}
	for dec := yaml.NewDecoder(bytes.NewReader(data)); ; {
		var doc yaml.Node
		err := dec.Decode(&doc)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			f := syntaxError(err)
			p.failAt(f.line, "%s", f.text)
			break // the decoder cannot continue
		}
		if doc.Kind != yaml.DocumentNode || len(doc.Content) == 0 {
			continue
		}
		if n := p.deref(doc.Content[0]); n != nil && !isNull(n) {
			p.document(n, true)
		}
	}
	if len(p.findings) > 0 {
		return nil, &broken{p.findings, p.more}
	}
	return &p.content, nil
}

// document reads one document, or one item of a list of resources.
func (p *parser) document(n *yaml.Node, mayBeList bool) {
	const what = "a document"
	if n.Kind != yaml.MappingNode {
		p.fail(n, "%s must be a mapping with services, or with apiVersion and kind, not %s", what, kindOf(n))
		return
	}
	var apiVersion, kind *yaml.Node
	for _, pair := range p.pairs(n, 0) {
		switch pair.key.Value {
		case "apiVersion":
			apiVersion = pair.value
		case "kind":
			kind = pair.value
		}
	}
	switch {
	case apiVersion == nil && kind == nil && !mayBeList:
		p.fail(n, "an item of a List must have apiVersion and kind")
	case apiVersion == nil && kind == nil:
		if len(n.Content) == 0 {
			p.fail(n, "%s must have services, or apiVersion and kind", what)
		}
		p.fields(n, what, field{"services", func(n *yaml.Node) { p.items(n, "services", p.service) }})
	case apiVersion == nil:
		p.fail(n, "kind is there, and apiVersion is missing")
	case kind == nil:
		p.fail(n, "apiVersion is there, and kind is missing")
	case apiVersion.Value == "v1" && kind.Value == "List" && mayBeList:
		p.fields(n, "a List", field{"apiVersion", nil}, field{"kind", nil}, field{"metadata", nil}, field{"items", func(n *yaml.Node) {
			p.items(n, "items", func(n *yaml.Node) { p.document(n, false) })
		}})
	default:
		p.resource(n, apiVersion, kind)
	}
}

// service reads a service in the neutral model.
func (p *parser) service(n *yaml.Node) {
	const what = "a service"
	svc := &service{line: n.Line}
	var instances *yaml.Node
	if !p.fields(
		n, what,
		field{"name", func(n *yaml.Node) { svc.Key.Name = p.nonEmpty(n, "name") }},
		field{"group", func(n *yaml.Node) { svc.Key.Group = p.text(n, "group") }},
		field{"namespace", func(n *yaml.Node) { svc.Key.Namespace = p.text(n, "namespace") }},
		field{"meta", func(n *yaml.Node) { svc.Meta = p.textMap(n, "meta") }},
		field{"tags", func(n *yaml.Node) { svc.Tags = p.texts(n, "tags") }},
		field{"ports", func(n *yaml.Node) { svc.Ports = p.ports(n) }},
		field{"instances", func(n *yaml.Node) { instances = n }},
	) {
		return
	}
	if svc.Key.Name == "" {
		p.fail(n, "the service has no name")
		return
	}
	if line := p.services[svc.Key]; line != 0 {
		p.fail(n, "service %s is defined in line %d already; make one of them", svc.Key, line)
		return
	}
	p.services[svc.Key] = max(1, n.Line)
	if instances != nil {
		ids := map[string]int{}
		p.items(instances, "instances", func(n *yaml.Node) {
			inst, ok := p.instance(n, svc)
			if !ok {
				return
			}
			if line := ids[inst.ID]; line != 0 {
				p.fail(n, "instance %s of service %s is defined in line %d already; give each an id of its own", quote(inst.ID), svc.Key, line)
				return
			}
			ids[inst.ID] = max(1, n.Line)
			svc.instances = append(svc.instances, inst)
		})
	}
	p.content.services = append(p.content.services, svc)
}

var healths = map[string]registry.Health{
	"unknown": registry.HealthUnknown, "passing": registry.HealthPassing, "warning": registry.HealthWarning, "critical": registry.HealthCritical,
}

// instance reads an instance of svc.
func (p *parser) instance(n *yaml.Node, svc *service) (inst registry.Instance, ok bool) {
	before := len(p.findings) + p.more
	var port, ports *yaml.Node
	if !p.fields(
		n, "an instance",
		field{"id", func(n *yaml.Node) { inst.ID = p.nonEmpty(n, "id") }},
		field{"address", func(n *yaml.Node) { inst.Address = p.nonEmpty(n, "address") }},
		field{"port", func(n *yaml.Node) { port = n }},
		field{"ports", func(n *yaml.Node) { ports = n }},
		field{"meta", func(n *yaml.Node) { inst.Meta = p.textMap(n, "meta") }},
		field{"tags", func(n *yaml.Node) { inst.Tags = p.texts(n, "tags") }},
		field{"weight", func(n *yaml.Node) { inst.Weight = new(p.share(n, "weight")) }},
		field{"health", func(n *yaml.Node) {
			s := p.text(n, "health")
			h, known := healths[s]
			if !known {
				p.fail(n, "health must be passing, warning, critical or unknown, not %s", quote(s))
			}
			inst.Health = h
		}},
		field{"disabled", func(n *yaml.Node) { inst.Disabled = p.boolean(n, "disabled") }},
		field{"locality", func(n *yaml.Node) { inst.Locality = p.locality(n) }},
		field{"cluster", func(n *yaml.Node) { inst.Cluster = p.text(n, "cluster") }},
		field{"node", func(n *yaml.Node) { inst.Node = p.text(n, "node") }},
	) {
		return inst, false
	}
	switch {
	case port != nil && ports != nil:
		p.fail(port, "an instance has port or ports, not both")
	case port != nil:
		inst.Ports = []registry.Port{{Number: p.port(port, "port")}}
		if len(svc.Ports) == 1 { // with a single port its name may be omitted
			inst.Ports[0].Name, inst.Ports[0].Protocol = svc.Ports[0].Name, svc.Ports[0].Protocol
		}
	case ports != nil:
		inst.Ports = p.ports(ports)
	default:
		inst.Ports = svc.Ports
	}
	if len(p.findings)+p.more != before {
		return inst, false
	}
	if inst.Address == "" {
		p.fail(n, "the instance has no address")
		return inst, false
	}
	if len(inst.Ports) == 0 {
		p.fail(n, "the instance has no port, and the service has none that it could take over")
		return inst, false
	}
	if inst.ID == "" {
		inst.ID = net.JoinHostPort(inst.Address, strconv.Itoa(inst.Ports[0].Number))
	}
	return inst, true
}

// ports reads a list of ports: mappings, or bare numbers.
func (p *parser) ports(n *yaml.Node) (all []registry.Port) {
	lines := map[string]int{}
	p.items(n, "ports", func(n *yaml.Node) {
		var port registry.Port
		if n.Kind == yaml.ScalarNode {
			port.Number = p.port(n, "a port")
		} else {
			numbered := false
			if p.fields(
				n, "a port",
				field{"name", func(n *yaml.Node) { port.Name = p.text(n, "name") }},
				field{"number", func(n *yaml.Node) { port.Number, numbered = p.port(n, "number"), true }},
				field{"protocol", func(n *yaml.Node) { port.Protocol = p.text(n, "protocol") }},
			) && !numbered {
				p.fail(n, "the port has no number")
			}
		}
		if line := lines[port.Name]; line != 0 {
			p.fail(n, "the port in line %d has the name %s already; give each port a name of its own", line, quote(port.Name))
			return
		}
		lines[port.Name] = max(1, n.Line)
		all = append(all, port)
	})
	return all
}

func (p *parser) locality(n *yaml.Node) (l registry.Locality) {
	s := p.text(n, "locality")
	parts := strings.Split(s, "/")
	if len(parts) > 3 || s != "" && parts[0] == "" {
		p.fail(n, "locality must be region, region/zone or region/zone/subzone, not %s", quote(s))
		return l
	}
	parts = append(parts, "", "")
	return registry.Locality{Region: parts[0], Zone: parts[1], SubZone: parts[2]}
}

var version = regexp.MustCompile(`^v[1-9][0-9]*((alpha|beta)[1-9][0-9]*)?$`)

// specLine matches the line in an error of protojson.
var specLine = regexp.MustCompile(`^proto:.{1,3}\(line (\d+):\d+\): `)

// resource reads an Istio resource.
func (p *parser) resource(n, apiVersion, kind *yaml.Node) {
	group, v, _ := strings.Cut(apiVersion.Value, "/")
	name, message := collection.OfKind(apiVersion.Value, kind.Value)
	if message == "" || !version.MatchString(v) {
		known := "; it may be one of " + strings.Join(slices.Sorted(slices.Values(collection.All())), ", ")
		if message != "" {
			known = "; the version is not of the form v1 or v1beta1"
		} else if group == "networking.istio.io" || group == "security.istio.io" {
			var kinds []string
			for _, c := range collection.All() {
				if k, ok := strings.CutPrefix(c, group+"/"); ok {
					kinds = append(kinds, k)
				}
			}
			slices.Sort(kinds)
			known = "; kinds of this group are " + strings.Join(kinds, ", ")
		}
		p.fail(kind, "apiVersion %s, kind %s is nothing that can be published%s", quote(apiVersion.Value), quote(kind.Value), known)
		return
	}

	before := len(p.findings) + p.more
	var (
		metadata, spec   *yaml.Node
		resourceName, ns string
		meta             = &mcp.Metadata{}
	)
	p.fields(
		n, "a "+kind.Value,
		field{"apiVersion", nil}, field{"kind", nil},
		field{"metadata", func(n *yaml.Node) { metadata = n }},
		field{"spec", func(n *yaml.Node) { spec = n }},
		field{"status", nil},
	)
	if metadata == nil {
		p.fail(n, "metadata is missing; it needs a name")
		return
	}
	ns = p.namespace
	p.fields(
		metadata, "metadata",
		field{"name", func(n *yaml.Node) {
			if resourceName = p.nonEmpty(n, "metadata.name"); resourceName != "" && !isDNSName(resourceName) {
				p.fail(n, "metadata.name %s is not legal; use lower-case letters, digits, dashes and dots", quote(resourceName))
			}
		}},
		field{"namespace", func(n *yaml.Node) {
			if ns = p.nonEmpty(n, "metadata.namespace"); ns != "" && !isDNSLabel(ns) {
				p.fail(n, "metadata.namespace %s is not legal; use lower-case letters, digits and dashes, 63 at most", quote(ns))
			}
		}},
		field{"labels", func(n *yaml.Node) { meta.Labels = p.textMap(n, "metadata.labels") }},
		field{"annotations", func(n *yaml.Node) { meta.Annotations = p.textMap(n, "metadata.annotations") }},
		// Fields that a cluster adds.
		field{"creationTimestamp", nil}, field{"deletionGracePeriodSeconds", nil}, field{"deletionTimestamp", nil}, field{"finalizers", nil},
		field{"generateName", nil}, field{"generation", nil}, field{"managedFields", nil}, field{"ownerReferences", nil},
		field{"resourceVersion", nil}, field{"selfLink", nil}, field{"uid", nil},
	)
	if len(p.findings)+p.more != before {
		return
	}
	if resourceName == "" {
		p.fail(metadata, "metadata has no name")
		return
	}
	meta.Name = ns + "/" + resourceName

	mt, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(message))
	if err != nil {
		panic("BUG: a collection without its message: " + err.Error())
	}
	body := mt.New().Interface()
	if spec != nil {
		if spec.Kind != yaml.MappingNode {
			p.fail(spec, "spec must be a mapping, not %s", kindOf(spec))
			return
		}
		w := jsonWriter{reader: &p.reader, line: spec.Line}
		if !w.value(spec, 0) {
			return
		}
		if err := protojson.Unmarshal(w.buf, body); err != nil {
			line, text := 1, strings.TrimLeft(strings.TrimPrefix(err.Error(), "proto:"), " \u00a0")
			if m := specLine.FindStringSubmatch(err.Error()); m != nil {
				line, _ = strconv.Atoi(m[1])
				text = err.Error()[len(m[0]):]
			}
			p.failAt(spec.Line+line-1, "spec of %s %s: %s", kind.Value, meta.Name, text)
			return
		}
	}
	res := &mcp.Resource{Metadata: meta, Body: &anypb.Any{}}
	if err := anypb.MarshalFrom(res.Body, body, proto.MarshalOptions{Deterministic: true}); err != nil {
		p.fail(n, "%s %s: %v", kind.Value, meta.Name, err)
		return
	}
	id := resourceID{name, meta.Name}
	if line := p.resources[id]; line != 0 {
		p.fail(n, "%s %s is defined in line %d already; make one of them", kind.Value, meta.Name, line)
		return
	}
	p.resources[id] = max(1, n.Line)
	p.content.resources = append(p.content.resources, &resource{id, res, n.Line})
}

// jsonWriter writes a YAML value as JSON with everything on the line that it
// has in the YAML, counted from the line of the value. So a position in the
// JSON gives the position in the file.
type jsonWriter struct {
	*reader
	buf  []byte
	line int // line of the file at the end of buf
}

// value writes n, which is not an alias. It returns false after recording that
// n is not representable as JSON.
func (w *jsonWriter) value(n *yaml.Node, depth int) bool {
	if depth > maxDepth {
		w.fail(n, "values are nested deeper than %d", maxDepth)
		return false
	}
	w.moveTo(n.Line)
	switch n.Kind {
	case yaml.MappingNode:
		before := len(w.findings) + w.more
		pairs := w.pairs(n, depth)
		if len(w.findings)+w.more != before {
			return false
		}
		w.buf = append(w.buf, '{')
		for i, p := range pairs {
			if i > 0 {
				w.buf = append(w.buf, ',')
			}
			w.moveTo(p.key.Line)
			w.string(p.key.Value)
			w.buf = append(w.buf, ':')
			if !w.value(p.value, depth+1) {
				return false
			}
		}
		w.buf = append(w.buf, '}')
	case yaml.SequenceNode:
		w.buf = append(w.buf, '[')
		for i, item := range n.Content {
			if i > 0 {
				w.buf = append(w.buf, ',')
			}
			if item = w.deref(item); item == nil || !w.value(item, depth+1) {
				return false
			}
		}
		w.buf = append(w.buf, ']')
	default:
		return w.scalar(n)
	}
	return true
}

func (w *jsonWriter) scalar(n *yaml.Node) bool {
	switch tag := n.ShortTag(); tag {
	case "!!null":
		w.buf = append(w.buf, "null"...)
	case "!!bool":
		var b bool
		if err := n.Decode(&b); err != nil {
			w.fail(n, "%s is neither true nor false", quote(n.Value))
			return false
		}
		w.buf = strconv.AppendBool(w.buf, b)
	case "!!int":
		var i int64
		var u uint64
		if n.Decode(&i) == nil {
			w.buf = strconv.AppendInt(w.buf, i, 10)
		} else if n.Decode(&u) == nil {
			w.buf = strconv.AppendUint(w.buf, u, 10)
		} else {
			w.fail(n, "the number %s does not fit into 64 bits", quote(n.Value))
			return false
		}
	case "!!float":
		var f float64
		if err := n.Decode(&f); err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			w.fail(n, "%s is not a finite number", quote(n.Value))
			return false
		}
		w.buf = strconv.AppendFloat(w.buf, f, 'g', -1, 64)
	case "!!str", "!!timestamp":
		w.string(n.Value)
	default:
		w.fail(n, "the tag %s means nothing here; leave it out", quote(tag))
		return false
	}
	return true
}

func (w *jsonWriter) string(s string) {
	b, err := json.Marshal(s)
	if err != nil {
		panic("BUG: a string that is not JSON: " + err.Error())
	}
	w.buf = append(w.buf, b...)
}

// moveTo ends lines up to the given one. The content of an alias is on the line
// of the alias.
func (w *jsonWriter) moveTo(line int) {
	for w.line < line {
		w.buf = append(w.buf, '\n')
		w.line++
	}
}
