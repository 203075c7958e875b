//go:build linux

package compose

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testdocker"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// recipe is part of the source of every image: raise it to make all again.
const recipe = "3"

// image is a stand-in for one that would be pulled: the same name, the same
// program, and the few programs beside it that health checks start.
type image struct {
	name    string
	source  string   // what decides its content
	changes []string // of docker import, as in a Dockerfile
	// fill adds the files.
	fill func(t testing.TB, w *layer)
}

// layer is the only layer of an image: a tar archive. The first error stays.
type layer struct {
	tar  *tar.Writer
	seen map[string]bool
	err  error
}

// parents adds the folders above a path.
func (l *layer) parents(path string) {
	if dir := filepath.Dir(path); dir != "." && dir != "/" && !l.seen[dir] {
		l.folder(dir, 0o755)
	}
}

func (l *layer) folder(path string, mode int64) {
	l.parents(path)
	l.seen[path] = true
	l.check(l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(path, "/") + "/", Mode: mode}))
}

func (l *layer) check(err error) {
	if l.err == nil {
		l.err = err
	}
}

func (l *layer) text(path, text string, mode int64) {
	l.parents(path)
	l.check(l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(path, "/"), Mode: mode, Size: int64(len(text))}))
	_, err := io.WriteString(l.tar, text)
	l.check(err)
}

func (l *layer) link(path, target string) {
	l.parents(path)
	l.check(l.tar.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: strings.TrimPrefix(path, "/"), Linkname: target, Mode: 0o777}))
}

// file adds a file, or what a link leads to.
func (l *layer) file(path, from string) {
	if l.seen[path] {
		return
	}
	l.seen[path] = true
	l.parents(path)
	f, err := os.Open(from)
	if err != nil {
		l.check(err)
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		l.check(err)
		return
	}
	l.check(l.tar.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: strings.TrimPrefix(path, "/"), Mode: int64(info.Mode().Perm()), Size: info.Size(), ModTime: info.ModTime(),
	}))
	_, err = io.Copy(l.tar, f)
	l.check(err)
}

// tree adds a folder, but for the names left out at its top. It follows links.
func (l *layer) tree(path, from string, without ...string) {
	entries, err := os.ReadDir(from)
	if err != nil {
		l.check(err)
		return
	}
	l.folder(path, 0o755)
	for _, e := range entries {
		if slices.Contains(without, e.Name()) {
			continue
		}
		to, at := filepath.Join(path, e.Name()), filepath.Join(from, e.Name())
		info, err := os.Stat(at)
		switch {
		case errors.Is(err, fs.ErrNotExist): // a link to what a package does not bring
		case err != nil:
			l.check(err)
		case info.IsDir():
			l.tree(to, at)
		case info.Mode().IsRegular():
			l.file(to, at)
		}
	}
}

// program adds a program of this machine with its libraries, at another path.
func (l *layer) program(t testing.TB, path, from string) {
	l.file(path, from)
	// What is linked statically has no list.
	out, _ := exec.CommandContext(t.Context(), "ldd", from).Output()
	for line := range strings.Lines(string(out)) {
		for word := range strings.FieldsSeq(line) {
			if strings.HasPrefix(word, "/") && strings.Contains(filepath.Base(word), ".so") {
				l.file(filepath.Clean(word), word)
			}
		}
	}
}

// shell adds what the health checks of the demo start.
func (l *layer) shell(t testing.TB) {
	for _, name := range []string{"bash", "grep", "head"} {
		path, err := exec.LookPath(name)
		if err != nil {
			l.check(err)
			return
		}
		l.program(t, "/bin/"+name, path)
	}
}

// build makes the image unless the engine has it of the same source.
func (i image) build(t testing.TB, d *testdocker.Engine) {
	t.Helper()
	sum := sha256.Sum256([]byte(recipe + i.source + strings.Join(i.changes, "\n")))
	source := hex.EncodeToString(sum[:])
	if strings.TrimSpace(d.Output("", "docker", "image", "inspect", "--format", `{{index .Config.Labels "isthmus.source"}}`, i.name)) == source {
		return
	}
	args := []string{"import", "--change", "LABEL isthmus.source=" + source}
	for _, c := range i.changes {
		args = append(args, "--change", c)
	}
	cmd := d.Command(t.Context(), "docker", append(args, "-", i.name)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	l := &layer{tar: tar.NewWriter(in), seen: map[string]bool{}}
	l.folder("/tmp", 0o1777)
	l.folder("/root", 0o700)
	l.text("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnonroot:x:65532:65532::/home/nonroot:/bin/false\n", 0o644)
	i.fill(t, l)
	l.check(l.tar.Close())
	if l.err != nil {
		_ = cmd.Process.Kill() // or the engine has an image of what there is
	}
	in.Close()
	if err := errors.Join(l.err, cmd.Wait()); err != nil {
		t.Fatalf("make the image %s: %v: %s", i.name, err, &out)
	}
	t.Logf("made the image %s", i.name)
}

// tool returns the path of a tool.
func tool(t testing.TB, tool testenv.Tool) string {
	t.Helper()
	path, err := tool.Fetch(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// images are the stand-ins of what docker-compose.yaml and the Dockerfile name.
func images(t testing.TB, root string) []image {
	t.Helper()
	consul, nacos, istiod := tool(t, testconsul.Tool), tool(t, testnacos.V3.Tool), tool(t, testistiod.V124.Tool)
	envoy, echo := tool(t, testproxy.EnvoyTool), tool(t, testdocker.HTTPEchoTool)
	busybox := filepath.Join(filepath.Dir(tool(t, testdocker.Tool)), "root", "bin", "busybox")
	single := func(name, program, entry string) image {
		return image{
			name: name, source: program, changes: []string{"ENV PATH=/usr/local/bin:/usr/bin:/bin", "ENTRYPOINT " + entry},
			fill: func(t testing.TB, l *layer) {
				l.shell(t)
				l.program(t, "/usr/local/bin/"+filepath.Base(program), program)
			},
		}
	}
	goroot, sums := goEnv(t, "GOROOT"), read(t, filepath.Join(root, "go.sum"))
	all := []image{
		single("hashicorp/consul:1.22.7", consul, `["consul"]`),
		single("istio/pilot:1.24.0", istiod, `["pilot-discovery"]`),
		single("envoyproxy/envoy:v1.40.0", envoy, "[]"),
		{
			name: "hashicorp/http-echo:1.0.0", source: echo, changes: []string{`ENTRYPOINT ["/http-echo"]`},
			fill: func(t testing.TB, l *layer) { l.program(t, "/http-echo", echo) },
		},
		{
			name: "busybox:1.37.0", source: busybox, changes: []string{"ENV PATH=/bin"},
			fill: func(t testing.TB, l *layer) { l.shellOf(t, busybox) },
		},
		{
			name: "nacos/nacos-server:v3.1.0", source: nacos + startNacos, changes: []string{"ENV PATH=/opt/java/bin:/bin", `ENTRYPOINT ["/bin/bash", "/start.sh"]`},
			fill: func(t testing.TB, l *layer) {
				l.shell(t)
				java := javaHome(t)
				l.tree("/opt/java", java, "jmods", "src.zip", "docs", "man", "legal", "demo", "include")
				// Its libraries need some of the machine's.
				libraries, _ := filepath.Glob(filepath.Join(java, "lib", "*.so"))
				for _, from := range append(libraries, filepath.Join(java, "lib", "server", "libjvm.so"), filepath.Join(java, "bin", "java")) {
					l.program(t, "/opt/java"+strings.TrimPrefix(from, java), from)
				}
				// One that it unpacks at its start needs more of the same.
				libc, err := exec.CommandContext(t.Context(), "ldd", filepath.Join(java, "bin", "java")).Output()
				l.check(err)
				for word := range strings.FieldsSeq(string(libc)) {
					if filepath.Base(word) == "libc.so.6" && filepath.IsAbs(word) {
						for _, name := range []string{"libpthread.so.0", "libdl.so.2", "librt.so.1", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"} {
							l.program(t, filepath.Join(filepath.Dir(word), name), filepath.Join(filepath.Dir(word), name))
						}
					}
				}
				dir := filepath.Dir(nacos)
				l.tree("/opt/nacos/lib", filepath.Join(dir, "lib"))
				l.file("/opt/nacos/launcher.jar", filepath.Join(dir, "launcher.jar"))
				l.text("/home/nacos/conf/application.properties", "nacos.server.main.port=8848\n", 0o644)
				l.text("/start.sh", startNacos, 0o755)
			},
		},
		{
			name: "gcr.io/distroless/static-debian12:nonroot", changes: []string{"USER 65532", "ENV PATH=/bin"},
			// An empty folder would be made by the volume, without its mode.
			fill: func(_ testing.TB, l *layer) { l.text("/tmp/.keep", "", 0o644); l.folder("/home/nonroot", 0o777) },
		},
		{
			name: "golang:1.26", source: goVersion(t, goroot) + string(sums),
			changes: []string{"ENV PATH=/usr/local/go/bin:/bin GOPATH=/go GOCACHE=/root/.cache/go-build GOFLAGS=-buildvcs=false GOTOOLCHAIN=local"},
			fill: func(t testing.TB, l *layer) {
				l.shellOf(t, busybox)
				l.tree("/usr/local/go", goroot, "test", "api", "doc", "misc")
				l.program(t, "/usr/local/go/bin/go", filepath.Join(goroot, "bin", "go"))
				caches(t, root, l)
			},
		},
	}
	return all
}

// shellOf adds a busybox as every program that it is.
func (l *layer) shellOf(t testing.TB, busybox string) {
	l.program(t, "/bin/busybox", busybox)
	out, err := exec.CommandContext(t.Context(), busybox, "--list").Output()
	l.check(err)
	for name := range strings.FieldsSeq(string(out)) {
		if name != "busybox" {
			l.link("/bin/"+name, "busybox")
		}
	}
}

// caches adds Go's caches with the modules and packages of the program, so that
// its Dockerfile needs no network.
func caches(t testing.TB, root string, l *layer) {
	user, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	// Packages are kept: most of them outlive a change of go.sum. Go itself
	// removes what was not used for days.
	modules, packages := filepath.Join(t.TempDir(), "mod"), filepath.Join(user, "isthmus", "golang-image")
	env := append(os.Environ(), "GOMODCACHE="+modules, "GOCACHE="+packages, "CGO_ENABLED=0",
		"GOFLAGS=-modcacherw -buildvcs=false", "GOPROXY=file://"+filepath.Join(goEnv(t, "GOMODCACHE"), "cache", "download")+","+goEnv(t, "GOPROXY"))
	for _, args := range [][]string{{"mod", "download"}, {"build", "-trimpath", "-ldflags", "-s -w", "-o", os.DevNull, "./cmd/isthmus"}} {
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir, cmd.Env = root, env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	l.tree("/go/pkg/mod", modules)
	l.tree("/root/.cache/go-build", packages)
}

// startNacos is what the image's own start makes of the environment, as far as
// the demo sets it.
const startNacos = `exec java -Xms$JVM_XMS -Xmx$JVM_XMX -Xmn$JVM_XMN -XX:TieredStopAtLevel=1 \
  --add-opens java.base/java.lang=ALL-UNNAMED --add-opens java.base/java.util=ALL-UNNAMED \
  --add-opens java.base/java.util.concurrent=ALL-UNNAMED --add-opens java.base/java.util.concurrent.atomic=ALL-UNNAMED \
  --add-opens java.base/java.math=ALL-UNNAMED --add-opens java.base/java.time=ALL-UNNAMED \
  -Dnacos.standalone=true -Dnacos.home=/home/nacos -Dserver.port=8848 -Dspring.config.additional-location=file:/home/nacos/conf/ -Dserver.servlet.contextPath=/nacos \
  -Dnacos.core.auth.enabled=false -Dnacos.core.auth.admin.enabled=$NACOS_AUTH_ADMIN_ENABLE -Dnacos.core.auth.system.type=nacos \
  -Dnacos.core.auth.server.identity.key=$NACOS_AUTH_IDENTITY_KEY -Dnacos.core.auth.server.identity.value=$NACOS_AUTH_IDENTITY_VALUE \
  -Dnacos.core.auth.plugin.nacos.token.secret.key=$NACOS_AUTH_TOKEN -Ddb.pool.config.connectionTimeout=60000 \
  -Dnacos.namespace.migrate.retry.times=60 '-Dnacos.security.ignore.urls=/,/error,/v1/auth/**,/v3/auth/**,/actuator/**' \
  -cp '/opt/nacos/launcher.jar:/opt/nacos/lib/hessian-4.0.63.jar:/opt/nacos/lib/*' io.isthmus.tools.Launcher
`

func javaHome(t testing.TB) string {
	t.Helper()
	java, err := exec.LookPath("java")
	if err == nil {
		java, err = filepath.EvalSymlinks(java)
	}
	if err != nil {
		t.Fatalf("find the Java runtime: %v", err)
	}
	return filepath.Dir(filepath.Dir(java))
}

func goEnv(t testing.TB, name string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "env", name).Output()
	if err != nil {
		t.Fatalf("go env %s: %v", name, err)
	}
	return strings.TrimSpace(string(out))
}

func goVersion(t testing.TB, goroot string) string {
	return string(read(t, filepath.Join(goroot, "VERSION")))
}

func read(t testing.TB, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// named returns the images that docker-compose.yaml and the Dockerfile name,
// but for the one that is built.
func named(t testing.TB, root string) (names []string) {
	t.Helper()
	var file struct {
		Services map[string]struct {
			Image string
			Build any
		}
	}
	if err := yaml.Unmarshal(read(t, filepath.Join(root, "docker-compose.yaml")), &file); err != nil {
		t.Fatal(err)
	}
	for _, s := range file.Services {
		if s.Build == nil {
			names = append(names, s.Image)
		}
	}
	for line := range strings.Lines(string(read(t, filepath.Join(root, "Dockerfile")))) {
		if from, ok := strings.CutPrefix(line, "FROM "); ok {
			names = append(names, strings.Fields(from)[0])
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Every image has a stand-in.
func checkNames(t testing.TB, root string, all []image) {
	t.Helper()
	var have []string
	for _, i := range all {
		have = append(have, i.name)
	}
	slices.Sort(have)
	if want := named(t, root); !slices.Equal(have, want) {
		t.Fatalf("stand-ins %q\nare not what the files name: %q", have, want)
	}
}
