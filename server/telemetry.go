package server

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-mesh/isthmus/server/config"
	mcpserver "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/otlp"
)

// newExporter returns the exporter of a configuration, nil if nothing is
// exported.
func newExporter(cfg *config.Config, o *Options) (*otlp.Exporter, error) {
	t := &cfg.Telemetry
	if t.Address == "" {
		return nil, nil //nolint:nilnil // off
	}
	var secure *mcpserver.TLS
	if t.TLS.Enabled {
		secure = &mcpserver.TLS{CA: t.TLS.CAFile, Certificate: t.TLS.CertFile, Key: t.TLS.KeyFile, ServerName: t.TLS.ServerName}
	}
	credentials, err := secure.Credentials()
	if err != nil {
		return nil, fmt.Errorf("telemetry.tls: %w", err)
	}
	// The exporter connects when there is something to deliver.
	e, err := otlp.New(context.Background(), otlp.Config{
		Address: t.Address, Credentials: credentials, Headers: t.Headers, Traces: t.Traces, Interval: time.Duration(t.Interval), Version: o.Version,
	}, o.Metrics, o.Log)
	if err != nil {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	return e, nil
}

// exportWithin bounds the delivery of the last traces and metrics.
const exportWithin = 2 * time.Second

// endExport delivers what is left to export.
func (s *Server) endExport() {
	if s.export == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), exportWithin)
	defer cancel()
	if err := s.export.Close(ctx); err != nil {
		s.log.Warn("the last telemetry was not exported", "err", err)
	}
}

// registerBuild registers the metric that names the program's version.
func registerBuild(reg prometheus.Registerer, version string) {
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "isthmus_build_info", Help: "1, with the version of the program and that of Go.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version()},
	})
	build.Set(1)
	reg.MustRegister(build)
}
