package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// Two bridges that serve the same are equal over either protocol, and a shadow
// run tells what comes to differ, that it no longer does, and how it ended.
func TestDiffServers(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		replaceFile(t, path, text)
		return path
	}
	services := func(address string) string {
		return "services:\n- {name: web, ports: [{name: http, number: 80, protocol: http}], instances: [{id: a, address: 10.0.0.1}, {id: b, address: " + address + ", weight: 3}]}\n"
	}
	serve := func(name string) (address string) {
		t.Helper()
		write(name+"/web.yaml", services("10.0.0.2"))
		file := write(name+".yaml", "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nregistries: [{name: r, type: file, config: {path: "+filepath.Join(dir, name)+"}}]\n")
		p := start(t, "serve", "--config", file)
		t.Cleanup(func() {
			p.signal(syscall.SIGTERM)
			p.wait()
		})
		address = p.find(p.stderr, `msg=serving xds=(\S+) `)[1]
		p.find(p.stderr, `msg="listing complete" registry=r`)
		return address
	}
	older, newer := serve("older"), serve("newer")
	for _, from := range []string{older, "mcp://" + older} {
		p := start(t, "diff", "--old", from, "--new", newer, "--settle", "200ms")
		if code := p.wait(); code != exitOK {
			t.Errorf("--old %s: exit code %d:\n%s\n%s", from, code, strings.Join(p.stdout.seen, "\n"), strings.Join(p.stderr.seen, "\n"))
		}
		if text := strings.Join(p.stdout.seen, "\n"); !regexp.MustCompile(`^1 services, 12 facts: 100 % equal, 0 differences`).MatchString(text) {
			t.Errorf("--old %s: %s", from, text)
		}
	}

	p := start(t, "diff", "--old", older, "--new", newer, "--settle", "200ms", "--watch")
	write("newer/web.yaml", services("10.0.0.3"))
	p.find(p.stdout, `^\+ web.r: endpoint 10.0.0.3:80: old -, new there \(translate.health\)$`)
	write("newer/web.yaml", services("10.0.0.2"))
	p.find(p.stdout, `^- web.r: endpoint 10.0.0.3:80: `)
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code after all is equal again = %d", code)
	}
	if text := strings.Join(p.stdout.seen, "\n"); !strings.Contains(text, "1 services, 12 facts: 100 % equal, 0 differences, 100 % of them explained; 2 differences lasted for 200ms since the start, at most 2 at once") {
		t.Errorf("the summary:\n%s", text)
	}
}
