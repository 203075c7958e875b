package file

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The program of the README writes files that the adapter never sees half
// written, whatever is in the directory meanwhile.
func TestProgramOfREADME(t *testing.T) {
	text, err := os.ReadFile("README.md")
	must(t, err)
	block := regexp.MustCompile("(?ms)^```python\n(.*?)^```").FindSubmatch(text)
	if block == nil {
		t.Fatal("the README has no program")
	}
	dir := t.TempDir()
	c := start(t, dir)
	c.await(t, "the empty directory", synced)
	program := string(block[1]) + `
import sys
instances = [{"address": f"10.0.{i // 250}.{i % 250 + 1}", "port": 80} for i in range(2000)]
for turn in range(20):
    instances[0]["id"], instances[0]["address"] = "first", f"10.1.0.{turn}"
    write(sys.argv[1], {"name": "web", "instances": instances})
write(sys.argv[1], {"name": "api", "instances": instances[:1]})
`
	if out, err := exec.CommandContext(t.Context(), "python3", "-c", program, dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c.await(t, "the last state", func(v view) bool {
		return v.Services["api"] == "10.1.0.19" && strings.HasPrefix(v.Services["web"], "10.1.0.19 ")
	})
	for _, call := range c.calls() {
		if strings.HasPrefix(call, "problem") || call == "degraded" || strings.HasPrefix(call, "remove") {
			t.Errorf("the adapter saw a file that is not whole: %s", call)
		}
	}
	entries, err := filepath.Glob(filepath.Join(dir, ".*"))
	if err != nil || len(entries) != 0 {
		t.Errorf("left over: %v, %v", entries, err)
	}
	must(t, os.Remove(filepath.Join(dir, "web.yaml")))
	c.await(t, "a file that is removed", func(v view) bool { return fmt.Sprint(v.Services) == "map[api:10.1.0.19]" })
}
