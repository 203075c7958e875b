// Package wire puts messages whose parts are encoded already on a gRPC stream.
package wire
