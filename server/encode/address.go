package encode

import (
	"encoding/binary"
	"net/netip"
)

// Addresses returns the addresses that a host hashes to: the first choice, and
// the one for when another host holds it. They are of
// 241.0.0.0-250.255.255.255, a block that is reserved (RFC 1112 section 4),
// routed nowhere, and disjoint from 240.240.0.0/16, from which istiod
// allocates.
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
