package access

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-mesh/isthmus/server/config"
)

// audited returns the lines of an audit file.
func audited(t *testing.T, file string) (all []map[string]any) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var line map[string]any
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatalf("%v: %s", err, lines.Text())
		}
		delete(line, "time")
		delete(line, "level")
		all = append(all, line)
	}
	return all
}

// Each change and each refusal is a line that says who by what was verified,
// from where, what, and with which result; reading leaves none.
func TestAudit(t *testing.T) {
	tokens, readers := write(t, "tokens", "first\n"), write(t, "readers", "second\n")
	g, _, log := newGate(t, config.Listener{Allow: []config.Allow{
		{Peer: config.Peer{TokenFile: tokens}, Role: config.RoleOperate}, {Peer: config.Peer{TokenFile: readers}, Role: config.RoleRead},
	}})
	file := filepath.Join(t.TempDir(), "audit.log")
	if err := g.audit.SetFile(file); err != nil {
		t.Fatal(err)
	}
	defer g.audit.Close()
	h := g.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		Note(r.Context(), "level=debug")
		if role, _ := RoleOf(r.Context()); role != Operate {
			http.Error(w, "needs role: operate", http.StatusForbidden)
		}
	}), func(string) bool { return false })
	call := func(method, host, token string) int {
		r, w := httptest.NewRequestWithContext(t.Context(), method, "http://"+host+"/api/v1/loglevel?secret=x", strings.NewReader("{}")), httptest.NewRecorder()
		r.Header.Set("Authorization", "Bearer "+token)
		h.ServeHTTP(w, r)
		return w.Code
	}
	for _, c := range []struct {
		method, host, token string
		code                int
	}{
		{"GET", "127.0.0.1", "first", 200},
		{"POST", "127.0.0.1", "first", 200},
		{"DELETE", "127.0.0.1", "second", 403},
		{"POST", "127.0.0.1", "third", 401},
		{"GET", "127.0.0.1", "third", 401},
		{"POST", "evil.example.org", "first", 421},
	} {
		if code := call(c.method, c.host, c.token); code != c.code {
			t.Errorf("%+v: %d", c, code)
		}
	}
	const path = " /api/v1/loglevel"
	var got []string
	for _, line := range audited(t, file) {
		got = append(got, fmt.Sprintf("%v %v %v: %v %v %v", line["who"], line["from"], line["action"], line["result"], line["detail"], line["reason"]))
	}
	want := []string{
		"token a7937b64 192.0.2.1:1234 POST" + path + ": done level=debug <nil>",
		"token 16367aac 192.0.2.1:1234 DELETE" + path + ": refused level=debug <nil>",
		"anonymous 192.0.2.1:1234 POST" + path + ": refused <nil> rule",
		"anonymous 192.0.2.1:1234 GET" + path + ": refused <nil> rule",
		"anonymous 192.0.2.1:1234 POST" + path + ": refused <nil> host",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("the audit has\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if strings.Contains(log.String(), "msg=audit") {
		t.Errorf("lines are in the log, too: %s", log)
	}

	// A file that was renamed or removed is made again.
	if err := os.Rename(file, file+".1"); err != nil {
		t.Fatal(err)
	}
	call("POST", "127.0.0.1", "first")
	if n := len(audited(t, file)); n != 1 {
		t.Errorf("%d lines are in the new file", n)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the new file: %v, %v", info, err)
	}
	// What cannot be written is in the log, whatever its level is.
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(file, 0o700); err != nil {
		t.Fatal(err)
	}
	call("POST", "127.0.0.1", "first")
	if text := log.String(); !strings.Contains(text, "the audit file cannot be written") || !strings.Contains(text, `msg=audit who="token a7937b64"`) {
		t.Errorf("the log: %s", text)
	}
}

// Without a file the lines are in the log, whatever its level is. Refusals of
// one network are bounded, and those left out are counted.
func TestAuditBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := new(buffer)
		a := NewAudit(slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelError})))
		for i := range 100 {
			a.Record("", fmt.Sprintf("[2001:db8::%d]:5", i), "connect", AuditRefused)
		}
		a.Record("", "10.0.0.1:5", "connect", AuditRefused)
		for range 100 {
			a.Record("ann", "10.0.0.1:5", "POST /x", AuditDone)
		}
		if n := strings.Count(log.String(), "msg=audit"); n != auditRefusals+1+100 {
			t.Errorf("%d lines", n)
		}
		time.Sleep(time.Minute)
		a.Record("", "[2001:db8::9]:5", "connect", AuditRefused)
		if !strings.Contains(log.String(), fmt.Sprintf("omitted=%d", 100-auditRefusals)) {
			t.Errorf("nothing is said of what was left out: %s", log)
		}
	})
	(*Audit)(nil).Record("", "", "", AuditDone)
	Note(context.Background(), "x")
}

// A request is for a name of the listener: what nobody else can have resolve
// to it, and what the configuration or the certificate has.
func TestHosts(t *testing.T) {
	p := &Policy{listener: config.Listener{Address: "admin.example.org:15080", Hosts: []string{"bridge.example.org", "*.dev.example.org"}}}
	for host, want := range map[string]bool{
		"127.0.0.1:15080": true, "[::1]:15080": true, "10.0.0.1": true, "localhost:15080": true, "a.localhost": true, "isthmus:15080": true, "": true,
		"isthmus.mesh.svc:15080": true, "isthmus.mesh.svc.cluster.local": true, "bridge.example.org": true, "BRIDGE.example.org.:80": true, "admin.example.org": true,
		"a.dev.example.org": true,
		"evil.example.org":  false, "bridge.example.org.evil.example": false, "127.0.0.1.nip.io": false, "localhost.evil.example": false, "evil.svc.example.org": false, "[evil.example.org]": false,
	} {
		if got := p.ofListener(host); got != want {
			t.Errorf("%q: %v", host, got)
		}
	}
}
