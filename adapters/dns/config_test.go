package dns

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// TestMinimalConfig shows that a name is enough, and what its forms stand for.
func TestMinimalConfig(t *testing.T) {
	for in, want := range map[string]string{
		`"web.example.org"`:                                  "{web.example.org. address 0   web.example.org map[]}",
		`"Web.Example.ORG.:8080"`:                            "{web.example.org. address 8080   web.example.org map[]}",
		`"_http._tcp.shop.example.org"`:                      "{_http._tcp.shop.example.org. srv 0 http  shop.example.org map[]}",
		`"_sip._udp.example.org"`:                            "{_sip._udp.example.org. srv 0 sip udp example.org map[]}",
		`{"name": "_x.example.org", "type": "a"}`:            "{_x.example.org. a 0   _x.example.org map[]}",
		`{"name": "a.example.org", "type": "srv"}`:           "{a.example.org. srv 0   a.example.org map[]}",
		`{"name": "a", "service": "b", "port_name": "http"}`: "{a. address 0 http  b map[]}",
	} {
		var n Name
		if err := json.Unmarshal([]byte(in), &n); err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if _, err := New(Config{Names: []Name{n}}, plugin.Env{}); err != nil {
			t.Errorf("%s: %v", in, err)
		}
		if got := fmt.Sprint(n.withDefaults()); got != want {
			t.Errorf("%s is %s, want %s", in, got, want)
		}
	}
}

// TestServers shows which forms of a server there are.
func TestServers(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1": "10.0.0.1:53", "10.0.0.1:5353": "10.0.0.1:5353", "udp://ns.example.org": "ns.example.org:53", "tcp://ns": "tcp://ns:53",
		"tls://10.0.0.1": "tls://10.0.0.1:853", "2001:db8::1": "[2001:db8::1]:53", "[2001:db8::1]": "[2001:db8::1]:53", "tls://[2001:db8::1]:8853": "tls://[2001:db8::1]:8853",
		"https://a": "", "a:b": "", "a:0": "", "": "", "tcp://": "", "a/b": "",
	} {
		s, err := parseServer(in)
		if got := s.String(); (err == nil) != (want != "") || err == nil && got != want {
			t.Errorf("%q is %s, %v, want %q", in, got, err, want)
		}
	}
}

// TestValidate shows that everything that is wrong is found, at its place.
func TestValidate(t *testing.T) {
	var wrongPort Name
	if err := json.Unmarshal([]byte(`"p.example.org:http"`), &wrongPort); err != nil {
		t.Fatal(err)
	}
	c := Config{
		Names: []Name{
			{Name: "a.example.org"},
			{Name: "A.example.org."},
			{Name: ""},
			{Name: "10.0.0.1"},
			{Name: "*.example.org"},
			wrongPort,
			{Name: "b.example.org", Type: "mx"},
			{Name: "_http._tcp.c.example.org", Port: 80},
			{Name: "_grpc._tcp.c.example.org"},
			{Name: strings.Repeat("a", 64) + ".org"},
		},
		Servers: []string{"10.0.0.1", "10.0.0.1:53", "doh://a"}, TLS: plugin.TLS{CertFile: "c"}, Timeout: 1, MinTTL: plugin.Duration(10e9), MaxTTL: plugin.Duration(5e9),
		InFlight: 2000, Priorities: "some", RemoveGrace: -1,
	}
	want := strings.Fields(`in_flight max_ttl names[1] names[2] names[3] names[4] names[5] names[6].type names[7].port names[8].service names[9]
		priorities remove_grace servers[1] servers[2] timeout tls tls.cert_file`)
	var fields []string
	for _, e := range c.Validate().(interface{ Unwrap() []error }).Unwrap() { //nolint:errorlint // what errors.Join returns
		f, ok := errors.AsType[*plugin.FieldError](e)
		if !ok {
			t.Fatalf("%v is not a FieldError", e)
		}
		fields = append(fields, f.Field)
	}
	slices.Sort(fields)
	if !slices.Equal(fields, want) {
		t.Errorf("fields\n%v\nwant\n%v", fields, want)
	}
	if err := (Config{}).Validate(); err == nil || !strings.Contains(err.Error(), "names") {
		t.Errorf("without names: %v", err)
	}
}

// FuzzNames shows that no file of names makes the adapter panic, and that what
// is taken from one is valid again.
func FuzzNames(f *testing.F) {
	for _, seed := range []string{"- a.example.org:80\n- {name: _http._tcp.b, metadata: {a: b}}", "[]", "null", "- [a]", "{a: &x [*x]}", `["a:70000", 1]`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		names, err := parseNames(b)
		if err != nil || len(checkNames("names", nil, names)) > 0 {
			return
		}
		for service, list := range groupNames(names) {
			if errs := checkNames("names", nil, list); service == "" || len(errs) > 0 {
				t.Errorf("service %q: %v", service, errs)
			}
		}
	})
}
