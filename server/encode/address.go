package encode

import (
	"encoding/binary"
	"net/netip"
)

// Addresses returns the addresses that a host hashes to, the one to take and
// the one for when another host has that: of 241.0.0.0-250.255.255.255. The
// block is reserved (RFC 1112 section 4), routed nowhere, and does not overlap
// 240.240.0.0/16, from which istiod allocates.
func Addresses(host string) [2]netip.Addr {
	return [2]netip.Addr{address("vip", host), address("vip2", host)}
}

func address(choice, host string) netip.Addr {
	sum := sumOf([]byte(choice), []byte(host))
	var a [4]byte
	copy(a[:], sum[4:8])
	a[0] = 241 + byte(binary.BigEndian.Uint64(sum[8:])%10)
	return netip.AddrFrom4(a)
}
