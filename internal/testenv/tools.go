package testenv

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// modulePath identifies the root of the repository.
const modulePath = "github.com/isthmus-mesh/isthmus"

// fetchTime bounds the build of one tool. The slowest takes four minutes
// without cache on two cores.
const fetchTime = 25 * time.Minute

// Tool is a server that tests run, and the means to obtain it.
type Tool struct {
	Name    string // a component of its folder in the cache
	Program string
	// Version reads the pinned version, so that the cache follows the pin.
	Version func(root string) (string, error)
	// Get writes the binary to path, in the folder of its final place.
	Get func(ctx context.Context, root, path string) error
	// Built reports that Go builds it, which takes all processors.
	Built bool
}

// String returns the tool's name.
func (t Tool) String() string { return t.Name }

// Path returns the path of the tool's binary, whether or not it exists.
func (t Tool) Path() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	version, err := t.Version(root)
	if err != nil {
		return "", fmt.Errorf("%s: which version is pinned: %w", t.Name, err)
	}
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "tools", t.Name+"-"+version, t.Program), nil
}

// Compat reports whether the tests run for the wide matrix of servers, as make
// compat has them: those of every version run against the versions that make
// ci leaves out, and only those.
func Compat() bool { return os.Getenv("ISTHMUS_COMPAT") != "" }

// Main reports whether only the main paths are tested, as make test has them,
// against one version of each server: see [Tool.Main]. What needs another one
// is skipped, and runs in make ci.
func Main() bool { return os.Getenv("ISTHMUS_MAIN") != "" }

// Main reports whether the tool is one of the main paths.
func (t Tool) Main() bool { return slices.Contains(mainPaths, t.Name) }

// mainPaths names the tools that make test needs.
var mainPaths = []string{
	"consul", "istiod", "pilot-1.8", "pilot-1.8-legacy", "envoy", "nacos", "eureka", "zookeeper", "etcd", "adapter-python",
}

// About is how long it takes to get the tool on two cores with nothing in any
// cache.
func (t Tool) About() time.Duration { return cmp.Or(about[t.Name], time.Minute) }

// about holds the tools that take other than a minute.
var about = map[string]time.Duration{
	"consul": 4 * time.Minute, "istiod": 3 * time.Minute, "pilot-1.8": 3 * time.Minute, "kube-apiserver": 6 * time.Minute,
}

// Cached reports whether the tool is in the cache, how long it took to get it,
// and how many bytes it takes there.
func (t Tool) Cached() (took time.Duration, bytes int64, ok bool) {
	path, err := t.Path()
	if err != nil || !isExecutable(path) {
		return 0, 0, false
	}
	if text, err := os.ReadFile(path + ".took"); err == nil {
		took, _ = time.ParseDuration(string(text)) // of another version
	}
	return took, Size(filepath.Dir(path)), true
}

// Size returns how many bytes the files in a folder have.
func Size(dir string) (bytes int64) {
	_ = filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if info, err := d.Info(); err == nil {
				bytes += info.Size()
			}
		}
		return nil
	})
	return bytes
}

// Fetch returns the path of the tool's binary. If it is not in the cache, Fetch
// obtains it, which takes minutes and is reported to progress. Concurrent
// processes wait for the first.
func (t Tool) Fetch(ctx context.Context, progress io.Writer) (string, error) {
	path, err := t.Path()
	if err != nil {
		return "", err
	}
	if isExecutable(path) {
		return path, nil
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTime)
	defer cancel()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", fmt.Errorf("%s: make its place in the cache: %w", t.Name, err)
	}
	unlock, err := LockFile(ctx, path+".lock", func() {
		fmt.Fprintf(progress, "%s: another process is getting it, waiting\n", t.Name)
	})
	if err != nil {
		return "", fmt.Errorf("%s: wait for another process that gets it: %w", t.Name, err)
	}
	defer unlock()
	if isExecutable(path) { // obtained by the process that held the lock
		return path, nil
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	// A new folder on the same file system, so that the binary appears
	// atomically.
	tmp, err := os.MkdirTemp(filepath.Dir(path), "new-*")
	if err != nil {
		return "", fmt.Errorf("%s: make its place in the cache: %w", t.Name, err)
	}
	defer os.RemoveAll(tmp)
	fmt.Fprintf(progress, "%s: not in the cache, getting it (about %v)\n", t.Name, t.About())
	begin := time.Now()
	if err := t.Get(ctx, root, filepath.Join(tmp, t.Program)); err != nil {
		return "", fmt.Errorf("could not get the test server %s: %w", t.Name, err)
	}
	if err := os.Rename(filepath.Join(tmp, t.Program), path); err != nil {
		return "", fmt.Errorf("%s: put it into the cache: %w", t.Name, err)
	}
	took := time.Since(begin).Round(time.Second)
	if err := os.WriteFile(path+".took", []byte(took.String()), 0o600); err != nil {
		return "", fmt.Errorf("%s: note how long it took: %w", t.Name, err)
	}
	fmt.Fprintf(progress, "%s: ready after %v at %s\n", t.Name, took, path)
	return path, nil
}

// Binary returns the path of the tool's binary, and obtains it if it is not in
// the cache. A test of the main paths only is skipped if the tool is not of
// them.
func (t Tool) Binary(tb testing.TB) string {
	tb.Helper()
	if Main() && !t.Main() {
		tb.Skipf("needs %s; runs in make ci", t.Name)
	}
	path, err := t.Fetch(tb.Context(), tb.Output())
	if err != nil {
		tb.Fatalf("%v\n(make tools gets all test servers, and shows its progress)", err)
	}
	return path
}

// Wide skips a test of the main paths only: it takes minutes and shows what
// another one on a main path shows in short, or what rarely changes.
func Wide(tb testing.TB) {
	tb.Helper()
	if Main() {
		tb.Skip("takes minutes; runs in make ci")
	}
}

// SkipIfShort skips a test that needs real servers if -short is given, except
// on CI (CI=true), where nothing is skipped.
func SkipIfShort(t testing.TB) {
	t.Helper()
	if testing.Short() && os.Getenv("CI") != "true" {
		t.Skip("runs real servers; -short is given")
	}
}

// Root returns the root folder of the repository, searching upwards from the
// working directory.
func Root() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the repository: %w", err)
	}
	for dir := wd; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module "+modulePath+"\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("find the repository: no go.mod of %s above %s", modulePath, wd)
		}
	}
}

// ToolsDir returns the folder in which tools are kept.
func ToolsDir() string {
	cache, err := CacheDir()
	if err != nil {
		return err.Error()
	}
	return filepath.Join(cache, "tools")
}

// CacheDir returns the folder that is kept from one run of the tests to the
// next.
func CacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the user's cache directory (set HOME or XDG_CACHE_HOME): %w", err)
	}
	return filepath.Join(dir, "isthmus"), nil
}

// GoTool is a tool that is pinned in tools/FOLDER/go.mod and built there, with
// these flags. Its version is that of module.
func GoTool(folder, binary, module, pkg string, flags ...string) Tool {
	return Tool{
		Name:    folder,
		Program: binary,
		Version: func(root string) (string, error) {
			return PinnedVersion(filepath.Join(root, "tools", folder, "go.mod"), module)
		},
		Get: func(ctx context.Context, root, path string) error {
			return GoBuild(ctx, filepath.Join(root, "tools", folder), pkg, path, slices.Concat(RarelyRun, flags)...)
		},
		Built: true,
	}
}

// OwnTool is a program of this repository in a module of its own, in a folder.
// Its version is that of its sources.
func OwnTool(name, binary, pkg string, folder ...string) Tool {
	in := func(root string) string { return filepath.Join(append([]string{root}, folder...)...) }
	return Tool{
		Name: name, Program: binary,
		Version: func(root string) (string, error) { return Digest(in(root)) },
		Get: func(ctx context.Context, root, path string) error {
			return GoBuild(ctx, in(root), pkg, path)
		},
		Built: true,
	}
}

// RarelyRun is Go's flags not to optimize what servers are full of and run
// little of in tests: generated types and clients, those of clouds, and some of
// istiod's that take the compiler half a minute each.
var RarelyRun = unoptimized(
	"k8s.io/...", "sigs.k8s.io/...", "istio.io/client-go/...",
	"istio.io/istio/pilot/pkg/serviceregistry/ambient", "istio.io/istio/pilot/pkg/config/kube/...",
	"github.com/envoyproxy/...", "github.com/aws/...", "github.com/Azure/...", "github.com/vmware/...", "github.com/softlayer/...", "github.com/google/gnostic-models/...",
	"cloud.google.com/...", "google.golang.org/api/...", "google.golang.org/genproto/...", "go.opentelemetry.io/...",
)

func unoptimized(patterns ...string) (flags []string) {
	for _, pattern := range patterns {
		flags = append(flags, "-gcflags="+pattern+"=-N -l -dwarf=false")
	}
	return flags
}

// GoBuild builds a package of the module in a folder, with these flags, and
// writes the program to path. Nobody debugs it: without DWARF it is built
// sooner, in half the space.
func GoBuild(ctx context.Context, folder, pkg, path string, flags ...string) error {
	cmd := exec.CommandContext(ctx, "go", slices.Concat([]string{"build", "-trimpath", "-ldflags=-s -w", "-gcflags=all=-dwarf=false"}, flags, []string{"-o", path, pkg})...)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), goEnv...)
	if err := RunQuiet(cmd); err != nil {
		return fmt.Errorf("build %s in %s (it needs the Go module proxy the first time): %w", pkg, folder, err)
	}
	return nil
}

// goEnv is added to the environment of a go command in a folder of tools. What
// it downloads can be removed.
var goEnv = []string{"GOWORK=off", "GOFLAGS=-mod=readonly -modcacherw"}

// PinnedVersion returns the version of module that a go.mod requires, without
// "v".
func PinnedVersion(goMod, module string) (string, error) {
	b, err := os.ReadFile(goMod)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "require "))
		if len(fields) >= 2 && fields[0] == module && strings.HasPrefix(fields[1], "v") {
			return fields[1][1:], nil
		}
	}
	return "", fmt.Errorf("%s does not require %s", goMod, module)
}

// ModuleDir downloads a module that the go.mod in a folder requires, and
// returns where its files are.
func ModuleDir(ctx context.Context, folder, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Dir = folder
	cmd.Env = append(os.Environ(), goEnv...)
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("download the module %s (it needs the Go module proxy the first time): %w: %s", module, err, out)
	}
	var downloaded struct{ Dir string }
	err = json.Unmarshal(out, &downloaded)
	return downloaded.Dir, err
}

// RunQuiet runs cmd, and adds the last lines of its output to the error.
func RunQuiet(cmd *exec.Cmd) error {
	OwnGroup(cmd)
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	err := StartCommand(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		lines := strings.Split(strings.TrimRight(output.String(), "\n"), "\n")
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, strings.Join(lines[max(0, len(lines)-30):], "\n"))
	}
	return nil
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// LockFile locks the file at path against other processes, and calls waiting
// once if it has to wait. The lock is released when its process ends.
func LockFile(ctx context.Context, path string, waiting func()) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for first := true; ; first = false {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return func() { f.Close() }, nil
		case !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR):
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if first {
			waiting()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		}
	}
}

// Digest returns a hash of a folder's content.
func Digest(path string) (string, error) {
	sum := sha256.New()
	folder := os.DirFS(path)
	err := fs.WalkDir(folder, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := fs.ReadFile(folder, path)
		fmt.Fprintf(sum, "%s %d\n%s", path, len(b), b)
		return err
	})
	return fmt.Sprintf("%x", sum.Sum(nil)[:5]), err
}
