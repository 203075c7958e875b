package access

import (
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"
)

// ofListener reports whether the Host of a request is a name of the listener. A
// page at a name of somebody else, which he has resolve to the listener's
// address, would otherwise be of one origin with it for a browser (DNS
// rebinding). Addresses are nobody's names, and neither are those without a dot
// and those of a cluster's Services: the public DNS does not have them.
func (p *Policy) ofListener(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if _, err := netip.ParseAddr(host); err == nil || !strings.Contains(host, ".") {
		return true
	}
	for _, suffix := range []string{".localhost", ".svc", ".svc.cluster.local"} {
		if strings.HasSuffix(host, suffix) {
			return true
		}
	}
	own, _, _ := net.SplitHostPort(p.listener.Address)
	names := append([]string{own}, p.listener.Hosts...)
	if p.tls != nil {
		for _, c := range p.tls.get().Certificates {
			names = append(names, c.Leaf.DNSNames...)
		}
	}
	return slices.ContainsFunc(names, func(name string) bool {
		ok, _ := path.Match(strings.ToLower(name), host) // validated; a certificate's *.example.org is one, too
		return ok
	})
}
