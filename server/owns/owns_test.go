package owns

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	_ "istio.io/api/security/v1beta1"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/translate"
)

var mesh = config.Mesh{ClusterDomain: "cluster.local", RootNamespace: "istio-system"}

// check checks a resource as the state does.
func check(t testing.TB, r *Rules, res *mcp.Resource) error {
	t.Helper()
	res.Metadata.CreateTime = timestamppb.New(translate.CreateTime)
	raw, err := proto.Marshal(res)
	if err != nil {
		t.Fatal(err)
	}
	_, err = encode.Parse(raw, nil, r.Check)
	if invalid, ok := errors.AsType[*encode.Invalid](err); ok {
		if _, isOutside := errors.AsType[*Outside](err); !isOutside {
			t.Fatalf("the resource is not read: %v", invalid)
		}
	}
	return err
}

// of makes a resource of namespace prod from a kind and the JSON of its spec.
func of(t testing.TB, kind, spec string) *mcp.Resource {
	t.Helper()
	group := "networking.istio.io/v1"
	if strings.HasSuffix(kind, "Policy") || strings.HasSuffix(kind, "Authentication") {
		group = "security.istio.io/v1"
	}
	_, message := collection.OfKind(group, kind)
	body, err := anypb.New(&networking.ServiceEntry{})
	if err != nil || message == "" {
		t.Fatal(kind, err)
	}
	body.TypeUrl = "type.googleapis.com/" + message
	into, err := body.UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	if err := protojson.Unmarshal([]byte(spec), into); err != nil {
		t.Fatalf("%s: %v", spec, err)
	}
	if body, err = anypb.New(into); err != nil {
		t.Fatal(err)
	}
	return &mcp.Resource{Metadata: &mcp.Metadata{Name: "prod/x"}, Body: body}
}

func host(t testing.TB, names ...string) *mcp.Resource {
	text, _ := json.Marshal(names)
	return of(t, "ServiceEntry", `{"hosts": `+string(text)+`}`)
}

func at(t testing.TB, address string) *mcp.Resource {
	return of(t, "WorkloadEntry", `{"address": "`+address+`"}`)
}

func virtual(t testing.TB, address string) *mcp.Resource {
	return of(t, "ServiceEntry", `{"hosts": ["web.example.org"], "addresses": ["`+address+`"]}`)
}

func in(namespace string, r *mcp.Resource) *mcp.Resource {
	r.Metadata.Name = namespace + "/x"
	return r
}

func TestAddresses(t *testing.T) {
	for name, c := range map[string]struct {
		owns          config.Owns
		yes, no       []string // addresses of instances
		yesVIP, noVIP []string
		field         string
	}{
		"defaults": {
			yes: []string{"10.0.0.1", "192.168.0.1", "2001:db8::1", "fd00::1", "db.example.org", ""},
			no: []string{
				"127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1", "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe",
				"2002:a9fe:a9fe::1", "2001:0:1::1", "169.254.169.254", "::ffff:169.254.169.254", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255",
				"fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192",
			},
			yesVIP: []string{"240.240.0.1", "10.96.0.1", "10.0.0.0/24"},
			noVIP:  []string{"0.0.0.0/0", "::/0", "127.0.0.1", "::ffff:127.0.0.1", "::ffff:127.0.0.0/104", "169.254.169.254", "169.254.0.0/16", "168.0.0.0/5", "64:ff9b::/96", "fd20:ce::254", "fe80::1%eth0", "::1"},
			field:  "addresses",
		},
		"a denied block by name": {
			owns:   config.Owns{Addresses: []string{"127.0.0.0/8", "10.0.0.0/8"}},
			yes:    []string{"127.0.0.1", "::ffff:127.0.0.1", "10.0.0.1"},
			no:     []string{"169.254.169.254", "192.168.0.1", "64:ff9b::7f00:1", "::1"},
			yesVIP: []string{"127.0.0.2", "127.0.0.0/16"}, noVIP: []string{"0.0.0.0/0", "127.0.0.0/7"},
			field: "addresses",
		},
		"everything names no denied block": {
			owns:   config.Owns{Addresses: []string{"0.0.0.0/0", "::/0", "127.0.0.0/8"}},
			yes:    []string{"192.168.0.1", "2001:db8::1", "127.0.0.1", "db.example.org"},
			no:     []string{"169.254.169.254", "::1", "64:ff9b::a00:1"},
			yesVIP: []string{"10.0.0.0/8"}, noVIP: []string{"169.0.0.0/8"}, field: "addresses",
		},
		"NAT64 stands for IPv4": {
			owns: config.Owns{Addresses: []string{"64:ff9b::/96"}},
			yes:  []string{"64:ff9b::a00:1"}, no: []string{"64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "10.0.0.1"}, field: "addresses",
		},
		"what a NAT64 address stands for by name": {
			owns: config.Owns{Addresses: []string{"64:ff9b::/96", "127.0.0.0/8"}}, yes: []string{"64:ff9b::7f00:1"}, no: []string{"64:ff9b::a9fe:a9fe"}, field: "addresses",
		},
		"addresses of hosts": {
			owns:   config.Owns{Addresses: []string{"10.1.0.0/16"}},
			yesVIP: []string{"10.1.0.1", "10.1.2.0/24"}, noVIP: []string{"10.96.0.1", "10.0.0.0/8"}, field: "addresses",
		},
		"other forms of an address": {no: []string{"127.1", "2130706433", "0x7f000001", "0177.0.0.1", "a.0x7f", "unix:///run/docker.sock", "UNIX:///run/docker.sock"}, field: ""},
		"names": {
			no: []string{
				"LOCALHOST", "localhost.", "a.localhost", "localhost.localdomain", "metadata.google.internal.", "metadata.goog", "metadata", "instance-data", "ip6-localhost",
				"payments.prod.svc.cluster.local", "Payments.prod.SVC.cluster.local.", "payments.prod.svc",
			}, field: "hosts",
		},
		"names by name": {
			owns: config.Owns{Hosts: []string{"localhost", "*.prod.svc.cluster.local"}},
			yes:  []string{"localhost", "payments.prod.svc.cluster.local", "db.example.org"}, no: []string{"payments.shop.svc.cluster.local"}, field: "hosts",
		},
		"a name beside addresses": {owns: config.Owns{Addresses: []string{"10.0.0.0/8"}}, no: []string{"db.example.org"}, field: "hosts"},
		"a name beside addresses and hosts": {
			owns: config.Owns{Hosts: []string{"*.example.org"}, Addresses: []string{"10.0.0.0/8"}},
			yes:  []string{"db.example.org"}, no: []string{"metadata.google.internal", "db.example.com"}, field: "hosts",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := New(&config.Registry{Owns: c.owns}, mesh)
			each := func(addresses []string, of func(testing.TB, string) *mcp.Resource, want bool) {
				for _, address := range addresses {
					var outside *Outside
					err := r.body("prod", body(t, of(t, address)))
					if want && err != nil {
						t.Errorf("%s: %v", address, err)
					} else if !want && (!errors.As(err, &outside) || outside.Field != c.field) {
						t.Errorf("%s: %v, want a refusal by owns.%s", address, err, c.field)
					}
				}
			}
			inline := func(t testing.TB, address string) *mcp.Resource {
				return of(t, "ServiceEntry", `{"endpoints": [{"address": "10.1.0.1"}, {"address": "`+address+`"}]}`)
			}
			each(c.yes, at, true)
			each(c.no, at, false)
			if len(c.owns.Addresses) == 0 {
				each(c.no, inline, false)
			}
			if len(c.owns.Hosts) == 0 {
				each(c.yesVIP, virtual, true)
				each(c.noVIP, virtual, false)
			}
		})
	}
}

func body(t testing.TB, r *mcp.Resource) proto.Message {
	m, err := r.GetBody().UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Every kind: what it says of hosts, namespaces and workloads.
func TestCheck(t *testing.T) {
	every := []string{"*"}
	to := func(kind, spec string) *mcp.Resource { return of(t, kind, spec) }
	routes := func(host, destination string) *mcp.Resource {
		return to("VirtualService", `{"hosts": ["`+host+`"], "http": [{"route": [{"destination": {"host": "`+destination+`"}}]}]}`)
	}
	labelled := func(key string, value ...string) *mcp.Resource {
		return to("WorkloadEntry", `{"address": "10.0.0.1", "labels": {"`+key+`": "`+strings.Join(append(value, "x")[:1], "")+`"}}`)
	}
	metadata := func(labels, annotations map[string]string) *mcp.Resource {
		r := host(t, "web.example.org")
		r.Metadata.Labels, r.Metadata.Annotations = labels, annotations
		return r
	}
	onWorkloads := []*mcp.Resource{
		to("AuthorizationPolicy", `{"selector": {"matchLabels": {"app": "payments"}}, "rules": [{}]}`), to("AuthorizationPolicy", `{"rules": [{}]}`),
		to("PeerAuthentication", `{"mtls": {"mode": "DISABLE"}}`), to("RequestAuthentication", `{}`), to("EnvoyFilter", `{}`), to("ProxyConfig", `{}`),
		to("WorkloadGroup", `{"template": {}}`), to("Sidecar", `{"egress": [{"hosts": ["./web.example.org"]}]}`), to("Gateway", `{"servers": [{"hosts": ["web.example.org"]}]}`),
	}
	inRoot := func() (all []*mcp.Resource) {
		for _, r := range onWorkloads {
			all = append(all, in("istio-system", proto.CloneOf(r)))
		}
		return all
	}
	for name, c := range map[string]struct {
		owns      config.Owns
		translate string
		yes, no   []*mcp.Resource
		field     string
	}{
		"kinds by default": {
			yes: []*mcp.Resource{host(t, "web.example.org"), at(t, "10.0.0.1")},
			no:  append([]*mcp.Resource{routes("web.example.org", "web.example.org"), to("DestinationRule", `{"host": "web.example.org"}`)}, onWorkloads...), field: "collections",
		},
		"kinds by name": {
			owns: config.Owns{Collections: []string{"networking.istio.io/V*"}},
			yes:  []*mcp.Resource{routes("web.example.org", "web.example.org")}, no: []*mcp.Resource{host(t, "web.example.org"), to("DestinationRule", `{"host": "web.example.org"}`)}, field: "collections",
		},
		"a DestinationRule of translate": {
			translate: `{"subsets": {"key": "version", "destination_rule": true}}`,
			yes:       []*mcp.Resource{to("DestinationRule", `{"host": "web.example.org"}`)}, no: []*mcp.Resource{routes("web.example.org", "web.example.org")}, field: "collections",
		},
		"hosts of the cluster": {
			owns: config.Owns{Collections: every, Namespaces: []string{"prod"}},
			yes: []*mcp.Resource{
				host(t, "web.dc1", "svc.example.org", "web"), host(t, "*.example.org"), host(t, "web.shop.svc.clusterset.local"), routes("web.example.org", "db.example.org"), to("DestinationRule", `{"host": "*.example.org"}`),
				to("VirtualService", `{"hosts": []}`),
			},
			no: []*mcp.Resource{
				host(t, "payments.prod.svc.cluster.local"), host(t, "web.example.org", "Payments.Prod.svc.Cluster.local"), host(t, "payments.prod.svc"), host(t, "cluster.local"), host(t, "*"), host(t, "*.local"),
				host(t, "*.cluster.local"), host(t, "*.svc.cluster.local"), host(t, "*.svc"), host(t, "*.prod.svc.cluster.local"), host(t, "payments.prod.svc.cluster.local."),
				routes("payments.prod.svc.cluster.local", "web.example.org"), routes("web.example.org", "payments.prod.svc.cluster.local"), routes("payments", "web.example.org"), routes("web.example.org", "payments"),
				routes("*", "web.example.org"),
				to("VirtualService", `{"hosts": ["web.example.org"], "tcp": [{"route": [{"destination": {"host": "payments.prod.svc"}}]}]}`),
				to("VirtualService", `{"hosts": ["web.example.org"], "tls": [{"match": [{"sniHosts": ["web.example.org"]}], "route": [{"destination": {"host": "payments"}}]}]}`),
				to("VirtualService", `{"hosts": ["web.example.org"], "http": [{"mirror": {"host": "payments"}}]}`),
				to("VirtualService", `{"hosts": ["web.example.org"], "http": [{"mirrors": [{"destination": {"host": "payments"}}]}]}`),
				to("DestinationRule", `{"host": "payments"}`), to("DestinationRule", `{"host": "*.svc.cluster.local"}`), to("DestinationRule", `{"host": "*"}`),
				to("Gateway", `{"servers": [{"hosts": ["*"]}]}`), to("Gateway", `{"servers": [{"hosts": ["web.example.org"]}, {"hosts": ["prod/payments.prod.svc.cluster.local"]}]}`), to("Gateway", `{"servers": [{"hosts": ["*/*"]}]}`),
				to("Sidecar", `{"egress": [{"hosts": ["*/*"]}]}`), to("Sidecar", `{"egress": [{"hosts": ["prod/payments.prod.svc.cluster.local"]}]}`),
			}, field: "hosts",
		},
		"hosts by name": {
			owns: config.Owns{Collections: every, Namespaces: []string{"prod"}, Hosts: []string{"*.service.consul", "DB.example.org", "?.example.com"}},
			yes: []*mcp.Resource{
				host(t, "web.service.consul", "db.example.org", "a.example.com"), host(t, "*.web.service.consul"), host(t, "Web.Service.Consul"), routes("web.service.consul", "db.example.org"),
				to("Gateway", `{"servers": [{"hosts": ["./web.service.consul"]}]}`), to("Sidecar", `{"egress": [{"hosts": ["*/db.example.org"]}]}`),
			},
			no: []*mcp.Resource{
				host(t, "kubernetes.default.svc.cluster.local"), host(t, "web.service.consul", "x.example.org"), host(t, "*"), host(t, "*.example.org"), host(t, "service.consul"), host(t, "*.example.com"),
				routes("web.service.consul", "x.example.org"), routes("x.example.org", "web.service.consul"), to("DestinationRule", `{"host": "x.example.org"}`),
				to("Gateway", `{"servers": [{"hosts": ["prod/x.example.org"]}]}`), to("Sidecar", `{"egress": [{"hosts": ["./x.example.org"]}]}`), to("Sidecar", `{"egress": [{"hosts": ["istio-system/*"]}]}`),
			}, field: "hosts",
		},
		"every host is named as it stands": {
			owns: config.Owns{Collections: every, Hosts: []string{"*"}},
			yes:  []*mcp.Resource{host(t, "*"), host(t, "web.example.org"), host(t, "*.example.org")},
			no:   []*mcp.Resource{host(t, "payments.prod.svc.cluster.local"), host(t, "*.svc.cluster.local"), host(t, "*.local"), to("DestinationRule", `{"host": "payments"}`)}, field: "hosts",
		},
		"hosts of the cluster by name": {
			owns: config.Owns{Collections: every, Hosts: []string{"*.prod.svc.cluster.local", "*.local"}},
			yes:  []*mcp.Resource{host(t, "payments.prod.svc.cluster.local"), host(t, "*.prod.svc.cluster.local"), host(t, "*.local"), to("DestinationRule", `{"host": "payments"}`)},
			no:   []*mcp.Resource{host(t, "payments.shop.svc.cluster.local"), host(t, "*.svc.cluster.local"), in("shop", to("DestinationRule", `{"host": "payments"}`))}, field: "hosts",
		},
		"workloads need a namespace that is named": {
			owns: config.Owns{Collections: every},
			yes:  []*mcp.Resource{host(t, "web.example.org"), routes("web.example.org", "web.example.org")},
			no:   append([]*mcp.Resource{to("ServiceEntry", `{"hosts": ["web.example.org"], "workloadSelector": {"labels": {"app": "payments"}}}`)}, onWorkloads...), field: "namespaces",
		},
		"namespaces by name": {
			owns: config.Owns{Collections: every, Namespaces: []string{"prod", "shop-*"}},
			yes:  append([]*mcp.Resource{to("ServiceEntry", `{"hosts": ["web.example.org"], "workloadSelector": {"labels": {"app": "payments"}}}`), in("shop-1", host(t, "web.example.org"))}, onWorkloads...),
			no:   append([]*mcp.Resource{in("shop", host(t, "web.example.org"))}, inRoot()...), field: "namespaces",
		},
		"the root namespace is named as it stands": {
			owns: config.Owns{Collections: every, Namespaces: []string{"*"}}, yes: append([]*mcp.Resource{in("istio-system", host(t, "web.example.org"))}, onWorkloads...), no: inRoot(), field: "namespaces",
		},
		"the root namespace by name": {owns: config.Owns{Collections: every, Namespaces: []string{"istio-system"}}, yes: inRoot(), no: onWorkloads, field: "namespaces"},
		"labels": {
			translate: `{"labels": {"add": {"security.istio.io/tlsMode": "istio"}}, "cluster_id": "c1", "relabel": {"instances": [{"target": "topology.istio.io/subzone"}], "services": [{"target": "annotation.networking.istio.io/exportTo"}]}}`,
			yes: []*mcp.Resource{
				labelled("app"), labelled("istio"), labelled("example.org/istio.io"), labelled("isthmus.io/service"), labelled("security.istio.io/tlsMode", "istio"), labelled("topology.istio.io/cluster", "c1"), labelled("topology.istio.io/subzone"),
				metadata(map[string]string{"istio.io/rev": "canary"}, map[string]string{"networking.istio.io/exportTo": "*", "a": "b"}),
			},
			no: []*mcp.Resource{
				labelled("security.istio.io/tlsMode", "disabled"), labelled("topology.istio.io/cluster", "c2"),
				labelled("istio-locality"), labelled("service.istio.io/canonical-name"), labelled("topology.istio.io/network"), labelled("istio.io/rev"), labelled("Security.istio.io/tlsMode"),
				to("ServiceEntry", `{"hosts": ["web.example.org"], "endpoints": [{"address": "10.0.0.1", "labels": {"istio-locality": "x"}}]}`),
				metadata(map[string]string{"a": "b", "networking.istio.io/traffic-distribution": "x"}, nil), metadata(nil, map[string]string{"istio.io/use-waypoint": "x"}),
			}, field: "labels",
		},
		"labels by name": {
			owns: config.Owns{Labels: []string{"security.istio.io/*", "istio-locality"}},
			yes:  []*mcp.Resource{labelled("istio-locality"), labelled("security.istio.io/tlsMode")}, no: []*mcp.Resource{labelled("topology.istio.io/network")}, field: "labels",
		},
		"labels of a WorkloadGroup": {
			owns: config.Owns{Collections: every, Namespaces: []string{"prod"}}, yes: []*mcp.Resource{to("WorkloadGroup", `{"metadata": {"labels": {"app": "a"}}, "template": {"labels": {"app": "a"}}}`)},
			no: []*mcp.Resource{
				to("WorkloadGroup", `{"metadata": {"labels": {"istio-locality": "a"}}, "template": {}}`), to("WorkloadGroup", `{"metadata": {"annotations": {"proxy.istio.io/config": "a"}}, "template": {}}`),
				to("WorkloadGroup", `{"template": {"labels": {"istio-locality": "a"}}}`),
			}, field: "labels",
		},
		"where a Sidecar passes traffic to": {
			owns: config.Owns{Collections: every, Namespaces: []string{"prod"}, Addresses: []string{"127.0.0.1"}},
			yes:  []*mcp.Resource{to("Sidecar", `{"ingress": [{"defaultEndpoint": "127.0.0.1:8080"}, {}]}`)}, no: []*mcp.Resource{to("Sidecar", `{"ingress": [{"defaultEndpoint": "[::1]:8080"}]}`)}, field: "addresses",
		},
		"where a Sidecar may not pass traffic to": {
			owns: config.Owns{Collections: every, Namespaces: []string{"prod"}}, no: []*mcp.Resource{to("Sidecar", `{"ingress": [{"defaultEndpoint": "127.0.0.1:15000"}]}`), to("WorkloadGroup", `{"template": {"address": "127.0.0.1"}}`)}, field: "addresses",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := New(&config.Registry{Owns: c.owns, Translate: json.RawMessage(c.translate)}, mesh)
			for _, res := range c.yes {
				if err := check(t, r, res); err != nil {
					t.Errorf("%v: %v", res, err)
				}
			}
			for _, res := range c.no {
				var outside *Outside
				if err := check(t, r, res); !errors.As(err, &outside) || outside.Field != c.field {
					t.Errorf("%v: %v, want a refusal by owns.%s", res, err, c.field)
				} else if outside.Field != "" && !strings.Contains(err.Error(), "name it in owns."+c.field) {
					t.Errorf("%v has no cure", err)
				}
			}
		})
	}
}

// A cluster may have another domain, and a mesh another root namespace.
func TestMesh(t *testing.T) {
	r := New(&config.Registry{Owns: config.Owns{Collections: []string{"*"}, Namespaces: []string{"*"}}}, config.Mesh{ClusterDomain: "corp.example", RootNamespace: "mesh-root"})
	for _, res := range []*mcp.Resource{host(t, "payments.prod.svc.corp.example"), of(t, "DestinationRule", `{"host": "payments"}`), in("mesh-root", of(t, "EnvoyFilter", `{}`))} {
		if check(t, r, res) == nil {
			t.Errorf("%v is not refused", res)
		}
	}
	for _, res := range []*mcp.Resource{host(t, "payments.prod.svc.cluster.local"), in("istio-system", of(t, "EnvoyFilter", `{}`))} {
		if err := check(t, r, res); err != nil {
			t.Error(err)
		}
	}
}

// No kind is without a rule of its own: a new one gets one here.
func TestEveryKind(t *testing.T) {
	for _, name := range collection.All() {
		switch name {
		case collection.ServiceEntry, collection.WorkloadEntry, collection.DestinationRule, "networking.istio.io/VirtualService":
		default:
			if !onWorkloads[name] {
				t.Errorf("%s is neither about hosts nor about workloads", name)
			}
		}
	}
}

// No text passes that is loopback or link-local, in whatever form.
func FuzzAddress(f *testing.F) {
	for _, text := range []string{"127.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "fe80::1%eth0", "127.1", "0.0.0.0/0", "2002:7f00:1::", "metadata.goog", "*.svc", "unix:x", "::/0"} {
		f.Add(text)
	}
	r := New(&config.Registry{}, mesh)
	f.Fuzz(func(t *testing.T, text string) {
		err, virtual := r.address(text), r.virtual(text)
		_ = r.host(text)
		a, notAddress := netip.ParseAddr(text)
		if notAddress != nil {
			return
		}
		if a = a.Unmap().WithZone(""); a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified() {
			if err == nil || virtual == nil {
				t.Errorf("%s is not refused: %v, %v", text, err, virtual)
			}
		}
		if b := a.As16(); a.Is6() && [12]byte(b[:12]) == [12]byte{0, 0x64, 0xff, 0x9b} && err == nil {
			t.Errorf("%s is not refused", text)
		}
	})
}

func BenchmarkCheck(b *testing.B) {
	r := New(&config.Registry{Owns: config.Owns{Hosts: []string{"*.service.consul"}, Addresses: []string{"10.0.0.0/8"}}}, mesh)
	p := &encode.Part{Collection: collection.WorkloadEntry, Name: "consul/web-1"}
	body := &networking.WorkloadEntry{Address: "10.1.2.3", Labels: map[string]string{"version": "v1", "team": "web", "protocol": "http"}}
	for b.Loop() {
		if err := r.Check(p, body); err != nil {
			b.Fatal(err)
		}
	}
}
