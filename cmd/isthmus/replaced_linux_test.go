package main

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// The resolver's files, the authorities and the cache of libraries are replaced
// as resolvconf, update-ca-certificates and ldconfig do it, under confined
// plugins: one that connects to nothing goes on, one that resolves names goes
// on resolving them, and nothing is a failure.
func TestSystemFilesReplaced(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root mounts another /etc")
	}
	polled := make(chan struct{}, 1)
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		select {
		case polled <- struct{}{}:
		default:
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"applications": {"versions__delta": "1", "apps__hashcode": "UP_1_", "application": [{"name": "WEB", "instance": [
			{"instanceId": "web-1", "app": "WEB", "ipAddr": "10.0.0.1", "hostName": "h", "status": "UP", "port": {"$": 8080, "@enabled": "true"}, "vipAddress": "web"}]}]}}`)
	}))
	defer registry.Close()
	_, port, err := net.SplitHostPort(registry.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	etc := filepath.Join(dir, "etc")
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", "/etc", etc).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	replace := func(name, text string) {
		t.Helper()
		path := filepath.Join(etc, name)
		if text == "" {
			b, err := os.ReadFile(path)
			if os.IsNotExist(err) {
				return // not every system has it
			}
			if err != nil {
				t.Fatal(err)
			}
			text = string(b)
		}
		replaceFile(t, path, text)
		if err := os.Chmod(path, 0o644); err != nil { //nolint:gosec // as on any system
			t.Fatal(err)
		}
	}
	replace("resolv.conf", "nameserver 127.0.0.1\n")
	replace("hosts", "127.0.0.1 localhost registry.test\n")
	file := filepath.Join(dir, "isthmus.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, `
listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}
registries:
- {name: load, type: sim, config: {services: 1, changes_per_second: 0}}
- {name: names, type: eureka, config: {servers: ["http://registry.test:%s/eureka"], interval: 1s}}
`, port), 0o600); err != nil {
		t.Fatal(err)
	}
	isthmus, err := exec.LookPath("isthmus")
	if err != nil {
		t.Fatal(err)
	}
	wrapper := filepath.Join(dir, "bin")
	if err := os.Mkdir(wrapper, 0o700); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\nexec unshare --mount sh -c 'mount --bind %s /etc && exec %s \"$@\"' isthmus \"$@\"\n", etc, isthmus)
	if err := os.WriteFile(filepath.Join(wrapper, "isthmus"), []byte(script), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	t.Setenv("PATH", wrapper+":"+os.Getenv("PATH"))
	p := start(t, "serve", "--config", file)
	admin := "http://" + p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]
	p.findAll(p.stderr, `msg="listing complete" registry=load`, `msg="listing complete" registry=names`)

	for _, name := range []string{"nsswitch.conf", "ssl/certs/ca-certificates.crt", "ld.so.cache", "host.conf", "services"} {
		replace(name, "")
	}
	replace("resolv.conf", "nameserver 127.0.0.2\n")
	replace("hosts", "127.0.0.1 localhost registry.test\n::1 localhost\n")
	p.find(p.stderr, `level=INFO msg="the plugin is replaced" registry=names .*/etc/(resolv\.conf|hosts) was replaced`)
	for len(polled) > 0 {
		<-polled
	}
	testwait.Eventually(t, patience, "the registry to be asked by its name", func() (string, bool) { return "", len(polled) > 0 })
	await(t, admin+"/api/v1/registries", `(?s)"name": "load".*"phase": "live".*"name": "names".*"phase": "live"`)
	await(t, admin+"/metrics", `(?m)^isthmus_plugin_starts_total\{registry="load"\} 1$`, `(?m)^isthmus_plugin_starts_total\{registry="names"\} 2$`)
	await(t, admin+"/readyz", `^ready\n$`)
	for _, line := range p.stderr.seen {
		if strings.Contains(line, "level=ERROR") || strings.Contains(line, "level=WARN") || strings.Contains(line, "failed") {
			t.Errorf("logged: %s", line)
		}
	}
}
