package translate

import (
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// protocols maps what registries write to the protocols that Istio knows. Keys and values are lower case.
var protocols = map[string]string{
	"tcp": "tcp", "udp": "udp", "grpc": "grpc", "grpc-web": "grpc-web", "http": "http", "http_proxy": "http_proxy",
	"http2": "http2", "https": "https", "tls": "tls", "mongo": "mongo", "redis": "redis", "mysql": "mysql",

	"http1": "http", "http1.0": "http", "http1.1": "http", "http/1": "http", "http/1.0": "http", "http/1.1": "http", "h1": "http",
	"rest": "http", "ws": "http", "websocket": "http",
	"h2": "http2", "h2c": "http2", "http/2": "http2", "http/2.0": "http2", "http2.0": "http2",
	"http-proxy": "http_proxy",
	"wss":        "https",
	"grpcweb":    "grpc-web", "grpc_web": "grpc-web",
	// Dubbo 3's Triple speaks gRPC's wire format.
	"tri": "grpc", "triple": "grpc",
	"grpcs": "tls", "ssl": "tls",
	"mongodb": "mongo", "mariadb": "mysql", "rediss": "tls",
	// Istio routes these as plain connections.
	"dubbo": "tcp", "dubbo2": "tcp", "thrift": "tcp", "kafka": "tcp", "amqp": "tcp", "mqtt": "tcp", "postgres": "tcp",
	"postgresql": "tcp", "memcached": "tcp", "rmi": "tcp", "raw": "tcp",
}

// normalProtocol returns the protocol of Istio's, in lower case, that s stands for.
func normalProtocol(s string) (string, bool) {
	p, ok := protocols[lower(strings.TrimSpace(s))]
	return p, ok
}

// protocolOfName returns the protocol that a port's name says by Istio's convention: "http", "grpc-orders".
func protocolOfName(name string) (string, bool) {
	if strings.HasPrefix(name, "grpc-web") && (len(name) == len("grpc-web") || name[len("grpc-web")] == '-') {
		return "grpc-web", true
	}
	first, _, _ := strings.Cut(name, "-")
	return normalProtocol(first)
}

// votes counts what instances say of a protocol. What no instance knows counts once, under its smallest spelling.
type votes struct {
	known   []vote
	unknown string
}

type vote struct {
	protocol string
	n        int
}

// add counts one statement; an empty one says nothing.
func (v *votes) add(said string) {
	if said == "" {
		return
	}
	p, ok := normalProtocol(said)
	if !ok {
		if v.unknown == "" || said < v.unknown {
			v.unknown = said
		}
		return
	}
	for i := range v.known {
		if v.known[i].protocol == p {
			v.known[i].n++
			return
		}
	}
	v.known = append(v.known, vote{p, 1})
}

// empty says whether nothing was said.
func (v *votes) empty() bool { return len(v.known) == 0 && v.unknown == "" }

// winner returns the protocol that most say, of equals the one first in the alphabet; "" if only unknown ones were named.
func (v *votes) winner() string {
	best := vote{}
	for _, c := range v.known {
		if c.n > best.n || c.n == best.n && c.protocol < best.protocol {
			best = c
		}
	}
	return best.protocol
}

// disputed says in words that instances say different things, or "".
func (v *votes) disputed() string {
	if len(v.known) < 2 {
		return ""
	}
	var all []string
	for _, c := range v.known {
		all = append(all, wireProtocol(c.protocol))
	}
	slices.Sort(all)
	return fmt.Sprintf("its instances say different protocols (%s)", strings.Join(all, ", "))
}

// wireProtocol returns the protocol as Istio's documentation writes it.
func wireProtocol(p string) string { return strings.ToUpper(p) }

// protocolTags is the compiled form of ProtocolOptions.Tags.
type protocolTags struct {
	prefixes []string
	bare     []string
}

// of returns what tags say of the protocol, or "". A prefixed tag wins over a bare one, then the alphabet decides.
func (p *protocolTags) of(tags []string) string {
	prefixed, bare := "", ""
	for _, tag := range tags {
		for _, prefix := range p.prefixes {
			if v, ok := strings.CutPrefix(tag, prefix); ok && v != "" && (prefixed == "" || v < prefixed) {
				prefixed = v
			}
		}
		for _, b := range p.bare {
			if strings.EqualFold(tag, b) && (bare == "" || b < bare) {
				bare = b
			}
		}
	}
	if prefixed != "" {
		return prefixed
	}
	return bare
}

// ofMeta returns what the first key that says anything says.
func ofMeta(meta map[string]string, keys []string) string {
	if len(meta) == 0 {
		return ""
	}
	for _, k := range keys {
		if v := meta[k]; v != "" {
			return v
		}
	}
	return ""
}

// commonProtocol returns the votes of the first source that says anything of the service as a whole: the service's metadata, the
// instances' metadata, the service's tags, the instances' tags.
func (t *Translator) commonProtocol(svc *registry.Service, instances []*registry.Instance) votes {
	var v votes
	if v.add(ofMeta(svc.Meta, t.o.Protocol.Keys)); !v.empty() {
		return v
	}
	if len(t.o.Protocol.Keys) > 0 {
		for _, inst := range instances {
			v.add(ofMeta(inst.Meta, t.o.Protocol.Keys))
		}
		if !v.empty() {
			return v
		}
	}
	if v.add(t.protocolTags.of(svc.Tags)); !v.empty() {
		return v
	}
	for _, inst := range instances {
		if len(inst.Tags) > 0 {
			v.add(t.protocolTags.of(inst.Tags))
		}
	}
	return v
}
