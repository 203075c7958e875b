package translate

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"text/template"
	"unicode/utf8"

	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Result is the translation of one service. It is immutable except for
// Endpoints, which can be packed for retention.
type Result struct {
	// Entry is the ServiceEntry, without endpoints and workloadSelector. Nil if
	// there is nothing to serve.
	Entry *Encoded
	// Endpoints are the WorkloadEntries of the instances that take traffic,
	// sorted by name. They are also nil while packed.
	Endpoints []Encoded
	// Rule is the DestinationRule with the service's subsets, if configured.
	// Its name is that of Entry.
	Rule *Encoded
	// Problems are the bounded findings, sorted by ID, one for each ID.
	Problems []Problem
	// LeftOut is what is not served although nothing is wrong with it, as the
	// registry or the configuration intends that: bounded, sorted by ID, one
	// for each ID.
	LeftOut []Problem

	// Idle are the instances that took traffic in the previous result or may
	// have, and do not now although the registry has them: bounded.
	Idle []Idle

	// State for the next call.
	t        *Translator
	key      uint64 // a hash of the service's key
	names    names
	head     uint64      // a hash of it
	findings []finding   // of the service
	states   []state     // in the order of IDs
	found    [][]finding // of the instances
	blocks   []block     // packed Endpoints
}

// Idle is an instance that takes no traffic any more.
type Idle struct {
	// Name is that of the WorkloadEntry that it had.
	Name string
	// Health is critical, warning or disabled, "" if it is another reason.
	Health string
	Reason string
}

// Encoded is one resource, encoded.
type Encoded struct {
	// Name is the resource's name, "namespace/name".
	Name string
	// Resource is an encoded istio.mcp.v1alpha1.Resource without version. It
	// must not be changed.
	Resource []byte
}

// state is the retained state of one instance.
type state struct {
	id          uint64 // a hash of the ID
	fingerprint uint64
	place       int32 // index in Endpoints, or -1
	found       int32 // index in Result.found, or -1
}

// names is the result of a service's templates and rules.
type names struct {
	host, namespace, name string
	more                  *more  // nil for none
	ok                    bool   // the service can be served
	leftOut               string // why it is not meant to be
	keyOnly               bool   // the templates read only the key and the registry
	findings              []finding
}

// more holds what few services have.
type more struct {
	aliases             []string // additional hosts
	labels, annotations []pair   // set by rules; the labels are not yet made legal
	subsets             []pair   // name and value, sorted
}

// extra returns n.more for writing, created if necessary.
func (n *names) extra() *more {
	if n.more == nil {
		n.more = &more{}
	}
	return n.more
}

// head is what the instances of a service share: equal heads and instances give
// equal WorkloadEntries.
type head struct {
	host, namespace, name string
	selector              string
	ports                 []servicePort
	labels                []pair
	more                  *more    // nil for none
	subjectAltNames       []string // sorted unless all are configured
	dns                   bool     // resolution is DNS
	fractional            bool     // some weight is not a whole number
	served                bool     // there is a ServiceEntry; otherwise only dns and fractional are set
}

// hash differs for heads that give different ServiceEntries or WorkloadEntries.
func (h *head) hash() uint64 {
	x := hashString(h.host)
	x = combine(x, hashString(h.namespace))
	x = combine(x, hashString(h.name))
	x = combine(x, uint64(len(h.ports)))
	for i := range h.ports {
		p := &h.ports[i]
		x = combine(x, hashString(p.key))
		x = combine(x, hashString(p.name))
		x = combine(x, uint64(p.number))
		x = combine(x, hashString(p.protocol))
		if p.first {
			x = combine(x, 1)
		}
		if p.alone {
			x = combine(x, 2)
		}
	}
	x = combinePairs(x, h.labels)
	x = combine(x, uint64(len(h.subjectAltNames)))
	for _, name := range h.subjectAltNames {
		x = combine(x, hashString(name))
	}
	if m := h.more; m != nil {
		x = combinePairs(combinePairs(x, m.annotations), m.subsets)
		for _, host := range m.aliases {
			x = combine(x, hashString(host))
		}
	}
	flags := uint64(0)
	for i, set := range [...]bool{h.dns, h.fractional, h.served} {
		if set {
			flags |= 1 << i
		}
	}
	return combine(x, flags)
}

func combinePairs(x uint64, list []pair) uint64 {
	x = combine(x, uint64(len(list)))
	for _, l := range list {
		x = combine(x, hashString(l.key))
		x = combine(x, hashString(l.value))
	}
	return x
}

// call is one run of Service.
type call struct {
	t        *Translator
	svc      *registry.Service
	name     string // the service's name for display; see key
	head     *head
	findings []finding // of the service or the current instance
	leftOut  leftOut
	idle     []Idle
	said     map[Problem]bool
	labels   labeler
	buf      []namedPort
	numbers  []portNumber
	network  string // of the current instance
	trace    *trace // nil unless the call is explained
}

// key returns the service's key for display.
func (c *call) key() string {
	if c.name == "" {
		c.name = plain(c.svc.Key.String())
	}
	return c.name
}

// about adds a finding about a part of the service. Duplicates are dropped.
func (c *call) about(part, reason string) {
	f := finding{Problem{"service " + c.key() + " " + plain(part), reason}, false}
	if c.said[f.Problem] {
		return
	}
	if c.said == nil {
		c.said = map[Problem]bool{}
	}
	c.said[f.Problem] = true
	c.findings = append(c.findings, f)
}

// once adds a finding of the current instance that is listed under the service,
// only for the first of several instances.
func (c *call) once(about, reason string) {
	c.findings = append(c.findings, finding{Problem{"service " + c.key() + " " + plain(about), reason}, true})
}

// ofService adds a finding about the service.
func (c *call) ofService(reason string) {
	c.findings = append(c.findings, finding{Problem{"service " + c.key(), reason}, false})
}

func (c *call) ofInstance(id, reason string) {
	c.findings = append(c.findings, finding{Problem{c.instanceID(id), reason}, false})
}

// instanceID returns the ID of problems about an instance.
func (c *call) instanceID(id string) string { return "instance " + c.key() + "/" + plain(id) }

// Service translates svc. prev is the previous result of the same service, or
// nil; it saves work without affecting the outcome. Of svc and instances only
// strings are retained, and order does not matter. If nothing changed, prev is
// returned; otherwise prev is unpacked.
func (t *Translator) Service(svc registry.Service, instances []registry.Instance, prev *Result) *Result {
	c := &call{t: t, svc: &svc}
	c.labels.call = c
	return c.service(instances, prev)
}

// service runs the call.
func (c *call) service(instances []registry.Instance, prev *Result) *Result {
	t := c.t
	key := hashKey(&c.svc.Key)
	if prev != nil && (prev.t != t || prev.key != key) {
		prev = nil
	}
	sorted := c.choose(c.sort(instances))
	r := &Result{t: t, key: key, names: c.nameService(prev, sorted)}
	c.head = c.makeHead(&r.names, sorted)
	r.head, r.findings = c.head.hash(), c.findings
	switch {
	case r.names.leftOut != "":
		c.leftOut.add("service "+c.key(), r.names.leftOut)
	case r.names.ok && len(instances) == 0 && !c.head.served:
		c.leftOut.add("service "+c.key(), "has neither instances nor ports of its own: left out until it has; register an instance")
	}

	states := make([]state, len(sorted))
	for i, inst := range sorted {
		states[i] = state{id: hashString(inst.ID), fingerprint: t.fingerprint(inst), place: -1, found: -1}
		if reason := t.idle(inst); reason != "" && c.head.served {
			c.leftOut.add(c.instanceID(inst.ID), reason)
			c.isIdle(inst, prev, health(inst), reason)
			if c.trace != nil {
				c.stepOf(inst.ID, idleRule(inst), reason)
			}
		}
	}
	r.LeftOut, r.Idle = c.leftOut.problems(c), c.idle
	same := prev != nil && prev.head == r.head // instances can be reused
	switch {
	case same && slices.Equal(r.findings, prev.findings) && slices.Equal(r.LeftOut, prev.LeftOut) && prev.holds(states):
		return prev
	case same:
		prev.Unpack()
		r.Entry, r.Rule = prev.Entry, prev.Rule
	case c.head.served:
		r.Entry = t.entry(c.head)
		r.Rule = t.destinationRule(c.head)
	}
	r.states = states
	r.translateInstances(c, sorted, prev, same)

	all := slices.Clone(r.findings)
	for _, f := range r.found {
		all = append(all, f...)
	}
	r.Problems = list(c, all)
	return r
}

// translateInstances completes states and fills Endpoints. With same it reuses
// the unchanged instances of prev.
func (r *Result) translateInstances(c *call, sorted []*registry.Instance, prev *Result, same bool) {
	if c.head.served {
		r.Endpoints = make([]Encoded, 0, len(sorted))
	}
	var old []state // remaining states of prev
	if same {
		old = prev.states
	}
	var index map[uint64]int // of old, by ID; created on demand
	inPlace := same          // all instances so far kept their index in Endpoints
	pass := func(n int) {
		for _, gone := range old[:n] {
			inPlace = inPlace && gone.place < 0
		}
		old = old[n:]
	}
	for i, inst := range sorted {
		s := &r.states[i]
		var was *state
		if len(old) > 0 && old[0].id != s.id {
			if index == nil {
				index = make(map[uint64]int, len(old))
				for at := range old {
					index[old[at].id] = len(old) - at
				}
			}
			if left := index[s.id]; left > 0 && left < len(old) {
				pass(len(old) - left)
			}
		}
		if len(old) > 0 && old[0].id == s.id {
			was, old = &old[0], old[1:]
		}
		var encoded Encoded
		var served bool
		if was != nil && was.place >= 0 {
			encoded, served = prev.Endpoints[was.place], true
		}
		var findings []finding
		if was != nil && was.fingerprint == s.fingerprint {
			if was.found >= 0 {
				findings = prev.found[was.found]
			}
		} else {
			c.findings = nil
			encoded, served = c.instance(inst, encoded.Name)
			findings = c.findings
			if c.trace != nil {
				for _, f := range findings {
					c.stepOf(inst.ID, cmp.Or(FieldOf(f.Reason), "registry"), f.Reason)
				}
			}
		}
		if len(findings) > 0 {
			s.found = int32(len(r.found)) //nolint:gosec // a service has no 2^31 instances
			r.found = append(r.found, findings)
		}
		if served {
			s.place = int32(len(r.Endpoints)) //nolint:gosec // likewise
			r.Endpoints = append(r.Endpoints, encoded)
		}
		inPlace = inPlace && (s.place >= 0) == (was != nil && was.place >= 0)
	}
	pass(len(old))
	r.sortEndpoints(prev, inPlace)
}

// sortEndpoints sorts Endpoints from the order of IDs to that of names. With
// inPlace the instances that take traffic are those of prev, so their places
// are known.
func (r *Result) sortEndpoints(prev *Result, inPlace bool) {
	if len(r.Endpoints) == 0 {
		r.Endpoints = nil
		return
	}
	sorted := make([]Encoded, len(r.Endpoints))
	if inPlace {
		old := prev.states
		for i := range r.states {
			s := &r.states[i]
			if s.place < 0 {
				continue
			}
			for old[0].place < 0 {
				old = old[1:]
			}
			sorted[old[0].place] = r.Endpoints[s.place]
			s.place, old = old[0].place, old[1:]
		}
		r.Endpoints = sorted
		return
	}
	order := make([]int32, len(r.Endpoints))
	for i := range order {
		order[i] = int32(i) //nolint:gosec // likewise
	}
	slices.SortFunc(order, func(a, b int32) int { return cmp.Compare(r.Endpoints[a].Name, r.Endpoints[b].Name) })
	places := make([]int32, len(order)) // in the order of IDs
	for place, i := range order {
		sorted[place] = r.Endpoints[i]
		places[i] = int32(place) //nolint:gosec // likewise
	}
	r.Endpoints = sorted
	for i := range r.states {
		if s := &r.states[i]; s.place >= 0 {
			s.place = places[s.place]
		}
	}
}

// holds reports whether r was made of exactly these instances.
func (r *Result) holds(states []state) bool {
	return slices.EqualFunc(r.states, states, func(a, b state) bool { return a.id == b.id && a.fingerprint == b.fingerprint })
}

// sort returns the instances by ID, without those that have no ID or a
// duplicate one.
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

// makeHead computes what all instances share.
func (c *call) makeHead(n *names, instances []*registry.Instance) *head {
	t := c.t
	h := &head{host: n.host, namespace: n.namespace, name: n.name, dns: t.o.Resolution == "dns"}
	for _, inst := range instances {
		if w, _ := weight(inst); w != math.Trunc(w) && t.o.Weights == "exact" {
			h.fractional = true
		}
		// Count unhealthy instances too: a failing check must not change the
		// ServiceEntry.
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
	h.subjectAltNames = c.subjectAltNames()
	if subsets := c.subsets(instances); n.more != nil || len(subsets) > 0 {
		h.more = &more{aliases: c.aliases(n, h.ports), subsets: subsets}
	}
	if n.more != nil {
		h.more.annotations = n.more.annotations
		for _, l := range n.more.labels {
			c.labels.add(fromRule, l.key, l.key, l.value)
		}
	}
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
	for _, l := range t.metadataLabels {
		c.labels.candidates = append(c.labels.candidates, candidate{pair: l, from: fromBridge})
	}
	h.labels = slices.Clone(c.labels.settle()) // the labeler reuses its slice
	return h
}

// subjectAltNames returns the configured names and those of the registry.
func (c *call) subjectAltNames() []string {
	if len(c.svc.SubjectAltNames) == 0 {
		return c.t.o.SubjectAltNames
	}
	all := slices.Clone(c.t.o.SubjectAltNames)
	for _, name := range c.svc.SubjectAltNames {
		if !utf8.ValidString(name) || name == "" {
			c.about("subjectAltName "+quote(name), "is not text: left out; correct it in the registry")
			continue
		}
		all = append(all, name)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// aliases returns the additional hosts that can be served.
func (c *call) aliases(n *names, ports []servicePort) []string {
	if n.more == nil || len(n.more.aliases) == 0 {
		return nil
	}
	for _, p := range ports {
		if !hostProtocols[p.protocol] {
			c.about("aliases", fmt.Sprintf("the port %s speaks %s, which does not name the host that it is for, so Istio takes one host only: the aliases are left out; "+
				"set its protocol under translate.ports, or take them out of translate.aliases", quote(p.name), wireProtocol(p.protocol)))
			return nil
		}
	}
	return n.more.aliases
}

// nameService computes host, namespace and name, or lists why it cannot. It
// reuses those of prev if they depend on the key alone.
func (c *call) nameService(prev *Result, instances []*registry.Instance) (n names) {
	n.keyOnly = len(c.svc.Meta) == 0 && len(c.svc.Tags) == 0
	if n.keyOnly && prev != nil && prev.names.keyOnly {
		c.findings = append(c.findings, prev.names.findings...)
		return prev.names
	}
	before := len(c.findings)
	defer func() { n.findings = slices.Clone(c.findings[before:]) }()
	t, k := c.t, &c.svc.Key
	data := &ServiceData{
		Name: k.Name, Group: k.Group, Namespace: k.Namespace, Partition: k.Partition, Datacenter: k.Datacenter, Peer: k.Peer,
		Registry: t.registry, Meta: c.svc.Meta, Tags: c.svc.Tags, instances: instances,
	}
	if data.Meta == nil {
		data.Meta = map[string]string{}
	}
	defer func() { n.keyOnly = n.keyOnly && !data.asked }()
	n.ok = true
	// run executes a template.
	run := func(what string, tmpl *template.Template) string {
		raw, err := execute(tmpl, data)
		if err != nil {
			c.ofService(fmt.Sprintf("has no %s: left out; the template fails: %s; correct translate.%s", what, quote(err.Error()), what))
			n.ok = false
		}
		return strings.TrimSpace(raw)
	}
	host, namespace, name := run("host", t.host), run("namespace", t.namespace), ""
	if c.trace != nil {
		defer func() { c.explainNames(&n, host) }()
	}
	if t.name != nil {
		name = run("name", t.name)
	}
	if n.ok && len(t.services) > 0 {
		c.relabelService(&n, data, &host, &namespace, &name)
	}
	if !n.ok {
		return n
	}
	set := func(to *string, what, raw string, mend func(string) string) {
		*to = mend(raw)
		switch {
		case *to == "":
			c.ofService(fmt.Sprintf("the %s %s cannot be made legal: left out; rename the service, or set translate.%s", what, quote(raw), what))
			n.ok = false
		case lower(*to) != lower(raw):
			c.ofService(fmt.Sprintf("the %s %s is not legal: served as %s; rename the service, or set translate.%s", what, quote(raw), quote(*to), what))
		}
	}
	set(&n.host, "host", host, t.hostOf)
	set(&n.namespace, "namespace", namespace, mendNamespace)
	if name != "" || t.name != nil {
		set(&n.name, "name", name, func(s string) string { return mendSubdomain(s, maxEntryName) })
	} else if n.name = entryName(k.Name, k.Group, k.Namespace, k.Partition, k.Datacenter, peerPart(k)); n.name == "" {
		c.ofService("its key cannot be made a resource's name: left out; rename the service, or set translate.name")
		n.ok = false
	}
	for i, tmpl := range t.aliases {
		c.nameAlias(&n, data, fmt.Sprintf("translate.aliases[%d]", i), tmpl)
	}
	return n
}

// hostOf returns a legal host, or "" if nothing of a label is left.
func (t *Translator) hostOf(raw string) string {
	host := mendHost(raw)
	if as := strings.TrimSuffix(raw, "."); t.o.HostCase == "keep" && lower(as) == host {
		return as
	}
	return host
}

// nameAlias adds one additional host.
func (c *call) nameAlias(n *names, data *ServiceData, field string, tmpl *template.Template) {
	raw, err := execute(tmpl, data)
	if err != nil {
		c.ofService(fmt.Sprintf("an alias is left out; the template fails: %s; correct %s", quote(err.Error()), field))
		return
	}
	raw = strings.TrimSpace(raw)
	if raw == "" {
		return
	}
	alias := c.t.hostOf(raw)
	switch {
	case alias == "":
		c.ofService(fmt.Sprintf("the alias %s cannot be made legal: left out; set %s", quote(raw), field))
		return
	case lower(alias) != lower(raw):
		c.ofService(fmt.Sprintf("the alias %s is not legal: served as %s; set %s", quote(raw), quote(alias), field))
	}
	if m := n.extra(); !strings.EqualFold(alias, n.host) && !slices.ContainsFunc(m.aliases, func(a string) bool { return strings.EqualFold(a, alias) }) {
		m.aliases = append(m.aliases, alias)
	}
}

// relabelService applies the rules to a service.
func (c *call) relabelService(n *names, data *ServiceData, host, namespace, name *string) {
	v := values{set: map[string]string{
		"__name": data.Name, "__group": data.Group, "__namespace": data.Namespace, "__partition": data.Partition, "__datacenter": data.Datacenter, "__peer": data.Peer,
		"__registry": data.Registry, "__tags": tagText(data.Tags), "host": *host, "namespace": *namespace, "name": *name,
	}}
	for k, m := range data.Meta {
		v.set["__meta_"+k] = m
	}
	v.more = func(name string) string {
		if key, ok := strings.CutPrefix(name, "__instance_meta_"); ok {
			return data.InstanceMeta(key)
		}
		return ""
	}
	v.foreign = func(name string) bool { return c.labels.denies(strings.TrimPrefix(name, "annotation.")) }
	if field := c.t.services.apply(&v); field != "" {
		n.leftOut = "left out by " + field
		n.ok = false
		return
	}
	*host, *namespace, *name = strings.TrimSpace(v.set["host"]), strings.TrimSpace(v.set["namespace"]), strings.TrimSpace(v.set["name"])
	for _, p := range sortedPairs(v.set) {
		key, isAnnotation := strings.CutPrefix(p.key, "annotation.")
		switch {
		case strings.HasPrefix(p.key, "__"), p.key == "host", p.key == "namespace", p.key == "name":
		case !isAnnotation:
			n.extra().labels = append(n.extra().labels, p)
		case key == healthChecksAnnotation || !isLabelKey(key) || !utf8.ValidString(p.value):
			c.about("annotation "+quote(key), "cannot be served: left out; correct translate.relabel.services")
		default:
			n.extra().annotations = append(n.extra().annotations, pair{key, p.value})
		}
	}
}

// isIdle notes an instance that takes no traffic unless it took none before.
func (c *call) isIdle(inst *registry.Instance, prev *Result, health, reason string) {
	if prev == nil || len(c.idle) >= maxProblems {
		return
	}
	if _, was := slices.BinarySearchFunc(prev.LeftOut, c.instanceID(inst.ID), func(p Problem, id string) int { return strings.Compare(p.ID, id) }); !was {
		c.idle = append(c.idle, Idle{c.instanceName(inst.ID), health, reason})
	}
}

// instanceName is the full name of an instance's WorkloadEntry.
func (c *call) instanceName(id string) string {
	k := &c.svc.Key
	parts := []string{k.Name, k.Group, k.Namespace, k.Partition, k.Datacenter, id}
	if k.Peer != "" { // others keep the names that they had before there were peers
		parts = append(parts, peerPart(k))
	}
	return c.head.namespace + "/" + c.head.name + "-" + shortHash(instanceHash, parts...)
}

// peerPart returns the part of a resource's name for the key's peer, "" for
// none. It cannot be mistaken for a datacenter.
func peerPart(k *registry.Key) string {
	if k.Peer == "" {
		return ""
	}
	return k.Peer + "-peer"
}

// entry encodes the ServiceEntry.
func (t *Translator) entry(h *head) *Encoded {
	spec := &networking.ServiceEntry{
		Hosts:           []string{h.host},
		Location:        networking.ServiceEntry_MESH_INTERNAL,
		Resolution:      networking.ServiceEntry_STATIC,
		ExportTo:        t.o.ExportTo,
		SubjectAltNames: h.subjectAltNames,
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
	annotations := t.o.Annotations.Add
	if h.more != nil {
		spec.Hosts = append(spec.Hosts, h.more.aliases...)
		if annotations = toMap(h.more.annotations); annotations == nil {
			annotations = t.o.Annotations.Add
		} else {
			maps.Copy(annotations, t.o.Annotations.Add)
		}
	}
	e.Resource, err = encodeResource(&mcp.Metadata{Name: e.Name, Labels: toMap(h.labels), Annotations: annotations}, spec)
	if err != nil {
		// All strings in it were validated.
		panic(fmt.Sprintf("BUG: translate: encode ServiceEntry %s: %v", e.Name, err))
	}
	return e
}

// destinationRule encodes the DestinationRule with the service's subsets, or
// returns nil if there are none.
func (t *Translator) destinationRule(h *head) *Encoded {
	if h.more == nil || len(h.more.subsets) == 0 {
		return nil
	}
	spec := &networking.DestinationRule{Host: h.host, ExportTo: t.o.ExportTo}
	for _, s := range h.more.subsets {
		spec.Subsets = append(spec.Subsets, &networking.Subset{Name: s.key, Labels: map[string]string{t.o.Subsets.Key: s.value}})
	}
	e := &Encoded{Name: h.namespace + "/" + h.name}
	var err error
	e.Resource, err = encodeResource(&mcp.Metadata{Name: e.Name, Labels: toMap(t.metadataLabels)}, spec)
	if err != nil {
		// All strings in it were validated.
		panic(fmt.Sprintf("BUG: translate: encode DestinationRule %s: %v", e.Name, err))
	}
	return e
}
