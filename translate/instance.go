package translate

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// maxWeight bounds a weight, so that the sum over a few thousand instances fits the 32 bits that Envoy has for it.
const maxWeight = 1_000_000

// weight returns the instance's weight, whether it had to be guessed, and why.
func weight(inst *registry.Instance) (w float64, reason string) {
	if inst.Weight == nil {
		return 1, ""
	}
	w = *inst.Weight
	if math.IsNaN(w) || math.IsInf(w, 0) || w < 0 {
		return 1, fmt.Sprintf("has the weight %v: served with 1; register it with a number from 0 on", w)
	}
	return w, ""
}

// scaleWeight returns the weight that is served for w, which is more than 0.
func scaleWeight(w float64, fractional bool) (scaled uint32, reason string) {
	s := w
	if fractional {
		s = max(1, math.Round(w*100))
	}
	if s > maxWeight {
		return maxWeight, fmt.Sprintf("has the weight %v: served with %d, the most there is; use smaller weights", w, maxWeight)
	}
	return uint32(s), ""
}

// address is what an instance's address turned out to be.
type address struct {
	text   string // as it is served; "" if it cannot be
	isName bool
	reason string // why it cannot be served
}

func parseAddress(s string) address {
	const cure = "left out; register it with an IP address or a host name"
	switch {
	case s == "":
		return address{reason: "has no address: " + cure}
	case strings.HasPrefix(s, "unix:") || strings.HasPrefix(s, "/"):
		return address{reason: fmt.Sprintf("listens on %s, which cannot be reached from elsewhere: %s", quote(s), cure)}
	}
	bare := s
	if s[0] == '[' && s[len(s)-1] == ']' {
		bare = s[1 : len(s)-1]
	}
	if ip, err := netip.ParseAddr(bare); err == nil {
		canonical := bare == s && ip.Is4() // has one spelling only
		ip = ip.Unmap()
		switch {
		case ip.Zone() != "":
			return address{reason: fmt.Sprintf("has the address %s, whose zone means nothing on another machine: %s", quote(s), cure)}
		case ip.IsUnspecified() || ip.IsMulticast():
			return address{reason: fmt.Sprintf("has the address %s, which nobody can connect to: %s", quote(s), cure)}
		}
		if canonical {
			return address{text: s}
		}
		return address{text: ip.String()}
	}
	if name := strings.TrimSuffix(lower(s), "."); isHost(name) {
		return address{text: name, isName: true}
	}
	return address{reason: fmt.Sprintf("has the address %s, which is neither an IP address nor a host name: %s", quote(s), cure)}
}

// locality returns the instance's locality as "region/zone/subzone", cut after the last part that there is.
func (c *call) locality(inst *registry.Instance) string {
	o := &c.t.o.Locality
	l := inst.Locality
	if whole := ofMeta(inst.Meta, o.Keys); whole != "" {
		parts := strings.SplitN(whole, "/", 3)
		parts = append(parts, "", "")
		l = registry.Locality{Region: parts[0], Zone: parts[1], SubZone: parts[2]}
	}
	if o.RegionKey != "" {
		l.Region = cmp.Or(inst.Meta[o.RegionKey], l.Region)
	}
	if o.ZoneKey != "" {
		l.Zone = cmp.Or(inst.Meta[o.ZoneKey], l.Zone)
	}
	if o.SubZoneKey != "" {
		l.SubZone = cmp.Or(inst.Meta[o.SubZoneKey], l.SubZone)
	}
	l.Region = cmp.Or(l.Region, o.Region)
	if l == (registry.Locality{}) {
		return ""
	}
	region, zone, subZone := c.localityPart(l.Region), c.localityPart(l.Zone), c.localityPart(l.SubZone)
	switch {
	case region == "":
		c.once("locality", "instances have a zone without a region: served without locality; set translate.locality.region")
		return ""
	case zone == "" && subZone != "":
		c.once("locality", "instances have a sub-zone without a zone: served with the region only; register the zone")
		return region
	case zone == "":
		return region
	case subZone == "":
		return region + "/" + zone
	}
	return region + "/" + zone + "/" + subZone
}

func (c *call) localityPart(s string) string {
	if !strings.ContainsFunc(s, badInLocality) {
		return s
	}
	mended := strings.Map(func(r rune) rune {
		if badInLocality(r) {
			return '-'
		}
		return r
	}, s)
	c.once("locality "+quote(s), fmt.Sprintf("has characters that a part of a locality cannot have: served as %s; rename it", quote(mended)))
	return mended
}

// takesTraffic says whether the operator and the checks let the instance take traffic.
func (t *Translator) takesTraffic(inst *registry.Instance) bool {
	switch {
	case inst.Disabled:
		return false
	case inst.Health == registry.HealthWarning:
		return t.o.Health != "passing"
	case inst.Health == registry.HealthCritical:
		return t.o.Health == "any"
	}
	return true
}

// instance translates one instance. It returns false if the instance is left out, having said why unless that is as wanted. name is
// the resource's name if that is known from before.
func (c *call) instance(inst *registry.Instance, name string) (Encoded, bool) {
	addr := parseAddress(inst.Address)
	if addr.isName && !c.head.dns {
		addr = address{reason: fmt.Sprintf("has the host name %s and translate.resolution is static: left out; register it with an IP address, or use auto or dns", quote(inst.Address))}
	}
	ports := validPorts(inst.Ports)
	w, odd := weight(inst)
	for _, reason := range [...]string{addr.reason, ports, odd} {
		if reason != "" {
			c.ofInstance(inst.ID, reason)
		}
	}
	if addr.reason != "" || ports != "" || w == 0 || !c.head.served || !c.t.takesTraffic(inst) {
		return Encoded{}, false
	}

	out := workload{address: addr.text, network: c.t.o.Network, serviceAccount: c.t.o.ServiceAccount}
	c.buf = namePorts(c.buf[:0], inst.Ports, nil)
	c.numbers = c.numbers[:0]
	for _, p := range c.buf {
		if i := matchPort(c.head.ports, p.key, len(c.buf)); i >= 0 {
			c.numbers = append(c.numbers, portNumber{c.head.ports[i].name, uint32(p.number)})
		}
	}
	if len(c.numbers) == 0 {
		c.ofInstance(inst.ID, "has none of the service's ports: left out; register it with one of them")
		return Encoded{}, false
	}
	slices.SortFunc(c.numbers, func(a, b portNumber) int { return cmp.Compare(a.name, b.name) })
	out.ports = c.numbers

	scaled, reason := scaleWeight(w, c.head.fractional)
	if reason != "" {
		c.ofInstance(inst.ID, reason)
	}
	if scaled != 1 {
		out.weight = scaled
	}
	out.locality = c.locality(inst)
	out.labels = c.instanceLabels(inst)
	if name == "" {
		name = c.instanceName(inst.ID)
	}
	return Encoded{Name: name, Resource: out.encode(name)}, true
}

func (c *call) instanceLabels(inst *registry.Instance) []pair {
	l, t := &c.labels, c.t
	l.candidates = append(l.candidates, candidate{pair: pair{SelectorLabel, c.head.selector}, from: fromBridge})
	for _, p := range t.addLabels {
		l.candidates = append(l.candidates, candidate{pair: p, from: fromOptions})
	}
	if t.clusterLabel != "" {
		l.add(fromCluster, t.clusterLabel, t.clusterLabel, inst.Cluster)
	}
	if len(t.meta) > 0 {
		for k, v := range inst.Meta {
			if t.meta.match(k) {
				l.add(fromMeta, k, k, v)
			}
		}
	}
	for _, tag := range inst.Tags {
		l.tag(tag)
	}
	return l.settle()
}

// fingerprintSeed differs from process to process, and that shows nowhere: a fingerprint only tells whether an instance is the one
// whose encoding is at hand already, and encoding it anew gives the same bytes.
var fingerprintSeed = maphash.MakeSeed()

// fingerprint sums up all of an instance that its translation depends on, apart from the ID, which is compared itself.
func (t *Translator) fingerprint(inst *registry.Instance) uint64 {
	x := hashString(inst.Address)
	x = combine(x, uint64(len(inst.Ports)))
	for _, p := range inst.Ports {
		x = combine(x, hashString(p.Name))
		x = combine(x, uint64(p.Number))
		x = combine(x, hashString(p.Protocol))
	}
	// The order of a map's pairs does not matter, so theirs is a sum.
	sum := uint64(len(inst.Meta))
	for k, v := range inst.Meta {
		sum += combine(combine(1, hashString(k)), hashString(v))
	}
	x = combine(x, sum)
	x = combine(x, uint64(len(inst.Tags)))
	for _, tag := range inst.Tags {
		x = combine(x, hashString(tag))
	}
	flags := uint64(0)
	if inst.Weight != nil {
		flags |= 1
		x = combine(x, math.Float64bits(*inst.Weight))
	}
	if t.takesTraffic(inst) {
		flags |= 2
	}
	x = combine(x, flags)
	x = combine(x, hashString(inst.Locality.Region))
	x = combine(x, hashString(inst.Locality.Zone))
	x = combine(x, hashString(inst.Locality.SubZone))
	return combine(x, hashString(inst.Cluster))
}

func hashString(s string) uint64 {
	if s == "" {
		return 0
	}
	return maphash.String(fingerprintSeed, s)
}

// combine mixes v into x; for either, different values of the other give different outcomes.
func combine(x, v uint64) uint64 {
	x = (x ^ v) * 0x9e3779b97f4a7c15
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	return x ^ x>>32
}

// compareInstances orders instances by ID and, where IDs are equal, by all that they hold, so that which one is served does not
// depend on the order in which the registry lists them.
func compareInstances(a, b *registry.Instance) int {
	if n := cmp.Compare(a.ID, b.ID); n != 0 {
		return n
	}
	weights := func(w *float64) []float64 {
		if w == nil {
			return nil
		}
		return []float64{*w}
	}
	meta := func(m map[string]string) []string {
		var flat []string
		for _, k := range slices.Sorted(maps.Keys(m)) {
			flat = append(flat, k, m[k])
		}
		return flat
	}
	return cmp.Or(
		compareBools(a.Disabled, b.Disabled),
		cmp.Compare(a.Health, b.Health),
		cmp.Compare(a.Address, b.Address),
		slices.CompareFunc(a.Ports, b.Ports, comparePorts),
		slices.Compare(weights(a.Weight), weights(b.Weight)),
		cmp.Compare(a.Locality.Region, b.Locality.Region),
		cmp.Compare(a.Locality.Zone, b.Locality.Zone),
		cmp.Compare(a.Locality.SubZone, b.Locality.SubZone),
		cmp.Compare(a.Cluster, b.Cluster),
		slices.Compare(meta(a.Meta), meta(b.Meta)),
		slices.Compare(a.Tags, b.Tags),
	)
}
