package kubernetes

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// ender is a proxy before an API server that ends watches in good order.
type ender struct {
	client *http.Client
	to     *url.URL

	mu      sync.Mutex
	watches []*context.CancelFunc // guarded by mu, oldest first
}

// startEnder starts an ender, at the URL that it returns.
func startEnder(t *testing.T, k *testkube.Server) (e *ender, address string) {
	t.Helper()
	to, err := url.Parse(k.URL)
	if err != nil {
		t.Fatal(err)
	}
	// It runs on this machine, and what it would show is not this.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true} //nolint:gosec // see above
	e = &ender{client: &http.Client{Transport: transport}, to: to}
	srv := httptest.NewServer(e)
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
		transport.CloseIdleConnections()
	})
	return e, srv.URL
}

// endOne ends the oldest watch.
func (e *ender) endOne() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.watches) > 0 {
		(*e.watches[0])()
	}
}

// ServeHTTP implements http.Handler.
func (e *ender) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	out := r.Clone(ctx)
	out.URL.Scheme, out.URL.Host, out.Host, out.RequestURI = e.to.Scheme, e.to.Host, "", ""
	out.Header.Del("Accept-Encoding")
	res, err := e.client.Do(out)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer res.Body.Close()
	w.Header().Set("Content-Type", res.Header.Get("Content-Type"))
	w.WriteHeader(res.StatusCode)
	flush := http.NewResponseController(w)
	_ = flush.Flush()
	if res.StatusCode == http.StatusOK && r.URL.Query().Has("watch") {
		e.mu.Lock()
		e.watches = append(e.watches, &cancel)
		e.mu.Unlock()
		defer func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.watches = slices.DeleteFunc(e.watches, func(c *context.CancelFunc) bool { return c == &cancel })
		}()
	}
	for b := make([]byte, 32<<10); ; {
		n, err := res.Body.Read(b)
		if n > 0 {
			_, _ = w.Write(b[:n])
			_ = flush.Flush()
		}
		if err != nil {
			return
		}
	}
}

var requestCount = regexp.MustCompile(`(?m)^apiserver_request_total\{[^}]*resource="(?:services|endpointslices)"[^}]*verb="(LIST|WATCH)"[^}]*\} (\S+)$`)

// requests returns how many listings and watches of Services and EndpointSlices
// an API server has answered since its start. A watch counts at its end.
func requests(t *testing.T, k *testkube.Server) map[string]int {
	t.Helper()
	body, code, err := k.Do(t.Context(), http.MethodGet, "/metrics", "", "", nil)
	if err != nil || code != http.StatusOK {
		t.Fatalf("/metrics: status %d, error %v", code, err)
	}
	n := map[string]int{}
	for _, m := range requestCount.FindAllSubmatch(body, -1) {
		v, err := strconv.ParseFloat(string(m[2]), 64)
		if err != nil {
			t.Fatal(err)
		}
		n[string(m[1])] += int(v)
	}
	return n
}

// TestWatchesThatEnd shows that a watch that ends goes on by itself: of 40, one
// after the other ends early, which costs one request each, is no outage and
// retains nothing.
func TestWatchesThatEnd(t *testing.T) {
	testenv.SkipIfShort(t)
	const namespaces, ends = 20, 15
	k := testkube.Start(t, testkube.Config{})
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(k.Token), 0o600); err != nil {
		t.Fatal(err)
	}
	proxy, server := startEnder(t, k)
	config := Config{Server: server, TokenFile: token, RemoveGrace: plugin.Duration(time.Hour)}
	for n := range namespaces {
		ns := fmt.Sprintf("ns-%d", n)
		config.Namespaces = append(config.Namespaces, ns)
		k.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+ns+"}}\n---\n"+svc(ns, "web")+slice(ns, "web", "web-a", "10.1.0.1", "10.1.0.2"))
	}
	before := requests(t, k)
	c, stop := start(t, config)
	c.Await(t, within, "the first list", func(h *plugintest.Held) bool { return h.Synced && len(h.Services) == namespaces })
	testenv.Eventually(t, within, "every watch", func() (string, bool) {
		proxy.mu.Lock()
		defer proxy.mu.Unlock()
		return strconv.Itoa(len(proxy.watches)), len(proxy.watches) >= 2*namespaces
	})
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for range ends {
		<-tick.C
		proxy.endOne()
	}
	// What leaves leaves at once.
	for n := range namespaces {
		k.Apply(t, slice(fmt.Sprintf("ns-%d", n), "web", "web-a", "10.1.0.1"))
	}
	for n := range namespaces {
		c.AwaitIDs(t, within, "scaled in", fmt.Sprintf("ns-%d/web", n), "10.1.0.1:8080")
	}
	stop()
	var after map[string]int
	testenv.Eventually(t, within, "the end of the watches", func() (string, bool) {
		after = requests(t, k)
		return fmt.Sprint(after), after["WATCH"]-before["WATCH"] >= 2*namespaces+ends
	})
	lists, watches := after["LIST"]-before["LIST"], after["WATCH"]-before["WATCH"]
	t.Logf("%d lists, %d watches", lists, watches)
	if lists > 2*namespaces || watches > 2*namespaces+2*ends {
		t.Errorf("%d lists and %d watches of %d resources, of which %d ended once", lists, watches, 2*namespaces, ends)
	}
	c.Look(func(h *plugintest.Held) {
		if len(h.Reasons) != 0 {
			t.Errorf("degraded %d times: %.300q", len(h.Reasons), h.Reasons)
		}
	})
}
