package etcd_test

import (
	"fmt"
	"net"
	"regexp"
	"strconv"
	"testing"

	"github.com/isthmus-mesh/isthmus/adapters/etcd"
	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testetcd"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// TestProxyEndsWatches shows a real etcd behind an Envoy that ends each request
// after two seconds, as balancers of clouds do after a minute or an hour: the
// watch goes on where it was, nothing is degraded, and changes arrive.
func TestProxyEndsWatches(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testetcd.Start(t, testetcd.Config{})
	host, port, err := net.SplitHostPort(server.Addr)
	if err != nil {
		t.Fatal(err)
	}
	var listens, admin string
	proxy := testenv.NewProcess(t, "envoy")
	proxy.StartReady(t, func() {
		listens, admin = fmt.Sprint(testenv.FreePort(t)), fmt.Sprint(testenv.FreePort(t))
		config := proxy.WriteFile(t, "envoy.yaml", fmt.Sprintf(envoyConfig, admin, listens, host, port))
		proxy.Start(t, nil, testproxy.EnvoyTool.Binary(t), "-c", config, "--disable-hot-restart", "--log-level", "warning", "--concurrency", "1")
	}, func() (string, bool) { return testenv.Answers("http://127.0.0.1:" + admin + "/ready") })
	for n := range 2 {
		server.Put(t, key("web", fmt.Sprint("web-", n)), value(n))
	}
	c := follow(t, etcd.Config{Endpoints: []string{"http://127.0.0.1:" + listens}, Timeout: short})
	c.AwaitIDs(t, within, "the first list", "web", "web-0 web-1")
	c.ForgetLeast()
	for n := 2; n < 5; n++ {
		testenv.Eventually(t, within, "the proxy to end the watch", func() (string, bool) {
			text, _, err := testenv.Get(t, "http://127.0.0.1:"+admin+"/stats?filter=max_duration_reached")
			ended := regexp.MustCompile(`http.etcd.downstream_rq_max_duration_reached: (\d+)`).FindSubmatch(text)
			if err != nil || ended == nil {
				return fmt.Sprintf("%s, %v", text, err), false
			}
			times, _ := strconv.Atoi(string(ended[1]))
			return string(text), times >= n-1
		})
		server.Put(t, key("web", fmt.Sprint("web-", n)), value(n))
		c.Await(t, within, "a change", func(h *plugintest.Held) bool { return len(h.Instances["web"]) == n+1 })
	}
	wantLeast(t, c)
	c.Look(func(h *plugintest.Held) {
		if len(h.Reasons) > 0 || h.Removes > 0 {
			t.Errorf("degraded %q, %d removed", h.Reasons, h.Removes)
		}
	})
}

// envoyConfig is a proxy of requests of two seconds at most.
const envoyConfig = `
admin: {address: {socket_address: {address: 127.0.0.1, port_value: %s}}}
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: %s}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: etcd
          codec_type: HTTP2
          route_config: {virtual_hosts: [{name: etcd, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: etcd, max_stream_duration: {max_stream_duration: 2s}}}]}]}
          http_filters: [{name: envoy.filters.http.router, typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}]
  clusters:
  - name: etcd
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions: {"@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions, explicit_http_config: {http2_protocol_options: {}}}
    load_assignment: {cluster_name: etcd, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: %q, port_value: %s}}}}]}]}
`
