package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// A server under churn violates nothing, live or as recorded, over each
// protocol; a recording that lacks a removal's cause does.
func TestVerify(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "isthmus.yaml")
	if err := os.WriteFile(file, []byte("listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}\n"+
		"registries: [{name: load, type: sim, config: {services: 5, changes_per_second: 50}}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	server := start(t, "serve", "--config", file)
	address := server.find(server.stderr, `msg=serving xds=(\S+) `)[1]
	server.find(server.stderr, `msg="listing complete" registry=load`)

	verified := func(p *process, code int, last string) {
		t.Helper()
		got := p.wait()
		if out := strings.TrimSpace(strings.Join(p.stdout.seen, "\n")); got != code || !strings.HasSuffix(out, last) {
			t.Errorf("exit code %d, want %d:\n%s\n%s", got, code, out, strings.Join(p.stderr.seen, "\n"))
		}
	}
	recorded := filepath.Join(dir, "live.jsonl")
	live := start(t, "verify", address, "--record", recorded)
	beside := start(t, "watch", "--address", address) // to see that there are changes
	beside.find(beside.stdout, `push [3-9]\d `)
	testwait.Eventually(t, patience, "something to be recorded", func() (string, bool) {
		text, err := os.ReadFile(recorded)
		return fmt.Sprint(err), strings.Contains(string(text), `"event":"response"`)
	})
	live.signal(syscall.SIGTERM)
	verified(live, exitOK, " 0 violations")
	verified(start(t, "verify", recorded), exitOK, " 0 violations")

	for _, protocol := range []string{"sotw", "delta", "mcp"} {
		recorded := filepath.Join(dir, protocol+".jsonl")
		w := start(t, "watch", "--address", address, "--protocol", protocol, "--record", recorded)
		w.find(w.stdout, `push [1-9]\d `)
		w.signal(syscall.SIGTERM)
		w.wait()
		verified(start(t, "verify", recorded), exitOK, " 0 violations")
	}

	truth := filepath.Join(dir, "truth.jsonl")
	stream := filepath.Join(dir, "stream.jsonl")
	for path, text := range map[string]string{
		truth: `{"time":"2026-01-01T00:00:00Z","event":"truth","collection":"networking.istio.io/ServiceEntry","name":"dc1/web","revision":1}` + "\n",
		stream: `{"time":"2026-01-01T00:00:01Z","event":"open","stream":1,"protocol":"sotw"}
{"time":"2026-01-01T00:00:01Z","event":"request","stream":1,"type":"networking.istio.io/v1/ServiceEntry"}
{"time":"2026-01-01T00:00:02Z","event":"response","stream":1,"type":"networking.istio.io/v1/ServiceEntry","nonce":"1","version":"a","resources":[{"name":"dc1/web","version":"b","sum":"c","content":"d"}]}
{"time":"2026-01-01T00:00:03Z","event":"request","stream":1,"type":"networking.istio.io/v1/ServiceEntry","nonce":"1"}
{"time":"2026-01-01T00:00:04Z","event":"response","stream":1,"type":"networking.istio.io/v1/ServiceEntry","nonce":"2","version":"e"}
`,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := start(t, "verify", stream, "--truth", truth, "--output", "json")
	p.find(p.stdout, `^\{"guarantee":1,"title":"no removal without cause","event":6,"time":"2026-01-01T00:00:04Z","stream":1,"text":`)
	verified(p, exitChanges, `"violations":1}`)
	verified(start(t, "verify", stream), exitOK, " 0 violations")
}
