package plugin

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The files of a configuration are found in blocks and lists.
func TestConfiguredFiles(t *testing.T) {
	type block struct {
		TLS  TLS    `json:"tls"`
		Path string `json:"context_path"`
		HTTP
	}
	c := struct {
		NamesFile string   `json:"names_file,omitempty"`
		EmptyFile string   `json:"empty_file"`
		Blocks    []block  `json:"blocks"`
		Pointer   *block   `json:"pointer"`
		None      *block   `json:"none"`
		Any       any      `json:"any"`
		Other     []string `json:"other"`
	}{
		NamesFile: "names",
		Blocks:    []block{{TLS: TLS{CAFile: "ca", CertFile: "cert"}, Path: "/nacos"}, {HTTP: HTTP{TokenFile: "token"}}},
		Pointer:   &block{TLS: TLS{CAPath: "cas"}},
		Other:     []string{"x"},
	}
	if diff := cmp.Diff([]string{"names", "ca", "cert", "token", "cas"}, configuredFiles(reflect.ValueOf(c))); diff != "" {
		t.Error(diff)
	}
}

// A path has moved if what it leads to is not below what was accessible at the
// start. What is missing for the moment has not moved.
func TestMoved(t *testing.T) {
	link := func(t *testing.T, target, path string) {
		t.Helper()
		if err := errors.Join(os.Symlink(target, path+".new"), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
	}
	put := func(t *testing.T, path string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".new", nil, 0o600), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name   string
		path   string
		before func(t *testing.T)
		change func(t *testing.T)
		moved  bool
	}{
		{"renamed file", "d/token", func(t *testing.T) { put(t, "d/token") }, func(t *testing.T) { put(t, "d/token") }, false},
		{"file that comes later", "d/token", func(t *testing.T) { put(t, "d/other") }, func(t *testing.T) { put(t, "d/token") }, false},
		{"directory that comes later", "d/token", func(*testing.T) {}, func(t *testing.T) { put(t, "d/token") }, true},
		{"file that goes", "d/token", func(t *testing.T) { put(t, "d/token") }, func(*testing.T) { os.Remove("d/token") }, false},
		{"directory that goes", "d", func(t *testing.T) { put(t, "d/a") }, func(*testing.T) { os.RemoveAll("d") }, false},
		{"directory of the same name", "d", func(t *testing.T) { put(t, "d/a") }, func(t *testing.T) { os.Rename("d", "e"); put(t, "d/a") }, true},
		{
			"mounted secret", "d/token", func(t *testing.T) {
				put(t, "d/..1/token")
				link(t, "..1", "d/..data")
				link(t, "..data/token", "d/token")
			},
			func(t *testing.T) { put(t, "d/..2/token"); link(t, "..2", "d/..data") }, false,
		},
		{
			"link to elsewhere", "d/token", func(t *testing.T) { put(t, "v1/token"); put(t, "d/x"); link(t, "../v1/token", "d/token") },
			func(t *testing.T) { put(t, "v2/token"); link(t, "../v2/token", "d/token") }, true,
		},
		{
			"link to a directory beside it", "d/current", func(t *testing.T) { put(t, "d/rev1/a"); link(t, "rev1", "d/current") },
			func(t *testing.T) { put(t, "d/rev2/a"); link(t, "rev2", "d/current") }, false,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			tt.before(t)
			c := newConfinement(Access{Read: []string{tt.path}})
			if err := c.moved(); err != nil {
				t.Errorf("at the start: %v", err)
			}
			tt.change(t)
			if err := c.moved(); (err != nil) != tt.moved || err != nil && !errors.Is(err, errMoved) {
				t.Errorf("after the change: %v, want moved %v", err, tt.moved)
			}
		})
	}
}

// What a kernel cannot enforce is said, never claimed.
func TestConfinementPhrases(t *testing.T) {
	one := Access{Read: []string{"/etc/isthmus/token"}, Ports: []uint16{8500}}
	for _, tt := range []struct {
		access   Access
		landlock int
		seccomp  error
		want     string
	}{
		{one, 7, nil, "reads only /etc/isthmus, what the system has for every program; connects by TCP only to 53, 8500; starts no program; listens nowhere"},
		{one, 3, nil, "reads only /etc/isthmus, what the system has for every program; ports not confined: this kernel's Landlock cannot; starts no program; listens nowhere"},
		{one, 0, errors.New("no seccomp"), "files not confined: this kernel has no Landlock; ports not confined: this kernel's Landlock cannot; system calls not confined: no seccomp"},
		{Access{Write: []string{"/var/lib/x/secret"}, AnyPort: true}, 7, nil, "reads only what the system has for every program; writes only /var/lib/x; connects to any port; starts no program; listens nowhere"},
		{Access{}, 7, nil, "reads only what the system has for every program; no network; starts no program; listens nowhere"},
	} {
		if diff := cmp.Diff(tt.want, strings.Join(newConfinement(tt.access).phrases(tt.access, tt.landlock, tt.seccomp), "; ")); diff != "" {
			t.Error(diff)
		}
	}
}

func TestURLPorts(t *testing.T) {
	if diff := cmp.Diff([]uint16{80, 443, 8761, 1}, URLPorts([]string{"http://a/eureka", "https://a", "http://a:8761/", "https://[::1]:1"})); diff != "" {
		t.Error(diff)
	}
}

func TestProxyPorts(t *testing.T) {
	env := map[string]string{
		"HTTPS_PROXY": "http://proxy.example.org:3128", "http_proxy": "proxy.example.org:8080", "ALL_PROXY": "https://proxy.example.org", "HTTP_PROXY": "::",
	}
	if got := proxyPorts(func(name string) string { return env[name] }); !slices.Equal(got, []uint16{3128, 443, 8080}) {
		t.Errorf("proxyPorts = %v", got)
	}
}
