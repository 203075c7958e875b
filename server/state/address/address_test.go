package address

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// An address depends only on the set of hosts, two hosts never have the same
// one, and Count names every other host whose address changes.
func TestModel(t *testing.T) {
	network := netip.MustParsePrefix("10.0.0.0/28") // 14 addresses
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 1))
		h, services, without := In(network), map[string]int{}, 0
		for range 60 {
			host := fmt.Sprintf("h%d", r.IntN(20))
			before := addresses(h, services)
			var others []string
			if services[host] > 0 && r.IntN(2) == 0 {
				if services[host]--; services[host] == 0 {
					delete(services, host)
				}
				others = h.Count(host, -1)
			} else {
				services[host]++
				others = h.Count(host, 1)
			}
			now := addresses(h, services)
			for of, addr := range now {
				if want := naive(network, services, of); addr != want {
					t.Fatalf("seed %d: %s has %v, want %v of %v", seed, of, addr, want, services)
				}
				if was, known := before[of]; known && of != host && was != addr && !slices.Contains(others, of) {
					t.Fatalf("seed %d: the address of %s changed with %s, which is not said", seed, of, host)
				}
				if !addr.IsValid() {
					without++
				}
			}
		}
		for host, n := range services {
			for range n {
				h.Count(host, -1)
			}
		}
		if h.Len() > 0 {
			t.Fatalf("seed %d: %d addresses of no host", seed, h.Len())
		}
		if without == 0 && seed == 0 {
			t.Error("no host is without an address; the network is too large to test anything")
		}
	}
}

func addresses(h *Hosts, services map[string]int) map[string]netip.Addr {
	out := make(map[string]netip.Addr)
	for host := range services {
		out[host] = h.Of(host).Addr
	}
	return out
}

// naive returns the address of a host given all others: each address belongs to
// the smallest of the hosts that have it as the first choice, else of those
// that have it as the second.
func naive(network netip.Prefix, services map[string]int, host string) netip.Addr {
	for n, addr := range encode.Addresses(network, host) {
		mine := true
		for _, other := range slices.Sorted(maps.Keys(services)) {
			choices := encode.Addresses(network, other)
			switch {
			case other == host:
			case choices[0] == addr:
				first := encode.Addresses(network, host)[0] == addr
				mine = mine && first && host < other
			case choices[1] == addr && n == 1:
				mine = mine && (encode.Addresses(network, host)[0] == addr || host < other)
			}
		}
		if mine {
			return addr
		}
	}
	return netip.Addr{}
}

// No host has no address, and another network is another address.
func TestOf(t *testing.T) {
	h := In(netip.Prefix{})
	h.Count("", 1)
	if got := h.Of(""); got.IsValid() || h.Len() > 0 {
		t.Errorf("no host has the address %v", got)
	}
	h.Count("web", 1)
	other := In(netip.MustParsePrefix("fd00::/64"))
	other.Count("web", 1)
	if a, b := h.Of("web"), other.Of("web"); a == b || a.Hash == b.Hash || !a.Addr.Is4() || !b.Addr.Is6() {
		t.Errorf("addresses %v and %v", a, b)
	}
}
