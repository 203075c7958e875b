package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// bridge is a program that serves, with the processes of its plugins and the
// directory of its sockets' directories.
type bridge struct {
	*process
	config, tmp string
	plugins     []int
}

// startBridge serves two registries: one that is synced, and one whose plugin
// hangs before its handshake. The test ends what it may leave behind.
func startBridge(t *testing.T, in surroundings) *bridge {
	t.Helper()
	tmp, err := os.MkdirTemp("/tmp", "it") // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(tmp) })
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "isthmus-adapter-silent"), []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700); err != nil { //nolint:gosec // it is executed
		t.Fatal(err)
	}
	silent := "- {name: quiet, type: silent}\n"
	if runtime.GOOS != "linux" {
		silent = "" // only a plugin that talks to its bridge notices its death
	}
	b := &bridge{config: filepath.Join(dir, "isthmus.yaml"), tmp: tmp}
	if err := os.WriteFile(b.config, []byte(`
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
plugin_dir: `+dir+`
registries:
- {name: load, type: sim, config: {services: 3, changes_per_second: 0}}
`+silent), 0o600); err != nil {
		t.Fatal(err)
	}
	in.env = []string{"TMPDIR=" + tmp}
	b.process = startWith(t, in, "serve", "--config", b.config)
	at := b.find(b.stderr, `msg=serving xds=\S+ admin=(\S+)`)
	testwait.Eventually(t, patience, "the plugins", func() (string, bool) {
		_, body := get(t, "http://"+at[1]+"/api/v1/registries")
		var all struct{ Items []struct{ PID int } }
		if err := json.Unmarshal([]byte(body), &all); err != nil {
			t.Fatal(err)
		}
		b.plugins = nil
		for _, r := range all.Items {
			b.plugins = append(b.plugins, r.PID)
		}
		return body, len(all.Items) > 0 && !slices.Contains(b.plugins, 0)
	})
	t.Cleanup(func() {
		for _, pid := range b.plugins {
			if testwait.Running(pid) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	if left := b.left(); left != 1 {
		t.Fatalf("%d directories of sockets while it serves", left)
	}
	return b
}

// left returns how many directories of sockets there are.
func (b *bridge) left() int {
	b.t.Helper()
	found, err := filepath.Glob(filepath.Join(b.tmp, "isthmus-*"))
	if err != nil {
		b.t.Fatal(err)
	}
	return len(found)
}

// However the bridge ends, its plugins end too, and what it left in the
// directory for temporary files goes: at an end in good order at once, at any
// other with the next start.
func TestEnds(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		signal syscall.Signal
		code   int  // -1: it is the signal that ended it
		left   bool // whether the directory is there until the next start
	}{
		{signal: syscall.SIGINT, code: exitOK},
		{signal: syscall.SIGTERM, code: exitOK},
		{signal: syscall.SIGQUIT, code: 2, left: true}, // Go prints all stacks, as at a panic
		{signal: syscall.SIGSEGV, code: 2, left: true}, // a panic of the runtime
		{signal: syscall.SIGABRT, code: 2, left: true},
		{signal: syscall.SIGKILL, code: -1, left: true},
	} {
		t.Run(tt.signal.String(), func(t *testing.T) {
			t.Parallel()
			b := startBridge(t, surroundings{})
			b.signal(tt.signal)
			if code := b.wait(); code != tt.code {
				t.Errorf("exit code %d, want %d; it wrote:\n%s", code, tt.code, strings.Join(b.stderr.seen[:min(30, len(b.stderr.seen))], "\n"))
			}
			testwait.Gone(t, patience, b.plugins...)
			if left := b.left(); (left > 0) != tt.left {
				t.Errorf("%d directories are left", left)
			}
			next := startWith(t, surroundings{env: []string{"TMPDIR=" + b.tmp}}, "demo", "--xds", "127.0.0.1:0", "--admin", "127.0.0.1:0")
			next.find(next.stdout, `^  admin `)
			next.signal(syscall.SIGHUP) // the demo ends with its terminal
			if code := next.wait(); code != exitOK {
				t.Errorf("exit code of demo after SIGHUP = %d; it wrote:\n%s", code, strings.Join(next.stderr.seen, "\n"))
			}
			if left := b.left(); left > 0 {
				t.Errorf("%d directories are left after the next start", left)
			}
		})
	}
}

// A bridge whose log nobody can read any more ends in good order when it
// notices.
func TestBrokenPipe(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	b := startBridge(t, surroundings{out: write, read: read})
	if err := read.Close(); err != nil {
		t.Fatal(err)
	}
	b.signal(syscall.SIGHUP) // a reason to write
	b.awaitEnd(exitFailed)
}

// awaitEnd waits for the end of the bridge, whose output nobody reads.
func (b *bridge) awaitEnd(code int) {
	b.t.Helper()
	ended := make(chan struct{})
	go func() { // ends with the process
		defer close(ended)
		_ = b.cmd.Wait() // the exit code says it
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
		b.t.Fatalf("it did not end within %s", patience)
	}
	if got := b.cmd.ProcessState; got.ExitCode() != code {
		b.t.Errorf("it ended with %v, want exit status %d", got, code)
	}
	testwait.Gone(b.t, patience, b.plugins...)
	if left := b.left(); left > 0 {
		b.t.Errorf("%d directories are left", left)
	}
}
