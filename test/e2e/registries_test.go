package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testeureka"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testzookeeper"
)

// scaling is a service of a registry that is called through Envoy while it is
// scaled.
type scaling struct {
	// registries configures the registry that has the service.
	registries string
	host       string
	port       int
	// add and remove register an instance and cancel it.
	add, remove func(testproxy.Backend)
}

// run scales from one instance to two and back to the second. No call fails,
// although the first one is gone in the end.
func (s scaling) run(t *testing.T) {
	t.Helper()
	one, two := testproxy.StartHTTPBackend(t, "one"), testproxy.StartHTTPBackend(t, "two")
	s.add(one)
	bridge := testisthmus.Start(t, s.registries)
	bridge.WaitReady(t)
	istiod := testistiod.Start(t, testistiod.Newest, bridge.Source())
	istiod.WaitReady(t)
	envoy := testproxy.StartEnvoy(t, istiod)
	cluster := testistiod.OutboundCluster(s.host, s.port)
	envoy.WaitReaches(t, cluster, "one")
	stop := keepCalling(t, envoy, cluster)
	defer stop()

	s.add(two)
	envoy.WaitReaches(t, cluster, "one", "two")
	s.remove(one)
	envoy.WaitReaches(t, cluster, "two")
	one.Stop()
	s.add(testproxy.StartHTTPBackend(t, "three"))
	envoy.WaitReaches(t, cluster, "two", "three")
	calls := stop()
	t.Logf("%d calls", calls)
	if calls == 0 {
		t.Error("no call was made meanwhile")
	}
}

// Calls follow the instances of an application that Eureka has.
func TestEurekaScales(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	eureka := testeureka.Start(t, testeureka.Config{})
	scaling{
		registries: fmt.Sprintf("- {name: eureka, type: eureka, config: {servers: [%q], interval: 1s}, translate: {ports: [{number: 80, protocol: http}]}}", eureka.URL),
		host:       "shop.eureka", port: 80,
		add: func(b testproxy.Backend) {
			eureka.Register(t, testeureka.Instance{App: "SHOP", ID: b.Name, IP: b.Address, Port: b.Port})
		},
		remove: func(b testproxy.Backend) { eureka.Deregister(t, "SHOP", b.Name) },
	}.run(t)
}

// Calls follow the instances that a program prints, which stays and prints
// again what has changed.
func TestExecScales(t *testing.T) {
	testenv.SkipIfShort(t)
	printed := filepath.Join(t.TempDir(), "printed")
	out, err := os.Create(printed)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	var instances []map[string]any
	say := func(lines ...any) {
		for _, line := range lines {
			if err := json.NewEncoder(out).Encode(line); err != nil {
				t.Fatal(err)
			}
		}
	}
	shop := func() any {
		return map[string]any{"service": map[string]any{"name": "shop", "instances": instances}}
	}
	scaling{
		registries: fmt.Sprintf("- {name: exec, type: exec, config: {command: [tail, --lines=+1, -f, %q]}, translate: {ports: [{number: 80, protocol: http}]}}", printed),
		host:       "shop.exec", port: 80,
		add: func(b testproxy.Backend) {
			instances = append(instances, map[string]any{"id": b.Name, "address": b.Address, "port": b.Port})
			say(shop(), map[string]any{"synced": true})
		},
		remove: func(b testproxy.Backend) {
			instances = slices.DeleteFunc(instances, func(i map[string]any) bool { return i["id"] == b.Name })
			say(shop())
		},
	}.run(t)
}

// Calls follow the providers of an interface of Dubbo, and the instances of an
// application, that ZooKeeper has.
func TestZooKeeperScales(t *testing.T) {
	testenv.SkipIfShort(t)
	zookeeper := testzookeeper.Start(t, testzookeeper.Config{})
	const registry = "- {name: zookeeper, type: zookeeper, config: {servers: [%q]}, translate: {ports: [%s]}}"
	provider := func(b testproxy.Backend) string {
		return "/dubbo/org.example.Shop/providers/" + url.QueryEscape(fmt.Sprintf("rest://%s:%d/org.example.Shop?application=%s&interface=org.example.Shop&side=provider", b.Address, b.Port, b.Name))
	}
	instance := func(b testproxy.Backend) string { return "/services/shop/" + b.Name }
	for _, s := range []scaling{
		{
			host: "org.example.shop.dubbo", registries: fmt.Sprintf(registry, zookeeper.Addr, "{name: rest, number: 80}"),
			add:    func(b testproxy.Backend) { zookeeper.Put(t, provider(b), "") },
			remove: func(b testproxy.Backend) { zookeeper.Delete(t, provider(b)) },
		},
		{
			host: "shop.zookeeper", registries: fmt.Sprintf(registry, zookeeper.Addr, "{number: 80, protocol: http}"),
			add: func(b testproxy.Backend) {
				zookeeper.Put(t, instance(b), fmt.Sprintf(`{"address":%q,"port":%d,"payload":{"metadata":{"instance_status":"UP"}}}`, b.Address, b.Port))
			},
			remove: func(b testproxy.Backend) { zookeeper.Delete(t, instance(b)) },
		},
	} {
		t.Run(s.host, func(t *testing.T) {
			s.port = 80
			s.run(t)
		})
	}
}

// Calls follow the providers of an interface of Dubbo that Nacos has.
func TestNacosDubboScales(t *testing.T) {
	testenv.SkipIfShort(t)
	if !testenv.Compat() {
		t.Skip("make compat runs it: Nacos alone takes a quarter of a minute to start")
	}
	server := testnacos.Start(t, testnacos.Config{})
	client := server.Client(t)
	providers := map[string]testnacos.Instance{}
	register := func() {
		var all []testnacos.Instance
		for _, name := range slices.Sorted(maps.Keys(providers)) {
			all = append(all, providers[name])
		}
		client.Register(t, "public", "DEFAULT_GROUP", "providers:org.example.Shop::", all...)
	}
	scaling{
		registries: fmt.Sprintf("- {name: nacos, type: nacos, config: {servers: [%q], dubbo: true}, translate: {ports: [{name: rest, number: 80}]}}", server.Addr),
		host:       "org.example.shop.dubbo", port: 80,
		add: func(b testproxy.Backend) {
			i := testnacos.Up(b.Address, b.Port)
			i.Metadata = map[string]string{"protocol": "rest", "category": "providers", "interface": "org.example.Shop", "application": b.Name}
			providers[b.Name] = i
			register()
		},
		remove: func(b testproxy.Backend) {
			delete(providers, b.Name)
			register()
		},
	}.run(t)
}

// Calls follow the endpoints of a Service of another cluster, and what Istio
// has there.
func TestKubernetesScales(t *testing.T) {
	testenv.SkipIfShort(t)
	kube := testkube.Start(t, testkube.Config{Istio: true})
	backends := map[string]testproxy.Backend{}
	apply := func(object func(all []testproxy.Backend) string) {
		var all []testproxy.Backend
		for _, name := range slices.Sorted(maps.Keys(backends)) {
			all = append(all, backends[name])
		}
		kube.Apply(t, object(all))
	}
	follow := func(object func(all []testproxy.Backend) string) (add, remove func(testproxy.Backend)) {
		clear(backends)
		add = func(b testproxy.Backend) {
			backends[b.Name] = b
			apply(object)
		}
		remove = func(b testproxy.Backend) {
			delete(backends, b.Name)
			apply(object)
		}
		return add, remove
	}
	const registry = "- {name: kube, type: kubernetes, config: {kubeconfig_file: %q, follow: %s, select: {exclude: [default/kubernetes]}}}"

	t.Run("services", func(t *testing.T) {
		kube.Apply(t, "{apiVersion: v1, kind: Service, metadata: {name: shop, namespace: default}, spec: {ports: [{name: http, port: 80}]}}")
		// A slice has one port for all of its endpoints, and none of loopback.
		add, remove := follow(func(all []testproxy.Backend) string {
			text := ""
			for _, name := range []string{"one", "two", "three"} {
				endpoints, port := "", 1
				for _, b := range all {
					if b.Name == name {
						endpoints, port = fmt.Sprintf("{addresses: [%s]}", b.Address), b.Port
					}
				}
				text += fmt.Sprintf(`
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: shop-%s, namespace: default, labels: {kubernetes.io/service-name: shop}}
addressType: IPv4
ports: [{name: http, port: %d}]
endpoints: [%s]
---
`, name, port, endpoints)
			}
			return text
		})
		scaling{
			registries: fmt.Sprintf(registry, kube.Kubeconfig, "services"),
			host:       "shop.default.svc.clusterset.local", port: 80,
			add:    func(b testproxy.Backend) { add(testproxy.Outside(t, b)) },
			remove: func(b testproxy.Backend) { remove(b) },
		}.run(t)
	})
	t.Run("istio", func(t *testing.T) {
		add, remove := follow(func(all []testproxy.Backend) string {
			endpoints := make([]string, 0, len(all))
			for _, b := range all {
				endpoints = append(endpoints, fmt.Sprintf("{address: %s, ports: {http: %d}}", b.Address, b.Port))
			}
			return fmt.Sprintf(`
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: store, namespace: default}
spec: {hosts: [store.example.org], addresses: [240.0.0.9], location: MESH_INTERNAL, resolution: STATIC, ports: [{number: 80, name: http, protocol: HTTP}], endpoints: [%s]}
`, strings.Join(endpoints, ", "))
		})
		scaling{
			registries: fmt.Sprintf(registry, kube.Kubeconfig, "istio"),
			host:       "store.example.org", port: 80, add: add, remove: remove,
		}.run(t)
	})
}
