// Package testistiod runs istiods without a cluster, and records what they
// push.
//
// Each version is pilot-discovery, built from the module pinned in
// tools/istiod-VERSION (four minutes on two cores, once). Start runs one; it is
// ready in two to five seconds, once its config sources have answered
// everything. The newest needs an API server and gets a stub.
package testistiod
