package etcd

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// TestMinimalConfig shows that a server's URL is enough, and which keys are
// followed then.
func TestMinimalConfig(t *testing.T) {
	for _, c := range []struct{ layout, prefix, want string }{
		{"", "", "/services/"},
		{layoutKratos, "", "/microservices/"},
		{layoutKratos, "/shop", "/shop/"},
		{layoutKratos, "/", "/"},
		{layoutGoMicro, "", "/micro/registry/"},
		{layoutGRPC, "", ""},
		{layoutGRPC, "foo/bar", "foo/bar/"},
	} {
		a, err := New(Config{Endpoints: []string{"http://a:2379"}, Layout: c.layout, Prefix: c.prefix}, plugin.Env{})
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		if got := a.(*Adapter).prefix; got != c.want { //nolint:forcetypeassert // what New returns
			t.Errorf("%+v: prefix %q", c, got)
		}
	}
}

// TestValidate shows that everything that is wrong is found, at its place.
func TestValidate(t *testing.T) {
	c := Config{
		Endpoints: []string{"a:2379", "http://a", "http://u:p@b", "http://a", "http://c/v3"}, Layout: "yaml",
		Username: "u", UsernameFile: "f", Password: "p", PasswordFile: "f", TLS: plugin.TLS{CertFile: "c"},
		Services: plugin.Selection{Include: []string{"["}}, Timeout: 1, RemoveGrace: -1, MinShare: 1.5,
	}
	fields := func(c Config) []string {
		var fields []string
		for _, e := range c.Validate().(interface{ Unwrap() []error }).Unwrap() { //nolint:errorlint // what errors.Join returns
			f, ok := errors.AsType[*plugin.FieldError](e)
			if !ok {
				t.Fatalf("%v is not a FieldError", e)
			}
			fields = append(fields, f.Field)
		}
		slices.Sort(fields)
		return fields
	}
	want := strings.Fields(`endpoints[0] endpoints[2] endpoints[3] endpoints[4] layout min_share password_file remove_grace
		services.include[0] timeout tls tls.cert_file username_file`)
	if got := fields(c); !slices.Equal(got, want) {
		t.Errorf("fields\n%v\nwant\n%v", got, want)
	}
	for field, c := range map[string]Config{
		"endpoints": {}, "username": {Endpoints: []string{"http://a"}, Password: "p"}, "password_file": {Endpoints: []string{"http://a"}, Username: "u"},
	} {
		if got := fields(c); !slices.Equal(got, []string{field}) {
			t.Errorf("%v, want %s", got, field)
		}
	}
}
