package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// healthcheck tells by its status whether a bridge is ready, and says why not.
func TestHealthcheck(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "isthmus.yaml")
	// A registry that lists nothing until its file is there holds its types.
	if err := os.WriteFile(config, []byte("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\n"+
		"registries: [{name: files, type: file, config: {path: "+filepath.Join(dir, "services.yaml")+"}}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", config)
	address := p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]
	ask := func(address string, want int, says string) {
		t.Helper()
		r := start(t, "healthcheck", "--ready", "--address", address)
		code := r.wait()
		if text := strings.Join(append(r.stdout.seen, r.stderr.seen...), "\n"); code != want || !strings.Contains(text, says) {
			t.Errorf("healthcheck ended with %d and wrote %s; want %d and %q", code, text, want, says)
		}
	}
	ask(address, exitFailed, "registry files")
	if err := os.WriteFile(filepath.Join(dir, "services.yaml"), []byte(fileServices(1)), 0o600); err != nil {
		t.Fatal(err)
	}
	p.find(p.stderr, `msg="listing complete"`)
	await(t, "http://"+address+"/readyz", `^ready\n`)
	ask(address, exitOK, "ready\n")
	ask("127.0.0.1:1", exitFailed, "connection refused")
	ask("nonsense", exitUsage, "must be host:port")
}
