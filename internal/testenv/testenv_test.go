package testenv

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

func TestGateCutsAndLetsThrough(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "behind") }))
	defer backend.Close()
	gate := NewGate(t, backend.Listener.Addr().String())
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	get := func() error {
		body, _, err := Do(t.Context(), client, http.MethodGet, "http://"+gate.Addr, nil, nil)
		if err == nil && string(body) != "behind" {
			return fmt.Errorf("body %q", body)
		}
		return err
	}
	if get() == nil {
		t.Error("a gate that was never opened lets through")
	}
	for range 2 {
		gate.Open(t)
		if err := get(); err != nil {
			t.Errorf("open: %v", err)
		}
		gate.Shut() // cuts the connection that the client keeps
		if get() == nil {
			t.Error("a shut gate lets through")
		}
	}
}

func TestPinnedVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "go.mod")
	if err := os.WriteFile(path, []byte("module m\n\nrequire (\n\texample.org/a v1.2.3 // indirect\n)\nrequire example.org/b v0.1.0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for module, want := range map[string]string{"example.org/a": "1.2.3", "example.org/b": "0.1.0"} {
		if got, err := PinnedVersion(path, module); got != want || err != nil {
			t.Errorf("version of %s is %q, error %v; want %s", module, got, err, want)
		}
	}
	if got, err := PinnedVersion(path, "example.org"); err == nil {
		t.Errorf("version of a module that is not required is %q, want an error", got)
	}
}

func TestFetchSaysWhatCouldNotBeHad(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	broken := GoTool("consul", "consul", "github.com/hashicorp/consul", "./no-such-package")
	_, err := broken.Fetch(t.Context(), io.Discard)
	if err == nil || !strings.Contains(err.Error(), "could not get the test server consul") || !strings.Contains(err.Error(), "no-such-package") {
		t.Errorf("error %v, want one that names the server and the package", err)
	}
	path, err := broken.Path()
	if err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 { // the lock
		t.Errorf("left in the cache: %v, error %v; want the lock only", left, err)
	}
}

func TestFetchWaitsForAnotherProcess(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	var calls atomic.Int32
	tool := Tool{
		Name: "made", Program: "made",
		Version: func(string) (string, error) { return "1", nil },
		Get: func(_ context.Context, _, path string) error {
			calls.Add(1)
			return os.WriteFile(path, nil, 0o755)
		},
	}
	path, err := tool.Path()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	// A lock of another open file excludes just as that of another process.
	unlock, err := LockFile(t.Context(), path+".lock", func() { t.Error("nobody has the lock yet") })
	if err != nil {
		t.Fatal(err)
	}
	read, write := io.Pipe()
	fetched := make(chan error, 1)
	// Owned by the test, which waits for it below.
	go func() {
		_, err := tool.Fetch(t.Context(), write)
		fetched <- err
		write.Close()
	}()
	line, err := bufio.NewReader(read).ReadString('\n')
	if err != nil || !strings.Contains(line, "waiting") {
		t.Errorf("progress %q, error %v; want that it waits", line, err)
	}
	go func() { _, _ = io.Copy(io.Discard, read) }() // ends with write, closed by the goroutine above
	if calls.Load() != 0 {
		t.Error("got although another holds the lock")
	}
	unlock()
	if err := <-fetched; err != nil {
		t.Fatal(err)
	}
	if _, err := tool.Fetch(t.Context(), io.Discard); err != nil || calls.Load() != 1 {
		t.Errorf("got %d times, error %v; want once", calls.Load(), err)
	}
}

// A cluster as tests of it need it: its controllers make EndpointSlices, its
// users have tokens, certificates and what RBAC lets them do, Istio's kinds are
// validated, and it keeps its data when it is killed.
