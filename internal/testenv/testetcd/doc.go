// Package testetcd runs etcd servers for tests.
//
// The newest is built from the module pinned in tools/etcd (half a minute), 3.4
// from that in tools/etcd-3.4. Start runs one that answers in a tenth of a
// second, StartCluster several.
package testetcd
