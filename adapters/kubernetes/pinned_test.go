package kubernetes

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"runtime"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// testPinned shows that a user gets in by a program where the adapter's own
// executable is pinned, and so a sealed copy in memory without a path.
func testPinned(t *testing.T, k *testkube.Server) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has files in memory")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(readFile(t, self))
	program, user := credentialProgram(t, k.Token)
	config, err := json.Marshal(map[string]any{"kubeconfig_file": k.KubeconfigOf(t, user), "exec": program, "accept_empty": true})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	host, err := supervisor.NewHost("/tmp", log)
	if err != nil {
		t.Fatal(err)
	}
	s := synced{result: make(chan error, 1)}
	sup, err := supervisor.New(host, supervisor.Spec{
		Registry: "east", Adapter: "kubernetes", Command: []string{self}, SHA256: hex.EncodeToString(sum[:]), Env: []string{"ISTHMUS_PLUGINTEST_SELF=1"},
		Config: config,
	}, s, log, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	done := make(chan error, 1)
	// Ends with ctx; waited for below.
	go func() { done <- sup.Run(ctx) }()
	select {
	case err = <-s.result:
	case <-ctx.Done():
		err = errors.New("no listing: " + sup.Status().LastError)
	}
	cancel()
	if err := errors.Join(err, <-done, host.Close()); err != nil {
		t.Error(err)
	}
}

// synced is a supervisor.Sink that waits for the first listing.
type synced struct{ result chan error }

// Begin implements supervisor.Sink.
func (synced) Begin(supervisor.Description) {}

// Apply implements supervisor.Sink.
func (s synced) Apply(resp *pluginv1.WatchResponse) error {
	if resp.GetSynced() {
		s.Down(nil)
	}
	return nil
}

// Down implements supervisor.Sink.
func (s synced) Down(err error) {
	select {
	case s.result <- err:
	default: // there is one
	}
}
