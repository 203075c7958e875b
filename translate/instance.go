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

// maxWeight bounds a weight so that the sum over a few thousand instances fits
// into Envoy's 32 bits.
const maxWeight = 1_000_000

// weight returns the instance's weight and, if it was replaced, the reason.
func weight(inst *registry.Instance) (w float64, reason string) {
	if inst.Weight == nil {
		return 1, ""
	}
	w = *inst.Weight
	if math.IsNaN(w) || math.IsInf(w, 0) || w < 0 {
		return 1, fmt.Sprintf("has the weight %v: served with 1; register it with a number from 0 on, or set translate.weights", w)
	}
	return w, ""
}

// scaleWeight returns the served weight for w, which is positive.
func scaleWeight(w float64, fractional bool) (scaled uint32, reason string) {
	s := w
	if fractional {
		s = max(1, math.Round(w*100))
	}
	if s > maxWeight {
		return maxWeight, fmt.Sprintf("has the weight %v: served with %d, the most there is; use smaller weights, or set translate.weights", w, maxWeight)
	}
	return uint32(s), ""
}

// address is the parsed address of an instance.
type address struct {
	text   string // as served; "" if it cannot be
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

// locality returns the instance's locality as "region/zone/subzone", without
// trailing empty parts.
func (c *call) locality(inst *registry.Instance) string {
	o := &c.t.o.Locality
	l := inst.Locality
	if len(c.t.localities) > 0 {
		if ip, err := netip.ParseAddr(parseAddress(inst.Address).text); err == nil {
			for _, x := range c.t.localities {
				if x.prefix.Contains(ip) {
					l = x.locality
					break
				}
			}
		}
	}
	if whole := ofMeta(inst.Meta, o.Keys); whole != "" {
		parts := strings.SplitN(strings.ReplaceAll(whole, "%2F", "/"), "/", 3)
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
		c.once("locality", "instances have a sub-zone without a zone: served with the region only; register the zone, or set translate.locality")
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
	c.once("locality "+quote(s), fmt.Sprintf("has characters that a part of a locality cannot have: served as %s; rename it, or set translate.locality.cidrs", quote(mended)))
	return mended
}

// idle returns why the instance is to take no traffic, or "".
func (t *Translator) idle(inst *registry.Instance) (reason string) {
	switch {
	case inst.Disabled:
		return "is disabled in the registry: left out; enable it there"
	case inst.Health == registry.HealthCritical && t.o.Health != "any":
		return "fails its check: left out; translate.health: any would serve it"
	case inst.Health == registry.HealthWarning && t.o.Health == "passing":
		return "has a check that warns: left out; it is served with warning in translate.health"
	case inst.Weight != nil && *inst.Weight == 0:
		return "has weight 0: left out; give it another weight in the registry"
	}
	return ""
}

// health returns what [Idle.Health] says of an instance that is idle.
func health(inst *registry.Instance) string {
	switch {
	case inst.Disabled:
		return "disabled"
	case inst.Health == registry.HealthCritical, inst.Health == registry.HealthWarning:
		return inst.Health.String()
	default:
		return ""
	}
}

// instance translates one instance. It returns false if the instance is
// omitted, with a finding unless that is intended. name is the resource's name
// if already known.
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
	if addr.reason != "" || ports != "" || !c.head.served || c.t.idle(inst) != "" {
		return Encoded{}, false
	}

	out := workload{address: addr.text, serviceAccount: c.serviceAccount(inst), metadata: c.t.metadataLabels}
	c.buf = namePorts(c.buf[:0], inst.Ports, nil)
	c.numbers = c.numbers[:0]
	for i := range c.head.ports {
		p := &c.head.ports[i]
		if j := matchPort(c.buf, p); j >= 0 {
			c.numbers = append(c.numbers, portNumber{p.name, uint32(c.buf[j].number)})
		}
	}
	if len(c.numbers) == 0 {
		c.ofInstance(inst.ID, "has none of the service's ports: left out; register it with one of them, or set translate.extra_ports")
		return Encoded{}, false
	}
	slices.SortFunc(c.numbers, func(a, b portNumber) int { return cmp.Compare(a.name, b.name) })
	out.ports = c.numbers

	switch c.t.o.Weights {
	case "none":
		w = 1
	case "whole":
		w = max(1, math.Trunc(w))
	}
	scaled, reason := scaleWeight(w, c.head.fractional)
	if reason != "" {
		c.ofInstance(inst.ID, reason)
	}
	if scaled != 1 {
		out.weight = scaled
	}
	if len(c.t.instances) > 0 {
		inst = new(*inst) // rules may set its locality
	}
	c.network = c.t.o.Network
	out.labels = c.instanceLabels(inst)
	out.network = c.network
	out.locality = c.locality(inst)
	if name == "" {
		name = c.instanceName(inst.ID)
	}
	if c.trace != nil {
		c.explainInstance(inst.ID, name, &out)
	}
	return Encoded{Name: name, Resource: out.encode(name)}, true
}

// serviceAccount returns the instance's own service account, else the
// configured one.
func (c *call) serviceAccount(inst *registry.Instance) string {
	o := &c.t.o
	account := ""
	if o.ServiceAccountKey != "" {
		account = inst.Meta[o.ServiceAccountKey]
	}
	namespace, name, _ := strings.Cut(inst.ServiceAccount, "/")
	switch {
	case account == "" && name != "" && namespace != c.head.namespace:
		// Istio takes the identity to be of the namespace of the resource.
		c.once("service accounts", fmt.Sprintf("its instances have service accounts of the namespace %s, and its resources are in %s: served with %s; set translate.namespace to {{.Namespace}}", quote(namespace), quote(c.head.namespace), quote(o.ServiceAccount)))
		return o.ServiceAccount
	case account == "":
		account = name
	}
	switch {
	case account == "":
		return o.ServiceAccount
	case !isSubdomain(account):
		c.ofInstance(inst.ID, fmt.Sprintf("has the service account %s, which is not a legal name: served with %s; correct it (translate.service_account_key)", quote(account), quote(o.ServiceAccount)))
		return o.ServiceAccount
	}
	return account
}

func (c *call) instanceLabels(inst *registry.Instance) []pair {
	l, t := &c.labels, c.t
	l.candidates = append(l.candidates, candidate{pair: pair{SelectorLabel, c.head.selector}, from: fromBridge})
	for _, p := range t.addLabels {
		l.candidates = append(l.candidates, candidate{pair: p, from: fromOptions})
	}
	if len(t.instances) > 0 {
		for _, p := range c.relabelInstance(inst) {
			l.add(fromRule, p.key, p.key, p.value)
		}
		return l.settle()
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

// fingerprintSeed differs between processes without visible effect: a
// fingerprint only detects an unchanged instance, whose encoding is then
// reused.
var fingerprintSeed = maphash.MakeSeed()

// fingerprint hashes all of an instance that its translation depends on, except
// the ID, which has its own hash.
func (t *Translator) fingerprint(inst *registry.Instance) uint64 {
	x := hashString(inst.Address)
	x = combine(x, uint64(len(inst.Ports)))
	for _, p := range inst.Ports {
		x = combine(x, hashString(p.Name))
		x = combine(x, uint64(p.Number))
		x = combine(x, hashString(p.Protocol))
	}
	// Summed, since the order of a map's pairs is random.
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
	x = combine(x, flags)
	x = combine(x, hashString(t.idle(inst)))
	x = combine(x, hashString(inst.Locality.Region))
	x = combine(x, hashString(inst.Locality.Zone))
	x = combine(x, hashString(inst.Locality.SubZone))
	if len(t.instances) > 0 {
		x = combine(x, hashString(inst.Node))
		x = combine(x, uint64(inst.Health))
	}
	x = combine(x, hashString(inst.ServiceAccount))
	return combine(x, hashString(inst.Cluster))
}

func hashKey(k *registry.Key) uint64 {
	x := hashString(k.Name)
	for _, part := range [...]string{k.Group, k.Namespace, k.Partition, k.Datacenter, k.Peer} {
		x = combine(x, hashString(part))
	}
	return x
}

func hashString(s string) uint64 {
	if s == "" {
		return 0
	}
	return maphash.String(fingerprintSeed, s)
}

// combine mixes v into x. It is injective in each argument.
func combine(x, v uint64) uint64 {
	x = (x ^ v) * 0x9e3779b97f4a7c15
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	return x ^ x>>32
}

// compareInstances orders instances by ID and then by content, so that the
// result does not depend on the registry's order.
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
		cmp.Compare(a.Check, b.Check),
		cmp.Compare(a.Node, b.Node),
		cmp.Compare(a.Address, b.Address),
		slices.CompareFunc(a.Ports, b.Ports, comparePorts),
		slices.Compare(weights(a.Weight), weights(b.Weight)),
		cmp.Compare(a.Locality.Region, b.Locality.Region),
		cmp.Compare(a.Locality.Zone, b.Locality.Zone),
		cmp.Compare(a.Locality.SubZone, b.Locality.SubZone),
		cmp.Compare(a.Cluster, b.Cluster),
		cmp.Compare(a.ServiceAccount, b.ServiceAccount),
		slices.Compare(meta(a.Meta), meta(b.Meta)),
		slices.Compare(a.Tags, b.Tags),
	)
}
