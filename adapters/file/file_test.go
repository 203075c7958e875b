package file

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

func TestMain(m *testing.M) {
	plugintest.Self(func() { Main("test") })
	goleak.VerifyTestMain(m)
}

// view is what a catalog holds, in a form that is easy to compare.
type view struct {
	Services  map[string]string // addresses by service
	Resources []string          // "collection name", sorted
	Problems  map[string]string
	Degraded  string
	Synced    bool
}

// catalog is a catalog that is looked at as a view.
type catalog struct{ *plugintest.Catalog }

// viewOf returns what is held.
func viewOf(h *plugintest.Held) view {
	v := view{Services: map[string]string{}, Resources: slices.Sorted(maps.Keys(h.Resources)), Problems: maps.Clone(h.Problems), Degraded: h.Degraded, Synced: h.Synced}
	for key, instances := range h.Instances {
		var addresses []string
		for _, i := range instances {
			addresses = append(addresses, i.Address)
		}
		v.Services[key] = strings.Join(addresses, " ")
	}
	return v
}

// await waits until the catalog is as cond wants it, and returns how it then
// is.
func (c catalog) await(t *testing.T, what string, cond func(v view) bool) (v view) {
	t.Helper()
	c.Await(t, 20*time.Second, what, func(h *plugintest.Held) bool {
		v = viewOf(h)
		return cond(v)
	})
	return v
}

// calls returns what the catalog was told, and forgets it.
func (c catalog) calls() (calls []string) {
	c.Look(func(h *plugintest.Held) { calls, h.Calls = h.Calls, nil })
	return calls
}

// web is a file of a service called web with one instance.
func web(address string) string {
	return fmt.Sprintf("services:\n- name: web\n  instances:\n  - {address: %s, port: 80}\n", address)
}

// named is a file of a service of the given name with one instance.
func named(name, address string) string { return strings.Replace(web(address), "web", name, 1) }

const gateway = "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {name: gw}\nspec: {selector: {app: gw}}\n"

// write puts the last of elem into the file that the others name, in one step:
// what a reader sees meanwhile is TestWritingInPieces' business.
func write(t *testing.T, elem ...string) {
	t.Helper()
	file, text := filepath.Join(elem[:len(elem)-1]...), elem[len(elem)-1]
	must(t, os.WriteFile(file+".tmp", []byte(text), 0o644))
	must(t, os.Rename(file+".tmp", file))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// start runs the adapter on path until the test ends.
func start(t *testing.T, path string) catalog {
	t.Helper()
	a, err := New(Config{Path: path}, plugin.Env{Registry: "static", Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	return run(t, a)
}

func run(t *testing.T, a plugin.Adapter) catalog {
	t.Helper()
	c := catalog{plugintest.NewCatalog()}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, c) }() // ends with ctx
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	return c
}

func synced(v view) bool { return v.Synced }

func serves(service, addresses string) func(v view) bool {
	return func(v view) bool { got, is := v.Services[service]; return is && got == addresses }
}

func TestFirstListing(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", web("10.0.0.1")+"---\n"+gateway)
	write(t, dir, "b.yml", named("api", "10.0.0.2"))
	write(t, dir, "empty.yaml", "")
	write(t, dir, "notes.txt", "no: [yaml\n")
	write(t, dir, ".hidden.yaml", "no: [yaml\n")
	must(t, os.Mkdir(filepath.Join(dir, "sub.yaml"), 0o755))
	write(t, dir, "sub.yaml", "c.yaml", "no: [yaml\n")

	c := start(t, dir)
	got := c.await(t, "the first listing", synced)
	want := view{
		Services:  map[string]string{"web": "10.0.0.1", "api": "10.0.0.2"},
		Resources: []string{"networking.istio.io/Gateway default/gw"},
		Problems:  map[string]string{},
		Synced:    true,
	}
	c.Look(func(h *plugintest.Held) {
		if h.Heard == 0 {
			t.Error("the files were not heard from")
		}
	})
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the catalog (-want +got):\n%s", diff)
	}
	if calls := c.calls(); calls[len(calls)-1] != "synced" {
		t.Errorf("Synced was not the last call: %q", calls)
	}
}

func TestEmptyDirectoryIsEmptyAndSynced(t *testing.T) {
	dir := t.TempDir()
	c := start(t, dir)
	v := c.await(t, "synced", synced)
	if v.Degraded != "" || len(v.Problems) > 0 {
		t.Errorf("an empty directory is %+v", v)
	}
	write(t, dir, "a.yaml", web("10.0.0.1"))
	c.await(t, "the first file", serves("web", "10.0.0.1"))
}

func TestFilesComeChangeAndGo(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", web("10.0.0.1"))
	write(t, dir, "b.yaml", gateway)
	c := start(t, dir)
	c.await(t, "the first listing", synced)
	c.calls()

	write(t, dir, "a.yaml", web("10.0.0.2"))
	c.await(t, "a changed file", serves("web", "10.0.0.2"))
	if diff := cmp.Diff([]string{"set web"}, c.calls()); diff != "" {
		t.Errorf("calls for one changed file (-want +got):\n%s", diff)
	}
	must(t, os.Rename(filepath.Join(dir, "a.yaml"), filepath.Join(dir, "a.txt")))
	c.await(t, "a file renamed away", func(v view) bool { return len(v.Services) == 0 })
	must(t, os.Rename(filepath.Join(dir, "a.txt"), filepath.Join(dir, "c.yaml")))
	c.await(t, "a file renamed here", serves("web", "10.0.0.2"))
	must(t, os.Remove(filepath.Join(dir, "b.yaml")))
	c.await(t, "a removed file", func(v view) bool { return len(v.Resources) == 0 })
	// The way of editors: a new file takes the place of the old one.
	write(t, dir, "c.yaml~", web("10.0.0.3"))
	must(t, os.Rename(filepath.Join(dir, "c.yaml~"), filepath.Join(dir, "c.yaml")))
	c.await(t, "a replaced file", serves("web", "10.0.0.3"))
}

// TestBrokenFileKeepsItsLastGoodContent shows that what a file held stays until
// the file is mended or removed, and that its neighbours go on.
func TestBrokenFileKeepsItsLastGoodContent(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "web.yaml", web("10.0.0.1")+"---\n"+gateway)
	c := start(t, dir)
	c.await(t, "the first listing", synced)
	c.calls()

	write(t, dir, "api.yaml", named("api", "10.0.0.9"))
	write(t, dir, "web.yaml", web("10.0.0.2")+"---\nservices:\n- name: api\n  prots: []\n")
	v := c.await(t, "the problem", func(v view) bool { return len(v.Problems) > 0 && v.Services["api"] != "" })
	want := view{
		Services:  map[string]string{"web": "10.0.0.1", "api": "10.0.0.9"},
		Resources: []string{"networking.istio.io/Gateway default/gw"},
		Problems: map[string]string{
			"file web.yaml": `web.yaml:8: unknown field "prots" of a service; did you mean ports?; the last good content is kept`,
		},
		Synced: true,
	}
	if diff := cmp.Diff(want, v); diff != "" {
		t.Errorf("the catalog (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"set api", "problem file web.yaml"}, c.calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}

	write(t, dir, "web.yaml", web("10.0.0.3"))
	v = c.await(t, "the mended file", func(v view) bool { return len(v.Problems) == 0 })
	if v.Services["web"] != "10.0.0.3" || len(v.Resources) != 0 {
		t.Errorf("after mending the catalog holds %+v", v)
	}

	write(t, dir, "web.yaml", "[")
	c.await(t, "the problem", func(v view) bool { return len(v.Problems) > 0 })
	must(t, os.Remove(filepath.Join(dir, "web.yaml")))
	v = c.await(t, "the removed file", func(v view) bool { return len(v.Problems) == 0 })
	if v.Services["web"] != "" {
		t.Errorf("the last good content of a removed file is still there")
	}
}

// A file that is broken from the start holds the first listing back, for it may
// hold what an earlier run knew; the others are taken over at once.
func TestBrokenFromTheStart(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", "services: 1\n")
	write(t, dir, "b.yaml", web("10.0.0.1"))
	c := start(t, dir)
	v := c.await(t, "the listing without the broken file", func(v view) bool { return v.Degraded != "" })
	want := view{
		Services: map[string]string{"web": "10.0.0.1"},
		Problems: map[string]string{
			"file a.yaml": `a.yaml:1: services must be a list, not "1"; nothing of the file is served until it is corrected`,
		},
		Degraded: v.Degraded,
	}
	if diff := cmp.Diff(want, v); diff != "" || !strings.Contains(v.Degraded, "waits for a.yaml") {
		t.Errorf("degraded: %s; the catalog (-want +got):\n%s", v.Degraded, diff)
	}
	write(t, dir, "a.yaml", "services: []\n")
	c.await(t, "the complete listing", func(v view) bool { return v.Synced && v.Degraded == "" && len(v.Problems) == 0 })
}

func TestFirstFileByNameWins(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "b.yaml", web("10.0.0.2")+"---\n"+gateway)
	write(t, dir, "c.yaml", web("10.0.0.3"))
	c := start(t, dir)
	v := c.await(t, "the first listing", synced)
	want := map[string]string{
		"service web in c.yaml": "defined in b.yaml:2 and in c.yaml:2; the one in b.yaml is used, since that name sorts first; remove one of them",
	}
	if diff := cmp.Diff(want, v.Problems); diff != "" || v.Services["web"] != "10.0.0.2" {
		t.Errorf("%s wins; problems (-want +got):\n%s", v.Services["web"], diff)
	}

	write(t, dir, "a.yaml", "# a comment\n"+gateway+"---\n"+web("10.0.0.1"))
	c.await(t, "the new first", serves("web", "10.0.0.1"))
	want = map[string]string{
		"resource networking.istio.io/Gateway default/gw in b.yaml": "defined in a.yaml:2 and in b.yaml:6; the one in a.yaml is used, since that name sorts first; remove one of them",
		"service web in b.yaml": "defined in a.yaml:8 and in b.yaml:2; the one in a.yaml is used, since that name sorts first; remove one of them",
		"service web in c.yaml": "defined in a.yaml:8 and in c.yaml:2; the one in a.yaml is used, since that name sorts first; remove one of them",
	}
	c.await(t, "its problems", func(v view) bool { return cmp.Equal(want, v.Problems) })

	c.calls()
	must(t, os.Remove(filepath.Join(dir, "a.yaml")))
	v = c.await(t, "the one after", func(v view) bool { return len(v.Problems) == 1 && v.Services["web"] == "10.0.0.2" })
	if len(v.Resources) != 1 {
		t.Errorf("the catalog holds %+v", v)
	}
	for _, call := range c.calls() {
		if strings.HasPrefix(call, "remove") || strings.HasPrefix(call, "withdraw") {
			t.Errorf("%s, although another file defines it too", call)
		}
	}
}

// TestDirectoryGoneRemovesNothing shows that a directory that vanishes makes
// the registry degraded, and no more, and that it is followed again when it is
// back.
func TestDirectoryGoneRemovesNothing(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "mesh")
	must(t, os.Mkdir(dir, 0o755))
	write(t, dir, "a.yaml", web("10.0.0.1"))
	c := start(t, dir)
	c.await(t, "the first listing", synced)

	must(t, os.Rename(dir, dir+".old"))
	v := c.await(t, "degraded", func(v view) bool { return v.Degraded != "" })
	if v.Services["web"] != "10.0.0.1" {
		t.Error("the service is gone")
	}
	if !strings.Contains(v.Degraded, "no such file") || !strings.HasSuffix(v.Degraded, "; nothing is removed") {
		t.Errorf("degraded because of %s", v.Degraded)
	}
	// What happens to the directory that was moved away is nobody's business.
	must(t, os.Remove(filepath.Join(dir+".old", "a.yaml")))

	must(t, os.Mkdir(dir+".new", 0o755))
	write(t, dir+".new", "a.yaml", web("10.0.0.2"))
	must(t, os.Rename(dir+".new", dir))
	c.await(t, "the directory being back", func(v view) bool { return v.Degraded == "" && v.Services["web"] == "10.0.0.2" })
	for _, call := range c.calls() {
		if strings.HasPrefix(call, "remove") {
			t.Errorf("the catalog was told to %s", call)
		}
	}
	// It is watched again, too.
	write(t, dir, "a.yaml", web("10.0.0.3"))
	c.await(t, "a change in the new directory", serves("web", "10.0.0.3"))
}

func TestDirectoryReplacedAtOnce(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "mesh")
	must(t, os.Mkdir(dir, 0o755))
	write(t, dir, "a.yaml", web("10.0.0.1"))
	must(t, os.Mkdir(dir+".new", 0o755))
	write(t, dir+".new", "b.yaml", web("10.0.0.2"))
	c := start(t, dir)
	c.await(t, "the first listing", synced)

	must(t, os.Rename(dir, dir+".old"))
	must(t, os.Rename(dir+".new", dir))
	c.await(t, "the other directory", serves("web", "10.0.0.2"))
	write(t, dir, "b.yaml", web("10.0.0.3"))
	c.await(t, "a change in the other directory", serves("web", "10.0.0.3"))
}

func TestDirectoryMissingAtFirst(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "mesh")
	c := start(t, dir)
	v := c.await(t, "degraded", func(v view) bool { return v.Degraded != "" })
	if v.Synced {
		t.Error("a directory that is not there counts as listed")
	}
	must(t, os.MkdirAll(dir, 0o755))
	write(t, dir, "a.yaml", web("10.0.0.1"))
	v = c.await(t, "the directory", serves("web", "10.0.0.1"))
	c.await(t, "the first listing", func(v view) bool { return v.Synced && v.Degraded == "" })
}

// TestConfigMapSwap goes through what the kubelet does to a mounted ConfigMap:
// files are links through ..data, which is replaced in one step.
func TestConfigMapSwap(t *testing.T) {
	dir := t.TempDir()
	volume := func(name, a, b string) {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		write(t, dir, name, "a.yaml", a)
		write(t, dir, name, "b.yaml", b)
	}
	swap := func(name string) {
		must(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	volume("..2026_01", web("10.0.0.1"), gateway)
	swap("..2026_01")
	for _, name := range []string{"a.yaml", "b.yaml"} {
		must(t, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
	}
	whole, single := start(t, dir), start(t, filepath.Join(dir, "a.yaml"))
	whole.await(t, "the first listing", synced)
	single.await(t, "the first listing of one file", synced)
	whole.calls()

	for i, address := range []string{"10.0.0.2", "10.0.0.3"} {
		volume(fmt.Sprintf("..2026_1%d", i), web(address), gateway)
		swap(fmt.Sprintf("..2026_1%d", i))
		v := whole.await(t, "the swapped content", serves("web", address))
		if len(v.Resources) != 1 || len(v.Problems) != 0 {
			t.Errorf("after the swap the catalog holds %+v", v)
		}
		single.await(t, "the swapped content of one file", serves("web", address))
	}
	must(t, os.RemoveAll(filepath.Join(dir, "..2026_01")))
	if diff := cmp.Diff([]string{"set web", "set web"}, whole.calls()); diff != "" {
		t.Errorf("calls for two swaps (-want +got):\n%s", diff)
	}
}

func TestLinks(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "mesh")
	must(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	write(t, dir, "sub", "web.yaml", web("10.0.0.1"))
	write(t, parent, "secret.yaml", named("secret", "10.0.0.66"))
	must(t, os.Symlink("sub/web.yaml", filepath.Join(dir, "in.yaml")))
	must(t, os.Symlink("../secret.yaml", filepath.Join(dir, "out.yaml")))
	must(t, os.Symlink("nowhere.yaml", filepath.Join(dir, "void.yaml")))

	c := start(t, dir)
	v := c.await(t, "what can be read", func(v view) bool { return v.Degraded != "" })
	if diff := cmp.Diff(map[string]string{"web": "10.0.0.1"}, v.Services); diff != "" {
		t.Errorf("services (-want +got):\n%s", diff)
	}
	for id, want := range map[string]string{"file out.yaml": "escapes", "file void.yaml": "no such file"} {
		if got := v.Problems[id]; !strings.Contains(got, want) || !strings.Contains(got, "a link must lead to a file within the directory") {
			t.Errorf("problem %s: %q", id, got)
		}
	}
	write(t, dir, "sub", "web.yaml", web("10.0.0.2"))
	c.await(t, "a change behind a link", serves("web", "10.0.0.2"))
	must(t, os.Remove(filepath.Join(dir, "out.yaml")))
	must(t, os.Remove(filepath.Join(dir, "void.yaml")))
	c.await(t, "the problems' end", func(v view) bool { return len(v.Problems) == 0 && v.Synced })

	// A link that breaks is a broken file, not a removed one.
	must(t, os.Remove(filepath.Join(dir, "sub", "web.yaml")))
	v = c.await(t, "the broken link", func(v view) bool { return len(v.Problems) == 1 })
	if v.Services["web"] != "10.0.0.2" || !strings.HasSuffix(v.Problems["file in.yaml"], "; the last good content is kept") {
		t.Errorf("the catalog holds %+v", v)
	}
}

func TestPathIsALink(t *testing.T) {
	parent := t.TempDir()
	for i, name := range []string{"one", "two"} {
		must(t, os.Mkdir(filepath.Join(parent, name), 0o755))
		write(t, parent, name, "a.yaml", web(fmt.Sprintf("10.0.0.%d", i+1)))
	}
	path := filepath.Join(parent, "mesh")
	must(t, os.Symlink("one", path))
	c := start(t, path)
	c.await(t, "the first listing", serves("web", "10.0.0.1"))
	must(t, os.Symlink("two", path+".new"))
	must(t, os.Rename(path+".new", path))
	c.await(t, "the other directory", serves("web", "10.0.0.2"))
	write(t, parent, "two", "a.yaml", web("10.0.0.3"))
	c.await(t, "a change there", serves("web", "10.0.0.3"))
}

func TestOneFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "mesh.conf") // where one file is named, its ending is free
	write(t, file, web("10.0.0.1"))
	write(t, dir, "other.yaml", "no: [yaml\n")
	c := start(t, file)
	v := c.await(t, "the first listing", synced)
	if diff := cmp.Diff(view{Services: map[string]string{"web": "10.0.0.1"}, Problems: map[string]string{}, Synced: true}, v); diff != "" {
		t.Errorf("the catalog (-want +got):\n%s", diff)
	}
	write(t, file, web("10.0.0.2"))
	c.await(t, "the change", serves("web", "10.0.0.2"))
	// It is all there is: without it nothing can be followed.
	must(t, os.Remove(file))
	v = c.await(t, "degraded", func(v view) bool { return v.Degraded != "" })
	if v.Services["web"] != "10.0.0.2" {
		t.Error("the service is gone")
	}
	write(t, file, web("10.0.0.3"))
	c.await(t, "the file being back", func(v view) bool { return v.Degraded == "" && v.Services["web"] == "10.0.0.3" })
}

func TestFilesThatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	large := filepath.Join(dir, "large.yaml")
	write(t, large, web("10.0.0.1"))
	c := start(t, dir)
	c.await(t, "the first listing", synced)

	write(t, large, strings.Repeat("# nothing\n", maxSize/10+1))
	v := c.await(t, "the problem", func(v view) bool { return len(v.Problems) > 0 })
	want := map[string]string{"file large.yaml": "large.yaml: is larger than 16 MiB; split it; the last good content is kept"}
	if diff := cmp.Diff(want, v.Problems); diff != "" || v.Services["web"] != "10.0.0.1" {
		t.Errorf("the catalog holds %v; problems (-want +got):\n%s", v.Services, diff)
	}
	write(t, large, web("10.0.0.1"))
	c.await(t, "the mended file", func(v view) bool { return len(v.Problems) == 0 })

	if os.Getuid() != 0 { // root may read everything
		must(t, os.Chmod(large, 0))
		v = c.await(t, "the problem", func(v view) bool { return len(v.Problems) > 0 })
		if v.Services["web"] != "10.0.0.1" {
			t.Error("the service is gone")
		}
		must(t, os.Chmod(large, 0o644))
		c.await(t, "the readable file", func(v view) bool { return len(v.Problems) == 0 })
	}
}

// TestWritingInPieces shows that a file that is written piece by piece is read
// whole: what is there in between would be legal and empty.
func TestWritingInPieces(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "a.yaml")
	write(t, file, web("10.0.0.1"))
	a, err := New(Config{Path: dir}, plugin.Env{Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	a.(*adapter).quiet = time.Second // however slow the machine
	c := run(t, a)
	c.await(t, "the first listing", synced)
	c.calls()

	f, err := os.Create(file) // empty from here on
	must(t, err)
	for piece := range strings.Lines(web("10.0.0.2")) {
		_, err = f.WriteString(piece)
		must(t, err)
	}
	must(t, f.Close())
	c.await(t, "the whole file", serves("web", "10.0.0.2"))
	if diff := cmp.Diff([]string{"set web"}, c.calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

func TestConfig(t *testing.T) {
	for _, tt := range []struct {
		conf Config
		want string
	}{
		{Config{}, "path: is missing; give a directory of YAML files, or one file, such as ./mesh"},
		{Config{Path: "mesh", Namespace: "Shop"}, `namespace: "Shop" is not the name of a namespace; use lower-case letters, digits and dashes, 63 at most`},
		{Config{Path: "mesh"}, ""},
	} {
		_, err := New(tt.conf, plugin.Env{})
		if got := fmt.Sprint(err); got != tt.want && (err != nil || tt.want != "") {
			t.Errorf("%+v: %s", tt.conf, got)
		}
	}
}

// TestRelativePath shows that a relative path is relative to the working
// directory, and stays with the one at the start.
func TestRelativePath(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", web("10.0.0.1"))
	t.Chdir(dir)
	c := start(t, ".")
	c.await(t, "the first listing", serves("web", "10.0.0.1"))
}
