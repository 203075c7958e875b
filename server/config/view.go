package config

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/shard"
)

// view checks a view. Of is the view that it is a part of, nil for none. What
// hosts there will be is not known before a listing, so that patterns which fit
// none are not found here.
func (d *decoder) view(at string, admin bool, v, of *View) {
	d.check(!admin || v.IsZero(), at, "is for sinks; listen.admin shows everything")
	d.check(!d.config.doc.Has(at) || !v.IsZero(), at, "is empty; name registries, namespaces, hosts, collections or a shard, or leave it out for everything")
	var registries []string
	for i := range d.config.Registries {
		registries = append(registries, d.config.Registries[i].Name)
	}
	kinds := slices.Sorted(slices.Values(collection.All()))
	for _, l := range []struct {
		field       string
		items, wide []string
		check       func(string) string
	}{
		{"registries", v.Registries, of.registries(), oneOf("no registry has this name", registries)},
		{"namespaces", v.Namespaces, of.namespaces(), func(n string) string {
			if len(n) > maxName || !label.MatchString(n) {
				return "must be lower-case letters, digits and dashes"
			}
			return ""
		}},
		{"hosts", v.Hosts, nil, func(h string) string {
			if _, err := path.Match(h, ""); h == "" || err != nil {
				return "is not a pattern; *.service.consul fits every host of that domain"
			}
			return ""
		}},
		{"collections", v.Collections, of.collections(), oneOf("no kind of resource is called so", kinds)},
	} {
		field := at + "." + l.field
		d.check(l.items == nil || len(l.items) > 0, field, "is an empty list, which selects nothing; leave it out for everything")
		for i, item := range l.items {
			if reason := l.check(item); reason != "" {
				d.check(false, fmt.Sprintf("%s[%d]", field, i), "%s", reason)
			}
		}
		d.check(len(l.items) == 0 || len(l.wide) == 0 || slices.ContainsFunc(l.items, func(item string) bool { return slices.Contains(l.wide, item) }),
			field, "select nothing, for the listener's view has only %s", strings.Join(l.wide, ", "))
	}
	if v.Shard == "" {
		d.check(d.bad[at] || !d.config.doc.Has(at+".shard"), at+".shard", "is empty; leave it out for everything")
		return
	}
	s, err := shard.Parse(v.Shard)
	if err != nil {
		d.check(false, at+".shard", "%v", err)
		return
	}
	if of != nil {
		d.check(s.Overlaps(of.Shards()), at+".shard", "selects nothing, for the listener's view has only shard %s", of.Shard)
	}
}

func (v *View) registries() []string  { return v.orAll().Registries }
func (v *View) namespaces() []string  { return v.orAll().Namespaces }
func (v *View) collections() []string { return v.orAll().Collections }
func (v *View) orAll() *View          { return cmp.Or(v, &View{}) }

// oneOf returns a check for one of some names.
func oneOf(unknown string, names []string) func(string) string {
	return func(name string) string {
		if slices.Contains(names, name) {
			return ""
		}
		return unknown + "; " + suggest(name, names)
	}
}

// OutOfShards returns a problem for each view that has none of the shards of
// the process.
func (c *Config) OutOfShards(own shard.Set) (found Problems) {
	check := func(at string, v *View) {
		if !v.Shards().Overlaps(own) {
			at += ".view.shard"
			found = append(found, &Problem{
				File: c.file, Position: c.Position(at), Field: at,
				Reason: fmt.Sprintf("selects nothing, for this process has only shard %s (--shards)", own),
			})
		}
	}
	for _, l := range c.Listen.All() {
		check(l.Path, &l.View)
		for i := range l.Allow {
			check(fmt.Sprintf("%s.allow[%d]", l.Path, i), &l.Allow[i].View)
		}
	}
	return found.Sort()
}

// Gaps describes shards that no listener serves although others of the same
// number are served: a mesh with these listeners lacks their services. Own are
// the shards of the process.
func (c *Config) Gaps(own shard.Set) (gaps []string) {
	served := make(map[int][]bool) // by the number of shards
	for _, l := range c.Listen.All() {
		s := l.View.Shards()
		if s.All() {
			continue
		}
		if served[s.Of] == nil {
			served[s.Of] = make([]bool, s.Of)
		}
		for i := s.First; i <= s.Last; i++ {
			served[s.Of][i] = true
		}
	}
	for _, of := range slices.Sorted(maps.Keys(served)) {
		var missing []string
		for i := 0; i < of; i++ {
			first := i
			for i < of && !served[of][i] && (shard.Set{First: i, Last: i, Of: of}).Overlaps(own) {
				i++
			}
			if i > first {
				missing = append(missing, shard.Set{First: first, Last: i - 1, Of: of}.String())
			}
		}
		if len(missing) > 0 {
			gaps = append(gaps, "no listener has shard "+strings.Join(missing, ", "))
		}
	}
	return gaps
}
