//go:build unix

package file

import (
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestNamedPipe shows that a named pipe, which nobody writes to, stops nothing.
func TestNamedPipe(t *testing.T) {
	dir := t.TempDir()
	must(t, syscall.Mkfifo(filepath.Join(dir, "pipe.yaml"), 0o600))
	write(t, dir, "web.yaml", web("10.0.0.1"))
	v := start(t, dir).await(t, "what can be read", func(v view) bool { return v.Degraded != "" })
	want := map[string]string{"file pipe.yaml": "pipe.yaml: is not a regular file; nothing of the file is served until it is corrected"}
	if diff := cmp.Diff(want, v.Problems); diff != "" || v.Services["web"] != "10.0.0.1" {
		t.Errorf("the catalog holds %v; problems (-want +got):\n%s", v.Services, diff)
	}
}
