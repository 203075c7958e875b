package kubernetes

import (
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

func TestMain(m *testing.M) {
	if os.Getenv(loginKey) != "" { // of an adapter in this process
		Main("test")
	}
	plugintest.Self(func() { Main("test") })
	// Package testenv has a goroutine of its own from the start, which on Linux
	// starts the servers.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/isthmus-mesh/isthmus/internal/testenv.startAll"))
}

// tokenFile returns a file with a token.
func tokenFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte("t"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
