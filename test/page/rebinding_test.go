package page

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// A page of somebody else reads nothing and changes nothing: neither one at a
// name that he has resolve to the bridge, which the browser takes for the
// bridge's own (DNS rebinding), nor one at another address.
func TestForeignPages(t *testing.T) {
	testenv.SkipIfShort(t)
	b := startBrowser(t, chromedp.Flag("host-resolver-rules", "MAP evil.example.org 127.0.0.1"))
	i := testisthmus.Start(t, "- {name: load, type: sim, config: {services: 2, instances: 1}}\n")
	await(t, i.Admin, "/api/v1/status", `"not_ready": []`)
	_, port, _ := strings.Cut(i.Admin, ":")
	foreign := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte("<title>elsewhere</title>"))
	}))
	defer foreign.Close()

	// What a page gets for a request: its status, or "failed" if the browser
	// does not tell.
	const fetch = `fetch(%q, {method: %q, mode: %q, headers: {"Content-Type": %q}, body: %s}).then(r => r.type + " " + r.status + " " + r.headers.get("content-type"), () => "failed")`
	ask := func(p *tab, url, method, mode, kind string) string {
		body := "undefined"
		if method == "POST" {
			body = `'{"level": "debug"}'`
		}
		return js[string](p, fmt.Sprintf(fetch, url, method, mode, kind, body))
	}
	open := func(url string) *tab {
		p := b.open(t, i.Admin, 1280, false)
		p.run(chromedp.Navigate(url))
		return p
	}

	t.Run("the bridge's own page", func(t *testing.T) {
		p := open("http://" + i.Admin + "/")
		if got := ask(p, "/api/v1/resources", "GET", "cors", "text/plain"); !strings.HasPrefix(got, "basic 200") {
			t.Errorf("it reads: %s", got)
		}
		if got := ask(p, "/api/v1/loglevel", "POST", "cors", "application/json"); !strings.HasPrefix(got, "basic 200") {
			t.Errorf("it changes the level: %s", got)
		}
	})
	t.Run("a name that resolves to the bridge", func(t *testing.T) {
		p := open("http://evil.example.org:" + port + "/")
		if at := js[string](p, "location.origin"); at != "http://evil.example.org:"+port {
			t.Fatalf("the page is of %s", at)
		}
		for _, path := range []string{"/api/v1/resources", "/api/v1/status", "/metrics", "/"} {
			if got := ask(p, path, "GET", "cors", "text/plain"); !strings.HasPrefix(got, "basic 421") {
				t.Errorf("it reads %s: %s", path, got)
			}
		}
		for _, path := range []string{"/api/v1/loglevel", "/api/v1/reload", "/api/v1/registries/load/accept"} {
			if got := ask(p, path, "POST", "cors", "application/json"); !strings.HasPrefix(got, "basic 421") {
				t.Errorf("it posts to %s: %s", path, got)
			}
		}
	})
	t.Run("another address", func(t *testing.T) {
		p := open(foreign.URL)
		for _, mode := range []string{"cors", "no-cors"} {
			if got := ask(p, "http://"+i.Admin+"/api/v1/resources", "GET", mode, "text/plain"); strings.Contains(got, "200") {
				t.Errorf("it reads, %s: %s", mode, got)
			}
			if got := ask(p, "http://"+i.Admin+"/api/v1/loglevel", "POST", mode, "text/plain"); strings.Contains(got, "200") {
				t.Errorf("it posts, %s: %s", mode, got)
			}
		}
	})
}
