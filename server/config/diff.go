package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
)

// Difference describes the changes between two configurations. It contains
// fields, registries and addresses, but no other values, which may be secret.
type Difference struct {
	// Added and Removed are names of registries.
	Added   []string `json:"registries_added"`
	Removed []string `json:"registries_removed"`
	// Changed are registries with changes other than their position.
	Changed []RegistryDifference `json:"registries_changed"`
	// Reordered reports whether the remaining registries have another order.
	Reordered bool `json:"registries_reordered"`
	// ListenersAdded and ListenersRemoved are listeners, as "listen.xds
	// 127.0.0.1:15051".
	ListenersAdded   []string `json:"listeners_added"`
	ListenersRemoved []string `json:"listeners_removed"`
	// ListenersChanged are those that stay open, with other rules or TLS.
	ListenersChanged []string `json:"listeners_changed"`
	// Fields are the paths of all other changed fields.
	Fields []string `json:"fields"`
	// NeedRestart are the paths of changed fields that require a restart.
	NeedRestart []string `json:"need_restart"`
}

// RegistryDifference describes the changes of one registry.
type RegistryDifference struct {
	Name string `json:"name"`
	// Was is the old name of a renamed registry, which is otherwise unchanged.
	Was string `json:"was,omitempty"`
	// Fields are paths within the registry, such as "config.address".
	Fields []string `json:"fields"`
}

// NeedsPlugin reports whether the registry needs a new plugin, because a field
// changed that the plugin receives.
func (d *RegistryDifference) NeedsPlugin() bool {
	return slices.ContainsFunc(d.Fields, func(field string) bool {
		return !slices.ContainsFunc(ofBridge, func(own string) bool { return within(field, own) })
	})
}

// Empty reports whether there are no changes.
func (d *Difference) Empty() bool {
	return len(d.Added)+len(d.Removed)+len(d.Changed)+len(d.ListenersAdded)+len(d.ListenersRemoved)+len(d.ListenersChanged)+len(d.Fields) == 0 && !d.Reordered
}

// Renamed returns the old names of renamed registries by their new ones.
func (d *Difference) Renamed() map[string]string {
	out := make(map[string]string)
	for _, c := range d.Changed {
		if c.Was != "" {
			out[c.Name] = c.Was
		}
	}
	return out
}

// Fields that a running bridge can change, besides listeners and registries.
// All others, including those of registries, need a restart.
var (
	reloadable         = []string{"addresses", "conflicts", "consumers", "drain", "log.level", "plugin_dir", "sinks"}
	reloadableRegistry = []string{"name", "type", "config", "translate", "plugin", "required", "sync_timeout", "protect", "owns"}
	// Fields of a registry that its plugin does not receive.
	ofBridge = []string{"required", "sync_timeout", "protect"}
)

// Diff returns the changes from c to next. The names of registries must be
// unique in both.
func (c *Config) Diff(next *Config) Difference {
	d := Difference{
		Added: []string{}, Removed: []string{}, Changed: []RegistryDifference{},
		ListenersAdded: []string{}, ListenersRemoved: []string{}, ListenersChanged: []string{}, Fields: []string{}, NeedRestart: []string{},
	}
	d.registries(c, next)
	before, after := c.Listen.All(), next.Listen.All()
	d.ListenersAdded, d.ListenersRemoved = without(names(after), names(before)), without(names(before), names(after))
	d.ListenersChanged = changedListeners(before, after)

	// Exclude what is reported above.
	was, is := *c, *next
	was.Listen, was.Registries, is.Listen, is.Registries = Listen{}, nil, Listen{}, nil
	d.Fields = append(d.Fields, changedFields("", reflect.ValueOf(was), reflect.ValueOf(is))...)
	for _, field := range d.Fields {
		if !slices.ContainsFunc(reloadable, func(r string) bool { return within(field, r) }) {
			d.NeedRestart = append(d.NeedRestart, field)
		}
	}
	return d
}

// Restart returns a problem for each changed field of c that needs a restart,
// nil if there is none.
func (c *Config) Restart(d *Difference) (found Problems) {
	for _, field := range d.NeedRestart {
		found = append(found, &Problem{
			File: c.file, Position: c.Position(field), Field: field,
			Reason: "cannot be changed while the bridge runs; restart it, or put back what it was",
		})
	}
	return found.Sort()
}

// NamedListener is a listener with its place in the configuration.
type NamedListener struct {
	// Field is listen.xds, listen.admin or listen.mcp.
	Field string
	// Path is the field, with the index of an item of a list.
	Path string
	Listener
}

// String returns the listener as "listen.xds 127.0.0.1:15051".
func (n NamedListener) String() string { return n.Field + " " + n.Address }

// All returns the configured listeners.
func (l *Listen) All() (all []NamedListener) {
	for i, x := range l.XDS {
		path := "listen.xds"
		if len(l.XDS) > 1 {
			path = fmt.Sprintf("listen.xds[%d]", i)
		}
		all = append(all, NamedListener{"listen.xds", path, x})
	}
	all = append(all, NamedListener{"listen.admin", "listen.admin", l.Admin})
	if l.MCP.Address != "" {
		all = append(all, NamedListener{"listen.mcp", "listen.mcp", l.MCP})
	}
	return all
}

func names(all []NamedListener) []string {
	out := make([]string, len(all))
	for i, l := range all {
		out[i] = l.String()
	}
	return out
}

// changedListeners returns the listeners of both that differ. One of several
// with port 0 is compared with the first.
func changedListeners(before, after []NamedListener) []string {
	out := []string{}
	for _, l := range after {
		i := slices.IndexFunc(before, func(b NamedListener) bool { return b.String() == l.String() })
		if i >= 0 && !reflect.DeepEqual(before[i].Listener, l.Listener) {
			out = append(out, l.String())
		}
	}
	return out
}

// without returns the multiset difference of a and b.
func without(a, b []string) []string {
	count := make(map[string]int)
	for _, s := range b {
		count[s]++
	}
	out := []string{}
	for _, s := range a {
		if count[s]--; count[s] < 0 {
			out = append(out, s)
		}
	}
	return out
}

func (d *Difference) registries(c, next *Config) {
	before, after := make(map[string]int), make(map[string]int)
	for i := range c.Registries {
		before[c.Registries[i].Name] = i
	}
	for i := range next.Registries {
		after[next.Registries[i].Name] = i
	}
	gone := slices.DeleteFunc(slices.Sorted(maps.Keys(before)), func(name string) bool { _, stays := after[name]; return stays })
	var order []int // positions in c of the remaining registries, in the order of next
	for i := range next.Registries {
		r := &next.Registries[i]
		at, stays := before[r.Name]
		was := ""
		if !stays {
			// A removed registry that is otherwise equal was renamed. Among
			// several equal ones, any is correct.
			n := slices.IndexFunc(gone, func(name string) bool {
				old := c.Registries[before[name]]
				old.Name = r.Name
				return len(registryFields(&old, r)) == 0
			})
			if n < 0 {
				d.Added = append(d.Added, r.Name)
				continue
			}
			was = gone[n]
			at, gone = before[was], slices.Delete(gone, n, n+1)
		}
		order = append(order, at)
		if fields := registryFields(&c.Registries[at], r); len(fields) > 0 {
			d.Changed = append(d.Changed, RegistryDifference{r.Name, was, fields})
			for _, field := range fields {
				if !slices.ContainsFunc(reloadableRegistry, func(r string) bool { return within(field, r) }) {
					d.NeedRestart = append(d.NeedRestart, registryPath(i)+"."+field)
				}
			}
		}
	}
	d.Removed = append(d.Removed, gone...)
	d.Reordered = !slices.IsSorted(order)
}

var rawMessage = reflect.TypeFor[json.RawMessage]()

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func registryFields(a, b *Registry) []string {
	return changedFields("", reflect.ValueOf(*a), reflect.ValueOf(*b))
}

// changedFields returns the paths of the fields in which two values of one type
// differ, in the order of the fields.
func changedFields(path string, a, b reflect.Value) (paths []string) {
	switch {
	case a.Type() == rawMessage:
		return changedJSON(path, decodeJSON(a.Bytes()), decodeJSON(b.Bytes()))
	case a.Kind() == reflect.Struct:
		for i := range a.NumField() {
			if f := a.Type().Field(i); f.IsExported() {
				paths = append(paths, changedFields(join(path, f.Tag.Get("json")), a.Field(i), b.Field(i))...)
			}
		}
		return paths
	case a.Kind() == reflect.Slice && a.Len() == b.Len() && a.Len() > 0:
		for i := range a.Len() {
			paths = append(paths, changedFields(fmt.Sprintf("%s[%d]", path, i), a.Index(i), b.Index(i))...)
		}
		return paths
	case a.Kind() == reflect.Slice && a.Len() == 0 && b.Len() == 0, reflect.DeepEqual(a.Interface(), b.Interface()):
		return nil
	}
	return []string{path}
}

// decodeJSON decodes a block, so that the order of its keys is irrelevant.
func decodeJSON(b []byte) (v any) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	_ = dec.Decode(&v) // encoded by Parse
	return v
}

func changedJSON(path string, a, b any) (paths []string) {
	x, isMap := a.(map[string]any)
	y, areMaps := b.(map[string]any)
	if !isMap || !areMaps {
		if reflect.DeepEqual(a, b) {
			return nil
		}
		return []string{path}
	}
	keys := make(map[string]bool)
	for key := range x {
		keys[key] = true
	}
	for key := range y {
		keys[key] = true
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		left, had := x[key]
		right, has := y[key]
		if had != has {
			paths = append(paths, join(path, key))
			continue
		}
		paths = append(paths, changedJSON(join(path, key), left, right)...)
	}
	return paths
}
