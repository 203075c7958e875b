package main

import (
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// Twelve faults at once: the page, /readyz, the API, the metric, doctor and
// explain name each of them alike, with the cure and the runbook.
func TestFaultsAreNamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	if err := os.Mkdir(filepath.Join(dir, "swept"), 0o700); err != nil {
		t.Fatal(err)
	}
	write("swept/services.yaml", fileServices(20))
	crash := write("isthmus-adapter-crash", "#!/bin/sh\nexit 7\n")
	if err := os.Chmod(crash, 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	lives := func(from, until time.Duration) *testcert.Certificate {
		return testcert.New(t, "bridge", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(from), time.Now().Add(until) })
	}
	expired, ending, fine := lives(-48*time.Hour, -time.Hour), lives(-90*24*time.Hour, 48*time.Hour), lives(-time.Hour, 90*24*time.Hour)
	listener := func(c *testcert.Certificate) string {
		return fmt.Sprintf(`{address: "127.0.0.1:0", tls: {cert_file: %q, key_file: %q}}`, c.Cert, c.Key)
	}
	text := fmt.Sprintf(`
listen:
  xds: [%s, %s, %s]
  admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}
limits: {services_per_registry: 24}
state: {dir: /proc/nowhere}
registries:
- {name: swept, type: file, config: {path: %q}}
- {name: dead, type: consul, required: false, sync_timeout: 1s, config: {address: "http://127.0.0.1:%d"}}
- {name: late, type: file, config: {path: %q}}
- {name: crash, type: crash}
- {name: full, type: sim, config: {services: 20, changes_per_second: 0}}
plugin_dir: %q
`, listener(expired), listener(ending), listener(fine), filepath.Join(dir, "swept"), testenv.FreePort(t), filepath.Join(dir, "late"), dir)
	file := write("isthmus.yaml", text)
	other := write("doctor.yaml", "registries: [{name: load, type: sim, config: {services: 1}}]\n")

	p := start(t, "serve", "--config", file)
	address := p.find(p.stderr, `msg=serving xds=\S+ admin=(\S+)`)[1]
	admin := "http://" + address
	p.find(p.stderr, `msg="listing complete" registry=swept`)
	write("swept/services.yaml", fileServices(1))
	if err := os.Truncate(fine.Cert, 10); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text+"more: wrong\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, admin+"/api/v1/status", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = "rebound.example.org"
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()

	faults := map[string]string{
		"registry-not-live": "registry crash", "serves-without": "registry dead", "types-waiting": "registry late", "removal-paused": "registry swept",
		"plugin-restarts": "registry crash", "limit-near": "registry full", "certificate-invalid": "listener listen.xds", "certificate-expires": "listener listen.xds",
		"files-not-renewed": "listener listen.xds", "state-failing": "state.dir /proc/nowhere", "reload-failed": "configuration " + file, "access-refused": "listener listen.admin",
	}
	// named returns the faults that a text does not name.
	unnamed := func(text string, form func(condition, subject string) string) (out []string) {
		for condition, subject := range faults {
			if !strings.Contains(text, form(condition, subject)) {
				out = append(out, condition)
			}
		}
		return out
	}
	anchor := func(condition, _ string) string {
		return "docs/runbooks.md#isthmus" + strings.ReplaceAll(condition, "-", "")
	}
	for path, form := range map[string]func(condition, subject string) string{
		"/readyz":            anchor,
		"/api/v1/conditions": func(condition, _ string) string { return fmt.Sprintf(`"condition": %q`, condition) },
		"/metrics": func(condition, subject string) string {
			return fmt.Sprintf(`isthmus_condition{condition=%q,subject="%s`, condition, subject)
		},
		"/":               anchor,
		"/host/s00.swept": anchor,
	} {
		testwait.Eventually(t, patience, path+" to name every fault", func() (string, bool) {
			_, body := get(t, admin+path)
			missing := unnamed(body, form)
			if path == "/host/s00.swept" { // not of other registries
				missing = nil
				for _, c := range []string{"removal-paused", "state-failing", "reload-failed", "certificate-invalid"} {
					if !strings.Contains(body, anchor(c, "")) {
						missing = append(missing, c)
					}
				}
			}
			return fmt.Sprintf("%q is missing in %s", missing, body), len(missing) == 0
		})
	}
	if _, metrics := get(t, admin+"/metrics"); strings.Count(metrics, `,subject="registry dead"} 1`) != 1 {
		t.Errorf("an optional registry that is away is not one condition: %s", metrics)
	}
	_, page := get(t, admin+"/")
	if !strings.Contains(page, `class="banner bad"`) || strings.Contains(page, `class="banner good"`) {
		t.Error("the page is not red")
	}
	if code, _ := get(t, admin+"/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz = %d while a required registry is missing", code)
	}
	for _, args := range [][]string{{"doctor", "--config", other, "--address", address}, {"explain", "nothing.example.org", "--address", address}} {
		c := start(t, args...)
		c.wait()
		if missing := unnamed(strings.Join(c.stdout.seen, "\n"), anchor); len(missing) > 0 {
			t.Errorf("%s does not name %q:\n%s", args[0], missing, strings.Join(c.stdout.seen, "\n"))
		}
	}
}

// An own certificate that has expired is said before anything starts.
func TestValidateExpired(t *testing.T) {
	expired := testcert.New(t, "bridge", func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
	})
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, "listen: {admin: 127.0.0.1:0, xds: {address: 127.0.0.1:0, tls: {cert_file: %q, key_file: %q}}}\nregistries: [{name: load, type: sim}]\n", expired.Cert, expired.Key), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "validate", "--config", file)
	if code, said := p.wait(), strings.Join(p.stderr.seen, "\n"); code != exitOK || !strings.Contains(said, "listen.xds.tls.cert_file: its own certificate expired at ") {
		t.Errorf("validate ended with %d and wrote %s", code, said)
	}
	d := start(t, "doctor", "--config", file)
	if code, said := d.wait(), strings.Join(d.stdout.seen, "\n"); code != exitFailed || !strings.Contains(said, "its own certificate expired at ") {
		t.Errorf("doctor ended with %d and wrote %s", code, said)
	}
}
