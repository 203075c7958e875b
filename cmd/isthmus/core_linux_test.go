package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// Neither the bridge nor a plugin leaves a core, even if the limit on cores and
// Go's runtime let them: it would hold secrets.
func TestNoCore(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	config := filepath.Join(dir, "isthmus.yaml")
	replaceFile(t, config, "listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\nstate: {dir: \"\"}\nregistries: [{name: r, type: sim, plugin: {env: [GOTRACEBACK]}}]\n")
	p := &process{t: t, cmd: exec.CommandContext(t.Context(), "/bin/sh", "-c", `cd "$1"; ulimit -c unlimited; exec isthmus serve --config "$2"`, "sh", dir, config)}
	p.cmd.Env = append(os.Environ(), "GOTRACEBACK=crash")
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.stderr = readLines(stderr)
	pid, err := strconv.Atoi(p.find(p.stderr, `msg="plugin started".* pid=(\d+)`)[1])
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGABRT); err != nil {
		t.Fatal(err)
	}
	if how := p.find(p.stderr, `the plugin's process ended: (signal: aborted( \(core dumped\))?)`); how[2] != "" {
		t.Errorf("a plugin that aborts: %s", how[1])
	}
	if err := p.cmd.Process.Signal(syscall.SIGABRT); err != nil {
		t.Fatal(err)
	}
	for range p.stderr.lines {
	}
	_ = p.cmd.Wait()
	if status := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.CoreDump() {
		t.Errorf("a bridge that aborts: %v", p.cmd.ProcessState)
	}
}
