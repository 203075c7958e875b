package translate

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"text/template"

	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Result is what one service becomes. It is immutable.
type Result struct {
	// Entry is the ServiceEntry, without endpoints and without workloadSelector. Nil: there is nothing to serve.
	Entry *Encoded
	// Endpoints are the WorkloadEntries of the instances that take traffic, sorted by name.
	Endpoints []Encoded
	// Problems is what could not be taken over as it is, sorted by ID, one for each ID, and bounded.
	Problems []Problem

	// What the next call reuses.
	t        *Translator
	key      registry.Key
	names    names
	head     *head
	findings []finding // the service's own
	states   []state   // sorted by ID
}

// Encoded is one resource, encoded.
type Encoded struct {
	// Name is the resource's name, "namespace/name".
	Name string
	// Resource is an encoded istio.mcp.v1alpha1.Resource without version. It must not be changed.
	Resource []byte
}

// state is what is remembered of one instance.
type state struct {
	id          string
	fingerprint uint64
	place       int // in Endpoints, or -1
	findings    []finding
}

// names is what the templates made of a service.
type names struct {
	host, namespace, name string
	ok                    bool // the service can be served
	keyOnly               bool // the templates saw nothing but the key and the registry
	findings              []finding
}

// head is what a service's instances have in common: the same head and the same instance make the same WorkloadEntry.
type head struct {
	host, namespace, name string
	selector              string
	ports                 []servicePort
	labels                []pair
	dns                   bool // resolution is DNS
	fractional            bool // some weight is no whole number
	served                bool // there is a ServiceEntry; if not, only dns and fractional are set
}

func (h *head) equal(g *head) bool {
	return h.host == g.host && h.namespace == g.namespace && h.name == g.name && h.dns == g.dns && h.fractional == g.fractional &&
		h.served == g.served && slices.Equal(h.ports, g.ports) && slices.Equal(h.labels, g.labels)
}

// call is one run of Service.
type call struct {
	t        *Translator
	svc      *registry.Service
	key      string // for people
	head     *head
	findings []finding // of the service or of the instance at hand
	said     map[Problem]bool
	labels   labeler
	buf      []namedPort
	numbers  []portNumber
}

// about adds a finding about a part of the service. Saying the same again does nothing.
func (c *call) about(part, reason string) {
	f := finding{Problem{"service " + c.key + " " + plain(part), reason}, false}
	if c.said[f.Problem] {
		return
	}
	if c.said == nil {
		c.said = map[Problem]bool{}
	}
	c.said[f.Problem] = true
	c.findings = append(c.findings, f)
}

// once adds a finding of the instance at hand that is listed under the service: of several instances the first one's stands for all.
func (c *call) once(about, reason string) {
	c.findings = append(c.findings, finding{Problem{"service " + c.key + " " + plain(about), reason}, true})
}

// ofService adds a finding about the service itself.
func (c *call) ofService(reason string) {
	c.findings = append(c.findings, finding{Problem{"service " + c.key, reason}, false})
}

func (c *call) ofInstance(id, reason string) {
	c.findings = append(c.findings, finding{Problem{"instance " + c.key + "/" + plain(id), reason}, false})
}

// Service translates svc. prev is the earlier result of the same service or nil; it saves work and never changes the outcome. Nothing
// of svc and instances is kept but strings, and their order does not matter. If nothing changed, prev itself is returned.
func (t *Translator) Service(svc registry.Service, instances []registry.Instance, prev *Result) *Result {
	if prev != nil && (prev.t != t || prev.key != svc.Key) {
		prev = nil
	}
	c := &call{t: t, svc: &svc, key: plain(svc.Key.String())}
	c.labels.call = c
	sorted := c.sort(instances)
	r := &Result{t: t, key: svc.Key, names: c.nameService(prev)}
	c.head = c.makeHead(&r.names, sorted)
	r.head, r.findings = c.head, c.findings

	fingerprints := make([]uint64, len(sorted))
	for i, inst := range sorted {
		fingerprints[i] = t.fingerprint(inst)
	}
	same := prev != nil && prev.head.equal(c.head) // whether instances can be reused
	switch {
	case same && slices.Equal(r.findings, prev.findings) && prev.holds(sorted, fingerprints):
		return prev
	case same:
		c.head, r.head, r.Entry = prev.head, prev.head, prev.Entry
	case c.head.served:
		r.Entry = t.entry(c.head)
	}
	r.translateInstances(c, sorted, fingerprints, prev, same)

	all := slices.Clone(r.findings)
	for i := range r.states {
		all = append(all, r.states[i].findings...)
	}
	r.Problems = list(c.key, all)
	return r
}

// translateInstances fills in states and Endpoints, taking over from prev what did not change if same says that it may.
func (r *Result) translateInstances(c *call, sorted []*registry.Instance, fingerprints []uint64, prev *Result, same bool) {
	r.states = make([]state, 0, len(sorted))
	if c.head.served {
		r.Endpoints = make([]Encoded, 0, len(sorted))
	}
	old := 0
	inPlace := same // whether each instance so far has the place in Endpoints that it had
	for i, inst := range sorted {
		var was *state
		if same {
			for old < len(prev.states) && prev.states[old].id < inst.ID {
				inPlace = inPlace && prev.states[old].place < 0
				old++
			}
			if old < len(prev.states) && prev.states[old].id == inst.ID {
				was = &prev.states[old]
				old++
			}
		}
		s := state{id: inst.ID, fingerprint: fingerprints[i], place: -1}
		var encoded Encoded
		var served bool
		if was != nil && was.place >= 0 {
			encoded, served = prev.Endpoints[was.place], true
		}
		if was != nil && was.fingerprint == s.fingerprint {
			s.id, s.findings = was.id, was.findings
		} else {
			c.findings = nil
			encoded, served = c.instance(inst, encoded.Name)
			s.findings = c.findings
		}
		if served {
			s.place = len(r.Endpoints)
			r.Endpoints = append(r.Endpoints, encoded)
		}
		inPlace = inPlace && (s.place >= 0) == (was != nil && was.place >= 0)
		r.states = append(r.states, s)
	}
	if same {
		for ; old < len(prev.states); old++ {
			inPlace = inPlace && prev.states[old].place < 0
		}
	}
	r.sortEndpoints(prev, inPlace)
}

// sortEndpoints brings Endpoints, which are in the order of the instances' IDs, into the order of their names. With inPlace the
// instances that take traffic are those of prev, so each one's place is known.
func (r *Result) sortEndpoints(prev *Result, inPlace bool) {
	if len(r.Endpoints) == 0 {
		r.Endpoints = nil
		return
	}
	places := make([]int, len(r.Endpoints)) // by the order of IDs
	if inPlace {
		i := 0
		for j := range prev.states {
			if prev.states[j].place >= 0 {
				places[i] = prev.states[j].place
				i++
			}
		}
	} else {
		order := make([]int, len(r.Endpoints))
		for i := range order {
			order[i] = i
		}
		slices.SortFunc(order, func(a, b int) int { return cmp.Compare(r.Endpoints[a].Name, r.Endpoints[b].Name) })
		for place, i := range order {
			places[i] = place
		}
	}
	sorted := make([]Encoded, len(r.Endpoints))
	for i, place := range places {
		sorted[place] = r.Endpoints[i]
	}
	r.Endpoints = sorted
	for i := range r.states {
		if s := &r.states[i]; s.place >= 0 {
			s.place = places[s.place]
		}
	}
}

// holds says whether r was made of these very instances.
func (r *Result) holds(sorted []*registry.Instance, fingerprints []uint64) bool {
	if len(r.states) != len(sorted) {
		return false
	}
	for i := range r.states {
		if r.states[i].fingerprint != fingerprints[i] || r.states[i].id != sorted[i].ID {
			return false
		}
	}
	return true
}

// sort returns the instances by ID, without those that have none or whose ID another one has.
func (c *call) sort(instances []registry.Instance) []*registry.Instance {
	sorted := make([]*registry.Instance, 0, len(instances))
	anonymous := 0
	for i := range instances {
		if instances[i].ID == "" {
			anonymous++
			continue
		}
		sorted = append(sorted, &instances[i])
	}
	if anonymous > 0 {
		c.ofService(fmt.Sprintf("it has instances without an ID (%d): left out; the adapter must set one", anonymous))
	}
	if !slices.IsSortedFunc(sorted, func(a, b *registry.Instance) int { return cmp.Compare(a.ID, b.ID) }) {
		slices.SortFunc(sorted, func(a, b *registry.Instance) int { return cmp.Compare(a.ID, b.ID) })
	}
	kept := sorted[:0]
	for i := 0; i < len(sorted); {
		j := i + 1
		for ; j < len(sorted) && sorted[j].ID == sorted[i].ID; j++ {
		}
		kept = append(kept, slices.MinFunc(sorted[i:j], compareInstances))
		if j-i > 1 {
			c.ofInstance(sorted[i].ID, fmt.Sprintf("%d instances have this ID: one of them is served; give each its own", j-i))
		}
		i = j
	}
	return kept
}

// makeHead works out what all instances have in common.
func (c *call) makeHead(n *names, instances []*registry.Instance) *head {
	t := c.t
	h := &head{host: n.host, namespace: n.namespace, name: n.name, dns: t.o.Resolution == "dns"}
	for _, inst := range instances {
		if w, _ := weight(inst); w != math.Trunc(w) {
			h.fractional = true
		}
		// Healthy or not: a failing check must not change the ServiceEntry.
		if t.o.Resolution == "auto" && !h.dns && parseAddress(inst.Address).isName {
			h.dns = true
		}
	}
	h.ports = c.ports(instances)
	h.served = n.ok && len(h.ports) > 0
	if !h.served {
		return &head{dns: h.dns, fractional: h.fractional}
	}
	h.selector = SelectorValue(h.name)
	if len(t.serviceMeta) > 0 {
		for _, m := range sortedPairs(c.svc.Meta) {
			if t.serviceMeta.match(m.key) {
				c.labels.add(fromMeta, m.key, m.key, m.value)
			}
		}
	}
	for k, v := range t.o.ServiceLabels.Add {
		c.labels.candidates = append(c.labels.candidates, candidate{pair: pair{k, v}, from: fromOptions})
	}
	h.labels = slices.Clone(c.labels.settle())
	return h
}

// nameService works out host, namespace and name, or says why it cannot. What prev says of them is taken over if it depends on the
// key alone.
func (c *call) nameService(prev *Result) (n names) {
	n.keyOnly = len(c.svc.Meta) == 0 && len(c.svc.Tags) == 0
	if n.keyOnly && prev != nil && prev.names.keyOnly {
		c.findings = append(c.findings, prev.names.findings...)
		return prev.names
	}
	before := len(c.findings)
	defer func() { n.findings = slices.Clone(c.findings[before:]) }()
	t, k := c.t, &c.svc.Key
	data := &ServiceData{
		Name: k.Name, Group: k.Group, Namespace: k.Namespace, Partition: k.Partition, Datacenter: k.Datacenter,
		Registry: t.registry, Meta: c.svc.Meta, Tags: c.svc.Tags,
	}
	if data.Meta == nil {
		data.Meta = map[string]string{}
	}
	n.ok = true
	set := func(to *string, what string, tmpl *template.Template, mend func(string) string) {
		raw, err := execute(tmpl, data)
		if err != nil {
			c.ofService(fmt.Sprintf("has no %s: left out; the template fails: %s", what, quote(err.Error())))
			n.ok = false
			return
		}
		raw = strings.TrimSpace(raw)
		*to = mend(raw)
		switch {
		case *to == "":
			c.ofService(fmt.Sprintf("the %s %s cannot be made legal: left out; rename the service, or set translate.%s", what, quote(raw), what))
			n.ok = false
		case *to != lower(raw):
			c.ofService(fmt.Sprintf("the %s %s is not legal: served as %s; rename the service, or set translate.%s", what, quote(raw), quote(*to), what))
		}
	}
	set(&n.host, "host", t.host, mendHost)
	set(&n.namespace, "namespace", t.namespace, mendNamespace)
	if t.name != nil {
		set(&n.name, "name", t.name, func(s string) string { return mendSubdomain(s, maxEntryName) })
	} else if n.name = entryName(k.Name, k.Group, k.Namespace, k.Partition, k.Datacenter); n.name == "" {
		c.ofService("its key cannot be made a resource's name: left out; rename the service, or set translate.name")
		n.ok = false
	}
	return n
}

// instanceName is the full name of an instance's WorkloadEntry.
func (c *call) instanceName(id string) string {
	k := &c.svc.Key
	return c.head.namespace + "/" + c.head.name + "-" + shortHash(instanceHash, k.Name, k.Group, k.Namespace, k.Partition, k.Datacenter, id)
}

// entry encodes the ServiceEntry.
func (t *Translator) entry(h *head) *Encoded {
	spec := &networking.ServiceEntry{
		Hosts:           []string{h.host},
		Location:        networking.ServiceEntry_MESH_INTERNAL,
		Resolution:      networking.ServiceEntry_STATIC,
		ExportTo:        t.o.ExportTo,
		SubjectAltNames: t.o.SubjectAltNames,
	}
	if t.o.Location == "external" {
		spec.Location = networking.ServiceEntry_MESH_EXTERNAL
	}
	if h.dns {
		spec.Resolution = networking.ServiceEntry_DNS
	}
	for _, p := range h.ports {
		spec.Ports = append(spec.Ports, &networking.ServicePort{Number: p.number, Name: p.name, Protocol: wireProtocol(p.protocol)})
	}
	e := &Encoded{Name: h.namespace + "/" + h.name}
	var err error
	e.Resource, err = encodeResource(&mcp.Metadata{Name: e.Name, Labels: toMap(h.labels), Annotations: t.o.Annotations.Add}, spec)
	if err != nil {
		// Every string in it was checked.
		panic(fmt.Sprintf("BUG: translate: encode ServiceEntry %s: %v", e.Name, err))
	}
	return e
}
