package encode

import (
	"fmt"
	"net/netip"
	"testing"
)

// The addresses of a host are of the network, and spread over all of it.
func TestAddresses(t *testing.T) {
	for _, tt := range []struct {
		network string
		want    [2]string // of web.example.org: other ones would be a change for each mesh
		room    int       // least number of different first choices of 10,000 hosts
	}{
		{"", [2]string{"243.132.51.177", "249.230.232.196"}, 9_990},
		{"10.64.0.0/10", [2]string{"10.95.122.249", "10.74.57.221"}, 9_970},
		{"198.18.0.0/15", [2]string{"198.18.195.53", "198.18.3.11"}, 9_500},
		{"192.168.7.0/24", [2]string{"192.168.7.109", "192.168.7.121"}, 254},
		{"fd00:a:b::/64", [2]string{"fd00:a:b:0:5cf:c210:fc2d:7f2b", "fd00:a:b:0:3210:acbe:e5b7:be87"}, 10_000},
		{"fd00:a:b::/120", [2]string{"fd00:a:b::6d", "fd00:a:b::79"}, 254},
	} {
		t.Run(tt.network, func(t *testing.T) {
			network := netip.Prefix{}
			if tt.network != "" {
				network = netip.MustParsePrefix(tt.network)
			}
			got := Addresses(network, "web.example.org")
			if text := [2]string{got[0].String(), got[1].String()}; text != tt.want {
				t.Errorf("addresses of web.example.org: %q, want %q", text, tt.want)
			}
			first := map[netip.Addr]bool{}
			for n := range 10_000 {
				for i, a := range Addresses(network, fmt.Sprintf("host-%d.example.org", n)) {
					if i == 0 {
						first[a] = true
					}
					if network.IsValid() && (!network.Contains(a) || a == network.Addr() || a.Next().IsValid() && !network.Contains(a.Next())) {
						t.Fatalf("host %d has the address %s", n, a)
					}
				}
			}
			if len(first) < tt.room {
				t.Errorf("10,000 hosts have %d different addresses, want %d", len(first), tt.room)
			}
		})
	}
}
