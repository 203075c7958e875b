// Package testdocker runs a Docker engine for tests.
//
// The engine is Debian's docker.io, unpacked and not installed (seconds), with
// Docker Compose from the module pinned in tools/compose (90 seconds). Start
// runs the engine as root in a network of its own; it answers in some seconds.
package testdocker

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

var (
	// Tool is Debian's Docker engine, with its client and a busybox.
	Tool = testenv.DebianTool("docker", "dockerd", "/usr/sbin/dockerd")
	// ComposeTool is Docker Compose.
	ComposeTool = testenv.GoTool("compose", "docker-compose", "github.com/docker/compose/v5", "github.com/docker/compose/v5/cmd")
	// HTTPEchoTool is a server that answers with a text.
	HTTPEchoTool = testenv.GoTool("http-echo", "http-echo", "github.com/hashicorp/http-echo", "github.com/hashicorp/http-echo")
)

// Engine is a running Docker engine with a network, mounts and process ids of
// its own: what it publishes at 127.0.0.1 is there for [Docker.Command] only,
// and all of it ends with it. Its images stay in the cache.
type Engine struct {
	*testenv.Process
	env    []string
	client string
}

// Start starts an engine and waits until it answers. It needs root. One
// runs at a time on a machine: others wait for it.
func Start(t testing.TB) *Engine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("docker: the engine needs root")
	}
	engine, compose := Tool.Binary(t), ComposeTool.Binary(t)
	cache, err := testenv.CacheDir()
	if err != nil {
		t.Fatal(err)
	}
	d := &Engine{client: filepath.Join(filepath.Dir(engine), "root", "usr", "bin", "docker")}
	data := filepath.Join(cache, filepath.Base(filepath.Dir(engine))+"-data")
	// A socket's path has to be short, and a plugin is looked for in the
	// client's folder.
	run, err := os.MkdirTemp("", "isthmus-docker-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(run) }) // the engine's mounts end with it
	for _, dir := range []string{data, filepath.Join(run, "cli-plugins")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(compose, filepath.Join(run, "cli-plugins", "docker-compose")); err != nil {
		t.Fatal(err)
	}
	unlock, err := testenv.LockFile(t.Context(), data+".lock", func() { t.Log("docker: another test has the engine, waiting") })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(unlock)
	socket := "unix://" + filepath.Join(run, "docker.sock")
	d.env = append(os.Environ(), "DOCKER_HOST="+socket, "DOCKER_CONFIG="+run, "DOCKER_BUILDKIT=0", "PATH="+filepath.Dir(d.client)+":"+os.Getenv("PATH"))
	d.Process = testenv.NewProcess(t, "dockerd")
	d.Process.StartReady(t, func() {
		d.Process.Start(t, nil, "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", `ip link set lo up && exec "$@"`, "sh",
			engine, "--log-level", "warn", "--host", socket, "--data-root", data, "--exec-root", filepath.Join(run, "exec"), "--pidfile", filepath.Join(run, "pid"))
	}, func() (string, bool) {
		out, err := d.Command(t.Context(), "docker", "info").CombinedOutput()
		return fmt.Sprintf("docker info: %v: %s", err, out), err == nil
	})
	// Otherwise it would not save what it has in its cache.
	t.Cleanup(func() { _ = d.Process.Terminate() })
	return d
}

// Command is a command in the engine's network, with docker for its client and
// docker compose.
func (d *Engine) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	pid := strconv.Itoa(d.Process.PID())
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=/proc/" + pid + "/ns/net", "--", name}, args...)...) //nolint:gosec // of a test
	cmd.Env = d.env
	return cmd
}

// Run runs a command in the engine's network and returns its output. The test
// ends if it does not succeed.
func (d *Engine) Run(t testing.TB, dir, name string, args ...string) string {
	t.Helper()
	cmd := d.Command(t.Context(), name, args...)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, t.Output()), t.Output()
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %s: %v", name, strings.Join(args, " "), err)
	}
	return out.String()
}

// Output is Run for a cleanup: it returns what the command says, whether or not
// it succeeds.
func (d *Engine) Output(dir, name string, args ...string) string {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	defer cancel()
	cmd := d.Command(ctx, name, args...)
	cmd.Dir = dir
	out, _ := cmd.CombinedOutput()
	return string(out)
}
