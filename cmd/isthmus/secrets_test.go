package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/isthmus-mesh/isthmus/server/config"
)

// secretFields returns the paths of the fields of a schema that hold secrets.
func secretFields(schema map[string]any, path string) (found []string) {
	properties, _ := schema["properties"].(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		p, ok := properties[name].(map[string]any)
		if !ok {
			continue
		}
		if p["writeOnly"] == true {
			found = append(found, path+name)
		}
		if values, ok := p["additionalProperties"].(map[string]any); ok && values["writeOnly"] == true {
			found = append(found, path+name+".SECRET")
		}
		found = append(found, secretFields(p, path+name+".")...)
	}
	return found
}

// A secret of any adapter is shown nowhere, also if the registry refuses it and
// sends back what it was sent.
func TestSecretsStaySecret(t *testing.T) {
	t.Parallel()
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20))
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, "%s %s %s\n", r.URL, r.Header, body)
	}))
	defer echo.Close()
	host := strings.TrimPrefix(echo.URL, "http://")

	c := start(t, "docs", "--schema")
	if code := c.wait(); code != exitOK {
		t.Fatalf("docs --schema ended with %d", code)
	}
	var schema struct {
		Defs map[string]map[string]any `json:"$defs"`
	}
	if err := json.Unmarshal([]byte(strings.Join(c.stdout.seen, "\n")), &schema); err != nil {
		t.Fatal(err)
	}

	// What each adapter needs besides the secret, by the name of the field.
	minimal := map[string]string{
		"consul":    "address: " + echo.URL,
		"etcd":      "endpoints: [" + echo.URL + "]",
		"eureka":    "servers: [" + echo.URL + "]",
		"exec":      `command: [/bin/sh, -c, 'echo "with $SECRET" >&2; echo "no JSON: $SECRET"; echo "{\"service\": {\"$SECRET\": 1}}"; exit 1']`,
		"nacos":     "servers: [" + host + "], protocol: http",
		"zookeeper": "servers: [" + host + "], timeout: 1s",
	}
	beside := map[string]string{
		"password":             "username: ann",
		"nacos/secret_key":     "access_key: ak",
		"nacos/access_key":     "secret_key: sk",
		"nacos/security_token": "access_key: ak, secret_key: sk",
	}
	var registries, broken strings.Builder
	var env, canaries []string
	for _, adapter := range builtIn() {
		fields := secretFields(schema.Defs[adapter+"-config"], "")
		if len(fields) > 0 && minimal[adapter] == "" {
			t.Errorf("adapter %s has secrets (%v); tell the test its minimal block", adapter, fields)
			continue
		}
		for _, field := range fields {
			n := len(canaries)
			canary := fmt.Sprintf("c4nary-%d/of+%s", n, adapter)
			canaries = append(canaries, canary)
			env = append(env, fmt.Sprintf("CANARY_%d=%s", n, canary))
			block := minimal[adapter]
			for _, key := range []string{adapter + "/" + field, field} {
				if more := beside[key]; more != "" {
					block += ", " + more
					break
				}
			}
			set := func(value string) string {
				if block, key, ok := strings.Cut(field, "."); ok {
					return fmt.Sprintf("%s: {%s: %s}", block, key, value)
				}
				return field + ": " + value
			}
			variable := fmt.Sprintf("\"${CANARY_%d}\"", n)
			fmt.Fprintf(&registries, "- {name: r%d, type: %s, config: {%s, %s}}\n", n, adapter, block, set(variable))
			// A value of another kind, and a field that does not exist.
			fmt.Fprintf(&broken, "- {name: r%d, type: %s, config: {%s, %s}}\n", n, adapter, block, set("["+variable+"]"))
			fmt.Fprintf(&broken, "- {name: s%d, type: %s, config: {%s, other: %s}}\n", n, adapter, block, variable)
			fmt.Fprintf(&broken, "- {name: t%d, type: %s, config: {%s}}\n", n, adapter, set(variable))
		}
	}
	if len(canaries) < 8 {
		t.Fatalf("%d fields with secrets, want those of Consul, Eureka and Nacos at least", len(canaries))
	}
	sink := "sinks: [{address: \"" + host + "\", metadata: {authorization: \"${CANARY_0}\"}}]\n"
	search := func(where, text string) {
		t.Helper()
		for _, canary := range canaries {
			for _, form := range []string{canary, url.QueryEscape(canary), url.PathEscape(canary), strconv.Quote(canary), base64.StdEncoding.EncodeToString([]byte("ann:" + canary))} {
				if i := strings.Index(text, strings.Trim(form, `"`)); i >= 0 {
					t.Errorf("%s has a secret: ...%s...", where, text[max(0, i-200):min(len(text), i+100)])
					return
				}
			}
		}
	}
	dir := t.TempDir()
	write := func(name, registries string) string {
		path := filepath.Join(dir, name)
		replaceFile(t, path, "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nadmin: {pprof: true}\nlog: {level: debug}\nstate: {dir: "+dir+"/state}\n"+sink+"registries:\n"+registries)
		return path
	}
	good, bad := write("good.yaml", registries.String()), write("bad.yaml", broken.String())

	r := startWith(t, surroundings{env: env}, "serve", "--config", good)
	at := r.find(r.stderr, `msg=serving xds=\S+ admin=(\S+)`)
	admin := "http://" + at[1]
	for n := range canaries {
		await(t, admin+"/api/v1/registries?", fmt.Sprintf(`"name": "r%d",(?s:.)*?"phase": "degraded"`, n))
	}
	for _, path := range []string{"/", "/readyz", "/metrics", "/api/v1/registries", "/api/v1/services", "/api/v1/resources", "/api/v1/sinks", "/api/v1/changes", "/api/v1/kept", "/api/v1/status", "/debug/pprof/goroutine?debug=2", "/debug/pprof/cmdline"} {
		_, body := get(t, admin+path)
		search(path, body)
	}
	entries, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if line, err := os.ReadFile(entry); err == nil {
			search(entry, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	for _, args := range [][]string{
		{"validate", "--config", good},
		{"validate", "--config", good, "--against", at[1]},
		{"validate", "--config", bad},
		{"serve", "--config", bad},
		{"dump", "--config", good, "--timeout", "1s"},
		{"validate", "--config", bad, "--against", at[1]},
	} {
		c := startWith(t, surroundings{env: env}, args...)
		c.wait()
		search(strings.Join(args, " "), strings.Join(append(c.stdout.seen, c.stderr.seen...), "\n"))
	}
	// A reload that is refused.
	replaceFile(t, good, "listen: {xds: 127.0.0.1:0, admin: {address: 127.0.0.1:0, allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nregistries:\n"+broken.String())
	r.signal(syscall.SIGHUP)
	r.find(r.stderr, "the configuration was not reloaded")
	_, body := get(t, admin+"/api/v1/status")
	search("/api/v1/status after a refused reload", body)
	r.signal(syscall.SIGTERM)
	r.wait()
	log := strings.Join(append(r.stderr.seen, r.stdout.seen...), "\n")
	search("the log", log)
	for _, repeated := range []string{"with <secret>", "X-Consul-Token:[<secret>]", "Basic <secret>"} {
		if !strings.Contains(log, repeated) {
			t.Errorf("the log has no %s; was anything sent back?", repeated)
		}
	}
	if err := filepath.WalkDir(filepath.Join(dir, "state"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		search(path, string(text))
		return err
	}); err != nil {
		t.Error(err)
	}
}

// A secret that is written into the configuration itself is not shown with the
// line of a problem: logs of pipelines have it.
func TestExcerptsHideSecrets(t *testing.T) {
	for _, tt := range []struct{ line, field, want string }{
		{`  password: c4nary,c4nary # of c4nary`, "registries[0].config.password", "password:"},
		{`  telemetry: {headers: {x-team: "c4nary", authorization: "Bearer c4nary"}, traces: 7}`, "telemetry.traces", "traces: 7"},
		{`    authorization: Bearer c4nary`, "telemetry.headers", "authorization:"},
		{`    x-team: c4nary`, "telemetry.headers.x-team", "x-team:"},
		{`- {address: "127.0.0.1:1", metadata: {api-key: c4nary}, nonsense: 1}`, "sinks[0].nonsense", "nonsense: 1"},
		{`{"api-key": "c4nary", "token": c4nary c4nary}`, "x", `"token":`},
		{`  config: {address: a, token: "${NAME}", wrong: 1}`, "x", `"${NAME}", wrong: 1`},
		{`  key_file: /etc/key.pem`, "x", "/etc/key.pem"},
	} {
		var out strings.Builder
		problems := config.Problems{{Position: config.Position{Line: 1, Column: 1}, Field: tt.field, Reason: "is wrong"}}
		if err := writeExcerpts(&out, problems, []byte(tt.line+"\n")); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(out.String(), "c4nary") || !strings.Contains(out.String(), tt.want) {
			t.Errorf("%s is shown as\n%s", tt.line, &out)
		}
	}
}
