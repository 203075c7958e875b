package nacos

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// TestDefaultConfig shows that the defaults are valid, and what an empty
// configuration becomes.
func TestDefaultConfig(t *testing.T) {
	if err := DefaultConfig.Validate(); err != nil {
		t.Error(err)
	}
	if _, err := New(Config{}, plugin.Env{}); err != nil {
		t.Error(err)
	}
}

// TestValidate shows that everything that is wrong is found, at its place.
func TestValidate(t *testing.T) {
	c := Config{
		Servers: []string{"host:0", "ftp://a", "http://u@a", "a:8848", "a:8848"}, Protocol: "udp", GRPCPortOffset: 1000,
		Username: "u", UsernameFile: "f", Token: "t", TokenFile: "t", AccessKey: "a", AccessKeyFile: "a", TLS: TLSConfig{TLS: plugin.TLS{CertFile: "c"}},
		Namespaces: []string{"*", "dev-?", "", "public"}, Groups: []string{"[a"}, Services: plugin.Selection{Exclude: []string{""}},
		ClusterLocality: "rack", Ports: plugin.PortKeys{{}, {Name: "grpc", Key: "k"}, {Name: "grpc", Key: "l"}},
		ListInterval: 1, PollInterval: 1, InFlight: 1000, RemoveGrace: -1,
	}
	err := c.Validate()
	var fields []string
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() { //nolint:errorlint // what errors.Join returns
		f, ok := errors.AsType[*plugin.FieldError](e)
		if !ok {
			t.Fatalf("%v is not a FieldError", e)
		}
		fields = append(fields, f.Field)
	}
	slices.Sort(fields)
	want := strings.Fields(`access_key access_key_file cluster_locality groups[0] in_flight list_interval namespaces[0] namespaces[1] namespaces[3]
		poll_interval ports[0].key ports[0].name ports[2].name protocol remove_grace servers[0] servers[1] servers[2] servers[4]
		services.exclude[0] tls tls.cert_file token token_file username username_file`)
	if !slices.Equal(fields, want) {
		t.Errorf("fields\n%v\nwant\n%v", fields, want)
	}
}

// TestParseServer shows the forms of an address.
func TestParseServer(t *testing.T) {
	for in, want := range map[string]string{
		"a":                     "http://a:8848/nacos a:9848",
		"a:80":                  "http://a:80/nacos a:1080",
		"https://a:443/":        "https://a:443/nacos a:1443",
		"http://a:8848/x/y/":    "http://a:8848/x/y a:9848",
		"http://[::1]:8848":     "http://[::1]:8848/nacos [::1]:9848",
		"https://nacos.example": "https://nacos.example:8848/nacos nacos.example:9848",
	} {
		s, err := parseServer(in, "nacos/", 1000)
		if got := s.url("") + " " + s.grpcAddress(); err != nil || got != want {
			t.Errorf("%s: %s, error %v; want %s", in, got, err, want)
		}
	}
	if s, err := parseServer("a", "/", 1000); err != nil || s.url("/x") != "http://a:8848/x" {
		t.Errorf("without a context path: %v, error %v", s.url("/x"), err)
	}
}

// TestServers shows the rotation, and what becomes of recommendations.
func TestServers(t *testing.T) {
	a, _ := parseServer("a:8848", "/nacos", 1000)
	b, _ := parseServer("b:8848", "/nacos", 1000)
	s := servers{all: []server{a, b}}
	var got []string
	take := func() { got = append(got, s.take().grpcAddress()) }
	take()
	s.recommend("c:8848")
	take()
	s.recommend("b:9848")
	take()
	s.recommend("d:1")
	s.recommend("nonsense")
	take()
	take()
	if want := strings.Fields("a:9848 c:9848 b:9848 b:9848 a:9848"); !slices.Equal(got, want) {
		t.Errorf("took %v, want %v", got, want)
	}
}
