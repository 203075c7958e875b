package migrate

import (
	"fmt"
	"strings"
	"testing"
)

// mesh is a file of services whose endpoints are WorkloadEntries of their own.
func mesh(services, instances int) []byte {
	var b strings.Builder
	b.WriteString("kind: List\nitems:\n")
	for s := range services {
		fmt.Fprintf(&b, "- kind: ServiceEntry\n  metadata: {name: s%[1]d, namespace: ns}\n  spec: {hosts: [s%[1]d.example.org], ports: [{number: 80, name: http, protocol: HTTP}], resolution: STATIC, workloadSelector: {labels: {app: s%[1]d, tier: web}}}\n", s)
		for i := range instances {
			fmt.Fprintf(&b, "- kind: WorkloadEntry\n  metadata: {name: s%[1]d-%[2]d, namespace: ns}\n  spec: {address: 10.%[3]d.%[4]d.%[2]d, labels: {app: s%[1]d, tier: web}}\n", s, i, s/250, s%250)
		}
	}
	return []byte(b.String())
}

func source(t testing.TB, text []byte) *Source {
	t.Helper()
	s := &Source{resources: map[string]resource{}}
	if err := s.read(text); err != nil {
		t.Fatal(err)
	}
	return s
}

// A service has the WorkloadEntries of its namespace that have all labels of
// its selector.
func TestSelected(t *testing.T) {
	text := mesh(2, 3)
	for _, other := range []string{"{name: elsewhere, namespace: other}\n  spec: {address: 10.9.0.1, labels: {app: s0, tier: web}}", "{name: half, namespace: ns}\n  spec: {address: 10.9.0.2, labels: {app: s0}}", "{name: none, namespace: ns}\n  spec: {address: 10.9.0.3}"} {
		text = append(text, "- kind: WorkloadEntry\n  metadata: "+other+"\n"...)
	}
	resources, _ := source(t, text).snapshot()
	for host, s := range services(resources) {
		if len(s.endpoints) != 3 {
			t.Errorf("%s has the endpoints %v, want 3", host, s.endpoints)
		}
	}
}

// BenchmarkCompare is a mesh of 1,000 services of 10 instances, compared with
// itself.
func BenchmarkCompare(b *testing.B) {
	s := source(b, mesh(1000, 10))
	for b.Loop() {
		if r := Compare(s, s); r.Services != 1000 || len(r.Differences) > 0 {
			b.Fatal(r)
		}
	}
}
