package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	collectormetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collectortrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// collector receives what is exported over OTLP.
type collector struct {
	collectortrace.UnimplementedTraceServiceServer

	mu      sync.Mutex
	spans   map[string]map[string]bool // names by trace
	metrics map[string]bool            // names
}

func (c *collector) Export(_ context.Context, req *collectortrace.ExportTraceServiceRequest) (*collectortrace.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range req.GetResourceSpans() {
		for _, s := range r.GetScopeSpans() {
			for _, span := range s.GetSpans() {
				id := string(span.GetTraceId())
				if c.spans[id] == nil {
					c.spans[id] = make(map[string]bool)
				}
				c.spans[id][span.GetName()] = true
			}
		}
	}
	return &collectortrace.ExportTraceServiceResponse{}, nil
}

type metricsCollector struct {
	collectormetrics.UnimplementedMetricsServiceServer
	*collector
}

func (c metricsCollector) Export(_ context.Context, req *collectormetrics.ExportMetricsServiceRequest) (*collectormetrics.ExportMetricsServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range req.GetResourceMetrics() {
		for _, s := range r.GetScopeMetrics() {
			for _, m := range s.GetMetrics() {
				c.metrics[m.GetName()] = true
			}
		}
	}
	return &collectormetrics.ExportMetricsServiceResponse{}, nil
}

// One change is a trace from the registry to the ACK of a sink, the metrics
// have its time, and both reach a collector.
func TestTelemetry(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &collector{spans: make(map[string]map[string]bool), metrics: make(map[string]bool)}
	otlp := grpc.NewServer()
	collectortrace.RegisterTraceServiceServer(otlp, c)
	collectormetrics.RegisterMetricsServiceServer(otlp, metricsCollector{collector: c})
	done := make(chan error, 1)
	go func() { done <- otlp.Serve(listener) }() // ends with Stop
	defer func() {
		otlp.Stop()
		<-done
	}()

	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, `
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
telemetry: {address: %q, traces: 1, interval: 1s}
registries: [{name: load, type: sim, config: {services: 3, changes_per_second: 20}}]
`, listener.Addr()), 0o600); err != nil {
		t.Fatal(err)
	}
	server := start(t, "serve", "--config", file)
	at := server.find(server.stderr, `msg=serving xds=(\S+) admin=(\S+)`)
	sink := start(t, "watch", "--address", at[1], "--output", "json")
	sink.find(sink.stdout, `"push":[2-9]\d,`)

	want := []string{"change", "plugin", "apply", "deliver", "wait", "ack"}
	testenv.Eventually(t, testenv.Patience, "a whole trace and the metrics at the collector", func() (string, bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		whole := false
		for _, names := range c.spans {
			missing := 0
			for _, name := range want {
				if !names[name] {
					missing++
				}
			}
			whole = whole || missing == 0
		}
		return fmt.Sprintf("%d traces, metrics %v", len(c.spans), c.metrics), whole && c.metrics["isthmus_change_seconds"] && c.metrics["isthmus_build_info"]
	})
	_, metrics := get(t, "http://"+at[2]+"/metrics")
	for _, series := range []string{
		`isthmus_change_seconds_count{registry="load",sink="delta"}`,
		`isthmus_change_hop_seconds_count{hop="plugin",registry="load",sink="delta"}`,
		`isthmus_change_hop_seconds_count{hop="ack",registry="load",sink="delta"}`,
		`isthmus_registry_last_change_timestamp_seconds{registry="load"}`,
		`isthmus_build_info{goversion="go`,
	} {
		if !strings.Contains(metrics, series) {
			t.Errorf("/metrics lacks %s", series)
		}
	}
	for _, p := range []*process{sink, server} {
		p.signal(syscall.SIGTERM)
		if code := p.wait(); code != exitOK {
			t.Errorf("exit code %d: %q", code, p.stderr.seen)
		}
	}
}
