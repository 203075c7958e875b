package owns

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/server/config"
)

func TestCheck(t *testing.T) {
	host := func(names ...string) proto.Message { return &networking.ServiceEntry{Hosts: names} }
	at := func(address string) proto.Message { return &networking.WorkloadEntry{Address: address} }
	inline := func(address string) proto.Message {
		return &networking.ServiceEntry{Endpoints: []*networking.WorkloadEntry{{Address: "10.0.0.1"}, {Address: address}}}
	}
	virtual := func(address string) proto.Message { return &networking.ServiceEntry{Addresses: []string{address}} }
	for name, c := range map[string]struct {
		owns   config.Owns
		beyond bool
		yes    []proto.Message
		no     []proto.Message
		field  string
	}{
		"defaults": {
			yes:   []proto.Message{host("db.svc.cluster.local"), at("10.0.0.1"), at("127.0.0.1"), at("::1"), at("db.example.org"), at(""), virtual("240.240.0.1"), &networking.Gateway{}},
			no:    []proto.Message{at("169.254.169.254"), at("::ffff:169.254.169.254"), inline("fe80::1%eth0"), at("0.0.0.0"), at("::"), at("224.0.0.1"), at("ff02::1"), at("255.255.255.255"), at("fd00:ec2::254"), at("unix:///run/docker.sock"), at("metadata.google.internal.")},
			field: "addresses",
		},
		"sinks on other machines": {beyond: true, yes: []proto.Message{at("10.0.0.1")}, no: []proto.Message{at("LOCALHOST"), at("a.localhost"), at("127.0.0.1"), inline("127.9.9.9"), at("::1"), at("::ffff:127.0.0.1")}, field: "addresses"},
		"a denied block by name": {
			owns: config.Owns{Addresses: []string{"127.0.0.0/8", "10.0.0.0/8"}}, beyond: true,
			yes: []proto.Message{at("127.0.0.1"), at("10.0.0.1")}, no: []proto.Message{at("169.254.169.254"), at("192.168.0.1")}, field: "addresses",
		},
		"everything names no denied block": {
			owns: config.Owns{Addresses: []string{"0.0.0.0/0", "::/0"}}, beyond: true,
			yes: []proto.Message{at("192.168.0.1"), at("2001:db8::1")}, no: []proto.Message{at("169.254.169.254"), at("127.0.0.1"), at("::1")}, field: "addresses",
		},
		"addresses of hosts": {
			owns: config.Owns{Addresses: []string{"10.1.0.0/16"}},
			yes:  []proto.Message{virtual("10.1.0.1"), virtual("10.1.2.0/24")}, no: []proto.Message{virtual("10.96.0.1"), virtual("10.0.0.0/8")}, field: "addresses",
		},
		"hosts": {
			owns: config.Owns{Hosts: []string{"*.service.consul", "db.example.org"}},
			yes:  []proto.Message{host("web.service.consul", "db.example.org"), host("*.web.service.consul")},
			no:   []proto.Message{host("kubernetes.default.svc.cluster.local"), host("web.service.consul", "x.example.org"), host("*"), host("*.example.org"), host("service.consul")}, field: "hosts",
		},
		"a name as an address": {
			owns: config.Owns{Hosts: []string{"*.example.org"}, Addresses: []string{"10.0.0.0/8"}},
			yes:  []proto.Message{at("db.example.org")}, no: []proto.Message{at("metadata.google.internal")}, field: "hosts",
		},
		"a name beside addresses":                  {owns: config.Owns{Addresses: []string{"10.0.0.0/8"}}, no: []proto.Message{at("db.example.org")}, field: "hosts"},
		"a wildcard that is more than the pattern": {owns: config.Owns{Hosts: []string{"?.example.org"}}, no: []proto.Message{host("*.example.org")}, field: "hosts"},
	} {
		t.Run(name, func(t *testing.T) {
			r := New(c.owns, c.beyond)
			for _, body := range c.yes {
				if err := r.Check(body); err != nil {
					t.Errorf("%v: %v", body, err)
				}
			}
			for _, body := range c.no {
				var outside *Outside
				if err := r.Check(body); !errors.As(err, &outside) || outside.Field != c.field {
					t.Errorf("%v: %v, want a refusal by owns.%s", body, err, c.field)
				}
			}
		})
	}
	r := New(config.Owns{Namespaces: []string{"consul"}}, false)
	if err := r.CheckNamespace("consul"); err != nil {
		t.Error(err)
	}
	if err := r.CheckNamespace("istio-system"); err == nil || !strings.Contains(err.Error(), "namespace istio-system is not the registry's: owns.namespaces has consul; name it in owns.namespaces if it is") {
		t.Error(err)
	}
	if err := New(config.Owns{}, true).CheckNamespace("istio-system"); err != nil {
		t.Error(err)
	}
}

func BenchmarkCheck(b *testing.B) {
	r := New(config.Owns{Hosts: []string{"*.service.consul"}, Addresses: []string{"10.0.0.0/8"}}, true)
	body := &networking.WorkloadEntry{Address: "10.1.2.3"}
	for b.Loop() {
		if err := r.Check(body); err != nil {
			b.Fatal(err)
		}
	}
}
