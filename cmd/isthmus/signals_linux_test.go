package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// newTerminal returns a pseudo terminal: the end of a person, and that of a
// process.
func newTerminal(t *testing.T) (master, terminal *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	// Fd made it blocking; a reader must not keep it open.
	if err := unix.SetNonblock(int(master.Fd()), true); err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return master, terminal
}

// A bridge whose terminal is closed ends in good order.
func TestClosedTerminal(t *testing.T) {
	t.Parallel()
	master, terminal := newTerminal(t)
	b := startBridge(t, surroundings{out: terminal, read: master, terminal: true})
	if err := master.Close(); err != nil {
		t.Fatal(err)
	}
	b.awaitEnd(exitFailed)
}

// On a terminal watch and doctor use colours, unless NO_COLOR is set or the
// terminal is a dumb one; elsewhere they do not.
func TestColor(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, []byte(`
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
registries: [{name: load, type: sim, config: {services: 3, changes_per_second: 0}}, {name: dead, type: consul, config: {address: "http://127.0.0.1:1"}, required: false}]
`), 0o600); err != nil {
		t.Fatal(err)
	}
	server := start(t, "serve", "--config", file)
	at := server.find(server.stderr, `msg=serving xds=(\S+) `)
	server.find(server.stderr, `msg="listing complete" registry=load`)
	const red, green, plain = "\x1b\\[31m", "\x1b\\[32m", "\x1b\\[0m"
	for _, tt := range []struct {
		name    string
		file    bool
		env     []string
		colored bool
	}{
		{name: "terminal", env: []string{"TERM=xterm", "NO_COLOR="}, colored: true},
		{name: "NO_COLOR", env: []string{"TERM=xterm", "NO_COLOR=1"}},
		{name: "dumb", env: []string{"TERM=dumb", "NO_COLOR="}},
		{name: "pipe", file: true, env: []string{"TERM=xterm", "NO_COLOR="}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			run := func(args ...string) (*process, *lineReader) {
				if tt.file {
					p := startWith(t, surroundings{env: tt.env}, args...)
					return p, p.stdout
				}
				master, terminal := newTerminal(t)
				t.Cleanup(func() { _ = master.Close() })
				p := startWith(t, surroundings{env: tt.env, out: terminal, read: master, terminal: true}, args...)
				return p, p.stderr
			}
			paint := func(color, text string) string {
				if !tt.colored {
					return text
				}
				return color + text + plain
			}
			w, lines := run("watch", "--address", at[1])
			w.find(lines, "^[0-9:.]+  push [0-9]+ +"+paint(green, "upsert")+"  ServiceEntry")
			w.signal(syscall.SIGINT)
			if code := w.wait(); code != exitOK {
				t.Errorf("exit code of watch %d", code)
			}
			d, lines := run("doctor", "--config", file)
			d.find(lines, "^"+paint(green, "ok")+" +registry load")
			d.find(lines, "^"+paint(red, "error")+" +registry dead")
			if code := d.wait(); code != exitFailed {
				t.Errorf("exit code of doctor %d", code)
			}
		})
	}
	server.signal(syscall.SIGTERM)
	if code := server.wait(); code != exitOK {
		t.Errorf("exit code of serve %d", code)
	}
}

// A SIGHUP that comes before the configuration was read is a reload, as any
// later one.
func TestHangupFirst(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := syscall.Mkfifo(file, 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	pipe, err := os.OpenFile(file, os.O_WRONLY, 0) // until the program reads
	if err != nil {
		t.Fatal(err)
	}
	p.signal(syscall.SIGHUP)
	const text = "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nregistries: [{name: load, type: sim, config: {services: 1}}]\n"
	replaceFile(t, file, text)
	if _, err := pipe.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if err := pipe.Close(); err != nil {
		t.Fatal(err)
	}
	p.find(p.stderr, `msg="configuration reloaded" trigger=SIGHUP`)
	p.signal(syscall.SIGTERM)
	if code := p.wait(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}
