package zookeeper

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// TestMinimalConfig shows that a server is enough, and which paths are read
// then.
func TestMinimalConfig(t *testing.T) {
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{}, "/dubbo /services"},
		{Config{Chroot: "/a/b/"}, "/a/b/dubbo /a/b/services"},
		{Config{Chroot: "/", Dubbo: "/shop", Apps: "/apps/"}, "/shop /apps"},
		{Config{Hosts: []string{"applications"}}, "/services"},
	} {
		c.config.Servers = []string{"a:2181"}
		a, err := New(c.config, plugin.Env{})
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		adapter := a.(*Adapter) //nolint:forcetypeassert // what New returns
		if got := strings.Join(adapter.layout.roots(adapter.config), " "); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// TestValidate shows that everything that is wrong is found, at its place.
func TestValidate(t *testing.T) {
	c := Config{
		Servers: []string{"a", "b:2181/root", "c:1,d:2", "e:2181", "e:2181", "f:99999"}, Chroot: "x", Dubbo: "/services/x", Apps: "/services", Hosts: []string{"all"},
		Auth: "kerberos", Username: "u", UsernameFile: "f", Password: "p", PasswordFile: "f", TLS: TLSConfig{TLS: plugin.TLS{CertFile: "c"}},
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
	want := strings.Fields(`applications auth chroot hosts[0] min_share password_file remove_grace
		servers[0] servers[1] servers[2] servers[4] servers[5] services.include[0] timeout tls.cert_file tls.enabled username_file`)
	if got := fields(c); !slices.Equal(got, want) {
		t.Errorf("fields\n%v\nwant\n%v", got, want)
	}
	one := DefaultConfig
	one.Servers = []string{"a:2181"}
	for field, change := range map[string]func(*Config){
		"servers": func(c *Config) { c.Servers = nil }, "dubbo": func(c *Config) { c.Dubbo = "/a//b" },
		"username": func(c *Config) { c.Password = "p" }, "password_file": func(c *Config) { c.Username = "u" },
	} {
		c := one
		change(&c)
		if got := fields(c); !slices.Equal(got, []string{field}) {
			t.Errorf("%v, want %s", got, field)
		}
	}
}
