package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
)

// BenchmarkKubernetesChange measures, for one changed endpoint among many, the
// time from the write to the API server to its arrival at a bare watch of the
// server and at a delta sink of Isthmus, in the same run. It reports medians,
// and the 99th percentile of what Isthmus adds, beside by how much a second
// bare watch is later than the first.
//
//	go test ./test/e2e -run '^$' -bench KubernetesChange -benchtime 300x
func BenchmarkKubernetesChange(b *testing.B) {
	const services, each = 1000, 10
	kube := testkube.Start(b, testkube.Config{Args: []string{"--max-requests-inflight=1000", "--max-mutating-requests-inflight=1000"}})
	kube.Load(b, services, each)
	begin := time.Now()
	isthmus := testisthmus.Start(b, fmt.Sprintf(`- {name: kube, type: kubernetes, config: {kubeconfig_file: %q, select: {exclude: [default/kubernetes]}}}`, kube.Kubeconfig))
	isthmus.WaitReady(b)
	b.Logf("isthmus ready after %v", time.Since(begin).Round(100*time.Millisecond))

	bare, second, delta := kube.Watch(b), kube.Watch(b), isthmus.Arrivals(b, services*each)
	testisthmus.MeasureChanges(b, func(n int) { kube.Change(b, n%services, each, n) }, bare, second, delta)
}
