package state

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// addresses returns the addresses of hosts as istiod gets them, "" for none.
func (e env) addresses() map[string]string {
	e.t.Helper()
	out := map[string]string{}
	for c := range e.Changes(Kind{Collection: collection.ServiceEntry}, new(Cursor)) {
		if c.Removed {
			continue
		}
		var se networking.ServiceEntry
		if err := decode(e.t, c.Record, encode.Form{Address: true}).GetBody().UnmarshalTo(&se); err != nil {
			e.t.Fatal(err)
		}
		out[se.GetHosts()[0]] = strings.Join(se.GetAddresses(), ",")
	}
	return out
}

// The addresses of hosts depend on the configured network and on the set of
// hosts: not on what came first, on a restart, or on the network before.
func TestAddressesOfNetwork(t *testing.T) {
	const hosts = 60
	small, wide := netip.MustParsePrefix("10.1.2.0/24"), netip.MustParsePrefix("fd00:1::/64")
	var all []*pluginv1.Upsert
	for n := range hosts {
		all = append(all, entry(fmt.Sprintf("dc1/s%d", n), fmt.Sprintf("s%d.example.org", n)))
	}
	e := newEnv(t, Options{Addresses: small}, "dc1")
	r := e.Registry("dc1")
	r.Begin(nil)
	r.Apply(upserts(all...))
	r.Apply(synced)
	got := e.addresses()
	taken := map[string]string{}
	none := 0
	for host, a := range got {
		switch addr, err := netip.ParseAddr(a); {
		case a == "":
			none++
		case err != nil || !small.Contains(addr) || taken[a] != "":
			t.Errorf("%s has address %q, as has %q", host, a, taken[a])
		}
		taken[a] = host
	}
	// So many hosts in so few addresses: some have none, and are listed.
	listed := 0
	for _, p := range r.Problems() {
		if host, ok := strings.CutPrefix(p.ID, "host "); !ok || got[host] != "" || p.Field != "addresses.cidr" {
			t.Errorf("problem %+v; the host has address %q", p, got[host])
		}
		listed++
	}
	if none == 0 || none > hosts/4 || listed != none || r.Status().ProblemCount != none || len(got) != hosts {
		t.Errorf("%d of %d hosts have no address, of which %d are listed and %d are counted", none, len(got), listed, r.Status().ProblemCount)
	}

	shuffled := newEnv(t, Options{Addresses: small}, "dc1")
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, u := range all {
		shuffled.Registry("dc1").Apply(upserts(u))
	}
	if d := cmp.Diff(got, shuffled.addresses()); d != "" {
		t.Errorf("addresses after another order (-straight +shuffled):\n%s", d)
	}
	restarted := newEnv(t, Options{Addresses: small}, "dc1")
	disk := &savedClaims{}
	disk.follow(e.DB)
	disk.restore(restarted)
	if d := cmp.Diff(got, restarted.addresses()); d != "" {
		t.Errorf("addresses after a restart (-before +after):\n%s", d)
	}
	if n := restarted.Registry("dc1").unaddressed; n != none {
		t.Errorf("%d hosts without address after a restart, want %d", n, none)
	}

	// Another network changes all of them, and each reader is told.
	var c Cursor
	for range e.Changes(Kind{Collection: collection.ServiceEntry}, &c) {
		continue
	}
	e.Configure([]string{"dc1"}, nil, nil, wide)
	told := 0
	for range e.Changes(Kind{Collection: collection.ServiceEntry}, &c) {
		told++
	}
	fresh := newEnv(t, Options{Addresses: wide}, "dc1")
	fresh.Registry("dc1").Apply(upserts(all...))
	if d := cmp.Diff(fresh.addresses(), e.addresses()); d != "" || told != hosts {
		t.Errorf("%d of %d hosts changed; addresses in the new network (-fresh +changed):\n%s", told, hosts, d)
	}
	for host, a := range e.addresses() {
		if addr, err := netip.ParseAddr(a); err != nil || !wide.Contains(addr) {
			t.Errorf("%s has address %q in %s", host, a, wide)
		}
	}
	if n := len(r.Problems()); n > 0 || r.Status().ProblemCount > 0 {
		t.Errorf("%d problems in the wide network: %v", n, r.Problems())
	}
	// Nothing is left of the old one, and the same network changes nothing.
	revision := e.Revision()
	e.Configure([]string{"dc1"}, nil, nil, wide)
	if e.Revision() != revision {
		t.Error("the same network changes something")
	}
	for _, u := range all {
		r.Apply(&pluginv1.WatchResponse{Removals: []*pluginv1.Removal{gone(collection.ServiceEntry, u.GetService())}})
	}
	if e.DB.addresses.Len() > 0 || r.unaddressed != 0 {
		t.Errorf("%d addresses are counted for no host, and %d hosts without one", e.DB.addresses.Len(), r.unaddressed)
	}
}
