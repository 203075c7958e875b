package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/isthmus-mesh/isthmus/internal/conf"
)

// JSONSchemaExtend allows the address in place of the block.
func (Listener) JSONSchemaExtend(s *jsonschema.Schema) {
	s.Extras = map[string]any{conf.ShortField: "address", conf.ShortText: "an address as host:port, or a block with one"}
}

// MarshalJSON encodes a listener in its shortest form.
func (l Listener) MarshalJSON() ([]byte, error) {
	if reflect.DeepEqual(l, Listener{Address: l.Address}) {
		return json.Marshal(l.Address)
	}
	type block Listener
	return json.Marshal(block(l))
}

// JSONSchemaExtend allows one item in place of the list.
func (Listeners) JSONSchemaExtend(s *jsonschema.Schema) {
	s.Extras = map[string]any{conf.SingleItem: true}
}

// MarshalJSON encodes listeners in their shortest form.
func (l Listeners) MarshalJSON() ([]byte, error) {
	if len(l) == 1 {
		return json.Marshal(l[0])
	}
	return json.Marshal([]Listener(l))
}

// ParseCIDR returns the addresses of a block, or of one address.
func ParseCIDR(text string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(text); err == nil {
		return addr.Prefix(addr.BitLen())
	}
	p, err := netip.ParsePrefix(text)
	return p.Masked(), err
}

// loopback reports whether only the machine itself reaches the address.
func (l Listener) loopback() bool {
	if _, ok := l.Socket(); ok {
		return true
	}
	host, _, err := net.SplitHostPort(l.Address)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// listen checks the listeners, and that no two have one address.
func (d *decoder) listen() {
	c := d.config
	d.check(len(c.Listen.XDS) > 0, "listen.xds", "is an empty list; leave it out for %v", Default.Listen.XDS[0])
	taken := make(map[string]string) // path by address
	for i := range c.Listen.XDS {
		path := "listen.xds"
		if item := fmt.Sprintf("listen.xds[%d]", i); c.doc.Has(item) {
			path = item
		}
		d.listener(path, &c.Listen.XDS[i], taken)
	}
	d.listener("listen.admin", &c.Listen.Admin, taken)
	if !reflect.ValueOf(c.Listen.MCP).IsZero() {
		d.listener("listen.mcp", &c.Listen.MCP, taken)
	}
}

// maxSocket bounds the path of a socket: sun_path has 108 bytes on Linux and
// 104 elsewhere, with a zero at the end.
const maxSocket = 103

func (d *decoder) listener(at string, l *Listener, taken map[string]string) {
	address := at
	if d.config.doc.Has(at + ".address") {
		address += ".address"
	}
	if socket, ok := l.Socket(); ok {
		d.check(socket != "" && len(socket) <= maxSocket, address, "must be unix: and a path of at most %d bytes, such as unix:/run/isthmus/xds.sock", maxSocket)
	} else {
		_, port, err := net.SplitHostPort(l.Address)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		d.check(err == nil, address, "must be host:port, for example 127.0.0.1:15051, or :15051 for all addresses of the machine, or unix:PATH")
	}
	if other := taken[l.Address]; other != "" && !strings.HasSuffix(l.Address, ":0") && !d.bad[address] {
		d.check(false, address, "is the same as %s; they need a port each", other)
	} else {
		taken[l.Address] = address
	}
	d.listenerTLS(at+".tls", &l.TLS)
	d.check(l.MaxAge == 0 || l.MaxAge >= Duration(time.Minute) && l.MaxAge <= maxTime, at+".max_age", "must be 1m to %s", maxTime)
	admin := at == "listen.admin"
	d.check(len(l.Hosts) == 0 || admin, at+".hosts", "is for listen.admin; browsers cannot speak what this listener does")
	for i, h := range l.Hosts {
		_, err := path.Match(h, "")
		d.check(h != "" && err == nil && !strings.ContainsAny(h, "/: "), fmt.Sprintf("%s.hosts[%d]", at, i), "must be a name such as bridge.example.org, without a port, or a pattern such as *.example.org")
	}
	d.view(at+".view", admin, &l.View, nil)
	for i := range l.Allow {
		d.allow(fmt.Sprintf("%s.allow[%d]", at, i), admin, l, &l.Allow[i])
		d.view(fmt.Sprintf("%s.allow[%d].view", at, i), admin, &l.Allow[i].View, &l.View)
	}
	if slices.ContainsFunc(l.Allow, func(a Allow) bool { return a.Peer.ServiceAccount != "" }) {
		l.TokenReview.Audience = cmp.Or(l.TokenReview.Audience, DefaultAudience)
	} else {
		d.check(l.TokenReview == TokenReview{}, at+".token_review", "is not used, as no rule in allow has a service_account")
	}
	if !d.bad[address] {
		known := len(l.Allow) > 0 || l.TLS.ClientAuth == ClientAuthRequire
		d.check(!admin || l.loopback() || known || l.Insecure, address,
			"is not loopback, and everyone who reaches it could read it: give it rules in allow, or tls with client_auth: require, or write {address: %q, insecure: true}", l.Address)
		d.check(l.loopback() || l.TLS.Enabled() || known || l.Insecure, address,
			"is not loopback, and everyone who reaches it could use it: give it tls, or rules in allow, or write {address: %q, insecure: true}", l.Address)
	}
}

func (d *decoder) listenerTLS(at string, t *ListenerTLS) {
	if !t.Enabled() {
		return
	}
	for _, f := range []struct{ name, file, missing string }{
		{"cert_file", t.CertFile, "is missing; name the PEM file of the certificate"},
		{"key_file", t.KeyFile, "is missing; name the PEM file of the certificate's key"},
	} {
		if t.WorkloadAPI == "" {
			d.check(f.file != "", at+"."+f.name, "%s", f.missing)
		} else {
			d.check(f.file == "", at+"."+f.name, "is not used, as the certificate comes from workload_api")
		}
	}
	if t.WorkloadAPI != "" {
		d.check(t.ClientCAFile == "", at+".client_ca_file", "is not used, as the authorities come from workload_api")
		path, ok := strings.CutPrefix(t.WorkloadAPI, "unix://")
		d.check(ok && strings.HasPrefix(path, "/"), at+".workload_api", "must be unix:// and an absolute path, such as unix:///run/spire/agent.sock")
	}
	d.check(t.ClientCRLFile == "" || t.ClientCAFile != "", at+".client_crl_file", "is not used without client_ca_file, whose authorities sign it")
	modes := []string{ClientAuthNone, ClientAuthRequest, ClientAuthRequire}
	switch {
	case t.ClientAuth == "" && (t.ClientCAFile != "" || t.WorkloadAPI != ""):
		t.ClientAuth = ClientAuthRequire
	case t.ClientAuth == "":
		t.ClientAuth = ClientAuthNone
	}
	d.check(slices.Contains(modes, t.ClientAuth), at+".client_auth", "must be one of %s", strings.Join(modes, ", "))
	if t.ClientAuth == ClientAuthNone {
		d.check(t.ClientCAFile == "", at+".client_ca_file", "is not used, for client_auth is none; write request or require")
	} else {
		d.check(t.ClientCAFile != "" || t.WorkloadAPI != "", at+".client_ca_file", "is missing; client_auth %s needs the authorities of the clients", t.ClientAuth)
	}
	d.check(slices.Contains([]string{"", "1.2", "1.3"}, t.MinVersion), at+".min_version", `must be "1.2" or "1.3"`)
}

// allow checks a rule of a listener.
func (d *decoder) allow(at string, admin bool, l *Listener, a *Allow) {
	p, peer := &a.Peer, at+".peer"
	d.check(*p != Peer{}, peer, "fits everyone; name a cidr, spiffe, san, sni, token_file or service_account, or leave allow out")
	if p.CIDR != "" {
		_, err := ParseCIDR(p.CIDR)
		d.check(err == nil, peer+".cidr", "must be a block of addresses such as 10.1.0.0/16 or fd00::/8, or one address")
		_, socket := l.Socket()
		d.check(!socket, peer+".cidr", "fits nobody, as callers of a unix socket have no address")
	}
	for _, f := range []struct{ name, pattern string }{{"spiffe", p.SPIFFE}, {"san", p.SAN}, {"sni", p.SNI}, {"service_account", p.ServiceAccount}} {
		_, err := path.Match(f.pattern, "")
		d.check(err == nil, peer+"."+f.name, `is not a pattern: a [ needs its ], and a \ something behind it`)
	}
	d.check(p.SPIFFE == "" || strings.HasPrefix(p.SPIFFE, "spiffe://"), peer+".spiffe", "must begin with spiffe://, such as spiffe://cluster.local/ns/istio-system/sa/istiod")
	verifies := l.TLS.Verifies()
	d.check(p.SPIFFE == "" || verifies, peer+".spiffe", "fits nobody without tls.client_ca_file or tls.workload_api, which certificates of clients are verified with")
	d.check(p.SAN == "" || verifies, peer+".san", "fits nobody without tls.client_ca_file or tls.workload_api, which certificates of clients are verified with")
	d.check(p.SNI == "" || l.TLS.Enabled(), peer+".sni", "fits nobody without tls")
	sealed := l.TLS.Enabled() || l.loopback() || l.Insecure
	d.check(p.TokenFile == "" || sealed, peer+".token_file", "a token would be sent in plaintext; give the listener tls, or write insecure: true")
	d.check(p.ServiceAccount == "" || sealed, peer+".service_account", "a token would be sent in plaintext; give the listener tls, or write insecure: true")
	d.check(p.ServiceAccount == "" || strings.Count(p.ServiceAccount, "/") == 1, peer+".service_account", "must be NAMESPACE/NAME, such as istio-system/istiod, or tools/* for all of a namespace")
	d.check(p.PasswordFile == "" || sealed, peer+".password_file", "a password would be sent in plaintext; give the listener tls, or write insecure: true")
	d.check(p.PasswordFile == "" || admin, peer+".password_file", "is for listen.admin; sinks send a token: token_file")
	d.check(a.Role == "" || admin, at+".role", "is for listen.admin; everyone who may use this listener may read")
	d.check(slices.Contains([]string{"", RoleRead, RoleOperate}, a.Role), at+".role", "must be %s or %s", RoleRead, RoleOperate)
}
