package testenv

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Cgroup is a memory cgroup, v1 or v2.
type Cgroup struct {
	dir string
	// Peak is the file with the most memory that it has had, in bytes, page
	// cache included.
	Peak string
}

// NewCgroup returns a cgroup of so many bytes, nil where a test may make none.
func NewCgroup(t testing.TB, limit int) *Cgroup {
	t.Helper()
	for _, v := range []struct{ mount, limit, peak string }{
		{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"},
		{"/sys/fs/cgroup", "memory.max", "memory.peak"},
	} {
		dir := filepath.Join(v.mount, fmt.Sprint("isthmus-test-", os.Getpid()))
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			testwait.Eventually(t, time.Minute, "no process in the cgroup", func() (string, bool) {
				err := os.Remove(dir)
				return fmt.Sprint(err), err == nil || errors.Is(err, fs.ErrNotExist)
			})
		})
		if err := os.WriteFile(filepath.Join(dir, v.limit), []byte(strconv.Itoa(limit)), 0); err == nil {
			return &Cgroup{dir, filepath.Join(dir, v.peak)}
		}
	}
	return nil
}

// Command returns a command that begins in the cgroup. With nil it begins where
// the test is.
func (g *Cgroup) Command(name string, args ...string) *exec.Cmd {
	dir := ""
	if g != nil {
		dir = g.dir
	}
	return exec.Command("sh", append([]string{"-c", `[ -z "$1" ] || echo $$ > "$1/cgroup.procs" || exit; shift; exec "$@"`, "sh", dir, name}, args...)...)
}
