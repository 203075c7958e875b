package deploy

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testdeploy"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// exposure is the highest that the service may have by systemd's reckoning, in
// tenths. It has 1.7.
const exposure = "20"

// systemd can read the unit, and counts it among those that are little exposed.
func TestUnit(t *testing.T) {
	// What only the package brings is replaced by what is here.
	unit := string(read(t, "deploy", "systemd", "isthmus.service"))
	for here, there := range map[string]string{
		"ExecStart=/bin/sh ": "ExecStart=/usr/bin/isthmus ", "User=games\n": "User=isthmus\n", "Group=games\n": "Group=isthmus\n",
	} {
		if !strings.Contains(unit, there) {
			t.Errorf("the unit has no %q", there)
		}
		unit = strings.Replace(unit, there, here, 1)
	}
	file := filepath.Join(t.TempDir(), "isthmus.service")
	if err := os.WriteFile(file, []byte(unit), 0o600); err != nil {
		t.Fatal(err)
	}
	path, err := testdeploy.SystemdTool.Fetch(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	// What it does not know it only says.
	if out, err := command(t, path, ".", "verify", "--man=no", file).CombinedOutput(); err != nil || bytes.Contains(out, []byte("isthmus.service")) {
		t.Errorf("verify: %v: %s", err, out)
	}
	if out, err := command(t, path, ".", "security", "--offline=true", "--no-pager", "--threshold="+exposure, file).CombinedOutput(); err != nil {
		t.Errorf("security: %v: %s", err, out)
	}
	if _, err := config.Parse("isthmus.yaml", read(t, "deploy", "systemd", "isthmus.yaml"), config.Options{Adapters: []string{"consul"}}); err != nil {
		t.Error(err)
	}
}

// Packages have the program, the unit, its user and a configuration that an
// upgrade leaves alone.
func TestPackages(t *testing.T) {
	release := decode[struct {
		Nfpms []map[string]any
	}](t, ".goreleaser.yaml")
	pkg := release.Nfpms[0]
	delete(pkg, "id")
	delete(pkg, "formats")
	delete(pkg, "bindir")
	delete(pkg, "mtime")
	pkg["name"], pkg["version"], pkg["arch"] = pkg["package_name"], "0.0.1", "amd64"
	delete(pkg, "package_name")
	for _, format := range pkg["overrides"].(map[string]any) { //nolint:forcetypeassert // or the test fails
		format := format.(map[string]any)          //nolint:forcetypeassert // or the test fails
		format["depends"] = format["dependencies"] // goreleaser's word for it
		delete(format, "dependencies")
	}
	program := filepath.Join(t.TempDir(), "isthmus")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	pkg["contents"] = append(pkg["contents"].([]any), map[string]any{"src": program, "dst": "/usr/bin/isthmus", "file_info": map[string]int{"mode": 0o755}}) //nolint:forcetypeassert // a list, or the test fails
	text, err := yaml.Marshal(pkg)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "nfpm.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"deb", "rpm"} {
		run(t, testdeploy.NfpmTool, root, "package", "--config", file, "--packager", format, "--target", dir)
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(debs) != 1 {
		t.Fatalf("debs: %q, %v", debs, err)
	}
	out, err := command(t, "dpkg-deb", ".", "--contents", debs[0]).CombinedOutput()
	if err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	var files []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); !strings.HasPrefix(f[0], "d") {
			files = append(files, f[0]+" "+f[5])
		}
	}
	slices.Sort(files)
	want := []string{
		"-rw-r--r-- ./etc/isthmus/isthmus.yaml", "-rw-r--r-- ./usr/lib/systemd/system/isthmus.service",
		"-rw-r--r-- ./usr/lib/sysusers.d/isthmus.conf", "-rw-r--r-- ./usr/share/doc/isthmus/copyright", "-rwxr-xr-x ./usr/bin/isthmus",
	}
	if !slices.Equal(files, want) {
		t.Errorf("the package has %q\nwant %q", files, want)
	}
	if out, err := command(t, "dpkg-deb", ".", "--info", debs[0], "conffiles").CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "/etc/isthmus/isthmus.yaml" {
		t.Errorf("conffiles: %v: %s", err, out)
	}
	installed(t, debs[0])
	if rpms, err := filepath.Glob(filepath.Join(dir, "*.rpm")); err != nil || len(rpms) != 1 {
		t.Errorf("rpms: %q, %v", rpms, err)
	}
}

// installed shows that a package is installed into the root of another system,
// as those who build images do it: the user is made there, and nothing of this
// machine is touched. It names the package that makes users, for a machine
// without systemd.
func installed(t *testing.T, deb string) {
	t.Helper()
	other := t.TempDir()
	for _, folder := range []string{"var/lib/dpkg/updates", "var/lib/dpkg/info", "etc"} {
		if err := os.MkdirAll(filepath.Join(other, folder), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(other, "var/lib/dpkg/status"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dpkg := func(args ...string) ([]byte, error) {
		return command(t, "dpkg", ".", append([]string{"--root=" + other, "--force-not-root", "--force-script-chrootless"}, args...)...).CombinedOutput()
	}
	if out, err := dpkg("--install", deb); err == nil || !bytes.Contains(out, []byte("systemd-sysusers")) {
		t.Errorf("installed without what makes users: %v: %s", err, out)
	}
	if out, err := dpkg("--force-depends", "--install", deb); err != nil {
		t.Fatalf("dpkg --install: %v: %s", err, out)
	}
	users, err := os.ReadFile(filepath.Join(other, "etc", "passwd"))
	if err != nil || !bytes.Contains(users, []byte("isthmus:")) {
		t.Errorf("the users are %q, error %v", users, err)
	}
	if _, err := os.Stat(filepath.Join(other, "usr", "bin", "isthmus")); err != nil {
		t.Error(err)
	}
	if out, err := dpkg("--remove", "isthmus"); err != nil {
		t.Errorf("dpkg --remove: %v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(other, "etc", "isthmus", "isthmus.yaml")); err != nil {
		t.Errorf("the configuration went with the package: %v", err)
	}
}
