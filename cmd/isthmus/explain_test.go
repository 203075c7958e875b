package main

import (
	"encoding/json"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/server/admin"
)

// One command says why a host is as it is: an instance in maintenance, a
// registry that is shadowed, a protocol, a name made legal, a host that nobody
// has; and which sink has it.
func TestExplain(t *testing.T) {
	t.Parallel()
	r := serveFile(t, filepath.Join(t.TempDir(), "isthmus.yaml"), `listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
registries:
- name: prod
  type: static
  config:
    services:
    - name: web
      ports: [{number: 8080, name: http}]
      endpoints: [{address: 10.0.0.1, id: web-1}, {address: 10.0.0.2, id: web-2, disabled: true}]
    - name: Cache_One
      endpoints: [{address: 10.0.0.3, ports: [{number: 6379}]}]
  translate: {host: "{{.Name}}.example.org"}
- name: old
  type: static
  config: {services: [{name: web, ports: [{number: 8080, name: http}], endpoints: [{address: 10.9.0.1}]}]}
  translate: {host: "{{.Name}}.example.org"}
`)
	address := strings.TrimPrefix(r.admin, "http://")
	explain := func(host string, more ...string) string {
		t.Helper()
		p := start(t, append([]string{"explain", host, "--address", address}, more...)...)
		if code := p.wait(); code != exitOK {
			t.Fatalf("explain %s: exit code %d: %s", host, code, strings.Join(p.stderr.seen, "\n"))
		}
		return strings.Join(p.stdout.seen, "\n")
	}
	want := func(text string, patterns ...string) {
		t.Helper()
		for _, p := range patterns {
			if !regexp.MustCompile(p).MatchString(text) {
				t.Errorf("no %s in\n%s", p, text)
			}
		}
	}
	want(explain("web.example.org"),
		`Registry prod has the service web with 2 instances, of which 1 is fit for traffic\.`,
		`Instance web-2 is disabled in the registry: left out; enable it there \(maintenance\)\.`,
		`Registry old is not served for this host: registry "prod", which comes first in the configuration, has the host web\.example\.org too .*conflicts with policy merge`,
		`No sink is connected, so nobody receives it: name this bridge's xDS address`,
		`port: protocol of port http: HTTP, as the port's name begins with it`,
		`instance web-2; 10\.0\.0\.2; http 8080; unknown; disabled; NOT SERVED`,
		`ServiceEntry prod/web, version [0-9a-f]{16}, of prod`)
	want(explain("cache_one"),
		`translate\.host: host: cache-one\.example\.org, made legal from "Cache_One\.example\.org"`,
		`translate\.protocol\.default: protocol of port tcp: TCP, as nothing says it`)
	want(explain("wep.example.org"), `No registry has wep\.example\.org: did you mean web\.example\.org`)

	follow(t, r.xds[0]).await(t, 4, "prod")
	var e admin.Explanation
	testwait.Eventually(t, patience, "the sink to have acknowledged the host", func() (string, bool) {
		text := explain("WEB.example.org.", "--output", "json")
		e = admin.Explanation{}
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			t.Fatalf("%v in %s", err, text)
		}
		return text, len(e.Sinks) == 1 && e.Sinks[0].State == "acknowledged"
	})
	if s := e.Sinks[0]; s.Shape != "workload" || s.SentVersion == "" || s.AckedVersion == "" || s.SentAt.IsZero() || s.AckedAt.IsZero() {
		t.Errorf("the sink: %+v", s)
	}
	if code, body := get(t, r.admin+"/api/v1/explain"); code != http.StatusBadRequest || !strings.Contains(body, "host is missing") {
		t.Errorf("without a host: %d %s", code, body)
	}
	r.end()
}
