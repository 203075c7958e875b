package translate

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// choose returns the instances selected by the configuration. It reuses the
// list.
func (c *call) choose(instances []*registry.Instance) []*registry.Instance {
	t := c.t
	if len(t.selector)+len(t.cidrs)+len(t.excludeCIDRs) == 0 && !t.instances.filters() {
		return instances
	}
	filters := t.instances.filters()
	return slices.DeleteFunc(instances, func(inst *registry.Instance) bool {
		field := t.notSelected(inst)
		if field == "" && filters {
			field = t.instances.apply(c.instanceValues(inst))
		}
		if field != "" {
			c.leftOut.add(c.instanceID(inst.ID), "left out by "+field)
			if c.trace != nil {
				c.stepOf(inst.ID, field, "left out by "+field)
			}
		}
		return field != ""
	})
}

// notSelected returns the field that excludes an instance, or "".
func (t *Translator) notSelected(inst *registry.Instance) string {
	if !t.selector.matches(inst.Meta) {
		return "translate.instances.selector"
	}
	if len(t.cidrs)+len(t.excludeCIDRs) == 0 {
		return ""
	}
	ip, _ := netip.ParseAddr(parseAddress(inst.Address).text)
	in := func(p netip.Prefix) bool { return p.Contains(ip) }
	switch {
	case slices.ContainsFunc(t.excludeCIDRs, in):
		return "translate.instances.exclude_cidrs"
	case len(t.cidrs) > 0 && !slices.ContainsFunc(t.cidrs, in):
		return "translate.instances.cidrs"
	}
	return ""
}

// instanceValues returns the values of an instance for rules, including the
// labels of the labels block in the registry's spelling.
func (c *call) instanceValues(inst *registry.Instance) *values {
	t := c.t
	v := &values{set: make(map[string]string, len(inst.Meta)), more: func(name string) string { return c.instanceFact(inst, name) }, foreign: t.foreign}
	if t.instances.names() {
		for _, name := range instanceFacts {
			if fact := c.instanceFact(inst, name); fact != "" {
				v.set[name] = fact
			}
		}
		for key, value := range inst.Meta {
			v.set["__meta_"+key] = value
		}
	}
	for _, tag := range slices.Backward(slices.Sorted(slices.Values(inst.Tags))) {
		if key, value := t.tagLabel(tag); key != "" && !strings.HasPrefix(key, "__") && !t.foreign(key) {
			v.put(key, value)
		}
	}
	for key, value := range inst.Meta {
		if value != "" && !strings.HasPrefix(key, "__") && t.meta.match(key) && !t.foreign(key) {
			v.set[key] = value
		}
	}
	if t.clusterLabel != "" && inst.Cluster != "" {
		v.set[t.clusterLabel] = inst.Cluster
	}
	return v
}

// instanceFact returns what rules read under a name of [instanceFacts], or of
// an instance's metadata.
func (c *call) instanceFact(inst *registry.Instance, name string) string {
	if key, ok := strings.CutPrefix(name, "__meta_"); ok {
		return inst.Meta[key]
	}
	k := &c.svc.Key
	switch name {
	case "__name":
		return k.Name
	case "__group":
		return k.Group
	case "__namespace":
		return k.Namespace
	case "__partition":
		return k.Partition
	case "__datacenter":
		return k.Datacenter
	case "__peer":
		return k.Peer
	case "__registry":
		return c.t.registry
	case "__tags":
		return tagText(inst.Tags)
	case "__id":
		return inst.ID
	case "__address":
		return inst.Address
	case "__port":
		if len(inst.Ports) > 0 {
			return strconv.Itoa(slices.MinFunc(inst.Ports, comparePorts).Number)
		}
	case "__node":
		return inst.Node
	case "__cluster":
		return inst.Cluster
	case "__health":
		return inst.Health.String()
	case "__region":
		return inst.Locality.Region
	case "__zone":
		return inst.Locality.Zone
	case "__sub_zone":
		return inst.Locality.SubZone
	case "__network":
		return c.t.o.Network
	}
	return ""
}

// relabelInstance applies the rules to an instance and returns its labels. It
// sets the locality from the rules in inst, and the network in c.
func (c *call) relabelInstance(inst *registry.Instance) []pair {
	v := c.instanceValues(inst)
	v.foreign = c.labels.denies
	for key, value := range inst.Meta {
		if value != "" && c.t.meta.match(key) {
			c.labels.denies(key)
		}
	}
	for _, tag := range inst.Tags {
		if key, _ := c.t.tagLabel(tag); key != "" {
			c.labels.denies(key)
		}
	}
	c.t.instances.apply(v) // excluded instances were removed before
	inst.Locality = registry.Locality{Region: v.get("__region"), Zone: v.get("__zone"), SubZone: v.get("__sub_zone")}
	network := v.get("__network")
	if c.network = mendLabelValue(network); c.network != network {
		c.once("network "+quote(network), fmt.Sprintf("is not a name of a network: served as %s; correct it (translate.relabel)", quote(c.network)))
	}
	return slices.DeleteFunc(sortedPairs(v.set), func(p pair) bool { return strings.HasPrefix(p.key, "__") })
}

// subsets groups the service's instances by the version label. All instances
// count, healthy or not.
func (c *call) subsets(instances []*registry.Instance) (out []pair) {
	key := c.t.o.Subsets.Key
	if !c.t.o.Subsets.DestinationRule {
		return nil
	}
	seen := map[string]bool{}
	for _, inst := range instances {
		for _, l := range c.quietLabels(inst) {
			if l.key != key || seen[l.value] {
				continue
			}
			seen[l.value] = true
			out = append(out, pair{mendPortName(l.value), l.value})
		}
	}
	slices.SortFunc(out, func(a, b pair) int { return strings.Compare(a.value, b.value) })
	// Several values may map to one name.
	taken := map[string]bool{}
	return slices.DeleteFunc(out, func(p pair) bool {
		if p.key == "" || taken[p.key] {
			c.about("subset "+quote(p.value), fmt.Sprintf("it is %s that has no letter or digit, or the name of another subset: left out; use another value of the label %s (translate.subsets.key)", quote(p.key), key))
			return true
		}
		taken[p.key] = true
		return false
	})
}

// quietLabels returns an instance's labels; their problems are listed when the
// instance is translated.
func (c *call) quietLabels(inst *registry.Instance) []pair {
	said := c.findings
	defer func() { c.findings = said }()
	copied := *inst
	saved := c.head
	c.head = &head{}
	defer func() { c.head = saved }()
	return c.instanceLabels(&copied)
}
