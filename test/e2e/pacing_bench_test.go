package e2e

import (
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// BenchmarkIstiodBusy measures what a registry of 100,000 endpoints that
// changes without a pause costs an istiod with one config source: the responses
// that it gets, each with everything, how long it takes to acknowledge one, and
// its processor time.
//
//	go test ./test/e2e -run '^$' -bench IstiodBusy -benchtime 1x
func BenchmarkIstiodBusy(b *testing.B) {
	const during = 30 * time.Second
	bridge := testisthmus.Start(b, `- {name: sim, type: sim, config: {services: 10000, instances: 10, changes_per_second: 50, changes: {weight: 1}}}`)
	bridge.WaitReady(b)
	istiod := testistiod.Start(b, testistiod.Newest, bridge.Source())
	istiod.WaitReady(b)
	pause(b, during/3) // the work of its first listing
	for b.Loop() {
		used, before, took := istiod.CPU(), acks(b, bridge), pushTime(b, bridge)
		pause(b, during)
		n := acks(b, bridge) - before
		b.ReportMetric((istiod.CPU()-used).Seconds()/during.Seconds()*100, "%-istiod-cpu")
		b.ReportMetric(n/during.Seconds(), "responses/s")
		b.ReportMetric((pushTime(b, bridge)-took)/n*1000, "ms-to-ack")
	}
	b.ReportMetric(0, "ns/op")
}

// acks returns how many responses sinks of xDS have acknowledged.
func acks(b *testing.B, bridge *testisthmus.Server) (n float64) {
	b.Helper()
	for _, m := range bridge.Metrics(b)["isthmus_xds_acks_total"].GetMetric() {
		n += m.GetCounter().GetValue()
	}
	return n
}

// pushTime returns the seconds that they took for them.
func pushTime(b *testing.B, bridge *testisthmus.Server) (seconds float64) {
	b.Helper()
	for _, m := range bridge.Metrics(b)["isthmus_xds_push_duration_seconds"].GetMetric() {
		seconds += m.GetHistogram().GetSampleSum()
	}
	return seconds
}
