package zookeeper

import (
	"cmp"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/internal/dubbo"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// kind is what a node is for.
type kind int

const (
	kindNone       kind = iota
	kindInterfaces      // children: interfaces
	kindInterface
	kindProviders // children: URLs
	kindRules     // children: URLs
	kindMappings  // children: interfaces
	kindMapping   // data: applications
	kindRevision  // data: what an application offers
	kindApps      // children: applications
	kindApp       // children: instances
	kindInstance  // data: an instance
)

// isList reports whether the children of a node are read, and not its data.
func (k kind) isList() bool {
	switch k {
	case kindInterfaces, kindProviders, kindRules, kindMappings, kindApps, kindApp:
		return true
	default:
		return false
	}
}

// place is a node of the tree.
type place struct {
	kind kind
	// name is the name of the node that stands for the interface or the
	// application, id that of an instance or a revision.
	name, id string
}

// layout knows which node is where. Paths are without a slash at their end.
type layout struct{ dubbo, apps string }

func newLayout(c Config) layout {
	root := clean(c.Chroot)
	return layout{dubbo: root + clean(c.Dubbo), apps: root + clean(c.Apps)}
}

// roots returns the paths below which everything is.
func (l layout) roots(c Config) []string {
	if !c.has(hostsInterfaces) {
		return []string{l.apps}
	}
	return []string{l.dubbo, l.apps}
}

// Names below the path of Dubbo.
const (
	nodeProviders = "providers"
	nodeRules     = "configurators"
	nodeMetadata  = "metadata"
	nodeMapping   = "mapping"
	nodeConfig    = "config"
)

// reserved are the children of Dubbo's path that are no interfaces.
var reserved = map[string]bool{nodeMetadata: true, nodeMapping: true, nodeConfig: true, "tag-router": true, "condition-router": true}

// place returns what the node with a path is.
func (l layout) place(path string) place {
	if path == l.apps {
		return place{kind: kindApps}
	}
	if rest, ok := strings.CutPrefix(path, l.apps+"/"); ok {
		app, id, deep := strings.Cut(rest, "/")
		switch {
		case !deep:
			return place{kind: kindApp, name: app}
		case !strings.Contains(id, "/"):
			return place{kind: kindInstance, name: app, id: id}
		}
		return place{}
	}
	if path == l.dubbo {
		return place{kind: kindInterfaces}
	}
	rest, ok := strings.CutPrefix(path, l.dubbo+"/")
	if !ok {
		return place{}
	}
	parts := strings.Split(rest, "/")
	switch {
	case len(parts) == 1 && parts[0] == nodeMapping:
		return place{kind: kindMappings}
	case len(parts) == 2 && parts[0] == nodeMapping:
		return place{kind: kindMapping, name: parts[1]}
	case len(parts) == 3 && parts[0] == nodeMetadata:
		return place{kind: kindRevision, name: parts[1], id: parts[2]}
	case reserved[parts[0]]:
	case len(parts) == 1:
		return place{kind: kindInterface, name: parts[0]}
	case len(parts) == 2 && parts[1] == nodeProviders:
		return place{kind: kindProviders, name: parts[0]}
	case len(parts) == 2 && parts[1] == nodeRules:
		return place{kind: kindRules, name: parts[0]}
	}
	return place{}
}

// path returns the path of a node.
func (l layout) path(p place) string {
	switch p.kind {
	case kindInterfaces:
		return l.dubbo
	case kindInterface:
		return l.dubbo + "/" + p.name
	case kindProviders:
		return l.dubbo + "/" + p.name + "/" + nodeProviders
	case kindRules:
		return l.dubbo + "/" + p.name + "/" + nodeRules
	case kindMappings:
		return l.dubbo + "/" + nodeMapping
	case kindMapping:
		return l.dubbo + "/" + nodeMapping + "/" + p.name
	case kindRevision:
		return l.dubbo + "/" + nodeMetadata + "/" + p.name + "/" + p.id
	case kindApps:
		return l.apps
	case kindApp:
		return l.apps + "/" + p.name
	case kindInstance:
		return l.apps + "/" + p.name + "/" + p.id
	default:
		panic("BUG: a place without a path")
	}
}

// unescape returns the interface or the URL whose escaped form is the name of a
// node.
func unescape(node string) string {
	if text, err := url.QueryUnescape(node); err == nil {
		return text
	}
	return node
}

// unit is what changes together: an interface, or an application.
type unit struct {
	app  bool
	name string // of the interface, unescaped, or of the application
}

// tree is what the nodes say. It is used by one goroutine.
type tree struct {
	config Config
	wants  func(registry.Key) bool // of plugin.Env

	interfaces map[string]*offered // by node
	apps       map[string]*app     // by node
	// listed are all applications, whether followed or not.
	listed map[string]bool
	// mapped are the applications by interface, and users the reverse.
	mapped map[string][]string
	users  map[string]map[string]bool

	// before is the tree of the session before, while this one is not read
	// wholly.
	before *tree
	// dirty are the units that changed.
	dirty map[unit]bool
}

// offered is an interface at Dubbo's interface level.
type offered struct {
	name             string
	providers        []dubbo.Provider
	rules            []dubbo.Override
	problem, ruleBad string
}

// app is a followed application.
type app struct {
	records map[string]*record
	// waiting are instances whose revision is not read yet. Until it is, what
	// was known of the instance counts.
	waiting   map[string]*record
	revisions map[string]*revision
}

// record is one instance of an application.
type record struct {
	found
	// usable reports that in is an instance, of now or of before.
	usable  bool
	problem string
}

// revision is what an application's instances of one revision offer.
type revision struct {
	read    bool
	offer   dubbo.Offer // nil if it is not in the registry
	problem string
}

func newTree(c Config, wants func(registry.Key) bool, before *tree) *tree {
	return &tree{
		config: c, wants: wants, before: before, interfaces: map[string]*offered{}, apps: map[string]*app{}, listed: map[string]bool{},
		mapped: map[string][]string{}, users: map[string]map[string]bool{}, dirty: map[unit]bool{},
	}
}

// selects reports whether an interface or an application is to be followed.
func (t *tree) selects(name string) bool { return t.config.Services.Match(name) }

// setInterfaces applies the list of interfaces, and returns the new ones.
func (t *tree) setInterfaces(nodes []string) (added []string) {
	now := map[string]bool{}
	for _, node := range nodes {
		if reserved[node] || !t.selects(unescape(node)) {
			continue
		}
		now[node] = true
		if t.addInterface(node) {
			added = append(added, node)
		}
	}
	for node := range t.interfaces {
		if !now[node] {
			t.removeInterface(node)
		}
	}
	return added
}

// addInterface reports whether the interface is new and to be followed.
func (t *tree) addInterface(node string) bool {
	if t.interfaces[node] != nil || !t.selects(unescape(node)) {
		return false
	}
	t.interfaces[node] = &offered{name: unescape(node)}
	return true
}

func (t *tree) removeInterface(node string) {
	if o := t.interfaces[node]; o != nil {
		delete(t.interfaces, node)
		t.touch(o.name)
	}
}

// touch notes that an interface has changed.
func (t *tree) touch(name string) { t.dirty[unit{name: name}] = true }

// setProviders applies the providers of an interface.
func (t *tree) setProviders(node string, urls []string) {
	o := t.interfaces[node]
	if o == nil {
		return
	}
	o.providers, o.problem = nil, ""
	var bad []string
	slices.Sort(urls)
	for _, u := range urls {
		text := unescape(u)
		p, err := dubbo.ParseProvider(text)
		if err != nil {
			bad = append(bad, fmt.Sprintf("provider %s: %v; it is left out", quote(text), err))
			continue
		}
		p.Name.Interface = o.name // whatever its parameters say, it is registered here
		o.providers = append(o.providers, p)
	}
	o.problem = several(bad)
	t.touch(o.name)
}

// setRules applies the configurators of an interface.
func (t *tree) setRules(node string, urls []string) {
	o := t.interfaces[node]
	if o == nil {
		return
	}
	o.rules, o.ruleBad = nil, ""
	var bad []string
	slices.Sort(urls)
	for _, u := range urls {
		text := unescape(u)
		if strings.HasPrefix(text, "empty://") {
			continue // how Dubbo writes that there is none
		}
		r, err := dubbo.ParseOverride(text)
		if err != nil {
			bad = append(bad, fmt.Sprintf("rule %s: %v; it is left out", quote(text), err))
			continue
		}
		o.rules = append(o.rules, r)
	}
	o.ruleBad = several(bad)
	t.touch(o.name)
}

// setMapping applies the applications that offer an interface, and returns
// those that are to be followed from now on.
func (t *tree) setMapping(node string, apps []string) (added []string) {
	name := unescape(node)
	for _, a := range t.mapped[name] {
		delete(t.users[a], name)
		if len(t.users[a]) == 0 {
			delete(t.users, a)
		}
	}
	was := t.mapped[name]
	if t.mapped[name] = apps; len(apps) == 0 {
		delete(t.mapped, name)
	}
	for _, a := range apps {
		if t.users[a] == nil {
			t.users[a] = map[string]bool{}
		}
		t.users[a][name] = true
		if t.follows(a) && t.addApp(a) {
			added = append(added, a)
		}
	}
	for _, a := range was {
		if !t.follows(a) {
			t.removeApp(a)
		}
	}
	t.touch(name)
	return added
}

// setMappings applies the list of interfaces that are mapped, and returns
// those whose applications are to be read.
func (t *tree) setMappings(nodes []string) (wanted []string) {
	now := map[string]bool{}
	for _, node := range nodes {
		name := unescape(node)
		if !t.selects(name) {
			continue
		}
		now[name] = true
		if t.mapped[name] == nil {
			wanted = append(wanted, node)
		}
	}
	for _, name := range slices.Collect(maps.Keys(t.mapped)) {
		if !now[name] {
			t.setMapping(name, nil)
		}
	}
	return wanted
}

// follows reports whether an application is there and of use.
func (t *tree) follows(name string) bool {
	return t.listed[name] && (t.config.has(hostsApplications) && t.selects(name) && t.wants(registry.Key{Name: name}) || len(t.users[name]) > 0)
}

// setApps applies the list of applications, and returns the new ones.
func (t *tree) setApps(nodes []string) (added []string) {
	t.listed = make(map[string]bool, len(nodes))
	for _, node := range nodes {
		t.listed[node] = true
	}
	for _, node := range nodes {
		if t.follows(node) && t.addApp(node) {
			added = append(added, node)
		}
	}
	for node := range t.apps {
		if !t.follows(node) {
			t.removeApp(node)
		}
	}
	return added
}

// list adds one application to the list, and reports whether it is new and to
// be followed.
func (t *tree) list(node string) bool {
	t.listed[node] = true
	return t.follows(node) && t.addApp(node)
}

func (t *tree) addApp(node string) bool {
	if t.apps[node] != nil {
		return false
	}
	t.apps[node] = &app{records: map[string]*record{}, waiting: map[string]*record{}, revisions: map[string]*revision{}}
	return true
}

func (t *tree) removeApp(node string) {
	if t.apps[node] != nil {
		delete(t.apps, node)
		t.touchApp(node)
	}
}

// touchApp notes that an application has changed, and the interfaces that it
// offers.
func (t *tree) touchApp(node string) {
	t.dirty[unit{app: true, name: node}] = true
	for name := range t.users[node] {
		t.touch(name)
	}
}

// setInstances applies the list of instances of an application, and returns
// those that are to be read.
func (t *tree) setInstances(node string, ids []string) (added []string) {
	a := t.apps[node]
	if a == nil {
		return nil
	}
	now := map[string]bool{}
	for _, id := range ids {
		now[id] = true
		if a.records[id] == nil && a.waiting[id] == nil {
			added = append(added, id)
		}
	}
	for id := range a.records {
		if !now[id] {
			t.removeInstance(node, id)
		}
	}
	for id := range a.waiting {
		if !now[id] {
			t.removeInstance(node, id)
		}
	}
	return added
}

func (t *tree) removeInstance(node, id string) {
	if a := t.apps[node]; a != nil && (a.records[id] != nil || a.waiting[id] != nil) {
		delete(a.records, id)
		delete(a.waiting, id)
		a.forget()
		t.touchApp(node)
	}
}

// known returns what is known of an instance, also from the session before.
func (t *tree) known(node, id string) *record {
	for _, tree := range []*tree{t, t.before} {
		if tree == nil || tree.apps[node] == nil {
			continue
		}
		if r := tree.apps[node].records[id]; r != nil && r.usable {
			return r
		}
	}
	return nil
}

// setInstance applies the data of an instance, and returns the revision that is
// to be read, "" for none.
func (t *tree) setInstance(node, id string, data []byte) (wanted string) {
	a := t.apps[node]
	if a == nil {
		return ""
	}
	r := &record{usable: true}
	f, err := parseInstance(id, data)
	if r.found = f; err != nil {
		was := t.known(node, id)
		if r.usable = was != nil; was != nil {
			r.found = was.found
			r.problem = fmt.Sprintf("instance %s: %v; what it said before is kept: register it again", quote(id), err)
		} else {
			r.problem = fmt.Sprintf("instance %s: %v; it is left out: register it again", quote(id), err)
		}
	}
	rev := r.revision
	if !t.config.has(hostsInterfaces) || !isNode(rev) {
		rev = ""
	}
	if rev == "" || a.revisions[rev] != nil && a.revisions[rev].read {
		a.records[id] = r
		delete(a.waiting, id)
		a.forget()
		t.touchApp(node)
		return ""
	}
	a.waiting[id] = r
	if a.revisions[rev] == nil {
		a.revisions[rev] = &revision{}
		return rev
	}
	return "" // it is being read
}

// setRevision applies what a revision of an application says; nil is that the
// registry does not have it.
func (t *tree) setRevision(node, id string, data []byte) {
	a := t.apps[node]
	if a == nil || a.revisions[id] == nil {
		return
	}
	rev := a.revisions[id]
	rev.read, rev.problem = true, ""
	if data != nil {
		offer, err := dubbo.ParseMetadata(data)
		switch {
		case err == nil:
			rev.offer = offer
		case rev.offer != nil:
			rev.problem = fmt.Sprintf("the metadata of revision %s cannot be read: %v; what it said before is kept", quote(id), err)
		default:
			rev.problem = fmt.Sprintf("the metadata of revision %s cannot be read: %v; its interfaces are served without group and version", quote(id), err)
		}
	}
	a.arrive(id)
	t.touchApp(node)
}

// arrive applies the instances that wait for a revision.
func (a *app) arrive(revision string) {
	for of, r := range a.waiting {
		if r.revision == revision {
			a.records[of] = r
			delete(a.waiting, of)
		}
	}
	a.forget()
}

// isNode reports whether a text from the registry can be the name of a node.
// A server ends connections on which a path is longer than it stores data.
func isNode(name string) bool { return name != "" && len(name) <= 1024 && !strings.Contains(name, "/") }

// forget drops revisions that no instance has.
func (a *app) forget() {
	if len(a.revisions) < 2 {
		return
	}
	used := map[string]bool{}
	for _, all := range []map[string]*record{a.records, a.waiting} {
		for _, r := range all {
			used[r.revision] = true
		}
	}
	maps.DeleteFunc(a.revisions, func(id string, _ *revision) bool { return !used[id] })
}

// keep takes over what the session before had of a node that may not be read.
func (t *tree) keep(p place) {
	if t.before == nil {
		return
	}
	switch p.kind {
	case kindProviders, kindRules:
		was, now := t.before.interfaces[p.name], t.interfaces[p.name]
		if was == nil || now == nil {
			return
		}
		if p.kind == kindProviders {
			now.providers, now.problem = was.providers, was.problem
		} else {
			now.rules, now.ruleBad = was.rules, was.ruleBad
		}
		t.touch(now.name)
	case kindMapping:
		if was := t.before.mapped[unescape(p.name)]; was != nil {
			t.setMapping(p.name, was)
		}
	case kindApp:
		if was := t.before.apps[p.name]; was != nil && t.apps[p.name] != nil {
			t.apps[p.name] = was
			t.touchApp(p.name)
		}
	case kindInstance:
		if was := t.known(p.name, p.id); was != nil && t.apps[p.name] != nil {
			t.apps[p.name].records[p.id] = was
			t.touchApp(p.name)
		}
	case kindRevision:
		was, now := t.before.apps[p.name], t.apps[p.name]
		if was == nil || now == nil || was.revisions[p.id] == nil || !was.revisions[p.id].read || now.revisions[p.id] == nil {
			return
		}
		now.revisions[p.id] = was.revisions[p.id]
		now.arrive(p.id)
		t.touchApp(p.name)
	case kindNone, kindInterfaces, kindInterface, kindMappings, kindApps:
	}
}

// units returns all units.
func (t *tree) units() map[unit]bool {
	all := map[unit]bool{}
	for _, o := range t.interfaces {
		all[unit{name: o.name}] = true
	}
	for name := range t.mapped {
		all[unit{name: name}] = true
	}
	for name := range t.apps {
		all[unit{app: true, name: name}] = true
	}
	return all
}

// compose returns the services of a unit that have instances, and what of it
// cannot be used, "" for nothing.
func (t *tree) compose(u unit) (services []plugin.Snapshot, problem string) {
	if u.app {
		return t.composeApp(u.name)
	}
	return t.composeInterface(u.name)
}

func (t *tree) composeApp(name string) ([]plugin.Snapshot, string) {
	a := t.apps[name]
	if a == nil || !t.config.has(hostsApplications) || !t.selects(name) {
		return nil, ""
	}
	var bad []string
	var instances []registry.Instance
	for _, id := range slices.Sorted(maps.Keys(a.records)) {
		r := a.records[id]
		if r.problem != "" {
			bad = append(bad, r.problem)
		}
		if r.usable {
			instances = append(instances, r.in)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(a.revisions)) {
		if p := a.revisions[id].problem; p != "" {
			bad = append(bad, p)
		}
	}
	if len(instances) == 0 {
		return nil, several(bad)
	}
	return []plugin.Snapshot{{Service: registry.Service{Key: registry.Key{Name: name}}, Instances: plugin.SortInstances(instances)}}, several(bad)
}

// named returns the interface of a name, whose node may be escaped or not.
func (t *tree) named(name string) *offered {
	if o := t.interfaces[url.QueryEscape(name)]; o != nil {
		return o
	}
	return t.interfaces[name]
}

func (t *tree) composeInterface(name string) (services []plugin.Snapshot, problem string) {
	type where struct {
		protocol, address string
		port              int
	}
	all := map[dubbo.Name][]dubbo.Provider{}
	here := map[where]bool{}
	var rules []dubbo.Override
	var bad []string
	if o := t.named(name); o != nil {
		rules = o.rules
		bad = slices.DeleteFunc([]string{o.problem, o.ruleBad}, func(s string) bool { return s == "" })
		for _, p := range o.providers {
			here[where{p.Protocol, p.Address, p.Port}] = true
			all[p.Name] = append(all[p.Name], p)
		}
	}
	for _, of := range t.mapped[name] {
		a := t.apps[of]
		if a == nil {
			continue
		}
		for _, id := range slices.Sorted(maps.Keys(a.records)) {
			r := a.records[id]
			if !r.usable || !r.dubbo {
				continue
			}
			var known dubbo.Offer
			if rev := a.revisions[r.revision]; rev != nil {
				known = rev.offer
			}
			for _, p := range dubbo.Offers(name, known, r.in) {
				// Providers that register at both levels say more at that of
				// the interface.
				if here[where{p.Protocol, p.Address, p.Port}] {
					continue
				}
				p.Params = maps.Clone(p.Params)
				if p.Params == nil {
					p.Params = map[string]string{}
				}
				p.Params["application"] = cmp.Or(p.Params["application"], of)
				all[p.Name] = append(all[p.Name], p)
			}
		}
	}
	for n, of := range all {
		instances, unusable := dubbo.Instances(dubbo.Apply(rules, of))
		if unusable != "" {
			bad = append(bad, unusable)
		}
		services = append(services, plugin.Snapshot{Service: n.Service(dubboNamespace, of), Instances: instances})
	}
	slices.Sort(bad)
	return services, several(bad)
}

// several describes some problems: the first, and the number of others.
func several(bad []string) string {
	switch len(bad) {
	case 0:
		return ""
	case 1:
		return bad[0]
	}
	return fmt.Sprintf("%s (and %d more like it)", bad[0], len(bad)-1)
}

// quote shortens and quotes a text for messages.
func quote(text string) string {
	return fmt.Sprintf("%.200q", strings.ToValidUTF8(text, "\uFFFD"))
}
