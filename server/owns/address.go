package owns

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/config"
)

// block is a range of addresses that no registry has unless it is given one
// within it.
type block struct {
	netip.Prefix
	what string
	v4   int // the byte at which an IPv4 address begins that is meant, 0 for none
}

// denied are ranges that no instance of a service has an address in. A proxy
// that is sent there reaches something of its own machine or of its network
// that trusts whoever can connect: RFC 6890, and the metadata services of
// clouds.
var denied = []block{
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback, where each proxy has its own administration port", 0},
	{netip.MustParsePrefix("::1/128"), "loopback, where each proxy has its own administration port", 0},
	{netip.MustParsePrefix("0.0.0.0/8"), "this network", 0},
	{netip.MustParsePrefix("::/128"), "unspecified", 0},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local, with the metadata service of most clouds", 0},
	{netip.MustParsePrefix("fe80::/10"), "link-local", 0},
	{netip.MustParsePrefix("fd00:ec2::/32"), "the metadata service of a cloud", 0},
	{netip.MustParsePrefix("fd20:ce::/32"), "the metadata service of a cloud", 0},
	{netip.MustParsePrefix("100.100.100.200/32"), "the metadata service of a cloud", 0},
	{netip.MustParsePrefix("168.63.129.16/32"), "the metadata service of a cloud", 0},
	{netip.MustParsePrefix("192.0.0.0/24"), "for protocols, with the metadata service of a cloud", 0},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast", 0},
	{netip.MustParsePrefix("ff00::/8"), "multicast", 0},
	{netip.MustParsePrefix("255.255.255.255/32"), "broadcast", 0},
	{netip.MustParsePrefix("64:ff9b::/96"), "an IPv4 address behind NAT64", 12},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "an IPv4 address behind NAT64", 12},
	{netip.MustParsePrefix("::/96"), "an IPv4 address in another form", 12},
	{netip.MustParsePrefix("::ffff:0:0:0/96"), "an IPv4 address in another form", 12},
	{netip.MustParsePrefix("2002::/16"), "an IPv4 address behind 6to4", 2},
	{netip.MustParsePrefix("2001::/32"), "an IPv4 address behind Teredo", 0},
}

// deniedNames are names for addresses of denied, besides those below localhost.
var deniedNames = map[string]bool{
	"localhost": true, "localhost.localdomain": true, "localhost4": true, "localhost6": true, "ip6-localhost": true, "ip6-loopback": true,
	"metadata": true, "metadata.google.internal": true, "metadata.goog": true,
	"instance-data": true, "instance-data.ec2.internal": true,
}

// virtual checks an address of a host, which may be a block.
func (r *Rules) virtual(text string) error {
	p, err := config.ParseCIDR(text)
	if err != nil {
		return nil //nolint:nilerr // what is not an address is refused elsewhere
	}
	return r.prefix(text, p)
}

// address checks the address of an instance: an IP address, a name, or the path
// of a socket.
func (r *Rules) address(text string) error {
	if strings.HasPrefix(strings.ToLower(text), "unix:") {
		return &Outside{"address " + text, "", "it is a socket of each proxy's own machine"}
	}
	if a, err := netip.ParseAddr(text); err == nil {
		return r.prefix(text, netip.PrefixFrom(a, a.BitLen()))
	}
	return r.named(text)
}

func (r *Rules) prefix(text string, p netip.Prefix) error {
	p = unmapped(p)
	outside := func(why string) error { return &Outside{"address " + text, "addresses", why} }
	if len(r.addresses) > 0 && !slices.ContainsFunc(r.addresses, func(own netip.Prefix) bool { return covers(own, p) }) {
		return outside("owns.addresses has " + r.blocks())
	}
	for _, d := range denied {
		if !d.Overlaps(p) {
			continue
		}
		// A block is named by one within it, or by what is wider as it stands.
		if !slices.ContainsFunc(r.addresses, func(own netip.Prefix) bool { return own == p || covers(own, p) && covers(d.Prefix, own) }) {
			return outside("it is " + d.what)
		}
		if a := p.Addr(); d.v4 > 0 && p.IsSingleIP() && a != netip.IPv6Unspecified() && !a.IsLoopback() {
			b := a.As16()
			v4 := netip.AddrFrom4([4]byte(b[d.v4 : d.v4+4]))
			if i := slices.IndexFunc(denied, func(d block) bool { return d.Contains(v4) }); i >= 0 && !slices.ContainsFunc(r.addresses, func(own netip.Prefix) bool {
				return covers(own, p) && own.Bits() > d.Bits() || own.Contains(v4) && covers(denied[i].Prefix, own)
			}) {
				return outside("it stands for " + v4.String() + ", which is " + denied[i].what)
			}
		}
	}
	return nil
}

// covers reports whether p is within outer.
func covers(outer, p netip.Prefix) bool {
	return outer.Bits() <= p.Bits() && outer.Contains(p.Addr())
}

// unmapped returns the IPv4 form of a block of IPv4 addresses mapped to IPv6.
func unmapped(p netip.Prefix) netip.Prefix {
	if a := p.Addr(); a.Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	return p
}

// named checks a host name as the address of an instance, which may stand for
// any address.
func (r *Rules) named(text string) error {
	name := lower(text)
	last := name[strings.LastIndexByte(name, '.')+1:]
	switch _, err := strconv.ParseUint(last, 0, 64); {
	case text == "":
		return nil
	case err == nil:
		return &Outside{"address " + text, "", "resolvers read it as an IP address; write that as 10.0.0.1"}
	case deniedNames[name] || strings.HasSuffix(name, ".localhost"):
		if !slices.Contains(r.hosts, name) {
			return &Outside{"address " + text, "hosts", "it stands for the machine of each proxy or the metadata service of a cloud"}
		}
	case len(r.addresses) > 0 && !r.everyAddress && len(r.hosts) == 0:
		return &Outside{"address " + text, "hosts", "owns.addresses has " + r.blocks() + ", and a name may stand for any address"}
	}
	if len(r.addresses) > 0 && !r.everyAddress {
		return r.host(text)
	}
	return r.cluster(text)
}

func (r *Rules) blocks() string {
	all := make([]string, len(r.addresses))
	for i, p := range r.addresses {
		all[i] = p.String()
	}
	return list(all)
}
