package validity

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/translate"
)

// texts are what registries hold, should not hold, and what lies next to a rule
// of Istio's.
var texts = []string{
	"", "web", "Web_1", "a b", "a..b", ".a.", "-a-", "1.2.3.4", "10.0.0.1", "10.0.0.2", "010.0.0.1", "256.1.1.1", "1.2.3", "2001:db8::1", "[2001:db8::1]",
	"::ffff:10.0.0.1", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1", "127.0.0.1", "db.example.org", "db.example.org.", "*.example.org", "*", "*a.example.org",
	"unix:///run/x.sock", "/run/x.sock", "http", "HTTP/1.1", "grpc", "tcp", "udp", "triple", "dubbo", "smtp", "https", "tls", "h2c", "grpc-web", "http_proxy",
	"protocol", "version", "v1", "v2", "team", "k=v", "k:v", "k|v", "protocol=h2c", "a/b", "a/b/c", "/", "/a", "a/", "isthmus.io/service", "istio.io/rev",
	"topology.istio.io/cluster", "security.istio.io/tlsMode", "app.kubernetes.io/name", "eu", "eu/eu-a", "eu/eu-a/r1", "DEFAULT_GROUP", "DEFAULT", "public",
	"providers:com.example.Demo:1.0.0:g", "com.example.Demo", "\u670d\u52a1", "\u00e9t\u00e9", "\xff\xfe", "\u212a", "a\nb", "a\x00b", "_", "---", "...",
	strings.Repeat("a", 63), strings.Repeat("a", 64), strings.Repeat("a", 253), strings.Repeat("ab.", 90), strings.Repeat("long-", 60), "1", "123", "0x1", "true",
}

// characters are those of texts that are made up.
var characters = []rune("abcxyzABZ019-_.:/|=*@ %\\\"'{}[]\t\u00e9\u670d\U0001F600")

// generator makes services of random numbers.
type generator struct{ rand *rand.Rand }

func newGenerator(n uint64) *generator { return &generator{rand.New(rand.NewPCG(n, 1))} }

func (g *generator) one(of int) bool { return g.rand.IntN(of) == 0 }

func (g *generator) text() string {
	switch g.rand.IntN(8) {
	case 0:
		return texts[g.rand.IntN(len(texts))] + []string{".", "-", "_", "/", "=", ":", ""}[g.rand.IntN(7)] + texts[g.rand.IntN(len(texts))]
	case 1:
		made := make([]rune, g.rand.IntN(1+g.rand.IntN(80)))
		for i := range made {
			made[i] = characters[g.rand.IntN(len(characters))]
		}
		return string(made)
	}
	return texts[g.rand.IntN(len(texts))]
}

// name is a text that is more often of use.
func (g *generator) name() string {
	if g.one(6) {
		return g.text()
	}
	return []string{"svc-", "Svc_", "com.example.Svc", "a:b:", "\u670d", "providers:com.example.Svc:1.0.0:", "DEFAULT_GROUP"}[g.rand.IntN(7)] + strconv.Itoa(g.rand.IntN(1000))
}

func (g *generator) texts(limit int) (out []string) {
	for range g.rand.IntN(limit) {
		out = append(out, g.text())
	}
	return out
}

// keys are those of metadata to which a preset gives a meaning.
var keys = []string{
	"protocol", "version", "istio.hostname", "k8sNs", "external", "aeraki_meta_app_namespace", "aeraki_meta_app_service_account", "aeraki_meta_locality",
	"aeraki_meta_app_version", "interface", "group", "canary", "team",
}

func (g *generator) meta() map[string]string {
	m := map[string]string{}
	for range g.rand.IntN(4) {
		if g.one(3) {
			m[keys[g.rand.IntN(len(keys))]] = g.text()
		} else {
			m[g.text()] = g.text()
		}
	}
	return m
}

func (g *generator) ports() (out []registry.Port) {
	for range g.rand.IntN(4) {
		p := registry.Port{Number: []int{80, 80, 443, 8080, 8081, 0, 1, 65535, 65536, -1, math.MaxInt, 1 + g.rand.IntN(65535)}[g.rand.IntN(12)]}
		if g.one(2) {
			p.Name = g.text()
		}
		if g.one(3) {
			p.Protocol = g.text()
		}
		out = append(out, p)
	}
	return out
}

func (g *generator) instance(n int) registry.Instance {
	i := registry.Instance{
		ID: fmt.Sprint(n), Address: fmt.Sprintf("10.%d.%d.%d", g.rand.IntN(3), g.rand.IntN(3), 1+g.rand.IntN(9)), Ports: []registry.Port{{Number: 8080}},
		Meta: g.meta(), Tags: g.texts(4), Health: registry.Health(g.rand.IntN(4)), Disabled: g.one(9), Node: g.text(),
	}
	if g.one(5) {
		i.Address = g.text()
	}
	if g.one(4) {
		i.Ports = g.ports()
	}
	if g.one(8) {
		i.ID = g.text()
	}
	if g.one(2) {
		i.Locality = registry.Locality{Region: g.text(), Zone: g.text(), SubZone: g.text()}
	}
	if g.one(2) {
		i.Cluster = g.text()
	}
	if g.one(2) {
		i.Check = []string{"http", "grpc", "tcp", "ttl", "x"}[g.rand.IntN(5)]
	}
	if g.one(2) {
		i.Weight = new([]float64{0, 1, 2, 2.5, -1, math.NaN(), math.Inf(1), math.MaxFloat64, math.SmallestNonzeroFloat64, 1 << 32, 0.004}[g.rand.IntN(11)])
	}
	return i
}

func (g *generator) service() (registry.Service, []registry.Instance) {
	svc := registry.Service{Key: registry.Key{Name: g.name()}, Tags: g.texts(3)}
	if g.one(2) {
		svc.Key = registry.Key{Name: g.name(), Group: g.name(), Namespace: g.name()}
	}
	if g.one(4) {
		svc.Key.Partition, svc.Key.Datacenter = g.name(), g.name()
	}
	if g.one(4) {
		svc.Key.Peer, svc.SubjectAltNames = g.name(), g.texts(2)
	}
	if g.one(2) {
		svc.Meta = g.meta()
	}
	if g.one(4) {
		svc.Ports = g.ports()
	}
	instances := make([]registry.Instance, g.rand.IntN(5))
	for i := range instances {
		instances[i] = g.instance(i)
	}
	return svc, instances
}

// translators are the options under which services are translated.
func translators(t *testing.T) (all []*translate.Translator) {
	t.Helper()
	options := []translate.Options{
		{},
		{
			Host: "{{.Name}}.service{{with .Datacenter}}.{{.}}{{end}}.consul", Health: "any", Resolution: "static",
			Labels: translate.LabelOptions{Tags: "pairs", Add: map[string]string{"version": "x"}},
		},
		{Host: "{{.Name}}.{{.Group | dash}}.{{.Namespace}}.nacos", Name: "{{.Name}}.{{.Group}}", Namespace: "{{.Namespace}}", ServiceLabels: translate.ServiceLabelOptions{Meta: []string{"*"}}},
		{Host: "{{.Name}}", Resolution: "dns", FallbackPort: 65535, Location: "external", ExportTo: []string{"."}, ServiceAccount: "web", Network: "net-1"},
		{
			Ports:    []translate.PortOptions{{Name: "http", Number: 80}, {Number: 80, Protocol: "grpc"}},
			Locality: translate.LocalityOptions{Keys: []string{"version"}, ZoneKey: "team", Region: "eu"}, Health: "passing",
		},
		{
			HostCase: "keep", PortPolicy: "instance", PortName: "{{.Protocol}}-{{.Name}}-{{.Number}}", Aliases: []string{"{{.Name}}", "{{.Name}}.{{.Group}}.alias"},
			ExtraPorts: []translate.ExtraPort{{Name: "http", Number: 80, Protocol: "http"}, {Name: "x", Number: 443, To: "http"}},
			Protocol:   translate.ProtocolOptions{Default: "http", Guess: []string{"check", "name", "number"}},
			Revision:   "canary", ClusterID: "c-1", Subsets: translate.SubsetOptions{Key: "version", DestinationRule: true}, Weights: "whole",
			Instances: translate.InstanceOptions{Selector: "!canary,team notin (red)", ExcludeCIDRs: []string{"10.1.0.0/16"}},
			Locality:  translate.LocalityOptions{CIDRs: []translate.LocalityCIDR{{CIDR: "10.0.0.0/8", Locality: "eu/eu-a"}}},
		},
		{
			PortPolicy: "fixed", PortName: "{{.Protocol}}", ServiceAccountKey: "team", Subsets: translate.SubsetOptions{Key: "version", DestinationRule: true},
			Relabel: translate.RelabelOptions{
				Services: []translate.RelabelRule{
					{Action: "labelmap", Regex: new("__meta_(.+)")},
					{Source: []string{"host", "__group"}, Separator: new("."), Target: "host"},
					{Source: []string{"__tags"}, Target: "annotation.tags"},
					{Source: []string{"__instance_meta_team"}, Regex: new("(.+)"), Target: "namespace"},
				},
				Instances: []translate.RelabelRule{
					{Action: "labelmap", Regex: new("__meta_(.+)"), Replacement: new("m_$1")},
					{Source: []string{"__node"}, Target: "version"},
					{Source: []string{"team"}, Target: "__region"},
					{Source: []string{"__cluster"}, Target: "__zone", Action: "uppercase"},
					{Source: []string{"__health"}, Regex: new("critical"), Action: "drop"},
				},
			},
		},
	}
	// Every preset, as its adapters and others have it.
	presets := []string{"consul", "nacos", "istio-consul", "aeraki-consul", "higress", "slime", "slime-gateway", "nacos-istio", "aeraki-dubbo", "registry-sync"}
	for _, preset := range presets {
		for _, adapter := range []string{"consul", "nacos", "eureka", "zookeeper"} {
			options = append(options, translate.Options{Preset: preset, Adapter: adapter})
		}
	}
	for _, o := range options {
		tr, err := translate.New("r", o)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, tr)
	}
	return all
}
