package plugin

import (
	"cmp"
	"maps"
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// EqualInstances reports whether two lists are equal, including their order.
// With it an adapter drops unchanged answers at less cost than the catalog,
// which translates first.
func EqualInstances(a, b []registry.Instance) bool {
	return slices.EqualFunc(a, b, func(a, b registry.Instance) bool {
		return a.ID == b.ID && a.Address == b.Address && a.Health == b.Health && a.Check == b.Check && a.Disabled == b.Disabled &&
			a.Locality == b.Locality && a.Cluster == b.Cluster && a.ServiceAccount == b.ServiceAccount && a.Node == b.Node &&
			(a.Weight == nil) == (b.Weight == nil) && (a.Weight == nil || *a.Weight == *b.Weight) &&
			slices.Equal(a.Ports, b.Ports) && slices.Equal(a.Tags, b.Tags) && maps.Equal(a.Meta, b.Meta)
	})
}

// UnionInstances returns first plus the instances of second that it lacks, and
// their number. An adapter uses it to retain instances that are missing from an
// incomplete answer. Both lists and the result are sorted by ID; the lists are
// not modified.
func UnionInstances(first, second []registry.Instance) (all []registry.Instance, added int) {
	byID := func(i registry.Instance, id string) int { return cmp.Compare(i.ID, id) }
	if len(first) == 0 {
		return second, len(second)
	}
	all = first
	for _, s := range second {
		if _, ok := slices.BinarySearchFunc(first, s.ID, byID); ok {
			continue
		}
		if added == 0 {
			all = slices.Clone(first)
		}
		all = append(all, s)
		added++
	}
	if added > 0 {
		slices.SortFunc(all, func(a, b registry.Instance) int { return cmp.Compare(a.ID, b.ID) })
	}
	return all, added
}

// SortInstances returns the instances sorted by ID, without duplicates: the
// last one of an ID wins. It returns the list itself if it is already in that
// form, else a new one.
func SortInstances(instances []registry.Instance) []registry.Instance {
	sorted := true
	for i := 1; i < len(instances) && sorted; i++ {
		sorted = instances[i-1].ID < instances[i].ID
	}
	if sorted {
		return instances
	}
	all := slices.Clone(instances)
	slices.SortStableFunc(all, func(a, b registry.Instance) int { return cmp.Compare(a.ID, b.ID) })
	n := 0
	for i := range all {
		if i+1 == len(all) || all[i].ID != all[i+1].ID {
			all[n] = all[i]
			n++
		}
	}
	clear(all[n:])
	return all[:n]
}

// withoutInstances returns the instances of all whose ID is not in others. Both
// are sorted by ID and not modified.
func withoutInstances(all, others []registry.Instance) []registry.Instance {
	var out []registry.Instance
	for _, i := range all {
		if _, ok := slices.BinarySearchFunc(others, i.ID, func(i registry.Instance, id string) int { return cmp.Compare(i.ID, id) }); !ok {
			out = append(out, i)
		}
	}
	return out
}
