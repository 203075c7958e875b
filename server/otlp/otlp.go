package otlp

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/credentials"
)

// Config says what is exported, and where to.
type Config struct {
	// Address is the collector's, host:port of OTLP over gRPC.
	Address string
	// Credentials secure the connection.
	Credentials credentials.TransportCredentials
	// Headers go with each call.
	Headers map[string]string
	// Traces is the share of changes that are traced, 0 to 1.
	Traces float64
	// Interval is the time between two exports of metrics, 0 for none.
	Interval time.Duration
	// Version is the program's.
	Version string
}

// Exporter exports until it is closed.
type Exporter struct {
	traces  *sdk.TracerProvider
	metrics *metric.MeterProvider
}

// New returns an exporter that exports the metrics of a gatherer. Nothing waits
// for the collector: what cannot be delivered is dropped and logged.
func New(ctx context.Context, c Config, metrics prometheus.Gatherer, log *slog.Logger) (*Exporter, error) {
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		log.Warn("telemetry cannot be exported", slog.Any("err", err))
	}))
	about := resource.NewSchemaless(attribute.String("service.name", "isthmus"), attribute.String("service.version", c.Version))
	e := &Exporter{}
	if c.Traces > 0 {
		exporter, err := otlptracegrpc.New(ctx,
			otlptracegrpc.WithEndpoint(c.Address), otlptracegrpc.WithHeaders(c.Headers), otlptracegrpc.WithTLSCredentials(c.Credentials))
		if err != nil {
			return nil, err
		}
		e.traces = sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(about), sdk.WithSampler(sdk.ParentBased(sdk.TraceIDRatioBased(c.Traces))))
	}
	if c.Interval > 0 {
		exporter, err := otlpmetricgrpc.New(ctx,
			otlpmetricgrpc.WithEndpoint(c.Address), otlpmetricgrpc.WithHeaders(c.Headers), otlpmetricgrpc.WithTLSCredentials(c.Credentials))
		if err != nil {
			return nil, errors.Join(err, e.Close(ctx))
		}
		producer := bridge.NewMetricProducer(bridge.WithGatherer(metrics))
		e.metrics = metric.NewMeterProvider(metric.WithResource(about),
			metric.WithReader(metric.NewPeriodicReader(exporter, metric.WithInterval(c.Interval), metric.WithProducer(producer))))
	}
	return e, nil
}

// Tracer returns the tracer of changes, nil if traces are off. The exporter may
// be nil.
func (e *Exporter) Tracer() trace.Tracer {
	if e == nil || e.traces == nil {
		return nil
	}
	return e.traces.Tracer("github.com/isthmus-mesh/isthmus")
}

// Close delivers what is left, until ctx ends.
func (e *Exporter) Close(ctx context.Context) (err error) {
	if e.traces != nil {
		err = e.traces.Shutdown(ctx)
	}
	if e.metrics != nil {
		err = errors.Join(err, e.metrics.Shutdown(ctx))
	}
	return err
}
