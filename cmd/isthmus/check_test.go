package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// A host is followed from its registry to a call, and the check stops at the
// first hop that is not fine.
func TestCheckCall(t *testing.T) {
	var code atomic.Int64
	code.Store(http.StatusOK)
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "s00.files" {
			w.WriteHeader(int(code.Load()))
		}
	}))
	defer gateway.Close()
	proxy := strings.TrimPrefix(gateway.URL, "http://")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "services.yaml"), []byte(fileServices(2)), 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nregistries: [{name: files, type: file, config: {path: %q}}]\n", dir), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	at := p.find(p.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	p.find(p.stderr, `msg="listing complete"`)
	check := func(wantCode int, want string, args ...string) {
		t.Helper()
		c := start(t, append([]string{"check", "--address", at[2]}, args...)...)
		got := c.wait()
		if said := strings.Join(append(c.stdout.seen, c.stderr.seen...), "\n"); got != wantCode || !strings.Contains(said, want) {
			t.Errorf("%q ended with %d and wrote\n%s\nwant %d and %q", args, got, said, wantCode, want)
		}
	}
	check(exitFailed, "STOP  registry  No registry has nothing.files", "--call", "nothing.files")
	check(exitFailed, "STOP  sinks     no istiod is connected", "--call", "s00.files")
	watch := start(t, "watch", "--address", at[1])
	watch.find(watch.stdout, `s01`)
	await(t, "http://"+at[2]+"/api/v1/explain?host=s00.files", `"state": "acknowledged"`)
	check(exitOK, "ok    sinks     1 sink has acknowledged it", "--call", "s00.files")
	check(exitOK, "ok    call      200 OK through "+proxy, "--call", "s00.files", "--proxy", proxy)
	check(exitFailed, "STOP  istiod", "--call", "s00.files", "--istiod", proxy)
	code.Store(http.StatusServiceUnavailable)
	check(exitFailed, `"hop": "call",`, "--call", "s00.files", "--proxy", proxy, "--output", "json")
}
