package e2e

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
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
	kube := testenv.StartKube(b, testenv.KubeConfig{Args: []string{"--max-requests-inflight=1000", "--max-mutating-requests-inflight=1000"}})
	kube.Load(b, services, each)
	begin := time.Now()
	isthmus := testenv.StartIsthmus(b, fmt.Sprintf(`- {name: kube, type: kubernetes, config: {kubeconfig_file: %q, select: {exclude: [default/kubernetes]}}}`, kube.Kubeconfig))
	isthmus.WaitReady(b)
	b.Logf("isthmus ready after %v", time.Since(begin).Round(100*time.Millisecond))

	bare, second, delta := kube.Watch(b), kube.Watch(b), isthmus.Arrivals(b, services*each)
	var toBare, toDelta, added, apart []time.Duration
	change := 0
	for b.Loop() {
		change++
		at := time.Now()
		kube.Change(b, change%services, each, change)
		x, y := testwait.Receive(b, testenv.Patience, "the change at a bare watch", bare), testwait.Receive(b, testenv.Patience, "the change at the sink", delta)
		z := testwait.Receive(b, testenv.Patience, "the change at a second watch", second)
		toBare, toDelta = append(toBare, x.Sub(at)), append(toDelta, y.Sub(at))
		added, apart = append(added, y.Sub(x)), append(apart, z.Sub(x))
	}
	ms := func(all []time.Duration, q float64) float64 {
		slices.SortFunc(all, cmp.Compare)
		return float64(all[min(int(q*float64(len(all))), len(all)-1)].Microseconds()) / 1000
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(toBare, 0.5), "ms-bare-p50")
	b.ReportMetric(ms(toDelta, 0.5), "ms-isthmus-p50")
	b.ReportMetric(ms(added, 0.5), "ms-added-p50")
	b.ReportMetric(ms(added, 0.99), "ms-added-p99")
	b.ReportMetric(ms(apart, 0.99), "ms-second-bare-p99")
}
