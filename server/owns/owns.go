// Package owns decides what a registry may say: hosts, namespaces and addresses
// that are not its own are refused.
package owns

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/server/config"
)

// Rules are those of one registry. They are safe for concurrent use.
type Rules struct {
	hosts, namespaces []string
	addresses         []netip.Prefix
	denied            []block
	beyond            bool
}

// block is a range of addresses that no registry has unless it is given one
// within it.
type block struct {
	netip.Prefix
	what string
}

// always are ranges that no instance of a service has an address in. A proxy
// that is sent there reaches something of its own machine or of its network
// that trusts whoever can connect: RFC 6890, and the metadata services of
// clouds.
var always = []block{
	{netip.MustParsePrefix("0.0.0.0/8"), "this network"},
	{netip.MustParsePrefix("::/128"), "unspecified"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local, with the metadata service of most clouds"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("fd00:ec2::/32"), "the metadata service of a cloud"},
	{netip.MustParsePrefix("100.100.100.200/32"), "the metadata service of a cloud"},
	{netip.MustParsePrefix("168.63.129.16/32"), "the metadata service of a cloud"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
	{netip.MustParsePrefix("255.255.255.255/32"), "broadcast"},
}

// loopback is where a proxy on another machine reaches itself: its own
// administration port, or what its application serves to itself only.
var loopback = []block{
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback, which is another machine for each proxy"},
	{netip.MustParsePrefix("::1/128"), "loopback, which is another machine for each proxy"},
}

// New returns the rules of a registry. With beyond the bridge has sinks on
// other machines, so that loopback addresses are nobody's.
func New(o config.Owns, beyond bool) *Rules {
	r := &Rules{hosts: o.Hosts, namespaces: o.Namespaces, denied: always, beyond: beyond}
	if beyond {
		r.denied = slices.Concat(always, loopback)
	}
	for _, text := range o.Addresses {
		p, _ := config.ParseCIDR(text) // validated
		r.addresses = append(r.addresses, p)
	}
	return r
}

// Outside is the refusal of something that the registry does not own.
type Outside struct {
	What  string // such as "host db.example.org"
	Field string // of the registry's block, which would permit it
	Why   string
}

// Error implements error.
func (e *Outside) Error() string {
	return fmt.Sprintf("%s is not the registry's: %s; name it in owns.%s if it is", e.What, e.Why, e.Field)
}

// CheckNamespace returns an *[Outside] for a namespace that is not the
// registry's.
func (r *Rules) CheckNamespace(namespace string) error {
	if len(r.namespaces) > 0 && !slices.Contains(r.namespaces, namespace) {
		return &Outside{"namespace " + namespace, "namespaces", "owns.namespaces has " + list(r.namespaces)}
	}
	return nil
}

// Check returns an *[Outside] for hosts and addresses of a ServiceEntry or
// WorkloadEntry that are not the registry's. Other kinds have none.
func (r *Rules) Check(body proto.Message) error {
	switch b := body.(type) {
	case *networking.ServiceEntry:
		for _, host := range b.GetHosts() {
			if err := r.host(host); err != nil {
				return err
			}
		}
		for _, text := range b.GetAddresses() {
			if err := r.virtual(text); err != nil {
				return err
			}
		}
		for _, e := range b.GetEndpoints() {
			if err := r.address(e.GetAddress()); err != nil {
				return err
			}
		}
	case *networking.WorkloadEntry:
		return r.address(b.GetAddress())
	}
	return nil
}

func (r *Rules) host(host string) error {
	if len(r.hosts) == 0 {
		return nil
	}
	for _, pattern := range r.hosts {
		// A host with a wildcard is owned by a pattern that covers all of it.
		if ok, _ := path.Match(pattern, host); ok && (!strings.HasPrefix(host, "*") || strings.HasPrefix(pattern, "*")) { // validated
			return nil
		}
	}
	return &Outside{"host " + host, "hosts", "owns.hosts has " + list(r.hosts)}
}

// virtual checks an address of a host, which may be a block.
func (r *Rules) virtual(text string) error {
	p, err := config.ParseCIDR(text)
	if err != nil || len(r.addresses) == 0 {
		return nil //nolint:nilerr // what is no address is refused elsewhere
	}
	for _, own := range r.addresses {
		if own.Bits() <= p.Bits() && own.Contains(p.Addr()) {
			return nil
		}
	}
	return &Outside{"address " + text, "addresses", "owns.addresses has " + r.blocks()}
}

// address checks the address of an instance: an IP address, a name, or the path
// of a socket.
func (r *Rules) address(text string) error {
	outside := func(why string) error { return &Outside{"address " + text, "addresses", why} }
	if strings.HasPrefix(text, "unix:") {
		return outside("it is a socket of each proxy's own machine")
	}
	a, err := netip.ParseAddr(text)
	if err != nil {
		return r.named(text)
	}
	a = a.Unmap().WithZone("")
	at := slices.IndexFunc(r.addresses, func(p netip.Prefix) bool { return p.Contains(a) })
	if at < 0 && len(r.addresses) > 0 {
		return outside("owns.addresses has " + r.blocks())
	}
	for _, d := range r.denied {
		if d.Contains(a) && !slices.ContainsFunc(r.addresses, func(p netip.Prefix) bool { return p.Contains(a) && d.Bits() <= p.Bits() }) {
			return outside("it is " + d.what)
		}
	}
	return nil
}

// named checks a host name as the address of an instance, which may stand for
// any address.
func (r *Rules) named(text string) error {
	name := strings.ToLower(strings.TrimSuffix(text, "."))
	switch {
	case text == "":
		return nil
	case len(r.addresses) > 0 && len(r.hosts) == 0:
		return &Outside{"address " + text, "hosts", "owns.addresses has " + r.blocks() + ", and a name may stand for any address"}
	case len(r.addresses) > 0:
		return r.host(text)
	case name == "metadata.google.internal", r.beyond && (name == "localhost" || strings.HasSuffix(name, ".localhost")):
		return &Outside{"address " + text, "addresses", "it stands for the machine of each proxy or the metadata service of a cloud"}
	}
	return nil
}

// maxListed bounds the patterns that a message names.
const maxListed = 5

func list(all []string) string {
	if len(all) > maxListed {
		return strings.Join(all[:maxListed], ", ") + " and others"
	}
	return strings.Join(all, ", ")
}

func (r *Rules) blocks() string {
	all := make([]string, len(r.addresses))
	for i, p := range r.addresses {
		all[i] = p.String()
	}
	return list(all)
}
