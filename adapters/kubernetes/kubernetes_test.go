package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// within is how long a change may take on a busy machine.
const within = testenv.Patience

// start runs an adapter until stop is called for the first time.
func start(t *testing.T, c Config, changes ...func(*Adapter)) (_ *plugintest.Catalog, stop func()) {
	t.Helper()
	c.MinShare = DefaultConfig.MinShare
	if c.RemoveGrace == 0 {
		c.RemoveGrace = DefaultConfig.RemoveGrace
	}
	made, err := New(c, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	a := made.(*Adapter)
	for _, change := range changes {
		change(a)
	}
	ctx, cancel := context.WithCancel(context.Background())
	catalog := plugintest.NewCatalog()
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, catalog) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return catalog, stop
}

// slice is an EndpointSlice, with an endpoint for each address; one with a ! is
// not ready.
func slice(namespace, of, name string, addresses ...string) string {
	endpoints := make([]string, 0, len(addresses))
	for _, a := range addresses {
		a, notReady := strings.CutSuffix(a, "!")
		endpoints = append(endpoints, fmt.Sprintf("{addresses: [%s], conditions: {ready: %t}}", a, !notReady))
	}
	return fmt.Sprintf(`
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: %s, name: %s, labels: {kubernetes.io/service-name: %s}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [%s]
---
`, namespace, name, of, strings.Join(endpoints, ", "))
}

// svc is a Service without a selector.
func svc(namespace, name string) string {
	return fmt.Sprintf("{apiVersion: v1, kind: Service, metadata: {namespace: %s, name: %s, labels: {app: %s}}, spec: {ports: [{name: http, port: 80}]}}\n---\n", namespace, name, name)
}

const web2 = "10.1.0.1:8080 10.1.0.2:8080"

// seed gives a cluster the Service web, with two endpoints.
func seed(t *testing.T, k *testkube.Server) {
	t.Helper()
	k.Apply(t, svc("default", "web")+slice("default", "web", "web-a", "10.1.0.1", "10.1.0.2"))
}

// wantLeast checks that web never had less than two instances since the first
// list or ForgetLeast.
func wantLeast(t *testing.T, c *plugintest.Catalog) {
	t.Helper()
	c.Look(func(h *plugintest.Held) {
		if h.Least["default/web"] != 2 {
			t.Errorf("web had %d instances meanwhile", h.Least["default/web"])
		}
	})
}

func podOf(name, address string, ready bool) (spec, status string) {
	head := fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s, labels: {app: live}}\n", name)
	return head + "spec: {nodeName: n1, containers: [{name: c, image: c}]}\n",
		head + fmt.Sprintf("status: {phase: Running, podIP: %[1]s, podIPs: [{ip: %[1]s}], conditions: [{type: Ready, status: %[2]q}]}\n", address, map[bool]string{true: "True", false: "False"}[ready])
}

// TestKubernetes follows a real cluster through what happens to its objects, to
// the connection and to the server itself.
func TestKubernetes(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	k := testkube.Start(t, testkube.Config{Istio: true, Controllers: true})
	seed(t, k)
	k.Apply(t, "{apiVersion: v1, kind: Node, metadata: {name: n1, labels: {topology.kubernetes.io/zone: eu-1}}}")
	config := Config{KubeconfigFile: k.Kubeconfig}

	t.Run("life", func(t *testing.T) {
		k.Apply(t, `
apiVersion: v1
kind: Service
metadata: {name: live, labels: {team: blue}}
spec: {selector: {app: live}, ports: [{name: http, port: 80, targetPort: 8080}, {name: rpc, port: 90, appProtocol: kubernetes.io/h2c}]}
---
{apiVersion: v1, kind: Service, metadata: {name: outside}, spec: {type: ExternalName, externalName: db.example.org, ports: [{port: 5432}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: dns}, spec: {ports: [{name: dns, port: 53, protocol: UDP}]}}
`)
		c, stop := start(t, config)
		defer stop()
		c.AwaitSynced(t, within)
		c.AwaitIDs(t, within, "the first list", "default/web", web2)
		c.Await(t, within, "a name outside, and ports that are not TCP", func(h *plugintest.Held) bool {
			_, dns := h.Services["default/dns"]
			return h.IDs("default/outside") == "db.example.org" && strings.Contains(h.LeftOut["ports"], "default/dns 53/UDP") && !dns
		})
		spec, status := podOf("live-1", "10.2.0.1", true)
		k.Apply(t, spec)
		k.ApplyStatus(t, status)
		c.AwaitInstance(t, within, "a pod", "default/live", "live-1", func(i registry.Instance) bool {
			return fmt.Sprintf("%+v", i) == fmt.Sprintf("%+v", registry.Instance{
				ID: "live-1", Address: "10.2.0.1", Health: registry.HealthPassing, Node: "n1", Locality: registry.Locality{Zone: "eu-1"},
				Ports: []registry.Port{{Name: "http", Number: 8080}, {Name: "rpc", Number: 90, Protocol: "http2"}},
			}) || fmt.Sprintf("%+v", i.Ports) == "[{Name:rpc Number:90 Protocol:http2} {Name:http Number:8080 Protocol:}]"
		})
		c.Look(func(h *plugintest.Held) {
			live := h.Services["default/live"]
			if got := fmt.Sprintf("%+v %v", live.Ports, live.Meta); got != "[{Name:http Number:80 Protocol:} {Name:rpc Number:90 Protocol:http2}] map[team:blue]" {
				t.Errorf("the service is %s", got)
			}
		})
		_, status = podOf("live-1", "10.2.0.1", false)
		k.ApplyStatus(t, status)
		c.AwaitInstance(t, within, "not ready", "default/live", "live-1", func(i registry.Instance) bool { return i.Health == registry.HealthCritical && !i.Disabled })
		_, status = podOf("live-1", "10.2.0.1", true)
		k.ApplyStatus(t, status)
		c.AwaitInstance(t, within, "ready again", "default/live", "live-1", func(i registry.Instance) bool { return i.Health == registry.HealthPassing })
		k.Delete(t, spec, "gracePeriodSeconds=3600")
		c.AwaitInstance(t, within, "terminating", "default/live", "live-1", func(i registry.Instance) bool { return i.Disabled })
		k.Delete(t, spec, "gracePeriodSeconds=0")
		c.AwaitIDs(t, within, "gone", "default/live", "")
		k.Delete(t, "{apiVersion: v1, kind: Service, metadata: {name: live}}", "")
		c.AwaitIDs(t, within, "the service is gone", "default/live", "-")
		c.Look(func(h *plugintest.Held) {
			if len(h.Reasons) != 0 || len(h.Problems) != 0 || h.Detail != "watching "+k.URL {
				t.Errorf("degraded %q, problems %q, detail %q", h.Reasons, h.Problems, h.Detail)
			}
		})
	})

	t.Run("selected", func(t *testing.T) {
		k.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: shop}}\n---\n{apiVersion: v1, kind: Namespace, metadata: {name: other}}\n---\n"+
			svc("shop", "cart")+slice("shop", "cart", "cart-a", "10.3.0.1")+svc("shop", "pay")+slice("shop", "pay", "pay-a", "10.3.0.2")+svc("other", "cart")+slice("other", "cart", "cart-a", "10.3.0.3"))
		for name, x := range map[string]struct {
			change func(*Config)
			want   string
		}{
			"namespaces": {func(c *Config) { c.Namespaces = []string{"other", "shop"} }, "other/cart shop/cart shop/pay"},
			"labels":     {func(c *Config) { c.Labels = "app in (cart,web)" }, "default/web other/cart shop/cart"},
			"select": {func(c *Config) {
				c.Select = plugin.Selection{Include: plugin.Globs{"shop/*"}, Exclude: plugin.Globs{"*/pay"}}
			}, "shop/cart"},
		} {
			of := config
			x.change(&of)
			c, stop := start(t, of)
			c.AwaitSynced(t, within)
			c.Look(func(h *plugintest.Held) {
				got := ""
				for _, key := range strings.Fields("default/web other/cart shop/cart shop/pay") {
					if len(h.Instances[key]) > 0 {
						got += " " + key
					}
				}
				if strings.TrimSpace(got) != x.want {
					t.Errorf("%s: services%s, want %s", name, got, x.want)
				}
			})
			if name == "labels" {
				// A Service that is no longer selected goes, and comes back
				// with the endpoints that it has meanwhile.
				k.Apply(t, strings.Replace(svc("shop", "cart"), "app: cart", "app: none", 1))
				c.AwaitIDs(t, within, "no longer selected", "shop/cart", "-")
				k.Apply(t, slice("shop", "cart", "cart-a", "10.3.0.1", "10.3.0.9")+svc("shop", "cart"))
				c.AwaitIDs(t, within, "selected again", "shop/cart", "10.3.0.1:8080 10.3.0.9:8080")
			}
			stop()
		}
	})

	t.Run("watches that end", func(t *testing.T) {
		c, stop := start(t, config, func(a *Adapter) { a.ends = time.Second })
		defer stop()
		c.AwaitIDs(t, within, "the first list", "default/web", web2)
		for n := range 3 {
			k.Apply(t, slice("default", "web", "web-b", fmt.Sprintf("10.1.1.%d", n)))
			c.AwaitIDs(t, within, "a change", "default/web", web2+fmt.Sprintf(" 10.1.1.%d:8080", n))
			var heard int
			c.Look(func(h *plugintest.Held) { heard = h.Heard })
			c.Await(t, within, "bookmarks", func(h *plugintest.Held) bool { return h.Heard > heard+2 })
		}
		k.Apply(t, slice("default", "web", "web-b"))
		c.AwaitIDs(t, within, "scaled in", "default/web", web2)
		c.Look(func(h *plugintest.Held) {
			if len(h.Reasons) != 0 {
				t.Errorf("degraded: %q", h.Reasons)
			}
		})
	})

	t.Run("pods", func(t *testing.T) { testPods(t, k, config) })
	t.Run("access", func(t *testing.T) { testAccess(t, k) })
	t.Run("login", func(t *testing.T) { testLogin(t, k) })
	t.Run("istio", func(t *testing.T) { testIstio(t, k, config) })

	t.Run("killed and started again", func(t *testing.T) {
		c, stop := start(t, config)
		defer stop()
		i, stopIstio := start(t, Config{KubeconfigFile: k.Kubeconfig, Follow: followIstio, RemoveGrace: plugin.Duration(time.Second)}, func(a *Adapter) { a.rediscover = time.Second })
		defer stopIstio()
		c.AwaitIDs(t, within, "the first list", "default/web", web2)
		const entry = "networking.istio.io/ServiceEntry default/kept"
		held := func(h *plugintest.Held) bool { return h.Resources[entry] != nil }
		i.Await(t, within, "the resource", held)
		k.Kill()
		for what, c := range map[string]*plugintest.Catalog{"services": c, "istio": i} {
			c.Await(t, within, "the reason, "+what, func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, k.URL) })
		}
		k.Restart(t)
		c.Await(t, within, "it is over", func(h *plugintest.Held) bool { return h.Degraded == "" })
		i.Await(t, within, "it is over", func(h *plugintest.Held) bool { return h.Degraded == "" })
		k.Apply(t, slice("default", "web", "web-b", "10.1.1.7"))
		c.AwaitIDs(t, within, "a change", "default/web", web2+" 10.1.1.7:8080")
		k.Apply(t, slice("default", "web", "web-b"))
		c.AwaitIDs(t, within, "scaled in", "default/web", web2)
		wantLeast(t, c)

		k.Kill()
		k.RestartEmpty(t)
		c.Await(t, within, "an empty cluster is not believed", func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, "accept_empty") })
		i.Await(t, within, "an empty cluster is not believed", func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, "accept_empty") && held(h) })
		k.Apply(t, svc("default", "web")+slice("default", "web", "web-a", "10.1.0.1"))
		c.Await(t, within, "what is missing is kept", func(h *plugintest.Held) bool {
			return strings.Contains(h.Degraded, "remove_grace") && h.IDs("default/web") == web2
		})
		wantLeast(t, c)
		seed(t, k)
		k.Apply(t, entryNamed("kept", "", "kept.example.org"))
		i.Await(t, within, "it is there again", func(h *plugintest.Held) bool { return h.Degraded == "" && held(h) })
	})

	t.Run("silent", func(t *testing.T) {
		silent := config
		silent.Timeout = plugin.Duration(4 * time.Second)
		c, stop := start(t, silent)
		defer stop()
		c.AwaitIDs(t, within, "the first list", "default/web", web2)
		c.ForgetLeast()
		k.Pause()
		c.Await(t, within, "the reason", func(h *plugintest.Held) bool { return h.Degraded != "" })
		k.Continue()
		c.Await(t, within, "it is over", func(h *plugintest.Held) bool { return h.Degraded == "" })
		k.Apply(t, slice("default", "web", "web-b", "10.1.1.7"))
		c.AwaitIDs(t, within, "a change", "default/web", web2+" 10.1.1.7:8080")
		wantLeast(t, c)
	})
}

// grant is the manifest that the adapter's page names.
func grant(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "examples", "kubernetes", file))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// testAccess shows who may follow a cluster, by which means, and what is said
// to others.
func testAccess(t *testing.T, k *testkube.Server) {
	token := k.ServiceAccount(t, "isthmus", "isthmus")
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	// As in a pod, but for the paths.
	pod := Config{Server: k.URL, TokenFile: file, TLS: plugin.TLS{CAFile: k.CAFile}, Pods: Pods{Labels: plugin.Globs{"version"}}}
	c, stop := start(t, pod)
	defer stop()
	mesh := pod
	mesh.Follow, mesh.AcceptEmpty, mesh.Pods = followIstio, true, Pods{}
	i, stopMesh := start(t, mesh)
	defer stopMesh()
	c.Await(t, within, "without rights", func(h *plugintest.Held) bool {
		return strings.Contains(h.Degraded, "may not list endpointslices, pods, services") && strings.Contains(h.Degraded, "system:serviceaccount:isthmus:isthmus") && strings.Contains(h.Degraded, "grant")
	})
	i.Await(t, within, "without rights", func(h *plugintest.Held) bool {
		return strings.Contains(h.Degraded, "virtualservices") && strings.Contains(h.Degraded, "peerauthentications")
	})
	k.Apply(t, grant(t, "rbac.yaml"))
	c.AwaitIDs(t, within, "with the manifest", "default/web", web2)
	c.Await(t, within, "it is over", func(h *plugintest.Held) bool { return h.Degraded == "" })
	i.Await(t, within, "with the manifest", func(h *plugintest.Held) bool { return h.Degraded == "" && h.Detail != "" })

	// A Role is enough for one namespace.
	narrow := k.ServiceAccount(t, "isthmus", "narrow")
	k.Apply(t, strings.ReplaceAll(strings.ReplaceAll(grant(t, "rbac-namespace.yaml"), "name: isthmus, namespace: isthmus", "name: narrow, namespace: isthmus"), "namespace: shop", "namespace: default"))
	one := Config{KubeconfigFile: k.KubeconfigOf(t, map[string]any{"token": narrow}), Namespaces: []string{"default"}, Pods: pod.Pods}
	n, stopNarrow := start(t, one)
	n.AwaitIDs(t, within, "with a Role", "default/web", web2)
	stopNarrow()
	one.Namespaces = nil
	n, stopNarrow = start(t, one)
	n.Await(t, within, "of every namespace", func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, "at the cluster scope") })
	stopNarrow()

	// A client certificate, by data and by files.
	cert := k.ClientCertificate(t, "bridge", "system:masters")
	for name, user := range map[string]map[string]any{
		"files": {"client-certificate": cert.Cert, "client-key": cert.Key},
		"data":  {"client-certificate-data": readFile(t, cert.Cert), "client-key-data": readFile(t, cert.Key)},
	} {
		x, stop := start(t, Config{KubeconfigFile: k.KubeconfigOf(t, user)})
		x.AwaitIDs(t, within, "a certificate in "+name, "default/web", web2)
		stop()
	}

	if err := os.WriteFile(file, []byte("unknown"), 0o600); err != nil {
		t.Fatal(err)
	}
	x, stopX := start(t, pod)
	x.Await(t, within, "an unknown token", func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, "status 401") })
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	x.AwaitIDs(t, within, "the file is read again", "default/web", web2)
	stopX()
}

// credentialProgram writes a program that prints a token, and returns it with
// the user of a kubeconfig that gets in by it. It reads the token from the file
// token beside it, adds a line to the file runs for each run, and fails without
// the information of which cluster it is for, or if it may not read.
func credentialProgram(t *testing.T, token string) (program string, user map[string]any) {
	t.Helper()
	dir := t.TempDir()
	program = filepath.Join(dir, "cloud-login")
	script := `#!/bin/sh
set -e
cd "$(dirname "$0")"
case "$1 $CLOUD $KUBERNETES_EXEC_INFO" in "get-token east "*'"server":"https://'*) ;; *) echo "called with $*, $KUBERNETES_EXEC_INFO" >&2; exit 3;; esac
echo run >> runs
cat <<END
{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "$(cat token)"}}
END
`
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil { //nolint:gosec // it is a program
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "token"), []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	return program, map[string]any{"exec": map[string]any{
		"apiVersion": "client.authentication.k8s.io/v1", "command": "cloud-login", "args": []string{"get-token"},
		"env": []any{map[string]any{"name": "CLOUD", "value": "east"}}, "interactiveMode": "IfAvailable", "provideClusterInfo": true,
	}}
}

// testLogin shows a user who gets in by a program: it runs once for a token
// that lasts, and again when the server refuses it.
func testLogin(t *testing.T, k *testkube.Server) {
	program, user := credentialProgram(t, k.Token)
	beside := func(name string) string { return filepath.Join(filepath.Dir(program), name) }
	config := Config{KubeconfigFile: k.KubeconfigOf(t, user)}
	for allowed, want := range map[string]string{"": "cloud-login; allow it by its path in exec", "/usr/bin/other": "exec allows /usr/bin/other only"} {
		config.Exec = allowed
		if _, err := New(config, plugin.Env{}); !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("with exec %q: error %v, want %s", allowed, err, want)
		}
	}
	config.Exec = program
	c, stop := start(t, config)
	c.AwaitIDs(t, within, "the first list", "default/web", web2)
	stop()
	if runs := readText(t, beside("runs")); runs != "run\n" {
		t.Errorf("it ran %d times for a token that lasts", strings.Count(runs, "\n"))
	}
	if err := os.WriteFile(beside("token"), []byte("over"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, stop = start(t, config)
	c.Await(t, within, "a token that is over", func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, "status 401") })
	if err := os.WriteFile(beside("token"), []byte(k.Token), 0o600); err != nil {
		t.Fatal(err)
	}
	c.AwaitIDs(t, within, "it runs again", "default/web", web2)
	stop()
	if err := os.Remove(beside("token")); err != nil {
		t.Fatal(err)
	}
	c, stop = start(t, config)
	c.Await(t, within, "it fails", func(h *plugintest.Held) bool {
		return strings.Contains(h.Degraded, "cloud-login") && strings.Contains(h.Degraded, "token")
	})
	stop()
}

func readText(t *testing.T, path string) string { return string(readFile(t, path)) }

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func entryNamed(name, labels, host string) string {
	return fmt.Sprintf("{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: %s, namespace: default, labels: {%s}, annotations: {a: b}}, spec: {hosts: [%s], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}}\n---\n", name, labels, host)
}

// testIstio publishes what a cluster has of Istio's kinds.
func testIstio(t *testing.T, k *testkube.Server, config Config) {
	config.Follow, config.Revision = followIstio, "canary"
	config.Select.Exclude = plugin.Globs{"*/excluded"}
	k.Apply(t, entryNamed("kept", "istio.io/rev: canary", "kept.example.org")+entryNamed("other", "istio.io/rev: stable", "other.example.org")+entryNamed("excluded", "", "excluded.example.org")+`
{apiVersion: security.istio.io/v1, kind: PeerAuthentication, metadata: {name: strict, namespace: default}, spec: {mtls: {mode: STRICT}}}
---
{apiVersion: networking.istio.io/v1alpha3, kind: EnvoyFilter, metadata: {name: filter, namespace: default}, spec: {}}
---
{apiVersion: networking.istio.io/v1beta1, kind: ProxyConfig, metadata: {name: proxy, namespace: default}, spec: {concurrency: 2}}
`)
	const kept = "networking.istio.io/ServiceEntry default/kept"
	c, stop := start(t, config)
	defer stop()
	c.AwaitSynced(t, within)
	c.Await(t, within, "every kind", func(h *plugintest.Held) bool {
		return h.Resources[kept] != nil && h.Resources["security.istio.io/PeerAuthentication default/strict"] != nil &&
			h.Resources["networking.istio.io/EnvoyFilter default/filter"] != nil && h.Resources["networking.istio.io/ProxyConfig default/proxy"] != nil
	})
	c.Look(func(h *plugintest.Held) {
		if len(h.Resources) != 4 || len(h.Services) != 0 || len(h.Problems) != 0 {
			t.Errorf("%d resources, services %v, problems %q; want 4 and none", len(h.Resources), h.Services, h.Problems)
		}
		m := h.Resources[kept].Metadata
		if m.Labels[revisionLabel] != "canary" || len(m.Annotations) != 1 || m.CreateTime == nil {
			t.Errorf("metadata %v", m)
		}
		var spec networking.ServiceEntry
		if err := h.Resources[kept].Body.UnmarshalTo(&spec); err != nil || spec.Hosts[0] != "kept.example.org" || spec.Resolution != networking.ServiceEntry_DNS {
			t.Errorf("spec %v, error %v", &spec, err)
		}
		if !strings.Contains(h.LeftOut["config.revision"], "1 resources") || !strings.Contains(h.LeftOut["config.select.exclude"], "default/excluded") {
			t.Errorf("left out: %q", h.LeftOut)
		}
	})
	host := func(want string) func(*plugintest.Held) bool {
		return func(h *plugintest.Held) bool {
			var spec networking.ServiceEntry
			return h.Resources[kept] != nil && h.Resources[kept].Body.UnmarshalTo(&spec) == nil && spec.Hosts[0] == want
		}
	}
	k.Apply(t, entryNamed("kept", "istio.io/rev: canary", "new.example.org"))
	c.Await(t, within, "a change", host("new.example.org"))
	k.Apply(t, entryNamed("kept", "istio.io/rev: stable", "new.example.org"))
	c.Await(t, within, "it is of another revision", func(h *plugintest.Held) bool { return h.Resources[kept] == nil })
	k.Apply(t, entryNamed("kept", "", "kept.example.org"))
	c.Await(t, within, "it is of every revision", host("kept.example.org"))
	k.Delete(t, "{apiVersion: security.istio.io/v1, kind: PeerAuthentication, metadata: {name: strict, namespace: default}}", "")
	c.Await(t, within, "a deletion", func(h *plugintest.Held) bool {
		return h.Resources["security.istio.io/PeerAuthentication default/strict"] == nil
	})
	c.Look(func(h *plugintest.Held) {
		if len(h.Reasons) != 0 {
			t.Errorf("degraded: %q", h.Reasons)
		}
	})
}

// TestBare follows a cluster without controllers.
func TestBare(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	k := testkube.Start(t, testkube.Config{})
	t.Run("cut at each point", func(t *testing.T) { testCut(t, k) })
	t.Run("login of a pinned executable", func(t *testing.T) { testPinned(t, k) })
	t.Run("kinds", func(t *testing.T) { testKinds(t, k) })
	t.Run("services of several clusters", func(t *testing.T) { testMultiCluster(t, k) })
}

// testKinds follows a cluster that gets Istio's kinds only later.
func testKinds(t *testing.T, k *testkube.Server) {
	c, stop := start(t, Config{KubeconfigFile: k.Kubeconfig, Follow: followIstio, AcceptEmpty: true}, func(a *Adapter) { a.rediscover = 100 * time.Millisecond })
	c.Await(t, within, "none of the kinds", func(h *plugintest.Held) bool { return h.Synced && strings.Contains(h.Problems["kinds"], "none") })
	defer stop()
	k.ApplyKinds(t, testkube.IstioCRDsTool)
	k.Apply(t, entryNamed("kept", "", "kept.example.org"))
	c.Await(t, within, "the kinds", func(h *plugintest.Held) bool {
		return h.Problems["kinds"] == "" && h.Resources["networking.istio.io/ServiceEntry default/kept"] != nil
	})
	c.Look(func(h *plugintest.Held) {
		for _, reason := range h.Reasons {
			// A busy server may not have made the storage of a new kind yet.
			if reason != "" && !strings.Contains(reason, "storage is (re)initializing") {
				t.Errorf("degraded: %q", h.Reasons)
			}
		}
	})
}

// TestConformance shows that the adapter as a plugin keeps the contract,
// against a real server.
func TestConformance(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	k := testkube.Start(t, testkube.Config{})
	seed(t, k)
	gate := testenv.NewGate(t, k.Addr)
	gate.Open(t)
	// By a program, which the confined adapter may not start itself.
	program, user := credentialProgram(t, k.Token)
	kubeconfig := k.KubeconfigOf(t, user)
	if err := os.WriteFile(kubeconfig, bytes.ReplaceAll([]byte(readText(t, kubeconfig)), []byte(k.Addr), []byte(gate.Addr)), 0o600); err != nil {
		t.Fatal(err)
	}
	of := func(grace string) []byte {
		b, err := json.Marshal(map[string]any{
			"kubeconfig_file": kubeconfig, "exec": program, "select": map[string]any{"exclude": []string{"default/kubernetes"}}, "remove_grace": grace,
		})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	joined := func(n int) string { return slice("default", "web", fmt.Sprint("web-", n), fmt.Sprint("10.1.2.", n)) }
	endpoints := func(want int) func(*plugintest.World) error {
		return func(w *plugintest.World) error { return w.WantInstances("web.default.svc.clusterset.local", want) }
	}
	apply := func(addresses ...string) func(context.Context) error {
		return func(context.Context) error { k.Apply(t, slice("default", "web", "web-a", addresses...)); return nil }
	}
	plugintest.Conformance(t, plugintest.Config{
		Config: of("1m"), Adapter: "kubernetes", Within: within,
		Changes: []plugintest.Change{
			{Name: "scaled out", MaxUpserts: 1, Want: endpoints(3), Do: apply("10.1.0.1", "10.1.0.2", "10.1.0.3")},
			{Name: "scaled in", Want: endpoints(2), Do: apply("10.1.0.1", "10.1.0.2")},
		},
		Outages: []plugintest.Outage{
			{
				Name: "cut off", Want: endpoints(2),
				Cut:     func(context.Context) error { gate.Shut(); return nil },
				Restore: func(context.Context) error { gate.Open(t); return nil },
			},
			{
				Name: "restarted without data, applied again",
				Cut:  func(context.Context) error { k.Kill(); return nil },
				Restore: func(context.Context) error {
					k.RestartEmpty(t)
					seed(t, k)
					return nil
				},
			},
		},
		Flaps: &plugintest.Flaps{
			Config: of("6s"), Grace: 6 * time.Second,
			Cut:     func(context.Context) error { gate.Shut(); return nil },
			Restore: func(context.Context) error { gate.Open(t); return nil },
			Host:    "web.default.svc.clusterset.local",
			Join:    func(_ context.Context, n int) error { k.Apply(t, joined(n)); return nil },
			Leave:   func(_ context.Context, n int) error { k.Delete(t, joined(n), ""); return nil },
		},
	})
}

// testCut cuts the connection after more and more bytes of what a
// server sends: within the handshake, the listings, the watches and what comes
// then. Nothing is lost, and nothing is left of a session that ended.
func testCut(t *testing.T, k *testkube.Server) {
	seed(t, k)
	gate := testenv.NewGate(t, k.Addr)
	gate.Open(t)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(k.Token), 0o600); err != nil {
		t.Fatal(err)
	}
	c, _ := start(t, Config{Server: "https://" + gate.Addr, TokenFile: token, TLS: plugin.TLS{CAFile: k.CAFile}, RemoveGrace: plugin.Duration(time.Millisecond)})
	c.AwaitIDs(t, within, "the first list", "default/web", web2)
	c.ForgetLeast()
	for _, n := range []int{1, 100, 1000, 2000, 2500, 3000, 3500, 4000, 4500, 5000, 6000} {
		var reasons int
		c.Look(func(h *plugintest.Held) { reasons = len(h.Reasons) })
		changed := web2 + fmt.Sprintf(" 10.1.1.%d:8080", n%250)
		gate.CutAfter(n)
		k.Apply(t, slice("default", "web", "web-b", fmt.Sprintf("10.1.1.%d", n%250)))
		// What is enough for a listing is no outage.
		c.Await(t, within, fmt.Sprint("cut after ", n), func(h *plugintest.Held) bool { return len(h.Reasons) > reasons || h.IDs("default/web") == changed })
		gate.CutAfter(-1)
		c.Await(t, within, fmt.Sprint("whole after ", n), func(h *plugintest.Held) bool {
			return h.Degraded == "" && h.IDs("default/web") == changed
		})
		k.Apply(t, slice("default", "web", "web-b"))
		c.AwaitIDs(t, within, fmt.Sprint("whole after ", n), "default/web", web2)
	}
	wantLeast(t, c)
	if n := len(gate.LocalPorts()); n > 1 {
		t.Errorf("%d connections, want one for everything", n)
	}
}

// heap returns the size of what is in use.
func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestKubernetesMany shows that 10,000 Services with 10 endpoints each are
// followed within bounds of memory, and that a change among them is one
// service.
func TestKubernetesMany(t *testing.T) {
	testenv.SkipIfShort(t)
	if !testenv.Compat() {
		t.Skip("make compat runs it: the services alone take half a minute to create")
	}
	const services, each = 10_000, 10
	k := testkube.Start(t, testkube.Config{Args: []string{"--max-requests-inflight=1000", "--max-mutating-requests-inflight=1000"}})
	begin := time.Now()
	k.Load(t, services, each)
	t.Logf("created in %v", time.Since(begin).Round(time.Second))
	before := heap()
	begin = time.Now()
	c, _ := start(t, Config{KubeconfigFile: k.Kubeconfig, Select: plugin.Selection{Exclude: plugin.Globs{"default/kubernetes"}}})
	c.Await(t, 4*within, "the first list", func(h *plugintest.Held) bool { return h.Synced && len(h.Services) == services })
	used := heap() - before
	t.Logf("listed in %v; %d MiB, of which the test's own catalog is about a half", time.Since(begin).Round(time.Millisecond), used>>20)
	if used > 400<<20 {
		t.Errorf("%d MiB are held for %d instances", used>>20, services*each)
	}
	c.Look(func(h *plugintest.Held) { h.Sets = 0 })
	begin = time.Now()
	k.Apply(t, slice("default", "app-7", "extra", "10.200.0.1"))
	c.Await(t, within, "a change", func(h *plugintest.Held) bool { return len(h.Instances["default/app-7"]) == each+1 })
	t.Logf("a change was seen %v after it was sent", time.Since(begin).Round(time.Microsecond))
	c.Look(func(h *plugintest.Held) {
		if h.Sets != 1 || h.Removes != 0 {
			t.Errorf("one change came to %d sets and %d removals", h.Sets, h.Removes)
		}
	})
}
