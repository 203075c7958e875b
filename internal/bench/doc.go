// Package bench measures a bridge as its users run it: the real program with
// the plugin process of the sim registry, or with one that follows a real
// server, and sinks over gRPC that look for the time that each change carries.
package bench
