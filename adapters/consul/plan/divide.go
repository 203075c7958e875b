package plan

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// find adds a service to its group, or requests a new division into groups.
func (p *Plan) find(t *Turn) {
	if !p.crowded && len(p.turns) <= p.places {
		key := groupKey{t.Scope, t.Name}
		if p.groups[key] == nil {
			p.add(&Group{groupKey: key}, t)
			return
		}
	}
	if p.crowded && len(p.turns) < p.grouped*5/4 {
		for n := len(t.Name); n >= 0; n-- {
			if g := p.groups[groupKey{t.Scope, t.Name[:n]}]; g != nil && g.Probe != "" {
				g.members[t], t.group = true, g
				return
			}
		}
	}
	p.dirty = true
}

func (p *Plan) add(g *Group, members ...*Turn) {
	g.members = make(map[*Turn]bool, len(members))
	for _, t := range members {
		g.members[t], t.group = true, g
	}
	p.groups[g.groupKey] = g
}

// divide divides the services into at most as many groups as there are places,
// and retains existing groups that still fit.
func (p *Plan) divide() {
	p.crowded = len(p.turns) > p.places
	old := p.groups
	p.groups = map[groupKey]*Group{}
	for t := range p.turns {
		t.group = nil
	}
	waiting := slices.DeleteFunc(slices.Collect(maps.Keys(p.turns)), func(t *Turn) bool { return !p.open[t.Scope] })
	for _, members := range partition(waiting, p.places) {
		key := groupKey{members[0].Scope, commonPrefix(members)}
		g := old[key]
		probe := ""
		if len(members) > 1 {
			probe = key.Prefix + free(members, len(key.Prefix))
		}
		if g == nil || g.Probe != probe {
			g = &Group{groupKey: key, Probe: probe}
		}
		p.add(g, members...)
	}
	for key, g := range old {
		g.retired = p.groups[key] != g
	}
}

// partition divides services into at most n groups with common prefixes, and
// minimizes the largest group. There is at least one group for each scope.
func partition(turns []*Turn, n int) (groups [][]*Turn) {
	slices.SortFunc(turns, func(a, b *Turn) int {
		return cmp.Or(cmp.Compare(a.Scope, b.Scope), strings.Compare(a.Name, b.Name))
	})
	if len(turns) == 0 || n == 0 {
		return nil
	}
	split := func(members []*Turn, next func(*Turn) int) (parts [][]*Turn) {
		for len(members) > 0 {
			end := slices.IndexFunc(members, func(t *Turn) bool { return next(t) != next(members[0]) })
			if end < 0 {
				end = len(members)
			}
			parts = append(parts, members[:end])
			members = members[end:]
		}
		return parts
	}
	groups = split(turns, func(t *Turn) int { return t.Scope })
	for whole := map[*Turn]bool{}; ; {
		largest := -1
		for i, g := range groups {
			if len(g) > 1 && !whole[g[0]] && (largest < 0 || len(g) > len(groups[largest])) {
				largest = i
			}
		}
		if largest < 0 {
			return groups
		}
		members := groups[largest]
		length := len(commonPrefix(members))
		parts := split(members, func(t *Turn) int { return nextByte(t.Name, length) })
		if len(parts) == 1 || len(groups)-1+len(parts) > n {
			whole[members[0]] = true
			continue
		}
		groups = slices.Replace(groups, largest, largest+1, parts...)
	}
}

// commonPrefix returns the common prefix of the names of sorted services.
func commonPrefix(members []*Turn) string {
	first, last := members[0].Name, members[len(members)-1].Name
	n := 0
	for n < len(first) && n < len(last) && first[n] == last[n] {
		n++
	}
	return first[:n]
}

// nextByte returns the byte of a name at an offset, -1 at its end.
func nextByte(name string, at int) int {
	if at == len(name) {
		return -1
	}
	return int(name[at])
}

// free returns a character that none of the names has at the offset.
func free(members []*Turn, at int) string {
	used := map[int]bool{}
	for _, t := range members {
		used[nextByte(t.Name, at)] = true
	}
	for _, c := range "~!$*+,;=@_-0123456789abcdefghijklmnopqrstuvwxyz" {
		if !used[int(c)] {
			return string(c)
		}
	}
	return "~"
}
