package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// The level of the log changes while the bridge runs, and healthcheck says what
// /healthz and /readyz say.
func TestLogLevel(t *testing.T) {
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, []byte(`
listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}
registries: [{name: load, type: sim, config: {services: 3}}]
`), 0o600); err != nil {
		t.Fatal(err)
	}
	server := start(t, "serve", "--config", file)
	at := server.find(server.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	xds, admin := at[1], at[2]
	server.find(server.stderr, `msg="listing complete" registry=load`)
	run := func(want int, out string, args ...string) {
		t.Helper()
		c := start(t, append(args, "--address", admin)...)
		if code := c.wait(); code != want {
			t.Errorf("%q ended with %d, want %d: %q", args, code, want, c.stderr.seen)
		}
		if got := strings.TrimSpace(strings.Join(c.stdout.seen, "\n")); got != out {
			t.Errorf("%q printed %q, want %q", args, got, out)
		}
	}
	run(exitOK, "ok", "healthcheck")
	run(exitOK, "ready", "healthcheck", "--ready")
	run(exitOK, "log level debug, before: info", "loglevel", "debug")
	server.find(server.stderr, `level=INFO msg="log level changed" level=debug was=info`)
	sink := start(t, "watch", "--address", xds)
	server.find(server.stderr, `level=DEBUG msg=subscribed`)
	sink.signal(syscall.SIGTERM)
	sink.wait()
	run(exitOK, "log level error, before: debug", "loglevel", "error")
	server.find(server.stderr, `level=INFO msg="log level changed" level=error was=debug`)
	run(exitUsage, "", "loglevel", "loud")
	server.signal(syscall.SIGTERM)
	server.wait()
	run(exitFailed, "", "healthcheck")
}
