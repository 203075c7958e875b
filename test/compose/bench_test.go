//go:build linux

package compose

import (
	"fmt"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testproxy"
)

// From the start of everything to the first call through the mesh: what a new
// user waits for once the images are there.
func BenchmarkFirstCallByCompose(b *testing.B) {
	root, d := prepare(b)
	d.Run(b, root, "docker", "compose", "build")
	for b.Loop() {
		d.Run(b, root, "sh", "-c", "docker compose up -d && until curl -fsS -o /dev/null http://127.0.0.1:18080/; do sleep 0.1; done")
		b.StopTimer()
		d.Run(b, root, "sh", "-c", down)
		b.StartTimer()
	}
}

// The same with programs: Isthmus, an istiod and an Envoy beside a Consul that
// is there already.
func BenchmarkFirstCallByProgram(b *testing.B) {
	consul := testconsul.Start(b, testconsul.Config{})
	web := testproxy.StartHTTPBackend(b, "web-1")
	consul.Register(b, testconsul.Instance{
		Service: "web", ID: "web-1", Address: web.Address, Port: web.Port, Meta: map[string]string{"protocol": "http"},
	})
	for b.Loop() {
		isthmus := testisthmus.Start(b, "- {name: dc1, type: consul, config: {address: \"http://"+consul.Addr+"\"}, translate: {namespace: consul}}")
		istiod := testistiod.Start(b, testistiod.V124, isthmus.Source())
		istiod.WaitReady(b)
		envoy := testproxy.StartEnvoy(b, istiod)
		testenv.Eventually(b, testenv.Patience, "the first call", func() (string, bool) {
			answer, err := envoy.Call(b, fmt.Sprintf("outbound|%d||web.service.consul", web.Port))
			return answer, err == nil
		})
	}
}
