// Package otlp exports traces and metrics to an OpenTelemetry collector.
package otlp
