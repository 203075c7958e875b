package kubernetes

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// kubeconfigOfAll writes a kubeconfig with a context for each server: a, b and
// so on.
func kubeconfigOfAll(t *testing.T, all ...*testkube.Server) string {
	t.Helper()
	var contexts, clusters, users strings.Builder
	for i, k := range all {
		name := string(rune('a' + i))
		fmt.Fprintf(&contexts, "- {name: %[1]s, context: {cluster: %[1]s, user: %[1]s}}\n", name)
		fmt.Fprintf(&clusters, "- {name: %s, cluster: {server: %q, certificate-authority-data: %s}}\n", name, k.URL, base64.StdEncoding.EncodeToString(readFile(t, k.CAFile)))
		fmt.Fprintf(&users, "- {name: %s, user: {token: %s}}\n", name, k.Token)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := "apiVersion: v1\nkind: Config\ncontexts:\n" + contexts.String() + "clusters:\n" + clusters.String() + "users:\n" + users.String()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestContexts follows two clusters as one registry: what both have is one
// service, and an outage of one keeps what that one said and nothing else.
func TestContexts(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	a, b := testkube.Start(t, testkube.Config{}), testkube.Start(t, testkube.Config{})
	seed(t, a)
	ofB := svc("default", "web") + slice("default", "web", "web-a", "10.9.0.1") + svc("default", "only-b") + slice("default", "only-b", "only-b-a", "10.9.0.2")
	b.Apply(t, ofB)
	config := Config{KubeconfigFile: kubeconfigOfAll(t, a, b), Contexts: []string{"a", "b"}}
	c, stop := start(t, config)
	defer stop()
	const both = "a/10.1.0.1:8080 a/10.1.0.2:8080 b/10.9.0.1:8080"
	c.AwaitSynced(t, within)
	c.Look(func(h *plugintest.Held) {
		if h.IDs("default/web") != both || h.IDs("default/only-b") != "b/10.9.0.2:8080" || h.Instances["default/web"][2].Cluster != "b" {
			t.Errorf("both clusters: %+v", h.Instances)
		}
	})
	// It comes after the listing.
	c.Await(t, within, "how they are followed", func(h *plugintest.Held) bool {
		return h.Detail == fmt.Sprintf("a: watching %s; b: watching %s", a.URL, b.URL)
	})

	b.Kill()
	c.Await(t, within, "which context is away", func(h *plugintest.Held) bool {
		return strings.HasPrefix(h.Degraded, "context b: "+b.URL) && !strings.Contains(h.Degraded, "context a")
	})
	a.Apply(t, slice("default", "web", "web-a", "10.1.0.1", "10.1.0.3"))
	c.AwaitIDs(t, within, "a change of the other one", "default/web", "a/10.1.0.1:8080 a/10.1.0.3:8080 b/10.9.0.1:8080")
	a.Delete(t, svc("default", "web"), "")
	c.AwaitIDs(t, within, "a removal in the other one", "default/web", "b/10.9.0.1:8080")
	seed(t, a)
	c.AwaitIDs(t, within, "it is back", "default/web", both)

	b.RestartEmpty(t)
	c.Await(t, within, "an empty cluster is not believed", func(h *plugintest.Held) bool {
		return strings.Contains(h.Degraded, "context b: ") && strings.Contains(h.Degraded, "accept_empty")
	})
	b.Apply(t, ofB)
	c.Await(t, within, "it is over", func(h *plugintest.Held) bool { return h.Degraded == "" })
	c.Look(func(h *plugintest.Held) {
		if h.IDs("default/web") != both || h.Least["default/only-b"] != 1 {
			t.Errorf("after the outage: %+v, least %v", h.Instances, h.Least)
		}
	})
	b.Delete(t, slice("default", "web", "web-a"), "")
	c.AwaitIDs(t, within, "what leaves leaves at once", "default/web", "a/10.1.0.1:8080 a/10.1.0.2:8080")

	// Of an object of Istio there is one.
	for i, k := range []*testkube.Server{a, b} {
		k.ApplyKinds(t, testkube.IstioCRDsTool)
		k.Apply(t, entryNamed("shared", "", fmt.Sprintf("cluster-%d.example.org", i)))
	}
	config.Follow = followIstio
	i, stop := start(t, config)
	defer stop()
	const entry = "networking.istio.io/ServiceEntry default/shared"
	host := func(want string) func(*plugintest.Held) bool {
		return func(h *plugintest.Held) bool {
			var spec networking.ServiceEntry
			return h.Resources[entry] != nil && h.Resources[entry].Body.UnmarshalTo(&spec) == nil && spec.Hosts[0] == want
		}
	}
	i.AwaitSynced(t, within)
	i.Await(t, within, "the first context's", func(h *plugintest.Held) bool {
		return host("cluster-0.example.org")(h) && strings.Contains(h.Problems["default/networking.istio.io/ServiceEntry/shared"], "several contexts")
	})
	b.Apply(t, entryNamed("other", "", "other.example.org"))
	a.Apply(t, entryNamed("last", "", "last.example.org"))
	a.Delete(t, entryNamed("shared", "", ""), "")
	i.Await(t, within, "the second context's", func(h *plugintest.Held) bool { return host("cluster-1.example.org")(h) && len(h.Problems) == 0 })
}
