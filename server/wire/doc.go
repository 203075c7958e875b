// Package wire sends messages whose parts are encoded already over gRPC.
package wire
