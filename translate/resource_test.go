package translate

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"sigs.k8s.io/yaml"
)

func parseResource(t testing.TB, text string) *mcp.Resource {
	t.Helper()
	j, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	res := &mcp.Resource{}
	if err := protojson.Unmarshal(j, res); err != nil {
		t.Fatal(err)
	}
	return res
}

const goodEntry = `
metadata: {name: ns/web, version: "7", labels: {a: b}}
body:
  "@type": type.googleapis.com/istio.networking.v1alpha3.ServiceEntry
  hosts: [web.example.org, "*.example.org"]
  addresses: [10.0.0.1, 10.1.0.0/16]
  ports: [{name: http, number: 80, protocol: HTTP, targetPort: 8080}, {name: guess, number: 81, protocol: TLS}]
  resolution: STATIC
  endpoints: [{address: 10.0.0.1, ports: {http: 8080}, labels: {version: v1, empty: ""}}, {address: "unix:///x"}]
  exportTo: [., team-a]
`

// A good resource is encoded without its version, with a create_time, and the
// caller's copy stays as it was.
func TestResource(t *testing.T) {
	res := parseResource(t, goodEntry)
	before := proto.CloneOf(res)
	e, err := Resource(res)
	if err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(before, res) {
		t.Errorf("the resource was changed")
	}
	body := &networking.ServiceEntry{}
	if m := decodeEncoded(t, e, body); e.Name != "ns/web" || m.Labels["a"] != "b" {
		t.Errorf("name %q, metadata %v", e.Name, m)
	}
	want := &networking.ServiceEntry{}
	if err := res.Body.UnmarshalTo(want); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(want, body) {
		t.Errorf("body %v, want %v", body, want)
	}
}

// A create_time of its own stays, and so does what this build does not know.
func TestResourceKeeps(t *testing.T) {
	spec := &networking.ServiceEntry{Hosts: []string{"web.example.org"}}
	value, err := proto.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	unknown := []byte{0xfa, 0x3f, 1, 'x'} // field 1023
	res := &mcp.Resource{
		Metadata: &mcp.Metadata{Name: "ns/web", CreateTime: timestamppb.New(CreateTime.AddDate(-50, 0, 0))},
		Body:     &anypb.Any{TypeUrl: typePrefix + "istio.networking.v1alpha3.ServiceEntry", Value: append(value, unknown...)},
	}
	e, err := Resource(res)
	if err != nil {
		t.Fatal(err)
	}
	got := &mcp.Resource{}
	if err := proto.Unmarshal(e.Resource, got); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(got, res) {
		t.Errorf("got %v, want %v", got, res)
	}
}

// Every kind of package collection can be published.
func TestResourceKinds(t *testing.T) {
	for _, kind := range []string{
		"networking.v1alpha3.WorkloadEntry", "networking.v1alpha3.WorkloadGroup", "networking.v1alpha3.VirtualService",
		"networking.v1alpha3.DestinationRule", "networking.v1alpha3.Gateway", "networking.v1alpha3.Sidecar", "networking.v1alpha3.EnvoyFilter",
		"networking.v1beta1.ProxyConfig", "security.v1beta1.AuthorizationPolicy", "security.v1beta1.PeerAuthentication", "security.v1beta1.RequestAuthentication",
	} {
		res := &mcp.Resource{Metadata: &mcp.Metadata{Name: "ns/x"}, Body: &anypb.Any{TypeUrl: typePrefix + "istio." + kind}}
		if kind == "networking.v1alpha3.WorkloadEntry" {
			res.Body.Value = []byte("\x0a\x0810.0.0.1")
		}
		if _, err := Resource(res); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

func TestResourceRefuses(t *testing.T) {
	change := func(from, to string) *mcp.Resource {
		if !strings.Contains(goodEntry, from) {
			t.Fatalf("goodEntry has no %q", from)
		}
		return parseResource(t, strings.Replace(goodEntry, from, to, 1))
	}
	undecodable := change("ns/web", "ns/web")
	undecodable.Body.Value = []byte{0xff}
	unknown := change("ns/web", "ns/web")
	unknown.Body.TypeUrl = typePrefix + "google.protobuf.Timestamp"
	late := change("ns/web", "ns/web")
	late.Metadata.CreateTime = &timestamppb.Timestamp{Nanos: -1}
	tests := []struct {
		name string
		res  *mcp.Resource
		want string
	}{
		{"nothing", nil, "there is no resource"},
		{"no metadata", &mcp.Resource{}, "metadata is missing"},
		{"no body", &mcp.Resource{Metadata: &mcp.Metadata{Name: "a/b"}}, "the body is missing"},
		{"unknown kind", unknown, "none that can be published"},
		{"undecodable", undecodable, "the body is not an istio.networking.v1alpha3.ServiceEntry"},
		{"create_time", late, "create_time"},
		{"name without namespace", change("ns/web", "web"), "not namespace/name"},
		{"namespace", change("ns/web", "Ns/web"), "not a legal namespace"},
		{"name", change("ns/web", "ns/a/b"), "not a legal name"},
		{"label", change("{a: b}", "{'a b': c}"), "not a legal label"},
		{"label value", change("{a: b}", "{a: 'b c'}"), "not a legal value of label a"},
		{"annotation", change("labels: {a: b}", "annotations: {proxy.istio.io/health-checks-enabled: 'true'}"), "remove it"},
		{"no host", change("[web.example.org, \"*.example.org\"]", "[]"), "hosts is empty"},
		{"host", change("web.example.org", "web_a.example.org"), `hosts: "web_a.example.org" is not a legal host`},
		{"host of digits", change("web.example.org", "web.1"), "not a legal host"},
		{"address of service", change("10.1.0.0/16", "x"), "neither an IP address nor a prefix"},
		{"port name", change("name: http,", "name: Http,"), "not a DNS label"},
		{"port name twice", change("name: guess", "name: http"), "ports[1].name"},
		{"port number", change("number: 80,", "number: 0,"), "0 is not a port number"},
		{"port number twice", change("number: 81", "number: 80"), "ports[1].number"},
		{"target port", change("targetPort: 8080", "targetPort: 70000"), "target_port"},
		{"protocol", change("HTTP", "SMTP"), "ports[0].protocol"},
		{"endpoint address", change("address: 10.0.0.1", "address: db.example.org"), "resolution STATIC needs"},
		{"endpoint without address", change("address: 10.0.0.1", "address: ''"), "endpoints[0].address is empty"},
		{"unix socket in DNS", change("resolution: STATIC", "resolution: DNS"), `"unix:///x" is a unix socket, which resolution DNS cannot use`},
		{"prefix in DNS", change("resolution: STATIC", "resolution: DNS"), `"10.1.0.0/16" is a prefix, which resolution DNS cannot use`},
		{"several hosts on TCP", change("protocol: TLS", "protocol: TCP"), "hosts are several"},
		{"endpoints in NONE", change("resolution: STATIC", "resolution: NONE"), "resolution is NONE"},
		{"endpoint port", change("http: 8080", "other: 8080"), `"other" is none of the service's ports`},
		{"endpoint port number", change("http: 8080", "http: 0"), "0 is not a port number"},
		{"endpoint label", change("version: v1", "'x y': v1"), "endpoints[0].labels"},
		{"selector and endpoints", change("exportTo", "workloadSelector: {labels: {a: b}}\n  exportTo"), "remove one"},
		{"exportTo", change("team-a", "Team"), "exportTo"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Resource(tt.res)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one that says %q", err, tt.want)
			}
		})
	}
}

// FuzzResource: no bytes make it panic, and what it accepts it accepts again,
// with the same outcome.
func FuzzResource(f *testing.F) {
	good, err := proto.Marshal(parseResource(f, goodEntry))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		res := &mcp.Resource{}
		if proto.Unmarshal(b, res) != nil {
			return
		}
		e, err := Resource(res)
		if err != nil {
			return
		}
		again := &mcp.Resource{}
		if err := proto.Unmarshal(e.Resource, again); err != nil {
			t.Fatal(err)
		}
		e2, err := Resource(again)
		if err != nil || e2.Name != e.Name || string(e2.Resource) != string(e.Resource) {
			t.Errorf("accepted once, then: %v", err)
		}
	})
}

// What the host checks of any plugin's resource is what Resource checks.
func TestValidateBody(t *testing.T) {
	good := &networking.ServiceEntry{}
	if err := parseResource(t, goodEntry).Body.UnmarshalTo(good); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		body proto.Message
		want string // "" is no error
	}{
		{good, ""},
		{&networking.ServiceEntry{}, "hosts is empty"},
		{&networking.ServiceEntry{Hosts: []string{"a.example.org"}, Ports: []*networking.ServicePort{{Name: "guess", Number: 80}}}, ""},
		{&networking.ServiceEntry{Hosts: []string{"a.example.org", "b.example.org"}, Resolution: networking.ServiceEntry_NONE, Ports: []*networking.ServicePort{{Name: "tcp", Number: 80, Protocol: "TCP"}}}, ""},
		{&networking.ServiceEntry{Hosts: []string{"a.example.org"}, Ports: []*networking.ServicePort{nil}, Endpoints: []*networking.WorkloadEntry{nil}}, "ports[0] is null"},
		{&networking.WorkloadEntry{Address: "10.0.0.1"}, ""},
		{&networking.WorkloadEntry{Network: "n"}, ""},
		{&networking.WorkloadEntry{Address: "db.example.org.", Ports: map[string]uint32{"http": 80}}, ""},
		{&networking.WorkloadEntry{}, "address is empty"},
		{&networking.WorkloadEntry{Address: "a b"}, "neither an IP address nor a host name"},
		{&networking.WorkloadEntry{Address: "unix:///x", Ports: map[string]uint32{"http": 80}}, "a unix socket has none"},
		{&networking.WorkloadEntry{Address: "10.0.0.1", Ports: map[string]uint32{"A": 70000}}, "not a port number"},
		{&networking.WorkloadEntry{Address: "10.0.0.1", Ports: map[string]uint32{"A": 7}}, "not a DNS label"},
		{&networking.Gateway{}, ""},
	}
	for _, tt := range tests {
		err := ValidateBody(tt.body)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("ValidateBody(%v) = %v, want %q", tt.body, err, tt.want)
		}
	}
}
