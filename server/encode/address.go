package encode

import (
	"encoding/binary"
	"net/netip"
)

// Addresses returns the addresses that a host hashes to in a network: the first
// choice, and the one for when another host holds it. The all-zeros address of
// the network and the all-ones one are none of them.
//
// The zero network stands for 241.0.0.0-250.255.255.255, a block that is
// reserved (RFC 1112 section 4), routed nowhere, and disjoint from
// 240.240.0.0/16, from which istiod allocates.
func Addresses(network netip.Prefix, host string) [2]netip.Addr {
	return [2]netip.Addr{address(network, "vip", host), address(network, "vip2", host)}
}

func address(network netip.Prefix, choice, host string) netip.Addr {
	sum := sumOf([]byte(choice), []byte(host))
	if !network.IsValid() {
		var a [4]byte
		copy(a[:], sum[4:8])
		a[0] = 241 + byte(binary.BigEndian.Uint64(sum[8:])%10)
		return netip.AddrFrom4(a)
	}
	a := network.Masked().Addr().AsSlice()
	// At most 62 bits of the address are chosen, which suffices.
	most := uint64(1)<<min(len(a)*8-network.Bits(), 62) - 2
	n := binary.BigEndian.Uint64(sum[8:])%most + 1
	for i := len(a) - 1; n > 0; i-- {
		a[i] |= byte(n)
		n >>= 8
	}
	addr, _ := netip.AddrFromSlice(a)
	return addr
}
