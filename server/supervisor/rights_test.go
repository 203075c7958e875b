package supervisor_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"aead.dev/minisign"
	landlock "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// captive is an adapter that tries what it may and what it may not, whenever
// its file changes, and lists how that went.
type captive struct{ config captiveConfig }

type captiveConfig struct {
	TokenFile string   `json:"token_file"`
	Secret    string   `json:"secret"`  // a file that it has no use for
	Server    string   `json:"server"`  // its registry
	Other     string   `json:"other"`   // an address that it has no use for
	Socket    string   `json:"socket"`  // of another program
	Program   []string `json:"program"` // another program
}

func newCaptive(c captiveConfig, _ plugin.Env) (plugin.Adapter, error) { return &captive{c}, nil }

func (c captiveConfig) access() plugin.Access {
	return plugin.Access{Ports: plugin.URLPorts([]string{"http://" + c.Server})}
}

func (a *captive) Run(ctx context.Context, catalog plugin.Catalog) error {
	catalog.Set(registry.Service{Key: registry.Key{Name: "web"}}, []registry.Instance{{ID: "1", Address: "10.0.0.1", Ports: []registry.Port{{Number: 80}}}})
	catalog.Synced()
	dial := func(network, address string) error {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err == nil {
			err = conn.Close()
		}
		return err
	}
	attempts := map[string]func() error{
		"read": func() error { _, err := os.ReadFile(a.config.Secret); return err },
		"write": func() error {
			return os.WriteFile(filepath.Join(filepath.Dir(a.config.TokenFile), "planted"), nil, 0o600)
		},
		"server": func() error { return dial("tcp", a.config.Server) },
		"other":  func() error { return dial("tcp", a.config.Other) },
		"socket": func() error { return dial("unix", a.config.Socket) },
		"listen": func() error {
			l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
			if err == nil {
				err = l.Close()
			}
			return err
		},
		"program": func() error { return exec.CommandContext(ctx, a.config.Program[0], a.config.Program[1:]...).Run() },
		"signal":  func() error { return syscall.Kill(os.Getppid(), 0) },
		"raw": func() error { // for which a bridge of root has the right
			fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_ICMP)
			if err == nil {
				err = syscall.Close(fd)
			}
			return err
		},
		"foreign": func() error { // the same, by the number of another architecture
			fd, errno := foreign(359, syscall.AF_INET, syscall.SOCK_RAW, syscall.IPPROTO_ICMP)
			if errno != 0 {
				return errno
			}
			return syscall.Close(int(fd))
		},
		"netlink": func() error { // as which root changes packet filters
			fd, err := syscall.Socket(16, syscall.SOCK_RAW, 12) // AF_NETLINK, NETLINK_NETFILTER
			if err == nil {
				err = syscall.Close(fd)
			}
			return err
		},
		"resolve": func() error { _, err := net.DefaultResolver.LookupHost(ctx, "localhost"); return err },
	}
	names := ""
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		names += " " + name
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for last := ""; ; {
		if token, err := os.ReadFile(a.config.TokenFile); err == nil && string(token) != last {
			last = string(token)
			for name, try := range attempts {
				err := try()
				catalog.Problem(name, fmt.Sprintf("%s: %v", token, errors.Is(err, os.ErrPermission)))
				if err != nil && !errors.Is(err, os.ErrPermission) {
					catalog.Problem(name, fmt.Sprintf("%s: %v", token, err))
				}
			}
			catalog.Problem("environment", string(token)+":"+names)
			catalog.Problem("user", string(token)+": "+strconv.Itoa(os.Getuid()))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// tried waits for what the captive says about a token.
func (s *sink) tried(t *testing.T, token string) map[string]string {
	t.Helper()
	out := map[string]string{}
	s.until(t, "what was tried with "+token, func(s *sink) bool {
		for _, m := range s.messages {
			for _, p := range m.GetProblems() {
				if rest, ok := strings.CutPrefix(p.GetReason(), token+":"); ok {
					out[p.GetId()] = strings.TrimSpace(rest)
				}
			}
		}
		return len(out) == 14
	})
	return out
}

func listenTCP(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.Addr().String()
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// copyOfSelf returns this binary in a directory that any user may read.
func copyOfSelf(t *testing.T, dir string) string {
	t.Helper()
	from, err := os.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	path := filepath.Join(dir, "plugin")
	to, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(to, from)
	if err := errors.Join(err, to.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// A plugin that says what it needs can do nothing else: neither read, write,
// connect, listen, start a program nor signal the bridge. It gets no variable
// that is not named. A file that is replaced by renaming is read; one that is
// somewhere else makes the plugin start again, and nothing is removed.
func TestConfinement(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux confines processes")
	}
	t.Setenv("ISTHMUS_TEST_CANARY", "c4nary")
	t.Setenv("ISTHMUS_TEST_NAMED", "named")
	dir := shortDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	files := filepath.Join(dir, "files")
	for _, d := range []string{files, files + ".next"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	socket, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	c := captiveConfig{
		TokenFile: filepath.Join(files, "token"), Secret: filepath.Join(dir, "secret"), Server: listenTCP(t), Other: listenTCP(t),
		Socket: socket.Addr().String(), Program: []string{"/bin/true"},
	}
	put(t, c.TokenFile, "one")
	put(t, c.Secret, "secret")
	put(t, filepath.Join(files+".next", "token"), "three")

	sp := spec("captive", c)
	sp.EnvNames, sp.OpenFiles, sp.Memory = []string{"ISTHMUS_TEST_NAMED"}, 500, 1<<30
	h, s := newHost(t), newSink()
	s.keep = 1 << 20
	h.Hurry()
	inherited, err := os.Open(c.Secret)
	if err != nil {
		t.Fatal(err)
	}
	defer inherited.Close()
	leaked, err := syscall.Dup(int(inherited.Fd())) // as if the bridge had been started with it
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(leaked)
	sup, _ := start(t, h, sp, s)

	abi, err := landlock.LandlockGetABIVersion()
	if err != nil {
		abi = 0
	}
	check := func(token string) {
		t.Helper()
		got := s.tried(t, token)
		refused := map[string]bool{"read": abi >= 1, "write": abi >= 1, "server": false, "other": abi >= 4, "socket": true, "listen": true, "program": true, "signal": true, "raw": true, "foreign": true, "netlink": true, "resolve": false}
		for name, want := range refused {
			if got[name] != strconv.FormatBool(want) {
				t.Errorf("%s, Landlock %d: %s is refused: %s, want %v", token, abi, name, got[name], want)
			}
		}
		if env := strings.Fields(got["environment"]); slices.Contains(env, "ISTHMUS_TEST_CANARY") || !slices.Contains(env, "ISTHMUS_TEST_NAMED") || !slices.Contains(env, "PATH") {
			t.Errorf("the environment is %s", env)
		}
	}
	check("one")
	st := sup.Status()
	said := strings.Join(st.Confinement, "; ")
	want := []string{"no new privileges", "1 GiB of memory", "500 open files", "starts no program", "listens nowhere"}
	if abi >= 1 {
		want = append(want, "reads only "+files+", what the system has")
	} else {
		want = append(want, "files not confined: this kernel has no Landlock")
	}
	_, port, _ := net.SplitHostPort(c.Server)
	if abi >= 4 {
		want = append(want, "connects by TCP only to 53, "+port)
	}
	for _, w := range want {
		if !strings.Contains(said, w) {
			t.Errorf("the status lacks %q: %s", w, said)
		}
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", st.PID))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", st.PID, e.Name())); err == nil && target == c.Secret {
			t.Errorf("the plugin has inherited %s as %s", target, e.Name())
		}
	}

	put(t, c.TokenFile, "two")
	check("two")
	if pid := sup.Status().PID; pid != st.PID {
		t.Errorf("a renamed file has made a new process, %d after %d", pid, st.PID)
	}

	if err := errors.Join(os.Rename(files, files+".old"), os.Rename(files+".next", files)); err != nil {
		t.Fatal(err)
	}
	check("three")
	if s.count() != 2 {
		t.Errorf("%d resources, want 2", s.count())
	}
	if pid := sup.Status().PID; abi >= 1 && pid == st.PID {
		t.Error("the directory was replaced, and the process is the one before")
	}
	select {
	case err := <-s.down:
		t.Errorf("a renewal is a failure: %v", err)
	default:
	}
}

// A plugin runs as the user of its block if the bridge is root, and keeps its
// rights if the operator wants that.
func TestUser(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root starts processes of other users; TestUserWithoutRoot shows the error")
	}
	dir := shortDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(dir, "token")
	put(t, token, "one")
	sp := spec("captive", captiveConfig{TokenFile: token, Secret: token, Server: listenTCP(t), Other: listenTCP(t), Socket: token, Program: []string{"/bin/true"}})
	sp.Command[0], sp.User, sp.Unconfined = copyOfSelf(t, dir), "65534", true
	h, s := newHost(t), newSink()
	if err := os.Chmod(filepath.Dir(h.Dir()), 0o755); err != nil { // as /tmp is
		t.Fatal(err)
	}
	sup, _ := start(t, h, sp, s)
	got := s.tried(t, "one")
	const want = "65534"
	if got["user"] != want || got["read"] != "false" || got["program"] != "false" {
		t.Errorf("tried: %v, want user %s, and nothing refused", got, want)
	}
	if said := strings.Join(sup.Status().Confinement, "; "); !strings.Contains(said, "user "+want) || !strings.Contains(said, "not confined: plugin.confine is false") {
		t.Errorf("the status says %s", said)
	}
}

// A bridge that cannot start a plugin as the configured user refuses to, and
// says which field is wrong.
func TestUserWithoutRoot(t *testing.T) {
	t.Parallel()
	refused := func(name string, err error) {
		t.Helper()
		e, ok := errors.AsType[*supervisor.ConfigError](err)
		if !ok || e.Violations[0].Field != "plugin.user" || !strings.Contains(e.Violations[0].Reason, name) {
			t.Errorf("user %s: %v", name, err)
		}
	}
	sp := spec("remote", nil)
	sp.User = "no-such-user"
	_, err := supervisor.Describe(t.Context(), newHost(t), sp, slog.New(slog.DiscardHandler))
	refused(sp.User, err)

	cmd := exec.Command(os.Args[0], "-test.run=^TestUserOfBridge$", "-test.v")
	cmd.Env = append(os.Environ(), "ISTHMUS_TEST_USER=0")
	dir := shortDir(t)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 {
		cmd.Path = copyOfSelf(t, dir)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		cmd.Env = append(cmd.Env, "TMPDIR="+dir)
	}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "only root can start a plugin as user") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestUserOfBridge is what TestUserWithoutRoot runs as another user.
func TestUserOfBridge(t *testing.T) {
	sp := spec("remote", nil)
	if sp.User = os.Getenv("ISTHMUS_TEST_USER"); sp.User == "" || os.Getuid() == 0 {
		t.Skip("for TestUserWithoutRoot")
	}
	h := newHost(t)
	_, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler))
	if _, ok := errors.AsType[*supervisor.ConfigError](err); !ok {
		t.Errorf("as root: %v", err)
	}
	t.Log(err)
	sp.User, sp.Command[0] = strconv.Itoa(os.Getuid()), "/proc/self/exe" // the binary's directory is another user's
	if exe, err := os.Executable(); err == nil {
		sp.Command[0] = exe
	}
	if _, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler)); err != nil {
		t.Errorf("as itself: %v", err)
	}
}

// A registry that requires confinement is refused where the kernel has no
// Landlock or no seccomp, and where the adapter does not confine itself; one
// that does not require it is followed, and its status says what is missing.
func TestConfinementRequired(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux confines processes")
	}
	abi, err := landlock.LandlockGetABIVersion()
	if err != nil {
		abi = 0
	}
	dir := shortDir(t)
	token := filepath.Join(dir, "token")
	put(t, token, "one")
	config := captiveConfig{TokenFile: token, Secret: token, Server: listenTCP(t), Other: listenTCP(t), Socket: token, Program: []string{"/bin/true"}}
	h := newHost(t)
	for _, tt := range []struct {
		role string
		want string // in the violation; empty: none
	}{
		{"captive", map[bool]string{true: "this kernel"}[abi < 4]},
		{"captive without landlock_create_ruleset", "files are not confined: this kernel has no Landlock"},
		{"captive without seccomp", "system calls are not confined"},
		{"remote", "the adapter does not say what it needs"},
	} {
		sp := spec(tt.role, config)
		if tt.role == "remote" {
			sp = spec(tt.role, remoteConfig{Socket: filepath.Join(dir, "s")})
		}
		sp.Adapter = ""
		sp.Confinement = supervisor.ConfinementRequired
		violations, _, err := supervisor.Check(t.Context(), h, sp, slog.New(slog.DiscardHandler))
		switch {
		case err != nil:
			t.Errorf("%s: %v", tt.role, err)
		case tt.want == "" && len(violations) > 0, tt.want != "" && (len(violations) != 1 || violations[0].Field != "plugin.confinement" || !strings.Contains(violations[0].Reason, tt.want)):
			t.Errorf("%s: %v, want %q", tt.role, violations, tt.want)
		}
		sp.Confinement = ""
		if violations, _, err := supervisor.Check(t.Context(), h, sp, slog.New(slog.DiscardHandler)); err != nil || len(violations) > 0 {
			t.Errorf("%s, not required: %v, %v", tt.role, violations, err)
		}
	}
}

// A pinned executable is a sealed copy of what was verified: the file may
// change while it runs, or between the check and the start, and a script finds
// what is beside it.
func TestPinnedCopy(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has files in memory")
	}
	dir := shortDir(t)
	binary := copyOfSelf(t, dir)
	script := filepath.Join(dir, "script")
	put(t, script, "#!/bin/sh\nexec \"$(dirname \"$ISTHMUS_PLUGIN_PATH\")/plugin\"\n")
	if err := os.Chmod(script, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{binary, script} {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(content)
		sp := spec("remote", remoteConfig{Socket: filepath.Join(shortDir(t), "s")})
		sp.Command[0], sp.SHA256 = path, hex.EncodeToString(sum[:])
		h := newHost(t)
		if path == script {
			if _, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler)); err != nil {
				t.Error(err)
			}
			continue
		}
		s := newSink()
		sup, _ := start(t, h, sp, s)
		wait(t, "stream", s.begun)
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", sup.Status().PID))
		if err != nil || !strings.HasPrefix(exe, "/memfd:") {
			t.Errorf("the process executes %s: %v", exe, err)
		}
		copied, err := os.Open(fmt.Sprintf("/proc/%d/fd/3", sup.Status().PID))
		if err != nil {
			t.Fatal(err)
		}
		const getSeals, all = 1034, 0xf // fcntl(2), of Linux
		if seals, err := unix.FcntlInt(copied.Fd(), getSeals, 0); err != nil || seals&all != all {
			t.Errorf("the copy has seals %#x: %v", seals, err)
		}
		copied.Close()
	}
}

// An executable without a signature of the configured key is not started.
func TestSignature(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	path := copyOfSelf(t, dir)
	public, private, err := minisign.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, other, err := minisign.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sign := func(key minisign.PrivateKey, content []byte) []byte {
		r := minisign.NewReader(strings.NewReader(string(content)))
		if _, err := io.Copy(io.Discard, r); err != nil {
			t.Fatal(err)
		}
		return r.Sign(key)
	}
	h := newHost(t)
	sp := spec("remote", nil)
	sp.Command[0], sp.PublicKey = path, public.String()
	for _, tt := range []struct {
		name      string
		signature []byte
		good      bool
	}{
		{"none", nil, false},
		{"another key", sign(other, content), false},
		{"another file", sign(private, content[1:]), false},
		{"garbage", []byte("untrusted comment: x\n\x00"), false},
		{"right", sign(private, content), true},
	} {
		if tt.signature != nil {
			put(t, path+supervisor.SignatureSuffix, string(tt.signature))
		}
		_, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler))
		if good := err == nil; good != tt.good || !good && !errors.Is(err, supervisor.ErrSignature) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
