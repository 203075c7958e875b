//go:build linux

package compose

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testdocker"
)

// block is what the README says to paste, without the line that clones.
func block(t *testing.T, root string) string {
	t.Helper()
	found := regexp.MustCompile("(?s)```sh\n(git clone [^\n]*\n)?(docker compose up.*?)```").FindSubmatch(read(t, filepath.Join(root, "README.md")))
	if found == nil {
		t.Fatal("the README has no block that begins with docker compose up")
	}
	return string(found[2])
}

// down ends the demo with all that it has made.
const down = "docker compose down -v --remove-orphans"

// prepare starts an engine that has every image but the one that is built, and
// nothing of an interrupted run.
func prepare(t testing.TB) (root string, d *testdocker.Engine) {
	t.Helper()
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	all := images(t, root)
	checkNames(t, root, all)
	d = testdocker.Start(t)
	for _, i := range all {
		i.build(t, d)
	}
	d.Run(t, root, "sh", "-c", down)
	// What earlier runs have built, and images that were made anew.
	d.Run(t, root, "docker", "image", "prune", "--force")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(d.Output(root, "docker", "compose", "logs", "--tail", "40"))
		}
		d.Output(root, "sh", "-c", down)
	})
	return root, d
}

// The block of the README runs as it stands: instances that registries add are
// called, one that ends under load fails no call, and nothing is left.
func TestDemo(t *testing.T) {
	testenv.SkipIfShort(t)
	root, d := prepare(t)
	out := d.Run(t, root, "sh", "-e", "-c", block(t, root))
	if n := strings.Count(out, "250 calls, none failed"); n != 2 {
		t.Errorf("the demo shows %d times that no call fails, want 2", n)
	}
	if left := d.Run(t, root, "docker", "ps", "-aq") + d.Run(t, root, "docker", "volume", "ls", "-q"); left != "" {
		t.Errorf("containers and volumes are left: %s", left)
	}
}
