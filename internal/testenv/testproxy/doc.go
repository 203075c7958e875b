// Package testproxy runs what calls go through: Envoy and proxyless gRPC
// clients behind an istiod, and the workloads that answer.
//
// Envoy comes from PyPI, pinned in tools/envoy (ten seconds, 100 MB), and
// starts in a second. Clients and workloads run in the test's process.
package testproxy
