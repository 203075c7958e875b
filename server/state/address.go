package state

import (
	"net/netip"
	"slices"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/record"
)

// claimant is a host that hashes to an address.
type claimant struct {
	host     string
	services int  // with this host
	first    bool // the address is its first choice
}

// before reports whether c takes precedence: first choices win, then the
// smaller host. An address depends only on the set of hosts.
func (c *claimant) before(d *claimant) bool {
	if c.first != d.first {
		return c.first
	}
	return c.host < d.host
}

// owns reports whether a host owns an address that it hashes to. The caller
// holds apply, as for all of this file.
func (d *DB) owns(host string, addr netip.Addr) bool {
	all := d.hosts[addr]
	n := slices.IndexFunc(all, func(c claimant) bool { return c.host == host })
	return n >= 0 && !slices.ContainsFunc(all, func(c claimant) bool { return c.host != host && c.before(&all[n]) })
}

// addressOf returns the address of a host, or the zero value if other hosts own
// both addresses that it hashes to. Of 100,000 hosts some 30 need the second in
// the default network.
func (d *DB) addressOf(host string) record.HostAddress {
	if host == "" {
		return record.HostAddress{}
	}
	for _, addr := range encode.Addresses(d.network, host) {
		if d.owns(host, addr) {
			return record.HostAddress{Addr: addr, Hash: encode.HashOf([]byte("address"), []byte(addr.String()))}
		}
	}
	return record.HostAddress{}
}

// setNetwork replaces the network of the addresses of hosts, and gives each
// host one of the new network. The same network changes nothing.
func (d *DB) setNetwork(network netip.Prefix) {
	if network == d.network {
		return
	}
	d.network = network
	clear(d.hosts)
	if len(d.registries) == 0 {
		return
	}
	b := &batch{r: d.registries[0], db: d}
	for _, head := range d.tables[collection.ServiceEntry].index {
		for c := head; c != nil; c = c.next {
			if c.parts != nil && c.of != nil && c.of.host != "" && !c.Is(record.Derived) {
				d.countHost(c.of.host, 1)
				b.change(c.of)
			}
		}
	}
	b.commit()
	for _, r := range d.registries {
		r.countProblems()
	}
}

// setUnaddressed updates the count of services whose host has no address, as
// others have both that it hashes to.
func (b *batch) setUnaddressed(s *service, on bool) {
	if s.unaddressed == on {
		return
	}
	s.unaddressed = on
	r := s.registry
	if on {
		r.unaddressed++
	} else {
		r.unaddressed--
	}
	b.concern(r)
}

// countHost adds delta, 1 or -1, to the number of services with a host. It
// returns the other hosts of the same addresses whose address may change.
func (d *DB) countHost(host string, delta int) (others []string) {
	choices := encode.Addresses(d.network, host)
	for n, addr := range choices {
		if n > 0 && addr == choices[0] {
			break
		}
		all := d.hosts[addr]
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
		if d.hosts[addr] = all; len(all) == 0 {
			delete(d.hosts, addr)
		}
		for _, c := range all {
			if me.before(&c) && (c.first || !d.owns(c.host, encode.Addresses(d.network, c.host)[0])) {
				others = append(others, c.host)
			}
		}
	}
	return others
}
