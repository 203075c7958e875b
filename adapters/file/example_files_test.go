package file

import (
	"os"
	"path/filepath"
	"testing"
)

// TestQuickstart shows that the files of examples/quickstart can be read.
func TestQuickstart(t *testing.T) {
	files, err := filepath.Glob("../../examples/quickstart/mesh/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		must(t, err)
		if _, err := parse(data, "static"); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}
