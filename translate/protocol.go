package translate

import (
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// protocols maps spellings in registries to Istio's protocols, both in lower
// case.
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

// normalProtocol returns Istio's name of protocol s, in lower case.
func normalProtocol(s string) (string, bool) {
	p, ok := protocols[lower(strings.TrimSpace(s))]
	return p, ok
}

// protocolOfName returns the protocol in a port name by Istio's convention:
// "http", "grpc-orders".
func protocolOfName(name string) (string, bool) {
	if strings.HasPrefix(name, "grpc-web") && (len(name) == len("grpc-web") || name[len("grpc-web")] == '-') {
		return "grpc-web", true
	}
	first, _, _ := strings.Cut(name, "-")
	return normalProtocol(first)
}

// votes counts the protocols stated by instances. Unknown protocols count once,
// under the smallest spelling.
type votes struct {
	known   []vote
	unknown string
}

type vote struct {
	protocol string
	n        int
}

// add counts one statement; an empty one is ignored.
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

// empty reports whether there were no statements.
func (v *votes) empty() bool { return len(v.known) == 0 && v.unknown == "" }

// winner returns the most frequent known protocol, the first in the alphabet on
// a tie, or "" if there is none.
func (v *votes) winner() string {
	best := vote{}
	for _, c := range v.known {
		if c.n > best.n || c.n == best.n && c.protocol < best.protocol {
			best = c
		}
	}
	return best.protocol
}

// disputed describes a conflict between instances, or returns "".
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

// wireProtocol returns the protocol in the spelling of Istio's documentation.
func wireProtocol(p string) string { return strings.ToUpper(p) }

// protocolTags is the compiled form of ProtocolOptions.Tags.
type protocolTags struct {
	prefixes []string
	bare     []string
}

// of returns the protocol stated by tags, or "". A prefixed tag wins over a
// bare one, then the alphabet decides.
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

// ofMeta returns the first non-empty value of keys.
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

// commonProtocol returns the votes of the first source that states a protocol
// for the service as a whole: its metadata, the instances' metadata, its tags,
// the instances' tags. from is that source.
func (t *Translator) commonProtocol(svc *registry.Service, instances []*registry.Instance) (v votes, from Step) {
	if v.add(ofMeta(svc.Meta, t.o.Protocol.Keys)); !v.empty() {
		return v, Step{"translate.protocol.keys", "", "as the service's metadata states it"}
	}
	if len(t.o.Protocol.Keys) > 0 {
		for _, inst := range instances {
			v.add(ofMeta(inst.Meta, t.o.Protocol.Keys))
		}
		if !v.empty() {
			return v, Step{"translate.protocol.keys", "", "as the metadata of most instances states it"}
		}
	}
	if v.add(t.protocolTags.of(svc.Tags)); !v.empty() {
		return v, Step{"translate.protocol.tags", "", "as a tag of the service states it"}
	}
	for _, inst := range instances {
		if len(inst.Tags) > 0 {
			v.add(t.protocolTags.of(inst.Tags))
		}
	}
	return v, Step{"translate.protocol.tags", "", "as a tag of most instances states it"}
}

// knownNumbers are port numbers registered for a protocol that Istio knows.
var knownNumbers = map[int]string{80: "http", 443: "https", 3306: "mysql", 6379: "redis", 27017: "mongo", 50051: "grpc"}

// guess returns the protocol of a port without a stated one, guessed from the
// configured sources, and a description of the source; "" if there is none.
func (t *Translator) guess(svc *registry.Service, g *portGroup, instances []*registry.Instance) (protocol, from string) {
	for _, source := range t.o.Protocol.Guess {
		switch source {
		case "check":
			var v votes
			for _, inst := range instances {
				if inst.Check != "tcp" { // any protocol passes a tcp check
					if _, ok := normalProtocol(inst.Check); ok {
						v.add(inst.Check)
					}
				}
			}
			if p := v.winner(); p != "" {
				return p, "the registry's checks"
			}
		case "name":
			words := strings.FieldsFunc(lower(svc.Key.Name), func(r rune) bool { return strings.ContainsRune("-_.:/ ", r) })
			for _, i := range []int{0, len(words) - 1} {
				if len(words) > 1 {
					if p, ok := normalProtocol(words[i]); ok {
						return p, "the word " + words[i] + " in the service's name"
					}
				}
			}
		case "number":
			number := g.fixed
			if number == 0 && g.agree*2 > g.total {
				number = g.candidate
			}
			if p := knownNumbers[number]; p != "" {
				return p, fmt.Sprintf("the number %d", number)
			}
		}
	}
	return "", ""
}
