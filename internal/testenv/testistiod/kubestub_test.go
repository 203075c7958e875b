package testistiod

import (
	"testing"
)

func TestKubePathNamesOne(t *testing.T) {
	for path, want := range map[string]bool{
		"pods": false, "nodes/n": true, "namespaces/ns/pods": false, "namespaces/ns/pods/p": true, "namespaces": false,
	} {
		if got := namesOne(path); got != want {
			t.Errorf("namesOne(%q) = %v, want %v", path, got, want)
		}
	}
}
