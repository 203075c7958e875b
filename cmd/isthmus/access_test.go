package main

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
)

// Commands, of which watch is a sink of delta xDS, reach a bridge that wants
// TLS, and a certificate or a token, and one behind a socket; with neither, or
// the wrong one, they say what is missing.
func TestClientsOfGuardedListeners(t *testing.T) {
	server, tool, other := testcert.New(t, "bridge.example.org"), testcert.New(t, "tool.example.org"), testcert.New(t, "other.example.org")
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	reader, operator, wrong := file("reader", "read-me-1\n"), file("operator", "run-me-2\n"), file("wrong", "guess-3\n")
	authorities := ""
	for _, c := range []*testcert.Certificate{tool, other} {
		text, err := os.ReadFile(c.Cert)
		if err != nil {
			t.Fatal(err)
		}
		authorities += string(text)
	}
	socket := filepath.Join(dir, "xds.sock")
	config := func(admin string) string {
		return file("isthmus.yaml", "listen:\n"+
			"  xds:\n"+
			"  - {address: \"127.0.0.1:0\", tls: {cert_file: "+server.Cert+", key_file: "+server.Key+", client_ca_file: "+file("ca.pem", authorities)+", client_auth: request},\n"+
			"     allow: [{peer: {san: tool.example.org}}, {peer: {token_file: "+reader+"}}]}\n"+
			"  - unix:"+socket+"\n"+
			"  admin: {address: \"127.0.0.1:0\", tls: {cert_file: "+server.Cert+", key_file: "+server.Key+"}, allow: ["+admin+"]}\n"+
			"registries: [{name: load, type: sim, config: {services: 2, instances: 1}}]\n")
	}
	rules := "{peer: {token_file: " + reader + "}, role: read}, {peer: {token_file: " + operator + "}}"
	configured := config(rules)
	p := start(t, "serve", "--config", configured)
	at := p.find(p.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	p.find(p.stderr, `msg="listing complete"`)
	trust := []string{"--ca-file", server.Cert, "--server-name", "bridge.example.org"}

	watch := func(want string, args ...string) {
		t.Helper()
		w := start(t, append([]string{"watch"}, args...)...)
		out := w.stdout
		if strings.HasPrefix(want, "stderr ") {
			out, want = w.stderr, strings.TrimPrefix(want, "stderr ")
		}
		w.find(out, want)
		w.signal(syscall.SIGTERM)
		w.wait()
	}
	watch(`upsert\s+WorkloadEntry`, append(trust, "--address", at[1], "--cert-file", tool.Cert, "--key-file", tool.Key)...)
	p.find(p.stderr, `msg="sink connected" .*identity="certificate tool\.example\.org"`) // beside what the sink says
	// The page and the API say it, too, while it is connected.
	w := start(t, append(append([]string{"watch"}, trust...), "--address", at[1], "--cert-file", tool.Cert, "--key-file", tool.Key)...)
	w.find(w.stdout, `upsert\s+WorkloadEntry`)
	pool := x509.NewCertPool()
	if text, err := os.ReadFile(server.Cert); err != nil || !pool.AppendCertsFromPEM(text) {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "bridge.example.org", MinVersion: tls.VersionTLS13}}}
	defer client.CloseIdleConnections()
	for path, want := range map[string]string{"/api/v1/sinks": `"identity": "certificate tool.example.org"`, "/sinks": "verified as certificate tool.example.org; "} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+at[2]+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer read-me-1")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s has no %s: %v\n%s", path, want, err, text)
		}
	}
	w.signal(syscall.SIGTERM)
	w.wait()
	watch(`stderr no rule in allow of listen\.xds fits: .*certificate for other\.example\.org`, append(trust, "--address", at[1], "--cert-file", other.Cert, "--key-file", other.Key)...)
	watch(`upsert\s+WorkloadEntry`, append(trust, "--address", at[1], "--token-file", reader)...)
	watch(`stderr no rule in allow of listen\.xds fits: .*no client certificate`, append(trust, "--address", at[1], "--token-file", wrong)...)
	watch(`stderr no rule in allow of listen\.xds fits: .*no client certificate`, append(trust, "--address", at[1])...)
	watch(`stderr this port speaks TLS`, "--address", at[1])
	watch(`upsert\s+WorkloadEntry`, "--address", "unix:"+socket)

	guarded := []string{"--new", at[1], "--new-ca-file", server.Cert, "--new-server-name", "bridge.example.org"}
	diff := append([]string{"diff", "--old", "unix:" + socket, "--settle", "200ms", "--timeout", "1m"}, guarded...)
	for _, tt := range []struct {
		code int
		want string
		args []string
	}{
		{exitOK, `100 % equal`, slices.Concat(diff, []string{"--new-cert-file", tool.Cert, "--new-key-file", tool.Key})},
		{exitUsage, `--new-cert-file and --new-key-file go together`, slices.Concat(diff, []string{"--new-cert-file", tool.Cert})},
		{exitFailed, `--new-token-file: .*no such file`, slices.Concat(diff, []string{"--new-token-file", dir + "/none"})},
		{exitFailed, `--new-ca-file: .*no such file`, slices.Concat(diff, []string{"--new-ca-file", dir + "/none"})},
	} {
		d := start(t, tt.args...)
		code := d.wait()
		if text := strings.Join(append(d.stdout.seen, d.stderr.seen...), "\n"); code != tt.code || !regexp.MustCompile(tt.want).MatchString(text) {
			t.Errorf("%v ended with %d and wrote %s; want %d and %s", tt.args, code, text, tt.code, tt.want)
		}
	}

	call := func(code int, want string, args ...string) {
		t.Helper()
		c := start(t, args...)
		got := c.wait()
		text := strings.Join(append(c.stdout.seen, c.stderr.seen...), "\n")
		if got != code || !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("%v ended with %d and wrote %s; want %d and %s", args, got, text, code, want)
		}
		for _, secret := range []string{"read-me-1", "run-me-2", "guess-3"} {
			if strings.Contains(text, secret) {
				t.Errorf("%v wrote a token: %s", args, text)
			}
		}
	}
	accept := append([]string{"accept", "load", "--address", at[2]}, trust...)
	call(exitFailed, "no removal is paused", append(accept, "--token-file", operator)...)
	p.find(p.stderr, `msg=audit who="token [0-9a-f]{8}" from=127\.0\.0\.1:\d+ action="POST /api/v1/registries/load/removals/allow" result=failed .*role=operate status=409 why=.*no removal is paused`)
	call(exitFailed, "needs role: operate", append(accept, "--token-file", reader)...)
	call(exitFailed, "401 Unauthorized", append(accept, "--token-file", wrong)...)
	call(exitFailed, "--token-file: .*no such file", append(accept, "--token-file", dir+"/none")...)
	call(exitFailed, "HTTP request to an HTTPS server|400 Bad Request", "accept", "load", "--address", at[2])
	call(exitOK, "nothing would change", append([]string{"validate", "--config", configured, "--against", at[2], "--token-file", operator}, trust...)...)

	// What changes is taken over without a new port.
	config("{peer: {token_file: " + reader + "}, role: operate}")
	p.find(p.stderr, `msg="configuration reloaded" .*listeners_changed="\[listen.admin 127.0.0.1:0\]"`)
	call(exitFailed, "no removal is paused", append(accept, "--token-file", reader)...)
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("the bridge ended with %d", code)
	}
	for _, line := range p.stderr.seen {
		if strings.Contains(line, "guess-3") || strings.Contains(line, "read-me-1") {
			t.Errorf("the log has a token: %s", line)
		}
	}
	if _, err := os.Stat(socket); err == nil {
		t.Error("the socket is still there after the end")
	}
}
