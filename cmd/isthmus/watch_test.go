package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A watch with a profile is taken for what it says and gets what such a sink
// gets; one without is a tool.
func TestWatchProfile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, []byte(`
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
mcp: {synthetic_entries: true}
registries: [{name: load, type: sim, config: {services: 3, changes_per_second: 20, changes: {weight: 1}}}]
`), 0o600); err != nil {
		t.Fatal(err)
	}
	server := start(t, "serve", "--config", file)
	at := server.find(server.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	server.find(server.stderr, `msg="listing complete" registry=load`)
	for _, tt := range []struct {
		args          []string
		profile, node string
		collections   int
		incremental   bool
		services      string // the collection in which they are
	}{
		{[]string{"--profile", "pilot-1.8", "--incremental"}, "pilot-1.8", "", 11, true, "serviceentries"},
		{[]string{"--profile", "pilot-1.6"}, "pilot-1.6", "", 18, false, "serviceentries"},
		// With synthetic entries the main stream of 1.4 has none.
		{[]string{"--profile", "synthetic"}, "synthetic", "SSEMCP", 1, false, "synthetic/serviceentries"},
		{nil, "mcp-tools", "isthmus-watch~", 1, false, "serviceentries"},
	} {
		t.Run(tt.profile, func(t *testing.T) {
			w := start(t, append([]string{"watch", "--address", at[1], "--protocol", "mcp", "--output", "json"}, tt.args...)...)
			w.find(w.stdout, `"push":\d+,"collection":"istio/networking/v1alpha3/`+tt.services+`"`)
			w.find(w.stdout, `"push":[2-9]\d,`) // later ones are incremental where that is permitted
			var sinks struct {
				Items []struct {
					Node, Profile string
					Subscriptions []struct {
						TypeURL     string `json:"type_url"`
						Incremental bool
					}
				}
			}
			code, body := get(t, "http://"+at[2]+"/api/v1/sinks")
			if err := json.Unmarshal([]byte(body), &sinks); err != nil || code != http.StatusOK || len(sinks.Items) != 1 {
				t.Fatalf("/api/v1/sinks = %d %s, %v", code, body, err)
			}
			sink := sinks.Items[0]
			if sink.Profile != tt.profile || !strings.HasPrefix(sink.Node, tt.node) || tt.node == "" && sink.Node != "" || len(sink.Subscriptions) != tt.collections {
				t.Errorf("the server takes it for %+v", sink)
			}
			for _, sub := range sink.Subscriptions {
				if strings.HasSuffix(sub.TypeURL, "/"+tt.services) && sub.Incremental != tt.incremental {
					t.Errorf("incremental is %v, want %v", sub.Incremental, tt.incremental)
				}
			}
			w.signal(syscall.SIGINT)
			if code := w.wait(); code != exitOK {
				t.Errorf("exit code %d; it wrote:\n%s", code, strings.Join(w.stderr.seen, "\n"))
			}
			server.find(server.stderr, `msg="sink disconnected"`)
		})
	}
	server.signal(syscall.SIGTERM)
	if code := server.wait(); code != exitOK {
		t.Errorf("exit code of serve %d", code)
	}
}
