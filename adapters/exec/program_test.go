package exec

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	osexec "os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// patience is how long a test waits for what will happen.
const patience = time.Minute

// logs is the log of an adapter.
type logs = testwait.Buffer

// follow runs the adapter until the test ends, or stop is called.
func follow(t *testing.T, c Config) (catalog *plugintest.Catalog, log *logs, stop func()) {
	t.Helper()
	log = &logs{}
	a, err := New(c, plugin.Env{Registry: "test", Log: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	catalog = plugintest.NewCatalog()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	// Ends with stop.
	go func() { done <- a.Run(ctx, catalog) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := testwait.Receive(t, patience, "the end of the adapter", done); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return catalog, log, stop
}

// script writes a program and returns its path.
func script(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(file, []byte(text), 0o755); err != nil { //nolint:gosec // it is a program
		t.Fatal(err)
	}
	return file
}

// pipe is a named pipe that a program (cat) prints the lines of.
type pipe struct {
	t    *testing.T
	path string
	file *os.File
}

func newPipe(t *testing.T) *pipe {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0) // an open writer: cat goes on
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return &pipe{t, path, f}
}

func (p *pipe) say(lines ...string) {
	p.t.Helper()
	if _, err := io.WriteString(p.file, strings.Join(lines, "\n")+"\n"); err != nil {
		p.t.Fatal(err)
	}
}

// service returns the line of a service with the instances of these IDs.
func service(name string, ids ...string) string {
	instances := []string{}
	for i, id := range ids {
		instances = append(instances, fmt.Sprintf(`{"id": %q, "address": "192.0.2.%d", "port": 8080}`, id, i+1))
	}
	return fmt.Sprintf(`{"service": {"name": %q, "instances": [%s]}}`, name, strings.Join(instances, ", "))
}

// has waits until the services have these instances, "web=a b, api=c".
func has(t *testing.T, c *plugintest.Catalog, what, want string) {
	t.Helper()
	c.Await(t, patience, what+": "+want, func(h *plugintest.Held) bool {
		n := 0
		for of := range strings.SplitSeq(want, ", ") {
			name, ids, ok := strings.Cut(of, "=")
			if !ok {
				break
			}
			n++
			if h.IDs(name) != ids {
				return false
			}
		}
		return len(h.Services) == n
	})
}

func degraded(t *testing.T, c *plugintest.Catalog, what, text string) {
	t.Helper()
	c.Await(t, patience, what, func(h *plugintest.Held) bool {
		return text == "" && h.Degraded == "" || text != "" && strings.Contains(h.Degraded, text)
	})
}

// pid waits for a process other than those given, as the detail has it.
func pid(t *testing.T, c *plugintest.Catalog, not ...int) (n int) {
	t.Helper()
	c.Await(t, patience, "another process", func(h *plugintest.Held) bool {
		_, text, ok := strings.Cut(h.Detail, "process ")
		n, _ = strconv.Atoi(text)
		for _, other := range not {
			ok = ok && n != other
		}
		return ok && n > 0
	})
	return n
}

// gone waits until there is no process of this id that is no zombie.
func gone(t *testing.T, pid int) {
	t.Helper()
	testwait.Eventually(t, patience, fmt.Sprintf("end of process %d", pid), func() (string, bool) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return "", runtime.GOOS == "linux" || syscall.Kill(pid, 0) != nil
		}
		return string(b), strings.Contains(string(b), ") Z ")
	})
}

// A program that stays: everything that it can say, in order.
func TestStays(t *testing.T) {
	p := newPipe(t)
	c, _, _ := follow(t, Config{Command: []string{"cat", p.path}})
	p.say(service("web", "a", "b"), service("api", "c"), ``, `{}`)
	has(t, c, "before the end of the listing", "web=a b, api=c")
	c.Look(func(h *plugintest.Held) {
		if h.Synced || h.Degraded != "" {
			t.Errorf("synced %t, degraded %q", h.Synced, h.Degraded)
		}
	})
	p.say(`{"synced": true}`)
	c.AwaitSynced(t, patience)
	p.say(service("web", "a"))
	has(t, c, "an instance goes", "web=a, api=c")
	p.say(`{"remove": {"name": "api"}}`)
	has(t, c, "a service goes", "web=a")
	p.say(`{"services": [{"name": "x", "instances": [{"id": "1"}]}, {"name": "y", "instances": []}]}`)
	has(t, c, "everything at once", "x=1, y=")
	p.say(`{"problem": {"id": "z", "reason": "has no address"}}`, `{"detail": "from a pipe"}`)
	c.Await(t, patience, "problem and detail", func(h *plugintest.Held) bool {
		return h.Problems["z"] == "has no address" && h.Detail == "from a pipe"
	})
	p.say(`{"problem": {"id": "z", "reason": ""}}`)
	c.Await(t, patience, "the end of the problem", func(h *plugintest.Held) bool { return len(h.Problems) == 0 })

	// While the program says that it is cut off, nothing is removed.
	p.say(`{"degraded": "the registry is away"}`)
	degraded(t, c, "cut off", "cat: the registry is away")
	c.ForgetLeast()
	p.say(`{"remove": {"name": "x"}}`, service("y", "2"))
	has(t, c, "what comes meanwhile", "x=1, y=2")
	p.say(`{"degraded": ""}`)
	has(t, c, "afterwards", "y=2")
	degraded(t, c, "afterwards", "")
}

// When the program ends, what is known stays until the next one has listed
// everything.
func TestEnds(t *testing.T) {
	p := newPipe(t)
	c, _, _ := follow(t, Config{Command: []string{"cat", p.path}})
	p.say(service("web", "a", "b"), service("api", "c"), service("old", "d"), `{"synced": true}`)
	c.AwaitSynced(t, patience)
	first := pid(t, c)
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	degraded(t, c, "the end of the program", "cat: signal: killed")
	pid(t, c, first)
	c.ForgetLeast()
	p.say(service("web", "a"), service("api", "c", "e"))
	has(t, c, "a listing that goes on", "web=a b, api=c e, old=d")
	p.say(`{"synced": true}`)
	has(t, c, "what is listed again", "web=a, api=c e")
	degraded(t, c, "what is listed again", "")
}

// A program that is to stay and ends by itself is told what it may want.
func TestEndsByItself(t *testing.T) {
	c, _, _ := follow(t, Config{Command: []string{"echo", service("web", "a")}})
	degraded(t, c, "the end of the program", "echo: it ended, with exit status 0; a program that prints everything and ends needs an interval")
	has(t, c, "what it printed", "web=a")
	c, log, _ := follow(t, Config{Command: []string{"sh", "-c", "echo first >&2; echo no such host >&2; exit 7"}})
	degraded(t, c, "the end of the program", "sh: exit status 7; its last words: no such host")
	testwait.Eventually(t, patience, "the log", func() (string, bool) {
		return log.String(), strings.Contains(log.String(), `level=INFO msg="the program writes" line=first`)
	})
	for command, want := range map[string]string{
		"no-such-program":  `no-such-program: there is no program "no-such-program" in ` + usualPath,
		"/no/such/program": "no such file",
	} {
		c, _, _ := follow(t, Config{Command: []string{command}})
		degraded(t, c, "no program", want)
	}
}

// A program that restarts without anything to say removes nothing, unless that
// is right.
func TestEmptyListing(t *testing.T) {
	p := newPipe(t)
	c, _, _ := follow(t, Config{Command: []string{"cat", p.path}})
	p.say(service("web", "a"), `{"synced": true}`)
	c.AwaitSynced(t, patience)
	p.say(`{"services": []}`)
	degraded(t, c, "an empty listing", "set accept_empty")
	has(t, c, "an empty listing", "web=a")
	p.say(service("api", "b"))
	has(t, c, "one that is not empty any more", "api=b")
	degraded(t, c, "one that is not empty any more", "")

	p = newPipe(t)
	c, _, _ = follow(t, Config{Command: []string{"cat", p.path}, AcceptEmpty: true})
	p.say(service("web", "a"), `{"synced": true}`, `{"services": []}`)
	has(t, c, "an empty listing that is right", "")
}

// A listing with a line that cannot be read removes nothing, until the line is
// mended.
func TestBadLines(t *testing.T) {
	p := newPipe(t)
	c, _, _ := follow(t, Config{Command: []string{"cat", p.path}})
	p.say(service("web", "a"), `{"service": {"name": "api", "instances": [{"id": "1", "wait": 3}]}}`, `{"synced": true}`)
	degraded(t, c, "a bad line", `nothing is removed: service api: line 2: unknown field "wait"`)
	c.Look(func(h *plugintest.Held) {
		if h.Synced || !strings.Contains(h.Problems["service api"], "what was known of it is kept") {
			t.Errorf("synced %t, problems %v", h.Synced, h.Problems)
		}
	})
	p.say(service("api", "1"))
	c.AwaitSynced(t, patience)
	degraded(t, c, "the line mended", "")
	c.Await(t, patience, "no problem", func(h *plugintest.Held) bool { return len(h.Problems) == 0 })

	// Later ones are problems, and the service stays as it was.
	p.say(`{"service": {"name": "api", "instances": [{"id": "1", "health": "ok"}]}}`, `what is this`)
	c.Await(t, patience, "problems", func(h *plugintest.Held) bool {
		return strings.Contains(h.Problems["service api"], `not "ok"`) && strings.HasPrefix(h.Problems["line"], "line 6: it is not a JSON object")
	})
	has(t, c, "bad lines", "web=a, api=1")
	p.say(`{"services": [{"name": "web", "instances": [{"id": "b"}]}, {"name": "api", "instances": 7}]}`)
	has(t, c, "all services, one of them bad", "web=b, api=1")
	p.say(`{"services": [{"name": "web", "instances": [{"id": "b"}]}]}`)
	has(t, c, "all services", "web=b")
	c.Await(t, patience, "no problem", func(h *plugintest.Held) bool { return len(h.Problems) == 0 && h.Degraded == "" })
}

// A program with an interval prints everything each time.
func TestInterval(t *testing.T) {
	file := filepath.Join(t.TempDir(), "state")
	write := func(lines ...string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(strings.Join(lines, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	write(service("web", "a", "b"), service("api", "c"), `{"problem": {"id": "p", "reason": "r"}}`)
	// Within the timeout a run must succeed on any machine.
	c, _, _ := follow(t, Config{Command: []string{"cat", file}, Interval: plugin.Duration(100 * time.Millisecond)})
	has(t, c, "the first run", "web=a b, api=c")
	c.AwaitSynced(t, patience)
	c.Await(t, patience, "its problem", func(h *plugintest.Held) bool {
		return h.Problems["p"] == "r" && h.Detail == "runs cat every 100ms"
	})
	write(service("web", "a"), `{"detail": "second"}`)
	has(t, c, "the next run", "web=a")
	c.Await(t, patience, "no problem", func(h *plugintest.Held) bool { return len(h.Problems) == 0 && h.Detail == "second" })
	c.ForgetLeast()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	degraded(t, c, "a run that fails", "cat: exit status 1; its last words: ")
	write(``)
	degraded(t, c, "a run that prints nothing", "lists no instance at all")
	write(service("api", "c"), `{"degraded": "half of it is missing"}`)
	degraded(t, c, "a run that is not sure", "half of it is missing")
	write(service("api", "c"), `{"service": {"name": "x"}}`)
	degraded(t, c, "a run with a bad line", "service x: line 2: the service has no instances")
	c.Look(func(h *plugintest.Held) {
		if h.Least["web"] != 1 || h.Least["api"] != 1 {
			t.Errorf("removed meanwhile: %v", h.Least)
		}
	})
	write(service("api", "c"))
	has(t, c, "a good run", "api=c")
	degraded(t, c, "a good run", "")
}

// A run that does not end in time fails, and is ended.
func TestTimeout(t *testing.T) {
	c, _, _ := follow(t, Config{Command: []string{"sh", "-c", "echo $$ >&2; exec sleep 1000"}, Interval: plugin.Duration(time.Hour), Timeout: plugin.Duration(200 * time.Millisecond)})
	degraded(t, c, "a run without end", "sh: it did not end within 200ms (timeout)")
}

// A program that hangs is ended and started again.
func TestSilence(t *testing.T) {
	c, _, _ := follow(t, Config{Command: []string{"sh", "-c", "echo '{}'; exec sleep 1000"}, Silence: plugin.Duration(time.Second)})
	first := pid(t, c)
	degraded(t, c, "a program that hangs", "sh: it printed nothing for 1s (silence) and was ended")
	gone(t, first)
	pid(t, c, first)
}

// The program has the environment and the directory that are configured, and
// nothing else.
func TestEnvironment(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("what a process has is read from Linux's /proc")
	}
	t.Setenv("ISTHMUS_TEST_SECRET", "not for programs")
	p, dir := newPipe(t), t.TempDir()
	c, _, _ := follow(t, Config{Command: []string{"cat", p.path}, Dir: dir, Env: map[string]plugin.Secret{"B": "2", "A": "1"}})
	n := pid(t, c)
	// A process has its environment a moment after the exec that starts it.
	testwait.Eventually(t, 10*time.Second, "the environment", func() (string, bool) {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", n))
		return fmt.Sprintf("%q, %v", env, err), string(env) == "A=1\x00B=2\x00"
	})
	if wd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", n)); err != nil || wd != dir {
		t.Errorf("directory %q, %v", wd, err)
	}
	// A name is looked up in the configured PATH.
	program := script(t, "#!/bin/sh\necho '"+service("web", "a")+"'\nexec sleep 1000\n")
	c, _, _ = follow(t, Config{Command: []string{"program"}, Env: map[string]plugin.Secret{"PATH": plugin.Secret(filepath.Dir(program) + ":/usr/bin:/bin")}})
	has(t, c, "a program in PATH", "web=a")
}

// What the program started ends with the adapter, also if it does not care for
// signals.
func TestProcessGroup(t *testing.T) {
	c, log, stop := follow(t, Config{Command: []string{"sh", "-c", `trap "" TERM; sleep 1000 & echo "{\"detail\": \"process $!\"}"; wait; wait`}})
	var child int
	c.Await(t, patience, "the child", func(h *plugintest.Held) bool {
		rest, ok := strings.CutPrefix(h.Detail, "process ")
		child, _ = strconv.Atoi(rest)
		return ok
	})
	stop()
	gone(t, child)
	if !strings.Contains(log.String(), "the program does not end; it is killed") {
		t.Errorf("log:\n%s", log)
	}
}

// A program that closes its output and lives on is ended, and so is what it
// leaves behind.
func TestOutputEnds(t *testing.T) {
	c, _, _ := follow(t, Config{Command: []string{"sh", "-c", `sleep 1000 >&- & echo $! >&2; exec >&-; wait`}})
	degraded(t, c, "the end of the output", "sh: signal: terminated; its last words: ")
	c.Look(func(h *plugintest.Held) {
		_, child, _ := strings.Cut(h.Degraded, "words: ")
		if n, err := strconv.Atoi(child); err != nil || n == 0 {
			t.Errorf("no child in %q", h.Degraded)
		} else {
			gone(t, n)
		}
	})
}

// If the adapter is killed, the program ends too.
func TestAdapterKilled(t *testing.T) {
	p := newPipe(t)
	pids := filepath.Join(t.TempDir(), "pids")
	config, err := json.Marshal(Config{Command: []string{"sh", "-c", `echo $$ > "$0.new"; mv "$0.new" "$0"; exec cat "$1"`, pids, p.path}})
	if err != nil {
		t.Fatal(err)
	}
	cmd := osexec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), aloneKey+"="+string(config))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var n int
	testwait.Eventually(t, patience, "the program", func() (string, bool) {
		b, _ := os.ReadFile(pids)
		n, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		return string(b), n > 0
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	gone(t, n)
}

// Ten thousand services of ten instances are listed, by a real program.
func TestMany(t *testing.T) {
	program := script(t, `#!/usr/bin/env python3
import json, sys
for s in range(10000):
    instances = [{"id": str(i), "address": f"10.{s // 250}.{s % 250}.{i + 1}", "port": 8080} for i in range(10)]
    print(json.dumps({"service": {"name": f"svc-{s}", "instances": instances}}))
print('{"synced": true}', flush=True)
sys.stdin.read()
`)
	c, _, _ := follow(t, Config{Command: []string{program}, Env: map[string]plugin.Secret{"PATH": plugin.Secret(os.Getenv("PATH"))}})
	c.AwaitSynced(t, 2*patience)
	c.Look(func(h *plugintest.Held) {
		if len(h.Services) != 10_000 || len(h.Instances["svc-9999"]) != 10 || h.Sets != 10_000 {
			t.Errorf("%d services, %d sets", len(h.Services), h.Sets)
		}
	})
}
