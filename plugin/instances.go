package plugin

import (
	"cmp"
	"maps"
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// EqualInstances reports whether two lists say the same, in the same order. With it an adapter drops answers that change nothing for less than the catalog
// does, which translates them first.
func EqualInstances(a, b []registry.Instance) bool {
	return slices.EqualFunc(a, b, func(a, b registry.Instance) bool {
		return a.ID == b.ID && a.Address == b.Address && a.Health == b.Health && a.Disabled == b.Disabled &&
			a.Locality == b.Locality && a.Cluster == b.Cluster && a.Node == b.Node &&
			(a.Weight == nil) == (b.Weight == nil) && (a.Weight == nil || *a.Weight == *b.Weight) &&
			slices.Equal(a.Ports, b.Ports) && slices.Equal(a.Tags, b.Tags) && maps.Equal(a.Meta, b.Meta)
	})
}

// UnionInstances returns first with those instances of second that it lacks, and how many those are. It is how an adapter keeps what is missing in an answer
// that cannot be trusted to be whole. Both lists are sorted by ID, and so is the result; neither is changed.
func UnionInstances(first, second []registry.Instance) (all []registry.Instance, added int) {
	byID := func(i registry.Instance, id string) int { return cmp.Compare(i.ID, id) }
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
