package eureka

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// TestMinimalConfig shows that a server's URL is enough, and with what path.
func TestMinimalConfig(t *testing.T) {
	for in, want := range map[string]string{
		"http://a:8761":              "http://a:8761/eureka",
		"http://a:8761/":             "http://a:8761/eureka",
		"http://a:8761/eureka/":      "http://a:8761/eureka",
		"https://a/x/eureka/v2":      "https://a/x/eureka/v2",
		"http://[::1]:8761/eureka//": "http://[::1]:8761/eureka",
	} {
		if _, err := New(Config{Servers: []string{in}}, plugin.Env{}); err != nil {
			t.Errorf("%s: %v", in, err)
		}
		if got := baseURL(in); got != want {
			t.Errorf("%s becomes %s, want %s", in, got, want)
		}
	}
}

// TestValidate shows that everything that is wrong is found, at its place.
func TestValidate(t *testing.T) {
	c := Config{
		Servers: []string{"a:8761", "http://a", "http://u:p@b", "http://a"}, ServiceBy: "name", Address: "dns",
		HTTP:     plugin.HTTP{Password: "p", Timeout: 1, TLS: plugin.TLS{CertFile: "c"}},
		Services: plugin.Selection{Include: []string{"["}}, Ports: plugin.PortKeys{{}, {Name: "grpc", Key: "k"}, {Name: "grpc", Key: "l"}, {Name: "https", Key: "m"}},
		Interval: 1, FullInterval: 1, RemoveGrace: -1, MinShare: 1.5,
	}
	var fields []string
	for _, e := range c.Validate().(interface{ Unwrap() []error }).Unwrap() { //nolint:errorlint // what errors.Join returns
		f, ok := errors.AsType[*plugin.FieldError](e)
		if !ok {
			t.Fatalf("%v is not a FieldError", e)
		}
		fields = append(fields, f.Field)
	}
	slices.Sort(fields)
	want := strings.Fields(`address full_interval interval min_share ports[0].key ports[0].name ports[2].name ports[3].name remove_grace servers[0]
		servers[2] servers[3] service_by services.include[0] timeout tls tls.cert_file username`)
	if !slices.Equal(fields, want) {
		t.Errorf("fields\n%v\nwant\n%v", fields, want)
	}
	if err := (Config{}).Validate(); err == nil || !strings.Contains(err.Error(), "servers") {
		t.Errorf("without servers: %v", err)
	}
}
