package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// The steps of README.md, with its configuration and its commands, end in a
// call through a sidecar that answers 200, and check --call finds every hop in
// order. Only addresses and ports are the test's: nothing redirects calls to
// the sidecar here, so they go to the HTTP proxy in it, which serves port 80.
func TestREADME(t *testing.T) {
	testenv.SkipIfShort(t)
	root, err := testenv.Root()
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, usage, _ := strings.Cut(string(readme), "\n## Usage\n")
	usage, _, _ = strings.Cut(usage, "\n## ")
	// step returns the block of Usage that begins with a text.
	step := func(language, begin string) string {
		t.Helper()
		m := regexp.MustCompile("(?s)```" + language + "\n(" + regexp.QuoteMeta(begin) + ".*?)```").FindStringSubmatch(usage)
		if m == nil {
			t.Fatalf("README.md has no step %q", begin)
		}
		return m[1]
	}

	web := testproxy.Outside(t, testproxy.StartHTTPBackend(t, "web-1"))
	consul := testconsul.Start(t, testconsul.Config{})
	xds, admin, proxy := testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t)), testenv.Loopback(testenv.FreePort(t))
	var istiod *testistiod.Server
	own := func(text string) string {
		text = strings.NewReplacer("127.0.0.1:15051", xds, "127.0.0.1:15080", admin, "127.0.0.1:8500", consul.Addr,
			"10.0.0.7", web.Address, "8080", fmt.Sprint(web.Port), "{namespace: consul}", "{namespace: consul, ports: [{number: 80}]}").Replace(text)
		if istiod != nil {
			text = strings.ReplaceAll(text, "127.0.0.1:15014", istiod.Monitoring)
		}
		return text
	}
	dir := t.TempDir()
	env := append(os.Environ(), "XDG_STATE_HOME="+filepath.Join(dir, "state"), "PATH="+filepath.Dir(testisthmus.Binary(t))+":"+os.Getenv("PATH"))
	sh := func(commands string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", own(commands))
		cmd.Dir, cmd.Env = dir, env
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s%v\n%s", own(commands), err, out)
		}
		return string(out)
	}

	began := time.Now()
	sh(step("sh", "curl -X PUT"))
	write(t, filepath.Join(dir, "isthmus.yaml"), own(step("yaml", "# yaml-language-server")))
	validate, serve, _ := strings.Cut(strings.TrimSpace(step("sh", "isthmus validate")), "\n")
	sh(validate)
	bridge := testenv.NewProcess(t, "isthmus")
	bridge.StartReady(t, func() {
		bridge.Start(t, env, testisthmus.Binary(t), strings.Fields(strings.Replace(serve, "isthmus.yaml", filepath.Join(dir, "isthmus.yaml"), 1))[1:]...)
	}, func() (string, bool) { return testenv.Answers("http://" + admin + "/readyz") })

	// The lines that README.md shows are those that the command prints.
	printed := sh("isthmus meshconfig --config isthmus.yaml")
	var shown, mesh map[string]any
	if err := errors.Join(yaml.Unmarshal([]byte(own(step("yaml", "# istiod's mesh configuration"))), &shown), yaml.Unmarshal([]byte(printed), &mesh)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(shown, mesh); diff != "" {
		t.Errorf("README.md shows other lines than isthmus meshconfig prints (-shown +printed):\n%s", diff)
	}
	_, port, _ := strings.Cut(proxy, ":")
	istiod = testistiod.StartAs(t, testistiod.Options{
		Version: testistiod.Newest, Env: testproxy.SidecarEnv,
		Mesh: strings.Replace(printed, "configSources:\n", "configSources:\n  - address: "+testproxy.SidecarSource(t)+"\n", 1) +
			fmt.Sprintf("proxyHttpPort: %s\nproxyListenPort: %d\nproxyInboundListenPort: %d\n", port, testenv.FreePort(t), testenv.FreePort(t)),
	})
	istiod.WaitReady(t)
	testproxy.StartSidecar(t, istiod, proxy)

	called := strings.Replace(regexp.MustCompile(`http://\S+`).FindString(step("sh", "kubectl exec")), ":8080", "", 1)
	client := &http.Client{Timeout: testenv.CallTime, Transport: &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: proxy})}}
	t.Cleanup(client.CloseIdleConnections)
	testenv.Eventually(t, testenv.Patience, "a call through the sidecar to "+called, func() (string, bool) {
		body, code, err := testenv.Do(t.Context(), client, http.MethodGet, called, nil, nil)
		return fmt.Sprintf("status %d %s, error %v", code, body, err), code == http.StatusOK && string(body) == "web-1"
	})
	t.Logf("from the configuration to a call that answers 200: %s", time.Since(began).Round(time.Millisecond))

	check := strings.TrimSpace(step("sh", "kubectl -n istio-system port-forward"))
	check = check[strings.LastIndex(check, "\n")+1:]
	got := sh(check + " --address " + admin + " --proxy " + proxy)
	t.Log("\n" + got)
	for _, hop := range []string{"registry", "bridge", "sinks", "istiod", "call"} {
		if !regexp.MustCompile(`(?m)^ok +` + hop).MatchString(got) {
			t.Errorf("isthmus check does not find %s in order:\n%s", hop, got)
		}
	}
}
