// Package address gives each host an address of a network.
//
// A host hashes to two addresses. If several hosts hash to one, it belongs to
// one that has it as its first choice, and of several to the smallest. So an
// address depends only on the set of hosts. Of 100,000 hosts some 30 need the
// second in the default network.
package address

import (
	"net/netip"
	"slices"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// Hosts are hosts with their addresses.
type Hosts struct {
	network   netip.Prefix
	claimants map[netip.Addr][]claimant
}

// claimant is a host that hashes to an address.
type claimant struct {
	host     string
	services int  // with this host
	first    bool // the address is its first choice
}

// before reports whether c takes precedence.
func (c *claimant) before(d *claimant) bool {
	if c.first != d.first {
		return c.first
	}
	return c.host < d.host
}

// In returns no hosts, with addresses of a network; see [encode.Addresses].
func In(network netip.Prefix) *Hosts {
	return &Hosts{network, make(map[netip.Addr][]claimant)}
}

// Network returns the network.
func (h *Hosts) Network() netip.Prefix { return h.network }

// Len returns the number of addresses that any host hashes to.
func (h *Hosts) Len() int { return len(h.claimants) }

// owns reports whether a host owns an address that it hashes to.
func (h *Hosts) owns(host string, addr netip.Addr) bool {
	all := h.claimants[addr]
	n := slices.IndexFunc(all, func(c claimant) bool { return c.host == host })
	return n >= 0 && !slices.ContainsFunc(all, func(c claimant) bool { return c.before(&all[n]) })
}

// Of returns the address of a host, or the zero value if other hosts own both
// that it hashes to, or if the host is "".
func (h *Hosts) Of(host string) record.HostAddress {
	if host != "" {
		for _, addr := range encode.Addresses(h.network, host) {
			if h.owns(host, addr) {
				return record.HostAddress{Addr: addr, Hash: encode.HashOf([]byte("address"), []byte(addr.String()))}
			}
		}
	}
	return record.HostAddress{}
}

// Count adds delta, 1 or -1, to the number of services with a host. It returns
// the other hosts of the same addresses whose address may change.
func (h *Hosts) Count(host string, delta int) (others []string) {
	if host == "" {
		return nil
	}
	choices := encode.Addresses(h.network, host)
	for n, addr := range choices {
		if n > 0 && addr == choices[0] {
			break
		}
		all := h.claimants[addr]
		at := slices.IndexFunc(all, func(c claimant) bool { return c.host == host })
		if at < 0 {
			at = len(all)
			all = append(all, claimant{host: host, first: n == 0})
		}
		all[at].services += delta
		me := all[at]
		if me.services <= 0 {
			all = slices.Delete(all, at, at+1)
		}
		if h.claimants[addr] = all; len(all) == 0 {
			delete(h.claimants, addr)
		}
		for _, c := range all {
			if me.before(&c) && (c.first || !h.owns(c.host, encode.Addresses(h.network, c.host)[0])) {
				others = append(others, c.host)
			}
		}
	}
	return others
}
