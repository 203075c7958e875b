package supervisor_test

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// own returns the adapters' own metrics of a registry: "name{registry} value",
// a line each.
func own(t *testing.T, reg *prometheus.Registry) string {
	t.Helper()
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, f := range all {
		name, ok := strings.CutPrefix(f.GetName(), "isthmus_adapter_")
		for _, m := range f.GetMetric() {
			if ok {
				fmt.Fprintf(&b, "%s{%s} %v\n", name, m.GetLabel()[0].GetValue(), m.GetCounter().GetValue()+m.GetGauge().GetValue())
			}
		}
	}
	return b.String()
}

// What an adapter counts is shown with its registry, begins again with another
// process, and is gone with the registry.
func TestOwnMetrics(t *testing.T) {
	t.Parallel()
	h, s, reg := newHost(t), newSink(), prometheus.NewRegistry()
	h.Hurry()
	socket := filepath.Join(shortDir(t), "s")
	sup, err := supervisor.New(h, spec("remote", remoteConfig{Socket: socket}), s, slog.New(slog.DiscardHandler), supervisor.NewMetrics(reg))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- sup.Run(ctx) }() // ends with cancel
	wait(t, "first stream", s.begun)
	tell(t, socket, command{Op: "count", Instances: 7, Change: 3})
	eventually(t, "the metrics", func() bool { return own(t, reg) == "asked_total{test} 7\nheld{test} 3\n" })
	tell(t, socket, command{Op: "count", Instances: 1, Change: -2}, command{Op: "set", Name: "web", Instances: 1}, command{Op: "synced"})
	eventually(t, "their change", func() bool { return own(t, reg) == "asked_total{test} 8\nheld{test} -2\n" })
	if err := syscall.Kill(sup.Status().PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wait(t, "second stream", s.begun)
	eventually(t, "those of another process", func() bool { return own(t, reg) == "asked_total{test} 0\nheld{test} 0\n" })
	cancel()
	if err := wait(t, "end of the supervisor", done); err != nil {
		t.Error(err)
	}
	if got := own(t, reg); got != "" {
		t.Errorf("left behind: %s", got)
	}
}

// No plugin can spoil the page or make it grow without bound.
func TestOwnMetricsAreBounded(t *testing.T) {
	const counter, gauge = pluginv1.MetricKind_METRIC_KIND_COUNTER, pluginv1.MetricKind_METRIC_KIND_GAUGE
	reg := prometheus.NewRegistry()
	m := supervisor.NewMetrics(reg)
	m.SetOwn("a",
		&pluginv1.Metric{Name: "same", Kind: gauge, Value: 1, Help: "One \xff\n" + strings.Repeat("x", 10_000)},
		&pluginv1.Metric{Name: "b_total", Kind: counter, Value: 1},
		&pluginv1.Metric{Name: "b_total", Kind: counter, Value: -1},
		&pluginv1.Metric{Name: "not a name", Kind: gauge},
		&pluginv1.Metric{Name: "", Kind: gauge},
		&pluginv1.Metric{Name: "kindless"},
		&pluginv1.Metric{Name: "c_total", Kind: gauge},
		&pluginv1.Metric{Name: "counter", Kind: counter},
		&pluginv1.Metric{Name: "nan", Kind: gauge, Value: math.NaN()},
		&pluginv1.Metric{Name: "inf", Kind: gauge, Value: math.Inf(1)},
		nil,
	)
	m.SetOwn("b", &pluginv1.Metric{Name: "same", Kind: gauge, Value: 2, Help: "Another text."})
	if got := own(t, reg); got != "b_total{a} 1\nsame{a} 1\nsame{b} 2\n" {
		t.Errorf("metrics\n%s", got)
	}
	for i := range 3 * wire.MaxMetrics {
		m.SetOwn("c", &pluginv1.Metric{Name: fmt.Sprintf("m%d", i), Kind: gauge})
	}
	if n := strings.Count(own(t, reg), "{c}"); n != wire.MaxMetrics {
		t.Errorf("%d metrics of one registry, want %d", n, wire.MaxMetrics)
	}
}
